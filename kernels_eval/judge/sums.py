"""Does a candidate add up all terms of a long sum, each with all digits, and compare all elements
for the largest? Asked on inputs of few terms, where none is left out unseen.
"""

from __future__ import annotations

import secrets

from kernels_eval.config import LEFT_OUT_SHARE, MOST_DRAWS, SCREEN_DRAWS, TIMED_INPUT_BYTES
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.explanation import errors_of
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.trial import Trial
from kernels_eval.judge.unseen_rounds import UnseenRounds
from kernels_eval.model.correctness import judge_terms
from kernels_eval.protocol import (
    DECISIVE,
    FEW_TERMS,
    LARGEST,
    LONE_TERMS,
    ORDINARY_TERMS,
    UNIT_FACTORS,
    CompareSums,
    Comparison,
)
from kernels_eval.records import Reason

WHAT = {
    **dict.fromkeys(
        (FEW_TERMS, ORDINARY_TERMS),
        "a long sum is not of all of its terms (are some left out, or only sampled?), or loses"
        " small ones",
    ),
    LONE_TERMS: "terms of a long sum are off (another formula, or fewer digits?)",
    UNIT_FACTORS: "a product has fewer digits of its factors than the task's precision",
    DECISIVE: "one element that decides is not seen (are some left out?)",
    LARGEST: "the largest or smallest element is not that of all (are some left out?)",
}

LOSES_DIGITS = (
    "a long sum loses digits, though none of its terms: a variance as E[x^2] - E[x]^2 cancels"
    " (subtract the mean before squaring, or use Welford's updates), and plain addition loses what"
    " is small beside its sum (add in blocks)"
)


def compare_sums(process: CandidateProcess) -> None:
    """Compare a candidate where the task has a long sum or a maximum; a screening, on fewer draws.
    Raises Stop for a term that is left out, or off.
    """
    for kind in WHAT:
        _compare_terms(process, kind)


def _compare_terms(process: CandidateProcess, kind: str) -> None:
    left, most = process.reference.few_terms(kind).draws, _most_draws(process)
    if process.config.level == "screen" or kind != LARGEST:
        left = min(left, most)  # a draw tells one place of each maximum, and of a sum many
    while left > 0:
        _compare_draws(process, kind, min(left, most))
        left -= most


def _compare_draws(process: CandidateProcess, kind: str, count: int) -> None:
    reference = process.reference
    seeds = [secrets.randbits(31) for _ in range(count)]
    rounds = UnseenRounds(process, count)
    process.renew()
    with process.child.stopped():
        rounds.draw(seeds, [kind] * count)
        rounds.expect()
    rounds.report(rounds.run())
    compared = reference.request(CompareSums(kind=kind, seeds=seeds))
    reference.end_timing()
    less = reference.few_terms(kind).less
    trial = Trial(kind, reference.trials[0].row, seeds[0], distribution=kind)
    for found in compared.found:
        outcome = judge_terms(found, kind, reference.gates.loosest)
        noted = outcome is Reason.APPROXIMATION and process.draft.approximation
        if outcome is not Reason.OK and not noted:
            raise Stop(
                Reason.NON_FINITE if outcome is Reason.NON_FINITE else Reason.WRONG_OUTPUT,
                f"{what_is_wrong(found, kind, less)}; {errors_of(trial, found)}",
            )


def what_is_wrong(found: Comparison, kind: str, less: Comparison | None) -> str:
    """`less`: the errors of an answer without one term."""
    if kind == FEW_TERMS and less and found.max < LEFT_OUT_SHARE * less.max:
        return LOSES_DIGITS
    return WHAT[kind]


def _most_draws(process: CandidateProcess) -> int:
    if process.reference.loaded.remembers:
        return 1  # each a first call
    most = SCREEN_DRAWS if process.config.level == "screen" else MOST_DRAWS
    return min(most, max(2, TIMED_INPUT_BYTES // max(1, process.reference.task_bytes)))
