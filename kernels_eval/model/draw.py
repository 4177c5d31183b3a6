"""What a seed draws for one argument: places along its axes, and numbers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from torch import Generator, Tensor

from kernels_eval.config import MOST_FEW, MOST_PLACES


@dataclass(frozen=True)
class Draw:
    """What is drawn for one argument."""

    random: Random
    generator: Generator
    less: bool
    few: str
    """A seed of the few places at which slices change, the same for all arguments. Empty: slices
    at many places change."""

    def axis(self, x: Tensor, among: Sequence[int] = ()) -> int:
        """An axis whose slices change. Where few do, a long axis is more likely."""
        axes = among or [axis for axis, size in enumerate(x.shape) if size > 1]
        if not self.few:
            return self.random.choice(axes)
        return self.random.choices(axes, [math.log2(x.shape[axis]) for axis in axes])[0]

    def pairs(self, size: int) -> tuple[Tensor, Tensor]:
        """Places along an axis, and for each the place of another."""
        if not self.few:
            return self._pairs(size)
        random = Random(f"{self.few} {size}")
        count = min(random.randint(1, MOST_FEW), max(1, size // MOST_FEW))
        first = random.randrange(size - count + 1)
        run = range(first, first + count)
        pool = random.choice([[*run], random.sample(range(size), count)])
        to = self.random.sample(pool, self.random.randint(1, count))
        others = self.random.choices([*pool, *self.random.sample(range(size), count)], k=len(to))
        both = torch.tensor([to, others], device=self.generator.device)
        return both[0], both[1]

    def touched(self, x: Tensor, axis: int) -> Tensor:
        """A mask of the slices along this axis that may change; all of them, unless few do."""
        if not self.few:
            return torch.ones([1] * x.dim(), dtype=torch.bool, device=x.device)
        chosen = torch.zeros(x.shape[axis], dtype=torch.bool, device=x.device)
        chosen[self.pairs(x.shape[axis])[0]] = True
        return chosen.view([-1 if other == axis else 1 for other in range(x.dim())])

    def _pairs(self, size: int) -> tuple[Tensor, Tensor]:
        """Few or many places along an axis, a run or here and there; and for each the place of
        another, of few different ones or many. `less`: few, each like one that is far from it, so
        that neighbours are as far from each other as they were, and the mean stays."""
        random, unit = self.random, -(-size // MOST_PLACES)
        count = size // unit
        least, largest = min(4, count // 2), count**0.5 if self.less else 3 / 4 * count
        wanted = max(1, int(least * max(1, largest / max(1, least)) ** random.random()))
        first = random.randrange(count - wanted + 1)
        run = range(first, first + wanted)
        chosen = random.choice([run, random.sample(range(count), wanted)])
        pool = random.sample(range(count), min(count, random.choice((1, 4, count))))
        others = [random.choice(pool) for _ in chosen]
        if self.less:
            far = count // 4, max(count // 4, count - 1 - count // 4)
            others = [(place + random.randint(*far)) % count for place in chosen]
        device = self.generator.device
        begins = torch.tensor([[*chosen], others], device=device) * unit
        to, like = (begins[..., None] + torch.arange(unit, device=device)).flatten(1)
        return to, like

    def uniform(self, *shape: int) -> Tensor:
        return torch.rand(shape, generator=self.generator, device=self.generator.device)

    def order(self, size: int) -> Tensor:
        return torch.randperm(size, generator=self.generator, device=self.generator.device)


Change = Callable[[Tensor, Draw], None]
"""Changes slices of a tensor along its first axis."""
