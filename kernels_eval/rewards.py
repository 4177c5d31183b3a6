"""Rewards for reinforcement learning: pure functions from a verdict to a number.

A fault of machine or task gives None, never 0, so that a trainer drops the sample. Published
recipes may be cheated: what our verifier rejects gets what their authors give a cheat. Speedups are
`Timing`'s, against eager PyTorch; 0 for a correct candidate that was not timed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import (
    Field,
    NonNegativeFloat,
    PositiveFloat,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)

from kernels_eval.errors import UsageError, first_problem
from kernels_eval.records import (
    REASONS,
    CompiledBaseline,
    Reason,
    Record,
    Status,
    Timing,
    Verdict,
)
from kernels_eval.written import yaml_of

Parts = dict[str, float]


class RewardRecipe(Record, allow_inf_nan=False):
    """What every recipe has. One of your own is a subclass with `parts`."""

    gamma: ClassVar[float] = 1.0
    """share of the next turn's reward that a turn is given (`discounted`)"""
    min_kernel_share: float | None = Field(default=None, ge=0, le=1)
    """a correct kernel whose own kernels take less of its time, or an unknown share, earns what one
    without a custom kernel does; no published recipe has this"""

    def __hash__(self) -> int:  # a field may be a dict, which has none
        return hash(type(self))

    def parts(self, verdict: Verdict, roofline: float) -> Parts:
        """The terms of the reward, by name; the reward is their sum. `roofline`: share of it
        reached, from 0 (or unknown) to 1.
        """
        raise NotImplementedError


class Kevin(RewardRecipe):
    """0.3 * correct + speedup * correct; a turn adds 0.4 of the next one's return.

    Source: Baronio et al., "Kevin: Multi-Turn RL for Generating CUDA Kernels", arXiv:2507.11948,
    section on rewards; https://cognition.ai/blog/kevin-32b. Read: the abstract, the formula as
    quoted in kernelbench-tinker's `training/reward.py`, and Figure 2's caption. Not verified: the
    paper's own equation, and any bound on the speedup (one reimplementation caps the reward at
    1.8).
    """

    name: Literal["kevin"] = "kevin"
    gamma: ClassVar[float] = 0.4
    correct: ClassVar[float] = 0.3

    def parts(self, verdict: Verdict, roofline: float) -> Parts:
        correct = verdict.correct_custom
        return {"correct": self.correct * correct, "speedup": verdict.speedup}


class DrKernel(RewardRecipe):
    """0.5 * correct + 0.5 * min(speedup, 3) + 0.5 * (share of kernel time in custom kernels); 0
    where not correct.

    Source: Liu et al., "Dr. Kernel", arXiv:2602.05885; github.com/hkust-nlp/KernelGYM at 3a84417,
    `calculate_reward_speedup` in `drkernel/kernel/rewards/reward_client.py`, with the numbers of
    `drkernel/kernel/scripts/rl/14b_trloo_mrs_pr_prs.sh` (`kernel_trainer.yaml` defaults to coverage
    0.25, off). Read in full. A decoy kernel gets `penalty_score`, 0 there. Their coverage is over
    CUDA time under a profiler; ours is `custom_kernel_time_share`; unknown counts as 0 in both.
    Left out: their rejection of turns by coverage, a rule of sampling.
    """

    name: Literal["dr_kernel"] = "dr_kernel"
    correct: ClassVar[float] = 0.5
    speedup: ClassVar[float] = 0.5
    fastest: ClassVar[float] = 3.0
    """a higher speedup counts as this"""
    coverage: ClassVar[float] = 0.5

    def parts(self, verdict: Verdict, roofline: float) -> Parts:
        correct = verdict.correct_custom
        return {
            "correct": self.correct * correct,
            "speedup": self.speedup * min(verdict.speedup, self.fastest),
            "coverage": self.coverage * correct * (verdict.custom_kernel_time_share or 0.0),
        }


class KernelGymSteps(RewardRecipe):
    """-1 where the task did not complete or cheats, -0.5 not compiled, -0.3 incorrect, -0.1 slower
    than the reference; 0.2, 0.4, 0.6, 0.8, 1 from a speedup of 1, 1.2, 1.5, 2, 3.

    Source: github.com/hkust-nlp/KernelGYM at 3a84417, `calculate_reward_like_kernel` in
    `drkernel/kernel/rewards/reward_client.py`. Read in full. There a runtime error is compiled and
    incorrect, a timeout did not complete. A response without a module gets their client's
    `penalty_score`, 0 by default; here it did not complete.
    """

    name: Literal["kernelgym_steps"] = "kernelgym_steps"
    failed: ClassVar[float] = -1.0
    not_compiled: ClassVar[float] = -0.5
    incorrect: ClassVar[float] = -0.3
    slower: ClassVar[float] = -0.1
    steps: ClassVar[tuple[tuple[float, float], ...]] = (
        (1.0, 0.2),
        (1.2, 0.4),
        (1.5, 0.6),
        (2.0, 0.8),
        (3.0, 1.0),
    )
    """(speedup, reward from there on)"""

    def parts(self, verdict: Verdict, roofline: float) -> Parts:
        if verdict.correct_custom:
            reached = [step for step in self.steps if verdict.speedup >= step[0]]
            return {"step": max(reached)[1] if reached else self.slower}
        failures = {
            Status.COMPILE_ERROR: self.not_compiled,
            Status.INCORRECT: self.incorrect,
            Status.RUNTIME_ERROR: self.incorrect,
        }
        return {"step": failures.get(verdict.status, self.failed)}


class CudaAgent(RewardRecipe):
    """-1 where not correct, else 1; 2 where more than 5 % faster than eager; 3 where more than 5 %
    faster than eager and than torch.compile.

    Source: Dai et al., "CUDA Agent: Large-Scale Agentic RL for High-Performance CUDA Kernel
    Generation", arXiv:2602.24286; its project page (cuda-agent.github.io) names discrete rewards
    and 5 % over torch.compile. The four values, and 5 % for both baselines, rest on three
    reimplementations. Not verified: the paper's own equation, and whether 5 % is of the speedup
    (taken here: above 1.05) or of the baseline's time (above 1.053). Training code is not public. 3
    needs the second baseline: `timing.baselines: [eager, compile]`.
    """

    name: Literal["cuda_agent"] = "cuda_agent"
    margin: ClassVar[float] = 0.05

    def parts(self, verdict: Verdict, roofline: float) -> Parts:
        if not verdict.correct_custom:
            return {"milestone": -1.0}
        compiled = verdict.timing and verdict.timing.compiled
        beaten = verdict.speedup > 1 + self.margin
        both = beaten and ((compiled and compiled.speedup) or 0.0) > 1 + self.margin
        return {"milestone": 1.0 + beaten + both}


class KernelBenchTinker(RewardRecipe):
    """0.3 * correct + min(speedup, 10) where correct; a turn adds 0.4 of the next one's return.

    Source: kernelbench-tinker, `src/kernelbench_tinker/training/reward.py`, the default
    `RewardConfig`, `compute_reward` and `compute_discounted_returns`, in the newest version found
    (a contributor's repository). An earlier version gave speedup - 1 (`speed_baseline: 1`): set
    `baseline: 1` for it. Its weights for format, compilation and length are 0 by default and left
    out. What its static checker finds gets 0, as what is rejected here.
    """

    name: Literal["kernelbench_tinker"] = "kernelbench_tinker"
    gamma: ClassVar[float] = 0.4
    correct: ClassVar[float] = 0.3
    baseline: NonNegativeFloat = 0.0
    most: ClassVar[float] = 10.0
    """a higher term of speed counts as this"""

    def parts(self, verdict: Verdict, roofline: float) -> Parts:
        gained = min(max(verdict.speedup - self.baseline, 0.0), self.most)
        return {
            "correct": self.correct * (verdict.correct_custom),
            "speedup": gained,
        }


class CudaL1(RewardRecipe):
    """clip((score - mean) / std, -1.5, 1.5), where the score is the speedup rounded towards 1 to
    two decimals, and 0 where not correct.

    Source: Li et al., "CUDA-L1: Improving CUDA Optimization via Contrastive Reinforcement
    Learning", arXiv:2507.14111, sections 2.4.4 (equation 2, rounding: 1.118 to 1.11, 0.992 to 1.00)
    and 3.2 (equation 6). Read in summaries by others; the training code is not public. Not
    verified: the bound of 1.5, and the samples that mean and standard deviation are over. Give your
    trainer's; the default puts a kernel as fast as the reference at 0 and a failure at -1.
    """

    name: Literal["cuda_l1"] = "cuda_l1"
    mean: float = 1.0
    """of the scores so far"""
    std: PositiveFloat = 1.0
    """of the scores so far"""
    clip: ClassVar[float] = 1.5

    def parts(self, verdict: Verdict, roofline: float) -> Parts:
        # 6 decimals of a hundredth: what is 1.11 in decimals may be a little less in binary
        score = 1 + math.trunc(round(100 * min(verdict.speedup, 1e9) - 100, 6)) / 100
        normalised = (score - self.mean) / self.std
        return {"score": min(max(normalised, -self.clip), self.clip)}


class Concur(RewardRecipe):
    """Where correct: 1 + 0.5 * log2(lower bound of the speedup, kept within 0.5 and 16) + 0.5 *
    share of the roofline reached + 0.5 * share of kernel time in custom kernels. Where rejected:
    -1, or what `penalties` says of the reason. Otherwise 0.

    Our own. Every correct kernel is above every other, and a cheat never above a wrong one. The
    logarithm keeps one outlier from ruling a group; the lower bound (95 %) pays for what was
    measured. The share of the roofline is `least_ms` / candidate's median, at most 1. An unknown
    share is 0.
    """

    name: Literal["concur"] = "concur"
    correct: PositiveFloat = 1.0
    speedup: NonNegativeFloat = 0.5
    """for each doubling"""
    slowest: PositiveFloat = 0.5
    """a lower speedup counts as this"""
    fastest: PositiveFloat = 16.0
    """a higher one counts as this"""
    roofline: NonNegativeFloat = 0.5
    coverage: NonNegativeFloat = 0.5
    rejected: NonNegativeFloat = 1.0
    """taken off where the candidate is rejected"""
    penalties: dict[Reason, NonNegativeFloat] = {}
    """instead of `rejected`, for these reasons"""

    @field_validator("penalties")
    @classmethod
    def _of_rejected(cls, value: dict[Reason, float]) -> dict[Reason, float]:
        if other := set(value) - REASONS[Status.REJECTED]:
            raise ValueError(f"{min(other)} is no reason of a rejection")
        return value

    @model_validator(mode="after")
    def _correct_pays(self) -> Concur:
        if self.correct + self.speedup * math.log2(min(self.slowest, self.fastest)) <= 0:
            raise ValueError("a slow correct kernel would earn no more than a wrong one")
        return self

    def parts(self, verdict: Verdict, roofline: float) -> Parts:
        if verdict.status is Status.REJECTED:
            return {"rejected": -self.penalties.get(verdict.reason, self.rejected)}
        if not verdict.correct_custom:
            return {"correct": 0.0}
        parts = {
            "correct": self.correct,
            "coverage": self.coverage * (verdict.custom_kernel_time_share or 0.0),
            "roofline": self.roofline * roofline,
        }
        if verdict.timing:
            lower = min(max(verdict.timing.speedup_lower, self.slowest), self.fastest)
            parts["speedup"] = self.speedup * math.log2(lower)
        return parts


_Known = Kevin | DrKernel | KernelGymSteps | CudaAgent | KernelBenchTinker | CudaL1 | Concur
Recipe = Annotated[_Known, Field(discriminator="name")]
"""A configuration field of this type takes any recipe, told apart by `name`."""
_adapter: TypeAdapter[RewardRecipe] = TypeAdapter(Recipe)
RECIPES: Mapping[str, RewardRecipe] = {kind().name: kind() for kind in get_args(_Known)}
"""Every recipe with the numbers of its source, by name."""


def recipe_of(given: str | Path | Mapping[str, object] | RewardRecipe) -> RewardRecipe:
    """The recipe that a name, a mapping with `name` and numbers, or a YAML file of such a mapping
    stands for. Raises UsageError.
    """
    if isinstance(given, RewardRecipe):
        return given
    if isinstance(given, str) and given in RECIPES:
        return RECIPES[given]
    hint = f"give one of {', '.join(RECIPES)}, or a YAML file with its name and numbers"
    try:
        text = isinstance(given, (str, Path)) and Path(given).read_text(encoding="utf-8")
        return _adapter.validate_python(yaml_of(text) if text else given)
    except (OSError, ValueError) as error:
        raise UsageError(f"{given} is no reward recipe: {_first(error)}", hint) from error


def _first(error: Exception) -> str:
    if not isinstance(error, ValidationError):
        return str(error)
    key, said = first_problem(error)
    field = key.partition(".")[2]  # behind the recipe's name
    return f"{field}: {said}" if field else said


def reward_parts(
    verdict: Verdict | None, recipe: RewardRecipe, *, least_ms: float | None = None
) -> Parts | None:
    """The terms of `reward` by name, for a trainer's metrics; None where the reward is None. A
    speed counts once confirmed: at level `screen`, no speedup is worth more than 1."""
    if verdict is None or verdict.status is Status.TASK_ERROR:
        return None
    if least_ms and not 0 < least_ms < math.inf:
        raise ValueError(f"least_ms is {least_ms}, but a time is a positive number")
    verdict = _without_fig_leaf(verdict, recipe.min_kernel_share)
    timing = verdict.timing
    if timing and not all(map(math.isfinite, (timing.speedup, timing.speedup_lower))):
        return None  # no clock measured that
    if timing and verdict.level == "screen":
        timing = _at_most_equal(timing)
        verdict = verdict.model_copy(update={"timing": timing})
    reached = least_ms / timing.candidate_ms if least_ms and timing else 0.0
    return recipe.parts(verdict, min(reached, 1.0))


def _without_fig_leaf(verdict: Verdict, least: float | None) -> Verdict:
    if not verdict.correct_custom or (verdict.custom_kernel_time_share or 0.0) >= (least or 0.0):
        return verdict
    reason = Reason.NO_CUSTOM_KERNEL
    refused = {"status": reason.status, "reason": reason, "outputs_match": True, "timing": None}
    return verdict.model_copy(update=refused)


def _at_most_equal(timing: Timing) -> Timing:
    slowest_ms = max(timing.candidate_ms, timing.reference_ms)
    compiled = timing.compiled
    if compiled:
        compiled = compiled.model_copy(update=_capped(compiled))
    changes = {**_capped(timing), "candidate_ms": slowest_ms, "compiled": compiled}
    return timing.model_copy(update=changes)


def _capped(ratios: Timing | CompiledBaseline) -> dict[str, float]:
    names = ("speedup", "speedup_lower", "speedup_upper")
    known = {name: getattr(ratios, name) for name in names}
    return {name: min(ratio, 1.0) for name, ratio in known.items() if ratio}


def reward(
    verdict: Verdict | None, recipe: RewardRecipe, *, least_ms: float | None = None
) -> float | None:
    """What a candidate earns under a recipe; None where the machine or the task failed.

    `verdict` is None where none was reached. `least_ms`, used by `concur` alone, is the machine's
    least time for a call, in milliseconds. Raises ValueError where that is no time.
    """
    parts = reward_parts(verdict, recipe, least_ms=least_ms)
    return None if parts is None else float(sum(parts.values()))


def discounted(rewards: Sequence[float | None], gamma: float) -> list[float | None]:
    """The return of each turn: its reward plus gamma times the next return (Kevin,
    arXiv:2507.11948). None where the sum includes a turn without a reward.

    Raises ValueError for a gamma outside [0, 1].
    """
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma is {gamma}, but a discount is at least 0 and at most 1")
    returns: list[float | None] = []
    later: float | None = 0.0
    for each in reversed(rewards):
        later = None if each is None or later is None else each + gamma * later
        returns.append(later)
    return returns[::-1]
