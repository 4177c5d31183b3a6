"""A comparison says what was planted, and no more: the better strategy, the null one, and the same
numbers in all three files."""

import html
import json
import re

import pytest
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from tasks.benchmark.comparison.numbers import compared
from tasks.benchmark.comparison.page import headline, trust, verdict_of, write_comparison
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.store.snapshot import SnapshotRef
from tests.support.ablations import (
    Written,
    ablation,
    answers,
    branch,
    drawn,
    solved,
    verdict,
    written_comparison,
)
from tests.support.pages import HOSTILE, Page, assert_tame, assert_whole_tables

FACTS = {"strategy": "min_length", "size": None}
LOST = Branch(name="lost-0", seed=0, state="failed", error="CUDA out of memory", rows=12, **FACTS)
EXEC = {"metric": "exec", "track": "custom_kernel"}


@pytest.fixture(scope="module")
def planted(tmp_path_factory):
    chances = {("concur", None): 0.6, ("random", None): 0.3, ("speedup", None): 0.3}
    made = ablation(
        tmp_path_factory.mktemp("planted"),
        chances,
        base=0.1,
        mlflow_url="http://127.0.0.1:1/#/a",
        cautions=("a caution",),
    )
    return made.model_copy(update={"branches": (*made.branches, LOST)})


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """Two strategies with one branch each."""
    chances = {("a", None): 0.5, ("random", None): 0.4}
    return ablation(tmp_path_factory.mktemp("pair"), chances, seeds=1)


@pytest.fixture(scope="module")
def numbers(planted):
    """Ten seconds of permutations."""
    return compared(planted, resamples=200)


@pytest.fixture(scope="module")
def written(numbers, tmp_path_factory):
    out = tmp_path_factory.mktemp("out") / "made"
    return Written(*write_comparison(numbers, out), headline(numbers))


def data_of(made):
    return json.loads(made.json_file.read_text(), parse_constant=lambda name: pytest.fail(name))


def of(*branches, **more):
    return compared(Ablation(name="s", fingerprint="f", branches=branches, **more), resamples=50)


def with_answers(made, found):
    """The same ablation, but for the answers of its first branch."""
    first = made.branches[0].model_copy(update={"answers": found})
    return made.model_copy(update={"branches": (first, *made.branches[1:])})


def doubts(found):
    return "\n".join(trust(found))


def exec_rows(found):
    return {row["model"]: row for row in found.differences if EXEC.items() <= row.items()}


# -- what is found, and what is not ----------------------------------------------------------------


def test_a_planted_better_strategy_is_found_and_said(written):
    data = data_of(written)
    known = (data["best"], data["baseline"], data["verdict"])
    assert known == ("concur", "random", "distinguishable")
    rows = {row["model"]: row for row in data["differences"] if EXEC.items() <= row.items()}
    assert 0.15 < rows["concur"]["lower"] < 0.3 < rows["concur"]["upper"] < 0.45
    assert rows["concur"]["p_holm"] < 0.01
    assert rows["speedup"]["p_holm"] > 0.05
    assert rows["speedup"]["lower"] < 0 < rows["speedup"]["upper"]
    assert written.headline.startswith("concur has the highest Exec@1 on 40 tasks:")
    assert written.headline.endswith(": more than chance.")
    assert "; concur minus random, Exec@1: +" in written.headline


def test_right_answers_that_were_only_screened_do_not_count_and_the_page_says_whose(tmp_path):
    def branch_at(strategy, level):
        rows = [verdict(f"t{task}", 0, 2.0) | {"level": level} for task in range(20)]
        return branch(tmp_path, strategy, 0, rows)

    found = of(branch_at("concur", "screen"), branch_at("random", "confirm"))
    assert {row["name"]: row["exec_at_1"] for row in found.strategies} == {
        "random": 1.0,
        "concur": 0.0,
    }
    assert "20 right answers were only screened: they count as not right (concur 20)." in doubts(
        found
    )


@pytest.mark.slow
def test_seeds_are_pooled_within_tasks_and_shown_by_themselves(planted):
    found = compared(planted, resamples=50)
    row = next(row for row in found.scores if {"model": "concur", **EXEC}.items() <= row.items())
    assert (row["tasks"], row["samples"]) == (40, 400)  # 2 seeds with 5 samples: 40 tasks still
    assert found.tasks == 40
    seeds = [
        each["value"]
        for each in found.scores_by_seed
        if {"arm": "concur", **EXEC}.items() <= each.items()
    ]
    assert len(seeds) == 2 and sum(seeds) / 2 == pytest.approx(row["value"])


@pytest.mark.slow
def test_seeds_that_vary_more_than_strategies_are_said(tmp_path):
    from scipy.stats import ttest_ind  # the same test where both have as many seeds

    rights = (("a", 0, 38), ("a", 1, 14), ("random", 0, 16), ("random", 1, 10))
    overlap = [solved(tmp_path, *each) for each in rights]
    found = of(*overlap)
    assert verdict_of(found) == "within_seed_spread"
    assert "within the spread between seeds" in headline(found)
    assert "Widest spread of seeds, Exec@1: 60.0 points (a)." in doubts(found)
    row = exec_rows(found)["a"]
    expected = float(ttest_ind([38 / 40, 14 / 40], [16 / 40, 10 / 40]).pvalue)
    assert row["p_seeds"] == pytest.approx(expected) and row["freedom"] == 2
    single = of(overlap[0], overlap[2])
    assert verdict_of(single) == "seed_spread_unknown" and "seeds unknown" in headline(single)
    assert "One seed only: a, random." in doubts(single)


@pytest.mark.slow
def test_strategies_share_one_spread_of_seeds_but_for_those_that_cannot_vary(tmp_path):
    rights = {"a": (30, 32), "b": (20, 24), "random": (10, 10), "none": (0, 0)}
    found = of(
        *(
            solved(tmp_path, name, seed, right)
            for name, both in rights.items()
            for seed, right in enumerate(both)
        )
    )
    rows = exec_rows(found)
    # a, b and random; "none" has no correct kernel
    spread = ((2 * 0.025**2 + 2 * 0.05**2 + 0) / 3) ** 0.5
    assert rows["a"]["spread"] == pytest.approx(spread) and rows["a"]["freedom"] == 3
    assert rows["a"]["p_seeds"] < rows["b"]["p_seeds"] < 0.05
    assert verdict_of(found) == "distinguishable"


@pytest.mark.slow
def test_a_baseline_that_wins_is_measured_against_the_next_best(tmp_path):
    made = [solved(tmp_path, *each) for each in (("random", 0, 30), ("a", 0, 10), ("b", 0, 15))]
    found = of(*made)
    assert found.strategies[0]["name"] == "random"
    assert "; b minus random, Exec@1: -37.5" in headline(found)
    assert of(*made, baseline="a").baseline == "a"


@pytest.mark.slow
def test_sizes_are_compared_like_with_like(tmp_path):
    chances = {(s, size): 0.3 + size / 1000 for s in ("concur", "random") for size in (10, 100)}
    made = ablation(tmp_path, chances, seeds=1)
    sizes = ("10 rows", "100 rows")
    branches = made.branches

    def pairs(*branches):
        return {(row["model"], row["baseline"]) for row in of(*branches).differences}

    assert pairs(*branches) == {(f"concur, {size}", f"random, {size}") for size in sizes}
    assert ("concur, 100 rows", "random, 100 rows") in pairs(*branches[1:])
    # random of 100 rows is gone
    assert ("concur, 100 rows", "random, 10 rows") in pairs(*branches[:3])
    out = written_comparison(made, tmp_path / "out", resamples=50)
    for page in (shown(out.html), shown(out.markdown)):
        assert "different numbers of rows" in page


# -- ablations that did not go well ----------------------------------------------------------------


def test_one_branch_alone_is_compared_with_nothing_but_the_untuned_model(tmp_path):
    found = compared(ablation(tmp_path, {("concur", None): 0.5}, seeds=1, base=0.1), resamples=50)
    assert verdict_of(found) == "one_strategy" and found.differences == ()
    assert len(found.against_untuned) == 4
    assert headline(found).endswith("; no other strategy finished.")


def test_an_ablation_of_which_nothing_finished_is_a_page_all_the_same(tmp_path):
    made = Ablation(name="s", fingerprint="f", branches=(LOST,))
    found = written_comparison(made, tmp_path / "out")
    assert found.headline == "No branch finished (1 failed): nothing to compare."
    data = data_of(found)
    known = [data[name] for name in "verdict best scores strategies".split()]
    assert known == ["nothing", None, [], []]
    for text in (found.html.read_text(), found.markdown.read_text()):
        assert "CUDA out of memory" in text
        assert "What to trust" not in text


def test_branches_without_one_correct_kernel_are_not_ranked(tmp_path):
    made = [solved(tmp_path, name, 0, 0) for name in ("a", "random")]
    found = of(*made)
    assert headline(found) == "No correct kernel from any of 2 strategies on 40 tasks."
    assert verdict_of(found) == "no_correct_kernel"
    assert "Not one correct answer: a, random." in doubts(found)


@pytest.mark.slow
def test_unequal_tasks_are_paired_where_both_answered(tmp_path):
    rows = [verdict(f"t{i:03}", 0, 2.0) for i in range(50)]
    reference = answers(tmp_path, "recorded", rows, "recorded")
    made = (solved(tmp_path, "a", 0, 20, tasks=30), solved(tmp_path, "random", 0, 20))
    found = of(*made, references=(reference,))
    assert {row["tasks"] for row in found.differences} == {30} and found.tasks == 40
    assert found.references[0]["tasks"] == 40  # what no strategy was asked plays no part
    elsewhere = answers(tmp_path, "other", [verdict("elsewhere", 0, 2.0)], "other")
    assert of(*made, references=(elsewhere,)).references == ()
    assert "a has no sample on 10 of 40 tasks" in doubts(found)


def test_tasks_whose_reference_fails_count_for_nobody_and_are_named(pair, tmp_path):
    failed = {"status": "task_error", "reason": "reference_failed", "outputs_match": None}
    rows = drawn(0.5, tasks=40, samples=7, seed=1)
    rows = [row | (failed if row["task_id"] == "task-003" else {}) for row in rows]
    found = compared(with_answers(pair, answers(tmp_path, "t", rows, "broken")), resamples=50)
    assert found.tasks == 39 and "left out for every model" in doubts(found)
    assert "task-003 (" in doubts(found)


def test_what_cannot_be_compared_is_one_clear_error(pair, tmp_path):
    rows = drawn(0.5, tasks=40, samples=5, seed=1, device="a GPU")
    gone = SnapshotRef(root=str(tmp_path), stage="verification", fingerprint="gone")
    other = answers(tmp_path, "t", rows, "gpu")
    missing = other.model_copy(update={"verdicts": gone})
    for match, made in (
        ("2 devices", with_answers(pair, other)),
        ("no strategy of the ablation", pair.model_copy(update={"baseline": "nobody"})),
        ("branch 'a-all-0' are not finished", with_answers(pair, missing)),
    ):
        with pytest.raises(UsageError, match=match):
            compared(made)
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        written_comparison(pair, tmp_path / "file", resamples=10)


def test_the_table_of_strategies_holds_the_numbers_of_the_page(numbers):
    table = {row["strategy"]: row for row in numbers.strategies}
    assert list(table) == ["concur", "speedup", "random"]
    row = table["concur"]
    difference = exec_rows(numbers)["concur"]
    for column in ("difference", "p_holm", "p_seeds_holm", "baseline"):
        assert row[column] == difference[column]
    assert row["difference_lower"] == difference["lower"]
    assert (row["seeds"], row["rows"], table["random"]["difference"]) == (2, 40, None)
    assert row["exec_at_1_lower"] < row["exec_at_1"] < row["exec_at_1_upper"]


@pytest.mark.parametrize(
    "change", [{"state": "done"}, {"error": None}, {"error": ""}, {"size": 0}, {"seconds": -1.0}]
)
def test_a_branch_that_cannot_be_is_refused(change):
    with pytest.raises(ValidationError):
        Branch.model_validate(LOST.model_dump() | change)


def test_two_branches_of_one_name_are_refused():
    with pytest.raises(ValidationError, match="lost-0"):
        Ablation(name="s", fingerprint="f", branches=(LOST, LOST))


# -- the three files -------------------------------------------------------------------------------


def shown(path):
    """What a reader sees of the page or the markdown, in one line."""
    text = re.sub(r"<(style|title)>.*?</\1>|<[^>]*>", " ", path.read_text(), flags=re.DOTALL)
    return " ".join(html.unescape(text).split())


def test_html_markdown_and_json_hold_the_same_numbers(written):
    data, page, text = data_of(written), shown(written.html), shown(written.markdown)
    own = [row for row in data["scores"] if row["track"] == "custom_kernel"]
    rates = [row for row in own if row["metric"] in ("exec", "fast_1")]
    speedups = [row for row in own if row["metric"] == "geometric_mean_speedup"]
    every = data["differences"] + data["against_untuned"]
    every = [row for row in every if row["track"] == "custom_kernel"]

    def said(row, name, form, unit, scale=100):
        value, lower, upper = (f"{scale * row[each]:{form}}" for each in (name, "lower", "upper"))
        return f"{value}{unit} ({lower} to {upper})"

    facts = [said(row, "value", ".1f", " %") for row in rates]
    facts += [said(row, "value", ".2f", "x", 1) for row in speedups]
    facts += [said(row, "difference", "+.1f", "") for row in every]
    facts += [*data["trust"], data["headline"], "a caution", "CUDA out of memory"]
    assert len(rates) == 8 and len(every) == 10 and data["cautions"] == ["a caution"]
    assert [fact for fact in facts if " ".join(fact.split()) not in page] == []
    assert [fact for fact in facts if " ".join(fact.split()) not in text] == []
    assert len(data["branches"]) == 7
    assert "answers" not in data["branches"][0]


def test_hostile_names_are_text_everywhere(tmp_path):
    chances = {("a", 1): 0.5, ("a", 2): 0.5, ("random", 1): 0.4}
    made = ablation(tmp_path / "data", chances, tasks=6, name=HOSTILE, base_model=HOSTILE)
    facts = dict.fromkeys(("strategy", "curated", "trained", "scores"), HOSTILE) | {
        "mlflow_url": "javascript:alert(1)",
        "prefect_url": 'http://u:s3cret@h/"><script>x',
    }
    branches = [
        each.model_copy(update=facts | {"name": f"{HOSTILE}{each.name}"}) for each in made.branches
    ]
    branches.append(LOST.model_copy(update={"error": HOSTILE, "name": HOSTILE}))
    changes = dict.fromkeys(("fingerprint", "created_at"), HOSTILE) | {
        "branches": tuple(branches),
        "references": (answers(tmp_path, HOSTILE, drawn(0.5, tasks=6, samples=5, seed=1), "r"),),
        "cautions": (HOSTILE,),
    }
    out = written_comparison(made.model_copy(update=changes), tmp_path / "out", resamples=20)
    raw, text = out.html.read_text(), out.markdown.read_text()
    page = Page(raw)
    assert_tame(page)
    allowed = "lang charset name content http-equiv class scope alt src media srcset href rel"
    allowed += " id aria-label"  # of the contents list
    assert {name for _, found in page.tags for name in found} <= set(allowed.split())
    links = {found["href"] for tag, found in page.tags if tag == "a"}
    links = {link for link in links if not re.fullmatch("#[a-z0-9-]+", link or "")}
    assert links and all(re.fullmatch(r"http://u:\*\*\*@h/[^\"<> ]*", link or "") for link in links)
    assert "<script>alert(1)</script>" in page.words and "s3cret" not in raw
    assert not re.search(r"`|<|javascript:", text) and "s3cret" not in text
    assert_whole_tables(text, 3)
    data = out.json_file.read_text()
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202e]", raw + text + data)
    assert data.isascii()


def test_the_page_loads_nothing(written):
    page = Page(written.html.read_text())
    assert_tame(page)
    assert sum(tag == "img" for tag, _ in page.tags) == 1
    assert "prefers-color-scheme:dark" in written.html.read_text()
    assert ("a", {"href": "http://127.0.0.1:1/#/a", "rel": "noopener noreferrer"}) in page.tags
