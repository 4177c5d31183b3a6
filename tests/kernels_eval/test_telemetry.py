"""Telemetry: sums, shares and depths, under a clock that the test moves."""

import json

import pytest

from kernels_eval.pool import telemetry as module
from kernels_eval.pool.telemetry import BUILDERS, DEVICES, Telemetry
from kernels_eval.records import Language, Phases, Status, Verdict


class Clock:
    def __init__(self):
        self.now = 100.0

    def monotonic(self):
        return self.now


@pytest.fixture
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def verdict(status, reason, **fields):
    return Verdict.model_validate(
        {
            "candidate_id": "c",
            "task_id": "t",
            "language": Language.CPP,
            "status": status,
            "reason": reason,
            **fields,
        }
    )


def test_shares_and_depths_follow_the_clock(clock):
    seen = Telemetry(builders=4, devices=2)
    seen.tick(0)
    clock.now += 10  # builds only
    seen.tick(6)
    clock.now += 20
    seen.worked(BUILDERS, 30.0)
    seen.worked(DEVICES, 20.0)
    seen.worked(DEVICES, 10.0)
    seen.reached(
        verdict(
            Status.INCORRECT,
            "wrong_output",
            build_tier="lite",
            run_s=2.0,
            phases=Phases(load_s=0.5, correctness_s=1.5),
        )
    )
    seen.reached(verdict(Status.COMPILE_ERROR, "build_failed", build_tier="full", build_s=7.0))
    seen.reached(
        verdict(Status.INCORRECT, "wrong_shape", build_tier="lite", build_cached=True, run_s=1.0)
    )
    seen.tick(2)
    shown = seen.summary()
    assert (
        shown["candidates"] == 3
        and shown["wall_s"] == 30.0
        and shown["candidates_per_hour"] == 360.0
    )
    assert shown["builder_busy_share"] == 0.25  # 30 of 4 x 30
    assert shown["device_busy_share"] == 0.75  # 30 of 2 x 20: since the first finished build
    assert shown["device_s_per_candidate"] == 10.0 and shown["on_device"] == 2
    assert shown["queue_depth_mean"] == 4.0 and shown["queue_depth_most"] == 6  # six for 20 of 30 s
    assert shown["cache_hit_share"] == pytest.approx(1 / 3, abs=1e-4) and shown[
        "lite_share"
    ] == pytest.approx(2 / 3, abs=1e-4)
    assert shown["built"] == 3 and shown["full_share"] == pytest.approx(1 / 3, abs=1e-4)
    assert (
        shown["seconds"]["run_s"] == 3.0
        and shown["seconds"]["build_s"] == 7.0
        and shown["seconds"]["correctness_s"] == 1.5
    )
    assert shown["statuses"] == {"compile_error": 1, "incorrect": 2}
    busy = "builders 25% busy, devices 75%, 2 built and waiting"
    assert seen.line() == busy, "half a minute is no rate"
    json.dumps(shown)
    clock.now += 570
    seen.tick(2)
    assert seen.line().startswith("18/h, ")


def test_nothing_done_is_nothing_shown():
    shown = Telemetry(1, 1).summary()
    assert (
        shown["candidates"] == 0
        and shown["device_busy_share"] == 0.0
        and shown["candidates_per_hour"] == 0.0
    )
