"""C++ and CUDA text as tokens: comments, literals, code, in linear time (ISO/IEC 14882:2020, 5.2,
phases of translation, and 5.4, preprocessing tokens). What never ends is left unchanged, as no
compiler takes it. Does not expand macros or evaluate `#if`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from enum import StrEnum
from functools import lru_cache
from typing import NamedTuple


class Kind(StrEnum):
    COMMENT = "comment"
    LITERAL = "literal"
    """a string or a character"""
    CODE = "code"
    """a name, a number, or one other character"""


class Token(NamedTuple):
    """`text` stands at `start`; blanks are in no token."""

    kind: Kind
    text: str
    start: int


_PREFIX = r"(?:u8|[uUL])?"
_TOKEN = re.compile(
    rf"""
    (?P<comment>
        //(?:\\\r?\n|[^\n])*
      | /\*.*?(?:\*/|\Z)
    )
  | (?P<literal>
        {_PREFIX}R"(?P<end>[^()\\\s]{{0,16}})\(.*?(?:\)(?P=end)"|\Z)
      | {_PREFIX}"(?:\\.|[^"\\\n])*+"
      | {_PREFIX}'(?:\\.|[^'\\\n])++'
    )
  | (?P<code>
        [A-Za-z_]\w*+                          # a name
      | \.?\d(?:[eEpP][+-]|'(?=\w)|[\w.])*+   # a number, its digits parted by apostrophes
      | \\.
      | \S
    )
    """,
    re.DOTALL | re.VERBOSE,
)
_KINDS: dict[str | None, Kind] = {kind.value: kind for kind in Kind}
_NOT_A_LINE_END = re.compile(r"[^\n]")


def tokens(text: str) -> Iterator[Token]:
    for match in _TOKEN.finditer(text):
        ends = match[0].startswith("//") or match[0].endswith(("*/", '"', "'"))
        kind = _KINDS[match.lastgroup] if ends else Kind.CODE
        yield Token(kind, match[0], match.start())


@lru_cache(maxsize=16)  # a verdict asks for the same text up to four times
def blank(text: str, *, comments: bool = True, literals: bool = True) -> str:
    """The text with spaces for its comments and literals; positions and lines stay."""
    hidden = {kind for kind, hide in ((Kind.COMMENT, comments), (Kind.LITERAL, literals)) if hide}
    parts, end = [], 0
    for token in tokens(text):
        if token.kind in hidden:
            parts.append(text[end : token.start])
            parts.append(_NOT_A_LINE_END.sub(" ", token.text))
            end = token.start + len(token.text)
    return "".join([*parts, text[end:]])
