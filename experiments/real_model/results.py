"""What rounds of expert iteration gave: results.md, answers.md and rounds.json."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from itertools import combinations
from pathlib import Path

import polars as pl

from flows.config import PipelineConfig
from kernels_eval.errors import UsageError
from kernels_eval.records import Record, Row
from tasks.benchmark.comparing import paired_differences
from tasks.benchmark.shown import OWN_TRACK, differences_parts, pivoted
from tasks.benchmark.stage import Answers, answers_frame
from tasks.files import atomic_write
from tasks.reporting.page import markdown
from tasks.reporting.parts import Code, Part, Section, Table
from tasks.scores import EXEC, metric_name, scores
from tasks.store.snapshot import SnapshotRef
from tasks.tables import unconfirmed

GROUPS = {1: "published operators", 2: "generated programs"}
"""Held-out tasks, by their level."""
SHOWN = 10
"""Tasks whose answers are shown side by side."""
FAST = metric_name(1.0)
READ = ("candidate_id", "task_id", "status", "reason")
SCORED: dict[str, Callable[[Row], str]] = {
    "model": lambda row: str(row["model"]),
    "tasks": lambda row: str(row["tasks"]),
    "samples": lambda row: str(row["samples"]),
}


class Scored(Record):
    """A model's held-out answers, and how it came about: `samples` are the round's snapshots,
    `seconds` those of each stage, on a machine with so many `gpus`."""

    name: str
    suite: SnapshotRef
    answers: Answers
    samples: dict[str, SnapshotRef] = {}
    seconds: dict[str, float] = {}
    gpus: int = 0


def write_results(found: Sequence[Scored], config: PipelineConfig, out: Path) -> None:
    """Write the three files; of an earlier round nothing is lost where a later one fails.

    Raises UsageError where right answers were only screened: scores do not count those.
    """
    out.mkdir(parents=True, exist_ok=True)
    rows = [each.model_dump(mode="json") for each in found]
    atomic_write(out / "rounds.json", json.dumps(rows, indent=1))
    frame = answers_frame([each.answers for each in found]).join(
        found[0].suite.open().read(columns=["task_id", "level"], unique="task_id"),
        on="task_id",
        suffix="_of_task",
    )
    screened = frame.filter(unconfirmed(frame))
    if models := screened["model"].unique(maintain_order=True).to_list():
        raise UsageError(
            f"{screened.height} right answers of {', '.join(models)} were only screened",
            "confirm them first (flows.confirm.judged_answers does both)",
        )
    ks = (1, config.benchmark.samples_per_task)
    atomic_write(out / "results.md", markdown(*results_parts(frame, found, ks)))
    atomic_write(out / "answers.md", markdown(*answers_parts(found[0], found[-1])))


def results_parts(
    frame: pl.DataFrame, found: Sequence[Scored], ks: Sequence[int]
) -> Iterator[Part]:
    """Scores and paired differences of each group of tasks, verdicts by reason, and times."""
    for level, group in GROUPS.items():
        own = frame.filter(pl.col("level_of_task") == level)
        if own.is_empty():
            continue
        yield Section(group, tuple(scores_parts(own, [each.name for each in found], ks)))
    yield Section("Held-out answers by verdict", (verdicts_table(frame),))
    yield Section("Wall time, and GPU-seconds held, by stage", (times_table(found),))
    yield Section("Training answers", (samples_table(found),))


def scores_parts(frame: pl.DataFrame, names: Sequence[str], ks: Sequence[int]) -> Iterator[Part]:
    """A row of scores a model, and the differences of each two."""

    def wanted(rows: pl.DataFrame) -> list[Row]:
        chosen = (pl.col("metric") == EXEC) | ((pl.col("metric") == FAST) & (pl.col("k") == 1))
        return list(rows.filter(chosen).iter_rows(named=True))

    yield pivoted(SCORED, wanted(scores(frame, ks=ks, ps=(1.0,), track=OWN_TRACK)))
    if pairs := list(combinations(names, 2)):
        yield from differences_parts(
            wanted(paired_differences(frame, pairs=pairs, ks=ks, ps=(1.0,)))
        )


def verdicts_table(frame: pl.DataFrame) -> Table:
    """Held-out answers by status and reason, a column for each model."""
    names = frame["model"].unique(maintain_order=True).to_list()
    counted = frame.group_by("status", "reason", "model").len()
    table = counted.pivot("model", index=["status", "reason"], values="len").fill_null(0)
    rows = table.sort(pl.sum_horizontal(names), descending=True)
    texts = [[str(cell or "") for cell in row] for row in rows.select("status", "reason").rows()]
    numbers = [[str(cell) for cell in row] for row in rows.select(names).rows()]
    return Table(("status", "reason", *names), list(map(list.__add__, texts, numbers)), 2)


def times_table(found: Sequence[Scored]) -> Table:
    stages = dict.fromkeys(stage for each in found for stage in each.seconds)
    rows = [[stage, *(_time(each, stage) for each in found)] for stage in stages]
    return Table(("stage", *(each.name for each in found)), rows, 1)


def _time(scored: Scored, stage: str) -> str:
    seconds = scored.seconds.get(stage)
    return "" if seconds is None else f"{seconds:.0f} s, {seconds * scored.gpus:.0f}"


def samples_table(found: Sequence[Scored]) -> Table:
    """What each round had to train on."""
    rows = []
    for each in found:
        if not each.samples:
            continue
        verdicts = each.samples["verdicts"].open().read(columns=list(READ), unique=READ[0])
        correct = verdicts.filter(status="correct")
        counts = (
            *(verdicts["task_id"].n_unique(), verdicts.height, correct.height),
            *(correct["task_id"].n_unique(), each.samples["curated"].open().manifest["rows"]),
        )
        rows.append([each.name, *map(str, counts)])
    return Table(("round", "tasks", "answers", "correct", "tasks solved", "trained on"), rows, 1)


def answers_parts(before: Scored, after: Scored) -> Iterator[Part]:
    """The first answers to some tasks, before and after."""
    first, last = texts_of(before), texts_of(after)
    shared = sorted(first.keys() & last.keys())
    for task_id in shared[:: max(1, len(shared) // SHOWN)][:SHOWN]:
        answers = [(before.name, *first[task_id]), (after.name, *last[task_id])]
        parts = [
            part for name, verdict, text in answers for part in (f"{name}: {verdict}", Code(text))
        ]
        yield Section(task_id, tuple(parts))


def texts_of(scored: Scored) -> dict[str, tuple[str, str]]:
    """Verdict and text of the first answer to each task."""
    answers = scored.answers.candidates.open().read(
        columns=["candidate_id", "task_id", "sample_index", "response"], unique="candidate_id"
    )
    verdicts = scored.answers.verdicts.open().read(columns=list(READ), unique="candidate_id")
    rows = answers.filter(sample_index=0).join(verdicts.drop("task_id"), on="candidate_id")
    return {
        row["task_id"]: (f"{row['status']} {row['reason'] or ''}".strip(), row["response"])
        for row in rows.iter_rows(named=True)
    }
