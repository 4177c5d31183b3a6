"""Loss on held-out tasks: which tasks those are, and the hook that measures it before the first
step and after each epoch.

Guarantees: all rows of a task are on one side; with a share, the side follows from the seed and the
task's id alone, so that a refresh with more tasks moves none across, and with equal share and seed
the held-out tasks are those that publishing puts into its split `test`; the loss is over the
completion tokens of all held-out rows, each token counting once, as `formatting.label_mask` marks
them. Does not guarantee that no held-out program resembles a training program (deduplication of the
tasks is a stage of its own), nor that a lower loss means better kernels.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.errors import UsageError
from tasks.sources.holdout import place_of
from tasks.training.formatting import IGNORED, label_mask

if TYPE_CHECKING:
    from trl.trainer.sft_trainer import SFTTrainer

COLUMN = "held_out_loss"
"""In the training log: nats a completion token, in the rows of the steps after which it was
measured."""


class EvaluationConfig(BaseModel):
    """Which tasks are kept out of training, and what comes of their loss."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    share: float = Field(
        default=0.02,
        ge=0,
        lt=1,
        description=(
            "about this share of the tasks is held out; 0: none. 2 % (ours) costs about 1 % of the"
            " training time: four forward passes over it in three epochs"
        ),
    )
    min_tasks: int = Field(
        default=20,
        ge=1,
        description=(
            "a share is taken only of a set with so many tasks: a smaller one has none to spare"
            " (ours)"
        ),
    )
    tasks: int | None = Field(
        default=None, ge=0, description="hold out exactly so many tasks in place of a share"
    )
    seed: int = Field(
        default=0,
        ge=0,
        description="which tasks; not the recipe's seed, so that runs of several seeds compare",
    )
    patience_epochs: int | None = Field(
        default=None,
        ge=1,
        description=(
            "stop after so many epochs without a new lowest held-out loss; null: never, as in the"
            " paper"
        ),
    )


class Split(NamedTuple):
    """The rows of a set, each on one side, in their order."""

    training: list[Mapping[str, Any]]
    held_out: list[Mapping[str, Any]]


class HeldOutLoss(BaseModel):
    """Mean cross-entropy per completion token of the held-out rows, nats, after so many steps (0:
    before the first)."""

    model_config = ConfigDict(frozen=True)

    step: int
    epoch: float
    loss: float


# -- the split -------------------------------------------------------------------------------------


def held_out_tasks(task_ids: Iterable[str], config: EvaluationConfig) -> set[str]:
    """Those of the tasks that are held out; repeats of an id do not matter, nor does the order.

    Raises UsageError where nothing would be left to train on.
    """
    names = sorted(set(task_ids))
    if config.tasks is not None:
        chosen = set(
            sorted(names, key=lambda name: (place_of(name, config.seed), name))[: config.tasks]
        )
    elif len(names) < config.min_tasks:
        chosen = set()
    else:
        chosen = {name for name in names if place_of(name, config.seed) < config.share}
    if names and len(chosen) == len(names):
        raise UsageError(
            f"holding out takes all {len(names)} tasks: nothing is left to train on",
            "hold out fewer, or curate more tasks",
        )
    return chosen


def split_by_task(rows: Sequence[Mapping[str, Any]], config: EvaluationConfig) -> Split:
    """Rows (with `task_id`) to train on and held-out rows. Raises UsageError where nothing is left
    to train on."""
    chosen = held_out_tasks((row["task_id"] for row in rows), config)
    return Split(
        [row for row in rows if row["task_id"] not in chosen],
        [row for row in rows if row["task_id"] in chosen],
    )


# -- the hook --------------------------------------------------------------------------------------


def attach(
    trainer: SFTTrainer,
    examples: Sequence[Mapping[str, Any]],
    tokenizer: Any,
    *,
    patience_epochs: int | None = None,
) -> None:
    """Let a trainer that is built evaluate on `examples` (of `formatting.select_examples`) before
    its first step and after each epoch.

    Evaluation leaves no trace in training: the random numbers after it are those that would have
    come without it. A resumed run measures what its checkpoint lacks, and nothing twice. With
    `patience_epochs` it stops where `stopped` says so (one step later where it was killed between
    the epoch's end and its evaluation); the adapter is that of the last step, not of the best one.
    Rows are evaluated one at a time: held-out rows are few, and one row surely fits where training
    fits.
    """
    if not examples:
        return
    import torch
    from datasets import Dataset
    from transformers.trainer_utils import IntervalStrategy

    masks = [label_mask(example, tokenizer) for example in examples]
    rows = [{"input_ids": mask.input_ids, "labels": mask.labels} for mask in masks]
    # transformers averages the losses of batches: weighed so, their mean is the mean over tokens.
    # The first token of a row is predicted from nothing, so it never counts
    counted = sum(sum(mask.carries_loss[1:]) for mask in masks)
    weight_per_token = len(rows) / counted
    loss_of_batch = trainer.prediction_step

    def weighted_step(
        model: Any, inputs: Any, prediction_loss_only: bool, ignore_keys: list[str] | None = None
    ) -> Any:
        tokens = (inputs["labels"][..., 1:] != IGNORED).sum()
        loss, logits, labels = loss_of_batch(model, inputs, prediction_loss_only, ignore_keys)
        return loss * tokens.to(loss.device) * weight_per_token, logits, labels

    evaluate = trainer.evaluate

    def evaluate_without_a_trace(*args: Any, **kwargs: Any) -> Any:
        # a data loader draws a seed from the generator that dropout draws from
        with torch.random.fork_rng():
            return evaluate(*args, **kwargs)

    patched: Any = trainer
    patched.evaluate = evaluate_without_a_trace
    patched.prediction_step = weighted_step
    trainer.eval_dataset = Dataset.from_list(rows)
    trainer.args.eval_strategy = IntervalStrategy.EPOCH
    trainer.args.per_device_eval_batch_size = 1
    trainer.add_callback(_hook(patience_epochs))


def _hook(patience_epochs: int | None) -> Any:
    from transformers import TrainerCallback

    class HeldOut(TrainerCallback):
        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            # before the first step, and where a checkpoint was written after an epoch's last step
            # and before its evaluation
            measured = {entry.step for entry in losses_of(state.log_history)}
            args.eval_on_start = (
                float(state.epoch or 0).is_integer() and state.global_step not in measured
            )

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            if state.global_step and stopped(losses_of(state.log_history), patience_epochs):
                control.should_training_stop = True

    return HeldOut()


# -- what came of it -------------------------------------------------------------------------------


def losses_of(log_history: Sequence[Mapping[str, Any]]) -> tuple[HeldOutLoss, ...]:
    """The held-out losses in a trainer's log (`trainer.state.log_history`), each step once, in
    order."""
    found = {
        entry["step"]: HeldOutLoss(
            step=entry["step"], epoch=entry.get("epoch") or 0.0, loss=entry["eval_loss"]
        )
        for entry in reversed(log_history)
        if "eval_loss" in entry
    }
    return tuple(found[step] for step in sorted(found))


def stopped(losses: Sequence[HeldOutLoss], patience_epochs: int | None) -> bool:
    """Have so many evaluations passed without a new lowest loss? The one before the first step
    counts as one to beat."""
    if patience_epochs is None or not losses:
        return False
    values = [math.inf if math.isnan(entry.loss) else entry.loss for entry in losses]
    return len(values) - 1 - values.index(min(values)) >= patience_epochs


def stopped_at(checkpoint: Path, patience_epochs: int | None) -> bool:
    """Did the run that wrote this checkpoint stop there? One that was killed before it saved the
    adapter must not train another step."""
    try:
        log = json.loads((checkpoint / "trainer_state.json").read_text(encoding="utf-8"))[
            "log_history"
        ]
    except (OSError, ValueError, KeyError):
        return False
    return stopped(losses_of(log), patience_epochs)


def with_held_out(
    history: Sequence[Mapping[str, Any]], losses: Sequence[HeldOutLoss]
) -> list[dict[str, Any]]:
    """The rows of the training log with the column `held_out_loss`, None where it was not measured.
    A loss from before the first step stands in a row of its own, step 0, in which nothing else was
    measured."""
    measured = {entry.step: entry.loss for entry in losses}
    rows = [{**entry, COLUMN: measured.get(int(entry["step"]))} for entry in history]
    if 0 not in measured:
        return rows
    names = dict.fromkeys(name for row in rows for name in row)
    return [{**names, "step": 0, "epoch": 0.0, COLUMN: measured[0]}, *rows]
