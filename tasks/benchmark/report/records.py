"""What a report is made of, as plain data, and how verdicts become it.

Guarantees: a context can be written as JSON and read back; passwords inside URLs of the
configuration are masked on the way in. Does not check that its numbers belong together: the report
says where they do not add up.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

import polars as pl
from pydantic import Field, field_validator

from kernels_eval.records import Record, Status
from tasks.benchmark.breakdown import GroupRow
from tasks.benchmark.diagnosis import Diagnosis
from tasks.benchmark.errors import ErrorGroup
from tasks.benchmark.scoring import ComparisonRow, ScoreRow
from tasks.reporting.findings import Finding
from tasks.reporting.text import masked

MAX_EXAMPLES = 8


class TrainingStep(Record):
    """One row of the training log. `epoch` is how many are done after the step."""

    step: int
    epoch: float | None = None
    loss: float | None = None
    learning_rate: float | None = None
    grad_norm: float | None = None
    num_tokens: float | None = None


class CandidatePoint(Record):
    """One verified candidate, as the figures need it. `lower` and `upper` bound `speedup` with 95 %
    confidence."""

    task_name: str
    generator: str = ""
    status: str
    reason: str
    reasoning_tokens: int | None = None
    speedup: float | None = None
    lower: float | None = None
    upper: float | None = None


class Example(Record):
    """One candidate to look at: its verdict in words and its code. Text of a stranger; nothing here
    is safe to run or to embed raw."""

    task_name: str
    generator: str = ""
    status: str
    reason: str
    detail: str = ""
    speedup: float | None = None
    code: str = ""


class ReportContext(Record):
    """Everything a report says, as plain data.

    `status_counts` and `reason_counts` are over the candidates of the line (not of the benchmark);
    every reason belongs to one status. `history` is the training log in order. `points` and
    `examples` come from `points_of` and `examples_of`. `fingerprints` maps a stage to its snapshot.
    Passwords inside URLs of `config` are masked on the way in.
    """

    run_name: str
    language: str
    device: str = ""
    created_at: str = Field(default="", description="when the run ended, ISO 8601")
    tasks: int = Field(ge=0)
    candidates: int = Field(ge=0)
    status_counts: dict[str, int] = {}
    reason_counts: dict[str, int] = {}
    criterion_counts: dict[str, int] = {}
    trace_flags: dict[str, tuple[int, int]] = Field(
        default={},
        description=(
            "flag of a trace -> correct samples with it, and how many of these became training data"
        ),
    )
    base_model: str = ""
    history: tuple[TrainingStep, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    against_compile: tuple[ScoreRow, ...] = Field(
        default=(), description="scores with the baseline 'compile', where it was timed"
    )
    comparisons: tuple[ComparisonRow, ...] = Field(
        default=(), description="what `compare` says of one model against another"
    )
    breakdowns: tuple[GroupRow, ...] = Field(
        default=(), description="scores of groups of tasks, from `score_groups`"
    )
    arl_of: str = Field(
        default="",
        description=(
            "the model by whose reasoning length the thirds of the tasks are; it is not scored by"
            " them"
        ),
    )
    distributions: tuple[ScoreRow, ...] = Field(
        default=(), description="quantiles of speedups, from `distribution`"
    )
    variants: tuple[ScoreRow, ...] = Field(
        default=(), description="scores by other rules, from `variants`"
    )
    diagnosis: tuple[Diagnosis, ...] = Field(
        default=(), description="what to look at, from `diagnose`"
    )
    errors: tuple[ErrorGroup, ...] = Field(
        default=(), description="typical errors, from `error_groups`"
    )
    findings: tuple[str, ...] = Field(
        default=(), description="headlines of the analysis of reasoning length"
    )
    finding_rows: tuple[Finding, ...] = Field(
        default=(), description="the numbers behind the headlines"
    )
    findings_bounded_by: tuple[str, ...] = Field(
        default=(), description="what bounds the findings, or why there are none"
    )
    points: tuple[CandidatePoint, ...] = ()
    examples: tuple[Example, ...] = ()
    fingerprints: dict[str, str] = {}
    tool_versions: dict[str, str] = {}
    hardware: dict[str, Any] = {}
    config: dict[str, Any] = {}
    notes: tuple[str, ...] = ()

    @field_validator("config", mode="after")
    @classmethod
    def _no_passwords(cls, config: dict[str, Any]) -> dict[str, Any]:
        plain: dict[str, Any] = masked(config)
        return plain

    @property
    def correct(self) -> int:
        return self.status_counts.get(Status.CORRECT, 0)

    @property
    def curated(self) -> int:
        return sum(self.criterion_counts.values())

    @property
    def losses(self) -> tuple[float, float] | None:
        """Mean loss over the steps of the first and of the last epoch: the same rows, so the two
        compare. None without a log.

        Without epochs in the log, the loss of the first and of the last step.
        """
        logged = [(step.loss, step.epoch) for step in self.history if step.loss is not None]
        if not logged:
            return None
        epochs = [epoch for _, epoch in logged if epoch is not None]
        losses = [loss for loss, _ in logged]
        if len(epochs) < len(losses):
            return losses[0], losses[-1]
        by_epoch = list(zip(epochs, losses, strict=True))
        first = [loss for epoch, loss in by_epoch if epoch <= 1] or losses[:1]
        last = [loss for epoch, loss in by_epoch if epoch > epochs[-1] - 1]
        return statistics.fmean(first), statistics.fmean(last)


def points_of(frame: pl.DataFrame, names: Mapping[str, str]) -> tuple[CandidatePoint, ...]:
    """Return the points of verdicts joined with candidates (tasks.tables has both tables).

    `names` maps task_id to a task's name.
    """
    return tuple(
        CandidatePoint(
            **_facts(row, names),
            reasoning_tokens=row.get("reasoning_tokens"),
            lower=(row.get("timing") or {}).get("speedup_lower"),
            upper=(row.get("timing") or {}).get("speedup_upper"),
        )
        for row in frame.iter_rows(named=True)
    )


def examples_of(frame: pl.DataFrame, names: Mapping[str, str]) -> tuple[Example, ...]:
    """Return the fastest correct candidate, then one of every other reason, at most MAX_EXAMPLES.

    The commonest reason comes first.
    """
    rows = sorted(frame.iter_rows(named=True), key=lambda row: row["candidate_id"])
    correct = [row for row in rows if row["status"] == Status.CORRECT]
    failed: dict[str, list[dict[str, Any]]] = {}
    for row in rows:
        if row["status"] != Status.CORRECT:
            failed.setdefault(row["reason"], []).append(row)
    chosen = sorted(correct, key=lambda row: -(row["timing"] or {}).get("speedup", 0.0))[:1]
    ranked = sorted(failed.items(), key=lambda item: (-len(item[1]), item[0]))
    chosen += [group[0] for _, group in ranked]
    return tuple(
        Example(**_facts(row, names), detail=row.get("detail") or "", code=row.get("code") or "")
        for row in chosen[:MAX_EXAMPLES]
    )


def _facts(row: Mapping[str, Any], names: Mapping[str, str]) -> dict[str, Any]:
    return {
        "task_name": names.get(row["task_id"], row["task_id"]),
        "generator": row.get("generator") or "",
        "status": row["status"],
        "reason": row["reason"],
        "speedup": (row.get("timing") or {}).get("speedup"),
    }
