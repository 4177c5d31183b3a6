"""Infrastructure faults: a failing kernel is a verdict, a failing machine one of these. Only these
are retried. Every error has a `hint`: one line that says how to fix it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError


def cause_of(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def first_problem(error: ValidationError) -> tuple[str, str]:
    """The dotted key (empty for the whole) and message of a validation's first problem."""
    first = error.errors()[0]
    return ".".join(map(str, first["loc"])), first["msg"]


class EvalError(Exception):
    """Base of all infrastructure faults."""

    def __init__(self, message: str, hint: str = "") -> None:
        super().__init__(message)
        self.hint = hint

    # Ray pickles exceptions: without this the hint is lost between processes.
    def __reduce__(self) -> tuple[type[EvalError], tuple[str, ...]]:
        return (type(self), (self.args[0], self.hint))

    def __str__(self) -> str:
        return f"{self.args[0]} ({self.hint})" if self.hint else str(self.args[0])


class ToolchainError(EvalError):
    """A compiler or header that every build needs is missing or broken."""


class DiskFullError(ToolchainError):
    """The disk of the builds or of the build cache is full."""


class InstallationError(EvalError):
    """This package's own code cannot be imported, or has changed since the process started."""


class DeviceError(EvalError):
    """The device that the language needs is not available."""


class BusyError(EvalError):
    """The devices are not free within the time given."""


class GpuLostError(EvalError):
    """A GPU stopped answering, or its health check failed."""


class ClusterError(EvalError):
    """Ray did not start, or has lost the node of this process."""


class ServiceError(EvalError):
    """The verification service (`concur serve`) does not answer, or not in time."""


class SandboxError(EvalError):
    """The fork server died or cannot start children."""


class KilledError(SandboxError):
    """A child or compiler (`role`) died of SIGKILL, possibly through no fault of its own."""

    def __init__(self, message: str, hint: str = "", role: str = "") -> None:
        super().__init__(message, hint)
        self.role = role

    def __reduce__(self) -> tuple[type[EvalError], tuple[str, ...]]:
        return (type(self), (self.args[0], self.hint, self.role))


class UsageError(EvalError):
    """The input cannot be used; the error names input, cause and fix. Never retried."""
