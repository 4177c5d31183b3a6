"""The build transform `schedules`: it makes the swaps of instructions that a source asks for.

A source asks by a flag for nvcc, `-DCONCUR_SCHEDULE=17_4`: the 17th swap that the built library
allows, then the 4th that the result allows (modulo their number). Without the transform the flag
defines a macro that nobody reads. So a candidate's source says which library is verified, cached
and confirmed.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from experiments.schedules.schedule import command, reorder
from kernels_eval.compile.transforms import BuildTransform, Tool
from kernels_eval.errors import UsageError
from kernels_eval.source.spec import ExtensionSpec

FLAG = "-DCONCUR_SCHEDULE="
MOST_SWAPS = 64


def asked_for(flags: Iterable[str]) -> list[int]:
    """The swaps that flags ask for, by their numbers. Raises UsageError for other texts, and for
    too many."""
    texts = [flag.removeprefix(FLAG) for flag in flags if flag.startswith(FLAG)]
    numbers = [number for text in texts for number in text.split("_")]
    if len(numbers) > MOST_SWAPS or not all(re.fullmatch("[0-9]{1,9}", each) for each in numbers):
        raise UsageError(f"{FLAG} takes up to {MOST_SWAPS} numbers between underscores")
    return [int(number) for number in numbers]


def change(library: Path, spec: ExtensionSpec, tool: Tool) -> None:
    numbers = asked_for(spec.extra_cuda_cflags)
    if numbers:
        reorder(library, numbers, lambda: tool(command(library)))


SCHEDULES = BuildTransform(change, version=1)
