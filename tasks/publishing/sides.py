"""One side of a comparison: a curated set, and as much as is there of the tasks, candidates and
verdicts that it was taken from.

Guarantees: what is not known is None, and never guessed; two sides that were made from one snapshot
share what only one of them can read. Memory holds numbers and ids of every candidate (about 1 kB
each), and no texts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import UsageError
from tasks.publishing.lineage import (
    CURATION,
    SYNTHESIS,
    TASKS,
    VERIFICATION,
    Lineage,
    batches,
    facts,
    lineage,
    readable,
    select,
)
from tasks.publishing.publish import PUBLICATION, is_whole, read_publication
from tasks.store.snapshot import Snapshot, SnapshotRef

if TYPE_CHECKING:
    import polars as pl

ROW = (
    "candidate_id",
    "task_id",
    "criterion",
    "operator_kind",
    "generator",
    "reasoning_tokens",
    "speedup",
    "speedup_lower",
)
ROW_REQUIRED = ("candidate_id", "task_id", "criterion")


@dataclass(frozen=True)
class Row:
    """A row of a curated set. Speedups are ratios; one that is not above 0 or no number is None."""

    candidate_id: str
    task_id: str
    criterion: str
    program: int
    operator_kind: str | None = None
    generator: str | None = None
    reasoning_tokens: int | None = None
    speedup: float | None = None
    speedup_lower: float | None = None


@dataclass(frozen=True)
class Verdict:
    """What verification said of a candidate, in short."""

    status: str
    reason: str | None
    speedup: float
    speedup_lower: float
    speedup_upper: float
    key: str | None


@dataclass
class Side:
    """A curated set. `tasks`: a hash of each program by task_id; `candidates`: task_id, reasoning
    tokens, generator by candidate_id. `excluded`: flags of its trace that kept a correct sample
    out, by candidate_id, where any did.
    """

    label: str
    facts: dict[str, Any]
    rows: dict[str, Row]
    tasks: dict[str, int] | None = None
    candidates: dict[str, tuple[str, int | None, str]] | None = None
    verdicts: dict[str, Verdict] | None = None
    excluded: dict[str, str] = field(default_factory=dict)

    def config(self, stage: str) -> dict[str, Any] | None:
        told = self.facts.get(stage)
        return None if told is None else told.get("config") or {}

    def told(self, stage: str, name: str) -> Any:
        return (self.facts.get(stage) or {}).get(name)

    def correct_of(self, task_id: str) -> Iterator[tuple[str, int, Verdict]]:
        """The samples of a task that curation could have taken: candidate_id, reasoning tokens,
        verdict."""
        for name in self._by_task.get(task_id, ()):
            verdict, tokens = (self.verdicts or {}).get(name), (self.candidates or {})[name][1]
            if verdict and verdict.status == "correct" and tokens and name not in self.excluded:
                yield name, tokens, verdict

    def rows_of(self, task_id: str) -> list[Row]:
        """The rows of a task."""
        return self._rows_by_task.get(task_id, [])

    @cached_property
    def _by_task(self) -> dict[str, list[str]]:
        return _grouped(
            (task_id, name) for name, (task_id, _, _) in (self.candidates or {}).items()
        )

    @cached_property
    def _rows_by_task(self) -> dict[str, list[Row]]:
        return _grouped((row.task_id, row) for row in self.rows.values())


def _grouped(pairs: Iterable[tuple[str, Any]]) -> dict[str, list[Any]]:
    found: dict[str, list[Any]] = {}
    for key, value in pairs:
        found.setdefault(key, []).append(value)
    return found


def read_side(source: SnapshotRef | Path, root: str | None = None) -> Side:
    """A curated snapshot, or a published folder with what `root` still has of the snapshots it was
    made from.

    Raises UsageError for what is neither, unfinished, or damaged.
    """
    if isinstance(source, SnapshotRef):
        line = lineage(source)
        return _filled(
            Side(f"{CURATION}/{source.fingerprint}", facts(line), _rows_of(line.curated)), line
        )
    published = read_publication(source)
    if not is_whole(source, published):
        raise UsageError(
            f"files of {source} are missing or have changed",
            f"publish it again, or restore what {PUBLICATION} lists",
        )
    name = published.configs[0]
    rows: dict[str, Row] = {}
    for shard in published.shards:
        if shard.config == name:
            rows |= _rows_in(_batches_of(source / shard.path))
    side = Side(published.tag, published.facts[name], rows)
    if root is not None:
        known = Snapshot(root, CURATION, published.curated[name])
        if known.finished:
            return _filled(side, lineage(known.ref))
    return side


def share(old: Side, new: Side) -> None:
    """What was made from one snapshot is known of both where it is known of one."""
    for stage, name in ((TASKS, "tasks"), (SYNTHESIS, "candidates"), (VERIFICATION, "verdicts")):
        if (fingerprint := old.told(stage, "fingerprint")) and fingerprint == new.told(
            stage, "fingerprint"
        ):
            found = getattr(old, name) if getattr(old, name) is not None else getattr(new, name)
            setattr(old, name, found)
            setattr(new, name, found)


def _filled(side: Side, line: Lineage) -> Side:
    if line.tasks:
        side.tasks = {}
        for frame in batches(line.tasks, ["task_id", "code"]):
            _require(frame, line.tasks.path, {"task_id": "text", "code": "text"})
            side.tasks |= dict(zip(frame["task_id"], frame["code"].hash(0), strict=True))
    if line.candidates:
        found = select(
            line.candidates,
            ["candidate_id", "task_id", "reasoning_tokens", "generator"],
            "candidate_id",
        )
        _require(
            found,
            line.candidates.path,
            {"candidate_id": "text"},
            {"task_id": "text", "reasoning_tokens": "numbers"},
        )
        columns = [
            found[name] if name in found.columns else [None] * len(found)
            for name in ("task_id", "reasoning_tokens", "generator")
        ]
        side.candidates = dict(zip(found["candidate_id"], zip(*columns, strict=True), strict=True))
    if line.verdicts:
        names = ["candidate_id", "status", "reason", "timing", "verdict_key"]
        found = select(line.verdicts, names, "candidate_id")
        _require(
            found,
            line.verdicts.path,
            {"candidate_id": "text", "status": "text"},
            {"timing": "a struct"},
        )
        side.verdicts = {row["candidate_id"]: _verdict(row) for row in found.iter_rows(named=True)}
    if line.flags and (unwanted := set((side.config(CURATION) or {}).get("exclude_flags") or ())):
        for name, raised in select(
            line.flags, ["candidate_id", "trace_flags"], "candidate_id"
        ).iter_rows():
            if found_here := unwanted & set(raised):
                side.excluded[name] = ", ".join(sorted(found_here))
    return side


def _verdict(row: dict[str, Any]) -> Verdict:
    timing = row.get("timing") or {}
    speedups = (
        _ratio(timing.get(name)) or 0.0 for name in ("speedup", "speedup_lower", "speedup_upper")
    )
    return Verdict(row["status"], row.get("reason"), *speedups, row.get("verdict_key"))


def _rows_of(snapshot: Snapshot) -> dict[str, Row]:
    return _rows_in(batches(snapshot, [*ROW, "task_code"]))


def _batches_of(path: Path) -> Iterator[pl.DataFrame]:
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq

    with readable(str(path)), pq.ParquetFile(path) as file:
        names = [name for name in (*ROW, "task_code") if name in file.schema_arrow.names]
        for batch in file.iter_batches(1000, columns=names):
            yield pl.from_arrow(pa.Table.from_batches([batch]))


def _rows_in(frames: Iterator[pl.DataFrame]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for frame in frames:
        _require(
            frame,
            "a curated set",
            dict.fromkeys(ROW_REQUIRED, "text"),
            {"speedup": "numbers", "speedup_lower": "numbers"},
        )
        programs = frame["task_code"].hash(0) if "task_code" in frame.columns else [0] * len(frame)
        for row, program in zip(
            frame.select([name for name in ROW if name in frame.columns]).iter_rows(named=True),
            programs,
            strict=True,
        ):
            ratios = {
                name: _ratio(row[name]) for name in ("speedup", "speedup_lower") if name in row
            }
            rows.setdefault(row["candidate_id"], Row(program=program, **(row | ratios)))
    return rows


def _ratio(value: Any) -> float | None:
    """A speedup, where it is one: NaN is not even the same as itself, and would be a change of
    every row that has it."""
    return (
        float(value)
        if isinstance(value, int | float) and math.isfinite(value) and value > 0
        else None
    )


def _require(
    frame: pl.DataFrame,
    where: str,
    needed: Mapping[str, str],
    optional: Mapping[str, str] | None = None,
) -> None:
    """Are these columns there, of these kinds, and the needed ones without gaps? Raises UsageError
    where not."""
    import polars as pl

    fix = "run its stage again with this version"
    if missing := [name for name in needed if name not in frame.columns]:
        raise UsageError(f"{where} lacks the columns {', '.join(missing)}", fix)
    for name, kind in {**needed, **(optional or {})}.items():
        of = frame.schema.get(name, pl.Null())
        fits = {
            "text": isinstance(of, pl.String | pl.Categorical | pl.Enum),
            "numbers": of.is_numeric(),
            "a struct": isinstance(of, pl.Struct),
        }
        if of != pl.Null and not fits[kind]:
            raise UsageError(f"the column {name} of {where} is {of}, not {kind}", fix)
        if name in needed and frame[name].has_nulls():
            raise UsageError(f"{where} has rows without {name}", fix)
