"""A task's own formula in float64, whatever it casts to on the way."""

from __future__ import annotations

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.operators import Named
from kernels_eval.reference.aten import SOURCES, Values, operator_name

WIDER = dict.fromkeys((torch.float32, torch.float16, torch.bfloat16), torch.float64)
WIDER |= {torch.complex64: torch.complex128}
"""FP8 stays: it is a task's own quantisation."""


def widened(x: Tensor) -> Tensor:
    return x.to(WIDER.get(x.dtype, x.dtype))


@without_compiler
class InFloat64(TorchDispatchMode):
    """Operators called under it take and give float64, where `widens` what a task casts to another
    type, too (`casts`: whether it does). Raises RuntimeError where it reads the bits of a float64.
    """

    def __init__(self, *, widens: bool) -> None:
        TorchDispatchMode.__init__(self)
        self.widens, self.casts = widens, False

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        name, kwargs = operator_name(function), dict(kwargs or {})
        if function._overloadname == "dtype" and args[0].dtype == torch.float64:
            raise RuntimeError("float64 has other bits")
        if not self.widens:
            return function(*args, **kwargs)
        dtype = kwargs.get("dtype")
        if dtype in WIDER and name not in SOURCES:
            self.casts, kwargs["dtype"] = True, WIDER[dtype]
        if not function._schema.is_mutable:
            args, kwargs = tree_map_only(Tensor, widened, (args, kwargs))
        result = function(*args, **kwargs)
        aliases = any(x.alias_info for x in function._schema.returns)
        return result if aliases else tree_map_only(Tensor, widened, result)


@without_compiler
class Widens(TorchDispatchMode):
    """Finds whether an operator makes float64 of a tensor of a narrower type, as `found`."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.found = False

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        wide = isinstance(result, Tensor) and result.dtype in WIDER.values()
        if wide and not self.found:
            given = tree_leaves((args, kwargs))
            self.found = any(isinstance(x, Tensor) and x.dtype in WIDER for x in given)
        return result
