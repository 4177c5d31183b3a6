"""Branches in, the numbers of a comparison out: scores by strategy with intervals, what seeds say,
and paired differences.

Guarantees: seeds of a strategy are pooled as samples within tasks, so a task counts once, whatever
the number of seeds; all models of an ablation are scored on tasks whose reference works; the
baseline is the same for all, at the same size where it has one; corrected p values are over all
comparisons of one question together. Does not guarantee that a difference is the strategy's: a
training run varies with its seed, and no interval here holds that. `scores_by_seed` says how much,
and `seed_tests` whether that alone could make the difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import product
from typing import Literal, TypeVar

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.grouping import grouped
from kernels_eval.records import Record
from tasks.benchmark.comparing import (
    ComparisonRow,
    Tested,
    compare_all,
    corrected,
    metric_name,
)
from tasks.benchmark.comparison.records import Ablation
from tasks.benchmark.metrics import mean
from tasks.benchmark.samples import TRACKS, Track, excluded_tasks, rates, samples_by_model
from tasks.benchmark.scoring import ScoreRow, score
from tasks.benchmark.stage import Answers

READ = ("candidate_id", "task_id", "status", "reason", "outputs_match", "timing", "device")
EXEC, FAST = "exec", metric_name(1.0)
TRACK: Track = "custom_kernel"
"""What the headline, the order and the figures are of."""

R = TypeVar("R", bound=Record)


class Arm(Record):
    """A strategy at one size: the branches that finished, one per seed, by name.

    `name` is the model of its scores and differences. `rows` are those trained on, on average over
    seeds; `gpu_hours` of all seeds together; losses of the seeds that have them.
    """

    name: str
    strategy: str
    size: int | None
    branches: tuple[str, ...]
    seeds: tuple[int, ...]
    rows: float | None
    gpu_hours: float | None
    loss_last: tuple[float, ...]
    held_out_loss_last: tuple[float, ...]


class SeedScore(Record):
    """One branch by itself: shares in [0, 1] at pass@1. Too few samples for an interval worth
    reading."""

    branch: str
    arm: str
    seed: int
    track: Track
    metric: str
    value: float


class SeedTest(Tested):
    """Could seeds alone make this difference? `spread` is the standard deviation of a share over
    the seeds of one strategy, estimated from all strategies together with `freedom` degrees of
    freedom; p is of a two-sided t test with it. None where it cannot be estimated.
    """

    spread: float | None = None
    freedom: int = 0


class Compared(Record):
    """Every number of a comparison. `strategies` are in the order of their Exec@1, best first;
    `baseline` names one of them, `untuned_model` a reference."""

    ablation: Ablation
    strategies: tuple[Arm, ...] = ()
    references: tuple[str, ...] = ()
    baseline: str | None = None
    untuned_model: str | None = None
    scores: tuple[ScoreRow, ...] = ()
    scores_by_seed: tuple[SeedScore, ...] = ()
    differences: tuple[ComparisonRow, ...] = ()
    against_untuned: tuple[ComparisonRow, ...] = ()
    seed_tests: tuple[SeedTest, ...] = ()
    tasks: int = 0
    samples_per_task_and_seed: dict[Literal["least", "most"], int] = {"least": 0, "most": 0}
    excluded_tasks: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def score(self, model: str, metric: str, track: str = TRACK) -> ScoreRow | None:
        return _first(self.scores, model=model, metric=metric, track=track)

    def by_seed(self, arm: str, metric: str) -> tuple[float, ...]:
        wanted = (arm, metric, TRACK)
        return tuple(
            row.value for row in self.scores_by_seed if (row.arm, row.metric, row.track) == wanted
        )

    def difference(self, model: str) -> ComparisonRow | None:
        """Exec of a strategy against its baseline."""
        return _first(self.differences, model=model, metric=EXEC, track=TRACK)

    def seed_test(self, row: ComparisonRow) -> SeedTest | None:
        wanted = row.model_dump(include={"model", "baseline", "metric", "track"})
        return _first(self.seed_tests, **wanted)

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.strategies if arm.name == name)


def compared(ablation: Ablation, *, resamples: int = 2000) -> Compared:
    """The numbers of an ablation, from the verdicts of its branches. Without a branch that finished
    there are none.

    Raises UsageError for verdicts that are not there or that scoring refuses (two devices, say),
    and a baseline that is no strategy of the ablation.
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
    frame = _frame(ablation, arms, references)
    excluded = excluded_tasks(frame)
    scores = score(frame, ks=(1,), ps=(1.0,), resamples=resamples)
    rates = {(row.model, row.metric): row.value or 0.0 for row in scores if row.track == TRACK}
    arms.sort(key=lambda arm: (-rates[arm.name, EXEC], -rates[arm.name, FAST]))
    pairs = [(_opponent(arm, against).name, arm.name) for arm in arms if arm not in against]
    base = next((name for name, answers in references.items() if answers.model == "base"), None)
    with_base = [(base, arm.name) for arm in arms] if base else []
    differences, against_base = (
        compare_all(frame, pairs=each, resamples=resamples) for each in (pairs, with_base)
    )
    seeds = _seeds(frame, arms)
    counts = (
        frame.filter(frame["arm"].is_not_null() & ~frame["task_id"].is_in(excluded))
        .group_by("branch", "task_id")
        .len()
    )
    least, most = min(counts["len"], default=0), max(counts["len"], default=0)
    return Compared(
        ablation=ablation,
        strategies=tuple(arms),
        references=tuple(references),
        baseline=against[-1].name,
        untuned_model=base,
        scores=tuple(scores),
        scores_by_seed=tuple(seeds),
        differences=tuple(differences),
        against_untuned=tuple(against_base),
        seed_tests=(*seed_tests(differences, seeds), *seed_tests(against_base, seeds)),
        tasks=counts["task_id"].n_unique(),
        samples_per_task_and_seed={"least": least, "most": most},
        excluded_tasks=tuple(excluded),
        devices=tuple(sorted({name for name in frame["device"].unique() if name})),
    )


def _arms(ablation: Ablation) -> list[Arm]:
    """Strategies at one size, in the order of the ablation. The size is in the name where there are
    several."""
    done = (branch for branch in ablation.branches if branch.state == "done")
    found = grouped(((branch.strategy, branch.size), branch) for branch in done)
    several = len({size for _, size in found}) > 1
    taken: set[str] = set()
    arms = []
    for (strategy, size), branches in found.items():
        trained = "all rows" if size is None else f"{size:,} rows"
        known = {
            column: [value for branch in branches if (value := getattr(branch, column)) is not None]
            for column in ("seed", "rows", "gpu_hours", "loss_last", "held_out_loss_last")
        }
        arms.append(
            Arm(
                name=_distinct(f"{strategy}, {trained}" if several else strategy, taken),
                strategy=strategy,
                size=size,
                branches=tuple(branch.name for branch in branches),
                seeds=tuple(known["seed"]),
                rows=statistics.fmean(known["rows"]) if known["rows"] else None,
                gpu_hours=sum(known["gpu_hours"]) if known["gpu_hours"] else None,
                loss_last=tuple(known["loss_last"]),
                held_out_loss_last=tuple(known["held_out_loss_last"]),
            )
        )
    return arms


def _distinct(name: str, taken: set[str]) -> str:
    """The name, or where another has it, the name with a number. Adds it to `taken`."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    taken.add(free)
    return free


def _frame(ablation: Ablation, arms: Sequence[Arm], references: dict[str, Answers]) -> pl.DataFrame:
    """One row per verdict: its `model` (arm or reference), and for arms `arm` and `branch`.
    References keep tasks that some arm answered."""
    answers = {branch.name: branch.answers for branch in ablation.branches}
    own = pl.concat(
        [
            _verdicts(
                found, f"branch {name!r}", {"model": arm.name, "arm": arm.name, "branch": name}
            )
            for arm in arms
            for name in arm.branches
            if (found := answers[name])  # a branch that is done has them
        ],
        how="diagonal_relaxed",
    )
    tasks = own["task_id"].unique()
    others = [
        _verdicts(found, f"reference {name!r}", {"model": name}).filter(
            pl.col("task_id").is_in(tasks)
        )
        for name, found in references.items()
    ]
    return pl.concat([own, *others], how="diagonal_relaxed")


def _verdicts(answers: Answers, whose: str, facts: dict[str, str]) -> pl.DataFrame:
    """Verdicts of one branch. Two seeds may give the same answer, which is two samples: the branch
    becomes part of a candidate's id."""
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


def _seeds(frame: pl.DataFrame, arms: Sequence[Arm]) -> list[SeedScore]:
    known = samples_by_model(frame.with_columns(model=pl.coalesce("branch", "model")))
    return [
        SeedScore(
            branch=branch, arm=arm.name, seed=seed, track=track, metric=metric, value=mean(each)
        )
        for arm in arms
        for branch, seed in zip(arm.branches, arm.seeds, strict=True)
        for track, (metric, p) in product(TRACKS, ((EXEC, None), (FAST, 1.0)))
        if (each := rates(known[branch], track, p, 1)) is not None
    ]


def seed_tests(rows: Sequence[ComparisonRow], seeds: Sequence[SeedScore]) -> list[SeedTest]:
    """Each difference against the spread of seeds, which all strategies share: two or three seeds
    of one say too little of it.

    Strategies with all or none right in every seed are left out of the spread: they cannot vary. A
    model without seeds (the untuned one) has no spread of its own. p is corrected (Holm) for all
    strategies; not for metrics too, which say nearly the same and have passed a test that is
    corrected for both.
    """
    from scipy.stats import t

    found = []
    for row in rows:
        own = (each for each in seeds if (each.track, each.metric) == (row.track, row.metric))
        groups = grouped((each.arm, each.value) for each in own)
        varying = [own for own in groups.values() if len(own) > 1 and 0 < statistics.fmean(own) < 1]
        freedom = sum(len(own) - 1 for own in varying)
        squares = sum((value - statistics.fmean(own)) ** 2 for own in varying for value in own)
        spread = p = None
        if squares > 0:
            spread = math.sqrt(squares / freedom)
            counts = [len(groups[name]) for name in (row.model, row.baseline) if name in groups]
            error = spread * math.sqrt(sum(1 / count for count in counts))
            p = float(2 * t.sf(abs(row.difference) / error, freedom))
        whose = row.model_dump(include={"model", "baseline", "track", "metric"})
        found.append(SeedTest(**whose, spread=spread, freedom=freedom, p=p))
    return corrected(found, lambda test: (test.track, test.metric))


def _baseline(ablation: Ablation, arms: Sequence[Arm]) -> list[Arm]:
    """The arms of the baseline's strategy, smallest first: the ablation's, "random", or the first
    that finished."""
    strategies = [arm.strategy for arm in arms]
    wanted = ablation.baseline or "random"
    strategy = wanted if wanted in strategies else strategies[0]
    return sorted(
        (arm for arm in arms if arm.strategy == strategy),
        key=lambda arm: math.inf if arm.size is None else arm.size,
    )


def _opponent(arm: Arm, against: Sequence[Arm]) -> Arm:
    """The baseline of the same size, else its largest."""
    return next((each for each in against if each.size == arm.size), against[-1])


def _first(rows: Iterable[R], **wanted: object) -> R | None:
    """Return the first row with these values, or None."""
    return next(
        (row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())),
        None,
    )
