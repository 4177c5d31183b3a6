"""Scores and differences as text and tables, for reports, comparisons and the viewer. Unknown
values are "n/a", never 0; strings are raw."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from itertools import tee

from kernels_eval.records import Row
from tasks.reporting.parts import Cell, Part, Section, Table, table_of
from tasks.reporting.text import interval, p_value
from tasks.scores import EXEC, GEOMETRIC_MEAN, KERNEL_SHARE, Track, metric_name

OWN_TRACK: Track = "custom_kernel"
"""What headlines, orders and figures are of."""
TRACK_NAMES = {"any": "any correct", "custom_kernel": "custom kernel"}
BASELINE_NAMES = {"eager": "eager PyTorch", "compile": "torch.compile"}
FAST = metric_name(1.0)
HEADLINE_METRICS = (EXEC, FAST, GEOMETRIC_MEAN, KERNEL_SHARE)
LABELS = {
    EXEC: "Exec",
    GEOMETRIC_MEAN: "speedup of correct",
    KERNEL_SHARE: "time in own kernels",
}
FEW_TASKS = 30
"""Below it, an interval of a share is wider than most differences between models."""
NO_INTERVAL = " (too few tasks)"
SIGNIFICANT = 0.05
READS = {
    "distinguishable": "more than chance",
    "within_seed_spread": "within the spread between seeds",
    "seed_spread_unknown": "more than chance between tasks; spread between seeds unknown",
    "not_distinguishable": "not distinguishable from chance",
}
"""What a difference may be called, by the verdict on it."""


CORRECT_MEANS = (
    "'correct' means that outputs matched on all inputs that were tried, and that the checks for"
    " known cheats found nothing. This is evidence, not proof."
)


def metrics_of(rows: Iterable[Row]) -> dict[str, float | None]:
    """Scores by MLflow's names: `exec_at_1`, `fast_1_at_1` and so on, with `_lower` and `_upper`.
    `_any` counts any correct answer, `_vs_compile` is against torch.compile."""
    found: dict[str, float | None] = {}
    for row in rows:
        name = row["metric"] + (f"_at_{row['k']}" if row["k"] else "")
        name += "" if row["track"] == OWN_TRACK else "_any"
        name += "_vs_compile" if row["baseline"] == "compile" else ""
        found |= {name: row["value"]}
        found |= {f"{name}_{end}": row[end] for end in ("lower", "upper")}
    return found


def label(metric: str, k: int | None = None) -> str:
    """A metric's name: `Exec@1`, `fast_1@5`, `speedup of correct`."""
    return LABELS.get(metric, metric) + (f"@{k}" if k is not None else "")


def scored(row: Row | None) -> str:
    if row is None:
        return "n/a"
    form = ".2x" if row["metric"] == GEOMETRIC_MEAN else ".1%"
    few = row["value"] is not None and row["lower"] is None and row["why_not"]
    return interval(row["value"], row["lower"], row["upper"], form) + NO_INTERVAL * bool(few)


def shown_metric(row: Row, name: str, form: str = ".1%") -> str:
    return interval(row.get(name), row.get(f"{name}_lower"), row.get(f"{name}_upper"), form)


def difference_points(row: Row) -> str:
    note = "" if row["lower"] is not None else " (no interval: all tasks differ alike)"
    return interval(row["difference"], row["lower"], row["upper"], "+.1p") + note


def judged(row: Row) -> str:
    """A key of READS: the verdict on a difference against chance of tasks and, where compared, of
    training seeds."""
    if row["p_holm"] is None or row["p_holm"] >= SIGNIFICANT:
        return "not_distinguishable"
    if "p_seeds_holm" not in row:
        return "distinguishable"
    if row["p_seeds_holm"] is None:
        return "seed_spread_unknown"
    return "distinguishable" if row["p_seeds_holm"] < SIGNIFICANT else "within_seed_spread"


def difference_sentence(row: Row) -> str:
    return (
        f"{row['model']} minus {row['baseline']}, {label(row['metric'], row['k'])}:"
        f" {difference_points(row)} points, corrected p {p_value(row['p_holm']) or 'not known'}:"
        f" {READS[judged(row)]}."
    )


DIFFERENCE_COLUMNS: Mapping[str, Callable[[Row], Cell]] = {
    "difference": lambda row: f"{row['model']} minus {row['baseline']}",
    "metric": lambda row: label(row["metric"], row["k"]),
    "percentage points": difference_points,
    "reads as": lambda row: READS[judged(row)],
    "p": lambda row: p_value(row["p"]),
    "p, corrected": lambda row: p_value(row["p_holm"]),
    "p of seeds": lambda row: p_value(row.get("p_seeds_holm")),
    "tasks": lambda row: str(row["tasks"]),
}
"""The conclusion stands before what it rests on: a narrow page, such as MLflow's preview, shows the
first columns."""


def differences_parts(rows: Iterable[Row]) -> tuple[Part, ...]:
    own, other = (
        table_of((row for row in rows if row["track"] == track), DIFFERENCE_COLUMNS)
        for rows, track in zip(tee(rows), (OWN_TRACK, "any"), strict=True)
    )
    if own == other:
        return (own,)
    return (own, Section("The same counting any correct answer", (other,)))


SCORE_COLUMNS: Mapping[str, Callable[[Row], str]] = {
    "model": lambda row: row["model"],
    "track": lambda row: TRACK_NAMES[row["track"]],
    "against": lambda row: BASELINE_NAMES[row["baseline"]],
    "k": lambda row: str(row["k"]),
    "tasks": lambda row: str(row["tasks"]),
    "samples": lambda row: str(row["samples"]),
}
"""What stands before the scores."""


def scores_table(rows: Iterable[Row]) -> Table:
    """A row per model, track, baseline and k, a column per metric but fast_0, which is Exec. Means
    over all samples are in the smallest k's row."""
    rows = [row for row in rows if row["metric"] != metric_name(0.0)]
    keys = dict(SCORE_COLUMNS)
    if all(row["baseline"] == "eager" for row in rows):
        del keys["against"]
    smallest = min((row["k"] for row in rows if row["k"] is not None), default=1)
    placed = [{**row, "k": smallest if row["k"] is None else row["k"]} for row in rows]
    return pivoted(keys, placed, lambda row: label(row["metric"]))


def pivoted(
    keys: Mapping[str, Callable[[Row], str]],
    rows: Iterable[Row],
    column_of: Callable[[Row], str] = lambda row: label(row["metric"], row["k"]),
) -> Table:
    """A table of scores, rows and columns in order of appearance, each row named by `keys`."""
    columns: dict[str, None] = {}
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        columns[column_of(row)] = None
        place = tuple(key(row) for key in keys.values())
        found.setdefault(place, {})[column_of(row)] = scored(row)
    cells = [(*place, *(own.get(name, "n/a") for name in columns)) for place, own in found.items()]
    return Table((*keys, *columns), cells, len(keys))
