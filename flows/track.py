"""What MLflow is told about a run, read from snapshots. Off the line: a tracking server that fails is logged, and the run goes on."""

from __future__ import annotations

from pathlib import Path

from prefect.logging import get_run_logger

from flows.benchmark import Benchmarked
from flows.config import PipelineConfig
from flows.refresh import Refreshed
from flows.report import Report
from kernels_eval.records import stable_hash
from tasks.benchmark.stage import scores_of
from tasks.progress import report as progress
from tasks.store import SnapshotRef
from tasks.tracking.mlflow_sink import DatasetRef, RunRecord, StageRecord, log_run
from tasks.training.stage import adapter_of


def track(config: PipelineConfig, refreshed: Refreshed, trained: SnapshotRef, benchmarked: Benchmarked, written: Report) -> str | None:
    """Write the run to MLflow, once per set of snapshots. Returns the parent run's id; None where tracking is off or failed."""
    if not config.tracking.enabled:
        return None
    record = run_record(config, refreshed, trained, benchmarked, written)
    root = None if config.tracking.uri else str(Path(config.root).absolute() / "mlartifacts")
    try:
        run_id = log_run(record, tracking_uri=config.tracking_uri, artifact_root=root, experiment=config.tracking.experiment)
    except Exception as error:  # whatever a tracking server does, the snapshots are complete and the next run writes this again
        get_run_logger().error(
            "MLflow was not written (%s: %s); the next run of the same configuration writes it", type(error).__name__, error
        )
        progress("tracking", 0, 1, f"failed: {type(error).__name__}")
        return None
    return run_id


def run_record(config: PipelineConfig, refreshed: Refreshed, trained: SnapshotRef, benchmarked: Benchmarked, written: Report) -> RunRecord:
    refs = [refreshed.tasks, refreshed.candidates, refreshed.verdicts, refreshed.curated, trained, benchmarked.scores]
    curated = refreshed.curated.open()
    return RunRecord(
        run_fingerprint=stable_hash([ref.fingerprint for ref in refs]),
        run_name=f"{config.name} {config.language.value} {config.curation.strategy}",
        tags={"language": config.language.value, "strategy": config.curation.strategy, "profile": config.name},
        params=config.model_dump(mode="json"),
        metrics=_headline(benchmarked, refreshed, trained),
        stages=(*_stages(config, refreshed, trained), *_models(benchmarked)),
        datasets=(DatasetRef(name=f"{config.name}-curated", path=str(curated.path), fingerprint=curated.fingerprint),),
        artifacts=tuple(Path(path) for path in written.files),
        adapter_dir=adapter_of(trained),
        registered_model=f"concur-{config.name}",
    )


def _headline(benchmarked: Benchmarked, refreshed: Refreshed, trained: SnapshotRef) -> dict[str, float | None]:
    manifest = trained.open().manifest
    metrics: dict[str, float | None] = {
        "candidates": refreshed.verdicts.open().manifest["rows"],
        "curated": refreshed.curated.open().manifest["rows"],
        "train_loss_first": manifest["loss_first"],
        "train_loss_last": manifest["loss_last"],
    }
    for row in scores_of(benchmarked.scores):
        if row.track == "custom_kernel" and row.metric in ("exec", "fast_1") and row.k:
            metrics[f"{row.model}.{row.metric}_at_{row.k}"] = row.value
    return metrics


def _stages(config: PipelineConfig, refreshed: Refreshed, trained: SnapshotRef) -> list[StageRecord]:
    candidates, verdicts, curated = (ref.open().manifest for ref in (refreshed.candidates, refreshed.verdicts, refreshed.curated))
    training = trained.open()
    history = training.read()
    series = {
        name: tuple((int(step), float(value)) for step, value in zip(history["step"], history[name], strict=True) if value is not None)
        for name in ("loss", "learning_rate", "grad_norm")
    }
    return [
        StageRecord(
            name="synthesis",
            params=config.synthesis.model_dump(mode="json"),
            metrics={"candidates": candidates["rows"], "requests": candidates["requests"]},
            tags={"fingerprint": candidates["fingerprint"], "generator": candidates["generator"]},
        ),
        StageRecord(
            name="verification",
            params=config.verification.model_dump(mode="json"),
            metrics={f"status_{name}": count for name, count in verdicts["status_counts"].items()},
            tags={"fingerprint": verdicts["fingerprint"]},
        ),
        StageRecord(
            name="curation",
            params=config.curation.model_dump(mode="json"),
            metrics={f"criterion_{name}": count for name, count in curated["criterion_counts"].items()},
            tags={"fingerprint": curated["fingerprint"]},
        ),
        StageRecord(
            name="training",
            params=config.training.model_dump(mode="json"),
            series=series,
            metrics={
                "loss_first": training.manifest["loss_first"],
                "loss_last": training.manifest["loss_last"],
                "seconds": training.manifest["seconds"],
            },
            tags={"fingerprint": training.fingerprint},
        ),
    ]


def _models(benchmarked: Benchmarked) -> list[StageRecord]:
    rows = scores_of(benchmarked.scores)
    records = []
    for answers in benchmarked.answers:
        metrics: dict[str, float | None] = {}
        for row in (r for r in rows if r.model == answers.model):
            name = row.metric + (f"_at_{row.k}" if row.k else "") + ("" if row.track == "custom_kernel" else "_any")
            metrics |= {name: row.value, f"{name}_lower": row.lower, f"{name}_upper": row.upper}
        records.append(
            StageRecord(
                name=f"benchmark {answers.model}",
                metrics=metrics,
                tags={"model": answers.model, "fingerprint": answers.verdicts.fingerprint},
            )
        )
    return records
