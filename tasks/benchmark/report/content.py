"""A report's content: findings, trust, next steps and details. Strings are raw, but headline and
summary, which terminals print, hold no control characters."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

from kernels_eval.grouping import grouped
from kernels_eval.records import STATUS_OF, Language, Row
from tasks.benchmark.report.context import ReportContext
from tasks.benchmark.shown import (
    CORRECT_MEANS,
    FAST,
    FEW_TASKS,
    HEADLINE_METRICS,
    OWN_TRACK,
    SIGNIFICANT,
    TRACK_NAMES,
    difference_sentence,
    differences_parts,
    label,
    pivoted,
    scored,
    scores_table,
)
from tasks.reporting.findings import findings_table
from tasks.reporting.parts import (
    Bullets,
    Code,
    Columns,
    Links,
    LocalLink,
    Part,
    Picture,
    Section,
    Table,
    fields_table,
)
from tasks.reporting.text import by_count, clean, cut, interval, number, plural, share
from tasks.scores import EXEC, TRACKS

TRAINED = ("base", "tuned")
RANDOM_DEMO, READ_DEMO = "small", "small-pretrained"
"""The base models that ship: random weights, and weights that read one family of tasks."""
DEMO_SHOWS = (
    "a small model with random weights, which cannot write a program: this run shows the pipeline,"
    " not a gain"
)
DEMO_READ = (
    "a small model that before had read programs and kernels of one family of tasks, but none of"
    " those it is asked here: what it scores says nothing of other tasks or models"
)
MOST_LIMITS = 7
"""Limits of the results beside what was found, for one screen; the others are folded."""
MOST_GROUPS = 16
"""Operator families of a large suite; more than fit a screen are in the JSON."""
HEADLINE_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "model": lambda row: cut(row["model"], 40),
    "tasks": lambda row: str(row["tasks"]),
}


def eager(context: ReportContext) -> list[Row]:
    return [row for row in context.scores if row["baseline"] == "eager"]


def own_scores(context: ReportContext) -> list[Row]:
    return [row for row in eager(context) if row["track"] == OWN_TRACK]


def headline_scores(context: ReportContext) -> list[Row]:
    rows = [row for row in own_scores(context) if row["metric"] in HEADLINE_METRICS]
    smallest = min((row["k"] for row in rows if row["k"] is not None), default=None)
    return [row for row in rows if row["k"] in (smallest, None)]


# -- the first screen ------------------------------------------------------------------------------


def headline(context: ReportContext) -> str:
    author = author_of(context)
    parts = [
        f"Of {plural(context.candidates, 'candidate')}{f' by {author}' if author else ''} on"
        f" {plural(context.tasks, 'task')},"
        f" {context.correct:,} proved correct",
        f"{f'{context.curated:,}' if context.curated else 'none'} became training data",
    ]
    if losses := context.losses:
        parts.append(f"training loss went from {losses[0]:.3f} to {losses[1]:.3f}")
    rows = [row for row in headline_scores(context) if row["metric"] == EXEC]
    known = [row for row in rows if row["value"] is not None]
    if known:
        rates = ", ".join(
            f"{model_in_words(context, row['model'])} {interval(row['value'], form='.1%')}"
            for row in known
        )
        tasks = plural(max(row["tasks"] for row in known), "held-out task")
        k = known[0]["k"]
        parts.append(f"correct with a custom kernel on {tasks} (Exec@{k}): {rates}")
    if remark := demo_remark(context):
        parts.append(": ".join(remark))
    return clean("; ".join(parts) + ".", one_line=True)


def author_of(context: ReportContext) -> str:
    """The model that was asked for candidates; "" of recorded answers."""
    return cut(str((context.config.get("synthesis") or {}).get("model") or ""), 40)


def silent_models(context: ReportContext) -> list[str]:
    """Models without one correct kernel of their own."""
    execs = [row for row in own_scores(context) if row["metric"] == EXEC]
    rates = grouped((row["model"], row["value"]) for row in execs if row["value"] is not None)
    return [model for model, values in rates.items() if max(values) == 0.0]


def silent_demo(context: ReportContext) -> list[str]:
    """The silent models, where all are the demo's with random weights."""
    silent = silent_models(context)
    demo = context.base_model == RANDOM_DEMO and set(silent) <= set(TRAINED)
    return silent if demo else []


def demo_remark(context: ReportContext) -> tuple[str, str] | None:
    """Models that are the demo's, and what their scores show."""
    if silent := silent_demo(context):
        return " and ".join(silent), DEMO_SHOWS
    scored = {row["model"] for row in own_scores(context) if row["value"] is not None}
    if context.base_model == READ_DEMO and (models := [each for each in TRAINED if each in scored]):
        return " and ".join(models), DEMO_READ
    return None


def model_in_words(context: ReportContext, model: str) -> str:
    """A model's name, with what it is where the name does not tell."""
    about = {
        "recorded": "answers that ship with concur",
        "base": f"{context.base_model}, not trained here",
        "tuned": f"{context.base_model}, trained on this set",
    }
    return f"{model} ({about[model]})" if model in about else model


def found(context: ReportContext) -> list[str]:
    smallest = min((row["k"] for row in context.comparisons), default=None)
    own = [row for row in context.comparisons if row["track"] == OWN_TRACK and row["k"] == smallest]
    alike = grouped(
        (f"{row['model']} minus {row['baseline']}", label(row["metric"], row["k"]))
        for row in own
        if _is_nowhere(row)
    )
    sentences = [difference_sentence(row) for row in own if not _is_nowhere(row)]
    sentences += [
        f"{pair}: no difference on any task ({', '.join(of)})." for pair, of in alike.items()
    ]
    if context.timed:
        sentences.append(
            f"{context.faster:,} of {plural(context.timed, 'correct, timed candidate')} of the"
            " training tasks are faster than PyTorch with 95 % confidence."
        )
    return sentences + list(context.findings[:1])


def _is_nowhere(row: Row) -> bool:
    return bool(row["difference"] == 0 and row["lower"] is None)


def next_steps(context: ReportContext) -> list[str]:
    """What to check first: model faults, the commonest failure, and the use of more data."""
    demo = context.base_model in (RANDOM_DEMO, READ_DEMO)
    steps = [sign.sentence for sign in context.signs if not (demo and sign.model in TRAINED)]
    if demo:
        steps.append(
            "For a score that says something of real kernels, tune a model that writes programs:"
            " set training.base_model (docs/how-to/train.md)."
        )
    if context.errors:
        most = context.errors[0]
        steps.append(
            "The commonest failure to build or run of answers in the benchmark,"
            f" {plural(most.count, 'time')}:"
            f" {cut(most.signature or 'no message', 120)} ({most.reason})."
        )
    unsure = [row for row in context.comparisons if (row["p_holm"] or 0.0) >= SIGNIFICANT]
    if unsure and not demo:
        steps.append(
            "More held-out tasks, or more samples of each, would narrow the intervals of the"
            " differences that chance could have made."
        )
    return steps or ["No sign of a model that went wrong was found."]


def summary_table(context: ReportContext) -> list[tuple[str, str]]:
    losses, steps = context.losses, plural(len(context.history), "step")
    rows = [("tasks", f"{context.tasks:,}"), ("candidates", f"{context.candidates:,}")]
    rows += [
        (f"status {status}", f"{count:,} ({share(count, context.candidates)})")
        for status, count in by_count(context.status_counts)
    ]
    if told := context.confirmation:
        rows.append(("confirmed candidates", f"{told['confirmed']:,} of {told['proposed']:,}"))
    rows.append(("curated samples", f"{context.curated:,}"))
    rows += [(f"curated by {name}", f"{n:,}") for name, n in context.criterion_counts.items()]
    rows += [("choice", "; ".join(context.choice))] * bool(context.choice)
    loss = f"{losses[0]:.3f} to {losses[1]:.3f} ({steps})" if losses else "not trained"
    rows.append(("training loss, first to last", loss))
    known = [row for row in eager(context) if row["metric"] in (EXEC, FAST)]
    smallest = min((row["k"] for row in known), default=None)
    cells = grouped(
        ((row["model"], row["track"]), f"{label(row['metric'], row['k'])} {scored(row)}")
        for row in known
        if row["k"] == smallest
    )
    rows += [
        (f"{model}, {TRACK_NAMES[track]}", ", ".join(cells.get((model, track), ())))
        for model in dict.fromkeys(row["model"] for row in known)
        for track in reversed(TRACKS)
    ]
    if remark := demo_remark(context):
        rows.append(remark)
    return [(clean(name, one_line=True), clean(value, one_line=True)) for name, value in rows]


def cautions(context: ReportContext) -> Iterator[str]:
    execs = [row for row in own_scores(context) if row["metric"] == EXEC]
    fewest = min((row["tasks"] for row in execs), default=FEW_TASKS)
    if fewest < FEW_TASKS:
        yield (
            f"{plural(fewest, 'task')} per model: too few to rank models. If two intervals overlap,"
            " the difference is unknown."
        )
    scored = {row["model"] for row in execs if row["value"] is not None}
    if silent := silent_models(context):
        why = (
            "they are the demo's small model, whose random output layer is not trained and gives no"
            " token more than 3 %: it writes no program."
            if silent_demo(context)
            else "small models rarely write a kernel that compiles."
        )
        yield (
            f"Not one correct kernel: {', '.join(silent)}. The zero is measured, not missing; {why}"
        )
    if (author := author_of(context)) and author != context.base_model and scored & {*TRAINED}:
        yield (
            f"{author}, which wrote the candidates, is not among the models that are scored:"
            f" these are {context.base_model} before and after training."
        )
    of_choice = context.choice[1:]  # what was kept is in the table
    yield from (f"Training set: {text}." for text in of_choice)
    yield from (note for note in context.notes if not note.startswith(of_choice))
    if any(row["model"] == "recorded" for row in execs):
        yield (
            "Recorded answers ship with concur and were verified here. They show what the pipeline"
            " does, not how a model ranks."
        )
    if context.history:
        yield (
            f"One training run, of {plural(len(context.history), 'step')}: no interval includes the"
            " spread between seeds. A lower loss says that the adapter fits the samples, not that"
            " kernels got better."
        )
    if not Language(context.language).needs_gpu:
        yield "Speedups compare C++ with PyTorch on the same CPU. They say nothing about a GPU."
    yield CORRECT_MEANS


# -- the page --------------------------------------------------------------------------------------


def sections(context: ReportContext) -> list[Section | Columns]:
    limits = tuple(cautions(context))
    shown, more = limits[:MOST_LIMITS], limits[MOST_LIMITS:]
    return [
        Columns(
            (
                Section("What this run found", _found(context)),
                Columns((Section("May you trust it", (Bullets(shown),)), _next(context))),
            )
        ),
        Section("Details", (Section("More limits", (Bullets(more),)), *_details(context))),
    ]


def _next(context: ReportContext) -> Section:
    steps = Bullets(tuple(next_steps(context)))
    if not context.viewer:
        return Section("What next", (steps,))
    viewer = LocalLink("Every candidate with its code, verdict and log", context.viewer)
    return Section("What next", (steps, Links((viewer,)), Code(context.viewer_command)))


def _found(context: ReportContext) -> tuple[Part, ...]:
    if not context.scores:
        return "No benchmark was run.", Bullets(tuple(found(context)))
    # the number of tasks is in the headline
    models = {"model": HEADLINE_COLUMNS["model"]}
    table = pivoted(models, headline_scores(context))
    about = (
        "Share of held-out tasks solved with one answer (Exec) and solved faster than PyTorch"
        " (fast_1), with a custom kernel; 95 % intervals over tasks."
    )
    # a zero is an answer here: no row is folded
    return replace(table, keys=0), about, Bullets(tuple(found(context)))


def _details(context: ReportContext) -> Iterator[Section]:
    yield Section("Every score", tuple(_scores(context)))
    yield Section("Differences, task by task", tuple(_differences(context)))
    yield Section("By level, operator and reasoning length", tuple(_groups(context)))
    yield Section("Signs and failures", _signs_and_errors(context))
    yield Section("Verdicts of all candidates", (_verdicts(context),))
    yield Section("Curation and training", tuple(_training(context)))
    yield Section("Reasoning length", tuple(_lengths(context)))
    yield Section("What limits the correct kernels", tuple(_limits(context)))
    yield Section("Where it came from", tuple(_origin(context)))


def _scores(context: ReportContext) -> Iterator[Part]:
    if not context.scores:
        return
    yield (
        "A task is a PyTorch program; a candidate is one answer of a model to it. 'recorded' stands"
        " for the answers that ship with concur, 'base' for the model before training and 'tuned'"
        " for the model after it. pass@k is the chance that one of k answers succeeds (unbiased"
        " estimate over a task's samples), speedup the reference time divided by the candidate"
        " time; beside it is the mean share of that time in own kernels. Track"
        " 'custom kernel' requires that a custom kernel did the work; 'any correct'"
        " also counts correct answers without one, which are not timed, so its fast_p for p > 0 is"
        " a lower bound. Against torch.compile, tasks whose reference could not be compiled are"
        " left out. n/a: too few samples for that k, or nothing to average."
    )
    if any(row["value"] is not None for row in headline_scores(context)):
        caption = (
            "Exec with 95 % intervals, and fast_p at the smallest k by model, on the track 'custom"
            " kernel'. fast_1 is the share that is correct and faster than PyTorch."
        )
        yield Picture("scores", caption)
    yield scores_table(context.scores)


def _differences(context: ReportContext) -> Iterator[Part]:
    if context.comparisons:
        yield from differences_parts(context.comparisons)
        yield (
            "p: sign-flip permutation test over the tasks that both models answered. Corrected: by"
            " Holm's method, for all comparisons of a track together."
        )


def _groups(context: ReportContext) -> Iterator[Part]:
    known = [row for row in context.groups if row["metric"] in (EXEC, FAST)]
    smallest = min((row["k"] for row in known), default=None)
    by_group = grouped((row["by"], row) for row in known if row["k"] == smallest)
    if by_group:
        yield (
            "Track 'custom kernel', with 95 % intervals over the tasks of the group. Groups of"
            " fewer than 20 tasks say little. A task counts for every family that its operators"
            " belong to."
        )
    for by, rows in by_group.items():
        groups = list(dict.fromkeys(row["group"] for row in rows))
        name = "reasoning" if by == "arl_third" else by.replace("_", " ")
        columns = {name: lambda row: row["group"].replace("_", " "), **HEADLINE_COLUMNS}
        yield pivoted(columns, [row for row in rows if row["group"] in groups[:MOST_GROUPS]])
        if len(groups) > MOST_GROUPS:
            yield f"The {MOST_GROUPS} largest of {len(groups)} groups; the JSON has them all."
        if by == "arl_third" and context.arl_of:
            yield (
                f"Thirds of the tasks by the mean length of {context.arl_of}'s reasoning on them."
                f" {context.arl_of} itself is not scored by them, because a model's failures are"
                " long and would form its own long third."
            )


def _signs_and_errors(context: ReportContext) -> tuple[Part, ...]:
    return (
        fields_table(context.signs, "model", "sign", "sentence"),
        fields_table(context.errors, *("signature", "reason", "count", "tasks", "models", "names")),
    )


def _verdicts(context: ReportContext) -> Table:
    place = {status: n for n, (status, _) in enumerate(by_count(context.status_counts))}
    statuses = {reason.value: status.value for reason, status in STATUS_OF.items()}
    rows = [
        (statuses.get(reason, ""), reason, f"{count:,}", share(count, context.candidates))
        for reason, count in by_count(context.reason_counts)
    ]
    ordered = sorted(rows, key=lambda row: (place.get(row[0], len(place)), row[0]))
    return Table(("status", "reason", "candidates", "share"), ordered)


def _training(context: ReportContext) -> Iterator[Part]:
    chosen = [
        (name, f"{count:,}", share(count, context.curated))
        for name, count in context.criterion_counts.items()
    ]
    yield Bullets(context.choice)
    yield Table(("criterion that selected the sample", "samples", "share"), chosen)
    flags = [(name, *map("{:,}".format, both)) for name, both in context.trace_flags.items()]
    yield Table(("flag of a reasoning trace", "correct samples", "of these taken"), flags, 1)
    if context.losses:
        header = (
            *("base model", "optimiser steps"),
            *("mean loss, first epoch", "mean loss, last epoch"),
        )
        losses = (number(loss, ".3f") for loss in context.losses)
        yield Table(header, [(context.base_model, f"{len(context.history):,}", *losses)])
        yield Picture(
            "training_loss",
            "Training loss at each optimiser step. The axis does not start at 0.",
        )


def _lengths(context: ReportContext) -> Iterator[Part]:
    yield Bullets(context.findings)
    if context.finding_rows:
        yield findings_table(context.finding_rows)
    if context.findings_bounded_by:
        yield "Limits of the findings:"
        yield Bullets(context.findings_bounded_by)


def _limits(context: ReportContext) -> Iterator[Part]:
    if context.limits:
        yield (
            "SOL score: 0.5 is the speed of PyTorch eager, 1 the speed of light: the time that the"
            " task's bytes and operations need at least on this device (SOL-ExecBench, arXiv"
            " 2603.19173)."
        )
    yield fields_table(
        context.limits, "limit", "candidates", "speedup", "kernel_share", "sol_score"
    )


def _origin(context: ReportContext) -> Iterator[Part]:
    machine = {"language": context.language, "device": context.device, **context.hardware}
    tables: Sequence[tuple[tuple[str, str], dict[str, object]]] = (
        (("snapshot of", "fingerprint"), dict(context.fingerprints)),
        (("hardware", "value"), machine),
        (("tool", "version"), dict(context.tool_versions)),
    )
    for header, values in tables:
        yield Table(header, [(name, str(value)) for name, value in values.items() if value != ""])
    if context.config:
        yield "Configuration"
        yield Code(json.dumps(context.config, indent=2, default=str))
