"""Does a candidate add up all terms of a long sum? Asked on inputs of few terms, where none is
left out unseen.
"""

from __future__ import annotations

import secrets

from kernels_eval.config import MOST_DRAWS, SCREEN_DRAWS, TIMED_INPUT_BYTES
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.explanation import errors_of
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.trials import Trial
from kernels_eval.judge.unseen_rounds import UnseenRounds
from kernels_eval.protocol import FEW_TERMS, CompareSums
from kernels_eval.records import Reason


def compare_sums(process: CandidateProcess) -> None:
    """Compare a candidate where the task has a long sum; a screening, on fewer draws. Raises Stop
    for a term that is left out.
    """
    reference = process.reference
    count = min(_most_draws(process), reference.draws_of_few_terms())
    if not count:
        return
    seeds = [secrets.randbits(31) for _ in range(count)]
    names = [FEW_TERMS] * count
    rounds = UnseenRounds(process, count)
    with process.child.stopped():
        rounds.draw(seeds, names)
        rounds.expect()
    rounds.report(rounds.run())
    compared = reference.request(CompareSums(seeds=seeds))
    reference.end_timing()
    trial = Trial(FEW_TERMS, reference.trials[0].row, seeds[0], distribution=FEW_TERMS)
    for found in compared.found:
        outcome = reference.judge(found, trial)
        noted = outcome is Reason.APPROXIMATION and process.draft.approximation
        if outcome is not Reason.OK and not noted:
            raise Stop(
                Reason.NON_FINITE if outcome is Reason.NON_FINITE else Reason.WRONG_OUTPUT,
                "a long sum is not of all of its terms (are some left out, or only sampled?), or"
                f" loses small ones; {errors_of(trial, found)}",
            )


def _most_draws(process: CandidateProcess) -> int:
    most = SCREEN_DRAWS if process.config.level == "screen" else MOST_DRAWS
    return min(most, max(2, TIMED_INPUT_BYTES // max(1, process.reference.task_bytes)))
