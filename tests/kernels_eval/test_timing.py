"""Statistics of the paired measurement on samplers whose truth is known, by a clock of their own:
nothing here runs a kernel or depends on the machine's speed."""

import math
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kernels_eval.config import (
    DECIDED_WIDTH,
    MOST_NS,
    PRECISE_PAIRS,
    PROCESS_SPREAD,
    EvalConfig,
    TimingConfig,
)
from kernels_eval.judge import paired_timing
from kernels_eval.judge.paired_timing import PairedClock
from kernels_eval.judge.runner import Runner
from kernels_eval.judge.timing import (
    ImplausibleTime,
    drift,
    lasting_spread,
    log_ratio_interval,
    measure,
    wanted_width,
    widened,
)
from kernels_eval.protocol import SampleReport
from kernels_eval.records import KernelTask, Timing
from tests.support.scripted_time import CLOCK, busy, scripted_time

__all__ = ["scripted_time"]

QUICK = TimingConfig(max_s=0.4, min_pairs=10, min_side_s=0.0, sample_us=50)


def honest(call_ns):
    return lambda calls: busy(call_ns * calls)


def timed(reference, candidate, **changes):
    """Their timing, bounded by what the wall shows of ten calls."""

    def bound(call_ns, reference_ns):
        started = CLOCK.perf_counter_ns()
        candidate(10)
        passed = (CLOCK.perf_counter_ns() - started) / 10
        return passed, passed

    return measure(reference, candidate, QUICK.model_copy(update=changes), bound=bound)


@pytest.mark.parametrize("ratio", [0.5, 1.0, 2.0, 4.0])
def test_a_known_ratio_is_found_and_covered(ratio):
    found = timed(honest(50_000 * ratio), honest(50_000))
    assert found.speedup == pytest.approx(ratio, rel=0.2)
    assert found.speedup_lower <= found.speedup <= found.speedup_upper
    assert found.speedup_lower <= ratio * 1.05 and found.speedup_upper >= ratio * 0.95
    assert found.reference_ms == pytest.approx(0.05 * ratio, rel=0.2)
    assert found.pairs >= QUICK.min_pairs


def test_both_sides_begin_anew_together():
    """One is warmed for longer, and alone makes the sample that says what runs."""
    turns = []

    def side(name):
        return lambda calls: turns.append(name) or busy(20_000 * calls)

    config = QUICK.model_copy(update={"max_s": 0.05})
    watch, begin = (lambda calls: turns.append("watch")), (lambda: turns.append(" "))
    measure(side("a"), side("b"), config, bound=None, watch=watch, begin=begin)
    warm, *measured = "".join(turns).split()
    assert warm.count("a") != warm.count("b") and "abba" not in warm
    assert all(each.removesuffix("watch").replace("abba", "") == "" for each in measured)


def test_short_calls_are_batched():
    found = timed(honest(2_000), honest(1_000))
    assert found.calls_per_sample >= QUICK.sample_us * 1e3 / 2_000
    assert found.candidate_ms < 0.05, "latencies are per call, not per sample"


def test_the_order_is_reference_candidate_candidate_reference():
    turns = []

    def side(name):
        return lambda calls: turns.append(name) or busy(20_000 * calls)

    timed(side("a"), side("b"))
    assert "abbaabbaabba" in "".join(turns)


def test_drift_hits_both_sides_alike():
    """Both slow down threefold during the measurement, as a hot machine does; their ratio stays."""
    steps = iter(range(10**9))

    def drifting(call_ns):
        return lambda calls: busy(call_ns * calls * (1 + min(next(steps), 200) / 100))

    found = timed(drifting(60_000), drifting(30_000), min_pairs=60)
    assert found.speedup == pytest.approx(2.0, rel=0.25)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.4])
def test_a_liar_is_found(share):
    """One that reports nothing must not make the parent ask for samples of a hundred thousand real
    calls, either."""
    spent = 0

    def liar(calls):
        nonlocal spent
        passed = busy(min(40_000 * calls, 5e8))
        spent += passed
        assert spent < 2.5e9, f"asked for {calls} calls a sample, beyond every budget"
        return int(passed * share)

    with pytest.raises(ImplausibleTime, match="the parent's clock saw"):
        timed(honest(40_000), liar)


def test_work_before_the_samples_own_clock_counts():
    def warm_start(calls):
        busy(5_000 * calls)
        return busy(1_000 * calls)

    with pytest.raises(ImplausibleTime):
        timed(honest(5_000), warm_start)


def test_a_bound_that_is_high_once_is_forgiven():
    """Another process had the core: a busy machine must not convict."""
    bounds = iter([(60_000, 60_000), (20_000, 20_000)])
    found = measure(honest(20_000), honest(20_000), QUICK, bound=lambda *_: next(bounds))
    assert found.candidate_ms >= 0.8 * found.clock_bound_ms


def test_a_machine_that_slows_down_before_the_bound_is_measured_slows_both_sides():
    """Samples of a fast moment are not held against a bound of a slow one, but taken anew."""
    slowed = 1

    def side(call_ns):
        return lambda calls: busy(call_ns * slowed * calls)

    def bound(*_):
        nonlocal slowed
        slowed = 2
        return 40_000, 40_000

    found = measure(side(60_000), side(20_000), QUICK, bound=bound)
    assert found.speedup == pytest.approx(3, rel=0.01)
    assert (found.reference_ms, found.candidate_ms) == pytest.approx((0.12, 0.04), rel=0.01)


def test_a_bound_that_nothing_can_be_told_from_counts_and_accuses_nobody():
    found = measure(honest(20_000), honest(20_000), QUICK, bound=lambda *_: (0.0, 900_000))
    assert found.candidate_ms == pytest.approx(0.9)


def test_a_liar_on_a_machine_that_gets_busy_wins_nothing():
    """Ten times as slow while it is asked again, a tenth of what passed looks like what a call
    needs: then that is what counts."""
    asked_again = False

    def liar(calls):
        passed = busy(20_000 * calls)
        return passed if asked_again else passed // 10

    def bound(call_ns, reference_ns):
        nonlocal asked_again
        asked_again = True
        return 20_000, 20_000

    found = measure(honest(20_000), liar, QUICK, bound=bound)
    assert found.candidate_ms >= 0.02 and found.speedup <= 1.2
    assert found.speedup_lower <= found.speedup <= found.speedup_upper


def test_reported_times_that_grow_beyond_any_integer_are_counted():
    """A few are the largest that a report may hold, and after the bound was asked for all are: then
    that is what counts, as many times as the median was less."""
    turns, asked = iter(range(10**9)), []

    def liar(calls):
        busy(20_000 * calls)
        return MOST_NS if asked or next(turns) % 3 == 2 else 1

    def bound(*_):
        asked.append(True)
        return -1e6, 1e3

    found = measure(honest(20_000), liar, QUICK, bound=bound)
    assert found.candidate_ms >= 1e3 * found.reference_ms


def test_the_budget_is_kept():
    started, noise = CLOCK.monotonic(), np.random.default_rng(1)

    def uneven(calls):
        return busy(2e6 * calls * (1 + 0.5 * abs(noise.standard_normal())))

    found = timed(uneven, uneven, max_s=0.3, min_pairs=10_000)
    assert CLOCK.monotonic() - started < 1
    assert 4 <= found.pairs < 10_000


# -- the interval ----------------------------------------------------------------------------------

samples = st.lists(st.integers(1_000, 10_000_000), min_size=4, max_size=40)


@given(samples, st.integers(0, 2**31))
def test_an_interval_is_ordered_and_repeatable(values, seed):
    other = values[::-1]
    low, high = log_ratio_interval(values, other, resamples=100, seed=seed)
    assert low <= high
    assert (low, high) == log_ratio_interval(values, other, resamples=100, seed=seed)


@given(samples, st.floats(0.01, 100))
def test_scaling_one_side_shifts_the_interval(values, factor):
    low, high = log_ratio_interval(values, values, resamples=100, seed=1)
    shifted = log_ratio_interval([v * factor for v in values], values, resamples=100, seed=1)
    assert shifted == pytest.approx((low + np.log(factor), high + np.log(factor)), abs=1e-9)


@given(samples)
def test_swapping_the_sides_mirrors_the_interval(values):
    other = sorted(values)
    low, high = log_ratio_interval(values, other, resamples=100, seed=1)
    assert log_ratio_interval(other, values, resamples=100, seed=1) == pytest.approx(
        (-high, -low), abs=1e-9
    )


@given(st.integers(1, 10**9), st.integers(1, 10**9), st.integers(4, 50))
def test_without_noise_the_interval_is_a_point(a, b, pairs):
    low, high = log_ratio_interval([a] * pairs, [b] * pairs, resamples=100, seed=1)
    assert low == high == pytest.approx(np.log(a / b), abs=1e-12)


@given(samples)
def test_the_interval_stays_within_what_was_seen(values):
    low, high = log_ratio_interval(values, [5_000] * len(values), resamples=100, seed=1)
    assert np.log(min(values) / 5_000) - 1e-9 <= low and high <= np.log(max(values) / 5_000) + 1e-9


@settings(deadline=None, max_examples=3)
@given(st.integers(0, 2**31))
def test_the_interval_covers_about_as_often_as_it_says(seed):
    rng = np.random.default_rng(seed)
    covered = 0
    for trial in range(200):
        a, b = (
            2e6 * np.exp(0.1 * rng.standard_normal(40)),
            1e6 * np.exp(0.1 * rng.standard_normal(40)),
        )
        low, high = log_ratio_interval(list(a), list(b), resamples=200, seed=trial)
        covered += low <= np.log(2) <= high
    assert covered >= 0.87 * 200, f"a 95 % interval covered the truth in {covered} of 200"


def test_more_pairs_narrow_the_interval():
    rng = np.random.default_rng(3)
    a, b = 1e6 * (1 + rng.random(400)), 1e6 * (1 + rng.random(400))
    few, many = (
        np.subtract(*reversed(log_ratio_interval(list(a[:n]), list(b[:n]), resamples=400, seed=1)))
        for n in (25, 400)
    )
    assert many < few / 2


def test_slow_calls_that_hardly_differ_are_measured_for_the_shorter_budget():
    config, seen = (
        TimingConfig(max_s=0.5, precise_s=1e-9),
        {"bound": lambda *_: (1.0, 1.0)},
    )
    steady = measure(honest(4_000_000), honest(8_000_000), config, **seen)
    assert steady.pairs == PRECISE_PAIRS < config.min_pairs
    noise = np.random.default_rng(3)
    uneven = measure(
        lambda calls: busy(4e6 * calls * noise.uniform(0.7, 1.3)), honest(4_000_000), config, **seen
    )
    assert uneven.pairs > config.min_pairs, "what is not precise yet has the whole budget"


@pytest.mark.parametrize(
    ("speedup", "share", "width"),
    [
        (1.0, 0.1, 0.02),
        (1.2, 0.1, 0.02),
        (2.0, 0.1, 0.0693),
        (0.5, 0.1, 0.0693),
        (0.05, 0.1, DECIDED_WIDTH),
        (0.05, 0.0, 0.02),
    ],
)
def test_the_farther_from_1_the_wider_an_interval_may_be(speedup, share, width):
    config = TimingConfig(decided_share=share)
    assert wanted_width(math.log(speedup), config) == pytest.approx(width, abs=1e-4)


def test_what_is_many_times_slower_takes_fewer_pairs():
    def pairs_of(share):
        noise = np.random.default_rng(5)

        def uneven(calls):
            return busy(1e6 * calls * noise.uniform(0.8, 1.2))

        config = TimingConfig(max_s=20, decided_share=share)
        slow = honest(20_000_000)
        return measure(uneven, slow, config, bound=lambda *_: (1.0, 1.0)).pairs

    assert pairs_of(0.1) < pairs_of(0.0) / 2


@pytest.mark.parametrize(
    "bad",
    [{"min_pairs": 1}, {"max_s": 0}, {"precise_s": 0}, {"decided_share": -1}, {"unknown": 1}],
)
def test_a_configuration_that_makes_no_sense_is_refused(bad):
    with pytest.raises(ValidationError):
        TimingConfig.model_validate(bad)


def test_the_spread_between_processes_widens_both_arms_in_quadrature():
    low, high = widened(-0.03, 0.04, 0.0, 0.0)
    assert (low, high) == pytest.approx((-0.03, 0.04))
    low, high = widened(-0.03, 0.04, 0.0, 0.01)
    between = 1.96 * 2**0.5 * 0.01  # this process's and the later one's
    assert low == pytest.approx(-np.hypot(0.03, between)) and high == pytest.approx(
        np.hypot(0.04, between)
    )
    assert widened(1.2, 1.3, 1.2, 0.01)[0] < 1.2, "an arm of no length gets one"


def test_pairs_that_differ_widen_the_interval_however_many_they_are():
    """A busy machine favours one side for seconds, which pairs of one moment do not average out."""
    steady, rng = [1_000] * 400, np.random.default_rng(1)
    assert lasting_spread(steady, steady) == PROCESS_SPREAD
    spreads = []
    for count in (100, 400):
        uneven = list(1_000 * np.exp(0.1 * rng.standard_normal(count)))
        spreads.append(lasting_spread([2_000] * count, uneven))
        assert lasting_spread(uneven, uneven) == PROCESS_SPREAD, "what hits both is no noise"
    assert spreads == pytest.approx([0.05, 0.05], rel=0.25)


def test_measurements_of_a_machine_that_favours_one_side_for_a_while_hold_one_truth():
    """Each falls into another moment, as two walks of a busy machine do."""
    rng, held = np.random.default_rng(2), 0
    for _ in range(100):
        moment = math.exp(0.05 * rng.standard_normal())

        def uneven(calls, moment=moment):
            return busy(2e5 * moment * calls * math.exp(0.1 * rng.standard_normal()))

        found = measure(uneven, honest(1e5), QUICK, bound=None)
        held += found.speedup_lower <= 2 <= found.speedup_upper
    assert held >= 90


def test_drift_is_the_change_of_the_median_over_the_window():
    assert drift([100] * 30) == 0
    assert drift([100] * 10 + [150] * 10 + [200] * 10) == pytest.approx(1.0)
    assert drift([200] * 10 + [150] * 10 + [100] * 10) == pytest.approx(-0.5)
    assert drift([100] * 10 + [5000] + [100] * 19) == 0, "one slow sample is no drift"


@pytest.mark.parametrize(
    "reference_ns, rounds, bound",
    [
        (2e6, [(0.3e6, 3.0e6), (0.2e6, 2.6e6), (0.2e6, 2.8e6)], 2.15e6),
        (2e5, [], 0.0),
    ],
)
def test_a_call_alone_bounds_those_that_share_their_work(reference_ns, rounds, bound):
    """The least that one call alone took, less what such a round costs, and less what a message may
    cost. Calls shorter than a message are not asked."""
    clock, scripted = object.__new__(PairedClock), iter(rounds)
    clock._round = lambda calls: next(scripted)
    assert clock._alone(reference_ns) == pytest.approx(bound)
    assert next(scripted, None) is None


@pytest.mark.parametrize(
    "threads, ran, waited, contended",
    [(2, 100, 80, True), (2, 100, 20, False), (2, 0, 0, False), (1, 100, 80, False)],
)
def test_a_measurement_of_threads_that_waited_for_processors_is_contended(
    monkeypatch, threads, ran, waited, contended
):
    """One thread counts by its processor time, which has no waits."""
    idle, busy = (iter([(7, 7), each]) for each in ((7, 7), (7 + ran, 7 + waited)))
    children = [SimpleNamespace(demand_ns=partial(next, each)) for each in (idle, busy)]
    clock = object.__new__(PairedClock)
    clock.on_gpu = clock.by_processor = clock.contended = False
    clock.sets, clock.config, clock._draw = 1, TimingConfig(), lambda: None
    clock.reference = SimpleNamespace(child=children[0])
    config = SimpleNamespace(threads=threads, level="screen")
    clock.process = SimpleNamespace(child=children[1], config=config, renew=None)
    monkeypatch.setattr(paired_timing, "measure", lambda *_, **__: "timing")
    monkeypatch.setattr(paired_timing, "most_calls", lambda *_: 1)
    monkeypatch.setattr(paired_timing, "on_one_core", lambda _: nullcontext())
    assert clock._measure_once() == "timing"
    assert clock.contended is contended


@pytest.mark.parametrize(
    "reported, used, around, counted",
    [
        (9_500_000, 10_000_000, 400_000, 9_500_000),
        (8_000_000, 10_000_000, 100_000, 9_500_000),
        (8_000_000, 10_000_000, None, 8_000_000),
    ],
)
def test_processor_time_of_a_sample_counts_whatever_a_candidate_reports(
    reported, used, around, counted
):
    """But for twice what a reference's sample has around its calls, a fiftieth, and an answer's."""
    clock, times = object.__new__(PairedClock), iter([7, 7 + used])
    clock.given, clock.by_processor, clock.needs_copy, clock.idle_samples = True, True, False, 0
    clock.spoils_outputs, clock.around_ns = False, [] if around is None else [around]
    clock.reported_ns = clock.counted_ns = 0
    clock.reference = SimpleNamespace(loaded=SimpleNamespace(effects=None))
    clock.process = SimpleNamespace(
        child=SimpleNamespace(processor_ns=partial(next, times)),
        config=SimpleNamespace(threads=1),
        request=lambda _: SampleReport(ns=reported, custom_calls=1),
    )
    assert clock._candidate_sample(1) == counted
    assert (clock.reported_ns, clock.counted_ns) == (reported, counted)


def test_only_processor_time_that_is_read_counts_for_a_sample():
    """On a GPU, and for a child that is not alone, none is read: a reference's samples have less
    than none around their calls then."""
    clock = object.__new__(PairedClock)
    clock.given = True
    clock.by_processor = clock.needs_copy = False
    clock.burnt_ns = clock.waited_ns = clock.reported_ns = clock.counted_ns = 0
    clock.idle_samples, clock.around_ns = 0, []
    reports = [SampleReport(ns=1_000_000, custom_calls=0), SampleReport(ns=9_000, custom_calls=1)]
    given = SimpleNamespace(
        child=SimpleNamespace(),
        config=SimpleNamespace(threads=1),
        loaded=SimpleNamespace(effects=None),
        timed_distribution="declared",
        trying_draws=lambda _: nullcontext(),
        request=lambda _: reports.pop(0),
    )
    clock.reference = clock.process = given
    assert clock._reference_sample(1) == 1_000_000
    assert clock._candidate_sample(1) == 9_000
    assert clock.reported_ns == clock.counted_ns == 0


@pytest.mark.parametrize("implausible", range(4))
def test_a_time_is_refused_only_where_it_is_implausible_in_three_measurements(implausible):
    """Each later one rotates over as many inputs as a round has: fewer may stay in a cache."""
    clock, asked = object.__new__(PairedClock), []
    clock.unseen, clock.wanted_sets = 10, 0

    def measure_once():
        asked.append(clock.wanted_sets)
        if len(asked) <= implausible:
            raise ImplausibleTime
        return "timing"

    clock._measure_once = measure_once
    refused = pytest.raises(ImplausibleTime) if implausible == 3 else nullcontext()
    with refused:
        assert clock._measure_believed() == "timing"
    assert asked == [0, 10, 10][: implausible + 1]


def test_as_many_sets_are_drawn_as_are_wanted_and_fit():
    def drawn(wanted, task_bytes):
        reference = SimpleNamespace(
            task_bytes=task_bytes,
            config=EvalConfig(),
            request=lambda request: SimpleNamespace(seconds=1.0 * len(request.seeds)),
        )
        return len(paired_timing.draw_sets(reference, wanted=wanted)[0])

    assert [drawn(wanted, 4 << 20) for wanted in (0, 10, 1000)] == [3, 10, 64]
    assert drawn(10, 64 << 20) == 4


def test_tasks_of_one_name_have_reference_times_of_their_own():
    runner = SimpleNamespace(_medians={}, config=EvalConfig())
    one, other = (KernelTask(task_id="file/task", name="task", code=code) for code in "ab")
    fast, slow = (
        Timing(
            reference_ms=ms,
            candidate_ms=1,
            speedup=ms,
            speedup_lower=ms,
            speedup_upper=ms,
            pairs=99,
            calls_per_sample=1,
            clock_bound_ms=1,
        )
        for ms in (1, 9)
    )
    drifts = [
        any(flag.startswith("reference_drift") for flag in Runner.drift_flags(runner, *each))
        for each in ((one, fast), (other, slow), (one, slow))
    ]
    assert drifts == [False, False, True]
