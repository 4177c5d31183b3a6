"""Whether a task means its infinities: one that comes from an infinity that an operator is given as
a number, in float64, too, is an answer like any other; one by an overflow, or the log of what
underflows, is none, as a more stable form has a number there.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

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


@without_compiler
class LargeNumbers(TorchDispatchMode):
    """Gives operators a large number in place of each infinity that they are given so. Its square
    is a number of the outputs' types."""

    def __init__(self, outputs: Sequence[Tensor]) -> None:
        TorchDispatchMode.__init__(self)
        self.number = min(torch.finfo(x.dtype).max ** 0.5 for x in _floats(outputs))

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        args, kwargs = tree_map(self._finite, (args, kwargs or {}))
        return function(*args, **kwargs)

    def _finite(self, value: object) -> object:
        if not _is_infinite(value):
            return value
        if isinstance(value, Tensor):
            return value.sign() * self.number
        assert isinstance(value, float)
        return math.copysign(self.number, value)


def _is_infinite(value: object) -> bool:
    if isinstance(value, Tensor):
        one = value.numel() == 1 and value.dtype.is_floating_point and not value.is_meta
        return one and bool(torch.isinf(computable(value)).any())
    return isinstance(value, float) and math.isinf(value)


def finite_share(outputs: Sequence[Tensor]) -> float:
    """Of an output's elements, how many are finite; the least of any output that has some."""
    return _least_share(torch.isfinite(computable(x)) for x in _floats(outputs))


def told_share(
    outputs: Sequence[Tensor], oracle: Sequence[Tensor], with_numbers: Sequence[Tensor]
) -> float:
    """The same, where an infinity counts as finite that float64 gives, too, and that is a number
    where `LargeNumbers` are given."""
    found = zip(*map(_floats, (outputs, oracle, with_numbers)), strict=True)
    return _least_share(
        torch.isfinite(x) | (torch.isinf(x) & (x == y) & torch.isfinite(z))
        for x, y, z in (map(computable, each) for each in found)
    )


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
