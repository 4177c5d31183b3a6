"""What a trainer calls before it starts, to train faster. Every row comes once an epoch; rows per
step are not TRL's."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

from tasks.training.acceleration.batching import balanced_epochs, busy_share
from tasks.training.acceleration.layers import (
    Acceleration,
    accelerate_trainer,
    exchange_in_float32,
)
from tasks.training.acceleration.ordering import use_orders

if TYPE_CHECKING:
    from transformers import Trainer

RowCost = Callable[[int], float]
"""Tokens of a row to its FLOPs, or any unit."""


@dataclass
class Accelerated:
    """What was done to a trainer.

    Attributes:
        batches: rows and real tokens of an optimiser step; of balanced ones also the first epoch's
            `busy_share`
        step_share: of balanced rows, the share of an epoch in a full step; None where each step's
            loss is the mean over its own tokens
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
    layers: bool,
    balanced: bool,
) -> Accelerated:
    """Accelerate a trainer that has not started. `lengths` are its rows' tokens.

    `layers`: accelerate the model's layers; with FSDP2 once training begins. `balanced`: rows of
    similar length share an optimiser step. Raises UsageError for an unsupported or too large
    model."""
    args = trainer.args
    sharded = bool(trainer.is_fsdp_enabled)
    rows = args.per_device_train_batch_size
    rows_per_step = rows * args.gradient_accumulation_steps * args.world_size
    means = {"rows_mean": float(rows_per_step), "tokens_mean": rows_per_step * fmean(lengths)}
    accelerated = Accelerated(means)
    if layers:
        tokens = max(lengths) * rows
        accelerate_trainer(
            trainer, tokens=tokens, seed=args.seed, sharded=sharded, made=accelerated.note
        )
    elif sharded:
        exchange_in_float32(trainer)
    if balanced:
        epochs = int(args.num_train_epochs)
        orders = balanced_epochs(
            lengths, rows_per_step=rows_per_step, epochs=epochs, seed=args.seed
        )
        use_orders(trainer, orders)
        costs = [row_cost(lengths[row]) for row in orders[0]]
        accelerated.batches["busy_share"] = busy_share(costs, args.world_size * rows)
        accelerated.step_share = min(1, rows_per_step / len(lengths))
    return accelerated
