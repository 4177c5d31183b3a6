"""Inputs in other layouts, and records of a call that a candidate tears."""

import pytest
import torch

from kernels_eval.model.inputs import make_inputs, plan_inputs
from kernels_eval.model.measurement import same
from kernels_eval.model.operators import UNTRACED, traced_operators
from kernels_eval.source.screening import screen


def test_same_looks_into_containers():
    x = torch.ones(3)
    assert same([x, {"a": (x, 1)}], [x.clone(), {"a": (x.clone(), 1)}])
    for other in ([x, {"a": (x + 1, 1)}], [x, {"a": (x, 2)}], [x, {"b": (x, 1)}], [x], (x, x)):
        assert not same([x, {"a": (x, 1)}], other)


LAYOUTS = {
    "channels_last": "torch.randn(4, 16, 24, 27).to(memory_format=torch.channels_last)",
    "transposed": "torch.randn(40, 24).t()",
    "plain": "torch.randn(24, 40)",
}


@pytest.mark.parametrize("made", LAYOUTS.values(), ids=LAYOUTS)
def test_inputs_that_are_drawn_anew_lie_as_declared(made):
    space = {"torch": torch}
    exec(f"def get_inputs(): return [{made}]", space)
    task = type("Task", (), space)
    (declared,) = make_inputs(task, 0, "declared", None, "cpu")
    plan = plan_inputs([[declared]])
    names = "uniform normal large small offset sparse mixed impulse non_finite".split()
    for name in names:
        (drawn,) = make_inputs(task, 1, name, plan, "cpu")
        assert drawn.shape == declared.shape and drawn.dtype == declared.dtype
        assert drawn.stride() == declared.stride(), name
    order = sorted(range(declared.dim()), key=declared.stride)
    for shape in plan.shapes:
        (cut,) = make_inputs(task, 1, "declared", plan, "cpu", shape)
        strides = [cut.stride(dim) for dim in order if cut.shape[dim] > 1]
        assert strides == sorted(strides), shape
        assert sum((n - 1) * s for n, s in zip(cut.shape, cut.stride(), strict=True)) < cut.numel()


def product(x):
    with torch._C._DisableTorchDispatch(), torch.profiler.record_function('"'):
        return x @ x


def test_a_label_that_breaks_the_record_hides_no_operator():
    assert "aten.mm" in traced_operators(lambda: product(torch.randn(32, 32)))
    assert UNTRACED in traced_operators(lambda: product(torch.randn(32, 32)))
    assert UNTRACED not in traced_operators(lambda: torch.randn(32, 32) @ torch.randn(32, 32))


def test_a_record_that_is_switched_off_is_torn():
    switch = torch.autograd._enable_record_function

    def unseen():
        switch(False)
        return torch.randn(32, 32) @ torch.randn(32, 32)

    try:
        assert traced_operators(unseen) >= {UNTRACED}
    finally:
        switch(True)


@pytest.mark.parametrize(
    "line",
    [
        "from torch.autograd import _enable_record_function as switch",
        "torch._C._profiler._add_execution_trace_observer('own.json')",
        "switch = vars(torch.autograd)['_enable_record_function']",
    ],
)
def test_what_records_is_left_alone(line):
    found = screen(f"import torch\n{line}\nclass ModelNew: pass\n")
    assert found.reason == "forbidden_call", found
