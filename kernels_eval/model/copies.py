"""Copies of a few parts of an argument, exact or nearly so: rows that are like others, or their
negatives, runs that come again or in reverse, blocks of another argument or of what a task computes
with. Elements keep what each of them means."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from random import Random

from torch import Tensor

from kernels_eval.config import MOST_FEW, MOST_NEAR, MOST_PLACES, OWN_PART
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
        ways += [agree] * x.is_floating_point()
    for way in random.sample(ways, min(len(ways), random.randint(1, 3))):
        way(x, random)


def bring_near(x: Tensor, operands: Sequence[Tensor], random: Random) -> None:
    """Make a few parts like tensors or numbers that a task computes with, or their negatives."""
    numbers = [each for each in operands if not each.dim()]
    fitting = [each for each in operands if each.is_floating_point() == x.is_floating_point()]
    tensors = [each for each in fitting if each.dim()]
    kinds = [kind for kind in (tensors, tensors, numbers) if kind]
    for _ in range(random.randint(1, MOST_NEAR) if kinds else 0):
        other = random.choice(random.choice(kinds))
        if other.dim():
            _copy_block(_oriented(other, random), x, random)
        else:
            _set_number(x, float(other), random)


def agree(x: Tensor, random: Random) -> None:
    """Elements of a few slices along one axis get one sign."""
    axis = random.choice([axis for axis, size in enumerate(x.shape) if size > 1])
    slices = x.movedim(axis, 0)
    places = random.sample(range(len(slices)), random.randint(1, min(MOST_FEW, len(slices))))
    slices[places] = slices[places].abs() * random.choice((-1, 1))


def _oriented(other: Tensor, random: Random) -> Tensor:
    matrix = other.dim() > 1 and min(other.shape[-2:]) > 1
    return other.mT if matrix and random.random() < 1 / 2 else other


def _set_number(x: Tensor, number: float, random: Random) -> None:
    """A number, or its negative, here and there, or in a run along one axis."""
    number *= random.choice((-1, 1))
    size = x.numel()
    if random.random() < 1 / 2:
        count = _length(max(1, size // 16), random)
        x.view(-1)[random.choices(range(size), k=min(count, MOST_PLACES))] = number
        return
    lines = x.movedim(random.randrange(x.dim()), -1) if x.dim() else x.view(1)
    length = _length(lines.shape[-1], random)
    first = _place(lines.shape[-1] - length, random)
    for size in lines.shape[:-1]:
        lines = lines[random.randrange(size)]
    lines[first : first + length] = number


def _repeat_rows(x: Tensor, random: Random) -> None:
    """Some become others, nearly so, their negatives, or others with a number added."""
    sizes = [(size > 1) * size for size in x.shape[:-1]]
    rows = x.movedim(random.choices(range(len(sizes)), sizes)[0], 0)
    count = random.randint(1, min(MOST_FEW, len(rows) // 2))
    to = random.sample(range(len(rows)), count)
    one = random.randrange(len(rows))
    like = random.choice(([one] * count, random.sample(range(len(rows)), count)))
    drawn = rows[like]
    way = random.choice(("same", "same", "same", "near", "added", "negated"))
    if way == "near":  # but for a few elements, or a run
        size = rows.shape[-1]
        length = _length(size, random)
        first = _place(size - length, random)
        few = [random.randrange(size) for _ in range(random.randint(1, 4))]
        places = random.choice((few, [*range(first, first + length)]))
        drawn[..., places] = rows[to][..., places]
    elif way == "added" and x.is_floating_point():
        drawn += random.uniform(-1, 1) * x.square().mean().sqrt()
    elif way == "negated" and x.is_floating_point():
        drawn = -drawn
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
    """A block of another argument, as large as both allow along most axes, at any place; of
    floats, perhaps the negative, or nearly so."""
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
    block, like = x[tuple(to)], other[tuple(of)].to(x.dtype)
    block.copy_(_changed(like, block, random) if x.is_floating_point() else like)


def _changed(like: Tensor, own: Tensor, random: Random) -> Tensor:
    way = random.choice(("same", "same", "same", "negated", "negated", "near"))
    if way == "negated":
        return -like
    return like.lerp(own, OWN_PART) if way == "near" else like


def _length(most: int, random: Random) -> int:
    """Of a run, short ones as likely as long ones."""
    return max(1, min(most, round(math.exp(math.log(most) * random.random()))))


def _place(most: int, random: Random) -> int:
    """Where a run begins, often at an end."""
    return random.choice((0, most, random.randint(0, most), random.randint(0, most)))
