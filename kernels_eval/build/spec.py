"""What a candidate asks to build, and what came of it."""

from __future__ import annotations

import shlex
from typing import Literal

from pydantic import field_validator

from kernels_eval.records import Reason, Record, stable_hash


class ExtensionSpec(Record):
    """One `load_inline` or `load` call as the candidate made it. For `load`, `files` holds (name,
    text) of the sources."""

    kind: Literal["inline", "files"] = "inline"
    name: str
    cpp_sources: tuple[str, ...] = ()
    cuda_sources: tuple[str, ...] = ()
    functions: tuple[str, ...] | None = None
    extra_cflags: tuple[str, ...] = ()
    extra_cuda_cflags: tuple[str, ...] = ()
    extra_ldflags: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    python_module: bool = True

    @field_validator("extra_cflags", "extra_cuda_cflags", "extra_ldflags")
    @classmethod
    def _as_a_shell_splits_them(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        """torch writes flags into a shell line: one string may hold several, and an empty one is
        none."""
        try:
            return tuple(part for flag in flags for part in shlex.split(flag))
        except ValueError:
            return flags  # an unbalanced quote: the compiler will say so

    @property
    def uses_cuda(self) -> bool:
        return bool(self.cuda_sources) or any(
            name.endswith((".cu", ".cuh")) for name, _ in self.files
        )

    @property
    def text(self) -> str:
        return "\n".join([*self.cpp_sources, *self.cuda_sources, *(text for _, text in self.files)])

    @property
    def key(self) -> str:
        """Identity of the request itself, without the toolchain: how a child finds what was built
        for it."""
        return stable_hash(self.model_dump(mode="json"))


class Build(Record):
    """What came of a build. `path` is the library where `ok`; `reason` is a compile_error, timeout
    or rejected reason where not.

    `library_bytes` is the size of a library that is kept; 0 where nobody has noted it. `lasting` is
    False where the same source may fare otherwise another time (a deadline, a compiler that was
    killed): such a build is not kept.
    """

    ok: bool
    key: str
    path: str = ""
    library_bytes: int = 0
    tier: str = ""
    reason: Reason | Literal[""] = ""
    log: str = ""
    seconds: float = 0.0
    cached: bool = False
    lasting: bool = True
