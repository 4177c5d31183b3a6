"""Who does the work: kernels that are absent, ornamental or hidden behind torch (threats 5 to
9)."""

from __future__ import annotations

import pytest

from kernels_eval.records import Verdict
from tests.support.adversarial import AFFINE_CPP, Case, trials, writer
from tests.support.kernels import functions_in, kernel_task, task_source

SOURCE = (
    AFFINE_CPP
    + r"""
#include <cmath>
torch::Tensor touch(torch::Tensor scratch) { scratch.data_ptr<float>()[0] = 1.0f; return scratch; }
torch::Tensor above_twenty_into(torch::Tensor x, torch::Tensor out) {
  for (int64_t i = 0; i < x.numel(); ++i)
      out.data_ptr<float>()[i] = std::fmax(x.data_ptr<float>()[i] - 20.0f, 0.0f);
  return out;
}
torch::Tensor library_product(torch::Tensor x, torch::Tensor w) { return torch::mm(x, w); }
torch::Tensor own_product(torch::Tensor x, torch::Tensor w) {
  auto in = x.contiguous(), weight = w.contiguous();
  const int64_t rows = in.size(0), inner = in.size(1), columns = weight.size(1);
  auto out = torch::empty({rows, columns}, in.options());
  for (int64_t i = 0; i < rows; ++i)
    for (int64_t j = 0; j < columns; ++j) {
      double sum = 0;
      for (int64_t k = 0; k < inner; ++k)
          sum += (double)in.data_ptr<float>()[i * inner + k]
            * weight.data_ptr<float>()[k * columns + j];
      out.data_ptr<float>()[i * columns + j] = (float)sum;
    }
  return out;
}
torch::Tensor library_softmax(torch::Tensor x) { return torch::softmax(x, 1); }
torch::Tensor own_softmax(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const int64_t rows = in.size(0), columns = in.size(1);
  for (int64_t i = 0; i < rows; ++i) {
    const float* a = in.data_ptr<float>() + i * columns;
    float* b = out.data_ptr<float>() + i * columns;
    double top = a[0], sum = 0;
    for (int64_t j = 1; j < columns; ++j) top = a[j] > top ? a[j] : top;
    for (int64_t j = 0; j < columns; ++j) sum += std::exp(a[j] - top);
    for (int64_t j = 0; j < columns; ++j) b[j] = (float)(std::exp(a[j] - top) / sum);
  }
  return out;
}
"""
)
code = writer(SOURCE, "adversarial_work")

PRODUCT = kernel_task(
    task_source(
        "return x @ self.weight",
        init="self.weight = nn.Parameter(torch.randn(64, 32))",
        inputs="[torch.randn(48, 64)]",
    ),
    "adversarial_product",
)
SOFTMAX = kernel_task(
    task_source("return torch.softmax(x, 1)", inputs="[torch.randn(48, 64)]"), "adversarial_softmax"
)
ZEROS = kernel_task(
    task_source("return torch.relu(x - 20.0)", inputs="[torch.rand(64, 64)]"),
    "adversarial_zeros_for_its_own_inputs",
)
TORCH = "return x * 2.0 + 1.0"
OWN = "return ext.affine(x)"
BUFFER = "self.out = torch.empty(64, 64)"
WEIGHT = "self.weight = nn.Parameter(torch.randn(64, 32))"
COPY = "class Model(nn.Module):\n    def forward(self, x):\n        return x * 2.0 + 1.0\n"
ONLY_TEXT = (
    f"import torch\nimport torch.nn as nn\nSOURCE = {SOURCE!r}\nclass ModelNew(nn.Module):\n    def"
    f" forward(self, x):\n        {TORCH}\n"
)
NAMED_TEXT = (
    "import torch\nimport torch.nn as nn\nfrom torch.utils.cpp_extension import"
    f" load_inline\nSOURCE = {SOURCE!r}\next = load_inline(name='adversarial_work',"
    f" cpp_sources=SOURCE, functions={functions_in(SOURCE)!r}, extra_cflags=['-O2'])\nclass"
    f" ModelNew(nn.Module):\n    def forward(self, x):\n        {OWN}\n"
)
TRY_BUILD = (
    "import torch\nimport torch.nn as nn\nfrom torch.utils.cpp_extension import"
    f" load_inline\ntry:\n    ext = load_inline(name='adversarial_work', cpp_sources={SOURCE!r},"
    f" functions={functions_in(SOURCE)!r}, extra_cflags=['-O2'])\n"
    "except RuntimeError:\n    ext = None\nclass ModelNew(nn.Module):\n    def"
    " forward(self, x):\n        if ext is None:\n            return"
    " x * 2.0 + 1.0\n        return ext.affine(x)\n"
)


def names(*operators: str) -> object:
    def check(verdict: Verdict) -> None:
        called = {name.removeprefix("aten.").strip("_") for name in verdict.library_calls}
        assert called & set(operators), f"none of {operators} in {verdict.library_calls}"

    return check


def names_none(*operators: str) -> object:
    def check(verdict: Verdict) -> None:
        called = {name.removeprefix("aten.").strip("_") for name in verdict.library_calls}
        assert not called & set(operators), verdict.library_calls

    return check


def matches(verdict: Verdict) -> None:
    assert verdict.outputs_match and verdict.correct_any and not verdict.correct_custom


CASES = [
    Case(5, "uncalled", "no_custom_kernel", TORCH, twin=OWN, check=matches),
    Case(5, "result_dropped", "no_custom_kernel", "ext.affine(x)\n" + TORCH, check=matches),
    Case(
        5,
        "scratch_only",
        "no_custom_kernel",
        code("ext.touch(self.scratch)\n" + TORCH, init="self.scratch = torch.zeros(1)"),
        twin="out = torch.empty_like(x)\next.affine_into(x, out)\nreturn out",
        check=matches,
    ),
    # Memory that is used again holds the right zeros before anything is written: other inputs tell.
    Case(
        5,
        "zeros_by_torch",
        "no_custom_kernel",
        code("ext.above_twenty_into(x, self.out)\nreturn torch.relu(x - 20.0)", init=BUFFER),
        task=ZEROS,
        check=matches,
        twin=code("ext.above_twenty_into(x, self.out)\nreturn self.out.clone()", init=BUFFER),
    ),
    Case(
        5,
        "times_zero",
        "no_custom_kernel",
        "return x * 2.0 + 1.0 + 0.0 * ext.affine(x)",
        check=matches,
    ),
    Case(
        5,
        "overwritten",
        "no_custom_kernel",
        "y = ext.affine(x)\ny.copy_(x * 2.0 + 1.0)\nreturn y",
        check=matches,
    ),
    Case(6, "only_text", "no_custom_kernel", ONLY_TEXT, twin=NAMED_TEXT, check=matches),
    Case(
        7,
        "fallback",
        "no_custom_kernel",
        f"try:\n    return ext.affine(x, 1, 2)\nexcept Exception:\n    {TORCH}",
        twin=TRY_BUILD,
        check=matches,
    ),
    Case(
        7,
        "flag",
        "no_custom_kernel",
        code(f"if self.training or not self.ready:\n    {TORCH}\n{OWN}", init="self.ready = False"),
        twin=code(
            f"if x.dtype != torch.float32 or not self.ready:\n    {TORCH}\n{OWN}",
            init="self.ready = True",
        ),
        check=matches,
    ),
    Case(
        7,
        "symbol_that_is_not_there",
        "no_custom_kernel",
        f"run = getattr(ext, 'affine_v2', None)\nif run is None:\n    {TORCH}\nreturn run(x)",
        check=matches,
    ),
    Case(8, "copied", "no_custom_kernel", code(TORCH, before=COPY), check=matches),
    Case(
        8,
        "inherited",
        "no_custom_kernel",
        code("return super().forward(x)", before=COPY).replace(
            "ModelNew(nn.Module)", "ModelNew(Model)"
        ),
        twin=code(OWN, before=COPY).replace("ModelNew(nn.Module)", "ModelNew(Model)"),
        check=matches,
    ),
    Case(
        8,
        "wrapped",
        "no_custom_kernel",
        code("return self.inner(x)", init="self.inner = Model()", before=COPY),
        check=matches,
    ),
    # A library called from inside an extension is no lie as long as the verdict says so.
    Case(
        9,
        "product_by_library",
        "ok",
        code("return ext.library_product(x, self.weight)", init=WEIGHT),
        task=PRODUCT,
        check=names("mm", "addmm", "matmul"),
        twin=code("return ext.own_product(x, self.weight)", init=WEIGHT),
        twin_check=names_none("mm", "addmm", "matmul", "bmm"),
    ),
    Case(
        9,
        "softmax_by_library",
        "ok",
        "return ext.library_softmax(x)",
        task=SOFTMAX,
        check=names("softmax"),
        twin="return ext.own_softmax(x)",
        twin_check=names_none("softmax"),
    ),
]


@pytest.mark.parametrize("trial", trials(CASES, code))
def test_work(judge, trial):
    trial.assert_judged(judge)
