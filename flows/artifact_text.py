"""Text of strangers in Prefect's artifacts, which its pages render as Markdown with HTML in it:
cells of tables too.

Guarantees: `as_text` shows a text as it is in Markdown; `cells` holds nothing that any renderer
takes for a tag, a picture or a link, whether it reads Markdown or not, for which it replaces a few
characters by others that look alike.
"""

from __future__ import annotations

import html
import re
from collections.abc import Iterable, Mapping
from typing import Any

MARKUP = re.compile(r"([\\`*_{}\[\]()#|~!])")
ALIKE = str.maketrans({"<": "‹", ">": "›", "[": "(", "]": ")", "`": "'", "&": "＆"})
LENGTH = 2000


def as_text(text: object, length: int = LENGTH) -> str:
    """One line of Markdown in which nothing of `text` is markup; at most `length` characters of
    it."""
    line = "".join(
        character if character.isprintable() else "?" for character in " ".join(str(text).split())
    )
    line = line if len(line) <= length else f"{line[:length]} ..."
    return MARKUP.sub(r"\\\1", html.escape(line, quote=False)).replace("://", ":\\/\\/")


def cells(rows: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Rows of a table artifact: numbers as they are, texts and the names of columns without
    markup."""
    return [
        {
            _harmless(str(name)): _harmless(value) if isinstance(value, str) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def _harmless(text: str) -> str:
    return " ".join(text.split()).translate(ALIKE).replace("://", ": //")
