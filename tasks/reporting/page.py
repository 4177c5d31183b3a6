"""Content as one self-contained HTML page, and the same content as Markdown.

Guarantees: the HTML page loads nothing and runs no script; everything in either is escaped; only an
http(s) address becomes a link. Does not guarantee what lies behind a link.
"""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from tasks.reporting.blocks import (
    Block,
    Bullets,
    Cell,
    Code,
    Folded,
    Link,
    Links,
    Picture,
    Section,
    Table,
    Text,
)
from tasks.reporting.text import address, as_text, clean, interval, plural

TEMPLATES = Path(__file__).parent / "templates"
NUMBER, NUMBER_CHARS = re.compile(r"[-+<]?\s?\d|n/a$"), 26
MARKDOWN_CHARS = 100_000  # of one block


def page_of(
    title: str,
    facts: Sequence[str],
    sentence: str,
    content: Sequence[Section],
    drawn: Mapping[str, str],
) -> str:
    """Return one self-contained HTML page: title, a line of facts, the headline, the sections.

    Strings are raw. `drawn` maps a figure's name to its SVG. Raises jinja2.UndefinedError for a
    picture that is not drawn.
    """
    return _template().render(
        title=title, facts=facts, sentence=sentence, content=content, drawn=drawn
    )


def markdown_of(title: str, facts: Sequence[str], sentence: str, content: Sequence[Section]) -> str:
    """Return the same page as Markdown: figures are named, not drawn. Strings are raw."""
    lines = [f"# {_md(title)}", ", ".join(_md(fact) for fact in facts if fact)]
    lines.append(f"**{_md(sentence)}**")
    for section in content:
        lines.append(f"## {_md(section.title)}")
        lines += [block_markdown(block) for block in section.blocks]
    return "\n\n".join(line for line in lines if line) + "\n"


def block_markdown(block: Block) -> str:
    """Return one block as Markdown in which nothing of its texts is markup."""
    match block:
        case Text(text):
            return _md(text)
        case Bullets(items):
            return "\n".join(f"- {_md(item)}" for item in items)
        case Links(items):
            return " · ".join(_cell(item) for item in items)
        case Table(header, rows):
            lines = [[_md(name) for name in header], ["---"] * len(header)]
            lines += [[_cell(value) for value in row] for row in rows]
            return "\n".join(f"| {' | '.join(line)} |" for line in lines)
        case Code(text):
            # indented, not fenced: no text can close an indented block
            return "\n".join(f"    {line}" for line in clean(text).split("\n"))
        case Picture(name, caption, file):
            if file:
                return f"![{_md(caption)}]({file})"
            return f"Figure {_md(name)} (drawn in the HTML report): {_md(caption)}"
        case Folded(title, blocks):
            return "\n\n".join([f"### {_md(title)}", *(block_markdown(part) for part in blocks)])


def rendered(template: Path, **values: object) -> str:
    """Return a text template filled with values.

    Of a template NAME.md.j2, nothing of the values is markup in the Markdown that is returned; any
    other gives plain text. It knows the filter `form` (a format specification) and the functions
    `interval` and `plural`.
    """
    return (
        _texts(template.parent, template.name.endswith(".md.j2"))
        .get_template(template.name)
        .render(values)
    )


@cache
def _texts(directory: Path, markdown: bool) -> Environment:
    environment = Environment(
        loader=FileSystemLoader(directory),
        autoescape=markdown,
        undefined=StrictUndefined,
        finalize=_markup if markdown else None,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(form=format)
    environment.globals.update(interval=interval, plural=plural)
    return environment


def _markup(value: object) -> Markup:
    return value if isinstance(value, Markup) else Markup(_md(str(value)))


@cache
def _template() -> Template:
    environment = Environment(
        loader=FileSystemLoader(TEMPLATES),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=lambda value: value if isinstance(value, Markup) else clean(value),
    )
    environment.filters.update(data=_data, kind=_kind, link=_link, width=_width)
    return environment.get_template("page.html")


def _kind(block: Block) -> str:
    return type(block).__name__


def _link(value: Cell) -> str | None:
    return address(value.url) if isinstance(value, Link) else None


def _width(value: Cell) -> str:
    """Return the class of a table cell.

    "n" keeps a number with its interval on one line, "w" breaks a sentence between words.
    """
    if not isinstance(value, str):
        return ""
    if len(value) > NUMBER_CHARS:
        return "w"
    return "n" if NUMBER.match(value) else ""


def _data(svg: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(svg.encode()).decode()}"


def _cell(value: Cell) -> str:
    if not isinstance(value, Link):
        return _md(value or "")
    url = _link(value)
    return f"[{_md(value.text)}]({url})" if url else _md(value.text)


def _md(text: str) -> str:
    return as_text(text, MARKDOWN_CHARS)
