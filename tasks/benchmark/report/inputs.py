"""A report's inputs beside scores: task groups, output and training traces, and training data.
Length thirds are never of the model they score."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence

import polars as pl

from kernels_eval.records import Row
from tasks.benchmark.groups import length_groups, level_groups, operator_groups
from tasks.benchmark.report.context import TrainingStep
from tasks.benchmark.signs import BAD_TRACES, Traces
from tasks.benchmark.stage import Answers
from tasks.scores import scores
from tasks.store import Snapshot, SnapshotRef

FEWEST_OF_THIRDS = 9
"""Tasks with a length: fewer would be thirds of one or two."""
LENGTHS_OF = ("recorded", "base")
"""Whose reasoning makes the thirds, the first that there is: a generator that is not trained here,
then the model before training."""
TEXTS = ("candidate_id", "reasoning", "response", "reasoning_tokens", "completion_tokens")
Flagger = Callable[[Iterator[tuple[str, str]]], Iterable[pl.DataFrame]]
"""From (candidate_id, text) to frames with a column `trace_flags`."""


def grouped_scores(
    suite: SnapshotRef,
    workloads: SnapshotRef | None,
    answers: Sequence[Answers],
    frame: pl.DataFrame,
    *,
    ks: Sequence[int],
) -> tuple[pl.DataFrame, str]:
    """Custom kernels' scores by task group (`by`, `group`), and whose reasoning lengths make the
    thirds. `frame` holds the verdicts of `answers`."""
    tasks = suite.open().read(columns=["task_id", "level"], unique="task_id")
    members = {}
    if tasks["level"].n_unique() > 1:
        members["level"] = level_groups(tasks)
    if workloads:
        columns = ["task_id", "operator_kind", "families"]
        members |= operator_groups(workloads.open().read(columns=columns, unique="task_id"))
    whose, thirds = thirds_of(answers)
    members["arl_third"] = thirds
    parts = []
    for by, groups in members.items():
        own = frame.filter(pl.col("model") != whose) if by == "arl_third" else frame
        joined = groups.join(own, on="task_id", maintain_order="left_right")
        if not joined.is_empty():
            rows = scores(joined, by=("group", "model"), ks=ks, resamples=0)
            parts.append(rows.select(pl.lit(by).alias("by"), pl.all()))
    scored = {part["by"][0] for part in parts}
    return pl.concat(parts) if parts else pl.DataFrame(), whose if "arl_third" in scored else ""


def thirds_of(answers: Sequence[Answers]) -> tuple[str, pl.DataFrame]:
    """The model whose reasoning is measured, and its thirds of the tasks (task_id, group).

    Empty without a model with enough lengths.
    """
    schema = {"candidate_id": pl.String, "task_id": pl.String, "reasoning_tokens": pl.Int64}
    candidates = {each.model: each.candidates for each in answers}
    for model in filter(candidates.__contains__, LENGTHS_OF):
        rows = candidates[model].open().read(columns=list(schema), unique="candidate_id")
        if "reasoning_tokens" in rows.columns:
            known = rows.drop_nulls("reasoning_tokens")
            if known["task_id"].n_unique() >= FEWEST_OF_THIRDS:
                return model, length_groups(known)
    return "", length_groups(pl.DataFrame(schema=schema))


def traces_of(candidates: SnapshotRef, flagged: Flagger) -> Traces:
    """A model's reasoning flags and median length in tokens.

    Without reasoning, the whole response counts.
    """
    snapshot = candidates.open()
    places = snapshot.index(["candidate_id"], unique=True)
    flags: Counter[str] = Counter()
    lengths: list[int] = []

    def texts() -> Iterator[tuple[str, str]]:
        for row in snapshot.rows_of(places, TEXTS):
            completion = row["completion_tokens"]
            length = row["reasoning_tokens"] if completion is None else completion
            if length is not None:
                lengths.append(length)
            yield row["candidate_id"], row["reasoning"] or row["response"] or ""

    for batch in flagged(texts()):
        flags.update(flag for row in batch["trace_flags"] for flag in row)
    return _traces(places.height, flags, lengths)


def training_traces(curated: Snapshot) -> Traces | None:
    counts: Row | None = curated.manifest.get("trace_flags")
    if not counts:
        return None
    lengths = curated.read(columns=["reasoning_tokens"])["reasoning_tokens"].drop_nulls()
    return _traces(curated.manifest["rows"], Counter(counts["taken"]), lengths.to_list())


def _traces(samples: int, flags: Counter[str], lengths: list[int]) -> Traces:
    median = pl.Series(lengths, dtype=pl.Int64).median()
    return Traces(
        samples=samples,
        flagged={name: flags[name] for name in BAD_TRACES},
        median_tokens=median if isinstance(median, float) else None,
    )


def trace_flags(curated: Snapshot) -> dict[str, tuple[int, int]]:
    """flag -> correct samples with it, and those that became training data."""
    counts = curated.manifest.get("trace_flags") or {"correct": {}}
    return {name: (count, counts["taken"][name]) for name, count in counts["correct"].items()}


def single_operators(curated: Snapshot) -> tuple[int, int] | None:
    if not curated.has_column("operator_kind"):
        return None
    columns = ["candidate_id", "operator_kind"]
    kinds = curated.read(columns=columns, unique="candidate_id")["operator_kind"].drop_nulls()
    return (int((kinds == "single_operator").sum()), len(kinds)) if len(kinds) else None


def training_steps(training: Snapshot) -> tuple[TrainingStep, ...]:
    rows = training.read(unique="step").sort("step").iter_rows(named=True)
    return tuple(
        TrainingStep.model_validate({name: row.get(name) for name in TrainingStep.model_fields})
        for row in rows
        if row["step"]
    )
