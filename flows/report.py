"""The report of a run, filled from snapshots of several stages and written beside the scores."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime

import polars as pl

from flows.benchmark import Benchmarked
from flows.config import PipelineConfig
from flows.refresh import Refreshed
from kernels_eval.records import Json, stable_hash
from tasks.analysis.stage import found_in
from tasks.benchmark.comparing import compare_all
from tasks.benchmark.diagnosis import Evidence, diagnose
from tasks.benchmark.errors import error_groups
from tasks.benchmark.report import inputs
from tasks.benchmark.report.files import Report, write_once
from tasks.benchmark.report.records import ReportContext, examples_of, points_of, profile_points
from tasks.benchmark.scoring import distribution, variants
from tasks.benchmark.stage import answers_frame, scores_of
from tasks.curation.config import QualityConfig
from tasks.curation.flags import flagged
from tasks.curation.stage import joined
from tasks.store import SnapshotRef
from tasks.versions import REPORT_VERSION
from tasks.workload.operator_times import profiles_of

COMPARED_PS = (1.0,)
"""Of fast_p, what models are compared by: each further one makes Holm's correction of all of them
stronger."""


def write_report(
    config: PipelineConfig, refreshed: Refreshed, trained: SnapshotRef, benchmarked: Benchmarked
) -> Report:
    """Write the report into the score snapshot's directory; the same run gives the same report.

    The analysis is no part of what scores are made of: where it differs (it had failed, say), the
    report is written again.
    """
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
    """Return everything the report says, as plain data."""
    frame = joined(refreshed.verdicts, refreshed.candidates)
    tasks = refreshed.tasks.open().read(unique="task_id")
    names = dict(tasks.select("task_id", "name").iter_rows())
    training, scores = trained.open(), benchmarked.scores.open()
    curated, answers = refreshed.curated.open(), answers_frame(list(benchmarked.answers))
    found = found_in(refreshed.analysis) if refreshed.analysis else None
    refs = {
        **_snapshots(refreshed),
        "training": trained.model_dump(),
        "benchmark": benchmarked.scores.model_dump(),
    }
    return ReportContext(
        run_name=config.name,
        language=config.language.value,
        device=refreshed.verdicts.open().manifest["device"],
        created_at=datetime.now(UTC).isoformat(timespec="seconds"),
        tasks=len(names),
        candidates=frame.height,
        status_counts=dict(frame["status"].value_counts().iter_rows()),
        reason_counts=dict(frame["reason"].value_counts().iter_rows()),
        criterion_counts=curated.manifest["criterion_counts"],
        trace_flags=inputs.trace_flags(curated),
        base_model=config.training.base_model,
        history=inputs.training_steps(training),
        **_scored(config, refreshed, benchmarked, answers),
        errors=tuple(error_groups(answers)),
        findings=found.finding if found else (),
        finding_rows=found.findings if found else (),
        findings_bounded_by=found.cautions if found else refreshed.cautions,
        points=points_of(frame, names),
        profiles=profile_points(refreshed.profiles.open().read(unique="candidate_id"))
        if refreshed.profiles
        else (),
        examples=examples_of(frame, names, dict(tasks.select("task_id", "code").iter_rows())),
        fingerprints={name: ref["fingerprint"] for name, ref in refs.items()},
        tool_versions=scores.manifest["tools"],
        hardware=scores.manifest["hardware"],
        config=config.model_dump(mode="json", exclude={"root"}),
        notes=(
            *(refreshed.cautions if found else ()),
            *inputs.notes_on(training.manifest, answers),
            *benchmarked.cautions,
        ),
    )


def _scored(
    config: PipelineConfig, refreshed: Refreshed, benchmarked: Benchmarked, answers: pl.DataFrame
) -> Json:
    """The fields of a context that the benchmark fills."""
    ks, resamples = config.benchmark.ks, config.benchmark.resamples
    models = {answer.model for answer in benchmarked.answers}
    tuned = {"base", "tuned"} <= models
    # lengths of other generators are counted by other tokenizers: they do not compare with those of
    # the base model
    related = {"base", "tuned"} if tuned else models
    groups, arl_of = inputs.breakdowns(
        *(benchmarked.suite, benchmarked.workloads, benchmarked.answers, answers),
        ks=ks,
        resamples=resamples,
    )
    rows, speedups = scores_of(benchmarked.scores), distribution(answers, resamples=resamples)
    spent = time_by_operator(benchmarked)
    pairs = [("base", "tuned")] if tuned else []
    comparisons = compare_all(answers, pairs=pairs, ps=COMPARED_PS, ks=ks, resamples=resamples)
    evidence = Evidence(
        groups=groups,
        speedups=speedups,
        traces={
            each.model: inputs.traces_of(each.candidates, _flagged)
            for each in benchmarked.answers
            if each.model in related
        },
        training=inputs.training_traces(refreshed.curated.open()),
        single_operator=inputs.single_operators(refreshed.curated.open()),
        verdicts=inputs.with_code(answers, benchmarked.answers) if spent else answers,
        baseline="base" if tuned else None,
        time_by_operator=spent,
    )
    return {
        "scores": tuple(rows),
        "against_compile": tuple(scores_of(benchmarked.scores, "compile")),
        "at_token_limits": tuple(
            scores_of(benchmarked.scores, limits=config.benchmark.token_limits)
        ),
        "comparisons": tuple(comparisons),
        "breakdowns": tuple(groups),
        "arl_of": arl_of,
        "distributions": tuple(speedups),
        "variants": tuple(variants(answers, ks=ks, resamples=resamples)),
        "diagnosis": diagnose(rows, evidence),
    }


def time_by_operator(benchmarked: Benchmarked) -> dict[str, dict[str, float]]:
    """Return task -> shares of its reference's time by operator; empty without a profile."""
    profiles = profiles_of(benchmarked.profiles) if benchmarked.profiles else {}
    return {task: profile.shares for task, profile in profiles.items()}


def _flagged(texts: Iterator[tuple[str, str]]) -> Iterator[pl.DataFrame]:
    with closing(flagged(texts, QualityConfig())) as batches:
        yield from batches


def _snapshots(refreshed: Refreshed) -> dict[str, Json]:
    """The existing snapshots of a refresh, by name."""
    return {
        name: value for name, value in refreshed.model_dump().items() if isinstance(value, dict)
    }
