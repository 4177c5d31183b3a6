"""Pages as lists of sections, for HTML and Markdown (`templates/sections.j2`). Strings are raw:
`tasks.reporting.page` escapes them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.reporting.page import Bullets, Cell, Form, Link, Table, page_of

TEMPLATE = Path(__file__).parent / "templates" / "sections.j2"


@dataclass(frozen=True)
class Picture:
    """A figure's name with its caption."""

    name: str
    caption: str


@dataclass(frozen=True)
class Code:
    """A preformatted block."""

    text: str


@dataclass(frozen=True)
class Links:
    """Links on one line, None left out."""

    items: tuple[Link | None, ...]


@dataclass(frozen=True)
class Definitions:
    """Folded lines: a term, and what it means."""

    items: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Section:
    """A heading and its content; nested sections are folded."""

    title: str
    parts: tuple[Part, ...]


@dataclass(frozen=True)
class Columns:
    """Parts or sections side by side, where there is room."""

    parts: tuple[Part, ...]


Part = str | Table | Bullets | Picture | Code | Links | Definitions | Columns | Section


def write_page(
    form: Form,
    *,
    title: str,
    facts: Sequence[str],
    sentence: str,
    sections: Sequence[Section | Columns],
    drawn: Mapping[str, str],
) -> str:
    """The page as HTML or Markdown. `drawn` maps names to SVG; Markdown only names figures."""
    return page_of(
        TEMPLATE,
        form,
        title=title,
        facts=facts,
        sentence=sentence,
        drawn=drawn,
        sections=sections,
        kind_of=lambda part: type(part).__name__,
    )


def fields_table(rows: Iterable[object], *columns: str) -> Table:
    """A row per record or mapping, a column per field with content."""
    cells = [[_cell(_field(row, name)) for name in columns] for row in rows]
    shown = [place for place in range(len(columns)) if any(row[place] for row in cells)]
    header = tuple(columns[place].replace("_", " ") for place in shown)
    return Table(header, [tuple(row[place] for place in shown) for row in cells])


def _field(row: object, name: str) -> object:
    return row[name] if isinstance(row, Mapping) else getattr(row, name)


def _cell(value: object) -> Cell:
    """A field as text: counts with separators, numbers with three digits, mappings as names and
    counts."""
    if value is None or isinstance(value, str | Link):
        return value
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return ", ".join(f"{name} {count:,}" for name, count in value.items())
    if isinstance(value, tuple | list):
        return ", ".join(map(str, value))
    return f"{value:,}" if isinstance(value, int) else str(value)
