"""Failure signatures of trained models, found in numbers: what to look at first.

Guarantees: a signature is reported only where the numbers show it beyond their intervals, and holds
these numbers; pure functions. Does not guarantee the cause that its sentence names: it is the one
that the ConCuR paper (arXiv 2510.07356) and its ablations point to. Stages do not import each
other, so what the training set holds and how traces read is passed in as numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import polars as pl
from pydantic import NonNegativeFloat, NonNegativeInt

from kernels_eval.records import Reason, Record
from kernels_eval.tables import table_beside
from tasks.benchmark.breakdown import GroupRow, gap
from tasks.benchmark.metrics import wilson_interval
from tasks.benchmark.replaced import called_operators, replaced_share
from tasks.benchmark.samples import Track
from tasks.benchmark.scoring import ScoreRow
from tasks.tables import CORRECT

Sign = Literal[
    "level_gap", "correct_but_slow", "verbose", "cut_off", "missed_bottleneck", "replaced"
]
WORDS: Mapping[str, Mapping[str, str]] = table_beside(__file__, "templates/diagnosis.toml")

# From where on a number is worth a row: our choices. The paper says which signs there are, not how
# large they must be.
LEVEL_POINTS = 0.10  # Exec of level 2 minus that of level 1
# share of single-operator samples below which a lack of them is named as the cause
FEW_SINGLE = 0.20
SLOW_SHARE = 0.5  # fast_1 below this share of Exec
SOLVES = 0.2  # below this Exec there is too little that is correct to ask how fast it is
MORE_POINTS = 0.05  # share of flagged outputs above the baseline's
MANY = 0.2  # share of flagged outputs, where there is no baseline
LONGER = 1.5  # median length over the baseline's
CUT_OFF = 0.1  # share of answers that the token limit ended
FEW_READ = 5  # correct answers below which nothing is said of what they replace
# of the time: what takes more is the bottleneck, and a kernel that takes less did not replace it
HALF = 0.5
# correct kernels that are not faster than PyTorch: with fewer there is no pattern to speak of
FEW_SLOW = 5

TIME_COLUMNS = ("status", "timing", "task_id", "custom_kernel_time_share", "library_calls")

BAD_TRACES = {
    "self_doubting": "self-doubting",
    "repetitive": "repetitive",
    "ends_in_loop": "ending in a loop",
    "mixed_language": "mixing languages",
}


class Diagnosis(Record):
    """One thing to look at: `sentence` says what and why, `numbers` show it.

    Names of numbers tell their unit: "..._ratio" and "..._speedup" are ratios, "..._count" counts,
    the others shares in [0, 1] (or differences of them).
    """

    sign: Sign
    model: str
    sentence: str
    numbers: dict[str, float] = {}

    @property
    def title(self) -> str:
        return WORDS[self.sign]["title"]

    def shown(self) -> str:
        """Return the numbers with their names, for a table."""
        return ", ".join(
            f"{name.replace('_', ' ')} {_shown(name, value)}"
            for name, value in self.numbers.items()
        )


class Traces(Record):
    """How reasoning traces read: counts of flags as tasks.curation.flags gives them, of a model's
    outputs or of a training set."""

    samples: NonNegativeInt
    flagged: dict[str, int] = {}
    median_tokens: NonNegativeFloat | None = None

    def share(self, flag: str) -> float:
        return self.flagged.get(flag, 0) / self.samples


@dataclass(frozen=True)
class Evidence:
    """What `diagnose` may look at beside the scores; what is missing is not looked at.

    Attributes:
        groups: from `score_groups`
        speedups: from `distribution`
        traces: model -> how its outputs read
        training: the same of the training set
        single_operator: its samples on single operators, and all of them
        verdicts: those scored (columns model and reason; with TIME_COLUMNS, what slow kernels
            replaced is looked at too; with code, what correct answers replace)
        time_by_operator: task_id -> shares of its reference's time (tasks.workload); without it,
            kernels' own shares of the time are taken
        baseline: the model before training, for whose habits training is not blamed
    """

    groups: Sequence[GroupRow] = ()
    speedups: Sequence[ScoreRow] = ()
    traces: Mapping[str, Traces] = field(default_factory=dict)
    training: Traces | None = None
    single_operator: tuple[int, int] | None = None
    verdicts: pl.DataFrame | None = None
    time_by_operator: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    baseline: str | None = None
    track: Track = "custom_kernel"


def diagnose(scores: Sequence[ScoreRow], evidence: Evidence | None = None) -> tuple[Diagnosis, ...]:
    """Return every signature that the numbers show, models in the order of `scores`.

    Scores are read at the smallest k.
    """
    evidence = evidence or Evidence()
    k = min((row.k for row in scores if row.k is not None), default=None)
    found: list[Diagnosis | None] = []
    for model in dict.fromkeys(row.model for row in scores):
        if k is not None:
            found.append(level_gap(model, k, evidence))
            found.append(correct_but_slow(model, k, scores, evidence))
        found.append(verbose(model, evidence))
        if evidence.verdicts is not None:
            own = evidence.verdicts.filter(pl.col("model") == model)
            found.append(missed_bottleneck(model, own, evidence.time_by_operator))
            found.append(cut_off(model, own))
            found.append(replaced(model, own, evidence.time_by_operator))
    return tuple(each for each in found if each is not None)


def level_gap(model: str, k: int, evidence: Evidence) -> Diagnosis | None:
    """Level 2 (several operators) well above level 1 (single operators).

    Single-operator tasks are missing from the training set.
    """
    wanted = (model, "level", "exec", k, evidence.track, "concur")
    by_level = {
        row.group: row
        for row in evidence.groups
        if (row.model, row.by, row.metric, row.k, row.track, row.rule) == wanted
    }
    found = gap(by_level["2"], by_level["1"]) if {"1", "2"} <= by_level.keys() else None
    if found is None or found[0] < LEVEL_POINTS or found[1].lower <= 0:
        return None
    numbers, more = {"difference": found[0], **found[1]._asdict()}, []
    if model != evidence.baseline and evidence.single_operator and evidence.single_operator[1]:
        single, samples = evidence.single_operator
        numbers |= {
            "single_operator_share": single / samples,
            "single_operator_count": single,
            "training_count": samples,
        }
        more = ["few_single" if single / samples < FEW_SINGLE else "enough_single"]
    return _diagnosed("level_gap", model, numbers, *more, k=k)


def correct_but_slow(
    model: str, k: int, scores: Sequence[ScoreRow], evidence: Evidence
) -> Diagnosis | None:
    """High Exec, low fast_1: it learned to compile, not to optimise."""
    wanted = (model, k, evidence.track, "concur")
    found = {row.metric: row for row in scores if (row.model, row.k, row.track, row.rule) == wanted}
    right, fast = found.get("exec"), found.get("fast_1")
    if right is None or fast is None or right.value is None or fast.value is None:
        return None
    slow = fast.value < SLOW_SHARE * right.value and (fast.upper or 0.0) < (right.lower or 0.0)
    if right.value < SOLVES or not slow:
        return None
    numbers = {"exec": right.value, "fast_1": fast.value}
    for row in evidence.speedups:
        if (row.model, row.track, row.metric) == (model, evidence.track, "speedup_q0.5"):
            median = {"median": row.value, "lower": row.lower, "upper": row.upper}
            numbers |= {f"{name}_speedup": n for name, n in median.items() if n is not None}
    return _diagnosed("correct_but_slow", model, numbers, k=k)


def verbose(model: str, evidence: Evidence) -> Diagnosis | None:
    """Verbose, self-doubting outputs: the training set held long, chaotic traces.

    Against the baseline's traces a flag counts where it is MORE_POINTS more frequent and the Wilson
    intervals (samples as independent trials) do not meet, and length where the median is LONGER
    times as long; without them, a flag that at least MANY of the outputs have.
    """
    now = evidence.traces.get(model)
    if now is None or not now.samples:
        return None
    trained = model != evidence.baseline
    before = evidence.traces.get(evidence.baseline or "") if trained else None
    training = evidence.training if trained else None
    bad = [name for name in BAD_TRACES if _stands_out(now, before, name)]
    longer = None
    if before and before.median_tokens and now.median_tokens is not None:
        longer = now.median_tokens / before.median_tokens
    if not bad and (longer is None or longer < LONGER):
        return None
    numbers: dict[str, float] = {"outputs_count": now.samples}
    for name in bad:
        numbers[f"{name}_share"] = now.share(name)
        if before and before.samples:
            numbers[f"{name}_share_before"] = before.share(name)
    parts = [BAD_TRACES[name] for name in bad]
    if longer is not None and longer >= LONGER:
        numbers["median_tokens_ratio"] = longer
        parts.append(f"longer than {evidence.baseline}'s")
    held = [name for name in bad if training and training.samples and training.flagged.get(name)]
    if training:
        numbers |= {f"training_{name}_share": training.share(name) for name in held}
    return _diagnosed(
        "verbose", model, numbers, *(["taught"] if held else []), how=", ".join(parts)
    )


def cut_off(model: str, own: pl.DataFrame) -> Diagnosis | None:
    """Answers that ran into the token limit count as failures, whatever they would have become."""
    cut = own.filter(pl.col("reason") == Reason.TRUNCATED.value).height
    if not own.height or cut / own.height < CUT_OFF:
        return None
    numbers = {"share": cut / own.height, "cut_off_count": cut, "answers_count": own.height}
    return _diagnosed("cut_off", model, numbers)


def replaced(
    model: str, own: pl.DataFrame, time_by_operator: Mapping[str, Mapping[str, float]]
) -> Diagnosis | None:
    """Which operators correct answers replace, against where their references spend their time.

    Read from the source (tasks.benchmark.replaced says what that misses). Wilson's interval takes
    answers as independent trials. None where fewer than FEW_READ correct answers could be read.
    """
    if "code" not in own.columns or not time_by_operator:
        return None
    own = own.filter(CORRECT, pl.col("code").is_not_null())
    shares, hits, largest = [], 0, []
    for task_id, code in own.select("task_id", "code").iter_rows():
        spent, called = time_by_operator.get(task_id), called_operators(code)
        if not spent or called is None:
            continue
        share, main = replaced_share(spent, called)
        shares.append(share)
        hits += main
        largest.append(max(spent.values()))
    answers = len(shares)
    if answers < FEW_READ:
        return None
    lower, upper = wilson_interval(hits, answers)
    numbers = {
        "share": hits / answers,
        "lower": lower,
        "upper": upper,
        "answers_count": answers,
        "main_operator_share": sum(largest) / answers,
        "replaced_time_share": sum(shares) / answers,
    }
    return _diagnosed("replaced", model, numbers)


def missed_bottleneck(
    model: str, own: pl.DataFrame, time_by_operator: Mapping[str, Mapping[str, float]]
) -> Diagnosis | None:
    """Correct kernels that are not faster than PyTorch, since torch still does what takes the time.

    With `time_by_operator`: the operator that takes more than half of the reference's time is among
    the candidate's `library_calls`. Without: the candidate's own kernels take less than half of its
    time. Reported where the Wilson interval of that share is above MANY.
    """
    if not set(TIME_COLUMNS) <= set(own.columns):
        return None
    slow = own.filter(CORRECT, pl.col("timing").struct.field("speedup") <= 1)
    main = {
        task: max(shares, key=lambda name: shares[name])
        for task, shares in time_by_operator.items()
        if max(shares.values(), default=0.0) > HALF
    }
    if main:
        rows = [
            (main[task], {_bare(call) for call in calls or ()})
            for task, calls in slow.select("task_id", "library_calls").iter_rows()
            if task in main
        ]
        left = Counter(operator for operator, calls in rows if _bare(operator) in calls)
        of, count = len(rows), left.total()
    else:
        left = Counter[str]()
        shares = slow["custom_kernel_time_share"].drop_nulls()
        of, count = len(shares), int((shares < HALF).sum())
    if of < FEW_SLOW or wilson_interval(count, of).lower <= MANY:
        return None
    numbers = {"kernels": of, "share": count / of, "missed_count": count}
    named = ", ".join(f"{operator} {count}" for operator, count in left.most_common(3))
    how = "by_profile" if main else "by_share"
    return _diagnosed("missed_bottleneck", model, numbers, how, named=named)


def _diagnosed(
    sign: Sign, model: str, numbers: Mapping[str, float], *more: str, **facts: object
) -> Diagnosis:
    """The sign with its sentences, those named in `more` last."""
    said = " ".join(WORDS[sign][name] for name in ("says", *more)).format(**facts)
    return Diagnosis(sign=sign, model=model, sentence=f"{model}: {said}", numbers=dict(numbers))


def _bare(operator: str) -> str:
    """aten::mm and torch.mm are one operator."""
    return operator.rpartition("::")[2].rpartition(".")[2]


def _stands_out(now: Traces, before: Traces | None, name: str) -> bool:
    if before is None or not before.samples:
        return now.flagged.get(name, 0) >= MANY * now.samples
    ours, theirs = (
        wilson_interval(traces.flagged.get(name, 0), traces.samples) for traces in (now, before)
    )
    more = now.share(name) - before.share(name)
    return more >= MORE_POINTS and ours.lower > theirs.upper


def _shown(name: str, value: float) -> str:
    if name.endswith(("_count", "kernels")):
        return f"{value:,.0f}"
    if name.endswith(("_ratio", "_speedup")):
        return f"{value:.2f}"
    return f"{100 * value:.1f} %"
