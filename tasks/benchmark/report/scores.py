"""What the benchmark found: scores, comparisons, breakdowns, other rules of counting, speedups, and
what to look at.

Guarantees: every rate has its interval beside it; what could not be estimated is "n/a". Strings are
raw: `tasks.reporting.page` escapes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from tasks.benchmark.comparing import ComparisonRow
from tasks.benchmark.diagnosis import SIGNS
from tasks.benchmark.report.records import ReportContext
from tasks.benchmark.report.summary import HEAD_METRICS, TRACK_NAMES, label, scored, smallest_k
from tasks.benchmark.scoring import GEOMETRIC_MEAN, ScoreRow
from tasks.reporting.blocks import Block, Folded, Section, Table, Text
from tasks.reporting.text import cut, interval, p_value

R = TypeVar("R", bound=ScoreRow)
MOST_GROUPS = 16  # operator families of a large suite; more than fit a screen are in the JSON
TITLE = "Scores on held-out tasks"
ABOUT_SCORES = Text(
    "Exec is the share of tasks solved, fast_p the share solved with a speedup above p, each at"
    " pass@k (unbiased estimate over a task's samples). In brackets: 95 % intervals, a bootstrap"
    " over tasks, or Wilson's where all tasks agree. Track 'custom kernel' requires that a kernel"
    " of the candidate's own did the work; 'any correct' also counts right answers without one."
    " n/a: too few samples for that k, or nothing to average."
)
ABOUT_COMPARISON = Text(
    "p: sign-flip permutation test over the tasks that both answered. Corrected: Holm's, for all"
    " comparisons of a track together."
)
ABOUT_COMPILE = Text(
    "Baseline torch.compile: the same references compiled, timed in the same window as the"
    " candidates. Tasks whose reference could not be compiled are left out here; the tables above"
    " and below are against eager PyTorch."
)
ABOUT_GROUPS = Text(
    "Track 'custom kernel', with 95 % intervals over the tasks of the group. Groups of fewer than"
    " 20 tasks say little."
)
ABOUT_RULES = Text(
    "KernelBench's rules take every sample that ran and whose outputs are within 1e-2 (v0) or 1e-4"
    " (v0.1) of the reference; what is only right by them was not timed, so their fast_1 is a lower"
    " bound, and so is their track 'custom kernel'."
)
RULE_NAMES = {
    "concur": "our gates",
    "kernelbench_v0": "KernelBench v0",
    "kernelbench_v0.1": "KernelBench v0.1",
}


def scores_section(context: ReportContext) -> Section:
    """All tables of scores; the detailed ones are folded."""
    if not context.scores:
        return Section(TITLE, (Text("No benchmark was run."),))
    head = [row for row in context.scores if row.metric in (*HEAD_METRICS, GEOMETRIC_MEAN)]
    rates = [row for row in context.scores if row.metric not in ("exec", GEOMETRIC_MEAN)]
    return Section(
        TITLE,
        (
            ABOUT_SCORES,
            _scores("model", head),
            *_against_compile(context),
            *_comparison(context.comparisons),
            Folded("Every fast_p", (_scores("model", rates),)),
            *_breakdowns(context),
            *_speedups(context),
            *_variants(context),
        ),
    )


def looking_section(context: ReportContext) -> Section:
    """Failure signatures, then the commonest errors, as the caller found them."""
    blocks: list[Block] = []
    if context.diagnosis:
        rows = tuple(
            (found.model, SIGNS.get(found.sign, found.sign), found.shown(), found.sentence)
            for found in context.diagnosis
        )
        blocks.append(Table(("model", "sign", "numbers", "what to look at"), rows))
    if context.errors:
        header = ("commonest failures to build or run", "reason", "candidates", "tasks")
        errors = tuple(
            (
                *(group.signature or "(no message)", group.reason),
                *(f"{group.count:,}", f"{group.tasks:,}"),
                ", ".join(f"{cut(model, 40)} {count:,}" for model, count in group.models.items()),
                ", ".join(group.names),
            )
            for group in context.errors
        )
        blocks.append(Table((*header, "by model", "names at …"), errors))
    return Section("What to look at", tuple(blocks))


def difference_points(row: ComparisonRow) -> str:
    """Return a difference in percentage points with its interval."""
    note = "" if row.lower is not None else " (no interval: all tasks differ alike)"
    return interval(row.difference, row.lower, row.upper, "+.1p") + note


def _comparison(comparisons: Iterable[ComparisonRow]) -> list[Block]:
    """One model against another, task by task: what overlapping intervals cannot tell."""
    rows = tuple(
        (
            f"{row.model} minus {row.baseline}",
            *(TRACK_NAMES[row.track], label(row.metric, row.k), str(row.tasks)),
            *(difference_points(row), p_value(row.p), p_value(row.p_holm)),
        )
        for row in comparisons
        if row.metric in HEAD_METRICS
    )
    header = ("difference", "track", "metric", "tasks", "percentage points", "p", "p, corrected")
    return [Table(header, rows), ABOUT_COMPARISON] if rows else []


def _against_compile(context: ReportContext) -> list[Block]:
    """fast_p and speedups once more, against the reference under torch.compile."""
    rows = context.against_compile
    return [ABOUT_COMPILE, _scores("against torch.compile", rows)] if rows else []


def _scores(title: str, rows: Sequence[ScoreRow]) -> Table:
    """A row for each model and track, a column for each metric and k."""
    # the geometric mean stands last, behind the rates at every k
    columns = sorted(_columns(rows), key=lambda column: column[0] == GEOMETRIC_MEAN)
    found = _pivot(rows, lambda row: (row.model, row.track), lambda row: (row.metric, row.k))
    cells = []
    for (model, track), own in found.items():
        first = next(iter(own.values()))
        counts = (str(first.tasks), str(first.samples))
        values = (scored(own.get(column)) for column in columns)
        cells.append((model, TRACK_NAMES[track], *counts, *values))
    header = (title, "track", "tasks", "samples", *(label(*column) for column in columns))
    return Table(header, tuple(cells))


def _breakdowns(context: ReportContext) -> list[Block]:
    """For each way of grouping a table: of each model Exec and fast_1 at the smallest k."""
    k = smallest_k(context.breakdowns)
    blocks: list[Text | Table] = []
    own = [
        row
        for row in context.breakdowns
        if (row.track, row.rule, row.k) == ("custom_kernel", "concur", k)
        and row.metric in HEAD_METRICS
    ]
    for by in dict.fromkeys(row.by for row in own):
        rows = [row for row in own if row.by == by]
        columns = list(dict.fromkeys((row.model, row.metric) for row in rows))
        found = _pivot(rows, lambda row: row.group, lambda row: (row.model, row.metric))
        cells = tuple(
            (
                group.replace("_", " "),
                str(max(row.tasks for row in values.values())),
                *(scored(values.get(column)) for column in columns),
            )
            for group, values in list(found.items())[:MOST_GROUPS]
        )
        name = "reasoning" if by == "arl_third" else by.replace("_", " ")
        heads = (f"{cut(model, 40)} {label(metric, k)}" for model, metric in columns)
        blocks.append(Table((name, "tasks", *heads), cells))
        whose = context.arl_of
        for holds, text in (
            (
                by == "operator_family",
                "A task counts for every family that its operators belong to.",
            ),
            (
                len(found) > MOST_GROUPS,
                f"The {MOST_GROUPS} largest of {len(found)} groups; the JSON has them all.",
            ),
            (
                by == "arl_third" and whose,
                f"Thirds of the tasks by the mean length of {whose}'s reasoning on them. {whose}"
                " itself is not scored by them: a model's failures are long, and would make up its"
                " own long third.",
            ),
        ):
            if holds:
                blocks.append(Text(text))
    title = "By level, operator and reasoning length"
    return [Folded(title, (ABOUT_GROUPS, *blocks))] if blocks else []


def _speedups(context: ReportContext) -> list[Block]:
    rows = [
        row
        for row in context.distributions
        if row.track == "custom_kernel" and row.value is not None
    ]
    columns = list(dict.fromkeys(row.metric for row in rows))
    found = _pivot(rows, lambda row: row.model, lambda row: row.metric)
    cells = tuple(
        (
            model,
            str(max(row.samples for row in own.values())),
            *(scored(own.get(column)) for column in columns),
        )
        for model, own in found.items()
    )
    quantiles = (100 * float(column.removeprefix("speedup_q")) for column in columns)
    heads = (f"{quantile:g} % are below" for quantile in quantiles)
    table = Table(("model", "correct, timed samples", *heads), cells)
    return [Folded("How speedups are spread", (table,))] if rows else []


def _variants(context: ReportContext) -> list[Block]:
    """The same verdicts as others would count them."""
    columns = _columns(context.variants)
    found = _pivot(
        context.variants,
        lambda row: (_counting(row), row.model, row.track),
        lambda row: (row.metric, row.k),
    )
    cells = tuple(
        (
            *(counting, model, TRACK_NAMES[track], str(next(iter(own.values())).tasks)),
            *(scored(own.get(column)) for column in columns),
        )
        for (counting, model, track), own in found.items()
    )
    header = ("counted", "model", "track", "tasks", *(label(*column) for column in columns))
    return [Folded("Counted by other rules", (ABOUT_RULES, Table(header, cells)))] if cells else []


def _counting(row: ScoreRow) -> str:
    said = RULE_NAMES[row.rule] + (", degenerate tasks kept" if row.degenerate_counted else "")
    return f"{said}, intervals over tasks and samples" if row.over == "tasks_and_samples" else said


def _columns(rows: Iterable[ScoreRow]) -> list[tuple[str, int | None]]:
    return list(dict.fromkeys((row.metric, row.k) for row in rows))


K = TypeVar("K")
C = TypeVar("C")


def _pivot(
    rows: Iterable[R], row_of: Callable[[R], K], column_of: Callable[[R], C]
) -> dict[K, dict[C, R]]:
    """Return the rows by row and column of a table, in their order."""
    found: dict[K, dict[C, R]] = {}
    for row in rows:
        found.setdefault(row_of(row), {})[column_of(row)] = row
    return found
