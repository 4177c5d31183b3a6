"""A static site that shows candidates: an index of small columns, and their texts in chunks that
the page loads when it needs them.

Guarantees: opens from disk (`file://`) and from any web server, and asks nothing of other machines;
what models wrote is only in compressed chunks, in which nothing can be taken for markup or script,
and the page shows it as text; the index is written last, so that a reader finds the old candidates
or the new; the same rows give the same bytes, so that a second writing changes only what is new.
Takes the memory of the index and one chunk. Does not guarantee room: texts take about a third of
their length.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import inspect
import shutil
from collections.abc import Iterable, Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
from pydantic_core import to_json

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason
from tasks.files import atomic_write, explain_write_errors

STATIC = Path(__file__).with_name("static")
COLUMNS = {
    "id": pl.String,
    "task": pl.String,
    "set": pl.String,
    "model": pl.String,
    "status": pl.String,
    "reason": pl.String,
    "flags": pl.String,
    "strategies": pl.String,
    "speedup": pl.Float64,
    "lower": pl.Float64,
    "upper": pl.Float64,
    "tokens": pl.Int64,
}
"""Of the index. `flags` and `strategies` hold names with tabs between them; `lower` and `upper`
bound `speedup`; `tokens` is the reasoning length."""
CHUNK_BYTES = 1_000_000
"""Of JSON before compression: what a page loads to show one candidate, and a few more."""
PAGE, INDEX = "index.html", "data/index.js"


def write_site(
    directory: Path, index: pl.DataFrame, details: Iterable[Mapping[str, Any]], **about: Any
) -> Path:
    """Write the site of the candidates in `index` (`COLUMNS`); returns its first page.

    `details` has one mapping per row of the index, in its order: what the candidate's page shows.
    `about` is what else the page gets: title, models (rows of a table) and figure (SVG). Raises
    UsageError where the directory holds something else, or cannot be written.
    """
    if directory.exists() and any(directory.iterdir()) and not (directory / INDEX).exists():
        raise UsageError(f"{directory} holds other files", "name a new folder with --out")
    with explain_write_errors(directory, "choose another --out, or free some disk"):
        shutil.copytree(STATIC, directory, dirs_exist_ok=True)
        chunks: list[str] = []
        starts: list[int] = []
        for start, rows in _chunks(details):
            packed = _packed(rows)
            chunks.append(f"chunk-{hashlib.sha256(packed).hexdigest()[:16]}")
            starts.append(start)
            path = directory / "data" / f"{chunks[-1]}.js"
            if not path.exists():
                atomic_write(path, _script(chunks[-1], packed))
        columns = {name: _column(index[name].cast(kind)) for name, kind in COLUMNS.items()}
        told = {"columns": columns, "chunks": chunks, "starts": starts, "reasons": reasons()}
        atomic_write(directory / INDEX, _script("index", _packed(to_json(about | told))))
        for path in (directory / "data").glob("chunk-*.js"):
            if path.stem not in set(chunks):
                path.unlink()
    return directory / PAGE


def reasons() -> dict[str, str]:
    """What each reason of a verdict means, in a sentence: the docstrings of `Reason`."""
    (defined,) = ast.parse(inspect.getsource(Reason)).body
    assert isinstance(defined, ast.ClassDef)
    return {
        str(ast.literal_eval(name.value)): str(ast.literal_eval(says.value))
        for name, says in pairwise(defined.body)
        if isinstance(name, ast.Assign) and isinstance(says, ast.Expr)
    }


def _chunks(details: Iterable[Mapping[str, Any]]) -> Iterator[tuple[int, bytes]]:
    """The number of the first row, and the rows as a JSON list."""
    start, size, rows = 0, 0, list[bytes]()
    for row in details:
        rows.append(to_json(row, inf_nan_mode="null"))
        size += len(rows[-1])
        if size > CHUNK_BYTES:
            yield start, b"[" + b",".join(rows) + b"]"
            start, size, rows = start + len(rows), 0, []
    if rows:
        yield start, b"[" + b",".join(rows) + b"]"


def _packed(data: bytes) -> bytes:
    return base64.b64encode(gzip.compress(data, 6, mtime=0))


def _script(name: str, packed: bytes) -> bytes:
    """A script, because a page that was opened from disk may not fetch; base64 holds no `<`."""
    return b'register("%s","%s")\n' % (name.encode(), packed)


def _column(values: pl.Series) -> Any:
    """Numbers and ids as they are; other texts as their values and, per row, the number of one."""
    if values.name == "id" or values.dtype != pl.String:
        return (values.round_sig_figs(5) if values.dtype.is_float() else values).to_list()
    values = values.fill_null("")
    numbers = (values.rank("dense") - 1).to_list()
    return {"values": values.unique().sort().to_list(), "rows": numbers}
