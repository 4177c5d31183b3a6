"""Which verdict an exception of a candidate stands for, and the line that says why."""

import pytest

from kernels_eval.candidate.build_interception import BuildFailed
from kernels_eval.model import failures
from kernels_eval.model.failures import classify, compiler_line, report
from kernels_eval.records import Reason
from kernels_eval.sandbox.child import CHATTER
from tests.support.cases import cases


def exception(name, base=Exception):
    """A stand-in for a class of a library that is not installed here."""
    module, _, short = name.rpartition(".")
    return type(short, (base,), {"__module__": module})


TRITON = """at 9:14:
def kernel(x_ptr, out_ptr, n, BLOCK: tl.constexpr):
    offsets = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offsets)
    y = tl.gelu(x)
        ^
AttributeError("module 'triton.language' has no attribute 'gelu'")"""


@pytest.mark.parametrize("name, text, reason", cases("failures"))
def test_the_reason_of_an_exception(name, text, reason):
    assert classify(exception(name)(TRITON if text == "TRITON" else text))[0] == reason


def test_the_innermost_error_of_a_compiler_counts_even_where_it_was_caught():
    compilation = exception("triton.compiler.errors.CompilationError")
    try:
        try:
            try:
                raise compilation(TRITON)
            except compilation as inner:
                raise compilation("at 3:4:\n    y = helper(x)\n        ^") from inner
        except compilation:
            raise RuntimeError("the launch failed")  # noqa: B904
    except RuntimeError as error:
        answer = report(error)
    assert answer.error == "build_failed"
    assert answer.detail.startswith("CompilationError: at 9:14: y = tl.gelu(x) AttributeError")


def test_a_context_that_was_suppressed_says_nothing():
    try:
        try:
            raise exception("triton.compiler.errors.CompilationError")("at 1:1:")
        except Exception:
            raise ValueError("another matter") from None
    except ValueError as error:
        assert classify(error)[0] == "exception"


def test_what_is_raised_below_a_compiler_is_about_the_source():
    names = {"__name__": "triton.compiler.code_generator"}
    exec("def visit():\n    raise KeyError('tl.foo')", names)
    with pytest.raises(KeyError) as caught:
        names["visit"]()
    assert classify(caught.value)[0] == "build_failed"
    names["__name__"] = "triton.runtime.jit"
    with pytest.raises(KeyError) as caught:
        names["visit"]()
    assert classify(caught.value)[0] == "exception"


def test_a_trace_has_a_candidates_frames_and_none_of_the_judges():
    judge, other = {}, {}
    exec(compile("def launch(f):\n    f()", failures.__file__, "exec"), judge)
    exec(compile("def forward(launch, f):\n    launch(f)", "theirs.py", "exec"), other)

    def kernel():
        raise ValueError("too many threads")

    with pytest.raises(ValueError) as caught:
        other["forward"](judge["launch"], kernel)
    trace = report(caught.value).trace
    assert "theirs.py" in trace and "in kernel" in trace
    assert failures.__file__ not in trace and trace.endswith("ValueError: too many threads\n")
    with pytest.raises(TypeError) as caught:
        judge["launch"](None)
    caught.value.__traceback__ = caught.tb.tb_next
    assert failures.__file__ in report(caught.value).trace, "all of it is ours"


def test_known_exceptions_keep_their_reasons():
    assert classify(BuildFailed("build", "the build ran past"))[0] is Reason.BUILD
    assert classify(MemoryError())[0] == "out_of_memory"
    assert classify(ModuleNotFoundError("no triton"))[0] == "no_module"
    assert classify(SyntaxError("bad"))[0] == "syntax_error"
    assert classify(RuntimeError("CUDA error: misaligned address"))[0] == "cuda_error"


def test_the_line_of_a_compiler():
    log = 'In file included\nk.cu(3): error: identifier "f" is undefined\n    f(x);\n    ^\n1 error'
    assert compiler_line(log) == 'k.cu(3): error: identifier "f" is undefined'
    assert compiler_line("nothing known") == "nothing known"
    assert compiler_line("") == ""


def test_a_log_tail_is_without_torchs_chatter():
    own = "step 1\nmy NVML report: fine\n"
    noise = (
        "/venv/torch/cuda/__init__.py:1061: UserWarning: Can't initialize NVML\n"
        '  warnings.warn("Can\'t initialize NVML", stacklevel=2)\n'
        "[W1123 01:24:32.39 execution_trace_observer.cpp:989] Enabling Execution Trace Observer\n"
        "[W1123 01:24:32.39 CUDAFunctions.cpp:1] NVML is not there\n"
    )
    assert CHATTER.sub("", "step 1\n" + noise + "my NVML report: fine\n") == own
