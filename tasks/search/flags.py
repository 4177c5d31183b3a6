"""The flags that a candidate hands to its compiler, changed within a set that the verifier allows.

Guarantees: a changed module differs in the lists `extra_cuda_cflags` and `extra_cflags` of its
`load_inline` alone. Does not guarantee that a flag keeps a result within tolerance, as
`--use_fast_math` may not: the verifier says so.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import accumulate
from pathlib import Path
from random import Random

from kernels_eval.checks.syntax import UNPARSABLE, parse_source
from kernels_eval.records import Language
from tasks.files import read_toml

CHOICES = read_toml(Path(__file__).with_suffix(".toml"))
"""By language: the keyword, and groups of flags of which a module has one at most."""


def changed(code: str, language: Language, draw: Random) -> tuple[str, str] | None:
    """The module with one flag added, replaced or left out, and what was changed in words; None
    where the flags are not written as a list of texts, and for Triton, which takes none."""
    if language not in CHOICES:
        return None
    keyword, groups = CHOICES[language].values()
    try:
        tree = parse_source(code)
    except UNPARSABLE:
        return None
    calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
    call = next((each for each in calls if _name(each.func) == "load_inline"), None)
    if call is None or not call.keywords:
        return None
    given = next((each.value for each in call.keywords if each.arg == keyword), None)
    flags = [] if given is None else _texts(given)
    if flags is None:
        return None
    group = draw.choice(groups)
    now = next((flag for flag in flags if flag in group), None)
    new = draw.choice([flag for flag in (*group, None) if flag != now])
    flags = [flag for flag in flags if flag not in group] + ([new] if new else [])
    place, last = places(code), call.keywords[-1].value
    end = place(last.end_lineno or 0, last.end_col_offset or 0)
    start, text = end, f", {keyword}={flags!r}"
    if given is not None:
        start, text = place(given.lineno, given.col_offset), repr(flags)
        end = place(given.end_lineno or 0, given.end_col_offset or 0)
    return code[:start] + text + code[end:], f"{now or 'no flag'} -> {new or 'no flag'}"


def places(code: str) -> Callable[[int, int], int]:
    """A function from a line and a column as `ast` has them, in bytes, to a place in the text."""
    lines = [f"{line}\n" for line in code.split("\n")]
    starts = [0, *accumulate(map(len, lines))]
    return lambda row, column: (
        starts[row - 1] + len(lines[row - 1].encode()[:column].decode(errors="replace"))
    )


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def _texts(node: ast.expr) -> list[str] | None:
    try:
        found = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    is_texts = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return found if is_texts else None
