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

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Record, Status
from tasks.operators import operator_kind
from tasks.reporting.page import Table, block_markdown

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
QUANTILES = (0.1, 0.25, 0.5, 0.75, 0.9)
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
    return next(
        (name for name in LEADING if name in families), families[0] if families else UNKNOWN
    )


def status_by_family(frame: pl.DataFrame, families: pl.DataFrame) -> tuple[FamilyStatuses, ...]:
    """Verdict statuses of every family, the family with most candidates first and UNKNOWN last.

    `frame` has a row a verdict with task_id and status (candidate_id, where it is there, counts
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
        order = (*STATUSES, *sorted(counts.keys() - set(STATUSES)))
        found.append(
            FamilyStatuses(
                family=str(family),
                tasks=part["task_id"].n_unique(),
                candidates=part.height,
                counts={name: counts[name] for name in order if name in counts},
            )
        )
    found.sort(key=lambda each: (each.family == UNKNOWN, -each.candidates, each.family))
    return tuple(found)


def composition(name: str, rows: pl.DataFrame, families: pl.DataFrame) -> SetComposition:
    """What a set holds: `rows` has a line a sample with task_id, reasoning_tokens, `speedup` or
    `timing`, and `operator_kind` or `reference_operators`; `families` task_id and family. Raises
    UsageError for missing columns."""
    _require(rows, ("task_id", "reasoning_tokens"))
    named = _with_family(rows.select(pl.col("task_id").cast(pl.String)), families)["family"]
    counts = named.value_counts().iter_rows()
    singles = int((_kinds(rows) == "single_operator").sum())
    return SetComposition(
        name=name,
        samples=rows.height,
        tasks=rows["task_id"].n_unique(),
        single_operator=singles,
        fusion=rows.height - singles,
        families=dict(sorted(counts, key=lambda pair: (-pair[1], pair[0]))),
        tokens=_quantiles(_numbers(rows, "reasoning_tokens")),
        speedups=_quantiles(_speedups(rows)),
    )


def overlap(sets: Mapping[str, Iterable[str]]) -> Overlap:
    """Which samples (by candidate_id) are in which sets: up to 63 of them, a bit each."""
    masks = _masks(sets)
    names = list(sets)
    same: dict[tuple[int, ...], list[int]] = {}  # sets with the same members are in the same masks
    for number in range(len(names)):
        same.setdefault(tuple(mask for mask in masks if mask >> number & 1), []).append(number)
    sizes = {numbers[0]: sum(masks[mask] for mask in of) for of, numbers in same.items()}
    ordered = sorted(
        same.values(), key=lambda numbers: -sizes[numbers[0]]
    )  # of equal size: as they were given
    exact = [
        (tuple(place for place, numbers in enumerate(ordered) if mask >> numbers[0] & 1), count)
        for mask, count in masks.items()
    ]
    pairs = []
    for first, second in combinations(range(len(names)), 2):
        both = 1 << first | 1 << second
        shared = sum(count for mask, count in masks.items() if mask & both == both)
        either = sum(count for mask, count in masks.items() if mask & both)
        jaccard = shared / either if either else 0.0
        pairs.append(Pair(first=names[first], second=names[second], shared=shared, jaccard=jaccard))
    sets_of = [
        SetSize(names=tuple(names[n] for n in numbers), samples=sizes[numbers[0]])
        for numbers in ordered
    ]
    exact.sort(key=lambda pair: (-pair[1], pair[0]))
    return Overlap(
        samples=sum(masks.values()),
        sets=tuple(sets_of),
        intersections=tuple(Intersection(sets=which, samples=n) for which, n in exact),
        pairs=tuple(pairs),
    )


def _masks(sets: Mapping[str, Iterable[str]]) -> dict[int, int]:
    """How many samples are in just these sets, by a number with a bit for each of them. No Python
    object is made for a sample."""
    parts = [
        pl.Series("id", ids if isinstance(ids, pl.Series) else list(ids), dtype=pl.String)
        .unique()
        .to_frame()
        .with_columns(pl.lit(1 << number, pl.Int64).alias("bit"))
        for number, ids in enumerate(sets.values())
    ]
    if not parts:
        return {}
    masks = pl.concat(parts).group_by("id").agg(pl.col("bit").sum())["bit"]
    return dict(sorted(masks.value_counts().iter_rows()))


def markdown(sets: Sequence[SetComposition], shared: Overlap | None = None) -> str:
    """Return both as Markdown tables: what sets hold, and how many samples two of them share."""
    header = ("strategy", "samples", "tasks", "single", "fusion", "tokens (median)")
    rows = tuple(
        (
            each.name,
            *(f"{n:,}" for n in (each.samples, each.tasks, each.single_operator, each.fusion)),
            f"{each.tokens.median:,.0f}" if each.tokens else "",
            f"{each.speedups.median:.2f} (n {each.speedups.n:,})" if each.speedups else "none",
            ", ".join(f"{name} {count:,}" for name, count in each.families.items()),
        )
        for each in sets
    )
    tables = [Table((*header, "speedup (median)", "families"), rows)]
    if shared is not None and shared.pairs:
        names = [each.name for each in sets]
        known = {
            frozenset((pair.first, pair.second)): f"{pair.shared:,} ({100 * pair.jaccard:.0f})"
            for pair in shared.pairs
        }
        cells = tuple(
            (row, *(known.get(frozenset((row, column)), "") for column in names)) for row in names
        )
        tables.append(Table(("samples in common (Jaccard, %)", *names), cells))
    return "\n\n".join(map(block_markdown, tables)) + "\n"


def _require(frame: pl.DataFrame, columns: Sequence[str]) -> None:
    if missing := [name for name in columns if name not in frame.columns]:
        raise UsageError(f"the figure needs the columns {', '.join(missing)}", FIX)


def _with_family(rows: pl.DataFrame, families: pl.DataFrame) -> pl.DataFrame:
    _require(families, ("task_id", "family"))
    named = families.select(
        pl.col("task_id").cast(pl.String), pl.col("family").cast(pl.String)
    ).unique("task_id", keep="first")
    return rows.join(named, on="task_id", how="left").with_columns(
        pl.col("family").fill_null(UNKNOWN)
    )


def _kinds(rows: pl.DataFrame) -> pl.Series:
    """single_operator or fusion. `operator_kind` is asked once for each different list of
    operators."""
    if "operator_kind" in rows.columns:
        return rows["operator_kind"].cast(pl.String).fill_null("fusion")
    _require(rows, ("reference_operators",))
    keys = rows["reference_operators"].cast(pl.List(pl.String)).list.join("\0").fill_null("")
    kinds = {key: operator_kind(key.split("\0") if key else []) for key in keys.unique()}
    return keys.replace_strict(kinds, return_dtype=pl.String) if kinds else keys


def _numbers(rows: pl.DataFrame, name: str) -> pl.Series:
    try:
        values = rows[name].cast(pl.Float64)
    except pl.exceptions.PolarsError as error:
        raise UsageError(f"the column {name} holds {rows.schema[name]}, no numbers", FIX) from error
    return values.filter(values.is_finite().fill_null(False))


def _speedups(rows: pl.DataFrame) -> pl.Series:
    """The usable ones."""
    if "speedup" not in rows.columns:
        _require(rows, ("timing",))
        fields = {field.name for field in getattr(rows.schema["timing"], "fields", [])}
        known = pl.col("timing").struct.field("speedup")
        rows = rows.select(known if "speedup" in fields else pl.lit(None).alias("speedup"))
    values = _numbers(rows, "speedup")
    return values.filter(values > 0)


def _quantiles(values: pl.Series) -> Quantiles | None:
    if values.is_empty():
        return None
    names = ("p10", "p25", "median", "p75", "p90")
    shares = [values.quantile(share, "linear") for share in QUANTILES]
    return Quantiles(n=len(values), **dict(zip(names, shares, strict=True)))
