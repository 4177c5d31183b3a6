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

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.errors import UsageError


class MicroBatch(BaseModel):
    """Rows of one forward pass, one after the other in one line of `padded_tokens`.

    Attributes:
        rows: indices into the lengths that were planned
        tokens: real tokens
        padded_tokens: tokens computed, padding included
    """

    model_config = ConfigDict(frozen=True)

    rows: tuple[int, ...] = Field(min_length=1)
    tokens: int
    padded_tokens: int


class EpochPlan(BaseModel):
    """Micro batches of one epoch, in order."""

    model_config = ConfigDict(frozen=True)

    epoch: int
    batches: tuple[MicroBatch, ...]

    @property
    def padding_waste(self) -> float:
        """Share of the computed tokens that is padding."""
        real = sum(batch.tokens for batch in self.batches)
        return 1 - real / sum(batch.padded_tokens for batch in self.batches)

    def effective_batch(self, accumulation: int) -> dict[str, float]:
        """Rows and real tokens per optimiser step of `accumulation` micro batches: mean, least and
        most. The last step may be short."""
        steps = [
            self.batches[start : start + accumulation]
            for start in range(0, len(self.batches), accumulation)
        ]
        summary = {"steps": float(len(steps))}
        for name, values in (
            ("rows", [sum(len(batch.rows) for batch in step) for step in steps]),
            ("tokens", [sum(batch.tokens for batch in step) for step in steps]),
        ):
            summary[f"{name}_mean"] = statistics.fmean(values)
            summary[f"{name}_min"] = float(min(values))
            summary[f"{name}_max"] = float(max(values))
        return summary


def plan_epochs(
    lengths: Sequence[int],
    *,
    token_budget: int,
    epochs: int,
    seed: int,
    multiple: int = 128,
    window_rows: int = 1024,
) -> list[EpochPlan]:
    """One plan an epoch, each with as many micro batches as the longest of them needs.

    `lengths` are tokens of prompt and completion. Lines are filled up to `token_budget`: best fit,
    longest first, within windows of `window_rows` shuffled rows. Padded lengths are multiples of
    `multiple` tokens, or the budget where that is less. Raises UsageError for no rows, a row
    without tokens and one above the budget.
    """
    _check(lengths, token_budget)
    lines = [_lines(lengths, token_budget, seed, epoch, window_rows) for epoch in range(epochs)]
    most = max(map(len, lines))

    def batch(rows: Sequence[int]) -> MicroBatch:
        tokens = sum(lengths[row] for row in rows)
        padded = min(-(-tokens // multiple) * multiple, token_budget)
        return MicroBatch(rows=tuple(rows), tokens=tokens, padded_tokens=padded)

    return [
        EpochPlan(epoch=epoch, batches=tuple(map(batch, _split_to(each, most))))
        for epoch, each in enumerate(lines)
    ]


def _check(lengths: Sequence[int], budget: int) -> None:
    if not lengths:
        raise UsageError("no rows to put into batches", "curate at least one row")
    if min(lengths) < 1:
        raise UsageError(f"row {list(lengths).index(min(lengths))} has no tokens", "drop it")
    above = [row for row, length in enumerate(lengths) if length > budget]
    if above:
        raise UsageError(
            f"{len(above)} rows are longer than the token budget of {budget}, the longest"
            f" {max(lengths)} (row {above[0]} is the first)",
            f"raise the budget to {max(lengths)}, or drop the rows: none is ever cut",
        )


def _lines(
    lengths: Sequence[int], budget: int, seed: int, epoch: int, window: int
) -> list[list[int]]:
    # seeded by a string, that is by its bytes: the same on every machine
    generator = random.Random(f"{seed} {epoch}")
    order = list(range(len(lengths)))
    generator.shuffle(order)
    lines = []
    for start in range(0, len(order), window):
        # ties in length keep the shuffled order
        longest_first = sorted(order[start : start + window], key=lambda row: -lengths[row])
        lines += _best_fit(longest_first, lengths, budget)
    generator.shuffle(lines)
    return lines


def _best_fit(rows: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Rows in the order given: each into the fullest line that has room, else into a new one."""
    lines: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens free, line), sorted
    for row in rows:
        place = bisect.bisect_left(free, (lengths[row], -1))
        if place == len(free):
            room, line = budget, len(lines)
            lines.append([])
        else:
            room, line = free.pop(place)
        lines[line].append(row)
        bisect.insort(free, (room - lengths[row], line))
    return lines


def _split_to(lines: Sequence[list[int]], count: int) -> list[list[int]]:
    """As many lines as asked, by halving the ones with the most rows: still below the budget, and
    each row still once."""
    lines = list(lines)
    while len(lines) < count:
        largest = max(range(len(lines)), key=lambda index: len(lines[index]))
        half = len(lines[largest]) // 2
        lines.append(lines[largest][half:])
        lines[largest] = lines[largest][:half]
    return lines
