"""Which operators run: seen by executing, never read from the text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

Function = Callable[..., Any]
Values = tuple[Any, ...]
Named = dict[str, Any] | None
NO_COMPUTE = frozenset(
    """empty empty_like empty_strided new_empty zeros zeros_like ones ones_like full full_like view
    reshape _unsafe_view t transpose permute expand as_strided slice select unsqueeze squeeze detach
    alias clone copy_ _to_copy contiguous split split_with_sizes chunk unbind lift_fresh
    scalar_tensor arange fill_ zero_ _local_scalar_dense is_same_size unfold resize_ set_ narrow
    diagonal new_zeros new_ones new_full _reshape_alias""".split()
)
"""aten operators that make, move or view tensors."""
NOT_NAMED = frozenset(
    """view reshape transpose permute expand expand_as unsqueeze squeeze flatten contiguous clone
    detach to t size dim numel stride shape device dtype is_contiguous split chunk unbind
    __getitem__ type float zeros ones full empty arange zeros_like ones_like full_like empty_like
    tensor view_as narrow select unfold swapaxes movedim __get__ __set__ __len__ requires_grad
    data_ptr element_size is_floating_point new_zeros tril triu bool copy_ broadcast_to __format__
    __repr__ item get_device storage is_cuda ndimension T mT""".split()
)
"""Functions of torch that make, move, view or describe tensors."""


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        namespace, name = function._schema.name.split("::")
        if namespace != "aten" or name not in NO_COMPUTE:
            self.seen.append(f"{namespace}.{name}")
        return function(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Function, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        name = resolve_name(function) or getattr(function, "__name__", "unknown")
        if "." in name and name.rsplit(".", 1)[-1] not in NOT_NAMED:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def compute_operators(run: Callable[[], object]) -> list[str]:
    """Names of the aten compute operators executed while `run()` runs."""
    mode = _Operators()
    with mode:
        run()
    return mode.seen


def reference_operators(run: Callable[[], object]) -> list[str]:
    """Names of the outermost torch functions called while `run()` runs, such as
    torch.nn.functional.layer_norm: what a person would call the operators of a module, before torch
    takes them apart."""
    mode = _Functions()
    with torch.no_grad(), mode:
        run()
    return mode.seen


def warm_modes() -> None:
    """Use both recorders once: their first use imports for more than a second, which forked
    children then need not."""
    compute_operators(lambda: torch.ones(2) + 1)
    reference_operators(lambda: torch.ones(2) + 1)
