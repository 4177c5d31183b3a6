"""Text that others wrote, made fit for a Markdown page.

Guarantees: what `cell` and `fenced` return shows the text and does nothing else: no markup, HTML,
link, table or front matter comes of it.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

MARKUP = re.compile(
    r"[&<>\"'|`*~\[\]()!#\\{}$@]|(?<!\w)_|_(?!\w)|:(?=//)"
)  # an underscore inside a word is none


def cell(value: object, length: int = 120) -> str:
    """One line of text for a table cell or a sentence: at most `length` characters of it, control
    characters as `?`."""
    text = "".join(
        character if character.isprintable() else "?" for character in str(value).replace("\n", " ")
    )
    text = text if len(text) <= length else text[: length - 3] + "..."
    return MARKUP.sub(lambda match: f"&#{ord(match[0])};", text)


def fenced(text: str, language: str = "", length: int = 1500) -> str:
    """A code block with at most `length` characters of a text, fenced by more backticks than the
    text has in a row."""
    text = text.replace("\r\n", "\n").encode("utf-8", "replace").decode()
    text = "".join(
        character if character.isprintable() or character in "\n\t" else "?" for character in text
    )
    text = text if len(text) <= length else text[:length] + "\n[...]"
    fence = "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))
    return f"{fence}{language}\n{text}\n{fence}"


def table(names: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table of cells that are fit for one."""
    lines = [names, ["---"] * len(names), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
