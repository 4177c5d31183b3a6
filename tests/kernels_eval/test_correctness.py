"""What counts as the same answer: gates, masks, the signature of a downcast, and inputs whose
meaning is kept when they are varied."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kernels_eval.config import CorrectnessConfig
from kernels_eval.judge.sums import what_is_wrong
from kernels_eval.model.correctness import judge, merge
from kernels_eval.model.inputs import flatten_outputs, load_module, make_inputs, plan_inputs
from kernels_eval.model.measurement import close, least_mark, measure, row_differences, unlike
from kernels_eval.model.weights import randomise_weights
from kernels_eval.protocol import FEW_TERMS, Comparison
from kernels_eval.records import Reason
from kernels_eval.reference import long_sums
from kernels_eval.reference.long_sums import LongSums

CONFIG = CorrectnessConfig()
OTHERS = "uniform normal_x10 normal_x10000 sparse small_integers mixed_positive".split()
DISTRIBUTIONS = ("small", *(name for name in CONFIG.distributions if name != "large"), *OTHERS)


def draw(seed=0, shape=(64, 64)):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def verdict(actual, reference, oracle=None, precision="fp32"):
    found = measure(actual, reference.double() if oracle is None else oracle, reference)
    return judge(found.model_copy(update={"precision": precision}))


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 1e-7, 1e-4, 0.3]),
    st.sampled_from([1e-20, 1.0, 1e6]),
    st.booleans(),
)
def test_finite_tensors_are_measured_as_the_formulas_say(seed, noise, size, fp64_oracle):
    reference = draw(seed, (7, 33)) * size
    oracle = reference.double() * (1 + 1e-7) if fp64_oracle else reference
    actual = reference + noise * size * draw(seed + 1, (7, 33))
    measured = measure(actual, oracle, reference)
    y, a, r = (np.asarray(tensor, dtype=np.float64) for tensor in (oracle, actual, reference))
    rms = float(np.sqrt((y**2).mean()))
    errors = {
        "rms": np.sqrt(((a - y) ** 2).mean()) / rms,
        "reference_rms": np.sqrt(((r - y) ** 2).mean()) / rms,
        "max": (np.abs(a - y) / (np.abs(y) + rms)).max(),
    }
    for name, error in errors.items():
        assert getattr(measured, name) == pytest.approx(float(error), rel=1e-3, abs=1e-12), name
    assert measured.masks_match
    assert measured.kernelbench_1e2 == bool(np.allclose(a, r, atol=1e-2, rtol=1e-2))


def test_another_summation_order_is_right():
    x = draw(1, (64, 2048))
    oracle = x.double().sum(1)
    reordered = x.reshape(64, 32, 64).sum(1).sum(1)
    assert verdict(reordered, x.sum(1), oracle) == "ok"


@pytest.mark.parametrize("wrong, expected", [(0, "ok"), (8, "ok"), (32, "wrong_output")])
def test_a_small_column_is_not_hidden_by_large_ones(wrong, expected):
    own = draw(2, (64, 400)).float() * 1e6
    own[:, -1] = 1.0
    answer = own.clone()
    answer[:wrong, -1] = 0.25
    found = measure(answer, own.double() * (1 + 1e-9), own)
    assert found.wrong_slice == wrong / 64 and found.reference_wrong_slice == 0
    assert found.rms < 1e-6 and found.wrong_share < 0.002 and judge(found) == expected


@pytest.mark.parametrize("factor", [10, 30, 1000])
def test_tails_may_be_lost_to_rounding_at_one_and_not_left_out(factor):
    """log(1 + exp(x)) of much below -17 is 0 in fp32; leaving out small exponentials is another
    error, which the largest ones hide from the RMS."""
    drawn = torch.randn(20_000, generator=torch.Generator().manual_seed(3))
    x = drawn * factor
    exact, own = torch.nn.functional.softplus(x.double()), torch.nn.functional.softplus(x)
    found = measure(torch.where(x > 20, x, torch.log(1 + torch.exp(x))), exact, own)
    assert found.wrong_share == 0 and judge(found) == "ok"
    x = drawn * 8
    exact, own = torch.exp(x.double()), torch.exp(x)
    found = measure(torch.where(drawn > 1, own, 0.0), exact, own)
    assert found.rms < 1e-5 and found.wrong_share > 0.5
    assert judge(found) == "wrong_output"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_downcast_is_named(dtype):
    y = draw()
    assert verdict(y.to(dtype).float(), y) == "precision_downcast"


@pytest.mark.parametrize("factor", [1.001, 0.999, 1.01])
def test_a_wrong_constant_is_not_called_a_downcast(factor):
    y = draw()
    assert verdict(y * factor, y) == "wrong_output"


def gelu_by_tanh(x):
    return torch.nn.functional.gelu(x.double(), approximate="tanh").float()


@pytest.mark.parametrize("size", [1e-320, 1e-200, 1e-130, 1e-25, 1.0, 1e100, 1e160, 1e200, 1e307])
def test_no_size_of_float64_is_too_small_or_too_large_to_measure(size):
    y = draw().double().abs() * size + size
    largest = torch.full_like(y, 1e308)
    for other in (y * 1e-170, -y, y * (1 + 1e-3), y * 1e5, largest, y / 0, y * float("nan")):
        for oracle, expected in ((y, y), (y, y * (1 + 1e-15))):
            measured = measure(other, oracle, expected)  # a candidate decides what it is given
            assert not any(map(math.isinf, (measured.rms, measured.max)))  # JSON has none
            assert size < 1e-140 or judge(measured) != "ok"
    assert size < 1e-140 or measure(y * (1 + 1e-3), y, y).rms == pytest.approx(1e-3)
    assert verdict(y * (1 + 2e-16), y) == "ok"
    beside = torch.cat([y.flatten(), torch.tensor([torch.inf], dtype=torch.float64)])
    assert verdict(beside, beside) == "ok"
    assert size < 1e-140 or verdict(beside * (1 + 1e-3), beside) != "ok"


FORMULAS = {
    "gelu": (lambda x: torch.nn.functional.gelu(x.double()), gelu_by_tanh),
    "gelu_of_two_branches": (
        lambda x: torch.nn.functional.gelu((x * 0.65).double()),
        lambda x: gelu_by_tanh(x * 0.65),
    ),
    "conv_gelu": (
        lambda x: torch.nn.functional.gelu(leaky(x).double()),
        lambda x: gelu_by_tanh(leaky(x)),
    ),
    "selu": (
        lambda x: 1.0507009873554805 * elu(x.double(), 1.6732632423543772),
        lambda x: (1.0507 * elu(x.double(), 1.673)).float(),
    ),
}


def leaky(x):
    return torch.nn.functional.leaky_relu(x * 0.3)


def elu(x, alpha):
    return torch.where(x > 0, x, alpha * torch.expm1(x))


@pytest.mark.parametrize("name", FORMULAS)
@pytest.mark.parametrize("shape", [(64, 64), pytest.param((1024, 513), marks=pytest.mark.slow)])
def test_an_approximation_is_not_called_a_downcast(name, shape):
    exact, approximate = FORMULAS[name]
    x = draw(5, shape)
    measured = measure(approximate(x), exact(x), exact(x).float())
    assert 1e-5 < measured.rms < 1.6e-2, "small, and beyond every gate"
    assert measured.systematic and not measured.offset
    expected = "approximation" if measured.kernelbench_1e4 else "wrong_output"
    assert verdict(approximate(x), exact(x).float(), exact(x)) == expected


@pytest.mark.parametrize("offset", [1e-3, -3e-4])
def test_an_offset_is_told_from_an_approximation(offset):
    y = draw(6, (512, 256))
    measured = measure(y + offset, y.double(), y)
    assert measured.systematic and measured.offset
    assert merge([measured, measure(y, y.double(), y)]).offset
    few = y.reshape(-1)[:8]
    assert not measure(few + offset, few.double(), few).offset
    scaled = measure(y * (1 + offset), y.double(), y)
    assert scaled.systematic and not scaled.offset


def cut(y, bits):
    return ((y.view(torch.int32) >> bits) << bits).view(torch.float32)


ROUNDED = {
    "product_fp16": lambda x: (x @ x.T, (x.half().double() @ x.half().double().T).float()),
    "gelu_of_bf16": lambda x: (
        torch.nn.functional.gelu(x),
        torch.nn.functional.gelu(x.bfloat16().float()),
    ),
    "near_one_bf16": lambda x: (1 + x.abs() / 300, (1 + x.abs() / 300).bfloat16().float()),
    "softmax_fp16": lambda x: (torch.softmax(x, 1), torch.softmax(x, 1).half().float()),
    "digits_cut": lambda x: (x, cut(x, 13)),
    "digits_cut_far": lambda x: (x, cut(x, 16)),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_rounding_is_no_formula(name):
    y, actual = ROUNDED[name](draw(6, (512, 256)))
    assert verdict(actual, y) == "precision_downcast"


@pytest.mark.parametrize("wrong", [1, 3, 8])
def test_a_few_wrong_elements_are_not_called_a_downcast(wrong):
    """Off by 1 beside values that make the error look small."""
    y = 2 * draw(shape=(128, 128)) + 1
    actual = y.clone()
    far = y.flatten().abs().topk(8).indices[:wrong]
    actual.view(-1)[far] += 1
    assert verdict(actual, y) == "wrong_output"


@given(st.integers(0, 64 * 64 - 1), st.sampled_from([-1.0, 0.01, 1.0, 100.0]))
@settings(max_examples=30, deadline=None)
def test_one_wrong_element_anywhere_is_seen(index, error):
    y = draw()
    actual = y.clone()
    actual.view(-1)[index] += error
    assert verdict(actual, y) != "ok"


@pytest.mark.parametrize("scale", [1e-12, 1e-6, 1.0, 1e6])
def test_the_gate_is_relative(scale):
    """Tiny outputs do not hide under an absolute tolerance, and large ones are not held to one."""
    y = draw() * scale
    assert verdict(torch.zeros_like(y), y) == "wrong_output"
    assert verdict(y * (1 + 1e-7), y) == "ok"


@pytest.mark.parametrize(
    "size, seen", [(1e-31, True), (3e-36, True), (1e-37, True), (1e-39, False)]
)
@pytest.mark.parametrize("fp64_oracle", [True, False])
def test_only_what_is_flushed_to_zero_counts_for_nothing(size, seen, fp64_oracle):
    oracle = draw(shape=(512, 512)).double() * size
    y = oracle.float()
    oracle = oracle if fp64_oracle else y
    assert (verdict(torch.zeros_like(y), y, oracle) != "ok") == seen
    least = torch.finfo(torch.float32).tiny
    assert verdict(y.masked_fill(y.abs() < least, 0), y, oracle) == "ok"


@pytest.mark.parametrize("large, small", [(1e4, 1e-4), (1e-4, 1e4)])
def test_a_part_beside_a_far_larger_one_counts(large, small):
    parts = torch.stack([draw() * large, draw(5) * small], -1)
    y = torch.view_as_complex(parts)
    less = torch.view_as_complex(parts * torch.tensor([large > small, small > large]))
    near = torch.view_as_complex(parts * (1 + 1e-7))
    oracle = y.to(torch.complex128)
    assert (verdict(less, y, oracle), verdict(near, y, oracle)) == ("wrong_output", "ok")


def test_complex_values_of_any_size_are_measured():
    y = torch.ones(1, dtype=torch.complex128)
    large = torch.full_like(y, complex(1.5e308, 1.5e308))  # its absolute value overflows
    assert verdict(large, y, y) == verdict(y, large, large) == "wrong_output"
    assert verdict(large, large, large) == "ok"


@pytest.mark.parametrize("value", [complex("inf+nanj"), complex("nan-infj"), complex("nan+nanj")])
def test_masks_of_complex_values_know_both_parts(value):
    y = draw().to(torch.complex64)
    rare = y.clone()
    rare[2, 3] = value
    assert verdict(rare, rare, rare) == "ok" and close(rare, rare, 1e-4)
    other = rare.clone()
    other[2, 3] = -value
    same = value != value and not any(map(math.isinf, (value.real, value.imag)))
    assert verdict(other, rare, rare) == ("ok" if same else "non_finite")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_nothing_is_near_the_largest_values_for_their_overflow(dtype):
    y = torch.full((64,), 0.9 * torch.finfo(dtype).max, dtype=dtype)
    for other in (-y, y / 10, y * 0.5):
        assert not close(other, y, 1e-4) and bool(unlike(other, y).all())
    assert close(y, y, 1e-4) and not unlike(y, y).any()


MARKS = {
    "assigned": lambda y, masked: y.masked_fill(masked, -1e9),
    "added": lambda y, masked: y - masked * 1e9,
    "of_half": lambda y, masked: y.masked_fill(masked, -1e4),
    "a_single_one": lambda y, masked: y.masked_fill(torch.arange(y.shape[1]) == 3, 1e12),
    "two_kinds": lambda y, masked: y.masked_fill(masked, 1e7).masked_fill(masked.T, -1e12),
    "beside_infinity": lambda y, masked: y.masked_fill(masked, -1e9).masked_fill(
        masked.T, -torch.inf
    ),
}


@pytest.mark.parametrize("how", MARKS)
@pytest.mark.parametrize("oracle", ["float64", "none"])
def test_marks_of_what_is_masked_hide_no_error(how, oracle):
    masked = torch.ones(64, 64).triu(40).bool()
    marked, y = MARKS[how], draw().double()
    expected = marked(y, masked)
    known = expected.float(), expected if oracle == "float64" else expected.float()
    assert verdict(marked(y.float(), masked), *known) == "ok"
    noise = 1 + 2e-7 * draw(1).sign()
    assert verdict(marked((y * noise).float(), masked), *known) == "ok"
    wrong = marked(y * 1.4, masked).float()
    assert verdict(wrong, *known) == "wrong_output"
    assert not close(wrong, known[0], 1e-4) and close(known[0], known[0], 1e-4)
    assert bool(unlike(wrong, known[0]).any())
    other = expected.float().masked_fill(expected.float().abs() > 1e3, 7e8)
    assert verdict(other, *known) != "ok", "the marks are compared, too"


def test_large_values_are_no_marks():
    for y in (draw() ** 9 * 1e6, torch.exp(draw() * 20), torch.tensor([3e4, 7e3, 20.0])):
        assert least_mark(y.reshape(-1)) == math.inf
    assert least_mark(torch.sigmoid(draw() * 1e4).flatten() * 255) == math.inf


def test_a_positive_mean_does_not_hide_an_error():
    y = draw().abs() + 100
    wrong = y.clone()
    wrong[3] += 1.0
    assert measure(wrong, y.double(), y).kernelbench_1e2 is True
    assert verdict(wrong, y) != "ok"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_masks_must_match_in_both_directions(value):
    y = draw()
    spoiled = y.clone()
    spoiled[2, 3] = value
    assert verdict(spoiled, y) == "non_finite"
    assert verdict(y, spoiled) == "non_finite"
    assert verdict(spoiled, spoiled) == "ok"


def test_infinities_keep_their_sign():
    y = draw()
    plus, minus = y.clone(), y.clone()
    plus[0, 0], minus[0, 0] = float("inf"), float("-inf")
    assert verdict(plus, minus) == "non_finite"


def test_expected_nan_does_not_let_anything_pass():
    y = draw()
    y[0] = float("nan")
    other = draw(5)
    other[0] = float("nan")
    assert verdict(other, y) == "wrong_output"


def test_integers_are_exact():
    y = torch.arange(100)
    assert verdict(y.clone(), y, y) == "ok"
    near = y.clone()
    near[50] += 1
    assert verdict(near, y, y) == "wrong_output"


def test_a_reference_with_a_large_own_error_widens_the_gate():
    """Cancellation costs the fp32 reference digits; a candidate is held to eight times that, not to
    1e-5."""
    oracle = draw().double()
    noise = draw(9).double() * 1e-4
    reference, actual = (oracle + noise).float(), (oracle + 4 * noise).float()
    assert verdict(actual, reference, oracle) == "ok"
    assert verdict((oracle + 20 * noise).float(), reference, oracle) != "ok"


def test_empty_outputs_are_equal():
    empty = torch.empty(0, 4)
    assert verdict(empty, empty) == "ok"


def test_merge_keeps_the_worst():
    y = draw()
    good, bad = measure(y, y.double(), y), measure(y * 1.1, y.double(), y)
    worst = merge([good, bad])
    assert worst.rms == bad.rms and worst.kernelbench_1e2 is False and worst.systematic is True
    assert merge([good, good]) == good
    nan = good.model_copy(update={"rms": float("nan")})
    for order in ([good, nan, bad], [nan, good], [good, nan]):
        assert judge(merge(order)) == "wrong_output"


# -- inputs ----------------------------------------------------------------------------------------

TASK = """
import torch
def get_inputs():
    return [
        torch.randn(8, 16), torch.randint(0, 10, (8,)), torch.softmax(torch.randn(8, 5), -1), \
torch.tril(torch.randn(6, 6)),
        (lambda a: a + a.T)(torch.randn(6, 6)), torch.randint(0, 2, (8,)).float(), torch.randn(8, \
16).half(), 3,
    ]
def get_init_inputs():
    return []
"""


@pytest.fixture(scope="module")
def task(tmp_path_factory):
    path = tmp_path_factory.mktemp("task") / "task.py"
    path.write_text(TASK)
    return load_module(str(path), "inputs_task")


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_inputs_repeat_for_a_seed_and_keep_their_meaning(task, distribution):
    plan = plan_inputs([make_inputs(task, 1, "declared", None, "cpu")])
    drawn, again, other = (make_inputs(task, seed, distribution, plan, "cpu") for seed in (7, 7, 8))
    for a, b in zip(drawn, again, strict=True):
        assert torch.equal(torch.as_tensor(a), torch.as_tensor(b))
    assert not torch.equal(drawn[0], other[0])
    dense, labels, probabilities, triangle, symmetric, mask, half, number = drawn
    assert labels.dtype == torch.int64 and int(labels.min()) >= 0 and int(labels.max()) < 10
    assert torch.allclose(probabilities.sum(-1), torch.ones(8), atol=1e-4) and bool(
        (probabilities >= 0).all()
    )
    assert torch.equal(triangle, torch.tril(triangle))
    assert torch.equal(symmetric, symmetric.T)
    assert set(mask.unique().tolist()) <= {0.0, 1.0}
    assert half.dtype == torch.float16 and number == 3 and dense.shape == (8, 16)


def test_distributions_are_what_they_are_called(task):
    plan = plan_inputs([make_inputs(task, 1, "declared", None, "cpu")])
    drawn = {name: make_inputs(task, 7, name, plan, "cpu")[0] for name in DISTRIBUTIONS}
    assert float(drawn["uniform"].abs().max()) <= 1
    assert float(drawn["normal_x10"].std()) > 5 * float(drawn["normal"].std())
    assert float((drawn["sparse"] == 0).float().mean()) > 0.7
    assert (
        torch.equal(drawn["small_integers"], drawn["small_integers"].round())
        and float(drawn["small_integers"].abs().max()) <= 3
    )
    declared, impulse, mixed = drawn["declared"], drawn["impulse"], drawn["mixed"]
    altered = impulse[impulse != declared]
    assert len(altered) == 2 and float(altered.min()) < -15 and float(altered.max()) > 15
    assert not torch.equal(mixed, declared) and bool((drawn["mixed_positive"] > 0).all())
    assert float(drawn["small"].square().mean()) < 1e-5
    assert float(drawn["offset"].mean()) > 1e3 * float(drawn["offset"].std())
    odd = make_inputs(task, 7, "non_finite", plan, "cpu")[0]
    assert [int(f(odd).sum()) for f in (torch.isnan, torch.isposinf, torch.isneginf)] == [1, 1, 1]


def test_outputs_beside_far_larger_ones_count():
    y = (8 * draw().double()).exp()
    large = y > 1e4
    assert verdict(torch.where(large, y, 0.0).float(), y.float(), y) == "wrong_output"
    assert verdict(y.float() * (1 + 1e-6), y.float(), y) == "ok"
    few = torch.where(y > y.quantile(0.03), y, 0.0).float()  # sums near zero may be off by so much
    assert verdict(few, y.float(), y) == "ok"
    assert verdict(few, torch.where(large, y, 0.0).float(), y) == "ok", "the reference's own"


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.complex64, torch.int64])
def test_the_row_that_differs_most_is_found(dtype):
    own = (draw(shape=(9, 50)) * 100).to(dtype)
    actual = own.clone()
    actual[6, 17] += 9
    actual[2, 3] += 3
    found = row_differences(actual, own)
    assert (found > 0).nonzero().flatten().tolist() == [2, 6] and int(found.argmax()) in (2, 6)
    if own.is_floating_point():
        actual[4, 0] = torch.nan
        assert row_differences(actual, own)[4] == torch.inf


@pytest.mark.parametrize("rare", [torch.nan, torch.inf, -torch.inf])
def test_rows_that_are_right_beside_nan_and_infinities_do_not_hide_a_wrong_one(rare):
    own = torch.randn(6, 40)
    own[:, 3] = rare
    actual = own.clone()
    actual[2, 7] += 0.5
    actual[4, 3] = 1.0
    found = row_differences(actual, own)
    assert (found[[0, 1, 3, 5]] == 0).all()
    assert 0.05 < found[2] < 1.0 and found[4] == torch.inf


def test_two_weights_of_one_shape_differ():
    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    randomise_weights(model, 1)
    assert not torch.equal(model[0].weight, model[1].weight) and not torch.equal(
        model[0].bias, model[1].bias
    )


def test_structures_are_told_apart():
    a, b = torch.ones(1), torch.zeros(1)
    assert flatten_outputs(a) == ([a], ".")
    leaves, nested = flatten_outputs((a, [b, {"k": a}]))
    assert [id(leaf) for leaf in leaves] == [id(a), id(b), id(a)]
    assert (
        len(
            {
                flatten_outputs(value)[1]
                for value in (a, (a,), (a, b), ((a, b),), {"x": a}, {"y": a})
            }
        )
        == 6
    )
    assert nested == "(.,(.,{k:.}))"


# -- long sums -------------------------------------------------------------------------------------


def in_order(terms, block):
    """Row sums in fp32: blocks of so many terms, one after the other."""
    sums = np.cumsum(terms.reshape(len(terms), -1, block).numpy(), axis=2, dtype=np.float32)
    return torch.from_numpy(np.cumsum(sums[:, :, -1], axis=1, dtype=np.float32)[:, -1].copy())


def to_tf32(x):
    return (((x.view(torch.int32) + (1 << 12)) >> 13) << 13).view(torch.float32)


def seen_by_modes(a, b):
    with LongSums() as sums:
        return sums.made_with(torch.mm(a, b)).error


@pytest.mark.parametrize("length", [1, 6, 7, 8, 100])
@pytest.mark.parametrize("scale", [1.0, 3e38])
def test_parts_are_added_up_as_the_whole_is(length, scale, monkeypatch):
    monkeypatch.setattr(long_sums, "TERMS_AT_ONCE", 7)
    rows = np.random.default_rng(length).uniform(-1, 1, (3, length)).astype(np.float32)
    rows *= np.float32(scale)
    with np.errstate(over="ignore", invalid="ignore"):
        exact = np.cumsum(rows, 1, dtype=np.float64)
        off = np.abs(np.cumsum(rows, 1, dtype=np.float32) - exact).max(1)
        found = long_sums._added_in_order(torch.from_numpy(rows))
    np.testing.assert_allclose(found[0], off, rtol=1e-6)
    np.testing.assert_allclose(found[1], exact[:, -1], rtol=1e-12, atol=1e-15 * scale)


@pytest.mark.parametrize("length", [1 << 9, 1 << 14, 1 << 17])
@pytest.mark.parametrize("positive", [False, True])
def test_plain_addition_of_any_length_is_right_and_tf32_is_not(length, positive):
    generator = torch.Generator().manual_seed(length + positive)
    a, b = (torch.randn(16, length, generator=generator) for _ in range(2))
    if positive:
        a, b = a.abs(), b.abs()
    oracle = (a.double() * b.double()).sum(1)

    def outcome(actual):
        found = measure(actual, oracle, oracle.float())
        found = found.model_copy(update={"sequential_rms": seen_by_modes(a, b.T)})
        return judge(found)

    for block in (length, 256, length // 32):
        assert outcome(in_order(a * b, block)) == "ok"
    if not positive:  # where all terms have one sign, roundings cancel
        assert outcome(in_order(to_tf32(a) * to_tf32(b), 256)) == "precision_downcast"
    assert outcome(in_order((a * b)[:, : -length // 64], 1)) != "ok", "a sum cut short"


SUMS = {
    "mm": lambda x: x @ x.T,
    "bmm": lambda x: torch.bmm(x[None], x.T[None]),
    "mv": lambda x: torch.mv(x, x[0]),
    "linear": lambda x: torch.nn.functional.linear(x, x, torch.ones(4)),
    "mean": lambda x: x.mean(1),
    "mean_of_all": torch.mean,
    "norm": lambda x: x.norm(dim=1),
    "variance": lambda x: x.var(1),
    "softmax": lambda x: torch.softmax(x, -1),
    "cumsum": lambda x: x.cumsum(1),
    "layer_norm": lambda x: torch.nn.functional.layer_norm(x, x.shape[1:]),
    "group_norm": lambda x: torch.nn.functional.group_norm(x[None], 2),
    "batch_norm": lambda x: torch.nn.functional.batch_norm(x.T, None, None, training=True),
}


@pytest.mark.parametrize("name", SUMS)
def test_sums_are_measured_in_every_operator_that_adds_up(name):
    """Terms that are alike err alike: by far more than terms of random sign."""
    errors = []
    for x in (torch.full((4, 1 << 16), 0.1), torch.full((4, 64), 0.1)):
        with LongSums() as sums:
            errors.append(sums.made_with(SUMS[name](x)).error)
    long, short = errors
    if name == "softmax":
        assert long == 0.0, "ones add up exactly"
    else:
        assert long > 1e-5
    assert short == 0.0 or (name in ("group_norm", "mean_of_all") and short < long)


LOSSES = {
    "mse": torch.nn.functional.mse_loss,
    "smooth_l1": torch.nn.functional.smooth_l1_loss,
    "huber": torch.nn.functional.huber_loss,
    "soft_margin": torch.nn.functional.soft_margin_loss,
    "bce": torch.nn.functional.binary_cross_entropy,
    "bce_with_logits": torch.nn.functional.binary_cross_entropy_with_logits,
    "nll": lambda x, _, **how: torch.nn.functional.nll_loss(-x, x[:, 0].long(), **how),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_losses_are_sums_unless_they_are_asked_of_each_element(name, reduction):
    with LongSums() as sums:
        found = LOSSES[name](
            torch.full((1 << 16, 4), 0.3), torch.full((1 << 16, 4), 0.7), reduction=reduction
        )
    assert (sums.made_with(found).error > 1e-5) == (reduction != "none")


def test_exact_arithmetic_is_not_moved():
    x = torch.tensor([0.125, 0.7, 1.5])
    with LongSums(torch.Generator().manual_seed(0), 64.0):
        product, rounded, total, quotient, third = x * 4, x * 0.3, x + 2.5, x / 0.25, x / 3
    assert torch.equal(product, x * 4) and torch.equal(quotient, x * 4)
    assert not (rounded == x * 0.3).any()
    assert (total == x + 2.5).tolist() == [True, False, True]
    assert (third == x / 3).tolist() == [False, False, True]


def test_what_is_no_long_sum_is_left_alone():
    x = torch.randn(8, 2048)
    for run in (lambda: x.exp(), lambda: x.long().sum(1), lambda: torch.empty(0, 2048).sum(1)):
        with LongSums() as sums:
            found = run()
        assert sums.made_with(found).error == 0.0


@pytest.mark.parametrize("error", [1e-5, 1e-4])
def test_a_gate_is_no_wider_than_what_tells_a_constant(error):
    y = draw().abs() + 1
    actual = y * (1 + error / 2 * draw(3).sign())
    measured = measure(actual, y.double(), y).model_copy(update={"sequential_rms": error})
    assert judge(measured) == "ok"
    assert judge(measured, loosest=error / 10) == "wrong_output"


@pytest.mark.parametrize("slope", [1e-2, 1e-4])
def test_errors_only_where_outputs_are_zero_are_no_approximation(slope):
    x = draw()
    y = torch.relu(x) * 0.5
    measured = measure(torch.where(x > 0, y, slope * x), y.double(), y)
    assert judge(measured, own_inputs=False) == "wrong_output"


X, AT, MASK = torch.randn(8, 16), torch.tensor([3, 1, 3]), torch.rand(8, 16) < 0.5
CHOSEN = {
    "sort": lambda: X.sort().values,
    "largest": lambda: X.amax(1),
    "moved": lambda: torch.roll(X.t().reshape(4, -1).flip(0), 1),
    "rows": lambda: X[AT],
    "where": lambda: torch.where(X > 0.1, X, 0.1).clamp(-0.3, 0.7),
    "filled": lambda: X.masked_fill(MASK, -1e9),
    "one_hot": lambda: torch.nn.functional.one_hot(AT).float(),
    "wider": lambda: X.double(),
    "branch": lambda: torch.relu(X) if (X > 9).any() else X.neg(),
}
COMPUTED = {
    "sum": lambda: X + 1,
    "before": lambda: X.softmax(0).sort().values,
    "narrower": lambda: X.bfloat16(),
    "narrower_copy": lambda: torch.zeros(8, 16).half().copy_(X),
    "added_at": lambda: torch.zeros(8, 16).index_put((AT,), X[:3], accumulate=True),
    "read_by_python": lambda: torch.full((3,), 2 * X.amax().item()),
    "filled_with": lambda: torch.empty(3).fill_(X.sum()),
    "progression": lambda: torch.linspace(0, 1, 7),
}


def test_running_statistics_are_computed():
    norm = torch.nn.BatchNorm1d(16)
    with LongSums() as sums:
        norm(X)
    assert not any(map(sums.only_chosen, (norm.running_mean, norm.running_var)))


@pytest.mark.parametrize("name", [*CHOSEN, *COMPUTED])
def test_tells_outputs_that_are_only_moved_and_chosen(name):
    with LongSums() as sums:
        output = (CHOSEN | COMPUTED)[name]()
    assert sums.only_chosen(output) == (name in CHOSEN)


@pytest.mark.parametrize(("error", "reason"), [(1e-7, Reason.OK), (2e-7, Reason.WRONG_OUTPUT)])
def test_what_is_only_chosen_is_the_references_but_for_four_roundings(error, reason):
    measured = Comparison(rms=error, max=error, reference_rms=0.0)
    assert judge(measured) is Reason.OK
    assert judge(measured.model_copy(update={"only_chosen": True})) is reason


@pytest.mark.parametrize(("error", "text"), [(2e-5, "loses digits"), (0.2, "not of all")])
def test_a_small_error_of_few_terms_is_no_term_left_out(error, text):
    less = Comparison(rms=0.07, max=0.5, reference_rms=0.0)
    found = Comparison(rms=error, max=error, reference_rms=0.0)
    assert text in what_is_wrong(found, FEW_TERMS, less)


def test_a_slice_that_rounding_moves_is_no_mistake_where_the_reference_errs_little_by_chance():
    generator = torch.Generator().manual_seed(0)
    oracle = torch.randn(64, 128, generator=generator, dtype=torch.float64)

    def rounded(*, at_first: float) -> torch.Tensor:
        """Rows 1 to 63 err by a hundredth, the first by so much."""
        error = 1e-2 * torch.randn(64, 128, generator=generator, dtype=torch.float64)
        error[0] *= at_first / 1e-2
        return (oracle + error).float()

    reference, answer = rounded(at_first=1e-8), rounded(at_first=1e-4)
    assert measure(answer, oracle, reference).of_slice
    moved = [rounded(at_first=1e-8), rounded(at_first=1e-4)]
    assert not measure(answer, oracle, reference, moved).of_slice
    sound = [rounded(at_first=1e-8)] * 4
    assert measure(answer, oracle, reference, sound).rms > 5e-5
