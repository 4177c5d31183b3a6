"""A comparison says what was planted, and no more: the better strategy, the null one, and the same
numbers in all three files."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from tasks.benchmark.comparing import ComparisonRow
from tasks.benchmark.comparison.findings import headline, trust, verdict_of
from tasks.benchmark.comparison.numbers import SeedScore, compared, seed_tests
from tasks.benchmark.comparison.page import write_comparison
from tasks.benchmark.comparison.records import Ablation, Branch, Written
from tasks.benchmark.metrics import sign_flip_p
from tasks.store.snapshot import SnapshotRef
from tests.support.ablations import ablation, answers, drawn, verdict
from tests.support.pages import HOSTILE, Page, svgs

LOST = Branch(
    name="lost-0",
    strategy="min_length",
    size=None,
    seed=0,
    state="failed",
    error="CUDA out of memory",
    rows=12,
)
LEFT = Branch(
    name="left-0",
    strategy="min_length",
    size=None,
    seed=1,
    state="left_out",
    error="the budget was spent",
)


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Ablation:
    chances = {("concur", None): 0.6, ("random", None): 0.3, ("speedup", None): 0.3}
    made = ablation(
        tmp_path_factory.mktemp("planted"),
        chances,
        base=0.1,
        mlflow_url="http://127.0.0.1:1/#/a",
        cautions=("a caution",),
    )
    return made.model_copy(update={"branches": (*made.branches, LOST, LEFT)})


@pytest.fixture(scope="module")
def written(planted: Ablation, tmp_path_factory: pytest.TempPathFactory) -> Written:
    return write_comparison(planted, tmp_path_factory.mktemp("out") / "made", resamples=200)


def data_of(made: Written) -> dict[str, Any]:
    return json.loads(made.json_file.read_text(), parse_constant=lambda name: pytest.fail(name))


# -- what is found, and what is not ----------------------------------------------------------------


def test_a_planted_better_strategy_is_found_and_said(written: Written) -> None:
    data = data_of(written)
    assert (data["best"], data["baseline"], data["verdict"]) == (
        "concur",
        "random",
        "distinguishable",
    )
    (row,) = [
        r
        for r in data["differences"]
        if (r["model"], r["metric"], r["track"]) == ("concur", "exec", "custom_kernel")
    ]
    assert 0.15 < row["lower"] < 0.3 < row["upper"] < 0.45 and row["p_holm"] < 0.01
    assert written.headline.startswith("concur has the highest Exec@1 on 40 tasks:")
    assert written.headline.endswith(": more than chance.")
    assert " points against the baseline random, corrected p " in written.headline
    (null,) = [
        r
        for r in data["differences"]
        if (r["model"], r["metric"], r["track"]) == ("speedup", "exec", "custom_kernel")
    ]
    assert null["p_holm"] > 0.05 and null["lower"] < 0 < null["upper"]


def test_strategies_that_are_alike_are_not_told_apart(tmp_path: Path) -> None:
    """Of 8 ablations of two equal strategies, chance may call one distinguishable."""
    called = 0
    for number in range(8):
        hits = [drawn(0.4, tasks=20, samples=4, seed=10 * number + seed) for seed in range(4)]
        branches = [
            Branch(
                name=f"{s}-{i}",
                strategy=s,
                size=None,
                seed=i,
                state="done",
                answers=answers(tmp_path, "t", rows, f"{number}-{s}-{i}"),
            )
            for (s, i), rows in zip(
                (("a", 0), ("a", 1), ("random", 0), ("random", 1)), hits, strict=True
            )
        ]
        found = compared(
            Ablation(name="null", fingerprint="f", branches=tuple(branches)), resamples=50
        )
        verdict = verdict_of(found)
        called += verdict != "not_distinguishable"
        assert ("not distinguishable from chance" in headline(found)) is (
            verdict == "not_distinguishable"
        )
    assert called <= 2  # both metrics are tested, corrected: three of 8 happens once in 170


def test_seeds_are_pooled_within_tasks_and_shown_by_themselves(planted: Ablation) -> None:
    found = compared(planted, resamples=50)
    row = found.score("concur", "exec")
    assert row is not None and (row.tasks, row.samples) == (
        40,
        400,
    )  # 2 seeds with 5 samples: 40 tasks still
    assert found.samples == (5, 5) and found.tasks == 40
    seeds = found.by_seed("concur", "exec")
    assert len(seeds) == 2 and sum(seeds) / 2 == pytest.approx(row.value)


def branch(root: Path, strategy: str, seed: int, right: int, tasks: int = 40) -> Branch:
    """So many of the tasks solved, always the first ones."""
    rows = [
        verdict(f"t{task:03}", number, 2.0 if task < right else None)
        for task in range(tasks)
        for number in range(2)
    ]
    made = answers(root, "t", rows, f"{strategy}-{seed}-{right}")
    return Branch(
        name=f"{strategy}-{seed}",
        strategy=strategy,
        size=None,
        seed=seed,
        state="done",
        answers=made,
    )


def test_seeds_that_vary_more_than_strategies_are_said(tmp_path: Path) -> None:
    overlap = [
        branch(tmp_path, *each)
        for each in (("a", 0, 38), ("a", 1, 14), ("random", 0, 16), ("random", 1, 10))
    ]
    found = compared(Ablation(name="s", fingerprint="f", branches=tuple(overlap)), resamples=50)
    assert verdict_of(found) == "within_seed_spread"
    assert "within what seeds can make" in headline(found)
    assert "differ by up to 60.0 points of Exec@1 (a)" in " ".join(trust(found))
    (test,) = [t for t in found.seed_tests if (t.metric, t.track) == ("exec", "custom_kernel")]
    from scipy.stats import ttest_ind  # the same test where both have as many seeds

    ours, theirs = [38 / 40, 14 / 40], [16 / 40, 10 / 40]
    assert test.p == pytest.approx(float(ttest_ind(ours, theirs).pvalue)) and test.freedom == 2
    single = compared(
        Ablation(name="s", fingerprint="f", branches=(overlap[0], overlap[2])), resamples=50
    )
    assert verdict_of(single) == "seed_spread_unknown" and "seeds unknown" in headline(single)
    assert "One seed only: a, random" in " ".join(trust(single))


def test_strategies_share_one_spread_of_seeds_but_for_those_that_cannot_vary(
    tmp_path: Path,
) -> None:
    rights = {"a": (30, 32), "b": (20, 24), "random": (10, 10), "none": (0, 0)}
    branches = tuple(
        branch(tmp_path, name, seed, right)
        for name, both in rights.items()
        for seed, right in enumerate(both)
    )
    found = compared(Ablation(name="s", fingerprint="f", branches=branches), resamples=50)
    tests = {
        test.model: test
        for test in found.seed_tests
        if (test.metric, test.track) == ("exec", "custom_kernel")
    }
    spread = (
        (2 * 0.025**2 + 2 * 0.05**2 + 0) / 3
    ) ** 0.5  # a, b and random; "none" has no correct kernel
    assert tests["a"].spread == pytest.approx(spread) and tests["a"].freedom == 3
    assert (
        tests["a"].p is not None and tests["b"].p is not None and tests["a"].p < tests["b"].p < 0.05
    )
    assert verdict_of(found) == "distinguishable"


@pytest.mark.slow
@pytest.mark.parametrize("seeds", [2, 3, 5])
def test_seeds_that_vary_seldom_pass_for_a_better_strategy(seeds: int) -> None:
    """Two strategies that are the same, with seeds that move Exec by two points: what each test
    says, of 200 ablations."""
    luck = np.random.default_rng(seeds)
    tasks, samples, count = 40, 5, 200
    by_tasks = by_both = 0
    for _ in range(count):
        hard = luck.beta(0.6, 1.2, tasks)
        lifts = luck.normal(0, 0.05, (2, seeds, 1))
        runs = luck.binomial(samples, np.clip(hard + lifts * 4 * hard * (1 - hard), 0, 1)) / samples
        pairs = runs[0].mean(axis=0) - runs[1].mean(axis=0)
        p = sign_flip_p(pairs)
        facts: dict[str, Any] = {"track": "custom_kernel", "metric": "exec"}
        row = ComparisonRow(
            model="a",
            baseline="random",
            k=1,
            difference=float(pairs.mean()),
            tasks=tasks,
            p=p,
            p_holm=p,
            **facts,
        )
        scores = [
            SeedScore(
                branch=f"{arm}-{seed}",
                arm=arm,
                seed=seed,
                value=float(runs[place, seed].mean()),
                **facts,
            )
            for place, arm in enumerate(("a", "random"))
            for seed in range(seeds)
        ]
        (test,) = seed_tests([row], scores)
        assert p is not None and test.p_holm is not None
        by_tasks += p < 0.05
        by_both += p < 0.05 and test.p_holm < 0.05
    assert by_tasks > 0.1 * count, (
        f"seeds of this size deceive the test over tasks twice as often as it says: {by_tasks}"
    )
    assert by_both < 0.08 * count, (by_tasks, by_both)


def test_a_baseline_that_wins_is_measured_against_the_next_best(tmp_path: Path) -> None:
    found = compared(
        ablation(tmp_path, {("random", None): 0.6, ("a", None): 0.2, ("b", None): 0.3}),
        resamples=100,
    )
    assert found.arms[0].name == "random" and " points against the next best, b, " in headline(
        found
    )
    assert (
        compared(
            ablation(tmp_path / "named", {("random", None): 0.6, ("a", None): 0.2}, baseline="a"),
            resamples=50,
        ).baseline
        == "a"
    )


def test_sizes_are_compared_like_with_like(tmp_path: Path) -> None:
    chances = {
        (strategy, size): 0.3 + size / 1000
        for strategy in ("concur", "random")
        for size in (10, 100)
    }
    made = ablation(tmp_path, chances, seeds=1)
    found = compared(made, resamples=50)
    pairs = {(row.model, row.baseline) for row in found.differences}
    assert pairs == {
        ("concur, 10 rows", "random, 10 rows"),
        ("concur, 100 rows", "random, 100 rows"),
    }
    assert "different numbers of rows" in " ".join(trust(found))
    out = write_comparison(made, tmp_path / "out", resamples=50)
    assert "Over size" in out.html.read_text() and "Over size" in out.markdown.read_text()
    alone = made.model_copy(update={"branches": made.branches[1:]})  # concur's smaller one is gone
    assert ("concur, 100 rows", "random, 100 rows") in {
        (r.model, r.baseline) for r in compared(alone, resamples=50).differences
    }
    other = made.model_copy(update={"branches": made.branches[:3]})  # random of 100 rows is gone
    assert "concur, 100 rows is compared with random, 10 rows, which has another size" in " ".join(
        trust(compared(other, resamples=50))
    )


# -- ablations that did not go well ----------------------------------------------------------------


def test_one_branch_alone_is_compared_with_nothing_but_the_untuned_model(tmp_path: Path) -> None:
    found = compared(ablation(tmp_path, {("concur", None): 0.5}, seeds=1, base=0.1), resamples=50)
    assert (
        verdict_of(found) == "one_strategy"
        and found.differences == ()
        and len(found.against_base) == 4
    )
    assert headline(found).endswith("; no other strategy finished.")


def test_an_ablation_of_which_nothing_finished_is_a_page_all_the_same(tmp_path: Path) -> None:
    made = write_comparison(
        Ablation(name="s", fingerprint="f", branches=(LOST, LEFT)), tmp_path / "out"
    )
    assert made.headline == "No branch finished (1 failed, 1 left out): nothing to compare."
    data = data_of(made)
    assert (data["verdict"], data["best"], data["scores"], data["strategies"]) == (
        "nothing",
        None,
        [],
        [],
    )
    for text in (made.html.read_text(), made.markdown.read_text()):
        assert (
            "CUDA out of memory" in text
            and "the budget was spent" in text
            and "What to trust" not in text
        )


def test_branches_without_one_correct_kernel_are_not_ranked(tmp_path: Path) -> None:
    made = write_comparison(
        ablation(tmp_path, {("a", None): -1.0, ("random", None): -1.0}),
        tmp_path / "out",
        resamples=50,
    )
    assert made.headline == "No correct kernel from any of 2 strategies on 40 tasks."
    assert (
        "The zero is measured" in made.markdown.read_text()
        and data_of(made)["verdict"] == "no_correct_kernel"
    )


def test_unequal_tasks_are_paired_where_both_answered(tmp_path: Path) -> None:
    reference = answers(
        tmp_path, "recorded", [verdict(f"t{i:03}", 0, 2.0) for i in range(50)], "recorded"
    )
    made = Ablation(
        name="s",
        fingerprint="f",
        branches=(branch(tmp_path, "a", 0, 20, tasks=30), branch(tmp_path, "random", 0, 20)),
        references=(reference,),
    )
    found = compared(made, resamples=50)
    assert {row.tasks for row in found.differences} == {30} and found.tasks == 40
    score = found.score("recorded", "exec")
    assert score is not None and score.tasks == 40  # what no strategy was asked plays no part
    assert "a has no sample on 10 tasks that another model answered" in " ".join(trust(found))


def test_tasks_whose_reference_fails_count_for_nobody_and_are_named(tmp_path: Path) -> None:
    made = ablation(tmp_path, {("a", None): 0.5, ("random", None): 0.4}, seeds=1)
    broken = verdict("task-003", 0, None) | {
        "status": "task_error",
        "reason": "reference_failed",
        "outputs_match": None,
    }
    rows = [
        broken if row["task_id"] == "task-003" and row["candidate_id"].endswith("-0") else row
        for row in drawn(0.5, tasks=40, samples=5, seed=1)
    ]
    first = made.branches[0].model_copy(update={"answers": answers(tmp_path, "t", rows, "broken")})
    found = compared(made.model_copy(update={"branches": (first, made.branches[1])}), resamples=50)
    assert found.excluded == ("task-003",) and found.tasks == 39
    assert "degenerate: task-003" in " ".join(trust(found))


def test_verdicts_of_two_devices_are_refused(tmp_path: Path) -> None:
    made = ablation(tmp_path, {("a", None): 0.5, ("random", None): 0.4}, seeds=1)
    other = answers(tmp_path, "t", drawn(0.5, tasks=40, samples=5, seed=1, device="a GPU"), "gpu")
    mixed = made.model_copy(
        update={
            "branches": (made.branches[0].model_copy(update={"answers": other}), made.branches[1])
        }
    )
    with pytest.raises(UsageError, match="2 devices"):
        compared(mixed)


def test_what_is_not_there_is_one_clear_error(tmp_path: Path) -> None:
    made = ablation(tmp_path, {("a", None): 0.5}, seeds=1, tasks=4)
    with pytest.raises(UsageError, match="no strategy of the ablation"):
        compared(made.model_copy(update={"baseline": "nobody"}))
    gone = SnapshotRef(root=str(tmp_path), stage="verification", fingerprint="gone")
    lost = made.branches[0].model_copy(
        update={"answers": made.branches[0].answers.model_copy(update={"verdicts": gone})}
    )  # type: ignore[union-attr]
    with pytest.raises(UsageError, match="branch 'a-all-0' are not finished"):
        compared(made.model_copy(update={"branches": (lost,)}))
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        write_comparison(made, tmp_path / "file", resamples=10)


@pytest.mark.parametrize(
    "change", [{"state": "done"}, {"error": None}, {"error": ""}, {"size": 0}, {"gpu_hours": -1.0}]
)
def test_a_branch_that_cannot_be_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Branch.model_validate(LOST.model_dump() | change)


def test_two_branches_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="lost-0"):
        Ablation(name="s", fingerprint="f", branches=(LOST, LOST))


# -- the three files -------------------------------------------------------------------------------


def shown(path: Path) -> str:
    """What a reader sees of the page or the markdown, in one line."""
    import html

    text = re.sub(r"<(style|title)>.*?</\1>|<[^>]*>", " ", path.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(text).split())


def test_html_markdown_and_json_hold_the_same_numbers(written: Written) -> None:
    data, page, text = data_of(written), shown(written.html), shown(written.markdown)
    rates = [
        row
        for row in data["scores"]
        if row["metric"] in ("exec", "fast_1") and row["track"] == "custom_kernel"
    ]
    said = [
        f"{100 * r['value']:.1f} % ({100 * r['lower']:.1f} to {100 * r['upper']:.1f})"
        for r in rates
    ]
    said += [
        f"{r['value']:.2f}x ({r['lower']:.2f} to {r['upper']:.2f})"
        for r in data["scores"]
        if r["metric"] == "geometric_mean_speedup"
    ]
    every = [
        r for r in data["differences"] + data["against_untuned"] if r["track"] == "custom_kernel"
    ]
    said += [
        f"{100 * r['difference']:+.1f} ({100 * r['lower']:+.1f} to {100 * r['upper']:+.1f})"
        for r in every
    ]
    assert len(rates) == 8 and len(every) == 10
    for fact in (
        *said,
        data["headline"],
        *data["trust"],
        "a caution",
        "CUDA out of memory",
        "KernelCoder (r)",
    ):
        assert " ".join(fact.split()) in page, fact
        assert " ".join(fact.split()) in text, fact
    assert (
        data["schema_version"] == 1
        and len(data["branches"]) == 8
        and "answers" not in data["branches"][0]
    )
    assert data["published"] and "KernelCoder" not in json.dumps(data["scores"])


def test_the_same_ablation_gives_the_same_bytes(
    planted: Ablation, written: Written, tmp_path: Path
) -> None:
    again = write_comparison(planted, tmp_path, resamples=200)
    for one, other in (
        (written.html, again.html),
        (written.markdown, again.markdown),
        (written.json_file, again.json_file),
    ):
        assert one.read_bytes() == other.read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "comparison.html",
        "comparison.json",
        "comparison.md",
    ]


def test_hostile_names_are_text_everywhere(tmp_path: Path) -> None:
    made = ablation(
        tmp_path / "data",
        {("a", 1): 0.5, ("a", 2): 0.5, ("random", 1): 0.4},
        tasks=6,
        seeds=2,
        name=HOSTILE,
        base_model=HOSTILE,
    )
    facts = {
        "strategy": HOSTILE,
        "mlflow_url": "javascript:alert(1)",
        "prefect_url": 'http://u:s3cret@h/"><script>x',
    }
    facts |= {"curated": HOSTILE, "trained": HOSTILE, "scores": HOSTILE}
    branches = [
        branch.model_copy(update=facts | {"name": f"{HOSTILE}{branch.name}"})
        for branch in made.branches
    ]
    branches.append(LOST.model_copy(update={"error": HOSTILE, "name": HOSTILE}))
    references = (made.branches[0].answers.model_copy(update={"model": HOSTILE}),)  # type: ignore[union-attr]
    changes = {
        "branches": tuple(branches),
        "references": references,
        "cautions": (HOSTILE,),
        "fingerprint": HOSTILE,
        "created_at": HOSTILE,
    }
    out = write_comparison(made.model_copy(update=changes), tmp_path / "out", resamples=20)
    raw = out.html.read_text()
    page = Page(raw)
    assert page.open == [] and not {"script", "link", "iframe", "object", "b"} & {
        tag for tag, _ in page.tags
    }
    assert {name for _, found in page.tags for name in found} <= {
        "lang",
        "charset",
        "name",
        "content",
        "http-equiv",
        "class",
        "scope",
        "alt",
        "src",
        "media",
        "srcset",
        "href",
        "rel",
    }
    links = {found["href"] for tag, found in page.tags if tag == "a"}
    assert links and all(re.fullmatch(r"http://u:\*\*\*@h/[^\"<> ]*", link or "") for link in links)
    assert "<script>alert(1)</script>" in page.words and "s3cret" not in raw
    for root in svgs(page):
        assert not {"script", "img", "image", "foreignObject", "a"} & {
            element.tag.split("}")[-1] for element in root.iter()
        }
    text = out.markdown.read_text()
    assert not re.search(r"`|<|javascript:", text) and "s3cret" not in text
    tables = [block.split("\n") for block in text.strip().split("\n\n") if block.startswith("|")]
    assert len(tables) > 4
    for header, rule, *body in tables:
        assert {line.count("|") for line in (header, *body)} == {rule.count("|")}
    assert (
        not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", raw + text + out.json_file.read_text())
        and out.json_file.read_text().isascii()
    )


def test_the_page_loads_nothing_and_has_a_figure_for_small_screens(written: Written) -> None:
    page = Page(written.html.read_text())
    sources = [
        value or ""
        for _, found in page.tags
        for name, value in found.items()
        if name in ("src", "srcset")
    ]
    assert len(sources) == 2 and all(
        source.startswith("data:image/svg+xml;base64,") for source in sources
    )
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert "prefers-color-scheme:dark" in written.html.read_text()
    assert ("a", {"href": "http://127.0.0.1:1/#/a", "rel": "noopener noreferrer"}) in page.tags
