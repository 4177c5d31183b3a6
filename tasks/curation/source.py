"""Verdicts and candidates from a root's finished snapshots or from Parquet files. Only requested
columns are read, null where missing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from kernels_eval.errors import UsageError
from kernels_eval.written import json_of
from tasks.curation.flags import flagged
from tasks.curation.tables import (
    READ,
    curated_rows,
    joined_on_candidate,
    named_tasks,
    places_of,
    texts_of,
    with_flags,
    with_operators,
    with_profiles,
)
from tasks.files import explain_read_errors
from tasks.sources.files import kind_of, shown
from tasks.sources.tables import part_files
from tasks.store.lookup import newest_first
from tasks.store.snapshot import Snapshot
from tasks.tables import CORRECT, TASK_ERROR, completed
from tasks.typed import typed

GIVE = "give a Parquet file, or the directory of a snapshot"


class Files(Snapshot):
    """Parquet files read as a snapshot's parts; `path` is their name in messages.

    Raises UsageError for unreadable files.
    """

    def __init__(self, path: str, files: Sequence[str]) -> None:
        super().__init__("/", "", "")
        self.path, self.files = path, files
        for part in map(Path, files):
            if (kind := kind_of(part)) not in ("", "Parquet"):
                made = "; `polars.read_ndjson(FILE).write_parquet(OUT)` makes one of JSON lines"
                fix = GIVE + made * (kind == "JSON")
                raise UsageError(f"cannot read {shown(part)}: it is {kind}", fix)

    def parts(self) -> list[str]:
        return list(self.files)

    def frames(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, pl.DataFrame]]:
        """As of a snapshot. A column takes precedence over a struct's field of its name."""
        with explain_read_errors(self.path, GIVE):
            names = {name for part in self.files for name in pq.read_schema(part).names}
            plain = [name for name in columns or names if name.partition(".")[2] not in names]
            for part, frame in super().frames(plain):
                yield part, typed(frame, part)

    def batches_at(
        self, part: str, rows: NDArray[Any], columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        with explain_read_errors(self.path, GIVE):
            for batch in super().batches_at(part, rows, columns):
                yield from typed(pl.DataFrame(batch), part).to_arrow().to_batches()


class Source:
    """Verdicts, their candidates (perhaps in the same files), and their tasks if a snapshot names
    them.

    `verdicts` defaults to those of the newest training set under `root`, else the newest finished;
    `candidates` to those beside the snapshot, or the same files. `unfinished` allows a directory
    without a manifest. Raises UsageError for a missing, remote, empty or unfinished place.
    """

    def __init__(
        self,
        verdicts: str | None,
        candidates: str | None,
        root: str,
        *,
        unfinished: bool = False,
    ) -> None:
        self.verdicts = _opened(verdicts, "--verdicts", unfinished) if verdicts else _latest(root)
        self.candidates = self.verdicts
        self.tasks: Snapshot | None = None
        if not isinstance(self.verdicts, Files):
            self.tasks = self.verdicts.above("training-tasks", "tasks")
            beside = self.verdicts.above("synthesis", "candidates", "improved")
            if not (beside or candidates):
                raise UsageError(
                    f"the candidates of {self.verdicts.path} are not beside it",
                    "name them with --candidates",
                )
            self.candidates = beside or self.verdicts
        if candidates:
            self.candidates = _opened(candidates, "--candidates", unfinished)

    def made_of(self, stage: str, *of: Snapshot | None) -> Snapshot | None:
        """A stage's newest finished snapshot made of all of these; what was made of screened
        verdicts counts for the confirmed ones, too."""
        wanted = [_names(each) for each in of if each and not isinstance(each, Files)]
        if isinstance(self.verdicts, Files) or len(wanted) < len(of):
            return None
        for each in newest_first(self.verdicts.root, stage):
            upstream = set(each.manifest["upstream"])
            if all(names & upstream for names in wanted):
                return each
        return None

    @property
    def one_table(self) -> bool:
        return self.candidates is self.verdicts

    def read(self, of_verdicts: Sequence[str], of_candidates: Sequence[str]) -> pl.DataFrame:
        """Columns that exist, one row per verdict with a candidate; shared ones are the verdict's.
        "column.field" reads a struct's field. Raises UsageError for unreadable files, separate
        tables without candidate_id, and verdicts without any candidate."""
        if self.one_table:
            both = list(dict.fromkeys((*of_verdicts, *of_candidates)))
            return typed(self.verdicts.read(columns=both), self.verdicts.path)
        left, right = (
            typed(_with_ids(where, where.read(columns=columns)), where.path).unique(
                "candidate_id", keep="first", maintain_order=True
            )
            for where, columns in ((self.verdicts, of_verdicts), (self.candidates, of_candidates))
        )
        kind = left["candidate_id"].dtype
        joined = joined_on_candidate(left, right.cast({"candidate_id": kind}, strict=False))
        if joined.is_empty():
            raise UsageError(
                f"no row of {self.verdicts.path} has its candidate in {self.candidates.path}",
                "give the candidates that were verified",
            )
        return joined

    def verdict_rows(
        self, of_verdicts: Sequence[str], of_candidates: Sequence[str], needed: Sequence[str]
    ) -> pl.DataFrame:
        """As `read`; raises UsageError also for a missing `needed` column or no rows."""
        frame = self.read(of_verdicts, of_candidates)
        fix = "give verdicts as verification or `concur verify-batch` wrote them"
        completed(frame, {}, needed, what=f"reading {self.verdicts.path}", fix=fix)
        if frame.is_empty():
            raise UsageError(
                f"{self.verdicts.path} has no row", "give the verdicts of a run that is finished"
            )
        return frame

    def deciding(self, *, flags: bool = False) -> pl.DataFrame:
        """The columns strategies decide by, without texts; `flags` adds flaws of correct samples'
        traces, reused or measured. Raises UsageError without candidate_id or rows."""
        frame = self.verdict_rows(READ, READ, ["candidate_id"])
        ids = pl.col("candidate_id")
        if "status" in frame.columns:
            right = CORRECT | TASK_ERROR  # the second judged nothing
            everywhere = right.all().over("candidate_id") & ids.is_not_null()
            frame = frame.with_columns(correct_on_every_gpu=everywhere)
        # of two verdicts on a candidate the first counts, correct or not
        frame = frame.filter(ids.is_null() | ids.is_first_distinct())
        frame = with_operators(frame, self.made_of("workloads", self.tasks))
        frame = with_profiles(frame, self.made_of("kernel-profiles", self.verdicts))
        if known := self.made_of("trace-flags", self.verdicts, self.candidates):
            return with_flags(frame, known)
        if flags and "trace_flags" not in frame.columns:
            return with_flags(frame, self._measured_flags(frame))
        return frame

    def _measured_flags(self, frame: pl.DataFrame) -> pl.DataFrame:
        wanted = frame.clear()
        if "status" in frame.columns:
            wanted = frame.filter(CORRECT)
        names = ["candidate_id", "reasoning"]
        rows = self.candidates.rows_of(places_of(self.candidates, wanted), names)
        texts = ((row[names[0]], row[names[1]]) for row in rows if len(row) == len(names))
        columns = ["candidate_id", "trace_flags"]
        found = [batch.select(columns) for batch in flagged(texts)]
        return pl.concat(found) if found else pl.DataFrame()

    def curated(self, taken: pl.DataFrame) -> pl.DataFrame:
        """tasks.tables.CURATED of the rows taken; missing columns are null."""
        named = named_tasks(self.tasks) if self.tasks else None
        return curated_rows(taken, texts_of(self.candidates, taken), named)


def _names(snapshot: Snapshot) -> set[str]:
    screened = snapshot.above("verification") if snapshot.stage == "verification" else None
    return {each.fingerprint for each in (snapshot, screened) if each}


def _with_ids(where: Snapshot, frame: pl.DataFrame) -> pl.DataFrame:
    if "candidate_id" not in frame.columns:
        raise UsageError(
            f"{where.path} has no column candidate_id",
            "give the tables that verification and synthesis wrote",
        )
    return frame


def _opened(location: str, option: str, unfinished: bool) -> Snapshot:
    if "://" in location:
        raise UsageError(f"{option} {location} is not a local path", "copy the snapshot here first")
    path = in_batch(Path(location).expanduser())
    whole = path.resolve()
    snapshot = Snapshot(str(whole.parent.parent), whole.parent.name, whole.name)
    if snapshot.finished:
        return snapshot
    if path.is_dir() and not unfinished:
        raise UsageError(
            f"{option} {location} is not a finished snapshot",
            "give its directory, which holds manifest.json, or a Parquet file",
        )
    return Files(location, [str(part) for part in part_files(path)])


def in_batch(path: Path) -> Path:
    """The verdicts of a folder of `concur verify-batch`: its snapshot, else its table; `path`
    itself where it is no such folder."""
    table = path / "verdicts.parquet"
    if not table.is_file():
        return path
    try:
        told = json_of((path / "summary.json").read_text(encoding="utf-8"))
        found = path / "snapshots/verification" / Path(told["snapshots"]["verdicts"]).name
    except (OSError, ValueError, KeyError, TypeError):
        return table
    return found if (found / "manifest.json").is_file() else table


def _latest(root: str) -> Snapshot:
    """Of the newest training set first: benchmarks write verdicts too."""
    for snapshot in newest_first(root, "curation"):
        if found := snapshot.above("verification"):
            return found
    if newest := newest_first(root, "verification"):
        return newest[0]
    raise UsageError(
        f"there is no finished verification snapshot under {root}",
        "name one with --verdicts, or another --root",
    )
