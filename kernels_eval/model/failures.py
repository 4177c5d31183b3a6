"""The verdict reason that an exception of a candidate stands for.

In-process compilers (Triton's, NVRTC, Numba, torch.compile, TileLang, CuTe) are known by the names
of their exceptions and modules, without importing them.
"""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from pathlib import Path

import kernels_eval
from kernels_eval.languages import Language
from kernels_eval.protocol import ErrorReport
from kernels_eval.records import Reason


class KnownFailure(RuntimeError):
    """An exception that names its own verdict reason."""

    reason: str


def _of_all(known: str, attribute: str) -> re.Pattern[str]:
    said = (getattr(language, attribute) for language in Language)
    return re.compile("|".join(filter(None, (known, *said))))


COMPILER_ERROR = _of_all(
    r"Compil\w*(Error|Exception|Fail)|Codegen\w*Error|PTXAS|NVRTC|^numba\.core\.errors\."
    r"|^torch\._inductor\.exc\.|^torch\._dynamo\.exc\.(?!TorchRuntimeError)",
    "compiler_errors",
)
"""Exceptions of compilers, as module.Class."""
COMPILER_FRAME = _of_all("", "compiler_frames")
"""Functions, as module.name, below which every exception is about the source."""
COMPILER_SAYS = re.compile(
    r"PassManager::run failed|PTX codegen error|ptxas (fatal|error)|NVRTC_ERROR_COMPILATION"
    r"|Kernel compilation failed|\(\d+\): (catastrophic )?error:"
)
"""What compilers write into exceptions of no type of their own."""
LAUNCH_ERROR = _of_all(r"\.CUDA(Runtime|Driver)Error$|\.CudaAPIError$", "launch_errors")
"""The compiled kernel asks for more than the device has, or its driver refuses it."""
CUDA_SAYS = ("CUDA error", "Triton Error [CUDA]", "illegal memory access")
ERROR_LINE = re.compile(r"\berror\b|\bfatal\b|undefined", re.IGNORECASE)
PLACE = re.compile(r"at \d+:\d+:")
CARET = re.compile(r"\s*\^[\s^~]*")
OWN_FILES = str(Path(kernels_eval.__file__).parent)


def report(error: Exception) -> ErrorReport:
    reason, cause = classify(error)
    said = compiler_line(str(cause)) if reason is Reason.BUILD_FAILED else str(cause)
    return ErrorReport(
        error=reason.value,
        detail=f"{type(cause).__name__}: {said}"[:2000],
        trace=_trace(error)[-4000:],
    )


def _trace(error: BaseException) -> str:
    """Its traceback as far as it lies outside of this package, where any of it does."""
    told: traceback.TracebackException | None = traceback.TracebackException.from_exception(error)
    said = told
    while told:
        theirs = [frame for frame in told.stack if not frame.filename.startswith(OWN_FILES)]
        told.stack = traceback.StackSummary.from_list(theirs) if theirs else told.stack
        told = told.__cause__ or (None if told.__suppress_context__ else told.__context__)
    return "".join(said.format()) if said else ""


def classify(error: BaseException) -> tuple[Reason, BaseException]:
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
    if isinstance(error, KnownFailure):
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
    """A compiler message's first error, or in Triton's form the place, the line above the caret,
    and what follows.
    """
    lines = [line for line in text.splitlines() if line.strip()]
    marks = [number for number, line in enumerate(lines) if number and CARET.fullmatch(line)]
    if marks and PLACE.match(text):
        shown = dict.fromkeys((lines[0], lines[marks[-1] - 1], *lines[marks[-1] + 1 :]))
    else:
        shown = dict.fromkeys([line for line in lines if ERROR_LINE.search(line)][:1] or lines[:1])
    return " ".join(map(str.strip, shown))


def _causes(error: BaseException) -> Iterator[BaseException]:
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
