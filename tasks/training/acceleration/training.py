"""What a trainer calls before it starts, to train faster. Every row comes once an epoch; rows per
step are not TRL's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from tasks.training.acceleration.batching import (
    balanced_epochs,
    balanced_lines,
    busy_share,
    effective_batch,
    plan_epochs,
)
from tasks.training.acceleration.layers import (
    Acceleration,
    accelerate_trainer,
    exchange_in_float32,
)
from tasks.training.acceleration.packing import use_lines, use_plans

if TYPE_CHECKING:
    from transformers import Trainer

PADDED_TO = 128
"""A packed line's length is a multiple of this, so that lines of similar length share compiled
code."""
RowCost = Callable[[int], float]
"""Tokens of a row to its FLOPs, or any unit."""


@dataclass
class Accelerated:
    """What was done to a trainer.

    Attributes:
        batches: rows and real tokens of an optimiser step; of planned steps also the first epoch's
            `busy_share`
        step_share: of balanced rows or lines, the share of an epoch in a full step; None where each
            step's loss is the mean over its own tokens
        decided: the recomputation plan and attention kernel, known once training begins"""

    batches: dict[str, float]
    step_share: float | None = None
    decided: dict[str, str] = field(default_factory=dict)

    def note(self, made: Acceleration) -> None:
        self.decided |= {"recomputation": made.plan.describe(), "attention": made.attention_name}


def accelerate_training(
    trainer: Trainer,
    lengths: Sequence[int],
    row_cost: RowCost,
    *,
    max_length: int,
    layers: bool,
    packing: bool,
    balanced: bool,
) -> Accelerated:
    """Accelerate a trainer that has not started. `lengths` are its rows' tokens, at most
    `max_length`.

    `layers`: accelerate the model's layers. `packing`: lines of several rows, up to `max_length`
    tokens; needs `layers`. `balanced`: rows or lines of similar cost share an optimiser step.
    Raises UsageError for an unsupported or too large model.
    """
    args = trainer.args
    sharded = bool(trainer.is_fsdp_enabled)
    rows = args.per_device_train_batch_size
    rows_per_step = rows * args.gradient_accumulation_steps * args.world_size
    budget = max_length if packing else max(lengths) * rows
    means = {"rows_mean": float(rows_per_step), "tokens_mean": rows_per_step * fmean(lengths)}
    accelerated = Accelerated(means)
    if layers:
        accelerate_trainer(
            trainer, tokens=budget, seed=args.seed, sharded=sharded, made=accelerated.note
        )
    elif sharded:
        exchange_in_float32(trainer)
    if not (packing or balanced):
        return accelerated

    def line_cost(line: Sequence[int]) -> float:
        return sum(row_cost(lengths[row]) for row in line)

    epochs, seed = int(args.num_train_epochs), args.seed
    if packing:  # a micro batch is a line
        plans = plan_epochs(lengths, token_budget=budget, epochs=epochs, seed=seed)
        if balanced:
            plans = balanced_lines(plans, line_cost, lines_per_step=rows_per_step, seed=seed)
        use_lines(trainer, plans, token_budget=budget, multiple=PADDED_TO)
        accelerated.batches = effective_batch(
            plans[0], lengths, rows_per_step, budget=budget, multiple=PADDED_TO
        )
    else:
        plans = balanced_epochs(lengths, rows_per_step=rows_per_step, epochs=epochs, seed=seed)
        use_plans(trainer, plans)
    costs = [line_cost(line) for line in plans[0]]
    accelerated.batches["busy_share"] = busy_share(costs, args.world_size * rows)
    if balanced:
        accelerated.step_share = min(1, rows_per_step / len(plans[0]))
    return accelerated
