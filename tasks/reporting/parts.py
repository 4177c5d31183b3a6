"""Parts of a page: sections, tables, lists, figures and links.

Guarantees: strings are raw, and `tasks.reporting.page` escapes them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

from tasks.reporting.text import moment

Item = TypeVar("Item")


@dataclass(frozen=True)
class Bullets:
    """A list, one item a line."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """A link; an address that is not http(s) stays text."""

    text: str
    url: str


@dataclass(frozen=True)
class LocalLink(Link):
    """A link to a file beside the page's, by the `as_uri` of a path; text in Markdown, which a
    server shows."""


Cell = str | Link | None


@dataclass(frozen=True)
class Table:
    """The first `keys` cells name a row; HTML folds rows whose other cells hold no finding. 0:
    every row is shown."""

    header: Sequence[str]
    rows: Sequence[Sequence[Cell]]
    keys: int = 0


@dataclass(frozen=True)
class Picture:
    """A figure's name with its caption. Markdown shows `file`, which lies beside the page."""

    name: str
    caption: str
    file: str = ""


@dataclass(frozen=True)
class Code:
    """A preformatted block."""

    text: str


@dataclass(frozen=True)
class Links:
    """Links on one line, None left out."""

    items: tuple[Link | None, ...]


@dataclass(frozen=True)
class Section:
    """A heading and its content; nested sections are folded."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Columns:
    """Parts or sections side by side, where there is room."""

    parts: tuple[Part, ...]


Part = str | Table | Bullets | Picture | Code | Links | Columns | Section


def table_of(rows: Iterable[Item], columns: Mapping[str, Callable[[Item], Cell]]) -> Table:
    cells = [[cell(row) for cell in columns.values()] for row in rows]
    shown = [name for name, *values in zip(columns, *cells, strict=True) if any(values)]
    places = [list(columns).index(name) for name in shown]
    return Table(tuple(shown), [tuple(row[place] for place in places) for row in cells])


def fields_table(rows: Iterable[object], *columns: str) -> Table:
    cells = {name.replace("_", " "): partial(_cell_of, name) for name in columns}
    return table_of(rows, cells)


def _cell_of(name: str, row: object) -> Cell:
    value = row[name] if isinstance(row, Mapping) else getattr(row, name)
    if value is None or isinstance(value, str | Link):
        return moment(value) if name.endswith("_at") and isinstance(value, str) else value
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count:,}" for name, count in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
