"""What an ablation will cost, before it starts. Pure but for reading manifests and the records of
earlier ablations.

Guarantees: every figure says what it rests on, a measurement under this root or a stated
assumption; what is finished costs nothing; trainings that branches share count once. Does not know:
how fast another model or another machine is than those that were measured, and how long answers are
before there are any. An estimate is for deciding whether to start, not a promise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from flows.ablation.records import earlier_records
from flows.config import PipelineConfig
from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.progress import duration
from tasks.store.snapshot import Snapshot, snapshots

# Of one H200 and a model of QwQ-32B's shape, with TRL, vLLM and our own verifier
# (docs/explanation/training-speed.md); far too dear for a small model, so that a first estimate
# errs on the side of refusing
TRAINED_TOKENS_PER_S = 1_800.0
SAMPLED_TOKENS_PER_S = 5_000.0
TOKENS_A_ROW = 8_000.0
VERIFIED_S = 2.0
START_S = 60.0
SHARE_OF_MAX_TOKENS = 0.5


class Figure(NamedTuple):
    """A number and what it rests on."""

    value: float
    basis: str


class Part(Record):
    """One kind of work of an ablation."""

    what: str
    count: int
    gpu_hours: float
    basis: str


class Estimate(Record):
    """Of the work that is left: `gpu_hours` of devices, `hours` of wall time at `parallel` branches
    at once."""

    branches: int
    trainings: int
    steps: int
    tokens: int
    gpu_hours: float
    hours: float
    parallel: int
    device: str
    parts: tuple[Part, ...]
    each_branch_s: float

    def lines(self) -> list[str]:
        """For a terminal and for markdown."""
        said = [
            f"{self.branches} branches, {self.trainings} trainings ({self.steps:,} steps,"
            f" {self.tokens:,} tokens): about {hours(self.gpu_hours)} of {self.device},"
            f" {duration(3600 * self.hours)} at {self.parallel} at once"
        ]
        return said + [
            f"  {part.what} ({part.count:,}): {hours(part.gpu_hours)}, {part.basis}"
            for part in self.parts
        ]


class Work(NamedTuple):
    """What is left to do. `rows` are those of each training; `known_rows` says whether they were
    counted or assumed."""

    branches: int
    rows: tuple[float, ...]
    rows_basis: str
    answered: int
    """Branches whose tuned model has still to answer the benchmark."""
    shared_answers: int
    """Answers of the base model and recorded ones that are still to be verified."""
    sampled_shared: int
    """Of these, those that a model of ours has still to write."""
    candidates: int
    """Candidates of the refresh that are still to be verified."""
    sampled: int
    """Of these, those that servers of ours have still to write."""
    suite: int
    """Tasks of the benchmark."""


def estimate(pipeline: PipelineConfig, work: Work, *, gpus: int, parallel: int) -> Estimate:
    """Device time of what is left. `gpus` 0 counts the CPU as the one device."""
    recipe, benchmark = pipeline.training, pipeline.benchmark
    a_row, per_s, start = (
        tokens_per_row(pipeline),
        trained_tokens_per_s(pipeline),
        branch_start_s(pipeline),
    )
    verified, sampled = verified_s(pipeline), sampled_tokens_per_s(pipeline)
    rows = sum(work.rows)
    tokens = rows * a_row.value * recipe.num_epochs
    steps = sum(math.ceil(each / recipe.rows_per_step) * recipe.num_epochs for each in work.rows)
    devices = recipe.workers if gpus else 1
    training_s = (tokens / per_s.value + len(work.rows) * start.value) * devices
    answers = work.suite * benchmark.samples_per_task
    per_answer = answer_s(pipeline, sampled, verified)
    benchmark_s = work.answered * answers * per_answer.value
    shared_s = work.shared_answers * verified.value + work.sampled_shared * max(
        0.0, per_answer.value - verified.value
    )
    refresh_s = work.candidates * verified.value + work.sampled * written_s(
        pipeline.synthesis.sampling.max_tokens, sampled
    )
    basis = f"{work.rows_basis}; {a_row.basis}; {per_s.basis}; {start.basis}"
    parts = [
        Part(
            what="candidates to write and verify",
            count=work.candidates,
            gpu_hours=refresh_s / 3600,
            basis=verified.basis,
        ),
        Part(what="trainings", count=len(work.rows), gpu_hours=training_s / 3600, basis=basis),
        Part(
            what="answers of tuned models",
            count=work.answered * answers,
            gpu_hours=benchmark_s / 3600,
            basis=per_answer.basis,
        ),
        Part(
            what="answers that all branches share",
            count=work.shared_answers,
            gpu_hours=shared_s / 3600,
            basis=verified.basis,
        ),
    ]
    branches_s = (training_s + benchmark_s) / devices
    wall_s = (refresh_s + shared_s) / max(1, gpus) + branches_s / max(
        1, min(parallel, work.branches or 1)
    )
    return Estimate(
        branches=work.branches,
        trainings=len(work.rows),
        steps=steps,
        tokens=round(tokens),
        gpu_hours=(refresh_s + training_s + benchmark_s + shared_s) / 3600,
        hours=wall_s / 3600,
        parallel=parallel,
        device=(
            f"{gpus} GPUs"
            if gpus > 1
            else "one GPU"
            if gpus
            else "the CPU, which counts as one GPU"
        ),
        parts=tuple(part for part in parts if part.count),
        each_branch_s=(training_s + benchmark_s) / max(1, work.branches),
    )


def require_within(found: Estimate, budget: float | None, spent: float = 0.0) -> None:
    """Raises UsageError where `spent` and what is estimated come to more GPU-hours than the budget;
    it says how to shrink the ablation."""
    if budget is None or spent + found.gpu_hours <= budget:
        return
    per_branch = found.each_branch_s / 3600
    shared = found.gpu_hours - per_branch * found.branches
    fit = int((budget - spent - shared) / per_branch) if per_branch else 0
    fits = f"about {fit} of {found.branches} branches fit" if fit > 0 else "not one branch fits"
    before = f", {hours(spent)} being spent already" if spent else ""
    raise UsageError(
        f"the ablation is estimated at {hours(found.gpu_hours)} and the budget is"
        f" {hours(budget)}{before}: {fits}",
        "take fewer strategies, sizes or seeds, lower sizes or training.num_epochs or"
        " benchmark.samples_per_task, or raise the budget (--max-gpu-hours); --estimate shows where"
        " the time goes",
    )


def hours(value: float) -> str:
    """GPU-hours for a person."""
    return (
        f"{value:,.1f} GPU-hours"
        if value >= 10
        else f"{value:.2f} GPU-hours"
        if value >= 0.1
        else f"{value:.4f} GPU-hours"
    )


# -- what figures rest on --------------------------------------------------------------------------


def _trainings(pipeline: PipelineConfig) -> list[dict[str, Any]]:
    """Manifests of finished trainings of this base model, without interrupted ones, which report
    their last share only."""
    found = (snapshot.manifest for snapshot in _finished(snapshots(pipeline.root, "training")))
    model = pipeline.training.base_model
    return [
        each
        for each in found
        if (each.get("config") or {}).get("base_model") == model
        and not each.get("resumed_from_step")
    ]


def _finished(found: Iterable[Snapshot]) -> list[Snapshot]:
    return [snapshot for snapshot in found if snapshot.finished]


def _measured(values: Sequence[float], what: Callable[[float], str], otherwise: Figure) -> Figure:
    known = [value for value in values if value > 0 and math.isfinite(value)]
    return (
        Figure(
            middle := statistics.median(known),
            f"{what(middle)}, measured ({len(known)} under this root)",
        )
        if known
        else otherwise
    )


def trained_tokens_per_s(pipeline: PipelineConfig) -> Figure:
    """Of one group of workers, loading of the model included."""
    rates = [
        each["tokens"] / each["seconds"] for each in _trainings(pipeline) if each.get("seconds")
    ]
    assumed = Figure(
        TRAINED_TOKENS_PER_S * pipeline.training.workers,
        f"{TRAINED_TOKENS_PER_S:,.0f} tokens a second and GPU, assumed",
    )
    return _measured(rates, lambda rate: f"{rate:,.0f} tokens a second trained on", assumed)


def tokens_per_row(pipeline: PipelineConfig) -> Figure:
    sizes = [
        each["tokens"] / each["rows"] / each["config"]["num_epochs"]
        for each in (
            {**manifest, "rows": _trained_rows(manifest)} for manifest in _trainings(pipeline)
        )
        if each["rows"]
    ]
    return _measured(
        sizes,
        lambda size: f"{size:,.0f} tokens a row",
        Figure(TOKENS_A_ROW, f"{TOKENS_A_ROW:,.0f} tokens a row, assumed"),
    )


def _trained_rows(manifest: dict[str, Any]) -> float:
    """Rows that a training saw in an epoch: its manifest's `rows` are those of the log, one a
    step."""
    return (
        manifest["rows"]
        / manifest["config"]["num_epochs"]
        * manifest["config"]["batch_size"]
        * manifest["config"]["gradient_accumulation"]
    )


def branch_start_s(pipeline: PipelineConfig) -> Figure:
    """Of a training beyond what its manifest counts: a worker process and its imports."""
    records = [
        each
        for each in earlier_records(pipeline.root)
        if each.base_model == pipeline.training.base_model
    ]
    starts = [
        each.phases_s["train"] - each.train_s
        for each in records
        if each.train_s and each.phases_s.get("train", 0) > each.train_s
    ]
    assumed = Figure(START_S, f"{START_S:.0f} s to start each, assumed")
    return _measured(starts, lambda seconds: f"{seconds:.0f} s to start each", assumed)


def verified_s(pipeline: PipelineConfig) -> Figure:
    """Seconds of a device for one verdict."""
    told = (snapshot.manifest for snapshot in _finished(snapshots(pipeline.root, "verification")))
    same = [
        each
        for each in told
        if each.get("language") == pipeline.language.value and each.get("telemetry")
    ]
    values = [float(each["telemetry"].get("device_s_per_candidate") or 0) for each in same]
    return _measured(
        values,
        lambda seconds: f"{seconds:.2f} s a verdict",
        Figure(VERIFIED_S, f"{VERIFIED_S:.0f} s of a device a verdict, assumed"),
    )


def sampled_tokens_per_s(pipeline: PipelineConfig) -> Figure:
    return Figure(
        SAMPLED_TOKENS_PER_S,
        f"{SAMPLED_TOKENS_PER_S:,.0f} tokens a second and GPU written, assumed",
    )


def written_s(max_tokens: int, rate: Figure) -> float:
    return SHARE_OF_MAX_TOKENS * max_tokens / rate.value


def answer_s(pipeline: PipelineConfig, sampled: Figure, verified: Figure) -> Figure:
    """Seconds of a device for one answer of a tuned model: writing and verifying it."""
    benchmark = pipeline.benchmark
    like = [
        each
        for each in earlier_records(pipeline.root)
        if each.base_model == pipeline.training.base_model
        and each.max_tokens == benchmark.sampling.max_tokens
        and each.answers
    ]
    seconds = [
        (each.phases_s.get("answer", 0.0) + each.phases_s.get("verify", 0.0)) / each.answers
        for each in like
    ]
    limit = benchmark.sampling.max_tokens
    assumed = Figure(
        written_s(limit, sampled) + verified.value,
        f"half of {limit:,} tokens an answer, {sampled.basis}; {verified.basis}",
    )
    return _measured(seconds, lambda value: f"{value:.2f} s an answer and its verdict", assumed)
