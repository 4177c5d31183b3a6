"""Numbers of a comparison: scores with intervals, spread of seeds, and paired differences.

Guarantees: seeds are pooled within tasks, so a task counts once; p values of one question are
corrected together. Intervals leave out the variation between training runs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.grouping import grouped
from kernels_eval.records import Json, Row
from tasks.benchmark.comparing import corrected, paired_differences
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.benchmark.remarks import remarks
from tasks.benchmark.shown import FAST, HEADLINE_METRICS, OWN_TRACK, metrics_of
from tasks.benchmark.stage import Answers
from tasks.scores import EXEC, RESAMPLES, TRACKS, excluded_tasks, scores, without_fig_leaves

READ = (
    *("candidate_id", "task_id", "status", "level", "reason", "outputs_match", "timing"),
    *("device", "custom_kernel_time_share"),
)
TRAINED = ("rows", "loss_last", "held_out_loss_last")
"""What a branch says of its training."""


class Arm(NamedTuple):
    """A strategy at one size, with its finished branches, one per seed. `name` is its model name in
    scores and differences."""

    name: str
    strategy: str
    size: int | None
    branches: tuple[Branch, ...]


@dataclass(frozen=True)
class Compared:
    """Every number of a comparison.

    `strategies` is its one table, best Exec@1 first; `references` that of other models. `baseline`
    is a strategy, `untuned_model` a reference's name. `scores` are those of `tasks.scores.scores`;
    `scores_by_seed` has a row per branch, track and metric at pass@1; differences are
    `paired_differences` with the columns of `with_seed_tests`. `remarks` say what scoring left out.
    """

    ablation: Ablation
    strategies: tuple[Json, ...] = ()
    references: tuple[Json, ...] = ()
    baseline: str | None = None
    untuned_model: str | None = None
    scores: tuple[Row, ...] = ()
    scores_by_seed: tuple[Row, ...] = ()
    differences: tuple[Row, ...] = ()
    against_untuned: tuple[Row, ...] = ()
    tasks: int = 0
    remarks: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()


def compared(ablation: Ablation, *, resamples: int = RESAMPLES) -> Compared:
    """An ablation's numbers, from its branches' verdicts; none without a finished branch.

    Raises UsageError for verdicts that are missing or refused, and a baseline that is no strategy.
    """
    known = {branch.strategy for branch in ablation.branches}
    if ablation.baseline is not None and ablation.baseline not in known:
        raise UsageError(
            f"the baseline {ablation.baseline!r} is no strategy of the ablation",
            f"name one of: {', '.join(sorted(known)) or 'none'}",
        )
    arms = _arms(ablation)
    if not arms:
        return Compared(ablation=ablation)
    against = _baseline(ablation, arms)
    taken = {arm.name for arm in arms}
    references = {_distinct(answers.model, taken): answers for answers in ablation.references}
    frame = without_fig_leaves(_frame(arms, references), ablation.min_kernel_share)
    rows = pl.concat(scores(frame, track=track, resamples=resamples) for track in TRACKS)
    pairs = [(_opponent(arm, against).name, arm.name) for arm in arms if arm not in against]
    base = next((name for name, answers in references.items() if answers.model == "base"), None)
    with_base = [(base, arm.name) for arm in arms] if base else []
    seeds = _seeds(frame, arms)
    differences, against_base = (
        with_seed_tests(paired_differences(frame, pairs=each, resamples=resamples), seeds)
        for each in (pairs, with_base)
    )
    own = frame.filter(pl.col("arm").is_not_null(), ~pl.col("task_id").is_in(excluded_tasks(frame)))
    strategies, others = _table(arms, references, rows, seeds, differences)
    return Compared(
        ablation=ablation,
        strategies=strategies,
        references=others,
        baseline=against[-1].strategy,
        untuned_model=base,
        scores=tuple(rows.to_dicts()),
        scores_by_seed=tuple(seeds.to_dicts()),
        differences=tuple(differences.to_dicts()),
        against_untuned=tuple(against_base.to_dicts()),
        tasks=own["task_id"].n_unique(),
        remarks=tuple(remarks(frame)),
        devices=tuple(sorted({name for name in frame["device"].unique() if name})),
    )


def _table(
    arms: Sequence[Arm],
    references: Iterable[str],
    rows: pl.DataFrame,
    seeds: pl.DataFrame,
    differences: pl.DataFrame,
) -> tuple[tuple[Json, ...], tuple[Json, ...]]:
    headline = rows.filter(pl.col("metric").is_in(HEADLINE_METRICS), track=OWN_TRACK)
    scored = headline.partition_by("model", as_dict=True)
    own = {"metric": EXEC, "track": OWN_TRACK}
    by_seed = seeds.filter(**own)
    found = differences.filter(**own).rows_by_key("model", named=True, unique=True)

    def row_of(name: str, arm: Arm | None) -> Json:
        difference = found.get(name, {})
        values = by_seed.filter(arm=name)["value"]
        return {
            "name": name,
            "strategy": arm.strategy if arm else None,
            "size": arm.size if arm else None,
            "seeds": len(arm.branches) if arm else None,
            **{column: _mean(arm, column) for column in TRAINED},
            "tasks": scored[name,]["tasks"][0],
            **metrics_of(scored[name,].iter_rows(named=True)),
            "exec_by_seed_percent": ", ".join(f"{100 * value:.1f}" for value in values),
            "difference": difference.get("difference"),
            "difference_lower": difference.get("lower"),
            "difference_upper": difference.get("upper"),
            **{name: difference.get(name) for name in ("p_holm", "p_seeds_holm", "baseline")},
        }

    strategies = [row_of(arm.name, arm) for arm in arms]
    strategies.sort(key=lambda row: (-(row["exec_at_1"] or 0.0), -(row["fast_1_at_1"] or 0.0)))
    # one that answered none of the tasks has no scores
    others = [row_of(name, None) for name in references if (name,) in scored]
    return tuple(strategies), tuple(others)


def _mean(arm: Arm | None, column: str) -> float | None:
    values = [getattr(branch, column) for branch in arm.branches] if arm else []
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def with_seed_tests(rows: pl.DataFrame, seeds: pl.DataFrame) -> pl.DataFrame:
    """Differences with a test against the seeds' spread, pooled because one strategy has few seeds.

    `spread` is a share's standard deviation over a strategy's seeds, estimated from all that can
    vary; `p_seeds` is of a two-sided t test, `p_seeds_holm` corrected over strategies. Null where
    not estimable.
    """
    tests = [_seed_test(row, seeds) for row in rows.iter_rows(named=True)]
    schema = {"spread": pl.Float64, "freedom": pl.Int64, "p_seeds": pl.Float64}
    found = pl.concat([rows, pl.DataFrame(tests, schema, orient="row")], how="horizontal")
    return corrected(found, "p_seeds", "track", "metric")


def _seed_test(row: Row, seeds: pl.DataFrame) -> tuple[float | None, int, float | None]:
    from scipy.stats import t

    own = seeds.filter(track=row["track"], metric=row["metric"])
    groups: dict[str, list[float]] = dict(
        own.group_by("arm", maintain_order=True).agg("value").iter_rows()
    )
    varying = [each for each in groups.values() if len(each) > 1 and 0 < statistics.fmean(each) < 1]
    freedom = sum(len(each) - 1 for each in varying)
    squares = sum((value - statistics.fmean(each)) ** 2 for each in varying for value in each)
    if not squares:
        return None, freedom, None
    spread = math.sqrt(squares / freedom)
    counts = [len(groups[name]) for name in (row["model"], row["baseline"]) if name in groups]
    error = spread * math.sqrt(sum(1 / count for count in counts))
    return spread, freedom, float(2 * t.sf(abs(row["difference"]) / error, freedom))


def _arms(ablation: Ablation) -> list[Arm]:
    done = [branch for branch in ablation.branches if branch.state == "done"]
    found = grouped(((branch.strategy, branch.size), branch) for branch in done)
    several = len({size for _, size in found}) > 1
    taken: set[str] = set()
    arms = []
    for (strategy, size), branches in found.items():
        trained = "all rows" if size is None else f"{size:,} rows"
        name = f"{strategy}, {trained}" if several else strategy
        arms.append(Arm(_distinct(name, taken), strategy, size, tuple(branches)))
    return arms


def _distinct(name: str, taken: set[str]) -> str:
    free, number = name, 2
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    taken.add(free)
    return free


def _frame(arms: Sequence[Arm], references: dict[str, Answers]) -> pl.DataFrame:
    """One row per verdict. References keep tasks some arm answered."""
    parts = []
    for arm in arms:
        for branch in arm.branches:
            assert branch.answers is not None, "a branch that is done has answers"
            facts = {"model": arm.name, "arm": arm.name, "branch": branch.name}
            parts.append(_verdicts(branch.answers, f"branch {branch.name!r}", facts))
    own = pl.concat(parts, how="diagonal_relaxed")
    shared = pl.col("task_id").is_in(own["task_id"].unique().implode())
    others = [
        _verdicts(found, f"reference {name!r}", {"model": name}).filter(shared)
        for name, found in references.items()
    ]
    return pl.concat([own, *others], how="diagonal_relaxed")


def _verdicts(answers: Answers, whose: str, facts: dict[str, str]) -> pl.DataFrame:
    """Branches are in candidate ids: equal answers of two seeds are two samples."""
    snapshot = answers.verdicts.open()
    frame = snapshot.read(columns=READ, unique="candidate_id") if snapshot.finished else None
    if frame is None or frame.is_empty():
        raise UsageError(
            f"the verdicts of {whose} are not finished or have no row: {snapshot.path}",
            "rerun the ablation to resume it; give the benchmark tasks and samples",
        )
    key = pl.lit(facts.get("branch", whose) + " ") + pl.col("candidate_id")
    return frame.with_columns(
        key.alias("candidate_id"), *(pl.lit(value).alias(name) for name, value in facts.items())
    )


def _seeds(frame: pl.DataFrame, arms: Sequence[Arm]) -> pl.DataFrame:
    members = [(branch.name, arm.name, branch.seed) for arm in arms for branch in arm.branches]
    # with the references: the same tasks are left out as in the scores of all
    named = frame.with_columns(branch=pl.coalesce("branch", "model"))
    rows = pl.concat(scores(named, by=("branch",), track=track, resamples=0) for track in TRACKS)
    rows = rows.filter(pl.col("metric").is_in([EXEC, FAST])).drop_nulls("value")
    known = pl.DataFrame(members, ["branch", "arm", "seed"], orient="row")
    known = known.join(rows, on="branch", maintain_order="left_right")
    return known.select("branch", "arm", "seed", "track", "metric", "value")


def _baseline(ablation: Ablation, arms: Sequence[Arm]) -> list[Arm]:
    strategies = [arm.strategy for arm in arms]
    wanted = ablation.baseline or "random"
    strategy = wanted if wanted in strategies else strategies[0]
    return sorted(
        (arm for arm in arms if arm.strategy == strategy),
        key=lambda arm: math.inf if arm.size is None else arm.size,
    )


def _opponent(arm: Arm, against: Sequence[Arm]) -> Arm:
    return next((each for each in against if each.size == arm.size), against[-1])
