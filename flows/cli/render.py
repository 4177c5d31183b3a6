"""Draw for a person the data that a command prints with `--json`.

Guarantees: every key of the data appears, unless it has no value: plain values as `name value`
lines, mappings as sections, lists of mappings as tables. A table wider than the page is continued
in a second one that repeats what names its rows; links stand below it, each on one line; what all
of its rows share above it; a single row that is too long becomes a section. Nothing printed acts on
a terminal. A long text may be cut.
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from tasks.reporting.text import interval, moment

Json = dict[str, Any]

PIPE_WIDTH = 140
"""Columns of a page that is written to a pipe or a file."""
LINE_CHARS = 100
"""Longest list or mapping that is written on one line."""
CELL_CHARS = 60
"""Widest column of text; longer cells are folded."""
MOST_CHARS = 400
"""Characters of a value, of which a cell shows no more; `--json` has the whole."""
HEADING_CHARS = 14
"""Longest heading of a column that is not folded for narrow cells."""
BORDER = 3
"""Characters beside each column of a table."""
MOST_NAMING = 3
"""Most columns that a table which is continued repeats, to tell its rows apart."""
SHARED_ROWS = 3
"""Fewest rows of a table whose common values are said once instead of in each row."""
_INTERVAL = {"value", "lower", "upper"}
_SHARE = re.compile(r"exec$|fast_|.*_share$")
_NAME = re.compile(r"(?!fast_\d)[a-z][a-z0-9]*(_[a-z0-9]+)+")


def render(data: Json) -> str:
    """Return the page of a command's data."""
    return "\n".join(_blocks(data, ""))


# -- sections --------------------------------------------------------------------------------------


def _blocks(data: Mapping[str, Any], title: str) -> list[str]:
    pairs: dict[str, list[str]] = {}
    below: list[str] = []
    for name, value in data.items():
        plain = _plain_lines(name, value)
        unknown = _is_interval(value) and value["value"] is None
        if value is None or value == "" or unknown:
            continue
        if plain is not None:
            pairs[label(name)] = plain
            continue
        heading = f"{title}: {label(name)}" if title else label(name)
        rows = _rows(value)
        if rows is None:
            below += ["", heading, *_blocks(value, heading)]
        elif len(rows) == 1 and not _fits(rows[0]):
            below += ["", heading, *_blocks(rows[0], heading)]
        else:
            below += _table(rows, heading)
    return [_pairs(pairs), *below] if pairs else below


def _plain_lines(name: str, value: Any) -> list[str] | None:
    if isinstance(value, Mapping) and not _is_interval(value):
        inline = inline_text(value)
        flat = not any(isinstance(each, Mapping | list) for each in value.values())
        return [inline] if flat and len(inline) <= LINE_CHARS else None
    if isinstance(value, list):
        if any(isinstance(each, Mapping) for each in value):
            return None
        line = text_of(name, value)
        if len(line) > LINE_CHARS:
            return [text_of(name, each) for each in value]
        return [line]
    return [text_of(name, value)[:MOST_CHARS]]


def _pairs(pairs: Mapping[str, list[str]]) -> str:
    width = max(map(len, pairs))
    lines = []
    for name, values in pairs.items():
        lines.append(f"{name:{width}}  {values[0]}")
        lines += [f"{'':{width}}  {more}" for more in values[1:]]
    return "\n".join(lines)


def _rows(value: Any) -> list[Json] | None:
    if isinstance(value, list):
        return [dict(each) if isinstance(each, Mapping) else {"": each} for each in value]
    of_mappings = all(isinstance(each, Mapping) and each for each in value.values())
    if len(value) > 1 and of_mappings:
        return [{"": name} | dict(row) for name, row in value.items()]
    return None


# -- tables ----------------------------------------------------------------------------------------


def _table(rows: Sequence[Mapping[str, Any]], title: str) -> list[str]:
    """The rows as tables no wider than the page. A column without any value is left out."""
    from rich.console import Console

    console = Console(width=_page_width())
    columns: dict[str, list[Any]] = {}
    links = []
    shared = _shared_values(rows)
    for name in dict.fromkeys(name for row in rows for name in row):
        if name in shared:
            continue
        values = [row.get(name) for row in rows]
        if any(_is_link(value) for value in values):
            links.append(name)
        elif any(value not in (None, "", []) for value in values):
            columns[name] = values
    tables = ["", title]
    if shared:
        tables += _shared_lines(shared, console.width)
    tables += [_drawn(console, part) for part in _split(columns, console.width)]
    first = next(iter(columns), "")
    for name in links:
        lines: dict[str, list[str]] = {}
        for row in rows:
            if row.get(name):
                lines.setdefault(text_of(first, row.get(first)), []).append(clean_line(row[name]))
        tables += ["", f"{title}: {label(name)}", _pairs(lines)]
    return tables


def _shared_values(rows: Sequence[Mapping[str, Any]]) -> Json:
    """The values that all rows of a long table share; never those of the first column."""
    if len(rows) < SHARED_ROWS:
        return {}
    first, *others = rows
    names = list(first)[1:]
    shared = {
        name: first[name]
        for name in names
        if all(name in row and row[name] == first[name] for row in others)
    }
    return {
        name: value
        for name, value in shared.items()
        if value not in (None, "", [], {}) and not _is_link(value)
    }


def _shared_lines(shared: Json, width: int) -> list[str]:
    """One paragraph: `the same in every row: seed 0; trace flags: left_out 0`."""
    texts = [f"{label(name)} {text_of(name, value)}"[:MOST_CHARS] for name, value in shared.items()]
    return textwrap.wrap(f"the same in every row: {'; '.join(texts)}", width - 1)


def _fits(row: Mapping[str, Any]) -> bool:
    columns = {name: [value] for name, value in row.items() if value not in (None, "", [])}
    return len(list(_split(columns, _page_width()))) <= 1


def _page_width() -> int:
    from rich.console import Console

    return Console().width if sys.stdout.isatty() else PIPE_WIDTH


def _split(columns: Mapping[str, list[Any]], width: int) -> Iterable[dict[str, list[Any]]]:
    if not columns:
        return
    names = dict(list(columns.items())[: _naming_columns(columns)])
    names_width = sum(_width(*column) + BORDER for column in names.items())
    part, used = dict(names), names_width
    for name, values in list(columns.items())[len(names) :]:
        needed = _width(name, values) + BORDER
        if len(part) > len(names) and used + needed >= width:
            yield part
            part, used = dict(names), names_width
        part[name] = values
        used += needed
    yield part


def _naming_columns(columns: Mapping[str, list[Any]]) -> int:
    rows = list(zip(*columns.values(), strict=True))
    for count in range(1, MOST_NAMING + 1):
        starts = {tuple(text_of("", value) for value in row[:count]) for row in rows}
        if len(starts) == len(rows):
            return count
    return 1


def _width(name: str, values: Iterable[Any]) -> int:
    heading = label(name)
    word = max([min(len(heading), HEADING_CHARS), *map(len, heading.split())])
    cell = max((len(text_of(name, value)) for value in values), default=0)
    return max(word, min(cell, CELL_CHARS), 1)


def _drawn(console: Any, columns: Mapping[str, list[Any]]) -> str:
    from rich.table import Table
    from rich.text import Text

    drawn = Table()
    for name, values in columns.items():
        justify: Any = "right" if all(map(_is_number, values)) else "left"
        drawn.add_column(
            Text(label(name)), justify=justify, overflow="fold", width=_width(name, values)
        )
    for cells in zip(*columns.values(), strict=True):
        texts = [text_of(name, value) for name, value in zip(columns, cells, strict=True)]
        drawn.add_row(*(Text(text[:MOST_CHARS]) for text in texts))
    with console.capture() as printed:
        console.print(drawn)
    return str(printed.get()).rstrip("\n")


# -- values ----------------------------------------------------------------------------------------


def label(name: str) -> str:
    """Return a key as words: `median_speedup` as `median speedup`; other texts stay."""
    *above, last = name.split(": ")
    words = last.replace("_", " ") if _NAME.fullmatch(last) else last
    return clean_line(": ".join([*map(label, above), words]))


def text_of(name: str, value: Any) -> str:
    """Return a value on one line; the name of its key says its unit."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(name, value)
    if isinstance(value, Mapping):
        return inline_text(value, name)
    if isinstance(value, list):
        return ", ".join(text_of(name, each) for each in value) or "none"
    if name.endswith("_at") and ":" in value:
        return clean_line(moment(value))
    return clean_line(value)


def inline_text(value: Mapping[str, Any], name: str = "") -> str:
    """Return a mapping on one line: `50.0 % (40.0 to 60.0)` or `1.2 (1.1 to 1.3)` of an interval,
    by its key's name, else `name 1, other 2`."""
    if _is_interval(value):
        form = ".1%" if _SHARE.match(name) else ".2x" if name.endswith("speedup") else ".4g"
        return interval(**value, form=form)
    return ", ".join(f"{clean_line(k)} {text_of(k, v)}" for k, v in value.items()) or "none"


def in_units(size: float) -> str:
    """Return bytes for a person, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def clean_line(text: object) -> str:
    """Return one line without characters that act on a terminal."""
    from tasks.reporting.text import clean

    return clean(text, one_line=True)


def _number(name: str, value: float) -> str:
    words = name.rpartition(": ")[2].split("_")
    if "bytes" in words:
        return in_units(value)
    if isinstance(value, int):
        return (
            f"{value:,}"
            if abs(value) >= 10_000 and words[-1] not in ("pid", "seed")
            else str(value)
        )
    if "share" in words:
        return f"{value:.1%}"
    number = f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{number}x" if words[-1] == "speedup" else number


def _is_link(value: Any) -> bool:
    return isinstance(value, str) and "://" in value and " " not in value


def _is_number(value: Any) -> bool:
    if isinstance(value, bool):
        return False
    return value is None or isinstance(value, int | float) or _is_interval(value)


def _is_interval(value: Any) -> bool:
    return isinstance(value, Mapping) and value.keys() == _INTERVAL
