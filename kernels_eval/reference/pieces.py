"""Operators whose numbers are made of pieces, and on which piece each element is: what they decide,
as booleans of the result's shape."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from torch import Tensor

from kernels_eval.reference.aten import Values

View = Callable[[Values, Tensor], Tensor]
"""Of an operator's arguments and its result."""
LARGE_SHARE = 1 / 8
"""From which share of the largest on a result is no longer faint; the rest of 1 is saturated."""


def _kept(args: Values, result: Tensor) -> Tensor:
    """Whether the first argument is the result."""
    return result.eq(args[0])


def _zero(args: Values, result: Tensor) -> Tensor:
    return result == 0


def _positive(args: Values, result: Tensor) -> Tensor:
    return result > 0


def _large(args: Values, result: Tensor) -> Tensor:
    return result.abs() > LARGE_SHARE


def _full(args: Values, result: Tensor) -> Tensor:
    return result.abs() > 1 - LARGE_SHARE


def _first(args: Values, result: Tensor) -> Tensor:
    """Whether an extreme is the first of its elements."""
    x, axes = args[0], args[1] if len(args) > 1 else ()
    axes = [axes] if isinstance(axes, int) else axes or range(x.dim())
    for axis in axes:
        x = x.narrow(axis, 0, 1)
    return result.eq(x.reshape(result.shape))


def _table(names: str, **views: View) -> dict[str, Mapping[str, View]]:
    return dict.fromkeys(names.split(), views)


PIECES: Mapping[str, Mapping[str, View]] = (
    _table(
        """threshold clamp clamp_min clamp_max hardtanh abs maximum minimum fmax fmin
        leaky_relu elu _prelu_kernel hardshrink hardswish""",
        kept=_kept,
    )
    | _table("relu relu6", positive=_positive)
    | _table("sign sgn", zero=_zero, positive=_positive)
    | _table(
        """round floor ceil trunc remainder fmod floor_divide bitwise_and bitwise_xor softshrink
        bucketize searchsorted argmax argmin""",
        zero=_zero,
    )
    | _table("sinc exp exp2 erfc pow reciprocal gelu silu mish", large=_large)
    | _table("sigmoid hardsigmoid tanh erf _softmax", large=_large, full=_full)
    | _table("softplus", kept=_kept, large=_large)
    | _table("amax amin", first=_first)
)
"""Their views, by aten's names."""
