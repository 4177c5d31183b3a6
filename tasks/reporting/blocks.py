"""The parts of a page, before it is HTML or Markdown.

Strings are raw: `page` escapes all of them.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Text:
    """A paragraph."""

    text: str


@dataclass(frozen=True)
class Bullets:
    """A list, one item a line."""

    items: tuple[str, ...]


@dataclass(frozen=True)
class Link:
    """Text that leads to a page. What is no http(s) address stays text."""

    text: str
    url: str


@dataclass(frozen=True)
class Links:
    """A list of links."""

    items: tuple[Link, ...]


Cell = str | Link | None


@dataclass(frozen=True)
class Table:
    """A table; every row has as many cells as the header."""

    header: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]


@dataclass(frozen=True)
class Code:
    """A block of code, shown as it is."""

    text: str


@dataclass(frozen=True)
class Picture:
    """A figure by name. Where "NAME.narrow" is drawn too, small screens show that.

    `file` is where it lies beside a Markdown page, if it does.
    """

    name: str
    caption: str
    file: str = ""


@dataclass(frozen=True)
class Folded:
    """Detail that is closed until asked for."""

    title: str
    blocks: tuple[Text | Table | Code, ...]


Block = Text | Bullets | Links | Table | Code | Picture | Folded


@dataclass(frozen=True)
class Section:
    """A heading and what stands below it."""

    title: str
    blocks: tuple[Block, ...]
