"""What the elements of an argument are drawn from, in place of what the task declares."""

from __future__ import annotations

import math
from itertools import pairwise
from random import Random

import torch
from torch import Tensor

from kernels_eval.config import (
    DISTINCT_STEP,
    EDGE_SPACING,
    EDGES,
    HALVES,
    IMPULSE_RANGE,
    LEAST_NORMAL,
    LEAST_SCALE,
    MOST_DISTINCT,
    OFFSET_MEAN,
    SMALL_DEVIATION,
)
from kernels_eval.protocol import DECLARED, POSITIVE, REACHED, UNIT, WITHIN, InputPlan, domain_of

BLOCKS = (DECLARED, "uniform", "normal", "normal_x10", "sparse", "small_integers")
"""What the blocks of `mixed` are drawn from."""


def drawn_from(
    value: Tensor,
    generator: torch.Generator,
    distribution: str,
    plan: InputPlan | None = None,
    reach: tuple[float, ...] = (),
) -> Tensor:
    """A tensor of the shape of `value`, in float32, from a distribution, in the domain that its
    name ends with (`DOMAINS`); `ends`: its own ends are in it. `plan`: what may vary about the
    task's inputs; `reach`: what it takes of this one.
    """
    domain = domain_of(distribution)
    name = distribution.removesuffix(domain)
    mixed = name in ("mixed", "edges", "ends")
    drawn = _mixed(value, generator) if mixed else _drawn(value, generator, name)
    least, largest = _limits(value, domain, reach)
    if domain == POSITIVE:
        drawn = drawn.abs() + 0.01
    elif domain:
        drawn = _folded(drawn if least < 0 else drawn.abs(), least, largest)
    plan = plan or InputPlan(notes=[], shapes={})
    if name == "ends":
        least, largest = math.nextafter(least, -math.inf), math.nextafter(largest, math.inf)
    if name in ("edges", "ends"):
        _set_edges(drawn, generator, least, largest, plan)
    if name == "ends" and plan.singular and least < 0 < largest:
        _set_slices(drawn, Random(generator.initial_seed()))
    return drawn


def _limits(value: Tensor, domain: str, reach: tuple[float, ...]) -> tuple[float, float]:
    """What all numbers of a domain lie between."""
    if domain == UNIT:
        return (-1.0 if bool((value < 0).any()) else 0.0), 1.0
    if domain == REACHED and reach:
        return reach[0], reach[-1]
    if domain in (REACHED, WITHIN):
        least, largest = value[torch.isfinite(value)].float().aminmax()
        return float(least), float(largest)
    return (0.0 if domain == POSITIVE else -math.inf), math.inf


def _folded(drawn: Tensor, least: float, largest: float) -> Tensor:
    """Values outside of this range, inside: the farther, the nearer to its ends."""
    middle, half = (least + largest) / 2, (largest - least) / 2
    inside = middle + half * drawn / (1 + drawn.abs())
    return torch.where((drawn > least) & (drawn < largest), drawn, inside)


def _set_edges(
    drawn: Tensor,
    generator: torch.Generator,
    least: float,
    largest: float,
    plan: InputPlan,
) -> None:
    """Make some elements numbers at which an answer may jump."""
    device = drawn.device
    scales = [1.0, *(x for x in plan.constants if x >= LEAST_SCALE)]
    halves = {x for half in HALVES for scale in scales for x in (half * scale, half / scale)}
    signed = {sign * x for x in {*EDGES, *halves, *plan.constants} for sign in (-1, 1)}
    edges = torch.tensor(sorted(x for x in signed if least < x < largest), device=device)
    count = drawn.numel() // EDGE_SPACING if len(edges) else 0
    if count:  # one in each part: two at one place may be in any order
        at = torch.randint(EDGE_SPACING, (count,), generator=generator, device=device)
        at += torch.arange(count, device=device) * EDGE_SPACING
        drawn.view(-1)[at] = edges[
            torch.randint(len(edges), (count,), generator=generator, device=device)
        ]


def _set_slices(drawn: Tensor, random: Random) -> None:
    """Make one slice of each dimension zero."""
    for dim in range(drawn.dim()):
        if drawn.shape[dim] > 3:
            drawn.select(dim, random.randrange(drawn.shape[dim])).zero_()


def warm_up(value: Tensor) -> None:
    """Draw every distribution once: a GPU loads each kernel on its first use."""
    generator = torch.Generator(device=value.device).manual_seed(0)
    for name in (*BLOCKS[1:], "mixed", "impulse", "ends", "offset", "small", "non_finite"):
        drawn_from(value, generator, name)


def _drawn(value: Tensor, generator: torch.Generator, name: str) -> Tensor:
    """A tensor of one distribution. `impulse` and `non_finite` change few elements of `value`: two
    and one in 2,048 (at most 1,024); `lone` changes one, `outliers` three.
    """
    shape, device, size = value.shape, value.device, value.numel()
    kind, _, factor = name.partition("_x")
    if kind == "uniform":
        return torch.rand(shape, generator=generator, device=device) * 2 - 1
    if kind == "small_integers":
        return torch.randint(-3, 4, shape, generator=generator, device=device).float()
    drawn = torch.randn(shape, generator=generator, device=device) * float(factor or 1)
    if kind == "sparse":
        drawn *= torch.rand(shape, generator=generator, device=device) < 0.1
    elif kind == "normal":
        _make_uneven(drawn, float(factor or 1))
    elif kind == "small":
        drawn *= max(SMALL_DEVIATION, LEAST_NORMAL * torch.finfo(value.dtype).tiny)
        if shape:  # a maximum that starts at 0 is wrong here, too
            drawn[shape[0] // 2 :].abs_().neg_()
    elif kind == "offset":
        drawn += min(OFFSET_MEAN, 2**-7 / torch.finfo(value.dtype).eps)
    elif kind in ("impulse", "lone", "outliers", "non_finite"):
        drawn, random = _flat_copy(value), Random(generator.initial_seed())
        odd = [math.nan, math.inf, -math.inf]
        if kind != "non_finite":
            count = {"lone": 1, "outliers": 3}.get(kind, 2 + min(size // 2048, 1022))
            sizes = [random.uniform(*IMPULSE_RANGE) * float(factor or 1) for _ in range(count)]
            odd = [size * (-1) ** index for index, size in enumerate(sizes)]
        places = random.sample(range(size), min(len(odd), size))
        if kind == "impulse" and size - 1 not in places and random.random() < 0.5:
            places[-1] = size - 1
        drawn.view(-1)[places] = torch.tensor(odd[: len(places)], device=device)
    return drawn


def _make_uneven(drawn: Tensor, spread: float) -> None:
    """Make maxima wrong that leave out the last element or start at 0, also behind a clamp."""
    if drawn.dim() > 1:
        drawn[..., ::2, :] /= 8
    ends = torch.tensor([0, 1.5, -1.5], device=drawn.device) * spread
    for dim in range(drawn.dim()):
        if drawn.shape[dim] >= 8:
            end = drawn.select(dim, -1)
            index = torch.arange(end.numel(), device=drawn.device)
            end.copy_(ends[index % len(ends)].view(end.shape))
    for dim in (0, -1) if drawn.dim() > 1 else ():
        if drawn.shape[dim] > 3:
            negative = drawn.select(dim, 1)
            negative.abs_().neg_().sub_(spread)


def make_distinct(value: Tensor) -> None:
    """Separate equal elements beyond rounding, also after a softmax before topk."""
    if value.dtype != torch.float32 or not 1 < value.numel() <= MOST_DISTINCT:
        return
    rising, order = value.reshape(-1).sort(stable=True)
    places = torch.arange(len(order), device=value.device)
    nth = places - (places * (rising.diff(prepend=rising[:1]) != 0)).cummax(0).values
    moves = nth * min(DISTINCT_STEP, 1 / (8 + 8 * float(nth.max())))
    scale = rising[rising != 0].abs().nanmedian().nan_to_num(1)
    rising = torch.where(rising != 0, rising * (1 - moves), scale * moves)
    value.copy_(torch.empty_like(rising).scatter_(0, order, rising).view_as(value))


def _mixed(value: Tensor, generator: torch.Generator) -> Tensor:
    """The declared tensor with 16 blocks of other distributions: no few elements tell the rest."""
    random, drawn = Random(generator.initial_seed()), _flat_copy(value)
    flat = drawn.view(-1)
    cuts = sorted(random.randrange(len(flat)) for _ in range(16))
    for start, end in pairwise([0, *cuts, len(flat)]):
        part = flat[start : end : random.choice((1, 1, 2, 3, 7))]
        kind = random.choice(BLOCKS)
        if kind != DECLARED and len(part):
            part.copy_(_drawn(part, generator, kind))
    return drawn


def _flat_copy(value: Tensor) -> Tensor:
    return value.float().clone(memory_format=torch.contiguous_format)
