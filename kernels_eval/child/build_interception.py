"""Replaces `torch.utils.cpp_extension.load_inline` and `load`: what they ask to build becomes plain
data.

The signatures, and how arguments are read, follow torch's.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils import cpp_extension

FLAGS = ("extra_cflags", "extra_cuda_cflags", "extra_ldflags")
POSITIONAL = ("extra_cflags", "extra_cuda_cflags", "extra_sycl_cflags", "extra_ldflags")


def _as_tuple(value: Any) -> tuple[str, ...]:
    if value is None:
        return ()
    return (str(value),) if isinstance(value, str) else tuple(map(str, value))


def inline_spec(
    name: str,
    cpp_sources: Any = (),
    cuda_sources: Any = None,
    functions: Any = None,
    **options: Any,
) -> dict[str, Any]:
    """The ExtensionSpec (as plain data) of a `load_inline` call."""
    return {
        "kind": "inline",
        "name": str(name),
        "cpp_sources": _as_tuple(cpp_sources),
        "cuda_sources": _as_tuple(cuda_sources),
        "functions": None if functions is None else _as_tuple(functions),
        **_options(options),
    }


def file_spec(name: str, sources: Any, **options: Any) -> dict[str, Any]:
    """The ExtensionSpec of a `load` call: the sources are read now, as the candidate wrote them."""
    paths = map(Path, _as_tuple(sources))
    files = [(path.name, path.read_text(errors="replace")) for path in paths]
    return {"kind": "files", "name": str(name), "files": files, **_options(options)}


def _options(options: dict[str, Any]) -> dict[str, Any]:
    flags = {key: _as_tuple(options.get(key)) for key in FLAGS}
    return {**flags, "python_module": bool(options.get("is_python_module", True))}


def intercept(provide: Callable[[dict[str, Any]], Any]) -> None:
    """Replace load_inline and load by `provide(spec) -> module`."""

    def load_inline(
        name: str,
        cpp_sources: Any,
        cuda_sources: Any = None,
        sycl_sources: Any = None,
        functions: Any = None,
        *args: Any,
        **options: Any,
    ) -> Any:
        options.update(zip(POSITIONAL, args, strict=False))
        return provide(inline_spec(name, cpp_sources, cuda_sources, functions, **options))

    def load(name: str, sources: Any, *args: Any, **options: Any) -> Any:
        options.update(zip(POSITIONAL, args, strict=False))
        return provide(file_spec(name, sources, **options))

    # an exception for a wrong call names these
    load_inline.__qualname__, load.__qualname__ = "load_inline", "load"
    cpp_extension.load_inline, cpp_extension.load = load_inline, load


class BuildFailed(RuntimeError):
    """A build that the parent was asked for did not succeed; candidates may catch it like the
    RuntimeError torch raises."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(f"Error building extension: {log}")
        self.reason = reason
