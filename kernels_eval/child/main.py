"""The only module that runs beside candidate code: serves commands in a forked process, one role
each.

`capture` reads build requests out of a candidate's module; `reference` is the trusted side that
holds expected values; `candidate` runs the kernel. `compiled` is the reference once more, under
torch.compile, as a second baseline. `workload` has no candidate: it counts what a task's reference
computes, and `profile` where that spends its time.
"""

from __future__ import annotations

import traceback
from contextlib import suppress
from types import ModuleType
from typing import Any

from kernels_eval.checks.inputs import construct, load_module
from kernels_eval.child.build_interception import BuildFailed, intercept
from kernels_eval.child.candidate import CandidateSide
from kernels_eval.isolation.channel import Channel, ChannelClosed
from kernels_eval.reference.compiled import CompiledSide
from kernels_eval.reference.expected_values import Reference
from kernels_eval.reference.operator_times import OperatorTimes
from kernels_eval.reference.workload import Workloads


def serve(role: str, channel: Channel, exchange: int) -> None:
    session = ROLES[role](channel, exchange)
    while True:
        try:
            message = channel.receive(None)
        except ChannelClosed:
            return
        handler = getattr(session, f"do_{message.pop('command')}")
        try:
            answer = handler(**message)
        except Exception as error:
            answer = {
                "error": _classify(error),
                "detail": f"{type(error).__name__}: {error}"[:2000],
                "trace": traceback.format_exc()[-4000:],
            }
        channel.send(answer, tuple(answer.pop("_descriptors", ())))


def _classify(error: Exception) -> str:
    """The verdict reason that an exception stands for."""
    name, text = type(error).__name__, str(error)
    # torch's allocator asks NVML for details when memory runs out; where the sandbox keeps NVML
    # away, that assertion is what is left
    nvml = "nvmlInit" in text and "CUDACachingAllocator" in text
    if (
        isinstance(error, MemoryError)
        or "OutOfMemory" in name
        or "out of memory" in text
        or "can't allocate memory" in text
        or nvml
    ):
        return "out_of_memory"
    if "CUDA error" in text or "AcceleratorError" in name or "illegal memory access" in text:
        return "cuda_error"
    if isinstance(error, ImportError) and "undefined symbol" in text:
        return "undefined_symbol"
    if isinstance(error, ModuleNotFoundError):
        return "no_module"
    if isinstance(error, SyntaxError):
        return "syntax_error"
    if isinstance(error, BuildFailed):
        return error.reason
    return "exception"


class Capture:
    """Runs the candidate's module with builds replaced by stubs, and reports what it asked to
    build."""

    def __init__(self, channel: Channel, exchange: int) -> None:
        self.specs: list[dict[str, Any]] = []

    def do_capture(self, path: str) -> dict[str, Any]:
        intercept(self._record)
        try:
            self.module = load_module(path, "candidate")
        except (
            Exception
        ) as error:  # a module that needs its extension at import still told what to build
            detail, trace = (
                f"{type(error).__name__}: {error}"[:2000],
                traceback.format_exc()[-4000:],
            )
            return {
                "specs": self.specs,
                "error": _classify(error),
                "detail": detail,
                "trace": trace,
            }
        return {"specs": self.specs}

    def do_construct(self, task_path: str, init_form: str) -> dict[str, Any]:
        """What the constructor asks to build. Weights are made without storage; that it fails with
        nothing built yet is expected."""
        with suppress(Exception):
            construct(self.module, "ModelNew", load_module(task_path, "task"), init_form, 0, "meta")
        return {"specs": self.specs}

    def _record(self, spec: dict[str, Any]) -> ModuleType:
        self.specs.append(spec)
        return _Stub(spec["name"])


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_: Any, **__: Any) -> Any:
            raise RuntimeError(f"{name} is not built yet")

        return unavailable


ROLES = {
    "capture": Capture,
    "reference": Reference,
    "candidate": CandidateSide,
    "compiled": CompiledSide,
    "workload": Workloads,
    "profile": OperatorTimes,
}
