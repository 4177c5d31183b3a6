"""Paired measurement and its statistics.

The reference and the candidate are separate processes; the parent asks each in turn for a sample,
in ABBA order, so slow drift of the machine hits both alike. A second baseline takes its turn
between them (ACBBCA), in the same window and with as many calls. Guarantees: at least the
configured pairs, an interval with every speedup, and a bound by the parent's own clock that the
candidate cannot forge. Statistics are pure functions of the samples.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from kernels_eval.config import TimingConfig
from kernels_eval.records import CompiledBaseline, Timing

Sampler = Callable[[int], int]
"""Given a number of forward calls, runs them as one sample and returns nanoseconds as the process
itself measured."""


WARM_ROUNDS = 12
MOST_CALLS = 10_000


class ImplausibleTime(Exception):
    """The candidate reports less time than the parent's clock saw pass."""


@dataclass
class _Side:
    sample: Sampler
    reported: list[int] = field(default_factory=list)

    def take(self, calls: int) -> None:
        self.reported.append(max(1, int(self.sample(calls))))


@dataclass(frozen=True)
class CompiledSampler:
    """The reference under torch.compile: its sampler, and what its record says besides the
    times."""

    sample: Sampler
    facts: dict[str, Any]


CpuClock = Callable[[], int]
"""Nanoseconds of processor time the candidate's processes have used so far, as the kernel counts
them."""


def measure(
    reference: Sampler,
    candidate: Sampler,
    config: TimingConfig,
    *,
    cpu_clock: CpuClock | None = None,
    bound: Callable[[float], float] | None = None,
    throttled: Callable[[], bool | None] = lambda: None,
    most_calls: int = MOST_CALLS,
    seed: int = 0,
    compiled: CompiledSampler | None = None,
) -> Timing:
    """Measure both sides until the 95 % interval of log(speedup) is narrow enough or the budget is
    spent.

    With `compiled`, all three sides until both intervals are, for half as long again. The budget is
    `max_s`, and `precise_s` where the interval of `precise_pairs` is narrow enough by then: more
    samples of slow calls would sharpen what the spread between processes blurs anyway. A sample
    holds `most_calls` calls at most.

    `bound(call_ns)` measures nanoseconds a call by a clock that the candidate cannot reach, on
    inputs it has not seen; without it the same samples are bounded. `cpu_clock` is given where the
    work is done on the processor: on a busy machine it, not the wall, is the fair bound.
    `throttled()` tells whether the device slows its clocks now. Raises ImplausibleTime where the
    candidate's reported time is below `clock_bound_share` of the bound.
    """
    a, b = _Side(reference), _Side(candidate)
    baselines = [a] if compiled is None else [a, _Side(compiled.sample)]
    calls = _calls_per_sample([*baselines, b], config, most_calls)
    order = [*baselines, b]
    slowed = [throttled()]
    started = time.monotonic()
    while True:
        for side in (*order, *reversed(order)):
            side.take(calls)
        pairs, elapsed = len(a.reported), (time.monotonic() - started) * 2 / len(order)
        enough = (
            pairs >= config.min_pairs
            and min(sum(side.reported) for side in order) >= config.min_side_s * 1e9
        )
        precise = pairs >= config.precise_pairs and elapsed >= config.precise_s
        if elapsed >= config.max_s and pairs >= 4:
            break
        if (enough or precise) and pairs % 10 == 0:
            ends = [
                log_ratio_interval(side.reported, b.reported, resamples=200, seed=seed)
                for side in baselines
            ]
            if all((high - low) / 2 <= config.interval_width for low, high in ends):
                break
    slowed.append(throttled())
    candidate_ns = float(np.median(b.reported))
    bound = bound or (lambda call_ns: _clock_bound(candidate, call_ns, calls, cpu_clock))
    least, believed_ns = _plausible_bound(candidate, candidate_ns / calls, calls, config, bound)
    if (
        slower := believed_ns * calls / candidate_ns
    ) > 1:  # what was too fast to be believed is not what counts
        b.reported = [max(1, round(ns * slower)) for ns in b.reported]
        candidate_ns = float(np.median(b.reported))
    against = [_against(side, b, calls, config, seed) for side in baselines]
    return Timing(
        **against[0],
        candidate_ms=candidate_ns / calls / 1e6,
        pairs=len(a.reported),
        calls_per_sample=calls,
        clock_bound_ms=max(least, 1.0) / 1e6,
        throttled=None if None in slowed else any(slowed),
        compiled=CompiledBaseline(**compiled.facts, **against[1]) if compiled else None,
    )


def _against(
    baseline: _Side, candidate: _Side, calls: int, config: TimingConfig, seed: int
) -> dict[str, float]:
    """What the candidate is worth against one baseline: its latency in ms a call, the speedup with
    its widened interval, its drift."""
    low, high = log_ratio_interval(
        baseline.reported, candidate.reported, resamples=config.bootstrap, seed=seed
    )
    baseline_ns, candidate_ns = (
        float(np.median(baseline.reported)),
        float(np.median(candidate.reported)),
    )
    low, high = widened(low, high, float(np.log(baseline_ns / candidate_ns)), config.process_spread)
    speedup = baseline_ns / candidate_ns
    return {
        "reference_ms": baseline_ns / calls / 1e6,
        "speedup": speedup,
        "speedup_lower": min(float(np.exp(low)), speedup),
        "speedup_upper": max(float(np.exp(high)), speedup),
        "drift": drift(baseline.reported),
    }


def widened(low: float, high: float, middle: float, spread: float) -> tuple[float, float]:
    """A 95 % interval of a log-ratio within one process, made to hold for a later measurement in
    another process: its arms and 1.96 standard deviations between processes, once for this process
    and once for that one, add in quadrature (a prediction interval).
    """
    between = 1.96 * math.sqrt(2.0) * spread
    return middle - float(np.hypot(max(0.0, middle - low), between)), middle + float(
        np.hypot(max(0.0, high - middle), between)
    )


def drift(samples: list[int]) -> float:
    """How far the median of the last third of the samples is from that of the first third, as a
    share of the first. Dimensionless."""
    third = max(1, len(samples) // 3)
    first, last = float(np.median(samples[:third])), float(np.median(samples[-third:]))
    return last / first - 1


def log_ratio_interval(
    reference: list[int], candidate: list[int], *, resamples: int, seed: int, level: float = 0.95
) -> tuple[float, float]:
    """Percentile bootstrap interval of log(median(reference) / median(candidate)) over pairs (Efron
    and Tibshirani 1993, ch. 13)."""
    a, b = np.asarray(reference, dtype=np.float64), np.asarray(candidate, dtype=np.float64)
    picks = np.random.default_rng(seed).integers(0, len(a), size=(resamples, len(a)))
    ratios = np.log(np.median(a[picks], axis=1)) - np.log(np.median(b[picks], axis=1))
    low, high = np.quantile(ratios, [(1 - level) / 2, (1 + level) / 2])
    return float(low), float(high)


def _calls_per_sample(sides: list[_Side], config: TimingConfig, most_calls: int) -> int:
    """Warm all sides until two consecutive medians of 3 agree within 1 % (or a quarter of
    `precise_s` is spent on one), then batch calls until the shorter sample is long enough.

    The batch grows by what the parent's clock sees, too: a side that reports next to nothing does
    not get a million calls.
    """
    for side in sides:
        last, spent = 0.0, 0
        for _ in range(WARM_ROUNDS):
            for _ in range(3):
                side.take(1)
            now = float(np.median(side.reported[-3:]))
            spent += sum(side.reported[-3:])
            if (last and abs(now - last) <= 0.01 * last) or spent > min(
                config.max_s / 8, config.precise_s / 4
            ) * 1e9:
                break
            last = now
    faster = min(sides, key=lambda side: min(side.reported))
    calls, wanted = 1, config.sample_us * 1e3
    shortest, wall = float(min(faster.reported)), 0
    while shortest < wanted and wall < 20 * wanted and calls < most_calls:
        calls = min(most_calls, calls * int(np.clip(np.ceil(wanted / shortest), 2, 10)))
        started = time.perf_counter_ns()
        faster.take(calls)
        wall, shortest = wall + time.perf_counter_ns() - started, float(faster.reported[-1])
    for side in sides:
        side.reported.clear()
    return calls


def _plausible_bound(
    candidate: Sampler,
    call_ns: float,
    calls: int,
    config: TimingConfig,
    measured: Callable[[float], float],
    *,
    rounds: int = 3,
) -> tuple[float, float]:
    """The parent's own bound on a call and the reported time that it bears out, in nanoseconds.
    Raises ImplausibleTime where the reported time stays below the bound.

    A busy machine can slow one round, of either side: the smallest bound and the largest reported
    time are taken, and that time is the one that counts: on a machine that is busy enough a tenth
    of what passed can look like what a call needs.
    """
    bound = measured(call_ns)
    for _ in range(rounds - 1):
        if call_ns >= config.clock_bound_share * bound:
            return bound, call_ns
        call_ns = max(call_ns, float(np.median([candidate(calls) for _ in range(20)])) / calls)
        bound = min(bound, measured(call_ns))
    if call_ns < config.clock_bound_share * bound:
        raise ImplausibleTime(
            f"reports {call_ns / 1e6:.4f} ms a call where the parent's clock saw {bound / 1e6:.4f}"
            " ms pass"
        )
    return bound, call_ns


def _clock_bound(
    candidate: Sampler,
    call_ns: float,
    batch: int,
    clock: CpuClock | None,
    *,
    least_ns: float = 2e7,
    repeats: int = 5,
) -> float:
    """Nanoseconds a call by clocks the candidate cannot reach: the best of a few samples long
    enough that their message costs nothing.

    Each sample is bounded by the smaller of the wall and, where there is one, the processor clock:
    time in which another process had the core is nobody's.
    """
    started = time.perf_counter_ns()
    candidate(batch)
    seen_ns = max(call_ns, (time.perf_counter_ns() - started) / batch)
    calls = int(np.clip(np.ceil(least_ns / seen_ns), 1, 10_000))
    bounds = []
    for _ in range(repeats):
        wall, cpu = time.perf_counter_ns(), clock() if clock else 0
        candidate(calls)
        seen = [time.perf_counter_ns() - wall] + ([clock() - cpu] if clock else [])
        bounds.append(min(seen) / calls)
    return float(min(bounds))
