"""The comparisons of a candidate with its task: which inputs, with which weights, in which mode."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from kernels_eval.protocol import DECLARED, OutputForm

SHAPE_SCOPES = ("each", "all", "last", "first")
TAILS = {"1": 1, "2": 2, "odd": -1}
"""What shrinks in another shape, and how many elements are left over in blocks of 4 and more, or
are missing to fill them (`model.inputs.smaller_shapes`)."""

LARGE = tuple(f"normal_x{10**power}" for power in (4, 3, 2, 1))
HARD = ("large", "small", "offset")
"""Distributions that look for answers right on tame values only: they overflow, or cancel to
nothing. `small` comes with `large`: what is added to a variance, say, then matters."""


@dataclass
class Trial:
    """One comparison: which inputs, with which weights, in which mode."""

    name: str
    seed: int = field(default_factory=lambda: secrets.randbits(31))
    distribution: str = DECLARED
    weights_seed: int | None = None
    in_place: bool = False
    shape: str = DECLARED
    evaluate: bool = False
    construct_seed: int | None = None
    outputs: list[OutputForm] = field(default_factory=list)

    @property
    def own_inputs(self) -> bool:
        """Are inputs and weights what the task itself draws, in its own shape?"""
        own = self.distribution == self.shape == DECLARED
        return own and self.weights_seed is None

    @property
    def as_drawn(self) -> bool:
        """Is it the task exactly as it is, inputs, weights and mode?"""
        special = self.evaluate or self.weights_seed is not None or self.construct_seed is not None
        return self.own_inputs and not special

    @property
    def own_mode(self) -> bool:
        """Is it run in the task's own shape and mode?"""
        return self.shape == DECLARED and not self.evaluate

    @property
    def hard(self) -> bool:
        return self.name in HARD

    @property
    def forms(self) -> tuple[str, ...]:
        """Its distribution in forms of which the first that suits the task is drawn."""
        return LARGE if self.name == "large" else (self.name, f"{self.name}_positive")
