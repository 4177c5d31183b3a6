"""Inputs on which a few hundred terms make up every long sum: adding them errs by little, and one
left out shows.

Guarantees: one term lies in each of as many equal parts of a tensor, at a random place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import BACKGROUNDS
from kernels_eval.protocol import FewTerms, InputPlan


def with_few_terms(values: list[Any], plan: InputPlan, seed: int, *, fewer: bool) -> list[Any]:
    """These arguments with terms in the largest that may vary, and in others of its shape at the
    same places.
    """
    asked = plan.few_terms
    vary = [
        index
        for index, (x, note) in enumerate(zip(values, plan.notes, strict=True))
        if note.vary and not note.keeps and isinstance(x, Tensor)
    ]
    if asked is None or not vary:
        return values
    shape = max((values[index] for index in vary), key=Tensor.numel).shape
    return [
        _placed(x, asked, seed, index, fewer=fewer) if index in vary and x.shape == shape else x
        for index, x in enumerate(values)
    ]


def _placed(value: Tensor, asked: FewTerms, seed: int, index: int, *, fewer: bool) -> Tensor:
    around, size = BACKGROUNDS[asked.background]
    count = max(1, value.numel() * asked.terms // asked.length)
    where, what = (torch.Generator(value.device).manual_seed(x) for x in (seed, seed + 1 + index))
    drawn = torch.rand(count, generator=where, device=value.device, dtype=torch.float64)
    part = torch.arange(count, device=value.device)
    places = ((part + drawn) * (value.numel() / count)).long().clamp(max=value.numel() - 1)
    terms = torch.randint(2, 4, (count,), generator=what, device=value.device)
    signs = 2 * torch.randint(0, 2, (count,), generator=what, device=value.device) - 1
    terms[:: asked.terms] = 2  # the least are those that are left out
    found = terms * size if around == 1.0 else terms * signs * size
    kept = part % asked.terms != 0 if fewer else part >= 0
    filled = value.clone() if around is None else torch.full_like(value, around)
    flat = filled.reshape(-1)
    flat[places[kept]] = found[kept].to(value.dtype)
    return torch.empty_like(value).copy_(flat.view(value.shape))


def draws_for(elements: int, asked: FewTerms, wanted: int) -> int:
    """How many draws have so many terms in each place that a sum reads, all its rows together."""
    rows = max(1, elements // asked.length)
    return math.ceil(wanted / (asked.terms * rows))
