"""Forms that honest candidates take and that were once refused: each is correct."""

import pytest
import torch

from kernels_eval.model.inputs import _make_distinct
from tests.support.kernels import (
    AFFINE,
    OWN_TMP,
    QUICK,
    assert_reason,
    kernel_task,
    module,
    task_source,
    verifying,
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
IN_TMP = f"""
import os, shutil, tempfile
from torch.utils.cpp_extension import load
os.makedirs("/tmp/own", exist_ok=True)
with open("/tmp/own/one.h", "w") as header, open("/tmp/own/one.cpp", "w") as source:
    header.write("inline float one(float v) {{ return 2 * v + 1; }}")
    source.write({HEADER!r})
"""
REMOVED = """
os.unlink("/tmp/own/one.cpp")
shutil.rmtree("/tmp/own")
with tempfile.NamedTemporaryFile("w", suffix=".txt", delete=False) as file:
    file.write("log")
os.remove(file.name)
torch.set_num_threads(8)
"""
BROKEN = f"load_inline('broken', {THREADS!r}, functions=['affine'], extra_cflags=['-mno-such'])"
SECOND_TRY = f"""
try:
    ext = {BROKEN}
except Exception:
    ext = None
if ext is None:
    ext = {EXTENSION}
"""
STEPS = """
torch::Tensor thousandths(torch::Tensor x) {
  const int64_t rows = x.size(0), columns = x.size(1);
  auto y = torch::empty(x.sizes(), x.options().dtype(torch::kInt64));
  for (int64_t row = 0; row < rows; ++row) {
    const float* a = x.data_ptr<float>() + row * columns;
    int64_t* b = y.data_ptr<int64_t>() + row * columns;
    const float most = *std::max_element(a, a + columns);
    float sum = 0;
    for (int64_t i = 0; i < columns; ++i) sum += std::exp(a[i] - most);
    const float scale = 1e5f / sum;
    for (int64_t i = 0; i < columns; ++i) b[i] = (int64_t)(std::exp(a[i] - most) * scale);
  }
  return y;
}
torch::Tensor quantised(torch::Tensor x) {
  auto y = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
    y.data_ptr<float>()[i] = std::nearbyint(x.data_ptr<float>()[i] * 33.333333f) * 0.03f;
  return y;
}
torch::Tensor log_ratio(torch::Tensor x) {
  const int64_t first = (x.size(0) + 1) / 2 * x.size(1);
  float sums[2] = {0, 0};
  for (int64_t i = 0; i < x.numel(); ++i) sums[i >= first] += std::exp(x.data_ptr<float>()[i]);
  auto y = torch::empty({1}, x.options());
  y.data_ptr<float>()[0] = std::log(sums[0]) - std::log(sums[1]);
  return y;
}
"""
STEPPED = (
    f"load_inline('steps', '#include <algorithm>\\n#include <cmath>\\n' + {STEPS!r},"
    " functions=['thousandths', 'quantised', 'log_ratio'], extra_cflags=['-O2', '-flto'])"
)
THOUSANDTHS = kernel_task(task_source("return (torch.softmax(x, 1) * 1e5).long()"), "thousandths")
QUANTISED = kernel_task(task_source("return torch.round(x / 0.03) * 0.03"), "quantised")
LOG_RATIO = kernel_task(
    task_source(
        "first, second = x.exp().chunk(2)\nreturn (first.sum() / second.sum()).log()[None]"
    ),
    "log_ratio",
)
WITH_NONE = kernel_task(
    task_source("return x * 2.0 + 1.0, {'weights': None}"), "an_output_that_is_none"
)
SCALED = kernel_task(
    task_source(
        "return x * self.weight + self.bias",
        init="self.weight = nn.Parameter(torch.randn(64))\n"
        "self.bias = nn.Parameter(torch.randn(64))",
    ),
    "scaled",
)
KEEPS_FIRST = """
if not hasattr(self, "kept"):
    self.kept = self.weight.detach().clone()
return ext.times_row(x, self.kept) + self.bias
"""
FORMS = {
    "none_among_the_outputs": (WITH_NONE, module("return ext.affine(x), dict(weights=None)")),
    "vmap_around_a_kernel": (
        AFFINE,
        module("return torch.vmap(lambda row: row * 0.5 + 0.5)(ext.affine(x * 2))"),
    ),
    "default_device_of_the_task": (
        AFFINE,
        module("return ext.affine(x)", before="torch.set_default_device('cpu')"),
    ),
    "files_in_tmp_that_it_removes": (
        AFFINE,
        module(
            "return ext.affine(x)",
            before=IN_TMP,
            extension="load('files', ['/tmp/own/one.cpp'], extra_include_paths=['/tmp/own'])",
            after=REMOVED,
        ),
    ),
    "a_second_build_after_one_that_failed": (
        AFFINE,
        module(
            "return x * 2 + 1 if ext is None else ext.affine(x)",
            extension="None",
            after=SECOND_TRY,
        ),
    ),
    "a_second_build_in_the_constructor": (
        AFFINE,
        module(
            "return self.ext.affine(x)",
            extension="None",
            init=SECOND_TRY + "self.ext = ext",
        ),
    ),
    "integers_that_hang_on_rounding": (
        THOUSANDTHS,
        module("return ext.thousandths(x)", extension=STEPPED),
    ),
    "numbers_that_hang_on_rounding": (
        QUANTISED,
        module("return ext.quantised(x)", extension=STEPPED),
    ),
    "one_number_that_cancels": (LOG_RATIO, module("return ext.log_ratio(x)", extension=STEPPED)),
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


DISHONEST = {
    "the_next_integer": (THOUSANDTHS, "ext.thousandths(x) + (x > 2).long()"),
    "an_integer_in_one_place": (THOUSANDTHS, "ext.thousandths(x) - mark(x).long()"),
    "half_precision": (THOUSANDTHS, "ext.thousandths(x.half().float())"),
    "the_next_step": (QUANTISED, "ext.quantised(x) + 0.03 * mark(x)"),
    "another_step": (QUANTISED, "ext.quantised(x * 1.0001)"),
    "a_sum_of_rounded_terms": (LOG_RATIO, "ext.log_ratio(x.bfloat16().float())"),
}
# for some inputs that are drawn, its few wrong elements are as small as a lower precision's errors
MISTAKEN_FOR = {"another_step": "precision_downcast"}
MARK = """
def mark(x):
    found = torch.zeros_like(x)
    found[-1, -1] = 1
    return found
"""


@pytest.mark.parametrize("form", DISHONEST)
def test_rounding_explains_no_more_than_rounding(verify, form):
    task, forward = DISHONEST[form]
    verdict = verify(task, module(f"return {forward}", before=MARK, extension=STEPPED))
    assert verdict.reason in {"wrong_output", MISTAKEN_FOR.get(form)}, verdict
    assert ("integers or truth values" in verdict.detail) == (task is THOUSANDTHS)


def test_a_mode_that_is_left_on_is_tampering(verify):
    verdict = verify(AFFINE, module("return ext.affine(x)", before=LEFT_ON))
    assert_reason(verdict, "harness_tampering")
    assert verdict.detail.startswith("changes modes")


def test_a_failed_build_without_another_is_what_counts(verify):
    code = module("return x * 2 + 1", extension="None", after=SECOND_TRY.partition("if ext")[0])
    verdict = verify(AFFINE, code)
    assert verdict.reason == "build_failed" and "-mno-such" in verdict.detail


def test_a_misplaced_nan_is_named(verify):
    forward = "out = ext.affine(x)\nout[0, 0] = torch.nan\nreturn out"
    verdict = verify(AFFINE, module(forward, extension=EXTENSION))
    assert_reason(verdict, "non_finite")
    assert verdict.detail.startswith("NaN or infinity in other places")


def test_threads_that_a_call_sets_are_refused_with_a_remedy(verify):
    forward = "torch.set_num_threads(8)\nreturn ext.affine(x)"
    verdict = verify(AFFINE, module(forward, extension=EXTENSION))
    assert_reason(verdict, "global_state_changed")
    assert "1 -> 8" in verdict.detail and "set it at import" in verdict.detail


@pytest.mark.parametrize("form", FORMS)
def test_honest_forms_are_correct(verify, form):
    task, code = FORMS[form]
    if "/tmp" in code and not OWN_TMP:
        pytest.skip("this checkout is in /tmp, which a child then shares")
    assert_reason(verify(task, code), "ok")


def test_a_task_with_outputs_of_no_fixed_shape_is_quarantined(verify):
    task = kernel_task(task_source("return x[x > 0]"), "positive_ones")
    verdict = verify(task, module("return ext.affine(x)", extension=EXTENSION))
    assert_reason(verdict, "degenerate_task")
    assert "depend on the values of its inputs" in verdict.detail


LEFT_ON = """
class Mode(torch.overrides.TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return function(*args, **(kwargs or {}))
Mode().__enter__()
"""
COMPILED = "from torch import compile\n@compile\ndef half(y):\n    return y * 0.5 + 0.5"
REGISTERS = """
libraries = [torch.library.Library(name, "IMPL", "CPU") for name in ("aten", "prims")]
libraries[{index}].impl("{name}", lambda x, *a: x.clone())
"""


def test_a_step_under_torch_compile_is_correct():
    limits = QUICK.limits.model_copy(update={"run_s": 180})
    with verifying(QUICK.model_copy(update={"limits": limits})) as verify:
        code = module("return half(ext.affine(x) * 2 - 1)", after=COMPILED)
        assert_reason(verify(AFFINE, code), "ok")


@pytest.mark.parametrize("index, name", [(0, "expm1"), (1, "cos")])
def test_replacing_an_operator_of_torch_is_tampering(verify, index, name):
    registers = REGISTERS.format(index=index, name=name)
    verdict = verify(AFFINE, module("return ext.affine(x)", after=registers))
    assert_reason(verdict, "harness_tampering")
    assert verdict.detail.startswith("changes operators")


@pytest.mark.parametrize("forward", ["ext.affine(x)", "ext.affine(x), {}", "None"])
def test_none_is_part_of_the_structure(verify, forward):
    assert_reason(verify(WITH_NONE, module(f"return {forward}")), "wrong_shape")


def test_a_task_without_outputs_is_an_error(verify):
    task = kernel_task(task_source("x.add_(1)"), "no_outputs")
    verdict = verify(task, module("return ext.affine(x)"))
    assert_reason(verdict, "reference_failed")
    assert "returns nothing, not tensors" in verdict.detail


def test_a_part_of_the_weights_that_is_kept_is_named(verify):
    init = "self.weight = nn.Parameter(torch.randn(64))\n"
    init += "self.bias = nn.Parameter(torch.randn(64))"
    verdict = verify(SCALED, module(KEEPS_FIRST, init=init))
    assert_reason(verdict, "wrong_output")
    assert verdict.detail.startswith("right with the weights of the earlier calls")


def test_square_weights_kept_apart_from_their_parameter_are_stale(verify):
    forward = "return ext.product(x, self.kept)"
    kept = f"{TRANSPOSED}\nself.kept = self.weight.detach().clone()"
    verdict = verify(SQUARE, module(forward, init=kept, extension=EXTENSION))
    assert_reason(verdict, "stale_weights")


def test_a_largest_element_that_is_left_out_is_wrong(verify):
    forward = "values, places = ext.largest(x[:, :-1].contiguous())\nreturn values, places"
    assert_reason(verify(LARGEST, module(forward, extension=EXTENSION)), "wrong_output")


def test_equal_elements_are_moved_so_far_apart_that_a_softmax_tells_them_apart():
    x = torch.randn(64, 64)
    x[3], x[5], x[9] = 0.0, 1.5, -1.5
    before = x.clone()
    _make_distinct(x)
    assert x.unique().numel() == x.numel()
    assert (x - before).abs().max() < 1e-2 and x.abs().max() == before.abs().max()
    assert all(torch.softmax(row, 0).unique().numel() == 64 for row in x[[3, 5, 9]])
    assert (x[x != 0].abs() >= torch.finfo(torch.float32).tiny).all()


@pytest.mark.parametrize(
    "x", [torch.ones(4, dtype=torch.bfloat16), torch.tensor([torch.inf, torch.inf, torch.nan])]
)
def test_what_has_no_room_for_distinct_elements_stays(x):
    before = x.clone()
    _make_distinct(x)
    assert torch.equal(x.nan_to_num(7), before.nan_to_num(7))
