"""One model against another on the same tasks: differences with intervals, a permutation test, and
Holm's correction over many.

Guarantees: only tasks that both answered count, pair by pair; a metric that either cannot support
is left out; p is exact for few tasks. Does not guarantee that a difference is due to the models:
one training run each says nothing about the spread between seeds.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.benchmark.metrics import bootstrap_interval, mean, sign_flip_p
from tasks.benchmark.samples import TRACKS, Rule, Samples, Track, rates, samples_by_model

if TYPE_CHECKING:
    import polars as pl

LEVEL = 0.95


class ComparisonRow(Record):
    """`model` minus `baseline` on the tasks both answered: shares in [-1, 1], interval from a
    bootstrap over task pairs.

    The bounds are None where every task shows the same difference (all zero, say): such data cannot
    say how sure it is. `p` is of a two-sided sign-flip test over tasks; `p_holm` is p corrected for
    all comparisons that were made together (`compare_all`).
    """

    model: str
    baseline: str
    track: Track
    metric: str
    k: int
    difference: float
    lower: float | None = None
    upper: float | None = None
    tasks: int
    p: float | None = None
    p_holm: float | None = None


def metric_name(p: float | None) -> str:
    """ "exec" for None, else "fast_0", "fast_0.5", "fast_1", ..."""
    return "exec" if p is None else f"fast_{p:g}"


def compare(
    frame: pl.DataFrame,
    *,
    baseline: str,
    model: str,
    ks: Sequence[int],
    ps: Sequence[float],
    seed: int = 0,
    resamples: int = 2000,
    rule: Rule = "concur",
) -> list[ComparisonRow]:
    """Exec and fast_p of `model` minus those of `baseline`, task by task, on both tracks. Metrics
    that either cannot support are left out.

    p is of each row by itself. Raises UsageError for a frame that `samples_by_model` refuses, or a
    model that is not in it.
    """
    known = samples_by_model(frame, rule=rule)
    for name in (baseline, model):
        if name not in known:
            raise UsageError(
                f"no verdicts of model {name!r}",
                f"models in this frame: {', '.join(known) or 'none'}",
            )
    return _compared(known, baseline, model, ks, ps, seed, resamples)


def compare_all(
    frame: pl.DataFrame,
    *,
    pairs: Sequence[tuple[str, str]] | None = None,
    ks: Sequence[int] = (1,),
    ps: Sequence[float] = (1.0,),
    seed: int = 0,
    resamples: int = 2000,
    rule: Rule = "concur",
) -> list[ComparisonRow]:
    """`compare` of several (baseline, model) pairs, of all models where None (the one that appears
    first is the baseline), with `p_holm`.

    Holm's correction (1979; statsmodels) is over the rows of one track together, since a reader
    looks at all of them for what is
    significant: every k, p and pair that is asked for has its price. Raises UsageError as `compare`
    does.
    """
    known = samples_by_model(frame, rule=rule)
    chosen = list(itertools.combinations(known, 2)) if pairs is None else list(pairs)
    unknown = sorted({name for pair in chosen for name in pair} - known.keys())
    if unknown:
        raise UsageError(
            f"no verdicts of model {unknown[0]!r}",
            f"models in this frame: {', '.join(known) or 'none'}",
        )
    rows = [
        row
        for baseline, model in chosen
        for row in _compared(known, baseline, model, ks, ps, seed, resamples)
    ]
    corrected = {
        track: iter(holm([row.p for row in rows if row.track == track])) for track in TRACKS
    }
    return [row.model_copy(update={"p_holm": next(corrected[row.track])}) for row in rows]


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
    ks: Sequence[int],
    ps: Sequence[float],
    seed: int,
    resamples: int,
) -> list[ComparisonRow]:
    shared = [task for task in known[model] if task in known[baseline]]
    ours, theirs = ({task: known[name][task] for task in shared} for name in (model, baseline))
    rows = []
    for track, p, k in ((track, p, k) for track in TRACKS for p in (None, *ps) for k in ks):
        a, b = rates(ours, track, p, k), rates(theirs, track, p, k)
        if a is None or b is None:
            continue
        lower, upper = bootstrap_interval(
            a - b, mean, seed=seed, resamples=resamples, level=LEVEL
        ) or (None, None)
        facts: dict[str, Any] = {
            "model": model,
            "baseline": baseline,
            "track": track,
            "metric": metric_name(p),
            "k": k,
        }
        tested = sign_flip_p(a - b, seed=seed)
        rows.append(
            ComparisonRow(
                **facts,
                difference=mean(a - b),
                lower=lower,
                upper=upper,
                tasks=len(shared),
                p=tested,
            )
        )
    return rows
