"""Replaces `torch.utils.cpp_extension.load_inline` and `load`, so that what they ask to build
becomes plain data. Signatures and the reading of arguments follow torch's.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch
from torch.utils import cpp_extension

from kernels_eval.model.failures import KnownFailure
from kernels_eval.sandbox.channel import Message

FLAGS = ("extra_cflags", "extra_cuda_cflags", "extra_ldflags")
POSITIONAL = (
    "extra_cflags",
    "extra_cuda_cflags",
    "extra_sycl_cflags",
    "extra_ldflags",
    "extra_include_paths",
)
INCLUDE = re.compile(r"""^[ \t]*#[ \t]*include[ \t]*[<"]([^<>"/\n]+)[>"]""", re.MULTILINE)
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


def _include_paths(options: dict[str, Texts]) -> list[Path]:
    return list(map(Path, _as_tuple(options.get("extra_include_paths"))))


def _own_headers(texts: Iterable[str], folders: Iterable[Path]) -> Message:
    resolved, places = (folder.resolve() for folder in folders), (Path.cwd(), Path("/tmp"))
    own = [folder for folder in resolved if any(map(folder.is_relative_to, places))]
    found: dict[str, str] = {}
    waiting = list(texts) if own else []
    while waiting:
        for name in INCLUDE.findall(waiting.pop()):
            path = next((folder / name for folder in own if (folder / name).is_file()), None)
            if path and name not in found:
                found[name] = path.read_text(errors="replace")
                waiting.append(found[name])
    return {"headers": sorted(found.items())} if found else {}


def intercept(provide: Callable[[Message], ModuleType | str]) -> None:
    """Replace load_inline and load by `provide(spec) -> module`."""

    def load_inline(
        name: str,
        cpp_sources: Texts,
        cuda_sources: Texts = None,
        sycl_sources: Texts = None,
        functions: Texts = None,
        *args: Texts,
        **options: Texts,
    ) -> ModuleType | str:
        options.update(zip(POSITIONAL, args, strict=False))
        made = inline_spec(name, cpp_sources, cuda_sources, functions, **options)
        texts = [*_as_tuple(cpp_sources), *_as_tuple(cuda_sources)]
        return provide(made | _own_headers(texts, _include_paths(options)))

    def load(name: str, sources: Texts, *args: Texts, **options: Texts) -> ModuleType | str:
        options.update(zip(POSITIONAL, args, strict=False))
        paths = list(map(Path, _as_tuple(sources)))  # read now, as the candidate wrote them
        files = [(path.name, path.read_text(errors="replace")) for path in paths]
        made = {"kind": "files", "files": files, **_options(name, options)}
        folders = [*(path.parent for path in paths), *_include_paths(options)]
        return provide(made | _own_headers([text for _, text in files], folders))

    # an exception for a wrong call names these
    load_inline.__qualname__, load.__qualname__ = "load_inline", "load"
    vars(cpp_extension).update(load_inline=load_inline, load=load)


def open_library(path: str, spec: Message) -> ModuleType | str:
    """Load a built library: its Python module, or its path where it registers operators."""
    if not spec.get("python_module", True):
        torch.ops.load_library(path)
        return path
    found = importlib.util.spec_from_file_location(str(spec["name"]), path)
    assert found and found.loader
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


class BuildFailed(KnownFailure):
    """A requested build failed; candidates may catch it like torch's RuntimeError."""

    def __init__(self, reason: str, log: str) -> None:
        super().__init__(f"Error building extension: {log}")
        self.reason = reason
