"""What verification said of each operator family, and what training sets hold and share: tables, as
records.

Guarantees: pure; every candidate is counted once, so that parts add up to their whole; a task
belongs to one family, its leading one, and to "unknown" where nothing tells; speedups that are
missing, not finite or not positive are counted as not timed, never as numbers. Does not guarantee
that a family is what a task's time is spent on: it is read from the operators' names.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from itertools import combinations
from pathlib import Path

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.grouping import grouped
from kernels_eval.records import Record, Status
from tasks.operators import is_single_operator
from tasks.reporting.page import rendered
from tasks.reporting.text import by_count

STATUSES = tuple(status.value for status in Status)
UNKNOWN = "unknown"
LEADING = (
    "attention",
    "convolution",
    "rnn",
    "matmul",
    "fft",
    "linear_algebra",
    "softmax",
    "normalisation",
    "pooling",
    "cumulative",
)
"""Families that lead a task before any other, the first of these first: what a kernel of it mostly
computes."""
QUANTILES = {"p10": 0.1, "p25": 0.25, "median": 0.5, "p75": 0.75, "p90": 0.9}
TABLES = Path(__file__).parent / "templates" / "composition.md.j2"
FIX = "give verdicts joined with the candidates they are of"


class FamilyStatuses(Record):
    """Verdicts on candidates for tasks of one family. `counts` by status, those that occur, in the
    order of STATUSES."""

    family: str
    tasks: int
    candidates: int
    counts: dict[str, int]


class Quantiles(Record):
    """Of `n` values: tokens, or speedups (ratios)."""

    n: int
    p10: float
    p25: float
    median: float
    p75: float
    p90: float


class SetComposition(Record):
    """What one training set holds. `families` counts samples, the most frequent first; `tokens` and
    `speedups` are None without any."""

    name: str
    samples: int
    tasks: int
    single_operator: int
    fusion: int
    families: dict[str, int]
    tokens: Quantiles | None
    speedups: Quantiles | None


class SetSize(Record):
    """Sets with the same members are one: `names` has several then."""

    names: tuple[str, ...]
    samples: int


class Intersection(Record):
    """Samples that are in exactly these sets (places in Overlap.sets) and in no other."""

    sets: tuple[int, ...]
    samples: int


class Pair(Record):
    """Samples that two sets share, and their share of all that either has (Jaccard)."""

    first: str
    second: str
    shared: int
    jaccard: float


class Overlap(Record):
    """`samples` different ones in all sets together. Intersections and sets: the largest first.
    `pairs`: of all names, in their order."""

    samples: int
    sets: tuple[SetSize, ...]
    intersections: tuple[Intersection, ...]
    pairs: tuple[Pair, ...]


def leading_family(families: Sequence[str]) -> str:
    """The family that stands for a task with these: the first of LEADING among them, else the first
    given; UNKNOWN of none."""
    return next((name for name in (*LEADING, *families) if name in families), UNKNOWN)


def in_order(statuses: Iterable[str]) -> list[str]:
    """Statuses in the order of STATUSES, names that are not in it last."""
    known = {name: place for place, name in enumerate(STATUSES)}
    return sorted(statuses, key=lambda name: (known.get(name, len(known)), name))


def status_by_family(frame: pl.DataFrame, families: pl.DataFrame) -> tuple[FamilyStatuses, ...]:
    """Verdict statuses of every family, the family with most candidates first and UNKNOWN last.

    `frame` has a row per verdict with task_id and status (candidate_id, where it is there, counts
    once), `families` task_id and family. Rows without a task or a status are left out. Raises
    UsageError for missing columns and where no row is left.
    """
    _require(frame, ("task_id", "status"))
    if "candidate_id" in frame.columns:
        named = pl.col("candidate_id")
        frame = frame.filter(named.is_null() | named.is_first_distinct())
    rows = frame.select(pl.col("task_id", "status").cast(pl.String)).drop_nulls()
    if rows.is_empty():
        raise UsageError("no verdict names a task and a status", FIX)
    found = []
    for (family,), part in _with_family(rows, families).group_by("family"):
        counts = Counter(part["status"])
        found.append(
            FamilyStatuses(
                family=str(family),
                tasks=part["task_id"].n_unique(),
                candidates=part.height,
                counts={name: counts[name] for name in in_order(counts)},
            )
        )
    found.sort(key=lambda each: (each.family == UNKNOWN, -each.candidates, each.family))
    return tuple(found)


def composition(name: str, rows: pl.DataFrame, families: pl.DataFrame) -> SetComposition:
    """What a set holds: `rows` has a line per sample with task_id, reasoning_tokens, `speedup` or
    `timing`, and `operator_kind` or `reference_operators`; `families` task_id and family. Raises
    UsageError for missing columns."""
    _require(rows, ("task_id", "reasoning_tokens"))
    named = _with_family(rows.select(pl.col("task_id").cast(pl.String)), families)["family"]
    singles = int(rows.select(_single(rows)).to_series().sum())
    speedups = _numbers(rows, "speedup", _speedup(rows))
    return SetComposition(
        name=name,
        samples=rows.height,
        tasks=rows["task_id"].n_unique(),
        single_operator=singles,
        fusion=rows.height - singles,
        families=dict(by_count(dict(named.value_counts().iter_rows()))),
        tokens=_quantiles(_numbers(rows, "reasoning_tokens", pl.col("reasoning_tokens"))),
        speedups=_quantiles(speedups.filter(speedups > 0)),
    )


def overlap(sets: Mapping[str, Iterable[str]]) -> Overlap:
    """Which samples (by candidate_id) are in which sets: up to 63 of them, a bit each."""
    masks = _masks(sets)

    def samples(of: Iterable[int]) -> int:
        return sum(masks[mask] for mask in of)

    held = {
        name: frozenset(mask for mask in masks if mask >> number & 1)
        for number, name in enumerate(sets)
    }
    same = grouped((of, name) for name, of in held.items())
    ordered = sorted(same, key=samples, reverse=True)  # of equal size: as they were given
    parts = [
        Intersection(sets=tuple(n for n, of in enumerate(ordered) if mask in of), samples=count)
        for mask, count in masks.items()
    ]
    pairs = []
    for first, second in combinations(held, 2):
        shared, either = samples(held[first] & held[second]), samples(held[first] | held[second])
        jaccard = shared / either if either else 0.0
        pairs.append(Pair(first=first, second=second, shared=shared, jaccard=jaccard))
    return Overlap(
        samples=samples(masks),
        sets=tuple(SetSize(names=tuple(same[of]), samples=samples(of)) for of in ordered),
        intersections=tuple(sorted(parts, key=lambda part: (-part.samples, part.sets))),
        pairs=tuple(pairs),
    )


def _masks(sets: Mapping[str, Iterable[str]]) -> dict[int, int]:
    """How many samples are in just these sets, by a number with a bit for each of them. No Python
    object is made for a sample."""
    parts = [
        pl.Series("id", ids if isinstance(ids, pl.Series) else list(ids), dtype=pl.String)
        .unique()
        .to_frame()
        .with_columns(bit=pl.lit(1 << number, pl.Int64))
        for number, ids in enumerate(sets.values())
    ]
    if not parts:
        return {}
    masks = pl.concat(parts).group_by("id").agg(pl.col("bit").sum())["bit"]
    return dict(sorted(masks.value_counts().iter_rows()))


def markdown(sets: Sequence[SetComposition], shared: Overlap | None = None) -> str:
    """Return both as Markdown tables: what sets hold, and how many samples two of them share."""
    return rendered(TABLES, sets=sets, shared=shared).strip() + "\n"


def _require(frame: pl.DataFrame, columns: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in frame.columns]:
        raise UsageError(f"the figure needs the columns {', '.join(missing)}", FIX)


def _with_family(rows: pl.DataFrame, families: pl.DataFrame) -> pl.DataFrame:
    _require(families, ("task_id", "family"))
    named = families.select(pl.col("task_id", "family").cast(pl.String))
    named = named.unique("task_id", keep="first")
    rows = rows.join(named, on="task_id", how="left")
    return rows.with_columns(pl.col("family").fill_null(UNKNOWN))


def _single(rows: pl.DataFrame) -> pl.Expr:
    if "operator_kind" in rows.columns:
        return pl.col("operator_kind").cast(pl.String) == "single_operator"
    _require(rows, ("reference_operators",))
    return is_single_operator(pl.col("reference_operators"))


def _speedup(rows: pl.DataFrame) -> pl.Expr:
    """Null where the timings have none."""
    if "speedup" in rows.columns:
        return pl.col("speedup")
    _require(rows, ("timing",))
    fields = {field.name for field in getattr(rows.schema["timing"], "fields", [])}
    return pl.col("timing").struct.field("speedup") if "speedup" in fields else pl.lit(None)


def _numbers(rows: pl.DataFrame, name: str, column: pl.Expr) -> pl.Series:
    """The finite ones."""
    try:
        values = rows.select(column.cast(pl.Float64).alias(name)).to_series()
    except pl.exceptions.PolarsError as error:
        kind = rows.schema.get(name)
        raise UsageError(f"the column {name} holds {kind}, no numbers", FIX) from error
    return values.filter(values.is_finite().fill_null(False))


def _quantiles(values: pl.Series) -> Quantiles | None:
    if values.is_empty():
        return None
    found = {name: values.quantile(share, "linear") for name, share in QUANTILES.items()}
    return Quantiles(n=len(values), **found)
