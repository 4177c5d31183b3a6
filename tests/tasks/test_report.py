"""The report as its readers meet it: what it says, that strangers' text stays text, and that it
stands alone."""

import functools
import html
import json
import math
import re

import polars as pl
import pytest

from kernels_eval.records import Status
from tasks.benchmark.breakdown import score_groups
from tasks.benchmark.comparing import compare_all
from tasks.benchmark.diagnosis import Diagnosis, Evidence, diagnose
from tasks.benchmark.errors import error_groups
from tasks.benchmark.report.content import headline, summary_table
from tasks.benchmark.report.figures import figures
from tasks.benchmark.report.files import build_report, to_json, to_markdown
from tasks.benchmark.report.records import (
    CandidatePoint,
    Example,
    ReportContext,
    TrainingStep,
    examples_of,
    points_of,
)
from tasks.benchmark.scoring import distribution, score, variants
from tasks.reporting.charts import INK
from tasks.reporting.text import clean
from tests.support.cases import cases
from tests.support.hostile_report import hostile_report
from tests.support.pages import HOSTILE, Page, assert_tame, assert_whole_tables, svgs
from tests.support.verdict_rows import row

CASES = cases("benchmark")


def verdict(model, task, outcome, tokens=100, number=0):
    """One verdict joined with its candidate: an outcome is a speedup or a reason."""
    log = f"main.cpp:{number}:1: error: '{model}' was not declared in this scope"
    return row(
        model,
        task,
        outcome,
        candidate_id=f"{model}-{task}-{number}",
        detail=f"saw {outcome}",
        log_tail=log if isinstance(outcome, str) else "",
        generator="a model",
        reasoning_tokens=tokens,
        code="int x;",
    )


LINE = [verdict("line", *each) for each in CASES["line"]]
HELD_OUT = [
    verdict(model, f"h{i}", right if i else wrong, number=n)
    for model, right, wrong in CASES["held_out"]
    for i in range(4)
    for n in range(2)
]
NAMES = {"t1": "1_Square_matmul", "t2": "2_Softmax", "t3": "3_Norm"}


@functools.cache
def facts():
    line, held_out = pl.DataFrame(LINE), pl.DataFrame(HELD_OUT)
    return {
        "run_name": "local",
        "language": "cpp",
        "device": "a CPU",
        "tasks": 3,
        "candidates": 6,
        "status_counts": dict(line["status"].value_counts().iter_rows()),
        "reason_counts": dict(line["reason"].value_counts().iter_rows()),
        "criterion_counts": {"concise_and_fast": 1, "high_speedup": 0},
        "trace_flags": {"repetitive": (2, 1)},
        "base_model": "tiny",
        "history": [
            {"step": i + 1, "epoch": (i + 1) / 2, "loss": 3.0 - 0.5 * i, "learning_rate": 1e-4}
            for i in range(4)
        ],
        "scores": score(held_out, ks=(1, 5), ps=(0.0, 1.0, 2.0), resamples=200),
        "comparisons": compare_all(
            held_out, pairs=[("base", "recorded")], ks=(1,), ps=(1.0,), resamples=200
        ),
        "breakdowns": score_groups(
            held_out, {"level": {"1": ["h0", "h1"], "2": ["h2", "h3"]}}, ks=(1,), resamples=50
        ),
        "distributions": distribution(held_out, resamples=50),
        "variants": variants(held_out, ks=(1,), resamples=50),
        "errors": error_groups(held_out),
        "findings": ["Shorter is more often correct."],
        "findings_bounded_by": ["Three tasks only."],
        "points": points_of(line, NAMES),
        "examples": examples_of(line, NAMES, {}),
        "fingerprints": {"verification": "abc123"},
        "tool_versions": {"torch": "2.13"},
        "hardware": {"cpus": 2},
        "config": {"seed": 0},
        "notes": ["a note of the run"],
    }


def context(**changes):
    return ReportContext(**(facts() | changes))


def hostile():
    """Everything a candidate, a task, a model or a profile can name is hostile at once."""
    named = {
        name: [
            each.model_copy(update={"model": HOSTILE, "group": HOSTILE}) for each in facts()[name]
        ]
        for name in "scores breakdowns distributions variants".split()
    }
    diagnosis = [Diagnosis(sign="verbose", model=HOSTILE, sentence=HOSTILE)]
    return context(
        **vars(hostile_report(HOSTILE))
        | {"history": facts()["history"]}
        | named
        | {"diagnosis": diagnosis}
    )


SAID = """
Exec@5
n/a
0.0 % (0.0 to 63.7)
fast_2
2.00x
recorded minus base
build_failed
concise_and_fast
2.750
1_Square_matmul
3.50x
saw 3.5
tasks per model
They say nothing about a GPU
a note of the run
KernelCoder (r)
abc123
2.13
repetitive
of these taken
Reasoning length: findings
Shorter is more often correct.
Three tasks only.
"""


# -- what it says ----------------------------------------------------------------------------------


def test_the_summary_is_the_run_in_rows():
    rows = dict(summary_table(context()))
    assert (rows["tasks"], rows["candidates"], rows["curated samples"]) == ("3", "6", "1")
    assert rows["status correct"] == "2 (33.3 %)" and rows["status compile_error"] == "2 (33.3 %)"
    assert (rows["curated by concise_and_fast"], rows["curated by high_speedup"]) == ("1", "0")
    assert rows["training loss, first to last epoch"] == "2.750 to 1.750 (4 steps)"
    assert rows["recorded, custom kernel"].startswith(
        "Exec@1 75.0 % (19.2 to 100.0), fast_1@1 75.0 %"
    )
    assert (
        rows["tuned, custom kernel"] == "Exec@1 0.0 % (0.0 to 63.7), fast_1@1 0.0 % (0.0 to 63.7)"
    )


def test_the_headline_tells_the_outcome():
    line = headline(context())
    assert "Of 6 candidates on 3 tasks, 2 proved correct" in line
    assert "2.750 to 1.750" in line
    assert "4 held-out tasks (Exec@1): recorded 75.0 %, base 0.0 %, tuned 0.0 %" in line


@pytest.mark.parametrize("render", [build_report, to_markdown])
def test_page_and_markdown_hold_the_same_facts(render):
    text = render(context())
    shown = Page(text).words if text.startswith("<!doctype") else text
    shown = html.unescape(shown)
    assert [fact for fact in SAID.strip().splitlines() if fact not in shown] == []


def test_a_run_without_training_or_benchmark_says_so():
    bare = ReportContext(run_name="r", language="cuda", tasks=0, candidates=0)
    assert ("training loss, first to last epoch", "not trained") in summary_table(bare)
    assert "No benchmark was run." in Page(build_report(bare)).words
    assert "No benchmark was run." in to_markdown(bare)
    assert figures(bare) == {}
    assert "Reasoning length: findings" not in to_markdown(bare)


def test_what_not_to_trust_follows_from_the_data():
    def caveats(**changes):
        rows = json.loads(to_json(context(**changes)))["caveats"]
        return {row["what"]: row["value"] for row in rows}

    said = caveats()
    assert said["tasks per model"] == "4" and said["not one correct kernel"] == "base, tuned"
    least = "pass@5 needs 5 samples of each task; 4 of 4 tasks have fewer (the least: 2)"
    assert said["not estimated"] == least and "tasks without a sample" not in said
    assert "speedups on a CPU" in said and "speedups on a CPU" not in caveats(language="cuda")
    counts = "counts do not add up"
    assert counts not in said and caveats(candidates=7)[counts] == "7 candidates, 6 verdicts"
    many = [row.model_copy(update={"tasks": 100}) for row in context().scores]
    assert "tasks per model" not in caveats(scores=many)
    assert "different numbers of tasks" in caveats(scores=[*many[:1], *context().scores])
    fewer = [row for row in HELD_OUT if row["model"] != "tuned" or row["task_id"] == "h1"]
    scores = score(pl.DataFrame(fewer), ks=(1,), ps=(1.0,), resamples=50)
    assert caveats(scores=scores)["tasks without a sample"] == "tuned 3"


@pytest.mark.parametrize(
    "steps, losses",
    [
        ([{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.0}], (2.0, 1.0)),
        ([{"step": 1, "epoch": 3.0, "loss": 2.0}], (2.0, 2.0)),
        ([], None),
    ],
)
def test_loss_compares_epochs_and_falls_back_to_steps(steps, losses):
    assert context().losses == (2.75, 1.75)
    assert context(history=steps).losses == losses


def words(**changes):
    return html.unescape(to_markdown(context(**changes)))


def test_what_to_look_at_holds_signatures_and_typical_errors():
    held_out = pl.DataFrame(
        [verdict("tuned", f"h{i}", 0.5, number=n) for i in range(40) for n in range(2)]
    )
    signs = diagnose(
        score(held_out, ks=(1,), ps=(1.0,), resamples=200),
        Evidence(speedups=distribution(held_out, resamples=50)),
    )
    said = words(diagnosis=signs)
    assert "What to look at" in said
    assert "| tuned | correct but slow | exec 100.0 %, fast 1 0.0 %, median speedup 0.50" in said
    assert (
        "| '…' was not declared in this scope | build_failed | 16 | 4 | base 8, tuned 8 | base,"
        " tuned |" in said
    )
    assert "What to look at" not in words(diagnosis=(), errors=())


def test_scores_are_broken_down_spread_out_and_counted_by_other_rules():
    said = words()
    assert "| level | model | tasks | Exec@1 | fast_1@1 |" in said
    assert "| 1 | recorded | 2 | 50.0 % (0.0 to 100.0) |" in said
    assert "| 2 | recorded | 2 | 100.0 %" in said
    assert "50 % are below" in said and "2.00x" in said
    assert (
        "| our gates, intervals over tasks and samples | recorded | custom kernel | 4 | 75.0 %"
        in said
    )
    for absent in ("breakdowns", "distributions", "variants"):
        assert words(**{absent: ()}) != said
    assert "By level" not in words(breakdowns=()) and "other rules" not in words(variants=())


def test_families_and_thirds_are_tables_of_their_own():
    held_out = pl.DataFrame(HELD_OUT)
    families = {f"family_{i}": [f"h{i % 4}"] for i in range(20)}
    rows = score_groups(
        held_out,
        {
            "operator_family": families,
            "arl_third": {"short": ["h0"], "middle": ["h1"], "long": ["h2"]},
        },
        ks=(1,),
    )
    said = words(breakdowns=rows, arl_of="recorded")
    assert "| operator family | model | tasks | Exec@1 |" in said
    assert "| family 15 | recorded | 1 |" in said
    assert "| family 16 |" not in said
    assert "The 16 largest of 20 groups; the JSON has them all." in said
    assert "| reasoning | model | tasks |" in said and "| long | recorded | 1 | 100.0 %" in said
    assert "mean length of recorded's reasoning" in said
    assert "recorded itself is not scored by them" in said
    assert (
        len({row["group"] for row in json.loads(to_json(context(breakdowns=rows)))["breakdowns"]})
        == 23
    )


def test_differences_have_their_p_and_a_corrected_one():
    alone, together = words(), words(comparisons=compare_all(pl.DataFrame(HELD_OUT), resamples=100))
    assert "| recorded minus base | custom kernel | Exec@1 | 4 | +75.0" in alone
    assert "| 0.250 | 0.500 |" in alone  # 2 of 8 sign patterns, two metrics
    assert "| 1.000 |" not in alone and "| 1.000 | 1.000 |" in together


def test_published_results_stand_apart_and_are_marked():
    page = build_report(context())
    ours, theirs = page.split(">Published results of others</h2>")
    assert "KernelCoder" not in ours and "not comparable" in theirs
    assert "KernelCoder" not in json.dumps(json.loads(to_json(context()))["scores"])


def test_examples_are_the_fastest_then_one_of_each_reason_and_points_are_timed_where_they_can():
    chosen = examples_of(pl.DataFrame(LINE), NAMES, {"t1": "import torch"})
    reasons = " ".join(example.reason for example in chosen)
    assert reasons == "ok build_failed no_custom_kernel wrong_output"
    assert (chosen[0].speedup, chosen[0].task_name) == (3.5, "1_Square_matmul")
    points = points_of(pl.DataFrame(LINE), {})
    assert [point.speedup for point in points] == [3.5, 0.8, None, None, None, None]
    assert points[0].lower == pytest.approx(3.15) and points[0].task_name == "t1"


def test_the_page_has_contents_scores_first_and_zero_rows_folded():
    page = build_report(context())
    listed = re.findall(r'<li><a href="#([^"]+)">', page)
    assert listed == re.findall(r'<h2 id="([^"]+)">', page)
    assert listed[0] == "scores-on-held-out-tasks"
    start = page.index("<h2 ")
    assert page.index("<figure>") < page.index("<table>", start)
    table = page[page.index("<table>", start) : page.index("</table>", start)]
    assert "recorded" in table and ">base<" not in table
    assert "Only zeros or n/a in 4 rows: base, tuned" in page
    assert "| base | custom kernel |" in to_markdown(context())


def test_examples_show_reasoning_timing_id_and_highlighted_sources():
    code = 'import torch\nsource = r"""#include <x.h>\nfloat f(); // </pre><b>"""'
    known = dict.fromkeys(("reference_ms", "candidate_ms"), 2.0) | {"speedup": 1.0}
    example = Example(
        **{"task_name": "t", "status": "correct", "reason": "ok", "candidate_id": "abc"},
        **{"reasoning": "Because.", "code": code, "reference": "x = 1", **known},
    )
    page = build_report(context(examples=[example]))
    words = Page(page).words
    for said in ("candidate abc", "Because.", "2 ms, candidate 2 ms, speedup 1.00x", "x = 1"):
        assert said in words
    assert '<span class="kn">import</span>' in page and '<span class="kt">float</span>' in page
    assert_tame(Page(page))
    assert " ".join(code.split()) in words


# -- strangers' text stays text --------------------------------------------------------------------


def test_hostile_text_adds_no_tag_and_no_attribute_and_cannot_act():
    page = Page(build_report(hostile()))
    assert_tame(page)
    tags = "html head meta title style body h1 h2 p ul li div details summary pre nav ol a span"
    tables = "table thead tbody tr th td figure picture source img figcaption"
    assert {tag for tag, _ in page.tags} == {*tags.split(), *tables.split()}
    attributes = {name for _, found in page.tags for name in found}
    assert attributes <= set(
        "lang charset name content http-equiv class scope alt src".split()
    ) | set("id href aria-label media srcset".split())
    assert page.words.count("<script>alert(1)</script>") > 10  # shown, as text
    assert "<script>" in "".join(text for root in svgs(page) for text in root.itertext())


def test_a_name_that_looks_like_a_formula_is_drawn_as_it_is():
    point = CandidatePoint(
        task_name="$\\frac{$ and $x_1$",
        status="$\\sqrt$",
        reason="ok",
        reasoning_tokens=5,
        speedup=2.0,
    )
    drawn = figures(context(points=[point]))
    assert "$\\frac{$ and $x_1$" in drawn["speedup"] and "$\\sqrt$" in drawn["reasoning_length"]


@pytest.mark.parametrize("render", [build_report, to_markdown, to_json])
def test_no_control_or_invisible_character_survives(render):
    text = render(hostile())
    assert not re.search(
        "[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]", text
    )
    assert "x1b" in text or "u001b" in text


def test_the_terminal_gets_no_control_characters_either():
    for name, value in summary_table(hostile()):
        assert (name + value).isprintable()


def test_hostile_text_is_no_markdown():
    lines = to_markdown(hostile()).split("\n")
    prose = [line for line in lines if not line.startswith("    ")]
    assert not [line for line in prose if re.search(r"[<`\[]|://|www\.", line)]
    assert not [line for line in prose if line.startswith("#") and not re.match(r"#{1,3} ", line)]
    assert_whole_tables("\n".join(prose), 8)


def test_code_in_markdown_cannot_leave_its_block():
    text = to_markdown(
        context(
            examples=[
                Example(
                    task_name="t", status="correct", reason="ok", code="a\r\n```\n\n<b>\n# no\rx"
                )
            ]
        )
    )
    block = [line for line in text.split("\n") if line.strip() in ("a", "```", "<b>", "# no\\rx")]
    assert len(block) == 4 and all(line.startswith("    ") for line in block)


def test_clean_shows_what_would_act():
    assert clean("a\x1b[2J\u202eb\u200b") == "a\\x1b[2J\\u202eb\\u200b"
    assert clean("a\r\nb\n\tc") == "a\nb\n\tc"
    assert clean("a\r\nb", one_line=True) == "a b"
    assert clean("\ud800") == "\\ud800"
    assert clean("Ωmega ≥ 1") == "Ωmega ≥ 1"


def test_passwords_in_urls_are_masked_everywhere():
    made = context(
        config={
            "tracking": {"uri": "postgresql://user:s3cret@db/mlflow"},
            "urls": ["http://a:s3c:r@t@host:80/x", "http://host:80/y@z"],
        }
    )
    for text in (build_report(made), to_markdown(made), to_json(made)):
        assert "s3c" not in text
    assert made.config["tracking"]["uri"] == "postgresql://user:***@db/mlflow"
    assert made.config["urls"] == ["http://a:***@host:80/x", "http://host:80/y@z"]


# -- the page stands alone -------------------------------------------------------------------------


def test_the_page_loads_nothing():
    page = Page(build_report(context()))
    assert_tame(page)
    assert sum(tag == "img" for tag, _ in page.tags) == 4
    (policy,) = [
        found["content"]
        for _, found in page.tags
        if found.get("http-equiv") == "Content-Security-Policy"
    ]
    assert policy.startswith("default-src 'none';")


def test_figures_follow_the_colour_scheme():
    drawn = figures(context())
    assert set(drawn) == {
        *("training_loss", "reasoning_length", "speedup", "scores", "scores.narrow")
    }
    for svg in drawn.values():
        assert "prefers-color-scheme:dark" in svg and "currentColor" in svg
        assert INK not in svg and not re.search(r"(fill|stroke): ?#(000000|ffffff)", svg)
    assert "prefers-color-scheme:dark" in build_report(context())


def test_every_figure_has_its_data():
    marks = {name: svg.count("<use ") for name, svg in figures(context()).items()}
    assert marks["training_loss"] >= 4 and marks["reasoning_length"] >= 6
    assert "1_Square_matmul" in figures(context())["speedup"]
    points = [
        point.model_copy(update={"reasoning_tokens": None, "speedup": None})
        for point in context().points
    ]
    without = context(points=points, history=(), scores=())
    assert figures(without) == {}
    assert "no tokenizer of the generator was given" in Page(build_report(without)).words


def test_a_large_run_stays_under_the_size_and_says_what_was_cut():
    known = {"reason": "ok", "lower": 1.0, "upper": 2.0}
    points = [
        CandidatePoint(
            task_name=f"task {i}",
            status=list(Status)[i % 8],
            reasoning_tokens=i,
            speedup=1 + i / 1e4,
            **known,
        )
        for i in range(20_000)
    ]
    long = {"code": "x" * 1_000_000, "detail": "d" * 1_000_000}
    examples = [Example(task_name="t", status="correct", reason="ok", **long)] * 50
    page = build_report(context(points=points, examples=examples, candidates=20_000))
    assert len(page.encode()) < 600_000
    words = Page(page).words
    for cut in ("1,500 of 20,000 candidates", "30 of 20,000", "more characters"):
        assert cut in words


def test_the_same_context_gives_the_same_bytes():
    made = context()
    assert build_report(made) == build_report(made)
    assert to_markdown(made) == to_markdown(made) and to_json(made) == to_json(made)


def test_json_is_plain_and_complete():
    made = context(history=[TrainingStep(step=1, loss=math.nan), TrainingStep(step=2, loss=1.5)])
    data = json.loads(to_json(made), parse_constant=lambda name: pytest.fail(name))
    assert data["history"][0]["loss"] is None
    assert set("headline summary caveats scores points fingerprints published".split()) <= set(data)
    again = ReportContext(**{name: data[name] for name in ReportContext.model_fields})
    assert again.scores == made.scores and again.points == made.points
    assert to_json(hostile()).isascii()


def test_a_speedup_without_an_end_is_in_no_figure():
    (point,) = points_of(pl.DataFrame([LINE[0] | {"timing": {"speedup": float("inf")}}]), {})
    assert point.speedup is None and point.status == LINE[0]["status"]
