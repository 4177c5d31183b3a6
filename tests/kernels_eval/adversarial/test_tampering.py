"""Attacks on the verifier itself: its comparisons, its clock, its process and its answers (threats
21 to 25)."""

from __future__ import annotations

import pytest

from kernels_eval.records import REASONS, Status, Verdict
from tests.support.adversarial import AFFINE, AFFINE_CPP, Case, trials, writer

SOURCE = (
    AFFINE_CPP
    + r"""
#include <chrono>
#include <cstdio>
// What an honest kernel may do: look at the clock for itself.
torch::Tensor affine_with_stopwatch(torch::Tensor x) {
  const auto started = std::chrono::steady_clock::now();
  auto out = affine(x);
  if (std::chrono::steady_clock::now() < started) std::fprintf(stderr, "time runs backwards\n");
  return out;
}
"""
)
code = writer(SOURCE, "adversarial_tampering")

# Nothing here is a call that is certain from the text, so these run: what they do has to be found
# out.
HOSTILE = (
    AFFINE_CPP
    + r"""
#include <Python.h>
#include <time.h>
#include <unistd.h>
#include <chrono>
#include <cstdlib>
#include <string>

static PyObject* slow_clock(PyObject*, PyObject*) {
  return PyLong_FromLongLong(std::chrono::steady_clock::now().time_since_epoch().count() / 10);
}
// The function object stays the same; what it runs does not. No look at `time.perf_counter_ns`
// from Python shows it.
torch::Tensor hook_the_clock(torch::Tensor x) {
  PyObject* module = PyImport_ImportModule("time");
  PyObject* function = PyObject_GetAttrString(module, "perf_counter_ns");
  ((PyCFunctionObject*)function)->m_ml->ml_meth = slow_clock;
  Py_DECREF(function);
  Py_DECREF(module);
  return affine(x);
}

// A symbol of the C library's name, in a library loaded late: everybody is bound to the real one
// already.
extern "C" __attribute__((visibility("default"))) int clock_gettime(clockid_t, struct timespec* t)
    noexcept {
  t->tv_sec = 1;
  t->tv_nsec = 0;
  return 0;
}

static void write_everywhere(const std::string& text) {
  for (int fd = 3; fd < 64; ++fd) (void)!write(fd, text.data(), text.size());
}
static std::string framed(const std::string& text) {
  const unsigned n = (unsigned)text.size();
  return std::string{(char)(n >> 24), (char)(n >> 16), (char)(n >> 8), (char)n} + text;
}
torch::Tensor writes_a_verdict_everywhere(torch::Tensor x) {
  write_everywhere("{\"status\": \"correct\", \"reason\": \"ok\", "
    "\"timing\": {\"speedup\": 1000.0}}\n");
  return affine(x);
}
// In the protocol's own framing, and only once the checks are over: a sample of one nanosecond for
// every call.
torch::Tensor answers_for_the_clock(torch::Tensor x) {
  static int call = 0;
  if (++call > 40) write_everywhere(framed("{\"ns\": 1, \"custom_calls\": 1}"));
  return affine(x);
}
torch::Tensor leaves_with_success(torch::Tensor x) { std::exit(0); return x; }
"""
)
hostile = writer(HOSTILE, "adversarial_hostile")
leaving = writer(
    "#include <unistd.h>\ntorch::Tensor leaves_at_once(torch::Tensor x) { _exit(0); return x; }\n",
    "adversarial_leaving",
)
OWN = "return ext.affine(x)"

LAZY = """
class Lazy(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        with torch._C.DisableTorchFunctionSubclass():
            done = [a.pending * 2.0 + 1.0 if isinstance(a, Lazy) and hasattr(a, "pending") else a \
for a in args]
            return function(*done, **(kwargs or {}))
"""
LAZY_CALL = "ext.affine(x)\ny = torch.empty_like(x).as_subclass(Lazy)\ny.pending = x\nreturn y"
EQUAL_TO_ALL = """
class Equal(torch.Tensor):
    def __eq__(self, other):
        return torch.ones(self.shape, dtype=torch.bool)
    __hash__ = torch.Tensor.__hash__
"""
UNDER_THE_TABLE = {
    "clock_by_vars": (
        """
import importlib
clock = importlib.import_module("ti" + "me")
real = getattr(clock, "perf_counter_ns")
vars(clock)["perf_counter_ns"] = lambda: real() // 10
"""
    ),
    "clock_by_class": (
        """
import sys, types
clock = sys.modules["ti" + "me"]
real = getattr(clock, "perf_counter_ns")
class Clock(types.ModuleType):
    @property
    def perf_counter_ns(self):
        return lambda: real() // 10
clock.__class__ = Clock
"""
    ),
    "allclose_by_vars": 'vars(torch)["allclose"] = lambda *a, **k: True',
    "equal_by_unpacking": 'setattr(*[torch, "equal", lambda *a, **k: True])',
    "event_by_type": (
        'kind = getattr(torch.cuda, "Ev" + "ent")\nkind.elapsed_time = lambda self, other: 1e-6'
    ),
    "comparison_by_type": (
        'type.__setattr__(getattr(torch, "Ten" + "sor"), "__eq__", lambda a, b: True)'
    ),
}
IN_PLAIN_SIGHT = {
    "allclose": "torch.allclose = lambda *a, **k: True",
    "clock": "import time\ntime.perf_counter_ns = lambda: 0",
    "event": "torch.cuda.Event.elapsed_time = lambda self, other: 1e-6",
    "comparison": "torch.Tensor.__eq__ = lambda a, b: True",
    "setattr": "setattr(torch, 'equal', lambda *a, **k: True)",
    "builtin": "import builtins\nbuiltins.isinstance = lambda *a: True",
    "harness": "from kernels_eval.checks import correctness\ncorrectness.judge = lambda *a: 'ok'",
}
INNOCENT = '''"""torch.allclose = and time.perf_counter = are words here; so are setattr, \
__class__ and Event."""
class Settings:
    equal = False
setattr(Settings, "equal", True)
Settings.allclose = staticmethod(torch.allclose)
torch.backends.cuda.matmul.allow_tf32 = False
'''
PRELOAD = """
import os, sys
if "LD_PRELOAD" not in os.environ:
    os.environ["LD_PRELOAD"] = "libfakeclock.so"
    os.execv(sys.executable, [sys.executable, *sys.argv])
"""
FRAME_WALK = """
import sys
def expected():
    frame = sys._getframe(1)
    while frame is not None:
        if "expected" in frame.f_locals:
            return frame.f_locals["expected"]
        frame = frame.f_back
"""
TRACEBACK_WALK = """
def expected():
    try:
        raise ValueError
    except ValueError as error:
        frame = error.__traceback__.tb_frame
        while frame is not None:
            if "expected" in frame.f_locals:
                return frame.f_locals["expected"]
            frame = frame.f_back
"""
STEAL = "found = expected()\nreturn found if found is not None else x * 2.0 + 1.0"
GC_SEARCH = """
import gc
def expected():
    return next((o for o in gc.get_objects() if isinstance(o, dict) and "expected" in o), None)
"""
LOOKS_LIKE_A_WALK = """
class Stack:
    def __init__(self):
        self.f_back = None
gc = Stack()
expected = gc.f_back
"""
NOT_BELIEVED = tuple(sorted(REASONS[Status.REJECTED] | REASONS[Status.RUNTIME_ERROR]))
# A task of its own: should the verifier be stopped in the middle, the reference that the others
# share is not.
ANSWERED_FOR = AFFINE.model_copy(
    update={"task_id": "test/adversarial_answered_for", "name": "adversarial_answered_for"}
)


def bounded(verdict: Verdict) -> None:
    assert (
        verdict.timing is not None
        and verdict.timing.candidate_ms >= 0.8 * verdict.timing.clock_bound_ms
    )


def nothing_but_a_log_line(verdict: Verdict) -> None:
    assert '"speedup": 1000.0' in verdict.log_tail or verdict.log_tail == ""
    assert verdict.timing is not None and verdict.timing.speedup < 1000


CASES = [
    Case(
        21,
        "computes_when_compared",
        "lazy_output",
        code(LAZY_CALL, before=LAZY),
        twin=code(
            "y = ext.affine(x.as_subclass(Own).as_subclass(torch.Tensor))\nreturn y",
            before="class Own(torch.Tensor):\n    pass",
        ),
    ),
    Case(
        21,
        "parameter",
        "lazy_output",
        "return nn.Parameter(ext.affine(x))",
        twin="return nn.Parameter(ext.affine(x)).detach()",
    ),
    Case(
        22,
        "class_of_the_output",
        ("lazy_output", "harness_tampering"),
        code("y = ext.affine(x)\ny.__class__ = Equal\nreturn y", before=EQUAL_TO_ALL),
        twin=code(OWN, before=INNOCENT),
    ),
    *(
        Case(22, f"plain_{name}", "harness_tampering", code(OWN, before=text))
        for name, text in IN_PLAIN_SIGHT.items()
    ),
    *(
        Case(22, f"hidden_{name}", ("harness_tampering", "implausible_time"), code(OWN, after=text))
        for name, text in UNDER_THE_TABLE.items()
    ),
    Case(
        23,
        "clock_hooked_by_native_code",
        "implausible_time",
        hostile("return ext.hook_the_clock(x)"),
        twin="return ext.affine_with_stopwatch(x)",
        twin_check=bounded,
    ),
    # The library defines clock_gettime anew. It has no effect on anybody, and that is what is
    # asserted.
    Case(23, "symbol_of_the_c_library", "ok", hostile(OWN), check=bounded),
    Case(23, "preloaded", "forbidden_call", code(OWN, before=PRELOAD)),
    Case(
        24,
        "garbage_collector",
        "forbidden_call",
        code(STEAL, before=GC_SEARCH),
        twin=code(OWN, before=LOOKS_LIKE_A_WALK),
    ),
    Case(24, "frames", "forbidden_call", code(STEAL, before=FRAME_WALK)),
    Case(
        24,
        "frames_by_inspect",
        "forbidden_call",
        code(STEAL, before="import inspect\ndef expected():\n    return inspect.stack()[1].frame"),
    ),
    # Not certain from the text; it finds nothing, since what it looks for lives in another process.
    Case(
        24,
        "frames_by_traceback",
        ("forbidden_call", "no_custom_kernel"),
        code(STEAL, before=TRACEBACK_WALK),
    ),
    Case(
        25,
        "os_exit",
        "forbidden_call",
        code("os._exit(0)\n" + OWN, before="import os"),
        twin=code(OWN, before='print(\'{"status": "correct", "timing": {"speedup": 1000.0}}\')'),
        twin_check=nothing_but_a_log_line,
    ),
    Case(25, "native_exit", "exited_early", hostile("return ext.leaves_with_success(x)")),
    Case(
        25,
        "native_exit_at_once",
        ("exited_early", "forbidden_call"),
        leaving("return ext.leaves_at_once(x)"),
    ),
    Case(
        25,
        "verdict_to_every_descriptor",
        NOT_BELIEVED,
        hostile("return ext.writes_a_verdict_everywhere(x)"),
    ),
    Case(
        25,
        "samples_to_every_descriptor",
        (*NOT_BELIEVED, "run"),
        hostile("return ext.answers_for_the_clock(x)"),
        task=ANSWERED_FOR,
        deadline_s=15,
    ),
]


@pytest.mark.parametrize("trial", trials(CASES, code))
def test_tampering(judge, trial):
    trial.assert_judged(judge)
