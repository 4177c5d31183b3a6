"""Scores as other people count them: KernelBench's formulas and tolerances, degenerate tasks, the
spread of speedups, many comparisons."""

from __future__ import annotations

import itertools
import math
from fractions import Fraction
from typing import Any

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from tasks.benchmark.comparing import compare_all, holm
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.samples import excluded_tasks, samples_by_model
from tasks.benchmark.scoring import ScoreRow, compare, distribution, score, variants

NUMBER = itertools.count()
FAILED = "wrong_output"


def row(model: str, task: str, outcome: float | str, **facts: Any) -> dict[str, Any]:
    """One verdict: an outcome is a speedup (then correct) or a reason, whose status is looked
    up."""
    from kernels_eval.records import STATUS_OF

    timed = not isinstance(outcome, str)
    found = {
        "model": model,
        "candidate_id": f"c{next(NUMBER)}",
        "task_id": task,
        "status": "correct" if timed else str(STATUS_OF[outcome]),
        "reason": "ok" if timed else outcome,
        "outputs_match": timed,
        "timing": {"speedup": outcome if timed else None},
        "correctness": {"kernelbench_1e4": timed, "kernelbench_1e2": timed},
        "custom_kernels": ["k"] if timed else [],
        "device": "a GPU",
    }
    return found | facts


def frame(*rows: dict[str, Any]) -> pl.DataFrame:
    timing, close = (
        pl.Struct({"speedup": pl.Float64}),
        pl.Struct({"kernelbench_1e4": pl.Boolean, "kernelbench_1e2": pl.Boolean}),
    )
    types = {
        "timing": timing,
        "correctness": close,
        "custom_kernels": pl.List(pl.String),
        "outputs_match": pl.Boolean,
    }
    return pl.DataFrame(list(rows), schema_overrides=types, infer_schema_length=None)


def value(
    rows: list[ScoreRow], metric: str, k: int | None = 1, track: str = "any", **facts: Any
) -> float | None:
    (found,) = [
        r
        for r in rows
        if (r.metric, r.k, r.track) == (metric, k, track)
        and all(getattr(r, n) == v for n, v in facts.items())
    ]
    return found.value


# -- KernelBench's published formulas, written from arXiv 2502.10517 and nothing of ours -----------


def kernelbench_fast_p(results: list[tuple[bool, float]], p: float) -> Fraction:
    """Section 3.3: fast_p = 1/N sum over tasks of 1(correct_i and speedup_i > p), one sample a
    task."""
    return Fraction(sum(1 for correct, speedup in results if correct and speedup > p), len(results))


def kernelbench_fast_p_at_k(results: list[list[tuple[bool, float]]], p: float, k: int) -> Fraction:
    """Its section on repeated sampling: 1/N sum of 1 - C(n - c, k) / C(n, k), c of a task's n
    samples correct and faster than p."""
    total = Fraction(0)
    for samples in results:
        n, c = len(samples), sum(1 for correct, speedup in samples if correct and speedup > p)
        total += 1 - Fraction(math.comb(n - c, k), math.comb(n, k))
    return total / len(results)


SAMPLE = st.tuples(
    st.booleans(), st.sampled_from([0.1, 0.5, 0.79, 0.8, 0.81, 1.0, 1.2, 1.5, 2.0, 9.0])
)
RESULTS = st.integers(1, 6).flatmap(
    lambda n: st.lists(st.lists(SAMPLE, min_size=n, max_size=n), min_size=1, max_size=5)
)


@given(RESULTS)
@settings(max_examples=60, deadline=None)
def test_scores_are_kernelbenchs_to_the_last_digit(results: list[list[tuple[bool, float]]]) -> None:
    rows = [
        row("m", f"t{i}", speed if right else FAILED)
        for i, samples in enumerate(results)
        for right, speed in samples
    ]
    ps = BenchmarkConfig().ps
    ks = range(1, len(results[0]) + 1)
    scores = score(frame(*rows), ks=ks, ps=ps, resamples=1)
    for k, p in itertools.product(ks, ps):
        assert value(scores, f"fast_{p:g}", k) == pytest.approx(
            float(kernelbench_fast_p_at_k(results, p, k)), abs=1e-12
        )
    assert value(scores, "exec") == value(scores, "fast_0")
    firsts = [samples[0] for samples in results]
    alone = score(
        frame(
            *(
                row("m", f"t{i}", speed if right else FAILED)
                for i, (right, speed) in enumerate(firsts)
            )
        ),
        ks=(1,),
        ps=ps,
    )
    for p in ps:
        assert value(alone, f"fast_{p:g}") == pytest.approx(
            float(kernelbench_fast_p(firsts, p)), abs=1e-15
        )


def test_the_defaults_are_the_thresholds_and_ks_of_the_plan() -> None:
    assert BenchmarkConfig().ps == (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
    assert BenchmarkConfig(samples_per_task=10).ks == (1, 5, 10)
    assert {"fast_0.8", "fast_1.2"} <= {
        r.metric for r in score(frame(row("m", "a", 1.0)), ks=(1,), ps=BenchmarkConfig().ps)
    }


# -- KernelBench's tolerances ----------------------------------------------------------------------


def close(both: bool | None, loose: bool | None) -> dict[str, Any]:
    return {"correctness": {"kernelbench_1e4": both, "kernelbench_1e2": loose}}


@pytest.mark.parametrize(
    ("outcome", "facts", "any_by_rule", "custom_by_rule"),
    [
        pytest.param(2.0, close(True, True), (1, 1, 1), (1, 1, 1), id="right by all"),
        pytest.param(
            "wrong_output",
            close(False, True) | {"custom_kernels": ["k"]},
            (0, 1, 0),
            (0, 1, 0),
            id="half precision",
        ),
        pytest.param(
            "shape_specialised",
            close(True, True) | {"custom_kernels": ["k"]},
            (0, 1, 1),
            (0, 1, 1),
            id="not looked for there",
        ),
        pytest.param(
            "no_custom_kernel",
            close(True, True) | {"outputs_match": True},
            (1, 1, 1),
            (0, 0, 0),
            id="torch did the work",
        ),
        pytest.param(
            "input_mutated",
            close(True, True) | {"custom_kernels": ["k"]},
            (0, 1, 1),
            (0, 0, 0),
            id="a cheat",
        ),
        pytest.param(
            "crashed",
            close(True, True) | {"custom_kernels": ["k"]},
            (0, 0, 0),
            (0, 0, 0),
            id="crashed after the first trial",
        ),
        pytest.param(
            "build_failed", {"correctness": None}, (0, 0, 0), (0, 0, 0), id="never compared"
        ),
        pytest.param("wrong_output", close(None, None), (0, 0, 0), (0, 0, 0), id="not recorded"),
        pytest.param(
            2.0, close(False, False), (1, 0, 0), (1, 0, 0), id="outside an absolute tolerance"
        ),
    ],
)
def test_rules_part_where_the_harnesses_do(
    outcome: Any, facts: dict[str, Any], any_by_rule: Any, custom_by_rule: Any
) -> None:
    made = frame(row("m", "a", outcome, **facts), row("m", "b", FAILED))
    for rule, right, custom in zip(
        ("concur", "kernelbench_v0", "kernelbench_v0.1"), any_by_rule, custom_by_rule, strict=True
    ):
        scores = score(made, ks=(1,), ps=(), rule=rule)  # type: ignore[arg-type]
        assert (value(scores, "exec"), value(scores, "exec", track="custom_kernel")) == (
            right / 2,
            custom / 2,
        ), rule
        assert {r.rule for r in scores} == {rule}


def test_a_tolerance_that_was_not_recorded_is_asked_for() -> None:
    with pytest.raises(UsageError, match="correctness, custom_kernels"):
        score(
            frame(row("m", "a", 1.0)).drop("correctness", "custom_kernels"),
            ks=(1,),
            ps=(),
            rule="kernelbench_v0",
        )


def test_degenerate_tasks_count_where_asked_and_broken_ones_never() -> None:
    made = frame(
        row("m", "a", 2.0),
        row("m", "flat", "degenerate_task"),
        row("m", "flat", "no_code_block"),
        row("m", "bad", "reference_failed"),
    )
    assert excluded_tasks(made) == ["bad", "flat"] and excluded_tasks(
        made, count_degenerate=True
    ) == ["bad"]
    without, with_them = (
        score(made, ks=(1,), ps=(), count_degenerate=count) for count in (False, True)
    )
    assert (value(without, "exec"), value(with_them, "exec")) == (1.0, 0.5)
    assert {r.degenerate_counted for r in with_them} == {True}


def test_variants_are_labelled_and_leave_out_what_is_not_recorded() -> None:
    made = frame(row("m", "a", 2.0), row("m", "b", FAILED), row("m", "flat", "degenerate_task"))
    found = {
        (r.rule, r.degenerate_counted, r.interval)
        for r in variants(made, ks=(1,))
        if r.metric == "exec" and r.track == "any"
    }
    rules = ("concur", "kernelbench_v0", "kernelbench_v0.1")
    assert found == {
        ("concur", False, "hierarchical"),
        *((rule, True, "bootstrap") for rule in rules),
    } | {(rule, False, "bootstrap") for rule in rules[1:]}
    bare = made.filter(pl.col("task_id") != "flat").drop("correctness", "custom_kernels")
    assert {(r.rule, r.degenerate_counted) for r in variants(bare, ks=(1,))} == {("concur", False)}


# -- the spread of speedups ------------------------------------------------------------------------


def test_quantiles_are_numpys_over_all_correct_samples_with_intervals_over_tasks() -> None:
    speeds = {f"t{i}": [0.2 * (i + 1), 0.5 + i] for i in range(12)}
    made = frame(
        *(row("m", task, s) for task, pair in speeds.items() for s in pair), row("m", "t0", FAILED)
    )
    rows = [r for r in distribution(made, resamples=300) if r.track == "custom_kernel"]
    every = [s for pair in speeds.values() for s in pair]
    assert [r.value for r in rows] == pytest.approx(
        np.quantile(every, [0.1, 0.25, 0.5, 0.75, 0.9]).tolist()
    )
    assert all(
        r.lower is not None and r.upper is not None and r.lower <= (r.value or 0) <= r.upper
        for r in rows
    )
    assert {(r.tasks, r.samples) for r in rows} == {(12, 24)}


def test_one_task_or_none_gives_no_interval_or_no_number() -> None:
    (lone,) = [
        r
        for r in distribution(frame(row("m", "a", 2.0), row("m", "b", FAILED)), quantiles=(0.5,))
        if r.track == "any"
    ]
    assert (lone.value, lone.lower, lone.tasks) == (2.0, None, 1)
    (none,) = [
        r for r in distribution(frame(row("m", "b", FAILED)), quantiles=(0.5,)) if r.track == "any"
    ]
    assert none.value is None and "no correct" in none.why_not


# -- many comparisons ------------------------------------------------------------------------------


def three_models() -> pl.DataFrame:
    """`good` solves everything, `same` what `base` solves."""
    solved = {"base": lambda i: i % 4 == 0, "same": lambda i: i % 4 == 1, "good": lambda i: True}
    return frame(
        *(
            row(model, f"t{i:02}", 2.0 if right(i) else FAILED)
            for model, right in solved.items()
            for i in range(24)
        )
    )


def test_all_pairs_are_compared_and_corrected_together() -> None:
    rows = compare_all(three_models(), resamples=300)
    found = {
        (r.baseline, r.model): r for r in rows if r.track == "custom_kernel" and r.metric == "exec"
    }
    assert set(found) == {("base", "same"), ("base", "good"), ("same", "good")}
    better, alike = found["base", "good"], found["base", "same"]
    assert better.difference == pytest.approx(0.75) and better.p is not None and better.p < 0.001
    assert alike.difference == 0 and alike.p == 1.0
    assert all(r.p_holm is not None and r.p is not None and r.p <= r.p_holm <= 1 for r in rows)
    # six tests a track: three pairs, Exec and fast_1
    smallest = min(r.p for r in rows if r.p is not None)
    assert better.p_holm == pytest.approx(6 * smallest) or better.p_holm == pytest.approx(
        min(1, 6 * better.p)
    )
    with pytest.raises(UsageError, match="'nobody'"):
        compare_all(three_models(), pairs=[("base", "nobody")])


def test_holm_by_hand() -> None:
    """Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.5 x 1, each at least the one before."""
    assert holm([0.03, 0.01, None, 0.5, 0.02]) == pytest.approx([0.06, 0.04, None, 0.5, 0.06])
    assert holm([]) == [] and holm([None]) == [None]


def test_a_pair_has_the_p_of_its_tasks() -> None:
    rows = [row("base", f"t{i}", FAILED) for i in range(6)] + [
        row("tuned", f"t{i}", 2.0) for i in range(6)
    ]
    (found,) = [
        r
        for r in compare(frame(*rows), baseline="base", model="tuned", ks=(1,), ps=())
        if r.track == "any"
    ]
    assert found.p == 2 / 2**6 and found.p_holm is None


# -- bad input -------------------------------------------------------------------------------------


def test_a_candidate_that_is_there_twice_is_refused_and_in_two_models_is_not() -> None:
    twice = frame(
        row("m", "a", 2.0, candidate_id="x"),
        row("m", "a", 2.0, candidate_id="x"),
        row("m", "b", 2.0),
    )
    with pytest.raises(
        UsageError, match=r"more than once, such as 'x' of model 'm' \(2 times\)"
    ) as caught:
        score(twice, ks=(1,), ps=())
    assert 'unique="candidate_id"' in str(caught.value.hint)
    shared = frame(row("m", "a", 2.0, candidate_id="x"), row("n", "a", 2.0, candidate_id="x"))
    assert len(samples_by_model(shared)) == 2


@pytest.mark.parametrize(
    "act", [lambda f: score(f, ks=(1,), ps=()), lambda f: compare_all(f), lambda f: distribution(f)]
)
def test_verdicts_of_two_devices_are_refused_with_a_way_out(act: Any) -> None:
    mixed = frame(
        row("m", "a", 2.0, device="GPU A"),
        row("n", "a", 2.0, device="GPU B"),
        row("n", "b", "build_failed", device=""),
    )
    with pytest.raises(
        UsageError, match=r"2 devices are mixed: GPU A \(1 of m\); GPU B \(1 of n\)"
    ) as caught:
        act(mixed)
    assert "each verification snapshot by itself" in str(caught.value.hint)


def test_verdicts_that_never_reached_a_device_mix_with_any() -> None:
    made = frame(
        row("m", "a", 2.0),
        row("m", "a", "build_failed", device=""),
        row("m", "a", "no_code_block", device=None),
    )
    assert value(score(made, ks=(1,), ps=()), "exec") == pytest.approx(1 / 3)


def test_a_model_without_samples_on_some_tasks_says_how_many_are_missing() -> None:
    made = frame(row("m", "a", 2.0), row("m", "b", FAILED), row("n", "a", 2.0))
    scores = {
        r.model: r for r in score(made, ks=(1,), ps=()) if r.metric == "exec" and r.track == "any"
    }
    assert (scores["m"].value, scores["m"].tasks, scores["m"].missing) == (0.5, 2, 0)
    assert (scores["n"].value, scores["n"].tasks, scores["n"].missing) == (1.0, 1, 1)
    (paired,) = [
        r for r in compare(made, baseline="m", model="n", ks=(1,), ps=()) if r.track == "any"
    ]
    assert (paired.tasks, paired.difference) == (1, 0.0)


def test_unequal_counts_are_estimated_up_to_the_smallest_and_say_why_not_beyond() -> None:
    made = frame(
        *(row("m", "a", 2.0) for _ in range(5)),
        *(row("m", "b", FAILED) for _ in range(3)),
        row("m", "c", 2.0),
    )
    rows = {
        r.k: r for r in score(made, ks=(1, 3), ps=()) if r.metric == "exec" and r.track == "any"
    }
    assert rows[1].value == pytest.approx(2 / 3) and rows[1].why_not == ""
    assert (
        rows[3].value is None
        and rows[3].why_not
        == "pass@3 needs 3 samples of each task; 1 of 3 tasks have fewer (the least: 1)"
    )
