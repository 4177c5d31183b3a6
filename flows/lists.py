"""Lists of an option's value, such as `--k 1,5,10`."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

from kernels_eval.errors import UsageError

Number = TypeVar("Number", int, float)


def parsed_numbers(
    text: str, option: str, kind: Callable[[str], Number], least: float, example: str
) -> list[Number]:
    """The distinct numbers of "1,5,10". Raises UsageError for anything else, and numbers below
    `least`."""
    found: list[Number] = []
    with suppress(ValueError):
        found = list(dict.fromkeys(map(kind, text.split(","))))
    if not found or not all(least <= value < math.inf for value in found):
        raise UsageError(
            f"{option} {text!r} is not a list of numbers from {least:g}", f"such as {example}"
        )
    return found
