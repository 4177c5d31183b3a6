"""What a comparison shows, once, for HTML and markdown.

Guarantees: reading order; a section without data is left out; a rate has its interval beside it.
Strings are raw: escaping happens in the renderers.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence

from tasks.benchmark.comparing import ComparisonRow
from tasks.benchmark.comparison.findings import READS, judged, trust
from tasks.benchmark.comparison.numbers import EXEC, FAST, Arm, Compared
from tasks.benchmark.comparison.records import Branch
from tasks.benchmark.report.sections import published_section
from tasks.benchmark.report.summary import difference_points, label, p_value, percent, ratio
from tasks.benchmark.scoring import GEOMETRIC_MEAN
from tasks.reporting.blocks import (
    Block,
    Bullets,
    Cell,
    Folded,
    Link,
    Links,
    Picture,
    Section,
    Table,
    Text,
)
from tasks.reporting.text import cut

SCORES, SIZES = "scores", "sizes"
UI = ("MLflow", "Prefect")
ERROR_CHARS = 600
SAME = "Counting any correct answer, with or without a kernel of its own, gives the same numbers."


def sections(found: Compared, drawn: Sequence[str]) -> list[Section]:
    """The content in reading order; `drawn` names the figures that there are."""
    every = [
        _first(found, drawn),
        _strategies(found),
        _differences(found),
        _sizes(found, drawn),
        Section("What to trust, and what not", (Bullets(tuple(trust(found))),)),
        _branches(found),
        published_section(),
        _provenance(found),
    ]
    return [section for section in every if section.blocks and section.blocks != (Bullets(()),)]


def _first(found: Compared, drawn: Sequence[str]) -> Section:
    blocks: list[Block] = []
    if links := _links(found.ablation.mlflow_url, found.ablation.prefect_url):
        blocks.append(Links(links))
    if SCORES in drawn:
        caption = (
            "Exec@1 and fast_1@1 on the track 'custom kernel'. A filled point with its line is a"
            " strategy, all its seeds pooled, with the 95 % interval over tasks; hollow points are"
            " single seeds; the dashed line is the baseline."
        )
        blocks.append(Picture(SCORES, caption))
    return Section("Scores by strategy", tuple(blocks))


def _strategies(found: Compared) -> Section:
    if not found.arms:
        return Section("Strategies", ())
    header = (
        "strategy",
        "Exec@1",
        "fast_1@1",
        "speedup of correct",
        "Exec@1 by seed",
        "seeds",
        "rows",
        "loss",
        "held-out loss",
        "GPU-hours",
    )
    rows = [_strategy_row(found, arm) for arm in found.arms]
    rows += [
        (f"{name} (not trained here)", *_cells(found, name), *[""] * 6) for name in found.references
    ]
    note = (
        "Exec@1 is the share of tasks solved with one answer, fast_1@1 the share solved with a"
        " kernel faster than PyTorch, both where a kernel of the candidate's own did the work. In"
        " brackets: 95 % intervals over tasks. The speedup is the geometric mean over correct,"
        " timed kernels alone. Losses are the last of training, means over seeds."
    )
    models = (*(arm.name for arm in found.arms), *found.references)
    other = tuple((model, *_cells(found, model, "any")) for model in models)
    same = other == tuple((model, *_cells(found, model)) for model in models)
    any_track: Block = Folded(
        "The same counting any correct answer", (Table(("strategy", *header[1:4]), other),)
    )
    return Section(
        "Strategies", (Table(header, tuple(rows)), Text(note), Text(SAME) if same else any_track)
    )


def _strategy_row(found: Compared, arm: Arm) -> tuple[Cell, ...]:
    name = f"{arm.name} (baseline)" if arm.strategy == _baseline_strategy(found) else arm.name
    seeds = ", ".join(f"{100 * value:.1f}" for value in found.by_seed(arm.name, EXEC))
    losses = [
        f"{statistics.fmean(values):.3f}" if (values := arm.loss(of)) else "n/a"
        for of in ("loss_last", "held_out_loss_last")
    ]
    rows, hours = (f"{arm.rows:,.0f}" if arm.rows is not None else "n/a"), _hours(arm.gpu_hours)
    return (name, *_cells(found, arm.name), seeds, str(len(arm.branches)), rows, *losses, hours)


def _hours(hours: float | None) -> str:
    """Two digits of what is small: a branch on a small model costs seconds."""
    if hours is None:
        return "n/a"
    return f"{hours:,.2f}" if hours >= 0.1 or not hours else f"{hours:.2g}"


def _cells(found: Compared, model: str, track: str = "custom_kernel") -> tuple[str, str, str]:
    speed = found.score(model, GEOMETRIC_MEAN, track)
    return (
        percent(found.score(model, EXEC, track)),
        percent(found.score(model, FAST, track)),
        ratio(speed.value, speed.lower, speed.upper) if speed else "n/a",
    )


def _differences(found: Compared) -> Section:
    title = (
        f"Against {_baseline_strategy(found)}, task by task"
        if found.differences
        else "Against the untuned model, task by task"
    )
    blocks: list[Block] = []
    if found.differences:
        blocks += _difference_table(found, found.differences)
    if found.against_base:
        if found.differences:
            blocks.append(
                Text(
                    f"Did training help? Against {found.base}, the untuned model, corrected by"
                    " themselves:"
                )
            )
        blocks += _difference_table(found, found.against_base)
    if blocks:
        blocks.append(
            Text(
                "Percentage points over the tasks that both answered, with 95 % intervals over task"
                " pairs. p: sign-flip permutation test over tasks, corrected by Holm's method for"
                " all rows of a track of this question. p of seeds: t test of the difference"
                " against the spread between seeds, which all strategies share, corrected for all"
                " strategies. Both have to be below 0.05."
            )
        )
    return Section(title, tuple(blocks))


def _difference_table(found: Compared, rows: Sequence[ComparisonRow]) -> list[Block]:
    # what it comes to stands before what it rests on: a narrow page, such as MLflow's preview,
    # shows the first columns
    header = (
        "difference",
        "metric",
        "percentage points",
        "reads as",
        "p",
        "p, corrected",
        "p of seeds",
        "tasks",
    )

    def table(track: str) -> Table:
        cells = tuple(
            (
                f"{row.model} minus {row.baseline}",
                f"{label(row.metric)}@{row.k}",
                difference_points(row),
                READS[judged(found, row)],
                p_value(row.p),
                p_value(row.p_holm),
                (p_value(test.p_holm) if (test := found.seed_test(row)) else "") or "n/a",
                str(row.tasks),
            )
            for row in rows
            if row.track == track
        )
        return Table(header, cells)

    own, other = table("custom_kernel"), table("any")
    return (
        [own] if own == other else [own, Folded("The same counting any correct answer", (other,))]
    )


def _sizes(found: Compared, drawn: Sequence[str]) -> Section:
    if SIZES not in drawn:
        return Section("Over size", ())
    caption = (
        "Exec@1 over the rows trained on, a line for each strategy with several sizes, with 95 %"
        " intervals over tasks; hollow points are single seeds."
    )
    return Section("Over size", (Picture(SIZES, caption),))


def _branches(found: Compared) -> Section:
    done = [branch for arm in found.arms for branch in arm.branches]
    lost = [branch for branch in found.ablation.branches if branch.state != "done"]
    blocks: list[Block] = []
    if lost:
        rows = tuple(
            (
                branch.name,
                branch.state.replace("_", " "),
                cut(branch.error or "", ERROR_CHARS),
                *_ui_cells(branch),
            )
            for branch in lost
        )
        blocks.append(_linked(("not finished", "state", "why"), rows))
    if done:
        header = ("branch", "seed", "rows", "loss", "Exec@1", "fast_1@1", "minutes", "GPU-hours")
        blocks.append(
            Folded(
                f"The {len(done)} that finished",
                (_linked(header, tuple(_branch_row(found, branch) for branch in done)),),
            )
        )
    return Section("Branches", tuple(blocks))


def _linked(header: tuple[str, ...], rows: tuple[tuple[Cell, ...], ...]) -> Table:
    """A table whose rows end with the links of `_ui_cells`. A page that no row has a link to gets
    no column."""
    places = range(len(header) + len(UI))
    kept = [place for place in places if place < len(header) or any(row[place] for row in rows)]
    names = (*header, *UI)
    return Table(
        tuple(names[place] for place in kept),
        tuple(tuple(row[place] for place in kept) for row in rows),
    )


def _branch_row(found: Compared, branch: Branch) -> tuple[Cell, ...]:
    scores = {
        row.metric: row.value
        for row in found.seeds
        if (row.branch, row.track) == (branch.name, "custom_kernel")
    }
    rates = (
        f"{100 * scores[metric]:.1f} %" if metric in scores else "n/a" for metric in (EXEC, FAST)
    )
    return (
        branch.name,
        str(branch.seed),
        "n/a" if branch.rows is None else f"{branch.rows:,}",
        "n/a" if branch.loss_last is None else f"{branch.loss_last:.3f}",
        *rates,
        "n/a" if branch.seconds is None else f"{branch.seconds / 60:.1f}",
        _hours(branch.gpu_hours),
        *_ui_cells(branch),
    )


def _ui_cells(branch: Branch) -> tuple[Cell, Cell]:
    return (
        Link("run", branch.mlflow_url) if branch.mlflow_url else "",
        Link("run", branch.prefect_url) if branch.prefect_url else "",
    )


def _links(mlflow: str | None, prefect: str | None) -> tuple[Link, ...]:
    named = (("The ablation in MLflow", mlflow), ("its run in Prefect", prefect))
    return tuple(Link(text, url) for text, url in named if url)


def _provenance(found: Compared) -> Section:
    rows: list[tuple[Cell, ...]] = [("ablation", found.ablation.fingerprint, "", "")]
    rows += [
        (b.name, b.curated or "", b.trained or "", b.scores or "")
        for b in found.ablation.branches
        if b.curated or b.trained or b.scores
    ]
    return Section(
        "Where it came from",
        (
            Folded(
                "Fingerprints", (Table(("of", "curated set", "training", "scores"), tuple(rows)),)
            ),
        ),
    )


def _baseline_strategy(found: Compared) -> str | None:
    return found.arm(found.baseline).strategy if found.baseline else None
