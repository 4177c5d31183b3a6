"""Approximations by either policy, and what repeated calls say of a wrong answer."""

from types import SimpleNamespace

import pytest

from kernels_eval.config import CorrectnessConfig
from kernels_eval.judge.explanation import explained
from kernels_eval.judge.trials import TRIALS, Trial
from kernels_eval.protocol import Comparison
from kernels_eval.records import Reason
from tests.support.kernels import QUICK, kernel_task, load_inline, module, task_source, verifying

NORMAL = next(row for row in TRIALS if row.name == "normal")
TASK = kernel_task(
    task_source("return torch.nn.functional.gelu(x)", inputs="[torch.rand(64, 64)]"), "formula"
)
GELU = load_inline(
    r"""
#include <cmath>
torch::Tensor gelu_by_tanh(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] =
        (float)(0.5 * v * (1.0 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))));
  }
  return out;
}
""",
    name="formula",
)


@pytest.mark.parametrize("formula", ["flag", pytest.param("off", marks=pytest.mark.slow)])
def test_an_approximation_is_correct_where_the_policy_takes_it(formula):
    config = QUICK.model_copy(
        update={"correctness": CorrectnessConfig(formula=formula), "time_correct": False}
    )
    with verifying(config) as verify:
        verdict = verify(TASK, module("return ext.gelu_by_tanh(x)", extension=GELU))
    assert verdict.reason is Reason.OK, verdict.detail
    assert verdict.outputs_match and ("approximation" in verdict.flags) == (formula == "flag")


@pytest.mark.parametrize("again, reason", [(1e-2, "wrong_output"), (1.2e-2, "non_deterministic")])
def test_other_bits_explain_a_wrong_answer_only_where_its_error_differs(again, reason):
    """A convolution of torch may differ in the last bits; a race differs by what it loses."""
    trial, found = (
        Trial("normal", NORMAL, 1, distribution="normal"),
        Comparison(rms=1e-2, reference_rms=0, max=1),
    )
    call = SimpleNamespace(rerun_differs=True, previous_changed=False)
    process = SimpleNamespace(
        calls=[call],
        call=lambda trial: found.model_copy(update={"rms": again}),
        reference=SimpleNamespace(trials=[trial], loaded=SimpleNamespace(gradients=None)),
    )
    stop = explained(trial, Reason.WRONG_OUTPUT, found, process)
    assert stop.finding.reason == reason
