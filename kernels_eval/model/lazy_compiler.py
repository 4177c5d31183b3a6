"""Keeps torch's compiler out of processes that compile nothing: importing it takes a second.

torch imports it at the first call of a dispatch mode's method, to say that the method must not be
compiled; and the compiler wraps `torch.manual_seed` when it is imported, for the same reason.
Guarantees: where something else has imported it, these functions are kept from it as ever; and a
candidate that imports it leaves `torch.manual_seed` as it was.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.jit._builtins
from torch.utils._python_dispatch import TorchDispatchMode

COMPILER = "torch._dynamo"
M = TypeVar("M", bound=TorchDispatchMode)


def _lazily(plain: Callable[..., Any], guarded: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `guarded` against the compiler once that is imported, and else plain."""

    @functools.wraps(plain)
    def call(*args: Any, **kwargs: Any) -> Any:
        chosen = guarded if COMPILER in sys.modules else plain
        return chosen(*args, **kwargs)

    return call


def without_compiler(mode: type[M]) -> type[M]:
    """A dispatch mode whose first use does not import the compiler."""
    kind: Any = mode
    guarded = kind.__torch_dispatch__
    kind.__torch_dispatch__ = _lazily(inspect.unwrap(guarded), guarded)
    return mode


def wrap_manual_seed() -> None:
    """Wrap `torch.manual_seed` as the compiler would, which then leaves it alone. To be called
    before anything watches for changes of torch."""
    api: Any = torch
    plain = api.manual_seed
    if plain is torch.random.manual_seed:
        api.manual_seed = _lazily(plain, api._disable_dynamo(plain))
        api.jit._builtins._register_builtin(api.manual_seed, "aten::manual_seed")
