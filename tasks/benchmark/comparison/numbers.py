"""Branches in, the numbers of a comparison out: scores by strategy with intervals, what seeds say,
and paired differences.

Guarantees: seeds of a strategy are pooled as samples within tasks, so a task counts once, whatever
the number of seeds; all models of an ablation are scored on tasks whose reference works; the
baseline is the same for all, at the same size where it has one; corrected p values are over all
comparisons of one question together. Does not guarantee that a difference is the strategy's: a
training run varies with its seed, and no interval here holds that. `seeds` says how much, and
`seed_tests` whether that alone could make the difference.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from itertools import product
from typing import TypeVar

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.benchmark.comparing import ComparisonRow, compare_all, corrected, metric_name
from tasks.benchmark.comparison.records import Ablation, Branch
from tasks.benchmark.metrics import mean
from tasks.benchmark.samples import TRACKS, Track, excluded_tasks, rates, samples_by_model
from tasks.benchmark.scoring import ScoreRow, score
from tasks.benchmark.stage import Answers

READ = ("candidate_id", "task_id", "status", "reason", "outputs_match", "timing", "device")
EXEC, FAST = "exec", metric_name(1.0)
TRACK: Track = "custom_kernel"
"""What the headline, the order and the figures are of."""
SIGNIFICANT = 0.05

R = TypeVar("R", bound=Record)


class Arm(Record):
    """A strategy at one size: the branches that finished, one a seed. `name` is the model of its
    scores and differences."""

    name: str
    strategy: str
    size: int | None
    branches: tuple[Branch, ...]

    @property
    def rows(self) -> float | None:
        """Rows trained on, on average over seeds."""
        known = [branch.rows for branch in self.branches if branch.rows is not None]
        return statistics.fmean(known) if known else None

    @property
    def gpu_hours(self) -> float | None:
        """Of all its seeds together."""
        known = [branch.gpu_hours for branch in self.branches if branch.gpu_hours is not None]
        return sum(known) if known else None

    def loss(self, name: str) -> tuple[float, ...]:
        """`loss_last` or `held_out_loss_last` of the seeds that have it."""
        return tuple(
            value for branch in self.branches if (value := getattr(branch, name)) is not None
        )


class SeedScore(Record):
    """One branch by itself: shares in [0, 1] at pass@1. Too few samples for an interval worth
    reading."""

    branch: str
    arm: str
    seed: int
    track: Track
    metric: str
    value: float


class SeedTest(Record):
    """Could seeds alone make this difference? `spread` is the standard deviation of a share over
    the seeds of one strategy, estimated from all strategies together with `freedom` degrees of
    freedom; p is of a two-sided t test with it. None where it cannot be estimated.
    """

    model: str
    baseline: str
    track: Track
    metric: str
    spread: float | None = None
    freedom: int = 0
    p: float | None = None
    p_holm: float | None = None


class Compared(Record):
    """Every number of a comparison. `arms` are in the order of their Exec@1, best first; `baseline`
    names one of them."""

    ablation: Ablation
    arms: tuple[Arm, ...]
    references: tuple[str, ...] = ()
    baseline: str | None = None
    base: str | None = None
    scores: tuple[ScoreRow, ...] = ()
    seeds: tuple[SeedScore, ...] = ()
    differences: tuple[ComparisonRow, ...] = ()
    against_base: tuple[ComparisonRow, ...] = ()
    seed_tests: tuple[SeedTest, ...] = ()
    tasks: int = 0
    samples: tuple[int, int] = (0, 0)
    excluded: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    def score(self, model: str, metric: str, track: str = TRACK) -> ScoreRow | None:
        return _first(self.scores, model=model, metric=metric, track=track)

    def by_seed(self, arm: str, metric: str, track: str = TRACK) -> tuple[float, ...]:
        wanted = (arm, metric, track)
        return tuple(row.value for row in self.seeds if (row.arm, row.metric, row.track) == wanted)

    def difference(
        self, model: str, metric: str = EXEC, track: str = TRACK
    ) -> ComparisonRow | None:
        return _first(self.differences, model=model, metric=metric, track=track)

    def seed_test(self, row: ComparisonRow) -> SeedTest | None:
        return _first(
            self.seed_tests,
            model=row.model,
            baseline=row.baseline,
            metric=row.metric,
            track=row.track,
        )

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)


def compared(ablation: Ablation, *, resamples: int = 2000, seed: int = 0) -> Compared:
    """The numbers of an ablation, from the verdicts of its branches. Without a branch that finished
    there are none.

    Raises UsageError for verdicts that are not there or that scoring refuses (two devices, say),
    and a baseline that is no strategy of the ablation.
    """
    arms = _arms(ablation)
    if ablation.baseline is not None and ablation.baseline not in (
        known := {branch.strategy for branch in ablation.branches}
    ):
        raise UsageError(
            f"the baseline {ablation.baseline!r} is no strategy of the ablation",
            f"name one of: {', '.join(sorted(known)) or 'none'}",
        )
    if not arms:
        return Compared(ablation=ablation, arms=())
    taken = {arm.name for arm in arms}
    references = {_distinct(answers.model, taken): answers for answers in ablation.references}
    frame = _frame(arms, references)
    excluded = excluded_tasks(frame)
    scores = score(frame, ks=(1,), ps=(1.0,), resamples=resamples, seed=seed)
    arms = sorted(
        arms,
        key=lambda arm: tuple(-_value(scores, arm.name, metric) for metric in (EXEC, FAST)),
    )
    against = _baseline(ablation, arms)
    pairs = [(_opponent(arm, against).name, arm.name) for arm in arms if arm not in against]
    base = next((name for name, answers in references.items() if answers.model == "base"), None)
    differences = compare_all(frame, pairs=pairs, resamples=resamples, seed=seed)
    with_base = [(base, arm.name) for arm in arms] if base else []
    against_base = compare_all(frame, pairs=with_base, resamples=resamples, seed=seed)
    seeds = _seeds(frame, arms)
    counts = (
        frame.filter(frame["arm"].is_not_null() & ~frame["task_id"].is_in(excluded))
        .group_by("branch", "task_id")
        .len()
    )
    return Compared(
        ablation=ablation,
        arms=tuple(arms),
        references=tuple(references),
        baseline=against[-1].name,
        base=base,
        scores=tuple(scores),
        seeds=tuple(seeds),
        differences=tuple(differences),
        against_base=tuple(against_base),
        seed_tests=(*seed_tests(differences, seeds), *seed_tests(against_base, seeds)),
        tasks=counts["task_id"].n_unique(),
        samples=(min(counts["len"], default=0), max(counts["len"], default=0)),
        excluded=tuple(excluded),
        devices=tuple(sorted({name for name in frame["device"].unique() if name})),
    )


def _arms(ablation: Ablation) -> list[Arm]:
    """Strategies at one size, in the order of the ablation. The size is in the name where there are
    several."""
    found: dict[tuple[str, int | None], list[Branch]] = {}
    for branch in ablation.branches:
        if branch.state == "done":
            found.setdefault((branch.strategy, branch.size), []).append(branch)
    several = len({size for _, size in found}) > 1
    taken: set[str] = set()
    arms = []
    for (strategy, size), branches in found.items():
        rows = "all rows" if size is None else f"{size:,} rows"
        name = _distinct(f"{strategy}, {rows}" if several else strategy, taken)
        arms.append(Arm(name=name, strategy=strategy, size=size, branches=tuple(branches)))
    return arms


def _distinct(name: str, taken: set[str]) -> str:
    """The name, or where another has it, the name with a number. Adds it to `taken`."""
    free, number = name, 2
    while free in taken:
        free, number = f"{name} ({number})", number + 1
    taken.add(free)
    return free


def _frame(arms: Sequence[Arm], references: dict[str, Answers]) -> pl.DataFrame:
    """One row a verdict: its `model` (arm or reference), and for arms `arm` and `branch`.
    References keep tasks that some arm answered."""
    own = []
    for arm in arms:
        for branch in arm.branches:
            assert branch.answers is not None  # a branch that is done has them
            facts = {"model": arm.name, "arm": arm.name, "branch": branch.name}
            own.append(_verdicts(branch.answers, f"branch {branch.name!r}", facts))
    frame = pl.concat(own, how="diagonal_relaxed")
    tasks = frame["task_id"].unique()
    for name, answers in references.items():
        read = _verdicts(answers, f"reference {name!r}", {"model": name})
        frame = pl.concat(
            [frame, read.filter(pl.col("task_id").is_in(tasks))], how="diagonal_relaxed"
        )
    return frame


def _verdicts(answers: Answers, whose: str, facts: dict[str, str]) -> pl.DataFrame:
    """Verdicts of one branch. Two seeds may give the same answer, which is two samples: the branch
    becomes part of a candidate's id."""
    snapshot = answers.verdicts.open()
    if not snapshot.finished:
        raise UsageError(
            f"the verdicts of {whose} are not finished: {snapshot.path}",
            "run the ablation again, it goes on where it was",
        )
    frame = snapshot.read(columns=READ, unique="candidate_id")
    if frame.is_empty():
        raise UsageError(
            f"the verdicts of {whose} hold no row: {snapshot.path}",
            "give the benchmark tasks and samples",
        )
    key = pl.lit(facts.get("branch", whose) + " ") + pl.col("candidate_id")
    return frame.with_columns(
        key.alias("candidate_id"), *(pl.lit(value).alias(name) for name, value in facts.items())
    )


def _seeds(frame: pl.DataFrame, arms: Sequence[Arm]) -> list[SeedScore]:
    rows = []
    known = samples_by_model(frame.with_columns(pl.coalesce("branch", "model").alias("model")))
    of_each = ((arm.name, branch) for arm in arms for branch in arm.branches)
    for (arm, branch), track, (metric, p) in product(of_each, TRACKS, ((EXEC, None), (FAST, 1.0))):
        each = rates(known[branch.name], track, p, 1)
        if each is not None:
            rows.append(
                SeedScore(
                    branch=branch.name,
                    arm=arm,
                    seed=branch.seed,
                    track=track,
                    metric=metric,
                    value=mean(each),
                )
            )
    return rows


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
        groups: dict[str, list[float]] = {}
        for each in seeds:
            if (each.track, each.metric) == (row.track, row.metric):
                groups.setdefault(each.arm, []).append(each.value)
        varying = [
            values
            for values in groups.values()
            if len(values) > 1 and 0 < statistics.fmean(values) < 1
        ]
        freedom = sum(len(values) - 1 for values in varying)
        test = SeedTest(
            model=row.model,
            baseline=row.baseline,
            track=row.track,
            metric=row.metric,
            freedom=freedom,
        )
        squares = sum(
            (value - statistics.fmean(values)) ** 2 for values in varying for value in values
        )
        if squares > 0:
            spread = math.sqrt(squares / freedom)
            ours, theirs = groups[row.model], groups.get(row.baseline)
            error = spread * math.sqrt(1 / len(ours) + (1 / len(theirs) if theirs else 0))
            test = test.model_copy(
                update={
                    "spread": spread,
                    "p": float(2 * t.sf(abs(row.difference) / error, freedom)),
                }
            )
        found.append(test)
    return corrected(found, lambda test: (test.track, test.metric))


def _baseline(ablation: Ablation, arms: Sequence[Arm]) -> list[Arm]:
    """The arms of the baseline's strategy, smallest first: the ablation's, "random", or the first
    that finished."""
    wanted = ablation.baseline or "random"
    finished = {arm.strategy for arm in arms}
    first = next(
        branch.strategy
        for branch in ablation.branches
        if branch.strategy in finished and branch.state == "done"
    )
    return sorted(
        (arm for arm in arms if arm.strategy == (wanted if wanted in finished else first)),
        key=_size,
    )


def _opponent(arm: Arm, against: Sequence[Arm]) -> Arm:
    """The baseline of the same size, else its largest."""
    return next((each for each in against if each.size == arm.size), against[-1])


def _size(arm: Arm) -> float:
    return float("inf") if arm.size is None else arm.size


def _first(rows: Iterable[R], **wanted: object) -> R | None:
    """Return the first row with these values, or None."""
    return next(
        (row for row in rows if all(getattr(row, name) == value for name, value in wanted.items())),
        None,
    )


def _value(scores: Sequence[ScoreRow], model: str, metric: str) -> float:
    row = _first(scores, model=model, metric=metric, track=TRACK)
    return row.value or 0.0 if row else 0.0
