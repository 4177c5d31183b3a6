"""Replaces `torch.utils.cpp_extension.load_inline` and `load`: what they ask to build becomes plain
data.

The signatures, and how arguments are read, follow torch's.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from kernels_eval.isolation.channel import Message

FLAGS = ("extra_cflags", "extra_cuda_cflags", "extra_ldflags")
POSITIONAL = ("extra_cflags", "extra_cuda_cflags", "extra_sycl_cflags", "extra_ldflags")
Texts = Iterable[object] | None
"""One string, or several."""


def _as_tuple(value: Texts) -> tuple[str, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, str) else tuple(map(str, value))


def inline_spec(
    name: str,
    cpp_sources: Texts = (),
    cuda_sources: Texts = None,
    functions: Texts = None,
    **options: Texts,
) -> Message:
    """The ExtensionSpec (as plain data) of a `load_inline` call."""
    return {
        "kind": "inline",
        "cpp_sources": _as_tuple(cpp_sources),
        "cuda_sources": _as_tuple(cuda_sources),
        "functions": None if functions is None else _as_tuple(functions),
        **_options(name, options),
    }


def _options(name: str, options: dict[str, Texts]) -> Message:
    flags = {key: _as_tuple(options.get(key)) for key in FLAGS}
    python_module = bool(options.get("is_python_module", True))
    return {"name": str(name), **flags, "python_module": python_module}


def intercept(provide: Callable[[Message], ModuleType | None]) -> None:
    """Replace load_inline and load by `provide(spec) -> module`."""

    def load_inline(
        name: str,
        cpp_sources: Texts,
        cuda_sources: Texts = None,
        sycl_sources: Texts = None,
        functions: Texts = None,
        *args: Texts,
        **options: Texts,
    ) -> ModuleType | None:
        options.update(zip(POSITIONAL, args, strict=False))
        return provide(inline_spec(name, cpp_sources, cuda_sources, functions, **options))

    def load(name: str, sources: Texts, *args: Texts, **options: Texts) -> ModuleType | None:
        options.update(zip(POSITIONAL, args, strict=False))
        paths = map(Path, _as_tuple(sources))  # read now, as the candidate wrote them
        files = [(path.name, path.read_text(errors="replace")) for path in paths]
        return provide({"kind": "files", "files": files, **_options(name, options)})

    # an exception for a wrong call names these
    load_inline.__qualname__, load.__qualname__ = "load_inline", "load"
    vars(cpp_extension).update(load_inline=load_inline, load=load)


def open_library(path: str, spec: Message) -> ModuleType | None:
    """A library that was built for this request, loaded: its Python module, or None where it
    registers operators with torch instead."""
    if not spec.get("python_module", True):
        torch.ops.load_library(path)
        return None
    found = importlib.util.spec_from_file_location(str(spec["name"]), path)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class BuildFailed(RuntimeError):
    """A build that the parent was asked for did not succeed; candidates may catch it like the
    RuntimeError torch raises."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(f"Error building extension: {log}")
        self.reason = reason
