"""How the observations are made: bins, seeds, budgets of time, and what lengths and speedups are
called."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

TOKENS = "tokens of the generator's own tokenizer"
OVER_EAGER = "speedup over PyTorch eager"


class ObservationConfig(BaseModel):
    """Bins, seeds and budgets; the labels say what the lengths and speedups of this frame are.

    Attributes:
        length_unit: what lengths are called in figures and sentences
        speedup_label: what speedups are called there
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    bin_tokens: int = Field(
        default=256, ge=1, description="width of a bin of reasoning length (paper)"
    )
    last_bin_tokens: int = Field(
        default=20_000, ge=1, description="from here on one bin holds all (paper)"
    )
    unit_tokens: float = Field(
        default=1000.0, gt=0, description="odds ratios are for this many additional tokens"
    )
    without_below_tokens: int = Field(
        default=2000,
        ge=0,
        description="a row of the sensitivity table leaves out samples shorter than this",
    )
    only_above_tokens: int = Field(
        default=4000, ge=0, description="a row of the sensitivity table takes longer samples only"
    )
    max_conditional_tasks: int = Field(
        default=2000,
        ge=2,
        description="tasks given to the conditional regression; above, a random sample",
    )
    permutations: int = Field(default=999, ge=199, description="shuffles of the permutation test")
    permutation_budget: int = Field(
        default=200_000_000,
        ge=1,
        description="samples times shuffles, at most; never under 199 shuffles",
    )
    points: int = Field(
        default=1500,
        ge=0,
        description="correct samples kept for the figure of length against speedup",
    )
    seed: int = Field(
        default=0,
        description="of the permutation test, the random groups of tasks and the dots of a figure",
    )
    length_unit: str = TOKENS
    speedup_label: str = OVER_EAGER
    speedup_within_tasks_only: bool = Field(
        default=False, description="speeds of different tasks are not comparable: do not pool them"
    )
