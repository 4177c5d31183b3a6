"""What a report says, from its context: the headline, the summary, and the tables of `report.j2`.

Guarantees: every number follows from the context alone. Strings are raw, but for the headline and
the summary, which a terminal prints and which therefore hold no control characters.
"""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable, Mapping, Sequence

from kernels_eval.grouping import grouped
from kernels_eval.records import STATUS_OF, Json, Language, Status
from tasks.benchmark.report.records import (
    MAX_EXAMPLES,
    CandidatePoint,
    ReportContext,
)
from tasks.benchmark.samples import TRACKS
from tasks.benchmark.scoring import GEOMETRIC_MEAN, ScoreRow
from tasks.benchmark.tables import (
    FEW_TASKS,
    HEAD_METRICS,
    PAPER,
    TRACK_NAMES,
    Caveat,
    caveats_of,
    difference_points,
    label,
    pivoted,
    published_table,
    scored,
)
from tasks.reporting.findings import findings_table
from tasks.reporting.page import Table
from tasks.reporting.text import by_count, clean, cut, interval, p_value, plural, share, spread

TRACK = "custom_kernel"
MOST_GROUPS = 16  # operator families of a large suite; more than fit a screen are in the JSON
EXAMPLE_CHARS = 3000
MAX_POINTS = 1500  # of the reasoning figure: 90,000 candidates would make a page of 10 MB
MAX_BARS = 30  # of the speedup figure: more do not fit a screen
RULE_NAMES = {
    "concur": "our gates",
    "kernelbench_v0": "KernelBench v0",
    "kernelbench_v0.1": "KernelBench v0.1",
}


def content(context: ReportContext) -> Json:
    """Return what `report.j2` shows, by name."""
    lengths, points = lengths_by_status(context), timed(context)
    head = [row for row in context.scores if row.metric in (*HEAD_METRICS, GEOMETRIC_MEAN)]
    return {
        **{"context": context, "cut": cut},
        **{"median": statistics.median, "by_model": _by_model},
        **{"most_points": MAX_POINTS, "most_groups": MOST_GROUPS, "most_examples": MAX_EXAMPLES},
        "example_chars": EXAMPLE_CHARS,
        "summary": summary_table(context),
        "head_scores": _scores("model", head),
        "against_compile": _scores("against torch.compile", context.against_compile),
        "at_token_limits": _scores(
            "answers of at most so many tokens",
            [
                row
                for row in context.at_token_limits
                if row.metric in (*HEAD_METRICS, GEOMETRIC_MEAN)
            ],
        ),
        "rates": pivoted(
            ("model", "track", "k", "tasks"),
            [row for row in context.scores if row.metric not in ("exec", GEOMETRIC_MEAN)],
            lambda row: (*_named(row)[:2], str(row.k), str(row.tasks)),
            lambda row: row.metric,
        ),
        "comparisons": _comparisons(context),
        "trace_flags": Table(
            ("flag of a reasoning trace", "correct samples", "of these taken"),
            [(name, *map("{:,}".format, both)) for name, both in context.trace_flags.items()],
            1,
        ),
        "breakdowns": _breakdowns(context),
        "quantiles": _quantiles(context),
        "variants": pivoted(
            ("counted", "model", "track", "tasks"),
            context.variants,
            lambda row: (_counting(row), row.model, TRACK_NAMES[row.track], str(row.tasks)),
        ),
        "caveats": caveats(context),
        "verdicts": _verdicts(context),
        "findings": findings_table(context.finding_rows),
        "lengths": lengths,
        "counted": sum(map(len, lengths.values())),
        "timed": len(points),
        "faster": sum(point.lower is not None and point.lower > 1 for point in points),
        "speedups": spread(points, MAX_BARS),
        "published": {"paper": PAPER, "table": published_table()},
        "config": json.dumps(context.config, indent=2, default=str),
    }


def headline(context: ReportContext) -> str:
    """Return the run in one sentence, from its data alone."""
    losses, k = context.losses, smallest_k(context.scores)
    parts = [
        f"Of {plural(context.candidates, 'candidate')} on {plural(context.tasks, 'task')},"
        f" {context.correct:,} proved correct",
        f"{f'{context.curated:,}' if context.curated else 'none'} became training data",
    ]
    if losses:
        parts.append(f"training loss went from {losses[0]:.3f} to {losses[1]:.3f}")
    known = [
        row
        for row in context.scores
        if (row.track, row.metric, row.k) == (TRACK, "exec", k) and row.value is not None
    ]
    if known:
        rates = ", ".join(f"{row.model} {interval(row.value, form='.1%')}" for row in known)
        tasks = plural(max(row.tasks for row in known), "held-out task")
        parts.append(f"correct with a custom kernel on {tasks} (Exec@{k}): {rates}")
    return clean("; ".join(parts) + ".", one_line=True)


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
    k = smallest_k(context.scores)
    cells = grouped(
        ((row.model, row.track), f"{label(row.metric, k)} {scored(row)}")
        for row in context.scores
        if row.metric in HEAD_METRICS and row.k == k
    )
    models = dict.fromkeys(row.model for row in context.scores)
    rows += [
        (f"{model}, {TRACK_NAMES[track]}", ", ".join(cells.get((model, track), ())))
        for model in models
        for track in TRACKS
    ]
    return [(clean(name, one_line=True), clean(value, one_line=True)) for name, value in rows]


def caveats(context: ReportContext) -> list[Caveat]:
    """Return what a careful reader would ask, answered from the data of the run."""
    execs = [row for row in context.scores if row.metric == "exec"]
    rates = grouped((row.model, row.value) for row in execs if row.value is not None)
    missing = {row.model: row.missing for row in context.scores if row.missing}
    reasons = (row.why_not for row in context.scores if row.k is not None and row.tasks)
    return caveats_of(
        "caveats.toml",
        context=context,
        few=FEW_TASKS,
        tasks=sorted({row.tasks for row in execs}),
        missing=[f"{model} {count:,}" for model, count in missing.items()],
        not_estimated=filter(None, dict.fromkeys(reasons)),
        silent=[model for model, values in rates.items() if max(values) == 0.0],
        on_gpu=Language(context.language).needs_gpu,
        verdicts=sum(context.status_counts.values()),
    )


def smallest_k(rows: Iterable[ScoreRow]) -> int | None:
    """Return the smallest k: where a model that is used once stands."""
    return min((row.k for row in rows if row.k is not None), default=None)


def lengths_by_status(context: ReportContext) -> dict[str, list[int]]:
    """Return status -> sorted reasoning lengths; correct first, then by how many there are."""
    found = grouped(
        (point.status, point.reasoning_tokens)
        for point in context.points
        if point.reasoning_tokens is not None
    )
    order = sorted(
        found, key=lambda status: (status != Status.CORRECT, -len(found[status]), status)
    )
    return {status: sorted(found[status]) for status in order}


def timed(context: ReportContext) -> list[CandidatePoint]:
    """Return the points with a speedup, fastest first."""
    points = [point for point in context.points if point.speedup]
    return sorted(points, key=lambda point: -(point.speedup or 0.0))


def _scores(title: str, rows: Sequence[ScoreRow]) -> Table:
    """A row for each model and track, a column for each metric and k."""
    return pivoted((title, "track", "tasks", "samples"), rows, _named)


def _named(row: ScoreRow) -> tuple[str, ...]:
    """Model, track, tasks and samples."""
    model = row.model + (f", {row.token_limit:,} tokens" if row.token_limit else "")
    return model, TRACK_NAMES[row.track], str(row.tasks), str(row.samples)


def _comparisons(context: ReportContext) -> Table:
    rows = [
        (
            *(f"{row.model} minus {row.baseline}", TRACK_NAMES[row.track]),
            *(label(row.metric, row.k), str(row.tasks), difference_points(row)),
            *(p_value(row.p), p_value(row.p_holm)),
        )
        for row in context.comparisons
        if row.metric in HEAD_METRICS
    ]
    named = ("difference", "track", "metric", "tasks")
    return Table((*named, "percentage points", "p", "p, corrected"), rows, len(named))


def _quantiles(context: ReportContext) -> Table:
    return pivoted(
        ("model", "correct, timed samples"),
        [row for row in context.distributions if row.track == TRACK and row.value is not None],
        lambda row: (row.model, str(row.samples)),
        lambda row: f"{100 * float(row.metric.removeprefix('speedup_q')):g} % are below",
    )


def _breakdowns(context: ReportContext) -> list[tuple[str, Table, int]]:
    """For each way of grouping its name, the table of its largest groups, and how many there are.

    Of each model Exec and fast_1 at the smallest k.
    """
    k = smallest_k(context.breakdowns)
    found: list[tuple[str, Table, int]] = []
    for by in dict.fromkeys(row.by for row in context.breakdowns):
        rows = [
            row
            for row in context.breakdowns
            if (row.by, row.track, row.rule, row.k) == (by, TRACK, "concur", k)
            and row.metric in HEAD_METRICS
        ]
        groups = list(dict.fromkeys(row.group for row in rows))
        table = pivoted(
            ("reasoning" if by == "arl_third" else by.replace("_", " "), "model", "tasks"),
            [row for row in rows if row.group in groups[:MOST_GROUPS]],
            lambda row: (row.group.replace("_", " "), cut(row.model, 40), str(row.tasks)),
        )
        found.append((by, table, len(groups)))
    return found


def _counting(row: ScoreRow) -> str:
    said = RULE_NAMES[row.rule] + (", degenerate tasks kept" if row.degenerate_counted else "")
    return f"{said}, intervals over tasks and samples" if row.over == "tasks_and_samples" else said


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
