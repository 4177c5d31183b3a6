"""Keeps torch's compiler out of processes that compile nothing: its import takes a second, at a
dispatch mode's first method call. Once it is imported elsewhere, modes are excluded from compiling
as ever. What compiles does so within a child's limits."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
import torch.jit._builtins
from torch.utils._python_dispatch import TorchDispatchMode

COMPILER = "torch._dynamo"
M = TypeVar("M", bound=TorchDispatchMode)


def _is_imported() -> bool:
    # a candidate may have put another module in its place
    return hasattr(sys.modules.get(COMPILER), "disable")


def eagerly() -> AbstractContextManager[object]:
    """A context in which compiled functions run as they are written. Under a dispatch mode none is
    compiled, for which `fullgraph=True` raises."""
    return torch.compiler.set_stance("force_eager") if _is_imported() else nullcontext()


def _lazily(plain: Callable[..., Any], guarded: Callable[..., Any]) -> Callable[..., Any]:
    """Call `guarded` once the compiler is imported, else `plain`."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = guarded if _is_imported() else plain
        return chosen(*args, **kwargs)

    return call


def without_compiler(mode: type[M]) -> type[M]:
    """A dispatch mode whose first use does not import the compiler, and under which functions run
    `eagerly`."""
    kind: Any = mode
    guarded, enter, leave = kind.__torch_dispatch__, kind.__enter__, kind.__exit__
    eager: list[AbstractContextManager[object]] = []

    def entered(self: M) -> Any:
        eager.append(eagerly())
        eager[-1].__enter__()
        return enter(self)

    def left(self: M, *error: Any) -> None:
        leave(self, *error)
        eager.pop().__exit__(*error)

    kind.__torch_dispatch__ = _lazily(inspect.unwrap(guarded), guarded)
    kind.__enter__, kind.__exit__ = entered, left
    return mode


def wrap_manual_seed() -> None:
    """Wrap `torch.manual_seed` as the compiler would; call before anything watches torch for
    changes.
    """
    api: Any = torch
    plain = api.manual_seed
    if plain is torch.random.manual_seed:
        api.manual_seed = _lazily(plain, api._disable_dynamo(plain))
        api.jit._builtins._register_builtin(api.manual_seed, "aten::manual_seed")


def wrap_compile() -> None:
    """Have `torch.compile` precompile no C++ header: it is larger than a file of a child may be.
    Its variable will not do, as torch 2.11 does not read it.
    """
    api: Any = torch
    plain = api.compile

    @functools.wraps(plain)
    def compiled(*args: Any, **kwargs: Any) -> Any:
        from torch._inductor import config

        if hasattr(config, "cpp_cache_precompile_headers"):
            config.cpp_cache_precompile_headers = False
        return plain(*args, **kwargs)

    api.compile = compiled
