"""Intervals and tests against known answers: simulated benchmarks whose truth is known, identities,
and scipy on the same data."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from tasks.benchmark.metrics import (
    bootstrap_interval,
    expanded_tail,
    hierarchical_interval,
    mean,
    pass_at_k,
    rate_interval,
    sign_flip_p,
)

Counts = NDArray[np.int64]


def benchmark(rng, tasks, samples, a, b):
    """How many of `samples` samples passed on each task, whose difficulty is drawn from Beta(a,
    b)."""
    return rng.binomial(samples, rng.beta(a, b, tasks))


def truth(k, a, b):
    """pass@k over all tasks of that kind: 1 - E[(1 - p)^k] = 1 - B(a, b + k) / B(a, b)."""
    return 1 - math.exp(
        math.lgamma(b + k) - math.lgamma(b) + math.lgamma(a + b) - math.lgamma(a + b + k)
    )


def coverage(kind, *, tasks, samples, k, a, b, runs, resamples):
    rng, wanted, hits = np.random.default_rng(1), truth(k, a, b), 0
    for run in range(runs):
        passed = benchmark(rng, tasks, samples, a, b)
        if kind == "rates":
            interval = rate_interval([pass_at_k(samples, int(c), k) for c in passed])
        elif kind == "tasks":
            interval = bootstrap_interval(
                [pass_at_k(samples, int(c), k) for c in passed], mean, seed=run, resamples=resamples
            )
        else:
            interval = hierarchical_interval(
                passed, [samples] * tasks, k, seed=run, resamples=resamples
            )
        hits += interval.lower <= wanted <= interval.upper
    return hits / runs


KINDS = [
    pytest.param("tasks", 100, 10, 1, 0.5, 1.0, id="tasks: a KernelBench level, pass@1"),
    pytest.param("tasks", 100, 10, 10, 0.3, 2.0, id="tasks: a KernelBench level, pass@10"),
    pytest.param("tasks", 20, 10, 1, 0.5, 1.0, id="tasks: few tasks"),
    pytest.param("both", 100, 10, 1, 0.5, 1.0, id="hierarchical: a KernelBench level, pass@1"),
    pytest.param("both", 100, 10, 5, 0.5, 1.0, id="hierarchical: a KernelBench level, pass@5"),
]


@pytest.mark.slow
@pytest.mark.parametrize("kind, tasks, samples, k, a, b", KINDS)
def test_intervals_cover_the_truth_in_93_to_97_of_100_benchmarks(kind, tasks, samples, k, a, b):
    assert (
        0.93
        <= coverage(kind, tasks=tasks, samples=samples, k=k, a=a, b=b, runs=2000, resamples=1000)
        <= 0.97
    )


@pytest.mark.parametrize("kind", ["tasks", "both"])
def test_coverage_in_short(kind):
    """300 runs have a standard deviation of 1.3 points: an interval that is a fifth too narrow (88
    %) or half too wide (99.7 %) fails."""
    assert (
        0.91
        <= coverage(kind, tasks=40, samples=8, k=1, a=0.5, b=1.0, runs=300, resamples=300)
        <= 0.985
    )


@pytest.mark.parametrize("tasks", [4, 10, 40, 100])
@pytest.mark.parametrize("a, b, k", [(0.5, 1.0, 1), (0.5, 1.0, 10), (0.3, 2.0, 1)])
def test_intervals_of_rates_cover_the_truth_for_few_tasks_too(tasks, a, b, k):
    """The bootstrap held it in 84 to 87 % of benchmarks of 4 tasks."""
    found = coverage("rates", tasks=tasks, samples=10, k=k, a=a, b=b, runs=400, resamples=1)
    assert found >= 0.93


def test_the_interval_of_a_rate_does_not_jump_where_tasks_begin_to_differ():
    alike, nearly = rate_interval([0.6] * 4), rate_interval([0.6, 0.6, 0.6, 0.8])
    assert alike == pytest.approx((0.2308, 0.8692), abs=1e-4)
    assert nearly == pytest.approx((0.2473, 0.9027), abs=1e-4)
    for start in ([1.0] * 9, [0.0] * 9, [0.5] * 9, [0.1, 0.9] * 4):
        steps = [rate_interval([*start, last]) for last in np.linspace(0, 1, 401)]
        assert max(np.abs(np.diff(steps, axis=0)).max(axis=0)) < 0.005
        for last, (lower, upper) in zip(np.linspace(0, 1, 401), steps, strict=True):
            assert lower <= np.mean([*start, last]) <= upper


def test_the_interval_of_solved_and_failed_tasks_is_agrestis_with_t():
    from scipy.stats import t

    for tasks, solved in ((1, 1), (5, 0), (12, 7), (100, 99)):
        lower, upper = rate_interval([1.0] * solved + [0.0] * (tasks - solved))
        share = (solved + 2) / (tasks + 4)
        margin = t.ppf(0.975, tasks + 3) * math.sqrt(share * (1 - share) / (tasks + 3))
        assert (lower, upper) == pytest.approx((max(0, share - margin), min(1, share + margin)))
    for wrong in ([], [1.1], [-0.1], [math.nan]):
        with pytest.raises(ValueError):
            rate_interval(wrong)


def test_plain_percentiles_of_ten_tasks_would_not_do():
    """The reason for expanded percentiles, on the same benchmarks: these miss the truth twice as
    often as they may."""
    rng, wanted, plain, expanded = np.random.default_rng(2), truth(1, 0.5, 1.0), 0, 0
    for run in range(400):
        rates = benchmark(rng, 10, 10, 0.5, 1.0) / 10
        draws = rates[np.random.default_rng(run).integers(0, 10, size=(500, 10))].mean(axis=1)
        lower, upper = np.quantile(draws, [0.025, 0.975])
        plain += lower <= wanted <= upper
        interval = bootstrap_interval(rates, mean, seed=run, resamples=500)
        expanded += interval.lower <= wanted <= interval.upper
    assert plain / 400 < 0.925 < expanded / 400 <= 0.975


def test_the_expanded_tail_tends_to_the_plain_one_and_leaves_one_task_alone():
    assert expanded_tail(10**6) == pytest.approx(0.025, rel=1e-3)
    assert expanded_tail(1) == pytest.approx(0.025)
    assert [expanded_tail(n) for n in (2, 5, 20, 100)] == sorted(
        expanded_tail(n) for n in (2, 5, 20, 100)
    )
    # for normal data the half width of the mean's interval is then t s / sqrt(n), as in every
    # textbook
    tasks, sd = 12, 1.0
    rates = np.random.default_rng(3).normal(0, sd, tasks)
    interval = bootstrap_interval(rates, mean, resamples=20_000)
    assert interval.upper - interval.lower == pytest.approx(
        2 * 2.201 * rates.std(ddof=1) / math.sqrt(tasks), rel=0.1
    )


def test_the_bootstrap_agrees_with_scipys():
    """scipy has plain percentiles: with so many tasks that the expansion is below 1 %, the two are
    the same within Monte Carlo error."""
    from scipy.stats import bootstrap

    rates = np.random.default_rng(4).beta(0.5, 1.0, 1000)
    ours = bootstrap_interval(rates, mean, seed=1, resamples=4000)
    theirs = bootstrap(
        (rates,), np.mean, n_resamples=4000, method="percentile", rng=np.random.default_rng(2)
    ).confidence_interval
    width = theirs.high - theirs.low
    assert abs(ours.lower - theirs.low) < 0.08 * width
    assert abs(ours.upper - theirs.high) < 0.08 * width


# -- tasks, then samples within --------------------------------------------------------------------


def width(interval):
    return interval[1] - interval[0]


def test_drawing_samples_too_widens_and_with_one_sample_a_task_changes_nothing():
    passed = benchmark(np.random.default_rng(5), 60, 4, 2.0, 3.0)
    tasks_only = width(bootstrap_interval(passed / 4, mean, resamples=4000))
    both = width(hierarchical_interval(passed, [4] * 60, 1, resamples=4000))
    assert 1.05 * tasks_only < both < 1.45 * tasks_only
    single = (passed > 1).astype(np.int64)
    assert width(hierarchical_interval(single, [1] * 60, 1, resamples=4000)) == pytest.approx(
        width(bootstrap_interval(single, mean, resamples=4000)), rel=0.06
    )


@pytest.mark.parametrize("k", [1, 5, 10])
def test_the_hierarchical_interval_holds_its_estimate_also_where_k_is_all_samples(k):
    """Without moving the resamples, pass@10 of tasks with 1 right of 10 would be drawn as 65 %,
    below any interval that holds 100 %."""
    passed = [1, 0] * 30
    estimate = mean([pass_at_k(10, c, k) for c in passed])
    interval = hierarchical_interval(passed, [10] * 60, k)
    assert interval.lower < estimate < interval.upper
    assert (interval.lower + interval.upper) / 2 == pytest.approx(estimate, abs=0.03)


def test_the_hierarchical_interval_takes_unequal_counts_and_refuses_what_it_cannot_estimate():
    assert hierarchical_interval([1, 2, 0], [4, 8, 6], 2) is not None
    assert hierarchical_interval([4, 8], [4, 8], 2) is None  # all right: no resample differs
    with pytest.raises(ValueError, match="pass@5"):
        hierarchical_interval([1, 2], [4, 8], 5)
    with pytest.raises(ValueError):
        hierarchical_interval([5, 2], [4, 8], 1)
    with pytest.raises(ValueError, match="no tasks"):
        hierarchical_interval([], [], 1)


# -- paired differences ----------------------------------------------------------------------------

DIFFERENCES = st.lists(
    st.sampled_from([-0.5, -0.25, 0.0, 0.125, 0.25, 1.0]), min_size=1, max_size=9
)


@given(DIFFERENCES)
@settings(max_examples=60)
def test_exact_p_is_the_share_of_all_sign_patterns(differences):
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    assert sign_flip_p(differences) == pytest.approx(
        np.mean([s >= abs(sum(differences)) - 1e-12 for s in sums])
    )
    assert sign_flip_p([-d for d in differences]) == sign_flip_p(differences)


@pytest.mark.parametrize("tasks", [6, 13, 80])
def test_p_agrees_with_scipys_permutation_test(tasks):
    from scipy.stats import permutation_test

    differences = np.random.default_rng(tasks).choice([-0.4, -0.2, 0.1, 0.3, 0.6], tasks)
    theirs = permutation_test(
        (differences,),
        lambda x, axis: x.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=9999,
        rng=np.random.default_rng(0),
    )
    close = 1e-9 if tasks <= 13 else 0.02  # all patterns, or two random sets of them
    assert sign_flip_p(differences) == pytest.approx(theirs.pvalue, abs=close)


def test_p_of_nothing_is_one_and_of_everything_is_small_but_never_zero():
    assert sign_flip_p([0.0] * 10) == 1.0
    assert sign_flip_p([0.3 - 0.1 * 3] * 20 + [0.1 + 0.2 - 0.3] * 20) == 1.0  # rounding has no sign
    assert sign_flip_p([0.5] * 5) == 2 / 2**5
    assert sign_flip_p([0.5] * 200) == 1 / 10_000
    with pytest.raises(ValueError):
        sign_flip_p([math.nan])


def rejections(tasks, gain, runs, samples=5):
    """Share of pairs of models that are called different at 5 %, where one solves `gain` more of
    each task's samples."""
    rng, found = np.random.default_rng(6), 0
    for run in range(runs):
        difficulty = rng.beta(0.5, 1.0, tasks)
        a, b = (
            rng.binomial(samples, difficulty * (1 - gain) + gain),
            rng.binomial(samples, difficulty),
        )
        found += sign_flip_p((a - b) / samples, seed=run, resamples=499) <= 0.05
    return found / runs


def test_size_and_power_in_short():
    assert rejections(30, 0.0, 400) <= 0.085
    assert rejections(30, 0.35, 100) >= 0.95


@pytest.mark.slow
@pytest.mark.parametrize("tasks", [10, 100])
def test_equal_models_are_called_different_in_at_most_5_of_100_pairs(tasks):
    assert rejections(tasks, 0.0, 3000) <= 0.06  # 5 % and 2.5 standard deviations


@pytest.mark.slow
def test_power_grows_with_tasks_and_with_the_difference():
    found = [rejections(tasks, gain, 500) for tasks, gain in ((20, 0.1), (100, 0.1), (100, 0.2))]
    assert found[0] < found[1] < found[2] and found[2] > 0.95
