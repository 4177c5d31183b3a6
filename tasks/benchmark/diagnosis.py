"""Failure signatures of trained models, found in numbers and said in words: what to look at first.

Guarantees: a sentence is made only where the numbers show it beyond their intervals, and holds
these numbers; pure functions. Does not guarantee the cause that a sentence names: it is the one
that the ConCuR paper (arXiv 2510.07356) and its ablations point to. Stages do not know each other,
so what the training set holds and how traces read is passed in as numbers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from kernels_eval.records import Reason, Record
from tasks.benchmark.breakdown import GroupRow, gap
from tasks.benchmark.metrics import wilson_interval
from tasks.benchmark.replaced import called_operators, replaced_share
from tasks.benchmark.samples import Track
from tasks.benchmark.scoring import ScoreRow

if TYPE_CHECKING:
    import polars as pl

Sign = Literal[
    "level_gap", "correct_but_slow", "verbose", "cut_off", "missed_bottleneck", "replaced"
]

# From where on a number is worth a sentence: our choices. The paper says which signs there are, not
# how large they must be.
LEVEL_POINTS = 0.10  # Exec of level 2 minus that of level 1
FEW_SINGLE = (
    0.20  # share of single-operator samples below which a lack of them is named as the cause
)
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
    "self_doubting": "are self-doubting",
    "repetitive": "repeat themselves",
    "ends_in_loop": "end in a loop",
    "mixed_language": "mix languages",
}


class Finding(Record):
    """One thing to look at. `numbers` are those of the sentence; shares are in [0, 1]."""

    sign: Sign
    model: str
    sentence: str
    numbers: dict[str, float] = {}


class Traces(Record):
    """How reasoning traces read: counts of flags as tasks.curation.quality gives them, of a model's
    outputs or of a training set."""

    samples: int = Field(ge=0)
    flagged: dict[str, int] = {}
    median_tokens: float | None = Field(default=None, ge=0)


class Bottleneck(Record):
    """The operator that takes most of a reference's time, named as in a verdict's `library_calls`,
    and its share of that time."""

    operator: str
    share: float = Field(ge=0, le=1)


def diagnose(
    scores: Sequence[ScoreRow],
    *,
    groups: Sequence[GroupRow] = (),
    speedups: Sequence[ScoreRow] = (),
    traces: Mapping[str, Traces] | None = None,
    training: Traces | None = None,
    single_operator: tuple[int, int] | None = None,
    verdicts: pl.DataFrame | None = None,
    bottlenecks: Mapping[str, Bottleneck] | None = None,
    baseline: str | None = None,
    track: Track = "custom_kernel",
    time_by_operator: Mapping[str, Mapping[str, float]] | None = None,
) -> tuple[Finding, ...]:
    """Every signature of every model that the numbers show, models in the order of `scores`, at the
    smallest k.

    `groups` come from `score_groups`, `speedups` from `distribution`. `traces` maps a model to how
    its outputs read, `training` is the same of the training set, and `single_operator` counts its
    samples on single operators, and all of them. `verdicts` are those scored (columns model and
    reason; with TIME_COLUMNS, what slow kernels replaced is looked at too). `bottlenecks` maps
    task_id to what a profiler saw of the reference; without it, kernels' own shares of the time are
    taken. `time_by_operator` maps a task to the shares of its reference's time (tasks.workload);
    `verdicts` needs the columns task_id, status and code then. Training is only blamed for what a
    model that is not `baseline` does.
    """
    ks = [row.k for row in scores if row.k is not None]
    found: list[Finding | None] = []
    for model in dict.fromkeys(row.model for row in scores):
        trained = model != baseline
        if ks:
            found.append(
                level_gap(
                    groups,
                    model=model,
                    k=min(ks),
                    track=track,
                    single_operator=single_operator if trained else None,
                )
            )
            found.append(correct_but_slow(scores, speedups, model=model, k=min(ks), track=track))
        if traces and model in traces:
            before = traces.get(baseline) if baseline and trained else None
            found.append(
                verbose(
                    model,
                    traces[model],
                    before=before,
                    before_name=baseline or "",
                    training=training if trained else None,
                )
            )
        if verdicts is not None:
            found.append(missed_bottleneck(model, verdicts, bottlenecks))
            found.append(cut_off(model, verdicts))
        if verdicts is not None and time_by_operator:
            found.append(replaced(model, verdicts, time_by_operator))
    return tuple(finding for finding in found if finding is not None)


def level_gap(
    groups: Sequence[GroupRow],
    *,
    model: str,
    k: int,
    track: Track = "custom_kernel",
    single_operator: tuple[int, int] | None = None,
) -> Finding | None:
    """Level 2 (several operators) well above level 1 (single operators): single-operator tasks are
    missing from the training set."""
    wanted = {
        "model": model,
        "by": "level",
        "metric": "exec",
        "k": k,
        "track": track,
        "rule": "concur",
    }
    by_level = {
        row.group: row
        for row in groups
        if all(getattr(row, name) == value for name, value in wanted.items())
    }
    if not {"1", "2"} <= by_level.keys():
        return None
    found = gap(by_level["2"], by_level["1"])
    if found is None or found[0] < LEVEL_POINTS or found[1].lower <= 0:
        return None
    value, (lower, upper) = found
    numbers = {"difference": value, "lower": lower, "upper": upper}
    said = (
        f"{model}: level 2 is {_points(value)} points above level 1 (95 % interval {_points(lower)}"
        f" to {_points(upper)}, Exec@{k})"
    )
    if single_operator is None or not single_operator[1]:
        return Finding(sign="level_gap", model=model, sentence=f"{said}.", numbers=numbers)
    share = single_operator[0] / single_operator[1]
    of = (
        f"the training set holds {_percent(share)} single-operator samples ({single_operator[0]:,}"
        f" of {single_operator[1]:,})"
    )
    if share < FEW_SINGLE:
        said = f"{said}: {of}. Add single-operator tasks, as the third criterion of the paper does."
    else:
        said = f"{said}, though {of}: a lack of them is not the likely cause."
    return Finding(
        sign="level_gap",
        model=model,
        sentence=said,
        numbers=numbers | {"single_operator_share": share},
    )


def correct_but_slow(
    scores: Sequence[ScoreRow],
    speedups: Sequence[ScoreRow] = (),
    *,
    model: str,
    k: int,
    track: Track = "custom_kernel",
) -> Finding | None:
    """High Exec, low fast_1: it learned to compile, not to optimise."""
    found = {
        row.metric: row
        for row in scores
        if (row.model, row.k, row.track, row.rule) == (model, k, track, "concur")
    }
    right, fast = found.get("exec"), found.get("fast_1")
    if right is None or fast is None or right.value is None or fast.value is None:
        return None
    if (
        right.value < SOLVES
        or fast.value >= SLOW_SHARE * right.value
        or (fast.upper or 0.0) >= (right.lower or 0.0)
    ):
        return None
    numbers = {"exec": right.value, "fast_1": fast.value}
    said = f"{model}: Exec@{k} is {_percent(right.value)}, but fast_1@{k} {_percent(fast.value)}"
    median = next(
        (
            row
            for row in speedups
            if (row.model, row.track, row.metric) == (model, track, "speedup_q0.5")
        ),
        None,
    )
    if median is not None and median.value is not None:
        numbers["median_speedup"] = median.value
        bounds = (
            ""
            if median.lower is None or median.upper is None
            else f" ({median.lower:.2f} to {median.upper:.2f})"
        )
        said += f", and the median correct kernel runs at {median.value:.2f}x of PyTorch{bounds}"
    said += (
        ". It writes kernels that compile rather than kernels that are fast: see which operator"
        " they replace, and whether it took the time."
    )
    return Finding(sign="correct_but_slow", model=model, sentence=said, numbers=numbers)


def verbose(
    model: str,
    now: Traces,
    *,
    before: Traces | None = None,
    before_name: str = "",
    training: Traces | None = None,
) -> Finding | None:
    """Verbose, self-doubting outputs: the training set held long, chaotic traces.

    Against `before` a flag counts where it is MORE_POINTS more frequent and the Wilson intervals
    (samples as independent trials) do not meet, and length where the median is LONGER times as
    long; without `before`, a flag that at least MANY of the outputs have.
    """
    if not now.samples:
        return None
    bad = [name for name in BAD_TRACES if _stands_out(now, before, name)]
    longer = _ratio(now, before)
    if not bad and (longer is None or longer < LONGER):
        return None
    numbers = {f"{name}_share": _share(now, name) for name in bad}
    parts = [
        f"{_percent(_share(now, name))} {BAD_TRACES[name]}{_was(before, before_name, name)}"
        for name in bad
    ]
    if longer is not None and longer >= LONGER:
        numbers["median_tokens_ratio"] = longer
        parts.append(f"the median one is {longer:.1f} times as long as {before_name}'s")
    said = f"{model}: of {now.samples:,} outputs, {', '.join(parts)}."
    held = [name for name in bad if training and training.samples and training.flagged.get(name)]
    if training and held:
        shares = ", ".join(
            f"{_percent(_share(training, name))} {BAD_TRACES[name]}" for name in held
        )
        said += (
            f" The training set's own traces: {shares}. A set of long, chaotic traces teaches this;"
            " filter them or prefer concise ones."
        )
        numbers |= {f"training_{name}_share": _share(training, name) for name in held}
    return Finding(sign="verbose", model=model, sentence=said, numbers=numbers)


def cut_off(model: str, verdicts: pl.DataFrame) -> Finding | None:
    """Answers that ran into the token limit count as failures, whatever they would have become."""
    import polars as pl

    own = verdicts.filter(pl.col("model") == model)
    cut = own.filter(pl.col("reason") == Reason.TRUNCATED.value).height
    if not own.height or cut / own.height < CUT_OFF:
        return None
    share = cut / own.height
    said = (
        f"{model}: {_percent(share)} of {own.height:,} answers ran into the token limit before any"
        f" code ({cut:,}). They count as failures: raise max_tokens, or read the scores as a lower"
        " bound."
    )
    return Finding(sign="cut_off", model=model, sentence=said, numbers={"share": share})


def replaced(
    model: str, verdicts: pl.DataFrame, time_by_operator: Mapping[str, Mapping[str, float]]
) -> Finding | None:
    """Which operators correct answers replace, against where their references spend their time.

    Read from the source (tasks.benchmark.replaced says what that misses). Wilson's interval takes
    answers as independent trials. None where fewer than FEW_READ correct answers could be read.
    """
    import polars as pl

    if "code" not in verdicts.columns:
        return None
    own = verdicts.filter(
        pl.col("model") == model, pl.col("status") == "correct", pl.col("code").is_not_null()
    )
    shares, hits, largest = [], 0, []
    for task_id, code in own.select("task_id", "code").iter_rows():
        spent, called = time_by_operator.get(task_id), called_operators(code)
        if not spent or called is None:
            continue
        share, main = replaced_share(spent, called)
        shares.append(share)
        hits += main
        largest.append(max(spent.values()))
    if len(shares) < FEW_READ:
        return None
    part, (lower, upper) = hits / len(shares), wilson_interval(hits, len(shares))
    most, gone = sum(largest) / len(largest), sum(shares) / len(shares)
    said = (
        f"{model}: {_percent(part)} of {len(shares):,} correct answers (95 % interval"
        f" {_percent(lower)} to {_percent(upper)}) replace the operator in which the reference"
        f" spends most of its time ({_percent(most)} of it on average); what they replace takes"
        f" {_percent(gone)} of the reference's time. Read from the source, not from a run."
    )
    numbers = {
        "share": part,
        "lower": lower,
        "upper": upper,
        "main_operator_share": most,
        "replaced_time_share": gone,
    }
    return Finding(sign="replaced", model=model, sentence=said, numbers=numbers)


def missed_bottleneck(
    model: str, verdicts: pl.DataFrame, bottlenecks: Mapping[str, Bottleneck] | None = None
) -> Finding | None:
    """Correct kernels that are not faster than PyTorch, since what takes the time was left to
    torch.

    With `bottlenecks`: the operator that takes more than half of the reference's time is among the
    candidate's `library_calls`. Without: the candidate's own kernels take less than half of its
    time. Said where the Wilson interval of that share is above MANY.
    """
    import polars as pl

    if not set(TIME_COLUMNS) <= set(verdicts.columns):
        return None
    slow = verdicts.filter(
        pl.col("model") == model,
        pl.col("status") == "correct",
        pl.col("timing").struct.field("speedup") <= 1,
    )
    known = bottlenecks or {}
    main = {task: found for task, found in known.items() if found.share > HALF}
    if main:
        rows = [
            (main[task].operator, calls or ())
            for task, calls in slow.select("task_id", "library_calls").iter_rows()
            if task in main
        ]
        left = [
            operator
            for operator, calls in rows
            if _bare(operator) in {_bare(call) for call in calls}
        ]
        named = ", ".join(f"{operator} {count}" for operator, count in Counter(left).most_common(3))
        said = f"leave the operator that takes most of the reference's time to torch ({named})"
        of, count = len(rows), len(left)
    else:
        shares = slow["custom_kernel_time_share"].drop_nulls()
        of, count = len(shares), int((shares < HALF).sum())
        said = "spend more than half of their time outside of their own kernels"
    if of < FEW_SLOW or wilson_interval(count, of).lower <= MANY:
        return None
    sentence = (
        f"{model}: of {of:,} correct kernels that are not faster than PyTorch, {count:,}"
        f" ({_percent(count / of)}) {said}: what they replaced is not what takes the time."
    )
    return Finding(
        sign="missed_bottleneck",
        model=model,
        sentence=sentence,
        numbers={"kernels": of, "share": count / of},
    )


def _bare(operator: str) -> str:
    """aten::mm and torch.mm are one operator."""
    return operator.rpartition("::")[2].rpartition(".")[2]


def _stands_out(now: Traces, before: Traces | None, name: str) -> bool:
    count = now.flagged.get(name, 0)
    if before is None or not before.samples:
        return count >= MANY * now.samples
    more = _share(now, name) - _share(before, name)
    ours, theirs = (
        wilson_interval(traces.flagged.get(name, 0), traces.samples) for traces in (now, before)
    )
    return more >= MORE_POINTS and ours.lower > theirs.upper


def _ratio(now: Traces, before: Traces | None) -> float | None:
    if before is None or not before.median_tokens or now.median_tokens is None:
        return None
    return now.median_tokens / before.median_tokens


def _was(before: Traces | None, name: str, flag: str) -> str:
    return (
        f" ({name}: {_percent(_share(before, flag))})"
        if before is not None and before.samples
        else ""
    )


def _share(traces: Traces, name: str) -> float:
    return traces.flagged.get(name, 0) / traces.samples


def _percent(share: float) -> str:
    return f"{100 * share:.1f} %" if 0 < share < 0.01 else f"{100 * share:.0f} %"


def _points(share: float) -> str:
    return f"{100 * share:.0f}"
