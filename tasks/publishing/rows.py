"""A curated set's published rows, with their origin. task_id alone decides the split, so a program
may be in both under two task_ids."""

from __future__ import annotations

import math

import polars as pl
import pyarrow as pa

from kernels_eval.errors import UsageError
from tasks.files import explain_read_errors
from tasks.publishing.columns import COLUMNS, ORIGINS, REQUIRED, licence_of
from tasks.publishing.config import SPLIT_SEED, TEST, TRAIN, PublishOptions
from tasks.publishing.lineage import Lineage, source_of
from tasks.sources.holdout import place_of
from tasks.store import Snapshot
from tasks.store.snapshot import RESTORE
from tasks.tables import (
    CANDIDATES,
    CURATED,
    TASKS,
    VERDICTS,
    columns_of,
    completed,
    unconfirmed,
)

SCHEMAS = {"candidates": CANDIDATES, "verdicts": VERDICTS, "tasks": TASKS}
FIX = "run its stage again with this version"
RESPONSE = ("response", "separated_reasoning")


def published_rows(line: Lineage) -> pl.DataFrame:
    """The rows to publish. Raises UsageError for an empty or unreadable snapshot, and missing
    columns or upstreams."""
    where = line.curated.path
    with explain_read_errors(where, RESTORE):
        rows = line.curated.read(unique="candidate_id")
        if rows.is_empty():
            fix = "there is nothing to publish: refresh again"
            raise UsageError(f"the curated set {where} is empty", fix)
        columns, what = columns_of(CURATED), f"publishing the curated set {where}"
        rows = completed(rows, columns, REQUIRED, what=what, fix=FIX)
        for name in ("candidate_id", "task_id"):
            if rows[name].has_nulls():
                raise UsageError(f"the curated set {where} has rows without {name}", FIX)
        for name in ORIGINS:
            rows = _joined(rows, getattr(line, name), name, where)
        _require_confirmed(rows, line.verdicts, where)
    rows = rows.with_columns(
        pl.col("sample_index").fill_null(0),
        pl.col("turn").fill_null(1),
        pl.col("device").replace({"cpu": _cpu_of(line)}),
        task_license=_licences(line, rows),
        repaired=_repaired(),
    )
    extra = [name for name in rows.columns if name not in (*COLUMNS, *RESPONSE)]
    return rows.sort("task_id", "sample_index", "candidate_id").select(*COLUMNS, *extra)


def _require_confirmed(rows: pl.DataFrame, verdicts: Snapshot | None, where: str) -> None:
    if verdicts is None:
        return
    columns, ids = ["candidate_id", "status", "level"], rows.select("candidate_id")
    found = verdicts.read(columns=columns, unique="candidate_id", among=ids)
    if screened := found.filter(unconfirmed(found)).height:
        raise UsageError(
            f"{screened:,} of {rows.height:,} samples of the curated set {where} were only"
            " screened, not confirmed",
            "refresh again, which confirms what its own strategy takes; for other sets with"
            " --set verification.screen=false",
        )


def split_of(task_id: str, holdout_share: float) -> str:
    """`test` for about `holdout_share` (0 to 1) of task ids, else `train`."""
    return TEST if place_of(task_id, SPLIT_SEED) < holdout_share else TRAIN


def splits_of(rows: pl.DataFrame, options: PublishOptions) -> dict[str, pl.DataFrame]:
    """Rows by split, `train` first, `test` if any. Raises UsageError where no row is left to train
    on."""
    tasks = rows["task_id"].unique()
    held_out = [task for task in tasks if split_of(task, options.holdout_share) == TEST]
    if len(held_out) == len(tasks):
        most = math.floor(100 * max(place_of(task, SPLIT_SEED) for task in tasks)) / 100
        raise UsageError(
            f"the hold-out takes all {len(tasks)} tasks",
            f"`--holdout {most:g}` leaves some to train on, `--holdout 0` all",
        )
    is_test = pl.col("task_id").is_in(held_out)
    return {TRAIN: rows.filter(~is_test)} | ({TEST: rows.filter(is_test)} if held_out else {})


def _joined(rows: pl.DataFrame, above: Snapshot | None, name: str, where: str) -> pl.DataFrame:
    if above is None:
        raise UsageError(
            f"the {name} snapshot that {where} was made from is missing",
            "rows are published with where they come from: copy the whole root, not the curated"
            " set alone",
        )
    key = "task_id" if name == "tasks" else "candidate_id"
    columns = ORIGINS[name] | ({each: each for each in RESPONSE} if name == "candidates" else {})
    found = above.read(
        columns=[key, *columns.values()], unique=key, among=rows.select(key).unique()
    )
    published = {path.rpartition(".")[2]: new for new, path in columns.items()}
    kinds = {new: _kind(SCHEMAS[name], path) for new, path in columns.items()}
    found = completed(found.rename(published, strict=False), {key: pl.String(), **kinds}, fix=FIX)
    found = found.select(key, *columns)
    return rows.drop(columns, strict=False).join(found, on=key, how="left", maintain_order="left")


def _kind(schema: pa.Schema, path: str) -> pl.DataType:
    column, _, field = path.partition(".")
    values = pl.DataFrame(schema.empty_table())[column]
    return values.struct.field(field).dtype if field else values.dtype


def _cpu_of(line: Lineage) -> str:
    """The snapshot knows the CPU; verdicts only say "cpu"."""
    device = line.verdicts.manifest.get("device") if line.verdicts else None
    return str(device or "cpu")


def _licences(line: Lineage, rows: pl.DataFrame) -> pl.Expr:
    config = (source_of(line.tasks).manifest.get("config") or {}) if line.tasks else {}
    known = {source: licence_of(str(source), config) for source in rows["task_source"].unique()}
    return pl.col("task_source").replace_strict(known, return_dtype=pl.String)


def _repaired() -> pl.Expr:
    def bare(text: pl.Expr) -> pl.Expr:
        return text.fill_null("").str.replace_all(r"\s+", "")

    reasoning, answer = bare(pl.col("reasoning")), bare(pl.col("answer"))
    response = bare(pl.col("response")).str.strip_prefix("<think>")
    separated = bare(pl.col("separated_reasoning"))
    whole = pl.concat_str(reasoning, pl.lit("</think>"), answer) == response
    apart = (separated == reasoning) & (answer == response)
    as_written = pl.when(pl.col("separated_reasoning").is_null()).then(whole).otherwise(apart)
    return ~as_written | pl.col("reasoning_from").is_not_null()
