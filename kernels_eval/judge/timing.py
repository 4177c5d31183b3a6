"""Paired measurement and its statistics. Samples in ABBA order, so slow drift hits both alike;
every speedup has an interval and a bound by the parent's clock."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from kernels_eval.config import (
    ACCUSED_SHARE,
    BOUND_ATTEMPTS,
    BOUND_SAMPLES,
    CLOCK_BOUND_SHARE,
    CONTENDED_SHARE,
    DECIDED_WIDTH,
    DISTURBED_LEAST_MS,
    DISTURBED_RATIO,
    IMPOSSIBLE_SHARE,
    LASTING_SHARE,
    LONGEST_SAMPLE_NS,
    MOST_CALLS_PER_SAMPLE,
    MOST_DRIFT,
    PRECISE_PAIRS,
    PROCESS_SPREAD,
    RESAMPLES,
    RESAMPLES_MEANWHILE,
    SHORTEST_SAMPLE_NS,
    WARM_ROUNDS,
    WARM_SHARE,
    TimingConfig,
)
from kernels_eval.records import Timing

Sampler = Callable[[int], int]
"""Runs this many forward calls as one sample; returns nanoseconds by the process's own clock."""


Bound = Callable[[float, float], tuple[float, float]]
"""Given apparent nanoseconds of both calls, bounds the candidate's on unseen inputs by a clock out
of its reach: the least (0: unknown), and the best estimate.
"""


class ImplausibleTime(Exception):
    """The candidate reports less time than the parent's clock saw pass."""


@dataclass
class _Series:
    sample: Sampler
    reported: list[int] = field(default_factory=list)

    def add_sample(self, calls: int) -> None:
        self.reported.append(max(1, int(self.sample(calls))))

    @property
    def median(self) -> float:
        return float(np.median(self.reported))


def measure(
    reference: Sampler,
    candidate: Sampler,
    config: TimingConfig,
    *,
    bound: Bound | None,
    watch: Callable[[int], object] = lambda calls: None,
    begin: Callable[[], object] = lambda: None,
    throttled: Callable[[], bool | None] = lambda: None,
    most_calls: int = MOST_CALLS_PER_SAMPLE,
) -> Timing:
    """Measure both until the 95 % interval of log(speedup) is narrow enough (`wanted_width`) or the
    budget is spent.

    The budget is `max_s`, or `precise_s` where PRECISE_PAIRS suffice by then: more samples would
    not reduce the spread between processes. `most_calls` bounds a sample.

    Where the candidate reports less than CLOCK_BOUND_SHARE of the bound, if any, both sides are
    sampled anew; where that does not help, the bound counts. Raises ImplausibleTime for less than
    ACCUSED_SHARE of the least bound in several rounds. `watch`: make
    such a sample that does not count, at a random place among the others. `begin`: samples of
    both sides follow that are to be alike. `throttled()`: whether clocks are lowered now.
    """
    a, b = _Series(reference), _Series(candidate)
    calls = _calls_per_sample((a, b), config, most_calls)
    slowed = [throttled()]
    started = time.monotonic()
    elapsed_s = 0.0
    watched = 2 * (1 + secrets.randbelow(PRECISE_PAIRS // 2))
    begin()
    while not _enough(a, b, elapsed_s, config):
        _add_pairs(a, b, calls)
        elapsed_s = time.monotonic() - started
        if len(b.reported) == watched:
            watch(calls)
            begin()
    if len(b.reported) < watched:
        watch(calls)
    slowed.append(throttled())
    bound_ms = None
    if bound:
        least, credible_ns = _plausible_bound(a, b, calls, bound)
        bound_ms = max(least, 1.0) / 1e6
        slower = credible_ns * calls / b.median
        if slower > 1:  # what was too fast to be credible is not what counts
            b.reported = [max(1, round(ns * slower)) for ns in b.reported]
    low, high = log_ratio_interval(a.reported, b.reported, resamples=RESAMPLES)
    speedup = a.median / b.median
    low, high = widened(low, high, math.log(speedup), lasting_spread(a.reported, b.reported))
    return Timing(
        reference_ms=a.median / calls / 1e6,
        candidate_ms=b.median / calls / 1e6,
        speedup=speedup,
        speedup_lower=min(math.exp(low), speedup),
        speedup_upper=max(math.exp(high), speedup),
        pairs=len(b.reported),
        calls_per_sample=calls,
        clock_bound_ms=bound_ms,
        drift=drift(a.reported),
        throttled=None if None in slowed else any(slowed),
    )


def ratio_of_speedups(candidate: Timing, baseline: Timing) -> tuple[float, float, float]:
    """The speedup over a baseline timed against one reference, and 95 % bounds: arms add in
    quadrature on the log scale.
    """
    speedup = candidate.speedup / baseline.speedup
    below = math.hypot(
        math.log(candidate.speedup / candidate.speedup_lower),
        math.log(baseline.speedup_upper / baseline.speedup),
    )
    above = math.hypot(
        math.log(candidate.speedup_upper / candidate.speedup),
        math.log(baseline.speedup / baseline.speedup_lower),
    )
    return speedup, speedup * math.exp(-below), speedup * math.exp(above)


def unsettled(timing: Timing, config: TimingConfig) -> bool:
    """Whether the machine disturbed a measurement: drift beyond the wanted interval, a time far
    above its bound, or understated.
    """
    drifted = abs(timing.drift) > max(MOST_DRIFT, config.interval_width)
    if timing.clock_bound_ms is None:
        return drifted
    ratio = timing.candidate_ms / timing.clock_bound_ms
    slowed = ratio > DISTURBED_RATIO and timing.clock_bound_ms > DISTURBED_LEAST_MS
    return drifted or slowed or abs(ratio - 1) < 1e-6


def contended(before: tuple[int, int], after: tuple[int, int]) -> bool:
    """Whether threads waited for processors (`Child.demand_ns`) for much of what they wanted."""
    ran, waited = (now - then for now, then in zip(after, before, strict=True))
    return waited > CONTENDED_SHARE * (ran + waited)


def price_of_new_inputs(seen: Sequence[int], new: Sequence[int]) -> float:
    """How many times as long samples take on new inputs as on those that come again, at least: by
    the quartiles of both that lie between them, 1 where these overlap.
    """
    return max(1.0, float(np.quantile(new, 0.25) / np.quantile(seen, 0.75)))


def slowed(timing: Timing, price: float) -> Timing:
    """With a candidate's calls taking so many times as long."""
    return timing.model_copy(
        update={
            "candidate_ms": timing.candidate_ms * price,
            "speedup": timing.speedup / price,
            "speedup_lower": timing.speedup_lower / price,
            "speedup_upper": timing.speedup_upper / price,
        }
    )


def _enough(reference: _Series, candidate: _Series, elapsed_s: float, config: TimingConfig) -> bool:
    pairs = len(candidate.reported)
    if elapsed_s >= (1 if pairs >= 4 else 2) * config.max_s:
        return True
    sampled_ns = min(sum(each.reported) for each in (reference, candidate))
    enough = pairs >= config.min_pairs and sampled_ns >= config.min_side_s * 1e9
    precise = pairs >= PRECISE_PAIRS and elapsed_s >= config.precise_s
    if not (enough or precise) or pairs % 10:
        return False
    low, high = log_ratio_interval(
        reference.reported, candidate.reported, resamples=RESAMPLES_MEANWHILE
    )
    return (high - low) / 2 <= wanted_width(math.log(reference.median / candidate.median), config)


def wanted_width(log_speedup: float, config: TimingConfig) -> float:
    """Half the width of an interval that is narrow enough for this speedup."""
    decided = min(DECIDED_WIDTH, config.decided_share * abs(log_speedup))
    return max(config.interval_width, decided)


def widened(low: float, high: float, middle: float, spread: float) -> tuple[float, float]:
    """The 95 % interval of one measurement's log-ratio, made a prediction interval: its arms and
    1.96 standard deviations between measurements, once for each, add in quadrature.
    """
    between = 1.96 * math.sqrt(2.0) * spread
    below, above = (math.hypot(max(0.0, arm), between) for arm in (middle - low, high - middle))
    return middle - below, middle + above


def lasting_spread(reference: list[int], candidate: list[int]) -> float:
    """Standard deviation of log(speedup) between measurements: what differs between processes, and
    what a busy machine does to one side for seconds, by how much pairs of samples differ.
    """
    a, b = (np.log(np.asarray(x, dtype=float)) for x in (reference, candidate))
    deviation = np.median(np.abs(a - b - np.median(a - b)))
    return math.hypot(PROCESS_SPREAD, LASTING_SHARE * float(deviation))


def drift(samples: list[int]) -> float:
    """Relative change from the first third's median to the last third's. Dimensionless."""
    third = max(1, len(samples) // 3)
    return float(np.median(samples[-third:]) / np.median(samples[:third])) - 1


def log_ratio_interval(
    reference: list[int], candidate: list[int], *, resamples: int, seed: int = 0
) -> tuple[float, float]:
    """Percentile bootstrap interval of log(median(reference) / median(candidate)) over pairs (Efron
    and Tibshirani 1993, ch. 13).
    """
    count = len(reference)
    picks = np.random.default_rng(seed).integers(0, count, size=(resamples, count))
    # floats, for what was reported may have grown beyond int64 (`measure`)
    floats = (np.asarray(x, dtype=float) for x in (reference, candidate))
    a, b = (np.log(np.median(x[picks], axis=1)) for x in floats)
    low, high = np.quantile(a - b, [0.025, 0.975])
    return float(low), float(high)


def _calls_per_sample(series: Sequence[_Series], config: TimingConfig, most_calls: int) -> int:
    """Batch calls until the shorter sample is long enough, also by the parent's clock, or the
    longer one too long.
    """
    for each in series:
        _warm(each, config)
    faster, slower = sorted(series, key=lambda each: min(each.reported))
    fewest = SHORTEST_SAMPLE_NS / min(faster.reported)
    fitting = LONGEST_SAMPLE_NS / min(slower.reported)
    most_calls = min(most_calls, math.ceil(max(fewest, fitting)))
    calls, wanted = 1, config.sample_us * 1e3
    shortest, wall = float(min(faster.reported)), 0
    while shortest < wanted and wall < 20 * wanted and calls < most_calls:
        calls = min(most_calls, calls * int(np.clip(np.ceil(wanted / shortest), 2, 10)))
        started = time.perf_counter_ns()
        faster.add_sample(calls)
        wall, shortest = wall + time.perf_counter_ns() - started, float(faster.reported[-1])
    for each in series:
        each.reported.clear()
    return calls


def _warm(series: _Series, config: TimingConfig) -> None:
    """Sample until two medians of 3 agree within 1 %, or half of the wanted interval, or a quarter
    of `precise_s` is spent.
    """
    last, spent = 0.0, 0
    budget_ns = min(config.max_s / 8, config.precise_s / 4) * 1e9
    for _ in range(WARM_ROUNDS):
        for _ in range(3):
            series.add_sample(1)
            spent += series.reported[-1]
            if spent > budget_ns:
                return
        now = float(np.median(series.reported[-3:]))
        if last and abs(now - last) <= max(WARM_SHARE, config.interval_width / 2) * last:
            return
        last = now


def _add_pairs(reference: _Series, candidate: _Series, calls: int) -> None:
    for each in (reference, candidate, candidate, reference):
        each.add_sample(calls)


def _plausible_bound(
    reference: _Series, candidate: _Series, calls: int, measured: Bound
) -> tuple[float, float]:
    """The parent's bound on a call and the time that counts, in nanoseconds.

    Below the bound, both sides are sampled anew: a machine that slowed down before the bound was
    measured slows both. Raises ImplausibleTime for what all reports and rounds deny.
    """
    pairs, most_ns = min(BOUND_SAMPLES, len(candidate.reported)), 0.0
    for number in range(BOUND_ATTEMPTS):
        if number:
            reference.reported.clear()
            candidate.reported.clear()
            while len(candidate.reported) < pairs:
                _add_pairs(reference, candidate, calls)
        call_ns = candidate.median / calls
        least, bound = measured(call_ns, reference.median / calls)
        if call_ns >= CLOCK_BOUND_SHARE * bound:
            return bound, call_ns
        most_ns = max(most_ns, call_ns)
    if least > 0 and most_ns < max(ACCUSED_SHARE * least, IMPOSSIBLE_SHARE * bound):
        raise ImplausibleTime(
            f"reports {most_ns / 1e6:.4f} ms a call where the parent's clock saw {least / 1e6:.4f}"
            " ms pass"
        )
    return bound, bound
