"""A report's context as plain data, and its derivation from verdicts. Passwords in configured URLs
are masked."""

from __future__ import annotations

import statistics
from typing import Annotated

import polars as pl
from pydantic import AfterValidator, NonNegativeInt

from kernels_eval.records import Json, Record, Status
from tasks.benchmark.errors import ErrorGroup
from tasks.benchmark.signs import Sign
from tasks.reporting.findings import Finding
from tasks.reporting.text import masked
from tasks.scores import known_ratio


class TrainingStep(Record):
    """A training log row. `epoch` counts those done after the step."""

    step: int
    epoch: float | None = None
    loss: float | None = None


class ReportContext(Record):
    """Everything a report says, as plain data.

    `status_counts` and `reason_counts` are over the run's candidates. `trace_flags` maps a flag to
    its correct samples, and those taken. `scores` are rows of `benchmark.stage.all_scores`,
    `comparisons` of `paired_differences`, `groups` of `scores` with `by` and `group`; `arl_of` is
    the model whose reasoning lengths make the thirds. `timed` candidates have a speedup; `faster`
    ones beat PyTorch with 95 % confidence. `limits` has a row per limit of profiled candidates.
    `fingerprints` maps a stage to its snapshot.
    """

    run_name: str
    language: str
    device: str = ""
    created_at: str = ""
    tasks: NonNegativeInt
    candidates: NonNegativeInt
    status_counts: dict[str, int] = {}
    reason_counts: dict[str, int] = {}
    confirmation: Json = {}
    """of the verdicts' manifest, where some were only screened"""
    criterion_counts: dict[str, int] = {}
    choice: tuple[str, ...] = ()
    """what the training set kept of the correct candidates, and what is slow of it"""
    trace_flags: dict[str, tuple[int, int]] = {}
    base_model: str = ""
    viewer: str = ""
    """the address of the file"""
    viewer_command: str = ""
    history: tuple[TrainingStep, ...] = ()
    scores: tuple[Json, ...] = ()
    comparisons: tuple[Json, ...] = ()
    groups: tuple[Json, ...] = ()
    arl_of: str = ""
    signs: tuple[Sign, ...] = ()
    errors: tuple[ErrorGroup, ...] = ()
    findings: tuple[str, ...] = ()
    finding_rows: tuple[Finding, ...] = ()
    findings_bounded_by: tuple[str, ...] = ()
    timed: NonNegativeInt = 0
    faster: NonNegativeInt = 0
    limits: tuple[Json, ...] = ()
    fingerprints: dict[str, str] = {}
    tool_versions: dict[str, str] = {}
    hardware: Json = {}
    config: Annotated[Json, AfterValidator(masked)] = {}
    notes: tuple[str, ...] = ()

    @property
    def correct(self) -> int:
        return self.status_counts.get(Status.CORRECT, 0)

    @property
    def curated(self) -> int:
        return sum(self.criterion_counts.values())

    @property
    def losses(self) -> tuple[float, float] | None:
        """Mean loss of the first and last epoch, over the same rows; within one epoch, or without
        any, of the first and last step. None without a log."""
        logged = [(step.loss, step.epoch) for step in self.history if step.loss is not None]
        if not logged:
            return None
        by_epoch = [(loss, epoch) for loss, epoch in logged if epoch is not None]
        end = by_epoch[-1][1] if by_epoch else 0.0
        if len(by_epoch) < len(logged) or end <= 1:
            return logged[0][0], logged[-1][0]
        first = [loss for loss, epoch in by_epoch if epoch <= 1] or [by_epoch[0][0]]
        last = [loss for loss, epoch in by_epoch if epoch > end - 1]
        return statistics.fmean(first), statistics.fmean(last)


def speedups_of(frame: pl.DataFrame) -> dict[str, int]:
    times = ("speedup", "speedup_lower")
    rows = frame.select(known_ratio(frame, name).alias(name) for name in times)
    rows = rows.filter(pl.col("speedup").is_not_null())
    return {"timed": rows.height, "faster": rows.filter(pl.col("speedup_lower") > 1).height}


def limits_of(profiles: pl.DataFrame) -> tuple[Json, ...]:
    """limit, candidates, and medians of speedup, of own kernels' share of the time, and of SOL
    score, from tasks.tables.KERNEL_PROFILES."""
    rows = profiles.drop_nulls(["limit", "reference_ms", "candidate_ms"])
    found = rows.group_by("limit").agg(
        candidates=pl.len(),
        speedup=(pl.col("reference_ms") / pl.col("candidate_ms")).median(),
        kernel_share=pl.col("kernel_share").median(),
        sol_score=pl.col("sol_score").median(),
    )
    return tuple(found.sort("limit").to_dicts())
