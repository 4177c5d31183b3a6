"""The report as markdown in which nothing that a stranger wrote is markup; figures are named, not
drawn."""

from __future__ import annotations

import html
import re
from collections.abc import Sequence
from typing import Any

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
from tasks.reporting.numbers import headline
from tasks.reporting.records import ReportContext
from tasks.reporting.sections import sections
from tasks.reporting.text import address, clean

_MARKDOWN = re.compile(r"([\\`*_\[\]#|~!])")


def to_markdown(context: ReportContext) -> str:
    """The same content as markdown; figures are named, not drawn."""
    facts = (context.language, context.device, context.created_at)
    return markdown_of(f"concur: {context.run_name}", facts, headline(context), sections(context))


def markdown_of(title: str, facts: Sequence[str], sentence: str, content: Sequence[Section]) -> str:
    """Title, a line of facts, the headline and the sections as markdown. Strings are raw."""
    lines = [
        f"# {_md(title)}",
        ", ".join(_md(fact) for fact in facts if fact),
        f"**{_md(sentence)}**",
    ]
    for section in content:
        lines.append(f"## {_md(section.title)}")
        lines += [_block_markdown(block) for block in section.blocks]
    return "\n\n".join(line for line in lines if line) + "\n"


def _block_markdown(block: Block) -> str:
    match block:
        case Text(text):
            return _md(text)
        case Bullets(items):
            return "\n".join(f"- {_md(item)}" for item in items)
        case Links(items):
            return " · ".join(_cell(item) for item in items)
        case Table(header, rows):
            cells = [
                [_md(cell) for cell in header],
                ["---"] * len(header),
                *([_cell(cell) for cell in row] for row in rows),
            ]
            return "\n".join(f"| {' | '.join(row)} |" for row in cells)
        case Code(text):
            # indented, not fenced: no text can close an indented block
            return "\n".join(f"    {line}" for line in clean(text).split("\n"))
        case Picture(name, caption):
            return f"Figure {_md(name)} (drawn in the HTML report): {_md(caption)}"
        case Folded(title, blocks):
            return "\n\n".join([f"### {_md(title)}", *(_block_markdown(part) for part in blocks)])


def _cell(cell: Cell) -> str:
    if not isinstance(cell, Link):
        return _md(cell or "")
    url = address(cell.url)
    return f"[{_md(cell.text)}]({url})" if url else _md(cell.text)


def _md(text: Any) -> str:
    """One line of markdown in which nothing of `text` is markup: no HTML, links, tables, emphasis
    or code."""
    escaped = _MARKDOWN.sub(r"\\\1", html.escape(clean(text, one_line=True), quote=False))
    return escaped.replace("://", ":\\/\\/").replace("www.", "www\\.")
