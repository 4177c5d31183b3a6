"""Settings of the two extensions: `tasks.options` of generated tasks, `synthesis.options` of the
scripted teacher."""

from __future__ import annotations

import math
from typing import Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from kernels_eval.records import Record

Style = Literal["naive", "tiled", "fused", "vectorised"]
Fault = Literal["tail", "axis", "epilogue", "constant", "maximum", "compile", "shape", "no_code"]


class GeneratedOptions(Record):
    """Which programs are generated. `tasks.split` says on which side: all, train or heldout."""

    seed: int = 0
    """another seed gives other programs"""
    count: PositiveInt = 1000
    """how many programs; `tasks.limit` takes the first of them"""
    sizes: Literal["cpp", "cuda"] = "cpp"
    """sizes of the inputs, for a processor's core or for a GPU"""


class TeacherOptions(Record):
    """Shares and relations of the scripted teacher's answers. A relation is the correlation of
    normal variables from which length, correctness and style are drawn (a Gaussian copula)."""

    wrong: float = Field(default=0.5, ge=0, le=1)
    """share of answers to programs of three operators that get a fault"""
    wrong_per_operator: float = Field(default=0.0, ge=-1, le=1)
    """added to that share for each operator above three, taken off for each below"""
    faults: dict[Fault, NonNegativeFloat] = {
        "tail": 2,
        "axis": 1,
        "epilogue": 2,
        "constant": 2,
        "maximum": 1,
        "compile": 1,
        "shape": 1,
        "no_code": 0.5,
    }
    """weights of the faults: last element left out, rows and columns exchanged, last pointwise
    operator left out, wrong constant, no maximum subtracted in a softmax, misspelled name, sizes
    written as numbers, no ModelNew; those that a program has no place for are left out"""
    styles: dict[Style, NonNegativeFloat] = {
        "naive": 1,
        "tiled": 1,
        "fused": 1,
        "vectorised": 1,
    }
    """weights of the styles, from slow to fast"""
    reasoning_tokens: PositiveInt = 180
    """median length of reasoning, words and signs; the least is about 50"""
    spread: PositiveFloat = 0.6
    """standard deviation of the logarithm of that length"""
    repetition: float = Field(default=0.3, ge=0, le=1)
    """share of the passages beyond the plan that repeat an earlier one word for word"""
    length_vs_correctness: float = Field(default=-0.3, ge=-1, le=1)
    """negative: longer reasoning is more often wrong; 0: no relation"""
    length_vs_speed: float = Field(default=0.0, ge=-1, le=1)
    """negative: longer reasoning comes with slower styles; 0: no relation"""

    @model_validator(mode="after")
    def _can_be_drawn(self) -> TeacherOptions:
        if math.hypot(self.length_vs_correctness, self.length_vs_speed) > 1:
            raise ValueError("length_vs_correctness and length_vs_speed: squares add up to above 1")
        if not sum(self.styles.values()) or not sum(self.faults.values()):
            raise ValueError("styles and faults need a weight above 0 each")
        return self
