"""Smaller shapes of a task's arguments, which its kernels may have forgotten."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from types import MappingProxyType

from kernels_eval.config import SHAPE_SCOPES, TAILS

UNDIVIDED: Mapping[int, int] = MappingProxyType({})


def smaller_shapes(
    shapes: list[list[int] | None], random: Random, parts: Mapping[int, int] = UNDIVIDED
) -> dict[str, list[tuple[int, int, int]]]:
    """Ways to make all arguments smaller, so that no dimension starts to broadcast.

    `batch_1`: the first dimension becomes 1, where its size is unique. Others are named by what
    shrinks and the tail left (`TAILS`): `each_1` every dimension alone, counted from the last (of
    matrices and vectors: kernels may rely on square images); `all_1` equal sizes together; `last_1`
    and `first_1` those equal to the first tensor's last or first. Of other sizes 1 is left, or of a
    matrix' rows -1 (-1, 2 and 1 of its elements). What the task cuts into equal `parts`, by size,
    stays a multiple: the tail is left of a part. The reference says which are accepted. Sizes are
    as secret as what `random` was seeded with.
    """
    dims = [
        (i, d, d - len(shape), size)
        for i, shape in enumerate(shapes)
        if shape
        for d, size in enumerate(shape)
    ]
    sized = [shape for shape in shapes if shape]
    if not sized or 0 in {size for *_, size in dims}:
        return {}
    lead = next((shape for shape in sized if len(shape) > 1), sized[0])
    first = [dim for dim in dims if dim[-1] == lead[0]]
    last = [dim for dim in dims if dim[-1] == lead[-1]]
    variants = {}
    if lead[0] > 1 and all(d == 0 for _, d, *_ in first):
        variants["batch_1"] = [(i, d, 1) for i, d, *_ in first]
    each = dims if max(map(len, sized)) <= 2 else []
    for name, tail in TAILS.items():
        for scope, chosen in zip(SHAPE_SCOPES, (each, dims, last, first), strict=True):
            changed = _shrunk(chosen, scope == "each", tail, random, parts)
            if changed:
                variants[f"{scope}_{name}"] = changed
    return variants


def _shrunk(
    dims: list[tuple[int, int, int, int]],
    by_place: bool,
    tail: int,
    random: Random,
    parts: Mapping[int, int],
) -> list[tuple[int, int, int]]:
    counts = {size: parts.get(size, 1) for *_, size in dims}
    keyed = [
        ((size // counts[size], by_place and place), i, d, place, counts[size])
        for i, d, place, size in dims
        if size > 4 and size // counts[size] > 2
    ]
    ends = {key for key, *_, place, _ in keyed if place == -1} or {key for key, *_ in keyed}
    beside = -1 if by_place and abs(tail) == 1 else 1
    drawn = {
        key: drawn_size(key[0], tail if key in ends else beside, random)
        for key in dict.fromkeys(key for key, *_ in keyed)
    }
    return [(i, d, count * drawn[key]) for key, i, d, _, count in keyed]


def drawn_size(size: int, tail: int, random: Random) -> int:
    """A size from half of this one on, with `tail` elements left over (-1: all but one) in blocks
    of every power of two up to the largest (at most 1,024) that allows a choice.
    """
    block = 4
    while block < 1024 and 8 * block <= size:
        block *= 2
    least = max(2, size // 2)
    fitting = range(least + (tail - least) % block, size, block)
    return random.choice(fitting) if fitting else max(2, size - abs(tail))
