"""Which rows share a micro batch: length-aware plans with a token budget.

Guarantees: every row exactly once an epoch, no micro batch above the budget, the same plan for the
same lengths, budget, seed and epoch on every machine, and equally many micro batches in every epoch
of a run (a trainer counts its steps once). Rows are never cut: one above the budget is refused.
Does not guarantee equally many rows per optimiser step: a step holds about equally many tokens,
which is reported, and its loss is the mean over its completion tokens, whatever they are packed
with.
"""

from __future__ import annotations

import bisect
import random
import statistics
from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.errors import UsageError

Mode = Literal["pack", "pad"]


class MicroBatch(BaseModel):
    """Rows of one forward pass. Packed they stand behind one another in one line of
    `padded_tokens`; padded, one below the other."""

    model_config = ConfigDict(frozen=True)

    rows: tuple[int, ...] = Field(
        min_length=1, description="indices into the lengths that were planned"
    )
    tokens: int = Field(description="real tokens")
    padded_tokens: int = Field(description="tokens computed, padding included")


class EpochPlan(BaseModel):
    """Micro batches of one epoch, in order."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    batches: tuple[MicroBatch, ...]

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that is padding."""
        return 1 - sum(batch.tokens for batch in self.batches) / sum(
            batch.padded_tokens for batch in self.batches
        )

    def effective_batch(self, accumulation: int) -> dict[str, float]:
        """Rows and real tokens per optimiser step of `accumulation` micro batches: mean, least and
        most. The last step may be short."""
        steps = [
            self.batches[start : start + accumulation]
            for start in range(0, len(self.batches), accumulation)
        ]
        rows = [sum(len(batch.rows) for batch in step) for step in steps]
        tokens = [sum(batch.tokens for batch in step) for step in steps]
        summary = {"steps": float(len(steps))}
        for name, values in (("rows", rows), ("tokens", tokens)):
            summary |= {
                f"{name}_mean": statistics.fmean(values),
                f"{name}_min": float(min(values)),
                f"{name}_max": float(max(values)),
            }
        return summary


def plan_epochs(
    lengths: Sequence[int],
    *,
    token_budget: int,
    epochs: int,
    seed: int,
    mode: Mode = "pack",
    multiple: int = 128,
    window_rows: int = 1024,
) -> list[EpochPlan]:
    """One plan an epoch, each with as many micro batches as the longest of them needs.

    `lengths` are tokens of prompt and completion. `pack` fills lines up to `token_budget` (best
    fit, longest first, within windows of `window_rows` shuffled rows); `pad` puts rows of like
    length below one another. Padded lengths are multiples of `multiple` tokens, or the budget where
    that is less. Raises UsageError for no rows, a row without tokens and one above the budget.
    """
    _check(lengths, token_budget)
    groups = [
        _groups(lengths, token_budget, seed, epoch, mode, multiple, window_rows)
        for epoch in range(epochs)
    ]
    most = max(len(group) for group in groups)
    return [
        _plan(epoch, _split_to(group, most), lengths, token_budget, mode, multiple)
        for epoch, group in enumerate(groups)
    ]


def _check(lengths: Sequence[int], budget: int) -> None:
    if not lengths:
        raise UsageError("no rows to put into batches", "curate at least one row")
    if min(lengths) < 1:
        raise UsageError(f"row {list(lengths).index(min(lengths))} has no tokens", "drop it")
    if max(lengths) > budget:
        above = [index for index, length in enumerate(lengths) if length > budget]
        raise UsageError(
            f"{len(above)} rows are longer than the token budget of {budget}, the longest"
            f" {max(lengths)} (row {above[0]} is the first)",
            f"raise the budget to {max(lengths)}, or drop the rows: none is ever cut",
        )


def _groups(
    lengths: Sequence[int],
    budget: int,
    seed: int,
    epoch: int,
    mode: Mode,
    multiple: int,
    window: int,
) -> list[list[int]]:
    generator = random.Random(
        f"{seed} {epoch}"
    )  # a string: seeds by its bytes, the same on every machine
    order = list(range(len(lengths)))
    generator.shuffle(order)
    groups = []
    for start in range(0, len(order), window):
        # ties in length keep the shuffled order
        longest_first = sorted(order[start : start + window], key=lambda row: -lengths[row])
        groups += (
            _best_fit(longest_first, lengths, budget)
            if mode == "pack"
            else _alike(longest_first, lengths, budget, multiple)
        )
    generator.shuffle(groups)
    return groups


def _best_fit(rows: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Best fit, rows in the order given: each into the fullest line that has room, else into a new
    one."""
    lines: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens free, line), sorted
    for row in rows:
        place = bisect.bisect_left(free, (lengths[row], -1))
        if place == len(free):
            lines.append([row])
            bisect.insort(free, (budget - lengths[row], len(lines) - 1))
        else:
            room, line = free.pop(place)
            lines[line].append(row)
            bisect.insort(free, (room - lengths[row], line))
    return lines


def _alike(
    rows: Sequence[int], lengths: Sequence[int], budget: int, multiple: int
) -> list[list[int]]:
    groups: list[list[int]] = []
    for row in rows:  # longest first, so a group's first row sets its width
        if (
            groups
            and (len(groups[-1]) + 1) * _padded(lengths[groups[-1][0]], budget, multiple) <= budget
        ):
            groups[-1].append(row)
        else:
            groups.append([row])
    return groups


def _split_to(groups: list[list[int]], count: int) -> list[list[int]]:
    """As many groups as asked, by halving the ones with the most rows: still below the budget, and
    each row still once."""
    groups = [list(group) for group in groups]
    while len(groups) < count:
        largest = max(range(len(groups)), key=lambda index: len(groups[index]))
        half = len(groups[largest]) // 2
        groups.append(groups[largest][half:])
        groups[largest] = groups[largest][:half]
    return groups


def _padded(tokens: int, budget: int, multiple: int) -> int:
    return min(-(-tokens // multiple) * multiple, budget)


def _plan(
    epoch: int,
    groups: list[list[int]],
    lengths: Sequence[int],
    budget: int,
    mode: Mode,
    multiple: int,
) -> EpochPlan:
    batches = []
    for group in groups:
        tokens = sum(lengths[row] for row in group)
        padded = (
            _padded(tokens, budget, multiple)
            if mode == "pack"
            else len(group) * _padded(lengths[group[0]], budget, multiple)
        )
        batches.append(MicroBatch(rows=tuple(group), tokens=tokens, padded_tokens=padded))
    return EpochPlan(epoch=epoch, batches=tuple(batches))
