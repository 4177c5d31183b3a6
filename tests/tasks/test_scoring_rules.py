"""Scores as other people count them: KernelBench's formulas and tolerances, degenerate tasks, the
spread of speedups, many comparisons."""

import itertools
import math
from fractions import Fraction

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from tasks.benchmark.comparing import compare_all, holm
from tasks.benchmark.config import BenchmarkConfig
from tasks.benchmark.samples import RULES, excluded_tasks, samples_by_model
from tasks.benchmark.scoring import distribution, score, variants
from tests.support.verdict_rows import WRONG as FAILED
from tests.support.verdict_rows import find, frame, outcomes, row


def value(rows, metric, k=1, track="any"):
    return find(rows, metric, k, track).value


def execs(rows):
    return [each for each in rows if (each.metric, each.track) == ("exec", "any")]


# -- KernelBench's published formulas, written from arXiv 2502.10517 and nothing of ours -----------


def kernelbench_fast_p_at_k(results, p, k):
    """Its section on repeated sampling: 1/N sum of 1 - C(n - c, k) / C(n, k), c of a task's n
    samples correct and faster than p. With one sample a task, section 3.3's fast_p."""
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
def test_scores_are_kernelbenchs_to_the_last_digit(results):
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


def test_the_defaults_are_the_thresholds_and_ks_of_the_plan():
    assert BenchmarkConfig().ps == (0.0, 0.5, 0.8, 1.0, 1.2, 1.5, 2.0)
    assert BenchmarkConfig(samples_per_task=10).ks == (1, 5, 10)


# -- KernelBench's tolerances ----------------------------------------------------------------------


def close(both, loose):
    return {"correctness": {"kernelbench_1e4": both, "kernelbench_1e2": loose}}


KERNEL = {"custom_kernels": ["k"]}


@pytest.mark.parametrize(
    "outcome, facts, any_by_rule, custom_by_rule",
    [
        pytest.param(2.0, close(True, True), "111", "111", id="right by all"),
        pytest.param(FAILED, close(False, True) | KERNEL, "010", "010", id="half precision"),
        pytest.param(
            "shape_specialised", close(True, True) | KERNEL, "011", "011", id="not looked for there"
        ),
        pytest.param(
            "no_custom_kernel",
            close(True, True) | {"outputs_match": True},
            *("111", "000"),
            id="torch did the work",
        ),
        pytest.param("input_mutated", close(True, True) | KERNEL, "011", "000", id="a cheat"),
        pytest.param(
            "crashed", close(True, True) | KERNEL, "000", "000", id="crashed after the first trial"
        ),
        pytest.param("build_failed", {"correctness": None}, "000", "000", id="never compared"),
        pytest.param(FAILED, close(None, None), "000", "000", id="not recorded"),
        pytest.param(2.0, close(False, False), "100", "100", id="outside an absolute tolerance"),
    ],
)
def test_rules_part_where_the_harnesses_do(outcome, facts, any_by_rule, custom_by_rule):
    made = frame(row("m", "a", outcome, **facts), row("m", "b", FAILED))
    for rule, right, custom in zip(RULES, any_by_rule, custom_by_rule, strict=True):
        scores = score(made, ks=(1,), ps=(), rule=rule)
        assert value(scores, "exec") == int(right) / 2, rule
        assert value(scores, "exec", track="custom_kernel") == int(custom) / 2, rule
        assert {r.rule for r in scores} == {rule}


def test_a_tolerance_that_was_not_recorded_is_asked_for():
    with pytest.raises(UsageError, match="correctness, custom_kernels"):
        score(
            frame(row("m", "a", 1.0)).drop("correctness", "custom_kernels"),
            ks=(1,),
            ps=(),
            rule="kernelbench_v0",
        )


def test_degenerate_tasks_count_where_asked_and_broken_ones_never():
    flat = ("degenerate_task", "no_code_block")
    made = frame(*outcomes("m", a=(2.0,), flat=flat, bad=("reference_failed",)))
    assert excluded_tasks(made) == ["bad", "flat"]
    assert excluded_tasks(made, count_degenerate=True) == ["bad"]
    without, with_them = (
        score(made, ks=(1,), ps=(), count_degenerate=count) for count in (False, True)
    )
    assert (value(without, "exec"), value(with_them, "exec")) == (1.0, 0.5)
    assert {r.degenerate_counted for r in with_them} == {True}


def test_variants_are_labelled_and_leave_out_what_is_not_recorded():
    made = frame(*outcomes("m", a=(2.0,), b=(FAILED,), flat=("degenerate_task",)))
    rows = execs(variants(made, ks=(1,)))
    assert {(r.rule, r.degenerate_counted, r.interval) for r in rows} == {
        ("concur", False, "hierarchical"),
        *((rule, True, "plus_four") for rule in RULES),
        *((rule, False, "plus_four") for rule in RULES[1:]),
    }
    bare = made.filter(pl.col("task_id") != "flat").drop("correctness", "custom_kernels")
    assert {(r.rule, r.degenerate_counted) for r in variants(bare, ks=(1,))} == {("concur", False)}


# -- the spread of speedups ------------------------------------------------------------------------


def test_quantiles_are_numpys_over_all_correct_samples_with_intervals_over_tasks():
    speeds = {f"t{i}": [0.2 * (i + 1), 0.5 + i] for i in range(12)}
    made = frame(*outcomes("m", **speeds), row("m", "t0", FAILED))
    rows = [r for r in distribution(made, resamples=300) if r.track == "custom_kernel"]
    expected = np.quantile(list(speeds.values()), [0.1, 0.25, 0.5, 0.75, 0.9])
    assert [r.value for r in rows] == pytest.approx(expected.tolist())
    for r in rows:
        assert None not in (r.value, r.lower, r.upper)
        assert (r.lower or 9) <= (r.value or 0) <= (r.upper or 0)
    assert {(r.tasks, r.samples) for r in rows} == {(12, 24)}


def test_one_task_or_none_gives_no_interval_or_no_number():
    failed = row("m", "b", FAILED)
    lone, none = (
        find(distribution(frame(*rows)), "speedup_q0.5", None)
        for rows in ((row("m", "a", 2.0), failed), (failed,))
    )
    assert (lone.value, lone.lower, lone.tasks) == (2.0, None, 1)
    assert none.value is None and "no correct" in none.why_not


# -- many comparisons ------------------------------------------------------------------------------


def three_models():
    """`good` solves everything, `same` what `base` solves."""
    solved = {"base": lambda i: i % 4 == 0, "same": lambda i: i % 4 == 1, "good": lambda i: True}
    return frame(
        *(
            row(model, f"t{i:02}", 2.0 if right(i) else FAILED)
            for model, right in solved.items()
            for i in range(24)
        )
    )


def test_all_pairs_are_compared_and_corrected_together():
    rows = [r for r in compare_all(three_models(), resamples=300) if r.track == "custom_kernel"]
    found = {(r.baseline, r.model): r for r in rows if r.metric == "exec"}
    assert set(found) == {("base", "same"), ("base", "good"), ("same", "good")}
    better, alike = found["base", "good"], found["base", "same"]
    assert better.difference == pytest.approx(0.75) and (better.p or 1) < 0.001
    assert alike.difference == 0 and alike.p == 1.0
    # six tests a track: three pairs, Exec and fast_1
    assert [r.p_holm for r in rows] == pytest.approx(holm([r.p for r in rows])) and len(rows) == 6
    assert better.p_holm == pytest.approx(6 * min(r.p or 1 for r in rows))


def test_holm_by_hand():
    """Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.5 x 1, each at least the one before."""
    assert holm([0.03, 0.01, None, 0.5, 0.02]) == pytest.approx([0.06, 0.04, None, 0.5, 0.06])
    assert holm([]) == [] and holm([None]) == [None]


def test_a_pair_has_the_p_of_its_tasks():
    tasks = [f"t{i}" for i in range(6)]
    rows = [row(m, t, o) for m, o in (("base", FAILED), ("tuned", 2.0)) for t in tasks]
    found = compare_all(frame(*rows), ps=())
    assert {r.p for r in found} == {r.p_holm for r in found} == {2 / 2**6}


# -- bad input -------------------------------------------------------------------------------------


def test_a_candidate_that_is_there_twice_is_refused_and_in_two_models_is_not():
    same = {"outcome": 2.0, "candidate_id": "x"}
    twice = frame(row("m", "a", **same), row("m", "a", **same), row("m", "b", 2.0))
    with pytest.raises(UsageError, match=r"such as 'x' of model 'm' \(2 times\)") as caught:
        score(twice, ks=(1,), ps=())
    assert 'unique="candidate_id"' in str(caught.value.hint)
    assert len(samples_by_model(frame(row("m", "a", **same), row("n", "a", **same)))) == 2


@pytest.mark.parametrize(
    "act", [lambda f: score(f, ks=(1,), ps=()), lambda f: compare_all(f), lambda f: distribution(f)]
)
def test_verdicts_of_two_devices_are_refused_with_a_way_out(act):
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


def test_verdicts_that_never_reached_a_device_mix_with_any():
    nowhere = [row("m", "a", "build_failed", device=device) for device in ("", None)]
    scores = score(frame(row("m", "a", 2.0), *nowhere), ks=(1,), ps=())
    assert value(scores, "exec") == pytest.approx(1 / 3)


def test_a_model_without_samples_on_some_tasks_says_how_many_are_missing():
    made = frame(*outcomes("m", a=(2.0,), b=(FAILED,)), row("n", "a", 2.0))
    scores = execs(score(made, ks=(1,), ps=()))
    found = {r.model: (r.value, r.tasks, r.missing) for r in scores}
    assert found == {"m": (0.5, 2, 0), "n": (1.0, 1, 1)}
    (paired,) = [r for r in compare_all(made, ps=()) if r.track == "any"]
    assert (paired.tasks, paired.difference) == (1, 0.0)


def test_unequal_counts_are_estimated_up_to_the_smallest_and_say_why_not_beyond():
    made = frame(*outcomes("m", a=[2.0] * 5, b=[FAILED] * 3, c=[2.0]))
    one, three = execs(score(made, ks=(1, 3), ps=()))
    assert one.value == pytest.approx(2 / 3) and one.why_not == "" and three.value is None
    expected = "pass@3 needs 3 samples of each task; 1 of 3 tasks have fewer (the least: 1)"
    assert three.why_not == expected
