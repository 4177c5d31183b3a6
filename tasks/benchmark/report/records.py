"""What a report is made of, as plain data, and how verdicts become it.

Guarantees: a context can be written as JSON and read back; passwords inside URLs of the
configuration are masked on the way in. Does not check that its numbers belong together: the report
says where they do not add up.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from typing import Annotated

import polars as pl
from pydantic import AfterValidator, NonNegativeInt

from kernels_eval.grouping import grouped
from kernels_eval.records import Json, Reason, Record, Row, Status
from tasks.benchmark.breakdown import GroupRow
from tasks.benchmark.comparing import ComparisonRow
from tasks.benchmark.diagnosis import Diagnosis
from tasks.benchmark.errors import ErrorGroup
from tasks.benchmark.scoring import ScoreRow
from tasks.reporting.findings import Finding
from tasks.reporting.text import masked

MAX_EXAMPLES = 8
TEXTS = ("candidate_id", "detail", "reasoning", "code")


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


class Example(CandidatePoint):
    """One candidate to look at: its verdict in words, its reasoning, its code and the reference's.
    Text of a stranger; nothing here is safe to run or to embed raw."""

    candidate_id: str = ""
    reference_ms: float | None = None
    candidate_ms: float | None = None
    detail: str = ""
    reasoning: str = ""
    code: str = ""
    reference: str = ""


class ProfilePoint(Record):
    """A profiled candidate: what limits it, and where it lies under the roofline."""

    limit: str
    speedup: float
    sol_score: float | None = None
    intensity: float | None = None
    """FLOPs a byte"""
    reached: float | None = None
    """share of the speed of light"""
    ridge: float | None = None
    """FLOPs a byte at which the device's arithmetic is the nearer bound"""


class ReportContext(Record):
    """Everything a report says, as plain data.

    `created_at` is when the run ended (ISO 8601). `status_counts` and `reason_counts` are over the
    candidates of the line (not of the benchmark); every reason belongs to one status. `trace_flags`
    maps a flag of a trace to the correct samples with it, and how many of these became training
    data. `history` is the training log in order. `scores` are against eager PyTorch,
    `against_compile` those with the baseline "compile", where it was timed, `at_token_limits` those
    with a limit of tokens an answer. `comparisons` come from
    `compare` or `compare_all`, `breakdowns` from `score_groups`, `distributions`, `variants`,
    `diagnosis` and `errors` from `distribution`, `variants`, `diagnose` and `error_groups`.
    `arl_of` is the model by whose reasoning length the thirds of the tasks are; it is not scored by
    them. `findings` are the headlines of the analysis of reasoning length, `finding_rows` the
    numbers behind them, `findings_bounded_by` what bounds them, or why there are none. `points` and
    `examples` come from `points_of` and `examples_of`, `profiles` from `profile_points`.
    `fingerprints` maps a stage to its snapshot. Passwords inside URLs of `config` are masked on the
    way in.
    """

    run_name: str
    language: str
    device: str = ""
    created_at: str = ""
    tasks: NonNegativeInt
    candidates: NonNegativeInt
    status_counts: dict[str, int] = {}
    reason_counts: dict[str, int] = {}
    criterion_counts: dict[str, int] = {}
    trace_flags: dict[str, tuple[int, int]] = {}
    base_model: str = ""
    history: tuple[TrainingStep, ...] = ()
    scores: tuple[ScoreRow, ...] = ()
    against_compile: tuple[ScoreRow, ...] = ()
    at_token_limits: tuple[ScoreRow, ...] = ()
    comparisons: tuple[ComparisonRow, ...] = ()
    breakdowns: tuple[GroupRow, ...] = ()
    arl_of: str = ""
    distributions: tuple[ScoreRow, ...] = ()
    variants: tuple[ScoreRow, ...] = ()
    diagnosis: tuple[Diagnosis, ...] = ()
    errors: tuple[ErrorGroup, ...] = ()
    findings: tuple[str, ...] = ()
    finding_rows: tuple[Finding, ...] = ()
    findings_bounded_by: tuple[str, ...] = ()
    points: tuple[CandidatePoint, ...] = ()
    examples: tuple[Example, ...] = ()
    profiles: tuple[ProfilePoint, ...] = ()
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
    return tuple(CandidatePoint(**_facts(row, names)) for row in frame.iter_rows(named=True))


def examples_of(
    frame: pl.DataFrame, names: Mapping[str, str], references: Mapping[str, str]
) -> tuple[Example, ...]:
    """Return the fastest correct candidate, then one of every other reason, at most MAX_EXAMPLES.

    The commonest reason comes first. `references` maps task_id to a task's source.
    """
    rows = frame.sort("candidate_id").iter_rows(named=True)
    groups = grouped((row["reason"], row) for row in rows)
    ranked = sorted(groups.items(), key=lambda item: (item[0] != Reason.OK, -len(item[1]), item[0]))
    chosen = [
        max(group, key=lambda row: (row["timing"] or {}).get("speedup") or 0.0)
        for _, group in ranked[:MAX_EXAMPLES]
    ]
    return tuple(
        Example(
            **_facts(row, names),
            **{name: row.get(name) or "" for name in TEXTS},
            **{name: (row["timing"] or {}).get(name) for name in ("reference_ms", "candidate_ms")},
            reference=references.get(row["task_id"], ""),
        )
        for row in chosen
    )


def _facts(row: Row, names: Mapping[str, str]) -> Json:
    known = (row.get("timing") or {}).items()
    timing = {name: x for name, x in known if isinstance(x, float) and math.isfinite(x)}
    return {
        "task_name": names.get(row["task_id"], row["task_id"]),
        "generator": row.get("generator") or "",
        "status": row["status"],
        "reason": row["reason"],
        "reasoning_tokens": row.get("reasoning_tokens"),
        "speedup": timing.get("speedup"),
        "lower": timing.get("speedup_lower"),
        "upper": timing.get("speedup_upper"),
    }


def profile_points(rows: pl.DataFrame) -> tuple[ProfilePoint, ...]:
    """The profiled candidates among rows of tasks.tables.KERNEL_PROFILES, by what limits them."""
    found = []
    for row in rows.drop_nulls(["limit", "reference_ms", "candidate_ms"]).iter_rows(named=True):
        flops, moved, peak, bandwidth = (
            row[name] for name in ("flops", "bytes_min", "peak_flops", "peak_bytes_per_s")
        )
        point = ProfilePoint(
            limit=row["limit"],
            speedup=row["reference_ms"] / row["candidate_ms"],
            sol_score=row["sol_score"],
            intensity=flops / moved if flops and moved else None,
            reached=row["speed_of_light"],
            ridge=peak / bandwidth if peak and bandwidth else None,
        )
        found.append(point)
    return tuple(sorted(found, key=lambda point: (point.limit, -point.speedup)))
