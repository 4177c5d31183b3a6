"""The report of a run, from several stages' snapshots, written beside the scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path

import polars as pl

from flows.benchmark import Benchmarked
from flows.config import PipelineConfig
from flows.refresh import Refreshed
from flows.view import view_command, viewer_page
from kernels_eval.records import Json, stable_hash
from tasks.benchmark.comparing import paired_differences
from tasks.benchmark.errors import error_groups
from tasks.benchmark.remarks import remarks
from tasks.benchmark.report import inputs
from tasks.benchmark.report.context import ReportContext, limits_of, speedups_of
from tasks.benchmark.report.files import Report, write_once
from tasks.benchmark.signs import signs
from tasks.benchmark.stage import answers_frame, scores_of
from tasks.curation.flags import flagged
from tasks.observe.stage import found_in
from tasks.reporting.choice import choice_of
from tasks.store import SnapshotRef
from tasks.versions import REPORT_VERSION

OF_VERDICTS = ("candidate_id", "status", "reason", "timing")


def write_report(
    config: PipelineConfig, refreshed: Refreshed, trained: SnapshotRef, benchmarked: Benchmarked
) -> Report:
    """Write the report into the score snapshot's directory, again where the analysis, on which
    scores do not depend, differs."""
    upstream = {name: ref["fingerprint"] for name, ref in _snapshots(refreshed).items()}
    upstream["suite workloads"] = benchmarked.workloads.fingerprint if benchmarked.workloads else ""
    # its own version too: scores stay when only their report changes
    made_of = [upstream, trained.fingerprint, list(refreshed.cautions), REPORT_VERSION]
    return write_once(
        benchmarked.scores.open().local_dir("report"),
        stable_hash(made_of),
        report_context,
        config,
        refreshed,
        trained,
        benchmarked,
    )


def report_context(
    config: PipelineConfig, refreshed: Refreshed, trained: SnapshotRef, benchmarked: Benchmarked
) -> ReportContext:
    training, scores = trained.open(), benchmarked.scores.open()
    curated = refreshed.curated.open()
    answers = answers_frame(list(benchmarked.answers), config.benchmark.min_kernel_share)
    snapshots = _snapshots(refreshed)
    snapshots |= {"training": trained.model_dump(), "benchmark": benchmarked.scores.model_dump()}
    return ReportContext(
        run_name=config.name,
        language=config.language.value,
        device=refreshed.verdicts.open().manifest["device"],
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        criterion_counts=curated.manifest["criterion_counts"],
        choice=tuple(choice_of(curated.manifest)),
        trace_flags=inputs.trace_flags(curated),
        base_model=config.training.base_model,
        **_viewer(config),
        history=inputs.training_steps(training),
        errors=tuple(error_groups(answers)),
        fingerprints={name: ref["fingerprint"] for name, ref in snapshots.items()},
        tool_versions=scores.manifest["tools"],
        hardware=scores.manifest["hardware"],
        config=config.model_dump(mode="json", exclude={"root"}),
        **_candidates(refreshed),
        **_analysis(refreshed),
        **_scored(config, refreshed, benchmarked, answers),
        notes=tuple(_notes(refreshed, training.manifest, benchmarked, answers)),
    )


def _viewer(config: PipelineConfig) -> Json:
    if "://" in config.root:
        return {}
    page = Path(viewer_page(config.root)).absolute()
    return {"viewer": page.as_uri(), "viewer_command": view_command(config.root)}


def _candidates(refreshed: Refreshed) -> Json:
    verdicts = refreshed.verdicts.open()
    frame = verdicts.read(columns=OF_VERDICTS, unique="candidate_id")
    profiles = refreshed.profiles
    return {
        "tasks": refreshed.tasks.open().manifest["rows"],
        "candidates": frame.height,
        "status_counts": dict(frame["status"].value_counts().iter_rows()),
        "reason_counts": dict(frame["reason"].value_counts().iter_rows()),
        "confirmation": verdicts.manifest.get("confirmation") or {},
        **speedups_of(frame),
        "limits": limits_of(profiles.open().read(unique="candidate_id")) if profiles else (),
    }


def _analysis(refreshed: Refreshed) -> Json:
    if not refreshed.analysis:
        return {"findings_bounded_by": refreshed.cautions}
    found = found_in(refreshed.analysis)
    return {
        "findings": found.finding,
        "finding_rows": found.findings,
        "findings_bounded_by": found.cautions,
    }


def _scored(
    config: PipelineConfig, refreshed: Refreshed, benchmarked: Benchmarked, answers: pl.DataFrame
) -> Json:
    ks = config.benchmark.ks
    models = {answer.model for answer in benchmarked.answers}
    tuned = {"base", "tuned"} <= models
    groups, arl_of = inputs.grouped_scores(
        benchmarked.suite, benchmarked.workloads, benchmarked.answers, answers, ks=ks
    )
    pairs = [("base", "tuned")] if tuned else []
    own = scores_of(benchmarked.scores).filter(track="custom_kernel")
    # lengths of other generators are counted by other tokenizers: they do not compare with those of
    # the base model
    related = {"base", "tuned"} if tuned else models
    traces = {
        each.model: inputs.traces_of(each.candidates, _flagged)
        for each in benchmarked.answers
        if each.model in related
    }
    curated = refreshed.curated.open()
    levels = groups.filter(by="level") if not groups.is_empty() else groups
    return {
        "scores": tuple(benchmarked.scores.open().read().to_dicts()),
        "comparisons": tuple(paired_differences(answers, pairs=pairs, ks=ks).to_dicts()),
        "groups": tuple(groups.to_dicts()),
        "arl_of": arl_of,
        "signs": signs(
            own,
            levels,
            answers,
            traces,
            training=inputs.training_traces(curated),
            single_operator=inputs.single_operators(curated),
            untrained="base" if tuned else None,
        ),
    }


def _notes(
    refreshed: Refreshed, training: Json, benchmarked: Benchmarked, answers: pl.DataFrame
) -> Iterator[str]:
    if refreshed.analysis:
        yield from refreshed.cautions
    if dropped := training.get("dropped"):
        yield f"{len(dropped)} curated rows could not be trained on and were left out."
    yield from remarks(answers)
    yield from benchmarked.cautions


def _flagged(texts: Iterator[tuple[str, str]]) -> Iterator[pl.DataFrame]:
    with closing(flagged(texts)) as batches:
        yield from batches


def _snapshots(refreshed: Refreshed) -> dict[str, Json]:
    return {
        name: value for name, value in refreshed.model_dump().items() if isinstance(value, dict)
    }
