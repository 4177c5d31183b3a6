"""Inputs on which a few terms make up every long sum, or each largest element: adding them errs by
little, and one left out, or computed otherwise, shows.

Guarantees: one term lies in each of as many equal parts of a tensor, at a random place.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from kernels_eval.protocol import ORDINARY_TERMS, FewTerms, InputPlan


def with_few_terms(values: list[Any], plan: InputPlan, seed: int, kind: str) -> list[Any]:
    """These arguments with terms in the largest that may vary, and in others of its shape at the
    same places.
    """
    asked = plan.few_terms.get(kind)
    vary = [
        index
        for index, (x, note) in enumerate(zip(values, plan.notes, strict=True))
        if note.vary and not note.keeps and isinstance(x, Tensor)
    ]
    if asked is None or not vary:
        return values
    shape = max((values[index] for index in vary), key=Tensor.numel).shape
    found = list(values)
    for index in vary:
        if (x := values[index]).shape == shape:
            found[index] = _placed(x, asked, seed, index)
            if kind == ORDINARY_TERMS:
                found[index].clamp_(*x.aminmax())
    return found


def _placed(value: Tensor, asked: FewTerms, seed: int, index: int) -> Tensor:
    count = max(1, value.numel() * asked.terms // asked.length)
    where, what = (torch.Generator(value.device).manual_seed(x) for x in (seed, seed + 1 + index))
    drawn = torch.rand(count, generator=where, device=value.device, dtype=torch.float64)
    part = torch.arange(count, device=value.device)
    places = ((part + drawn) * (value.numel() / count)).long().clamp(max=value.numel() - 1)
    kept = part % asked.terms != 0 if asked.fewer else part >= 0
    filled = value.clone() if asked.around is None else torch.full_like(value, asked.around)
    flat = filled.reshape(-1)
    found = value.reshape(-1)[places] if asked.size is None else _terms(asked, what, count)
    flat[places[kept]] = found[kept].to(value.dtype)
    return torch.empty_like(value).copy_(flat.view(value.shape))


def _terms(asked: FewTerms, what: torch.Generator, count: int) -> Tensor:
    terms = torch.randint(2, 4, (count,), generator=what, device=what.device)
    terms[:: asked.terms] = 2  # the least are those that are left out
    found = terms * (asked.size or 0.0)
    if asked.around == 1.0 or asked.terms == 1:  # a logarithm's, or the largest
        return found
    return found * (2 * torch.randint(0, 2, (count,), generator=what, device=what.device) - 1)


def draws_for(elements: int, asked: FewTerms, wanted: int) -> int:
    """How many draws have so many terms in each place that a sum reads, all its rows together."""
    rows = max(1, elements // asked.length)
    return math.ceil(wanted / (asked.terms * rows))
