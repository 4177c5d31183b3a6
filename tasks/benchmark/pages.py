"""A page as a list of sections, written once for HTML and Markdown (`templates/sections.j2`).

Guarantees: strings are raw and `tasks.reporting.page` escapes them; a part or a section without
content is left out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tasks.reporting.page import Bullets, Form, Link, Table, page_of

TEMPLATE = Path(__file__).parent / "templates" / "sections.j2"


@dataclass(frozen=True)
class Picture:
    """A figure by its name, with its caption."""

    name: str
    caption: str


@dataclass(frozen=True)
class Code:
    """A block of preformatted text."""

    text: str


@dataclass(frozen=True)
class Links:
    """Links on one line; None is left out."""

    items: tuple[Link | None, ...]


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it. A section inside another one is folded."""

    title: str
    parts: tuple[Part, ...]


Part = str | Table | Bullets | Picture | Code | Links | Section


def write_page(
    form: Form,
    *,
    title: str,
    facts: Sequence[str],
    sentence: str,
    sections: Sequence[Section],
    drawn: Mapping[str, str],
) -> str:
    """Return the page as HTML or Markdown. `drawn` maps a figure's name to its SVG; Markdown names
    figures and draws none."""
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
