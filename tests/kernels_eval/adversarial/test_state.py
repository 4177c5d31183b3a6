"""Inputs, weights, modes, globals and settings that are not the candidate's to change or to
remember (threats 10, 18, 19, 20, 32, 33)."""

from __future__ import annotations

import pytest

from kernels_eval.records import Verdict
from tests.support.adversarial import AFFINE_CPP, Case, trials, writer
from tests.support.kernels import kernel_task, task_source

SOURCE = (
    AFFINE_CPP
    + r"""
#include <cmath>
torch::Tensor relu_in_place(torch::Tensor x) {
  float* a = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) a[i] = a[i] > 0.0f ? a[i] : 0.0f;
  return x;
}
torch::Tensor relu(torch::Tensor x) { return relu_in_place(x.clone()); }
torch::Tensor spoils_one(torch::Tensor x) {
  auto out = affine(x);
  x.data_ptr<float>()[x.numel() - 1] += 1.0f;
  return out;
}
torch::Tensor by_row(torch::Tensor x, torch::Tensor gain) {
  auto out = torch::empty_like(x);
  const int64_t n = gain.numel();
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = x.data_ptr<float>()[i] * gain.data_ptr<float>()[i % n];
  return out;
}
torch::Tensor layer_norm(torch::Tensor x, torch::Tensor gain, torch::Tensor shift) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t rows = in.size(0), n = in.size(1);
  const bool one_gain = gain.numel() == 1, one_shift = shift.numel() == 1;
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = in.data_ptr<float>() + i * n;
    double mean = 0, square = 0;
    for (int64_t j = 0; j < n; ++j) mean += a[j];
    mean /= n;
    for (int64_t j = 0; j < n; ++j) square += (a[j] - mean) * (a[j] - mean);
    const double scale = 1.0 / std::sqrt(square / n + 1e-5);
    for (int64_t j = 0; j < n; ++j)
      out.data_ptr<float>()[i * n + j] = (float)((a[j] - mean) * scale
          * gain.data_ptr<float>()[one_gain ? 0 : j]
                                                 + shift.data_ptr<float>()[one_shift ? 0 : j]);
  }
  return out;
}
torch::Tensor column_mean(torch::Tensor x) {
  auto out = torch::empty({x.size(1)}, x.options());
  for (int64_t j = 0; j < x.size(1); ++j) {
    double sum = 0;
    for (int64_t i = 0; i < x.size(0); ++i) sum += x.data_ptr<float>()[i * x.size(1) + j];
    out.data_ptr<float>()[j] = (float)(sum / x.size(0));
  }
  return out;
}
torch::Tensor column_variance(torch::Tensor x) {
  auto out = torch::empty({x.size(1)}, x.options());
  for (int64_t j = 0; j < x.size(1); ++j) {
    double mean = 0, sum = 0;
    for (int64_t i = 0; i < x.size(0); ++i) mean += x.data_ptr<float>()[i * x.size(1) + j];
    mean /= x.size(0);
    for (int64_t i = 0; i < x.size(0); ++i) {
      const double d = x.data_ptr<float>()[i * x.size(1) + j] - mean;
      sum += d * d;
    }
    out.data_ptr<float>()[j] = (float)(sum / x.size(0));
  }
  return out;
}
torch::Tensor normalise(torch::Tensor x, torch::Tensor mean, torch::Tensor variance,
    torch::Tensor gain, torch::Tensor shift) {
  auto out = torch::empty_like(x);
  const int64_t n = x.size(1);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const int64_t j = i % n;
    const double scale =
        gain.data_ptr<float>()[j] / std::sqrt((double)variance.data_ptr<float>()[j] + 1e-5);
    out.data_ptr<float>()[i] = (float)((x.data_ptr<float>()[i] - (double)mean.data_ptr<float>()[j])
        * scale + shift.data_ptr<float>()[j]);
  }
  return out;
}
torch::Tensor ones_of(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i] = 1.0f;
  return out;
}
"""
)
code = writer(SOURCE, "adversarial_state")

RANDN = "[torch.randn(48, 64)]"
RELU = kernel_task(task_source("return torch.relu(x)", inputs=RANDN), "adversarial_relu")
RELU_IN_PLACE = kernel_task(
    task_source("return torch.relu_(x)", inputs=RANDN), "adversarial_relu_in_place"
)
WEIGHTED = kernel_task(
    task_source(
        "return x * self.weight", init="self.weight = nn.Parameter(torch.randn(64))", inputs=RANDN
    ),
    "adversarial_weighted",
)
LAYER_NORM = kernel_task(
    task_source("return self.norm(x)", init="self.norm = nn.LayerNorm(64)", inputs=RANDN),
    "adversarial_layer_norm",
)
BATCH_NORM = kernel_task(
    task_source("return self.norm(x)", init="self.norm = nn.BatchNorm1d(64)", inputs=RANDN),
    "adversarial_batch_norm",
)
OWN = "return ext.affine(x)"
WEIGHT = "self.weight = nn.Parameter(torch.randn(64))"
NORM = "self.norm = nn.BatchNorm1d(64)"
RUNNING = (
    "return ext.normalise(x, self.norm.running_mean, self.norm.running_var, self.norm.weight,"
    " self.norm.bias)"
)
BATCH = f"""if not self.training:
    {RUNNING}
return ext.normalise(x, ext.column_mean(x), ext.column_variance(x), self.norm.weight, \
self.norm.bias)"""
PLAIN_NORM = "ones, zeros = torch.ones(1), torch.zeros(1)\nreturn ext.layer_norm(x, ones, zeros)"

OVERRIDES = """
N = 1
def get_inputs():
    return [torch.zeros(1, 64)]
def get_init_inputs():
    return []
class Model(nn.Module):
    def forward(self, x):
        return torch.ones_like(x)
"""
REACHES_INTO_THE_TASK = """
import sys
task = sys.modules["task"] if "task" in sys.modules else None
if task is not None:
    task.get_inputs = lambda: [torch.zeros(48, 64)]
"""
# Checks draw inputs once per call; whoever draws several times in a row is about to take the time.
SMALL_WHEN_TIMED = """
import sys
task = sys.modules["task"] if "task" in sys.modules else None
drawn = [0]
if task is not None:
    real_inputs = task.get_inputs
    def inputs_for_the_clock():
        drawn[0] += 1
        return real_inputs() if drawn[0] < 2 else [torch.zeros(1, 1)]
    task.get_inputs = inputs_for_the_clock
"""


def flagged_at_most(verdict: Verdict) -> None:
    assert not any("global_state" in flag for flag in verdict.flags)


CASES = [
    Case(
        10,
        "changed_in_place",
        "input_mutated",
        "y = ext.relu(x)\next.relu_in_place(x)\nreturn y",
        task=RELU,
        twin="return ext.relu_in_place(x)",
        twin_task=RELU_IN_PLACE,
    ),
    Case(10, "one_element_changed", "input_mutated", "return ext.spoils_one(x)", twin=OWN),
    Case(
        18,
        "frozen_copy",
        "stale_weights",
        code(
            "return ext.by_row(x, self.frozen)",
            init=WEIGHT + "\nself.frozen = self.weight.detach().clone()",
        ),
        task=WEIGHTED,
        twin=code("return ext.by_row(x, self.weight)", init=WEIGHT),
    ),
    Case(
        18,
        "copied_on_the_first_call",
        "stale_weights",
        code(
            "if self.kept is None:\n    self.kept = self.weight.detach().clone()\nreturn"
            " ext.by_row(x, self.kept)",
            init=WEIGHT + "\nself.kept = None",
        ),
        task=WEIGHTED,
    ),
    Case(
        18,
        "not_a_parameter",
        "stale_weights",
        code("return ext.by_row(x, self.weight)", init="self.weight = torch.randn(64)"),
        task=WEIGHTED,
    ),
    Case(
        19,
        "no_parameters",
        "stale_weights",
        PLAIN_NORM,
        task=LAYER_NORM,
        twin=code(
            "return ext.layer_norm(x, self.gain, self.shift)",
            init=(
                "self.gain = nn.Parameter(torch.ones(64))\nself.shift ="
                " nn.Parameter(torch.zeros(64))"
            ),
        ),
    ),
    Case(
        19,
        "one_element",
        "stale_weights",
        code(
            "return ext.layer_norm(x, self.weight, self.bias)",
            init=(
                "self.weight = nn.Parameter(torch.ones(1))\nself.bias ="
                " nn.Parameter(torch.zeros(1))"
            ),
        ),
        task=LAYER_NORM,
    ),
    Case(
        19,
        "right_shape_never_read",
        "stale_weights",
        code(PLAIN_NORM, init="self.norm = nn.LayerNorm(64)"),
        task=LAYER_NORM,
    ),
    Case(
        20,
        "right_in_eval_only",
        "wrong_output",
        code(RUNNING, init=NORM),
        task=BATCH_NORM,
        twin=code(BATCH, init=NORM),
    ),
    Case(
        20,
        "switches_itself_to_eval",
        "wrong_output",
        code(RUNNING, init=NORM + "\nself.eval()"),
        task=BATCH_NORM,
    ),
    # Its own inputs and its own reference agree with it. Nobody asks them.
    Case(
        32,
        "own_inputs_and_reference",
        ("wrong_output", "input_independent"),
        code("return ext.ones_of(x)", before=OVERRIDES),
        twin=code(OWN, before=OVERRIDES),
    ),
    Case(32, "own_size", "wrong_shape", code("return ext.affine(x[:N])", before=OVERRIDES)),
    Case(
        32,
        "inputs_of_the_task_replaced",
        ("wrong_output", "input_independent", "harness_tampering"),
        code(OWN, before=REACHES_INTO_THE_TASK),
    ),
    Case(
        32,
        "small_inputs_for_the_clock",
        ("wrong_shape", "wrong_output", "harness_tampering", "implausible_time"),
        code("drawn[0] = 0\n" + OWN, before=SMALL_WHEN_TIMED),
    ),
    Case(
        33,
        "threads",
        "global_state_changed",
        "torch.set_num_threads(8)\n" + OWN,
        twin=code(OWN, before="torch.backends.cudnn.benchmark = True"),
        twin_check=flagged_at_most,
    ),
    Case(
        33,
        "default_dtype",
        "global_state_changed",
        "torch.set_default_dtype(torch.float64)\nreturn ext.affine(x.float())",
    ),
    Case(33, "default_device", "global_state_changed", "torch.set_default_device('meta')\n" + OWN),
    Case(
        33,
        "deterministic_algorithms",
        "global_state_changed",
        "torch.use_deterministic_algorithms(True)\n" + OWN,
    ),
]


@pytest.mark.parametrize("trial", trials(CASES, code))
def test_state(judge, trial):
    trial.assert_judged(judge)
