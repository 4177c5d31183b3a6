"""Numeric signs of model faults, to check first. Causes are only suggestions, after the ConCuR
paper (arXiv 2510.07356); thresholds are our own."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping

import polars as pl
from pydantic import NonNegativeFloat, NonNegativeInt

from kernels_eval.records import Reason, Record, Row
from tasks.reporting.text import interval
from tasks.scores import Interval, wilson_interval
from tasks.tables import CORRECT

LEVEL_POINTS = 0.10
"""Exec of level 2 minus that of level 1."""
FEW_SINGLE = 0.20
"""Share of single-operator samples below which a lack of them is named as the cause."""
SLOW_SHARE = 0.5
"""fast_1 below this share of Exec is slow."""
SOLVES = 0.2
"""Below this Exec too little is correct to ask how fast it is."""
MORE_POINTS = 0.05
"""Share of flagged outputs above that of the model before training."""
MANY = 0.2
"""Share of flagged outputs where there is no model before training."""
LONGER = 1.5
"""Median length over that of the model before training."""
CUT_OFF = 0.1
"""Share of answers that the token limit ended."""
HALF = 0.5
FEW_SLOW = 5
"""Correct kernels that are not faster than PyTorch below which there is no pattern."""
BAD_TRACES = {
    "self_doubting": "self-doubting",
    "repetitive": "repetitive",
    "ends_in_loop": "ending in a loop",
    "mixed_language": "mixing languages",
}


class Sign(Record):
    """One thing to look at: `sentence` has its numbers and likely cause."""

    sign: str
    model: str
    sentence: str


class Traces(Record):
    """Flag counts (as in tasks.curation.flags) and length of a model's or training set's traces."""

    samples: NonNegativeInt
    flagged: dict[str, int] = {}
    median_tokens: NonNegativeFloat | None = None

    def share(self, flag: str) -> float:
        return self.flagged.get(flag, 0) / self.samples


def signs(
    scores: pl.DataFrame,
    levels: pl.DataFrame,
    verdicts: pl.DataFrame,
    traces: Mapping[str, Traces],
    *,
    training: Traces | None = None,
    single_operator: tuple[int, int] | None = None,
    untrained: str | None = None,
) -> tuple[Sign, ...]:
    """Every sign shown, models in the order of `scores`, at the smallest k.

    `scores` are custom kernels' against eager PyTorch, `levels` the same by level (column `group`),
    `traces` of models' outputs, `training` of the training set, `single_operator` its samples on
    single operators and in all. `untrained` is the model before training.
    """
    smallest = scores.filter(pl.col("k").is_null() | (pl.col("k") == pl.col("k").min()))
    found = []
    for model in scores["model"].unique(maintain_order=True):
        trained = model != untrained
        before = traces.get(untrained or "") if trained else None
        own = verdicts.filter(model=model)
        by_metric = smallest.filter(model=model).rows_by_key("metric", named=True, unique=True)
        sentences = {
            "level 2 above level 1": level_gap(
                levels if levels.is_empty() else levels.filter(model=model),
                by_metric["exec"]["k"],
                single_operator if trained else None,
            ),
            "correct but slow": correct_but_slow(by_metric),
            "verbose": verbose(traces.get(model), before, training if trained else None),
            "cut off by the token limit": cut_off(own),
            "bottleneck missed": missed_bottleneck(own),
        }
        found += [
            Sign(sign=sign, model=model, sentence=f"{model}: {sentence}")
            for sign, sentence in sentences.items()
            if sentence
        ]
    return tuple(found)


def level_gap(levels: pl.DataFrame, k: int, single_operator: tuple[int, int] | None) -> str:
    """Level 2 (several operators) well above level 1: training lacks single-operator tasks."""
    if levels.is_empty():
        return ""
    rows = levels.filter(metric="exec", k=k).rows_by_key("group", named=True, unique=True)
    found = gap(rows["2"], rows["1"]) if {"1", "2"} <= rows.keys() else None
    if found is None or found[0] < LEVEL_POINTS or found[1].lower <= 0:
        return ""
    points = interval(found[0], *found[1], "+.1p")
    sentence = f"level 2 is above level 1 by {points} points (Exec@{k})."
    if not single_operator or not single_operator[1]:
        return sentence
    single, samples = single_operator
    share = f"{single:,} of the {samples:,} samples of the training set are single operators"
    if single / samples < FEW_SINGLE:
        return (
            f"{sentence} {share}: add single-operator tasks, as the paper's third criterion does."
        )
    return f"{sentence} {share}: they are not the likely cause."


def correct_but_slow(scores: Mapping[str, Row]) -> str:
    """High Exec, low fast_1: it learned to compile, not to optimise. `scores` by metric."""
    if not {"exec", "fast_1"} <= scores.keys():
        return ""
    right, fast = scores["exec"], scores["fast_1"]
    if fast["value"] is None or right["value"] is None or right["value"] < SOLVES:
        return ""
    if fast["value"] >= SLOW_SHARE * right["value"] or fast["upper"] >= right["lower"]:
        return ""
    speedup = scores.get("geometric_mean_speedup", {}).get("value")
    k = right["k"]
    return (
        f"many correct kernels (Exec@{k} {right['value']:.1%}), few of them fast (fast_1@{k}"
        f" {fast['value']:.1%}, mean speedup {interval(speedup)}). Check which operator they"
        " replace, and whether it took most of the time."
    )


def verbose(now: Traces | None, before: Traces | None, training: Traces | None) -> str:
    """Verbose, self-doubting outputs: the training set held long, chaotic traces.

    Against traces before training, a flag needs MORE_POINTS more and disjoint Wilson intervals,
    length LONGER times the median; without them, a flag needs a share of MANY.
    """
    if now is None or not now.samples:
        return ""
    bad = [name for name in BAD_TRACES if _stands_out(now, before, name)]
    parts = []
    for name in bad:
        earlier = f", before {before.share(name):.1%}" if before and before.samples else ""
        parts.append(f"{BAD_TRACES[name]} ({now.share(name):.1%}{earlier})")
    if before and before.median_tokens and now.median_tokens is not None:
        ratio = now.median_tokens / before.median_tokens
        if ratio >= LONGER:
            parts.append(f"{ratio:.2f} times as long as before training")
    if not parts:
        return ""
    sentence = f"outputs are {', '.join(parts)}."
    held = [
        f"{BAD_TRACES[name]} {training.share(name):.1%}"
        for name in bad
        if training and training.flagged.get(name)
    ]
    if not held:
        return sentence
    return (
        f"{sentence} The training set contains such traces ({', '.join(held)}) and teaches this:"
        " filter them, or prefer concise ones."
    )


def cut_off(verdicts: pl.DataFrame) -> str:
    """Answers cut off by the token limit count as failures."""
    cut = verdicts.filter(pl.col("reason") == Reason.TRUNCATED.value).height
    if not verdicts.height or cut / verdicts.height < CUT_OFF:
        return ""
    return (
        f"{cut:,} of {verdicts.height:,} answers ran into the token limit before any code and"
        " count as failures. Raise max_tokens, or read the scores as a lower bound."
    )


def missed_bottleneck(verdicts: pl.DataFrame) -> str:
    """Correct kernels that are not faster than PyTorch and measured to spend less than half their
    time in their own kernels; shown where the share's Wilson interval is above MANY."""
    if not {"custom_kernel_time_share", "library_calls"} <= set(verdicts.columns):
        return ""
    if not isinstance(verdicts.schema["timing"], pl.Struct):
        return ""
    slow = verdicts.filter(CORRECT, pl.col("timing").struct.field("speedup") <= 1)
    slow = slow.drop_nulls("custom_kernel_time_share")
    missed = slow.filter(pl.col("custom_kernel_time_share") < HALF)
    if slow.height < FEW_SLOW or wilson_interval(missed.height, slow.height).lower <= MANY:
        return ""
    calls = Counter(call for row in missed["library_calls"].to_list() for call in set(row or ()))
    named = ", ".join(f"{call} {count}" for call, count in calls.most_common(3))
    sentence = (
        f"{missed.height:,} of {slow.height:,} correct kernels that are not faster than PyTorch"
        " spend more than half of their time outside their own kernels."
    )
    return f"{sentence} What they call most: {named}." if named else sentence


def gap(first: Row, second: Row) -> tuple[float, Interval] | None:
    """`first` minus `second`, over different tasks, with a 95 % interval; None without both values.
    Square-and-add (Newcombe 1998, method 10; Zou and Donner 2008)."""
    if first["value"] is None or second["value"] is None:
        return None
    value = first["value"] - second["value"]
    below = math.hypot(first["value"] - first["lower"], second["upper"] - second["value"])
    above = math.hypot(first["upper"] - first["value"], second["value"] - second["lower"])
    return value, Interval(value - below, value + above)


def _stands_out(now: Traces, before: Traces | None, name: str) -> bool:
    count = now.flagged.get(name, 0)
    if before is None or not before.samples:
        return count >= MANY * now.samples
    ours = wilson_interval(count, now.samples)
    theirs = wilson_interval(before.flagged.get(name, 0), before.samples)
    more = now.share(name) - before.share(name)
    return more >= MORE_POINTS and ours.lower > theirs.upper
