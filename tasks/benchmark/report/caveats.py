"""What a careful reader would ask, answered from the data of a run.

Guarantees: every caveat follows from the context alone; the run's own notes come last. Does not
guarantee that the list is complete.
"""

from __future__ import annotations

from collections.abc import Iterable

from kernels_eval.records import Status
from tasks.benchmark.report.records import ReportContext
from tasks.benchmark.report.summary import models_of
from tasks.reporting.text import plural

FEW_TASKS = 30  # below it, an interval of a rate is wider than most differences between models


def caveats(context: ReportContext) -> Iterable[str]:
    """What a careful reader would ask, answered from the data; the run's own notes last."""
    counted = {row.tasks for row in context.scores if row.metric == "exec"}
    if counted and min(counted) < FEW_TASKS:
        yield (
            f"The scores rest on {plural(min(counted), 'task')} a model. That is too few to rank"
            " models: where two intervals overlap, read the difference as unknown."
        )
    if len(counted) > 1:
        yield (
            "The models were scored on different numbers of tasks"
            f" ({', '.join(map(str, sorted(counted)))}): compare with care."
        )
    for missing, model in sorted(
        {(row.missing, row.model) for row in context.scores if row.missing}
    ):
        yield (
            f"{model} has no sample on {plural(missing, 'task')} that another model answered: these"
            " are left out of its scores."
        )
    for reason in dict.fromkeys(
        row.why_not for row in context.scores if row.k is not None and row.tasks and row.why_not
    ):
        yield f"Not estimated: {reason}."
    silent = [model for model in models_of(context) if _never_correct(context, model)]
    if silent:
        samples = max(row.samples for row in context.scores if row.model in silent)
        yield (
            f"{', '.join(silent)}: not one correct kernel in {plural(samples, 'sample')}. The zero"
            " is measured, not missing; small models rarely write a kernel that compiles, whatever"
            " they were trained on."
        )
    if "recorded" in models_of(context):
        yield (
            "'recorded' is a set of answers kept with the project and verified here; it shows what"
            " the line does, not how a model ranks."
        )
    if context.history:
        yield (
            "A lower training loss says that the adapter fits the curated samples; only held-out"
            " scores say whether kernels got better. This is one training run: the spread between"
            " seeds is in none of the intervals."
        )
    yield (
        "'correct' means that outputs matched on all inputs tried and that the checks for known"
        " cheats found nothing: evidence, not proof. On the track 'any correct' an answer without a"
        " custom kernel is not timed, so its fast_p for p > 0 is a lower bound."
    )
    if context.language == "cpp":
        yield (
            "Speedups are of C++ against PyTorch on the same CPU. They say nothing about a GPU and"
            " do not compare with published figures."
        )
    verdicts = sum(context.status_counts.values())
    if verdicts != context.candidates:
        yield (
            f"There are {plural(context.candidates, 'candidate')} but"
            f" {plural(verdicts, 'verdict')}: the counts do not add up."
        )
    excluded = context.status_counts.get(Status.TASK_ERROR, 0)
    if excluded:
        yield (
            f"{plural(excluded, 'candidate')} met a task whose own reference program fails: that"
            " says nothing about the generator."
        )
    yield from context.notes


def _never_correct(context: ReportContext, model: str) -> bool:
    rates = [
        row.value
        for row in context.scores
        if row.model == model and row.metric == "exec" and row.value is not None
    ]
    return bool(rates) and max(rates) == 0.0
