"""Numbers that mislead without anybody lying: one slow sample, coarse clocks, throttling (threats
36, 37, 40).

The samplers report scripted times and take none of their own, so nothing here depends on the speed
of the machine. A reported time above what the parent's clock saw is never implausible.
"""

from itertools import count
from types import SimpleNamespace

import pytest

from kernels_eval.config import TimingConfig
from kernels_eval.judge import timing as timing_module
from kernels_eval.judge.timing import measure
from tests.support.cases import cases
from tests.support.scripted_time import Clock

CONFIG = TimingConfig(max_s=5.0, min_pairs=60, min_side_s=0.0, interval_width=0.5, sample_us=200)
SAMPLERS = [SimpleNamespace(**row) for row in cases("sampled_times")]


def sampler(ns, slow=(0, 0), factor=1, resolution_ns=1):
    turns = count(1)

    def sample(calls):
        turn = next(turns)
        call_ns = ns * (1 + 0.01 * ((turn * 7) % 5 - 2) / 2)
        call_ns *= factor if slow[0] <= turn < slow[1] else 1
        return int(call_ns * calls) // resolution_ns * resolution_ns

    return sample


@pytest.mark.parametrize(
    "case",
    SAMPLERS,
    ids=lambda case: f"t{case.threat}-{case.name}-{'honest' if case.honest else 'cheat'}",
)
def test_what_is_made_of_samples(case, monkeypatch):
    monkeypatch.setattr(timing_module, "time", Clock())
    sides = sampler(**case.reference), sampler(**case.candidate)
    timing = measure(*sides, CONFIG, bound=lambda *_: (1.0, 1.0))
    assert timing.pairs >= CONFIG.min_pairs
    assert eval(case.holds, {"t": timing}), f"{case.says}; saw {timing}"
