"""The whole line in one flow: refresh, train, benchmark, report, track."""

from __future__ import annotations

from flows.artifacts import (
    create_markdown_artifact,
    create_table_artifact,
    link_mlflow,
    show_candidates,
    show_scores,
    show_snapshots,
)
from flows.benchmark import Benchmarked, benchmark_models
from flows.config import PipelineConfig
from flows.refresh import Refreshed, refresh_dataset
from flows.report import write_report
from flows.runtime.guard import guarded_flow
from flows.track import run_record, track
from flows.train import train_adapter
from kernels_eval.records import Record
from tasks.benchmark.stage import scores_of
from tasks.store.snapshot import SnapshotRef

DEFAULTS = PipelineConfig()


class LineResult(Record):
    """Everything one run of the line produced, by reference."""

    refreshed: Refreshed
    trained: SnapshotRef
    benchmarked: Benchmarked
    report_dir: str
    mlflow_run: str | None


@guarded_flow("concur line", "concur")
def concur_line(config: PipelineConfig = DEFAULTS) -> LineResult:
    """Tasks to tuned adapter to scores, as one run. A second run of the same configuration is
    served from snapshots."""
    refreshed = refresh_dataset.fn(config)  # stages and artifacts of this run
    trained = train_adapter.fn(config, refreshed.tasks, refreshed.curated)
    benchmarked = benchmark_models.fn(config, trained)
    report = write_report(config, refreshed, trained, benchmarked)
    create_markdown_artifact("report", report.markdown, "What this run found")
    summary = [{"what": name, "value": value} for name, value in report.summary]
    create_table_artifact("summary", summary, "The run in one table")
    run_id = track(run_record, config, refreshed, trained, benchmarked, report)
    show_scores(scores_of(benchmarked.scores))
    made = {"adapter and training log": trained, "scores": benchmarked.scores}
    show_candidates(config)
    show_snapshots({**refreshed.snapshots, **made})
    link_mlflow(config, run_id, "report.html")
    return LineResult(
        refreshed=refreshed,
        trained=trained,
        benchmarked=benchmarked,
        report_dir=report.directory,
        mlflow_run=run_id,
    )
