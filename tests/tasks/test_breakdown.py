"""Groups of tasks, and what to look at: a signature is said where the numbers show it, with these
numbers, and else not."""

import numpy as np
import polars as pl
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tasks.benchmark.breakdown import arl_groups, gap, level_groups, operator_groups, score_groups
from tasks.benchmark.diagnosis import (
    Evidence,
    Traces,
    correct_but_slow,
    cut_off,
    diagnose,
    level_gap,
    missed_bottleneck,
    verbose,
)
from tasks.benchmark.errors import error_groups, first_error, signature
from tasks.benchmark.metrics import wilson_interval
from tasks.benchmark.scoring import ScoreRow, distribution, score
from tests.support import verdict_rows
from tests.support.cases import cases
from tests.support.verdict_rows import frame

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


def of_levels(verdicts):
    return score_groups(verdicts, {"level": level_groups(TASKS)}, ks=(1,), resamples=300)


# -- groups ----------------------------------------------------------------------------------------


def test_a_group_is_scored_as_its_verdicts_alone_would_be():
    verdicts = levels(10, 30)
    found = of_levels(verdicts)
    assert list(dict.fromkeys(r.group for r in found)) == ["1", "2"]
    own = verdicts.filter(pl.col("task_id").str.starts_with("L2/"))
    alone = score(own, ks=(1,), ps=(1.0,), resamples=300)
    second = [r.model_dump(exclude={"by", "group"}) for r in found if r.group == "2"]
    assert second == [r.model_dump() for r in alone]


def test_families_overlap_kinds_do_not_and_what_was_not_counted_comes_last():
    workloads = pl.DataFrame(CASES["workloads"])
    found = operator_groups(workloads)
    assert found["operator_kind"] == CASES["operator_kinds"]
    assert list(map(list, found["operator_family"].items())) == CASES["operator_families"]
    verdicts = frame(row("a", 2.0), row("b", "wrong_output"))
    rows = score_groups(verdicts, found, ks=(1,), resamples=50)
    matmul = verdict_rows.find(rows, "exec", by="operator_family", group="matmul")
    assert (matmul.value, matmul.tasks) == (0.5, 2)
    assert not [r for r in rows if r.group == "not counted"]  # no verdict is there


def test_thirds_by_mean_length_leave_unknown_lengths_out():
    lengths = pl.DataFrame(CASES["lengths"], schema_overrides={"reasoning_tokens": pl.Int64})
    assert arl_groups(lengths) == CASES["thirds"]
    assert arl_groups(lengths.head(3)) == {}


def test_thirds_are_taken_within_levels():
    """Else the long third would be the level with the longer limit."""
    ids = [f"kernelbench/L{level}/{task}" for level in (1, 2) for task in range(6)]
    rows = pl.DataFrame({"task_id": ids, "reasoning_tokens": [*range(900, 906), *range(100, 106)]})
    for number, tasks in enumerate(arl_groups(rows).values()):
        assert sorted(tasks) == [ids[2 * number + place] for place in (0, 1, 6, 7)]


def test_the_gap_of_two_groups_covers_the_truth():
    """Two groups of 60 tasks that are solved at 20 and 45 %: 95 of 100 intervals hold 25 points."""
    rng, hits, runs = np.random.default_rng(0), 0, 400

    facts = {"model": "m", "track": "any", "metric": "exec", "samples": 60}

    def scored(share):
        solved = int(rng.binomial(60, share))
        lower, upper = wilson_interval(solved, 60)
        return ScoreRow(**facts, value=solved / 60, lower=lower, upper=upper, tasks=60)

    for _ in range(runs):
        found = gap(scored(0.45), scored(0.20))
        hits += found[1].lower <= 0.25 <= found[1].upper
    assert 0.925 <= hits / runs <= 0.98
    assert gap(ScoreRow(**facts, tasks=0), scored(0.2)) is None


# -- signatures ------------------------------------------------------------------------------------


def evidence(**facts):
    return Evidence(**({"single_operator": (196, 4892)} | facts))


def test_level_2_above_level_1_is_reported_with_its_numbers_and_its_likely_cause():
    groups = of_levels(levels(15, 30))
    found = level_gap("tuned", 1, evidence(groups=groups))
    assert found.numbers["difference"] == pytest.approx(0.30)
    assert found.numbers["lower"] > 0 and found.numbers["single_operator_share"] == 196 / 4892
    assert "difference 30.0 %" in found.shown() and "training count 4,892" in found.shown()
    assert "Exec@1" in found.sentence and "add single-operator tasks" in found.sentence
    balanced = level_gap("tuned", 1, evidence(groups=groups, single_operator=(500, 1000)))
    assert "not the likely cause" in balanced.sentence
    unknown = level_gap("tuned", 1, evidence(groups=groups, single_operator=None))
    assert "training set" not in unknown.sentence


@pytest.mark.parametrize("one, two", [(15, 18), (30, 15), (20, 26)])
def test_no_gap_is_said_where_it_is_small_reversed_or_within_chance(one, two):
    assert level_gap("tuned", 1, evidence(groups=of_levels(levels(one, two)))) is None


def test_high_exec_and_low_fast_1_is_reported_with_the_median_speedup():
    verdicts = levels(40, 40, speedup=0.5)
    scores, speedups = (
        score(verdicts, ks=(1,), ps=(1.0,), resamples=300),
        distribution(verdicts, resamples=100),
    )
    found = correct_but_slow("tuned", 1, scores, Evidence(speedups=speedups))
    assert found.numbers["exec"] == pytest.approx(0.8)
    assert found.numbers["fast_1"] == 0 and found.numbers["median_speedup"] == 0.5
    for quiet in (levels(40, 40, speedup=2.0), levels(5, 5, speedup=0.5)):
        rows = score(quiet, ks=(1,), ps=(1.0,), resamples=300)
        assert correct_but_slow("tuned", 1, rows, Evidence()) is None


def test_verbose_outputs_are_held_against_the_baseline_and_the_training_set():
    before = Traces(samples=400, flagged={"self_doubting": 40}, median_tokens=4000)
    now = Traces(samples=400, flagged={"self_doubting": 140, "repetitive": 10}, median_tokens=9000)
    training = Traces(samples=5000, flagged={"self_doubting": 1050})

    def read(traces, before=before):
        known = {"tuned": traces} | ({"base": before} if before else {})
        return verbose("tuned", Evidence(traces=known, training=training, baseline="base"))

    found = read(now)
    assert found.numbers == CASES["verbose"]
    assert found.sentence.startswith("tuned: outputs are self-doubting, longer than base's.")
    assert "The training set contains such traces" in found.sentence
    # 17.5 % of 40 may be chance
    slightly = Traces(samples=40, flagged={"self_doubting": 7}, median_tokens=4100)
    assert read(before) is None and read(slightly) is None
    assert read(now, None) is not None and read(Traces(samples=0), None) is None


def test_answers_that_were_cut_off_are_reported():
    verdicts = frame(
        *(row("a", "truncated") for _ in range(30)), *(row("a", 2.0) for _ in range(70))
    )
    found = cut_off("tuned", verdicts)
    assert found.numbers == {"share": 0.3, "cut_off_count": 30, "answers_count": 100}
    assert cut_off("tuned", verdicts.tail(75)) is None and cut_off("x", verdicts.clear()) is None


CALLS = ["aten::empty", "aten::convolution"]


def slow(*shares, speedup=0.5):
    return frame(
        *(
            row(f"t{i}", speedup, custom_kernel_time_share=share, library_calls=CALLS)
            for i, share in enumerate(shares)
        )
    )


def test_kernels_that_replaced_what_does_not_take_the_time_are_reported():
    verdicts = slow(*[0.1] * 8, *[0.9] * 2)
    found = missed_bottleneck("tuned", verdicts, {})
    assert found.numbers == {"kernels": 10, "share": 0.8, "missed_count": 8}
    assert "spend more than half of their time outside" in found.sentence
    # four are no pattern, two of ten may be chance
    for fine in (
        slow(*[0.9] * 10),
        slow(*[0.1] * 10, speedup=2.0),
        slow(*[0.1] * 4),
        slow(*[0.1] * 2, *[0.9] * 8),
        verdicts.drop("library_calls"),
    ):
        assert missed_bottleneck("tuned", fine, {}) is None


def test_with_a_profile_the_operator_that_was_left_to_torch_is_named():
    verdicts = slow(*[0.9] * 10)

    def of(operator, share):
        spent = {f"t{i}": {operator: share, "rest": 0.1} for i in range(10)}
        return missed_bottleneck("tuned", verdicts, spent)

    found = of("torch.convolution", 0.8)
    assert found.numbers["share"] == 1.0
    assert "to torch (torch.convolution 10)" in found.sentence
    assert of("aten::mm", 0.8) is None
    assert of("aten::convolution", 0.4) is None  # no operator takes most of the time


def test_a_diagnosis_names_every_sign_and_does_not_blame_training_for_the_baseline():
    tuned = levels(15, 40)
    base = tuned.with_columns(model=pl.lit("base"), candidate_id="b" + pl.col("candidate_id"))
    both = pl.concat([tuned, base])
    scores = score(both, ks=(1,), ps=(1.0,), resamples=300)
    found = diagnose(
        scores,
        Evidence(
            groups=of_levels(both),
            traces={
                "base": Traces(samples=100),
                "tuned": Traces(samples=100, flagged={"ends_in_loop": 60}),
            },
            training=Traces(samples=10),
            single_operator=(4, 100),
            verdicts=both,
            baseline="base",
        ),
    )
    signs = ["level_gap", "correct_but_slow"]
    assert [(f.model, f.sign) for f in found] == [
        *(("tuned", sign) for sign in (*signs, "verbose")),
        *(("base", sign) for sign in signs),
    ]
    assert "training set" in found[0].sentence and "training set" not in found[3].sentence
    assert diagnose([]) == ()


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
