"""Planted effects come back within their intervals, planted nothing is not claimed, and data that
cannot say is told so."""

import json
import math

import numpy as np
import polars as pl
import pytest
from statsmodels.stats.contingency_tables import StratifiedTable
from statsmodels.stats.proportion import proportion_confint

from benchmarks.analysis_scale import PLANTED_ODDS, PLANTED_SD_TOKENS, planted_frame
from kernels_eval.errors import UsageError
from tasks.analysis.difficulty import difficulty
from tasks.analysis.estimates import Basis, correlation, longer_if_incorrect, mantel_haenszel
from tasks.analysis.figures import all_figures
from tasks.analysis.lengths import samples_of
from tasks.analysis.observations import ObservationConfig, observe
from tasks.analysis.records import Observations, bend
from tasks.analysis.report import as_json, markdown, write
from tasks.analysis.verdict import (
    CONTRADICTED,
    NOT_ROBUST,
    SUPPORTED,
    Check,
    judge,
    negligible,
    shorter,
)
from tasks.analysis.within import demeaned, permutation_p, within_task
from tasks.benchmark.signs import wilson_interval
from tasks.reporting.findings import Estimate
from tests.support.drawings import assert_readable

SEEDS = (0, 1, 2, 3, 4)
QUICK = ObservationConfig(max_conditional_tasks=300, permutations=199)
SCHEMA = {
    "task_id": pl.String,
    "status": pl.String,
    "reasoning_tokens": pl.Int64,
    "speedup": pl.Float64,
}


def inside(truth, estimate):
    return estimate.bounded and estimate.lower <= truth <= estimate.upper


def claim(found, number=0):
    """The verdict on one of the paper's two claims."""
    return found.findings[number].verdict


def sides(found, name="everything"):
    """What the three statistics within tasks say of "shorter is more often correct"."""
    return [check.side for check in shorter(getattr(found, name).within)]


def certain(found, name="everything"):
    return all(check.certain for check in shorter(getattr(found, name).within))


def notes(found):
    return " ".join(row.note for row in found.findings)


def rows(*samples, **more):
    """(task, status, reasoning tokens, speedup) as a frame with the columns that are read."""
    frame = pl.DataFrame(list(samples), schema=SCHEMA, orient="row")
    return frame.with_columns(**{name: pl.Series(values) for name, values in more.items()})


def outcome(right):
    return "correct" if right else "incorrect"


@pytest.fixture(scope="module")
def planted():
    return [observe(planted_frame(5000, seed), QUICK) for seed in SEEDS]


def test_a_planted_effect_comes_back_within_its_intervals(planted):
    truth = PLANTED_ODDS ** (QUICK.unit_tokens / PLANTED_SD_TOKENS)
    inner = [found.everything.within for found in planted]
    # 95 % intervals of five seeds: fixed data, so this is a fact about them and not a chance
    assert sum(inside(truth, within.odds_ratio_per_unit) for within in inner) >= 4
    assert all(sides(found) == [1, 1, 1] and certain(found) for found in planted)
    assert {claim(found) for found in planted} == {SUPPORTED}
    assert all(abs(within.sd_tokens - PLANTED_SD_TOKENS) < 50 for within in inner)


def test_a_planted_zero_correlation_with_speedup_is_not_claimed(planted):
    for name, truth in {"spearman": 0.0, "pearson": 0.0, "within": 1.0}.items():
        assert sum(inside(truth, getattr(found.speedup, name)) for found in planted) >= 4
    assert all(negligible(found.speedup.spearman) == (1, True) for found in planted)
    # within tasks an interval of these sizes may reach beyond 0.1
    assert [claim(found, 1) for found in planted].count(SUPPORTED) >= 4
    said = planted[0].finding[0]
    assert said.startswith("Shorter reasoning is more often correct: supported (of ")
    assert "; speedup is independent of length: " in said


FAST = QUICK.model_copy(update={"max_conditional_tasks": 100})


@pytest.mark.parametrize(
    "odds, verdict", [(0.5, SUPPORTED), (1.0, NOT_ROBUST), (2.0, CONTRADICTED)]
)
def test_the_rule_is_right_at_sensible_rates(odds, verdict):
    """A planted effect is found in 8 of 8 seeds, none in one of them at most: a test at 5 %."""
    said = []
    for seed in range(8):
        data = samples_of(planted_frame(500, seed, odds=odds)).data
        arrays = (data[name].to_numpy() for name in ("group", "tokens", "correct"))
        said.append(judge(shorter(within_task(*arrays, FAST, permute=False)))[0])
    assert said.count(verdict) >= (7 if odds == 1.0 else 8)


def line(value, reach=0.01):
    return Estimate(value=value, lower=value - reach, upper=value + reach)


def test_the_rule_by_hand():
    """Main numbers must be certain, all must agree, and nothing known is not robust."""
    none = Check(0, False)
    for side, said in ((1, SUPPORTED), (-1, CONTRADICTED)):
        sure, unsure, other = Check(side, True), Check(side, False), Check(-side, False)
        assert judge([sure])[0] == judge([sure], [unsure])[0] == said
        for main, others in (([unsure], [sure]), ([sure], [other]), ([sure], [none]), ([none], [])):
            assert judge(main, others)[0] == NOT_ROBUST
        assert judge([], [sure])[0] == NOT_ROBUST
    known = {0.0: (1, True), 0.095: (1, False), 0.105: (-1, False), 0.2: (-1, True)}
    for value, check in known.items():
        assert negligible(line(value)) == negligible(line(-value)) == check


def leveled(effects, *, tasks=40, samples=8, seed=0, longest=()):
    """Samples of KernelBench-like tasks: log odds of being correct per 1,000 tokens, by level."""
    random, made = np.random.default_rng(seed), []
    for level, effect in effects.items():
        for task in range(tasks):
            for length in random.normal(5.0, 1.5, size=samples).clip(0.3):
                right = random.random() < 1 / (1 + math.exp(-effect * (length - 5.0)))
                tokens = min(int(1000 * length), *(longest or (10**6,)), 10**6)
                made.append((f"kernelbench/L{level}/{task}", outcome(right), tokens, None))
    return rows(*made)


def test_levels_that_disagree_are_not_robust_and_are_listed():
    same, opposed = (observe(leveled({1: -1.0, 2: other}), FAST) for other in (-1.0, 0.6))
    assert (claim(same), claim(opposed)) == (SUPPORTED, NOT_ROBUST)
    assert [row.name for row in opposed.sensitivity] == [
        "all samples",
        "without samples below 2,000 tokens",
        "only samples above 4,000 tokens",
        "level 1 alone",
        "level 2 alone",
    ]
    assert [stratum.name for stratum in opposed.strata] == ["level 1", "level 2"]
    # a level too small to have a say is printed, and has none
    few = leveled({2: 0.6}, tasks=20).with_columns(pl.col("task_id").str.replace("L2", "L3"))
    found = observe(pl.concat([leveled({1: -1.0, 2: -1.0}), few]), FAST)
    assert claim(found) == SUPPORTED and found.sensitivity[-1].within.rank_odds_ratio.value > 1
    assert "not counted in the verdict" in notes(found)


def test_a_lever_of_a_few_long_samples_moves_the_linear_statistic_alone():
    """In every tenth task one correct sample is ten times as long; ranks and medians see no more
    than one sample."""
    random, made = np.random.default_rng(1), []
    for task in range(400):
        for number, length in enumerate(random.normal(5000, 300, size=6)):
            right, lever = number % 2 == 0, number == 0 and task % 10 == 0
            made.append((f"t{task}", outcome(right), int(length * (10 if lever else 1)), None))
    found = observe(rows(*made), FAST)
    within = found.everything.within
    assert within.slope.lower > 0 and within.permutation_p < 0.05
    assert within.rank_odds_ratio.lower < 1 or within.median_odds_ratio.lower < 1
    assert claim(found) == NOT_ROBUST


def test_the_longest_samples_of_levels_are_compared():
    even, uneven = leveled({1: -1.0, 2: -1.0}), leveled({1: -1.0})
    uneven = pl.concat([uneven, leveled({2: -1.0}, longest=(6000,))])
    assert not [text for text in observe(even, FAST).cautions if "longest samples" in text]
    (said,) = (text for text in observe(uneven, FAST).cautions if "longest samples" in text)
    assert "6,000 tokens in level 2" in said
    limits = planted_frame(600, 0).with_columns(max_tokens=pl.int_range(pl.len()) % 2 * 1000 + 9000)
    found = observe(limits, FAST)
    assert [each.name for each in found.strata] == ["limit 10000 tokens", "limit 9000 tokens"]
    assert found.everything.within.tasks_in_all == 240  # samples of two limits are not compared


def test_mantel_haenszel_by_hand():
    """Two tasks: above the median 3 of 4 and 1 of 2 correct, below 1 of 4 and 1 of 2. Odds ratio
    (9/8 + 1/4) / (1/8 + 1/4) = 11/3; the interval, Robins, Breslow and Greenland's, is
    statsmodels'."""
    high, codes = np.array([1] * 4 + [-1] * 4 + [1, 1, -1, -1, 0]), np.array([0] * 8 + [1] * 5)
    y = np.array([1, 1, 1, 0, 1, 0, 0, 0, 1, 0, 1, 0, 1], dtype=bool)
    found = mantel_haenszel(high, y, codes, Basis(13, 2))
    theirs = StratifiedTable([[[3, 1], [1, 3]], [[1, 1], [1, 1]]])
    bounds = theirs.oddsratio_pooled_confint()
    assert theirs.oddsratio_pooled == pytest.approx(11 / 3)
    assert (found.value, found.lower, found.upper) == pytest.approx((11 / 3, *bounds))
    assert (found.n, found.tasks) == (12, 2)
    # all tables one way: an answer with an interval, drawn towards 1
    separated = mantel_haenszel(high, high > 0, codes, Basis(13, 2))
    assert separated.value > 1 and separated.bounded and separated.method.endswith("0.5 added")


def test_simpsons_paradox_is_decided_within_tasks():
    """Between tasks longer is better (easy tasks invite long reasoning), within each task shorter
    is."""
    random, made = np.random.default_rng(7), []
    for task in range(300):
        ease = random.normal()
        for length in random.normal(scale=1.0, size=8):
            right = random.random() < 1 / (1 + math.exp(-(1.5 * ease - 0.8 * length)))
            made.append((f"t{task}", outcome(right), int(9000 + 4000 * ease + 1000 * length), None))
    found = observe(rows(*[each for each in made if each[2] > 0]), QUICK)
    within = found.everything.within
    assert found.everything.pooled.lower > 1.0
    assert within.odds_ratio.upper < 1.0 and within.slope.upper < 0.0
    assert inside(math.exp(-0.8), within.odds_ratio_per_unit)
    assert claim(found) == SUPPORTED and "opposite sign" in notes(found)


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
    found = observe(rows(*samples, finish_reason=np.where(cut, "length", "stop")), QUICK)
    assert found.truncated == int(cut.sum()) and found.truncated_correct == 0
    assert sides(found) == [1, 1, 1] and certain(found) and not certain(found, "complete")
    assert claim(found) == NOT_ROBUST


def test_a_peak_between_short_and_long_is_not_called_a_slope():
    samples = [
        (f"t{n % 100}", outcome((3000 < length < 6000) == (n % 10 > 0)), length, None)
        for n, length in enumerate(np.linspace(100, 9000, 2000).astype(int).tolist())
    ]
    found = observe(rows(*samples), QUICK)
    turn = bend(found.everything.tenths)
    assert turn[0] == 1
    assert 3000 <= turn[1].from_tokens < 6000
    assert "not monotone" in notes(found) and claim(found) == NOT_ROBUST


def test_bins_are_the_papers_and_their_intervals_wilsons():
    """Wilson's interval of 8 of 10 is 0.4902 to 0.9433 (worked out by hand from Wilson 1927), and
    elsewhere it is statsmodels'."""
    samples = [("t", outcome(n < 8), 300, None) for n in range(10)]
    alone = observe(rows(*samples), QUICK).everything.bins
    assert (alone[0].lower, alone[0].upper) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    lengths = (255, 256, 511, 512, 20_223, 20_224, 99_000)
    samples += [("u", "incorrect", tokens, None) for tokens in lengths]
    bins = {each.from_tokens: each for each in observe(rows(*samples), QUICK).everything.bins}
    assert sorted(bins) == [0, 256, 512, 19_968, 20_224]
    second, last = bins[256], bins[20_224]
    assert (second.samples, second.correct, second.tasks, second.to_tokens) == (12, 8, 2, 512)
    assert (last.to_tokens, last.samples, last.lower) == (None, 2, 0.0)
    expected = proportion_confint(8, 12, method="wilson")
    for bounds in ((second.lower, second.upper), wilson_interval(8, 12)):
        assert bounds == pytest.approx(expected)


def test_the_permutation_test_agrees_with_every_permutation():
    """Three tasks of three samples with one correct each: 27 orders, of which those as extreme as
    the observed one can be counted."""
    lengths, codes = np.array([1.0, 2, 4, 1, 3, 9, 2, 5, 6]), np.repeat(np.arange(3), 3)
    right = np.isin(np.arange(9), (0, 3, 7))
    x = demeaned(lengths, codes, 3)
    orders = [a + b + c for a in x[:3] for b in x[3:6] for c in x[6:]]
    exact = float(np.mean(np.abs(orders) >= abs(x[right].sum()) - 1e-9))
    found = permutation_p(x, right, codes, 3, shuffles=20_000, seed=0)
    assert found == pytest.approx(exact, abs=0.01)


def test_tasks_of_many_samples_are_shuffled_to_the_same_p():
    random = np.random.default_rng(5)
    x = random.normal(size=20)
    x -= x.mean()
    right = np.zeros(20, dtype=bool)
    right[np.argsort(x)[4:14]] = True  # C(20, 10) draws: too many to list
    p = permutation_p(x, right, np.zeros(20, dtype=np.int64), 1, shuffles=4000, seed=0)
    draws = np.array([random.permutation(x)[:10].sum() for _ in range(4000)])
    assert p == pytest.approx(np.mean(np.abs(draws) >= abs(x[right].sum())), abs=0.04)


def test_the_chance_of_being_longer_by_hand():
    tokens, correct = np.array([1.0, 2, 3, 3, 5]), np.array([True, True, True, False, False])
    pairs = [(wrong > good) + 0.5 * (wrong == good) for wrong in (3, 5) for good in (1, 2, 3)]
    found = longer_if_incorrect(tokens, correct, np.arange(5), seed=0)
    assert found.value == pytest.approx(np.mean(pairs))


def test_intervals_widen_when_samples_repeat_within_tasks():
    """Four copies of every sample are no more evidence: an interval over tasks knows, one over
    samples would halve."""
    x, y = np.random.default_rng(2).normal(size=(2, 200))
    arrays = (x, y, np.arange(200))
    once, four = (
        correlation(*(np.repeat(each, copies) for each in arrays), ranks=False, seed=0)
        for copies in (1, 4)
    )
    assert four.value == pytest.approx(once.value)
    assert four.upper - four.lower == pytest.approx(once.upper - once.lower, rel=1e-6)


# -- what cannot be said ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "change, said",
    [
        *(
            (lambda frame, lost=lost: frame.drop(lost), lost)
            for lost in "task_id status reasoning_tokens speedup".split()
        ),
        (lambda frame: frame.with_columns(reasoning_tokens=pl.lit("many")), "something else"),
        (
            lambda frame: frame.drop("speedup").with_columns(timing=pl.lit(1.0)),
            "without a field speedup",
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
    frame = change(planted_frame(50, 0))
    for analyse in (observe, difficulty):
        with pytest.raises(UsageError, match=said):
            analyse(frame)


LONG, EVEN = pl.col("reasoning_tokens") >= 9000, pl.int_range(pl.len()) % 2 == 0
UNSAYABLE, UNTIMED = "length cannot be judged", "speed cannot be judged"
CASES = {
    "none correct": ({"status": pl.lit("incorrect")}, UNSAYABLE + UNTIMED),
    "all correct": ({"status": pl.lit("correct")}, UNSAYABLE),
    "one task": ({"keep": pl.int_range(pl.len()) < 5}, UNSAYABLE),
    "two tasks": ({"keep": pl.int_range(pl.len()) < 10}, ""),
    "one row": ({"keep": pl.int_range(pl.len()) < 1}, UNSAYABLE),
    "one sample a task": ({"keep": pl.col("sample_index") == 0}, UNSAYABLE),
    "NaN speedups": ({"speedup": pl.lit(math.nan)}, UNTIMED),
    "infinite and negative": ({"speedup": pl.when(EVEN).then(math.inf).otherwise(-1)}, UNTIMED),
    "equal speedups": ({"speedup": pl.lit(2.0)}, "equal speedups"),
    "equal lengths": ({"reasoning_tokens": pl.lit(100)}, UNSAYABLE),
    "all truncated": ({"finish_reason": pl.lit("length")}, ""),
    "perfectly separated": (
        {"status": pl.when(LONG).then(pl.lit("incorrect")).otherwise(pl.lit("correct"))},
        "separated",
    ),
    "null names": (dict.fromkeys(("generator", "finish_reason", "sample_index"), pl.lit(None)), ""),
    "null timing": ({"speedup": None, "timing": pl.lit(None)}, UNTIMED),
    "only what is required": (
        dict.fromkeys(("candidate_id", "reason", "finish_reason", "generator", "sample_index")),
        "required",
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_whatever_cannot_be_said_is_said_so_and_never_a_crash(name):
    changes, kind = CASES[name]
    frame = planted_frame(200, 1).with_columns(
        **{name: value for name, value in changes.items() if value is not None}
    )
    frame = frame.drop(column for column, value in changes.items() if value is None)
    if "keep" in frame.columns:
        frame = frame.filter("keep").drop("keep")
    found, divided = observe(frame, QUICK), difficulty(frame)
    text = markdown(found, divided, all_figures(found, divided))
    within, speed = found.everything.within, found.speedup
    assert divided.finding and found.finding[0].startswith("Shorter reasoning is more often")
    assert "nan" not in text.lower().split()
    json.dumps(as_json(found, divided), allow_nan=False)
    if UNSAYABLE in kind:
        assert claim(found) == NOT_ROBUST and sides(found) == [0, 0, 0]
        assert within.odds_ratio.why_not in text
    if UNTIMED in kind:
        assert speed.samples == 0 and speed.pearson.value is None
        assert "n/a: 0 correct samples have a speedup" in text
    if kind == "equal speedups":
        assert speed.pearson.value is None and "does not vary" in speed.pearson.why_not
    if kind == "separated":
        # the regressions have no finite answer; the linear models on the same exposures do
        assert within.odds_ratio.value is None and sides(found) == [1, 1, 1] and certain(found)
    if kind == "required":
        assert found.truncated is None and "No column states which samples" in found.cautions[0]


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


# -- the page --------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_page_and_the_figures_repeat_to_the_byte_and_open_nothing_global(tmp_path):
    import matplotlib

    frame, before = planted_frame(500, 0), dict(matplotlib.rcParams)
    made = []
    for name in ("first", "second"):
        write(observe(frame, QUICK), difficulty(frame), tmp_path / name)
        made.append({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()})
    assert made[0] == made[1] and len(made[0]) == 2 + 2 * 4
    assert dict(matplotlib.rcParams) == before


@pytest.mark.slow
def test_figures_read_on_white_and_on_black(tmp_path):
    frame = planted_frame(500, 0)
    for drawn in all_figures(observe(frame, QUICK), difficulty(frame)):
        assert_readable(drawn, tmp_path)


def test_names_from_the_data_are_text_in_the_page():
    frame = planted_frame(100, 0).with_columns(generator=pl.lit("<script>|[x](y)`\nz"))
    text = markdown(observe(frame, QUICK), difficulty(frame))
    assert "<script>" not in text and "&#60;script&#62;&#124;&#91;x&#93;(y)&#96; z" in text


def test_the_json_holds_every_figure(planted):
    found, divided = planted[0], difficulty(planted_frame(500, 0))
    data = json.loads(json.dumps(as_json(found, divided), allow_nan=False))
    assert Observations.model_validate(data["observations"]) == found


def test_order_of_rows_does_not_matter():
    frame = planted_frame(300, 0)
    shuffled = frame.sample(fraction=1.0, shuffle=True, seed=1)
    assert observe(frame, QUICK) == observe(shuffled, QUICK)
    assert difficulty(frame) == difficulty(shuffled)


def test_speeds_that_compare_within_tasks_only_are_not_pooled():
    random, samples = np.random.default_rng(4), []
    for task in range(80):
        for deviation in random.normal(size=5):
            # within a task longer is faster; between tasks speeds are in units of their own
            speedup = math.exp(random.normal(scale=0.1) + 0.2 * deviation + task)
            samples.append((f"t{task}", "correct", int(8000 + 1000 * deviation), speedup))
    found = observe(rows(*samples), QUICK.model_copy(update={"speedup_within_tasks_only": True}))
    speed = found.speedup
    assert speed.pearson.value is None and speed.spearman.value is None
    assert speed.pearson.why_not.startswith("speeds of different tasks do not compare")
    assert inside(math.exp(0.2 * speed.sd_tokens / 1000), speed.within)
    assert speed.within_ranks.lower > 0.3 and claim(found, 1) == NOT_ROBUST
