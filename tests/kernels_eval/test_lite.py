"""The lite headers: what they accept torch accepts, what they give is what torch gives, and
launches of CUDA libraries are counted."""

import ctypes
import importlib.util
import os
import re
import struct
import subprocess
import sys
import tempfile
import uuid
from pathlib import Path

import pytest
import yaml

from kernels_eval.candidate.kernel_tracer import Launches
from kernels_eval.compile.certain_errors import certain_error
from kernels_eval.compile.extensions import Builder
from kernels_eval.compile.lite import (
    COMMON,
    Operators,
    definitions,
    only_declares,
    standard_headers,
)
from kernels_eval.compile.process import WorkRoot, remove_abandoned
from kernels_eval.compile.torch_names import TorchNames, file_scope
from kernels_eval.config import BuildConfig
from kernels_eval.records import stable_hash
from kernels_eval.source.spec import ExtensionSpec
from tests.support.cases import cases
from tests.support.processes import output_of, python

CASES = cases("lite")

torch = pytest.importorskip("torch")


@pytest.fixture(scope="module")
def builder():
    made = Builder(BuildConfig())
    made.warm()
    return made


def inline(source, *functions, **fields):
    """A request for a library, which is kept until these headers or its source change."""
    return ExtensionSpec.model_validate(
        {
            "name": f"lite_{stable_hash([source, functions, fields])[:8]}",
            "cpp_sources": (source,),
            "functions": functions,
            "extra_cflags": ("-O1",),
            **fields,
        }
    )


def load(build):
    name = Path(build.path).stem
    spec = importlib.util.spec_from_file_location(name, build.path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def attempted(builder, spec):
    """What comes of a spec with the lite headers alone."""
    with tempfile.TemporaryDirectory(dir=builder.work_root) as scratch:
        return builder.attempt(spec, "lite", Path(scratch)).build()


WIDE = """
#include <vector>
torch::Tensor metadata(torch::Tensor x) {
  TORCH_CHECK(x.dim() == 2, "want 2 dims, got ", x.dim(), " of ", x.sizes(), " in ", \
x.scalar_type(), " on ", x.device(), ' ', 1.5, true);
  auto options = torch::TensorOptions().dtype(torch::kFloat32).device(x.device());
  auto facts = torch::zeros({8}, options);
  float* f = facts.data_ptr<float>();
  f[0] = x.size(-1); f[1] = x.stride(0); f[2] = x.numel(); f[3] = x.is_contiguous(); f[4] = \
x.element_size();
  f[5] = x.dtype() == torch::kDouble; f[6] = x.options().has_dtype(); f[7] = x.sizes().vec().back();
  return facts;
}
std::vector<torch::Tensor> arithmetic(torch::Tensor a, const at::Tensor& b, double s, int64_t n, \
bool flip) {
  auto c = torch::empty_like(a);
  c.copy_(a);
  c += b;
  c *= s;
  std::vector<torch::Tensor> out = {a + b, a - s, s / a, a * 2, -a, c, a.sum(), a.sum({0}, true), \
a.mean(1),
                                    a.matmul(b.t()), a[0], a[0][n]};
  if (flip) out.push_back(torch::flip(a, {1}));
  out.push_back(torch::softmax(a, -1));
  out.push_back(std::get<0>(a.max(1)));
  out.push_back(a.view({-1}).slice(0, 1, 3).contiguous());
  out.push_back(torch::full({2, 3}, 1.5, a.options()));
  out.push_back(a > b);
  return out;
}
std::tuple<double, int64_t, bool> scalars(at::Tensor x, c10::optional<at::Tensor> none, \
std::vector<int64_t> dims, at::IntArrayRef more) {
  return {x.sum().item<double>(), dims[0] + more[1] + x.sum().item().toLong(), none.has_value()};
}
torch::Tensor dispatched(torch::Tensor x) {
  auto y = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "dispatched", [&] {
    auto in = x.accessor<scalar_t, 2>();
    auto out = y.accessor<scalar_t, 2>();
    at::parallel_for(0, x.size(0), 1, [&](int64_t from, int64_t to) {
      for (int64_t i = from; i < to; ++i) for (int64_t j = 0; j < x.size(1); ++j) out[i][j] = \
in[i][j] * scalar_t(sizeof(scalar_t));
    });
  });
  return y;
}
"""


@pytest.fixture(scope="module")
def wide(builder):
    build = builder.build(inline(WIDE, "metadata", "arithmetic", "scalars", "dispatched"))
    assert build.ok and build.tier == "lite", build.log
    return load(build)


@pytest.mark.slow
def test_unoptimised_code_does_not_take_the_place_of_torchs(builder):
    """At -O0 inline functions are emitted under torch's own names; bound to by the shims, they
    would call each other without end."""
    build = builder.build(
        inline(WIDE, "metadata", "arithmetic", "scalars", "dispatched", extra_cflags=("-O0",))
    )
    assert build.ok and build.tier == "lite", build.log
    x = torch.randn(3, 4)
    assert load(build).metadata(x)[2] == 12
    exported = output_of("nm", "-D", "--defined-only", build.path)
    names = [line.split()[-1] for line in exported.splitlines() if " A " not in line]
    assert names == [f"PyInit_{Path(build.path).stem}"]


def test_metadata_is_torchs(wide):
    x = torch.zeros(3, 4, dtype=torch.float64)
    assert wide.metadata(x).tolist() == [4, 4, 12, 1, 8, 1, 1, 4]
    assert wide.metadata(x.t()).tolist() == [3, 1, 12, 0, 8, 1, 1, 3]
    with pytest.raises(
        RuntimeError, match=re.escape("want 2 dims, got 3 of [1, 2, 3] in Float on cpu 1.51")
    ):
        wide.metadata(torch.zeros(1, 2, 3))


SHAPES = """
torch::Tensor shape(torch::Tensor x) {
  auto found = torch::empty({2 + 4 * x.dim()}, torch::kInt64);
  int64_t* f = found.data_ptr<int64_t>();
  *f++ = x.dim();
  *f++ = x.numel();
  for (int64_t d = -x.dim(); d < x.dim(); ++d) { *f++ = x.size(d); *f++ = x.stride(d); }
  return found;
}
int64_t size(torch::Tensor x, int64_t d) { return x.size(d); }
int64_t stride(torch::Tensor x, int64_t d) { return x.stride(d); }
int64_t turns(torch::Tensor x) {
  auto y = torch::empty_like(x);
  float *in = x.data_ptr<float>(), *out = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) out[i] = in[i] + float(x.size(0));
  return y.numel();
}
"""


def test_shapes_are_read_where_torch_keeps_them(builder):
    """Without a call, or a loop up to `x.numel()` would be slower than with torch's headers."""
    build = builder.build(inline(SHAPES, "shape", "size", "stride", "turns"))
    assert build.ok and build.tier == "lite", build.log
    module = load(build)
    for dims in range(9):
        x = torch.empty(*range(1, dims + 1)).transpose(0, -1) if dims else torch.tensor(1.0)
        both = zip(x.size() * 2, x.stride() * 2, strict=True)
        assert module.shape(x).tolist() == [dims, x.numel(), *(n for pair in both for n in pair)]
        for far in (dims, -dims - 1):
            for named in (module.size, module.stride):
                with pytest.raises(IndexError, match="[Dd]imension"):
                    named(x, far)
    x = torch.empty(4, 6)
    assert module.shape(x[:, :0]).tolist()[:2] == [2, 0]
    x.resize_(2, 3, 4)
    assert module.shape(x).tolist()[:6] == [3, 24, 2, 12, 3, 4]
    assert not {"numel", "dim"} & functions_of_the_shim(build)


METADATA = """
void refuse(torch::Tensor x) {
  auto dtype = x.scalar_type();
  TORCH_CHECK(x.defined() && x.dtype() != dtype, "it is ", dtype, " on ", x.device());
}
std::vector<int64_t> facts(torch::Tensor x) {
  TORCH_CHECK(x.scalar_type() == torch::kFloat32 && x.dtype() == torch::kFloat32);
  TORCH_CHECK(x.device() == torch::kCPU && x.is_cpu() && !x.is_cuda() && !x.is_meta());
  std::vector<int64_t> found = {x.storage_offset(), x.get_device()};
  for (auto n : x.sizes()) found.push_back(n);
  for (auto n : x.strides()) found.push_back(n);
  return found;
}
bool handles(torch::Tensor x) {
  torch::Tensor y = std::move(x), z;
  bool moved = !x.defined() && y.defined();
  z = std::move(y);
  return moved && !y.defined() && z.defined();
}
float sum(torch::Tensor x) {
  float total = 0;
  auto a = x.accessor<float, 2>();
  for (int i = 0; i < x.sizes()[0]; ++i) for (int j = 0; j < x.sizes()[1]; ++j) total += a[i][j];
  return total;
}
"""


def functions_of_the_shim(build):
    """Names of what a library calls there. The places of a tensor's fields are data."""
    called = output_of("nm", "-D", "--demangle", "--undefined-only", build.path)
    return set(re.findall(r" U concur::(\w+)\(", called))


@pytest.mark.filterwarnings("ignore")
def test_metadata_is_read_without_a_call(builder):
    """Where a loop asks for it, a call took up to twenty times as long as torch's headers do."""
    build = builder.build(inline(METADATA, "refuse", "facts", "handles", "sum"))
    assert build.ok and build.tier == "lite", build.log
    module = load(build)
    assert functions_of_the_shim(build) <= {
        *("retain", "release", "unpack", "wrap", "translate_exception"),
        *("check_failed", "scalar_name", "no_scalar_type", "device"),  # of errors
        "data",  # torch's headers call for pointers, too
    }
    for dims in range(9):
        x = torch.zeros(3, *range(1, dims + 1))[1].transpose(0, -1) if dims else torch.zeros(2)[1]
        expected = [x.storage_offset(), -1, *x.shape, *x.stride()]
        assert module.facts(x) == expected
    assert module.handles(x) and module.sum(torch.ones(3, 4)) == 12
    for dtype in {x for x in vars(torch).values() if isinstance(x, torch.dtype)}:
        if not str(dtype).startswith("torch.q"):
            x = torch.empty(0, dtype=dtype, device="meta")
            said = x.type().rpartition(".")[2].removesuffix("Tensor")
            with pytest.raises(RuntimeError, match=f"^it is {said} on meta$"):
                module.refuse(x)
    with pytest.raises(RuntimeError, match="does not have a device"):
        module.refuse(None)


def test_the_bindings_functions_are_optimised(builder):
    """Unoptimised, they took a call of eight arguments twice as long as pybind11's."""
    table = output_of("nm", "-C", "--defined-only", builder.prepared.shim("concur_python"))
    assert "concur::unpack(" in table and "THPVariable_Unpack(" not in table


def test_operators_mean_what_torchs_mean(wide):
    a, b = torch.randn(3, 4), torch.randn(3, 4)
    c = (a.clone() + b) * 0.5
    expected = [
        a + b,
        a - 0.5,
        0.5 / a,
        a * 2,
        -a,
        c,
        a.sum(),
        a.sum(0, keepdim=True),
        a.mean(1),
        a @ b.t(),
        a[0],
        a[0][2],
        a.flip(1),
    ]
    expected += [a.softmax(-1), a.max(1).values, a.view(-1)[1:3], torch.full((2, 3), 1.5), a > b]
    got = wide.arithmetic(a, b, 0.5, 2, True)
    assert len(got) == len(expected)
    for one, other in zip(got, expected, strict=True):
        assert one.dtype == other.dtype and torch.allclose(one.double(), other.double())


def test_values_go_in_and_out_as_pybind11_takes_them(wide):
    assert wide.scalars(torch.ones(2), None, [5, 6], (1, 2)) == (2.0, 9, False)
    assert wide.scalars(torch.ones(2), torch.ones(1), [5], [1, 2])[2] is True
    for wrong in (
        (torch.ones(2), None, [0.5], [1, 2]),
        ("x", None, [5], [1, 2]),
        (torch.ones(2), None, [5]),
    ):
        with pytest.raises(TypeError):
            wide.scalars(*wrong)


def test_dispatch_covers_its_types_and_refuses_others(wide):
    assert wide.dispatched(torch.ones(2, 2)).tolist() == [[4, 4], [4, 4]]
    assert wide.dispatched(torch.ones(2, 2, dtype=torch.float64)).tolist() == [[8, 8], [8, 8]]
    with pytest.raises(NotImplementedError, match="not implemented for 'Int'"):
        wide.dispatched(torch.ones(2, 2, dtype=torch.int32))


def test_options_that_are_compiled_once_mean_what_torchs_mean(builder):
    source = """
std::vector<at::Tensor> f(at::Tensor x) {
  auto half = x.options().dtype(torch::kFloat64).requires_grad(true);
  auto empty = at::empty({2, 3}, x.options().layout(torch::kStrided).memory_format(std::nullopt));
  return {torch::zeros({2}, half), torch::ones_like(x, torch::requires_grad()), torch::full({2}, \
7, torch::dtype(torch::kInt64)),
          torch::full_like(x, 1.5, torch::kFloat64), at::zeros({1}, \
torch::device(torch::kCPU).dtype(torch::kBool)), empty,
          torch::zeros(x.sizes().vec(), torch::TensorOptions().device(torch::kMeta)),
          torch::ones({1}, torch::device_index(0).device(x.device()))};
}"""
    build = builder.build(inline(source, "f"))
    assert build.ok and build.tier == "lite", build.log
    x = torch.zeros(2, 3)
    got = load(build).f(x)
    expected = [
        torch.zeros(2, dtype=torch.float64, requires_grad=True),
        torch.ones_like(x, requires_grad=True),
        torch.full((2,), 7),
        torch.full_like(x, 1.5, dtype=torch.float64),
        torch.zeros(1, dtype=torch.bool),
        torch.empty(2, 3),
        torch.zeros(2, 3, device="meta"),
        torch.ones(1),
    ]
    for number, (one, other) in enumerate(zip(got, expected, strict=True)):
        assert (one.dtype, one.shape, one.device, one.requires_grad) == (
            other.dtype,
            other.shape,
            other.device,
            other.requires_grad,
        )
        assert number in (5, 6) or torch.equal(one, other)


def test_the_common_library_exports_what_it_is_for_and_nothing_else(builder):
    """Lite's inline functions have torch's names: exported, they would take the place of torch's in
    the shims, which call them."""
    table = output_of("nm", "-DC", "--defined-only", builder.prepared.common())
    exported = [
        line.split(maxsplit=2)[2].split("(")[0]
        for line in table.splitlines()
        if line.split(maxsplit=2)[1] in "TWV"
    ]
    kept = {
        "c10::optTypeMetaToScalarType",
        *(f"{space}::{name}" for space in ("at", "torch") for name in COMMON),
    }
    assert kept <= set(exported)
    assert all(name in kept or name.startswith("c10::TensorOptions::") for name in exported), (
        exported
    )


@pytest.mark.parametrize(
    "text, only",
    CASES["which_sources_do_without_operators"],
)
def test_which_sources_do_without_operators(text, only):
    assert only_declares(text) is only


@pytest.mark.parametrize("flags", [(), ("-O3",), ("-O2", "-DWITH_CUDA"), ("-std=c++14",)])
def test_bindings_are_precompiled_where_the_flags_allow_it(builder, flags, tmp_path):
    spec = inline("at::Tensor f(at::Tensor x);", "f", extra_cflags=flags, cuda_sources=("// none",))
    attempt = builder.attempt(spec, "lite", tmp_path)
    name, text = attempt.units()[0]
    (tmp_path / name).write_text(text)
    command = [*attempt.command(name), "-H", "-fsyntax-only", str(tmp_path / name)]
    done = subprocess.run(command, capture_output=True, text=True)
    if builder.tools.is_gcc:
        assert (re.search(r"^! .*extension\.h\.gch", done.stderr, re.MULTILINE) is not None) is (
            flags != ("-std=c++14",)
        ), done.stderr
    assert (done.returncode == 0) is (flags != ("-std=c++14",))


def test_standard_headers_come_with_the_names_that_need_them():
    assert standard_headers("x.numel(); expf(y); std::sqrt(z); std :: pow(a, b)") == ""
    for text in (
        "std::max(a, b)",
        "std::vector<int> v",
        "using namespace std;",
        "x.sizes().vec()",
        "std::swap(a, b); std::sqrt(c)",
    ):
        assert "<vector>" in standard_headers(text), text
    assert "<limits>" in standard_headers("std::numeric_limits<float>::max()")
    assert "-DCONCUR_SPECIAL" in definitions(
        "std::legendre(1, x)"
    ) and "-DCONCUR_SPECIAL" not in definitions("legend(1)")


@pytest.mark.parametrize(
    "source",
    [
        "double x = std::legendre(1, 0.5);",
        pytest.param("float beta = 1;", marks=pytest.mark.slow),
        pytest.param("double y = beta(1.0, 2.0);", marks=pytest.mark.slow),
    ],
)
def test_special_functions_are_there_for_those_who_name_them(builder, source):
    plain = f"#include <cmath>\n#include <math.h>\n{source}"
    command = [builder.tools.cxx, "-std=c++20", "-fsyntax-only", "-x", "c++", "-"]
    alone = subprocess.run(command, input=plain, text=True, capture_output=True)
    asked = inline(f"{source}\nat::Tensor f(at::Tensor x) {{ return x; }}", "f")
    build = attempted(builder, asked)
    assert build.ok is (alone.returncode == 0), build.log


def test_tensors_are_neither_leaked_nor_freed_early(builder):
    build = builder.build(
        inline(
            "at::Tensor same(at::Tensor x) { at::Tensor y = x; auto z = std::move(y); y = z; x = y;"
            " return x; }",
            "same",
        )
    )
    assert build.ok and build.tier == "lite", build.log
    same, x = load(build).same, torch.ones(1000)
    for _ in range(100):
        y = same(x)
    assert y.data_ptr() == x.data_ptr() and x._use_count() == y._use_count()
    del y
    before = x._use_count()
    same(x)
    assert x._use_count() == before


STRICT = {
    "explicit_layout": "torch::TensorOptions o = torch::kStrided; return x;",
    "no_such_overload": "return x.sum(1, 2, 3, 4);",
    "other_namespace": "return c10::empty({1}, x.options());",
    "stream_without_its_header": "at::cuda::getCurrentCUDAStream(); return x;",
    "dispatch_on_type": 'AT_DISPATCH_FLOATING_TYPES(x.type(), "f", [&] {}); return x;',
    "rvalue_accessor": "auto a = (x + x).accessor<float, 1>(); return x;",
    "removed_macro": 'AT_CHECK(x.dim() == 1, "no"); return x;',
    "no_cfloat": "float m = FLT_MAX; return x * m;",
}


@pytest.mark.parametrize("fault", STRICT)
def test_what_torch_rejects_lite_rejects(builder, fault):
    asked = inline(f"at::Tensor f(at::Tensor x) {{ {STRICT[fault]} }}", "f")
    build = attempted(builder, asked)
    assert (
        not build.ok
        and "error: " in build.log
        and "concur_" not in build.log.partition("error: ")[0]
    )


@pytest.mark.parametrize(
    "source",
    [
        "PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {}",
        "at::Tensor f(at::Tensor x) { return torch::nn::functional::relu(x); }",
        "TORCH_LIBRARY(a, m) {}",
        "at::Tensor f(at::Tensor x) { TORCH_WARN(1); return x; }",
    ],
)
def test_what_only_torch_has_goes_straight_to_it(builder, source):
    assert not builder.lite_can(inline(source, "f"))


KNOWN = TorchNames(
    macros=frozenset(),
    words=frozenset({"stride", "relu", "rows"}),
    file_scope=frozenset({"printf"}),
    methods=frozenset({"relu"}),
    not_brought=frozenset({"getCurrentCUDAStream"}),
    nvcc_words=frozenset({"__half2float", "stride", "relu", "rows"}),
    nvcc_files=frozenset({"/t/torch/extension.h", "/usr/include/math.h"}),
)


ERRORS = yaml.safe_load((Path(__file__).parents[1] / "data/first_errors.yaml").read_text())


@pytest.mark.parametrize("certain", ERRORS)
def test_which_first_errors_need_no_second_opinion(certain):
    for case in ERRORS[certain]:
        assert certain_error(case["error"], case["source"], KNOWN) is (certain == "certain"), case


def test_a_standard_that_torch_refuses_is_refused_in_its_words(builder, tmp_path):
    """Many candidates ask for C++14. Torch's headers took a minute to say no."""
    old = inline("torch::Tensor f(torch::Tensor x) { return x; }", "f").model_copy(
        update={"extra_cflags": ("-std=c++14",)}
    )
    build = builder.attempt(old, "lite", tmp_path).build()
    assert not build.ok and builder.is_certain(build, old)
    torchs = (builder.tools.torch_dir / "include/torch/csrc/api/include/torch/all.h").read_text()
    said = re.search(r"#error [^\n]*", build.log)
    assert said and said.group(0) in torchs


def test_names_at_file_scope():
    text = (
        'extern "C" { int a(int p); } namespace n { int b; } enum { C1, C2 }; enum class E { d };'
    )
    text += " struct S { int e; }; void g() { int h; }"
    names = file_scope(text)
    assert {"a", "C1", "C2", "S", "E", "g"} <= names and not names & {"b", "d", "e", "h"}


def test_an_operator_comes_with_all_its_overloads(builder, tmp_path):
    include = builder.tools.torch_dir / "include"
    Operators(include).write("x.sum(1); torch::softmax(x, 0); x.index({})", tmp_path)
    methods = (tmp_path / "concur_methods.inc").read_text()
    declared = [
        line
        for line in (include / "ATen/core/TensorBody.h").read_text().split("\n};\n")[0].splitlines()
        if " sum(" in line
    ]
    assert len(declared) == len(re.findall(r"\bsum\(.*\) const", methods)) >= 2
    assert "= delete" in methods, "an overload with a type that lite lacks is there, and deleted"
    assert "softmax" in (tmp_path / "concur_ops.inc").read_text() and " mean(" not in methods


def test_a_work_root_goes_with_its_process(tmp_path):
    script = (
        "from pathlib import Path; from kernels_eval.compile.process import WorkRoot; w ="
        f" WorkRoot(Path({str(tmp_path)!r})); print(w.path)"
    )
    path = Path(python(script).stdout.strip())
    assert path.parent == tmp_path and not path.exists()
    killed = python(f"{script}; import os; os.kill(os.getpid(), 9)")
    assert killed.returncode == -9
    [left] = tmp_path.glob("work-*")
    mine = WorkRoot(tmp_path)
    assert mine.path.exists() and not left.exists(), "the next builder sweeps it"
    remove_abandoned(tmp_path)
    assert mine.path.exists()


def test_confine_runs_in_every_compiler(tmp_path):
    marks = tmp_path / "marks"
    builder = Builder(BuildConfig())
    builder.confine = lambda: os.close(os.open(marks, os.O_CREAT | os.O_APPEND | os.O_WRONLY))
    assert (
        builder.build(
            inline(f"// {uuid.uuid4()}\nat::Tensor f(at::Tensor x) {{ return x; }}", "f")
        ).ok
        and marks.exists()
    )


# -- CUDA: built here, run on a GPU by test_gpu ----------------------------------------------------

needs_nvcc = pytest.mark.skipif(Builder(BuildConfig()).tools.nvcc is None, reason="needs nvcc")
CUDA = [
    """
template <typename T> __global__ void scale(const T* x, T* y, T s, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = s * x[i];
}
torch::Tensor f(torch::Tensor x) {
  auto y = torch::empty_like(x);
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "f", ([&] {
    scale<scalar_t><<<1, 256>>>(x.data_ptr<scalar_t>(), y.data_ptr<scalar_t>(), 2, x.numel()); }));
  return y;
}""",
    """
__global__ void rows(torch::PackedTensorAccessor32<float, 2, torch::RestrictPtrTraits> x, float* \
y) {
  float s = 0;
  for (int j = threadIdx.x; j < x.size(1); j += 32) s += x[blockIdx.x][j];
  for (int k = 16; k; k /= 2) s += __shfl_down_sync(~0u, s, k);
  if (!threadIdx.x) y[blockIdx.x] = s;
}
torch::Tensor f(torch::Tensor x) {
  TORCH_CHECK(x.is_cuda(), "want a GPU, got ", x.device());
  auto y = torch::zeros({x.size(0)}, x.options());
  rows<<<x.size(0), 32>>>(x.packed_accessor32<float, 2, torch::RestrictPtrTraits>(), \
y.data_ptr<float>());
  return y;
}""",
    """
__global__ void half_sum(const at::Half* x, float* y, int n) {
  __shared__ float part[128];
  part[threadIdx.x] = threadIdx.x < n ? static_cast<float>(x[threadIdx.x]) : 0.f;
  __syncthreads();
  if (!threadIdx.x) { float s = 0; for (int i = 0; i < 128; ++i) s += part[i]; *y = s; }
}
torch::Tensor f(torch::Tensor x) {
  auto y = torch::zeros({1}, torch::dtype(torch::kFloat32).device(x.device()));
  half_sum<<<1, 128>>>(x.data_ptr<at::Half>(), y.data_ptr<float>(), x.numel());
  return y;
}""",
]


def cuda(source):
    return inline(
        "torch::Tensor f(torch::Tensor x);", "f", cuda_sources=(source,), name="lite_cuda"
    )


def kernel_code(cubin):
    """The machine code of each kernel: the `.text.NAME` sections of an ELF file."""
    data = cubin.read_bytes()
    table, (size, count, names) = (
        struct.unpack_from("<Q", data, 0x28)[0],
        struct.unpack_from("<HHH", data, 0x3A),
    )
    sections = [struct.unpack_from("<IIQQQQ", data, table + i * size) for i in range(count)]
    strings = sections[names][4]
    named = {
        data[strings + s[0] : data.index(b"\0", strings + s[0])].decode(): data[s[4] : s[4] + s[5]]
        for s in sections
    }
    return {name: code for name, code in named.items() if name.startswith(".text.")}


@needs_nvcc
@pytest.mark.slow
@pytest.mark.parametrize("number", range(len(CUDA)))
def test_the_kernels_machine_code_does_not_depend_on_the_tier(builder, number, tmp_path):
    found = []
    for tier in ("lite", "full"):
        attempt = builder.attempt(cuda(CUDA[number]), tier, tmp_path)
        build, work = attempt.build(), attempt.work
        assert build.ok, build.log
        command = [*attempt.command("cuda.cu"), "-cubin", "-o", "f.cubin", "cuda.cu"]
        subprocess.run(command, check=True, cwd=work)
        found.append(kernel_code(work / "f.cubin"))
    lite, full = found
    assert lite and all(len(code) > 100 for code in lite.values())
    assert {name: full.get(name) for name in lite} == lite, f"{sorted(lite)} against {sorted(full)}"


@needs_nvcc
@pytest.mark.parametrize(
    "body, certain",
    [
        # all that nvcc brings along is read for it, once
        pytest.param("int n = no_name_of_torch(x); return x;", True, marks=pytest.mark.slow),
        ('return torch::empty({2}, torch::device("cuda"));', True),
        ("float m = static_cast<float>(__float2half(1.f)); return x;", False),
    ],
)
def test_what_nvcc_does_not_know(builder, body, certain, tmp_path):
    """`__float2half` is what torch's headers bring along under nvcc, and lite only for those who
    name at::Half."""
    asked = cuda(f"#include <torch/extension.h>\ntorch::Tensor f(torch::Tensor x) {{ {body} }}")
    build = builder.attempt(asked, "lite", tmp_path).build()
    assert not build.ok and builder.is_certain(build, asked) is certain, build.log


@pytest.mark.slow
@needs_nvcc
def test_launches_of_a_library_go_through_the_counter(builder):
    build = builder.build(cuda(CUDA[0]))
    assert build.ok and build.tier == "lite", build.log
    table = output_of("nm", "-D", build.path)
    assert (
        re.search(r" U __wrap_(__)?cudaLaunchKernel", table)
        and "U __wrap___cudaRegisterFunction" in table
    )
    assert not re.search(r" U (__)?cudaLaunchKernel", table), "no way around it"
    assert "libconcur_launch.so" in output_of("objdump", "-p", build.path)


FAKE = """
#include <cuda_runtime_api.h>
#include <cstdio>
static int made = 0, events = 0;
extern "C" {
void __cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, void*, \
void*, int*) {}
cudaError_t __cudaGetKernel(void** handle, const void* stub) { *handle = (char*)stub + 4096; \
return cudaSuccess; }
cudaError_t __cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t) { ++made; return \
cudaSuccess; }
cudaError_t __cudaLaunchKernel_ptsz(void*, dim3, dim3, void**, size_t, cudaStream_t) { ++made; \
return cudaSuccess; }
cudaError_t cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { ++made; \
return cudaSuccess; }
cudaError_t cudaLaunchCooperativeKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t) { \
++made; return cudaSuccess; }
cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t*, const void*, void**) { ++made; return \
cudaSuccess; }
cudaError_t cudaEventCreate(cudaEvent_t* e) { *e = (cudaEvent_t)(long)++events; return \
cudaSuccess; }
cudaError_t cudaEventDestroy(cudaEvent_t) { --events; return cudaSuccess; }
cudaError_t cudaEventRecord(cudaEvent_t, cudaStream_t) { return cudaSuccess; }
cudaError_t cudaEventSynchronize(cudaEvent_t) { return cudaSuccess; }
cudaError_t cudaEventElapsedTime(float* ms, cudaEvent_t, cudaEvent_t) { *ms = 1.5f; return \
cudaSuccess; }
int fake_made() { return made; }
int fake_events() { return events; }
cudaError_t __wrap___cudaGetKernel(void**, const void*);
cudaError_t __wrap___cudaLaunchKernel(void*, dim3, dim3, void**, size_t, cudaStream_t);
cudaError_t __wrap_cudaLaunchKernel(const void*, dim3, dim3, void**, size_t, cudaStream_t);
void __wrap___cudaRegisterFunction(void**, const char*, char*, const char*, int, void*, void*, \
void*, void*, int*);
static char first, second[2];
void fake_setup() {
  __wrap___cudaRegisterFunction(0, &first, 0, "_Z5firstv", -1, 0, 0, 0, 0, 0);
  __wrap___cudaRegisterFunction(0, second, 0, "second_c", -1, 0, 0, 0, 0, 0);
}
void fake_first(long stream) {
  void* handle;
  __wrap___cudaGetKernel(&handle, &first);
  __wrap___cudaLaunchKernel(handle, dim3(), dim3(), 0, 0, (cudaStream_t)stream);
}
void fake_second(long stream) { __wrap_cudaLaunchKernel(second, dim3(), dim3(), 0, 0, \
(cudaStream_t)stream); }
}
"""


@needs_nvcc
def test_the_counters_add_up(builder, tmp_path):
    """Against a CUDA runtime of our own that only counts: no GPU is needed, and nothing of a real
    one is loaded."""
    source = tmp_path / "fake.cpp"
    source.write_text(FAKE)
    support = (
        Path(sys.modules["kernels_eval.toolchain"].__file__ or "").parent
        / "compile/headers/support/concur_launch.cpp"
    )
    library = tmp_path / "libconcur_launch.so"
    includes = [f"-I{path}" for path in builder.tools.plain_includes]
    command = [
        builder.tools.cxx,
        "-std=c++20",
        "-w",
        "-fPIC",
        "-shared",
        *includes,
        str(source),
        str(support),
        "-o",
        str(library),
    ]
    subprocess.run([*command, "-Wl,-Bsymbolic"], check=True)
    fake = ctypes.CDLL(str(library))
    launches = Launches(fake)
    for name in ("fake_first", "fake_second"):
        getattr(fake, name).argtypes = [ctypes.c_long]
    fake.fake_setup()
    launches.reset()
    launches.expect_stream(7)
    for stream in (7, 7, 8):
        fake.fake_first(stream)
    fake.fake_second(7)
    assert (launches.total, launches.off_stream, fake.fake_made()) == (4, 1, 4)
    assert launches.names() == {"first()": 3, "second_c": 1}
    launches.mode(null=True)
    fake.fake_first(7)
    assert (launches.total, fake.fake_made()) == (5, 4), "counted, not made"
    launches.mode(timed=True)
    fake.fake_first(7)
    fake.fake_second(7)
    assert launches.elapsed_ms() == launches.elapsed_ms() == 3.0 and fake.fake_events() == 0
    launches.reset()
    assert (launches.total, launches.off_stream, launches.elapsed_ms(), launches.names()) == (
        0,
        0,
        0.0,
        {},
    )


def test_without_a_cuda_library_there_are_no_counters():
    script = "from kernels_eval.candidate.kernel_tracer import Launches; print(Launches.find())"
    assert python(script).stdout.strip() == "None"
