"""Plans of which rows share a micro batch or an optimiser step.

Guarantees: every row once an epoch, uncut; no micro batch above the token budget; the same plan on
every machine, equally many micro batches per epoch.
"""

from __future__ import annotations

import bisect
import random
from collections.abc import Callable, Sequence
from statistics import fmean

from kernels_eval.errors import UsageError

Plan = list[list[int]]
"""Micro batches of an epoch, in order; each is row indices of one packed line."""


def padded_length(tokens: int, budget: int, multiple: int) -> int:
    """Tokens of a padded line: a multiple of `multiple`, at most the budget."""
    return min(-(-tokens // multiple) * multiple, budget)


def effective_batch(
    plan: Plan, lengths: Sequence[int], accumulation: int, *, budget: int, multiple: int
) -> dict[str, float]:
    """Rows and real tokens per optimiser step of `accumulation` micro batches (mean, least, most),
    and the padded share of the computed tokens."""
    tokens = [sum(lengths[row] for row in line) for line in plan]
    computed = sum(padded_length(count, budget, multiple) for count in tokens)
    starts = range(0, len(plan), accumulation)
    summary = {"steps": float(len(starts)), "padding_waste": 1 - sum(tokens) / computed}
    for name, counts in (("rows", [len(line) for line in plan]), ("tokens", tokens)):
        values = [sum(counts[start : start + accumulation]) for start in starts]
        summary |= {
            f"{name}_mean": fmean(values),
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
    window_rows: int = 1024,
) -> list[Plan]:
    """One plan per epoch, all with as many micro batches as the longest needs.

    Lines of up to `token_budget` are filled best fit, longest first, within windows of
    `window_rows` shuffled rows. Raises UsageError for no rows, an empty row or one above the
    budget.
    """
    _check(lengths, token_budget)
    plans = [_lines(lengths, token_budget, seed, epoch, window_rows) for epoch in range(epochs)]
    most = max(map(len, plans))
    for plan in plans:
        while len(plan) < most:
            # halve the line with the most rows: still below the budget, and each row still once
            largest = max(range(len(plan)), key=lambda index: len(plan[index]))
            rows = plan[largest]
            plan[largest], half = rows[: len(rows) // 2], rows[len(rows) // 2 :]
            plan.append(half)
    return plans


def balanced_epochs(
    lengths: Sequence[int],
    *,
    rows_per_step: int,
    epochs: int,
    seed: int,
    window_steps: int = 32,
) -> list[Plan]:
    """One order of all rows per epoch, as lines of one row; rows of a step are of similar length:
    sorted within windows of `window_steps` steps, which are then shuffled. Raises UsageError for no
    rows or an empty row."""
    _check(lengths, max(lengths, default=0))
    plans: list[Plan] = []
    for epoch in range(epochs):
        generator = random.Random(f"{seed} {epoch}")
        rows = list(range(len(lengths)))
        generator.shuffle(rows)
        order = _in_steps([lengths[row] for row in rows], rows_per_step, window_steps, generator)
        plans.append([[rows[place]] for place in order])
    return plans


def balanced_lines(
    plans: Sequence[Plan],
    cost: Callable[[Sequence[int]], float],
    *,
    lines_per_step: int,
    seed: int,
    window_steps: int = 32,
) -> list[Plan]:
    """The lines of each epoch, ordered as `balanced_epochs` orders rows. `cost` maps a line's rows
    to its cost, in any unit."""
    ordered = []
    for epoch, plan in enumerate(plans):
        costs, generator = [cost(line) for line in plan], random.Random(f"{seed} {epoch} lines")
        order = _in_steps(costs, lines_per_step, window_steps, generator)
        ordered.append([plan[place] for place in order])
    return ordered


def _in_steps(
    costs: Sequence[float], per_step: int, window_steps: int, generator: random.Random
) -> list[int]:
    places, window = list(range(len(costs))), per_step * window_steps
    for start in range(0, len(places), window):
        part = slice(start, start + window)
        places[part] = sorted(places[part], key=lambda place: -costs[place])
    full = len(places) // per_step * per_step
    steps = [places[start : start + per_step] for start in range(0, full, per_step)]
    generator.shuffle(steps)
    return [place for step in (*steps, places[full:]) for place in step]


def busy_share(costs: Sequence[float], workers: int) -> float:
    """Share of the workers' time spent computing, if each pass takes as long as its costliest micro
    batch. `costs` (any unit) are in dealing order, one to a worker."""
    passes = [costs[start : start + workers] for start in range(0, len(costs), workers)]
    return sum(costs) / (workers * sum(map(max, passes)))


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


def _lines(lengths: Sequence[int], budget: int, seed: int, epoch: int, window: int) -> Plan:
    # seeded by a string, that is by its bytes: the same on every machine
    generator = random.Random(f"{seed} {epoch}")
    order = list(range(len(lengths)))
    generator.shuffle(order)
    lines: Plan = []
    for start in range(0, len(order), window):
        # ties in length keep the shuffled order
        longest_first = sorted(order[start : start + window], key=lambda row: -lengths[row])
        lines += _best_fit(longest_first, lengths, budget)
    generator.shuffle(lines)
    return lines


def _best_fit(rows: Sequence[int], lengths: Sequence[int], budget: int) -> Plan:
    lines: Plan = []
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
