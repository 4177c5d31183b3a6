"""What the benchmark says: scores, comparisons, breakdowns, other rules of counting, speedups, and
what to look at.

Guarantees: every rate has its interval beside it; what could not be estimated is "n/a". Strings are
raw: escaping happens in the renderers.
"""

from __future__ import annotations

from collections.abc import Sequence

from tasks.benchmark.breakdown import GroupRow
from tasks.benchmark.report.records import ReportContext
from tasks.benchmark.report.summary import (
    TRACK_NAMES,
    difference_points,
    find,
    ks_of,
    label,
    metrics_of,
    models_of,
    p_value,
    percent,
    ratio,
)
from tasks.benchmark.scoring import GEOMETRIC_MEAN, TRACKS, ScoreRow, metric_name
from tasks.reporting.blocks import Block, Bullets, Folded, Section, Table, Text
from tasks.reporting.text import cut

MOST_GROUPS = 16  # operator families of a large suite; more than fit a screen are in the JSON


def scores_section(context: ReportContext) -> Section:
    if not context.scores:
        return Section("Scores on held-out tasks", (Text("No benchmark was run."),))
    ks = ks_of(context)
    shown = [metric for metric in ("exec", metric_name(1.0)) if metric in metrics_of(context)]
    intro = (
        "Exec is the share of tasks solved, fast_p the share solved with a speedup above p, each at"
        " pass@k (unbiased estimate over a task's samples). In brackets: 95 % intervals, a"
        " bootstrap over tasks, or Wilson's where all tasks agree. Track 'custom kernel' asks that"
        " a kernel of the candidate's own did the work; 'any correct' also counts right answers"
        " without one. n/a: too few samples for that k, or nothing to average."
    )
    every = _score_table(
        context,
        [metric for metric in metrics_of(context) if metric != "exec"],
        ks,
        with_speedup=False,
    )
    blocks = [
        Text(intro),
        _score_table(context, shown, ks, with_speedup=True),
        *_against_compile(context),
        *_comparison(context),
    ]
    blocks += [Folded("Every fast_p", (every,))]
    return Section(
        "Scores on held-out tasks",
        (*blocks, *_breakdowns(context), *_speedups(context), *_variants(context)),
    )


def looking_section(context: ReportContext) -> Section:
    """Signatures in words, then the commonest errors. Both are what the caller found; no sentence
    is made here."""
    blocks: list[Block] = (
        [Bullets(tuple(finding.sentence for finding in context.diagnosis))]
        if context.diagnosis
        else []
    )
    if context.errors:
        header = (
            "commonest failures to build or run",
            "reason",
            "candidates",
            "tasks",
            "by model",
            "names at …",
        )
        rows = tuple(
            (
                group.signature or "(nothing was said)",
                group.reason,
                f"{group.count:,}",
                f"{group.tasks:,}",
                ", ".join(f"{cut(model, 40)} {count:,}" for model, count in group.models.items()),
                ", ".join(group.names),
            )
            for group in context.errors
        )
        blocks.append(Table(header, rows))
    return Section("What to look at", tuple(blocks))


def _comparison(context: ReportContext) -> list[Block]:
    """One model against another, task by task: what overlapping intervals cannot tell."""
    wanted = ("exec", metric_name(1.0))
    rows = [row for row in context.comparisons if row.metric in wanted]
    if not rows:
        return []
    header = ("difference", "track", "metric", "tasks", "percentage points", "p", "p, corrected")
    cells = tuple(
        (
            f"{row.model} minus {row.baseline}",
            TRACK_NAMES[row.track],
            f"{label(row.metric)}@{row.k}",
            str(row.tasks),
            difference_points(row),
            p_value(row.p),
            p_value(row.p_holm),
        )
        for row in rows
    )
    note = (
        "p: sign-flip permutation test over the tasks that both answered. Corrected: Holm's, for"
        " all comparisons of a track together."
    )
    return [Table(header, cells), Text(note)]


def _against_compile(context: ReportContext) -> list[Block]:
    """fast_p and speedups once more, against the reference under torch.compile."""
    columns = list(dict.fromkeys((row.metric, row.k) for row in context.against_compile))
    if not columns:
        return []
    found: dict[tuple[str, str], dict[tuple[str, int | None], ScoreRow]] = {}
    for row in context.against_compile:
        found.setdefault((row.model, row.track), {})[row.metric, row.k] = row
    rows = []
    for (model, track), cells in found.items():
        first = next(iter(cells.values()))
        shown = (
            _quantile(cells[key]) if key[0] == GEOMETRIC_MEAN else percent(cells[key])
            for key in columns
        )
        rows.append((model, TRACK_NAMES[track], str(first.tasks), str(first.samples), *shown))
    names = ("speedup of correct" if k is None else f"{label(metric)}@{k}" for metric, k in columns)
    note = (
        "Baseline torch.compile: the same references compiled, timed in the same window as the"
        " candidates. Tasks whose reference could not be compiled are left out here; the tables"
        " above and below are against eager PyTorch."
    )
    return [
        Text(note),
        Table(("against torch.compile", "track", "tasks", "samples", *names), tuple(rows)),
    ]


def _breakdowns(context: ReportContext) -> list[Block]:
    """For each way of grouping a table: a row a group, and of each model Exec and fast_1 at the
    smallest k, with a custom kernel."""
    k = min((row.k for row in context.breakdowns if row.k is not None), default=None)
    own = [
        row
        for row in context.breakdowns
        if row.track == "custom_kernel" and row.rule == "concur" and row.k == k
    ]
    blocks: list[Text | Table] = []
    for by in dict.fromkeys(row.by for row in own):
        blocks += _breakdown([row for row in own if row.by == by], by, k)
        if by == "arl_third" and context.arl_of:
            whose = context.arl_of
            said = (
                f"Thirds of the tasks by the mean length of {whose}'s reasoning on them, by which"
                f" {whose} itself is not scored: "
            )
            blocks.append(
                Text(f"{said}a model's failures are long, and would make its own long third.")
            )
    if not blocks:
        return []
    note = Text(
        "Track 'custom kernel', with 95 % intervals over the tasks of the group. Groups of fewer"
        " than 20 tasks say little."
    )
    return [Folded("By level, operator and reasoning length", (note, *blocks))]


def _breakdown(rows: Sequence[GroupRow], by: str, k: int | None) -> list[Text | Table]:
    models = list(dict.fromkeys(row.model for row in rows))
    metrics = [
        metric for metric in ("exec", metric_name(1.0)) if any(row.metric == metric for row in rows)
    ]
    found = {(row.group, row.model, row.metric): row for row in rows}
    groups = list(dict.fromkeys(row.group for row in rows))
    cells = tuple(
        (
            group.replace("_", " "),
            str(max(row.tasks for row in rows if row.group == group)),
            *(percent(found.get((group, model, metric))) for model in models for metric in metrics),
        )
        for group in groups[:MOST_GROUPS]
    )
    header = (
        "reasoning" if by == "arl_third" else by.replace("_", " "),
        "tasks",
        *(f"{cut(model, 40)} {label(metric)}@{k}" for model in models for metric in metrics),
    )
    blocks: list[Text | Table] = [Table(header, cells)]
    if by == "operator_family":
        blocks.append(Text("A task counts for every family that its operators belong to."))
    if len(groups) > MOST_GROUPS:
        blocks.append(
            Text(f"The {MOST_GROUPS} largest of {len(groups)} groups; the JSON has them all.")
        )
    return blocks


def _speedups(context: ReportContext) -> list[Block]:
    rows = [
        row
        for row in context.distributions
        if row.track == "custom_kernel" and row.value is not None
    ]
    if not rows:
        return []
    quantiles = list(dict.fromkeys(row.metric for row in rows))
    found: dict[str, dict[str, ScoreRow]] = {}
    for row in rows:
        found.setdefault(row.model, {})[row.metric] = row
    cells = tuple(
        (
            model,
            str(max(row.samples for row in own.values())),
            *(_quantile(own.get(q)) for q in quantiles),
        )
        for model, own in found.items()
    )
    header = (
        "model",
        "correct, timed samples",
        *(f"{100 * float(q.removeprefix('speedup_q')):g} % are below" for q in quantiles),
    )
    return [Folded("How speedups are spread", (Table(header, cells),))]


def _quantile(row: ScoreRow | None) -> str:
    return ratio(row.value, row.lower, row.upper) if row else "n/a"


def _variants(context: ReportContext) -> list[Block]:
    """The same verdicts as others would count them."""
    if not context.variants:
        return []
    found: dict[tuple[str, str, str], list[ScoreRow]] = {}
    for row in context.variants:
        found.setdefault((_counting(row), row.model, row.track), []).append(row)
    columns = list(dict.fromkeys((row.metric, row.k) for row in context.variants))
    rows = []
    for (counting, model, track), own in found.items():
        cells = {(row.metric, row.k): row for row in own}
        rows.append(
            (
                counting,
                model,
                TRACK_NAMES[track],
                str(own[0].tasks),
                *(percent(cells.get(column)) for column in columns),
            )
        )
    header = (
        "counted",
        "model",
        "track",
        "tasks",
        *(f"{label(metric)}@{k}" for metric, k in columns),
    )
    note = (
        "KernelBench's rules take every sample that ran and whose outputs are within 1e-2 (v0) or"
        " 1e-4 (v0.1) of the reference; what is only right by them was not timed, so their fast_1"
        " is a lower bound, and so is their track 'custom kernel'."
    )
    return [Folded("Counted by other rules", (Text(note), Table(header, tuple(rows))))]


def _counting(row: ScoreRow) -> str:
    said = {
        "concur": "our gates",
        "kernelbench_v0": "KernelBench v0",
        "kernelbench_v0.1": "KernelBench v0.1",
    }[row.rule]
    said += ", degenerate tasks kept" if row.degenerate_counted else ""
    return f"{said}, intervals over tasks and samples" if row.over == "tasks_and_samples" else said


def _score_table(
    context: ReportContext, metrics: Sequence[str], ks: Sequence[int], *, with_speedup: bool
) -> Table:
    columns = [(metric, k) for metric in metrics for k in ks]
    header = [
        "model",
        "track",
        "tasks",
        "samples",
        *(f"{label(metric)}@{k}" for metric, k in columns),
    ]
    rows = []
    for model in models_of(context):
        for track in TRACKS:
            found = [find(context, model, track, metric, k) for metric, k in columns]
            counted = next((row for row in found if row), None)
            row = [
                model,
                TRACK_NAMES[track],
                str(counted.tasks if counted else 0),
                str(counted.samples if counted else 0),
            ]
            rows.append(
                (
                    *row,
                    *map(percent, found),
                    *([_speedup_cell(context, model, track)] if with_speedup else []),
                )
            )
    return Table((*header, *(["speedup of correct"] if with_speedup else [])), tuple(rows))


def _speedup_cell(context: ReportContext, model: str, track: str) -> str:
    row = find(context, model, track, GEOMETRIC_MEAN, None)
    return ratio(row.value, row.lower, row.upper) if row else "n/a"
