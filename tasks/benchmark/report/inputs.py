"""What a report needs beside the scores, read from snapshots: groups of the suite's tasks, how
outputs and training traces read, what the training set holds.

Guarantees: thirds by reasoning length are never of the model that is scored by them; texts are read
a batch at a time; what a snapshot does not hold is left out. Does not guarantee that a group of few
tasks says anything: the report has the intervals.
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import polars as pl

from kernels_eval.records import Row
from tasks.benchmark.breakdown import (
    By,
    GroupRow,
    Groups,
    arl_groups,
    level_groups,
    operator_groups,
    score_groups,
)
from tasks.benchmark.diagnosis import BAD_TRACES, Traces
from tasks.benchmark.report.records import TrainingStep
from tasks.benchmark.samples import remarks
from tasks.benchmark.stage import Answers
from tasks.store import Snapshot, SnapshotRef

FEWEST_OF_THIRDS = 9  # tasks with a length: fewer would be thirds of one or two
LENGTHS_OF = ("recorded", "base")
"""Whose reasoning makes the thirds, the first that there is: a generator that is not trained here,
then the model before training."""
TEXTS = ("candidate_id", "reasoning", "response", "reasoning_tokens", "completion_tokens")
Flagger = Callable[[Iterator[tuple[str, str]]], Iterable[pl.DataFrame]]
"""From (candidate_id, text) to frames with a column `trace_flags`."""


def breakdowns(
    suite: SnapshotRef,
    workloads: SnapshotRef | None,
    answers: Sequence[Answers],
    frame: pl.DataFrame,
    *,
    ks: Sequence[int],
    resamples: int,
) -> tuple[list[GroupRow], str]:
    """Return scores of groups of tasks, and whose reasoning lengths made the thirds.

    Groups are levels (where there are several), kinds and families of operators, and thirds by
    reasoning length. `frame` holds the verdicts of `answers`.
    """
    tasks = suite.open().read(columns=["task_id", "level"], unique="task_id")
    groups: dict[By, Groups] = {}
    if tasks["level"].n_unique() > 1:
        groups["level"] = level_groups(tasks)
    if workloads:
        columns = ["task_id", "operator_kind", "families"]
        groups |= operator_groups(workloads.open().read(columns=columns, unique="task_id"))
    rows = score_groups(frame, groups, ks=ks, resamples=resamples)
    whose, thirds = thirds_of(answers)
    others = frame.filter(frame["model"] != whose)
    if not thirds or others.is_empty():
        return rows, ""
    return rows + score_groups(others, {"arl_third": thirds}, ks=ks, resamples=resamples), whose


def thirds_of(answers: Sequence[Answers]) -> tuple[str, dict[str, list[str]]]:
    """Return the model whose reasoning is measured, and the thirds of the tasks by it.

    Empty where no such model has lengths of enough tasks.
    """
    columns = ["candidate_id", "task_id", "reasoning_tokens"]
    candidates = {each.model: each.candidates for each in answers}
    for model in filter(candidates.__contains__, LENGTHS_OF):
        rows = candidates[model].open().read(columns=columns, unique="candidate_id")
        if "reasoning_tokens" in rows.columns:
            known = rows.drop_nulls("reasoning_tokens")
            if known["task_id"].n_unique() >= FEWEST_OF_THIRDS:
                return model, arl_groups(known)
    return "", {}


def traces_of(candidates: SnapshotRef, flagged: Flagger) -> Traces:
    """Return how a model's outputs read: flags of its reasoning, and the median length in tokens.

    Where a candidate shows no reasoning, the whole response counts.
    """
    snapshot = candidates.open()
    places = snapshot.index(["candidate_id"]).unique(
        "candidate_id", keep="first", maintain_order=True
    )
    flags: Counter[str] = Counter()
    lengths: list[int] = []

    def texts() -> Iterator[tuple[str, str]]:
        for row in snapshot.rows_of(places, TEXTS):
            completion = row["completion_tokens"]
            length = row["reasoning_tokens"] if completion is None else completion
            lengths.extend([] if length is None else [length])
            yield row["candidate_id"], row["reasoning"] or row["response"] or ""

    for batch in flagged(texts()):
        flags.update(flag for row in batch["trace_flags"] for flag in row)
    return Traces(
        samples=places.height,
        flagged={name: flags[name] for name in BAD_TRACES},
        median_tokens=statistics.median(lengths) if lengths else None,
    )


def training_traces(curated: Snapshot) -> Traces | None:
    """Return how the training set's own traces read, by the counts that curation left, or None."""
    counts: Row | None = curated.manifest.get("trace_flags")
    if not counts:
        return None
    lengths = curated.read(columns=["reasoning_tokens"])["reasoning_tokens"].drop_nulls()
    return Traces(
        samples=curated.manifest["rows"],
        flagged={name: counts["taken"].get(name, 0) for name in BAD_TRACES},
        median_tokens=statistics.median(lengths) if len(lengths) else None,
    )


def trace_flags(curated: Snapshot) -> dict[str, tuple[int, int]]:
    """Return flag -> correct samples with it, and how many of these became training data."""
    counts = curated.manifest.get("trace_flags") or {"correct": {}}
    return {name: (count, counts["taken"][name]) for name, count in counts["correct"].items()}


def single_operators(curated: Snapshot) -> tuple[int, int] | None:
    """Return the training set's samples on single operators, and all whose kind is known."""
    if not curated.has_column("operator_kind"):
        return None
    columns = ["candidate_id", "operator_kind"]
    kinds = curated.read(columns=columns, unique="candidate_id")["operator_kind"].drop_nulls()
    return (int((kinds == "single_operator").sum()), len(kinds)) if len(kinds) else None


def training_steps(training: Snapshot) -> tuple[TrainingStep, ...]:
    """Return the log's optimiser steps in order; what was measured before the first is none."""
    rows = training.read(unique="step").sort("step").iter_rows(named=True)
    return tuple(
        TrainingStep.model_validate({name: row.get(name) for name in TrainingStep.model_fields})
        for row in rows
        if row["step"]
    )


def with_code(frame: pl.DataFrame, answers: Sequence[Answers]) -> pl.DataFrame:
    """Return the verdicts of `answers` with the code that was verified."""
    code = pl.concat(
        each.candidates.open().read(columns=["candidate_id", "code"], unique="candidate_id")
        for each in answers
    ).unique("candidate_id", keep="first")
    return frame.join(code, on="candidate_id", how="left", maintain_order="left")


def notes_on(training: Row, frame: pl.DataFrame) -> Iterator[str]:
    """Return what was left out of training (its manifest) and of the benchmark."""
    if dropped := training.get("dropped"):
        yield f"{len(dropped)} curated rows could not be trained on and were left out."
    yield from remarks(frame).values()
