"""Builds of real tiny sources: the cache, two builders at once, both header tiers, and what is
refused."""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import threading
import uuid
from pathlib import Path

import pytest

from kernels_eval.compile import extensions
from kernels_eval.compile.extensions import PARTS, Attempt, Builder
from kernels_eval.compile.linked import forbidden_link
from kernels_eval.compile.prepared import Prepared
from kernels_eval.config import BuildConfig
from kernels_eval.errors import ToolchainError
from kernels_eval.source.spec import Build, ExtensionSpec, refused_flag
from tests.support.cases import cases
from tests.support.processes import python

FLAGS = cases("compiler_flags")
SCALE = "at::Tensor scale(at::Tensor x) { return x.mul(2); }"


def spec(source=SCALE, *, unique=False, **fields):
    text = f"// {uuid.uuid4()}\n{source}" if unique else source
    return ExtensionSpec.model_validate(
        {
            "name": "scale_ext",
            "cpp_sources": (text,),
            "functions": ("scale",),
            "extra_cflags": ("-O2",),
            **fields,
        }
    )


@pytest.fixture(scope="module")
def builder():
    made = Builder(BuildConfig())
    made.warm()
    return made


def test_every_part_that_is_waited_for_has_a_name():
    assert {path.name for path in Builder(BuildConfig()).parts(cuda=True)} <= PARTS.keys()


def test_what_most_builds_need_is_begun_at_once_where_it_is_missing(builder, monkeypatch):
    assert all(path.exists() for path in builder.parts(cuda=True))
    said = []
    monkeypatch.setattr(builder, "say", said.append)
    builder.begin_warm(cuda=True)
    assert said == [], "all of it is there"
    meet = threading.Barrier(2, timeout=60)

    def fail():
        meet.wait()
        raise ToolchainError("the build says so", "doctor")

    parts = {Path("a"): meet.wait, Path("b"): fail, Path(__file__): meet.abort}
    monkeypatch.setattr(builder, "parts", lambda cuda: parts)
    builder.begin_warm(cuda=True)
    builder.end_warm()
    assert not meet.broken and "(2 parts)" in said[0]
    told = [re.sub(r"\d+ s", "N s", line) for line in said[1:]]
    first, last = ("a", "b") if "a took" in told[0] else ("b", "a")
    assert told == [
        f"headers: 1 of 2 parts built, {first} took N s; under way: {last}",
        f"headers: 2 of 2 parts built, {last} took N s",
    ]


def entry(build):
    return Path(build.path).parent


def test_a_library_is_built_once(builder):
    asked = spec(unique=True)
    assert builder.cached(asked) is None
    first = builder.build(asked)
    assert first.ok and not first.cached and first.tier == "lite" and first.seconds > 0
    stamp = Path(first.path).stat().st_mtime_ns
    second = Builder(BuildConfig()).build(asked)
    assert second.ok and second.cached and second.path == first.path and second.key == asked.key
    assert Path(second.path).stat().st_mtime_ns == stamp
    assert sorted(path.name for path in entry(first).iterdir()) == ["build.json", "scale_ext.so"]
    (entry(first) / "build.json").write_text('{"a": "record of another version"}')
    assert builder.cached(asked) is None, "a record that nobody can read is no build"
    again = builder.build(asked)
    assert again.ok and not again.cached and builder.cached(asked).path == first.path


def test_a_failed_build_is_remembered_and_says_why(builder):
    asked = spec("at::Tensor scale(at::Tensor x) { return never_heard_of(x); }")
    first, second = builder.build(asked), builder.build(asked)
    assert not first.ok and first.reason == "build_failed" and "never_heard_of" in first.log
    assert second.cached and (second.reason, second.log) == (first.reason, first.log)


def test_a_build_counts_the_processor_time_of_both_tiers(builder, monkeypatch):
    tiers = []

    def run(command, work, deadline, *_):
        tiers.append(work.name)
        deadline.spent_s += 1
        return "failed"

    monkeypatch.setattr(extensions, "run", run)
    monkeypatch.setattr(Prepared, "precompiled", lambda self: None)
    build = builder.build(spec(unique=True))
    assert tiers == ["lite", "full"] and build.processor_s == 2


@pytest.mark.slow
def test_two_processes_building_the_same_spec_both_succeed(builder, tmp_path):
    asked = spec(unique=True)
    script = tmp_path / "build.py"
    script.write_text(
        textwrap.dedent("""
        import sys
        from kernels_eval.config import BuildConfig
        from kernels_eval.compile.extensions import Builder
        from kernels_eval.source.spec import ExtensionSpec
        sys.stdin.readline()
        print(Builder(BuildConfig()).build(ExtensionSpec.model_validate_json(sys.argv[1])).model_dump_json())
        """)
    )
    command = [sys.executable, str(script), asked.model_dump_json()]
    both = [
        subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    for process in both:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    builds = [Build.model_validate_json(process.communicate()[0]) for process in both]
    assert all(build.ok for build in builds), [build.log for build in builds]
    assert builds[0].path == builds[1].path and Path(builds[0].path).exists()
    load = """
    import importlib.util, sys, torch
    found = importlib.util.spec_from_file_location("scale_ext", sys.argv[1])
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    print(module.scale(torch.ones(2)).tolist())
    """
    done = python(load, builds[0].path)
    assert done.stdout.strip() == "[2.0, 2.0]", done.stderr
    shutil.rmtree(entry(builds[0]))


FAILING = {
    "undeclared": (
        "at::Tensor scale(at::Tensor x) {\n  return x + not_declared_anywhere;\n}",
        "not_declared_anywhere",
    ),
    "missing_semicolon": (
        "at::Tensor scale(at::Tensor x) {\n  auto y = x\n  return y;\n}",
        "return",
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    "fault", ["undeclared", pytest.param("missing_semicolon", marks=pytest.mark.slow)]
)
def test_both_tiers_blame_the_same_line(builder, fault):
    source, name = FAILING[fault]
    asked = spec(source)
    with tempfile.TemporaryDirectory(dir=builder.work_root) as scratch:
        folder = Path(scratch)
        lite, full = (builder.attempt(asked, tier, folder).build() for tier in ("lite", "full"))
    blamed = []
    for build in (lite, full):
        assert not build.ok and build.reason == "build_failed" and name in build.log
        found = re.search(r"main\.cpp:(\d+)(?::\d+)?: (?:error|fatal)[^\n]*", build.log)
        assert found, build.log
        blamed.append(found.group(0))
    assert blamed[0] == blamed[1]


@pytest.mark.parametrize("flags", FLAGS["slips"])
def test_a_slip_in_a_flag_is_no_attack(builder, flags):
    build = builder.build(spec(extra_cflags=flags))
    assert not build.ok and build.reason == "build_failed" and "not allowed" in build.log


@pytest.mark.parametrize("flag", FLAGS["refused"])
@pytest.mark.parametrize("field", ["extra_cflags", "extra_ldflags", "extra_cuda_cflags"])
def test_flags_that_load_or_write_are_refused(builder, flag, field):
    build = builder.build(spec(**{field: ("-O2", flag)}))
    assert not build.ok and build.reason == "forbidden_call" and flag in build.log


@pytest.mark.parametrize("flags", FLAGS["honest"])
def test_flags_of_honest_builds_are_accepted(flags):
    assert refused_flag(flags.split()) is None


def test_flags_that_a_compiler_is_to_pass_on_may_stand_in_one_string():
    assert refused_flag(["-Xcompiler", "-O3 -fopenmp"]) is None
    assert refused_flag(["-Xcompiler", "-O3 -fplugin=x"]) == "-fplugin=x"


@pytest.mark.parametrize("flag", FLAGS["without_value"])
def test_what_begins_like_a_flag_is_no_value(flag):
    assert refused_flag([flag, "-fplugin=x"]) == "-fplugin=x"


@pytest.mark.parametrize("flags", FLAGS["left_out"])
def test_flags_that_change_no_result_are_left_out(flags):
    assert spec(extra_cflags=flags, extra_ldflags=flags).extra_cflags == ("-O2",)
    assert refused_flag(spec(extra_cflags=("-fopt-info-vec=file", "-flto=/x")).extra_cflags)


@pytest.mark.parametrize("flag", ["-oTARGET", "-Wl,-o,TARGET", "-Wl,-Map=TARGET", "-Wp,-MD,TARGET"])
def test_no_spelling_of_a_flag_writes_outside_the_build(builder, flag, tmp_path):
    """The compiler runs with the rights of the user, outside any sandbox: what it writes is
    nobody's but the builder's."""
    target = tmp_path / "elsewhere"
    field = "extra_ldflags" if flag.startswith("-Wl") else "extra_cflags"
    try:
        build = builder.build(
            spec(unique=True, **{field: ("-O2", flag.replace("TARGET", str(target)))})
        )
    except FileNotFoundError as error:
        pytest.fail(
            f"the candidate's fault came out as the machine's: {error}; written elsewhere:"
            f" {target.exists()}"
        )
    assert not target.exists()
    assert not build.ok


def test_the_key_covers_what_changes_the_library(builder):
    keys = [
        builder.tools.key_for(asked)
        for asked in (
            spec(),
            spec(extra_cflags=("-O3",)),
            spec(extra_cflags=("-O2", "-ffast-math")),
            spec(extra_ldflags=("-lm",)),
            spec(SCALE + " "),
            spec(name="other_ext"),
            spec(functions=None),
            spec(cuda_sources=("__global__ void k() {}",)),
        )
    ]
    assert len(set(keys)) == len(keys)
    assert builder.tools.key_for(spec()) == keys[0]


def test_the_key_covers_the_gpu_only_where_there_is_cuda_code():
    first, second = (Builder(BuildConfig(cuda_arch=arch)).tools for arch in ("8.0", "9.0"))
    assert first.key_for(spec()) == second.key_for(spec())
    cuda = spec(cuda_sources=("__global__ void k() {}",))
    if first.nvcc:
        assert first.key_for(cuda) != second.key_for(cuda)


def test_a_compiler_that_is_not_there_is_the_machines_fault(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(ToolchainError) as fault:
        Builder(BuildConfig(), cache=tmp_path / "cache").build(spec())
    assert "g++" in fault.value.hint


def test_a_compiler_sees_nothing_of_the_users_environment(builder, monkeypatch):
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    monkeypatch.setenv("CPATH", "/somewhere")
    assert set(builder.tools.environment) == {"PATH", "LC_ALL", "HOME", "TMPDIR"}


def test_compilers_are_as_nice_as_their_builder_says(builder, monkeypatch, tmp_path):
    monkeypatch.setattr(Attempt, "command", lambda *_: ["/bin/sh", "-c", "nice; exit 1"])
    monkeypatch.setattr(builder, "niceness", 1)
    failed = builder.attempt(spec(), "lite", tmp_path).build()
    assert int(failed.log) == min(os.nice(0) + 1, 19)


KERNEL = """
__global__ void twice(const float* a, float* b, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) b[i] = 2.0f * a[i];
}
at::Tensor scale(at::Tensor x) {
  auto y = at::empty_like(x);
  int n = x.numel();
  twice<<<(n + 255) / 256, 256>>>(x.data_ptr<float>(), y.data_ptr<float>(), n);
  return y;
}
"""


def cuda_spec(source):
    return spec("at::Tensor scale(at::Tensor x);", cuda_sources=(source,), name="cuda_scale_ext")


@pytest.mark.slow
@pytest.mark.skipif(Builder(BuildConfig()).tools.nvcc is None, reason="needs nvcc")
def test_a_cuda_source_compiles_and_links(builder):
    build = builder.build(cuda_spec(KERNEL))
    assert build.ok, build.log
    symbols = Path(build.path).read_bytes()
    assert b"PyInit_cuda_scale_ext" in symbols and b"twice" in symbols


@pytest.mark.slow
@pytest.mark.skipif(Builder(BuildConfig()).tools.nvcc is None, reason="needs nvcc")
def test_algorithms_of_cub_need_nothing_that_finds_functions_by_name(builder):
    sort = "cub::DeviceRadixSort::SortKeys(nullptr, bytes, (float*)nullptr, (float*)nullptr, 8);"
    source = f"#include <cub/cub.cuh>\nvoid sort() {{ size_t bytes = 0; {sort} }}\n{KERNEL}"
    build = builder.build(cuda_spec(source))
    assert build.ok, build.log
    assert forbidden_link(build.path) == ""


@pytest.mark.slow
@pytest.mark.skipif(Builder(BuildConfig()).tools.nvcc is None, reason="needs nvcc")
def test_a_cuda_source_that_does_not_compile(builder):
    build = builder.build(cuda_spec(KERNEL.replace("blockIdx.x", "blockIndex.x")))
    assert not build.ok and build.reason == "build_failed" and "blockIndex" in build.log


@pytest.fixture
def compilers(monkeypatch):
    """Stands for the compilers of builds: notes what is compiled, and fails at what is in `fails`;
    of what succeeds there is an object."""
    ran, fails = [], set()

    def run(command, work, *_):
        source = next((word for word in command if word.endswith((".cpp", ".cu"))), "link")
        step = f"{work.name} {Path(source).name}"
        ran.append(step)
        if step in fails:
            return "failed"
        Path(command[command.index("-o") + 1]).touch() if "-o" in command else None
        return "ok"

    monkeypatch.setattr(extensions, "run", run)
    monkeypatch.setattr(Prepared, "precompiled", lambda self: None)
    return ran, fails


@pytest.mark.parametrize("unit", ["cuda.cu", "main.cpp"])
def test_full_begins_where_lite_has_failed(builder, compilers, monkeypatch, unit):
    monkeypatch.setattr(Builder, "is_certain", lambda *_: False)
    ran, fails = compilers
    fails |= {f"lite {unit}", f"full {unit}"}
    source = f"// {uuid.uuid4()}\n{KERNEL}"
    assert builder.build(cuda_spec(source)).reason == "build_failed"
    tried = {"main.cpp": ["lite main.cpp"], "cuda.cu": ["lite main.cpp", "lite cuda.cu"]}
    assert ran == [*tried[unit], f"full {unit}"]


def test_a_compiler_stops_after_the_errors_that_are_shown(builder, tmp_path):
    if not builder.tools.is_gcc:
        pytest.skip("an option of GCC")
    source = "".join(f"int f{i}() {{ return absent{i}; }}\n" for i in range(100))
    attempt = builder.attempt(spec(source + SCALE), "lite", tmp_path)
    assert not attempt.build().ok
    assert (attempt.work / "log").read_text().count(" error: ") == 20
