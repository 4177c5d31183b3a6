"""Planted effects come back within their intervals, planted nothing is not claimed, and data that
cannot say is told so."""

import json
import math

import numpy as np
import polars as pl
import pytest
from statsmodels.discrete.conditional_models import ConditionalLogit
from statsmodels.stats.proportion import proportion_confint

from kernels_eval.errors import UsageError
from tasks.arl import arl_thirds
from tasks.observe.figure import accuracy_figure
from tasks.observe.observations import Observations, observe, thirds_of
from tasks.observe.page import report, write
from tasks.observe.samples import samples_of
from tasks.observe.statistics import odds_ratio, rank_correlation
from tests.support.cases import cases
from tests.support.drawings import assert_readable
from tests.support.planted import planted_frame

CASES = cases("analysis")
SCHEMA = {
    "task_id": pl.String,
    "status": pl.String,
    "reasoning_tokens": pl.Int64,
    "speedup": pl.Float64,
}
ODDS, RHO = "odds_ratio_within_tasks", "spearman_of_length_and_speedup"


def rows(*samples, **more):
    """(task, status, reasoning tokens, speedup) as a frame with the columns that are read."""
    frame = pl.DataFrame(list(samples), schema=SCHEMA, orient="row")
    return frame.with_columns(**{name: pl.Series(values) for name, values in more.items()})


def outcome(right):
    return "correct" if right else "incorrect"


def page_of(found):
    return report(found, accuracy_figure(found))


# -- what is planted -------------------------------------------------------------------------------


@pytest.mark.parametrize("odds, side", [(0.5, -1), (1.0, 0), (2.0, 1)])
def test_a_planted_effect_is_found_and_none_is_not(odds, side):
    """95 % intervals of eight seeds: fixed data, so this is a fact about them and not a chance."""
    sides = []
    for seed in range(8):
        found = observe(planted_frame(1000, seed, odds=odds)).estimate(ODDS)
        sides.append((found.lower > 1) - (found.upper < 1))
    assert sides.count(side) >= (7 if side == 0 else 8)


def test_no_correlation_with_speedup_is_planted_and_none_is_claimed():
    found = [observe(planted_frame(5000, seed)).estimate(RHO) for seed in range(5)]
    assert sum(each.lower <= 0 <= each.upper for each in found) >= 4
    assert all(each.upper - each.lower < 0.15 for each in found)


def test_simpsons_paradox_is_decided_within_tasks():
    """Between tasks longer is better (easy tasks invite long reasoning), within each task shorter
    is."""
    random, made = np.random.default_rng(7), []
    for task in range(300):
        ease = random.normal()
        for length in random.normal(size=8):
            right = random.random() < 1 / (1 + math.exp(-(1.5 * ease - 0.8 * length)))
            tokens = max(1, int(20_000 + 4000 * ease + 1000 * length))
            made.append((f"t{task}", outcome(right), tokens, None))
    found = observe(rows(*made))
    medians = [found.estimate(f"median_{name}_tokens").value for name in ("correct", "incorrect")]
    assert medians[0] > medians[1]
    assert found.estimate(ODDS).upper < 0.7


def test_samples_of_two_token_limits_are_not_compared():
    """Short limits make samples short and wrong: within a limit there is nothing to see."""
    random, made, limits = np.random.default_rng(3), [], []
    for task in range(200):
        for sample in range(8):
            limit = 9000 if sample % 2 else 3000
            right = random.random() < (0.8 if sample % 2 else 0.2)
            made.append((f"t{task}", outcome(right), int(limit * random.uniform(0.5, 1)), None))
            limits.append(limit)
    apart, mixed = observe(rows(*made, max_tokens=limits)), observe(rows(*made))
    assert apart.estimate(ODDS).lower < 1 < apart.estimate(ODDS).upper < mixed.estimate(ODDS).lower


def test_truncation_alone_is_recognised_as_such():
    """Nothing but the limit makes samples wrong: with truncated samples there is an effect of
    length, without them none."""
    random = np.random.default_rng(3)
    lengths = random.integers(2000, 12_000, size=4000)
    cut = lengths > 9000
    right = (random.random(4000) < 0.5) & ~cut
    status = np.where(cut, "no_code", np.where(right, "correct", "incorrect")).tolist()
    tasks = [f"t{number // 8}" for number in range(4000)]
    samples = zip(tasks, status, np.minimum(lengths, 9000).tolist(), [None] * 4000, strict=True)
    found = observe(rows(*samples, finish_reason=np.where(cut, "length", "stop")))
    complete = found.estimate(f"{ODDS}_complete")
    assert found.truncated == int(cut.sum())
    assert found.estimate(ODDS).upper < 1 and complete.lower < 1 < complete.upper
    assert any(f"cut off {found.truncated:,} of 4,000" in text for text in found.cautions)


def test_a_few_very_long_samples_do_not_move_the_odds():
    """In every tenth task one correct sample is ten times as long."""
    frame = planted_frame(2000, 0)
    lever = (pl.col("status") == "correct").and_(pl.int_range(pl.len()) % 50 == 0)
    longer = pl.when(lever).then(pl.col("reasoning_tokens") * 10).otherwise("reasoning_tokens")
    moved = observe(frame.with_columns(reasoning_tokens=longer)).estimate(ODDS)
    assert moved.upper < 1


# -- the statistics --------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Dropped")
@pytest.mark.parametrize("sizes", [(5,), (2, 3, 9), (40, 70)], ids=str)
def test_odds_are_those_of_statsmodels_and_of_tasks_of_any_size(sizes):
    random = np.random.default_rng(1)
    task = np.repeat(np.arange(60), [sizes[number % len(sizes)] for number in range(60)])
    exposure = random.normal(size=len(task))
    chance = 1 / (1 + np.exp(0.4 * exposure + random.normal(size=60)[task]))
    right = random.random(len(task)) < chance
    found = odds_ratio(exposure, right, task)
    model = ConditionalLogit(right.astype(float), exposure[:, None], groups=task)
    theirs = model.fit(disp=0, gtol=1e-9)
    # its optimiser is less exact than ours, which test_independent_recomputation_within shows
    assert math.log(found.value) == pytest.approx(theirs.params[0], rel=1e-4)
    error = (math.log(found.upper) - math.log(found.lower)) / 2 / 1.959964
    assert error == pytest.approx(theirs.bse[0], rel=1e-3)


def test_odds_of_a_task_with_a_thousand_samples_stay_in_range():
    random = np.random.default_rng(0)
    exposure, task = random.normal(size=2000), np.repeat([0, 1], 1000)
    right = random.random(2000) < 1 / (1 + np.exp(0.5 * exposure))
    found = odds_ratio(exposure, right, task)
    assert found.lower < math.exp(-0.5) < found.upper


def test_rank_correlation_is_scipys_and_repeated_samples_are_no_more_evidence():
    from scipy.stats import spearmanr

    x, y = np.random.default_rng(2).normal(size=(2, 200)).round(1)  # with ties
    arrays = (x, y, np.arange(200))
    once, four = (
        rank_correlation(*(np.repeat(each, copies) for each in arrays)) for copies in (1, 4)
    )
    assert once.value == pytest.approx(spearmanr(x, y).statistic)
    assert four.value == pytest.approx(once.value)
    assert four.upper - four.lower == pytest.approx(once.upper - once.lower, rel=1e-6)


def test_bins_are_the_papers_and_their_intervals_wilsons():
    """Wilson's interval of 8 of 10 is 0.4902 to 0.9433 (worked out by hand from Wilson 1927), and
    elsewhere it is statsmodels'."""
    samples = [("t", outcome(n < 8), 300, None) for n in range(10)]
    (alone,) = observe(rows(*samples)).bins
    assert (alone["lower"], alone["upper"]) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    lengths = (255, 256, 511, 512, 20_223, 20_224, 99_000)
    samples += [("u", "incorrect", tokens, None) for tokens in lengths]
    bins = {each["from_tokens"]: each for each in observe(rows(*samples)).bins}
    assert sorted(bins) == [0, 256, 512, 19_968, 20_224]
    second, last = bins[256], bins[20_224]
    assert (second["samples"], second["correct"], second["to_tokens"]) == (12, 8, 512)
    assert (last["to_tokens"], last["samples"], last["lower"]) == (None, 2, 0.0)
    expected = proportion_confint(8, 12, method="wilson")
    assert (second["lower"], second["upper"]) == pytest.approx(expected)


# -- difficulty ------------------------------------------------------------------------------------


def test_thirds_by_hand():
    thirds = thirds_of(samples_of(pl.DataFrame(CASES["samples"])).data)
    shown = [
        (row["from_arl"], row["to_arl"], row["exec"], pytest.approx(row["speedup"]))
        for row in thirds
    ]
    assert [list(group) for group in shown] == CASES["groups"]


def test_three_tasks_are_no_thirds_and_four_samples_no_correlation():
    few = [(f"t{n}", outcome(n), 100 + n, 2.0 + n) for n in range(4)]
    found = observe(rows(*few, ("t0", "correct", 99, 1.0)))
    assert found.thirds == () and not [row for row in found.findings if "arl" in row.key]
    odds, speedups, thirds = found.finding
    assert "samples: 1, and it takes 2" in odds
    assert "no estimate" in speedups and "4, and it takes 5" in speedups
    assert thirds == "4 tasks, fewer than 15: not divided by average reasoning length."


def test_thirds_are_taken_within_levels_and_ties_go_by_name():
    """Level 1 has long tasks, level 2 short ones: each third holds as many of either."""
    names = [f"kernelbench/L{level}/{task}" for level in (1, 2) for task in range(6)]
    lengths = [*range(900, 906), *range(100, 106)]
    frame = pl.DataFrame({"task_id": names, "reasoning_tokens": lengths, "stratum": [1, 2] * 6})
    leveled = frame.with_columns(stratum=pl.col("task_id").str.slice(12, 2))
    thirds = arl_thirds(leveled).sort("task_id")["third"].to_list()
    assert thirds == ["short", "short", "middle", "middle", "long", "long"] * 2
    equal = leveled.with_columns(reasoning_tokens=5)
    assert arl_thirds(equal).equals(arl_thirds(equal.reverse()))
    assert arl_thirds(leveled.head(2)).is_empty()


def test_planted_difficulty_falls_over_the_thirds():
    found = observe(planted_frame(2000, 0))
    execs = [row["exec"] for row in found.thirds]
    assert execs == sorted(execs, reverse=True)
    assert found.thirds[0]["exec_lower"] > found.thirds[2]["exec_upper"]
    assert found.finding[2].startswith("Thirds of the tasks by average reasoning length (ARL)")


# -- what cannot be said ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, said",
    [
        *(
            (lambda frame, lost=lost: frame.drop(lost), lost)
            for lost in "task_id status reasoning_tokens speedup".split()
        ),
        (
            lambda frame: frame.with_columns(reasoning_tokens=pl.lit("many")),
            "holds String",
        ),
        (
            lambda frame: frame.drop("speedup").with_columns(timing=pl.lit(1.0)),
            "timing holds Float64, not Struct",
        ),
        (lambda _: rows(), "no sample with a reasoning length"),
        (
            lambda _: rows(
                ("t", "correct", None, 1.0), ("t", "task_error", 5, None), ("t", "correct", 0, 1.0)
            ),
            "no sample with a reasoning length",
        ),
    ],
)
def test_a_frame_that_cannot_be_used_is_one_clear_error(change, said):
    with pytest.raises(UsageError, match=said):
        observe(change(planted_frame(50, 0)))


LONG, EVEN = pl.col("reasoning_tokens") >= 9000, pl.int_range(pl.len()) % 2 == 0
PARTED = pl.when(LONG).then(pl.lit("incorrect")).otherwise(pl.lit("correct"))
NO_ODDS, NO_RHO = "both correct and incorrect samples", "correct samples have a speedup"
UNSAYABLE = {
    "none correct": ({"status": pl.lit("incorrect")}, [NO_ODDS, NO_RHO]),
    "all correct": ({"status": pl.lit("correct")}, [NO_ODDS]),
    "one task": ({"keep": pl.int_range(pl.len()) < 5}, [NO_ODDS]),
    "two tasks": ({"keep": pl.int_range(pl.len()) < 10}, []),
    "one row": ({"keep": pl.int_range(pl.len()) < 1}, [NO_ODDS, NO_RHO]),
    "one sample a task": ({"keep": pl.col("sample_index") == 0}, [NO_ODDS]),
    "NaN speedups": ({"speedup": pl.lit(math.nan)}, [NO_RHO]),
    "no speedup is one": ({"speedup": pl.when(EVEN).then(math.inf).otherwise(-1)}, [NO_RHO]),
    "equal speedups": ({"speedup": pl.lit(2.0)}, ["does not vary"]),
    "equal lengths": ({"reasoning_tokens": pl.lit(100)}, ["equally long", "does not vary"]),
    "all truncated": ({"finish_reason": pl.lit("length")}, []),
    "perfectly separated": ({"status": PARTED}, ["perfectly"]),
    "null names": (dict.fromkeys(("generator", "finish_reason"), pl.lit(None)), []),
    "null timing": ({"speedup": None, "timing": pl.lit(None)}, [NO_RHO]),
    "only what is required": (
        dict.fromkeys(("candidate_id", "reason", "finish_reason", "generator", "sample_index")),
        [],
    ),
}


@pytest.mark.parametrize("name", UNSAYABLE)
def test_whatever_cannot_be_said_is_said_so_and_never_a_crash(name):
    changes, reasons = UNSAYABLE[name]
    frame = planted_frame(200, 1).with_columns(
        **{name: value for name, value in changes.items() if value is not None}
    )
    frame = frame.drop(column for column, value in changes.items() if value is None)
    if "keep" in frame.columns:
        frame = frame.filter("keep").drop("keep")
    found = observe(frame)
    text = page_of(found)
    assert len(found.finding) == 3 and found.cautions[-1].startswith("Association, not cause")
    assert "nan" not in text.lower().split()
    json.dumps(found.model_dump(mode="json"), allow_nan=False)
    why_not = [row.estimate.why_not for row in found.findings]
    for reason in reasons:
        assert any(reason in why for why in why_not) and reason in text
    if name == "only what is required":
        assert found.truncated is None and "No column says which samples" in found.cautions[0]


def test_rows_left_out_are_counted_by_reason():
    frame = rows(
        ("t", "correct", 10, 1.0),
        ("t", "incorrect", 20, None),
        ("t", "task_error", 30, None),
        ("t", "correct", None, 1.0),
        ("t", "no_code", 0, None),
        ("t", "correct", 10, 1.0),
        candidate_id="a b c d e a".split(),
    )
    samples = samples_of(frame)
    reasons = ("repeated", "reference failed", "length unknown", "no reasoning")
    assert samples.left_out == dict.fromkeys(reasons, 1)
    assert (samples.rows, samples.data.height) == (6, 2)


def test_samples_of_several_generators_are_said_to_be_pooled():
    frame = planted_frame(100, 0)
    two = frame.with_columns(generator=pl.when(EVEN).then(pl.lit("a")).otherwise(pl.lit("b")))
    assert any("Samples of 2 generators" in text for text in observe(two).cautions)
    assert not any("generators" in text for text in observe(frame).cautions)


# -- the page --------------------------------------------------------------------------------------


def test_the_page_and_the_figure_repeat_to_the_byte_and_open_nothing_global(tmp_path):
    import matplotlib

    before, made = dict(matplotlib.rcParams), []
    frame = planted_frame(300, 0)
    for name, rows_ in (("first", frame), ("second", frame.sample(fraction=1.0, shuffle=True))):
        write(observe(rows_), tmp_path / name)
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert made[0] == made[1] and len(made[0]) == 2 + 2
    assert dict(matplotlib.rcParams) == before
    told = json.loads(made[0]["analysis.json"])
    assert Observations.model_validate(told) == observe(frame)


def test_the_figure_reads_on_white_and_on_black(tmp_path):
    assert_readable(accuracy_figure(observe(planted_frame(500, 0))), tmp_path)


def test_names_from_the_data_are_text_in_the_page():
    frame = planted_frame(100, 0).with_columns(generator=pl.lit("<script>|[x](y)`\nz"))
    text = page_of(observe(frame))
    assert "<script>" not in text and "&#60;script&#62;&#124;&#91;x&#93;(y)&#96; z" in text
