"""The entry of a forked process: serves the commands of one role until its channel closes.

`capture` reads build requests out of a candidate's module, `candidate` runs the kernel. The other
roles run the task alone, in processes that no candidate enters: they are named here and imported
only where they are served, so a candidate's process does not hold their code.

The verdict reason that an exception of a candidate stands for.

Compilers that run inside the process (Triton's, NVRTC, Numba, torch.compile, TileLang, CuTe) are
known by the names of their exceptions and modules, which are not imported for it.
"""

from __future__ import annotations

import os
import re
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from importlib import import_module
from types import ModuleType
from typing import NoReturn

from kernels_eval.build.spec import ExtensionSpec
from kernels_eval.checks.inputs import construct, declared, load_candidate, load_module
from kernels_eval.child.build_interception import BuildFailed, intercept
from kernels_eval.child.candidate import CandidateRole
from kernels_eval.child.model_runner import ModelRunner
from kernels_eval.child.refusals import Refused
from kernels_eval.isolation.channel import Channel, ChannelClosed, Message
from kernels_eval.languages import Language
from kernels_eval.records import Reason, Record

OTHER_ROLES = {
    "reference": "reference.answers:Reference",
    "compiled": "reference.task_runner:CompiledRole",
    "workload": "reference.workload",
    "profile": "reference.operator_times",
    "peaks": "reference.operator_times",
    "health": "isolation.health",
    "sanitizer": "child.sanitized",
    "profiled": "child.profiled",
}
"""Modules whose functions are the commands, or whose class has them as methods."""


def serve(role: str, channel: Channel) -> None:
    channel.accepts_descriptors = True
    session = role_of(role, channel)
    while True:
        try:
            message = channel.receive_record()
        except ChannelClosed:
            return
        command = message.pop("command")
        handler = getattr(session, f"do_{command}")
        try:
            answer = handler(**message) or {}
        except Exception as error:
            answer = report(error)
        if isinstance(session, ModelRunner):
            with suppress(RuntimeError):  # a broken device: the next command says so
                session.end_command(command)
        if isinstance(answer, Record):
            answer = answer.model_dump(mode="json")
        descriptors = tuple(answer.pop("_descriptors", ()))
        channel.send(answer, descriptors)
        for descriptor in descriptors:
            os.close(descriptor)


def role_of(name: str, channel: Channel) -> object:
    """What serves a role."""
    if name == "candidate":
        return CandidateRole(channel)
    if name == "capture":
        return Capture()
    module, _, role = OTHER_ROLES[name].partition(":")
    found = import_module(f"kernels_eval.{module}")
    return getattr(found, role)(channel) if role else found


class Capture:
    """Runs the candidate's module with builds replaced by stubs, and reports what it asked to
    build."""

    def __init__(self) -> None:
        self.specs: list[Message] = []

    def do_capture(self, path: str, failed: Sequence[str] = ()) -> Message:
        """Import the module. Requests with these keys fail, for they did when they were built."""
        self.failed = failed
        intercept(self._record)
        try:
            self.module = load_candidate(path)
        except Exception as error:
            # a module that needs its extension at import still told what to build
            return {"specs": self.specs, **report(error)}
        return {"specs": self.specs}

    def do_construct(self, task_path: str, init_form: str) -> Message:
        """What the constructor asks to build. Weights are made without storage; that it fails with
        nothing built yet is expected."""
        asked = {"entry_point": "ModelNew", "init_form": init_form}
        with suppress(Exception):
            task = load_module(task_path, "task")
            construct(self.module, task, declared(asked, "meta", "meta"))
        return {"specs": self.specs}

    def _record(self, spec: Message) -> ModuleType:
        self.specs.append(spec)
        if self.failed and ExtensionSpec.model_validate(spec).key in self.failed:
            raise BuildFailed(Reason.BUILD_FAILED, "")
        return _Stub(str(spec["name"]))


class _Stub(ModuleType):
    def __getattr__(self, name: str) -> Callable[..., NoReturn]:
        if name.startswith("__"):
            raise AttributeError(name)

        def unavailable(*_: object, **__: object) -> NoReturn:
            raise RuntimeError(f"{name} is not built yet")

        return unavailable


def _of_all(known: str, attribute: str) -> re.Pattern[str]:
    """What is known, or an attribute of any language says: a candidate may use several."""
    said = (getattr(language, attribute) for language in Language)
    return re.compile("|".join(filter(None, (known, *said))))


COMPILER_ERROR = _of_all(
    r"Compil\w*(Error|Exception|Fail)|Codegen\w*Error|PTXAS|NVRTC|^numba\.core\.errors\."
    r"|^torch\._inductor\.exc\.|^torch\._dynamo\.exc\.(?!TorchRuntimeError)",
    "compiler_errors",
)
"""Exceptions of compilers, as module.Class."""
COMPILER_FRAME = _of_all("", "compiler_frames")
"""Functions, as module.name, below which whatever is raised is about the source."""
COMPILER_SAYS = re.compile(
    r"PassManager::run failed|PTX codegen error|ptxas (fatal|error)|NVRTC_ERROR_COMPILATION"
    r"|Kernel compilation failed|\(\d+\): (catastrophic )?error:"
)
"""What compilers write into exceptions of no type of their own."""
LAUNCH_ERROR = _of_all(r"\.CUDA(Runtime|Driver)Error$|\.CudaAPIError$", "launch_errors")
"""The kernel was compiled, but asks for more than the device has, or its driver refuses it."""
CUDA_SAYS = ("CUDA error", "Triton Error [CUDA]", "illegal memory access")
ERROR_LINE = re.compile(r"\berror\b|\bfatal\b|undefined", re.IGNORECASE)
PLACE = re.compile(r"at \d+:\d+:")
CARET = re.compile(r"\s*\^[\s^~]*")


def report(error: Exception) -> Message:
    """What a process answers where a command has raised."""
    reason, cause = classify(error)
    said = compiler_line(str(cause)) if reason is Reason.BUILD_FAILED else str(cause)
    return {
        "error": reason,
        "detail": f"{type(cause).__name__}: {said}"[:2000],
        "trace": traceback.format_exc()[-4000:],
    }


def classify(error: BaseException) -> tuple[Reason, BaseException]:
    """The reason, and the exception of the chain that it comes from."""
    name, text = type(error).__name__, str(error)
    memory = "out of memory" in text or "can't allocate memory" in text
    # torch's allocator asks NVML for details when memory runs out; where the sandbox keeps NVML
    # away, that assertion is what is left
    memory = memory or ("nvmlInit" in text and "CUDACachingAllocator" in text)
    if memory or isinstance(error, MemoryError) or "OutOfMemory" in name:
        return Reason.OUT_OF_MEMORY, error
    if "AcceleratorError" in name or any(said in text for said in CUDA_SAYS):
        return Reason.CUDA_ERROR, error
    if isinstance(error, ImportError) and "undefined symbol" in text:
        return Reason.UNDEFINED_SYMBOL, error
    if isinstance(error, BuildFailed | Refused):
        return Reason(error.reason), error
    if isinstance(error, ModuleNotFoundError):
        return Reason.NO_MODULE, error
    causes = list(_causes(error))
    for cause in causes:
        if LAUNCH_ERROR.search(_name(cause)):
            return Reason.CUDA_ERROR, cause
    # the innermost says most: Triton wraps an error once for every function it was inlined into
    for cause in reversed(causes):
        if _is_of_compiler(cause):
            return Reason.BUILD_FAILED, cause
    is_syntax = isinstance(error, SyntaxError)
    return Reason.SYNTAX_ERROR if is_syntax else Reason.EXCEPTION, error


def compiler_line(text: str) -> str:
    """The line of a compiler's message that says what is wrong: its first error, or in Triton's
    form the place, the line above the caret, and what follows."""
    lines = [line for line in text.splitlines() if line.strip()]
    marks = [number for number, line in enumerate(lines) if number and CARET.fullmatch(line)]
    if marks and PLACE.match(text):
        shown = dict.fromkeys((lines[0], lines[marks[-1] - 1], *lines[marks[-1] + 1 :]))
    else:
        shown = dict.fromkeys([line for line in lines if ERROR_LINE.search(line)][:1] or lines[:1])
    return " ".join(map(str.strip, shown))


def _causes(error: BaseException) -> Iterator[BaseException]:
    """The exception and those that it was raised for, the outermost first."""
    seen: set[int] = set()
    at: BaseException | None = error
    while at is not None and id(at) not in seen:
        seen.add(id(at))
        yield at
        at = at.__cause__ or (None if at.__suppress_context__ else at.__context__)


def _name(error: BaseException) -> str:
    return f"{type(error).__module__}.{type(error).__name__}"


def _is_of_compiler(error: BaseException) -> bool:
    if COMPILER_ERROR.search(_name(error)) or COMPILER_SAYS.search(str(error)):
        return True
    frames = (frame for frame, _ in traceback.walk_tb(error.__traceback__))
    return any(
        COMPILER_FRAME.match(f"{frame.f_globals.get('__name__')}.{frame.f_code.co_name}")
        for frame in frames
    )
