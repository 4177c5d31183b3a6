"""The rows that a training learns from, and their hash: equal rows give equal trainings, in
whatever order."""

from __future__ import annotations

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import stable_hash
from tasks.store import SnapshotRef

LEARNED_FROM = ("candidate_id", "task_id", "prompt", "reasoning", "answer")
"""What decides a training: a row's id (order and held-out side), its texts, and whether its answer
was cut off (no end token)."""


def training_rows(curated: SnapshotRef, prompts: dict[str, str]) -> pl.DataFrame:
    """Rows of a curated set by id, each with its task's prompt (task_id -> prompt). Raises
    UsageError where the set is unfinished or empty."""
    snapshot = curated.open()
    if not snapshot.manifest["rows"]:
        raise UsageError(f"the curated set {snapshot.path} is empty", "curate at least one row")
    rows = snapshot.read(unique="candidate_id").sort("candidate_id")
    return with_prompts(rows, prompts)


def with_prompts(rows: pl.DataFrame, prompts: dict[str, str]) -> pl.DataFrame:
    prompt = pl.col("task_id").replace_strict(prompts, return_dtype=pl.String)
    return rows.with_columns(prompt=prompt)


def rows_hash(rows: pl.DataFrame) -> str:
    cut = (pl.col("finish_reason") == "length").fill_null(False)
    return stable_hash(rows.select(*LEARNED_FROM, cut=cut).rows())
