"""Weights moved away from where a constructor made them, by numbers of a few scales and either
sign: what a task uses as a logarithm, a logit or a level then acts at other scales.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from kernels_eval.config import ROW_SHIFTS, SCALED_FAN_IN
from kernels_eval.model.measurement import as_real
from kernels_eval.protocol import BACK, SHIFTED
from kernels_eval.records import stable_hash


def shifted_form(keys: Iterable[str], *, back: bool = False) -> str:
    """The form of weights in which these are shifted; `back`: by the negatives."""
    return "_".join([f"{SHIFTED}{BACK if back else ''}", *keys])


def keyed(weights: Iterable[tuple[Tensor, list[int]]]) -> Iterator[tuple[str, Tensor]]:
    """Each weight by its shape and how many of that shape came before."""
    seen: dict[str, int] = {}
    for weight, shape in weights:
        name = "x".join(map(str, shape)) or "1"
        nth = seen[name] = seen.get(name, -1) + 1
        yield f"{name}n{nth}", as_real(weight.detach())


def may_shift(weights: Iterable[tuple[Tensor, list[int]]]) -> dict[str, Tensor]:
    """What is no factor of products as layers make them: vectors, numbers, and matrices of larger
    elements."""
    found = dict(keyed(weights))
    return {key: x for key, x in found.items() if x.numel() and not _is_factor(x)}


def shift_weights(weights: Iterable[tuple[Tensor, list[int]]], seed: int, form: str) -> None:
    """Shift those that the form names: each row, or element of a vector, by one of the numbers."""
    head, *keys = form.split("_")
    sign = -1 if head.endswith(BACK) else 1
    for key, x in keyed(weights):
        if key in keys:
            by = torch.tensor(ROW_SHIFTS, device=x.device, dtype=x.dtype) * sign
            shape = [*x.shape[:-1], 1] if x.squeeze().dim() > 1 else [*x.shape]
            generator = torch.Generator(x.device)
            generator.manual_seed(int(stable_hash([seed, "shift", key])[:15], 16))
            count = math.prod(shape)
            order = torch.randperm(count, generator=generator, device=x.device) % len(by)
            x += by[order].view(shape)


def _is_factor(x: Tensor) -> bool:
    rows = x.squeeze()
    size = float(rows.double().square().mean().sqrt())
    return rows.dim() > 1 and size * rows[0].numel() ** 0.5 < SCALED_FAN_IN
