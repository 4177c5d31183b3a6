"""Text for people, and escaping of text from outside.

Guarantees: `clean` leaves no character that acts on a terminal or page, `masked` no password in a
URL; `as_text`, `cell`, `cells` and `fenced` return inert text. HTML is escaped in `page`.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

if TYPE_CHECKING:  # whose imports `concur --help` would pay for
    from kernels_eval.records import Json, Row

_URL_PASSWORD = re.compile(r"(?<=://)([^/\s:@]*):[^/\s]+@")
_ACTING = frozenset({"Cc", "Cf", "Cs", "Co", "Zl", "Zp"})
# an underscore or an @ inside a word is none
_MARKUP = re.compile(r"[&<>`*~\[\]!#\\{}$|]|(?<!\w)[_@]|_(?!\w)|:(?=//)|(?<=www)\.", re.IGNORECASE)
_ALIKE = str.maketrans({"<": "‹", ">": "›", "[": "(", "]": ")", "`": "'", "&": "＆"})


def clean(text: object, *, one_line: bool = False) -> str:
    r"""Return text with control and invisible characters spelt out (`\x1b`, `\u202e`)."""
    plain = str(text).replace("\r\n", "\n")
    if one_line:
        plain = " ".join(plain.split("\n"))
    return "".join(
        char if char in "\n\t" or unicodedata.category(char) not in _ACTING else ascii(char)[1:-1]
        for char in plain
    )


def as_text(text: object, length: int = 2000) -> str:
    """Return one line of inert Markdown, with at most `length` characters of the text."""
    line = " ".join(clean(text, one_line=True).split())
    return _MARKUP.sub(lambda match: f"&#{ord(match[0])};", shortened(line, length))


def cell(value: object, length: int = 120) -> str:
    """Return `as_text` cut for a table cell or sentence."""
    return as_text(value, length)


def cells(rows: Iterable[Row]) -> list[Json]:
    """Return rows of a Prefect table artifact, texts without markup: only some Prefect pages render
    Markdown, so a few characters are replaced by lookalikes."""
    return [
        {
            _alike(str(name)): _alike(value) if isinstance(value, str) else value
            for name, value in row.items()
        }
        for row in rows
    ]


def _alike(text: str) -> str:
    return " ".join(text.split()).translate(_ALIKE).replace("://", ": //")


def printable(text: str) -> str:
    """The text with spaces for what a line cannot show."""
    return "".join(char if char.isprintable() else " " for char in text)


def fence(text: str) -> str:
    """A Markdown fence that is longer than any in the text."""
    return "`" * max(3, 1 + max((len(run) for run in re.findall(r"`+", text)), default=0))


def fenced(text: str, language: str = "", length: int = 1500) -> str:
    """Return a Markdown code block with at most `length` characters of a text."""
    text = clean(text)
    text = text if len(text) <= length else f"{text[:length]}\n[...]"
    return f"{fence(text)}{language}\n{text}\n{fence(text)}"


def moment(iso: str) -> str:
    """A time of a record (ISO 8601, UTC) to the minute."""
    return f"{iso[:16].replace('T', ' ')} UTC" if iso else ""


def masked(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: masked(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [masked(item) for item in value]
    return _URL_PASSWORD.sub(r"\1:***@", value) if isinstance(value, str) else value


def address(url: str) -> str | None:
    """Return an http(s) address in ASCII without quotes, spaces, brackets or a password, or None.

    It ends no HTML attribute and no Markdown link."""
    plain = str(masked(url.strip()))
    if not re.match(r"https?://[^/]", plain, re.IGNORECASE):
        return None
    return quote(plain, safe=":/?#@!$&*+,;=%~._-", errors="replace")


SHORT_ID = 12
"""Letters of a fingerprint or id that people are shown: a beginning is enough for every command."""
_UNITS = {"%": (100, " %"), "p": (100, ""), "x": (1, "x")}


def interval(
    value: float | None,
    lower: float | None = None,
    upper: float | None = None,
    form: str = ".2f",
) -> str:
    """Return a number with its interval: `25.0 % (0.0 to 75.0)`, `1.83x (1.70 to 1.95)`, `n/a`.
    `form` is a float format, or ends in "%" (a share in percent), "p" (the same, no sign) or "x" (a
    ratio)."""
    if value is None:
        return "n/a"
    scale, unit = _UNITS.get(form[-1], (1, ""))
    spec = f"{form[:-1]}f" if form[-1] in _UNITS else form
    known = [f"{scale * each:{spec}}" for each in (value, lower, upper) if each is not None]
    return f"{known[0]}{unit}" + (f" ({known[1]} to {known[2]})" if len(known) == 3 else "")


def number(value: float | None, form: str) -> str:
    return "n/a" if value is None else f"{value:{form}}"


def p_value(p: float | None) -> str:
    """Return a p value: `0.034`, `< 0.001`, empty for None."""
    return "" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def share(part: int, whole: int) -> str:
    return f"{100 * part / whole:.1f} %" if whole else "n/a"


def plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"


def cut(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, and how many more there are."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]} [... {len(text) - limit:,} more characters]"


def shortened(text: str, limit: int) -> str:
    """Return at most `limit` characters of a text, in whole words where these fill half of them;
    three dots say that there are more."""
    if len(text) <= limit:
        return text
    kept = text[: limit - 3]
    words = kept if text[limit - 3] == " " else kept.rpartition(" ")[0]
    return f"{words if 2 * len(words) > limit else kept}..."


def by_count(counts: Mapping[str, int]) -> list[tuple[str, int]]:
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))
