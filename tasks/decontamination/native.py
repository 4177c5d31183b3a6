"""Native sources, in the strings of a candidate, that are the same program apart from comments,
blanks and the names of their functions."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from kernels_eval.source.lexer import Kind, tokens

_OPERATORS = frozenset(
    ":: -> ->* ++ -- << >> <<< >>> <= >= <=> == != && || += -= *= /= %= &= |= ^= <<= >>= ##".split()
)
_NAME = re.compile(r"[A-Za-z_]\w*")
_MODULE = re.compile(r"PYBIND11_MODULE|TORCH_LIBRARY(_IMPL|_FRAGMENT)?")
_BEFORE_NAME = {"*", "&", "&&", ">", ")"}
_LINE_END = "\n"
MOST_QUALIFIERS = 8
"""Words such as `const` and `noexcept` between the parameters of a function and its body."""


def is_native(text: str) -> bool:
    return ";" in text or "{" in text


def native_program(text: str, rename: Callable[[str], str], extension: str) -> str:
    found = list(_words(text))
    for place, word in enumerate(found[:-2]):
        if _MODULE.fullmatch(word) and found[place + 1] == "(":
            found[place + 2] = extension
    return " ".join(map(rename, found))


def defined_functions(text: str) -> set[str]:
    """Functions and kernels that a source defines at file scope, or in a namespace there."""
    found = list(_without_directives(_words(text)))
    names, braces, place = set[str](), 0, 0
    while place < len(found):
        word, before = found[place], found[max(0, place - 2) : place]
        if word == "{" and not _opens_namespace(before):
            braces += 1
        elif word == "}":
            braces = max(0, braces - 1)
        elif word == "(" and not braces:
            place = _closing(found, place)
            after = found[place + 1 : place + 1 + MOST_QUALIFIERS]
            rest = next((each for each in after if not _NAME.fullmatch(each)), "")
            if rest == "{" and len(before) == 2 and _may_define(*before):
                names.add(before[1])
        place += 1
    return names


def _opens_namespace(before: list[str]) -> bool:
    return "namespace" in before or before[-1:] == ['"C"']


def _may_define(kind: str, name: str) -> bool:
    """Not a macro such as PYBIND11_MODULE, which has no type before it."""
    typed = _NAME.fullmatch(kind) or kind in _BEFORE_NAME
    return bool(typed and _NAME.fullmatch(name))


def _closing(found: list[str], place: int) -> int:
    depth = 0
    for index in range(place, len(found)):
        depth += (found[index] == "(") - (found[index] == ")")
        if not depth:
            return index
    return len(found)


def _without_directives(words: Iterator[str]) -> Iterator[str]:
    for word in words:
        if word == "#":
            word = next((each for each in words if each == _LINE_END), _LINE_END)
        if word != _LINE_END:
            yield word


def _words(text: str) -> Iterator[str]:
    text = text.replace("\r\n", "\n").replace("\\\n", " ")
    last, end, directive, fresh = "", 0, False, True
    for token in tokens(text):
        gap = text[end : token.start]
        end = token.start + len(token.text)
        fresh = fresh or "\n" in gap
        if token.kind is Kind.COMMENT:
            continue
        joined = last + token.text
        if not gap and not fresh and joined in _OPERATORS:
            last = joined
            continue
        if last:
            yield last
        if fresh and (directive or token.text == "#"):
            yield _LINE_END
            directive = False
        directive = directive or (fresh and token.text == "#")
        last, fresh = token.text, False
    if last:
        yield last
