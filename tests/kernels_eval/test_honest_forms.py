"""Forms that honest candidates take and that were once refused: each is correct."""

import pytest
import torch

from kernels_eval.checks.inputs import _make_distinct
from tests.support.kernels import (
    AFFINE,
    assert_reason,
    kernel_task,
    module,
    task_source,
)

HEADER = """\
#include <torch/extension.h>
#include "one.h"
torch::Tensor affine(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) y.data_ptr<float>()[i] = one(x.data_ptr<float>()[i]);
  return y;
}
PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) { m.def("affine", &affine); }
"""
WITH_HEADER = f"""
import os
from torch.utils.cpp_extension import load
here = os.path.join(os.path.dirname(os.path.abspath(__file__)), "sources")
os.makedirs(here, exist_ok=True)
with open(os.path.join(here, "one.h"), "w") as header, open(here + "/one.cpp", "w") as source:
    header.write("inline float one(float v) {{ return 2 * v + 1; }}")
    source.write({HEADER!r})
"""
LIBRARY = """
torch::Tensor affine(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i) y.data_ptr<float>()[i] = 2 * x.data_ptr<float>()[i] + 1;
  return y;
}
TORCH_LIBRARY(honest_forms, m) { m.def("affine", affine); }
"""
THREADS = """
#include <algorithm>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>
torch::Tensor affine(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  float* b = y.data_ptr<float>();
  #pragma omp parallel for num_threads(2)
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = 2 * a[i] + 1;
  return y;
}
torch::Tensor total(torch::Tensor x) {
  auto y = torch::zeros({1}, x.options());
  const float* a = x.data_ptr<float>();
  float* sum = y.data_ptr<float>();
  const int64_t n = x.numel();
  std::mutex lock;
  std::vector<std::thread> threads;
  for (int64_t k = 0; k < 8; ++k) threads.emplace_back([=, &lock] {
    const float part = std::accumulate(a + k * n / 8, a + (k + 1) * n / 8, 0.0f);
    std::lock_guard<std::mutex> held(lock);
    *sum += part;
  });
  for (auto& each : threads) each.join();
  return y;
}
std::vector<torch::Tensor> largest(torch::Tensor x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  auto values = torch::empty({rows, 3}, x.options());
  auto places = torch::empty({rows, 3}, x.options().dtype(torch::kInt64));
  std::vector<int64_t> order(columns);
  for (int64_t row = 0; row < rows; ++row) {
    const float* a = x.data_ptr<float>() + row * columns;
    std::iota(order.begin(), order.end(), 0);
    std::partial_sort(order.begin(), order.begin() + 3, order.end(),
                      [a](int64_t i, int64_t j) { return a[i] > a[j] || (a[i] == a[j] && i < j); });
    for (int64_t k = 0; k < 3; ++k) {
      places.data_ptr<int64_t>()[row * 3 + k] = order[k];
      values.data_ptr<float>()[row * 3 + k] = a[order[k]];
    }
  }
  return {values, places};
}
torch::Tensor product(torch::Tensor x, torch::Tensor w) {
  auto y = torch::zeros({x.size(0), w.size(1)}, x.options());
  for (int64_t i = 0; i < x.size(0); ++i)
    for (int64_t k = 0; k < w.size(0); ++k)
      for (int64_t j = 0; j < w.size(1); ++j)
        y.data_ptr<float>()[i * w.size(1) + j] +=
            x.data_ptr<float>()[i * x.size(1) + k] * w.data_ptr<float>()[k * w.size(1) + j];
  return y;
}
"""
EXTENSION = (
    f"load_inline('honest_forms', {THREADS!r},"
    " functions=['affine', 'total', 'largest', 'product'],"
    " extra_cflags=['-O2', '-fopenmp', '-pipe'])"
)
SUM = kernel_task(task_source("return x.sum().reshape(1)"), "sum_of_all")
LARGEST = kernel_task(task_source("return torch.topk(x, 3, dim=1)"), "largest")
SQUARE = kernel_task(
    task_source("return self.linear(x)", init="self.linear = nn.Linear(64, 64, bias=False)"),
    "square_linear",
)
TRANSPOSED = (
    "self.weight = nn.Parameter(nn.Linear(64, 64, bias=False).weight.detach().t().contiguous())"
)
FORMS = {
    "byte_order_mark": (AFFINE, "\ufeff" + module("return ext.affine(x)")),
    "test_block": (
        AFFINE,
        module(
            "return ext.affine(x)",
            after="if __name__ == '__main__':\n    import gc, subprocess\n    gc.collect()",
        ),
    ),
    "files_beside_its_own_and_a_header": (
        AFFINE,
        module(
            "return ext.affine(x)",
            before=WITH_HEADER,
            extension="load('files', [here + '/one.cpp'], extra_include_paths=[here])",
        ),
    ),
    "library_loaded_by_its_path": (
        AFFINE,
        module(
            "return torch.ops.honest_forms.affine(x)",
            extension=f"load_inline('operators', {LIBRARY!r}, is_python_module=False)",
            after="torch.ops.load_library(ext)",
        ),
    ),
    "two_openmp_threads": (AFFINE, module("return ext.affine(x)", extension=EXTENSION)),
    "sum_under_a_lock": (SUM, module("return ext.total(x)", extension=EXTENSION)),
    "indices_of_equal_elements": (
        LARGEST,
        module("return tuple(ext.largest(x))", extension=EXTENSION),
    ),
    "square_weights_kept_transposed": (
        SQUARE,
        module("return ext.product(x, self.weight)", init=TRANSPOSED, extension=EXTENSION),
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_honest_forms_are_correct(verify, form):
    task, code = FORMS[form]
    assert_reason(verify(task, code), "ok")


def test_square_weights_kept_apart_from_their_parameter_are_stale(verify):
    forward = "return ext.product(x, self.kept)"
    kept = f"{TRANSPOSED}\nself.kept = self.weight.detach().clone()"
    verdict = verify(SQUARE, module(forward, init=kept, extension=EXTENSION))
    assert_reason(verdict, "stale_weights")


def test_a_largest_element_that_is_left_out_is_wrong(verify):
    forward = "values, places = ext.largest(x[:, :-1].contiguous())\nreturn values, places"
    assert_reason(verify(LARGEST, module(forward, extension=EXTENSION)), "wrong_output")


def test_equal_elements_are_moved_apart_in_their_order():
    x = torch.randn(64, 64)
    x[3], x[5], x[9] = 0.0, 1.5, -1.5
    before = x.clone()
    _make_distinct(x)
    assert x.unique().numel() == x.numel()
    assert torch.equal(x.flatten().argsort(), before.flatten().argsort(stable=True))
    assert (x - before).abs().max() < 1e-4
    assert (x[x != 0].abs() >= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize(
    "x", [torch.ones(4, dtype=torch.bfloat16), torch.tensor([torch.inf, torch.inf, torch.nan])]
)
def test_what_has_no_room_for_distinct_elements_stays(x):
    before = x.clone()
    _make_distinct(x)
    assert torch.equal(x.nan_to_num(7), before.nan_to_num(7))
