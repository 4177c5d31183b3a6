"""Signs of a model that went wrong, found in numbers: what to look at first.

Guarantees: a sign is reported only where the numbers show it beyond their intervals, and holds
these numbers. Does not guarantee the cause that its sentence names: it is the one that the ConCuR
paper (arXiv 2510.07356) and its ablations point to. How large a number must be is our choice: the
paper says which signs there are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping
from typing import Literal

import polars as pl
from pydantic import NonNegativeFloat, NonNegativeInt

from kernels_eval.records import Reason, Record, Row
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
TITLES = {
    "level_gap": "level 2 above level 1",
    "correct_but_slow": "correct but slow",
    "verbose": "verbose",
    "cut_off": "cut off by the token limit",
    "missed_bottleneck": "bottleneck missed",
}


class Sign(Record):
    """One thing to look at: `sentence` says what and why, `numbers` show it.

    Names of numbers tell their unit: "..._ratio" and "..._speedup" are ratios, "..._count" counts,
    the others shares in [0, 1] (or differences of them).
    """

    sign: Literal["level_gap", "correct_but_slow", "verbose", "cut_off", "missed_bottleneck"]
    model: str
    sentence: str
    numbers: dict[str, float] = {}

    @property
    def title(self) -> str:
        return TITLES[self.sign]

    def shown(self) -> str:
        """The numbers with their names, for a table."""
        return ", ".join(
            f"{name.replace('_', ' ')} {_shown(name, n)}" for name, n in self.numbers.items()
        )


class Traces(Record):
    """How reasoning traces read: counts of flags as tasks.curation.flags gives them, of a model's
    outputs or of a training set."""

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
    """Every sign that the numbers show, models in the order of `scores`, at the smallest k.

    `scores` are those of custom kernels against eager PyTorch, `levels` the same by level (column
    `group`), `verdicts` what was scored, `traces` how the outputs of a model read, `training` how
    the traces of the training set do, `single_operator` its samples on single operators and all of
    them. `untrained` is the model before training, for whose habits training is not blamed.
    """
    k = scores["k"].drop_nulls().min()
    assert isinstance(k, int), "Exec has a row at every k"
    found: list[Sign | None] = []
    for model in scores["model"].unique(maintain_order=True):
        trained = model != untrained
        before = traces.get(untrained or "") if trained else None
        own = verdicts.filter(model=model)
        found += [
            level_gap(model, levels, k, single_operator if trained else None),
            correct_but_slow(model, scores.filter(pl.col("k").is_null() | (pl.col("k") == k))),
            verbose(model, traces.get(model), before, training if trained else None),
            cut_off(model, own),
            missed_bottleneck(model, own),
        ]
    return tuple(sign for sign in found if sign is not None)


def level_gap(
    model: str, levels: pl.DataFrame, k: int, single_operator: tuple[int, int] | None
) -> Sign | None:
    """Level 2 (several operators) well above level 1: single-operator tasks are missing from the
    training set."""
    if levels.is_empty():
        return None
    rows = levels.filter(model=model, metric="exec", k=k).rows_by_key(
        "group", named=True, unique=True
    )
    found = gap(rows["2"], rows["1"]) if {"1", "2"} <= rows.keys() else None
    if found is None or found[0] < LEVEL_POINTS or found[1].lower <= 0:
        return None
    numbers = {"difference": found[0], **found[1]._asdict()}
    sentence = f"{model}: level 2 is above level 1 (Exec@{k})."
    if single_operator and single_operator[1]:
        single, samples = single_operator
        share = single / samples
        numbers["single_operator_share"] = share
        numbers |= {"single_operator_count": single, "training_count": samples}
        sentence += (
            " The training set has few single-operator samples: add single-operator tasks, as the"
            " third criterion of the paper does."
            if share < FEW_SINGLE
            else " The training set has enough single-operator samples: they are not the likely"
            " cause."
        )
    return Sign(sign="level_gap", model=model, sentence=sentence, numbers=numbers)


def correct_but_slow(model: str, scores: pl.DataFrame) -> Sign | None:
    """High Exec, low fast_1: it learned to compile, not to optimise."""
    rows = scores.filter(model=model).rows_by_key("metric", named=True, unique=True)
    if not {"exec", "fast_1"} <= rows.keys():
        return None
    right, fast = rows["exec"], rows["fast_1"]
    if right["value"] is None or right["value"] < SOLVES:
        return None
    if fast["value"] >= SLOW_SHARE * right["value"] or fast["upper"] >= right["lower"]:
        return None
    numbers = {"exec": right["value"], "fast_1": fast["value"]}
    speedup = rows.get("geometric_mean_speedup", {}).get("value")
    if speedup is not None:
        numbers["mean_speedup"] = speedup
    k = right["k"]
    sentence = (
        f"{model}: many correct kernels, few of them fast (Exec@{k}, fast_1@{k}). Check which"
        " operator they replace, and whether it took most of the time."
    )
    return Sign(sign="correct_but_slow", model=model, sentence=sentence, numbers=numbers)


def verbose(
    model: str, now: Traces | None, before: Traces | None, training: Traces | None
) -> Sign | None:
    """Verbose, self-doubting outputs: the training set held long, chaotic traces.

    Against the traces before training, a flag counts where it is MORE_POINTS more frequent and the
    Wilson intervals (samples as independent trials) do not meet, and length where the median is
    LONGER times as long; without them, a flag that at least MANY of the outputs have.
    """
    if now is None or not now.samples:
        return None
    bad = [name for name in BAD_TRACES if _stands_out(now, before, name)]
    ratio = None
    if before and before.median_tokens and now.median_tokens is not None:
        ratio = now.median_tokens / before.median_tokens
    longer = ratio is not None and ratio >= LONGER
    if not bad and not longer:
        return None
    numbers: dict[str, float] = {"outputs_count": now.samples}
    for name in bad:
        numbers[f"{name}_share"] = now.share(name)
        if before and before.samples:
            numbers[f"{name}_share_before"] = before.share(name)
    parts = [BAD_TRACES[name] for name in bad]
    if ratio is not None and longer:
        numbers["median_tokens_ratio"] = ratio
        parts.append("longer than before training")
    sentence = f"{model}: outputs are {', '.join(parts)}."
    held = [name for name in bad if training and training.samples and training.flagged.get(name)]
    if training and held:
        numbers |= {f"training_{name}_share": training.share(name) for name in held}
        sentence += (
            " The training set contains such traces and teaches this: filter them, or prefer"
            " concise ones."
        )
    return Sign(sign="verbose", model=model, sentence=sentence, numbers=numbers)


def cut_off(model: str, own: pl.DataFrame) -> Sign | None:
    """Answers that ran into the token limit count as failures, whatever they would have become."""
    cut = own.filter(pl.col("reason") == Reason.TRUNCATED.value).height
    if not own.height or cut / own.height < CUT_OFF:
        return None
    numbers = {"share": cut / own.height, "cut_off_count": cut, "answers_count": own.height}
    sentence = (
        f"{model}: answers ran into the token limit before any code and count as failures. Raise"
        " max_tokens, or read the scores as a lower bound."
    )
    return Sign(sign="cut_off", model=model, sentence=sentence, numbers=numbers)


def missed_bottleneck(model: str, own: pl.DataFrame) -> Sign | None:
    """Correct kernels that are not faster than PyTorch and spend less than half of their time in
    kernels of their own, as measured. Reported where the Wilson interval of that share is above
    MANY."""
    if not {"custom_kernel_time_share", "library_calls"} <= set(own.columns):
        return None
    if not isinstance(own.schema["timing"], pl.Struct):
        return None
    slow = own.filter(CORRECT, pl.col("timing").struct.field("speedup") <= 1)
    slow = slow.drop_nulls("custom_kernel_time_share")
    missed = slow.filter(pl.col("custom_kernel_time_share") < HALF)
    if slow.height < FEW_SLOW or wilson_interval(missed.height, slow.height).lower <= MANY:
        return None
    numbers = {
        "share": missed.height / slow.height,
        "missed_count": missed.height,
        "kernels_count": slow.height,
    }
    calls = Counter(call for row in missed["library_calls"].to_list() for call in set(row or ()))
    named = ", ".join(f"{call} {count}" for call, count in calls.most_common(3))
    sentence = (
        f"{model}: correct kernels that are not faster than PyTorch spend more than half of their"
        " time outside their own kernels."
    )
    if named:
        sentence += f" What they call most: {named}."
    return Sign(sign="missed_bottleneck", model=model, sentence=sentence, numbers=numbers)


def gap(first: Row, second: Row) -> tuple[float, Interval] | None:
    """`first` minus `second`, two scores over different tasks, with a 95 % interval; None where one
    has no value.

    Square-and-add of the two intervals (Newcombe 1998, method 10; for other intervals than
    Wilson's, Zou and Donner 2008).
    """
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


def _shown(name: str, value: float) -> str:
    if name.endswith("_count"):
        return f"{value:,.0f}"
    if name.endswith(("_ratio", "_speedup")):
        return f"{value:.2f}"
    return f"{100 * value:.1f} %"
