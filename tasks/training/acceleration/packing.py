"""Rows packed into one line, each computed as if alone.

Guarantees: positions restart with every row, attention does not cross rows, padding and first
tokens have no loss, and tokens weigh the same however packed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import TYPE_CHECKING, Any, cast

import torch

from tasks.training.acceleration.batching import Plan, padded_length
from tasks.training.acceleration.layers import require_rows_apart

if TYPE_CHECKING:
    from transformers import Trainer

Rows = Sequence[Mapping[str, Any]]
IGNORED = torch.nn.CrossEntropyLoss().ignore_index


def use_lines(trainer: Trainer, plans: Sequence[Plan], *, token_budget: int, multiple: int) -> None:
    """Let an unstarted trainer of batch size 1 pack each line of `plans` into a micro batch, padded
    to a multiple of `multiple` tokens, at most `token_budget`.

    Raises UsageError for a model that would attend across rows, ValueError for another batch size
    and as `use_plans` does.
    """
    require_rows_apart(cast(torch.nn.Module, trainer.model))
    if trainer.args.per_device_train_batch_size != 1:
        raise ValueError(
            "lines are micro batches already: set the trainer's batch size to 1, the budget decides"
        )

    pad_token = getattr(trainer.processing_class, "pad_token_id", None) or 0

    def collate(rows: Rows) -> dict[str, Any]:
        tokens = sum(len(row["input_ids"]) for row in rows)
        width = padded_length(tokens, token_budget, multiple)
        return pack(rows, padded_tokens=width, pad_token=pad_token)

    use_plans(trainer, plans, collate)


def use_plans(
    trainer: Trainer,
    plans: Sequence[Plan],
    collate: Callable[[Rows], dict[str, Any]] | None = None,
) -> None:
    """Let an unstarted trainer take its prepared rows in the order of `plans`, a line at a time;
    `collate` makes a micro batch, by default the trainer's own.

    Plans index `trainer.train_dataset`; further epochs start again with the first. Raises
    ValueError where the plans are of other rows.
    """
    examples = cast("Rows", trainer.train_dataset)
    planned = sorted(row for line in plans[0] for row in line)
    if planned != list(range(len(examples))):
        raise ValueError(f"the plans hold {len(planned)} rows, the trainer {len(examples)}")
    of_rows = trainer.data_collator

    def of_lines(batch: list[Any]) -> dict[str, Any]:
        if isinstance(batch[0], Mapping):  # single rows: an evaluation set has no plan
            return of_rows(batch)
        return (collate or of_rows)([row for line in batch for row in line])

    patched: Any = trainer
    patched.train_dataset = Lines(examples, plans)
    patched.data_collator = of_lines
    trainer.args.train_sampling_strategy = "sequential"


def pack(
    examples: Rows, *, padded_tokens: int | None = None, pad_token: int = 0
) -> dict[str, torch.Tensor]:
    """Pack examples with `input_ids` and `labels` into tensors of shape (1, padded_tokens) and
    `cu_documents`.

    `cu_documents`, int32: row starts, then the line's end, repeated to a multiple of eight entries
    so that short lists share compiled code; padding counts as a row. Omitted for one row. Raises
    ValueError where the examples do not fit.
    """
    lengths = [len(example["input_ids"]) for example in examples]
    total = sum(lengths)
    width = total if padded_tokens is None else padded_tokens
    if not 0 < total <= width:
        raise ValueError(f"{len(lengths)} rows of {total} tokens do not make a line of {width}")
    padding = width - total
    values = {
        "input_ids": [i for row in examples for i in row["input_ids"]] + [pad_token] * padding,
        # what stands before the first token of a row is another row
        "labels": [i for row in examples for i in (IGNORED, *row["labels"][1:])]
        + [IGNORED] * padding,
        "position_ids": [i for length in (*lengths, padding) for i in range(length)],
    }
    line = {name: torch.tensor([each]) for name, each in values.items()}
    if len(lengths) > 1:
        bounds = [*accumulate(lengths, initial=0), *([width] if padding else [])]
        bounds += [width] * (-len(bounds) % 8)
        line["cu_documents"] = torch.tensor(bounds, dtype=torch.int32)
    return line


class Lines(torch.utils.data.Dataset[list[Mapping[str, Any]]]):
    """The rows of each line of the current epoch, in the plan's order. The trainer calls
    `set_epoch`."""

    def __init__(self, examples: Rows, plans: Sequence[Plan]) -> None:
        self._examples, self._plans, self._epoch = examples, plans, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._plans[0])

    def __getitem__(self, line: int) -> list[Mapping[str, Any]]:
        plan = self._plans[self._epoch % len(self._plans)]
        return [self._examples[row] for row in plan[line]]
