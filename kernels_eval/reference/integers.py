"""How large the integers are that a task computes: a kernel may hold them in 32 bits."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.operators import Named
from kernels_eval.reference.aten import SOURCES, Values, operator_name

LIMIT = 2**31


@without_compiler
class Integers(TorchDispatchMode):
    """Finds whether operators give integers that are `too_large` for 32 bits."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.too_large = False

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        computes = operator_name(function) not in SOURCES
        for x in tree_leaves(result) if computes and not self.too_large else ():
            if isinstance(x, Tensor) and x.dtype is torch.int64 and x.numel():
                least, largest = map(int, x.aminmax())
                self.too_large = least < -LIMIT or largest >= LIMIT
        return result
