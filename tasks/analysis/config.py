"""How the observations are made: bins, seeds, budgets of time, and what lengths and speedups are
called."""

from __future__ import annotations

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from kernels_eval.records import Record

TOKENS = "tokens of the generator's own tokenizer"
OVER_EAGER = "speedup over PyTorch eager"


class ObservationConfig(Record):
    """Bins, seeds and budgets; the labels say what the lengths and speedups of this frame are.

    Attributes:
        length_unit: what lengths are called in figures and sentences
        speedup_label: what speedups are called there
    """

    bin_tokens: PositiveInt = 256
    """width of a bin of reasoning length (paper)"""
    last_bin_tokens: PositiveInt = 20_000
    """from here on one bin holds all (paper)"""
    unit_tokens: PositiveFloat = 1000.0
    """odds ratios are for this many additional tokens"""
    without_below_tokens: NonNegativeInt = 2000
    """a row of the sensitivity table leaves out samples shorter than this"""
    only_above_tokens: NonNegativeInt = 4000
    """a row of the sensitivity table takes longer samples only"""
    max_conditional_tasks: int = Field(default=2000, ge=2)
    """tasks given to the conditional regression; above, a random sample"""
    permutations: int = Field(default=999, ge=199)
    """shuffles of the permutation test"""
    permutation_budget: PositiveInt = 200_000_000
    """samples times shuffles, at most; never under 199 shuffles"""
    points: NonNegativeInt = 1500
    """correct samples kept for the figure of length against speedup"""
    seed: int = 0
    """of the permutation test, the random groups of tasks and the dots of a figure"""
    length_unit: str = TOKENS
    speedup_label: str = OVER_EAGER
    speedup_within_tasks_only: bool = False
    """speeds of different tasks are not comparable: do not pool them"""
