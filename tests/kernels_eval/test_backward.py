"""Tasks that ask for gradients: right, wrong, and not by the candidate's kernels."""

import pytest

from kernels_eval.records import Reason
from tests.support.backward import FORMULAS, candidate, task_of
from tests.support.kernels import UNTIMED, verifying_on_gpu

REASONS = {
    "right": Reason.OK,
    "wrong_gradient": Reason.WRONG_GRADIENT,
    "no_kernel_in_backward": Reason.NO_CUSTOM_KERNEL,
}
BY_NAME = {formula.name: formula for formula in FORMULAS}


@pytest.fixture(scope="module")
def verify(verifiers):
    return verifiers(UNTIMED)


def assert_judged(evaluator, formula, kind, language):
    verdict = evaluator(task_of(formula), candidate(formula, kind, language))
    assert verdict.reason is REASONS[kind], verdict
    if kind == "right":
        assert {f"run_{formula.name}", f"run_{formula.name}_backward"} <= {
            name.removesuffix("_kernel").split("_kernel(")[0] for name in verdict.custom_kernels
        }
        assert type(verdict).model_validate_json(verdict.model_dump_json()) == verdict
    if kind == "wrong_gradient":
        # all gradients are off by as much: the worst is any of them
        assert verdict.detail.startswith("the gradient of ")
        assert verdict.outputs_match is False
    if kind == "no_kernel_in_backward":
        assert "backward passes" in verdict.detail and verdict.outputs_match


@pytest.mark.parametrize("kind", REASONS)
def test_gradients_are_judged(verify, kind):
    assert_judged(verify.evaluator, BY_NAME["rms_norm"], kind, "cpp")


def changed(formula, old, new):
    made = candidate(formula, "right", "cpp")
    assert made.code.count(old) == 1
    code = made.code.replace(old, new)
    return made.model_copy(update={"code": code, "candidate_id": code})


def test_a_kernel_that_runs_in_backward_for_show_is_found(verify):
    formula = BY_NAME["sigmoid"]
    show = changed(
        formula,
        "return tuple(ext.run_sigmoid_backward(g, x, 1.0))",
        "ext.run_sigmoid_backward(g, x, 1.0); s = torch.sigmoid(x); return g * s * (1 - s)",
    )
    verdict = verify.evaluator(task_of(formula), show)
    assert verdict.reason is Reason.NO_CUSTOM_KERNEL, verdict
    assert verdict.custom_kernels == ("run_sigmoid", "run_sigmoid_backward")


def test_a_backward_pass_that_knows_the_last_forward_pass_alone_is_wrong(verify):
    """Two calls of a layer in one graph, or losses that are added up, end as two forward passes
    before a backward one."""
    formula = BY_NAME["sigmoid"]
    made = changed(formula, "ctx.save_for_backward(x)", "Function.last = x,")
    code = made.code.replace("ctx.saved_tensors", "Function.last")
    assert code != made.code
    verdict = verify(task_of(formula), code)
    assert verdict.reason is Reason.WRONG_GRADIENT, verdict


def test_an_own_backward_is_taken_and_none_is_said(verify):
    formula = BY_NAME["gate"]
    call = "return Function.apply(x, y)"
    own = changed(
        formula,
        call,
        "self.saved = x, y; return ext.run_gate(x, y)\n"
        "    def backward(self, g):\n"
        "        return tuple(ext.run_gate_backward(g, *self.saved, 1.0))",
    )
    assert verify.evaluator(task_of(formula), own).reason is Reason.OK
    none = verify.evaluator(task_of(formula), changed(formula, call, "return ext.run_gate(x, y)"))
    assert none.reason is Reason.EXCEPTION and "define backward(*gradients)" in none.detail


@pytest.mark.slow
def test_marked_inputs_alone_have_gradients(verify):
    """`y` is not marked, so None for its gradient is right."""
    formula = BY_NAME["product"]
    task = task_of(formula)
    code = task.code.replace("[torch.randn(65, 64), ", "[torch.randn(65, 64, requires_grad=True), ")
    assert code != task.code
    only_x = changed(
        formula,
        "return tuple(ext.run_product_backward(g, x, y, 1.0))",
        "return ext.run_product_backward(g, x, y, 1.0)[0], None",
    )
    verdict = verify.evaluator(task.model_copy(update={"code": code}), only_x)
    assert verdict.reason is Reason.OK, verdict
    assert verify.evaluator(task, only_x).reason is Reason.WRONG_GRADIENT


CPP_FUNCTION = """
import torch
from torch.utils.cpp_extension import load_inline
source = r'''
#include <torch/extension.h>
#include <cmath>
using torch::autograd::AutogradContext;
using torch::autograd::variable_list;
struct Sigmoid : torch::autograd::Function<Sigmoid> {
  static torch::Tensor forward(AutogradContext* ctx, torch::Tensor x) {
    auto y = torch::empty_like(x);
    const float* from = x.data_ptr<float>();
    float* to = y.data_ptr<float>();
    for (int64_t i = 0; i < x.numel(); ++i) to[i] = 1.0f / (1.0f + expf(-from[i]));
    ctx->save_for_backward({y});
    return y;
  }
  static variable_list backward(AutogradContext* ctx, variable_list given) {
    auto y = ctx->get_saved_variables()[0], made = torch::empty_like(y);
    const float *g = given[0].data_ptr<float>(), *s = y.data_ptr<float>();
    float* to = made.data_ptr<float>();
    for (int64_t i = 0; i < y.numel(); ++i) to[i] = g[i] * s[i] * (1.0f - s[i]);
    return {made};
  }
};
torch::Tensor run(torch::Tensor x) { return Sigmoid::apply(x).view_as(x); }
'''
ext = load_inline(name="sigmoid_function", cpp_sources=source, functions=["run"])
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return ext.run(x)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("returned", "library"),
    [("made", ()), ("at::sigmoid_backward(given[0], y)", ("aten.sigmoid_backward",))],
)
def test_a_function_of_c_plus_plus_is_seen_in_backward(verify, returned, library):
    """Nothing in Python calls its backward pass; torch's operators in it are named."""
    code = CPP_FUNCTION.replace("return {made}", f"return {{{returned}}}")
    assert returned in code
    verdict = verify(task_of(BY_NAME["sigmoid"]), code)
    assert verdict.reason is Reason.OK, verdict
    assert verdict.custom_kernels == ("run", "Sigmoid") and verdict.library_calls == library


@pytest.mark.slow
@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.parametrize("name", BY_NAME)
def test_twelve_tasks_three_candidates_each(verify, name, kind):
    assert_judged(verify.evaluator, BY_NAME[name], kind, "cpp")


@pytest.fixture(scope="module")
def verify_on_gpu():
    with verifying_on_gpu() as made:
        yield made.evaluator


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("kind", REASONS)
@pytest.mark.parametrize("name", BY_NAME)
def test_twelve_tasks_three_candidates_each_on_a_gpu(verify_on_gpu, name, kind):
    assert_judged(verify_on_gpu, BY_NAME[name], kind, "cuda")
