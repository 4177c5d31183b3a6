"""A page of parts, as one self-contained HTML file or as Markdown.

Guarantees: HTML loads nothing and runs no script; values are escaped; only http(s) addresses become
links.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Literal

from jinja2 import Environment
from markupsafe import Markup

from tasks.reporting.parts import Cell, Link, LocalLink, Part
from tasks.reporting.templates import environment
from tasks.reporting.text import address, as_text, clean, cut, plural

Form = Literal["html", "md"]
TEMPLATES = Path(__file__).parent / "templates"
NUMBER, NUMBER_CHARS = re.compile(r"[-+<]?\s?\d|n/a$"), 26
MOST_UNBROKEN = 8
"""Columns of a table beyond which its intervals are broken over lines, to fit a screen."""
NOTHING = re.compile(r"([-+]?0(\.0+)?( %)?|n/a)( \(.*\))?|n/a: .*|1\.000|")
"""A cell without a finding: zero, not estimated, or a p value of 1."""
HEADING = re.compile(r'<h2 id="([a-z0-9-]*)">(.*?)</h2>', re.DOTALL)
MARKDOWN_CHARS = 100_000  # of one value


def write_page(
    form: Form,
    *,
    title: str,
    facts: Sequence[str],
    sentence: str,
    sections: Sequence[Part],
    drawn: Mapping[str, str] = {},
) -> str:
    """The page: title, a line of facts, the headline, and the sections with content.

    Strings are raw. `drawn` maps figures' names to SVG for HTML."""
    text = (
        _environment(form)
        .get_template("sections.j2")
        .render(
            form=form, title=title, facts=facts, sentence=sentence, sections=sections, drawn=drawn
        )
    )
    return text if form == "html" else _spaced(text) + "\n"


def markdown(*parts: Part) -> str:
    return write_page("md", title="", facts=(), sentence="", sections=parts)


def _spaced(text: str) -> str:
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n")


@cache
def _environment(form: Form) -> Environment:
    def shown(value: object) -> object:
        if isinstance(value, Markup):
            return value
        return clean(value) if form == "html" else Markup(as_text(value, MARKDOWN_CHARS))

    def link(value: Cell) -> str | None:
        if isinstance(value, LocalLink):
            return value.url if form == "html" and value.url.startswith("file:///") else None
        url = address(value.url) if isinstance(value, Link) else None
        return Markup(url) if form == "md" and url else url

    filters = {
        **{"data": _data, "indented": _indented, "link": link, "cut": cut},
        **{"width": _width, "unbroken": _unbroken, "split": _split},
        **{"slug": _slug, "headings": _headings},
    }
    made = environment(TEMPLATES, filters=filters, autoescape=True, finalize=shown)
    made.globals.update(
        MOST_UNBROKEN=MOST_UNBROKEN, plural=plural, kind_of=lambda part: type(part).__name__
    )
    return made


def _width(value: Cell) -> str:
    if not isinstance(value, str):
        return ""
    if len(value) > NUMBER_CHARS:
        return "w"
    return "n" if NUMBER.match(value) else ""


def _unbroken(value: Cell) -> Cell:
    narrow = isinstance(value, str) and _width(value) == "n"
    return re.sub(r" (?!\()", "\u00a0", str(value)) if narrow else value


def _split(
    rows: Sequence[Sequence[Cell]], keys: int
) -> tuple[list[Sequence[Cell]], list[Sequence[Cell]]]:
    split: tuple[list[Sequence[Cell]], list[Sequence[Cell]]] = ([], [])
    for row in rows:
        found = map(NOTHING.fullmatch, map(str, row[keys:]))
        split[bool(keys) and all(found)].append(row)
    return split


def _slug(title: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def _headings(page: str) -> list[tuple[str, Markup]]:
    return [(found[1], Markup(found[2])) for found in HEADING.finditer(page)]


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _indented(text: str) -> Markup:
    """Code as an indented Markdown block, which no text can close."""
    return Markup("\n".join(f"    {line}" for line in clean(text).split("\n")))
