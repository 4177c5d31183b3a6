"""Whether a task means its infinities: where one of its operators is given an infinity as a number,
an infinity that float64 gives, too, is an answer like any other; one by an overflow is none.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.measurement import computable, least_mark
from kernels_eval.model.operators import Named
from kernels_eval.reference.aten import Values


@without_compiler
class GivenInfinities(TorchDispatchMode):
    """Sees whether any operator is `given` an infinity as a number or a tensor of one element."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.given = False

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        self.given = self.given or any(map(_is_infinite, tree_leaves((args, kwargs))))
        return function(*args, **(kwargs or {}))


def _is_infinite(value: object) -> bool:
    if isinstance(value, Tensor):
        one = value.numel() == 1 and value.dtype.is_floating_point and not value.is_meta
        return one and bool(torch.isinf(computable(value)).any())
    return isinstance(value, float) and math.isinf(value)


def finite_share(outputs: Sequence[Tensor]) -> float:
    """Of an output's elements, how many are finite; the least of any output that has some."""
    return _least_share(torch.isfinite(computable(x)) for x in _floats(outputs))


def told_share(outputs: Sequence[Tensor], oracle: Sequence[Tensor] | None) -> float:
    """The same, where an infinity that float64 gives, too, counts as finite."""
    if oracle is None:
        return finite_share(outputs)
    pairs = zip(_floats(outputs), _floats(oracle), strict=True)
    numbers = ((computable(x), y) for x, y in pairs)
    return _least_share(torch.isfinite(x) | (torch.isinf(x) & (x == y)) for x, y in numbers)


def _floats(outputs: Sequence[Tensor]) -> list[Tensor]:
    return [x for x in outputs if x.is_floating_point()]


def _least_share(masks: Iterable[Tensor]) -> float:
    return min((int(x.sum()) / x.numel() for x in masks if x.numel()), default=1.0)


def with_infinities(actual: Tensor, expected: Tensor) -> Tensor:
    """An output, with the expected infinity where it has a far larger number than anywhere else, of
    the same sign, such as -1e30."""
    if not actual.is_floating_point():
        return actual
    a, y = computable(actual), computable(expected)
    infinite = torch.isinf(y)
    if not infinite.any():
        return actual
    marked = a.abs() >= least_mark(a.reshape(-1).double())
    return torch.where(infinite & marked & (a.sign() == y.sign()), expected, actual)
