"""Rows behind one another in one line, each as if it stood alone.

Guarantees: positions restart with every row, attention does not cross rows (with the attention of
`tasks.training.attention`), the first token of a row is predicted by nothing, and padding is behind
the last row with no loss: logits and gradients of a row are those of the row alone, up to rounding.
The loss of a line is a sum over its completion tokens; the trainer divides it by the completion
tokens of the whole optimiser step (TRL's `num_items_in_batch`), so a token weighs the same whatever
it is packed with, as it does without packing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

from tasks.training.batching import EpochPlan
from tasks.training.formatting import IGNORED

if TYPE_CHECKING:
    from transformers import Trainer


def use_lines(
    trainer: Trainer,
    plans: Sequence[EpochPlan],
    *,
    token_budget: int,
    multiple: int,
    pad_token: int,
) -> None:
    """Let a trainer (of batch size 1, not yet started) take its micro batches from `plans` over its
    own prepared rows.

    The plans' rows are the rows of `trainer.train_dataset`, in its order; epochs beyond the plans
    begin with the first again. Evaluation keeps the collator it had. Raises ValueError where the
    plans are of other rows.
    """
    examples = cast("Sequence[Mapping[str, Any]]", trainer.train_dataset)
    rows = sorted(row for batch in plans[0].batches for row in batch.rows)
    if rows != list(range(len(examples))):
        raise ValueError(f"the plans hold {len(rows)} rows, the trainer {len(examples)}")
    if trainer.args.per_device_train_batch_size != 1:
        raise ValueError(
            "lines are micro batches already: set the trainer's batch size to 1, the budget decides"
        )
    patched: Any = trainer
    patched.train_dataset = Lines(examples)
    trainer.data_collator = LineCollator(
        token_budget=token_budget,
        multiple=multiple,
        pad_token=pad_token,
        of_rows=trainer.data_collator,
    )
    patched._get_train_sampler = lambda dataset=None: LineSampler(plans)


def pack(
    examples: Sequence[Mapping[str, Any]], *, padded_tokens: int | None = None, pad_token: int = 0
) -> dict[str, torch.Tensor]:
    """One line of examples with `input_ids` and `labels`: tensors of shape (1, padded_tokens) and
    `cu_documents`.

    `cu_documents`, int32: where each row begins, then the end of the line, repeated to a multiple
    of eight entries, so that lines of few rows share compiled code; padding counts as one more row.
    It is left out where the line is one row: plain causal attention is then right, and faster.
    Raises ValueError where the examples do not fit.
    """
    lengths = [len(example["input_ids"]) for example in examples]
    total = sum(lengths)
    width = total if padded_tokens is None else padded_tokens
    if not lengths or width < total:
        raise ValueError(f"{len(lengths)} rows of {total} tokens do not make a line of {width}")
    ids = torch.full((1, width), pad_token, dtype=torch.long)
    labels = torch.full((1, width), IGNORED, dtype=torch.long)
    positions = torch.arange(width)
    starts = []
    begin = 0
    for example, length in zip(examples, lengths, strict=True):
        starts.append(begin)
        ids[0, begin : begin + length] = torch.as_tensor(example["input_ids"])
        labels[0, begin : begin + length] = torch.as_tensor(example["labels"])
        labels[0, begin] = IGNORED  # what stands before it is another row
        positions[begin : begin + length] = torch.arange(length)
        begin += length
    if begin < width:
        positions[begin:] = torch.arange(width - begin)
    line = {"input_ids": ids, "labels": labels, "position_ids": positions[None]}
    if len(lengths) > 1:
        bounds = [*starts, begin, width] if begin < width else [*starts, width]
        bounds += [width] * (-len(bounds) % 8)
        line["cu_documents"] = torch.tensor(bounds, dtype=torch.int32)
    return line


class Lines(torch.utils.data.Dataset[list[Mapping[str, Any]]]):
    """The examples of a trainer as micro batches of `tasks.training.batching`: an item is asked for
    by the rows it is made of."""

    def __init__(self, examples: Sequence[Mapping[str, Any]]) -> None:
        self._examples = examples

    def __len__(self) -> int:
        return len(self._examples)

    def __getitem__(self, rows: Any) -> list[Mapping[str, Any]]:
        return [self._examples[int(row)] for row in rows]


class LineSampler(torch.utils.data.Sampler[tuple[int, ...]]):
    """Micro batches of the current epoch, in the plan's order. A trainer calls `set_epoch`; plans
    hold equally many micro batches."""

    def __init__(self, plans: Sequence[EpochPlan]) -> None:
        self._plans = list(plans)
        self._epoch = 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._plans[0].batches)

    def __iter__(self) -> Iterator[tuple[int, ...]]:
        return iter([batch.rows for batch in self._plans[self._epoch % len(self._plans)].batches])


class LineCollator:
    """Makes the line of one micro batch, padded to a multiple of `multiple` tokens but never above
    `token_budget`.

    Single rows (an evaluation set, which has no plan) go to the collator `of_rows`.
    """

    def __init__(
        self,
        *,
        token_budget: int,
        multiple: int,
        pad_token: int,
        of_rows: Callable[[list[Any]], dict[str, Any]] | None = None,
    ) -> None:
        self._budget, self._multiple, self._pad_token, self._of_rows = (
            token_budget,
            multiple,
            pad_token,
            of_rows,
        )

    def __call__(self, batch: list[Any]) -> dict[str, Any]:
        if self._of_rows is not None and batch and isinstance(batch[0], Mapping):
            return self._of_rows(batch)
        if len(batch) != 1:
            raise ValueError(
                f"{len(batch)} micro batches at once: set the trainer's batch size to 1, the budget"
                " decides"
            )
        total = sum(len(example["input_ids"]) for example in batch[0])
        width = max(total, min(-(-total // self._multiple) * self._multiple, self._budget))
        return pack(batch[0], padded_tokens=width, pad_token=self._pad_token)
