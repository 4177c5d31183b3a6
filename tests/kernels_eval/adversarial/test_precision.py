"""Answers that are nearly right, right for one shape, or right by luck (threats 15, 16, 17, 29,
30)."""

from __future__ import annotations

import pytest

from kernels_eval.records import Verdict
from tests.support.adversarial import AFFINE_CPP, Case, trials, writer
from tests.support.kernels import kernel_task, task_source

SOURCE = (
    AFFINE_CPP
    + r"""
#include <chrono>
#include <cmath>
#include <cstring>
#include <thread>
static torch::Tensor scaled_by(torch::Tensor x, float factor) {
  auto out = affine(x);
  for (int64_t i = 0; i < out.numel(); ++i) out.data_ptr<float>()[i] *= factor;
  return out;
}
torch::Tensor half_percent_off(torch::Tensor x) { return scaled_by(x, 1.005f); }

// Rounds every product to so many bits of mantissa, as hardware does: 10 is TF32 (and fp16, within
// its range), 7 is bf16.
torch::Tensor rounded(torch::Tensor x, int64_t bits) {
  auto out = affine(x);
  float* b = out.data_ptr<float>();
  const unsigned drop = 23 - (unsigned)bits;
  for (int64_t i = 0; i < out.numel(); ++i) {
    unsigned word;
    std::memcpy(&word, b + i, 4);
    word = (word + (1u << (drop - 1))) & ~((1u << drop) - 1);
    std::memcpy(b + i, &word, 4);
  }
  return out;
}
torch::Tensor gelu_by_tanh(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = (float)(0.5 * v
        * (1.0 + std::tanh(0.7978845608028654 * (v + 0.044715 * v * v * v))));
  }
  return out;
}
torch::Tensor gelu(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) {
    const double v = x.data_ptr<float>()[i];
    out.data_ptr<float>()[i] = (float)(0.5 * v * (1.0 + std::erf(v * 0.7071067811865476)));
  }
  return out;
}
torch::Tensor affine_bf16(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const at::BFloat16* a = in.data_ptr<at::BFloat16>();
  at::BFloat16* b = out.data_ptr<at::BFloat16>();
  for (int64_t i = 0; i < in.numel(); ++i) b[i] = at::BFloat16((float)a[i] * 2.0f + 1.0f);
  return out;
}

static torch::Tensor column_mean_over(torch::Tensor x, double rows) {
  auto in = x.contiguous();
  auto out = torch::empty({in.size(1)}, in.options());
  for (int64_t j = 0; j < in.size(1); ++j) {
    double sum = 0;
    for (int64_t i = 0; i < in.size(0); ++i) sum += in.data_ptr<float>()[i * in.size(1) + j];
    out.data_ptr<float>()[j] = (float)(sum / rows);
  }
  return out;
}
torch::Tensor column_mean(torch::Tensor x) { return column_mean_over(x, (double)x.size(0)); }
torch::Tensor column_mean_of_48(torch::Tensor x) { return column_mean_over(x, 48.0); }
torch::Tensor column_mean_only_48(torch::Tensor x) {
  TORCH_CHECK(x.size(0) == 48 && x.size(1) == 64, "this kernel is for inputs of shape [48, 64]");
  return column_mean_over(x, 48.0);
}
static torch::Tensor row_sum_over(torch::Tensor x, int64_t columns) {
  auto in = x.contiguous();
  auto out = torch::empty({in.size(0)}, in.options());
  const int64_t last = in.numel() - 1;
  for (int64_t i = 0; i < in.size(0); ++i) {
    double sum = 0;
    for (int64_t j = 0; j < columns; ++j)
        sum += in.data_ptr<float>()[std::min(i * columns + j, last)];
    out.data_ptr<float>()[i] = (float)sum;
  }
  return out;
}
torch::Tensor row_sum(torch::Tensor x) { return row_sum_over(x, x.size(1)); }
torch::Tensor row_sum_of_64(torch::Tensor x) { return row_sum_over(x, 64); }

// Sums a copy of x into columns; `beyond` elements after the last one were never written.
static torch::Tensor column_sum_of_copy(torch::Tensor x, int64_t beyond, bool clear) {
  auto in = x.contiguous();
  const int64_t n = in.numel(), columns = in.size(1);
  auto copy = torch::empty({n + 1}, in.options());
  float* c = copy.data_ptr<float>();
  if (clear) c[n] = 0.0f;
  std::memcpy(c, in.data_ptr<float>(), n * 4);
  auto out = torch::empty({columns}, in.options());
  for (int64_t j = 0; j < columns; ++j) {
    double sum = 0;
    for (int64_t i = j; i < n + beyond; i += columns) sum += c[i];
    out.data_ptr<float>()[j] = (float)sum;
  }
  return out;
}
torch::Tensor column_sum_beyond(torch::Tensor x) { return column_sum_of_copy(x, 1, false); }
torch::Tensor column_sum_padded(torch::Tensor x) { return column_sum_of_copy(x, 1, true); }

static unsigned long long now() {
  return std::chrono::steady_clock::now().time_since_epoch().count();
}
// The last bits are the clock's: well within every tolerance, and never twice the same.
torch::Tensor jitter(torch::Tensor x) {
  auto out = affine(x);
  unsigned long long state = now();
  for (int64_t i = 0; i < out.numel(); ++i) {
    state = state * 6364136223846793005ull + 1442695040888963407ull;
    out.data_ptr<float>()[i] *= (state >> 63) ? 1.0f + 2.4e-7f : 1.0f - 2.4e-7f;
  }
  return out;
}
// Every third call one element loses an update, as in a race.
torch::Tensor lost_update(torch::Tensor x) {
  static int call = 0;
  auto out = affine(x);
  if (++call % 3 == 0) out.data_ptr<float>()[5] -= 1.0f;
  return out;
}
torch::Tensor two_halves(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const float* a = in.data_ptr<float>();
  float* b = out.data_ptr<float>();
  const int64_t n = in.numel();
  auto part = [=](int64_t from, int64_t to) {
    for (int64_t i = from; i < to; ++i) b[i] = a[i] * 2.0f + 1.0f;
  };
  std::thread other(part, 0, n / 2);
  part(n / 2, n);
  other.join();
  return out;
}
"""
)
code = writer(SOURCE, "adversarial_precision")

RANDN = "[torch.randn(48, 64)]"
POSITIVE = kernel_task(
    task_source("return x * 2.0 + 1.0", inputs="[torch.rand(48, 64)]"), "adversarial_positive"
)
BF16 = kernel_task(
    task_source("return x * 2.0 + 1.0", inputs="[torch.randn(48, 64).bfloat16()]"),
    "adversarial_bf16",
)
MEAN = kernel_task(task_source("return x.mean(0)", inputs=RANDN), "adversarial_mean")
ROW_SUM = kernel_task(task_source("return x.sum(1)", inputs=RANDN), "adversarial_row_sum")
COLUMN_SUM = kernel_task(task_source("return x.sum(0)", inputs=RANDN), "adversarial_column_sum")
OWN = code("return ext.affine(x)")


GELU = kernel_task(
    task_source("return torch.nn.functional.gelu(x)", inputs="[torch.randn(64, 64)]"),
    "adversarial_gelu",
)


def passes_the_loose_tolerance(verdict: Verdict) -> None:
    assert verdict.correctness is not None and verdict.correctness.kernelbench_1e2, (
        "the case is one that allclose(1e-2) lets pass"
    )


def says_that_other_shapes_are_refused(verdict: Verdict) -> None:
    assert "declared_shape_only" in verdict.flags


def says_that_it_is_another_formula(verdict: Verdict) -> None:
    assert verdict.detail.startswith("another formula")


CASES = [
    Case(
        15,
        "half_percent_off",
        "wrong_output",
        "return ext.half_percent_off(x)",
        task=POSITIVE,
        twin=OWN,
        check=passes_the_loose_tolerance,
    ),
    Case(
        16,
        "divides_by_48",
        "shape_specialised",
        "return ext.column_mean_of_48(x)",
        task=MEAN,
        twin="return ext.column_mean(x)",
    ),
    Case(
        16,
        "refuses_other_shapes",
        "ok",
        "return ext.column_mean_only_48(x)",
        task=MEAN,
        check=says_that_other_shapes_are_refused,
    ),
    Case(
        16,
        "stride_of_64",
        "shape_specialised",
        "return ext.row_sum_of_64(x)",
        task=ROW_SUM,
        twin="return ext.row_sum(x)",
    ),
    Case(
        17,
        "ten_bits",
        "precision_downcast",
        "return ext.rounded(x, 10)",
        twin="return ext.affine_bf16(x)",
        twin_task=BF16,
    ),
    Case(17, "seven_bits", "precision_downcast", "return ext.rounded(x, 7)"),
    Case(17, "through_fp16", "precision_downcast", "return ext.affine(x.half().float())"),
    Case(17, "through_bf16", "precision_downcast", "return ext.affine_bf16(x.bfloat16()).float()"),
    Case(
        17,
        "another_formula",
        "wrong_output",
        "return ext.gelu_by_tanh(x)",
        task=GELU,
        twin="return ext.gelu(x)",
        check=says_that_it_is_another_formula,
    ),
    Case(
        29,
        "one_beyond",
        ("wrong_output", "non_finite", "crashed"),
        "return ext.column_sum_beyond(x)",
        task=COLUMN_SUM,
        twin="return ext.column_sum_padded(x)",
    ),
    Case(
        30, "jitter", "non_deterministic", "return ext.jitter(x)", twin="return ext.two_halves(x)"
    ),
    Case(30, "lost_update", ("non_deterministic", "wrong_output"), "return ext.lost_update(x)"),
]


@pytest.mark.parametrize("trial", trials(CASES, code))
def test_precision(judge, trial):
    trial.assert_judged(judge)
