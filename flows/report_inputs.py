"""What a report needs beside the scores: groups of the suite's tasks, how outputs and training
traces read, what the training set holds.

Guarantees: thirds by reasoning length are never of the model that is scored by them; texts are read
a batch at a time; what a snapshot does not hold is left out. Does not guarantee that a group of few
tasks says anything: the report has the intervals.
"""

from __future__ import annotations

import statistics
from collections import Counter
from contextlib import closing
from typing import TYPE_CHECKING, Any

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
from tasks.benchmark.stage import Answers
from tasks.curation.config import QualityConfig
from tasks.curation.flags import flagged
from tasks.store.snapshot import Snapshot, SnapshotRef

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    import polars as pl

    from flows.benchmark import Benchmarked

FEWEST_OF_THIRDS = 9  # tasks with a length: fewer would be thirds of one or two
LENGTHS_OF = ("recorded", "base")
"""Whose reasoning makes the thirds, the first that there is: a generator that is not trained here,
then the model before training."""


def breakdowns(
    benchmarked: Benchmarked, answers: pl.DataFrame, *, ks: Sequence[int], resamples: int
) -> tuple[list[GroupRow], str]:
    """Scores by level (where there are several), kind and family of operator, and third of
    reasoning length; whose lengths these are."""
    suite = benchmarked.suite.open().read(columns=["task_id", "level"], unique="task_id")
    groups: dict[By, Groups] = {}
    if suite["level"].n_unique() > 1:
        groups["level"] = level_groups(suite)
    if benchmarked.workloads:
        columns = ["task_id", "operator_kind", "families"]
        groups |= operator_groups(
            benchmarked.workloads.open().read(columns=columns, unique="task_id")
        )
    rows = score_groups(answers, groups, ks=ks, resamples=resamples)
    whose, thirds = thirds_of(benchmarked.answers)
    others = answers.filter(answers["model"] != whose)
    if not thirds or others.is_empty():
        return rows, ""
    return rows + score_groups(others, {"arl_third": thirds}, ks=ks, resamples=resamples), whose


def thirds_of(answers: Sequence[Answers]) -> tuple[str, dict[str, list[str]]]:
    """The model whose reasoning is measured, and the thirds of the tasks by it. Empty where no such
    model has lengths of enough tasks."""
    for name in LENGTHS_OF:
        for each in (found for found in answers if found.model == name):
            rows = each.candidates.open().read(
                columns=["candidate_id", "task_id", "reasoning_tokens"], unique="candidate_id"
            )
            known = (
                rows.drop_nulls("reasoning_tokens")
                if "reasoning_tokens" in rows.columns
                else rows.clear()
            )
            if known.height and known["task_id"].n_unique() >= FEWEST_OF_THIRDS:
                return name, arl_groups(known)
    return "", {}


def traces_of(candidates: SnapshotRef, config: QualityConfig) -> Traces:
    """How a model's outputs read: flags of its reasoning, of the whole response where it shows
    none, and the median length in tokens."""
    snapshot = candidates.open()
    places = snapshot.index(["candidate_id"]).unique(
        "candidate_id", keep="first", maintain_order=True
    )
    flags: Counter[str] = Counter()
    lengths: list[int] = []

    def texts() -> Iterator[tuple[str, str]]:
        for row in snapshot.rows_of(
            places,
            ["candidate_id", "reasoning", "response", "reasoning_tokens", "completion_tokens"],
        ):
            length = (
                row["reasoning_tokens"]
                if row["completion_tokens"] is None
                else row["completion_tokens"]
            )
            if length is not None:
                lengths.append(length)
            yield row["candidate_id"], row["reasoning"] or row["response"] or ""

    with closing(flagged(texts(), config)) as batches:
        for batch in batches:
            flags.update(flag for row in batch["trace_flags"] for flag in row)
    counted = {name: flags[name] for name in BAD_TRACES}
    return Traces(
        samples=places.height,
        flagged=counted,
        median_tokens=statistics.median(lengths) if lengths else None,
    )


def training_traces(curated: Snapshot) -> Traces | None:
    """How the training set's own traces read, by the counts that curation left. None where none
    were measured."""
    manifest = curated.manifest
    counts: dict[str, Any] | None = manifest.get("trace_flags")
    if not counts:
        return None
    lengths = curated.read(columns=["reasoning_tokens"])["reasoning_tokens"].drop_nulls()
    taken = {name: counts["taken"].get(name, 0) for name in BAD_TRACES}
    return Traces(
        samples=manifest["rows"],
        flagged=taken,
        median_tokens=statistics.median(lengths) if len(lengths) else None,
    )


def single_operators(curated: Snapshot) -> tuple[int, int] | None:
    """Samples of the training set on single operators, and all whose kind is known. None where none
    is."""
    if not curated.has_column("operator_kind"):
        return None
    kinds = curated.read(columns=["candidate_id", "operator_kind"], unique="candidate_id")[
        "operator_kind"
    ].drop_nulls()
    return (int((kinds == "single_operator").sum()), len(kinds)) if len(kinds) else None
