"""Child runs of the stages, from the manifests and columns of finished snapshots.

Guarantees: the numbers of a stage's manifest are its metrics, and nothing unmeasured is written
as 0.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from datetime import datetime
from typing import Any

import polars as pl

from kernels_eval.records import Json, Row
from tasks.store import Snapshot, SnapshotRef
from tasks.tracking.records import Cell, DatasetRef, Metrics, StageRecord

HELD_OUT = "held_out_loss"
STEPS = ("step", "epoch")
"""Columns of the training log that name the step, and are no measurement."""
DESCRIPTION = ("schema_version", "config", "tools", "hardware")
"""Parts of a manifest that are no measurement."""


def times_of(snapshot: Snapshot) -> tuple[int, int]:
    """When a snapshot was made, from and until, in ms since 1970."""
    manifest = snapshot.manifest
    ended_s = datetime.fromisoformat(manifest["created_at"]).timestamp()
    return int(1000 * (ended_s - manifest["seconds"])), int(1000 * ended_s)


def numbers_of(manifest: Row) -> Iterator[tuple[str, float]]:
    """The finite numbers of a manifest by name, those of a mapping as `status_counts/correct`."""
    for name, value in manifest.items():
        if name in DESCRIPTION:
            continue
        if isinstance(value, dict):
            for inner, number in numbers_of(value):
                yield f"{name}/{inner}", number
        elif _is_finite(value):
            yield name, value


def _is_finite(value: object) -> bool:
    """Whether every database takes the number: diverged losses are NaN or infinite."""
    return isinstance(value, int | float) and math.isfinite(value)


def stage_record(
    name: str,
    config: object,
    ref: SnapshotRef,
    *,
    metrics: Mapping[str, float | None] = {},
    tags: Mapping[str, str] = {},
    **more: Any,
) -> StageRecord:
    """A stage's run: its configuration, times and numbers, and `more` fields of the record."""
    snapshot = ref.open()
    manifest = snapshot.manifest
    labels = [label for label in ("fingerprint", "generator", "device") if label in manifest]
    return StageRecord(
        name=name,
        times=times_of(snapshot),
        params=config,
        metrics={**dict(numbers_of(manifest)), **metrics},
        tags={**{label: str(manifest[label]) for label in labels}, **tags},
        **more,
    )


def verification_record(config: object, verdicts: SnapshotRef) -> StageRecord:
    return stage_record("verification", config, verdicts, metrics=_phases(verdicts.open()))


def _phases(verdicts: Snapshot) -> Metrics:
    if not verdicts.parts():
        return {}
    columns = ["candidate_id", "run_s", "phases"]
    spent = verdicts.read(columns=columns, unique="candidate_id").drop("candidate_id")
    metrics: Json = {}
    for seconds in spent.unnest("phases"):
        # 0: not reached, or the reference was loaded already
        known = seconds.filter((seconds > 0).fill_null(False))
        phase = f"phases/{seconds.name.removesuffix('_s')}"
        metrics |= {f"{phase}_median_s": known.median(), f"{phase}_mean_s": known.mean()}
    return metrics


def training_record(
    config: object, trained: SnapshotRef, curated: DatasetRef | None = None
) -> StageRecord:
    snapshot = trained.open()
    log = snapshot.read(unique="step").sort("step")
    numbers = dict(numbers_of(snapshot.manifest))
    series = {}
    for name, kind in log.schema.items():
        if kind.is_numeric() and name not in (*STEPS, *numbers):
            points = log.select("step", pl.col(name).cast(pl.Float64))
            series[name] = tuple(points.filter(pl.col(name).is_finite()).iter_rows())
    decided = snapshot.manifest.get("decided") or {}
    return stage_record(
        "training",
        config,
        trained,
        series={name: points for name, points in series.items() if points},
        datasets=(curated,) if curated else (),
        tags={"base_model": base_model_of(config, trained), **decided},
    )


def base_model_of(config: Any, trained: SnapshotRef) -> str:
    return str(trained.open().manifest.get("base_model") or config.base_model)


def held_out_losses(training: Snapshot) -> dict[int, float]:
    """step -> loss on held-out tasks, in order; empty without any."""
    if not training.has_column(HELD_OUT):
        return {}
    frame = training.read(columns=["step", HELD_OUT], unique="step").drop_nulls(HELD_OUT)
    return dict(frame.select("step", HELD_OUT).sort("step").iter_rows())


def training_headline(trained: SnapshotRef) -> Metrics:
    """Losses of the first and last epoch, and on held-out tasks before and after."""
    snapshot = trained.open()
    headline: Metrics = {
        f"train_{name}": snapshot.manifest[name] for name in ("loss_first", "loss_last")
    }
    if losses := list(held_out_losses(snapshot).values()):
        headline |= {
            f"{HELD_OUT}_first": losses[0],
            f"{HELD_OUT}_last": losses[-1],
            f"{HELD_OUT}_lowest": min(losses),
        }
    return headline


def analysis_record(analysis: SnapshotRef) -> StageRecord:
    """With its numbers and their bounds, as metrics and as a table, and its page."""
    snapshot = analysis.open()
    rows: list[dict[str, Cell]] = snapshot.read(unique="name").to_dicts()
    metrics: Json = {}
    for row in rows:
        if row["value"] is not None:
            metrics[str(row["name"])] = row["value"]
            metrics |= {f"{row['name']}_{bound}": row[bound] for bound in ("lower", "upper")}
    return stage_record(
        "analysis",
        {},
        analysis,
        metrics=metrics,
        tables={"numbers": rows} if rows else {},
        artifacts=tuple(snapshot.local_dir() / name for name in snapshot.manifest["files"]),
    )
