"""The reference under torch.compile, compiled for real (inductor's C++), and everything that must
not reach it or cost more than it.

Threats of a second baseline, one test each: a candidate that patches the compiler, or looks for the
compiled side's cache and answers; an environment or a cache of the user's; a reference that is left
to Python, answers otherwise when compiled, compiles for ever, dies, or compiles again under the
clock. One compilation takes 10 s of a core, more on a busy machine: most tests share one. What
needs a GPU is in test_compile_baseline_gpu.py.
"""

import os
from pathlib import Path

import pytest

from kernels_eval.config import TimingConfig
from kernels_eval.judge.compiled_baseline import CompiledReference, Lost
from kernels_eval.judge.runner import Runner
from tests.support.kernels import (
    AFFINE,
    QUICK,
    Verifier,
    assert_reason,
    kernel_task,
    module,
    task_source,
)

BOTH = QUICK.model_copy(
    update={
        "timing": TimingConfig(
            max_s=1.5, min_pairs=6, min_side_s=0.02, baselines=("eager", "compile")
        )
    }
)
HOSTILE = {
    "TORCHDYNAMO_DISABLE": "1",
    "TORCH_COMPILE_DISABLE": "1",
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "0",
}
"""What would leave everything to Python, or share a cache, if children had the environment of who
started them."""
HONEST = "return ext.affine(x)"


class Bench(Verifier):
    def __call__(self, code=HONEST, task=AFFINE, **parts):
        return super().__call__(task, module(code, **parts))


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    shared = tmp_path_factory.mktemp("inductor_of_the_user")
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (HOSTILE | {"TORCHINDUCTOR_CACHE_DIR": str(shared)}).items():
            patch.setenv(name, value)
        made = Bench(BOTH)
        made.shared = shared
        with made.evaluator:
            yield made


def compiled_of(verdict):
    assert_reason(verdict, "ok")
    assert verdict.timing is not None and verdict.timing.compiled is not None
    return verdict.timing.compiled


@pytest.mark.slow
def test_a_correct_candidate_is_timed_against_both(bench):
    verdict = bench()
    compiled = compiled_of(verdict)
    assert compiled.unavailable_reason == "" and compiled.graphs == 1 and compiled.compile_s > 0.5
    assert compiled.speedup == pytest.approx(
        compiled.reference_ms / verdict.timing.candidate_ms, rel=1e-6
    )
    assert compiled.speedup_lower <= compiled.speedup <= compiled.speedup_upper
    assert verdict.phases.timing_s < compiled.compile_s + 5, (
        "compiling is no part of the timed window"
    )
    assert verdict.phases.reference_s >= compiled.compile_s


@pytest.mark.slow
def test_the_next_candidate_of_the_task_pays_for_no_compilation(bench):
    compiled_of(bench())
    again = compiled_of(bench(before="# another candidate"))
    assert again.compile_s < 0.1 and again.reference_ms is not None


@pytest.mark.slow
def test_the_users_environment_and_cache_do_not_reach_it(bench):
    """The fixture switches torch.compile off and names a cache in the environment of this
    process."""
    assert os.environ["TORCHDYNAMO_DISABLE"] == "1"
    assert compiled_of(bench()).graphs == 1, "it was compiled all the same"
    assert list(Path(bench.shared).rglob("*")) == []


@pytest.mark.slow
def test_a_candidate_that_patches_the_compiler_patches_its_own(bench):
    """In the same process this would make the compiled baseline fail, or take 50 ms a call."""
    patch = (
        "import sys, time, types\nvars(torch)['compile'] = lambda model, **_: (lambda *a:"
        " (time.sleep(0.05), model(*a))[1])\nsys.modules['torch._dynamo'] ="
        " types.ModuleType('torch._dynamo')\nsys.modules['torch._inductor'] ="
        " types.ModuleType('torch._inductor')"
    )
    compiled = compiled_of(bench(before=patch))
    assert compiled.unavailable_reason == "" and compiled.graphs == 1 and compiled.reference_ms < 10


@pytest.mark.slow
def test_the_compiled_side_has_ended_before_the_candidate_goes_on(bench):
    """It leaves no cache and no answer that a candidate could look for."""
    compiled_of(bench())
    assert bench.runner._compiled.timing is not None
    assert list(Path(bench.runner.server.base).glob("compiled-*")) == []


@pytest.mark.slow
def test_a_compiled_side_that_is_lost_under_the_clock_costs_its_baseline_only(bench, monkeypatch):
    bench.runner.drop_reference()
    sample, taken = CompiledReference._sample, iter(range(10**9))

    def again(self, calls):
        if next(taken) == 12:
            self.graphs -= 1  # as if the last call had been compiled anew
        return sample(self, calls)

    monkeypatch.setattr(CompiledReference, "_sample", again)
    verdict = bench(before="# under the clock")
    lost = compiled_of(verdict)
    assert lost.unavailable_reason == "torch.compile compiled it again while it was timed"
    assert verdict.timing.pairs >= 4 and verdict.timing.speedup > 0
    monkeypatch.undo()
    assert compiled_of(bench(before="# afterwards")).unavailable_reason, (
        "a baseline that was lost stays lost for this task"
    )
    bench.runner.drop_reference()


@pytest.mark.slow
def test_a_reference_that_answers_otherwise_when_compiled_is_no_baseline(bench):
    forward = "return x * 2.0 + (2.0 if torch.compiler.is_compiling() else 1.0)"
    compiled = compiled_of(
        bench(task=kernel_task(task_source(forward), "compiles_to_another_answer"))
    )
    assert (
        "its output is not the eager reference's (wrong_output)" in compiled.unavailable_reason
        and compiled.reference_ms is None
    )


@pytest.mark.slow
def test_a_reference_that_remembers_its_calls_is_no_baseline(bench):
    init, forward = "self.calls = 0", "self.calls += 1; return x * 2.0 + self.calls"
    source = task_source(forward, init=init, inputs="[torch.randn(48, 64)]")
    counted = "self.calls += 1; return ext.affine(x) + float(self.calls - 1)"
    verdict = bench(counted, kernel_task(source, "remembers"), init=init)
    assert_reason(verdict, "ok")
    assert "from call to call" in verdict.timing.compiled.unavailable_reason


@pytest.mark.slow
def test_a_reference_that_is_left_to_python_is_no_baseline(bench):
    """Timed all the same, it would be the eager reference under another name."""
    code = task_source("return x * 2.0 + 1.0").replace(
        "    def forward", "    @torch.compiler.disable\n    def forward"
    )
    compiled = compiled_of(bench(task=kernel_task(code, "not_compiled")))
    assert "found no graph" in compiled.unavailable_reason and compiled.graphs is None


@pytest.mark.slow
def test_a_reference_that_dies_when_compiled_costs_its_baseline_only(bench):
    forward = "import os\nif 'compiled-' in os.getcwd():\n    os._exit(3)\nreturn x * 2.0 + 1.0"
    compiled = compiled_of(bench(task=kernel_task(task_source(forward), "dies_compiled")))
    assert "ended by itself with status 3" in compiled.unavailable_reason


@pytest.mark.slow
def test_a_reference_that_compiles_too_long_costs_its_baseline_only():
    """The candidate's own deadlines are not touched, nor its verdict, and the next one does not
    wait again."""
    hurried = BOTH.model_copy(
        update={"timing": BOTH.timing.model_copy(update={"compile_s": 0.05, "max_s": 0.3})}
    )
    bench = Bench(hurried)
    with bench.evaluator:
        first, second = compiled_of(bench()), compiled_of(bench(before="# the next one"))
    assert "Compile: took longer than 0.05 s" in first.unavailable_reason
    assert second.unavailable_reason == first.unavailable_reason and second.compile_s < 0.05


def test_nothing_is_compiled_where_it_is_not_asked_for():
    """Not even a process is started: with a server that is None, starting one would raise."""
    runner = Runner(QUICK, "cpu")
    assert runner.compiled(None) is None and runner._server is None
    runner.close()


def test_a_lost_baseline_always_says_why():
    reference = CompiledReference.__new__(CompiledReference)
    reference._child = None
    with pytest.raises(Lost):
        reference._lose("")
    assert reference.unavailable_reason
