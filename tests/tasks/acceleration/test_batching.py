"""Length-aware plans: every row once an epoch, never above the budget, the same for the same seed,
and little padding on real lengths."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from tasks.training.acceleration.batching import (
    balanced_epochs,
    balanced_lines,
    busy_share,
    effective_batch,
    padded_length,
    plan_epochs,
)
from tasks.training.trainer import last_batch

BUDGET = 1000
lengths_of_rows = st.lists(st.integers(1, BUDGET), min_size=1, max_size=80)


def plans(lengths, *, epochs=3, seed=0, window_rows=32):
    return plan_epochs(
        lengths, token_budget=BUDGET, epochs=epochs, seed=seed, window_rows=window_rows
    )


@given(lengths_of_rows, st.integers(0, 3))
def test_every_row_is_there_exactly_once_an_epoch_and_no_batch_is_above_the_budget(lengths, seed):
    for plan in plans(lengths, seed=seed):
        assert sorted(row for line in plan for row in line) == list(range(len(lengths)))
        for line in plan:
            tokens = sum(lengths[row] for row in line)
            assert tokens <= padded_length(tokens, BUDGET, 64) <= BUDGET


@given(lengths_of_rows)
def test_epochs_have_equally_many_batches(lengths):
    assert len({len(plan) for plan in plans(lengths, epochs=4)}) == 1


@given(lengths_of_rows, st.integers(0, 5))
def test_the_same_seed_gives_the_same_plan(lengths, seed):
    assert plans(lengths, seed=seed) == plans(list(lengths), seed=seed)


@given(st.lists(st.integers(1, BUDGET), min_size=2, max_size=24), st.randoms(use_true_random=False))
def test_coverage_does_not_depend_on_the_order_of_the_rows(lengths, generator):
    """Within one window the lines hold the same lengths, whatever order the rows came in."""
    shuffled = list(lengths)
    generator.shuffle(shuffled)

    def filled(rows):
        plan = plans(rows, epochs=1, window_rows=64)[0]
        return sorted(sorted(rows[row] for row in line) for line in plan)

    assert filled(lengths) == filled(shuffled)


@given(st.lists(st.integers(1, BUDGET), min_size=1, max_size=60))
def test_packing_is_within_first_fits_bound(lengths):
    """First and best fit decreasing need at most 11/9 of the least possible number of lines, and
    one (Johnson 1973)."""
    plan = plans(lengths, epochs=1, window_rows=64)[0]
    least = max(-(-sum(lengths) // BUDGET), sum(length > BUDGET // 2 for length in lengths))
    assert (
        len(plan) <= 11 / 9 * least + least * 0.5 + 1
    )  # `least` is a lower bound of the optimum, which is at most 1.5 times it


def test_seeds_and_epochs_give_other_orders():
    lengths = [100 + index for index in range(60)]
    first, second, _ = plans(lengths)
    assert first != second
    assert first != plans(lengths, seed=1)[0]


def test_real_lengths_waste_less_than_three_percent():
    # tokens of 1,032 recorded QwQ-32B responses with their prompts, as a log-normal of their mean
    # and spread, cut where they are cut
    generator = random.Random(0)
    lengths = [
        min(24_865, max(1492, round(generator.lognormvariate(9.25, 0.42)))) for _ in range(1032)
    ]
    for plan in plan_epochs(lengths, token_budget=32_768, epochs=2, seed=0):
        told = effective_batch(plan, lengths, 1, budget=32_768, multiple=128)
        assert told["padding_waste"] <= 0.03
    unplanned = 1 - sum(lengths) / sum(
        4 * max(lengths[start : start + 4]) for start in range(0, 1032, 4)
    )
    assert unplanned > 0.2, "rows taken as they come, four at a time"


def test_the_effective_batch_is_told_in_rows_and_tokens():
    lengths = [500, 500, 400, 300, 300]
    (plan,) = plans(lengths, epochs=1)
    told, single = (effective_batch(plan, lengths, n, budget=1000, multiple=64) for n in (2, 1))
    assert (told["steps"], told["rows_mean"], told["tokens_mean"]) == (1.0, 5.0, 2000.0)
    assert single["tokens_max"] == 1000.0


@pytest.mark.parametrize(
    "lengths, words",
    [
        ([], "no rows"),
        ([5, 0], "row 1 has no tokens"),
        ([10, 1001, 1200], "2 rows are longer than the token budget of 1000, the longest 1200"),
    ],
)
def test_rows_that_cannot_be_planned_are_refused(lengths, words):
    with pytest.raises(UsageError, match=words):
        plans(lengths)


def balanced(lengths, *, rows_per_step=8, epochs=3, seed=0, **more):
    plans = balanced_epochs(lengths, rows_per_step=rows_per_step, epochs=epochs, seed=seed, **more)
    assert all(len(line) == 1 for plan in plans for line in plan)
    return [[row for line in plan for row in line] for plan in plans]


@given(lengths_of_rows, st.integers(1, 9), st.integers(0, 3))
def test_a_balanced_epoch_has_every_row_once_and_follows_from_lengths_and_seed(
    lengths, rows_per_step, seed
):
    orders = balanced(lengths, rows_per_step=rows_per_step, seed=seed)
    for order in orders:
        assert sorted(order) == list(range(len(lengths)))
    assert orders == balanced(list(lengths), rows_per_step=rows_per_step, seed=seed)


def test_seeds_and_epochs_balance_otherwise():
    lengths = [100 + index for index in range(64)]
    first, second, _ = balanced(lengths, window_steps=2)
    assert first != second and first != balanced(lengths, seed=1, window_steps=2)[0]
    steps = [{frozenset(order[s : s + 8]) for s in range(0, 64, 8)} for order in (first, second)]
    assert steps[0] != steps[1], "other rows share a step"


@given(st.lists(st.integers(1, BUDGET), min_size=16, max_size=64))
def test_within_a_window_no_row_is_between_those_of_another_step(lengths):
    (order,) = balanced(lengths, epochs=1)
    steps = sorted([lengths[row] for row in order[s : s + 8]] for s in range(0, len(order), 8))
    for shorter, longer in pairwise(steps):
        assert max(shorter) <= min(longer)


@given(st.integers(1, 40), st.integers(1, 3), st.integers(1, 5))
def test_without_what_it_repeats_the_last_pass_of_all_workers_has_each_row_once(
    rows, size, workers
):
    from accelerate.data_loader import BatchSamplerShard
    from torch.utils.data import BatchSampler

    seen, batches = [], BatchSampler(range(rows), size, drop_last=False)
    for worker in range(workers):
        *earlier, last = BatchSamplerShard(batches, workers, worker) if workers > 1 else batches
        seen += [row for batch in earlier for row in batch]
        seen += last[: last_batch(rows, size, workers, worker)]
    assert sorted(seen) == list(range(rows))


def test_the_busy_share_by_hand():
    assert busy_share([4, 2, 3, 3], workers=2) == 12 / 14
    assert busy_share([4, 2, 3, 3], workers=1) == 1
    assert busy_share([4, 4, 4], workers=2) == 12 / 16, "the last pass has one micro batch"


@pytest.mark.parametrize("longest", [8192, 16_384])
def test_eight_workers_are_busy_on_lengths_like_the_recorded(longest):
    """A log-normal again. A row of QwQ-32B costs 128 GFLOP a token and 2 MFLOP a pair of tokens."""
    generator = random.Random(0)
    drawn = (round(generator.lognormvariate(9.0, 0.6)) for _ in range(1032))
    lengths = [tokens for tokens in drawn if tokens <= longest]

    def share(order):
        costs = (128e9 * lengths[row] + 1.97e6 * lengths[row] ** 2 for row in order)
        return busy_share(list(costs), workers=8)

    assert share(generator.sample(range(len(lengths)), len(lengths))) < 0.75
    for order in balanced(lengths, epochs=2):
        assert share(order) >= 0.93


def test_rows_that_cannot_be_balanced_are_refused():
    for lengths, words in (([], "no rows"), ([5, 0], "row 1 has no tokens")):
        with pytest.raises(UsageError, match=words):
            balanced(lengths)


@given(lengths_of_rows, st.integers(1, 9), st.integers(0, 3))
def test_balanced_lines_are_the_same_lines_in_steps_of_like_cost(lengths, lines_per_step, seed):
    packed = plans(lengths, seed=seed)

    def cost(line):
        return sum(lengths[row] ** 2 for row in line)

    ordered = balanced_lines(packed, cost, lines_per_step=lines_per_step, seed=seed)
    for before, after in zip(packed, ordered, strict=True):
        assert sorted(map(tuple, before)) == sorted(map(tuple, after))
        costs = [cost(line) for line in after]
        full = len(costs) // lines_per_step * lines_per_step
        steps = [costs[s : s + lines_per_step] for s in range(0, full, lines_per_step)]
        for cheap, dear in pairwise(sorted(steps)):
            assert max(cheap) <= min(dear)
    assert ordered == balanced_lines(packed, cost, lines_per_step=lines_per_step, seed=seed)
