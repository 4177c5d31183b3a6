"""A static site of candidates: a small index, and texts in chunks loaded on demand.

Guarantees: opens from `file://` and any web server, asks nothing of other machines; candidate text
is inert; the index is written last.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import inspect
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path

import polars as pl
from pydantic_core import to_json

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason, Row
from kernels_eval.source.syntax import parse_source
from kernels_eval.written import json_of
from tasks.files import atomic_write, explain_write_errors
from tasks.tables import VIEWED, columns_of

STATIC = Path(__file__).with_name("static")
COLUMNS = columns_of(VIEWED)
"""Columns of the index. `flags` and `strategies` hold names with tabs between them; `lower` and
`upper` bound `speedup`; `share` is own kernels' of the time; `tokens` is the reasoning length;
`screened` says of a right answer that it is not confirmed;
`bottleneck` and `sol_score` are a profile's."""
CHUNK_BYTES = 1_000_000
"""Bytes of JSON before compression that a page loads to show one candidate."""
PAGE, INDEX = "index.html", "data/index.js"
KEPT = "chunks.json"
"""The site's chunks, each with its candidates' keys."""
Chunk = tuple[str, list[str]]
Details = Callable[[pl.Series], Iterable[Row]]


def write_site(directory: Path, index: pl.DataFrame, details: Details, **about: object) -> Path:
    """Write the site of the candidates in `index`; returns its first page.

    `index` has COLUMNS and a unique `key`. Existing chunks stay if all their keys are wanted;
    `details` gets the other keys, in order, and yields their pages' content. `about` has the title
    and models (rows of a table). Raises UsageError where the directory holds something else or
    cannot be written.
    """
    made = any((directory / name).exists() for name in (INDEX, KEPT))
    if directory.exists() and any(directory.iterdir()) and not made:
        raise UsageError(f"{directory} holds other files", "name a new folder with --out")
    with explain_write_errors(directory, "choose another --out, or free some disk"):
        chunks = _kept(directory, set(index["key"]))
        old = pl.Series([key for _, keys in chunks for key in keys], dtype=pl.String)
        new = index["key"].filter(~index["key"].is_in(old.implode()))
        try:
            for chunk in _written(directory, details(new), iter(new)):
                chunks.append(chunk)
        finally:  # also where it is interrupted: the next writing takes up what is there
            atomic_write(directory / KEPT, to_json(chunks))
        shutil.copytree(STATIC, directory, dirs_exist_ok=True)
        names, held = [name for name, _ in chunks], [keys for _, keys in chunks]
        order = pl.DataFrame({"key": list(chain.from_iterable(held))}, {"key": pl.String})
        index = order.join(index, on="key", how="left", maintain_order="left")
        columns = {name: _column(index[name].cast(kind)) for name, kind in COLUMNS.items()}
        starts = list(accumulate(map(len, held), initial=0))[:-1]
        told = {"columns": columns, "chunks": names, "starts": starts, "reasons": reasons()}
        atomic_write(directory / INDEX, _script("index", _packed(to_json(about | told))))
        for path in (directory / "data").glob("chunk-*.js"):
            if path.stem not in set(names):
                path.unlink()
    return directory / PAGE


def _kept(directory: Path, wanted: set[str]) -> list[Chunk]:
    try:
        chunks = json_of((directory / KEPT).read_bytes())
    except (OSError, ValueError):
        return []
    there = {path.stem for path in (directory / "data").glob("chunk-*.js")}
    return [(name, keys) for name, keys in chunks if name in there and wanted.issuperset(keys)]


def _written(directory: Path, details: Iterable[Row], keys: Iterator[str]) -> Iterator[Chunk]:
    for rows in _chunks(details):
        packed = _packed(b"[" + b",".join(rows) + b"]")
        name = f"chunk-{hashlib.sha256(packed).hexdigest()[:16]}"
        atomic_write(directory / "data" / f"{name}.js", _script(name, packed))
        yield name, list(islice(keys, len(rows)))


def reasons() -> dict[str, str]:
    """Meaning of each verdict reason, from the docstrings of `Reason`."""
    (defined,) = parse_source(inspect.getsource(Reason)).body
    assert isinstance(defined, ast.ClassDef)
    return {
        str(ast.literal_eval(name.value)): str(ast.literal_eval(says.value))
        for name, says in pairwise(defined.body)
        if isinstance(name, ast.Assign) and isinstance(says, ast.Expr)
    }


def _chunks(details: Iterable[Row]) -> Iterator[list[bytes]]:
    size, rows = 0, list[bytes]()
    for row in details:
        rows.append(to_json(row, inf_nan_mode="null"))
        size += len(rows[-1])
        if size > CHUNK_BYTES:
            yield rows
            size, rows = 0, []
    if rows:
        yield rows


def _packed(data: bytes) -> bytes:
    # half the time of zlib's default 6, for 9 % more bytes
    return base64.b64encode(gzip.compress(data, 4, mtime=0))


def _script(name: str, packed: bytes) -> bytes:
    """A script with base64: pages opened from disk may not fetch, and base64 holds no `<`."""
    return b'register("%s","%s")\n' % (name.encode(), packed)


def _column(values: pl.Series) -> object:
    if values.name == "id" or values.dtype != pl.String:
        return (values.round_sig_figs(5) if values.dtype.is_float() else values).to_list()
    values = values.fill_null("")
    numbers = (values.rank("dense") - 1).to_list()
    return {"values": values.unique().sort().to_list(), "rows": numbers}
