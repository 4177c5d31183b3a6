"""Scores that can be worked out by hand, KernelBench's own formulas, intervals that cover simulated
truths, and tables that must not be scored."""

import itertools
import math
from fractions import Fraction

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from kernels_eval.records import Verdict
from tasks.benchmark import shown
from tasks.scores import (
    GEOMETRIC_MEAN,
    TRACKS,
    baselines_of,
    excluded_tasks,
    pass_at_k,
    percentile_interval,
    resampled_means,
    scores,
    uncompiled_tasks,
    without_fig_leaves,
)
from tests.support.verdict_rows import BROKEN, CHEAT, WRONG, frame, outcomes, row, scored_row

PS = (0.0, 0.5, 1.0, 1.5, 2.0)
WHOLE = (GEOMETRIC_MEAN, None)


def scored(*rows, **asked):
    return scores(frame(*rows), **{"ps": PS, **asked})


# -- by hand ---------------------------------------------------------------------------------------


def test_scores_by_hand():
    found = scored(
        *outcomes("m", a=(3.0, 0.4, WRONG, WRONG), b=(1.2, WRONG, WRONG, WRONG)), ks=(1, 2)
    )
    for metric, k, value in (
        ("exec", 1, (2 / 4 + 1 / 4) / 2),
        ("exec", 2, ((1 - 1 / 6) + (1 - 3 / 6)) / 2),
        ("fast_0", 1, (2 / 4 + 1 / 4) / 2),
        ("fast_0.5", 1, 1 / 4),
        ("fast_1", 2, 1 / 2),
        ("fast_1.5", 1, 1 / 8),
        (*WHOLE, (3.0 * 0.4 * 1.2) ** (1 / 3)),
    ):
        assert scored_row(found, metric, k)["value"] == pytest.approx(value), metric
    assert found.select("tasks", "samples").unique().rows() == [(2, 8)]


def test_own_kernels_share_stands_beside_the_speedup():
    rows = [
        row("m", "a", 8.0, custom_kernel_time_share=0.02),
        row("m", "a", 2.0, custom_kernel_time_share=0.9),
        row("m", "b", 2.0, custom_kernel_time_share=None),
        row("m", "b", WRONG, custom_kernel_time_share=0.9),
    ]
    found = scored_row(scored(*rows), "kernel_share", None)
    assert found["value"] == pytest.approx(0.46) and found["lower"] is None
    nothing = scored_row(scored(*rows[2:]), "kernel_share", None)
    assert nothing["value"] is None and "share" in nothing["why_not"]
    assert "kernel_share" not in set(scored(*outcomes("m", a=(2.0,)))["metric"])


def test_a_fig_leaf_is_no_custom_kernel_where_a_share_is_asked_for():
    rows = [
        row("m", task, 8.0, custom_kernel_time_share=share)
        for task, share in zip("abcd", (0.0, 0.0999, 0.1, None), strict=True)
    ]
    made = frame(*rows)
    assert without_fig_leaves(made, None) is made
    left = without_fig_leaves(made, 0.1)
    for track, right in (("custom_kernel", 0.25), ("any", 1.0)):
        assert scored_row(scores(left, track=track), "exec")["value"] == right
        assert scored_row(scores(made, track=track), "exec")["value"] == 1.0
    with pytest.raises(UsageError, match="custom_kernel_time_share"):
        without_fig_leaves(frame(*outcomes("m", a=(2.0,))), 0.1)


def test_groups_are_scored_like_whole_benchmarks():
    rows = outcomes("m", a=(2.0, WRONG), b=(WRONG, WRONG), c=(3.0, 3.0))
    rows += outcomes("n", a=(0.5,), c=(WRONG,))
    made = frame(*rows).with_columns(
        level=pl.col("task_id").replace_strict({"a": 1, "b": 1, "c": None})
    )
    found = scores(made, by=("model", "level"))
    for model, level in itertools.product("mn", (1, None)):
        part = made.filter(pl.col("level").eq_missing(level))
        alone = scores(part).filter(model=model)
        own = found.filter(pl.col("model") == model, pl.col("level").eq_missing(level))
        assert own.drop("level").equals(alone)
    first = scored_row(found, "exec", model="n", level=1)
    assert (first["tasks"], first["missing"]) == (1, 1)


def test_the_track_any_takes_right_outputs_without_a_custom_kernel():
    rows = [row("m", "a", CHEAT, outputs_match=match) for match in (True, False, None)]
    rows += [row("m", "a", 2.0), row("m", "a", "forbidden_call", outputs_match=True)]
    own, every = (scored(*rows, track=track) for track in ("custom_kernel", "any"))
    assert scored_row(own, "exec")["value"] == pytest.approx(0.2)
    assert scored_row(every, "exec")["value"] == pytest.approx(0.4)
    assert scored_row(every, "fast_0")["value"] == pytest.approx(0.4)
    # a rejected kernel has no timing: beyond 0 nothing is claimed for it
    assert scored_row(every, "fast_0.5")["value"] == pytest.approx(0.2)
    assert scored_row(every, *WHOLE)["value"] == pytest.approx(2.0)


def test_a_correct_verdict_that_was_only_screened_counts_as_not_correct():
    levels = ("confirm", "screen", None)
    rows = [row("m", "a", 2.0, level=level) for level in levels]
    rows.append(row("m", "a", CHEAT, outputs_match=True, level="screen"))
    found = scored(*rows)
    assert scored_row(found, "exec")["value"] == pytest.approx(0.5)
    assert scored_row(scored(*rows, track="any"), "exec")["value"] == pytest.approx(0.5)
    assert scored_row(found, *WHOLE)["value"] == pytest.approx(2.0)
    assert {*found["samples"]} == {4}


def test_tracks_agree_with_the_verdicts_own_properties():
    timing = {"reference_ms": 0.7, "candidate_ms": 1.0, "speedup": 0.7, "speedup_lower": 0.7}
    timing |= {"speedup_upper": 0.7, "pairs": 1, "calls_per_sample": 1, "clock_bound_ms": 1.0}
    found = [
        {"status": "rejected", "reason": CHEAT, "outputs_match": True},
        {"status": "incorrect", "reason": WRONG, "outputs_match": False},
        {"status": "correct", "reason": "ok", "outputs_match": True, "timing": timing},
        {"status": "timeout", "reason": "run"},
    ]
    verdicts = [
        Verdict(candidate_id=f"c{n}", task_id="a", language="cpp", **each)
        for n, each in enumerate(found)
    ]
    rows = [verdict.model_dump(mode="json") | {"model": "m"} for verdict in verdicts]
    made = pl.DataFrame(rows, infer_schema_length=None)
    own, every = (scores(made, ps=PS, track=track) for track in ("custom_kernel", "any"))
    assert scored_row(every, "exec")["value"] == sum(v.correct_any for v in verdicts) / 4
    assert scored_row(own, "exec")["value"] == sum(v.correct_custom for v in verdicts) / 4
    assert scored_row(own, "fast_0.5")["value"] == sum(v.speedup > 0.5 for v in verdicts) / 4


def test_invalid_speedups_and_verdicts_without_a_status_do_not_count():
    rows = outcomes("m", a=(2.0, math.inf, math.nan, -1.0), b=(4.0,))
    rows.append(row("m", "b", WRONG) | {"status": None})
    found = scored(*rows)
    assert scored_row(found, "fast_2")["value"] == pytest.approx((0 + 1 / 2) / 2)
    assert scored_row(found, "exec")["value"] == pytest.approx((1 + 1 / 2) / 2)
    assert scored_row(found, *WHOLE)["value"] == pytest.approx(8**0.5)


# -- what cannot be said ---------------------------------------------------------------------------


def test_k_beyond_the_samples_of_a_task_is_null_and_says_why():
    one, three = (
        scored_row(
            scored(*outcomes("m", a=[2.0] * 5, b=[WRONG] * 3, c=[2.0]), ks=(1, 3)), "exec", k
        )
        for k in (1, 3)
    )
    assert one["value"] == pytest.approx(2 / 3) and one["why_not"] == ""
    assert (three["value"], three["lower"], three["upper"]) == (None, None, None)
    expected = "pass@3 needs 3 samples of each task; 1 of 3 tasks have fewer (the least: 1)"
    assert three["why_not"] == expected


def test_zeros_are_zero_with_an_interval_that_admits_ignorance():
    found = scored(*outcomes("m", **dict.fromkeys("abcd", [WRONG] * 5)), ks=(1, 5))
    fast = scored_row(found, "fast_1", 5)
    assert (fast["value"], fast["lower"]) == (0.0, 0.0)
    # 20 samples in 4 tasks are not 20 trials: 2 of 8, with t of 7 degrees of freedom
    assert fast["upper"] == pytest.approx(0.25 + 2.3646 * (0.25 * 0.75 / 7) ** 0.5, abs=1e-4)
    mean = scored_row(found, *WHOLE)
    assert (mean["value"], mean["why_not"]) == (None, "no correct, timed sample")


def test_four_tasks_do_not_bound_a_speedup_and_one_barely_bounds_a_share():
    solved = {name: (2.0, 3.0) for name in "abcd"}
    mean = scored_row(scored(*outcomes("m", **solved, e=(WRONG,))), *WHOLE)
    assert mean["value"] == pytest.approx(6**0.5) and mean["lower"] is mean["upper"] is None
    assert mean["why_not"] == (
        "no interval of the speedup: it takes 5 tasks with a correct, timed sample, not 4"
    )
    assert shown.scored(mean) == "2.45x (too few tasks)"
    mean = scored_row(scored(*outcomes("m", **solved, e=(1.0, WRONG))), *WHOLE)
    assert mean["lower"] < mean["value"] < mean["upper"] and mean["why_not"] == ""
    alone = scored_row(scored(row("m", "a", 2.0)), "exec")
    assert alone["value"] == 1.0 and alone["lower"] < 0.25


def test_a_task_is_left_out_where_its_reference_fails_for_most_that_reached_it():
    rows = outcomes("m", a=(2.0, BROKEN, WRONG), bad=(BROKEN, BROKEN, 2.0, "truncated"))
    rows += outcomes("n", a=(2.0, 2.0, 2.0), even=(BROKEN, 2.0, WRONG))
    assert excluded_tasks(frame(*rows)) == ["bad"]
    found = scored(*rows)
    alone, other = (scored_row(found, "exec", model=model) for model in "mn")
    assert (alone["value"], alone["tasks"]) == (pytest.approx(1 / 3), 1)
    assert (alone["samples"], alone["missing"]) == (3, 1)
    assert (other["tasks"], other["samples"], other["missing"]) == (2, 6, 0)


def test_a_model_with_nothing_to_score_has_rows_without_values():
    found = scored(row("m", "bad", BROKEN))
    assert found.height == 1 + len(PS) + 1
    assert found["value"].null_count() == found["lower"].null_count() == found.height
    assert set(found["tasks"]) == {0} and "" not in found["why_not"]


@pytest.mark.parametrize(
    "change, said",
    [
        (lambda f: f.drop("model"), "needs the columns model"),
        (lambda f: f.drop("timing", "reason"), "needs the columns reason, timing"),
        (lambda f: pl.concat([f, f[:1]]), r"1 candidates .* such as 'x' of model 'm' \(2 times\)"),
        (
            lambda f: f.with_columns(device=pl.Series(["A", "B", None])),
            r"2 devices are mixed: A \(1\); B \(1\)",
        ),
    ],
)
def test_a_table_that_would_give_wrong_numbers_is_refused(change, said):
    rows = [row("m", "a", 2.0, candidate_id="x"), *outcomes("m", b=(WRONG, "build_failed"))]
    with pytest.raises(UsageError, match=said) as caught:
        scores(change(frame(*rows)))
    assert caught.value.hint


def test_two_models_may_give_one_answer_and_not_every_verdict_reached_a_device():
    same = {"outcome": 2.0, "candidate_id": "x"}
    found = scores(
        frame(
            *(row(model, "a", **same) for model in "mn"),
            *(row("m", "a", "build_failed", device=device) for device in ("", None)),
        )
    )
    assert scored_row(found, "exec", model="m")["value"] == pytest.approx(1 / 3)


# -- against torch.compile -------------------------------------------------------------------------


def timed(task, eager, compiled):
    record = None if compiled == "not asked" else {"mode": "default", "speedup": compiled}
    return row("m", task, eager) | {"timing": {"speedup": eager, "compiled": record}}


COMPILED = pl.Struct(
    {"speedup": pl.Float64, "compiled": pl.Struct({"mode": pl.String, "speedup": pl.Float64})}
)


def against_both(*more):
    rows = [
        timed("a", 4.0, 2.0),  # faster than both
        timed("b", 2.0, 0.5),  # faster than eager, slower than compiled
        timed("c", 3.0, None),  # its reference does not compile
        row("m", "d", WRONG),
        *more,
    ]
    return pl.DataFrame(rows, schema_overrides={"timing": COMPILED}, infer_schema_length=None)


def test_each_baseline_counts_its_own_speedups():
    made = against_both()
    assert baselines_of(made) == ("eager", "compile") and uncompiled_tasks(made) == ["c"]
    eager, compiled = (scores(made, ps=(0.0, 1.0), baseline=each) for each in baselines_of(made))
    assert scored_row(eager, "fast_1")["value"] == pytest.approx(3 / 4)
    assert scored_row(eager, *WHOLE)["value"] == pytest.approx(24 ** (1 / 3))
    # of a, b and d; c has no such baseline and counts for nobody
    assert scored_row(compiled, "fast_1")["value"] == pytest.approx(1 / 3)
    assert scored_row(compiled, *WHOLE)["value"] == pytest.approx((2.0 * 0.5) ** 0.5)
    assert set(compiled["metric"]) == {"fast_1", GEOMETRIC_MEAN}, "being right has no baseline"


def test_a_model_that_was_not_timed_against_it_has_no_such_numbers():
    other = timed("a", 9.0, "not asked") | {"model": "n"}
    found = scores(against_both(other), baseline="compile")
    assert scored_row(found, "fast_1", model="m")["value"] is not None
    own = found.filter(model="n")
    assert own["value"].null_count() == own.height
    assert set(own["why_not"]) == {"1 of its timed samples were not timed against torch.compile"}


@pytest.mark.parametrize("timing", [[{"speedup": 2.0}], [None]])
def test_a_table_without_such_times_has_one_baseline(timing):
    made = frame(row("m", "a", 2.0)).with_columns(timing=pl.Series(timing))
    assert baselines_of(made) == ("eager",) and uncompiled_tasks(made) == []
    assert scored_row(scores(made), "exec")["value"] == 1.0


# -- KernelBench's published formula, written from arXiv 2502.10517 and nothing of ours ------------


def kernelbench_fast_p_at_k(results, p, k):
    """Its section on repeated sampling: 1/N sum of 1 - C(n - c, k) / C(n, k), c of a task's n
    samples correct and faster than p. With one sample a task, section 3.3's fast_p."""
    total = Fraction(0)
    for samples in results:
        n, c = len(samples), sum(1 for correct, speedup in samples if correct and speedup > p)
        total += 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    return total / len(results)


SAMPLE = st.tuples(
    st.booleans(), st.sampled_from([0.1, 0.5, 0.79, 0.8, 0.81, 1.0, 1.2, 1.5, 2.0, 9.0])
)
RESULTS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(SAMPLE, min_size=n, max_size=n), min_size=1, max_size=5)
)


@given(RESULTS)
@settings(max_examples=30, deadline=None)
def test_scores_are_kernelbenchs_bounded_ordered_and_repeatable(results):
    made = frame(
        *(
            row("m", f"t{i}", speed if right else WRONG)
            for i, samples in enumerate(results)
            for right, speed in samples
        )
    )
    ks = range(1, len(results[0]) + 1)
    for track in TRACKS:
        found = scores(made, ks=ks, ps=PS, track=track, resamples=10)
        assert found.equals(scores(made, ks=ks, ps=PS, track=track, resamples=10))
        for k in ks:
            values = [scored_row(found, f"fast_{p:g}", k)["value"] for p in PS]
            expected = [float(kernelbench_fast_p_at_k(results, p, k)) for p in PS]
            assert values == pytest.approx(expected, abs=1e-12)
            assert values == sorted(values, reverse=True)
        shares = found.filter(pl.col("metric") != GEOMETRIC_MEAN)
        inside = pl.col("value").is_between(pl.col("lower") - 1e-12, pl.col("upper") + 1e-12)
        assert shares.select(
            (inside & (pl.col("lower") >= 0) & (pl.col("upper") <= 1)).all()
        ).item()


CASE = st.integers(1, 9).flatmap(
    lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n))
)


@given(CASE)
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(case):
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(map(any, subsets)) / len(subsets))


@pytest.mark.parametrize("n, c, k", [(3, 4, 1), (3, -1, 1), (3, 2, 0), (3, 2, 4), (0, 0, 1)])
def test_pass_at_k_refuses_what_has_no_unbiased_estimate(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


# -- intervals -------------------------------------------------------------------------------------


def benchmark(rng, tasks, samples, a, b):
    """Verdicts of a benchmark whose difficulty is drawn from Beta(a, b) task by task."""
    passed = rng.random((tasks, samples)) < rng.beta(a, b, tasks)[:, None]
    return pl.DataFrame(
        {
            "task_id": np.repeat([f"t{n:03}" for n in range(tasks)], samples),
            "status": np.where(passed, "correct", "incorrect").ravel(),
        }
    )


def truth(k, a, b):
    """pass@k over all tasks of that kind: 1 - E[(1 - p)^k] = 1 - B(a, b + k) / B(a, b)."""
    log = math.lgamma(b + k) - math.lgamma(b) + math.lgamma(a + b) - math.lgamma(a + b + k)
    return 1 - math.exp(log)


def coverage(tasks, k, a, b, runs):
    """Share of simulated benchmarks whose interval of Exec holds the truth."""
    rng = np.random.default_rng(1)
    made = pl.concat(
        benchmark(rng, tasks, 10, a, b).with_columns(
            run=pl.lit(n), task_id=f"{n} " + pl.col("task_id")
        )
        for n in range(runs)
    ).with_columns(reason=pl.lit(""), outputs_match=False, timing=pl.lit(None))
    found = scores(made, by=("run",), ks=(k,), ps=(), resamples=0).filter(metric="exec")
    return found.select(pl.lit(truth(k, a, b)).is_between("lower", "upper").mean()).item()


@pytest.mark.parametrize("tasks", [4, 10, 40, 100])
@pytest.mark.parametrize("a, b, k", [(0.5, 1.0, 1), (0.5, 1.0, 10), (0.3, 2.0, 1)])
def test_intervals_of_shares_cover_the_truth_for_few_tasks_too(tasks, a, b, k):
    """A plain bootstrap held it in 84 to 87 % of benchmarks of 4 tasks."""
    assert coverage(tasks, k, a, b, runs=400) >= 0.93


def test_the_interval_of_solved_and_failed_tasks_is_agrestis_with_t():
    from scipy.stats import t

    for tasks, solved in ((1, 1), (5, 0), (12, 7), (100, 99)):
        rows = [row("m", f"t{n}", 2.0 if n < solved else WRONG) for n in range(tasks)]
        found = scored_row(scored(*rows, resamples=0), "exec")
        share = (solved + 2) / (tasks + 4)
        margin = t.ppf(0.975, tasks + 3) * math.sqrt(share * (1 - share) / (tasks + 3))
        expected = max(0, share - margin), min(1, share + margin)
        assert (found["lower"], found["upper"]) == pytest.approx(expected)


@pytest.mark.slow
def test_the_bootstrap_covers_the_truth_where_plain_percentiles_do_not():
    """On benchmarks of ten tasks plain percentiles miss the truth twice as often as they may."""
    rng, wanted, plain, expanded = np.random.default_rng(2), truth(1, 0.5, 1.0), 0, 0
    for run in range(400):
        passed = rng.binomial(10, rng.beta(0.5, 1.0, 10))
        means = resampled_means(passed.astype(float), np.full(10, 10), seed=run, resamples=500)
        lower, upper = np.quantile(means, [0.025, 0.975])
        plain += lower <= wanted <= upper
        bounds = percentile_interval(means, 10)
        expanded += bounds.lower <= wanted <= bounds.upper
    assert plain / 400 < 0.925 < expanded / 400 <= 0.975


def test_the_bootstrap_draws_whole_tasks_and_claims_nothing_where_it_knows_nothing():
    """Two tasks, each all right or all wrong: 1000 samples in them do not make it more certain."""
    many = np.array([1000, 1000])
    assert percentile_interval(resampled_means(np.array([0.0, 1000.0]), many), 2) == (0.0, 1.0)
    for totals, counts in (([0.5], [1]), ([0.0, 0.0], [1, 1]), ([0.0, 0.0], [0, 0])):
        means = resampled_means(np.array(totals), np.array(counts))
        assert percentile_interval(means, len(counts)) is None
    with pytest.raises(ValueError, match="no tasks"):
        resampled_means(np.array([]), np.array([], dtype=np.int64))
