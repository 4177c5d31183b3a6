"""How candidates are searched for faster ones."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt, field_validator

from kernels_eval.config import EvalConfig
from kernels_eval.extensions import require_known
from kernels_eval.records import Record

GROUP = "concur.search_operators"
BUILT_IN = ("parameters", "flags", "rewrite", "cross", "schedule")
OF_MODELS = frozenset({"rewrite", "cross"})
"""Operators that ask `synthesis.sampler`."""
MORE_INPUTS, RERUNS = ("uniform", "normal_x10", "sparse", "small_integers"), 16
"""What `confirming` adds to the distributions of inputs, and calls on the same inputs."""


class SearchConfig(Record):
    """Operators, budget, and what survives. The same configuration on the same verdicts proposes
    the same candidates, but for what a model writes."""

    operators: tuple[str, ...] = Field(default=("parameters",), min_length=1)
    """how a candidate is changed. parameters: block and tile sizes, unrolling, vector widths,
    launch bounds. flags: compiler flags. rewrite: a model improves one. cross: a model combines
    two. Both ask synthesis.sampler. schedule: instructions of sm_90 change places in the built
    library; needs CUDA and compute-sanitizer, for winners are then confirmed under a stricter
    protocol. Others are extensions (docs/how-to/extend.md)"""
    options: dict[str, Any] = {}
    """settings of extensions, by the names they document"""
    method: Literal["evolution", "random"] = "evolution"
    """random is the control with the same budget: operators are drawn uniformly, and every change
    is made to a start"""
    evaluations: PositiveInt = 32
    """verdicts per task, beside those of the starts"""
    device_s: PositiveFloat | None = None
    """stop after verdicts of so many device-seconds in all; null: no limit. Looked at between
    generations"""
    patience: PositiveInt | None = 16
    """stop a task after so many evaluations without a faster one; null: never"""
    starts: PositiveInt = 1
    """correct candidates of each task to begin with, the fastest ones"""
    tasks: PositiveInt | None = None
    """only so many tasks, the first ones by id; null: all that have a correct candidate"""
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
        """The first step of a generation; those of 0, the starts, are 0 and below."""
        return (generation - 1) * self.batch + 1

    @property
    def changes_machine_code(self) -> bool:
        """Whether winners are confirmed under a stricter protocol."""
        return "schedule" in self.operators

    def confirming(self, protocol: EvalConfig, *, sanitized: bool = False) -> EvalConfig:
        """The protocol under which winners are confirmed; where machine code was changed, with more
        distributions of inputs and more calls on the same ones. `sanitized`: a correct verdict
        needs no error of compute-sanitizer, too."""
        if not self.changes_machine_code:
            return protocol
        drawn = (*protocol.correctness.distributions, *MORE_INPUTS)
        inputs = {"distributions": tuple(dict.fromkeys(drawn)), "reruns": RERUNS}
        correctness = protocol.correctness.model_copy(update=inputs)
        checked = {"sanitizer": "correct", "sanitizer_finding": "refuse"} if sanitized else {}
        return protocol.model_copy(update={"correctness": correctness, **checked})
