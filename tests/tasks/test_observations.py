"""Planted effects come back within their intervals, planted nothing is not claimed, and data that
cannot say is told so."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest
from statsmodels.stats.proportion import proportion_confint

from benchmarks.analysis_scale import PLANTED_ODDS, PLANTED_SD_TOKENS, planted_frame
from kernels_eval.errors import UsageError
from tasks.analysis.difficulty import difficulty
from tasks.analysis.estimates import correlation, longer_if_incorrect
from tasks.analysis.figures import all_figures
from tasks.analysis.findings import speed_verdict, verdict
from tasks.analysis.lengths import samples_of
from tasks.analysis.observations import ObservationConfig, observe
from tasks.analysis.records import Observations, bend
from tasks.analysis.report import as_json, markdown, write
from tasks.analysis.within import demeaned, permutation_p
from tasks.benchmark.metrics import wilson_interval
from tasks.reporting.charts import save

SEEDS = (0, 1, 2, 3, 4)
QUICK = ObservationConfig(max_conditional_tasks=800, permutations=199)


def inside(truth: float, estimate: Any) -> bool:
    return estimate.bounded and estimate.lower <= truth <= estimate.upper


def claims(found: Observations) -> list[tuple[str, str]]:
    """Verdict and note of the paper's two claims."""
    return [(row.verdict, row.note) for row in found.findings[:2]]


def rows(*samples: tuple[str, str, int | None, float | None], **more: Any) -> pl.DataFrame:
    """(task, status, reasoning tokens, speedup) as a frame with the columns that are read."""
    names = ("task_id", "status", "reasoning_tokens", "speedup")
    schema = {
        "task_id": pl.String,
        "status": pl.String,
        "reasoning_tokens": pl.Int64,
        "speedup": pl.Float64,
    }
    return pl.DataFrame(
        [dict(zip(names, sample, strict=True)) for sample in samples], schema=schema
    ).with_columns(**{name: pl.Series(values) for name, values in more.items()})


@pytest.fixture(scope="module")
def planted() -> list[Observations]:
    return [observe(planted_frame(5000, seed), QUICK) for seed in SEEDS]


def test_a_planted_effect_comes_back_within_its_intervals(planted: list[Observations]) -> None:
    truth = PLANTED_ODDS ** (QUICK.unit_tokens / PLANTED_SD_TOKENS)
    covered = [inside(truth, found.everything.within.odds_ratio_per_unit) for found in planted]
    # 95 % intervals of five seeds: fixed data, so this is a fact about them and not a chance
    assert sum(covered) >= 4
    assert all(verdict(found.everything) == "shorter" for found in planted)
    assert all(claims(found)[0] == ("supports", "also within tasks") for found in planted)
    assert all(abs(found.everything.within.sd_tokens - PLANTED_SD_TOKENS) < 50 for found in planted)


def test_a_planted_zero_correlation_with_speedup_is_not_claimed(
    planted: list[Observations],
) -> None:
    assert sum(inside(0.0, found.speedup.spearman) for found in planted) >= 4
    assert sum(inside(0.0, found.speedup.pearson) for found in planted) >= 4
    assert sum(inside(1.0, found.speedup.within) for found in planted) >= 4
    assert all(speed_verdict(found.speedup.spearman) == "none" for found in planted)
    assert all(claims(found)[1] == ("supports", "") for found in planted)
    assert planted[0].finding == (
        "Shorter reasoning is more often correct: supported (also within tasks); speedup is"
        " independent of length: supported.",
    )


def test_no_effect_within_tasks_is_not_claimed_although_pooled_data_show_one() -> None:
    found = [observe(planted_frame(5000, seed, odds=1.0), QUICK) for seed in SEEDS]
    assert all(
        each.everything.pooled.upper < 0.95 for each in found
    )  # hard tasks are long and wrong
    open_ones = [each for each in found if verdict(each.everything) == "open"]
    assert len(open_ones) >= 4  # tests at 5 %, and these seeds are fixed
    assert all(
        claims(each)[0] == ("undecided", "seen over all tasks, not shown within them")
        for each in open_ones
    )


def test_simpsons_paradox_is_decided_within_tasks() -> None:
    """Between tasks longer is better (easy tasks invite long reasoning), within each task shorter
    is."""
    random = np.random.default_rng(7)
    made = []
    for task in range(300):
        ease = random.normal()
        for length in random.normal(scale=1.0, size=8):
            right = random.random() < 1 / (1 + math.exp(-(1.5 * ease - 0.8 * length)))
            made.append(
                (
                    f"t{task}",
                    "correct" if right else "incorrect",
                    int(9000 + 4000 * ease + 1000 * length),
                    None,
                )
            )
    found = observe(rows(*[sample for sample in made if sample[2] > 0]), QUICK)
    assert found.everything.pooled.lower > 1.0
    assert (
        found.everything.within.odds_ratio.upper < 1.0 and found.everything.within.slope.upper < 0.0
    )
    assert inside(math.exp(-0.8), found.everything.within.odds_ratio_per_unit)
    assert claims(found)[0][0] == "supports"
    assert any("opposite sign" in row.note for row in found.findings)


def test_an_effect_against_the_paper_is_said_to_be_one() -> None:
    found = observe(planted_frame(5000, 0, odds=1 / PLANTED_ODDS), QUICK)
    assert claims(found)[0] == ("contradicts", "within tasks")


def test_truncation_alone_is_recognised_as_such() -> None:
    """Nothing but the limit makes samples wrong: with truncated samples there is an effect of
    length, without them none."""
    random = np.random.default_rng(3)
    lengths = random.integers(2000, 12_000, size=4000)
    cut = lengths > 9000
    right = (random.random(4000) < 0.5) & ~cut
    samples = [
        (
            f"t{number // 8}",
            "correct" if good else "no_code" if short else "incorrect",
            min(int(length), 9000),
            None,
        )
        for number, (length, good, short) in enumerate(zip(lengths, right, cut, strict=True))
    ]
    frame = rows(*samples, finish_reason=["length" if short else "stop" for short in cut])
    found = observe(frame, QUICK)
    assert found.truncated == int(cut.sum()) and found.truncated_correct == 0
    assert verdict(found.everything) == "shorter"
    assert found.complete is not None and verdict(found.complete) == "open"
    assert claims(found)[0] == ("supports", "only as long as samples that were cut off count")


def test_a_peak_between_short_and_long_is_not_called_a_slope() -> None:
    samples = [
        (
            f"t{n % 100}",
            "correct" if (3000 < length < 6000) == (n % 10 > 0) else "incorrect",
            length,
            None,
        )
        for n, length in enumerate(np.linspace(100, 9000, 2000).astype(int).tolist())
    ]
    found = observe(rows(*samples), QUICK)
    turn = bend(found.everything.tenths)
    assert turn is not None and turn[0] == 1 and 3000 <= turn[1].from_tokens < 6000
    assert (
        found.everything.past_turn is not None
        and found.everything.past_turn_from == turn[1].from_tokens
    )
    assert any("explores and does not test" in row.note for row in found.findings)
    assert any("not monotone" in row.note for row in found.findings)


def test_bins_are_the_papers_and_their_intervals_wilsons() -> None:
    """Wilson's interval of 8 of 10 is 0.4902 to 0.9433 (worked out by hand from Wilson 1927), and
    ours elsewhere is the same."""
    samples = [("t", "correct" if n < 8 else "incorrect", 300, None) for n in range(10)]
    samples += [
        ("u", "incorrect", tokens, None) for tokens in (255, 256, 511, 512, 20_223, 20_224, 99_000)
    ]
    bins = {each.from_tokens: each for each in observe(rows(*samples), QUICK).everything.bins}
    assert sorted(bins) == [0, 256, 512, 19_968, 20_224]
    assert (bins[256].samples, bins[256].correct, bins[256].tasks, bins[256].to_tokens) == (
        12,
        8,
        2,
        512,
    )
    last = bins[max(bins)]
    assert last.to_tokens is None and last.samples == 2 and last.lower == 0.0
    expected = proportion_confint(8, 12, method="wilson")
    assert (bins[256].lower, bins[256].upper) == pytest.approx(expected)
    assert wilson_interval(8, 12) == pytest.approx(expected)
    alone = observe(rows(*samples[:10]), QUICK).everything.bins
    assert (alone[0].lower, alone[0].upper) == pytest.approx((0.4902, 0.9433), abs=1e-4)


def test_the_permutation_test_agrees_with_every_permutation() -> None:
    """Three tasks of three samples with one correct each: 27 orders, of which those as extreme as
    the observed one can be counted."""
    lengths = np.array([1.0, 2, 4, 1, 3, 9, 2, 5, 6])
    right = np.array([True, False, False, True, False, False, False, True, False])
    codes = np.repeat(np.arange(3), 3)
    x = demeaned(lengths, codes, 3)
    orders = [a + b + c for a in x[:3] for b in x[3:6] for c in x[6:]]
    exact = float(np.mean(np.abs(orders) >= abs(x[right].sum()) - 1e-9))
    assert permutation_p(x, right, codes, 3, shuffles=20_000, seed=0) == pytest.approx(
        exact, abs=0.01
    )


def test_tasks_of_many_samples_are_shuffled_to_the_same_p() -> None:
    random = np.random.default_rng(5)
    x = random.normal(size=20)
    right = np.zeros(20, dtype=bool)
    right[np.argsort(x)[4:14]] = True  # C(20, 10) draws: too many to list
    codes = np.zeros(20, dtype=np.int64)
    p = permutation_p(x - x.mean(), right, codes, 1, shuffles=4000, seed=0)
    draws = np.array([random.permutation(x - x.mean())[:10].sum() for _ in range(4000)])
    assert p == pytest.approx(np.mean(np.abs(draws) >= abs((x - x.mean())[right].sum())), abs=0.04)


def test_the_chance_of_being_longer_by_hand() -> None:
    tokens, correct = np.array([1.0, 2, 3, 3, 5]), np.array([True, True, True, False, False])
    pairs = [(wrong > good) + 0.5 * (wrong == good) for wrong in (3, 5) for good in (1, 2, 3)]
    assert longer_if_incorrect(tokens, correct, np.arange(5), seed=0).value == pytest.approx(
        np.mean(pairs)
    )


def test_intervals_widen_when_samples_repeat_within_tasks() -> None:
    """Four copies of every sample are no more evidence: an interval over tasks knows, one over
    samples would halve."""
    random = np.random.default_rng(2)
    x, y = random.normal(size=(2, 200))
    task = np.arange(200)
    once = correlation(x, y, task, ranks=False, seed=0)
    four = correlation(np.repeat(x, 4), np.repeat(y, 4), np.repeat(task, 4), ranks=False, seed=0)
    assert four.value == pytest.approx(once.value)
    assert four.upper - four.lower == pytest.approx(once.upper - once.lower, rel=1e-6)


# -- what cannot be said ---------------------------------------------------------------------------


@pytest.mark.parametrize("lost", ["task_id", "status", "reasoning_tokens", "speedup"])
def test_a_missing_column_is_one_clear_error(lost: str) -> None:
    frame = planted_frame(50, 0).drop(lost)
    with pytest.raises(UsageError, match=lost):
        observe(frame)
    with pytest.raises(UsageError, match=lost):
        difficulty(frame)


def test_a_column_of_another_kind_is_one_clear_error() -> None:
    with pytest.raises(UsageError, match="something else"):
        observe(planted_frame(50, 0).with_columns(reasoning_tokens=pl.lit("many")))
    with pytest.raises(UsageError, match="without a field speedup"):
        observe(planted_frame(50, 0).drop("speedup").with_columns(timing=pl.lit(1.0)))


def test_nothing_to_analyse_is_one_clear_error() -> None:
    for frame in (
        rows(),
        rows(("t", "correct", None, 1.0), ("t", "task_error", 5, None), ("t", "correct", 0, 1.0)),
    ):
        with pytest.raises(UsageError, match="no sample with a reasoning length"):
            observe(frame)


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("none correct", lambda frame: frame.with_columns(status=pl.lit("incorrect"))),
        ("all correct", lambda frame: frame.with_columns(status=pl.lit("correct"))),
        ("one task", lambda frame: frame.head(5)),
        ("two tasks", lambda frame: frame.head(10)),
        ("one row", lambda frame: frame.head(1)),
        ("one sample a task", lambda frame: frame.filter(pl.col("sample_index") == 0)),
        ("NaN speedups", lambda frame: frame.with_columns(speedup=pl.lit(math.nan))),
        (
            "infinite and negative speedups",
            lambda frame: frame.with_columns(
                speedup=pl.when(pl.int_range(pl.len()) % 2 == 0).then(math.inf).otherwise(-1)
            ),
        ),
        ("equal speedups", lambda frame: frame.with_columns(speedup=pl.lit(2.0))),
        ("equal lengths", lambda frame: frame.with_columns(reasoning_tokens=pl.lit(100))),
        ("all truncated", lambda frame: frame.with_columns(finish_reason=pl.lit("length"))),
        (
            "perfectly separated",
            lambda frame: frame.with_columns(
                status=pl.when(pl.col("reasoning_tokens") < 9000)
                .then(pl.lit("correct"))
                .otherwise(pl.lit("incorrect"))
            ),
        ),
        (
            "null names",
            lambda frame: frame.with_columns(
                generator=pl.lit(None, pl.String),
                finish_reason=pl.lit(None, pl.String),
                sample_index=pl.lit(None, pl.Int64),
            ),
        ),
        ("null timing", lambda frame: frame.drop("speedup").with_columns(timing=pl.lit(None))),
        (
            "only what is required",
            lambda frame: frame.select("task_id", "status", "reasoning_tokens", "speedup"),
        ),
    ],
)
def test_whatever_cannot_be_said_is_said_so_and_never_a_crash(name: str, change: Any) -> None:
    frame = change(planted_frame(200, 1))
    found, divided = observe(frame, QUICK), difficulty(frame)
    text = markdown(found, divided, all_figures(found, divided))
    assert divided.finding and found.finding[0].startswith("Shorter reasoning is more often")
    assert "nan" not in text.lower().split()
    json.dumps(as_json(found, divided), allow_nan=False)
    if name in (
        "none correct",
        "all correct",
        "one task",
        "one row",
        "one sample a task",
        "equal lengths",
    ):
        assert claims(found)[0][0] == "undecided" and verdict(found.everything) == "unsayable"
        assert found.everything.within.odds_ratio.why_not in text
    if name in ("none correct", "NaN speedups", "infinite and negative speedups", "null timing"):
        assert found.speedup.samples == 0 and found.speedup.pearson.value is None
        assert "n/a: 0 correct samples have a speedup" in text
    if name == "equal speedups":
        assert (
            found.speedup.pearson.value is None and "does not vary" in found.speedup.pearson.why_not
        )
    if name == "perfectly separated":
        # the regressions have no finite answer; the linear model and the permutations still do
        assert (
            found.everything.within.odds_ratio.value is None
            and verdict(found.everything) == "shorter"
        )
    if name == "only what is required":
        assert found.truncated is None and "No column states which samples" in found.cautions[0]


def test_rows_left_out_are_counted_by_reason() -> None:
    frame = rows(
        ("t", "correct", 10, 1.0),
        ("t", "incorrect", 20, None),
        ("t", "task_error", 30, None),
        ("t", "correct", None, 1.0),
        ("t", "no_code", 0, None),
        ("t", "correct", 10, 1.0),
        candidate_id=["a", "b", "c", "d", "e", "a"],
    )
    samples = samples_of(frame)
    assert samples.left_out == {
        "repeated": 1,
        "reference failed": 1,
        "length unknown": 1,
        "no reasoning": 1,
    }
    assert (samples.rows, samples.data.height) == (6, 2)


# -- the page --------------------------------------------------------------------------------------


def test_the_page_and_the_figures_repeat_to_the_byte_and_open_nothing_global(
    tmp_path: Path,
) -> None:
    import matplotlib

    frame = planted_frame(500, 0)
    before = dict(matplotlib.rcParams)
    for name in ("first", "second"):
        write(observe(frame, QUICK), difficulty(frame), tmp_path / name)
    files = sorted(path.name for path in (tmp_path / "first").iterdir())
    assert len(files) == 2 + 2 * 4
    for name in files:
        assert (tmp_path / "first" / name).read_bytes() == (
            tmp_path / "second" / name
        ).read_bytes(), name
    assert dict(matplotlib.rcParams) == before


def test_figures_read_on_white_and_on_black(tmp_path: Path) -> None:
    from matplotlib.image import imread

    frame = planted_frame(500, 0)
    for drawn in all_figures(observe(frame, QUICK), difficulty(frame)):
        vector, raster = save(drawn, tmp_path)
        assert "<dc:description>" in vector.read_text(encoding="utf-8") and len(drawn.alt) > 60
        pixels = imread(raster)
        assert pixels[0, 0, 3] == 0  # nothing behind it
        solid = pixels[pixels[..., 3] > 0.95][:, :3]
        linear = np.where(solid <= 0.04045, solid / 12.92, ((solid + 0.055) / 1.055) ** 2.4) @ [
            0.2126,
            0.7152,
            0.0722,
        ]
        # WCAG contrast against both grounds: 3 : 1 is asked of graphics
        assert (1.05 / (linear + 0.05)).min() > 3 and ((linear + 0.05) / (0.0056 + 0.05)).min() > 3


def test_names_from_the_data_are_text_in_the_page() -> None:
    frame = planted_frame(100, 0).with_columns(generator=pl.lit("<script>|[x](y)`\nz"))
    text = markdown(observe(frame, QUICK), difficulty(frame))
    assert "<script>" not in text and "&#60;script&#62;&#124;&#91;x&#93;(y)&#96; z" in text


def test_the_json_holds_every_figure(planted: list[Observations]) -> None:
    found = planted[0]
    data = json.loads(
        json.dumps(as_json(found, difficulty(planted_frame(500, 0))), allow_nan=False)
    )
    within = data["observations"]["everything"]["within"]
    assert within["odds_ratio"]["value"] == found.everything.within.odds_ratio.value
    assert {"value", "lower", "upper", "p", "n", "tasks", "method"} <= within["odds_ratio"].keys()
    assert Observations.model_validate(data["observations"]) == found


def test_order_of_rows_does_not_matter() -> None:
    frame = planted_frame(300, 0)
    shuffled = frame.sample(fraction=1.0, shuffle=True, seed=1)
    first, second = observe(frame, QUICK), observe(shuffled, QUICK)
    assert first == second
    assert difficulty(frame) == difficulty(shuffled)


def test_speeds_that_compare_within_tasks_only_are_not_pooled() -> None:
    random = np.random.default_rng(4)
    samples = []
    for task in range(80):
        for deviation in random.normal(size=5):
            # within a task longer is faster; between tasks speeds are in units of their own
            samples.append(
                (
                    f"t{task}",
                    "correct",
                    int(8000 + 1000 * deviation),
                    math.exp(random.normal(scale=0.1) + 0.2 * deviation + task),
                )
            )
    found = observe(rows(*samples), QUICK.model_copy(update={"speedup_within_tasks_only": True}))
    assert found.speedup.pearson.value is None and found.speedup.spearman.value is None
    assert inside(math.exp(0.2 * found.speedup.sd_tokens / 1000), found.speedup.within)
    assert found.speedup.pearson.why_not.startswith("speeds of different tasks do not compare")
    assert claims(found)[1] == ("undecided", "over all tasks; within tasks there is an effect")
