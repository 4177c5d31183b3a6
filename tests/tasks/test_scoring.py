"""Scores that can be worked out by hand, the difference between the tracks, and what few tasks may
not claim."""

import math

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from kernels_eval.records import Verdict
from tasks.benchmark.comparing import compare_all
from tasks.benchmark.samples import excluded_tasks, remarks, unknown_lengths, within_tokens
from tasks.benchmark.scoring import score
from tasks.benchmark.tables import PUBLISHED, published_table
from tests.support.verdict_rows import BROKEN, CHEAT, WRONG, find, frame, outcomes, row

PS = (0.0, 0.5, 1.0, 1.5, 2.0)
GEOMETRIC = ("geometric_mean_speedup", None)
OWN = "custom_kernel"


def own(scores, metric, k=1, **facts):
    return find(scores, metric, k, OWN, **facts)


def scored(*rows, ks=(1,)):
    return score(frame(*rows), ks=ks, ps=PS)


def test_scores_by_hand():
    scores = scored(
        *outcomes("m", a=(3.0, 0.4, WRONG, WRONG), b=(1.2, WRONG, WRONG, WRONG)), ks=(1, 2)
    )
    for metric, k, value in (
        ("exec", 1, (2 / 4 + 1 / 4) / 2),
        ("exec", 2, ((1 - 1 / 6) + (1 - 3 / 6)) / 2),
        ("fast_0", 1, (2 / 4 + 1 / 4) / 2),
        ("fast_0.5", 1, 1 / 4),
        ("fast_1", 2, 1 / 2),
        ("fast_1.5", 1, 1 / 8),
        (*GEOMETRIC, (3.0 * 0.4 * 1.2) ** (1 / 3)),
    ):
        assert own(scores, metric, k).value == pytest.approx(value), metric
    geometric = own(scores, *GEOMETRIC)
    assert geometric.lower == pytest.approx((3.0 * 0.4) ** (1 / 2))
    assert geometric.upper == pytest.approx(1.2)
    assert {(each.tasks, each.samples) for each in scores} == {(2, 8)}


def test_the_first_track_takes_right_outputs_without_a_custom_kernel():
    cheats = [row("m", "a", CHEAT, outputs_match=match) for match in (True, False, None)]
    forbidden = row("m", "a", "forbidden_call", outputs_match=True)
    scores = scored(*cheats, row("m", "a", 2.0), forbidden)
    assert own(scores, "exec").value == pytest.approx(0.2)
    assert find(scores, "exec").value == find(scores, "fast_0").value == pytest.approx(0.4)
    # a rejected kernel has no timing: beyond 0 nothing is claimed for it
    assert find(scores, "fast_0.5").value == pytest.approx(0.2)
    assert find(scores, *GEOMETRIC).value == pytest.approx(2.0)


def test_tracks_agree_with_the_verdicts_own_properties():
    timing = {"reference_ms": 0.7, "candidate_ms": 1.0, "speedup": 0.7, "speedup_lower": 0.7}
    timing |= {"speedup_upper": 0.7, "pairs": 1, "calls_per_sample": 1, "clock_bound_ms": 1.0}
    found = [
        {"status": "rejected", "reason": CHEAT, "outputs_match": True},
        {"status": "incorrect", "reason": WRONG, "outputs_match": False},
        {"status": "correct", "reason": "ok", "outputs_match": True, "timing": timing},
        {"status": "timeout", "reason": "run"},
    ]
    verdicts = [
        Verdict(candidate_id=f"c{n}", task_id="a", language="cpp", **each)
        for n, each in enumerate(found)
    ]
    rows = [verdict.model_dump(mode="json") | {"model": "m"} for verdict in verdicts]
    scores = score(pl.DataFrame(rows, infer_schema_length=None), ks=(1,), ps=PS)
    assert find(scores, "exec").value == sum(v.correct_any for v in verdicts) / 4
    assert own(scores, "exec").value == sum(v.correct_custom for v in verdicts) / 4
    assert own(scores, "fast_0.5").value == sum(v.speedup > 0.5 for v in verdicts) / 4


def test_k_beyond_the_samples_is_reported_as_none_never_invented():
    found = own(scored(*outcomes("m", a=[2.0] * 5, b=[2.0] * 4), ks=(1, 5)), "exec", 5)
    assert (found.value, found.lower, found.upper, found.interval) == (None, None, None, None)


def test_zeros_are_zero_with_an_interval_that_admits_ignorance():
    scores = scored(*outcomes("m", **dict.fromkeys("abcd", [WRONG] * 5)), ks=(1, 5))
    found = own(scores, "fast_1", 5)
    assert (found.value, found.lower, found.interval) == (0.0, 0.0, "plus_four")
    # 20 samples in 4 tasks are not 20 trials: 2 of 8, with t of 7 degrees of freedom
    assert found.upper == pytest.approx(0.25 + 2.3646 * (0.25 * 0.75 / 7) ** 0.5, abs=1e-4)
    assert own(scores, *GEOMETRIC).value is None


def test_one_task_does_not_bound_a_speedup_and_barely_bounds_a_rate():
    found = own(scored(*outcomes("m", a=(2.0, 3.0), b=(WRONG,))), *GEOMETRIC)
    assert found.value == pytest.approx(6**0.5) and found.lower is None
    alone = own(scored(row("m", "a", 2.0)), "exec")
    assert alone.value == 1.0 and alone.lower is not None and alone.lower < 0.25


def test_a_broken_task_counts_against_nobody():
    rows = outcomes("m", a=(2.0,), bad=(BROKEN,)) + outcomes("n", a=(WRONG,), bad=("truncated",))
    scores = scored(*rows)
    assert excluded_tasks(frame(*rows)) == ["bad"]
    first, second = (own(scores, "exec", model=model) for model in ("m", "n"))
    assert (first.value, first.tasks, second.value, second.samples) == (1.0, 1, 0.0, 1)


def test_a_task_is_left_out_where_its_reference_fails_for_most_that_reached_it():
    rows = outcomes("m", a=(2.0, BROKEN, WRONG), bad=(BROKEN, BROKEN, 2.0, "truncated"))
    rows += outcomes("n", a=(2.0, 2.0, 2.0), even=(BROKEN, 2.0, WRONG))
    assert excluded_tasks(frame(*rows)) == ["bad"]
    scores = scored(*rows)
    alone, other = (own(scores, "exec", model=model) for model in ("m", "n"))
    assert (alone.value, alone.tasks, alone.samples) == (pytest.approx(1 / 3), 1, 3)
    assert (other.tasks, other.samples) == (2, 6)
    said = remarks(frame(*rows))
    assert said["excluded"].endswith("reached it: bad (2 candidates).")
    assert "2 candidates of tasks where it works for most" in said["task_errors"]
    assert said["task_errors"].endswith("a (1), even (1).")
    assert remarks(frame(*outcomes("m", a=(2.0, WRONG)))) == {}


def test_verdicts_without_a_status_and_speedups_without_an_end_are_counted_and_said():
    rows = outcomes("m", a=(2.0, math.inf, math.nan, -1.0), b=(4.0,))
    rows.append(row("m", "b", WRONG) | {"status": None})
    scores, said = scored(*rows), remarks(frame(*rows))
    assert said["without_status"].startswith("1 verdicts have no status")
    assert said["speedups"].startswith("3 speedups are infinite")
    assert own(scores, "fast_2").value == pytest.approx((0 + 1 / 2) / 2)  # none of the endless
    assert own(scores, "exec").value == pytest.approx((1 + 1 / 2) / 2)
    assert own(scores, *GEOMETRIC).value == pytest.approx(8**0.5)


def test_an_answer_above_a_limit_of_tokens_is_none():
    rows = outcomes("m", a=(2.0, 3.0, WRONG), bad=(BROKEN,)) + outcomes("n", a=(2.0,))
    for each, tokens in zip(rows, (100, 101, None, 5, None), strict=True):
        each["completion_tokens"] = tokens
    cut = within_tokens(frame(*rows), 100)
    assert cut["status"].to_list() == ["correct", "no_code", "incorrect", "correct"]
    assert cut["reason"][1] == "truncated" and cut["timing"].is_null()[1]
    assert own(score(cut, ks=(1,), ps=PS), "exec", model="m").value == pytest.approx(1 / 3)
    assert unknown_lengths(cut) == {"n": 1}


def test_a_model_with_nothing_to_score_has_none_everywhere():
    scores = scored(row("m", "bad", BROKEN))
    assert len(scores) == 2 * (1 + len(PS) + 1)
    assert all(each.value is None and each.lower is None and each.tasks == 0 for each in scores)


OUTCOMES = st.tuples(st.sampled_from("abc"), st.sampled_from([WRONG, CHEAT, 0.3, 1.0, 4.0]))


@given(st.lists(OUTCOMES, min_size=1, max_size=12))
@settings(max_examples=25, deadline=None)
def test_rates_are_bounded_ordered_and_repeatable(found):
    read = frame(*(row("m", task, outcome, outputs_match=True) for task, outcome in found))
    scores = score(read, ks=(1, 2), ps=PS, resamples=100)
    assert scores == score(read, ks=(1, 2), ps=PS, resamples=100)
    metrics = ("exec", "fast_0", "fast_0.5", "fast_1", "fast_1.5", "fast_2")
    for track in ("any", OWN):
        for k in (1, 2):
            rates = [find(scores, name, k, track).value for name in metrics]
            known = [rate for rate in rates if rate is not None]
            assert len(known) in (0, len(rates)) and known == sorted(known, reverse=True)
    for each in scores:
        if each.metric in metrics and each.value is not None and each.lower is not None:
            assert 0 <= each.lower <= each.value + 1e-12
            assert each.value - 1e-12 <= (each.upper or 0.0) <= 1 + 1e-12


def test_comparison_pairs_tasks():
    """Both models find task a easy and b hard; only the pairing shows that one is better on
    each."""
    rows = outcomes("base", a=(2.0, 2.0, WRONG, WRONG), b=[WRONG] * 4)
    rows += outcomes("tuned", a=(2.0, 2.0, 2.0, WRONG), b=(2.0, 2.0, WRONG, WRONG))
    found = compare_all(frame(*rows), pairs=[("base", "tuned")], ks=(1, 9), ps=PS)
    (pair,) = [each for each in found if (each.track, each.metric) == (OWN, "exec")]
    assert pair.difference == pytest.approx((0.25 + 0.5) / 2) and (pair.tasks, pair.k) == (2, 1)
    assert (pair.lower, pair.upper) == (pytest.approx(0.25), pytest.approx(0.5))
    assert {each.k for each in found} == {1}


def test_comparison_uses_shared_tasks_and_does_not_call_a_constant_difference_certain():
    made = frame(*outcomes("base", a=(WRONG,), only=(2.0,)), row("tuned", "a", 2.0))
    pair = compare_all(made, pairs=[("base", "tuned")])[0]
    assert (pair.difference, pair.tasks, pair.lower) == (1.0, 1, None)
    with pytest.raises(UsageError, match="'nobody'"):
        compare_all(made, pairs=[("base", "nobody")])


def test_a_frame_without_models_is_refused():
    with pytest.raises(UsageError, match="model"):
        score(frame(row("m", "a", 1.0)).drop("model"), ks=(1,), ps=PS)


def test_published_rows_are_shares_with_a_source_and_a_mark():
    keys = [(each["model"], each["level"], each["metric"], each["k"]) for each in PUBLISHED]
    assert len(keys) == len(set(keys)) == 25
    assert all(0 < each["value"] < 1 and "2510.07356" in each["source"] for each in PUBLISHED)
    table = published_table()
    rows = {str(cells[0]): dict(zip(table.header, cells, strict=True)) for cells in table.rows}
    assert all(name.endswith(" (r)") for name in rows)
    assert rows["KernelCoder (r)"]["L2 fast_1@10"] == "68"
    assert rows["DeepSeek-R1-0528 (r)"]["L1 Exec@10"] == ""
