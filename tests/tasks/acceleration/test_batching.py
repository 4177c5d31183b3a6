"""Orders of rows of like length: every row once an epoch, the same for the same seed, and workers
that hardly wait."""

import random
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from tasks.training.acceleration.batching import balanced_epochs, busy_share
from tasks.training.trainer import last_batch

BUDGET = 1000
lengths_of_rows = st.lists(st.integers(1, BUDGET), min_size=1, max_size=80)


def balanced(lengths, *, rows_per_step=8, epochs=3, seed=0, **more):
    return balanced_epochs(lengths, rows_per_step=rows_per_step, epochs=epochs, seed=seed, **more)


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
