"""What a report is made of, as plain data, and how verdicts become it.

Guarantees: a context can be written as JSON and read back; passwords inside URLs of the
configuration are masked on the way in; its size does not grow with the number of candidates.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Annotated

import polars as pl
from pydantic import AfterValidator, NonNegativeInt

from kernels_eval.records import Json, Reason, Record, Status
from tasks.benchmark.errors import ErrorGroup
from tasks.benchmark.signs import Sign
from tasks.reporting.findings import Finding
from tasks.reporting.text import masked, spread
from tasks.scores import nested

MAX_EXAMPLES = 8
MAX_POINTS = 1500
"""Of the figure of reasoning lengths."""
MAX_BARS = 30
"""Of the figure of speedups."""
TEXTS = ("candidate_id", "detail", "reasoning", "code", "reference")
TIMES = ("speedup", "speedup_lower", "speedup_upper", "reference_ms", "candidate_ms")


class TrainingStep(Record):
    """One row of the training log. `epoch` is how many are done after the step."""

    step: int
    epoch: float | None = None
    loss: float | None = None


class Lengths(Record):
    """Reasoning lengths of the candidates of one status, in tokens; `drawn` are at most MAX_POINTS
    of all statuses, sorted."""

    status: str
    candidates: int
    median: float
    drawn: tuple[int, ...]


class Example(Record):
    """One candidate: its verdict in words, its reasoning, its code and the reference's. Text of a
    stranger; nothing here is safe to run or to embed raw."""

    task_name: str
    generator: str = ""
    status: str
    reason: str
    speedup: float | None = None
    speedup_lower: float | None = None
    speedup_upper: float | None = None
    reference_ms: float | None = None
    candidate_ms: float | None = None
    reasoning_tokens: int | None = None
    candidate_id: str = ""
    detail: str = ""
    reasoning: str = ""
    code: str = ""
    reference: str = ""


class ReportContext(Record):
    """Everything a report says, as plain data.

    `status_counts` and `reason_counts` are over the candidates of the run (not of the benchmark).
    `trace_flags` maps a flag to the correct samples with it, and how many of these became training
    data. `scores` are rows of `benchmark.stage.all_scores`, `comparisons` of `paired_differences`,
    `groups` of `scores` with `by` (what was grouped by) and `group`; `arl_of` is the model by whose
    reasoning length the thirds of the tasks are, which is not scored by them. `findings` are the
    observations of reasoning length in sentences, `finding_rows` the numbers behind them,
    `findings_bounded_by` what bounds them. `timed` candidates have a speedup, `faster` ones are
    faster than PyTorch with 95 % confidence; `speedups` are at most MAX_BARS of them. `limits` has
    a row per limit of profiled candidates. `fingerprints` maps a stage to its snapshot.
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
    scores: tuple[Json, ...] = ()
    comparisons: tuple[Json, ...] = ()
    groups: tuple[Json, ...] = ()
    arl_of: str = ""
    signs: tuple[Sign, ...] = ()
    errors: tuple[ErrorGroup, ...] = ()
    findings: tuple[str, ...] = ()
    finding_rows: tuple[Finding, ...] = ()
    findings_bounded_by: tuple[str, ...] = ()
    lengths: tuple[Lengths, ...] = ()
    timed: NonNegativeInt = 0
    faster: NonNegativeInt = 0
    speedups: tuple[Json, ...] = ()
    limits: tuple[Json, ...] = ()
    examples: tuple[Example, ...] = ()
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
        compare. Without epochs in the log, the loss of the first and of the last step. None without
        a log."""
        logged = [(step.loss, step.epoch) for step in self.history if step.loss is not None]
        if not logged:
            return None
        by_epoch = [(loss, epoch) for loss, epoch in logged if epoch is not None]
        if len(by_epoch) < len(logged):
            return logged[0][0], logged[-1][0]
        end = by_epoch[-1][1]
        first = [loss for loss, epoch in by_epoch if epoch <= 1] or [by_epoch[0][0]]
        last = [loss for loss, epoch in by_epoch if epoch > end - 1]
        return statistics.fmean(first), statistics.fmean(last)


def lengths_of(frame: pl.DataFrame) -> tuple[Lengths, ...]:
    """Reasoning lengths by status from rows with `status` and `reasoning_tokens`; correct first,
    then by how many there are."""
    known = frame.drop_nulls("reasoning_tokens").group_by("status").agg("reasoning_tokens")
    groups = {status: sorted(values) for status, values in known.iter_rows()}
    total = sum(map(len, groups.values()))
    ordered = sorted(groups, key=lambda name: (name != Status.CORRECT, -len(groups[name]), name))
    return tuple(
        Lengths(
            status=status,
            candidates=len(groups[status]),
            median=statistics.median(groups[status]),
            drawn=tuple(spread(groups[status], max(2, MAX_POINTS * len(groups[status]) // total))),
        )
        for status in ordered
    )


def speedups_of(frame: pl.DataFrame, names: Mapping[str, str]) -> Json:
    """`timed`, `faster` and `speedups` of a context from verdicts joined with candidates; `names`
    maps task_id to a task's name."""
    rows = _timed(frame, names).filter(pl.col("speedup") > 0).sort("speedup", descending=True)
    columns = ["task_name", "generator", "speedup", "speedup_lower", "speedup_upper"]
    return {
        "timed": rows.height,
        "faster": rows.filter(pl.col("speedup_lower") > 1).height,
        "speedups": tuple(spread(rows.select(columns).to_dicts(), MAX_BARS)),
    }


def example_rows(frame: pl.DataFrame, names: Mapping[str, str]) -> pl.DataFrame:
    """The fastest correct candidate, then the first of every other reason, at most MAX_EXAMPLES,
    with the name of their task and their times.

    The commonest reason comes first. `names` maps task_id to a task's name.
    """
    order = pl.col("reason") != Reason.OK.value
    fastest = pl.col("speedup").fill_null(0.0).arg_max()
    return (
        _timed(frame, names)
        .sort("candidate_id")
        .group_by("reason", maintain_order=True)
        .agg(pl.all().get(fastest), count=pl.len())
        .sort(order, -pl.col("count").cast(pl.Int64), "reason")
        .head(MAX_EXAMPLES)
    )


def examples_of(rows: pl.DataFrame) -> tuple[Example, ...]:
    """`example_rows` with their texts, those of `TEXTS` that are there."""
    found = []
    for row in rows.iter_rows(named=True):
        known = {name: value for name, value in row.items() if name in Example.model_fields}
        found.append(Example(**known | {name: row.get(name) or "" for name in TEXTS}))
    return tuple(found)


def _timed(frame: pl.DataFrame, names: Mapping[str, str]) -> pl.DataFrame:
    """The frame with the name of each task, and its times as columns; what is no number is null."""
    times = {name: nested(frame, "timing", name).cast(pl.Float64) for name in TIMES}
    known = {name: pl.when(value.is_finite()).then(value) for name, value in times.items()}
    generator = pl.col("generator") if "generator" in frame.columns else pl.lit("")
    return frame.with_columns(
        task_name=pl.col("task_id").replace(names),
        generator=generator.fill_null(""),
        **known,
    )


def limits_of(profiles: pl.DataFrame) -> tuple[Json, ...]:
    """What limits profiled candidates, from rows of tasks.tables.KERNEL_PROFILES: limit,
    candidates, median speedup and median SOL score."""
    rows = profiles.drop_nulls(["limit", "reference_ms", "candidate_ms"])
    found = rows.group_by("limit").agg(
        candidates=pl.len(),
        speedup=(pl.col("reference_ms") / pl.col("candidate_ms")).median(),
        sol_score=pl.col("sol_score").median(),
    )
    return tuple(found.sort("limit").to_dicts())
