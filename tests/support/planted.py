"""Verdicts and candidates in which an effect of reasoning length is planted: frames, tables on disk
and finished snapshots.

Within a task, a sample a standard deviation longer has odds of being correct lower by the factor
PLANTED_ODDS; tasks differ in difficulty and in length; speedup does not depend on length.
"""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import polars as pl

from tasks.tables import CANDIDATES, VERDICTS
from tests.support.samples import finished

SAMPLES_PER_TASK = 5
PLANTED_ODDS = 0.7
PLANTED_SD_TOKENS = 1500.0
PART_ROWS = 100_000


def planted_frame(rows: int, seed: int, *, odds: float = PLANTED_ODDS) -> pl.DataFrame:
    """`rows` samples, five a task, with the columns of verdicts and candidates that are read."""
    random = np.random.default_rng(seed)
    task = np.arange(rows) // SAMPLES_PER_TASK
    tasks = int(task[-1]) + 1
    hardness = random.normal(size=tasks)
    deviation = random.normal(scale=PLANTED_SD_TOKENS, size=rows)
    tokens = np.maximum(1, np.rint(9000 + 1500 * hardness[task] + deviation)).astype(np.int64)
    log_odds = math.log(odds) * deviation / PLANTED_SD_TOKENS - 0.3 - 1.2 * hardness[task]
    correct = random.random(rows) < 1 / (1 + np.exp(-log_odds))
    of_task = random.normal(scale=0.4, size=tasks)[task]
    speedup = np.exp(of_task + random.normal(scale=0.4, size=rows))
    number = pl.int_range(rows, dtype=pl.Int64)
    right = pl.Series(correct)
    return pl.select(
        # as long as real ids are: joins and groups pay for their length
        candidate_id="candidate-" + number.cast(pl.String).str.zfill(22),
        task_id="kernelbook/" + pl.Series(task).cast(pl.String).str.zfill(21),
        status=pl.when(right).then(pl.lit("correct")).otherwise(pl.lit("incorrect")),
        reason=pl.when(right).then(pl.lit("ok")).otherwise(pl.lit("wrong_output")),
        speedup=pl.when(right).then(pl.Series(speedup)),
        reasoning_tokens=pl.Series(tokens),
        finish_reason=pl.lit("stop"),
        generator=pl.lit("planted"),
        sample_index=pl.Series(np.arange(rows) % SAMPLES_PER_TASK),
    )


def plant(directory: Path, rows: int, seed: int) -> None:
    """Write the tables verdicts and candidates, in parts, as a user has them."""
    frame = planted_frame(rows, seed)
    speedup = pl.col("speedup")
    timing = pl.struct(speedup, speedup_lower=speedup, candidate_ms=pl.lit(1.0))
    operators = pl.lit(["torch.nn.functional.linear", "torch.nn.functional.gelu"])
    tables = {
        "verdicts": frame.select(
            *("candidate_id", "task_id", "status", "reason"),
            timing=pl.when(speedup.is_not_null()).then(timing),
            reference_operators=operators,
        ),
        "candidates": frame.drop("status", "reason", "speedup"),
    }
    for name, table in tables.items():
        (directory / name).mkdir()
        for part, start in enumerate(range(0, rows, PART_ROWS)):
            file = directory / name / f"part-{part:05d}.parquet"
            table.slice(start, PART_ROWS).write_parquet(file)


def planted(root, rows=600):
    """Finished snapshots of verdicts, and of candidates the other way round."""
    table = [
        row | {"timing": row["speedup"] and {"speedup": row["speedup"]}}
        for row in planted_frame(rows, 0).to_dicts()
    ]
    return (
        finished(root, "verification", table, VERDICTS),
        finished(root, "synthesis", table[::-1], CANDIDATES),
    )
