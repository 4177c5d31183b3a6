"""Why a candidate is not in a training set, in the order of curation's checks."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum


class WhyNot(StrEnum):
    """A candidate's first reason that applies."""

    NOT_CORRECT = "not_correct"
    LATER_TURN = "later_turn"
    CUT_OFF = "cut_off"
    KERNEL_SHARE = "kernel_share"
    TRACE_FLAG = "trace_flag"
    NO_REASONING = "no_reasoning"
    SPEEDUP_BOUND = "speedup_bound"
    NO_CUSTOM_KERNEL = "no_custom_kernel"
    BOTTLENECK_KEPT = "bottleneck_kept"
    NOT_ON_EVERY_GPU = "not_on_every_gpu"
    EQUAL_KERNEL = "equal_kernel"
    ONE_CORRECT = "one_correct"
    LIMIT = "limit"
    LONGER = "longer"
    UNTIMED = "untimed"
    SLOWER = "slower"
    OUTRANKED = "outranked"


MEANING = {
    WhyNot.NOT_CORRECT: "its verdict is not correct",
    WhyNot.LATER_TURN: "it answers a follow-up, and later_turns is off",
    WhyNot.CUT_OFF: "the token limit cut its answer off, and cut_off_answers is off",
    WhyNot.KERNEL_SHARE: "its own kernels take less of its time than min_kernel_share, or unknown",
    WhyNot.TRACE_FLAG: "its reasoning has a flag of exclude_flags",
    WhyNot.NO_REASONING: "it has no reasoning to train on",
    WhyNot.SPEEDUP_BOUND: "its lower speedup bound is not above require_speedup_lower_above",
    WhyNot.NO_CUSTOM_KERNEL: "its verdict names no custom kernel (require_custom_kernel)",
    WhyNot.BOTTLENECK_KEPT: "it keeps the slowest operator (require_rewritten_bottleneck)",
    WhyNot.NOT_ON_EVERY_GPU: "it is not correct on every GPU (require_correct_on_every_gpu)",
    WhyNot.EQUAL_KERNEL: "an equal kernel of its task was taken",
    WhyNot.ONE_CORRECT: "it is its task's only correct sample, and two are required",
    WhyNot.LIMIT: "a limit of the set was reached before it (single_operator_quota,"
    " criterion_sizes, size)",
    WhyNot.LONGER: "a correct sample of its task has shorter reasoning",
    WhyNot.UNTIMED: "it was not timed",
    WhyNot.SLOWER: "a correct sample of its task is faster",
    WhyNot.OUTRANKED: "no criterion of the strategy chose it among the samples of its task",
}


def left_out(why_not: Mapping[str, int]) -> list[str]:
    """How many candidates are left out for each reason, in words, the most frequent first."""
    ordered = sorted(why_not.items(), key=lambda counted: -counted[1])
    return [f"{count:,}: {MEANING[WhyNot(why)]}" for why, count in ordered]
