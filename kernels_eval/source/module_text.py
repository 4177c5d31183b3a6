"""The text of a candidate's Python module by which its language is determined: without comments of
Python or of native sources in its strings."""

from __future__ import annotations

import io
import re
import tokenize
from collections.abc import Iterator
from itertools import accumulate

from kernels_eval.source.lexer import blank

UNREADABLE = (tokenize.TokenError, SyntaxError, ValueError)
"""What tokenising raises: `SyntaxError` for indentation, `ValueError` for NUL bytes."""
_OPENED = re.compile(r"\w*(\"\"\"|'''|\"|')")
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def visible_text(code: str, *, literals: bool = True) -> str:
    """The module with spaces for comments, and unless `literals` for all that is no code: strings
    but native sources, and what these quote. Positions stay. What is not Python is read as C++.
    """
    parts, end = [], 0
    try:
        for token, start, stop in placed_tokens(code):
            if token.type != tokenize.COMMENT and token.type not in STRINGS:
                continue
            text = code[start:stop]
            source = token.type in STRINGS and (literals or "{" in text)
            hidden = _native(text, literals) if source else " " * len(text)
            parts += [code[end:start], hidden]
            end = stop
    except UNREADABLE:
        return "".join([*parts, blank(code[end:], literals=not literals)])
    return "".join([*parts, code[end:]])


def placed_tokens(code: str) -> Iterator[tuple[tokenize.TokenInfo, int, int]]:
    """Python's tokens with their start and end positions. Raises one of `UNREADABLE`."""
    # not `splitlines`: a form feed ends no line of Python
    begins = [0, *accumulate(len(line) + 1 for line in code.split("\n"))]
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        start, stop = (begins[line - 1] + column for line, column in (token.start, token.end))
        yield token, start, stop


def _native(literal: str, literals: bool) -> str:
    opened = _OPENED.match(literal)
    if not opened:  # a part of an f-string
        return blank(literal, literals=not literals)
    head, quotes = opened[0], opened[1]
    body = literal[len(head) : -len(quotes)]
    if len(quotes) == 1:
        body = with_line_ends(body)
    return head + blank(body, literals=not literals) + quotes


def with_line_ends(body: str) -> str:
    """The content of a one-line string with its escaped line ends expanded."""
    return body.replace("\\n", " \n")
