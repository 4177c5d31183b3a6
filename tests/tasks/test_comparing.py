"""Two models on the same tasks: pairing, the permutation test against brute force and scipy, and
Holm's correction."""

import itertools
import math

import numpy as np
import polars as pl
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from tasks.benchmark.comparing import corrected, paired_differences, sign_flip_p
from tests.support.verdict_rows import WRONG, frame, outcomes, row, scored_row

OWN = {"track": "custom_kernel"}


def test_differences_are_of_the_same_tasks():
    """Both models find task a easy and b hard; only the pairing shows that one is better on
    each."""
    rows = outcomes("base", a=(2.0, 2.0, WRONG, WRONG), b=[WRONG] * 4)
    rows += outcomes("tuned", a=(2.0, 2.0, 2.0, WRONG), b=(2.0, 2.0, WRONG, WRONG))
    found = paired_differences(frame(*rows), pairs=[("base", "tuned")], ks=(1, 9))
    pair = scored_row(found, "exec", **OWN)
    assert (pair["difference"], pair["tasks"]) == (pytest.approx((0.25 + 0.5) / 2), 2)
    assert (pair["lower"], pair["upper"]) == (pytest.approx(0.25), pytest.approx(0.5))
    assert set(found["k"]) == {1}, "nine samples were not drawn"


def test_only_shared_tasks_count_and_a_constant_difference_is_not_certain():
    made = frame(*outcomes("base", a=(WRONG,), only=(2.0,)), row("tuned", "a", 2.0))
    pair = scored_row(paired_differences(made), "exec", **OWN)
    assert (pair["difference"], pair["tasks"], pair["lower"]) == (1.0, 1, None)
    with pytest.raises(UsageError, match="'nobody'"):
        paired_differences(made, pairs=[("base", "nobody")])


def test_all_pairs_are_compared_and_corrected_together():
    """`good` solves everything, `same` as many as `base`."""
    solved = {"base": lambda i: i % 4 == 0, "same": lambda i: i % 4 == 1, "good": lambda i: True}
    made = frame(
        *(
            row(model, f"t{i:02}", 2.0 if right(i) else WRONG)
            for model, right in solved.items()
            for i in range(24)
        )
    )
    found = paired_differences(made, resamples=300).filter(**OWN)
    assert found.height == 6, "six tests a track: three pairs, Exec and fast_1"
    better = scored_row(found, "exec", baseline="base", model="good")
    alike = scored_row(found, "exec", baseline="base", model="same")
    assert better["difference"] == pytest.approx(0.75) and better["p"] < 0.001
    assert (alike["difference"], alike["p"]) == (0.0, 1.0)
    assert better["p_holm"] == pytest.approx(6 * found["p"].min())
    assert scored_row(found, "exec", baseline="same", model="good")["difference"] > 0


def test_holm_by_hand():
    """Sorted: 0.01 x 4, 0.02 x 3, 0.03 x 2, 0.5 x 1, each at least the one before."""
    rows = pl.DataFrame({"p": [0.03, 0.01, None, 0.5, 0.02, 0.04], "of": [*"aaaaa", "b"]})
    expected = [0.06, 0.04, None, 0.5, 0.06, 0.04]
    assert corrected(rows, "p", "of")["p_holm"].to_list() == pytest.approx(expected)
    assert corrected(rows.clear(), "p", "of").columns == ["p", "of", "p_holm"]


DIFFERENCES = st.lists(
    st.sampled_from([-0.5, -0.25, 0.0, 0.125, 0.25, 1.0]), min_size=1, max_size=9
)


@given(DIFFERENCES)
@settings(max_examples=30)
def test_exact_p_is_the_share_of_all_sign_patterns(differences):
    sums = [
        abs(sum(s * d for s, d in zip(signs, differences, strict=True)))
        for signs in itertools.product((-1, 1), repeat=len(differences))
    ]
    share = np.mean([s >= abs(sum(differences)) - 1e-12 for s in sums])
    assert sign_flip_p(differences) == pytest.approx(share)
    assert sign_flip_p([-d for d in differences]) == sign_flip_p(differences)


@pytest.mark.parametrize("tasks", [6, 13, 80])
def test_p_agrees_with_scipys_permutation_test(tasks):
    from scipy.stats import permutation_test

    differences = np.random.default_rng(tasks).choice([-0.4, -0.2, 0.1, 0.3, 0.6], tasks)
    theirs = permutation_test(
        (differences,),
        lambda x, axis: x.mean(axis=axis),
        permutation_type="samples",
        vectorized=True,
        n_resamples=9999,
        rng=np.random.default_rng(0),
    )
    close = 1e-9 if tasks <= 13 else 0.02  # all patterns, or two random sets of them
    assert sign_flip_p(differences) == pytest.approx(theirs.pvalue, abs=close)


def test_p_of_nothing_is_one_and_of_everything_is_small_but_never_zero():
    assert sign_flip_p([0.0] * 10) == 1.0
    assert sign_flip_p([0.3 - 0.1 * 3] * 20 + [0.1 + 0.2 - 0.3] * 20) == 1.0  # rounding has no sign
    assert sign_flip_p([0.5] * 5) == 2 / 2**5
    assert sign_flip_p([0.5] * 200) == 1 / 10_000
    with pytest.raises(ValueError):
        sign_flip_p([math.nan])
