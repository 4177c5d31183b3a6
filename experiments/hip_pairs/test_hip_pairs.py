"""Pairs of CUDA and HIP: what is kept of a source, what is translated, and what hipcc makes of it
where it is."""

import json
import shutil

import datasets
import polars as pl
import pytest

from experiments.hip_pairs import hip, pairs
from experiments.hip_pairs.hip import (
    CAUSES,
    HipBuild,
    compile_hip,
    device_code,
    sass_of,
    translated,
)
from kernels_eval.compile.cubins import cuobjdump

needs_hipcc = pytest.mark.skipif(not shutil.which("hipcc"), reason="hipcc is not here")
needs_cuda = pytest.mark.skipif(
    not (shutil.which("nvcc") and cuobjdump()), reason="needs nvcc and cuobjdump"
)
SOURCE = r"""
#include <torch/extension.h>
#include <cuda_runtime.h>  // cudaMemset stays in no comment
#include <cub/cub.cuh>
#include "own.h"
#define WARP 32
constexpr int TILE = 16;
struct Pair { float a; float b; };
template <int N> __device__ float total(float v) {
  for (int o = N / 2; o; o >>= 1) v += __shfl_xor_sync(0xffffffffu, v, o);
  return v;
}
template <typename T, int N> __global__ void sums(const T* x, T* y, Pair p) {
  T v = x[blockIdx.x * N + threadIdx.x] * p.a;
  if (v == -CUDART_INF_F) v = p.b;
  y[blockIdx.x * N + threadIdx.x] = total<WARP>(v);
}
torch::Tensor run(torch::Tensor x) {
  AT_DISPATCH_FLOATING_TYPES(x.scalar_type(), "run", ([&] {
    sums<scalar_t, TILE><<<1, 32>>>(x.data_ptr<scalar_t>(), x.data_ptr<scalar_t>(), Pair{1, 2});
  }));
  return x;
}
cudaError_t wait(cudaStream_t s) { return cudaStreamSynchronize(s); }
"""
TASK = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return 2 * x
def get_inputs():
    return [torch.rand(32)]
def get_init_inputs():
    return []
"""
MODULE = """
import torch
from torch.utils.cpp_extension import load_inline
source = r'''
__global__ void twice(float* x) {{ x[threadIdx.x] = 2 * {value}; }}
torch::Tensor run(torch::Tensor x) {{ twice<<<1, 32>>>(x.data_ptr<float>()); return x; }}
'''
extension = load_inline("e", "torch::Tensor run(torch::Tensor x);", source, functions=["run"])
class ModelNew(torch.nn.Module): pass
"""


def test_device_code_is_kept_and_named_as_hip_names_it():
    kept, found = device_code(SOURCE), translated(SOURCE)
    for text in ("#define WARP 32", "struct Pair { float a; float b; };", "__global__ void sums"):
        assert text in kept and text in found
    assert "(void)&sums<float, 16>;" in kept, "a template that is launched is instantiated"
    assert "#include <cub/cub.cuh>" in kept and "cub" not in found
    assert "__shfl_xor( v, o)" in found and "__builtin_inff()" in found
    assert "hipError_t wait(hipStream_t s) { return hipStreamSynchronize(s); }" in found
    for text in ("torch", "<<<", "cuda", "CUDART", "own.h"):
        assert text not in found, text


@pytest.mark.parametrize(
    ("reason", "cause"),
    [
        ("timeout", "timeout"),
        ("no CUDA source with a kernel was found", "no_source"),
        ("no kernel is instantiated in the device code", "no_kernel"),
        ("'hipcub.h' file not found", "missing_header"),
        ("invalid output constraint '=f' in asm", "inline_assembly"),
        ("use of undeclared identifier 'cub'", "unknown_name"),
        ("no matching function for call to 'f'", "no_matching_function"),
        ("expected ';' after expression", "other"),
    ],
)
def test_why_a_source_did_not_compile_has_a_class(reason, cause):
    build = HipBuild(arch="gfx90a", source="", compiled=False, reason=reason)
    assert build.cause == cause and cause in CAUSES
    assert build.model_copy(update={"compiled": True}).cause == ""


@needs_hipcc
@pytest.mark.slow
@pytest.mark.parametrize(
    "source, kernel, says",
    [
        (SOURCE.replace("#include <cub/cub.cuh>", ""), "sums", ""),
        ("__global__ void f(float* a) { a[0] = nowhere; }", "", "identifier 'nowhere'"),
        ("template <class T> __global__ void f(T* a) { a[0] = 1; }", "", "no kernel"),
        ("int f() { return 1; }", "", "no CUDA source"),
    ],
)
def test_what_hipcc_makes_of_a_source(source, kernel, says):
    build = compile_hip(source)
    assert build.compiled == bool(kernel) and says in build.reason
    assert all(kernel in name for name in build.kernels) and len(build.kernels) == bool(kernel)
    assert ("s_endpgm" in build.assembly) == bool(kernel)


@needs_cuda
@pytest.mark.slow
def test_machine_code_is_of_the_same_device_code():
    found = sass_of(SOURCE.replace("#include <cub/cub.cuh>", "#include <math_constants.h>"))
    assert "code for sm_90" in found and "sumsIfLi16E" in found and "EXIT" in found
    assert sass_of("__global__ void f() { nowhere; }") == sass_of("int f();") == ""


def test_the_architecture_is_one_that_this_hipcc_knows(tmp_path, monkeypatch):
    for place, arch in {"usr": "gfx90a", "opt/rocm-6.4": "gfx942"}.items():
        program = tmp_path / place / "bin/hipcc"
        program.parent.mkdir(parents=True)
        program.touch(0o755)
        monkeypatch.setenv("PATH", str(program.parent))
        assert hip.default_arch() == arch


def row(name, value="x[threadIdx.x]", **more):
    return {
        "candidate_id": name,
        "task_id": "t/1",
        "language": "cuda",
        "status": "correct",
        "reason": "ok",
        "code": MODULE.format(value=value),
        "generator": "m",
        "sample_index": 0,
        **more,
    }


@pytest.fixture
def asked(tmp_path):
    text = MODULE.format(value="x[1]").replace("\n", "\n    ")
    verdicts = [
        row("good"),
        row("unknown", "__nowhere(x[0])"),
        row("none", code="class ModelNew: pass"),
        row("later", code=f"import torch\nif torch.cuda.is_available():{text}"),
        row("wrong", status="incorrect", reason="wrong_output"),
        row("other", language="cpp"),
    ]
    pl.DataFrame(verdicts).write_parquet(tmp_path / "v.parquet")
    pl.DataFrame({"task_id": ["t/1"], "code": [TASK]}).write_parquet(tmp_path / "tasks.parquet")
    given = {"--tasks": tmp_path / "tasks.parquet", "--out": tmp_path / "out"}
    return [str(tmp_path / "v.parquet"), *(str(word) for pair in given.items() for word in pair)]


@pytest.mark.slow
def test_pairs_are_written_resumed_and_loaded(asked, tmp_path, monkeypatch, capsys):
    seen = []

    def compiled(cuda, *, arch):
        """What hipcc says, where there is none."""
        bad = "" if "__global__" in cuda else "no CUDA source"
        bad = "undeclared identifier '__nowhere'" if "__nowhere" in cuda else bad
        return HipBuild(
            arch=arch,
            source=translated(cuda),
            compiled=not bad,
            kernels=() if bad else ("twice",),
            assembly="" if bad else "s_endpgm",
            reason=bad,
        )

    def interrupted(given):
        seen.append(given[0][1].candidate_id)
        if seen.count("none") == 1 and seen[-1] == "none":
            raise KeyboardInterrupt
        return one_pair(given)

    one_pair = pairs.pair
    monkeypatch.setattr(hip, "default_arch", lambda: "gfx90a")
    monkeypatch.setattr(hip, "compile_hip", compiled)
    monkeypatch.setattr(hip, "sass_of", lambda cuda: "")
    monkeypatch.setattr(pairs.os, "cpu_count", lambda: 1)
    monkeypatch.setattr(pairs, "pair", interrupted)
    with pytest.raises(KeyboardInterrupt):
        pairs.main(asked)
    seen_first = len(seen)
    assert pairs.main(asked) == 0
    assert seen[seen_first:] == ["none", "later"], "the others were kept"
    told = json.loads(capsys.readouterr().out)
    assert (told["pairs"], told["compiled"]) == (4, 2)
    assert told["causes"] == {"no_source": 1, "unknown_name": 1}
    assert told["left_out"] == {"the verdict is incorrect": 1, "the language is cpp": 1}
    cache = str(tmp_path / "cache")
    loaded = datasets.load_dataset(str(tmp_path / "out"), cache_dir=cache, split="train")
    assert loaded.column_names == pairs.PAIRS.names
    rows = {each["candidate_id"]: each for each in loaded}
    assert rows["good"]["compiled"] and "__global__ void twice" in rows["good"]["cuda_source"]
    assert rows["unknown"]["hip_device"] is None and "__nowhere" in rows["unknown"]["detail"]
    assert pairs.main(asked) == 0
    assert json.loads(capsys.readouterr().out) == told and len(seen) == seen_first + 2


def test_without_hipcc_nothing_is_begun(asked, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(hip.shutil, "which", lambda name: None)
    assert pairs.main(asked) == 1
    assert "apt-get install hipcc" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
