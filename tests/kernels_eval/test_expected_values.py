"""The process that holds expected values: how long it takes must not decide what it compares."""

import itertools
import time

import pytest
import torch

from kernels_eval.checks.correctness import PRECISION_OF, judge
from kernels_eval.checks.trials import ModelSpec
from kernels_eval.config import CorrectnessConfig
from kernels_eval.records import Reason
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
    return serving(tmp_path, task_source("return x.sum(1)", inputs="[torch.randn(48, 64)]"))


def serving(folder, source):
    path = folder / "task.py"
    path.write_text(source)
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


@pytest.mark.parametrize("cast", ["", ".half()", ".bfloat16()", ".to(torch.complex64)"])
def test_what_only_float64_holds_is_no_oracle(tmp_path, cast):
    """The lowest number of a type marks what is masked: in float64 it is another one, whose square
    has no sum, and next to which every error is small."""
    forward = "return x.masked_fill(x.real > 0, torch.finfo(x.dtype).min)"
    made = serving(tmp_path, task_source(forward, inputs=f"[torch.randn(48, 64){cast}]"))
    assert oracles(made) == ["float64", "float64"]
    expected = made.known["declared"].expected[0]
    precision = PRECISION_OF.get(str(expected.dtype).removeprefix("torch."), "fp32")
    for actual, reason in (
        (expected.clone(), Reason.OK),
        (torch.zeros_like(expected), Reason.WRONG_OUTPUT),
        (expected.masked_fill(expected.real < -1e4, 7), Reason.WRONG_OUTPUT),
        (expected.masked_fill(expected.real > -1e4, 7), Reason.WRONG_OUTPUT),
    ):
        found = made._measured("declared", [actual])
        assert judge(found, precision, CorrectnessConfig()) is reason


@pytest.mark.parametrize(
    "wanted, oracle",
    [
        ("(x >= 0).all()", "float64"),
        ("x.max() <= 1", "float64"),
        ("x.dtype == x.float().dtype", "float32"),
    ],
)
def test_a_task_that_asserts_something_of_its_inputs_is_asked_for_more(tmp_path, wanted, oracle):
    source = task_source(f"assert {wanted}\nreturn x.sqrt()", inputs="[torch.rand(48, 64)]")
    made = serving(tmp_path, source)
    assert made.do_expect("declared", 1, "declared", None, "declared", False, None).oracle == oracle
    assert made.do_ignored_inputs(1) == {"ignored": []}
    assert made.do_used_bytes(1) == {"bytes": 48 * 64 * 4}
