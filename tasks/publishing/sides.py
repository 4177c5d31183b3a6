"""One side of a comparison: a curated set, and as much as is there of the tasks, candidates and
verdicts that it was taken from.

Guarantees: what is not known is None, and never guessed; two sides that were made from one snapshot
share what only one of them can read. Memory holds numbers and ids of every candidate (about 1 kB
each), and no texts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import polars as pl
import pyarrow.parquet as pq

from kernels_eval.errors import UsageError
from tasks.publishing.config import PUBLICATION
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
from tasks.publishing.publish import is_whole, read_publication
from tasks.store import Snapshot, SnapshotRef

BATCH_ROWS = 1000
COLUMNS = (
    *("candidate_id", "task_id", "criterion", "operator_kind"),
    *("generator", "reasoning_tokens", "speedup", "speedup_lower"),
)


class Row(NamedTuple):
    """A row of a curated set; `program` is a hash. Speedups are ratios; one that is not above 0 or
    no number is None."""

    candidate_id: str
    task_id: str
    criterion: str
    program: int
    operator_kind: str | None = None
    generator: str | None = None
    reasoning_tokens: int | None = None
    speedup: float | None = None
    speedup_lower: float | None = None


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
    facts: dict[str, Any]
    rows: dict[str, Row]
    tasks: dict[str, int] | None = None
    candidates: dict[str, Sample] | None = None
    verdicts: dict[str, Judged] | None = None
    excluded: dict[str, str] = field(default_factory=dict)

    def config(self, stage: str) -> dict[str, Any] | None:
        """The published settings of a stage, None where the stage is not known."""
        found = self.facts.get(stage)
        return None if found is None else found.get("config") or {}

    def fact(self, stage: str, name: str) -> Any:
        """One fact of a stage, None where it is not known."""
        return (self.facts.get(stage) or {}).get(name)

    def verdict(self, candidate_id: str) -> Judged | None:
        return (self.verdicts or {}).get(candidate_id)

    def correct_of(self, task_id: str) -> Iterator[tuple[str, int, Judged]]:
        """The samples of a task that curation could have taken: candidate_id, reasoning tokens,
        verdict."""
        for name, tokens in self._samples_by_task.get(task_id, ()):
            verdict = self.verdict(name)
            if verdict and verdict.status == "correct" and tokens and name not in self.excluded:
                yield name, tokens, verdict

    @cached_property
    def rows_by_task(self) -> dict[str, dict[str, Row]]:
        """The rows by task_id, then by candidate_id."""
        found: dict[str, dict[str, Row]] = defaultdict(dict)
        for name, row in self.rows.items():
            found[row.task_id][name] = row
        return found

    @cached_property
    def _samples_by_task(self) -> dict[str | None, list[tuple[str, int | None]]]:
        found = defaultdict(list)
        for name, sample in (self.candidates or {}).items():
            found[sample.task_id].append((name, sample.reasoning_tokens))
        return found


def read_side(source: SnapshotRef | Path, root: str | None = None) -> Side:
    """A curated snapshot, or a published folder with what `root` still has of the snapshots it was
    made from.

    Raises UsageError for what is neither, unfinished, or damaged.
    """
    if isinstance(source, SnapshotRef):
        line = lineage(source)
        rows = _rows_of(batches(line.curated, [*COLUMNS, "task_code"]))
        return _filled(Side(f"{CURATION}/{source.fingerprint}", facts(line), rows), line)
    published = read_publication(source)
    if not is_whole(source, published):
        raise UsageError(
            f"files of {source} are missing or have changed",
            f"publish it again, or restore what {PUBLICATION} lists",
        )
    name = published.configs[0]
    shards = [source / shard.path for shard in published.shards if shard.config == name]
    side = Side(published.tag, published.facts[name], _rows_of(_batches_of(shards)))
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
        for frame in batches(line.tasks, ["task_id", "code"]):
            _require(frame, line.tasks.path, needed={"task_id": "text", "code": "text"})
            side.tasks |= zip(frame["task_id"], frame["code"].hash(0), strict=True)
    if line.candidates:
        found = _selected(
            line.candidates,
            needed={"candidate_id": "text"},
            optional={"task_id": "text", "reasoning_tokens": "numbers", "generator": ""},
        )
        side.candidates = {name: Sample(*values) for name, *values in found.iter_rows()}
    if line.verdicts:
        found = _selected(
            line.verdicts,
            needed={"candidate_id": "text", "status": "text"},
            optional={"reason": "", "timing": "a struct", "verdict_key": ""},
        )
        side.verdicts = {}
        for name, status, reason, timing, key in found.iter_rows():
            names = ("speedup", "speedup_lower", "speedup_upper")
            ratios = (_ratio((timing or {}).get(each)) or 0.0 for each in names)
            side.verdicts[name] = Judged(status, reason, key, *ratios)
    excluded = set((side.config(CURATION) or {}).get("exclude_flags") or ())
    if line.flags and excluded:
        flags = select(line.flags, ["candidate_id", "trace_flags"], "candidate_id")
        for name, raised in flags.iter_rows():
            if unwanted := excluded & set(raised):
                side.excluded[name] = ", ".join(sorted(unwanted))
    return side


def _selected(
    snapshot: Snapshot, needed: Mapping[str, str], optional: Mapping[str, str]
) -> pl.DataFrame:
    """These columns of every candidate, in this order; null where the snapshot lacks one."""
    columns = [*needed, *optional]
    found = select(snapshot, columns, "candidate_id")
    _require(found, snapshot.path, needed, optional)
    absent = {name: pl.lit(None) for name in columns if name not in found.columns}
    return found.with_columns(**absent).select(columns)


def _batches_of(paths: Iterable[Path]) -> Iterator[pl.DataFrame]:
    for path in paths:
        with readable(str(path)), pq.ParquetFile(path) as file:
            there = [name for name in (*COLUMNS, "task_code") if name in file.schema_arrow.names]
            for batch in file.iter_batches(BATCH_ROWS, columns=there):
                yield pl.DataFrame(batch)


def _rows_of(frames: Iterable[pl.DataFrame]) -> dict[str, Row]:
    rows: dict[str, Row] = {}
    for frame in frames:
        _require(
            frame,
            "a curated set",
            needed=dict.fromkeys(("candidate_id", "task_id", "criterion"), "text"),
            optional={"speedup": "numbers", "speedup_lower": "numbers"},
        )
        programs = frame["task_code"].hash(0) if "task_code" in frame.columns else [0] * len(frame)
        present = frame.select(name for name in COLUMNS if name in frame.columns)
        for values, program in zip(present.iter_rows(named=True), programs, strict=True):
            for name in ("speedup", "speedup_lower"):
                values[name] = _ratio(values.get(name))
            rows.setdefault(values["candidate_id"], Row(program=program, **values))
    return rows


def _ratio(value: Any) -> float | None:
    """A speedup, where it is one: NaN is not even the same as itself, and would be a change of
    every row that has it."""
    usable = isinstance(value, int | float) and math.isfinite(value) and value > 0
    return float(value) if usable else None


def _require(
    frame: pl.DataFrame,
    where: str,
    needed: Mapping[str, str],
    optional: Mapping[str, str] | None = None,
) -> None:
    """Raises UsageError where columns are missing, of another kind ("" for any), or where needed
    ones have gaps."""
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
        if of != pl.Null and not fits.get(kind, True):
            raise UsageError(f"the column {name} of {where} is {of}, not {kind}", fix)
        if name in needed and frame[name].has_nulls():
            raise UsageError(f"{where} has rows without {name}", fix)
