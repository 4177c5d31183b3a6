"""The numbers of a context in words: the headline, the summary, a rate with its interval.

Guarantees: a number that is not there is "n/a", never 0. Does not escape: strings are raw, but for
the headline and the summary, which a terminal prints and which therefore hold no control
characters.
"""

from __future__ import annotations

from kernels_eval.records import Status
from tasks.benchmark.published import PUBLISHED
from tasks.benchmark.report.records import CandidatePoint, ReportContext
from tasks.benchmark.scoring import GEOMETRIC_MEAN, TRACKS, ComparisonRow, ScoreRow, metric_name
from tasks.reporting.text import by_count, clean, plural, share

TRACK_NAMES = {"any": "any correct", "custom_kernel": "custom kernel"}


def percent(row: ScoreRow | None) -> str:
    """A rate and its interval in percent: `25.0 % (0.0 to 75.0)`; `n/a` where there is no value."""
    if row is None or row.value is None:
        return "n/a"
    value = f"{100 * row.value:.1f} %"
    return (
        value
        if row.lower is None or row.upper is None
        else f"{value} ({100 * row.lower:.1f} to {100 * row.upper:.1f})"
    )


def p_value(p: float | None) -> str:
    """A p value as people write it: `0.034`, `< 0.001`, nothing where there is none."""
    if p is None:
        return ""
    return "< 0.001" if p < 0.001 else f"{p:.3f}"


def ratio(value: float | None, lower: float | None = None, upper: float | None = None) -> str:
    """A speedup and its interval: `1.83x (1.70 to 1.95)`."""
    if value is None:
        return "n/a"
    return (
        f"{value:.2f}x"
        if lower is None or upper is None
        else f"{value:.2f}x ({lower:.2f} to {upper:.2f})"
    )


def models_of(context: ReportContext) -> list[str]:
    return list(dict.fromkeys(row.model for row in context.scores))


def find(
    context: ReportContext, model: str, track: str, metric: str, k: int | None
) -> ScoreRow | None:
    wanted = (model, track, metric, k)
    return next(
        (row for row in context.scores if (row.model, row.track, row.metric, row.k) == wanted), None
    )


def ks_of(context: ReportContext) -> list[int]:
    return sorted({row.k for row in context.scores if row.k is not None})


def metrics_of(context: ReportContext) -> list[str]:
    return list(dict.fromkeys(row.metric for row in context.scores if row.metric != GEOMETRIC_MEAN))


def headline(context: ReportContext) -> str:
    """The run in one sentence, from its data alone."""
    parts = [
        f"Of {plural(context.candidates, 'candidate')} on {plural(context.tasks, 'task')},"
        f" {context.correct:,} proved correct"
    ]
    parts.append(
        f"{context.curated:,} became training data"
        if context.curated
        else "none became training data"
    )
    if context.losses:
        parts.append(f"training loss went from {context.losses[0]:.3f} to {context.losses[1]:.3f}")
    ks = ks_of(context)
    rows = (
        [find(context, model, "custom_kernel", "exec", ks[0]) for model in models_of(context)]
        if ks
        else []
    )
    known = [row for row in rows if row is not None and row.value is not None]
    if known:
        rates = ", ".join(
            f"{row.model} {100 * row.value:.1f} %" for row in known if row.value is not None
        )
        parts.append(
            "correct with a custom kernel on"
            f" {plural(max(row.tasks for row in known), 'held-out task')} (Exec@{ks[0]}): {rates}"
        )
    return clean("; ".join(parts) + ".", one_line=True)


def summary_table(context: ReportContext) -> list[tuple[str, str]]:
    """The rows (what, value) that a terminal prints when the run ends; control characters are
    already shown, not obeyed."""
    rows = [("tasks", f"{context.tasks:,}"), ("candidates", f"{context.candidates:,}")]
    for status, count in by_count(context.status_counts):
        rows.append((f"status {status}", f"{count:,} ({share(count, context.candidates)})"))
    rows.append(("curated samples", f"{context.curated:,}"))
    rows += [
        (f"curated by {criterion}", f"{count:,}")
        for criterion, count in context.criterion_counts.items()
    ]
    losses = context.losses
    steps = plural(len(context.history), "step")
    rows.append(
        (
            "training loss, first to last epoch",
            f"{losses[0]:.3f} to {losses[1]:.3f} ({steps})" if losses else "not trained",
        )
    )
    for model in models_of(context):
        rows += [
            (f"{model}, {TRACK_NAMES[track]}", _headline_scores(context, model, track))
            for track in TRACKS
        ]
    return [(clean(name, one_line=True), clean(value, one_line=True)) for name, value in rows]


def _headline_scores(context: ReportContext, model: str, track: str) -> str:
    """Exec and fast_1 at the smallest k, which is where a model that is used once stands."""
    k = ks_of(context)[0] if ks_of(context) else None
    shown = [("Exec", "exec"), ("fast_1", metric_name(1.0))]
    return ", ".join(
        f"{label}@{k} {percent(row)}"
        for label, metric in shown
        if (row := find(context, model, track, metric, k))
    )


def difference_points(row: ComparisonRow) -> str:
    value = f"{100 * row.difference:+.1f}"
    if row.lower is None or row.upper is None:
        return f"{value} (no interval: all tasks differ alike)"
    return f"{value} ({100 * row.lower:+.1f} to {100 * row.upper:+.1f})"


def label(metric: str) -> str:
    return "Exec" if metric == "exec" else metric


def lengths_by_status(context: ReportContext) -> dict[str, list[int]]:
    """status -> sorted reasoning lengths; correct first, then by how many there are."""
    found: dict[str, list[int]] = {}
    for point in context.points:
        if point.reasoning_tokens is not None:
            found.setdefault(point.status, []).append(point.reasoning_tokens)
    order = sorted(
        found, key=lambda status: (status != Status.CORRECT, -len(found[status]), status)
    )
    return {status: sorted(found[status]) for status in order}


def timed(context: ReportContext) -> list[CandidatePoint]:
    return sorted(
        (point for point in context.points if point.speedup),
        key=lambda point: -(point.speedup or 0.0),
    )


def published_table() -> list[tuple[str, dict[str, str]]]:
    """(model, column -> percent) of PUBLISHED in its order, such as ("KernelCoder (r)", {"L1
    Exec@1": "58"})."""
    found: dict[str, dict[str, str]] = {}
    for row in PUBLISHED:
        found.setdefault(row.label, {})[f"L{row.level} {label(row.metric)}@{row.k}"] = (
            f"{100 * row.value:.0f}"
        )
    return list(found.items())
