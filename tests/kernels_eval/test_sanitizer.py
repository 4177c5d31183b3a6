"""compute-sanitizer over correct candidates: what its output says, when it runs, and what a finding
costs. A stand-in takes the program's place where there is no GPU."""

import sys
from contextlib import ExitStack, contextmanager
from functools import partial

import pytest

from kernels_eval.config import EvalConfig
from kernels_eval.errors import ToolchainError
from kernels_eval.judge import sanitizer
from kernels_eval.judge.memory_errors import instrumented
from kernels_eval.judge.messages import Finding, Prepared, Stop, VerdictDraft
from kernels_eval.pool import worker
from kernels_eval.records import Language, Reason, stable_hash
from kernels_eval.source.spec import ExtensionSpec
from tests.support.kernels import (
    AFFINE,
    QUICK,
    assert_reason,
    candidate,
    kernel_task,
    module,
    task_source,
    verifying,
    verifying_on_gpu,
)

CLEAN = f"========= COMPUTE-SANITIZER\n{sanitizer.DONE}\n========= ERROR SUMMARY: 0 errors\n"
MEMCHECK = """========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at affine_kernel(const float *, float *, int)+0x90
=========     by thread (0,0,0) in block (4,0,0)
=========     Access at 0x7f2c5c600800 is out of bounds
========= ERROR SUMMARY: 1 error
"""
RACECHECK = """========= COMPUTE-SANITIZER
========= Error: Race reported between Write access at sum_kernel+0x110
=========     and Read access at sum_kernel+0x170 [1020 hazards]
=========
every call returned
========= RACECHECK SUMMARY: 2 hazards displayed (1 error, 1 warning)
"""
NEVER_STARTED = """========= COMPUTE-SANITIZER
========= Error: Target application terminated before first instrumented API call
========= ERROR SUMMARY: 0 errors
"""


@pytest.mark.parametrize(
    "said, errors",
    [
        (CLEAN, 0),
        (MEMCHECK, 1),
        (RACECHECK, 1),
        (NEVER_STARTED, None),
        (f"{sanitizer.DONE}\n", None),
        (CLEAN.replace("0 errors", "127 errors"), 127),
        (RACECHECK.replace("2 hazards displayed (1 error", "0 hazards displayed (0 errors"), 0),
        ("", None),
    ],
)
def test_errors_in_recorded_outputs(said, errors):
    assert sanitizer.errors_in(said, "memcheck", ("affine_kernel",)) == errors


def reads(*places, count=None):
    """What initcheck prints of uninitialised reads there."""
    said = "".join(
        f"========= Uninitialized __global__ memory read of size 4 bytes\n"
        f"=========     at {place}\n=========     by thread (0,0,0) in block (0,0,0)\n"
        for place in places
    )
    return f"{said}{sanitizer.DONE}\n========= ERROR SUMMARY: {count or len(places)} errors\n"


@pytest.mark.parametrize(
    "said, errors",
    [
        (CLEAN, 0),
        (reads("rows_kernel(const float *, float *, int)+0x90"), 1),
        (reads("0x90 in cuda.cu:12:rows_kernel(const float *)"), 1),
        (reads("void at::native::vectorized_kernel<4>(int)+0x30"), 0),
        (reads("void at::native::rows_kernel_impl(int)+0x30"), 0),
        (reads("void at::native::fill(int)+0x30", "rows_kernel(int)+0x90", count=9000), 1),
        (reads("void at::native::fill(int)+0x30", count=9000), None),
    ],
)
def test_of_initcheck_only_reads_of_the_candidates_kernels_count(said, errors):
    names = ("void (anonymous namespace)::tile<float, 4>(float*)", "rows_kernel(float const*)")
    assert sanitizer.errors_in(said, "initcheck", names) == errors


def test_initcheck_sees_what_every_kernel_writes():
    assert "--kernel-name" not in sanitizer._options("initcheck", ["rows_kernel"])


def test_a_missing_program_is_a_flag(monkeypatch, tmp_path):
    draft = VerdictDraft()
    found = candidate(AFFINE, "", language=Language.CUDA)
    with verifying(QUICK.model_copy(update={"compute_sanitizer": ("memcheck",)})) as judge:
        reference = judge.runner.reference(AFFINE)
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path))
        sanitizer.sanitize(judge.runner, reference, found, {}, draft)
    assert draft.flags == ["sanitizer:memcheck:not_run"]


def test_correct_cuda_that_is_confirmed_is_checked_for_memory_errors_by_default():
    config, found = EvalConfig(), candidate(AFFINE, "", language=Language.CUDA)
    assert sanitizer.wanted(config, found) and config.compute_sanitizer == ("memcheck",)
    assert not sanitizer.wanted(config.screened(), found)
    assert not sanitizer.wanted(config.model_copy(update={"compute_sanitizer": ()}), found)
    assert not sanitizer.wanted(config, candidate(AFFINE, "", language=Language.CPP))


def test_options_name_the_candidates_kernels():
    options = sanitizer._options("racecheck", ["tile", "affine_kernel"])
    assert options[:2] == ["--tool", "racecheck"]
    assert options[-4::2] == ["--kernel-name"] * 2
    assert options[-3::2] == ["kernel_substring=tile", "kernel_substring=affine_kernel"]


STAND_IN = """#!{python}
import subprocess, sys
program = sys.argv[sys.argv.index({python!r}):]
print("========= COMPUTE-SANITIZER", flush=True)
status = subprocess.run(program).returncode
print("========= Invalid __global__ write of size 4 bytes" if {errors} else "")
print({summary!r})
"""
SUMMARIES = {
    "memcheck": "========= ERROR SUMMARY: {} errors",
    "racecheck": "========= RACECHECK SUMMARY: {} hazards displayed ({} errors, 0 warnings)",
}
NOTICES = "raise RuntimeError('notices the tool')"


@pytest.mark.parametrize(
    "forward, errors, tool, flags",
    [
        pytest.param("return ext.affine(x)", 0, "memcheck", [], marks=pytest.mark.slow),
        ("return ext.affine(x)", 3, "memcheck", ["sanitizer:memcheck:3"]),
        pytest.param(
            *("return ext.affine(x)", 3, "racecheck", ["sanitizer:racecheck:3"]),
            marks=pytest.mark.slow,
        ),
        pytest.param(
            *(NOTICES, 0, "memcheck", ["sanitizer:memcheck:not_run"]), marks=pytest.mark.slow
        ),
    ],
)
def test_a_confined_run_with_a_stand_in(monkeypatch, forward, errors, tool, flags):
    """On the CPU: the child, its confinement, the program and the parsing are as on a GPU."""
    draft = VerdictDraft()
    with standing_in(monkeypatch, candidate(AFFINE, module(forward)), errors, tool) as run:
        if errors and tool == "memcheck":
            with pytest.raises(Stop) as stop:
                run(draft)
            assert stop.value.finding.reason is Reason.MEMORY_ERROR
            assert "Invalid __global__ write" in stop.value.finding.detail
        else:
            run(draft)
    assert draft.flags == flags
    assert bool(draft.log) == bool(flags)


def test_kernels_are_named_by_a_source():
    source = (
        "template <typename T, int N>\n__global__ void __launch_bounds__(256, 2)\n"
        "tile(const T* x);  // __global__ void no(int);\n"
        'extern "C" __global__ void rows(float* y) {}\n'
    )
    found = candidate(AFFINE, f"SOURCE = {source!r}", language=Language.CUDA)
    assert sanitizer.kernels_of(found) == ["tile", "rows"]


@pytest.mark.parametrize(
    "ran, starts",
    [
        (("affine_kernel(float*)",), 1),
        pytest.param(("other(int)",), 2, marks=pytest.mark.slow),
    ],
)
def test_a_tool_that_was_begun_serves_where_it_looks_at_what_ran(monkeypatch, ran, starts):
    source = '\nSOURCE = "__global__ void affine_kernel(float* x) {}"\n'
    found = candidate(AFFINE, module("return ext.affine(x)") + source)
    monkeypatch.setattr(sanitizer, "wanted", lambda config, candidate: True)
    with (
        standing_in(monkeypatch, found, 3, "racecheck") as run,
        sanitizer.begun(run.args[0], run.args[1].config, found) as tool,
    ):
        begun = run.args[0].warm_pool.beside
        assert begun == [tool.child]
        with run.args[0].warm_pool.quiet():
            assert tool.child._is_stopped
        made, anew = [], sanitizer.Tool
        monkeypatch.setattr(sanitizer, "Tool", lambda *of: made.append(of) or anew(*of))
        draft = VerdictDraft(custom_kernels=ran)
        run(draft, begun=tool)
    assert draft.flags == ["sanitizer:racecheck:3"]
    assert 1 + len(made) == starts


@pytest.mark.parametrize(
    "flags, shapes",
    [([], 2), pytest.param(["declared_shape_only"], 1, marks=pytest.mark.slow)],
)
def test_a_tool_sees_an_odd_shape_too(monkeypatch, flags, shapes):
    found = candidate(AFFINE, module("print('called on', *x.shape)\nreturn ext.affine(x)"))
    draft = VerdictDraft(flags=[*flags])
    with standing_in(monkeypatch, found, 3, "racecheck") as run:
        run(draft)
    calls = [line for line in draft.log.splitlines() if line.startswith("called on")]
    assert len(calls) == 2 and len({*calls}) == shapes


@contextmanager
def standing_in(monkeypatch, found, errors, tool):
    """A run of one tool, which counts so many errors."""
    with verifying(QUICK.model_copy(update={"compute_sanitizer": (tool,)})) as judge:
        reference = judge.runner.reference(AFFINE)
        reference.open()
        libraries = judge.preparer.prepare(found, AFFINE).libraries
        stand_in = judge.runner.server.base / "compute-sanitizer"
        summary = SUMMARIES[tool].format(errors, errors)
        stand_in.write_text(STAND_IN.format(python=sys.executable, errors=errors, summary=summary))
        stand_in.chmod(0o755)
        monkeypatch.setattr(sanitizer, "installed", lambda: str(stand_in))
        yield partial(sanitizer.sanitize, judge.runner, reference, found, libraries)


def kernel(body):
    """A candidate whose kernel of one block per row adds up its `columns` floats, by this body."""
    source = (
        "__global__ void sum_kernel(const float* x, float* y, int rows, int columns) {\n"
        "  __shared__ float part[256];\n"
        "  const int t = threadIdx.x, row = blockIdx.x;\n"
        f"{body}\n}}\n"
        "torch::Tensor sum(torch::Tensor x) {\n"
        "  auto y = torch::empty({x.size(0)}, x.options());\n"
        "  sum_kernel<<<x.size(0), 256>>>(x.data_ptr<float>(), y.data_ptr<float>(),"
        " (int)x.size(0), (int)x.size(1));\n"
        "  return y;\n}\n"
    )
    extension = (
        f"load_inline(name='sanitized_{stable_hash(body)[:8]}', cuda_sources={source!r},"
        " cpp_sources='torch::Tensor sum(torch::Tensor x);', functions=['sum'])"
    )
    return module("return ext.sum(x)", extension=extension)


ROWS = kernel_task(
    task_source("return x.sum(1)", inputs="[torch.randn(33, 256)]"), "sanitized_rows"
)
START = (
    "  float total = 0.0f;\n"
    "  for (int i = t; i < columns; i += 256) total += x[row * columns + i];\n"
    "  part[t] = total;\n  __syncthreads();\n"
)
HALVES = (
    "  for (int n = 128; n; n /= 2) {\n    if (t < n) part[t] += part[t + n];\n"
    "    __syncthreads();\n  }\n"
)
END = "  if (t == 0) y[row] = part[0];"
HONEST = START + HALVES + END
FAULTS = {
    # right answers all of them: torch's allocator rounds blocks up, and what is read in passing
    # never has that value
    "memcheck": HONEST + "\n  if (t == 0 && row == 0) y[rows] = 1.0f;",
    "racecheck": HONEST
    + "\n  if (t == 0) part[1] = 2.0f;\n  if (t == 200 && part[1] == 12345.0f) y[row] = 0.0f;",
    "initcheck": "  if (t == 1 && y[row] == 12345.0f) part[2] = 0.0f;\n" + HONEST,
    "synccheck": HONEST.replace(
        "  if (t == 0) y", "  if (t < 48) __syncthreads();\n  if (t == 0) y"
    ),
}


@pytest.fixture(scope="module")
def judges():
    """A judge for each tool, made when it is asked for."""
    made = {}
    with ExitStack() as stack:

        def judge(tool):
            if tool not in made:
                update = {"compute_sanitizer": (tool,), "compute_sanitizer_s": 300.0}
                config = QUICK.model_copy(update=update)
                made[tool] = stack.enter_context(verifying_on_gpu(config))
            return made[tool]

        yield judge


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", FAULTS)
def test_a_fault_that_passes_every_other_check_is_found(judges, tool):
    verdict = judges(tool)(ROWS, kernel(FAULTS[tool]), language=Language.CUDA)
    assert_reason(verdict, "memory_error" if tool == "memcheck" else "ok")
    counts = [flag for flag in verdict.flags if flag.startswith(f"sanitizer:{tool}:")]
    assert len(counts) == 1 and counts[0].rpartition(":")[2].isdigit(), verdict.flags


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("tool", FAULTS)
def test_an_honest_kernel_has_no_finding(judges, tool):
    verdict = judges(tool)(ROWS, kernel(HONEST), language=Language.CUDA)
    assert_reason(verdict, "ok")
    assert not [flag for flag in verdict.flags if flag.startswith("sanitizer")], verdict.flags


@pytest.mark.gpu
@pytest.mark.slow
def test_a_fault_in_an_odd_shape_is_found(judges):
    odd = FAULTS["memcheck"].replace("t == 0 && row == 0", "columns % 2 && t == 0 && row == 0")
    verdict = judges("memcheck")(ROWS, kernel(odd), language=Language.CUDA)
    assert_reason(verdict, "memory_error")
    assert "memcheck" in verdict.detail


def instrumented_builds(monkeypatch, prepared, level):
    """What an InstrumentingBuildWorker builds beside what is prepared."""
    built = []

    class Builder:
        def warm(self, *share, cuda): ...

        def build(self, spec):
            built.append(spec)
            raise ToolchainError("no sanitizer here", "none")

    class Stub:
        builder = Builder()

        def __init__(self, config, *, cuda_arch): ...

        def prepare(self, candidate, task):
            return prepared

    monkeypatch.setattr(worker, "Preparer", Stub)
    made = worker.InstrumentingBuildWorker(EvalConfig(level=level), None)
    assert made.build(AFFINE, candidate(AFFINE, "load_inline")) == prepared
    return built


def test_what_is_confirmed_is_built_with_sanitizers_beside_the_first_build(monkeypatch):
    spec = ExtensionSpec(name="plain", cpp_sources=("int f();",), functions=("f",))
    right = Prepared(candidate_id="a", specs=(spec,), tier="lite")
    assert instrumented_builds(monkeypatch, right, "confirm") == [instrumented(spec)]
    assert instrumented_builds(monkeypatch, right, "screen") == []
    assert instrumented_builds(
        monkeypatch, right.model_copy(update={"tier": "full"}), "confirm"
    ) == [instrumented(spec)] * (EvalConfig().address_sanitizer == "correct")
    wrong = right.model_copy(update={"finding": Finding(reason=Reason.BUILD_FAILED)})
    assert instrumented_builds(monkeypatch, wrong, "confirm") == []
