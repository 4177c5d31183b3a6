"""Where `concur curate` and `concur analyze` read verdicts and their candidates: finished snapshots
of a root, or Parquet files.

Guarantees: only the columns that are asked for leave the disk, a field of a struct without the
others; a column that some files lack is null in their rows; of two tables each candidate once, in
the order of the verdicts. Changes nothing. Does not guarantee anything about files that are being
written meanwhile. Paths that are named are local; a root need not be.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from glob import glob
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from kernels_eval.errors import UsageError
from tasks.store import BATCH_ROWS, Snapshot, present_columns, snapshots

if TYPE_CHECKING:
    import polars as pl


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
        self.tasks: Snapshot | None = None
        upstream: list[str] = []
        if isinstance(self.verdicts, Snapshot):
            upstream = self.verdicts.manifest["upstream"]
            self.tasks = _among(self.verdicts.root, ("training-tasks", "tasks"), upstream)
        if candidates:
            self.candidates: Place = _opened(candidates, f"--{of}candidates", unfinished)
        elif isinstance(self.verdicts, Snapshot):
            found = _among(self.verdicts.root, ("synthesis", "candidates"), upstream)
            if found is None:
                raise UsageError(
                    f"the candidates of {self.verdicts.path} are not beside it",
                    f"name them with --{of}candidates",
                )
            self.candidates = found
        else:
            self.candidates = self.verdicts

    def made_of(self, stage: str, *of: Place | None) -> Snapshot | None:
        """The newest finished snapshot of a stage that was made of all of these, under the root of
        the verdicts."""
        if not isinstance(self.verdicts, Snapshot) or not all(
            isinstance(each, Snapshot) for each in of
        ):
            return None
        wanted = {each.fingerprint for each in of if isinstance(each, Snapshot)}
        there = [
            (found.manifest, found)
            for found in snapshots(self.verdicts.root, stage)
            if found.finished
        ]
        fit = [
            (manifest["created_at"], found.fingerprint, found)
            for manifest, found in there
            if wanted <= set(manifest["upstream"])
        ]
        return max(fit, key=lambda each: each[:2])[2] if fit else None

    @property
    def one_table(self) -> bool:
        return self.candidates is self.verdicts

    def read(self, of_verdicts: Sequence[str], of_candidates: Sequence[str]) -> pl.DataFrame:
        """Those of the columns that are there, one row a verdict whose candidate is there; what
        both tables have is the verdict's.

        "column.field" is a field of a struct, as a column of the field's name. Raises UsageError
        for what cannot be read, two tables of which one has no candidate_id, and verdicts of none
        of the candidates.
        """
        import polars as pl

        from tasks.curation.tables import joined_on_candidate

        if self.one_table:
            return columns_of(self.verdicts, list(dict.fromkeys((*of_verdicts, *of_candidates))))
        left, right = (
            columns_of(self.verdicts, of_verdicts),
            columns_of(self.candidates, of_candidates),
        )
        for where, frame in ((self.verdicts, left), (self.candidates, right)):
            if "candidate_id" not in frame.columns:
                raise UsageError(
                    f"{name_of(where)} has no column candidate_id",
                    "give the tables that verification and synthesis wrote",
                )
        left, right = (
            frame.unique("candidate_id", keep="first", maintain_order=True)
            for frame in (left, right)
        )
        if left["candidate_id"].dtype != right["candidate_id"].dtype:
            right = right.with_columns(
                pl.col("candidate_id").cast(left["candidate_id"].dtype, strict=False)
            )
        joined = joined_on_candidate(left, right)
        if joined.is_empty():
            raise UsageError(
                f"no row of {name_of(self.verdicts)} has its candidate in"
                f" {name_of(self.candidates)}",
                "give the candidates verified",
            )
        return joined


def name_of(where: Place) -> str:
    """What messages and summaries call a place."""
    return where.path if isinstance(where, Snapshot) else where.name


def columns_of(
    where: Place, columns: Sequence[str], only: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Those of the columns that are there; of files with `only`, of these candidates. Raises
    UsageError for what cannot be read."""
    import polars as pl

    if isinstance(where, Snapshot):
        return where.read(
            columns=columns, unique="candidate_id" if "candidate_id" in columns else None
        )
    try:
        frames = [
            _scanned(list(files), there)
            for there, files in groupby(where.paths, lambda path: _there(path, columns))
            if there
        ]
        if only is not None:
            frames = [
                frame.join(only.lazy(), on="candidate_id", how="semi", maintain_order="left")
                for frame in frames
            ]
        return (
            pl.concat(frames, how="diagonal_relaxed").collect(engine="streaming")
            if frames
            else pl.DataFrame()
        )
    except (OSError, pl.exceptions.PolarsError) as error:
        cause = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(
            f"{where.name} cannot be read as Parquet: {cause}",
            "give a Parquet file, or the directory of a snapshot",
        ) from error


def stream_texts(
    where: Place, wanted: pl.DataFrame, column: str
) -> Iterator[tuple[str, str | None]]:
    """candidate_id and one text of the candidates in `wanted`, each once, a few hundred in memory
    at a time. Nothing where there is no such column. Raises UsageError for what cannot be read."""
    import polars as pl
    import pyarrow.parquet as pq
    from pyarrow import ArrowInvalid

    names, left = ["candidate_id", column], set(wanted["candidate_id"].to_list())
    if isinstance(where, Snapshot):
        places = where.index(["candidate_id"]).unique(
            "candidate_id", keep="first", maintain_order=True
        )
        places = places.join(wanted, on="candidate_id", how="semi", maintain_order="left")
        yield from ((row["candidate_id"], row[column]) for row in where.rows_of(places, names))
        return
    for path in where.paths:
        try:
            with pq.ParquetFile(path) as file:
                if len(present_columns(file.schema_arrow, names)) < 2:
                    continue
                for batch in file.iter_batches(BATCH_ROWS, columns=names):
                    for name, text in pl.DataFrame(pl.from_arrow(batch)).select(names).iter_rows():
                        if name in left:
                            left.discard(name)
                            yield name, text
        except (OSError, ArrowInvalid) as error:
            raise UsageError(
                f"{where.name} cannot be read as Parquet: {error}",
                "give a Parquet file, or the directory of a snapshot",
            ) from error


def _there(path: str, columns: Sequence[str]) -> tuple[str, ...]:
    """The columns that a file has. A field of a struct steps back for a column of its name."""
    import pyarrow.parquet as pq
    from pyarrow import ArrowInvalid

    try:
        found = present_columns(pq.read_schema(path), columns)
    except ArrowInvalid as error:
        raise OSError(str(error)) from error
    return tuple(name for name in found if "." not in name or name.partition(".")[2] not in found)


def _scanned(files: list[str], columns: Sequence[str]) -> pl.LazyFrame:
    """Files that have these columns, which may differ in their others, and in fields of structs."""
    import polars as pl

    picked = [(name, *name.partition(".")[::2]) for name in columns]
    chosen = [
        pl.col(name) if not field else pl.col(column).struct.field(field)
        for name, column, field in picked
    ]
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
    if path.is_dir():
        whole = path.resolve()
        snapshot = Snapshot(str(whole.parent.parent), whole.parent.name, whole.name)
        if snapshot.finished:
            return snapshot
        if not unfinished:
            raise UsageError(
                f"{option} {location} is not a finished snapshot",
                "give its directory, which holds manifest.json, or a Parquet file",
            )
    found = sorted(glob(str(path / "*.parquet"))) if path.is_dir() else sorted(glob(str(path)))
    if not found:
        problem = "holds no Parquet file" if path.is_dir() else "is not there"
        raise UsageError(
            f"{option} {location} {problem}",
            "give a snapshot's directory (ROOT/verification/FINGERPRINT), or a Parquet file",
        )
    return Files(location, tuple(found))


def _latest(root: str) -> Snapshot:
    """The verdicts that the newest training set under a root was made of, else the newest: those of
    a benchmark are verdicts too."""
    for stage in ("curation", "verification"):
        finished = [snapshot for snapshot in snapshots(root, stage) if snapshot.finished]
        for snapshot in sorted(
            finished, key=lambda each: each.manifest["created_at"], reverse=True
        ):
            found = (
                snapshot
                if stage == "verification"
                else _among(root, ("verification",), snapshot.manifest["upstream"])
            )
            if found:
                return found
    raise UsageError(
        f"there is no finished verification snapshot under {root}",
        "name one with --verdicts, or another --root",
    )


def _among(root: str, stages: Sequence[str], fingerprints: Sequence[str]) -> Snapshot | None:
    """The finished snapshot of one of these stages with one of these fingerprints."""
    for stage in stages:
        for name in fingerprints:
            if (snapshot := Snapshot(root, stage, name)).finished:
                return snapshot
    return None
