"""Foreign sources as rows with the map that reads them: tables, folders that a map knows, and data
sets of the hub."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Row, stable_hash
from tasks.files import file_sha256
from tasks.sources.files import columns_of, read_json, read_text, rows_of, shown
from tasks.sources.mapping import Found, Map, known_maps, map_of, mapped


class Foreign(NamedTuple):
    """Rows of one place; `root` is the folder that their paths are of, `by` the map that fits their
    columns."""

    name: str
    columns: Sequence[str]
    rows: Callable[[], Iterable[Row]]
    root: Path
    digest: Callable[[], str]
    by: Map | None

    def found(self) -> Iterator[Found]:
        if self.by is None:
            raise UsageError(
                f"{self.name} has columns of no known map: {shown(', '.join(self.columns), 300)}",
                "say which are the task and the answer with --map task=COLUMN,answer=COLUMN; known"
                f" are {', '.join(known_maps())}",
            )
        return mapped(iter(self.rows()), self.by, self.name, self.root)

    def answers(self) -> Iterator[Json]:
        """Rows of a table of candidates."""
        return (row for each in self.found() for row in each.answers)


def of_file(path: Path, root: Path | None = None, by: Map | None = None) -> Foreign:
    """A table. Raises UsageError where it cannot be read."""
    columns = columns_of(path)
    rows, digest = partial(rows_of, path, columns), partial(file_sha256, path)
    return Foreign(shown(path), columns, rows, root or path.parent, digest, by or map_of(columns))


def of_rows(name: str, rows: Sequence[Json], root: Path, by: Map | None = None) -> Foreign:
    columns = list(dict.fromkeys(column for row in rows for column in row))
    digest = partial(stable_hash, rows)
    return Foreign(name, columns, lambda: rows, root, digest, by or map_of(columns))


def of_folder(path: Path, by: Map | None = None) -> Foreign | None:
    """A folder that a map knows by its files; None where none does."""
    if not path.is_dir():
        return None
    for each in [by] if by else known_maps().values():
        files = sorted(file for wanted in each.files for file in path.glob(wanted))
        if files and each.columns:
            table = of_file(files[0], path, each)
            if by or set(each.columns) <= set(table.columns):
                return table
        elif files:
            rows = [_of_program(file, path) for file in files]
            return of_rows(shown(path), rows, path, each)
    return None


def _of_program(file: Path, root: Path) -> Json:
    beside = {each.stem: read_json(each) for each in sorted(file.parent.glob("*.json"))}
    return {"text": read_text(file), "folder": file.parent.relative_to(root).as_posix(), **beside}
