"""What an ablation will cost, before it starts. Reads manifests and the records of earlier
ablations; computes the rest. How fast answers are written follows from the memory for keys and
values and its bandwidth (tasks.synthesis.sizing).

Guarantees: every figure names its basis, a measurement under this root or a stated assumption; what
is finished costs nothing; trainings that branches share count once. Does not know how fast another
model or another machine is than those that were measured, nor how long answers are before there are
any. An estimate is for deciding whether to start, not a promise.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from flows.ablation.records import BranchRecord, earlier_records
from flows.config import PipelineConfig
from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record
from tasks.progress import duration, hours
from tasks.store import snapshots
from tasks.synthesis import sizing

# Of one H200 and a model of QwQ-32B's shape, with TRL and our own verifier
# (docs/explanation/training-speed.md). Far too high for a small model, so that a first estimate
# errs on the side of refusing.
TRAINED_TOKENS_PER_S = 1_800.0
TOKENS_A_ROW = 8_000.0
VERIFIED_S = 2.0
START_S = 60.0


class Figure(NamedTuple):
    """A number and its basis."""

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
        return [
            f"{self.branches} branches, {self.trainings} trainings ({self.steps:,} steps,"
            f" {self.tokens:,} tokens): about {hours(self.gpu_hours)} of {self.device},"
            f" {duration(3600 * self.hours)} at {self.parallel} at once",
            *(
                f"  {part.what} ({part.count:,}): {hours(part.gpu_hours)}, {part.basis}"
                for part in self.parts
            ),
        ]


class Work(NamedTuple):
    """What is left to do."""

    suite: int
    """Tasks of the benchmark."""
    shared_answers: int = 0
    """Answers of the base model and recorded ones that are still to be verified."""
    sampled_shared: int = 0
    """Of these, those that a model has still to write."""
    branches: int = 0
    rows: tuple[float, ...] = ()
    """Of each training."""
    rows_basis: str = ""
    answered: int = 0
    """Branches whose tuned model has still to answer the benchmark."""
    candidates: int = 0
    """Candidates of the refresh that are still to be verified."""
    sampled: int = 0
    """Of these, those that servers have still to write."""


def estimate(pipeline: PipelineConfig, work: Work, *, gpus: int, parallel: int) -> Estimate:
    """Device time of what is left. `gpus` 0 counts the CPU as the one device."""
    recipe = pipeline.training
    row, rate, start = trained_rates(pipeline)
    verified, answer = answer_rates(pipeline)
    synthesis = pipeline.synthesis
    written = written_s(pipeline, synthesis.model, synthesis.sampling.max_tokens)
    devices = recipe.workers if gpus else 1
    tokens = sum(work.rows) * row.value * recipe.num_epochs
    answers = work.answered * work.suite * pipeline.benchmark.samples_per_task
    training_s = (tokens / rate.value + len(work.rows) * start.value) * devices
    answers_s = answers * answer.value
    shared_s = work.shared_answers * verified.value
    shared_s += work.sampled_shared * max(0.0, answer.value - verified.value)
    refresh_s = work.candidates * verified.value
    refresh_s += work.sampled * written.value
    refresh_basis = "; ".join([verified.basis, *([written.basis] if work.sampled else [])])
    training_basis = f"{work.rows_basis}; {row.basis}; {rate.basis}; {start.basis}"
    parts = (
        ("candidates to write and verify", work.candidates, refresh_s, refresh_basis),
        ("trainings", len(work.rows), training_s, training_basis),
        ("answers of tuned models", answers, answers_s, answer.basis),
        ("answers that all branches share", work.shared_answers, shared_s, verified.basis),
    )
    at_once = max(1, min(parallel, work.branches or 1))
    branches_s = (training_s + answers_s) / devices / at_once
    epoch_steps = [math.ceil(rows / recipe.rows_per_step) for rows in work.rows]
    return Estimate(
        branches=work.branches,
        trainings=len(work.rows),
        steps=sum(epoch_steps) * recipe.num_epochs,
        tokens=round(tokens),
        gpu_hours=(refresh_s + training_s + answers_s + shared_s) / 3600,
        hours=((refresh_s + shared_s) / max(1, gpus) + branches_s) / 3600,
        parallel=parallel,
        device={0: "the CPU, which counts as one GPU", 1: "one GPU"}.get(gpus, f"{gpus} GPUs"),
        parts=tuple(
            Part(what=what, count=count, gpu_hours=seconds / 3600, basis=basis)
            for what, count, seconds, basis in parts
            if count
        ),
        each_branch_s=(training_s + answers_s) / max(1, work.branches),
    )


def require_within(found: Estimate, budget: float | None, spent: float = 0.0) -> None:
    """Raise UsageError where `spent` and the estimate are more GPU-hours than the budget. It says
    how to shrink the ablation."""
    if budget is None or spent + found.gpu_hours <= budget:
        return
    per_branch = found.each_branch_s / 3600
    shared = found.gpu_hours - per_branch * found.branches
    fit = int((budget - spent - shared) / per_branch) if per_branch else 0
    fits = f"about {fit} of {found.branches} branches fit" if fit > 0 else "no branch fits"
    before = f", of which {hours(spent)} are spent already" if spent else ""
    raise UsageError(
        f"the ablation is estimated at {hours(found.gpu_hours)} and the budget is"
        f" {hours(budget)}{before}: {fits}",
        "take fewer strategies, sizes or seeds, lower sizes or training.num_epochs or"
        " benchmark.samples_per_task, or raise the budget (--max-gpu-hours); --estimate shows where"
        " the time goes",
    )


def written_s(pipeline: PipelineConfig, model: str | None, max_tokens: int) -> Figure:
    """GPU-seconds to write one answer, computed for the servers of the configuration."""
    found, basis = sizing.expected(model, pipeline.synthesis.server, max_tokens)
    length = f"half of {max_tokens:,} tokens per answer, assumed"
    return Figure(found.gpu_s(sizing.ANSWER_SHARE * max_tokens), f"{length}; {basis}")


def trained_rates(pipeline: PipelineConfig) -> tuple[Figure, Figure, Figure]:
    """Of trainings under this root, else assumed: tokens of a row in one epoch; tokens per second
    of one group of workers, loading of the model included; seconds of a training beyond what its
    manifest counts (a worker process and its imports)."""
    recipe = pipeline.training
    # an interrupted training reports its last share only
    trainings = [
        manifest
        for manifest in _manifests(pipeline, "training")
        if (manifest.get("config") or {}).get("base_model") == recipe.base_model
        and not manifest.get("resumed_from_step")
    ]
    visited = [(manifest["tokens"], _row_visits(manifest)) for manifest in trainings]
    timed = [each for each in trainings if each.get("seconds")]
    return (
        _median(
            (tokens / rows for tokens, rows in visited if rows),
            "{:,.0f} tokens per row",
            TOKENS_A_ROW,
            f"{TOKENS_A_ROW:,.0f} tokens per row, assumed",
        ),
        _median(
            (each["tokens"] / each["seconds"] for each in timed),
            "{:,.0f} tokens per second trained on",
            TRAINED_TOKENS_PER_S * recipe.workers,
            f"{TRAINED_TOKENS_PER_S:,.0f} tokens per second and GPU, assumed",
        ),
        _median(
            (
                each.phases_s.get("train", 0.0) - each.train_s
                for each in _earlier(pipeline)
                if each.train_s
            ),
            "{:.0f} s to start each",
            START_S,
            f"{START_S:.0f} s to start each, assumed",
        ),
    )


def answer_rates(pipeline: PipelineConfig) -> tuple[Figure, Figure]:
    """Device seconds for one verdict; for one answer of a tuned model, written and verified."""
    limit = pipeline.benchmark.sampling.max_tokens
    verified = _median(
        (
            float(manifest["telemetry"].get("device_s_per_candidate") or 0)
            for manifest in _manifests(pipeline, "verification")
            if manifest.get("language") == pipeline.language.value and manifest.get("telemetry")
        ),
        "{:.2f} s per verdict",
        VERIFIED_S,
        f"{VERIFIED_S:.0f} s of a device per verdict, assumed",
    )
    written = written_s(pipeline, pipeline.training.base_model, limit)
    answer = _median(
        (
            (each.phases_s.get("answer", 0.0) + each.phases_s.get("verify", 0.0)) / each.answers
            for each in _earlier(pipeline)
            if each.max_tokens == limit and each.answers
        ),
        "{:.2f} s per answer and verdict",
        written.value + verified.value,
        f"{written.basis}; {verified.basis}",
    )
    return verified, answer


def _manifests(pipeline: PipelineConfig, stage: str) -> Iterable[Json]:
    return (each.manifest for each in snapshots(pipeline.root, stage) if each.finished)


def _earlier(pipeline: PipelineConfig) -> Iterator[BranchRecord]:
    model = pipeline.training.base_model
    return (each for each in earlier_records(pipeline.root) if each.base_model == model)


def _median(values: Iterable[float], text: str, assumed: float, assumption: str) -> Figure:
    """The median of what was measured, or the stated assumption where nothing was."""
    known = [value for value in values if value > 0 and math.isfinite(value)]
    if not known:
        return Figure(assumed, assumption)
    middle = statistics.median(known)
    return Figure(middle, f"{text.format(middle)}, measured ({len(known)} under this root)")


def _row_visits(manifest: Json) -> float:
    """How often a training saw a row: its manifest's `rows` are those of the log, one per step."""
    config = manifest["config"]
    return float(manifest["rows"] * config["batch_size"] * config["gradient_accumulation"])
