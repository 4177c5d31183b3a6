"""Operators of a reference that may return any one of equal elements, made to return a candidate's.

Guarantees: a place is taken from the candidate only where what the operator chose from holds the
very value that it has chosen, and only if the candidate names no place twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_eval.checks.operators import Named
from kernels_eval.reference.operator_costs import Values, operator_name

ANY_ORDER = frozenset("topk sort argsort msort median nanmedian kthvalue mode".split())
"""Operators that return any one of the indices of equal elements."""


class ChosenAs(TorchDispatchMode):
    """Operators that are called under it choose as these outputs of a candidate do, those that are
    integers and as many. `free` says whether one that may choose was called."""

    def __init__(self, outputs: Sequence[Tensor] = ()) -> None:
        TorchDispatchMode.__init__(self)
        self.free = False
        self.outputs = [x for x in outputs if x.dtype in (torch.int32, torch.int64)]

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if operator_name(function) not in ANY_ORDER or kwargs.get("stable"):
            return result
        self.free = True
        with suppress(RuntimeError, IndexError, TypeError, ValueError):
            values, own = result
            names = (argument.name for argument in function._schema.arguments)
            dim = (dict(zip(names, args, strict=False)) | kwargs).get("dim", -1)
            for places in self.outputs:
                if places.numel() == own.numel():
                    own = chosen(args[0], dim, values, own, places.reshape(own.shape).long())
            return values, own
        return result


def chosen(x: Tensor, dim: int, values: Tensor, own: Tensor, places: Tensor) -> Tensor:
    """These places along `dim` of x (or its own) for these values, where they hold them."""
    kept = own.dim() == x.dim()
    at = places if kept else places.unsqueeze(dim)
    wanted = values if kept else values.unsqueeze(dim)
    inside = (at >= 0) & (at < x.shape[dim])
    twice = (at.sort(dim).values.diff(dim=dim) == 0).any(dim, keepdim=True)
    right = inside & ~twice & (x.gather(dim, at.where(inside, 0)) == wanted)
    return places.where(right if kept else right.squeeze(dim), own)
