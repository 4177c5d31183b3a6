"""A compiler's log in the lines of the candidate's module: what is compiled is a generated file."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

_PLACE = re.compile(r"(?<![\w./])(?P<file>[\w.]+\.(?:cpp|cu))(?P<before>[:(])(?P<line>\d+)")
_GUTTER = re.compile(r"^(?P<line> *\d+)(?= \|)")
Lines = Mapping[int, int]
"""Line of a generated file -> line of the module."""


def lines_of(head: str, texts: Sequence[str], code: str) -> Lines:
    """Lines of a file made of `head` and `texts`. A text that the module does not hold once, as it
    is, has none."""
    found: dict[int, int] = {}
    first = head.count("\n") + 2
    for text in texts:
        count = text.count("\n") + 1
        if text and code.count(text) == 1:
            own = code[: code.index(text)].count("\n") + 1
            found |= {first + number: own + number for number in range(count)}
        first += count
    return found


def in_own_lines(log: str, files: Mapping[str, Lines]) -> str:
    """The log with the module's lines for those that `files` (by name) knows, as candidate.py's."""
    lines: Lines = {}

    def place(match: re.Match[str]) -> str:
        own = files.get(match["file"], {}).get(int(match["line"]))
        return f"candidate.py{match['before']}{own}" if own else match[0]

    def gutter(match: re.Match[str]) -> str:
        own = lines.get(int(match["line"]))
        return f"{own:>{len(match[0])}}" if own else match[0]

    told = []
    for line in log.split("\n"):
        if named := _PLACE.search(line):
            lines = files.get(named["file"], {})
            told.append(_PLACE.sub(place, line))
        else:
            told.append(_GUTTER.sub(gutter, line))
    return "\n".join(told)
