"""What a careful reader would ask, answered from the data of a run.

Guarantees: every caveat follows from the context alone; the run's own notes come last. Does not
guarantee that the list is complete.
"""

from __future__ import annotations

from collections.abc import Iterator

from kernels_eval.records import Status
from tasks.benchmark.report.records import ReportContext
from tasks.benchmark.report.summary import models_of
from tasks.reporting.text import plural

FEW_TASKS = 30  # below it, an interval of a rate is wider than most differences between models
EVIDENCE = "'correct' means that outputs matched on all inputs tried and that the checks for known"


def caveats(context: ReportContext) -> Iterator[str]:
    """Return the caveats that hold, one sentence or two each."""
    for holds, text in (*_of_scores(context), *_of_line(context)):
        if holds:
            yield text
    yield from context.notes


def _of_scores(context: ReportContext) -> Iterator[tuple[object, str]]:
    tasks = sorted({row.tasks for row in context.scores if row.metric == "exec"})
    yield (
        tasks and tasks[0] < FEW_TASKS,
        f"The scores rest on {plural(min(tasks, default=0), 'task')} a model. That is too few to"
        " rank models: where two intervals overlap, read the difference as unknown.",
    )
    yield (
        len(tasks) > 1,
        "The models were scored on different numbers of tasks"
        f" ({', '.join(map(str, tasks))}): compare with care.",
    )
    missing = sorted({(row.missing, row.model) for row in context.scores if row.missing})
    for count, model in missing:
        yield (
            True,
            f"{model} has no sample on {plural(count, 'task')} that another model answered: these"
            " are left out of its scores.",
        )
    reasons = [row.why_not for row in context.scores if row.k is not None and row.tasks]
    for reason in dict.fromkeys(filter(None, reasons)):
        yield True, f"Not estimated: {reason}."
    silent = [model for model in models_of(context) if _never_correct(context, model)]
    samples = max((row.samples for row in context.scores if row.model in silent), default=0)
    yield (
        silent,
        f"{', '.join(silent)}: not one correct kernel in {plural(samples, 'sample')}. The zero is"
        " measured, not missing; small models rarely write a kernel that compiles, whatever they"
        " were trained on.",
    )
    yield (
        "recorded" in models_of(context),
        "'recorded' is a set of answers kept with the project and verified here; it shows what the"
        " pipeline does, not how a model ranks.",
    )


def _of_line(context: ReportContext) -> Iterator[tuple[object, str]]:
    yield (
        context.history,
        "A lower training loss says that the adapter fits the curated samples; only held-out scores"
        " say whether kernels got better. This is one training run: the spread between seeds is in"
        " none of the intervals.",
    )
    yield (
        True,
        f"{EVIDENCE} cheats found nothing: evidence, not proof. On the track 'any correct' an"
        " answer without a custom kernel is not timed, so its fast_p for p > 0 is a lower bound.",
    )
    yield (
        context.language == "cpp",
        "Speedups are of C++ against PyTorch on the same CPU. They say nothing about a GPU and do"
        " not compare with published figures.",
    )
    verdicts = sum(context.status_counts.values())
    yield (
        verdicts != context.candidates,
        f"There are {plural(context.candidates, 'candidate')} but {plural(verdicts, 'verdict')}:"
        " the counts do not add up.",
    )
    excluded = context.status_counts.get(Status.TASK_ERROR, 0)
    yield (
        excluded,
        f"{plural(excluded, 'candidate')} met a task whose own reference program fails: that says"
        " nothing about the generator.",
    )


def _never_correct(context: ReportContext, model: str) -> bool:
    rates = [row.value for row in context.scores if (row.model, row.metric) == (model, "exec")]
    known = [value for value in rates if value is not None]
    return bool(known) and max(known) == 0.0
