"""Why a candidate is taken or not: the words on small cases, and that the answer is always the
rule's own."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from tasks.curation.config import STRATEGY_NAMES, CurationConfig
from tasks.curation.explain import CHECKS, explain
from tasks.curation.strategies import BASELINES, RULES, curate
from tests.support.samples import any_samples, frame, sample, samples


def why(candidate_id, *rows, **config):
    return explain(frame(*rows), CurationConfig(**config), candidate_id)


ROWS = samples(
    """a-0 5120 1.2; a-1 3004 1.0; a-2 6000 7.0
    b-0 100 2.0; b-1 100 2.0; b-2 50 - status=incorrect
    c-0 400 1.0 single; c-1 300 1.0 single; c-2 500 1.0 single"""
)
ROWS[5]["reason"] = "wrong_output"


def test_not_the_shortest_not_the_fastest_not_fast_enough_and_no_single_operator():
    said = why("a-0", *ROWS)
    assert (said.taken, said.criterion, said.strategy, said.task_id) == (False, None, "concur", "a")
    assert said.reasons == (
        (
            "concise_and_fast: reasoning 5,120 tokens; the shortest correct of its task has 3,004"
            " (a-1); speedup 1.2; the fastest of its task has 7 (a-2)"
        ),
        "high_speedup: speedup 1.2 is not above 5",
        "single_operator: its task is a fusion, not a single operator",
    )


def test_what_was_taken_says_by_what():
    said = why("a-2", *ROWS)
    assert said.criterion == "high_speedup"
    assert said.reasons[-1] == "high_speedup: speedup 7 is above 5"
    assert "the shortest correct of its task has 3,004" in said.reasons[0]
    said = why("c-1", *ROWS)
    assert said.criterion == "concise_and_fast"
    assert said.reasons == (
        (
            "concise_and_fast: reasoning 300 tokens, the shortest of its task's 3 correct; speedup"
            " 1, the fastest of its task's 3 correct"
        ),
    )


def test_a_tie_names_who_was_taken():
    assert why("b-0", *ROWS).taken
    said = why("b-1", *ROWS)
    assert said.reasons[0].endswith(
        "the shortest of its task's 2 correct, as are 1 others; speedup 2, the fastest of its"
        " task's 2 correct; b-0 (sample 0) of its task was taken"
    )


def test_what_is_not_eligible():
    assert why("b-2", *ROWS).reasons == (
        "status incorrect/wrong_output: only correct samples are taken",
    )
    later = sample("d", 0, 10, 2.0) | {"turn": 2, "parent": "x"}
    assert "turn 2" in why("d-0", *ROWS, later).reasons[0]
    assert why("d-0", *ROWS, later, later_turns=True).taken
    assert why("d-0", *ROWS, sample("d", 0, 0, 2.0)).reasons == ("it has no reasoning to train on",)


def test_strict_demands_come_first():
    said = why("b-0", *ROWS, require_speedup_lower_above=1.9)
    assert (
        said.reasons[0]
        == "the lower bound of its speedup, 1.8, is not above 1.9 (require_speedup_lower_above)"
    )
    assert not said.taken
    assert "names no custom kernel" in why("b-0", *ROWS, require_custom_kernel=True).reasons[0]


def test_the_quota_and_the_turn():
    rows = samples(
        """f-0 100 2.0; s1-0 100 1.0 single; s1-1 200 2.0 single
        s2-0 100 1.0 single; s2-1 200 2.0 single"""
    )
    assert why("s1-0", *rows).criterion == "single_operator"
    assert (
        why("s1-1", *rows).reasons[-1] == "single_operator: s1-0 (sample 0) of its task was taken"
    )
    assert (
        why("s2-0", *rows).reasons[-1]
        == "single_operator: 1 were added and then the quota was met; none of them is of its task"
    )


def test_intervals_that_overlap_or_not():
    for rows, taken, words in (
        ("a-0 100 1.97; a-1 200 2.0", True, "overlap"),
        ("a-0 100 1.0; a-1 200 2.0", False, "do not overlap"),
    ):
        said = why("a-0", *samples(rows), equal_speedups="interval")
        assert said.taken == taken and f"their 95 % intervals {words}" in said.reasons[0]


def test_baselines_say_the_place_in_the_task_and_in_the_order():
    said = why("a-0", *ROWS, strategy="min_length", size=2)
    assert said.reasons == (
        "reasoning 5,120 tokens: number 2 of its task's 3 in the order of the rule",
        "at most 1 of a task: a-1 came first",
    )
    said = why("a-1", *ROWS, strategy="min_length", size=2)
    assert said.reasons[1] == "number 3 of 3 samples in that order; the set of 2 takes 2 of them"
    assert not said.taken
    said = why("c-1", *ROWS, strategy="balanced_min_length", size=2)
    assert (
        said.reasons[1]
        == "number 1 of 1 single operators in that order; the set of 2 takes 1 of them"
    )
    assert said.taken
    untimed = sample("d", 0, 10, None)
    assert why("d-0", *ROWS, untimed, strategy="speedup", size=9).reasons == ("it was not timed",)


def test_thinning_and_moved_reasoning_are_told():
    whole = curate(frame(*ROWS), CurationConfig())["candidate_id"].to_list()
    kept = curate(frame(*ROWS), CurationConfig(size=1))["candidate_id"].to_list()
    left, *_ = [name for name in whole if name not in kept]
    assert (
        why(left, *ROWS, size=1).reasons[-1]
        == f"size 1 keeps 1 of the {len(whole)} samples of the rule, drawn with seed 0"
    )
    moved = curate(frame(*ROWS), CurationConfig(strategy="shuffled_reasoning"))
    for row in moved.iter_rows(named=True):
        said = why(row["candidate_id"], *ROWS, strategy="shuffled_reasoning")
        assert said.reasons[-1] == f"its row holds the reasoning of {row['reasoning_from']}"


def test_a_candidate_that_is_not_there():
    with pytest.raises(UsageError, match="no candidate 'zzz' among 9 rows"):
        why("zzz", *ROWS)


def test_an_explanation_is_frozen():
    with pytest.raises(ValidationError):
        why("a-0", *ROWS).taken = True  # type: ignore[misc]


@pytest.mark.parametrize("strategy", STRATEGY_NAMES)
@given(
    rows=any_samples(max_size=14),
    size=st.sampled_from([None, 2]),
    bound=st.sampled_from([None, 0.9]),
)
@settings(max_examples=5, deadline=None)
def test_every_candidate_can_be_asked_and_the_answer_is_the_rules(strategy, rows, size, bound):
    config = CurationConfig(strategy=strategy, size=size, require_speedup_lower_above=bound)
    table = frame(*rows)
    try:
        taken = dict(curate(table, config).select("candidate_id", "criterion").iter_rows())
    except UsageError:
        return  # nothing to move between
    for row in rows:
        said = explain(table, config, row["candidate_id"])
        assert (said.taken, said.criterion) == (
            row["candidate_id"] in taken,
            taken.get(row["candidate_id"]),
        )
        assert said.reasons and all(said.reasons)


def test_every_rule_has_its_checks():
    assert set(CHECKS) == set(RULES) and not set(CHECKS) & set(BASELINES)
