"""Writes runs to MLflow from finished snapshots, one parent run per set of them. Failures are
logged."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import Concatenate, ParamSpec

import polars as pl
from prefect import flow
from prefect.logging import get_run_logger

from flows.artifacts import Links, mlflow_links, show_kernels
from flows.benchmark import Benchmarked
from flows.config import PipelineConfig
from flows.morning.step import show_morning_report
from flows.naming import run_name, submitted_name, typed_name
from flows.refresh import Refreshed, refresh
from flows.runtime.guard import guarding
from flows.view import viewer_page
from kernels_eval.records import Status, stable_hash
from tasks.benchmark.report.files import Report
from tasks.benchmark.shown import FAST, OWN_TRACK, metrics_of
from tasks.benchmark.stage import scores_of
from tasks.progress import report as progress
from tasks.publishing.lineage import lineage
from tasks.reporting.text import moment
from tasks.scores import BASELINES, EXEC
from tasks.search.population import START
from tasks.store import SnapshotRef
from tasks.tracking.connection import Destination, try_mlflow
from tasks.tracking.mlflow_sink import log_run, registered_version
from tasks.tracking.records import AdapterRecord, DatasetRef, Metrics, RunRecord, StageRecord
from tasks.tracking.stages import (
    analysis_record,
    base_model_of,
    stage_record,
    times_of,
    training_headline,
    training_record,
    verification_record,
)
from tasks.tracking.writing import NOTE_TAG
from tasks.training.stage import adapter_of

P = ParamSpec("P")


def track(
    build: Callable[Concatenate[PipelineConfig, P], RunRecord],
    config: PipelineConfig,
    *made: P.args,
    **more: P.kwargs,
) -> str | None:
    """Write a run described by a function below, under the name that a person typed for the flow
    run, if any. Returns the parent run's id; None where tracking is off or failed."""
    if not config.tracking.enabled:
        return None
    record, to = build(config, *made, **more), destination_of(config)
    if typed := typed_name():
        record = record.model_copy(update={"name": typed})

    def failed(line: str) -> None:
        get_run_logger().error("%s", line)
        progress("tracking", 0, 1, line)

    def waits(line: str) -> None:
        get_run_logger().warning("%s", line)

    return try_mlflow(to.tracking_uri, lambda: log_run(record, to), log=waits, failed=failed)


def run_record(
    config: PipelineConfig,
    refreshed: Refreshed,
    trained: SnapshotRef,
    benchmarked: Benchmarked,
    written: Report,
) -> RunRecord:
    analysis, made = _analysis(refreshed), (trained, benchmarked.scores)
    dataset = dataset_of(config, refreshed.curated)
    metrics = {
        **_counts(refreshed),
        **training_headline(trained),
        **_headline_scores(benchmarked),
    }
    training = training_record(config.training, trained, dataset)
    stages = (*_until_curation(config, refreshed), training, *analysis, *model_records(benchmarked))
    said = next((line for line in written.markdown.split("\n") if line.startswith("**")), "")
    return RunRecord(
        run_fingerprint=stable_hash(_fingerprints(refreshed, *made)),
        name=_name_of(config.name, refreshed),
        times=_times(refreshed),
        tags=tags_of(config, strategy=config.curation.strategy) | {NOTE_TAG: said},
        params=config,
        metrics=metrics,
        stages=stages,
        datasets=(dataset,),
        artifacts=tuple(Path(path) for path in written.files),
        adapter=adapter_record(config, refreshed.curated, trained),
    )


@flow(name="refresh the data set", flow_run_name=run_name("refresh"))
def refresh_and_track(config: PipelineConfig) -> tuple[Refreshed, str | None]:
    """Write, verify, refine, confirm what is kept, and curate candidates; and the refresh's run in
    MLflow. Pays only for tasks, samples and verdicts that are new."""
    with guarding(config.root):
        refreshed = refresh(config)
        run_id = track(refresh_record, config, refreshed)
        show_refresh(config, refreshed, mlflow_links(config, run_id))
        return refreshed, run_id


def show_refresh(config: PipelineConfig, refreshed: Refreshed, links: Links) -> None:
    """Show the kernels of a refresh, and its report with links to them and to these."""
    kernels = show_kernels(refreshed.verdicts, refreshed.candidates)
    there = {"Code of the kernels": kernels} if kernels else {}
    show_morning_report(config.root, refreshed.id, there | links)


def _counts(refreshed: Refreshed) -> Metrics:
    verified = _rows(refreshed.verdicts)
    correct = refreshed.verdicts.open().manifest["status_counts"].get(Status.CORRECT, 0)
    return {
        "tasks": _rows(refreshed.tasks),
        "candidates": verified,
        "correct": correct,
        "correct_share": correct / verified if verified else None,
        "curated": _rows(refreshed.curated),
    }


def refresh_record(config: PipelineConfig, refreshed: Refreshed) -> RunRecord:
    strategy = config.curation.strategy
    metrics = _counts(refreshed)
    counts = {name: value for name, value in metrics.items() if name != "correct_share"}
    return RunRecord(
        run_fingerprint=stable_hash(["refresh", *_fingerprints(refreshed)]),
        name=_name_of(f"{config.name} refresh", refreshed),
        times=_times(refreshed),
        tags=tags_of(config, strategy=strategy, kind="refresh") | _note(counts, ",.0f"),
        params=config,
        metrics=metrics,
        stages=(*_until_curation(config, refreshed), *_analysis(refreshed)),
        datasets=(dataset_of(config, refreshed.curated),),
    )


def benchmark_record(config: PipelineConfig, benchmarked: Benchmarked) -> RunRecord:
    return RunRecord(
        run_fingerprint=stable_hash(["benchmark", benchmarked.scores.fingerprint]),
        name=f"{config.name} benchmark {config.language.value}",
        tags=tags_of(config, kind="benchmark") | _note(_headline_scores(benchmarked), ".1%"),
        params={"benchmark": config.benchmark},
        metrics=_headline_scores(benchmarked),
        stages=model_records(benchmarked),
    )


def model_version_of(config: PipelineConfig, run_id: str) -> str | None:
    """NAME/VERSION of the registered adapter of a run; None where MLflow does not say."""
    with suppress(Exception):  # the run is written: where its version stands is no reason to fail
        return registered_version(run_id, destination_of(config))
    return None


def training_run_record(
    config: PipelineConfig, curated: SnapshotRef, trained: SnapshotRef
) -> RunRecord:
    dataset, strategy = dataset_of(config, curated), lineage(curated).strategy
    losses = training_headline(trained)
    return RunRecord(
        run_fingerprint=stable_hash(["training", trained.fingerprint]),
        name=f"{config.name} training on {strategy}",
        tags={"strategy": strategy, "profile": config.name} | _note(losses, ".4f"),
        params={"training": config.training},
        metrics={"curated": _rows(curated), **losses},
        stages=(training_record(config.training, trained, dataset),),
        datasets=(dataset,),
        adapter=adapter_record(config, curated, trained),
    )


def reinforcement_record(config: PipelineConfig, reinforced: SnapshotRef) -> RunRecord:
    stage = training_record(config.reinforcement, reinforced)
    last = ("reward", "status/correct", "status/rejected")
    metrics = {name: stage.series[name][-1][1] for name in last if name in stage.series}
    return RunRecord(
        run_fingerprint=stable_hash(["reinforcement", reinforced.fingerprint]),
        name=f"{config.name} reinforcement by {config.reinforcement.reward}",
        tags=tags_of(config, kind="reinforcement"),
        params={"reinforcement": config.reinforcement},
        metrics=metrics,
        stages=(stage,),
    )


def search_record(
    config: PipelineConfig, proposals: SnapshotRef, improved: SnapshotRef
) -> RunRecord:
    """A search: confirmed gain, costs, operators' shares of the proposals and the curve; tables of
    each task's gain and of winners' lineages."""
    told = improved.open().manifest["search"]
    made = Counter(proposals.open().read(columns=["operator"])["operator"])
    del made[START]
    gain = {f"gain_{end}": told["gain"][end] for end in ("lower", "upper")}
    numbers = {name: told[name] for name in ("tasks", "improved", "evaluations", "device_s")}
    metrics = {"gain": told["gain"]["value"], **gain, **numbers}
    gains, lines = [], []
    for row in map(dict, told["results"]):
        lines += [{"task_id": row["task_id"], **each} for each in row.pop("lineage")]
        gains.append(row)
    return RunRecord(
        run_fingerprint=stable_hash(["search", proposals.fingerprint, improved.fingerprint]),
        name=f"{config.name} search {config.language.value} {config.search.method}",
        tags=tags_of(config, kind="search") | _note(metrics, ".4g"),
        params={"search": config.search},
        metrics=metrics | {f"share.{name}": n / made.total() for name, n in made.items()},
        series={"curve": tuple(enumerate(told["curve"], 1))},
        tables={"gains": tuple(gains)} | ({"lineage": tuple(lines)} if lines else {}),
    )


def destination_of(config: PipelineConfig) -> Destination:
    artifacts = Path(config.root).absolute() / "mlartifacts"
    return Destination(config.tracking_uri, str(artifacts), config.tracking.experiment)


# -- parts of records ------------------------------------------------------------------------------


def tags_of(config: PipelineConfig, **more: str) -> dict[str, str]:
    return {
        "language": config.language.value,
        "profile": config.name,
        "viewer": viewer_page(config.root),
        **more,
    }


def _note(metrics: Metrics, form: str) -> dict[str, str]:
    said = [f"{name} {value:{form}}" for name, value in metrics.items() if value is not None]
    return {NOTE_TAG: ", ".join(said)}


def _rows(ref: SnapshotRef) -> int:
    return int(ref.open().manifest["rows"])


def _name_of(what: str, refreshed: Refreshed) -> str:
    """When (UTC), and the name under which a run was submitted, else what it is. What tells runs
    apart comes first: MLflow's lists and legends show some twenty letters."""
    when = moment(refreshed.began_at or refreshed.curated.open().manifest["created_at"])[5:]
    return f"{when.removesuffix(' UTC')} {submitted_name() or what}"


def _times(refreshed: Refreshed) -> tuple[int, int] | None:
    """From the beginning of the refresh until now."""
    if not refreshed.began_at:
        return None
    began_s = datetime.fromisoformat(refreshed.began_at).timestamp()
    return int(1000 * began_s), int(1000 * time.time())


def _fingerprints(refreshed: Refreshed, *made: SnapshotRef) -> list[str]:
    refs = [refreshed.tasks, refreshed.candidates, refreshed.verdicts, refreshed.curated, *made]
    return [ref.fingerprint for ref in (*refs, refreshed.analysis) if ref]


def dataset_of(config: PipelineConfig, curated: SnapshotRef) -> DatasetRef:
    return DatasetRef(f"{config.name}-curated", str(curated.open().path), curated.fingerprint)


def adapter_record(
    config: PipelineConfig, curated: SnapshotRef, trained: SnapshotRef
) -> AdapterRecord:
    line, base_model = lineage(curated), base_model_of(config.training, trained)
    upstream = {
        name: getattr(line, name) for name in ("tasks", "candidates", "verdicts", "curated")
    }
    return AdapterRecord(
        directory=adapter_of(trained),
        base_model=base_model,
        registered_model=f"concur-{config.name}",
        lineage={f"concur.{name}": above.fingerprint for name, above in upstream.items() if above}
        | {
            "concur.training": trained.fingerprint,
            "concur.strategy": line.strategy,
            "concur.base_model": base_model,
        },
    )


def _until_curation(config: PipelineConfig, refreshed: Refreshed) -> tuple[StageRecord, ...]:
    stages = [
        stage_record("synthesis", config.synthesis, refreshed.candidates),
        verification_record(config.verification, refreshed.screened or refreshed.verdicts),
    ]
    if refreshed.screened:
        stages.append(stage_record("confirmation", config.verification, refreshed.verdicts))
    return (*stages, stage_record("curation", config.curation, refreshed.curated))


def _analysis(refreshed: Refreshed) -> list[StageRecord]:
    found = refreshed.analysis
    return [analysis_record(found)] if found else []


def model_records(benchmarked: Benchmarked) -> tuple[StageRecord, ...]:
    rows = pl.concat(scores_of(benchmarked.scores, baseline) for baseline in BASELINES)
    return tuple(
        StageRecord(
            name=f"benchmark {answers.model}",
            times=(
                times_of(answers.candidates.open())[0],
                times_of(answers.verdicts.open())[1],
            ),
            metrics=metrics_of(rows.filter(model=answers.model).iter_rows(named=True)),
            tags={"model": answers.model, "fingerprint": answers.verdicts.fingerprint},
        )
        for answers in benchmarked.answers
    )


def _headline_scores(benchmarked: Benchmarked) -> Metrics:
    rows = scores_of(benchmarked.scores).filter(
        pl.col("metric").is_in([EXEC, FAST]), track=OWN_TRACK
    )
    found: Metrics = {}
    for row in rows.iter_rows(named=True):
        name = next(iter(metrics_of([row])))
        found[f"{row['model']}.{name}"] = row["value"]
    return found
