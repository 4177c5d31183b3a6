"""The report of a run: filled from snapshots, written beside the scores, the same content as HTML,
markdown and JSON."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.benchmark import Benchmarked
from flows.config import PipelineConfig
from flows.refresh import Refreshed
from flows.report_inputs import breakdowns, single_operators, traces_of, training_traces
from kernels_eval.records import Record, stable_hash
from tasks.analysis.stage import found_in
from tasks.benchmark.diagnosis import Bottleneck, diagnose
from tasks.benchmark.errors import error_groups
from tasks.benchmark.report.records import ReportContext, TrainingStep, examples_of, points_of
from tasks.benchmark.report.render import build_report, to_json, to_markdown
from tasks.benchmark.report.summary import summary_table
from tasks.benchmark.scoring import compare_all, distribution, excluded_tasks, variants
from tasks.benchmark.stage import answers_frame, scores_of
from tasks.curation.stage import joined
from tasks.files import atomic_write
from tasks.store import Snapshot, SnapshotRef
from tasks.versions import REPORT_VERSION
from tasks.workload.operator_times_stage import profiles_of

if TYPE_CHECKING:
    import polars as pl

FILES = ("report.html", "report.md", "report.json")
COMPARED_PS = (1.0,)
"""Of fast_p, what models are compared by: each further one makes Holm's correction of all of them
stronger."""
SUMMARY, MADE_OF = "summary.json", "made_of.txt"


class Report(Record):
    """Where a report lies and what it says in short."""

    directory: str
    files: tuple[str, ...]
    markdown: str
    summary: tuple[tuple[str, str], ...]


def write_report(
    config: PipelineConfig, refreshed: Refreshed, trained: SnapshotRef, benchmarked: Benchmarked
) -> Report:
    """Write the report into the score snapshot's directory, atomically, file by file. The same run
    gives the same report.

    The analysis is no part of what scores are made of: where it differs (it had failed, say), the
    report is written anew.
    """
    directory = benchmarked.scores.open().local_dir("report")
    upstream = {name: ref["fingerprint"] for name, ref in _snapshots(refreshed).items()}
    upstream["suite workloads"] = benchmarked.workloads.fingerprint if benchmarked.workloads else ""
    # its own version too: scores stay when only their report changes
    made_of = stable_hash(
        [
            upstream,
            trained.fingerprint,
            list(refreshed.cautions),
            REPORT_VERSION,
        ]
    )
    marker = directory / MADE_OF  # written last: what it says means that the others are whole
    if not marker.exists() or marker.read_text(encoding="utf-8") != made_of:
        context = report_context(config, refreshed, trained, benchmarked)
        texts = dict(
            zip(FILES, (build_report(context), to_markdown(context), to_json(context)), strict=True)
        )
        for name, text in (
            *texts.items(),
            (SUMMARY, json.dumps(summary_table(context))),
            (MADE_OF, made_of),
        ):
            atomic_write(directory / name, text)
    return Report(
        directory=str(directory),
        files=tuple(str(directory / name) for name in FILES),
        markdown=(directory / "report.md").read_text(encoding="utf-8"),
        summary=tuple(read_summary(str(directory))),
    )


def read_summary(directory: str) -> list[tuple[str, str]]:
    return [
        (name, value)
        for name, value in json.loads((Path(directory) / SUMMARY).read_text(encoding="utf-8"))
    ]


def training_steps(training: Snapshot) -> tuple[TrainingStep, ...]:
    """The log's optimiser steps in order, of its columns those that the report shows. What was
    measured before the first step is none."""
    rows = training.read(unique="step").sort("step").iter_rows(named=True)
    return tuple(
        TrainingStep.model_validate({name: row.get(name) for name in TrainingStep.model_fields})
        for row in rows
        if row["step"]
    )


def report_context(
    config: PipelineConfig, refreshed: Refreshed, trained: SnapshotRef, benchmarked: Benchmarked
) -> ReportContext:
    """Everything the report says, as plain data."""
    frame = joined(refreshed.verdicts, refreshed.candidates)
    names = {
        row["task_id"]: row["name"]
        for row in refreshed.tasks.open().read(unique="task_id").iter_rows(named=True)
    }
    verdicts, training, scores = (
        refreshed.verdicts.open().manifest,
        trained.open(),
        benchmarked.scores.open(),
    )
    curated = refreshed.curated.open().manifest
    refs = {
        **_snapshots(refreshed),
        "training": trained.model_dump(),
        "benchmark": benchmarked.scores.model_dump(),
    }
    found = found_in(refreshed.analysis) if refreshed.analysis else None
    answers = answers_frame(list(benchmarked.answers))
    models = [answer.model for answer in benchmarked.answers]
    pairs = [("base", "tuned")] if {"base", "tuned"} <= set(models) else []
    # lengths of other generators are counted by other tokenizers: they do not compare with those of
    # the base model
    related = {"base", "tuned"} if pairs else set(models)
    asked = {"ks": config.benchmark.ks, "resamples": config.benchmark.resamples}
    rows = tuple(scores_of(benchmarked.scores))
    groups, arl_of = breakdowns(benchmarked, answers, **asked)
    spread = distribution(answers, resamples=config.benchmark.resamples)
    spent = _time_by_operator(benchmarked)
    return ReportContext(
        run_name=config.name,
        language=config.language.value,
        device=verdicts["device"],
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tasks=len(names),
        candidates=frame.height,
        status_counts=dict(frame["status"].value_counts().iter_rows()),
        reason_counts=dict(frame["reason"].value_counts().iter_rows()),
        criterion_counts=curated["criterion_counts"],
        trace_flags=_trace_flags(curated),
        base_model=config.training.base_model,
        history=training_steps(training),
        scores=rows,
        against_compile=tuple(scores_of(benchmarked.scores, "compile")),
        comparisons=tuple(compare_all(answers, pairs=pairs, ps=COMPARED_PS, **asked)),
        breakdowns=tuple(groups),
        arl_of=arl_of,
        distributions=tuple(spread),
        variants=tuple(variants(answers, **asked)),
        diagnosis=diagnose(
            rows,
            groups=groups,
            speedups=spread,
            traces={
                each.model: traces_of(each.candidates, config.quality)
                for each in benchmarked.answers
                if each.model in related
            },
            training=training_traces(refreshed.curated.open()),
            single_operator=single_operators(refreshed.curated.open()),
            verdicts=_with_code(answers, benchmarked),
            baseline="base" if pairs else None,
            bottlenecks=_bottlenecks(spent),
            time_by_operator=spent,
        ),
        errors=tuple(error_groups(answers)),
        findings=found.finding if found else (),
        findings_bounded_by=found.cautions if found else refreshed.cautions,
        points=points_of(frame, names),
        examples=examples_of(frame, names),
        fingerprints={name: ref["fingerprint"] for name, ref in refs.items()},
        tool_versions=scores.manifest["tools"],
        hardware=scores.manifest["hardware"],
        config=config.model_dump(mode="json", exclude={"root"}),
        notes=(
            *(refreshed.cautions if found else ()),
            *_notes(training.manifest, answers),
            *benchmarked.cautions,
        ),
    )


def _time_by_operator(benchmarked: Benchmarked) -> dict[str, dict[str, float]] | None:
    """Task -> shares of its reference's time by operator; None where it was not profiled."""
    if benchmarked.profiles is None:
        return None
    return {task: profile.shares for task, profile in profiles_of(benchmarked.profiles).items()}


def _bottlenecks(spent: dict[str, dict[str, float]] | None) -> dict[str, Bottleneck]:
    """The operator in which each profiled reference spends most of its time."""
    main = {
        task: max(shares.items(), key=lambda item: item[1])
        for task, shares in (spent or {}).items()
        if shares
    }
    return {
        task: Bottleneck(operator=operator, share=share) for task, (operator, share) in main.items()
    }


def _with_code(answers: pl.DataFrame, benchmarked: Benchmarked) -> pl.DataFrame:
    """The verdicts with what was verified, where somebody is going to read it."""
    if benchmarked.profiles is None:
        return answers
    import polars as pl

    code = [
        each.candidates.open().read(columns=["candidate_id", "code"], unique="candidate_id")
        for each in benchmarked.answers
    ]
    return answers.join(
        pl.concat(code).unique("candidate_id", keep="first"),
        on="candidate_id",
        how="left",
        maintain_order="left",
    )


def _snapshots(refreshed: Refreshed) -> dict[str, dict[str, Any]]:
    """The snapshots of a refresh that are there, by name."""
    return {
        name: value for name, value in refreshed.model_dump().items() if isinstance(value, dict)
    }


def _trace_flags(curated: dict[str, Any]) -> dict[str, tuple[int, int]]:
    counts = curated.get("trace_flags")
    return (
        {name: (count, counts["taken"][name]) for name, count in counts["correct"].items()}
        if counts
        else {}
    )


def _notes(training: dict[str, Any], answers: pl.DataFrame) -> Iterator[str]:
    """What was left out, so that nobody has to guess."""
    if dropped := training.get("dropped"):
        yield f"{len(dropped)} curated rows could not be trained on and were left out."
    if excluded := excluded_tasks(answers):
        yield (
            "Benchmark tasks left out for every model, because their reference fails or is"
            f" degenerate: {', '.join(excluded)}."
        )
