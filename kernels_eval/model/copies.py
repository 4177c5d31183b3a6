"""Copies of a few parts of an argument, exact or nearly so: rows that are like others, runs that
come again or in reverse, blocks of another argument. Elements keep what each of them means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from torch import Tensor

from kernels_eval.config import MOST_FEW
from kernels_eval.protocol import InputNote

ORDERS = frozenset({"rising", "falling"})


def may_repeat(x: Tensor, note: InputNote) -> bool:
    """Whether parts of an argument may be like others: not where each is told apart, or counted."""
    means = note.vary or note.varied in ("resampled", "between", "probabilities")
    return x.numel() > 1 and (means or note.rare == "full_rows")


def repeat_parts(x: Tensor, others: Sequence[Tensor], note: InputNote, random: Random) -> None:
    """Make a few parts like others, of it or of `others`; in order, whole rows alone."""
    ways: list[Callable[[Tensor, Random], None]] = []
    if x.dim() > 1 and max(x.shape[:-1]) > 1:
        ways.append(_repeat_rows)
    if not ORDERS.intersection(note.keeps):
        ways.append(_repeat_run)
        ways += [partial(_copy_block, other) for other in others]
    for way in random.sample(ways, min(len(ways), random.randint(1, 2))):
        way(x, random)


def _repeat_rows(x: Tensor, random: Random) -> None:
    """Some become others, or nearly, or others with a number added."""
    axis = random.choice([axis for axis in range(x.dim() - 1) if x.shape[axis] > 1])
    rows = x.movedim(axis, 0)
    count = random.randint(1, min(MOST_FEW, len(rows) // 2))
    to = random.sample(range(len(rows)), count)
    one = random.randrange(len(rows))
    like = random.choice(([one] * count, random.sample(range(len(rows)), count)))
    drawn = rows[like]
    way = random.choice(("same", "near", "added"))
    if way == "near":  # but for a few elements, or a run
        size = rows.shape[-1]
        length = _length(size, random)
        first = _place(size - length, random)
        few = [random.randrange(size) for _ in range(random.randint(1, 4))]
        places = random.choice((few, [*range(first, first + length)]))
        drawn[..., places] = rows[to][..., places]
    elif way == "added" and x.is_floating_point():
        drawn += random.uniform(-1, 1) * x.square().mean().sqrt()
    rows[to] = drawn


def _repeat_run(x: Tensor, random: Random) -> None:
    """A run of elements comes again, or in reverse right behind itself, or is one number."""
    axes = [axis for axis, size in enumerate(x.shape) if size > 1]
    axis = axes[-1] if random.random() < 3 / 4 else random.choice(axes)
    lines = x.movedim(axis, -1)
    size = lines.shape[-1]
    length = _length(max(1, size // 2), random)
    first = _place(size - length, random)
    if lines.dim() > 1 and random.random() < 1 / 2:  # not in all lines
        lines = lines[random.randrange(len(lines)) :]
    run = lines[..., first : first + length].clone()
    way = random.choice(("again", "again", "reversed", "one"))
    if way == "again":
        for _ in range(random.randint(1, 4)):
            to = _place(size - length, random)
            lines[..., to : to + length] = run
    elif way == "reversed":
        to = first + length - random.randint(0, 1)
        fits = min(length, size - to)
        lines[..., to : to + fits] = run.flip(-1)[..., :fits]
    else:
        lines[..., first : first + length] = run[..., :1]


def _copy_block(other: Tensor, x: Tensor, random: Random) -> None:
    """A block of another argument, as large as both allow along most axes, at any place."""
    to: list[slice] = []
    of: list[slice] = []
    for back in range(min(x.dim(), other.dim()), 0, -1):
        sizes = x.shape[-back], other.shape[-back]
        most = min(sizes)
        length = most if random.random() < 3 / 4 else _length(most, random)
        for size, places in zip(sizes, (to, of), strict=True):
            first = random.randrange(size - length + 1)
            places.append(slice(first, first + length))
    ahead = x.dim() - len(to), other.dim() - len(of)
    for size in x.shape[: ahead[0]]:
        x = x[random.randrange(size)]
    for size in other.shape[: ahead[1]]:
        other = other[random.randrange(size)]
    x[tuple(to)] = other[tuple(of)].to(x.dtype)


def _length(most: int, random: Random) -> int:
    """Of a run, short ones as likely as long ones."""
    return max(1, min(most, round(math.exp(math.log(most) * random.random()))))


def _place(most: int, random: Random) -> int:
    """Where a run begins, often at an end."""
    return random.choice((0, most, random.randint(0, most), random.randint(0, most)))
