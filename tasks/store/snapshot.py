"""Snapshots: immutable Parquet datasets, one per stage and configuration.

Layout: `<root>/<stage>/<fingerprint>/part-*.parquet`, a stage's own files, and `manifest.json`,
written last.

Guarantees: with a manifest a snapshot never changes; without, it is resumed, each row there once
after any kill. Two processes that fill one may both write a row; readers keep the first per key.
"""

from __future__ import annotations

import json
import os
import platform
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

import fsspec
from pydantic import BaseModel

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record, Row
from kernels_eval.written import json_of
from tasks.files import atomic_write_at, explain_write_errors
from tasks.store.identity import SNAPSHOT_SCHEMA_VERSION, code_hash, fingerprint
from tasks.store.journal import Journal, abandoned, another_runs, part_suffix, read_journal
from tasks.store.parts import combine_parts, present_columns, storable
from tasks.versions import modules_of

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa
    import pyarrow.parquet as pq
    from numpy.typing import NDArray

MANIFEST = "manifest.json"
ADAPTER_WEIGHTS = "adapter_model.safetensors"
ADAPTER = f"adapter/{ADAPTER_WEIGHTS}"
NEEDED = {"training": (MANIFEST, ADAPTER), "reinforcement": (MANIFEST, ADAPTER)}
"""Files without which a snapshot of a stage is unfinished; of other stages the manifest alone."""
PART_ROWS = 1000
BATCH_ROWS = 256
READ_ROWS = 4096
STRETCH_ROWS = 4096
"""Rows held while they are reordered."""
RESTORE = "restore it, or run its stage again under another root"
WRITE_FIX = (
    "choose another root with --set root=DIR, free some disk, or correct its permissions; what was"
    " already written is intact"
)


class SnapshotRef(Record):
    """What flows hand from stage to stage instead of data."""

    root: str
    stage: str
    fingerprint: str

    def open(self) -> Snapshot:
        return Snapshot(self.root, self.stage, self.fingerprint)


@dataclass
class Snapshot:
    """A snapshot directory, to read when finished, to append to and publish when not."""

    root: str
    stage: str
    fingerprint: str
    upstream: Sequence[str] = field(default=(), repr=False, compare=False)
    """Fingerprints of its upstreams, where `planned` made it."""

    _fs: Any = field(default=None, repr=False)
    _opened_s: float = field(default_factory=time.monotonic, repr=False, compare=False)

    def __post_init__(self) -> None:
        self._fs, path = fsspec.core.url_to_fs(str(self.root))
        self.path = f"{path.rstrip('/')}/{self.stage}/{self.fingerprint}"
        local = isinstance(self._fs, fsspec.implementations.local.LocalFileSystem)
        self._local_path = Path(self.path) if local else None

    @staticmethod
    def planned(
        stage: str,
        config: Any,
        above: Iterable[SnapshotRef | None],
        version: int | Sequence[int] | str,
    ) -> Snapshot:
        """The snapshot that a stage makes of others (None: an optional one), under the root of the
        first."""
        refs = [ref for ref in above if ref]
        upstream = [ref.fingerprint for ref in refs]
        name = fingerprint(stage, config, upstream, version)
        return Snapshot(refs[0].root, stage, name, upstream)

    @property
    def ref(self) -> SnapshotRef:
        return SnapshotRef(root=self.root, stage=self.stage, fingerprint=self.fingerprint)

    @property
    def finished(self) -> bool:
        return self.missing is None

    @property
    def missing(self) -> str | None:
        """The first file that keeps it unfinished."""
        needed = NEEDED.get(self.stage, (MANIFEST,))
        return next((name for name in needed if not self._fs.exists(f"{self.path}/{name}")), None)

    @property
    def manifest(self) -> Json:
        """The manifest. Raises UsageError where it is missing or damaged."""
        if missing := self.missing:
            raise UsageError(
                f"snapshot {self.path} has no {missing}",
                "it is unfinished: run its stage again to resume",
            )
        try:
            found: Json = json_of(self._fs.cat_file(f"{self.path}/{MANIFEST}"))
            datetime.fromisoformat(found["created_at"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise UsageError(
                f"the manifest of {self.path} cannot be read: {error}", RESTORE
            ) from error
        return found

    def above(self, *stages: str) -> Snapshot | None:
        """The finished upstream that one of these stages wrote."""
        names = self.manifest.get("upstream") or ()
        places = (Snapshot(self.root, stage, str(name)) for stage in stages for name in names)
        return next((each for each in places if each.finished), None)

    @property
    def is_local(self) -> bool:
        """Whether files can lie beside the tables and rows be journalled; remote roots get whole
        parts only."""
        return self._local_path is not None

    def local_dir(self, name: str = "") -> Path:
        """A directory for files beside the tables (an adapter, a report).

        Raises UsageError for remote roots.
        """
        local = self._local_path
        if local is None:
            raise UsageError(
                f"snapshot root {self.root} is not a local directory",
                "files beside tables need a local root",
            )
        with explain_write_errors(self.root, WRITE_FIX):
            (local / name).mkdir(parents=True, exist_ok=True)
        return local / name

    # -- reading -----------------------------------------------------------------------------------

    def parts(self) -> list[str]:
        if not self._fs.exists(self.path):
            return []
        return sorted(
            p
            for p in self._fs.ls(self.path, detail=False)
            if Path(p).name.startswith("part-") and p.endswith(".parquet")
        )

    @contextmanager
    def open_part(self, part: str) -> Iterator[pq.ParquetFile]:
        """One part, wherever the root lies."""
        import pyarrow.parquet as pq

        with self._fs.open(part, "rb") as handle:
            yield pq.ParquetFile(handle)

    def schema(self) -> pa.Schema:
        """Columns of all parts, in the order of the first part, without metadata."""
        import pyarrow as pa

        schemas = []
        for part in self.parts():
            with self.open_part(part) as file:
                schemas.append(file.schema_arrow.remove_metadata())
        return pa.unify_schemas(schemas, promote_options="permissive") if schemas else pa.schema([])

    def frames(self, columns: Sequence[str] | None = None) -> Iterator[tuple[str, pl.DataFrame]]:
        """Batches of some thousand rows with their part, in the order of writing, without missing
        columns.

        "column.field" reads a struct's field as a column of its name.
        """
        import polars as pl

        for part in self.parts():
            with self.open_part(part) as file:
                schema = file.schema_arrow
                wanted = present_columns(schema, columns) if columns else schema.names
                paths = [name.partition(".")[::2] for name in wanted]
                batches = file.iter_batches(READ_ROWS, columns=wanted)
                # a part without rows has no batches
                for batch in batches if file.metadata.num_rows else [schema.empty_table()]:
                    yield (
                        part,
                        pl.DataFrame(batch).select(
                            pl.col(name).struct.field(inner) if inner else pl.col(name)
                            for name, inner in paths
                        ),
                    )

    def read(
        self,
        *,
        columns: Sequence[str] | None = None,
        unique: str | None = None,
        among: pl.DataFrame | None = None,
    ) -> pl.DataFrame:
        """All rows in the order of writing, with the columns of `frames`, null where missing.

        `unique` keeps the first row per value of that column, `among` only its values of that
        column. Memory holds the result and one batch. Raises UsageError where a column differs in
        kind between parts, or cannot be a key.
        """
        import polars as pl

        tables = []
        for _, frame in self.frames(columns):
            if unique and unique not in frame.columns and not frame.is_empty():
                raise UsageError(
                    f"{self.path} has no column {unique} in some part",
                    "it was not written by this version: run its stage again",
                )
            if unique and among is not None:
                frame = frame.join(among, on=unique, how="semi", maintain_order="left")
            tables.append(frame)
        frame = combine_parts(tables, self.path)
        if unique and not frame.is_empty():
            frame = frame.filter(pl.col(unique).is_first_distinct())
        return frame

    def has_column(self, name: str) -> bool:
        """Whether a first part exists and has this column."""
        for part in self.parts()[:1]:
            with self.open_part(part) as file:
                return name in file.schema_arrow.names
        return False

    def index(self, columns: Sequence[str], *, unique: bool = False) -> pl.DataFrame:
        """Some columns of every row with its place (`part`, and its number `row` there), in the
        order of writing. `unique` keeps the first row per value of the first column. Raises polars'
        ColumnNotFoundError where no part has one."""
        import polars as pl

        kinds = {**dict.fromkeys(columns, pl.String), "part": pl.Categorical}
        frames = [
            frame.with_columns(part=pl.lit(part, dtype=pl.Categorical))
            for part, frame in self.frames(columns)
        ]
        found = combine_parts(frames, self.path) if frames else pl.DataFrame(schema=kinds)
        number = pl.int_range(pl.len(), dtype=pl.UInt32).over("part")
        places = found.select(*kinds, row=number)
        return places.filter(pl.col(columns[0]).is_first_distinct()) if unique else places

    def batches_at(
        self, part: str, rows: NDArray[Any], columns: Sequence[str] | None = None
    ) -> Iterator[pa.RecordBatch]:
        """Rows of one part by ascending numbers, a few hundred at a time to bound memory. Missing
        columns are left out."""
        import numpy as np

        start = 0
        with self.open_part(part) as file:
            for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                first, last = np.searchsorted(rows, (start, start + len(batch)))
                if last > first:
                    yield batch.take(rows[first:last] - start)
                start += len(batch)

    def rows_of(self, places: pl.DataFrame, columns: Sequence[str] | None = None) -> Iterator[Json]:
        for (part,), found in places.group_by("part", maintain_order=True):
            for batch in self.batches_at(str(part), found["row"].to_numpy(), columns):
                yield from batch.to_pylist()

    def rows_in_order(
        self, places: pl.DataFrame, columns: Sequence[str] | None = None
    ) -> Iterator[Json]:
        """Rows at these places, in the order of `places`. Holds `STRETCH_ROWS` rows, and reads a
        part once per stretch that has rows of it."""
        numbered = places.select("part", "row").with_row_index("position")
        for stretch in numbered.iter_slices(STRETCH_ROWS):
            as_written = stretch.sort("part", "row")
            rows = dict(zip(as_written["position"], self.rows_of(as_written, columns), strict=True))
            for position in stretch["position"]:
                yield rows[position]

    def rows_by(
        self,
        column: str,
        values: Iterable[str] | None = None,
        columns: Sequence[str] | None = None,
    ) -> Iterator[Json]:
        """The first row of each of a column's values (None: of all), in the order of writing."""
        import polars as pl

        found = self.index([column], unique=True)
        if values is not None:
            found = found.filter(pl.col(column).is_in(list(values)))
        return self.rows_of(found, columns)

    def keys(self, column: str) -> set[str]:
        """A column's values among the existing rows, which a resumed stage can skip."""
        frame = self.read(columns=[column])
        return set() if frame.is_empty() else set(frame[column].to_list())

    def read_table(self, name: str) -> pl.DataFrame:
        """A table written by `write_table`. Raises UsageError where it is missing."""
        import polars as pl

        path = f"{self.path}/{name}.parquet"
        if not self._fs.exists(path):
            raise UsageError(f"there is no table {path}", RESTORE)
        with self._fs.open(path, "rb") as handle:
            return pl.read_parquet(handle)

    # -- writing -----------------------------------------------------------------------------------

    def write_table(self, name: str, table: pl.DataFrame) -> None:
        """Write a second table beside the rows, atomically. Raises UsageError where the snapshot is
        finished or the root cannot be written."""
        self._require_unfinished()
        self._write(
            f"{name}.parquet", lambda handle: table.write_parquet(handle, compression="zstd")
        )

    def append(self, rows: Iterable[Row], schema: pa.Schema, *, key: str | None = None) -> None:
        """Write rows as new atomic parts of at most 1,000. With `key`, skip rows whose value a
        killed run wrote. Raises UsageError where the snapshot is finished or the root cannot be
        written."""
        there = self.keys(key) if key else ()
        taken = (row for row in rows if key is None or row[key] not in there)
        while part := list(islice(taken, PART_ROWS)):
            self._append_part(schema, part)

    def _append_part(self, schema: pa.Schema, rows: list[Row], suffix: str = "") -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        self._require_unfinished()
        try:
            table = pa.Table.from_pylist(rows, schema=schema)
        except UnicodeEncodeError:  # lone surrogates, in text that some model wrote
            table = pa.Table.from_pylist([storable(row) for row in rows], schema=schema)
        # parts sort in the order of writing: nanoseconds first, then a random tail so that two
        # writers never collide
        name = f"part-{time.time_ns():020d}-{suffix or uuid.uuid4().hex[:8]}.parquet"
        self._write(name, lambda handle: pq.write_table(table, handle, compression="zstd"))

    @contextmanager
    def journal(
        self, schema: pa.Schema, *, rows_per_part: int = PART_ROWS
    ) -> Iterator[Callable[..., None]]:
        """Add rows, those of one call all or none, on disk before it returns (on remote roots, with
        their part)."""
        self._require_unfinished()

        def add(*rows: Row) -> None:
            with explain_write_errors(self.root, WRITE_FIX):
                journal.add(*rows)

        with explain_write_errors(self.root, WRITE_FIX):
            journal = Journal(self._local_path, partial(self._append_part, schema), rows_per_part)
        with closing(journal):
            yield add

    def recover(self, schema: pa.Schema) -> int:
        """Turn journals of killed processes into parts, each once, and remove their half-written
        files. Returns the number of rows saved."""
        local = self._local_path
        if local is None or self.finished:
            return 0
        for path in local.glob(".*.tmp"):
            if not another_runs(int(path.name.rsplit(".", 2)[1])):
                path.unlink(missing_ok=True)
        return self.save_journals(schema)

    def save_journals(self, schema: pa.Schema) -> int:
        """Turn journals whose writers are gone into parts, each once. Returns the number of rows
        saved. Safe on another run's snapshot."""
        local, saved = self._local_path, 0
        if local is None or self.finished:
            return 0
        known = {Path(part).stem.rsplit("-", 1)[1] for part in self.parts()}
        for path in abandoned(local):
            # its writer may have been killed after it had written the part
            rows = [] if part_suffix(path) in known else read_journal(path)
            if rows:
                self._append_part(schema, list(rows), part_suffix(path))
            saved += len(rows)
            path.unlink()
        return saved

    def publish(
        self,
        *,
        config: Any,
        upstream: Iterable[str] | None = None,
        rows: int | None = None,
        extra: Row | None = None,
    ) -> Snapshot:
        """Write the manifest: the snapshot is then finished and immutable.

        `code` is the advisory hash of the stage's logic, `seconds` those since the finishing
        process opened the snapshot.
        """
        manifest = {
            "schema_version": SNAPSHOT_SCHEMA_VERSION,
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "config": config.model_dump(mode="json") if isinstance(config, BaseModel) else config,
            "upstream": list(self.upstream if upstream is None else upstream),
            "rows": sum(map(self._row_count, self.parts())) if rows is None else rows,
            "code": code_hash(*modules_of(self.stage)),
            "tools": tool_versions(),
            "hardware": hardware(),
            "created_at": datetime.now(UTC).isoformat(timespec="microseconds"),
            "seconds": round(time.monotonic() - self._opened_s, 3),
            **(extra or {}),
        }
        text = json.dumps(manifest, indent=2, sort_keys=True).encode()
        self._write(MANIFEST, lambda handle: handle.write(text))
        return self

    def _row_count(self, part: str) -> int:
        with self.open_part(part) as file:
            return int(file.metadata.num_rows)

    def _write(self, name: str, write: Callable[[BinaryIO], object]) -> None:
        with explain_write_errors(self.root, WRITE_FIX):
            atomic_write_at(self._fs, f"{self.path}/{name}", write)

    def _require_unfinished(self) -> None:
        if self.finished:
            raise UsageError(
                f"snapshot {self.path} is finished",
                "another run of this configuration has finished it meanwhile: run the same again,"
                " and it is used as it is",
            )


def tool_versions() -> dict[str, str]:
    """Tool versions from package metadata, without heavy imports."""
    found = {"python": platform.python_version()}
    for name in ("concur", "torch", "ray", "trl", "peft", "transformers", "polars", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> Json:
    return {"machine": platform.machine(), "system": platform.system(), "cpus": os.cpu_count()}
