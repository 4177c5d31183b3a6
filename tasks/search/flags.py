"""Changes of a candidate's compiler flags (`extra_cuda_cflags`, `extra_cflags` of `load_inline`),
among those the verifier allows (`flags.toml`)."""

from __future__ import annotations

import ast
from collections.abc import Callable
from itertools import accumulate
from random import Random

from kernels_eval.records import Language
from kernels_eval.source.syntax import UNPARSABLE, name_path, parse_source
from kernels_eval.tables import table_beside

TABLE = table_beside(__file__)
CHOICES = TABLE["flags"]
Change = Callable[[list[str]], tuple[list[str], str]]
"""Other flags, and what was changed in words."""


def changed(code: str, language: Language, draw: Random) -> tuple[str, str] | None:
    """The module with one flag added, replaced or removed, and the change in words; None for Triton
    or where flags are not a list of texts."""
    keyword, groups = CHOICES.get(language, {"keyword": "", "groups": ()}).values()

    def one(flags: list[str]) -> tuple[list[str], str]:
        group = draw.choice(groups)
        now = next((flag for flag in flags if flag in group), None)
        new = draw.choice([flag for flag in (*group, None) if flag != now])
        kept = [flag for flag in flags if flag not in group]
        return kept + [new] * bool(new), f"{now or 'no flag'} -> {new or 'no flag'}"

    return with_flags(code, keyword, one) if keyword else None


def with_flags(code: str, keyword: str, change: Change) -> tuple[str, str] | None:
    """The module with other flags under `keyword` of `load_inline`, and the change in words; None
    where they are not a list of texts."""
    try:
        calls = (node for node in ast.walk(parse_source(code)) if isinstance(node, ast.Call))
    except UNPARSABLE:
        return None
    call = next((each for each in calls if name_path(each.func)[-1:] == ["load_inline"]), None)
    if call is None or not call.keywords or any(each.arg is None for each in call.keywords):
        return None
    given = next((each.value for each in call.keywords if each.arg == keyword), None)
    flags = [] if given is None else _texts(given)
    if flags is None:
        return None
    flags, said = change(flags)
    data = code.encode()
    starts = [0, *accumulate(len(line) + 1 for line in data.split(b"\n"))]
    place = given or call.keywords[0]  # before it, since what it has may stand in brackets
    start = end = starts[place.lineno - 1] + place.col_offset
    text = f"{keyword}={flags!r}, "
    if given is not None:
        end, text = starts[(given.end_lineno or 0) - 1] + (given.end_col_offset or 0), repr(flags)
    return (data[:start] + text.encode() + data[end:]).decode(), said


def _texts(node: ast.expr) -> list[str] | None:
    try:
        found = ast.literal_eval(node)
    except (ValueError, TypeError):
        return None
    is_texts = isinstance(found, list) and all(isinstance(each, str) for each in found)
    return found if is_texts else None
