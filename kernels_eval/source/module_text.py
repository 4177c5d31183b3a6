"""The text of a candidate's Python module as languages are told by it: without the comments of
Python, and without those of the native sources in its strings.

Guarantees: each string is read on its own, so what looks like a comment in one ends with it.
"""

from __future__ import annotations

import io
import re
import tokenize
from itertools import accumulate

from kernels_eval.source.lexer import blank

UNREADABLE = (tokenize.TokenError, SyntaxError, ValueError)
"""What tokenising raises: `SyntaxError` for indentation, `ValueError` for NUL bytes."""
_OPENED = re.compile(r"\w*(\"\"\"|'''|\"|')")
STRINGS = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", tokenize.STRING)}


def visible_text(code: str) -> str:
    """The module with spaces for comments: every place and every line stays. Text that is no
    Python is read as a native source from where Python ends."""
    lines = code.splitlines(keepends=True)
    begins = [0, *accumulate(map(len, lines))]
    parts, end = [], 0
    try:
        for token in tokenize.generate_tokens(io.StringIO(code).readline):
            if token.type != tokenize.COMMENT and token.type not in STRINGS:
                continue
            start = begins[token.start[0] - 1] + token.start[1]
            stop = begins[token.end[0] - 1] + token.end[1]
            text = code[start:stop]
            hidden = " " * len(text) if token.type == tokenize.COMMENT else _native(text)
            parts += [code[end:start], hidden]
            end = stop
    except UNREADABLE:
        return "".join([*parts, blank(code[end:], literals=False)])
    return "".join([*parts, code[end:]])


def _native(literal: str) -> str:
    """A Python string without the comments of the source that it may hold."""
    opened = _OPENED.match(literal)
    if not opened:  # a part of an f-string
        return blank(literal, literals=False)
    head, quotes = opened[0], opened[1]
    body = literal[len(head) : -len(quotes)]
    if len(quotes) == 1:
        body = body.replace("\\n", " \n")  # the line ends that the string spells out
    return head + blank(body, literals=False) + quotes
