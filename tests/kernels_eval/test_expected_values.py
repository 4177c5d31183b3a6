"""The process that holds expected values: how long it takes must not decide what it compares."""

import itertools
import time

import pytest

from kernels_eval.checks.trials import ModelSpec
from kernels_eval.reference import task_runner
from kernels_eval.reference.expected_values import ORACLE_MAX_S, Reference
from tests.support.kernels import task_source

SLOW_S = 2 * ORACLE_MAX_S


def by_steps(monkeypatch, *names):
    """Each reading of these clocks is SLOW_S later than the one before."""
    steps = itertools.count(0, int(SLOW_S * 1e9))
    for name in names:
        monkeypatch.setattr(time, name, lambda: next(steps) / 1e9)
        monkeypatch.setattr(time, f"{name}_ns", lambda: next(steps))


@pytest.fixture
def busy(monkeypatch):
    """Time passes, but this process has little of it."""
    by_steps(monkeypatch, "monotonic", "perf_counter")
    monkeypatch.setattr(task_runner, "now_ns", time.perf_counter_ns)


@pytest.fixture
def reference(tmp_path):
    """Serves a task whose batch has rows enough for a sample of them."""
    path = tmp_path / "task.py"
    path.write_text(task_source("return x.sum(1)", inputs="[torch.randn(48, 64)]"))
    spec = ModelSpec(
        entry_point="Model",
        init_form="args",
        device="cpu",
        construct_on="cpu",
    )
    made = Reference(None)
    made.do_load(str(path), spec.model_dump(), oracle_max_bytes=1 << 30)
    return made


def oracles(reference):
    return [
        reference.do_expect(name, seed, "normal", None, "declared", False, None).oracle
        for seed, name in enumerate(("declared", "normal"))
    ]


def test_the_oracle_stays_where_others_hold_the_processor(reference, busy):
    assert oracles(reference) == ["float64", "float64"]


def test_an_oracle_that_is_much_work_is_computed_once(reference, monkeypatch):
    by_steps(monkeypatch, "process_time")
    assert oracles(reference) == ["float64", "float32"]
    assert not reference.samples  # nor is a sample of rows


def test_inputs_are_drawn_in_the_same_time_where_others_hold_the_processor(reference, busy):
    assert reference.do_timing_inputs([1, 2, 3])["seconds"] < SLOW_S
