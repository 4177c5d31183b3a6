"""Child runs of the stages, from the manifests and columns of finished snapshots.

Guarantees: every measurement is kept, and nothing unmeasured is written as 0.
"""

from __future__ import annotations

import math
import statistics
from datetime import datetime
from typing import Any

from pydantic import BaseModel

from kernels_eval.records import Json, Phases
from tasks.store import Snapshot, SnapshotRef
from tasks.tracking.records import Cell, DatasetRef, Metrics, StageRecord

HELD_OUT = "held_out_loss"
STEPS = ("step", "epoch")
"""Columns of the training log that name the step, and are no measurement."""
TRAINING_METRICS = ("loss_first", "loss_last", "seconds", "tokens", "steps")
# of `Telemetry.summary` (kernels_eval.pool.telemetry)
POOL_METRICS = """candidates wall_s candidates_per_hour devices device_busy_share
    device_s_per_candidate on_device builders builder_busy_share queue_depth_mean
    queue_depth_most""".split()
BUILD_METRICS = ("lite_share", "full_share", "cache_hit_share")


def times_of(snapshot: Snapshot) -> tuple[int, int]:
    """When a snapshot was made, from and until, in ms since 1970."""
    manifest = snapshot.manifest
    ended_s = datetime.fromisoformat(manifest["created_at"]).timestamp()
    return int(1000 * (ended_s - manifest["seconds"])), int(1000 * ended_s)


def synthesis_record(config: BaseModel, candidates: SnapshotRef) -> StageRecord:
    snapshot = candidates.open()
    manifest = snapshot.manifest
    return StageRecord(
        name="synthesis",
        times=times_of(snapshot),
        params=config,
        metrics={"candidates": manifest["rows"], "requests": manifest["requests"]},
        tags={"fingerprint": manifest["fingerprint"], "generator": manifest["generator"]},
    )


def verification_record(config: BaseModel, verdicts: SnapshotRef) -> StageRecord:
    """Verdicts by status, the pool's use of time (finishing run only), and seconds by phase (all
    verdicts)."""
    snapshot = verdicts.open()
    manifest = snapshot.manifest
    phases = _phases(snapshot)
    metrics: Metrics = {
        f"status_{name}": count for name, count in manifest["status_counts"].items()
    }
    for row in phases:
        metrics |= {
            f"phases/{row['phase']}_{kind}_s": row[f"{kind}_s"] for kind in ("median", "mean")
        }
    tables = {"phases": phases}
    # none where every verdict was there before
    if telemetry := manifest.get("telemetry"):
        built = telemetry.get("built")
        metrics |= {f"pool/{name}": telemetry.get(name) for name in POOL_METRICS}
        metrics["builds/candidates"] = built
        # a share of no builds is no number
        metrics |= {
            f"builds/{name}": telemetry.get(name) if built else None for name in BUILD_METRICS
        }
        tables["pool"] = [
            {name: value for name, value in telemetry.items() if not isinstance(value, dict)}
        ]
    return StageRecord(
        name="verification",
        times=times_of(snapshot),
        params=config,
        metrics=metrics,
        tables=tables,
        tags={"fingerprint": manifest["fingerprint"], "device": manifest["device"]},
    )


def _phases(verdicts: Snapshot) -> list[Json]:
    """Candidates and seconds by phase with the device held, and of all as `run`."""
    spent = {}
    if verdicts.parts():
        frame = verdicts.read(columns=["candidate_id", "run_s", "phases"], unique="candidate_id")
        spent = {name: frame["phases"].struct.field(name) for name in Phases.model_fields}
        spent["run_s"] = frame["run_s"]
    rows = []
    for name in (*Phases.model_fields, "run_s"):
        # 0 or none: not reached, or the reference was loaded already
        seconds = [value for value in spent.get(name, ()) if value]
        rows.append(
            {
                "phase": name.removesuffix("_s"),
                "candidates": len(seconds),
                "sum_s": math.fsum(seconds),
                "mean_s": statistics.fmean(seconds) if seconds else None,
                "median_s": statistics.median(seconds) if seconds else None,
            }
        )
    return rows


def curation_record(config: BaseModel, curated: SnapshotRef) -> StageRecord:
    snapshot = curated.open()
    manifest = snapshot.manifest
    metrics = {f"criterion_{name}": count for name, count in manifest["criterion_counts"].items()}
    if flags := manifest.get("trace_flags"):
        metrics |= {
            f"trace_flags/{which}_{name}": count
            for which in ("correct", "taken")
            for name, count in flags[which].items()
        }
        metrics["trace_flags/left_out"] = flags["left_out"]
    figures = sorted((snapshot.local_dir() / "figures").glob("*.*")) if snapshot.is_local else []
    return StageRecord(
        name="curation",
        times=times_of(snapshot),
        params=config,
        metrics=metrics,
        tags={"fingerprint": manifest["fingerprint"]},
        artifacts=tuple(figures),
    )


def training_record(
    config: BaseModel, trained: SnapshotRef, curated: DatasetRef | None = None
) -> StageRecord:
    snapshot = trained.open()
    manifest, frame = snapshot.manifest, snapshot.read(unique="step").sort("step")
    numbers = {name: manifest[name] for name in TRAINING_METRICS if _is_finite(manifest.get(name))}
    series = {
        name: tuple(
            (int(step), float(value))
            for step, value in zip(frame["step"], frame[name], strict=True)
            if _is_finite(value)
        )
        for name, kind in frame.schema.items()
        if kind.is_numeric() and name not in STEPS and name not in numbers
    }
    return StageRecord(
        name="training",
        times=times_of(snapshot),
        params=config,
        series={name: values for name, values in series.items() if values},
        metrics=numbers,
        datasets=(curated,) if curated else (),
        tags={
            "fingerprint": snapshot.fingerprint,
            "base_model": base_model_of(config, trained),
            **(manifest.get("decided") or {}),
        },
    )


def _is_finite(value: object) -> bool:
    """Whether every database takes the number: diverged losses are NaN or infinite."""
    return isinstance(value, int | float) and math.isfinite(value)


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


def analysis_record(config: BaseModel, analysis: SnapshotRef) -> StageRecord:
    snapshot = analysis.open()
    rows: list[dict[str, Cell]] = snapshot.read(unique="name").to_dicts()
    metrics: Json = {}
    for row in rows:
        if row["value"] is not None:
            name = str(row["name"])
            metrics[name] = row["value"]
            metrics |= {f"{name}_{bound}": row[bound] for bound in ("lower", "upper")}
    return StageRecord(
        name="analysis",
        times=times_of(snapshot),
        params=config,
        metrics=metrics,
        tables={"numbers": rows} if rows else {},
        tags={"fingerprint": snapshot.fingerprint},
        artifacts=tuple(snapshot.local_dir() / name for name in snapshot.manifest["files"]),
    )
