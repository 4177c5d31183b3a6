"""Arguments changed at random: in which ways, at which places and by how much, a seed alone tells,
so that no look at the inputs, or at this source, tells what the next ones are not.

Guarantees: one seed gives the same arguments. What an argument means is kept: what its note names,
the range of integers, the sum of a row of probabilities, both numbers of each row of a mask.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from random import Random
from typing import Any

import torch
from torch import Generator, Tensor

from kernels_eval.config import ALIKE_SHARE, BEYOND, FEWEST_ALIKE
from kernels_eval.model.copies import ORDERS, bring_near, may_repeat, repeat_parts
from kernels_eval.model.draw import Draw
from kernels_eval.model.held import hold, may_hold
from kernels_eval.model.integer_changes import (
    change_integers,
    change_mask,
    change_one_number,
    hold_mask,
    relate_mask,
    shuffle,
)
from kernels_eval.model.invariants import is_one_number
from kernels_eval.model.measurement import as_real, computable
from kernels_eval.model.number_changes import CHANGES, REGULAR
from kernels_eval.model.redraws import KEEP, VARIED_EDGES, moved_numbers, redrawn
from kernels_eval.model.relations import relate
from kernels_eval.model.structures import restructured
from kernels_eval.protocol import (
    ALIKE,
    FEW,
    HELD,
    LESS,
    MOVED,
    MUTATED,
    NEAR,
    POSITIVE,
    REACHED,
    SUM,
    VARIED,
    InputNote,
    InputPlan,
    domain_of,
)

NUMBERS = (VARIED, VARIED_EDGES)
"""Draws of floats below the declared one, and above."""


def mutated(
    arguments: list[Any],
    plan: InputPlan,
    seed: int,
    *,
    domain: str = "",
    less: bool = False,
    few: bool = False,
    alike: bool = False,
    near: bool = False,
    operands: Sequence[Tensor] = (),
    held: int = 0,
) -> list[Any]:
    """These arguments, each like itself at other places and like an earlier one of its type, and
    then changed in some ways, within a domain (`less`: no numbers, whose size and mean look as they
    did, and half of the others). `few`: only slices at one to eight places change; arguments of
    one length have the same places. `alike`: a few parts become exactly like others; `near`: like
    `operands`, which a task computes with. `held`: along axes of this length, most elements are one
    or few in turn, and nothing else changes.
    """
    found: list[tuple[Any, InputNote]] = []
    chosen = _holding(arguments, plan, seed, held) if held else []
    for index, (value, note) in enumerate(zip(arguments, plan.notes, strict=True)):
        random = Random(seed + index)
        changes = not less or (not note.vary and random.random() < 1 / 2)
        if note.structure or (held and index not in chosen):
            pass  # drawn below, or as it is
        elif note.varied in ("number", "text"):
            value = redrawn(value, note, seed + index, random.choice(NUMBERS))
        elif isinstance(value, Tensor) and value.layout == torch.strided and value.numel():
            generator = Generator(value.device).manual_seed(seed + index)
            draw = Draw(random, generator, less, str(seed) if few else "")
            own = as_real(value.detach())
            wide = torch.float64 if own.dtype == torch.float64 else torch.float32
            wide = wide if own.is_floating_point() else torch.int64
            drawn = own.to(wide, copy=True, memory_format=torch.contiguous_format)
            parts = alike or near
            unsorted = bool(note.order) and not parts and (bool(held) or random.random() < 1 / 2)
            if unsorted and not held:
                shuffle(drawn, draw)
            if held:
                change = hold_mask if note.is_mask else hold
                drawn = change(drawn, note, draw, held)
            elif near:
                if may_repeat(drawn, note) and not ORDERS.intersection(note.keeps):
                    bring_near(drawn, operands, random)
            elif alike:
                before = [x for x, _ in found]
                rest = arguments[index + 1 :]
                others = [as_real(x) for x in (*before, *rest) if _same_type(x, value)]
                if may_repeat(drawn, note) and (not others or random.random() < ALIKE_SHARE):
                    repeat_parts(drawn, others, note, random)
            else:
                relates = note.relates and plan.singular and own.numel() > 1
                like = _like(own, note, found) if relates else None
                drawn = _changed(drawn, note, draw, like, changes=changes, singular=plan.singular)
            loose = note.varied == "shuffled" and random.random() < 1 / 2
            most = float(drawn.abs().amax()) if near else 0.0
            drawn = _kept(drawn, own, note, domain, keeps=not loose, most=most)
            for name in () if unsorted else note.order:
                drawn = KEEP[name](drawn, own)
            drawn = torch.view_as_complex(drawn.contiguous()) if value.is_complex() else drawn
            value = torch.empty_like(value).copy_(drawn)
        found.append((value, note))
    return restructured([value for value, _ in found], plan, seed)


def _holding(arguments: list[Any], plan: InputPlan, seed: int, length: int) -> list[int]:
    """Positions of some that have an axis of this length, one at least if any may hold a state."""
    pairs = enumerate(zip(arguments, plan.notes, strict=True))
    suit = [i for i, (x, note) in pairs if may_hold(x, note, length, singular=plan.singular)]
    random = Random(seed)
    return random.sample(suit, random.randint(1, len(suit))) if suit else []


def mutated_as(
    distribution: str, arguments: list[Any], plan: InputPlan, operands: Sequence[Tensor] = ()
) -> list[Any]:
    """As a trial's name says: `mutated_SEED`, perhaps several, each perhaps `_less`, `_few`,
    `_alike`, `_near` or `_heldLENGTH`, and a domain; `mutated_movedNUMBER_SEED`: with each number a
    little smaller."""
    domain = domain_of(distribution)
    for seed, form, length in re.findall(
        rf"_(\d+)({LESS}|{FEW}|{ALIKE}|{NEAR}|{HELD}(\d+))?", distribution
    ):
        ways = {"less": form == LESS, "few": form == FEW, "alike": form == ALIKE}
        ways["near"], held = form == NEAR, int(length or 0)
        arguments = mutated(
            arguments, plan, int(seed), domain=domain, **ways, operands=operands, held=held
        )
    if moved := re.match(rf"{MUTATED}_{MOVED}(\d+)", distribution):
        first = len(arguments) * int(moved[1])
        pairs = enumerate(zip(arguments, plan.notes, strict=True), first)
        return [_moved(value, note, seed, domain) for seed, (value, note) in pairs]
    return arguments


def _moved(value: Any, note: InputNote, seed: int, domain: str) -> Any:
    if not note.vary or not isinstance(value, Tensor) or value.layout != torch.strided:
        return value
    own = computable(as_real(value.detach()))
    if not own.numel():
        return value
    generator = Generator(own.device).manual_seed(seed)
    drawn = _kept(moved_numbers(own, generator, note), own, note, domain)
    drawn = torch.view_as_complex(drawn.contiguous()) if value.is_complex() else drawn
    return torch.empty_like(value).copy_(drawn)


def _like(own: Tensor, note: InputNote, found: list[tuple[Any, InputNote]]) -> list[Tensor]:
    """Earlier arguments whose parts it may have: masks, or of its type and about its length."""
    tensors = [
        (x, of)
        for x, of in found
        if isinstance(x, Tensor) and x.device == own.device and x.dim() and x.numel()
    ]
    if note.is_mask:
        return [x for x, of in tensors if of.is_mask]
    return [x for x, _ in tensors if x.dtype == own.dtype and _fit(x, own)]


def _fit(one: Tensor, other: Tensor) -> bool:
    """Whether one size at most differs; of tensors of other dimensions, the last up to twice."""
    if one.dim() == other.dim():
        return sum(a != b for a, b in zip(one.shape, other.shape, strict=True)) < 2
    small, large = sorted((one.shape[-1], other.shape[-1]))
    return large <= 2 * small


def _same_type(one: Any, other: Tensor) -> bool:
    if not isinstance(one, Tensor) or one.device != other.device:  # of NumPy's arrays
        return False
    return one.dtype == other.dtype and one.numel() > 0 and one.dim() > 0


def _changed(
    x: Tensor,
    note: InputNote,
    draw: Draw,
    others: list[Tensor] | None,
    *,
    changes: bool,
    singular: bool,
) -> Tensor:
    """Like others, if any, and with `changes` in the ways of what it is: a mask, one number,
    integers, numbers. What is whole is like others after its changes, as these would tell it from
    them.
    """
    if note.is_mask:
        x = change_mask(x, draw) if changes else x
        return x if others is None else relate_mask(x, others, draw)
    whole = not x.is_floating_point()
    if others is not None and not whole:
        relate(x, others, draw)
    if changes and is_one_number(x):
        x = change_one_number(x, note, draw)
    elif changes and (whole or note.varied == "between"):
        change_integers(x, note, draw)
    elif changes and (note.vary or note.varied):
        ways = CHANGES if singular else REGULAR
        for change in draw.random.sample(ways, draw.random.randint(1, len(ways) // 2)):
            change(x.movedim(draw.axis(x), 0), draw)
    if others is not None and whole:
        relate(x, others, draw, FEWEST_ALIKE)
    return x


def _kept(
    drawn: Tensor,
    own: Tensor,
    note: InputNote,
    domain: str,
    *,
    keeps: bool = True,
    most: float = 0.0,
) -> Tensor:
    """With what it means, and `keeps`, and within its domain; any numbers may be as large as the
    `most`."""
    if note.vary:
        drawn = drawn.clamp(*_limits(own, "" if note.free else domain, note.reach, most))
    elif note.varied == "probabilities":
        sums = drawn.clamp_(min=0).sum(-1, keepdim=True)
        drawn = torch.where(sums > 0, drawn / sums, own)
    elif SUM not in note.keeps and not is_one_number(own):
        drawn = drawn.clamp(*_range(own))
    for name in note.keeps if keeps else ():
        drawn = KEEP[name](drawn, own) if name in KEEP else drawn
    return drawn


def _range(own: Tensor) -> tuple[Tensor, Tensor]:
    """The least and the largest; of few rows of integers, which may be of other ranges, of each."""
    if own.dim() < 2 or own.is_floating_point() or len(own) >= FEWEST_ALIKE:
        least, largest = own.aminmax()
        return least, largest
    rows = tuple(range(1, own.dim()))
    return own.amin(rows, keepdim=True), own.amax(rows, keepdim=True)


def _limits(
    own: Tensor, domain: str, reach: tuple[float, ...] = (), most: float = 0.0
) -> tuple[float, float]:
    if domain == REACHED and reach:
        return reach[0], reach[-1]
    least, largest = map(float, own.where(torch.isfinite(own), 0).aminmax())
    beyond = max(BEYOND, -least, largest, most)
    return {"": (-beyond, beyond), POSITIVE: (least, beyond)}.get(domain, (least, largest))
