"""A trainer that takes its rows in a given order, epoch by epoch.

Guarantees: a resumed run goes on in the same order. Evaluation is as it was."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

import torch

if TYPE_CHECKING:
    from transformers import Trainer

Row = Mapping[str, Any]


def use_orders(trainer: Trainer, orders: Sequence[Sequence[int]]) -> None:
    """Let an unstarted trainer take its prepared rows (`trainer.train_dataset`) in one order per
    epoch; further epochs start again with the first."""
    rows = cast("Sequence[Row]", trainer.train_dataset)
    patched: Any = trainer
    patched.train_dataset = OrderedRows(rows, orders)
    trainer.args.train_sampling_strategy = "sequential"


class OrderedRows(torch.utils.data.Dataset[Row]):
    """Rows in the current epoch's order. The trainer calls `set_epoch`."""

    def __init__(self, rows: Sequence[Row], orders: Sequence[Sequence[int]]) -> None:
        self._rows, self._orders, self._epoch = rows, orders, 0

    def set_epoch(self, epoch: int) -> None:
        self._epoch = epoch

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, place: int) -> Row:
        order = self._orders[self._epoch % len(self._orders)]
        return self._rows[order[place]]
