"""ConCuR's observations (arXiv 2510.07356): reasoning length against correctness and speedup, and
task difficulty.

Every estimate has an interval over tasks or says why not. Intervals of bins treat samples as
independent.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import polars as pl

from kernels_eval.records import Json, Record, Row
from tasks.arl import THIRDS, arl_thirds
from tasks.observe.samples import JudgedSamples, samples_of
from tasks.observe.statistics import odds_ratio, rank_correlation
from tasks.reporting.findings import Estimate, Finding
from tasks.reporting.text import interval, plural
from tasks.scores import (
    EXEC,
    FEWEST_TASKS,
    GEOMETRIC_MEAN,
    affordable_resamples,
    scores,
    wilson_intervals,
)

TOKENS, CORRECT, SPEEDUP = (pl.col(name) for name in ("reasoning_tokens", "correct", "speedup"))
BIN_TOKENS, LAST_BIN_TOKENS = 256, 20_000
"""Width of a bin of reasoning length, and from where one bin holds all: the paper's."""
FEWEST_FOR_THIRDS = len(THIRDS) * FEWEST_TASKS
"""Tasks below which a third is no statistic."""
FEW_TASKS = 30
"""Tasks with both outcomes, below which only large effects show."""


class Observations(Record):
    """Of the frame's `rows`, `samples` were judged and measured.

    `left_out` counts the others by reason; `truncated` those cut off by the token limit (None:
    unknown). `bins` have the paper's fixed width: from_tokens, to_tokens (None: open), samples,
    correct, accuracy, lower, upper. `thirds` of the tasks by ARL: third, from_arl, to_arl (tokens),
    tasks, samples, and exec (a share) and speedup (a geometric mean), each with bounds. `finding`
    is one sentence per observation, `cautions` their limits.
    """

    rows: int
    samples: int
    correct: int
    tasks: int
    generators: tuple[str, ...]
    left_out: dict[str, int]
    truncated: int | None
    bins: tuple[Json, ...]
    thirds: tuple[Json, ...]
    findings: tuple[Finding, ...]
    finding: tuple[str, ...] = ()
    cautions: tuple[str, ...] = ()

    def estimate(self, key: str) -> Estimate:
        """Return the finding with this key. Raises KeyError without one."""
        return {row.key: row.estimate for row in self.findings}[key]


def observe(frame: pl.DataFrame) -> Observations:
    """Return all observations of verdicts joined with their candidates.

    Columns are those of `samples.samples_of`. Raises UsageError for a missing column, and where no
    sample has a length and an outcome."""
    judged = samples_of(frame)
    data = judged.data
    tasks = data["task_id"].n_unique()
    thirds = thirds_of(data) if tasks >= FEWEST_FOR_THIRDS else ()
    found = Observations(
        rows=judged.rows,
        samples=data.height,
        correct=int(data["correct"].sum()),
        tasks=tasks,
        generators=tuple(name for name in data["generator"].unique().sort() if name),
        left_out=judged.left_out,
        truncated=int(data["truncated"].sum()) if judged.knows_truncation else None,
        bins=accuracy_by_length(data),
        thirds=thirds,
        findings=(*_findings(judged), *_findings_of_thirds(thirds)),
    )
    said = {"finding": tuple(_sentences(found)), "cautions": tuple(_cautions(found))}
    return found.model_copy(update=said)


# -- numbers ---------------------------------------------------------------------------------------


def accuracy_by_length(data: pl.DataFrame) -> tuple[Json, ...]:
    """Return the share correct per non-empty bin of length, with Wilson's interval (the paper's
    figure 2)."""
    last = -(-LAST_BIN_TOKENS // BIN_TOKENS)  # begins at a whole multiple of the width
    number = (TOKENS // BIN_TOKENS).clip(upper_bound=last).cast(pl.Int64)
    bins = data.group_by(bin=number).agg(samples=pl.len(), correct=CORRECT.sum()).sort("bin")
    lower, upper = wilson_intervals(bins["correct"].to_numpy(), bins["samples"].to_numpy())
    end = (pl.col("bin") + 1) * BIN_TOKENS
    table = bins.select(
        from_tokens=pl.col("bin") * BIN_TOKENS,
        to_tokens=pl.when(pl.col("bin") < last).then(end),
        samples="samples",
        correct="correct",
        accuracy=pl.col("correct") / pl.col("samples"),
        lower=pl.Series(lower),
        upper=pl.Series(upper),
    )
    return tuple(table.to_dicts())


def odds_within_tasks(data: pl.DataFrame) -> Estimate:
    """Return the odds ratio of being correct per standard deviation of the length's rank within its
    task (and token limit), which cancels effects of the task. Ranks are shares of the task's
    samples; ties have the mean rank."""
    some_correct = CORRECT.any().over("group")
    some_wrong = (~CORRECT).any().over("group")
    mixed = data.filter(some_correct & some_wrong)
    rank = TOKENS.rank("average") / pl.len()
    ranks = mixed.select("group", "correct", rank=(rank - rank.mean()).over("group"))
    values = ranks["rank"].to_numpy()
    freedom = max(1, ranks.height - ranks["group"].n_unique())
    deviation = float(np.sqrt(np.sum(values**2) / freedom)) or 1.0
    correct, group = ranks["correct"].to_numpy(), ranks["group"].to_numpy()
    return odds_ratio(values / deviation, correct, group)


def length_and_speedup(data: pl.DataFrame) -> Estimate:
    timed = data.drop_nulls("speedup")
    task = timed.select(pl.col("task_id").rank("dense")).to_series()
    values = (timed["reasoning_tokens"].to_numpy(), timed["speedup"].to_numpy())
    return rank_correlation(*values, task.to_numpy())


def thirds_of(data: pl.DataFrame) -> tuple[Json, ...]:
    """Return Exec and geometric-mean speedup of the thirds of the tasks by ARL, as scores are
    computed."""
    tasks = arl_thirds(data)
    if tasks.is_empty():
        return ()
    status = pl.when("correct").then(pl.lit("correct")).otherwise(pl.lit("incorrect"))
    verdicts = data.join(tasks, on="task_id").select(
        *("task_id", "third"),
        status=status,
        reason=pl.lit(None, pl.String),
        outputs_match=pl.lit(None, pl.Boolean),
        timing=pl.struct("speedup"),
    )
    resamples = affordable_resamples(tasks.height)
    scored = scores(verdicts, by=("third",), ps=(), resamples=resamples)
    spans = {
        row["third"]: row
        for row in tasks.group_by("third")
        .agg(from_arl=pl.col("arl").min(), to_arl=pl.col("arl").max())
        .iter_rows(named=True)
    }
    rows: list[Json] = []
    for third in THIRDS:
        own = {row["metric"]: row for row in scored.filter(third=third).iter_rows(named=True)}
        counts = {name: own[EXEC][name] for name in ("tasks", "samples")}
        rows.append(
            spans[third]
            | counts
            | _bounds("exec", own[EXEC])
            | _bounds("speedup", own[GEOMETRIC_MEAN])
        )
    return tuple(rows)


def _bounds(name: str, score: Row) -> Json:
    return {
        name: score["value"],
        f"{name}_lower": score["lower"],
        f"{name}_upper": score["upper"],
    }


# -- findings --------------------------------------------------------------------------------------


def _findings(judged: JudgedSamples) -> Iterator[Finding]:
    data = judged.data
    for outcome, part in (
        ("correct", data.filter("correct")),
        ("incorrect", data.filter(~CORRECT)),
    ):
        name = f"median tokens of {outcome} samples"
        key = f"median_{outcome}_tokens"
        yield Finding(key=key, name=name, estimate=_median(part), form=",.0f")
    yield Finding(
        key="odds_ratio_within_tasks",
        name="odds ratio of being correct, one standard deviation longer within the task",
        estimate=odds_within_tasks(data),
    )
    complete = data.filter(~pl.col("truncated"))
    if 0 < complete.height < data.height:
        yield Finding(
            key="odds_ratio_within_tasks_complete",
            name="the same without samples that the token limit cut off",
            estimate=odds_within_tasks(complete),
        )
    yield Finding(
        key="spearman_of_length_and_speedup",
        name="Spearman's rho of length and speedup",
        estimate=length_and_speedup(data),
        form=".3f",
    )


def _median(part: pl.DataFrame) -> Estimate:
    estimate = Estimate(n=part.height, tasks=part["task_id"].n_unique(), method="median")
    median = part["reasoning_tokens"].median()
    return estimate.found(median) if isinstance(median, float) else estimate.unknown("no sample")


def _findings_of_thirds(thirds: tuple[Json, ...]) -> Iterator[Finding]:
    for value, name, form in (
        ("exec", "Exec", ".1%"),
        ("speedup", "geometric-mean speedup", ".2x"),
    ):
        for row in thirds:
            estimate = Estimate(
                n=row["samples"], tasks=row["tasks"], method="score of the third's tasks"
            )
            known = [row[value], row[f"{value}_lower"], row[f"{value}_upper"]]
            yield Finding(
                key=f"{value}_{row['third']}_arl",
                name=f"{name} of the third of the tasks with {row['third']} ARL",
                estimate=estimate.unknown("no correct, timed sample")
                if known[0] is None
                else estimate.found(*known),
                form=form,
            )


def _sentences(found: Observations) -> Iterator[str]:
    odds = found.estimate("odds_ratio_within_tasks")
    yield (
        "Longer by one standard deviation within a task: odds of being correct times"
        f" {odds.shown('.2f')}."
        if odds.value is not None
        else f"Length and correctness within a task: no estimate ({odds.why_not})."
    )
    rho = found.estimate("spearman_of_length_and_speedup")
    yield (
        f"Length and speedup of {plural(rho.n, 'correct sample')}: Spearman {rho.shown('.2f')}."
        if rho.value is not None
        else f"Length and speedup: no estimate ({rho.why_not})."
    )
    if not found.thirds:
        few = f"fewer than {FEWEST_FOR_THIRDS}"
        yield f"{plural(found.tasks, 'task')}, {few}: not divided by average reasoning length."
        return
    execs = ", ".join(interval(row["exec"], form=".0%") for row in found.thirds)
    speedups = ", ".join(interval(row["speedup"], form=".2x") for row in found.thirds)
    yield (
        "Thirds of the tasks by average reasoning length (ARL), short to long:"
        f" Exec {execs}; geometric-mean speedup {speedups}."
    )


def _cautions(found: Observations) -> Iterator[str]:
    if found.left_out:
        counts = ", ".join(f"{count:,} {reason}" for reason, count in found.left_out.items())
        yield f"{found.rows:,} rows, left out: {counts}."
    if found.truncated is None:
        yield "No column says which samples the token limit cut off: they are long and wrong by it."
    elif found.truncated:
        yield (
            f"The token limit cut off {found.truncated:,} of {plural(found.samples, 'sample')}:"
            " they are long and wrong by it."
        )
    mixed = found.estimate("odds_ratio_within_tasks").tasks
    if mixed < FEW_TASKS:
        yield f"{mixed} of {found.tasks:,} tasks have both outcomes: only large effects show."
    if len(found.generators) > 1:
        yield f"Samples of {len(found.generators)} generators, whose tokens differ, are pooled."
    yield "Association, not cause: a sample may be long because it struggles."
