"""Orders of rows in which those of an optimiser step are of similar length.

Guarantees: every row once an epoch; the same order on every machine."""

from __future__ import annotations

import random
from collections.abc import Sequence

from kernels_eval.errors import UsageError


def balanced_epochs(
    lengths: Sequence[int],
    *,
    rows_per_step: int,
    epochs: int,
    seed: int,
    window_steps: int = 32,
) -> list[list[int]]:
    """One order of all rows per epoch; rows of a step are of similar length (tokens).

    Shuffled rows are sorted within windows of `window_steps` steps, whose steps are then shuffled;
    an incomplete one comes last. Raises UsageError for no rows or an empty row."""
    if not lengths:
        raise UsageError("no rows to put into batches", "curate at least one row")
    if min(lengths) < 1:
        raise UsageError(f"row {list(lengths).index(min(lengths))} has no tokens", "drop it")
    # seeded by a string, that is by its bytes: the same on every machine
    return [
        _balanced(lengths, rows_per_step, window_steps, random.Random(f"{seed} {epoch}"))
        for epoch in range(epochs)
    ]


def _balanced(
    lengths: Sequence[int], rows_per_step: int, window_steps: int, generator: random.Random
) -> list[int]:
    rows, window = list(range(len(lengths))), rows_per_step * window_steps
    generator.shuffle(rows)
    for start in range(0, len(rows), window):
        part = slice(start, start + window)
        rows[part] = sorted(rows[part], key=lambda row: -lengths[row])
    full = len(rows) // rows_per_step * rows_per_step
    steps = [rows[start : start + rows_per_step] for start in range(0, full, rows_per_step)]
    generator.shuffle(steps)
    return [row for step in (*steps, rows[full:]) for row in step]


def busy_share(costs: Sequence[float], workers: int) -> float:
    """Share of the workers' time spent computing, if each pass takes as long as its costliest micro
    batch. `costs` (any unit) are in dealing order, one to a worker."""
    passes = [costs[start : start + workers] for start in range(0, len(costs), workers)]
    return sum(costs) / (workers * sum(map(max, passes)))
