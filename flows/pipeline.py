"""The whole line in one flow: refresh, train, benchmark, report, track."""

from __future__ import annotations

from pathlib import Path

from prefect import flow

from flows.artifacts import (
    create_markdown_artifact,
    mlflow_links,
    show_scores,
    show_snapshots,
)
from flows.benchmark import Benchmarked, benchmark_models
from flows.config import PipelineConfig
from flows.naming import run_name
from flows.refresh import Refreshed, refresh
from flows.report import write_report
from flows.runtime.guard import guarding
from flows.track import run_record, show_refresh, track
from flows.train import train_adapter
from kernels_eval.records import Record
from tasks.benchmark.report.files import Report
from tasks.benchmark.stage import scores_of
from tasks.files import atomic_write
from tasks.store.snapshot import SnapshotRef

DEFAULTS = PipelineConfig()


class LineResult(Record):
    """Everything one run of the line produced, by reference."""

    refreshed: Refreshed
    trained: SnapshotRef
    benchmarked: Benchmarked
    report_dir: str
    report: str
    """the page of the newest run of this root, whose name does not change"""
    mlflow_run: str | None


@flow(name="concur line", flow_run_name=run_name("concur"))
def concur_line(config: PipelineConfig = DEFAULTS) -> LineResult:
    """Tasks to tuned adapter to scores, as one run. A second run of the same configuration is
    served from snapshots."""
    with guarding(config.root):
        return run_line(config)


def run_line(config: PipelineConfig) -> LineResult:
    refreshed = refresh(config)
    trained = train_adapter(config, refreshed.tasks, refreshed.curated)
    benchmarked = benchmark_models(config, trained)
    report = write_report(config, refreshed, trained, benchmarked)
    create_markdown_artifact("report", report.markdown, "The report of this run")
    run_id = track(run_record, config, refreshed, trained, benchmarked, report)
    show_scores(scores_of(benchmarked.scores))
    made = {"adapter and training log": trained, "scores": benchmarked.scores}
    show_snapshots({**refreshed.snapshots, **made})
    show_refresh(config, refreshed, mlflow_links(config, run_id, "report.html"))
    return LineResult(
        refreshed=refreshed,
        trained=trained,
        benchmarked=benchmarked,
        report_dir=report.directory,
        report=_newest_page(config, report),
        mlflow_run=run_id,
    )


def _newest_page(config: PipelineConfig, report: Report) -> str:
    page = Path(report.directory) / "report.html"
    if "://" in config.root:
        return str(page)
    return str(atomic_write(Path(config.root) / page.name, page.read_bytes()))
