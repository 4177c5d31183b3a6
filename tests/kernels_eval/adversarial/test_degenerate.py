"""Tasks on which anything would pass: constant, tiny, or NaN outputs (threats 13, 14, 31)."""

from __future__ import annotations

import pytest

from kernels_eval.records import Verdict
from tests.support.adversarial import Case, trials, writer
from tests.support.kernels import kernel_task, task_source

SOURCE = r"""
#include <cmath>
torch::Tensor zeros_like_rows(torch::Tensor x) {
  auto out = torch::empty({x.size(0), 1}, x.options());
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] = 0.0f;
  return out;
}
torch::Tensor zeros_of(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] = 0.0f;
  return out;
}
torch::Tensor centred_row_max(torch::Tensor x, int64_t dim) {
  auto in = x.contiguous();
  const int64_t rows = in.size(0), columns = in.size(1);
  auto out = torch::empty({rows, 1}, in.options());
  float* b = out.data_ptr<float>();
  double sum = 0;
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = in.data_ptr<float>() + i * columns;
    float top = a[0];
    for (int64_t j = 1; j < columns; ++j) top = a[j] > top ? a[j] : top;
    b[i] = top;
    sum += top;
  }
  const double mean = sum / rows;
  for (int64_t i = 0; i < rows; ++i) b[i] = (float)(b[i] - (dim == 0 ? mean : (double)b[i]));
  return out;
}
torch::Tensor scaled(torch::Tensor x, double factor) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = (float)(x.data_ptr<float>()[i] * factor);
  return out;
}
torch::Tensor memorised(torch::Tensor x) {
  auto out = torch::empty_like(x);
  const float known[4] = {2.0f, 4.0f, -6.0f, 8.0f};
  for (int64_t i = 0; i < 4; ++i) out.data_ptr<float>()[i] = known[i];
  return out;
}
torch::Tensor roots(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = std::sqrt(x.data_ptr<float>()[i]);
  return out;
}
torch::Tensor not_roots(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const float v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = v < 0 ? NAN : v;
  }
  return out;
}
torch::Tensor all_nan(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) out.data_ptr<float>()[i] = NAN;
  return out;
}
"""
code = writer(
    SOURCE,
    "adversarial_degenerate",
)


def task(forward: str, name: str) -> object:
    return kernel_task(task_source(forward, inputs="[torch.randn(48, 64)]"), f"adversarial_{name}")


# A maximum minus its own mean over a dimension of size 1: always zero, whatever the input. One word
# away from a sound task.
CONSTANT = task("top = x.amax(1, keepdim=True)\nreturn top - top.mean(1, keepdim=True)", "constant")
NOT_CONSTANT = task(
    "top = x.amax(1, keepdim=True)\nreturn top - top.mean(0, keepdim=True)", "not_constant"
)
TINY = task("return x * 1e-6", "tiny")
TINY_AND_RANDOM = task("return (x + torch.rand_like(x)) * 1e-6", "tiny_and_random")
ALL_NAN = task("return torch.sqrt(-1.0 - x * x)", "all_nan")
SOME_NAN = task("return torch.sqrt(x)", "some_nan")

# Its inputs are written out: one answer, which is known before anything is run.
WRITTEN_OUT = kernel_task(
    task_source("return x * 2.0", inputs="[torch.tensor([[1.0, 2.0], [-3.0, 4.0]])]"),
    "adversarial_written_out",
)
ALL_ALIKE = kernel_task(
    task_source("return x * 2.0", inputs="[torch.ones(2, 2)]"), "adversarial_all_alike"
)


def flagged(*flags: str) -> object:
    def check(verdict: Verdict) -> None:
        assert {flag for flag in verdict.flags if flag.endswith("never_vary")} == set(flags), (
            verdict.flags
        )

    return check


CASES = [
    Case(
        13,
        "memorised",
        ("stale_cache", "input_independent"),
        "return ext.memorised(x)",
        task=WRITTEN_OUT,
        twin="return ext.scaled(x, 2.0)",
        twin_check=flagged("own_answers_never_vary"),
    ),
    Case(
        13,
        "wrong_for_what_is_written_out",
        "wrong_output",
        "return ext.scaled(x, 3.0)",
        task=WRITTEN_OUT,
    ),
    Case(
        13,
        "all_alike",
        "wrong_output",
        "return ext.scaled(x, 2.1)",
        task=ALL_ALIKE,
        twin="return ext.scaled(x, 2.0)",
        twin_check=flagged("own_answers_never_vary", "answers_never_vary"),
    ),
    Case(
        13,
        "constant_output",
        "degenerate_task",
        "return ext.zeros_like_rows(x)",
        task=CONSTANT,
        twin="return ext.centred_row_max(x, 0)",
        twin_task=NOT_CONSTANT,
    ),
    Case(
        13,
        "honest_kernel_cannot_be_judged",
        "degenerate_task",
        "return ext.centred_row_max(x, 1)",
        task=CONSTANT,
    ),
    Case(
        13,
        "constant_on_a_sound_task",
        ("wrong_output", "input_independent"),
        "return ext.zeros_like_rows(x)",
        task=NOT_CONSTANT,
    ),
    Case(
        14,
        "zeros_for_tiny",
        ("wrong_output", "input_independent"),
        "return ext.zeros_of(x)",
        task=TINY,
        twin="return ext.scaled(x, 1e-6)",
    ),
    Case(14, "tenth_off_for_tiny", "wrong_output", "return ext.scaled(x, 1.1e-6)", task=TINY),
    Case(
        14,
        "random_task_of_tiny_outputs",
        "degenerate_task",
        "return ext.scaled(x, 1.5e-6)",
        task=TINY_AND_RANDOM,
    ),
    Case(
        31,
        "all_nan",
        "degenerate_task",
        "return ext.all_nan(x)",
        task=ALL_NAN,
        twin="return ext.roots(x)",
        twin_task=SOME_NAN,
    ),
    Case(31, "nan_in_place_rest_wrong", "wrong_output", "return ext.not_roots(x)", task=SOME_NAN),
    Case(
        31,
        "nan_everywhere_where_some_is_wanted",
        "non_finite",
        "return ext.all_nan(x)",
        task=SOME_NAN,
    ),
]


@pytest.mark.parametrize("trial", trials(CASES, code))
def test_degenerate(judge, trial):
    trial.assert_judged(judge)
