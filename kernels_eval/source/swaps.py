"""Which swaps of instructions a source asks for, by a flag for nvcc (`compile.schedule` makes
them)."""

from __future__ import annotations

import re
from collections.abc import Iterable

FLAG = "-DCONCUR_SCHEDULE="
MOST_SWAPS = 64


def asked_for(flags: Iterable[str]) -> list[int]:
    """The swaps that flags ask for, by their numbers. Raises ValueError for other texts, and
    for too many."""
    numbers = [each for x in flags if x.startswith(FLAG) for each in x[len(FLAG) :].split("_")]
    if len(numbers) > MOST_SWAPS or not all(re.fullmatch("[0-9]{1,9}", each) for each in numbers):
        raise ValueError(f"{FLAG} takes up to {MOST_SWAPS} numbers between underscores")
    return [*map(int, numbers)]
