"""Where verdicts and their candidates are read from: finished snapshots of a root, or Parquet
files.

Guarantees: only the columns that are asked for leave the disk, a field of a struct without the
others; a column that some files lack is null in their rows; of two tables each candidate once, in
the order of the verdicts. Changes nothing. Does not guarantee anything about files that are being
written meanwhile. Paths that are named are local; a root need not be.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from glob import glob
from itertools import groupby
from pathlib import Path
from typing import NamedTuple

import polars as pl
import pyarrow as pa
import pyarrow.parquet as pq

from kernels_eval.errors import UsageError
from tasks.curation.config import QualityConfig
from tasks.curation.flags import flagged
from tasks.curation.tables import (
    DECIDING,
    TEXTS,
    curated_rows,
    joined_on_candidate,
    named_tasks,
    places_of,
    texts_of,
    with_flags,
    with_operators,
)
from tasks.store import BATCH_ROWS, Snapshot, present_columns, snapshots

TABLES_FIX = "give the tables that verification and synthesis wrote"


class Files(NamedTuple):
    """Parquet files, and what messages call them."""

    name: str
    paths: tuple[str, ...]


Place = Snapshot | Files


class Source:
    """Verdicts, their candidates (the same files where one table holds both), and their tasks where
    a snapshot names them.

    Without `verdicts`, those of the newest training set under `root`, else the newest finished
    ones. Without `candidates`, those beside the snapshot, or the same files. `unfinished` takes a
    directory without a manifest for the parts it holds; `of` begins the names of the options in
    messages. Raises UsageError for a place that is not there, is not local, holds no Parquet file
    or is unfinished, and where candidates are not beside their verdicts.
    """

    def __init__(
        self,
        verdicts: str | None,
        candidates: str | None,
        root: str,
        *,
        unfinished: bool = False,
        of: str = "",
    ) -> None:
        self.verdicts: Place = (
            _opened(verdicts, f"--{of}verdicts", unfinished) if verdicts else _latest(root)
        )
        self.candidates: Place = self.verdicts
        self.tasks: Snapshot | None = None
        if isinstance(self.verdicts, Snapshot):
            place, upstream = self.verdicts.root, self.verdicts.manifest["upstream"]
            self.tasks = _among(place, ("training-tasks", "tasks"), upstream)
            beside = _among(place, ("synthesis", "candidates"), upstream)
            if not (beside or candidates):
                raise UsageError(
                    f"the candidates of {self.verdicts.path} are not beside it",
                    f"name them with --{of}candidates",
                )
            self.candidates = beside or self.verdicts
        if candidates:
            self.candidates = _opened(candidates, f"--{of}candidates", unfinished)

    def made_of(self, stage: str, *of: Place | None) -> Snapshot | None:
        """The newest finished snapshot of a stage that was made of all of these, under the root of
        the verdicts."""
        wanted = {each.fingerprint for each in of if isinstance(each, Snapshot)}
        if not isinstance(self.verdicts, Snapshot) or len(wanted) < len(of):
            return None
        finished = _newest_first(self.verdicts.root, stage)
        return next((each for each in finished if wanted <= set(each.manifest["upstream"])), None)

    @property
    def one_table(self) -> bool:
        return self.candidates is self.verdicts

    def read(self, of_verdicts: Sequence[str], of_candidates: Sequence[str]) -> pl.DataFrame:
        """The columns that the tables have, one row a verdict whose candidate is there; what both
        tables have is the verdict's.

        "column.field" is a field of a struct, as a column of the field's name. Raises UsageError
        for what cannot be read, two tables of which one has no candidate_id, and verdicts of none
        of the candidates.
        """
        if self.one_table:
            return columns_of(self.verdicts, list(dict.fromkeys((*of_verdicts, *of_candidates))))
        tables = []
        for where, columns in ((self.verdicts, of_verdicts), (self.candidates, of_candidates)):
            frame = columns_of(where, columns)
            require_ids(where, frame)
            tables.append(frame.unique("candidate_id", keep="first", maintain_order=True))
        left, right = tables
        kind = left["candidate_id"].dtype
        joined = joined_on_candidate(left, right.cast({"candidate_id": kind}, strict=False))
        if joined.is_empty():
            raise UsageError(
                f"no row of {name_of(self.verdicts)} has its candidate in"
                f" {name_of(self.candidates)}",
                "give the candidates verified",
            )
        return joined

    def deciding(self, *, flags: bool = False) -> pl.DataFrame:
        """What strategies decide by, one row a candidate, without texts; with `flags`, also the
        flaws of the traces of correct samples.

        Flags that a refresh has measured are taken as they are, others are measured here. Raises
        UsageError where a table has no candidate_id, or no row.
        """
        frame = self.read(DECIDING, DECIDING)
        require_ids(self.verdicts, frame)
        if frame.is_empty():
            raise UsageError(
                f"{name_of(self.verdicts)} has no row",
                "give the verdicts of a run that is finished",
            )
        # of two verdicts on a candidate the first counts, correct or not
        if self.one_table:
            ids = pl.col("candidate_id")
            frame = frame.filter(ids.is_null() | ids.is_first_distinct())
        frame = with_operators(frame, self.made_of("workloads", self.tasks))
        if known := self.made_of("trace-flags", self.verdicts, self.candidates):
            return with_flags(frame, known)
        if flags and "trace_flags" not in frame.columns:
            return with_flags(frame, self._measured_flags(frame))
        return frame

    def _measured_flags(self, frame: pl.DataFrame) -> pl.DataFrame:
        """candidate_id and trace_flags of the correct candidates whose reasoning is there, read a
        batch at a time."""
        wanted = frame.clear()
        if "status" in frame.columns:
            wanted = frame.filter(pl.col("status") == "correct")
        texts = stream_texts(self.candidates, wanted.select("candidate_id"), "reasoning")
        columns = ["candidate_id", "trace_flags"]
        found = [batch.select(columns) for batch in flagged(texts, QualityConfig())]
        return pl.concat(found) if found else pl.DataFrame()

    def curated(self, taken: pl.DataFrame) -> pl.DataFrame:
        """tasks.tables.CURATED of what was taken. Columns that the source does not have are
        null."""
        if isinstance(self.candidates, Snapshot):
            texts = texts_of(self.candidates, taken)
        else:
            texts = columns_of(self.candidates, TEXTS, taken.select("candidate_id"))
        texts = texts.unique("candidate_id", keep="first")
        return curated_rows(taken, texts, named_tasks(self.tasks) if self.tasks else None)


def name_of(where: Place) -> str:
    """What messages and summaries call a place."""
    return where.path if isinstance(where, Snapshot) else where.name


def require_ids(where: Place, frame: pl.DataFrame) -> None:
    """Raises UsageError where the rows of a place have no candidate_id."""
    if "candidate_id" not in frame.columns:
        raise UsageError(f"{name_of(where)} has no column candidate_id", TABLES_FIX)


def columns_of(
    where: Place, columns: Sequence[str], only: pl.DataFrame | None = None
) -> pl.DataFrame:
    """The columns that a place has; of files with `only`, of these candidates. Raises UsageError
    for what cannot be read."""
    if isinstance(where, Snapshot):
        unique = "candidate_id" if "candidate_id" in columns else None
        return where.read(columns=columns, unique=unique)
    with _readable(where):
        frames = []
        for there, files in groupby(where.paths, lambda path: _there(path, columns)):
            frame = _scanned(list(files), there)
            if there and only is not None:
                frame = frame.join(
                    only.lazy(), on="candidate_id", how="semi", maintain_order="left"
                )
            frames += [frame] if there else []
        if not frames:
            return pl.DataFrame()
        return pl.concat(frames, how="diagonal_relaxed").collect(engine="streaming")


def stream_texts(
    where: Place, wanted: pl.DataFrame, column: str
) -> Iterator[tuple[str, str | None]]:
    """candidate_id and one text of the candidates in `wanted`, each once, a few hundred in memory
    at a time. Nothing where there is no such column. Raises UsageError for what cannot be read."""
    names = ["candidate_id", column]
    if isinstance(where, Snapshot):
        rows = where.rows_of(places_of(where, wanted), names)
        yield from ((row["candidate_id"], row[column]) for row in rows)
        return
    left = set(wanted["candidate_id"].to_list())
    for path in where.paths:
        with _readable(where), pq.ParquetFile(path) as file:
            if len(present_columns(file.schema_arrow, names)) < 2:
                continue
            for batch in file.iter_batches(BATCH_ROWS, columns=names):
                for name, text in pl.DataFrame(batch).select(names).iter_rows():
                    if name in left:
                        left.discard(name)
                        yield name, text


@contextmanager
def _readable(where: Files) -> Iterator[None]:
    try:
        yield
    except (OSError, pa.ArrowInvalid, pl.exceptions.PolarsError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"{where.name} cannot be read as Parquet: {cause}",
            "give a Parquet file, or the directory of a snapshot",
        ) from error


def _there(path: str, columns: Sequence[str]) -> tuple[str, ...]:
    """The columns that a file has. A field of a struct steps back for a column of its name."""
    found = present_columns(pq.read_schema(path), columns)
    return tuple(name for name in found if "." not in name or name.partition(".")[2] not in found)


def _scanned(files: list[str], columns: Sequence[str]) -> pl.LazyFrame:
    """Files that have these columns, which may differ in their others, and in fields of structs."""
    chosen = []
    for column, _, field in (name.partition(".") for name in columns):
        chosen.append(pl.col(column).struct.field(field) if field else pl.col(column))
    fields = pl.ScanCastOptions(missing_struct_fields="insert", extra_struct_fields="ignore")
    return pl.scan_parquet(
        files, glob=False, extra_columns="ignore", missing_columns="insert", cast_options=fields
    ).select(chosen)


def _opened(location: str, option: str, unfinished: bool) -> Place:
    if "://" in location:
        raise UsageError(f"{option} {location} is not a local path", "copy the snapshot here first")
    path = Path(location).expanduser()
    if path.is_file():
        return Files(str(path), (str(path),))
    pattern, problem = path, "is not there"
    if path.is_dir():
        pattern, problem = path / "*.parquet", "holds no Parquet file"
        whole = path.resolve()
        snapshot = Snapshot(str(whole.parent.parent), whole.parent.name, whole.name)
        if snapshot.finished:
            return snapshot
        if not unfinished:
            raise UsageError(
                f"{option} {location} is not a finished snapshot",
                "give its directory, which holds manifest.json, or a Parquet file",
            )
    found = sorted(glob(str(pattern)))
    if not found:
        raise UsageError(
            f"{option} {location} {problem}",
            "give a snapshot's directory (ROOT/verification/FINGERPRINT), or a Parquet file",
        )
    return Files(location, tuple(found))


def _newest_first(root: str, stage: str) -> list[Snapshot]:
    finished = [snapshot for snapshot in snapshots(root, stage) if snapshot.finished]
    age = {each.fingerprint: each.manifest["created_at"] for each in finished}
    return sorted(
        finished, key=lambda each: (age[each.fingerprint], each.fingerprint), reverse=True
    )


def _latest(root: str) -> Snapshot:
    """The verdicts that the newest training set under a root was made of, else the newest: those of
    a benchmark are verdicts too."""
    for snapshot in _newest_first(root, "curation"):
        if found := _among(root, ("verification",), snapshot.manifest["upstream"]):
            return found
    if newest := _newest_first(root, "verification"):
        return newest[0]
    raise UsageError(
        f"there is no finished verification snapshot under {root}",
        "name one with --verdicts, or another --root",
    )


def _among(root: str, stages: Sequence[str], fingerprints: Iterable[str]) -> Snapshot | None:
    """The finished snapshot of one of these stages with one of these fingerprints."""
    places = (Snapshot(root, stage, name) for stage in stages for name in list(fingerprints))
    return next((snapshot for snapshot in places if snapshot.finished), None)
