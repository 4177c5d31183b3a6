"""One side of a comparison: a curated set, and as much as is there of the tasks, candidates and
verdicts that it was taken from.

Guarantees: what is not known is None, and never guessed; two sides that were made from one snapshot
share what only one of them can read. Memory holds numbers and ids of every candidate (about 1 kB
each), and no texts.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

import polars as pl
from polars import selectors

from kernels_eval.errors import UsageError
from kernels_eval.grouping import grouped
from kernels_eval.records import Json, Status
from tasks.publishing.config import PUBLICATION
from tasks.publishing.lineage import (
    CURATION,
    SYNTHESIS,
    TASKS,
    VERIFICATION,
    Lineage,
    facts,
    lineage,
    readable,
    require,
    select,
)
from tasks.publishing.publish import is_whole, read_publication
from tasks.store import Snapshot, SnapshotRef

ROWS = {"candidate_id": "text", "task_id": "text", "criterion": "text"}
MORE = {
    **{"operator_kind": "", "generator": "", "reasoning_tokens": ""},
    **{"speedup": "numbers", "speedup_lower": "numbers", "program": "numbers"},
}


class Row(NamedTuple):
    """A row of a curated set; `program` is a hash. Speedups are ratios; one that is not above 0 or
    no number is None."""

    candidate_id: str
    task_id: str
    criterion: str
    operator_kind: str | None
    generator: str | None
    reasoning_tokens: int | None
    speedup: float | None
    speedup_lower: float | None
    program: int | None


class Sample(NamedTuple):
    """A candidate, in short."""

    task_id: str | None
    reasoning_tokens: int | None
    generator: str | None


class Judged(NamedTuple):
    """What verification found of a candidate, in short. Speedups are ratios, 0 where there is
    none."""

    status: str
    reason: str | None
    key: str | None
    speedup: float
    speedup_lower: float
    speedup_upper: float


@dataclass
class Side:
    """A curated set. `tasks`: a hash of each program by task_id; `candidates` and `verdicts` by
    candidate_id. `excluded`: flags of its trace that kept a correct sample out, by candidate_id.
    """

    label: str
    facts: Json
    rows: dict[str, Row]
    tasks: dict[str, int] | None = None
    candidates: dict[str, Sample] | None = None
    verdicts: dict[str, Judged] | None = None
    excluded: dict[str, str] = field(default_factory=dict)

    def config(self, stage: str) -> Json | None:
        """The published settings of a stage, None where the stage is not known."""
        found = self.facts.get(stage)
        return None if found is None else found.get("config") or {}

    def fact(self, stage: str, name: str) -> object:
        """One fact of a stage, None where it is not known."""
        return (self.facts.get(stage) or {}).get(name)

    @cached_property
    def rows_by_task(self) -> dict[str, list[Row]]:
        return grouped((row.task_id, row) for row in self.rows.values())

    @cached_property
    def pool(self) -> dict[str | None, list[tuple[str, int, Judged]]]:
        """The samples that curation could have taken, by task_id: candidate_id, reasoning tokens,
        verdict."""
        found = defaultdict(list)
        for name, sample in (self.candidates or {}).items():
            verdict, tokens = (self.verdicts or {}).get(name), sample.reasoning_tokens
            correct = verdict and verdict.status == Status.CORRECT
            if verdict and correct and tokens and name not in self.excluded:
                found[sample.task_id].append((name, tokens, verdict))
        return found


def read_side(source: SnapshotRef | Path, root: str | None = None) -> Side:
    """A curated snapshot, or a published folder with what `root` still has of the snapshots it was
    made from.

    Raises UsageError for what is neither, unfinished, or damaged.
    """
    if isinstance(source, SnapshotRef):
        line = lineage(source)
        frames = (frame for _, frame in line.curated.frames([*ROWS, *MORE, "task_code"]))
        with readable(line.curated.path):
            rows = _rows_of(frames)
        return _filled(Side(f"{CURATION}/{source.fingerprint}", facts(line), rows), line)
    published = read_publication(source)
    if not is_whole(source, published):
        raise UsageError(
            f"files of {source} are missing or have changed",
            f"publish it again, or restore what {PUBLICATION} lists",
        )
    name = published.configs[0]
    with readable(str(source)):
        rows = _rows_of(
            pl.scan_parquet(source / shard.path)
            for shard in published.shards
            if shard.config == name
        )
    side = Side(published.tag, published.facts[name], rows)
    if root is not None:
        known = Snapshot(root, CURATION, published.curated[name])
        if known.finished:
            return _filled(side, lineage(known.ref))
    return side


def share(old: Side, new: Side) -> None:
    """What was made from one snapshot is known of both where it is known of one."""
    for stage, name in ((TASKS, "tasks"), (SYNTHESIS, "candidates"), (VERIFICATION, "verdicts")):
        fingerprint = old.fact(stage, "fingerprint")
        if fingerprint and fingerprint == new.fact(stage, "fingerprint"):
            known = getattr(old, name)
            known = getattr(new, name) if known is None else known
            setattr(old, name, known)
            setattr(new, name, known)


def _filled(side: Side, line: Lineage) -> Side:
    """The side with what the snapshots above it say."""
    if line.tasks:
        side.tasks = {}
        with readable(line.tasks.path):
            for _, frame in line.tasks.frames(["task_id", "code"]):
                require(frame, line.tasks.path, {"task_id": "text", "code": "text"})
                side.tasks |= zip(frame["task_id"], frame["code"].hash(0), strict=True)
    if line.candidates:
        texts = {"task_id": "text", "reasoning_tokens": "numbers", "generator": ""}
        found = _selected(line.candidates, {"candidate_id": "text"}, texts)
        side.candidates = {name: Sample(*values) for name, *values in found.iter_rows()}
    if line.verdicts:
        ratios = ("speedup", "speedup_lower", "speedup_upper")
        found = _selected(
            line.verdicts,
            {"candidate_id": "text", "status": "text"},
            {"reason": "", "verdict_key": "", **{f"timing.{name}": "" for name in ratios}},
        ).with_columns(_ratio(name).fill_null(0.0) for name in ratios)
        side.verdicts = {name: Judged(*values) for name, *values in found.iter_rows()}
    excluded = set((side.config(CURATION) or {}).get("exclude_flags") or ())
    if line.flags and excluded:
        flags = select(line.flags, ["trace_flags"], "candidate_id")
        for name, raised in flags.iter_rows():
            if unwanted := excluded & set(raised):
                side.excluded[name] = ", ".join(sorted(unwanted))
    return side


def _selected(
    snapshot: Snapshot, needed: Mapping[str, str], optional: Mapping[str, str]
) -> pl.DataFrame:
    """These columns of every candidate, in this order; null where the snapshot lacks one."""
    found = select(snapshot, [*needed, *optional], "candidate_id")
    optional = {name.rpartition(".")[2]: kind for name, kind in optional.items()}
    return _checked(found, snapshot.path, needed, optional)


def _checked(
    frame: pl.DataFrame, where: str, needed: Mapping[str, str], optional: Mapping[str, str]
) -> pl.DataFrame:
    require(frame, where, needed, optional)
    absent = {name: pl.lit(None) for name in optional if name not in frame.columns}
    return frame.with_columns(**absent).select(*needed, *optional)


def _rows_of(frames: Iterable[pl.DataFrame | pl.LazyFrame]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for each in frames:
        hashed = pl.col("^task_code$").hash(0).alias("program")
        known = selectors.by_name(*ROWS, *MORE, require_all=False)
        frame = each.lazy().select(known, hashed).collect(engine="streaming")
        ratios = [_ratio("speedup"), _ratio("speedup_lower")]
        found = _checked(frame, "a curated set", ROWS, MORE).with_columns(ratios)
        for values in found.iter_rows():
            rows.setdefault(values[0], Row(*values))
    return rows


def _ratio(name: str) -> pl.Expr:
    """A speedup, where it is one: NaN is not even the same as itself, and would be a change of
    every row that has it."""
    value = pl.col(name).cast(pl.Float64)
    return pl.when(value.is_finite() & (value > 0)).then(value).alias(name)
