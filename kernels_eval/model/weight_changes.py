"""Weights changed at random: which ones, in which ways and by how much, a seed alone tells.

Guarantees: one seed, shape and position give the same weights in two processes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random
from typing import Any

import torch
from torch import Generator, Tensor

from kernels_eval.config import (
    CHANGED_SHARES,
    DOUBLINGS,
    LIKE_ANOTHER,
    MOST_CHANGES,
    ROW_DOUBLINGS,
    ROW_SHARES,
)
from kernels_eval.records import stable_hash

Change = Callable[[Tensor, Random, Generator], Tensor]
"""Changes a tensor of rows."""


def changed(drawn: Tensor, identity: list[Any]) -> Tensor:
    """One tensor of a point's weights, perhaps changed. `identity`: the point's seed, and what
    tells this tensor from its others.
    """
    share = Random(str(identity[0])).choice(CHANGED_SHARES)  # of all of the point's tensors
    random = Random(stable_hash(["change", *identity]))
    if not drawn.numel() or random.random() > share:
        return drawn
    generator = Generator(drawn.device).manual_seed(random.getrandbits(31))
    rows = drawn.flatten(1) if drawn.dim() > 1 else drawn.reshape(-1, 1)
    for change in random.choices(WAYS, k=random.randint(1, MOST_CHANGES)):
        rows = change(rows, random, generator)
    return rows.reshape(drawn.shape)


def shared_rows(x: Tensor, other: Tensor, identity: list[Any]) -> Tensor:
    """A tensor of which rows, a few or many, may be those of another of its shape: at some points
    two weights are alike. `identity`: as of `changed`.
    """
    random = Random(stable_hash(["share", *identity]))
    if x.dim() < 2 or not x.numel() or random.random() > LIKE_ANOTHER:
        return x
    count = max(1, round(math.exp(math.log(len(x)) * random.random())))
    to, of = (random.sample(range(len(x)), count) for _ in range(2))
    shared = x.clone()
    shared[to] = other[random.choice((to, of))].to(x.dtype)
    return shared


def _scale(rows: Tensor, random: Random, _: Generator) -> Tensor:
    return rows * _power(random, DOUBLINGS)


def _add_number(rows: Tensor, random: Random, _: Generator) -> Tensor:
    """A common part, which opens or shuts gates."""
    part = random.choice((-1, 1)) * _power(random, DOUBLINGS)
    return rows + part * _size(rows)


def _add_identity(rows: Tensor, random: Random, _: Generator) -> Tensor:
    """Blocks of a multiple of it, with the size of all elements kept."""
    count, length = rows.shape
    if min(count, length) < 2:
        return _add_number(rows, random, _)
    size, part = _size(rows), _power(random, ROW_DOUBLINGS)
    place, like = torch.arange(count, device=rows.device), torch.arange(length, device=rows.device)
    block = min(count, length)
    unit = (place[:, None] % block == like % block).to(rows.dtype)
    rows = rows + part * math.sqrt(length) * size * unit
    return rows * (size / _size(rows))


def _scale_rows(rows: Tensor, random: Random, generator: Generator) -> Tensor:
    """Some, each by another number."""
    share = random.choice((1 / len(rows), *ROW_SHARES))
    chosen, by = torch.rand(2, len(rows), 1, generator=generator, device=rows.device)
    factors = torch.exp2(random.choice((-1, 1)) * ROW_DOUBLINGS * by)
    return torch.where(chosen <= max(share, float(chosen.min())), rows * factors, rows)


def _liken(rows: Tensor, random: Random, _: Generator) -> Tensor:
    """Rows with much of one of them, and their norms kept."""
    like = torch.lerp(rows, rows[:1].expand_as(rows), random.random())
    norms, new = (x.norm(dim=1, keepdim=True) for x in (rows, like))
    scaled: Tensor = like * (norms / new.clamp(min=1e-30))
    return scaled


WAYS: tuple[Change, ...] = (_scale, _add_number, _add_identity, _scale_rows, _liken)


def _size(rows: Tensor) -> Tensor:
    return rows.square().mean().sqrt()


def _power(random: Random, most: float) -> float:
    return math.exp2(random.uniform(-most, most))
