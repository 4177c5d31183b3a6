"""Groups of tasks, and what to look at: a sign is said where the numbers show it, with these
numbers, and else not."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.benchmark.errors import error_groups, first_error, signature
from tasks.benchmark.groups import length_groups, level_groups, operator_groups
from tasks.benchmark.signs import (
    Traces,
    correct_but_slow,
    cut_off,
    gap,
    level_gap,
    missed_bottleneck,
    signs,
    verbose,
)
from tasks.scores import scores, wilson_interval
from tests.support import verdict_rows
from tests.support.cases import cases
from tests.support.verdict_rows import frame, scored_row

CASES = cases("benchmark")


def row(task, outcome, model="tuned", **facts):
    return verdict_rows.row(model, task, outcome, **facts)


def levels(one, two, tasks=50, speedup=0.5):
    """`one` and `two` of so many tasks of levels 1 and 2 are solved."""
    solved = {1: one, 2: two}
    return frame(
        *(
            row(f"L{level}/{i}", speedup if i < solved[level] else "wrong_output")
            for level in solved
            for i in range(tasks)
        )
    )


TASKS = pl.DataFrame(
    {
        "task_id": [f"L{level}/{i}" for level in (2, 1) for i in range(50)] + ["own"],
        "level": [2] * 50 + [1] * 50 + [None],
    }
)


def by_group(groups, verdicts):
    joined = groups.join(verdicts, on="task_id", maintain_order="left_right")
    return scores(joined, by=("group", "model"), resamples=0)


def by_level(*solved, **facts):
    return by_group(level_groups(TASKS), levels(*solved, **facts))


def members(groups):
    return dict(groups.group_by("group", maintain_order=True).agg("task_id").iter_rows())


# -- groups ----------------------------------------------------------------------------------------


def test_levels_are_in_order_and_tasks_without_one_in_no_group():
    assert list(members(level_groups(TASKS))) == ["1", "2"]
    assert "own" not in level_groups(TASKS)["task_id"]


def test_families_overlap_kinds_do_not_and_what_was_not_counted_comes_last():
    found = operator_groups(pl.DataFrame(CASES["workloads"]))
    assert members(found["operator_kind"]) == CASES["operator_kinds"]
    assert list(map(list, members(found["operator_family"]).items())) == CASES["operator_families"]
    verdicts = frame(row("a", 2.0), row("b", "wrong_output"))
    rows = by_group(found["operator_family"], verdicts)
    matmul = scored_row(rows, "exec", group="matmul")
    assert (matmul["value"], matmul["tasks"]) == (0.5, 2)
    assert "not counted" not in rows["group"], "no verdict is there"


def test_thirds_by_mean_length_leave_unknown_lengths_out():
    lengths = pl.DataFrame(CASES["lengths"], schema_overrides={"reasoning_tokens": pl.Int64})
    assert members(length_groups(lengths)) == CASES["thirds"]
    assert length_groups(lengths.head(3)).is_empty()


def test_thirds_are_taken_within_levels():
    """Else the long third would be the level with the longer limit."""
    ids = [f"kernelbench/L{level}/{task}" for level in (1, 2) for task in range(6)]
    rows = pl.DataFrame({"task_id": ids, "reasoning_tokens": [*range(900, 906), *range(100, 106)]})
    for number, tasks in enumerate(members(length_groups(rows)).values()):
        assert sorted(tasks) == [ids[2 * number + place] for place in (0, 1, 6, 7)]


# -- signs -----------------------------------------------------------------------------------------


def test_the_gap_of_two_groups_covers_the_truth():
    """Two groups of 60 tasks that are solved at 20 and 45 %: 95 of 100 intervals hold 25 points."""
    rng, hits, runs = np.random.default_rng(0), 0, 400

    def scored(share):
        solved = int(rng.binomial(60, share))
        return {"value": solved / 60, **wilson_interval(solved, 60)._asdict()}

    for _ in range(runs):
        found = gap(scored(0.45), scored(0.20))
        hits += found[1].lower <= 0.25 <= found[1].upper
    assert 0.925 <= hits / runs <= 0.98
    assert gap({"value": None}, scored(0.2)) is None


def test_wilson_against_published_values():
    # Newcombe 1998, Statistics in Medicine 17:857, table I, method 3
    assert wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=1e-4)
    assert wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=1e-4)


def gap_of(*solved, single=None):
    return level_gap(by_level(*solved).filter(model="tuned"), 1, single)


@pytest.mark.parametrize(
    "single, said",
    [
        ((196, 4892), "196 of the 4,892 samples of the training set are single operators: add"),
        ((500, 1000), "not the likely cause"),
        (None, "points (Exec@1)."),
    ],
)
def test_level_2_above_level_1_is_reported_with_its_likely_cause(single, said):
    found = gap_of(15, 30, single=single)
    assert found.startswith("level 2 is above level 1 by +30.0 (+") and said in found


@pytest.mark.parametrize("one, two", [(15, 18), (30, 15), (20, 26)])
def test_no_gap_is_said_where_it_is_small_reversed_or_within_chance(one, two):
    assert gap_of(one, two) == ""


def slow_of(verdicts):
    return correct_but_slow(scores(verdicts).rows_by_key("metric", named=True, unique=True))


def test_high_exec_and_low_fast_1_is_reported_with_the_speedup():
    found = slow_of(levels(40, 40))
    assert "(Exec@1 80.0%), few of them fast (fast_1@1 0.0%, mean speedup 0.50)" in found
    for quiet in (levels(40, 40, speedup=2.0), levels(5, 5), levels(0, 0)):
        assert slow_of(quiet) == ""


def test_verbose_outputs_are_held_against_the_untrained_model_and_the_training_set():
    before = Traces(samples=400, flagged={"self_doubting": 40}, median_tokens=4000)
    now = Traces(samples=400, flagged={"self_doubting": 140, "repetitive": 10}, median_tokens=9000)
    training = Traces(samples=5000, flagged={"self_doubting": 1050})
    assert verbose(now, before, training).startswith(
        "outputs are self-doubting (35.0%, before 10.0%), 2.25 times as long as before training."
        " The training set contains such traces (self-doubting 21.0%) and teaches this"
    )
    # 17.5 % of 40 may be chance
    slightly = Traces(samples=40, flagged={"self_doubting": 7}, median_tokens=4100)
    assert verbose(before, before, training) == verbose(slightly, before, training) == ""
    assert verbose(now, None, None) == "outputs are self-doubting (35.0%)."
    assert verbose(Traces(samples=0), None, None) == ""


def test_answers_that_were_cut_off_are_reported():
    verdicts = frame(*[row("a", "truncated")] * 30, *[row("a", 2.0)] * 70)
    assert cut_off(verdicts).startswith("30 of 100 answers ran into the token limit")
    assert cut_off(verdicts.tail(75)) == cut_off(verdicts.clear()) == ""


def slow(*shares, speedup=0.5):
    calls = {"library_calls": ["aten::empty", "aten::convolution"]}
    return frame(
        *(
            row(f"t{i}", speedup, custom_kernel_time_share=share, **calls)
            for i, share in enumerate(shares)
        )
    )


def test_kernels_that_leave_the_time_to_torch_are_reported_with_what_they_call():
    verdicts = slow(*[0.1] * 8, *[0.9] * 2)
    found = missed_bottleneck(verdicts)
    assert found.startswith("8 of 10 correct kernels") and "aten::convolution 8" in found
    # four are no pattern, two of ten may be chance
    for fine in (
        slow(*[0.9] * 10),
        slow(*[0.1] * 10, speedup=2.0),
        slow(*[0.1] * 4),
        slow(*[0.1] * 2, *[0.9] * 8),
        verdicts.drop("library_calls"),
    ):
        assert missed_bottleneck(fine) == ""


def test_every_sign_is_named_and_training_is_not_blamed_for_the_model_before_it():
    tuned = levels(15, 40)
    base = tuned.with_columns(model=pl.lit("base"), candidate_id="b" + pl.col("candidate_id"))
    both = pl.concat([tuned, base])
    found = signs(
        scores(both, ks=(1, 5)),
        by_group(level_groups(TASKS), both),
        both,
        {
            "base": Traces(samples=100),
            "tuned": Traces(samples=100, flagged={"ends_in_loop": 60}),
        },
        training=Traces(samples=10),
        single_operator=(4, 100),
        untrained="base",
    )
    expected = ["level 2 above level 1", "correct but slow"]
    assert [(f.model, f.sign) for f in found] == [
        *(("tuned", sign) for sign in (*expected, "verbose")),
        *(("base", sign) for sign in expected),
    ]
    assert "training set" in found[0].sentence and "training set" not in found[3].sentence


def test_without_levels_the_other_signs_are_still_looked_for():
    made = levels(40, 40)
    (found,) = signs(scores(made), pl.DataFrame(), made, {})
    assert found.sign == "correct but slow" and found.sentence.startswith("tuned: many correct")


# -- typical errors --------------------------------------------------------------------------------


@pytest.mark.parametrize("log, detail, expected", CASES["first_errors"])
def test_the_first_error_line_is_found(log, detail, expected):
    assert first_error(log, detail) == expected


@pytest.mark.parametrize("line, expected", CASES["signatures"])
def test_a_signature_holds_no_place_no_name_and_no_number(line, expected):
    assert signature(line) == expected


@given(
    st.integers(1, 999),
    st.integers(1, 99),
    st.from_regex(r"[a-z][a-z_]{0,12}", fullmatch=True),
    st.floats(0, 1e9),
)
def test_failures_alike_have_one_signature(line, column, name, number):
    made = signature(
        f"{name}/main.cpp:{line}:{column}: error: no matching function for call to"
        f" '{name}({number})' with {line} arguments"
    )
    assert made == "no matching function for call to '…' with N arguments"


@given(st.text(max_size=400))
def test_any_line_has_a_short_signature(text):
    assert len(signature(text)) <= 160 and "\n" not in signature(text)


def test_groups_count_failures_tasks_and_models_and_leave_wrong_outputs_out():
    undeclared = [
        f"main.cpp:{i}:1: error: '{name}' was not declared in this scope"
        for i, name in enumerate(["d", "d", "rmax"])
    ]
    verdicts = frame(
        *(row(f"t{i % 2}", "build_failed", log_tail=line) for i, line in enumerate(undeclared)),
        row("t9", "build_failed", "base", log_tail=undeclared[0]),
        row("t1", "exception", detail="TypeError: x"),
        row("t1", "wrong_output", detail="relative RMS error"),
    )
    found = error_groups(verdicts)
    assert [[g.count, g.tasks, g.reason, list(g.names)] for g in found] == CASES["error_groups"]
    assert found[0].models == {"tuned": 3, "base": 1} and found[0].example == undeclared[0]
    assert error_groups(verdicts, limit=1) == found[:1]


@pytest.mark.parametrize("unit", ["'", "/", "a/", "error " + "1" * 8000, "Error", "(1)"])
def test_a_long_hostile_log_takes_linear_time(unit):
    """A regular expression that backtracks would need hours, and end at the test's time limit."""
    assert len(signature(first_error(unit * (80_000 // len(unit))))) <= 160
