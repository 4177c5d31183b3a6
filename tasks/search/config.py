"""Settings of the search for faster candidates."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from kernels_eval.extensions import require_known
from kernels_eval.records import Record

GROUP = "concur.search_operators"
BUILT_IN = ("parameters", "flags", "rewrite", "cross")
OF_MODELS = frozenset({"rewrite", "cross"})
"""Operators that ask `synthesis.sampler`."""


class SearchConfig(Record):
    """Operators, budget, and what survives. The same configuration on the same verdicts proposes
    the same candidates, but for what a model writes."""

    operators: tuple[str, ...] = Field(default=("parameters",), min_length=1)
    """how a candidate is changed. parameters: block and tile sizes, unrolling, vector widths,
    launch bounds. flags: compiler flags. rewrite: a model improves one. cross: a model combines
    two. Both ask synthesis.sampler. Others are extensions (docs/how-to/extend.md)"""
    options: dict[str, Any] = {}
    """settings of extensions, by the names they document"""
    method: Literal["evolution", "random"] = "evolution"
    """random has the same budget, for comparison: operators are drawn uniformly, and every change
    is made to a start"""
    evaluations: PositiveInt = 32
    """verdicts per task, beside those of the starts"""
    device_s: PositiveFloat | None = None
    """stop after the generation in which verdicts have taken so many device-seconds in all; not
    set: no limit"""
    patience: PositiveInt | None = 16
    """stop a task after so many evaluations without a faster one; null: never"""
    starts: PositiveInt = 1
    """correct candidates of each task to begin with, the fastest ones"""
    tasks: PositiveInt | None = None
    """only so many tasks, the first ones by id; not set: all that have a correct candidate"""
    batch: PositiveInt = 4
    """evaluations of a task in one generation, proposed without knowing each other's verdicts"""
    rounds: PositiveInt = 3
    """fresh measurements of start and winner, from which the gain is computed"""
    seed: NonNegativeInt = 0
    """of every draw"""

    @field_validator("operators")
    @classmethod
    def _are_known(cls, operators: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(require_known(GROUP, operator, BUILT_IN) for operator in operators)

    def first_step(self, generation: int) -> int:
        """A generation's first step; the starts, generation 0, are 0 and below."""
        return (generation - 1) * self.batch + 1
