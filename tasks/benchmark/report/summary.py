"""The numbers of a context in words: the headline, the summary, a rate with its interval.

Guarantees: a number that is not there is "n/a", never 0. Does not escape: strings are raw, but for
the headline and the summary, which a terminal prints and which therefore hold no control
characters.
"""

from __future__ import annotations

from collections.abc import Iterable

from kernels_eval.records import Status
from tasks.benchmark.published import PUBLISHED
from tasks.benchmark.report.records import CandidatePoint, ReportContext
from tasks.benchmark.scoring import GEOMETRIC_MEAN, TRACKS, ScoreRow, metric_name
from tasks.reporting.text import by_count, clean, interval, plural, share

TRACK_NAMES = {"any": "any correct", "custom_kernel": "custom kernel"}
HEAD_METRICS = ("exec", metric_name(1.0))


def scored(row: ScoreRow | None) -> str:
    """Return a score with its interval: a ratio for speedups, else percent; `n/a` without one."""
    if row is None:
        return "n/a"
    form = ".2x" if row.metric.startswith((GEOMETRIC_MEAN, "speedup_q")) else ".1%"
    return interval(row.value, row.lower, row.upper, form)


def label(metric: str, k: int | None = None) -> str:
    """Return a metric's name: `Exec@1`, `fast_1@5`, `speedup of correct`."""
    names = {"exec": "Exec", GEOMETRIC_MEAN: "speedup of correct"}
    return names.get(metric, metric) + (f"@{k}" if k is not None else "")


def models_of(context: ReportContext) -> list[str]:
    return list(dict.fromkeys(row.model for row in context.scores))


def find(
    rows: Iterable[ScoreRow], model: str, track: str, metric: str, k: int | None
) -> ScoreRow | None:
    """Return the score of one model on one track, or None."""
    wanted = (model, track, metric, k)
    return next((row for row in rows if (row.model, row.track, row.metric, row.k) == wanted), None)


def smallest_k(rows: Iterable[ScoreRow]) -> int | None:
    """Return the smallest k: where a model that is used once stands."""
    return min((row.k for row in rows if row.k is not None), default=None)


def headline(context: ReportContext) -> str:
    """Return the run in one sentence, from its data alone."""
    losses, k = context.losses, smallest_k(context.scores)
    parts = [
        f"Of {plural(context.candidates, 'candidate')} on {plural(context.tasks, 'task')},"
        f" {context.correct:,} proved correct",
        f"{context.curated:,} became training data"
        if context.curated
        else "none became training data",
    ]
    if losses:
        parts.append(f"training loss went from {losses[0]:.3f} to {losses[1]:.3f}")
    rows = [find(context.scores, model, "custom_kernel", "exec", k) for model in models_of(context)]
    known = [row for row in rows if k is not None and row is not None and row.value is not None]
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
    for model in models_of(context):
        for track in TRACKS:
            found = [(m, find(context.scores, model, track, m, k)) for m in HEAD_METRICS]
            cells = ", ".join(f"{label(metric, k)} {scored(row)}" for metric, row in found if row)
            rows.append((f"{model}, {TRACK_NAMES[track]}", cells))
    return [(clean(name, one_line=True), clean(value, one_line=True)) for name, value in rows]


def lengths_by_status(context: ReportContext) -> dict[str, list[int]]:
    """Return status -> sorted reasoning lengths; correct first, then by how many there are."""
    found: dict[str, list[int]] = {}
    for point in context.points:
        if point.reasoning_tokens is not None:
            found.setdefault(point.status, []).append(point.reasoning_tokens)
    order = sorted(
        found, key=lambda status: (status != Status.CORRECT, -len(found[status]), status)
    )
    return {status: sorted(found[status]) for status in order}


def timed(context: ReportContext) -> list[CandidatePoint]:
    """Return the points with a speedup, fastest first."""
    points = [point for point in context.points if point.speedup]
    return sorted(points, key=lambda point: -(point.speedup or 0.0))


def published_table() -> list[tuple[str, dict[str, str]]]:
    """Return (model, column -> percent) of PUBLISHED, such as ("KernelCoder (r)", {"L1 Exec@1":
    "58"})."""
    found: dict[str, dict[str, str]] = {}
    for row in PUBLISHED:
        column = f"L{row.level} {label(row.metric, row.k)}"
        found.setdefault(row.label, {})[column] = f"{100 * row.value:.0f}"
    return list(found.items())
