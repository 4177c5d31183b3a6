"""One model against another on the same tasks: differences with intervals, a permutation test, and
Holm's correction over many.

Guarantees: only tasks that both answered count, pair by pair; a metric that either cannot support
is left out; p is exact for few tasks. Does not guarantee that a difference is due to the models:
one training run each says nothing about the spread between seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import TypeVar

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.grouping import grouped
from kernels_eval.records import Record
from tasks.benchmark.metrics import bootstrap_interval, mean, sign_flip_p
from tasks.benchmark.samples import TRACKS, Samples, Track, rates, samples_by_model


class Tested(Record):
    """`model` against `baseline`: p of a two-sided test, and p corrected for all that were made
    together."""

    model: str
    baseline: str
    track: Track
    metric: str
    p: float | None = None
    p_holm: float | None = None


T = TypeVar("T", bound=Tested)


class ComparisonRow(Tested):
    """`model` minus `baseline` on the tasks both answered: shares in [-1, 1], interval from a
    bootstrap over task pairs.

    The bounds are None where every task shows the same difference (all zero, say): such data cannot
    say how sure it is. `p` is of a two-sided sign-flip test over tasks; `p_holm` is p corrected for
    all comparisons that were made together (`compare_all`).
    """

    k: int
    difference: float
    lower: float | None = None
    upper: float | None = None
    tasks: int


def metric_name(p: float | None) -> str:
    """ "exec" for None, else "fast_0", "fast_0.5", "fast_1", ..."""
    return "exec" if p is None else f"fast_{p:g}"


def compare_all(
    frame: pl.DataFrame,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    ks: Sequence[int] = (1,),
    ps: Sequence[float] = (1.0,),
    resamples: int = 2000,
) -> list[ComparisonRow]:
    """Return Exec and fast_p of a model minus those of a baseline, task by task, on both tracks,
    for several (baseline, model) pairs.

    Where `pairs` is None all models are compared; the one that appears first is the baseline.
    Metrics that either cannot support are left out. Holm's correction (1979; statsmodels) is over
    the rows of one track together, since a reader looks at all of them for what is significant:
    every k, p and pair that is asked for has its price. Raises UsageError for a frame that
    `samples_by_model` refuses, or a model that is not in it.
    """
    known = samples_by_model(frame)
    chosen = list(itertools.combinations(known, 2)) if pairs is None else pairs
    if unknown := sorted({name for pair in chosen for name in pair} - known.keys()):
        raise UsageError(
            f"no verdicts of model {unknown[0]!r}",
            f"models in this frame: {', '.join(known) or 'none'}",
        )
    rows = [
        row
        for pair in chosen
        for track, p, k in itertools.product(TRACKS, (None, *ps), ks)
        if (row := _compared(known, *pair, track, p, k, resamples))
    ]
    return corrected(rows, lambda row: row.track)


def corrected(rows: Sequence[T], group: Callable[[T], Hashable]) -> list[T]:
    """Return rows with `p_holm`, corrected over the rows of one group."""
    found = list(rows)
    for own in grouped((group(row), place) for place, row in enumerate(rows)).values():
        for place, p in zip(own, holm([rows[place].p for place in own]), strict=True):
            found[place] = rows[place].model_copy(update={"p_holm": p})
    return found


def holm(p_values: Sequence[float | None]) -> list[float | None]:
    """p values corrected for all of them (Holm 1979), in their order. What is None stays so and is
    not counted."""
    from statsmodels.stats.multitest import multipletests

    known = [p for p in p_values if p is not None]
    corrected = iter(multipletests(known, method="holm")[1].tolist() if known else [])
    return [None if p is None else next(corrected) for p in p_values]


def _compared(
    known: Mapping[str, Samples],
    baseline: str,
    model: str,
    track: Track,
    p: float | None,
    k: int,
    resamples: int,
) -> ComparisonRow | None:
    shared = [task for task in known[model] if task in known[baseline]]
    a, b = (
        rates({task: known[name][task] for task in shared}, track, p, k)
        for name in (model, baseline)
    )
    if a is None or b is None:
        return None
    bounds = bootstrap_interval(a - b, mean, resamples=resamples)
    return ComparisonRow(
        model=model,
        baseline=baseline,
        track=track,
        metric=metric_name(p),
        k=k,
        difference=mean(a - b),
        lower=bounds and bounds.lower,
        upper=bounds and bounds.upper,
        tasks=len(shared),
        p=sign_flip_p(a - b),
    )
