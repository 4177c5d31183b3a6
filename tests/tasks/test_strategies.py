"""Every strategy on frames decided by hand, against an oracle in plain Python, and its laws on
arbitrary frames; then unusable input."""

import itertools
import random
import sys
import types
from fractions import Fraction

import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from kernels_eval.records import VERDICT_SCHEMA_VERSION
from tasks.curation.config import STRATEGY_NAMES, CurationConfig
from tasks.curation.decisions import curate, decide
from tasks.curation.draw import draw_numbers
from tasks.curation.reasons import WhyNot
from tasks.curation.strategies import Strategy
from tasks.operators import operator_kind
from tests.support.cases import cases
from tests.support.samples import FUSION, SINGLE, any_samples, frame, listed, sample, samples, taken

CASES = cases("curation")

BASELINES = {name for name in STRATEGY_NAMES if not name.startswith(("concur", "shuffled"))}
EACH = pytest.mark.parametrize("strategy", STRATEGY_NAMES)
QUIET = settings(max_examples=5, deadline=None)


def ids(rows, **config):
    return [name for name, _ in taken(*rows, **config)]


def speedup_of(row):
    speedup = (row["timing"] or {}).get("speedup") or 0.0
    return speedup if speedup == speedup else 0.0


def oracle(rows, min_speedup, quota):
    """concur's rule, written down a second time, a sample at a time. A quota is a share of the set,
    or the most that balance may add."""
    share = Fraction(str(quota)) if isinstance(quota, float) else Fraction(1, 2)
    correct = [row for row in rows if row["status"] == "correct"]
    correct.sort(key=lambda row: (row["task_id"], row["sample_index"]))
    of_task = {row["task_id"]: [] for row in correct}
    for row in correct:
        of_task[row["task_id"]].append(row)
    chosen = {}
    for mine in of_task.values():
        shortest, fastest = min(row["reasoning_tokens"] for row in mine), max(map(speedup_of, mine))
        for row in mine:
            if (row["reasoning_tokens"], speedup_of(row)) == (shortest, fastest) and fastest > 0:
                chosen[row["candidate_id"]] = "concise_and_fast"
                break
    for row in correct:
        if speedup_of(row) > min_speedup:
            chosen.setdefault(row["candidate_id"], "high_speedup")
    single = {
        row["candidate_id"]: operator_kind(row["reference_operators"]) == "single_operator"
        for row in correct
    }
    for mine in of_task.values():
        left = [row for row in mine if row["candidate_id"] not in chosen]
        singles, added = (
            sum(single[name] for name in chosen),
            list(chosen.values()).count("single_operator"),
        )
        room = isinstance(quota, float) or added < quota
        if left and single[left[0]["candidate_id"]] and room and singles < share * len(chosen):
            best = min(left, key=lambda row: (row["reasoning_tokens"], -speedup_of(row)))
            chosen[best["candidate_id"]] = "single_operator"
    return list(chosen.items())


# -- the paper's rule ------------------------------------------------------------------------------


@given(
    any_samples(),
    st.sampled_from([0.1, 0.25, 0.5, 0.7, 0.9, 0, 1, 2, 5]),
    st.sampled_from([0.5, 5.0, 7.0]),
)
@settings(max_examples=30, deadline=None)
def test_concur_is_the_rule_written_down_a_second_time(rows, quota, min_speedup):
    expected = oracle(rows, min_speedup, quota)
    assert taken(*rows, single_operator_quota=quota, min_speedup=min_speedup) == expected


def test_equal_within_the_interval():
    """The shortest is 3 % slower, well within its interval: by the median it loses, by the interval
    it is as fast as the fastest."""
    rows = samples("a-0 100 1.97; a-1 200 2.0; b-0 100 1.0; b-1 200 2.0")
    assert listed(*rows) == ""
    assert listed(*rows, equal_speedups="interval") == "a-0 concise_and_fast"
    touching = samples("c-0 100 1.0; c-1 200 2.0 lower=1.1")  # 1.1: intervals that touch overlap
    assert listed(*touching, equal_speedups="interval") == "c-0 concise_and_fast"


def test_a_speedup_without_bounds_is_its_own_interval():
    rows = samples("a-0 100 1.97; a-1 200 2.0")
    for row in rows:
        row["timing"] |= {"speedup_lower": None, "speedup_upper": None}
    assert taken(*rows, equal_speedups="interval") == []
    assert ids([rows[1]], require_speedup_lower_above=1.9) == ["a-1"]


@pytest.mark.parametrize("speedup", [float("nan"), float("inf"), float("-inf"), -2.0, 0.0])
def test_a_speedup_that_is_no_ratio_counts_as_not_timed(speedup):
    rows = [sample("a", 0, 100, speedup), sample("a", 1, 200, 2.0), sample("b", 0, 100, speedup)]
    assert taken(*rows) == []
    assert ids(rows, strategy="speedup", size=9) == ["a-1"]
    assert ids(rows, strategy="min_length", size=9, max_per_task=None)[2:] == ["a-1"]


def test_a_custom_kernel_can_be_demanded_and_crowns_no_other():
    rows = samples("a-0 100 3.0; a-1 200 2.0; b-0 100 3.0")
    rows[1] |= {"custom_kernels": ["add"]}
    rows[2] |= {"custom_kernels": ["add"]}
    rows[0] |= {"custom_kernels": []}
    assert ids(rows, require_custom_kernel=True) == ["b-0"]
    assert set(ids(rows, require_custom_kernel=True, strategy="speedup", size=9)) == {"a-1", "b-0"}
    rows[2] |= {"custom_kernels": None}
    assert ids(rows, require_custom_kernel=True) == []


def test_a_fig_leaf_counts_as_never_drawn_where_a_share_is_asked_for():
    rows = samples("a-0 100 9.0; a-1 200 2.0; b-0 100 3.0; c-0 100 7.0")
    for row, share in zip(rows, (0.02, 0.1, None, 0.6), strict=True):
        row["custom_kernel_time_share"] = share
    assert ids(rows) == ["a-0", "b-0", "c-0"]
    assert ids(rows, min_kernel_share=0.1) == ["a-1", "c-0"], "the next one wins"
    assert ids(rows, min_kernel_share=0.0) == ["a-0", "b-0", "c-0"]
    decisions = decide(frame(*rows), CurationConfig(min_kernel_share=0.1)).decisions
    why = dict(decisions.select("candidate_id", "why_not").iter_rows())
    assert why == {"a-0": "kernel_share", "a-1": None, "b-0": "kernel_share", "c-0": None}
    assert "min_kernel_share" not in CurationConfig().model_dump()


def test_answers_to_follow_ups_wait_to_be_asked_for():
    rows = samples("a-0 100 2.0; a-1 50 3.0; b-0 10 1.5")
    rows[1] |= {"turn": 2, "parent": "a-0"}
    rows[2] |= {"turn": None}  # an older snapshot
    assert ids(rows) == ["a-0", "b-0"]
    assert ids(rows, later_turns=True) == ["a-1", "b-0"]
    old = frame(*rows).drop("turn")
    assert curate(old, CurationConfig())["candidate_id"].to_list() == ["a-1", "b-0"]


# -- controls --------------------------------------------------------------------------------------


def many(seed=1, tasks=60):
    """Five samples a task, a third of the tasks single operators, lengths and speedups
    independent."""
    rng = random.Random(seed)
    return [
        sample(
            f"t{task:03d}",
            index,
            rng.randint(100, 9000),
            round(rng.lognormvariate(0, 0.9), 3),
            ops=FUSION if task % 3 else SINGLE,
        )
        for task in range(tasks)
        for index in range(5)
    ]


def test_without_conciseness_takes_the_fastest_and_reads_no_length():
    rows = many()
    config = {"strategy": "concur_without_conciseness", "min_speedup": 3.0}
    before = taken(*rows, **config)
    counts = [name for _, name in taken(*rows, min_speedup=3.0)]
    assert len(before) == len(counts)
    added = [name for _, name in before].count("single_operator")
    assert added == counts.count("single_operator") > 0
    for row in rows:
        if (row["candidate_id"], "fastest") in before:
            rivals = [each for each in rows if each["task_id"] == row["task_id"]]
            assert speedup_of(row) == max(map(speedup_of, rivals))
    # other lengths of the samples that concur does not look at must not matter: only how many it
    # takes may
    longer = [row | {"reasoning_tokens": row["reasoning_tokens"] * 7} for row in rows]
    assert taken(*longer, **config) == before


def test_without_speedup_takes_the_shortest_and_reads_no_speedup():
    rows = many()
    before = taken(*rows, strategy="concur_without_speedup", min_speedup=5.0)
    assert {name for _, name in before} == {"shortest", "single_operator"}
    short = [name for name, criterion in before if criterion == "shortest"]
    for row in rows:
        if row["candidate_id"] in short:
            rivals = [each for each in rows if each["task_id"] == row["task_id"]]
            assert row["reasoning_tokens"] == min(each["reasoning_tokens"] for each in rivals)
    assert len(before) == len(ids(rows)) and len({name[:4] for name in short}) == len(short)


def test_without_balance_adds_as_many_of_any_kind():
    rows = many()
    plain, control = taken(*rows), taken(*rows, strategy="concur_without_balance")
    assert [pair for pair in plain if pair[1] != "single_operator"] == [
        pair for pair in control if pair[1] != "any_operator"
    ]
    assert len(plain) == len(control) and len(set(plain) & set(control)) < len(plain)
    singles = {row["candidate_id"] for row in rows if row["reference_operators"] == SINGLE}
    assert sum(name in singles for name, _ in plain) > sum(name in singles for name, _ in control)


def test_shuffled_reasoning_moves_every_trace_to_another_task():
    rows = frame(*many())
    plain, moved = (
        curate(rows, CurationConfig()),
        curate(rows, CurationConfig(strategy="shuffled_reasoning")),
    )
    untouched = [name for name in plain.columns if name not in ("reasoning", "reasoning_tokens")]
    assert moved.select(untouched).equals(plain.select(untouched))
    task = dict(rows.select("candidate_id", "task_id").iter_rows())
    tokens = dict(rows.select("candidate_id", "reasoning_tokens").iter_rows())
    for row in moved.iter_rows(named=True):
        assert task[row["reasoning_from"]] != row["task_id"]
        assert row["reasoning"] == f"thoughts of {row['reasoning_from']}"
        assert row["reasoning_tokens"] == tokens[row["reasoning_from"]]
    assert sorted(moved["reasoning_from"]) == sorted(plain["candidate_id"])
    other = curate(rows, CurationConfig(strategy="shuffled_reasoning", seed=1))
    assert other["candidate_id"].equals(moved["candidate_id"])
    assert not other["reasoning_from"].equals(moved["reasoning_from"])


def test_reasoning_cannot_be_moved_within_one_task_only():
    rows, moved = samples("a-0 100 9; a-1 101 8; a-2 102 7; b-0 10 2"), "shuffled_reasoning"
    for few, said in ((rows[:1], "1 of 1"), (rows, "3 of 4")):
        with pytest.raises(UsageError, match=f"{said} samples are of one task"):
            taken(*few, strategy=moved)
    half = [*rows, *samples("c-0 10 2; d-0 10 2")]  # exactly
    assert len(taken(*half, strategy=moved)) == 6


# -- baselines -------------------------------------------------------------------------------------


@pytest.mark.parametrize("config, expected", CASES["baselines"])
def test_each_baseline_by_hand(config, expected):
    found = ids(
        samples(
            """a-0 100 1.0; a-1 400 4.0; b-0 200 3.0; b-1 300 0.5
            c-0 500 2.0; c-1 50 9.0 status=incorrect"""
        ),
        **config,
    )
    assert expected == (len(found) if isinstance(expected, int) else " ".join(found))


def test_without_a_size_a_baseline_takes_as_many_as_concur():
    rows = many(tasks=200)
    size = len(ids(rows))
    for strategy in STRATEGY_NAMES:
        assert len(ids(rows, strategy=strategy)) == min(
            size, 200 if strategy in BASELINES else size
        ), strategy
    assert len(ids(rows, strategy="random", max_per_task=None)) == size


def test_balanced_strategies_meet_the_quota_and_fill_up_where_one_kind_is_short():
    rows = many()  # 20 single-operator tasks, 40 fusions

    def kinds(**config):
        kept = ids(rows, **config)
        singles = sum(
            row["candidate_id"] in kept for row in rows if row["reference_operators"] == SINGLE
        )
        return singles, len(kept) - singles

    for strategy in ("balanced_min_length", "balanced_speedup", "balanced_random"):
        assert kinds(strategy=strategy, size=30) == (15, 15)
        assert kinds(strategy=strategy, size=30, single_operator_quota=0.2) == (6, 24)
        assert kinds(strategy=strategy, size=30, single_operator_quota=4) == (4, 26)
        assert kinds(strategy=strategy, size=50) == (20, 30)
        assert kinds(strategy=strategy, size=60, single_operator_quota=0.1) == (20, 40)
        assert kinds(strategy=strategy, size=99) == (20, 40)
    assert kinds(strategy="min_length", size=30) != (15, 15)


def test_ties_of_a_baseline_are_drawn_not_decided_by_another_criterion():
    rows = [sample(f"t{task}", 0, 100, float(task + 1)) for task in range(40)]
    first = {seed: set(ids(rows, strategy="min_length", size=10, seed=seed)) for seed in range(3)}
    assert len(set(map(frozenset, first.values()))) == 3
    assert (
        ids(rows, strategy="speedup", size=3, seed=1)
        == ids(rows, strategy="speedup", size=3, seed=2)
        == ["t39-0", "t38-0", "t37-0"]
    )


def test_the_draw_is_the_same_everywhere():
    """Known numbers: a set must not depend on the version of a library, nor on the machine."""
    names = ["", "a-0", "\u00e9" * 40, "x" * 70]
    assert draw_numbers(pl.Series(names), 3).tolist() == [
        4550890225689799384,
        959020789694759899,
        7039155400195340171,
        11849648338337101819,
    ]


def test_random_draws_every_sample_alike():
    """1,000 draws of 10 of 20: each sample is in about half of them (binomial, six standard
    deviations)."""
    rows = [sample(f"t{task:02d}", 0, 100, 1.0) for task in range(20)]
    names = [row["candidate_id"] for row in rows]
    counts = dict.fromkeys(names, 0)
    for seed in range(1000):
        order = draw_numbers(pl.Series(names), seed).argsort()
        for place in order[:10]:
            counts[names[place]] += 1
    assert all(abs(count - 500) < 95 for count in counts.values()), counts


# -- laws ------------------------------------------------------------------------------------------


def curated(rows, config):
    try:
        return curate(frame(*rows), config)
    except UsageError as error:
        assert "cannot be moved" in str(error) and config.strategy == "shuffled_reasoning"
        return None


@EACH
@given(
    rows=any_samples(),
    size=st.sampled_from([None, 1, 3, 8]),
    seed=st.integers(0, 3),
    order=st.randoms(),
)
@QUIET
def test_laws_of_every_strategy(strategy, rows, size, seed, order):
    config = CurationConfig(strategy=strategy, size=size, seed=seed)
    result = curated(rows, config)
    mixed = rows + rows
    order.shuffle(mixed)
    again = curated(mixed, config)
    if result is None or again is None:
        assert result is again
        return
    assert again.equals(result)  # the order of rows, and repeated rows, do not matter
    assert result["candidate_id"].is_unique().all() and set(result["status"]) <= {"correct"}
    assert result["criterion"].null_count() == 0
    assert size is None or result.height <= size
    per_task = result["task_id"].value_counts()["count"].max() or 0
    if strategy in BASELINES:
        assert per_task <= 1
        whole = len(
            {
                row["task_id"]
                for row in rows
                if row["status"] == "correct" and (strategy[-7:] != "speedup" or speedup_of(row))
            }
        )
        assert result.height == min(whole, size or len(ids(rows)))
    else:
        per_criterion = (
            result.group_by("task_id", "criterion")
            .len()
            .filter(pl.col("criterion") != "high_speedup")["len"]
            .to_list()
        )
        assert set(per_criterion) <= {1}
        assert result.height <= len(ids(rows))


@EACH
@given(rows=any_samples(), seed=st.integers(0, 3))
@settings(max_examples=6, deadline=None)
def test_a_smaller_set_is_part_of_a_larger_one(strategy, rows, seed):
    if strategy == "shuffled_reasoning":
        strategy = "concur"  # its samples are concur's
    sets = [set(ids(rows, strategy=strategy, seed=seed, size=size)) for size in (1, 2, 5, 8)]
    if strategy.startswith(
        "balanced"
    ):  # where one kind runs short the other fills up, and a larger set may take back
        assert all(len(small) <= len(large) for small, large in itertools.pairwise(sets))
    else:
        assert all(small <= large for small, large in itertools.pairwise(sets))


@given(rows=any_samples(), size=st.integers(1, 12))
@QUIET
def test_thinning_keeps_the_mixture_of_criteria(rows, size):
    whole, thin = taken(*rows), taken(*rows, size=size)
    assert [pair for pair in whole if pair in thin] == thin and len(thin) == min(size, len(whole))
    for criterion in {name for _, name in whole}:
        share = sum(name == criterion for _, name in whole) / len(whole)
        assert abs(sum(name == criterion for _, name in thin) - share * len(thin)) <= 1.5


# -- decisions on all candidates -------------------------------------------------------------------


@EACH
@given(
    rows=any_samples(max_size=14),
    size=st.sampled_from([None, 2]),
    bound=st.sampled_from([None, 0.9]),
)
@settings(max_examples=5, deadline=None)
def test_every_candidate_has_one_decision_and_it_is_the_rules(strategy, rows, size, bound):
    config = CurationConfig(strategy=strategy, size=size, require_speedup_lower_above=bound)
    try:
        rows_taken, decisions = decide(frame(*rows), config)
    except UsageError:
        return  # nothing to move between
    expected = dict(rows_taken.select("candidate_id", "criterion").iter_rows())
    assert decisions["candidate_id"].to_list() == [row["candidate_id"] for row in rows]
    for row in decisions.iter_rows(named=True):
        assert row["taken"] == (row["candidate_id"] in expected) == (row["why_not"] is None)
        if row["taken"]:
            assert row["criterion"] == expected[row["candidate_id"]]
        else:
            assert WhyNot(row["why_not"])


@pytest.mark.parametrize("name", CASES["decisions"])
def test_why_a_candidate_is_not_taken(name):
    rows, config, expected = CASES["decisions"][name]
    decisions = decide(frame(*samples(rows)), CurationConfig(**config)).decisions
    found = decisions.select("candidate_id", "criterion", "why_not").iter_rows()
    assert "; ".join(" ".join(filter(None, row)) for row in found) == expected


def test_what_is_not_in_the_pool_says_which_condition_it_fails():
    rows = samples(
        "a-0 10 2.0 status=incorrect; b-0 10 2.0; c-0 0 2.0; d-0 10 2.0; e-0 9 2.0; f-0 9 2.0"
    )
    rows[1] |= {"turn": 2, "parent": "x"}
    rows[3] |= {"finish_reason": "length"}
    table = frame(*rows).with_columns(trace_flags=pl.lit([], pl.List(pl.String)))
    flagged = pl.when(candidate_id="e-0").then(pl.lit(["repetitive"])).otherwise("trace_flags")
    table = table.with_columns(trace_flags=flagged)
    decisions = decide(table, CurationConfig(exclude_flags=("repetitive",))).decisions
    assert decisions["why_not"].to_list() == [
        *("not_correct", "later_turn", "no_reasoning", "cut_off", "trace_flag", None)
    ]
    assert decisions["shortest_tokens"].to_list() == [*[None] * 5, 9]


def test_a_decision_names_the_numbers_behind_it():
    rows = samples("a-0 5120 1.2; a-1 3004 1.0; a-2 6000 7.0")
    decisions = decide(frame(*rows), CurationConfig()).decisions
    assert decisions["why_not"].to_list() == ["longer", "slower", None]
    assert decisions["shortest_tokens"].to_list() == [3004] * 3
    assert decisions["fastest_speedup"].to_list() == [7.0] * 3
    assert decisions["correct_in_task"].to_list() == [3] * 3


def test_an_equal_kernel_is_named():
    rows = frame(*samples("a-0 10 7.0; a-1 20 6.0; a-2 30 6.5"))
    rows = rows.with_columns(kernel=pl.Series(["a-0", "a-0", "a-2"]))
    decisions = decide(rows, CurationConfig()).decisions
    assert decisions["why_not"].to_list() == [None, "equal_kernel", None]
    assert decisions["equals"].to_list() == [None, "a-0", None]


# -- strategies of other packages ------------------------------------------------------------------


def longest_of_all(choice, config):
    choice.add("longest_of_all", choice.sure.sort("reasoning_tokens").tail(1))


def test_an_installed_package_adds_a_strategy(tmp_path, monkeypatch):
    folder = tmp_path / "other-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Name: other\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text(
        "[concur.strategies]\nlongest_of_all = other_rules:rule\nbroken = other_rules:nothing\n"
        "wrong = other_rules:name\n"
    )
    module = types.ModuleType("other_rules")
    module.rule, module.name = Strategy(longest_of_all), "no strategy"
    monkeypatch.setitem(sys.modules, "other_rules", module)
    monkeypatch.syspath_prepend(tmp_path)
    rows = samples("a-0 100 2.0; b-0 300 2.0")
    assert listed(*rows, strategy="longest_of_all") == "b-0 longest_of_all"
    with pytest.raises(UsageError, match="cannot be used"):
        taken(*rows, strategy="broken")
    with pytest.raises(UsageError, match="'wrong' of other cannot be used: .*no Strategy"):
        taken(*rows, strategy="wrong")
    with pytest.raises(UsageError, match="there is no strategy 'none'; known are concur,"):
        CurationConfig(strategy="none")


# -- input that cannot be used ---------------------------------------------------------------------


@EACH
def test_no_correct_candidate_gives_an_empty_frame(strategy):
    rows = frame(sample("a", 0, 10, None, status="incorrect"))
    result = curate(rows, CurationConfig(strategy=strategy))
    assert result.is_empty() and result.columns[: rows.width + 1] == [*rows.columns, "criterion"]
    assert result["timing"].dtype == rows["timing"].dtype


@EACH
def test_one_task_only(strategy):
    rows = [sample("a", index, 100 + index, 3.0 - index) for index in range(3)]
    if strategy == "shuffled_reasoning":
        with pytest.raises(UsageError, match="one task"):
            taken(*rows, strategy=strategy)
    else:
        assert len(taken(*rows, strategy=strategy)) == 1


@EACH
def test_missing_columns_are_named(strategy):
    rows = frame(sample("a", 0, 10, 2.0)).drop("timing", "sample_index")
    with pytest.raises(UsageError, match="needs the columns timing, sample_index"):
        curate(rows, CurationConfig(strategy=strategy))


def test_a_demand_needs_its_column():
    rows = frame(sample("a", 0, 10, 2.0)).drop("custom_kernels")
    assert curate(rows, CurationConfig()).height == 1
    with pytest.raises(UsageError, match="custom_kernels"):
        curate(rows, CurationConfig(require_custom_kernel=True))
    rows = rows.drop("custom_kernel_time_share")
    assert curate(rows, CurationConfig()).height == 1
    with pytest.raises(UsageError, match="custom_kernel_time_share"):
        curate(rows, CurationConfig(min_kernel_share=0.1))


def test_verdicts_of_several_schema_versions_are_refused():
    rows = [
        sample("a", 0, 10, 2.0) | {"schema_version": 1},
        sample("b", 0, 10, 2.0) | {"schema_version": 2},
    ]
    with pytest.raises(UsageError, match="2 schema versions .version 1: 1, version 2: 1"):
        taken(*rows)
    newer = sample("a", 0, 10, 2.0) | {"schema_version": VERDICT_SCHEMA_VERSION + 1}
    with pytest.raises(UsageError, match=f"schema version {VERDICT_SCHEMA_VERSION + 1}"):
        taken(newer)


def test_a_timing_that_is_no_struct_is_refused_and_one_without_values_is_not():
    rows = frame(sample("a", 0, 10, 2.0))
    with pytest.raises(UsageError, match="timing holds Float64, not Struct"):
        curate(rows.with_columns(pl.lit(2.0).alias("timing")), CurationConfig())
    assert curate(rows.with_columns(pl.lit(None).alias("timing")), CurationConfig()).is_empty()
