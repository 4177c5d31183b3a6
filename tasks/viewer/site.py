"""A static site that shows candidates: an index of small columns, and their texts in chunks that
the page loads when it needs them.

Guarantees: opens from disk (`file://`) and from any web server, and asks nothing of other machines;
what models wrote is only in compressed chunks, in which nothing can be taken for markup or script,
and the page shows it as text; the index is written last, so that a reader finds the old candidates
or the new; a second writing reads and writes the texts of new candidates only, and of those whose
chunk held one that changed or went. Takes the memory of the index and one chunk. Does not guarantee
room: texts take about a third of their length.
"""

from __future__ import annotations

import ast
import base64
import gzip
import hashlib
import inspect
import json
import shutil
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain, islice, pairwise
from pathlib import Path

import polars as pl
from pydantic_core import to_json

from kernels_eval.errors import UsageError
from kernels_eval.records import Reason, Row
from kernels_eval.source.syntax import parse_source
from tasks.files import atomic_write, explain_write_errors
from tasks.tables import VIEWED

STATIC = Path(__file__).with_name("static")
COLUMNS = pl.DataFrame(VIEWED.empty_table()).schema
"""Of the index. `flags` and `strategies` hold names with tabs between them; `lower` and `upper`
bound `speedup`; `tokens` is the reasoning length; `bottleneck` and `sol_score` are of a profile."""
CHUNK_BYTES = 1_000_000
"""Of JSON before compression: what a page loads to show one candidate, and a few more."""
PAGE, INDEX = "index.html", "data/index.js"
KEPT = "chunks.json"
"""The chunks of the site, each with the keys of its candidates."""
Chunk = tuple[str, list[str]]
Details = Callable[[pl.Series], Iterable[Row]]


def write_site(directory: Path, index: pl.DataFrame, details: Details, **about: object) -> Path:
    """Write the site of the candidates in `index`; returns its first page.

    `index` has COLUMNS and `key`, which names all that the candidate's page shows, and no two have
    the same. Of a site that lies there, chunks stay whose keys are all wanted. `details` gets the
    keys of the others, in the order of the index, and yields what their pages show. `about` is what
    else the page gets: title, models (rows of a table) and figure (SVG). Raises UsageError where
    the directory holds something else, or cannot be written.
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
    """The chunks of an earlier writing that hold nothing but what is wanted."""
    try:
        chunks = json.loads((directory / KEPT).read_bytes())
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
    """What each reason of a verdict means, in a sentence: the docstrings of `Reason`."""
    (defined,) = parse_source(inspect.getsource(Reason)).body
    assert isinstance(defined, ast.ClassDef)
    return {
        str(ast.literal_eval(name.value)): str(ast.literal_eval(says.value))
        for name, says in pairwise(defined.body)
        if isinstance(name, ast.Assign) and isinstance(says, ast.Expr)
    }


def _chunks(details: Iterable[Row]) -> Iterator[list[bytes]]:
    """The rows as JSON, so many at a time as a chunk holds."""
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
    """A script, because a page that was opened from disk may not fetch; base64 holds no `<`."""
    return b'register("%s","%s")\n' % (name.encode(), packed)


def _column(values: pl.Series) -> object:
    """Numbers and ids as they are; other texts as their values and, per row, the number of one."""
    if values.name == "id" or values.dtype != pl.String:
        return (values.round_sig_figs(5) if values.dtype.is_float() else values).to_list()
    values = values.fill_null("")
    numbers = (values.rank("dense") - 1).to_list()
    return {"values": values.unique().sort().to_list(), "rows": numbers}
