"""Dropout without state: rate, independence, purity, and what compiled code keeps of it."""

import math

import pytest
import torch

from tasks.training.acceleration.dropout import CounterDropout, DropoutKeys, keep_mask

ROWS, COLUMNS, RATE = 512, 640, 0.05


def dropouts(count, seed=3, step=0):
    modules = [CounterDropout(RATE, torch.device("cpu")) for _ in range(count)]
    DropoutKeys(modules, seed).set(step)
    return modules


def masks(count, *, seed=3, step=0):
    return torch.stack(
        [keep_mask((ROWS, COLUMNS), module.key, RATE) for module in dropouts(count, seed, step)]
    )


def assert_independent(first, second):
    """Of dropped elements, as many coincide as chance gives: within five standard errors of rate
    squared."""
    both = (~first & ~second).double()
    error = math.sqrt(RATE**2 * (1 - RATE**2) / both.numel())
    assert abs(float(both.mean()) - RATE**2) < 5 * error


def test_rate_is_kept_in_every_module_and_over_rows_and_columns():
    drawn = (~masks(20)).double()
    error = math.sqrt(RATE * (1 - RATE) / (ROWS * COLUMNS))
    assert (drawn.mean((1, 2)) - RATE).abs().max() < 5 * error
    for mean, count in ((drawn.mean(1), ROWS), (drawn.mean(2), COLUMNS)):
        spread = mean.var() / (RATE * (1 - RATE) / count)
        assert 0.95 < float(spread) < 1.05, "rows and columns vary as independent draws do"


def test_modules_steps_and_seeds_are_independent():
    base = masks(3)
    assert_independent(base[0], base[1])
    assert_independent(base[0], base[2])
    assert_independent(base[0], masks(1, step=1)[0])
    assert_independent(base[0], masks(1, seed=4)[0])
    other_rank = CounterDropout(RATE, torch.device("cpu"))
    DropoutKeys([other_rank], 3, rank=1).set(0)
    assert_independent(base[0], keep_mask((ROWS, COLUMNS), other_rank.key, RATE))
    assert torch.equal(base, masks(3)), "the same seed and step draw the same masks"


@pytest.mark.parametrize("offset", [1, 2, 3, 32, COLUMNS, 2 * COLUMNS, COLUMNS + 1])
def test_neighbours_are_independent(offset):
    flat = masks(8).flatten(1)
    assert_independent(flat[:, :-offset], flat[:, offset:])


def test_expectation_is_preserved_and_eval_is_the_identity():
    module = dropouts(1)[0]
    x = torch.rand(ROWS, COLUMNS) + 1
    out = module(x)
    kept = out != 0
    assert torch.allclose(out[kept], x[kept] / (1 - RATE))
    error = math.sqrt(float((x**2).mean()) * RATE / (1 - RATE) / x.numel())
    assert abs(float((out - x).mean())) < 5 * error
    assert module.eval()(x) is x


def test_gradient_is_masked_and_scaled_like_the_output():
    module = dropouts(1)[0]
    x = torch.ones(64, 64, requires_grad=True)
    out = module(x)
    out.sum().backward()
    assert torch.equal(x.grad, out.detach())


def test_an_update_of_the_keys_moves_no_tensor():
    modules = dropouts(4)
    places = [module.key.data_ptr() for module in modules]
    DropoutKeys(modules, 3).set(7)
    assert [module.key.data_ptr() for module in modules] == places
    assert not torch.equal(modules[0].key, dropouts(4)[0].key)


@pytest.mark.parametrize("rate", [0.0, 1.0, -0.1])
def test_a_rate_out_of_range_is_refused(rate):
    with pytest.raises(ValueError, match="between 0 and 1"):
        CounterDropout(rate, torch.device("cpu"))


@pytest.mark.slow
def test_compiled_code_draws_the_same_mask_and_keeps_nothing_of_it():
    module = dropouts(1)[0]
    weight = torch.nn.Parameter(torch.randn(8, COLUMNS))

    def step(x):
        return torch.nn.functional.linear(module(x), weight)

    x = torch.randn(ROWS, COLUMNS, requires_grad=True)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: saved.append(tensor) or tensor, lambda tensor: tensor
    ):
        out = torch.compile(step)(x)
    assert torch.allclose(out, step(x), atol=1e-5)
    assert not any(tensor.dtype == torch.bool for tensor in saved)
    assert sum(tensor.nbytes for tensor in saved) <= x.nbytes + weight.nbytes + 64, (
        "the input, the weight and the key"
    )
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    DropoutKeys([module], 3).set(1)
    assert not torch.equal(torch.compile(step)(x), out)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before, (
        "a new key compiles nothing"
    )
