"""Settings of a training set: strategy, thresholds, size and seed. Not every key matters to every
strategy: descriptions say which."""

from __future__ import annotations

from typing import Annotated, Literal, get_args

from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, field_validator

from kernels_eval.extensions import require_known
from kernels_eval.records import Record
from tasks.keys import Asked, LeastShare

Strategy = Literal[
    "concur",
    "concur_without_conciseness",
    "concur_without_speedup",
    "concur_without_balance",
    "concur_two_correct",
    "shuffled_reasoning",
    "min_length",
    "max_length",
    "speedup",
    "random",
    "balanced_min_length",
    "balanced_speedup",
    "balanced_random",
]
STRATEGY_NAMES: tuple[Strategy, ...] = get_args(Strategy)
STRATEGY_GROUP = "concur.strategies"
"""Entry points by which an installed package adds a `tasks.curation.strategies.Strategy`."""

Flag = Literal[
    "repetitive", "ends_in_loop", "self_doubting", "mixed_language", "truncated", "too_short"
]
FLAGS: tuple[Flag, ...] = get_args(Flag)


class CurationConfig(Record):
    """The rule, its thresholds, and its requirements for every sample."""

    strategy: str = "concur"
    """the rule's name: concur is the paper's, the others are compared with it"""
    size: PositiveInt | None = None
    """the most samples; smaller sets are subsets of larger ones; not set: all that the rule
    selects, where a strategy has no end of its own as many as concur takes of the same rows"""
    seed: int = Field(default=0, ge=0, lt=2**63)
    """of every draw: random samples, ties of the baselines, thinning to a size"""
    min_speedup: NonNegativeFloat = 5.0
    """paper, criterion b: every correct kernel above this speedup is taken; concur and its
    controls"""
    if_empty: Literal["error", "shortest"] = Field(
        default="error", exclude_if=lambda asked: asked == "error"
    )
    """where criteria a, b and c take none, as of few tasks they may: stop, or take each task's
    shortest correct, timed sample; concur and its controls"""
    single_operator_quota: (
        Annotated[int, Field(strict=True, ge=0)] | Annotated[float, Field(gt=0, lt=1)]
    ) = 0.5
    """criterion c: a share (0.5) limits the single operators to this part of the set; a whole
    number limits the samples that are added, never beyond half of the set. The balanced
    strategies aim at the same share, or select at most this number"""
    criterion_sizes: tuple[PositiveInt, PositiveInt, NonNegativeInt] | None = None
    """numbers of samples for criteria a, b and c, drawn if there are more. Replaces
    single_operator_quota in concur and its controls. The paper's: 3934, 414, 544"""
    require_speedup_lower_above: NonNegativeFloat | None = None
    """strict: take only samples whose lower bound of the speedup (95 %) is above this"""
    require_custom_kernel: bool = False
    """strict: take only samples whose verdict names a custom kernel"""
    require_rewritten_bottleneck: Asked = False
    """strict: take only samples that call the reference's slowest operator no more; asks for
    profiles (`profile.enabled`)"""
    require_correct_on_every_gpu: Asked = False
    """strict: take only samples that are correct on every GPU that judged them, where verdicts of
    several are merged. Times are those of the first"""
    min_kernel_share: LeastShare = None
    """samples whose own kernels take less of their candidate's time (0.1), or an unknown share, are
    not in the pool, for every strategy. Left out: any share, as the paper has it"""
    max_per_task: PositiveInt | None = 1
    """maximum samples per task of the baselines and the balanced strategies; null: no limit. The
    paper's rule has its own limits"""
    equal_speedups: Literal["exact", "interval"] = "exact"
    """criterion a: a sample is as fast as the fastest if the medians agree (exact), or if their
    95 % intervals overlap (interval)"""
    later_turns: bool = False
    """also use answers to follow-ups. Training pairs every sample with its task's first prompt,
    which these did not answer"""
    cut_off_answers: bool = False
    """also use answers that the token limit cut off. Training adds no end token to them, because
    their model wrote none"""
    without_reasoning: Asked = False
    """also use answers without reasoning, as models write that do not think"""
    exclude_flags: tuple[Flag, ...] = ()
    """samples whose reasoning raises one of these flags are not in the pool, for every strategy"""

    @field_validator("strategy")
    @classmethod
    def _is_known(cls, name: str) -> str:
        return require_known(STRATEGY_GROUP, name, STRATEGY_NAMES)
