"""What MLflow is told of a part of the line that ran by itself: a refresh, or a benchmark. Off the
line, as `flows.track`.

Guarantees: one parent run per set of snapshots, whoever ran them and how often; a tracking server
that fails is logged, and None returned.
"""

from __future__ import annotations

from flows.benchmark import Benchmarked
from flows.config import PipelineConfig
from flows.refresh import Refreshed
from flows.track import _logged, analysis_records, dataset_of, model_records, refresh_records
from kernels_eval.records import stable_hash
from tasks.benchmark.stage import scores_of
from tasks.tracking.records import RunRecord


def track_refresh(config: PipelineConfig, refreshed: Refreshed) -> str | None:
    """A refresh: a parent run with the counts, a child run per stage. Returns the parent's id; None
    where tracking is off or failed."""
    return _logged(config, lambda: refresh_record(config, refreshed))


def track_benchmark(config: PipelineConfig, benchmarked: Benchmarked) -> str | None:
    """A benchmark: a parent run with the headline scores, a child run per model."""
    return _logged(config, lambda: benchmark_record(config, benchmarked))


def refresh_record(config: PipelineConfig, refreshed: Refreshed) -> RunRecord:
    refs = [
        refreshed.tasks,
        refreshed.candidates,
        refreshed.verdicts,
        refreshed.curated,
        *filter(None, [refreshed.analysis]),
    ]
    verdicts, curated = refreshed.verdicts.open().manifest, refreshed.curated.open()
    counts = verdicts["status_counts"]
    return RunRecord(
        run_fingerprint=stable_hash(["refresh", *(ref.fingerprint for ref in refs)]),
        run_name=f"{config.name} refresh {config.language.value} {config.curation.strategy}",
        tags={
            "language": config.language.value,
            "strategy": config.curation.strategy,
            "profile": config.name,
            "kind": "refresh",
        },
        params=config.model_dump(mode="json"),
        metrics={
            "tasks": refreshed.tasks.open().manifest["rows"],
            "candidates": verdicts["rows"],
            "correct": counts.get("correct", 0),
            "curated": curated.manifest["rows"],
        },
        stages=(*refresh_records(config, refreshed), *analysis_records(config, refreshed)),
        datasets=(dataset_of(config, curated),),
    )


def benchmark_record(config: PipelineConfig, benchmarked: Benchmarked) -> RunRecord:
    metrics = {
        f"{row.model}.{row.metric}_at_{row.k}": row.value
        for row in scores_of(benchmarked.scores)
        if row.track == "custom_kernel" and row.metric in ("exec", "fast_1") and row.k
    }
    return RunRecord(
        run_fingerprint=stable_hash(["benchmark", benchmarked.scores.fingerprint]),
        run_name=f"{config.name} benchmark {config.language.value}",
        tags={"language": config.language.value, "profile": config.name, "kind": "benchmark"},
        params={"benchmark": config.benchmark.model_dump(mode="json")},
        metrics=metrics,
        stages=tuple(model_records(benchmarked)),
    )
