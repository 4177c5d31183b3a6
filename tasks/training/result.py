"""Results of a training run: its log, a row per step, and the facts for manifest and card."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from kernels_eval.records import Record
from tasks.training.formatting import Dropped
from tasks.training.telemetry import SPEED

HELD_OUT = "held_out_loss"
"""Log column: held-out loss, nats per completion token."""
LEARNED = ("step", "epoch", "loss", "learning_rate", "grad_norm", "num_tokens")
HISTORY = pa.schema(
    {"step": pa.int64()} | dict.fromkeys((*LEARNED[1:], HELD_OUT, *SPEED), pa.float64())
)
"""One row per optimiser step; step 0 holds only the held-out loss before training."""


def training_log(log_history: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    rows: dict[int, dict[str, Any]] = {}
    for entry in log_history:
        if not entry.keys() & {"loss", "eval_loss"}:  # the summary at the end
            continue
        row = rows.setdefault(entry["step"], dict.fromkeys(HISTORY.names))
        if "loss" in entry:
            row |= {name: entry[name] for name in row.keys() & entry.keys()}
        elif row[HELD_OUT] is None:
            row |= {"step": entry["step"], "epoch": entry.get("epoch") or 0.0}
            row[HELD_OUT] = entry["eval_loss"]
    return [rows[step] for step in sorted(rows)]


class TrainingResult(Record):
    """What one training run did. Losses are mean cross-entropy per completion token, nats."""

    adapter_dir: Path
    log: tuple[dict[str, float | None], ...]
    """rows of HISTORY"""
    loss_first: float
    """mean loss over the steps of the first epoch"""
    loss_last: float
    """mean loss over the steps of the last epoch: the same rows as the first, so the two compare"""
    steps: int
    tokens: int
    """tokens seen, prompts included, padding not, over all epochs"""
    seconds: float
    """wall time of this call alone; a resumed run reports only its own share"""
    rows: int
    """rows trained on"""
    max_length: int = 0
    """the longest row that was allowed, tokens"""
    workers: int = 1
    """processes that trained together"""
    held_out_rows: int = 0
    held_out_tasks: int = 0
    batches: dict[str, float] = {}
    """rows and real tokens of an optimiser step; busy_share of balanced ones in the first epoch"""
    decided: dict[str, str] = {}
    """what `auto` chose and why: parallelism; and under acceleration the plan of recomputation and
    the attention kernel"""
    resumed_from_step: int = 0
    """0 where training started from the beginning"""
    dropped: tuple[Dropped, ...] = ()

    @property
    def history(self) -> list[dict[str, float | None]]:
        return [{name: row[name] for name in LEARNED} for row in self.log if row["step"]]

    @property
    def held_out(self) -> list[dict[str, Any]]:
        """Step, epoch and held-out loss, before the first step and after each epoch."""
        return [
            {"step": int(row["step"] or 0), "epoch": row["epoch"], "loss": row[HELD_OUT]}
            for row in self.log
            if row[HELD_OUT] is not None
        ]
