"""Estimators against brute force, and intervals against what statistics says they must do."""

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tasks.benchmark.metrics import bootstrap_interval, mean, pass_at_k, wilson_interval
from tests.support.cases import cases

CASES = cases("benchmark")


@given(
    st.integers(1, 9).flatmap(lambda n: st.tuples(st.just(n), st.integers(0, n), st.integers(1, n)))
)
def test_pass_at_k_is_the_share_of_subsets_with_a_pass(case):
    n, c, k = case
    subsets = list(itertools.combinations([True] * c + [False] * (n - c), k))
    assert pass_at_k(n, c, k) == pytest.approx(sum(any(s) for s in subsets) / len(subsets))


@given(
    st.integers(2, 200).flatmap(
        lambda n: st.tuples(st.just(n), st.integers(0, n - 1), st.integers(1, n - 1))
    )
)
def test_pass_at_k_is_bounded_and_grows_with_passes_and_with_k(case):
    n, c, k = case
    here = pass_at_k(n, c, k)
    assert 0.0 <= here <= 1.0
    assert pass_at_k(n, c + 1, k) >= here
    assert pass_at_k(n, c, k + 1) >= here - 1e-12
    assert pass_at_k(n, c, 1) == pytest.approx(c / n)


@pytest.mark.parametrize("n, c, k", CASES["impossible"])
def test_pass_at_k_refuses_what_has_no_unbiased_estimate(n, c, k):
    with pytest.raises(ValueError):
        pass_at_k(n, c, k)


@given(
    st.lists(st.floats(0, 1, allow_subnormal=False), min_size=2, max_size=12), st.integers(0, 2**31)
)
@settings(max_examples=40)
def test_bootstrap_is_deterministic_and_stays_within_the_data(values, seed):
    first = bootstrap_interval(values, mean, seed=seed, resamples=100)
    assert first == bootstrap_interval(values, mean, seed=seed, resamples=100)
    if first is None:
        assert len(set(values)) == 1
    else:
        assert min(values) - 1e-12 <= first[0] <= first[1] <= max(values) + 1e-12


def test_bootstrap_narrows_with_tasks():
    def width(values):
        interval = bootstrap_interval(values, mean, seed=1)
        return interval[1] - interval[0]

    assert width([0.0, 1.0, 0.0, 1.0]) > 0.7
    assert width([0.0, 1.0] * 100) < 0.2


def test_bootstrap_resamples_whole_tasks_not_samples():
    """Two tasks, each all right or all wrong: 1000 samples in them do not make the answer more
    certain."""
    assert bootstrap_interval([0.0, 1.0], mean, seed=0) == (0.0, 1.0)


def test_bootstrap_claims_nothing_where_it_knows_nothing():
    assert bootstrap_interval([0.5], mean, seed=0) is None
    assert bootstrap_interval([0.0, 0.0, 0.0], mean, seed=0) is None
    assert bootstrap_interval([[0.0, 0.0], [1.0, 2.0]], lambda rows: None, seed=0) is None
    with pytest.raises(ValueError):
        bootstrap_interval([], mean, seed=0)


@given(st.integers(1, 300).flatmap(lambda n: st.tuples(st.integers(0, n), st.just(n))))
def test_wilson_holds_the_rate_and_mirrors(case):
    successes, trials = case
    lower, upper = wilson_interval(successes, trials)
    assert 0.0 <= lower <= successes / trials <= upper <= 1.0
    mirrored = wilson_interval(trials - successes, trials)
    assert (1 - mirrored[1], 1 - mirrored[0]) == pytest.approx((lower, upper), abs=1e-9)


def test_wilson_against_published_values_and_edges():
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)
    assert wilson_interval(0, 0) == (0.0, 1.0)
    # a mean rate of 0.625 over 4 tasks is 2.5 of them
    below, between, above = (wilson_interval(successes, 4) for successes in (2, 2.5, 3))
    assert below[0] < between[0] < above[0] and below[1] < between[1] < above[1]
    for successes, trials in ((-1, 3), (4, 3)):
        with pytest.raises(ValueError):
            wilson_interval(successes, trials)
