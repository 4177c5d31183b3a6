"""Numbers that mislead without anybody lying: tiny shapes, one slow sample, coarse clocks,
throttling (threats 35, 36, 37, 40).

The samplers report scripted times and take none of their own, so nothing here depends on the speed
of the machine. A reported time above what the parent's clock saw is never implausible.
"""

from collections.abc import Callable
from dataclasses import dataclass

import pytest

from kernels_eval.config import TimingConfig
from kernels_eval.judge import timing as timing_module
from kernels_eval.judge.timing import measure
from kernels_eval.records import Timing
from tests.support.adversarial import AFFINE_CPP, Case, trials, writer
from tests.support.kernels import kernel_task, task_source
from tests.support.scripted_time import Clock

code = writer(AFFINE_CPP, "adversarial_timing")
CONFIG = TimingConfig(max_s=5.0, min_pairs=60, min_side_s=0.0, interval_width=0.5, sample_us=200)


def has_an_interval(verdict):
    timing = verdict.timing
    assert timing is not None and timing.calls_per_sample > 1, (
        "one call is too short to be timed alone"
    )
    assert (
        timing.speedup_lower <= timing.speedup <= timing.speedup_upper
        and timing.speedup_lower < timing.speedup_upper
    )
    assert timing.candidate_ms >= 0.8 * timing.clock_bound_ms
    assert timing.pairs >= 6


def small(rows, columns):
    return kernel_task(
        task_source("return x * 2.0 + 1.0", inputs=f"[torch.randn({rows}, {columns})]"),
        f"adversarial_{rows}_by_{columns}",
    )


CASES = [
    Case(
        35,
        "tiny_shape",
        "ok",
        "return ext.affine(x)",
        task=small(3, 5),
        check=has_an_interval,
        twin="return ext.affine(x)",
        twin_task=small(24, 40),
        twin_check=has_an_interval,
    )
]


@pytest.mark.parametrize("trial", trials(CASES, code))
def test_timing_threats(verify, trial):
    trial.assert_judged(verify)


# -- samplers whose truth is known -----------------------------------------------------------------

Script = Callable[[int, int], float]
"""Nanoseconds a call, given which sample this is and how many calls it has."""


@dataclass
class Sampler:
    """A side of the measurement that reports what its script says. Remembers what it was asked."""

    script: Script
    resolution_ns: int = 1

    def __post_init__(self):
        self.asked = []

    def __call__(self, calls):
        self.asked.append(calls)
        return (
            int(self.script(len(self.asked), calls) * calls)
            // self.resolution_ns
            * self.resolution_ns
        )


def wobbling(call_ns):
    """Within 2 % of `call_ns`, never twice the same in a row."""
    return lambda turn, _: call_ns * (1 + 0.01 * ((turn * 7) % 5 - 2) / 2)


def slow_at(turns, factor, script):
    return lambda turn, calls: script(turn, calls) * (factor if turn in turns else 1.0)


def slower_from(turn_from, factor, script):
    return lambda turn, calls: script(turn, calls) * (factor if turn >= turn_from else 1.0)


@dataclass(frozen=True)
class Measured:
    """A pair of samplers and what must hold of their timing."""

    threat: int
    name: str
    honest: bool
    reference: Callable[[], Sampler]
    candidate: Callable[[], Sampler]
    holds: Callable[[Timing], bool]
    says: str


A, B = 500_000.0, 250_000.0
SAMPLERS = [
    Measured(
        36,
        "one_slow_reference_sample",
        False,
        lambda: Sampler(slow_at(range(70, 71), 100, wobbling(A))),
        lambda: Sampler(wobbling(B)),
        lambda t: abs(t.speedup - 2) < 0.05 and t.speedup_upper < 2.1,
        "one sample 100 times as slow moves neither median nor interval",
    ),
    Measured(
        36,
        "three_slow_reference_samples",
        False,
        lambda: Sampler(slow_at(range(70, 73), 100, wobbling(A))),
        lambda: Sampler(wobbling(B)),
        lambda t: abs(t.speedup - 2) < 0.05 and t.speedup_upper < 2.1,
        "nor do three",
    ),
    Measured(
        36,
        "reference_that_is_slow",
        True,
        lambda: Sampler(wobbling(100 * A)),
        lambda: Sampler(wobbling(B)),
        lambda t: abs(t.speedup - 200) < 5,
        "a reference that is slow in every sample is slow",
    ),
    Measured(
        37,
        "thirty_nanoseconds_a_call",
        False,
        lambda: Sampler(wobbling(60)),
        lambda: Sampler(wobbling(30)),
        lambda t: t.calls_per_sample >= 3_000 and abs(t.speedup - 2) < 0.1,
        "calls are batched until a sample is long enough",
    ),
    Measured(
        37,
        "clock_of_a_microsecond",
        False,
        lambda: Sampler(wobbling(400), resolution_ns=1_000),
        lambda: Sampler(wobbling(200), resolution_ns=1_000),
        lambda t: t.calls_per_sample >= 500 and abs(t.speedup - 2) < 0.1,
        "a call below the clock's resolution is never timed alone",
    ),
    Measured(
        37,
        "long_enough_alone",
        True,
        lambda: Sampler(wobbling(A)),
        lambda: Sampler(wobbling(B)),
        lambda t: t.calls_per_sample == 1 and abs(t.speedup - 2) < 0.05,
        "a call that is long enough is a sample of its own",
    ),
    Measured(
        40,
        "clocks_lowered_half_way",
        False,
        lambda: Sampler(slower_from(40, 2, wobbling(A))),
        lambda: Sampler(slower_from(40, 2, wobbling(B))),
        lambda t: abs(t.speedup - 2) < 0.1 and t.drift > 0.2,
        "both sides slow down: the speedup stays, and the drift is recorded",
    ),
    Measured(
        40,
        "steady_clocks",
        True,
        lambda: Sampler(wobbling(A)),
        lambda: Sampler(wobbling(B)),
        lambda t: abs(t.speedup - 2) < 0.05 and abs(t.drift) < 0.05,
        "a steady device shows no drift",
    ),
]


@pytest.mark.parametrize(
    "case",
    SAMPLERS,
    ids=lambda case: f"t{case.threat}-{case.name}-{'honest' if case.honest else 'cheat'}",
)
def test_what_is_made_of_samples(case, monkeypatch):
    monkeypatch.setattr(timing_module, "time", Clock())
    reference, candidate = case.reference(), case.candidate()
    timing = measure(reference, candidate, CONFIG, bound=lambda *_: (1.0, 1.0))
    assert timing.pairs >= CONFIG.min_pairs
    assert case.holds(timing), f"{case.says}; saw {timing}"
