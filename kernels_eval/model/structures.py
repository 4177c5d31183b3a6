"""Arguments that a task takes in some structure only, drawn anew within it: permutations, places in
order within the rows of a sparse matrix, parents that lie before their children.

A structure is the names of invariants that the declared argument has; `FIXED`: no other values suit
the task. Guarantees: one seed gives the same elements, and these lie within the declared range.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import combinations
from random import Random
from typing import Any, NamedTuple

import torch
from torch import Generator, Tensor

from kernels_eval.config import FEWEST_PLACES, MOST_INVARIANTS, MOST_SHUFFLED, ROOTS_SHARE
from kernels_eval.protocol import FIXED, SUM, InputNote, InputPlan

Structure = tuple[str, ...]
ORDERS = ("rising", "falling")


def restructured(values: Sequence[Any], plan: InputPlan, seed: int) -> list[Any]:
    """These arguments, those with a structure drawn anew: first what divides others."""
    drawn = list(values)
    dividing = {_named(name) for note in plan.notes for name in note.structure}
    for index in sorted(range(len(drawn)), key=lambda index: (index not in dividing, index)):
        structure = plan.notes[index].structure
        if structure and structure != FIXED:
            drawn[index] = _Redraw(drawn, values, index, seed).of(structure)
    return drawn


def may_have_structure(value: object) -> bool:
    """Whether it is of numbers, not all one."""
    if not isinstance(value, Tensor) or value.layout != torch.strided or value.is_complex():
        return False
    return value.numel() > 1 and bool((value != value.reshape(-1)[0]).any())


def structures_of(values: Sequence[Any], index: int, note: InputNote) -> Iterator[Structure]:
    """What may be kept of an argument, the fewest invariants first."""
    x = values[index]
    trusted = _whole(x) and _needed(values, index, note)
    found: list[Structure] = [names for names in moves_of(x) if not trusted or names == ("gaps",)]
    for division in _divisions(values, index):
        names = _invariants(values, index, division, note)
        needed = _needed(values, index, note)
        for count in range(MOST_INVARIANTS + 1):
            for chosen in combinations(names, count):
                structure = (*division, *chosen)
                if structure and needed.issubset(chosen) and len({*chosen} & EXCLUSIVE) < 2:
                    found.append(structure)
    yield from sorted(found, key=lambda names: len(names) + MOVES.get(names[0], 0))


EXCLUSIVE = {"elements", "distinct", "before", "after"}
"""Of these, one tells how elements are drawn."""
TOGETHER: tuple[Structure, ...] = (("relabelled",), ("conjugated",), ("both",))
"""What gives several arguments the same new labels."""
MOVES = {"relabelled": 1, "conjugated": 1, "both": 1, "gaps": 2, "along0": 3, "along1": 3}
"""What keeps all that does not hang on how labels, rows or columns are numbered, or on the order of
gaps, and as how many invariants more each counts."""


def _needed(values: Sequence[Any], index: int, note: InputNote) -> set[str]:
    """What operators may trust without a look: bounds that divide another argument, or its sum."""
    x = values[index]
    if note.is_mask or SUM in note.keeps or not _whole(x):
        return {"rising"} if x.is_floating_point() and _in_order(x) else {"elements"}
    sizes = {x.numel() for x in values if isinstance(x, Tensor)}
    divides = any(_boundaries(values[index], size) is not None for size in sizes)
    return {"rising", "ends"} if divides and not note.varied else set()


def moves_of(x: Tensor) -> list[Structure]:
    """Structures that only renumber."""
    found: list[Structure] = []
    if x.dim() > 1:
        found += [(f"along{axis}",) for axis in (0, 1) if x.shape[axis] > 1]
        found += [("both",)] if x.shape[-1] == x.shape[-2] else []
    if x.dtype != torch.bool and _in_order(x):
        found.append(("gaps",))
    if _whole(x) and _range(x) <= MOST_SHUFFLED:
        found += [("relabelled",), ("relabelled", "ends")]
        if int(x.min()) >= 0 and int(x.max()) < len(x):
            found += [("conjugated",), ("conjugated", "ends")]
    return found


def _divisions(values: Sequence[Any], index: int) -> list[Structure]:
    """Into what groups: all in one, rows, and segments that another argument divides it into."""
    x = values[index]
    found: list[Structure] = [(), ("rows",)] if x.dim() > 1 else [()]
    if x.dim() == 1:
        others = (i for i in range(len(values)) if i != index)
        found += [(f"by:{i}",) for i in others if _boundaries(values[i], len(x)) is not None]
    return found


def _boundaries(y: object, count: int) -> Tensor | None:
    """Where segments of so many elements begin, and the last ends, by their bounds or lengths."""
    if not isinstance(y, Tensor) or y.dim() != 1 or y.is_floating_point() or len(y) < 2:
        return None
    y = y.long()
    if int(y[0]) == 0 and int(y[-1]) == count and bool((y.diff() >= 0).all()):
        return y
    if int(y.sum()) == count and bool((y >= 0).all()):
        return torch.cat([y.new_zeros(1), y.cumsum(0)])
    return None


class _Groups(NamedTuple):
    """Of each element the group, its place there, and how many the group has."""

    of: Tensor
    place: Tensor
    size: Tensor

    def order(self, keys: Tensor) -> Tensor:
        """The places of elements, group by group, in the order of these keys."""
        order = keys.argsort(stable=True)
        return order[self.of[order].argsort(stable=True)]


def _groups(values: Sequence[Any], index: int, division: Structure) -> _Groups:
    x = values[index]
    count, begins = x.numel(), torch.zeros(1, dtype=torch.long, device=x.device)
    if division == ("rows",):
        begins = torch.arange(0, count, x.shape[-1], device=x.device)
    elif division:
        bounds = _boundaries(values[_named(division[0])], count)
        begins = begins if bounds is None else bounds[:-1].to(x.device)
    every = torch.arange(count, device=x.device)
    of = torch.bucketize(every, begins, right=True) - 1
    return _Groups(of, every - begins[of], of.bincount()[of])


def _invariants(
    values: Sequence[Any], index: int, division: Structure, note: InputNote
) -> list[str]:
    """What holds of an argument in these groups."""
    x, groups = values[index], _groups(values, index, division)
    if note.is_mask or not _whole(x):
        return ["rising", "ends"] if x.is_floating_point() and _in_order(x) else ["elements"]
    flat = x.reshape(-1).long()
    within = groups.of.diff() == 0
    rising = flat[groups.order(flat)].diff()
    place = _places(x)
    holds = {
        "rising": bool((flat.diff()[within] >= 0).all()) and bool(within.any()),
        "falling": bool((flat.diff()[within] <= 0).all()) and bool(within.any()),
        "distinct": bool((rising[within] > 0).all()),
        "ends": not division,
        "before": _mostly(flat < place),
        "not_after": _mostly(flat <= place),
        "after": _mostly(flat > place),
        "not_before": _mostly(flat >= place),
        "elements": True,
    }
    names: list[str] = []
    for other, y in enumerate(values):
        if other != index and isinstance(y, Tensor) and y.shape == x.shape and _whole(y):
            names += [f"most:{other}"] if bool((x <= y).all()) else []
            names += [f"least:{other}"] if bool((x >= y).all()) else []
    return [*names, *(name for name, true in holds.items() if true)]


def _places(x: Tensor) -> Tensor:
    """Of each element, its place along the last axis."""
    return torch.arange(x.numel(), device=x.device) % x.shape[-1]


def _mostly(holds: Tensor) -> bool:
    """Whether it holds, but for a few: roots are nobody's child."""
    return len(holds) >= FEWEST_PLACES and float(holds.float().mean()) >= 1 - ROOTS_SHARE


def _whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _range(x: Tensor) -> int:
    return int(x.max()) - int(x.min()) + 1


def _named(name: str) -> int:
    """Of the other argument in an invariant's name; -1: none."""
    return int(name.partition(":")[2] or -1)


class _Redraw:
    """One argument of `drawn`, of which some are drawn anew; `own` are as declared."""

    def __init__(self, drawn: Sequence[Any], own: Sequence[Any], index: int, seed: int) -> None:
        self.drawn, self.own, self.index, self.seed = drawn, own, index, seed
        self.x: Tensor = own[index]
        self.random = Random(seed + index)
        self.generator = Generator(self.x.device).manual_seed(seed + index)

    def of(self, structure: Structure) -> Tensor:
        if structure[0] in MOVES:
            drawn = self._moved(structure[0], ends="ends" in structure)
        else:
            drawn = self._elements(structure).view(self.x.shape)
        return torch.empty_like(self.x).copy_(drawn)

    def _moved(self, move: str, *, ends: bool) -> Tensor:
        x = self.x
        if move.startswith("along"):
            axis = int(move[-1])
            return x.index_select(axis, self._order(x.shape[axis]))
        if move == "both":
            labels = self._labels(x.shape[-1], 0, ends=False)
            return x[..., labels, :][..., labels]
        if move == "conjugated":
            labels = self._labels(len(x), 0, ends=ends)
            drawn = torch.empty_like(x).index_copy_(0, labels, labels[x.long()].to(x.dtype))
            return drawn.sort(-1).values if x.dim() > 1 and _in_order(x) else drawn
        if move == "gaps":
            gaps = x.diff()[..., self._order(x.shape[-1] - 1)]
            drawn = torch.cat([x[..., :1], gaps], -1).cumsum(-1)
            drawn[..., -1] = x[..., -1]
            return drawn
        least = int(x.min())
        labels = self._labels(_range(x), least, ends=ends) + least
        return _in_order_as(labels[x.long() - least].to(x.dtype), x)

    def _labels(self, count: int, least: int, *, ends: bool) -> Tensor:
        """Others, the same for all arguments of one range. `ends`: but for the first and last."""
        seed = Random(f"{self.seed} {count} {least}").getrandbits(31)
        generator = Generator(self.x.device).manual_seed(seed)
        labels = torch.arange(count, device=self.x.device)
        inner = labels[1:-1] if ends else labels
        order = torch.randperm(len(inner), generator=generator, device=self.x.device)
        inner.copy_(inner[order])
        return labels

    def _order(self, count: int) -> Tensor:
        return torch.randperm(count, generator=self.generator, device=self.x.device)

    def _uniform(self) -> Tensor:
        return torch.rand(
            self.x.numel(), generator=self.generator, device=self.x.device, dtype=torch.float64
        )

    def _elements(self, structure: Structure) -> Tensor:
        names = set(structure)
        division = tuple(name for name in structure if name == "rows" or name.startswith("by:"))
        groups = _groups([*self.drawn], self.index, division)
        flat = self.x.reshape(-1)
        if "elements" in names:
            drawn = flat[groups.order(self._keys(groups))]
        elif "distinct" in names:
            drawn = self._distinct(flat, groups)
        else:
            drawn = self._within(flat, names)
        if names & {*ORDERS}:
            drawn = drawn[groups.order(-drawn if "falling" in names else drawn)]
        if "ends" in names:
            lines, own = drawn.view(-1, self.x.shape[-1]), flat.view(-1, self.x.shape[-1])
            lines[:, [0, -1]] = own[:, [0, -1]].to(lines.dtype)
        return drawn

    def _keys(self, groups: _Groups) -> Tensor:
        """All in any order, or most in the order of now."""
        anywhere = self._uniform() * groups.size
        chosen = self._uniform() < self.random.choice((1, 1, 1 / 8))
        return torch.where(chosen, anywhere, groups.place.double())

    def _distinct(self, flat: Tensor, groups: _Groups) -> Tensor:
        least, room = int(flat.min()), _range(flat)
        rises = (self._uniform() * (room - groups.size + 1).clamp(min=1)).long()
        rises = rises[groups.order(rises)] + groups.place + least
        return rises[groups.order(self._uniform())]

    def _within(self, flat: Tensor, names: set[str]) -> Tensor:
        """Between limits, or as declared where these leave no room."""
        x, place = self.x, _places(self.x)
        rows = flat.view(-1, x.shape[-1]) if "rows" in names else flat.view(1, -1)
        low = rows.amin(1, keepdim=True).expand(rows.shape).reshape(-1)
        high = rows.amax(1, keepdim=True).expand(rows.shape).reshape(-1)
        if x.is_floating_point():
            return torch.lerp(low, high, self._uniform().to(x.dtype))
        own, low, high = flat.long(), low.long(), high.long()
        least = {"after": place + 1, "not_before": place}
        most = {"before": place - 1, "not_after": place}
        for name in names:
            if name.startswith(("most:", "least:")):
                other, declared = self.drawn[_named(name)].reshape(-1), self.own[_named(name)]
                apart = int(bool((x != declared).all()))
                least |= {name: other + apart} if name.startswith("least:") else {}
                most |= {name: other - apart} if name.startswith("most:") else {}
            low = torch.maximum(low, least[name]) if name in least else low
            high = torch.minimum(high, most[name]) if name in most else high
        drawn = low + (self._uniform() * (high - low + 1)).long()
        kept = (high < low) | (self._uniform() >= self.random.choice((1, 1, 1 / 8)))
        kept &= (own >= low) & (own <= high) | (high < low)
        return torch.where(kept, own, drawn)


def _in_order(x: Tensor) -> bool:
    """Whether its rows rise."""
    return x.dim() > 0 and x.shape[-1] > 2 and bool((x.diff() >= 0).all())


def _in_order_as(drawn: Tensor, x: Tensor) -> Tensor:
    """Few rows of labels, their columns in order where the declared ones are."""
    if drawn.dim() != 2 or not torch.equal(x, _columns_in_order(x)):
        return drawn
    return _columns_in_order(drawn)


def _columns_in_order(x: Tensor) -> Tensor:
    for row in range(len(x) - 1, -1, -1) if len(x) <= math.isqrt(x.numel()) else ():
        x = x[:, x[row].argsort(stable=True)]
    return x
