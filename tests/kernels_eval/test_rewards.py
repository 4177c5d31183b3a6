"""Rewards follow their published formulas, never punish a fault of the machine, and keep their
order."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.errors import UsageError
from kernels_eval.records import REASONS, STATUS_OF, Reason, Status, Verdict
from kernels_eval.rewards import (
    RECIPES,
    Concur,
    RewardRecipe,
    discounted,
    recipe_of,
    reward,
    reward_parts,
)
from tests.support.cases import cases

CASES = cases("rewards")
ABOUT_THE_CANDIDATE = sorted(set(Reason) - REASONS[Status.TASK_ERROR])
speedups = st.floats(1e-3, 1e4)
shares = st.none() | st.floats(0, 1)


def failed(reason):
    reason = Reason(reason)
    return Verdict(
        candidate_id="c", task_id="t", language="cpp", status=reason.status, reason=reason
    )


def correct(speedup=None, *, compiled=None, lower=1.0, share=None):
    """A correct verdict; `lower` is the lower bound of the interval as a share of the speedup."""
    timing = None
    if speedup is not None:
        numbers = {"reference_ms": 1.0, "speedup": speedup}
        numbers |= {"speedup_lower": speedup * lower, "speedup_upper": speedup}
        timing = numbers | {"candidate_ms": 1 / speedup, "clock_bound_ms": 1 / speedup}
        timing |= {"pairs": 1, "calls_per_sample": 1}
        if compiled:
            numbers |= {"speedup": compiled, "speedup_lower": compiled, "speedup_upper": compiled}
            timing["compiled"] = {"mode": "default", **numbers}
    found = failed("ok").model_dump() | {"timing": timing, "custom_kernel_time_share": share}
    return Verdict.model_validate(found)


@pytest.mark.parametrize("name", RECIPES)
def test_a_fault_of_machine_or_task_has_no_reward(name):
    assert reward(None, RECIPES[name]) is None
    assert reward_parts(None, RECIPES[name]) is None
    for reason in REASONS[Status.TASK_ERROR]:
        assert reward(failed(reason), RECIPES[name]) is None


@given(st.sampled_from(sorted(RECIPES)), st.sampled_from(ABOUT_THE_CANDIDATE), shares)
def test_every_verdict_about_the_candidate_has_one(name, reason, share):
    verdict = correct(share=share) if reason is Reason.OK else failed(reason)
    found = reward(verdict, RECIPES[name])
    assert isinstance(found, float)
    assert math.isfinite(found)


@given(st.sampled_from(sorted(RECIPES)), st.floats(1e-300, 1e308))
def test_a_speedup_is_a_finite_reward_and_one_that_no_clock_measured_is_none(name, speedup):
    measured = correct(1.0)
    for said, finite in ((speedup, True), (math.inf, False), (math.nan, False)):
        timing = measured.timing.model_copy(update={"speedup": said, "speedup_lower": said})
        found = reward(measured.model_copy(update={"timing": timing}), RECIPES[name])
        assert math.isfinite(found) if finite else found is None


@pytest.mark.parametrize("least_ms", [-1.0, math.nan, math.inf])
def test_a_least_time_that_is_none_is_refused(least_ms):
    with pytest.raises(ValueError, match="least_ms"):
        reward(correct(2.0), RECIPES["concur"], least_ms=least_ms)


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", RECIPES)
def test_every_number_of_a_recipe_is_finite(name, number):
    for field, value in RECIPES[name].model_dump().items():
        if isinstance(value, float):
            with pytest.raises(UsageError, match=rf"recipe: {field}: "):
                recipe_of({"name": name, field: number})
    with pytest.raises(UsageError, match=r"recipe: .*steps"):  # a published number is no setting
        recipe_of({"name": "kernelgym_steps", "steps": [[1, number]]})


@given(st.sampled_from(sorted(RECIPES)), speedups, speedups, shares, st.none() | speedups)
def test_a_faster_kernel_never_earns_less(name, one, other, share, least_ms):
    slow, fast = (correct(each, share=share) for each in sorted((one, other)))
    recipe = RECIPES[name]
    assert reward(slow, recipe, least_ms=least_ms) <= reward(fast, recipe, least_ms=least_ms)


@pytest.mark.parametrize("name", RECIPES)
def test_a_fig_leaf_earns_what_no_kernel_earns(name):
    """With the least share that a recipe of one's own asks for; no published one does."""
    strict = recipe_of({"name": name, "min_kernel_share": 0.1})
    for share in (None, 0.0, 0.09):
        leaf = correct(8.0, share=share)
        assert reward(leaf, strict) == reward(failed("no_custom_kernel"), strict)
        assert reward(leaf, RECIPES[name]) > reward(leaf, strict)
    own = correct(8.0, share=0.1)
    assert reward(own, strict) == reward(own, RECIPES[name])


@given(st.sampled_from(sorted(RECIPES)), speedups, st.sampled_from(ABOUT_THE_CANDIDATE))
def test_a_parts_sum_is_the_reward(name, speedup, reason):
    verdict = correct(speedup, share=0.5) if reason is Reason.OK else failed(reason)
    parts = reward_parts(verdict, RECIPES[name])
    assert sum(parts.values()) == reward(verdict, RECIPES[name])


@pytest.mark.parametrize("name", CASES["published"])
def test_the_published_formula(name):
    """A reason, or the facts of a correct verdict, and what the source gives for it."""
    for outcome, expected in CASES["published"][name]:
        verdict = failed(outcome) if isinstance(outcome, str) else correct(**outcome)
        assert reward(verdict, RECIPES[name]) == pytest.approx(expected), outcome


def test_the_earlier_kernelbench_tinker_and_a_spread_of_scores():
    earlier = recipe_of({"name": "kernelbench_tinker", "baseline": 1})
    assert reward(correct(3.0), earlier) == pytest.approx(2.3)
    assert reward(correct(0.5), earlier) == pytest.approx(0.3)
    spread = recipe_of({"name": "cuda_l1", "mean": 2.0, "std": 4.0})
    assert reward(correct(4.0), spread) == pytest.approx(0.5)


weights = st.floats(0, 5)
ours = st.builds(
    Concur,
    correct=st.floats(5.1, 9),
    speedup=st.floats(0, 5),
    roofline=weights,
    coverage=weights,
    rejected=weights,
    slowest=st.floats(0.5, 4),
    fastest=st.floats(0.5, 16),
    penalties=st.dictionaries(st.sampled_from(sorted(REASONS[Status.REJECTED])), weights),
)


@given(ours, st.sampled_from(sorted(set(STATUS_OF) - {"ok"})), speedups, shares, speedups)
def test_ours_puts_correct_above_wrong_above_cheating(recipe, reason, speedup, share, least_ms):
    if STATUS_OF[reason] is Status.TASK_ERROR:
        return
    wrong = reward(failed("wrong_output"), recipe)
    assert reward(failed(reason), recipe) <= wrong
    if STATUS_OF[reason] is not Status.REJECTED:
        assert reward(failed(reason), recipe) == wrong
    for verdict in (correct(), correct(speedup, share=share)):
        assert reward(verdict, recipe, least_ms=least_ms) > wrong


def test_ours_pays_for_the_roofline_where_it_is_known():
    recipe = recipe_of("concur")
    verdict = correct(2.0)  # 0.5 ms a call
    assert reward(verdict, recipe) == pytest.approx(1.5)
    assert reward(verdict, recipe, least_ms=0.25) == pytest.approx(1.5 + 0.25)
    assert reward(verdict, recipe, least_ms=2.0) == pytest.approx(1.5 + 0.5)


def test_a_penalty_of_its_own_reason():
    recipe = Concur(penalties={Reason.HARNESS_TAMPERING: 3.0})
    assert reward(failed("harness_tampering"), recipe) == -3.0
    assert reward(failed("stale_cache"), recipe) == -1.0


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_yaml(name, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(RECIPES[name].model_dump(mode="json")))
    assert recipe_of(path) == recipe_of(str(path)) == recipe_of(name) == RECIPES[name]
    assert recipe_of(RECIPES[name]) is RECIPES[name]


@pytest.mark.parametrize(
    "given, said",
    CASES["a_recipe_that_cannot_be_says_so"],
)
def test_a_recipe_that_cannot_be_says_so(given, said):
    with pytest.raises(UsageError, match=said) as refused:
        recipe_of(given)
    assert "kevin, dr_kernel" in refused.value.hint


@pytest.mark.parametrize("name", RECIPES)
def test_equal_recipes_are_one_key(name):
    assert {RECIPES[name], recipe_of(RECIPES[name].model_dump())} == {RECIPES[name]}


def test_a_broken_file_is_named(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("name: [")
    with pytest.raises(UsageError, match=r"recipe\.yaml is no reward recipe"):
        recipe_of(path)


def test_a_recipe_of_your_own():
    class Sparse(RewardRecipe):
        def parts(self, verdict, roofline):
            return {"correct": float(verdict.status is Status.CORRECT)}

    assert reward(correct(), Sparse()) == 1.0
    assert reward(failed("degenerate_task"), Sparse()) is None
    assert reward(correct(), recipe_of(Sparse())) == 1.0


def test_turns_are_discounted_as_kevin_does():
    assert discounted([0.3, 1.3, 2.3], 0.4) == pytest.approx([1.188, 2.22, 2.3])
    assert discounted([], 0.4) == []
    assert discounted([1.0, 2.0], 0.0) == [1.0, 2.0]


@given(st.lists(st.none() | st.floats(-5, 5), max_size=8), st.floats(0, 1))
def test_a_turn_without_a_reward_leaves_those_before_without(rewards, gamma):
    returns = discounted(rewards, gamma)
    assert len(returns) == len(rewards)
    for turn, value in enumerate(returns):
        if None in rewards[turn:]:
            assert value is None
        else:
            terms = [gamma**i * each for i, each in enumerate(rewards[turn:])]
            assert value == pytest.approx(sum(terms))


@pytest.mark.parametrize("gamma", [-0.1, 1.1, math.nan])
def test_a_discount_outside_its_range_is_refused(gamma):
    with pytest.raises(ValueError, match="gamma"):
        discounted([1.0], gamma)


@given(st.sampled_from(sorted(RECIPES)), speedups, shares, st.none() | st.floats(0.01, 100))
def test_a_screened_speed_is_worth_at_most_that_of_the_reference(name, speedup, share, least_ms):
    """Confirmed it is worth what it is; one that is slower is not better for being screened."""
    found = correct(speedup, compiled=speedup, share=share)
    equal = correct(min(speedup, 1.0), compiled=min(speedup, 1.0), share=share)
    screened = found.model_copy(update={"level": "screen"})
    worth = [reward(each, RECIPES[name], least_ms=least_ms) for each in (screened, equal)]
    assert worth[0] == pytest.approx(worth[1])
    assert reward(found, RECIPES[name], least_ms=least_ms) >= worth[0] - 1e-9
