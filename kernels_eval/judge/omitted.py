"""Does a candidate leave out terms of the task's formula that are too small for a gate? Asked of
its errors in two trials."""

from __future__ import annotations

from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.messages import Stop
from kernels_eval.judge.trial import Stage, Trial
from kernels_eval.protocol import FindOmitted, OmittedTerm
from kernels_eval.records import Reason

TOLD = 2
"""Trials in which a term must be left out. A choice: chance tells in none."""


def check_terms(process: CandidateProcess) -> None:
    """Require every term in two trials. Raises Stop for one that is left out, or scaled."""
    if process.draft.approximation:
        return  # its errors are functions of the output, and so are terms
    lacking: dict[str, OmittedTerm] = {}
    told = 0
    for trial in process.reference.trials:
        if not _tells(trial, process):
            continue
        process.call(trial)
        request = FindOmitted(trial=trial.name)
        found = process.reference.answer_if_suitable(request)
        terms = {term.name: term for term in found.terms} if found else {}
        lacking = terms if not told else {x: y for x, y in lacking.items() if x in terms}
        told += 1
        if not lacking:
            return
        if told == TOLD:
            break
    if told == TOLD:
        worst = max(lacking.values(), key=lambda term: abs(term.coefficient))
        raise Stop(
            Reason.WRONG_OUTPUT,
            f"a term of the task's formula is left out, or scaled, though the error is within its"
            f" gate: {worst.name} has the coefficient {worst.coefficient:.2f} in it (1: left out;"
            f" standard error {worst.standard_error:.1g})",
        )


def _tells(trial: Trial, process: CandidateProcess) -> bool:
    row = trial.row
    ordinary = row.stage is Stage.OUTPUTS and not (row.hard or trial.weights or trial.earlier_seeds)
    return ordinary and trial.own_mode and trial.regular and trial.name in process.compared
