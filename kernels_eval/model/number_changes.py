"""Ways in which slices of numbers change."""

from __future__ import annotations

import torch
from torch import Tensor

from kernels_eval.config import (
    COMMON_NUMBER,
    COMMON_SLICE,
    MOST_DOUBLINGS,
    MOST_SHUFFLED,
    SHARPNESS,
)
from kernels_eval.model.draw import Change, Draw
from kernels_eval.model.relations import blended, copy_slices, exchange_slices


def _scale(x: Tensor, draw: Draw) -> None:
    to, _ = draw.pairs(len(x))
    if draw.few and draw.random.random() < 1 / 4:  # all other slices shrink instead
        kept = x[to]
        x *= 2 ** draw.random.uniform(-MOST_DOUBLINGS, 0)
        x[to] = kept
    else:
        each = draw.uniform(len(to) if draw.few else 1, *[1] * (x.dim() - 1))
        x[to] *= torch.exp2(MOST_DOUBLINGS * (2 * each - 1))


def _add(x: Tensor, draw: Draw) -> None:
    """A common part, one number or one slice, to some slices or to all."""
    to, like = draw.pairs(len(x))
    random, size = draw.random, x.square().mean().sqrt()
    number = random.uniform(-COMMON_NUMBER, COMMON_NUMBER)
    # along few slices alone, as digits of spreads would cancel
    if draw.few or random.random() < 1 / 2:
        x[to] += random.choice(
            [x[like[:1]] * random.uniform(-COMMON_SLICE, COMMON_SLICE), number * size]
        )
    else:
        x += number * random.choice([x[like[:1]].clone(), size])


def _clear(x: Tensor, draw: Draw) -> None:
    x[draw.pairs(len(x))[0]] = 0


def _average(x: Tensor, draw: Draw) -> None:
    to, like = draw.pairs(len(x))
    x[to] = blended(x[to], x[like].mean(0, keepdim=True), draw)


def _sort(x: Tensor, draw: Draw) -> None:
    if draw.few:
        to, _ = draw.pairs(len(x))
        x[to] = x[to].sort(-1).values
    elif x.numel() <= MOST_SHUFFLED:
        x.copy_(x.sort(0).values)


def _sharpen(x: Tensor, draw: Draw) -> None:
    """Make small elements of some slices smaller still, so that a few large ones dominate."""
    to, _ = draw.pairs(len(x))
    largest = x[to].abs().amax().clamp(min=1e-30)
    x[to] *= (x[to].abs() / largest) ** draw.random.uniform(*SHARPNESS)


REGULAR: tuple[Change, ...] = (_scale, _add, exchange_slices)
"""What makes no matrix singular."""
CHANGES: tuple[Change, ...] = (*REGULAR, _clear, _average, _sort, copy_slices, _sharpen)
