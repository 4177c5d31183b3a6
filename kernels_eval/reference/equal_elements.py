"""Operators of a reference that may return any of equal elements, made to return a candidate's
choice.

Guarantees: a candidate's place is taken only where the operator's input holds the very value chosen
there, and only if no place is named twice.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.operators import Named
from kernels_eval.reference.aten import Values, operator_name

ANY_ORDER = frozenset("topk sort argsort msort median nanmedian kthvalue mode".split())
"""Operators that return any one of the indices of equal elements."""


@without_compiler
class ChosenAs(TorchDispatchMode):
    """Makes operators choose as a candidate's integer outputs; else the first (`last`: last) of
    equal elements.
    """

    def __init__(self, outputs: Sequence[Tensor] = (), *, last: bool = False) -> None:
        TorchDispatchMode.__init__(self)
        self.outputs = [x for x in outputs if x.dtype in (torch.int32, torch.int64)]
        self.last = last

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        if operator_name(function) not in ANY_ORDER or kwargs.get("stable"):
            return result
        with suppress(RuntimeError, IndexError, TypeError, ValueError):
            values, own = result
            names = (argument.name for argument in function._schema.arguments)
            dim = (dict(zip(names, args, strict=False)) | kwargs).get("dim", -1)
            own = chosen(args[0], dim, values, own, in_order(args[0], dim, values, last=self.last))
            for places in self.outputs:
                if places.numel() == own.numel():
                    own = chosen(args[0], dim, values, own, places.reshape(own.shape).long())
            return values, own
        return result


def in_order(x: Tensor, dim: int, values: Tensor, *, last: bool) -> Tensor:
    """Places along `dim` of x that hold these values, of equal ones the first or the last."""
    kept = values.dim() == x.dim()
    wanted = (values if kept else values.unsqueeze(dim)).movedim(dim, -1).contiguous()
    rising, order = (x.flip(dim) if last else x).movedim(dim, -1).contiguous().sort(stable=True)
    at = torch.arange(wanted.shape[-1], device=x.device)
    differs = torch.nn.functional.pad(wanted[..., 1:] != wanted[..., :-1], (1, 0))
    at = at - (at * differs).cummax(-1).values + torch.searchsorted(rising, wanted)
    places = order.gather(-1, at.clamp(max=x.shape[dim] - 1)).movedim(-1, dim)
    places = x.shape[dim] - 1 - places if last else places
    return places if kept else places.squeeze(dim)


def chosen(x: Tensor, dim: int, values: Tensor, own: Tensor, places: Tensor) -> Tensor:
    """These places along `dim` of x (or its own) for these values, where they hold them."""
    kept = own.dim() == x.dim()
    at = places if kept else places.unsqueeze(dim)
    wanted = values if kept else values.unsqueeze(dim)
    inside = (at >= 0) & (at < x.shape[dim])
    twice = (at.sort(dim).values.diff(dim=dim) == 0).any(dim, keepdim=True)
    right = inside & ~twice & (x.gather(dim, at.where(inside, 0)) == wanted)
    return places.where(right if kept else right.squeeze(dim), own)
