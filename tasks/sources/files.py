"""The user's task files, and the checks and reading that task sources share. Code is parsed, never
run.

Guarantees: a task defines at module level its `entry_point` class, `get_inputs` and
`get_init_inputs`; task_ids are stable, and unique within a load.
"""

from __future__ import annotations

import ast
import csv
import re
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, KernelTask
from kernels_eval.source.syntax import UNPARSABLE, parse_source
from kernels_eval.written import json_of
from tasks.reporting.text import shortened
from tasks.sources.config import TasksConfig
from tasks.sources.syntax import defined_names

if TYPE_CHECKING:
    import polars as pl
    import pyarrow as pa

SHAPE = (
    "a task file defines `class {entry_point}(nn.Module)` with `forward`, `get_inputs()` returning"
    " the list of arguments for `forward`, and `get_init_inputs()` returning the list of"
    " constructor arguments ([] for none)"
)
REQUIRED_FUNCTIONS = ("get_inputs", "get_init_inputs")
SHOWN_ROWS = 3
BATCH_ROWS = 256
LINES = (".jsonl", ".ndjson", ".csv")
"""Tables of text: JSON lines, and CSV with a header."""
TEXTS = (*LINES, ".json")
"""The same, and JSON: rows, a list of them, or lists of them by the `group` that they belong to."""
GROUP = "group"
ARROW = (".arrow", ".feather")
MAGIC = {
    b"PAR1": "Parquet",
    b"ARROW1": "Arrow",
    b"\x1f\x8b": "packed by gzip",
    b"\x28\xb5\x2f\xfd": "packed by zstd",
    b"\xfd7zXZ": "packed by xz",
    b"BZh": "packed by bzip2",
    b"PK\x03\x04": "an archive or a spreadsheet",
    b"SQLite format 3": "a database",
}
"""Kinds of files by their first bytes."""
HEAD_BYTES = 4096
UNPACKED = "give Parquet, Arrow, JSON or CSV, unpacked and with its own suffix"
COLUMNS = ("name", "code")
OPTIONAL_COLUMNS = ("name", "task_id", "entry_point", "init_form", "source", "level")


def from_config(config: TasksConfig) -> list[KernelTask]:
    """Tasks of the configured place. Raises UsageError without one."""
    if not config.location:
        raise UsageError(
            "tasks.source is 'files' but tasks.location is not set", "--set tasks.location=PATH"
        )
    return load(config.location, config.code_column)


def load(location: str | Path, code_column: str = "code") -> list[KernelTask]:
    """Tasks of a .py file, a folder (its direct .py files without `_*.py`), or a table: Parquet,
    JSON lines (.jsonl) or CSV.

    A file's task_id is `user/{stem}`. A table has programs in `code_column`, and perhaps
    KernelTask's other columns. Raises UsageError with the file, the fault and the expected form.
    """
    path = existing(location)
    others = [name for name in OPTIONAL_COLUMNS if name != code_column]
    tasks: dict[str, KernelTask] = {}
    for number, (where, row) in enumerate(read_rows(path, [code_column], others)):
        if code_column not in row:
            raise UsageError(
                f"{where} has no {code_column}", f"it has {', '.join(row) or 'nothing'}"
            )
        given = {key: row[key] for key in others if row.get(key) is not None}
        if "name" not in row:
            given["name"] = given.get("task_id", f"{path.stem}_{number}")
        given = {"task_id": f"user/{given.get('name')}", **given, "code": row[code_column]}
        task = checked_task(given, where)
        if task.task_id in tasks:
            raise UsageError(
                f"{where}: task_id {task.task_id} occurs twice",
                "give every row a task_id of its own",
            )
        tasks[task.task_id] = task
    if not tasks:
        raise UsageError(f"{path} has no rows", "give a table with one task per row")
    return list(tasks.values())


def read_rows(
    path: Path, columns: Sequence[str], optional: Sequence[str] = ()
) -> Iterator[tuple[str, Json]]:
    """Rows, each with its place in words, of .py files (`name`, and the text in the last of
    `columns`), JSON lines, CSV or Parquet. Raises UsageError for unreadable input and missing files
    or columns."""
    from tasks.typed import typed_row

    if path.is_dir() or path.suffix == ".py":
        found = [path] if path.suffix == ".py" else sorted(path.glob("[!_]*.py"))
        files = [file for file in found if file.is_file()]
        if not files:
            raise UsageError(
                f"{path} holds no .py file",
                "give a folder of .py files, one task per file, or a Parquet or JSON lines file"
                " (`concur import` makes one of deeper folders)",
            )
        for file in files:
            yield str(file), {"name": file.stem, columns[-1]: read_text(file)}
        return
    if path.suffix in TEXTS:
        rows: Iterable[Json] = read_lines(path)
    else:
        rows = read_parquet(path, columns, optional).iter_rows(named=True)
    for number, row in enumerate(rows):
        where = f"{path} row {number}"
        yield where, typed_row(row, where)


def check_task_source(code: str, entry_point: str, name: str) -> None:
    """Raise UsageError, prefixed by `name`, where `code` is not a task of class `entry_point`."""
    hint = SHAPE.format(entry_point=entry_point)
    try:
        body = parse_source(code).body
    except UNPARSABLE as error:
        cause = str(error) or type(error).__name__
        if isinstance(error, SyntaxError):
            cause = f"line {error.lineno}: {error.msg}"
        raise UsageError(f"{name} is not Python: {cause}", hint) from None
    functions = defined_names(body, ast.FunctionDef, ast.Assign)
    missing = [f"class {entry_point}"] * (entry_point not in defined_names(body, ast.ClassDef))
    missing += [f"{wanted}()" for wanted in REQUIRED_FUNCTIONS if wanted not in functions]
    if missing:
        raise UsageError(f"{name} does not define {' or '.join(missing)}", hint)


def checked_task(given: Json, where: str) -> KernelTask:
    """A row's task. Raises UsageError that begins with `where`."""
    try:
        task = KernelTask.model_validate(given)
    except ValidationError as error:
        raise UsageError(
            f"{where}: {first_line(error)}",
            "columns are those of KernelTask: task_id, name, code, ...",
        ) from error
    check_task_source(task.code, task.entry_point, f"{where} ({shown(task.name)})")
    return task


def local(location: str | Path) -> Path:
    """The path, `~` expanded. Raises UsageError for one that no file can have."""
    try:
        path = Path(location).expanduser()
        if not str(location):
            raise OSError("it is empty")
        path.exists()
    except (RuntimeError, OSError) as error:
        cause = getattr(error, "strerror", None) or error
        fix = "give a file, a folder or an id of the hub"
        raise UsageError(f"{shown(location)} is no path: {cause}", fix) from None
    return path


def existing(location: str | Path) -> Path:
    """The path, `~` expanded. Raises UsageError where nothing is there."""
    path = local(location)
    if not path.exists():
        raise UsageError(
            f"{path} does not exist", "give a .py file, a folder or a Parquet file that exists"
        )
    return path


def read_text(path: Path) -> str:
    """A source file's text. Raises UsageError unless it is UTF-8."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(
            f"cannot read {path}: {error}", "give a UTF-8 text file that this user may read"
        ) from error


def read_json(path: Path) -> Any:
    """What a JSON file holds. Raises UsageError."""
    try:
        return json_of(read_text(path))
    except ValueError as error:
        raise UsageError(f"{shown(path)} is not JSON: {error}", "give a complete file") from error


def read_lines(path: Path) -> Iterator[Json]:
    """Rows of JSON (empty lines skipped) or CSV (all text, empty as None). Raises UsageError naming
    a bad line."""
    try:
        with path.open(
            encoding="utf-8-sig", newline="" if path.suffix == ".csv" else "\n"
        ) as handle:
            yield from (_csv_rows if path.suffix == ".csv" else _json_rows)(handle, path)
    except csv.Error as error:
        fix = "separate fields by commas, and quote those that hold commas or line ends"
        raise UsageError(f"cannot read {path}: {error}", fix) from error
    except (OSError, UnicodeDecodeError) as error:
        if kind := kind_of(path):
            raise UsageError(f"cannot read {shown(path)}: it is {kind}", UNPACKED) from error
        raise UsageError(f"cannot read {path}: {error}", "give a complete file in UTF-8") from error


def kind_of(path: Path) -> str:
    """What a file is by its first bytes; "" where they tell nothing."""
    try:
        with path.open("rb") as handle:
            head = handle.read(HEAD_BYTES)
    except OSError:
        return ""
    for magic, kind in MAGIC.items():
        if head.startswith(magic):
            return kind
    try:
        line = head.decode("utf-8-sig", "ignore" if len(head) == HEAD_BYTES else "strict").lstrip()
    except UnicodeDecodeError:
        return ""
    if not line or "\0" in line:
        return ""
    if line[0] in "{[":
        return "JSON"
    return "text with tabs" if "\t" in line.splitlines()[0] else "text"


def _csv_rows(handle: TextIO, path: Path) -> Iterator[Json]:
    csv.field_size_limit(sys.maxsize)
    table = csv.DictReader(handle, strict=True)
    names = [name for name in table.fieldnames or () if name]
    if len(names) == 1 and "\t" in names[0]:
        raise UsageError(f"{shown(path)} is text with tabs", "separate its fields by commas")
    refuse_repeated(path, names)
    for row in table:
        if None in row:
            raise UsageError(
                f"{path} line {table.line_num} has more fields than the header",
                "quote fields that hold commas or line ends",
            )
        yield {name: value or None for name, value in row.items()}


def _json_rows(handle: TextIO, path: Path) -> Iterator[Json]:
    """An object a line, or one value; of public sets some say .json for the first, .jsonl for the
    second."""
    whole = path.suffix == ".json"
    if whole or not _is_json(handle.readline()):
        handle.seek(0)
        try:
            held = json_of(handle.read())
        except ValueError as error:
            handle.seek(0)
            if whole and not _is_json(handle.readline()):
                raise UsageError(f"{path} is not JSON: {error}", "give a complete file") from error
        else:
            yield from _grouped_rows(held, path)
            return
    handle.seek(0)
    for number, line in enumerate(handle, start=1):
        if line.strip():
            try:
                row, fault = json_of(line), "is not a JSON object"
            except ValueError as error:
                row, fault = None, f"is not JSON: {error}"
            if not isinstance(row, dict):
                raise UsageError(
                    f"{path} line {number} {fault}", "give a file with one JSON object per line"
                )
            yield row


def _is_json(text: str) -> bool:
    try:
        json_of(text)
    except ValueError:
        return False
    return True


def _grouped_rows(held: object, path: Path) -> Iterator[Json]:
    groups = {"": held} if isinstance(held, list) else held
    if not isinstance(groups, dict) or not all(isinstance(each, list) for each in groups.values()):
        groups = {"": [held]}  # one object
    for name, rows in groups.items():
        for row in rows:
            if not isinstance(row, dict):
                raise UsageError(f"{path} holds {type(row).__name__}", "give a list of objects")
            yield {GROUP: name, **row} if name else row


@contextmanager
def reading_parquet(path: Path) -> Iterator[None]:
    import polars as pl
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException, pl.exceptions.PolarsError) as error:
        wanted = "Arrow" if path.suffix in ARROW else "Parquet"
        kind = kind_of(path)
        if kind not in ("", "Parquet", "Arrow"):
            raise UsageError(f"cannot read {shown(path)}: it is {kind}", UNPACKED) from error
        raise UsageError(
            f"cannot read {shown(path)} as {wanted}: {shown(error)}", "give a complete file"
        ) from error


def columns_of(path: Path) -> list[str]:
    """A table's column names. Raises UsageError."""
    import pyarrow.parquet as pq

    if path.suffix in TEXTS:
        return list(dict.fromkeys(name for row in read_lines(path) for name in row))
    with reading_parquet(path):
        names = (_arrow(path).schema if path.suffix in ARROW else pq.read_schema(path)).names
    refuse_repeated(path, names)
    return list(names)


def refuse_repeated(path: Path, names: Sequence[str]) -> None:
    """Raise UsageError for a table with two columns of one name: nobody knows which is meant."""
    if repeated := [name for name, count in Counter(names).items() if count > 1]:
        raise UsageError(
            f"{path} has the column {shown(repeated[0])!r} more than once", "rename all but one"
        )


def read_parquet(path: Path, columns: Sequence[str], optional: Sequence[str] = ()) -> pl.DataFrame:
    """`columns`, and those of `optional` that exist. Raises UsageError naming missing ones."""
    import polars as pl

    present = columns_of(path)
    if missing := [column for column in columns if column not in present]:
        raise UsageError(
            f"{path} has no column {', '.join(missing)}", f"its columns are {', '.join(present)}"
        )
    wanted = [*columns, *(column for column in optional if column in present)]
    if path.suffix in (*TEXTS, *ARROW):
        from tasks.typed import typed_row

        found = enumerate(rows_of(path, wanted))
        rows = [typed_row(row, f"{path} row {number}") for number, row in found]
        return pl.DataFrame(rows, infer_schema_length=None, strict=False)
    with reading_parquet(path):
        return pl.read_parquet(path, columns=wanted)


def rows_of(path: Path, columns: Sequence[str]) -> Iterator[Json]:
    """Rows with these columns, `BATCH_ROWS` at a time. Raises UsageError for a truncated file."""
    import pyarrow.parquet as pq

    if path.suffix in TEXTS:
        yield from ({name: row.get(name) for name in columns} for row in read_lines(path))
        return
    if path.suffix in ARROW:
        with reading_parquet(path):
            yield from _arrow(path).select(list(columns)).to_pylist(maps_as_pydicts="lossy")
        return
    with reading_parquet(path), pq.ParquetFile(path) as table:
        for batch in table.iter_batches(BATCH_ROWS, columns=list(columns)):
            yield from batch.to_pylist(maps_as_pydicts="lossy")


def _arrow(path: Path) -> pa.Table:
    """A table of `datasets.save_to_disk`, or a file of Arrow or Feather."""
    import pyarrow as pa

    with pa.memory_map(str(path)) as source:
        kind = pa.ipc.open_file if source.read(6) == b"ARROW1" else pa.ipc.open_stream
        source.seek(0)
        return kind(source).read_all()


def number_of(value: object) -> int | None:
    """The first whole number in a value: 3, 3.0, "3", "level_3" and "3_Softmax" give 3."""
    found = None if value is None else re.search(r"\d+", str(value))
    return int(found[0]) if found else None


def shown(text: object, length: int = 200) -> str:
    """Foreign text made safe for one terminal line: printable, at most `length` characters."""
    text = "".join(c if c.isprintable() else "?" for c in str(text))
    return shortened(text, length)


def tasks_of_rows(
    rows: Iterable[Json],
    make: Callable[[Json], KernelTask],
    where: str,
    limit: int | None = None,
) -> list[KernelTask]:
    """The first `limit` tasks (None: all) that `make` builds of rows.

    Broken and repeated rows are left out with one warning.
    """
    tasks: dict[str, KernelTask] = {}
    broken: list[str] = []
    for number, row in enumerate(rows):
        if len(tasks) == limit:
            break
        try:
            task = make(row)
            check_task_source(task.code, task.entry_point, task.task_id)
            if task.task_id in tasks:
                raise UsageError(f"{task.task_id} occurs twice")
        except (UsageError, ValidationError) as error:
            broken.append(f"row {number}: {first_line(error)}")
        else:
            tasks[task.task_id] = task
    if broken:
        told = "; ".join(broken[:SHOWN_ROWS]) + ("; ..." if len(broken) > SHOWN_ROWS else "")
        warnings.warn(
            f"{where}: {len(broken)} of {len(tasks) + len(broken)} rows left out ({told})",
            stacklevel=3,
        )
    return list(tasks.values())


def first_line(error: Exception) -> str:
    """The error without hint and pydantic's page."""
    if isinstance(error, ValidationError):
        return "; ".join(
            f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
        )
    return str(error.args[0]).splitlines()[0]
