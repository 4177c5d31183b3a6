"""Snapshots: immutable, fingerprinted Parquet datasets, one per stage and configuration.

Layout: `<root>/<stage>/<fingerprint>/part-*.parquet`, files a stage adds, and `manifest.json`,
written last.

Guarantees: a part or a manifest is there whole or not at all (written under a temporary name, then
renamed); a snapshot with a manifest never changes; one without is unfinished and is resumed from
the rows it already has, each of which is there once, whenever its writer was killed; the same
stage, configuration, code and upstreams give the same fingerprint, so finished work is never done
again. Does not guarantee that two processes filling the same unfinished snapshot divide the work:
both may write a row, and readers keep the first per key.
"""

from __future__ import annotations

import ast
import fcntl
import importlib.util
import json
import os
import platform
import shutil
import tempfile
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import UsageError
from kernels_eval.records import Record, stable_hash

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

SNAPSHOT_SCHEMA_VERSION = 1
MANIFEST = "manifest.json"
PART_ROWS = 1000
BATCH_ROWS = 256


def code_version(*modules: str) -> str:
    """Hash of the logic of modules or whole packages: comments, formatting and docstrings do not
    change it.

    Raises ModuleNotFoundError for an unknown module.
    """
    digests = []
    for name in modules:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise ModuleNotFoundError(name)
        origin = Path(spec.origin)
        files = sorted(origin.parent.rglob("*.py")) if origin.name == "__init__.py" else [origin]
        digests += [_logic_digest(path) for path in files]
    return stable_hash(digests)


def _parsed(text: str) -> ast.Module:
    """Python 3.11 keeps the depth of the tree that it builds for all threads together, and takes
    another thread's parsing for an error."""
    for _ in range(20):
        with suppress(SystemError):
            return ast.parse(text)
    return ast.parse(text)


def _logic_digest(path: Path) -> str:
    """Kept as long as the file does not change: an ablation asks hundreds of times, and parsing all
    of a package takes seconds."""
    found = path.stat()
    return _digest_of(path, found.st_mtime_ns, found.st_size)


@lru_cache(maxsize=1024)
def _digest_of(path: Path, mtime_ns: int, size: int) -> str:
    tree = _parsed(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if (
                node.body
                and isinstance(node.body[0], ast.Expr)
                and isinstance(getattr(node.body[0], "value", None), ast.Constant)
            ):
                if isinstance(node.body[0].value.value, str):
                    node.body[0].value = ast.Constant(value="")
    return stable_hash([path.name, ast.dump(tree)])


def fingerprint(stage: str, config: Any, upstream: Sequence[str] = (), code: str = "") -> str:
    """Identity of a snapshot: hash(stage name, resolved stage config, upstream fingerprints, code
    version)."""
    if hasattr(config, "model_dump"):
        config = config.model_dump(mode="json")
    return stable_hash([SNAPSHOT_SCHEMA_VERSION, stage, config, list(upstream), code])


class SnapshotRef(Record):
    """What flows hand from stage to stage instead of data."""

    root: str
    stage: str
    fingerprint: str

    def open(self) -> Snapshot:
        return Snapshot(self.root, self.stage, self.fingerprint)


@dataclass
class Snapshot:
    """One snapshot directory: read it when finished, append to it and publish it when not."""

    root: str
    stage: str
    fingerprint: str
    _fs: Any = field(default=None, repr=False)

    def __post_init__(self) -> None:
        import fsspec

        self._fs, path = fsspec.core.url_to_fs(str(self.root))
        self.path = f"{path.rstrip('/')}/{self.stage}/{self.fingerprint}"

    @property
    def ref(self) -> SnapshotRef:
        return SnapshotRef(root=self.root, stage=self.stage, fingerprint=self.fingerprint)

    @property
    def finished(self) -> bool:
        return self._fs.exists(f"{self.path}/{MANIFEST}")

    @property
    def manifest(self) -> dict[str, Any]:
        """The manifest. Raises UsageError where the snapshot is unfinished."""
        if not self.finished:
            raise UsageError(
                f"snapshot {self.path} has no {MANIFEST}",
                "it is unfinished: run its stage again, it resumes",
            )
        return json.loads(self._fs.cat_file(f"{self.path}/{MANIFEST}"))

    @property
    def is_local(self) -> bool:
        """Can files lie beside the tables?"""
        return self._local_path() is not None

    @property
    def has_journal(self) -> bool:
        """Is each row of a journal on disk at once? Local file systems only: elsewhere rows are
        written part by part."""
        return self._local_path() is not None

    def local_dir(self, name: str = "") -> Path:
        """A directory for files beside the tables (an adapter, a report). Local file systems
        only."""
        local = self._local_path()
        if local is None:
            raise UsageError(
                f"snapshot root {self.root} is not a local directory",
                "files beside tables need a local root",
            )
        try:
            (local / name).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise _unwritable(self.root, error) from error
        return local / name

    @contextmanager
    def scratch(self) -> Iterator[Path]:
        """A directory for files that nobody needs afterwards: to be made by who uses it, removed
        here or, after a kill, by `recover`."""
        home = self._local_path() or Path(tempfile.gettempdir())
        directory = home / f".scratch-{uuid.uuid4().hex[:8]}-{os.getpid()}"
        try:
            yield directory
        finally:
            shutil.rmtree(directory, ignore_errors=True)

    # -- reading -----------------------------------------------------------------------------------

    def parts(self) -> list[str]:
        if not self._fs.exists(self.path):
            return []
        return sorted(
            p
            for p in self._fs.ls(self.path, detail=False)
            if Path(p).name.startswith("part-") and p.endswith(".parquet")
        )

    def read(
        self, *, columns: Sequence[str] | None = None, unique: str | None = None
    ) -> pl.DataFrame:
        """All rows in the order they were written; with `unique`, the first row per value of that
        column.

        A column that some parts lack, because an older version wrote them, is null in their rows.
        "column.field" reads one field of a struct, as a column of the field's name. Raises
        UsageError where a column is of two kinds in two parts, or cannot be a key.
        """
        import polars as pl
        import pyarrow.parquet as pq

        tables = []
        for part in self.parts():
            with self._fs.open(part, "rb") as handle:
                wanted = columns_there(pq.read_schema(handle), columns) if columns else None
                handle.seek(0)
                tables.append(pl.from_arrow(pq.read_table(handle, columns=wanted)))
        frame = together(tables, self.path)
        if unique and not frame.is_empty():
            if unique not in frame.columns:
                raise UsageError(
                    f"{self.path} has no column {unique}",
                    "it was not written by this version: run its stage again",
                )
            frame = frame.unique(subset=unique, keep="first", maintain_order=True)
        return frame

    def has_column(self, name: str) -> bool:
        """Is there a row yet, and does it have this column? Snapshots of older versions may lack
        some."""
        import pyarrow.parquet as pq

        for part in self.parts()[:1]:
            with self._fs.open(part, "rb") as handle:
                return name in pq.read_schema(handle).names
        return False

    def index(self, columns: Sequence[str]) -> pl.DataFrame:
        """Some columns of every row, in the order of writing, with the place of the row: its
        `part`, and its number `row` in there.

        Holds these columns in memory, whatever the others weigh. `rows_at` reads the rows
        themselves.
        """
        import polars as pl
        import pyarrow.parquet as pq

        frames = []
        for part in self.parts():
            with self._fs.open(part, "rb") as handle:
                frame = pl.from_arrow(pq.read_table(handle, columns=list(columns)))
            frames.append(
                frame.with_columns(
                    pl.lit(part).alias("part"), pl.int_range(pl.len(), dtype=pl.UInt32).alias("row")
                )
            )
        empty = pl.DataFrame(
            schema={**dict.fromkeys(columns, pl.String), "part": pl.String, "row": pl.UInt32}
        )
        return pl.concat(frames, how="vertical_relaxed") if frames else empty

    def rows_at(
        self, part: str, rows: Sequence[int], columns: Sequence[str] | None = None
    ) -> Iterator[list[dict[str, Any]]]:
        """The rows of one part with these numbers (which ascend), a few hundred at a time: a part
        of any size takes little memory."""
        import numpy as np
        import pyarrow.parquet as pq

        wanted, start = np.asarray(rows), 0
        with self._fs.open(part, "rb") as handle:
            for batch in pq.ParquetFile(handle).iter_batches(
                BATCH_ROWS, columns=list(columns) if columns else None
            ):
                first, last = np.searchsorted(wanted, (start, start + len(batch)))
                if last > first:
                    yield batch.take(wanted[first:last] - start).to_pylist()
                start += len(batch)

    def rows_of(
        self, places: pl.DataFrame, columns: Sequence[str] | None = None
    ) -> Iterator[dict[str, Any]]:
        """The rows at these places (some of those that `index` gave, in its order), read part by
        part."""
        for (part,), found in places.group_by("part", maintain_order=True):
            for batch in self.rows_at(str(part), found["row"].to_numpy(), columns):
                yield from batch

    def keys(self, column: str) -> set[str]:
        """Values of one column among the rows already there: what a resumed stage need not do
        again."""
        frame = self.read(columns=[column]) if self.parts() else None
        return set() if frame is None or frame.is_empty() else set(frame[column].to_list())

    # -- writing -----------------------------------------------------------------------------------

    def append(self, rows: Iterable[Mapping[str, Any]], schema: pa.Schema) -> None:
        """Write rows as new parts of at most 1,000, each atomically and before more rows are taken
        from an iterator.

        Raises UsageError where the snapshot is finished or the root cannot be written.
        """
        taken = iter(rows)
        while part := list(islice(taken, PART_ROWS)):
            self._append_part(part, schema)

    def _append_part(
        self, rows: list[Mapping[str, Any]], schema: pa.Schema, tail: str = ""
    ) -> None:
        """`tail`, part of the name, tells where the rows come from: see `_tail_of`."""
        import pyarrow as pa
        import pyarrow.parquet as pq

        if self.finished:
            raise UsageError(
                f"snapshot {self.path} is finished",
                "a finished snapshot never changes: change the configuration instead",
            )
        try:
            table = pa.Table.from_pylist(rows, schema=schema)
        except UnicodeEncodeError:  # lone surrogates, in text that some model wrote
            table = pa.Table.from_pylist([_encodable(row) for row in rows], schema=schema)
        # parts sort in the order of writing: nanoseconds first, then a random tail so that two
        # writers never collide
        name = f"part-{_now_ns():020d}-{tail or uuid.uuid4().hex[:8]}.parquet"
        self._write(name, lambda handle: pq.write_table(table, handle, compression="zstd"))

    @contextmanager
    def journal(
        self, schema: pa.Schema, *, rows_per_part: int = PART_ROWS
    ) -> Iterator[Callable[[Mapping[str, Any]], None]]:
        """Add rows one by one, each on disk before the call returns; full parts are written as they
        fill and when the block ends.

        A killed process loses no row it had added: `recover` turns what it left into a part. On a
        remote root, rows are written part by part only.
        """
        if self.finished:
            raise UsageError(
                f"snapshot {self.path} is finished",
                "a finished snapshot never changes: change the configuration instead",
            )
        rows: list[Mapping[str, Any]] = []
        local = self._local_path()
        files: list[Any] = []  # the journal of the part to come, open, where there is one
        if local:
            try:
                local.mkdir(parents=True, exist_ok=True)
                files.append(_new_journal(local))
            except OSError as error:
                raise _unwritable(self.root, error) from error

        def add(row: Mapping[str, Any]) -> None:
            rows.append(row)
            try:
                for handle in files:
                    handle.write(json.dumps(row, default=str) + "\n")
                    handle.flush()
            except OSError as error:
                raise _unwritable(self.root, error) from error
            if len(rows) >= rows_per_part:
                flush()
                files[:] = [_new_journal(local)] if local else []

        def flush() -> None:
            if rows:
                self._append_part(rows, schema, *(_tail_of(Path(handle.name)) for handle in files))
            rows.clear()
            for handle in files:
                handle.close()
                Path(handle.name).unlink(missing_ok=True)
            files.clear()

        try:
            yield add
        finally:
            try:
                flush()
            finally:
                for handle in files:
                    with suppress(OSError):  # what it still held does not fit on the disk either
                        handle.close()

    def recover(self, schema: pa.Schema) -> int:
        """Turn journals that killed processes left behind into parts, each once, and remove their
        other files. Returns the number of rows saved."""
        local = self._local_path()
        if local is None or self.finished:
            return 0
        for path in local.glob(".scratch-*"):
            if not _running(int(path.name.rsplit("-", 1)[1])):
                shutil.rmtree(path, ignore_errors=True)
        for path in local.glob(".*.tmp"):
            if not _running(int(path.name.rsplit(".", 2)[1])):
                path.unlink(missing_ok=True)
        return self.save_journals(schema)

    def save_journals(self, schema: pa.Schema) -> int:
        """Turn journals whose writers are gone into parts, each once. Returns the number of rows
        saved. Touches nothing else, so that a run may do it for another one's snapshot."""
        local, saved = self._local_path(), 0
        if local is None or self.finished:
            return 0
        known = {part.rsplit("-", 1)[1] for part in self.parts()}
        for path in sorted(local.glob(".journal-*.jsonl")):
            with _left_alone(path) as left:
                if not left:
                    continue
                rows = (
                    [] if f"{_tail_of(path)}.parquet" in known else _whole_rows(path)
                )  # its writer may have been killed after that
                if rows:
                    self._append_part(rows, schema, _tail_of(path))
                saved += len(rows)
                path.unlink()
        return saved

    def _local_path(self) -> Path | None:
        protocols = (
            self._fs.protocol if isinstance(self._fs.protocol, tuple) else (self._fs.protocol,)
        )
        return Path(self.path) if "file" in protocols else None

    def publish(
        self,
        *,
        config: Any,
        upstream: Iterable[str] = (),
        rows: int | None = None,
        extra: Mapping[str, Any] | None = None,
    ) -> Snapshot:
        """Write the manifest: from here on the snapshot is finished and immutable."""
        if hasattr(config, "model_dump"):
            config = config.model_dump(mode="json")
        manifest = {
            "schema_version": SNAPSHOT_SCHEMA_VERSION,
            "stage": self.stage,
            "fingerprint": self.fingerprint,
            "config": config,
            "upstream": list(upstream),
            "rows": sum(self._rows(p) for p in self.parts()) if rows is None else rows,
            "tools": tool_versions(),
            "hardware": hardware(),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            **(extra or {}),
        }
        text = json.dumps(manifest, indent=2, sort_keys=True).encode()
        self._write(MANIFEST, lambda handle: handle.write(text))
        return self

    def _rows(self, part: str) -> int:
        import pyarrow.parquet as pq

        with self._fs.open(part, "rb") as handle:
            return pq.read_metadata(handle).num_rows

    def _write(self, name: str, write: Any) -> None:
        target, temporary = f"{self.path}/{name}", f"{self.path}/.{name}.{os.getpid()}.tmp"
        try:
            self._fs.makedirs(self.path, exist_ok=True)
            with self._fs.open(temporary, "wb") as handle:
                write(handle)
            self._fs.mv(temporary, target)
        except OSError as error:
            raise _unwritable(self.root, error) from error


def columns_there(schema: pa.Schema, columns: Sequence[str]) -> list[str]:
    """Those of the columns that a file has, fields of its structs among them. Raises UsageError
    where fields are asked for of a column that is no struct and holds something."""
    import pyarrow as pa

    for column in {name.partition(".")[0] for name in columns if "." in name} & set(schema.names):
        kind = schema.field(column).type
        if not pa.types.is_struct(kind) and not pa.types.is_null(kind):
            raise UsageError(
                f"the column {column} is {kind}, not a struct",
                "give the tables that verification and synthesis wrote",
            )
    nested = {
        f"{column.name}.{each.name}"
        for column in schema
        if pa.types.is_struct(column.type)
        for each in column.type
    }
    return [name for name in columns if name in schema.names or name in nested]


def together(tables: Sequence[pl.DataFrame], where: str) -> pl.DataFrame:
    """The rows of all parts. Columns and fields of structs that a part lacks are null in its rows;
    numbers may be of several types.

    Raises UsageError for a column that is of two kinds, such as text here and numbers there: polars
    would make text of both.
    """
    import polars as pl

    seen: dict[str, pl.DataType] = {}
    for table in tables:
        for name, kind in table.schema.items():
            if _kind_of(seen.setdefault(name, kind)) is None:
                seen[name] = kind
            if _kind_of(kind) not in (None, _kind_of(seen[name])):
                problem = (
                    f"the column {name} is {seen[name]} in one part of {where} and {kind} in"
                    " another"
                )
                raise UsageError(
                    problem,
                    "its parts were not written by one program: run its stage again under another"
                    " root",
                )
    try:
        return pl.concat(tables, how="diagonal_relaxed") if tables else pl.DataFrame()
    except pl.exceptions.PolarsError as error:
        problem = f"the parts of {where} do not fit together: {str(error).splitlines()[0]}"
        raise UsageError(
            problem, "they were not written by one program: run its stage again under another root"
        ) from error


def _kind_of(of: pl.DataType) -> str | None:
    """None where there are no values."""
    import polars as pl

    if of == pl.Null:
        return None
    if of.is_numeric():
        return "numbers"
    if isinstance(of, pl.String | pl.Categorical | pl.Enum):
        return "text"
    return str(of.base_type())


def _encodable(value: Any) -> Any:
    """The same value with characters that UTF-8 cannot hold replaced."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, Mapping):
        return {key: _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value


def _unwritable(root: str, error: OSError) -> UsageError:
    return UsageError(
        f"cannot write to the snapshot root {root}: {error.strerror or error}",
        "choose another one with --set root=DIR, free some disk, or mend its permissions; what was"
        " already written is intact",
    )


def _new_journal(folder: Path) -> Any:
    """The file of one journal, open and locked: the kernel unlocks it when its writer dies."""
    while True:
        path = folder / f".journal-{_now_ns():020d}-{os.getpid()}.jsonl"
        handle = open(path, "a", encoding="utf-8", errors="surrogatepass")
        with suppress(OSError):  # a file system without locks
            fcntl.flock(handle, fcntl.LOCK_EX)
        if path.exists():
            return handle
        handle.close()  # taken for a dead one's before it was locked


def _tail_of(journal: Path) -> str:
    """What ends the name of the part that a journal becomes: so that it becomes one only once,
    whenever who does it is killed."""
    return stable_hash(journal.name)[:8]


@contextmanager
def _left_alone(journal: Path) -> Iterator[bool]:
    """Is its writer gone, and nobody else at recovering it? So it stays inside the block.

    The writer's process id is asked only where there are no locks: ids are used again, in a
    container very soon.
    """
    with open(journal, "a") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = journal.exists()
        except BlockingIOError:
            left = False
        except OSError:
            left = not _running(int(journal.stem.rsplit("-", 1)[1]))
        yield left


def _whole_rows(journal: Path) -> list[dict[str, Any]]:
    rows = []
    for line in journal.read_text(encoding="utf-8", errors="surrogatepass").splitlines():
        with suppress(ValueError):  # the line that its writer was killed in
            rows.append(json.loads(line))
    return rows


def _running(pid: int) -> bool:
    """Is a process with this id alive and not this one?"""
    import psutil

    return pid != os.getpid() and psutil.pid_exists(pid)


def _now_ns() -> int:
    import time

    return time.time_ns()


def snapshots(root: str, stage: str) -> list[Snapshot]:
    """Every snapshot of a stage under a root, finished or not, in no particular order."""
    import fsspec

    fs, path = fsspec.core.url_to_fs(str(root))
    base = f"{path.rstrip('/')}/{stage}"
    if not fs.exists(base):
        return []
    return [
        Snapshot(root, stage, Path(p).name)
        for p in sorted(fs.ls(base, detail=False))
        if not Path(p).name.startswith(".")
    ]


def known_rows(
    root: str, stage: str, column: str, keys: Iterable[str], schema: pa.Schema, *, exclude: str = ""
) -> Iterator[dict[str, Any]]:
    """Rows of any other snapshot of the stage whose key is asked for, each key once: a nightly
    refresh pays only for what is new.

    What killed runs left in journals counts too (`schema` is the stage's): a run that is killed and
    begun again after an update fills another snapshot. Reads the key column of every snapshot, and
    of the rows only those that were found: a few hundred in memory at a time.
    """
    import polars as pl

    missing = pl.DataFrame({column: pl.Series(list(keys), dtype=pl.String)}).unique()
    for snapshot in snapshots(root, stage):
        if missing.is_empty():
            return
        if snapshot.fingerprint == exclude:
            continue
        snapshot.save_journals(schema)
        if not snapshot.has_column(column):
            continue
        found = (
            snapshot.index([column])
            .join(missing, on=column, how="semi")
            .unique(subset=column, keep="first", maintain_order=True)
        )
        missing = missing.join(found, on=column, how="anti")
        yield from snapshot.rows_of(found)


def tool_versions() -> dict[str, str]:
    """Versions of the tools that made a snapshot, read from package metadata (nothing heavy is
    imported)."""
    from importlib.metadata import PackageNotFoundError, version

    found = {"python": platform.python_version()}
    for name in ("concur", "torch", "ray", "trl", "peft", "transformers", "polars", "pyarrow"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def hardware() -> dict[str, Any]:
    return {"machine": platform.machine(), "system": platform.system(), "cpus": os.cpu_count()}
