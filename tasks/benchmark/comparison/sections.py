"""What a comparison shows, once, for HTML and Markdown.

Guarantees: reading order; a section without data is left out; a rate has its interval beside it.
Strings are raw: `tasks.reporting.page` escapes them.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence

from tasks.benchmark.comparing import ComparisonRow
from tasks.benchmark.comparison.findings import READS, judged, trust
from tasks.benchmark.comparison.numbers import EXEC, FAST, TRACK, Arm, Compared
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.benchmark.report.scores import difference_points
from tasks.benchmark.report.sections import published_section
from tasks.benchmark.report.summary import label, scored
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
from tasks.reporting.text import cut, p_value

SCORES, SIZES = "scores", "sizes"
ERROR_CHARS = 600
UNKNOWN = "n/a"
SAME = Text(
    "Counting any correct answer, with or without a kernel of its own, gives the same numbers."
)
ABOUT_FIGURE = (
    "Exec@1 and fast_1@1 on the track 'custom kernel'. A filled point with its line is a strategy,"
    " all its seeds pooled, with the 95 % interval over tasks; hollow points are single seeds; the"
    " dashed line is the baseline."
)
ABOUT_SIZES = (
    "Exec@1 over the rows trained on, a line for each strategy with several sizes, with 95 %"
    " intervals over tasks; hollow points are single seeds."
)
ABOUT_STRATEGIES = Text(
    "Exec@1 is the share of tasks solved with one answer, fast_1@1 the share solved with a kernel"
    " faster than PyTorch, both where a kernel of the candidate's own did the work. In brackets:"
    " 95 % intervals over tasks. The speedup is the geometric mean over correct, timed kernels"
    " alone. Losses are the last of training, means over seeds."
)
ABOUT_DIFFERENCES = Text(
    "Percentage points over the tasks that both answered, with 95 % intervals over task pairs. p:"
    " sign-flip permutation test over tasks, corrected by Holm's method for all rows of a track of"
    " this question. p of seeds: t test of the difference against the spread between seeds, which"
    " all strategies share, corrected for all strategies. Both have to be below 0.05."
)


def sections(found: Compared, drawn: Sequence[str]) -> list[Section]:
    """Return the content in reading order; `drawn` names the figures that there are."""
    baseline = _baseline(found) if found.differences else "the untuned model"
    content = (
        ("Scores by strategy", _first(found, drawn)),
        ("Strategies", _strategies(found)),
        (f"Against {baseline}, task by task", _differences(found)),
        ("Over size", [Picture(SIZES, ABOUT_SIZES)] if SIZES in drawn else []),
        (
            "What to trust, and what not",
            [Bullets(cautions)] if (cautions := tuple(trust(found))) else [],
        ),
        ("Branches", _branches(found)),
    )
    pages = [Section(title, tuple(blocks)) for title, blocks in content]
    return [page for page in (*pages, published_section(), _provenance(found)) if page.blocks]


def _first(found: Compared, drawn: Sequence[str]) -> Iterator[Block]:
    links = _links(found.ablation, "The ablation in MLflow", "its run in Prefect")
    if any(links):
        yield Links(tuple(link for link in links if link))
    if SCORES in drawn:
        yield Picture(SCORES, ABOUT_FIGURE)


def _links(of: Ablation | Branch, *names: str) -> list[Link | None]:
    """A link to the run in MLflow and one in Prefect, where it has a page there."""
    urls = (of.mlflow_url, of.prefect_url)
    return [Link(name, url) if url else None for name, url in zip(names, urls, strict=True)]


def _strategies(found: Compared) -> Iterator[Block]:
    if not found.arms:
        return
    scores = ("Exec@1", "fast_1@1", "speedup of correct")
    more = ("Exec@1 by seed", "seeds", "rows", "loss", "held-out loss", "GPU-hours")
    rows = [_strategy(found, arm) for arm in found.arms]
    for name in found.references:
        rows.append((f"{name} (not trained here)", *_cells(found, name), *[""] * len(more)))
    yield Table(("strategy", *scores, *more), tuple(rows))
    yield ABOUT_STRATEGIES
    models = (*(arm.name for arm in found.arms), *found.references)
    own, other = (
        tuple((model, *_cells(found, model, track)) for model in models) for track in (TRACK, "any")
    )
    table = Table(("strategy", *scores), other)
    yield SAME if own == other else Folded("The same counting any correct answer", (table,))


def _strategy(found: Compared, arm: Arm) -> tuple[Cell, ...]:
    name = f"{arm.name} (baseline)" if arm.strategy == _baseline(found) else arm.name
    seeds = ", ".join(f"{100 * value:.1f}" for value in found.by_seed(arm.name, EXEC))
    losses = (arm.loss(name) for name in ("loss_last", "held_out_loss_last"))
    means = [_number(statistics.fmean(values) if values else None, ".3f") for values in losses]
    counts = (str(len(arm.branches)), _number(arm.rows, ",.0f"))
    return (name, *_cells(found, arm.name), seeds, *counts, *means, _hours(arm.gpu_hours))


def _number(value: float | None, form: str) -> str:
    return UNKNOWN if value is None else f"{value:{form}}"


def _hours(hours: float | None) -> str:
    """Two digits of what is small: a branch on a small model costs seconds."""
    return _number(hours, ".2g" if hours and hours < 0.1 else ",.2f")


def _cells(found: Compared, model: str, track: str = TRACK) -> list[str]:
    return [scored(found.score(model, metric, track)) for metric in (EXEC, FAST, GEOMETRIC_MEAN)]


def _differences(found: Compared) -> Iterator[Block]:
    if found.differences:
        yield from _difference_tables(found, found.differences)
    if found.against_base:
        if found.differences:
            yield Text(
                f"Did training help? Against {found.base}, the untuned model, corrected separately:"
            )
        yield from _difference_tables(found, found.against_base)
    if found.differences or found.against_base:
        yield ABOUT_DIFFERENCES


def _difference_tables(found: Compared, rows: Sequence[ComparisonRow]) -> Iterator[Block]:
    # the conclusion stands before what it rests on: a narrow page, such as MLflow's preview, shows
    # the first columns
    header = ("difference", "metric", "percentage points", "reads as", "p", "p, corrected")
    own, other = (
        Table(
            (*header, "p of seeds", "tasks"),
            tuple(_difference(found, row) for row in rows if row.track == track),
        )
        for track in (TRACK, "any")
    )
    yield own
    if own != other:
        yield Folded("The same counting any correct answer", (other,))


def _difference(found: Compared, row: ComparisonRow) -> tuple[Cell, ...]:
    test = found.seed_test(row)
    return (
        *(f"{row.model} minus {row.baseline}", label(row.metric, row.k), difference_points(row)),
        *(READS[judged(found, row)], p_value(row.p), p_value(row.p_holm)),
        *(p_value(test.p_holm if test else None) or UNKNOWN, str(row.tasks)),
    )


def _branches(found: Compared) -> Iterator[Block]:
    lost = [branch for branch in found.ablation.branches if branch.state != "done"]
    done = [branch for arm in found.arms for branch in arm.branches]
    if lost:
        rows = [
            (
                *(branch.name, branch.state.replace("_", " ")),
                *(cut(branch.error or "", ERROR_CHARS), *_links(branch, "run", "run")),
            )
            for branch in lost
        ]
        yield _linked(("not finished", "state", "why"), rows)
    if done:
        header = ("branch", "seed", "rows", "loss", "Exec@1", "fast_1@1", "minutes", "GPU-hours")
        table = _linked(header, [_branch(found, branch) for branch in done])
        yield Folded(f"The {len(done)} that finished", (table,))


def _linked(header: tuple[str, ...], rows: Sequence[tuple[Cell, ...]]) -> Table:
    """A table whose rows end with `_links`. A page that no row has a link to gets no column."""
    names = (*header, "MLflow", "Prefect")
    kept = [n for n in range(len(names)) if n < len(header) or any(row[n] for row in rows)]
    cells = tuple(tuple(row[n] for n in kept) for row in rows)
    return Table(tuple(names[n] for n in kept), cells)


def _branch(found: Compared, branch: Branch) -> tuple[Cell, ...]:
    scores = {
        row.metric: f"{100 * row.value:.1f} %"
        for row in found.seeds
        if (row.branch, row.track) == (branch.name, TRACK)
    }
    minutes = None if branch.seconds is None else branch.seconds / 60
    return (
        *(branch.name, str(branch.seed), _number(branch.rows, ",")),
        _number(branch.loss_last, ".3f"),
        *(scores.get(metric, UNKNOWN) for metric in (EXEC, FAST)),
        *(_number(minutes, ".1f"), _hours(branch.gpu_hours), *_links(branch, "run", "run")),
    )


def _provenance(found: Compared) -> Section:
    rows: list[tuple[Cell, ...]] = [("ablation", found.ablation.fingerprint, "", "")]
    for branch in found.ablation.branches:
        prints = (branch.curated or "", branch.trained or "", branch.scores or "")
        rows += [(branch.name, *prints)] if any(prints) else []
    table = Table(("of", "curated set", "training", "scores"), tuple(rows))
    return Section("Where it came from", (Folded("Fingerprints", (table,)),))


def _baseline(found: Compared) -> str | None:
    return found.arm(found.baseline).strategy if found.baseline else None
