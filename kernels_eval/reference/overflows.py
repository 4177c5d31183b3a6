"""Whether integers that a task computes leave their type: what wraps there is no answer to ask
for."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.operators import Named
from kernels_eval.reference.aten import Values, operator_name

GROWING = frozenset(
    """add sub rsub mul pow square mm bmm addmm dot mv matmul sum cumsum prod cumprod
    addcmul baddbmm""".split()
)
"""Operators whose results may be larger than their arguments."""
INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@without_compiler
class Overflows(TorchDispatchMode):
    """Finds whether an operator gives integers that their type does not hold, as `found`."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.found = False

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        written = "out" in (kwargs or {})
        grows = not (self.found or written) and operator_name(function) in GROWING
        wide = tree_map(_in_float64, args) if grows else ()  # before it writes in place
        result = function(*args, **(kwargs or {}))
        if grows and isinstance(result, Tensor) and result.dtype in INTEGERS and result.numel():
            others = {name: x for name, x in (kwargs or {}).items() if name != "dtype"}
            exact, held = function(*wide, **others), torch.iinfo(result.dtype)
            self.found = bool(((exact < held.min) | (exact > held.max)).any())
        return result


def _in_float64(x: Any) -> Any:
    integral = isinstance(x, Tensor) and not x.is_floating_point() and not x.is_complex()
    return x.double() if integral else x
