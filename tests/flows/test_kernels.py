"""The page of kernels that Prefect shows: the fastest correct one of each task, and one of each
error, with code that cannot act on the page."""

from flows.kernels import CODE_CHARS, kernels_page
from tasks.tables import CANDIDATES, VERDICTS
from tests.support.samples import finished

HOSTILE = "x = 1\n```\n<script>alert(1)</script>\n# a heading"


def verdict(name, speedup=None, **changes):
    timing = None
    if speedup:
        ends = {"speedup_lower": speedup - 0.1, "speedup_upper": speedup + 0.1}
        timing = {"speedup": speedup, **ends}
    return {
        "candidate_id": name,
        "task_id": name[0],
        "status": "correct",
        "reason": "ok",
        "detail": "",
        "log_tail": "",
        "level": "confirm",
        "timing": timing,
    } | changes


def page_of(root, code, *verdicts):
    candidates = [{"candidate_id": name, "code": text} for name, text in code.items()]
    return kernels_page(
        finished(root, "verification", verdicts, VERDICTS),
        finished(root, "synthesis", candidates, CANDIDATES),
    )


def test_the_fastest_of_each_task_and_one_of_each_error_are_shown_with_their_code(tmp_path):
    failed = {"status": "runtime_error", "reason": "raised"}
    failed["detail"] = "TypeError: 3 given, 2 known"
    code = {"a1": "slow()", "a2": "fast()", "b1": "untimed()", "c1": "broken()", "c2": "broken2()"}
    page = page_of(
        tmp_path,
        code,
        verdict("a1", 1.5),
        verdict("a2", 2.5),
        verdict("b1"),
        verdict("c1", **failed),
        verdict("c2", **failed),
    )
    assert "## a\n\nspeedup 2.5 (2.4 to 2.6), candidate `a2`\n\n```python\nfast()\n```" in page
    assert "correct, not timed, candidate `b1`" in page and "untimed()" in page
    assert "slow()" not in page, "a faster one of its task is there"
    assert "TypeError: 3 given, 2 known (2 candidates), candidate `c1`" in page
    assert "broken()" in page and "broken2()" not in page
    assert page.index("## a") < page.index("## b") < page.index("## Error: raised")


def test_code_stays_code_and_a_long_one_is_cut(tmp_path):
    code = {"a1": HOSTILE, "b1": "y" * 2 * CODE_CHARS}
    page = page_of(tmp_path, code, verdict("a1", 2.0), verdict("b1", 1.5, level="screen"))
    assert "speedup 2 (1.9 to 2.1), cand" in page
    assert "speedup 1.5 (1.4 to 1.6), only screened, cand" in page
    assert f"````python\n{HOSTILE}\n````" in page
    assert "y" * CODE_CHARS in page and "y" * (CODE_CHARS + 1) not in page
