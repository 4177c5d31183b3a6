"""Planted difficulty is found, ARL that only mirrors its own wrong samples is unmasked, and two
generators are compared."""

import numpy as np
import polars as pl
import pytest

from kernels_eval.errors import UsageError
from tasks.analysis.difficulty import difficulty, divide
from tasks.analysis.findings import steps_checks
from tasks.analysis.verdict import CONTRADICTED, NOT_ROBUST, SUPPORTED, judge
from tasks.reporting.findings import Estimate
from tests.support.cases import cases

CASES = cases("analysis")


def planted(tasks, *, seed, harder, wrong_longer=0.0, name="g", samples=8):
    """`harder`: how much of a task's hardness reaches its lengths; `wrong_longer`: tokens that a
    wrong sample is longer by itself.

    Hardness depends on the task alone, so frames of two generators share it; speedup falls with it.
    """
    random, hardness = np.random.default_rng(seed), np.random.default_rng(99).normal(size=tasks)
    task = np.repeat(np.arange(tasks), samples)
    easy = 0.0 if wrong_longer else 1.5
    right = random.random(len(task)) < 1 / (1 + np.exp(easy * hardness[task]))
    tokens = (
        9000
        + 2000 * harder * hardness[task]
        + wrong_longer * ~right
        + random.normal(scale=800, size=len(task))
    )
    speedup = np.exp(0.3 - 0.4 * hardness[task] + random.normal(scale=0.2, size=len(task)))
    return pl.DataFrame(
        {
            "task_id": [f"t{number:05d}" for number in task],
            "status": np.where(right, "correct", "incorrect"),
            "reasoning_tokens": tokens.astype(np.int64),
            "speedup": np.where(right, speedup, np.nan),
            "generator": [name] * len(task),
            "sample_index": np.tile(np.arange(samples), tasks),
        }
    )


def execs(found):
    return [group.exec.value or 0.0 for group in found.tertiles.groups]


def test_planted_difficulty_falls_over_the_thirds_in_exec_and_speedup():
    found = difficulty(planted(600, seed=0, harder=1.0))
    assert [group.name for group in found.tertiles.groups] == ["easy", "medium", "hard"]
    assert [group.tasks for group in found.tertiles.groups] == [200, 200, 200]
    assert (
        found.tertiles.exec_monotone
        == found.tertiles.speedup_monotone
        == found.split_half.exec_monotone
        == SUPPORTED
    )
    assert execs(found) == sorted(execs(found), reverse=True)
    assert found.arl_exec.upper < -0.5 and found.reliability.lower > 0.7
    # moved thresholds, other numbers of groups, and medians say the same
    assert len(found.sensitivity) == 7
    assert {division.exec_monotone for division in found.sensitivity} == {SUPPORTED}
    assert found.finding[0].startswith("Exec falls with ARL: supported (easy ")


def test_lengths_without_difficulty_are_not_taken_for_it():
    random, said = np.random.default_rng(0), []
    for _ in range(200):
        tasks = pl.DataFrame(
            {
                "task_id": [f"{n:03}" for n in range(150)],
                "arl": random.normal(size=150),
                "share": random.random(150),
            }
        )
        found = divide(
            tasks.with_columns(samples=1, timed=0, log_sum=0.0, stratum=pl.lit("")),
            (1 / 3, 2 / 3),
            "x",
        )
        said.append(found.exec_monotone)
    # intervals hold with 95 % for both steps together: both hardly ever lie on one side
    assert set(said) == {NOT_ROBUST}


def test_wrong_samples_that_are_long_by_themselves_are_unmasked_by_other_samples():
    """All tasks are equally hard; wrong samples are longer. ARL then counts failures, and only a
    split by samples shows it."""
    found = difficulty(planted(600, seed=2, harder=0.0, wrong_longer=3000.0))
    assert found.tertiles.exec_monotone == SUPPORTED
    assert found.split_half.exec_monotone == NOT_ROBUST
    assert found.findings[0].verdict == NOT_ROBUST
    assert all(step.lower < 0 < step.upper for step in found.split_half.steps)


def test_a_rise_beyond_doubt_refutes():
    found = difficulty(planted(600, seed=3, harder=-1.0))
    assert found.tertiles.exec_monotone == found.findings[0].verdict == CONTRADICTED
    assert found.finding[0].startswith("Exec falls with ARL: contradicted (easy ")


def test_two_generators_that_share_difficulty_agree_and_others_do_not():
    first = planted(600, seed=4, harder=1.0, name="first")
    same = difficulty(first, planted(600, seed=5, harder=1.0, name="second")).agreement
    other = difficulty(first, planted(600, seed=5, harder=0.0, name="second")).agreement
    assert (same.first, same.second, same.tasks) == ("first", "second", 600)
    assert same.spearman.lower > 0.8 and same.kappa.lower > 0.6 and same.same_third.lower > 0.7
    assert other.spearman.lower < 0 < other.spearman.upper
    assert other.kappa.lower < 0 < other.kappa.upper
    assert same.crossed.exec_monotone == SUPPORTED
    assert other.crossed.exec_monotone != SUPPORTED


def test_a_frame_of_two_generators_is_divided():
    first, second = (
        planted(60, seed=4, harder=1.0, name="first"),
        planted(60, seed=5, harder=1.0, name="second", samples=4),
    )
    together = difficulty(pl.concat([second, first]))
    assert together == difficulty(first, second)


def test_generators_without_a_common_task_cannot_agree():
    first, second = planted(30, seed=4, harder=1.0), planted(30, seed=5, harder=1.0, name="h")
    found = difficulty(first, second.with_columns(task_id="other/" + pl.col("task_id")))
    both = found.agreement
    assert both.tasks == 0
    assert both.spearman.value is None
    assert "0 tasks are shared" in both.spearman.why_not


def test_groups_by_hand():
    frame = pl.DataFrame(CASES["samples"])
    found = difficulty(frame)
    groups = found.tertiles.groups
    shown = [(g.from_arl, g.to_arl, g.exec.value, pytest.approx(g.speedup.value)) for g in groups]
    assert [list(group) for group in shown] == CASES["groups"]
    assert found.tertiles.exec_monotone == NOT_ROBUST  # one task a group bounds nothing


def test_equal_arls_are_divided_the_same_way_whatever_the_order():
    tasks = pl.DataFrame(
        {
            "task": range(9),
            "task_id": list("abcdefghi"),
            "arl": [5.0] * 9,
            "samples": 1,
            "share": [0.0, 1.0, 0.5] * 3,
            "timed": 0,
            "log_sum": 0.0,
            "stratum": "",
        }
    )
    assert divide(tasks, (1 / 3, 2 / 3), "x") == divide(tasks.reverse(), (1 / 3, 2 / 3), "x")
    assert divide(tasks.head(2), (1 / 3, 2 / 3), "x") is None


@pytest.mark.parametrize(
    "second, said",
    [
        ((1, 0.5, 1.5), SUPPORTED),
        ((0.1, -0.1, 0.3), NOT_ROBUST),
        ((-0.1, -0.3, 0.1), NOT_ROBUST),
        ((-1, -2, -0.5), NOT_ROBUST),
        ((1, None, None), NOT_ROBUST),
    ],
)
def test_a_fall_needs_every_step_and_a_rise_too(second, said):
    """The same numbers with the other sign give the other verdict."""
    exchanged = {SUPPORTED: CONTRADICTED, NOT_ROBUST: NOT_ROBUST}
    for sign, verdict in ((1, said), (-1, exchanged[said])):
        bounds = [
            [None if bound is None else sign * bound for bound in each[::sign]]
            for each in ((0.5, 1, 1.5), (second[1], second[0], second[2]))
        ]
        steps = [Estimate(value=v, lower=lower, upper=upper) for lower, v, upper in bounds]
        assert judge(steps_checks(steps))[0] == verdict


def test_thirds_are_taken_within_levels():
    """Level 1 has long tasks, level 2 short ones: each third holds as many of either."""
    frame = planted(120, seed=0, harder=1.0)
    number = pl.col("task_id").str.slice(1).cast(pl.Int64)
    level = pl.when(number % 2 == 0).then(1).otherwise(2)
    tokens = pl.col("reasoning_tokens") + pl.when(level == 1).then(50_000).otherwise(0)
    leveled = frame.with_columns(
        task_id=pl.format("kernelbench/L{}/{}", level, "task_id"), reasoning_tokens=tokens
    )
    parts = (leveled, *(leveled.filter(pl.col("task_id").str.contains(f"L{n}/")) for n in (1, 2)))
    groups = (difficulty(part).tertiles.groups for part in parts)
    for both, first, second in zip(*groups, strict=True):
        assert both.tasks == 40 and both.from_arl < 30_000 < both.to_arl
        assert both.exec.value == pytest.approx((first.exec.value + second.exec.value) / 2)


def test_a_bad_frame_of_another_generator_is_a_usage_error():
    with pytest.raises(UsageError, match="status"):
        difficulty(planted(5, seed=0, harder=1.0), planted(5, seed=0, harder=1.0).drop("status"))


def test_the_words_on_speedup_follow_the_means_that_they_show():
    """Tasks differ in how many of their samples are timed: the mean over samples rises where that
    over tasks falls."""
    rows = []
    for group, (tokens, many, few) in enumerate(
        ((100, 4.0, 4.0), (200, 0.5, 3.0), (300, 2.0, 0.1))
    ):
        for task in range(4):
            samples, speedup = (8, many) if task == 0 else (1, few)
            rows += [
                (
                    f"t{group}{task}",
                    "correct",
                    tokens + task,
                    speedup * (1 + 0.01 * n + 0.001 * task),
                )
                for n in range(samples)
            ]
    frame = pl.DataFrame(
        rows, schema="task_id status reasoning_tokens speedup".split(), orient="row"
    )
    found = difficulty(frame)
    values = [group.speedup.value for group in found.tertiles.groups]
    assert values[0] > values[1]
    assert all(step.value is not None for step in found.tertiles.speed_steps)
    for step, before, after in zip(found.tertiles.speed_steps, values, values[1:], strict=False):
        assert step.value == pytest.approx(np.log(before) - np.log(after), abs=1e-9)
