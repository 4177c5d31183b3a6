"""Text as people read it, and what strangers wrote made harmless.

Guarantees: `clean` leaves no character that acts on a terminal or a page, `masked` no password
inside a URL. Does not escape markup: that is each renderer's own work.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import quote

_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]+@")
_ACTING = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})


def clean(text: Any, *, one_line: bool = False) -> str:
    """Text with control and invisible formatting characters spelt out (`\\x1b`, `\\u202e`), so that
    none acts on a terminal or a page."""
    plain = str(text).replace("\r\n", "\n")
    if one_line:
        plain = " ".join(plain.split("\n"))
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _ACTING else ascii(char)[1:-1]
        for char in plain
    )


def masked(value: Any) -> Any:
    """The same value with passwords inside URLs replaced, at any depth."""
    if isinstance(value, Mapping):
        return {key: masked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return _URL_PASSWORD.sub(r"\1:***@", value) if isinstance(value, str) else value


def address(url: str) -> str | None:
    """An http(s) address in ASCII without quotes, spaces, brackets or a password, so that it ends
    no attribute and no markdown; or None."""
    plain = masked(url.strip())
    if not re.match(r"https?://[^/]", plain, re.IGNORECASE):
        return None
    return quote(plain, safe=":/?#@!$&*+,;=%~._-", errors="replace")


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def cut(text: str, limit: int) -> str:
    return (
        text
        if len(text) <= limit
        else f"{text[:limit]} [... {len(text) - limit:,} more characters]"
    )


def spread(items: Sequence[Any], limit: int) -> list[Any]:
    """At most `limit` items, evenly taken, first and last included."""
    if len(items) <= limit:
        return list(items)
    return [items[round(i * (len(items) - 1) / (limit - 1))] for i in range(limit)]


def by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
