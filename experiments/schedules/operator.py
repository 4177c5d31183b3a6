"""The search operator `schedule`: one more swap of instructions in the built library."""

from __future__ import annotations

from collections.abc import Mapping
from random import Random
from typing import Any

from experiments.schedules.transform import FLAG
from tasks.search.flags import with_flags

KEYWORD = "extra_cuda_cflags"
NUMBERS = 10**6
"""More than a library has swaps: a number is taken modulo their number."""


def swap(
    code: str, language: str, draw: Random, options: Mapping[str, Any]
) -> tuple[str, str] | None:
    """The module whose library has one more swap, and which one; None for other languages than
    CUDA, and where the flags are not written as a list of texts."""

    def one_more(flags: list[str]) -> tuple[list[str], str]:
        before = [flag for flag in flags if flag.startswith(FLAG)]
        kept = [flag for flag in flags if flag not in before]
        number = draw.randrange(NUMBERS)
        asked = f"{before[-1]}_{number}" if before else f"{FLAG}{number}"
        return [*kept, asked], f"swap {number}"

    return with_flags(code, KEYWORD, one_more) if language == "cuda" else None
