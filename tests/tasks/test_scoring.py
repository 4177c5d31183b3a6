"""Scores that can be worked out by hand, the difference between the tracks, and what few tasks may
not claim."""

from __future__ import annotations

import itertools
from typing import Any

import polars as pl
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from kernels_eval.records import Verdict
from tasks.benchmark.published import PUBLISHED
from tasks.benchmark.scoring import ComparisonRow, ScoreRow, compare, excluded_tasks, score
from tasks.tables import VERDICTS

SCHEMA = pa.schema(
    [("model", pa.string()), *(field for field in VERDICTS if field.name != "verdict_key")]
)
NUMBER = itertools.count()
WRONG, CHEAT, BROKEN = (
    ("incorrect", "wrong_output"),
    ("rejected", "no_custom_kernel"),
    ("task_error", "reference_failed"),
)


def verdict(
    model: str, task: str, outcome: float | tuple[str, str], match: bool | None = None
) -> dict[str, Any]:
    """A real Verdict as a row: an outcome is a speedup, or (status, reason)."""
    facts: dict[str, Any] = {
        "candidate_id": f"c{next(NUMBER)}",
        "task_id": task,
        "language": "cpp",
        "outputs_match": match,
    }
    if isinstance(outcome, tuple):
        made = Verdict(**facts, status=outcome[0], reason=outcome[1])
    else:
        timing = {
            "reference_ms": outcome,
            "candidate_ms": 1.0,
            "speedup": outcome,
            "speedup_lower": outcome,
            "speedup_upper": outcome,
        }
        made = Verdict(
            **facts,
            status="correct",
            reason="ok",
            timing=timing | {"pairs": 1, "calls_per_sample": 1, "clock_bound_ms": 1.0},
        )
    return made.model_dump(mode="json") | {"model": model}


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    read = pl.from_arrow(pa.Table.from_pylist(list(rows), schema=SCHEMA))
    assert isinstance(read, pl.DataFrame)
    return read


def find(
    rows: list[ScoreRow],
    metric: str,
    k: int | None = 1,
    track: str = "custom_kernel",
    model: str = "m",
) -> ScoreRow:
    (row,) = [r for r in rows if (r.metric, r.k, r.track, r.model) == (metric, k, track, model)]
    return row


PS = (0.0, 0.5, 1.0, 1.5, 2.0)


def test_scores_by_hand() -> None:
    rows = [verdict("m", "a", x) for x in (3.0, 0.4, WRONG, WRONG)] + [
        verdict("m", "b", x) for x in (1.2, WRONG, WRONG, WRONG)
    ]
    scores = score(frame(*rows), ks=(1, 2), ps=PS)
    assert find(scores, "exec").value == pytest.approx((2 / 4 + 1 / 4) / 2)
    assert find(scores, "exec", 2).value == pytest.approx(((1 - 1 / 6) + (1 - 3 / 6)) / 2)
    assert find(scores, "fast_0").value == find(scores, "exec").value
    assert find(scores, "fast_0.5").value == pytest.approx(1 / 4)
    assert find(scores, "fast_1", 2).value == pytest.approx(1 / 2)
    assert find(scores, "fast_1.5").value == pytest.approx(1 / 8)
    geometric = find(scores, "geometric_mean_speedup", None)
    assert geometric.value == pytest.approx((3.0 * 0.4 * 1.2) ** (1 / 3))
    assert geometric.lower == pytest.approx(
        (3.0 * 0.4) ** (1 / 2)
    ) and geometric.upper == pytest.approx(1.2)
    assert {(row.tasks, row.samples) for row in scores} == {(2, 8)}


def test_the_first_track_takes_right_outputs_without_a_custom_kernel() -> None:
    rows = [
        verdict("m", "a", CHEAT, True),
        verdict("m", "a", CHEAT, False),
        verdict("m", "a", CHEAT, None),
        verdict("m", "a", 2.0, True),
    ]
    rows.append(verdict("m", "a", ("rejected", "forbidden_call"), True))
    scores = score(frame(*rows), ks=(1,), ps=PS)
    assert (find(scores, "exec").value, find(scores, "exec", track="any").value) == (
        pytest.approx(0.2),
        pytest.approx(0.4),
    )
    assert find(scores, "fast_0", track="any").value == pytest.approx(0.4)
    # a rejected kernel has no timing: beyond 0 nothing is claimed for it
    assert find(scores, "fast_0.5", track="any").value == pytest.approx(0.2)
    assert find(scores, "geometric_mean_speedup", None, "any").value == pytest.approx(2.0)


def test_tracks_agree_with_the_verdicts_own_properties() -> None:
    rows = [
        verdict("m", "a", CHEAT, True),
        verdict("m", "a", WRONG, False),
        verdict("m", "a", 0.7, True),
    ]
    rows.append(verdict("m", "a", ("timeout", "run")))
    verdicts = [
        Verdict.model_validate({key: value for key, value in row.items() if key != "model"})
        for row in rows
    ]
    scores = score(frame(*rows), ks=(1,), ps=PS)
    assert find(scores, "exec", track="any").value == sum(v.correct_any for v in verdicts) / 4
    assert find(scores, "exec").value == sum(v.correct_custom for v in verdicts) / 4
    assert find(scores, "fast_0.5").value == sum(v.speedup > 0.5 for v in verdicts) / 4


def test_k_beyond_the_samples_is_reported_as_none_never_invented() -> None:
    rows = [verdict("m", task, 2.0) for task in "aaaaabbbb"]
    row = find(score(frame(*rows), ks=(1, 5), ps=PS), "exec", 5)
    assert (row.value, row.lower, row.upper, row.interval) == (None, None, None, None)


def test_zeros_are_zero_with_an_interval_that_admits_ignorance() -> None:
    rows = [verdict("m", task, WRONG) for task in "abcd" for _ in range(5)]
    scores = score(frame(*rows), ks=(1, 5), ps=PS)
    row = find(scores, "fast_1", 5)
    assert (row.value, row.lower, row.interval) == (0.0, 0.0, "wilson")
    assert row.upper == pytest.approx(
        0.4899, abs=1e-4
    )  # Wilson, 0 of 4 tasks: 20 samples in 4 tasks are not 20 trials
    assert find(scores, "geometric_mean_speedup", None).value is None


def test_one_task_does_not_bound_a_speedup_and_barely_bounds_a_rate() -> None:
    scores = score(
        frame(verdict("m", "a", 2.0), verdict("m", "a", 3.0), verdict("m", "b", WRONG)),
        ks=(1,),
        ps=PS,
    )
    row = find(scores, "geometric_mean_speedup", None)
    assert row.value == pytest.approx(6**0.5) and row.lower is None
    alone = find(score(frame(verdict("m", "a", 2.0)), ks=(1,), ps=PS), "exec")
    assert alone.value == 1.0 and alone.lower is not None and alone.lower < 0.25


def test_a_broken_task_counts_against_nobody() -> None:
    rows = [
        verdict("m", "a", 2.0),
        verdict("m", "bad", BROKEN),
        verdict("n", "a", WRONG),
        verdict("n", "bad", ("no_code", "truncated")),
    ]
    read = frame(*rows)
    scores = score(read, ks=(1,), ps=PS)
    assert excluded_tasks(read) == ["bad"]
    assert (find(scores, "exec").value, find(scores, "exec").tasks) == (1.0, 1)
    assert (find(scores, "exec", model="n").value, find(scores, "exec", model="n").samples) == (
        0.0,
        1,
    )


def test_a_model_with_nothing_to_score_has_none_everywhere() -> None:
    scores = score(frame(verdict("m", "bad", BROKEN)), ks=(1,), ps=PS)
    assert len(scores) == 2 * (1 + len(PS) + 1)
    assert all(row.value is None and row.lower is None and row.tasks == 0 for row in scores)


OUTCOMES = st.tuples(st.sampled_from("abc"), st.sampled_from([WRONG, CHEAT, 0.3, 1.0, 4.0]))


@given(st.lists(OUTCOMES, min_size=1, max_size=12), st.integers(0, 99))
@settings(max_examples=25, deadline=None)
def test_rates_are_bounded_ordered_and_repeatable(
    outcomes: list[tuple[str, Any]], seed: int
) -> None:
    read = frame(*(verdict("m", task, outcome, True) for task, outcome in outcomes))
    scores = score(read, ks=(1, 2), ps=PS, seed=seed, resamples=100)
    assert scores == score(read, ks=(1, 2), ps=PS, seed=seed, resamples=100)
    for track in ("any", "custom_kernel"):
        for k in (1, 2):
            rates = [
                find(scores, name, k, track).value
                for name in ("exec", "fast_0", "fast_0.5", "fast_1", "fast_1.5", "fast_2")
            ]
            known = [rate for rate in rates if rate is not None]
            assert len(known) in (0, len(rates)) and known == sorted(known, reverse=True)
    for row in scores:
        if (
            row.metric != "geometric_mean_speedup"
            and row.value is not None
            and row.lower is not None
            and row.upper is not None
        ):
            assert (
                0 <= row.lower <= row.value + 1e-12 and row.value - 1e-12 <= row.upper <= 1 + 1e-12
            )


def test_comparison_pairs_tasks() -> None:
    """Both models find task a easy and b hard; only the pairing shows that one is better on
    each."""
    rows = [verdict("base", "a", x) for x in (2.0, 2.0, WRONG, WRONG)] + [
        verdict("base", "b", WRONG) for _ in range(4)
    ]
    rows += [verdict("tuned", "a", x) for x in (2.0, 2.0, 2.0, WRONG)] + [
        verdict("tuned", "b", x) for x in (2.0, 2.0, WRONG, WRONG)
    ]
    found = {
        (row.track, row.metric, row.k): row
        for row in compare(frame(*rows), baseline="base", model="tuned", ks=(1, 9), ps=PS)
    }
    row = found["custom_kernel", "exec", 1]
    assert row.difference == pytest.approx((0.25 + 0.5) / 2) and row.tasks == 2
    assert (row.lower, row.upper) == (pytest.approx(0.25), pytest.approx(0.5))
    assert not any(k == 9 for _, _, k in found)


def test_comparison_uses_shared_tasks_and_does_not_call_a_constant_difference_certain() -> None:
    rows = [verdict("base", "a", WRONG), verdict("base", "only", 2.0), verdict("tuned", "a", 2.0)]
    row = compare(frame(*rows), baseline="base", model="tuned", ks=(1,), ps=PS)[0]
    assert isinstance(row, ComparisonRow) and (row.difference, row.tasks, row.lower) == (
        1.0,
        1,
        None,
    )
    with pytest.raises(UsageError, match="'nobody'"):
        compare(frame(*rows), baseline="base", model="nobody", ks=(1,), ps=PS)


def test_a_frame_without_models_is_refused() -> None:
    with pytest.raises(UsageError, match="model"):
        score(frame(verdict("m", "a", 1.0)).drop("model"), ks=(1,), ps=PS)


def test_published_rows_are_shares_with_a_source_and_a_mark() -> None:
    keys = [(row.model, row.level, row.metric, row.k) for row in PUBLISHED]
    assert len(keys) == len(set(keys))
    assert all(
        0 < row.value < 1 and "2510.07356" in row.source and row.label.endswith("(r)")
        for row in PUBLISHED
    )
    assert (
        next(
            row.value
            for row in PUBLISHED
            if (row.model, row.level, row.k, row.metric) == ("KernelCoder", 2, 10, "fast_1")
        )
        == 0.68
    )
