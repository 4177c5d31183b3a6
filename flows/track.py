"""What MLflow is told about a run, read from snapshots. Off the line: a tracking server that fails
is logged, and the run goes on."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from prefect.logging import get_run_logger

from flows.benchmark import Benchmarked
from flows.config import PipelineConfig
from flows.refresh import Refreshed
from flows.report import Report
from kernels_eval.records import Phases, Record, stable_hash
from tasks.analysis.stage import found_in
from tasks.benchmark.stage import scores_of
from tasks.progress import report as progress
from tasks.publishing.lineage import lineage
from tasks.store.snapshot import Snapshot, SnapshotRef
from tasks.tracking.connection import retry_mlflow
from tasks.tracking.mlflow_sink import log_run, registered_version
from tasks.tracking.records import Cell, DatasetRef, RunRecord, StageRecord
from tasks.training.evaluation import COLUMN as HELD_OUT
from tasks.training.stage import adapter_of


def track(
    config: PipelineConfig,
    refreshed: Refreshed,
    trained: SnapshotRef,
    benchmarked: Benchmarked,
    written: Report,
) -> str | None:
    """Write the run to MLflow, once per set of snapshots. Returns the parent run's id; None where
    tracking is off or failed."""
    return _logged(config, lambda: run_record(config, refreshed, trained, benchmarked, written))


def track_training(
    config: PipelineConfig, curated: SnapshotRef, trained: SnapshotRef
) -> Tracked | None:
    """Write a training that ran by itself (`concur train`) to MLflow, once per training snapshot.
    None where tracking is off or failed."""
    run_id = _logged(config, lambda: training_run_record(config, curated, trained))
    if run_id is None:
        return None
    try:
        version = registered_version(run_id, tracking_uri=config.tracking_uri)
    except Exception:  # as above: where the version stands is no reason to fail
        version = None
    return Tracked(
        tracking_uri=config.tracking_uri,
        experiment=config.tracking.experiment,
        run_id=run_id,
        model_version=version,
    )


class Tracked(Record):
    """Where a run lies in MLflow; `model_version` is NAME/VERSION of the registered adapter."""

    tracking_uri: str
    experiment: str
    run_id: str
    model_version: str | None


def _logged(config: PipelineConfig, build: Callable[[], RunRecord]) -> str | None:
    if not config.tracking.enabled:
        return None
    record = build()
    served = config.tracking.uri or config.tracking_uri.startswith(
        "http"
    )  # a server knows where its artifacts go
    root = None if served else str(Path(config.root).absolute() / "mlartifacts")
    uri, experiment = config.tracking_uri, config.tracking.experiment
    try:
        run_id = retry_mlflow(
            uri,
            lambda: log_run(record, tracking_uri=uri, artifact_root=root, experiment=experiment),
            lambda line: get_run_logger().warning("%s", line),
        )
    except Exception as error:
        # whatever a tracking server does, the snapshots are complete and the next run writes this
        # again
        get_run_logger().error(
            "MLflow was not written (%s: %s); the next run of the same configuration writes it",
            type(error).__name__,
            error,
        )
        progress("tracking", 0, 1, f"failed: {type(error).__name__}")
        return None
    return run_id


def run_record(
    config: PipelineConfig,
    refreshed: Refreshed,
    trained: SnapshotRef,
    benchmarked: Benchmarked,
    written: Report,
) -> RunRecord:
    refs = [
        refreshed.tasks,
        refreshed.candidates,
        refreshed.verdicts,
        refreshed.curated,
        trained,
        benchmarked.scores,
    ]
    refs += [refreshed.analysis] if refreshed.analysis else []
    curated = refreshed.curated.open()
    return RunRecord(
        run_fingerprint=stable_hash([ref.fingerprint for ref in refs]),
        run_name=f"{config.name} {config.language.value} {config.curation.strategy}",
        tags={
            "language": config.language.value,
            "strategy": config.curation.strategy,
            "profile": config.name,
        },
        params=config.model_dump(mode="json"),
        metrics=_headline(benchmarked, refreshed, trained),
        stages=(
            *refresh_records(config, refreshed),
            training_record(config, refreshed.curated, trained),
            *analysis_records(config, refreshed),
            *model_records(benchmarked),
        ),
        datasets=(dataset_of(config, curated),),
        artifacts=tuple(Path(path) for path in written.files),
        **adapter_fields(config, refreshed.curated, trained),
    )


def training_run_record(
    config: PipelineConfig, curated: SnapshotRef, trained: SnapshotRef
) -> RunRecord:
    """A training by itself: a parent run with the losses and the adapter, one child run with the
    series."""
    training, manifest = trained.open(), trained.open().manifest
    strategy = lineage(curated).strategy
    return RunRecord(
        run_fingerprint=stable_hash(["training", trained.fingerprint]),
        run_name=f"{config.name} training on {strategy}",
        tags={"strategy": strategy, "profile": config.name},
        params={"training": config.training.model_dump(mode="json")},
        metrics={"curated": curated.open().manifest["rows"], **train_headline(manifest, training)},
        stages=(training_record(config, curated, trained),),
        datasets=(dataset_of(config, curated.open()),),
        **adapter_fields(config, curated, trained),
    )


def dataset_of(config: PipelineConfig, curated: Snapshot) -> DatasetRef:
    return DatasetRef(
        name=f"{config.name}-curated", path=str(curated.path), fingerprint=curated.fingerprint
    )


def adapter_fields(
    config: PipelineConfig, curated: SnapshotRef, trained: SnapshotRef
) -> dict[str, Any]:
    """The adapter and what it comes from, back to the tasks: fields of a RunRecord."""
    line, manifest = lineage(curated), trained.open().manifest
    base_model = str(manifest.get("base_model") or config.training.base_model)
    upstream = {
        "tasks": line.tasks,
        "candidates": line.candidates,
        "verdicts": line.verdicts,
        "curated": line.curated,
    }
    told = {
        f"concur.{name}": snapshot.fingerprint for name, snapshot in upstream.items() if snapshot
    }
    told |= {
        "concur.training": trained.fingerprint,
        "concur.strategy": line.strategy,
        "concur.base_model": base_model,
    }
    return {
        "adapter_dir": adapter_of(trained),
        "base_model": base_model,
        "registered_model": f"concur-{config.name}",
        "lineage": told,
    }


def _headline(
    benchmarked: Benchmarked, refreshed: Refreshed, trained: SnapshotRef
) -> dict[str, float | None]:
    manifest = trained.open().manifest
    metrics: dict[str, float | None] = {
        "candidates": refreshed.verdicts.open().manifest["rows"],
        "curated": refreshed.curated.open().manifest["rows"],
        **train_headline(manifest, trained.open()),
    }
    for row in scores_of(benchmarked.scores):
        if row.track == "custom_kernel" and row.metric in ("exec", "fast_1") and row.k:
            metrics[f"{row.model}.{row.metric}_at_{row.k}"] = row.value
    return metrics


def refresh_records(config: PipelineConfig, refreshed: Refreshed) -> list[StageRecord]:
    """The stages from tasks to training set, as child runs."""
    candidates, curated = (ref.open().manifest for ref in (refreshed.candidates, refreshed.curated))
    return [
        StageRecord(
            name="synthesis",
            params=config.synthesis.model_dump(mode="json"),
            metrics={"candidates": candidates["rows"], "requests": candidates["requests"]},
            tags={"fingerprint": candidates["fingerprint"], "generator": candidates["generator"]},
        ),
        verification_record(config, refreshed.verdicts),
        StageRecord(
            name="curation",
            params=config.curation.model_dump(mode="json"),
            metrics={
                f"criterion_{name}": count for name, count in curated["criterion_counts"].items()
            }
            | _flag_metrics(curated),
            tags={"fingerprint": curated["fingerprint"]},
            artifacts=_set_figures(refreshed.curated.open()),
        ),
    ]


def _set_figures(curated: Snapshot) -> tuple[Path, ...]:
    """Figures of the training set, as far as the refresh drew them."""
    return tuple(sorted((curated.local_dir() / "figures").glob("*.*"))) if curated.is_local else ()


def _flag_metrics(curated: dict[str, Any]) -> dict[str, float | None]:
    """Samples by flag of their trace. Nothing of snapshots of older versions."""
    counts = curated.get("trace_flags")
    if not counts:
        return {}
    found = {
        f"trace_flags/{which}_{name}": count
        for which in ("correct", "taken")
        for name, count in counts[which].items()
    }
    return found | {"trace_flags/left_out": counts["left_out"]}


# columns of the training log that say which step it is, and are no measurement
STEPS = ("step", "epoch")


def training_record(
    config: PipelineConfig, curated: SnapshotRef, trained: SnapshotRef
) -> StageRecord:
    """Every number of the training log by step, whatever it is: the trainer decides what it
    measures, and nothing measured is left out."""
    snapshot = trained.open()
    manifest, frame = snapshot.manifest, snapshot.read(unique="step").sort("step")
    series = {
        name: tuple(
            (int(step), float(value))
            for step, value in zip(frame["step"], frame[name], strict=True)
            if _measured(value)
        )
        for name, kind in frame.schema.items()
        if kind.is_numeric() and name not in STEPS
    }
    numbers = {
        name: value
        for name, value in manifest.items()
        if name in TRAINING_METRICS and _measured(value)
    }
    return StageRecord(
        name="training",
        params=config.training.model_dump(mode="json"),
        series={name: values for name, values in series.items() if values and name not in numbers},
        metrics=numbers,
        datasets=(dataset_of(config, curated.open()),),
        tags={
            "fingerprint": snapshot.fingerprint,
            "base_model": str(manifest.get("base_model") or config.training.base_model),
        },
    )


TRAINING_METRICS = ("loss_first", "loss_last", "seconds", "tokens", "steps")


def _measured(value: Any) -> bool:
    """A number that MLflow's databases take: some refuse NaN and infinity, and a loss that diverged
    has them."""
    return isinstance(value, int | float) and math.isfinite(value)


def train_headline(manifest: dict[str, Any], training: Snapshot) -> dict[str, float | None]:
    """Losses of the first and last epoch, and on held-out tasks before and after, where any were
    held out."""
    headline = {f"train_{name}": manifest[name] for name in ("loss_first", "loss_last")}
    if training.has_column(HELD_OUT):
        measured = (
            training.read(columns=["step", HELD_OUT], unique="step")
            .drop_nulls(HELD_OUT)
            .sort("step")[HELD_OUT]
            .to_list()
        )
        if measured:
            headline |= {
                f"{HELD_OUT}_first": measured[0],
                f"{HELD_OUT}_last": measured[-1],
                f"{HELD_OUT}_lowest": min(measured),
            }
    return headline


def verification_record(config: PipelineConfig, verdicts: SnapshotRef) -> StageRecord:
    """Verdicts by status; what the pool did with its time (of the run that finished the snapshot);
    seconds by phase (of all verdicts)."""
    snapshot = verdicts.open()
    manifest = snapshot.manifest
    phases = _phases(snapshot)
    telemetry = manifest.get(
        "telemetry"
    )  # none where every verdict was there before, or in a snapshot of an older version
    metrics: dict[str, float | None] = {
        f"status_{name}": count for name, count in manifest["status_counts"].items()
    }
    for row in phases:
        metrics |= {
            f"phases/{row['phase']}_{kind}_s": row[f"{kind}_s"] for kind in ("median", "mean")
        }
    tables: dict[str, list[dict[str, Cell]]] = {"phases": phases}
    if telemetry:
        metrics |= _pool_metrics(telemetry)
        tables["pool"] = [
            {name: value for name, value in telemetry.items() if not isinstance(value, dict)}
        ]
    return StageRecord(
        name="verification",
        params=config.verification.model_dump(mode="json"),
        metrics=metrics,
        tables=tables,
        tags={"fingerprint": manifest["fingerprint"], "device": manifest["device"]},
    )


def analysis_records(config: PipelineConfig, refreshed: Refreshed) -> Iterator[StageRecord]:
    """The headline numbers with their intervals; the findings, the page and its figures as files.
    Nothing where there is no analysis."""
    if refreshed.analysis is None:
        return
    snapshot = refreshed.analysis.open()
    rows: list[dict[str, Cell]] = snapshot.read(unique="name").to_dicts()
    metrics: dict[str, float | None] = {}
    for row in rows:
        name, value = str(row["name"]), row["value"]
        metrics |= (
            {name: value, f"{name}_lower": row["lower"], f"{name}_upper": row["upper"]}
            if value is not None
            else {}
        )
    yield StageRecord(
        name="analysis",
        params=config.analysis.model_dump(mode="json"),
        metrics=metrics,
        tables={"numbers": rows} if rows else {},
        tags={"fingerprint": snapshot.fingerprint},
        artifacts=found_in(refreshed.analysis).files,
    )


POOL_METRICS = (
    *(
        "candidates",
        "wall_s",
        "candidates_per_hour",
        "devices",
        "device_busy_share",
        "device_s_per_candidate",
        "on_device",
    ),
    *("builders", "builder_busy_share", "queue_depth_mean", "queue_depth_most"),
)
BUILD_METRICS = ("lite_share", "full_share", "cache_hit_share")


def _pool_metrics(telemetry: dict[str, Any]) -> dict[str, float | None]:
    """`Telemetry.summary` (kernels_eval.cluster.telemetry) under MLflow's names. A share of no
    builds is no number, so it is not reported."""
    built = telemetry.get("built")
    builds = {f"builds/{name}": telemetry.get(name) if built else None for name in BUILD_METRICS}
    return (
        {f"pool/{name}": telemetry.get(name) for name in POOL_METRICS}
        | {"builds/candidates": built}
        | builds
    )


def _phases(verdicts: Snapshot) -> list[dict[str, Cell]]:
    """One row per phase with the device held, and one for all of them (`run`): the candidates that
    came to it, and their seconds."""
    names = list(Phases.model_fields)
    if not verdicts.has_column("phases"):  # no verdict, or those of an older version
        spent = {}
    else:
        frame = verdicts.read(columns=["candidate_id", "run_s", "phases"], unique="candidate_id")
        spent = {name: frame["phases"].struct.field(name) for name in names} | {
            "run_s": frame["run_s"]
        }
    rows: list[dict[str, Cell]] = []
    for name in (*names, "run_s"):
        seconds = [
            value for value in spent.get(name, ()) if value
        ]  # 0 or none: not reached, or the reference was there already
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


def model_records(benchmarked: Benchmarked) -> list[StageRecord]:
    rows = scores_of(benchmarked.scores) + scores_of(benchmarked.scores, "compile")
    records = []
    for answers in benchmarked.answers:
        metrics: dict[str, float | None] = {}
        for row in (r for r in rows if r.model == answers.model):
            name = (
                row.metric
                + (f"_at_{row.k}" if row.k else "")
                + ("" if row.track == "custom_kernel" else "_any")
            )
            name += "_vs_compile" if row.baseline == "compile" else ""
            metrics |= {name: row.value, f"{name}_lower": row.lower, f"{name}_upper": row.upper}
        records.append(
            StageRecord(
                name=f"benchmark {answers.model}",
                metrics=metrics,
                tags={"model": answers.model, "fingerprint": answers.verdicts.fingerprint},
            )
        )
    return records
