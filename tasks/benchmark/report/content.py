"""What a report says, from its context: what the run found, whether it may be trusted, what comes
next, and the tables of `report.j2`.

Guarantees: every number follows from the context alone. Strings are raw, but for the headline and
the summary, which a terminal prints and which therefore hold no control characters.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from kernels_eval.grouping import grouped
from kernels_eval.records import STATUS_OF, Json, Language, Row
from tasks.benchmark.report.context import MAX_EXAMPLES, MAX_POINTS, ReportContext
from tasks.benchmark.shown import (
    FAST,
    FEW_TASKS,
    HEADLINE_METRICS,
    TRACK_NAMES,
    Caution,
    cautions_of,
    difference_points,
    label,
    pivoted,
    scored,
)
from tasks.reporting.findings import findings_table
from tasks.reporting.page import Table
from tasks.reporting.text import by_count, clean, cut, interval, p_value, plural, share
from tasks.scores import EXEC, TRACKS

TRACK = "custom_kernel"
MOST_GROUPS = 16
"""Operator families of a large suite; more than fit a screen are in the JSON."""
EXAMPLE_CHARS = 3000
SIGNIFICANT = 0.05


def content(context: ReportContext) -> Json:
    """Return what `report.j2` shows, by name."""
    head = [row for row in eager(context) if row["metric"] in HEADLINE_METRICS]
    compiled = [row for row in context.scores if row["baseline"] == "compile"]
    limited = [row for row in context.scores if row["token_limit"] is not None]
    return {
        "context": context,
        "found": found(context),
        "head_scores": pivoted(
            ("model", "tasks"),
            headline_scores(context),
            lambda row: (row["model"], str(row["tasks"])),
        ),
        "cautions": cautions(context),
        "next_steps": next_steps(context),
        "every_score": _scores("model", head),
        "rates": pivoted(
            ("model", "track", "k", "tasks"),
            [row for row in eager(context) if row["metric"].startswith("fast_")],
            lambda row: (row["model"], TRACK_NAMES[row["track"]], str(row["k"]), str(row["tasks"])),
            lambda row: row["metric"],
        ),
        "against_compile": _scores(
            "against torch.compile", [row for row in compiled if row["token_limit"] is None]
        ),
        "at_token_limits": _scores(
            "answers of at most so many tokens",
            [
                row
                for row in limited
                if row["metric"] in HEADLINE_METRICS and row["baseline"] == "eager"
            ],
        ),
        "comparisons": _comparisons(context),
        "groups": _groups(context),
        "trace_flags": Table(
            ("flag of a reasoning trace", "correct samples", "of these taken"),
            [(name, *map("{:,}".format, both)) for name, both in context.trace_flags.items()],
            1,
        ),
        "verdicts": _verdicts(context),
        "findings": findings_table(context.finding_rows),
        "config": json.dumps(context.config, indent=2, default=str),
        **{"cut": cut, "by_model": _by_model},
        **{"most_points": MAX_POINTS, "most_groups": MOST_GROUPS, "most_examples": MAX_EXAMPLES},
        "example_chars": EXAMPLE_CHARS,
    }


def eager(context: ReportContext) -> list[Row]:
    """The scores of the answers as they are, against eager PyTorch."""
    return [
        row for row in context.scores if row["baseline"] == "eager" and row["token_limit"] is None
    ]


def own_scores(context: ReportContext) -> list[Row]:
    """Those of custom kernels."""
    return [row for row in eager(context) if row["track"] == TRACK]


def headline_scores(context: ReportContext) -> list[Row]:
    """Exec and fast_1 at the smallest k, and the speedup, of custom kernels."""
    rows = [row for row in own_scores(context) if row["metric"] in HEADLINE_METRICS]
    smallest = min((row["k"] for row in rows if row["k"] is not None), default=None)
    return [row for row in rows if row["k"] in (smallest, None)]


def headline(context: ReportContext) -> str:
    """Return the run in one sentence, from its data alone."""
    parts = [
        f"Of {plural(context.candidates, 'candidate')} on {plural(context.tasks, 'task')},"
        f" {context.correct:,} proved correct",
        f"{f'{context.curated:,}' if context.curated else 'none'} became training data",
    ]
    if losses := context.losses:
        parts.append(f"training loss went from {losses[0]:.3f} to {losses[1]:.3f}")
    rows = [row for row in headline_scores(context) if row["metric"] == EXEC]
    known = [row for row in rows if row["value"] is not None]
    if known:
        rates = ", ".join(f"{row['model']} {interval(row['value'], form='.1%')}" for row in known)
        tasks = plural(max(row["tasks"] for row in known), "held-out task")
        k = known[0]["k"]
        parts.append(f"correct with a custom kernel on {tasks} (Exec@{k}): {rates}")
    return clean("; ".join(parts) + ".", one_line=True)


def found(context: ReportContext) -> list[str]:
    """What the run found beside its scores, a sentence each."""
    said = []
    smallest = min((row["k"] for row in context.comparisons), default=None)
    for row in context.comparisons:
        if row["track"] == TRACK and row["k"] == smallest:
            significant = row["p_holm"] is not None and row["p_holm"] < SIGNIFICANT
            reads = "more than chance" if significant else "not distinguishable from chance"
            said.append(
                f"{row['model']} minus {row['baseline']}, {label(row['metric'], row['k'])}:"
                f" {difference_points(row)} points, corrected p {p_value(row['p_holm'])}: {reads}."
            )
    if context.timed:
        said.append(
            f"{context.faster:,} of {plural(context.timed, 'correct, timed candidate')} of the"
            " training tasks are faster than PyTorch with 95 % confidence."
        )
    return said + list(context.findings[:2])


def next_steps(context: ReportContext) -> list[str]:
    """What to look at first: signs of a model that went wrong, the commonest failure, and whether
    more data would tell more."""
    steps = [sign.sentence for sign in context.signs]
    if context.errors:
        most = context.errors[0]
        steps.append(
            f"The commonest failure to build or run, {most.count:,} times:"
            f" {cut(most.signature or 'no message', 120)} ({most.reason})."
        )
    unsure = [row for row in context.comparisons if (row["p_holm"] or 0.0) >= SIGNIFICANT]
    if unsure:
        steps.append(
            "More held-out tasks, or more samples of each, would narrow the intervals of the"
            " differences that chance could have made."
        )
    return steps or ["No sign of a model that went wrong was found."]


def summary_table(context: ReportContext) -> list[tuple[str, str]]:
    """Return the rows (what, value) that a terminal prints when the run ends, cleaned."""
    losses, steps = context.losses, plural(len(context.history), "step")
    rows = [("tasks", f"{context.tasks:,}"), ("candidates", f"{context.candidates:,}")]
    rows += [
        (f"status {status}", f"{count:,} ({share(count, context.candidates)})")
        for status, count in by_count(context.status_counts)
    ]
    rows.append(("curated samples", f"{context.curated:,}"))
    rows += [(f"curated by {name}", f"{n:,}") for name, n in context.criterion_counts.items()]
    loss = f"{losses[0]:.3f} to {losses[1]:.3f} ({steps})" if losses else "not trained"
    rows.append(("training loss, first to last epoch", loss))
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
    return [(clean(name, one_line=True), clean(value, one_line=True)) for name, value in rows]


def cautions(context: ReportContext) -> list[Caution]:
    """What a careful reader would ask, answered from the data of the run."""
    execs = [row for row in own_scores(context) if row["metric"] == EXEC]
    tasks = sorted({row["tasks"] for row in execs})
    missing = {row["model"]: row["missing"] for row in execs if row["missing"]}
    rates = grouped((row["model"], row["value"]) for row in execs if row["value"] is not None)
    silent = [model for model, values in rates.items() if max(values) == 0.0]
    reasons = [row["why_not"] for row in eager(context) if row["k"] is not None and row["tasks"]]
    verdicts = sum(context.status_counts.values())
    recorded = any(row["model"] == "recorded" for row in execs)
    return cautions_of(
        (
            "tasks per model",
            tasks[0] if tasks and tasks[0] < FEW_TASKS else "",
            "Too few to rank models: if two intervals overlap, the difference is unknown.",
        ),
        (
            "different numbers of tasks",
            ", ".join(map(str, tasks)) if len(tasks) > 1 else "",
            "The models were scored on different numbers of tasks: compare with care.",
        ),
        (
            "tasks without a sample",
            ", ".join(f"{model} {count:,}" for model, count in missing.items()),
            "Another model answered these tasks; they are left out of this model's scores.",
        ),
        (
            "not estimated",
            "; ".join(filter(None, dict.fromkeys(reasons))),
            "Shown as n/a, never as another k.",
        ),
        (
            "not one correct kernel",
            ", ".join(silent),
            "The zero is measured, not missing; small models rarely write a kernel that compiles.",
        ),
        (
            "recorded answers",
            "yes" if recorded else "",
            "They ship with concur and were verified here. They show what the pipeline does, not"
            " how a model ranks.",
        ),
        (
            "training",
            plural(len(context.history), "step") if context.history else "",
            "A lower loss says that the adapter fits the curated samples; only held-out scores say"
            " whether kernels got better. This is one training run: no interval includes the spread"
            " between seeds.",
        ),
        (
            "'correct'",
            "always",
            "Outputs matched on all inputs that were tried, and the checks for known cheats found"
            " nothing. This is evidence, not proof.",
        ),
        (
            "speedups on a CPU",
            "" if Language(context.language).needs_gpu else "yes",
            "They compare C++ with PyTorch on the same CPU. They say nothing about a GPU.",
        ),
        (
            "counts do not add up",
            f"{context.candidates:,} candidates, {verdicts:,} verdicts"
            if verdicts != context.candidates
            else "",
            "Every candidate should have one verdict.",
        ),
        (
            "references that fail",
            context.status_counts.get("task_error"),
            "The reference program of these candidates' tasks fails. This says nothing about the"
            " generator.",
        ),
    )


def _scores(title: str, rows: Sequence[Row]) -> Table:
    """A row for each model and track, a column for each metric and k."""

    def named(row: Row) -> tuple[str, ...]:
        limit = f", {row['token_limit']:,} tokens" if row["token_limit"] else ""
        track = TRACK_NAMES[row["track"]]
        return row["model"] + limit, track, str(row["tasks"]), str(row["samples"])

    return pivoted((title, "track", "tasks", "samples"), rows, named)


def _comparisons(context: ReportContext) -> Table:
    rows = [
        (
            *(f"{row['model']} minus {row['baseline']}", TRACK_NAMES[row["track"]]),
            *(label(row["metric"], row["k"]), str(row["tasks"]), difference_points(row)),
            *(p_value(row["p"]), p_value(row["p_holm"])),
        )
        for row in context.comparisons
    ]
    named = ("difference", "track", "metric", "tasks")
    return Table((*named, "percentage points", "p", "p, corrected"), rows, len(named))


def _groups(context: ReportContext) -> list[tuple[str, Table, int]]:
    """For each way of grouping its name, the table of its first groups, and how many there are. Of
    each model Exec and fast_1 at the smallest k."""
    known = [row for row in context.groups if row["metric"] in (EXEC, FAST)]
    smallest = min((row["k"] for row in known), default=None)
    tables = []
    for by, rows in grouped((row["by"], row) for row in known if row["k"] == smallest).items():
        groups = list(dict.fromkeys(row["group"] for row in rows))
        table = pivoted(
            ("reasoning" if by == "arl_third" else by.replace("_", " "), "model", "tasks"),
            [row for row in rows if row["group"] in groups[:MOST_GROUPS]],
            lambda row: (row["group"].replace("_", " "), cut(row["model"], 40), str(row["tasks"])),
        )
        tables.append((by, table, len(groups)))
    return tables


def _verdicts(context: ReportContext) -> list[tuple[str, str, int]]:
    """Reasons by status, both in the order of their counts."""
    place = {status: n for n, (status, _) in enumerate(by_count(context.status_counts))}
    statuses = {reason.value: status.value for reason, status in STATUS_OF.items()}
    rows = [
        (statuses.get(reason, ""), reason, count)
        for reason, count in by_count(context.reason_counts)
    ]
    return sorted(rows, key=lambda row: (place.get(row[0], len(place)), row[0]))


def _by_model(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{cut(model, 40)} {count:,}" for model, count in counts.items())
