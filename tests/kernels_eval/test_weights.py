"""How weights map between two models, and what is redrawn of them."""

import math
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kernels_eval.judge.candidate_handle import matched_names, unmatched_shapes
from kernels_eval.model.inputs import construct, made_elsewhere
from kernels_eval.model.renewals import counterparts, drawn_forms, renew, unheld
from kernels_eval.model.shifts import may_shift, shifted_form
from kernels_eval.model.weights import (
    copy_weights,
    exchange_elements,
    is_structured,
    padded_shapes,
    parameters_of,
    randomise_weights,
    redraw_statistics,
    running_statistics,
    squeezed,
)
from kernels_eval.protocol import LEADING, ModelSpec

SHAPE = st.lists(st.integers(1, 40), min_size=1, max_size=4)


def test_weights_map_by_shape_whatever_their_order_name_and_ones():
    class One(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.weight = (
                torch.nn.Parameter(torch.ones(4)),
                torch.nn.Parameter(torch.ones(3, 4)),
            )

    class Other(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.w, self.g = (
                torch.nn.Parameter(torch.zeros(3, 4)),
                torch.nn.Parameter(torch.zeros(1, 4, 1, 1)),
            )

    one, other = One(), Other()
    shapes = [list(map(squeezed, parameters_of(each).values())) for each in (one, other)]
    assert unmatched_shapes(*shapes) == ([], 0)
    randomise_weights(one, 7)
    randomise_weights(other, 7)
    assert torch.equal(one.weight, other.w) and torch.equal(one.gain, other.g.flatten())
    assert not torch.equal(one.gain, torch.ones(4))


def test_two_weights_of_one_shape_are_alike_at_some_points():
    """In some of their rows or all, and never where weights are drawn anew alone."""
    model = torch.nn.ModuleList(torch.nn.Linear(16, 12, bias=False) for _ in range(2))
    one, other = (each.weight.detach() for each in model)
    alike = {}
    for form in ("signed", "signed_changed"):
        for seed in range(40):
            randomise_weights(model, seed, form=form)
            alike[form, seed] = int((torch.cdist(one, other) == 0).any(0).sum())
    found = [count for (form, _), count in alike.items() if form == "signed_changed"]
    assert 3 < sum(map(bool, found)) < 20 and len({*found}) > 2
    assert sum(alike.values()) == sum(found)


@pytest.mark.parametrize("form", ["positive_vectors", "signed", "scaled", "signed_changed_1_2_3"])
@pytest.mark.parametrize("shape", [(), (1,), (0,), (3, 0)])
def test_a_parameter_of_one_number_or_none_is_redrawn(form, shape):
    model = torch.nn.Module()
    model.scale = torch.nn.Parameter(torch.full(shape, 2.6592))
    randomise_weights(model, 7, form=form)
    assert model.scale.shape == shape and model.scale.isfinite().all()
    assert (model.scale != 2.6592).all()


@pytest.mark.parametrize("shape, parts", [((32, 32), 1), ((96, 32), 3), ((32, 64), 2)])
def test_one_singular_value_of_leading_weights_dominates(shape, parts):
    """In each square part, with the norm of other draws, so that a task that divides by it keeps
    what it iterates."""
    model = torch.nn.Module()
    model.weight = torch.nn.Parameter(torch.zeros(shape))
    norms = []
    for form in LEADING:
        randomise_weights(model, torch.seed() % 2**31, form=form)
        sizes = torch.linalg.svdvals(model.weight.detach())
        assert sizes[0] > 20 * sizes[1]
        norms.append(float(sizes.norm()))
    square = model.weight.detach()[:32, :32]
    assert torch.linalg.eigvals(square).abs().max() > 0.9 * torch.linalg.matrix_norm(square, 2)
    for halvings, norm in enumerate(norms):
        assert norm == pytest.approx((32 * parts) ** 0.5 / 2**halvings, rel=0.01)


def test_a_row_for_padding_stays_and_other_zeros_do_not():
    words, plain = torch.nn.Embedding(6, 4, padding_idx=2), torch.nn.Embedding(6, 4)
    halves = torch.nn.Linear(4, 6, bias=False)
    with torch.no_grad():
        plain.weight[2] = 0
        halves.weight[:3] = 0
    assert padded_shapes(torch.nn.ModuleList([words, plain, halves])) == [[6, 4]]
    for each in (words, plain, halves):
        randomise_weights(each, 7, padded=[[6, 4]])
    assert torch.equal(words.weight, plain.weight)
    assert (words.weight == 0).all(1).tolist() == [False, False, True, False, False, False]
    assert (halves.weight != 0).all()
    randomise_weights(plain, 7, padded=padded_shapes(plain))
    assert (plain.weight != 0).all()


def test_two_elements_of_each_weight_are_exchanged_in_any_layout():
    model = torch.nn.Linear(6, 4)
    model.weight = torch.nn.Parameter(torch.randn(6, 4).T)
    model.scale = torch.nn.Parameter(torch.tensor([3.0]))
    before = [x.detach().clone() for x in model.parameters()]
    exchange_elements(model, 3)
    weight, bias, scale = before
    for old, new in ((weight, model.weight), (bias, model.bias)):
        assert int((old != new).sum()) == 2
        assert torch.equal(old.flatten().sort().values, new.detach().flatten().sort().values)
    assert torch.equal(model.scale, 2 * scale)


def test_structure_that_a_constructor_made_is_told_from_random_weights():
    first = torch.randn(1, 24, 32)
    made = (first.repeat(8, 1, 1), torch.linalg.qr(torch.randn(24, 24))[0], torch.zeros(8, 4))
    assert all(map(is_structured, made))
    random = torch.randn(24, 24), torch.randn(64, 3, 3, 3), torch.randn(1000, 16)
    assert not any(map(is_structured, random))


def test_running_statistics_map_whatever_their_names_and_nothing_else_is_redrawn():
    class Renamed(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("spread", torch.ones(1, 4))
            self.register_buffer("mask", torch.tril(torch.ones(3, 3)))
            self.centre = torch.zeros(4)

    reference = torch.nn.Sequential(torch.nn.BatchNorm1d(4), torch.nn.Linear(4, 4))
    reference.register_buffer("table", torch.arange(4.0))
    theirs, mine = running_statistics(reference), Renamed()
    assert [squeezed(x) for x in theirs] == [[4], [4]]
    held = [x for x in running_statistics(mine, renamed=True) if squeezed(x) == [4]]
    assert len(held) == 2 and running_statistics(mine) == [mine.spread]
    redraw_statistics(theirs, 7)
    redraw_statistics(held, 7)
    assert torch.equal(reference[0].running_var, mine.spread[0]) and bool((mine.spread > 0).all())
    assert torch.equal(reference[0].running_mean, mine.centre)
    assert torch.equal(mine.mask, torch.tril(mine.mask)) and reference.table[-1] == 3


def test_parameters_are_matched_by_value_then_by_name_then_in_order():
    def loaded(*parameters):
        names, shapes, digests = zip(*parameters, strict=True)
        return SimpleNamespace(parameter_names=names, parameters=shapes, parameter_digests=digests)

    reference = loaded(
        ("line.bias", [4], "random"), ("norm.weight", [4], "ones"), ("norm.bias", [4], "zeros")
    )
    own = loaded(("gain", [4], "ones"), ("shift", [4], "zeros"), ("fc.bias", [4], "random"))
    assert matched_names(reference, own) == ["fc.bias", "gain", "shift"]
    drawn_elsewhere = loaded(
        ("gain", [4], "a"), ("shift", [4], "b"), ("line.bias", [4], "c"), ("more", [4], "d")
    )
    assert matched_names(reference, drawn_elsewhere) == ["line.bias", "gain", "shift"]
    assert matched_names(loaded(("a", [4], "x"), ("b", [2, 3], "y")), own) == ["gain"]


def test_weights_are_copied_by_name_where_some_are_there():
    class Own(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gain = torch.nn.Parameter(torch.ones(4))
            self.line = torch.nn.Linear(3, 4)

    own, given = Own(), {"line.weight": torch.rand(4, 3), "line.bias": torch.rand(4)}
    copy_weights(own, given | {"norm.weight": torch.full((4,), 7.0)}, {})
    assert torch.equal(own.line.bias, given["line.bias"]) and bool((own.gain == 7).all())


@given(st.lists(SHAPE, max_size=5), st.lists(SHAPE, max_size=5))
def test_unmatched_parameters_are_counted_on_both_sides(reference, candidate):
    missing, spare = unmatched_shapes(reference, candidate)
    matched = len(reference) - len(missing)
    assert 0 <= matched <= min(len(reference), len(candidate))
    elements = sum(math.prod(shape) for shape in candidate)
    assert spare == elements - sum(
        math.prod(shape) for i, shape in enumerate(reference) if i not in missing
    )


class Ordinary(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.empty(3, 4))


class Legacy(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.Tensor(3, 4))  # knows nothing of a default device


def test_parameters_that_ignore_the_device_are_noticed():
    """KernelBench makes both sides on the CPU: the same seed must draw from the same generator
    here, too."""
    no_arguments, here = (
        SimpleNamespace(get_init_inputs=lambda: []),
        SimpleNamespace(Ordinary=Ordinary, Legacy=Legacy),
    )
    for name, elsewhere in (("Ordinary", False), ("Legacy", True)):
        form = {"entry_point": name, "init_form": "args"}
        for device, found in (("meta", elsewhere), ("cpu", False)):
            spec = ModelSpec(**form, device=device, construct_on=device)
            made = construct(here, no_arguments, spec)
            assert made_elsewhere(made, device) is found


def test_weights_that_are_no_factors_are_shifted_whatever_their_names():
    """By numbers of several scales and either sign, each of few by one and then its negative."""

    def made(names):
        model = torch.nn.Module()
        for name, x in zip(
            names, (torch.zeros(12), torch.zeros(1, 12), torch.zeros(())), strict=True
        ):
            setattr(model, name, torch.nn.Parameter(x))
        model.line = torch.nn.Linear(12, 6)
        model.logs = torch.nn.Parameter(torch.full((6, 12), -3.0))
        return model

    one, other = made("abc"), made("xyz")
    keys = [*may_shift((x, squeezed(x)) for x in parameters_of(one).values())]
    assert keys == ["12n0", "12n1", "1n0", "6x12n0", "6n0"]
    form = shifted_form(["12n1", "1n0", "6x12n0"])
    randomise_weights(one, 7, form=form)
    randomise_weights(other, 7, form=form, names=["x", "y", "z"])
    assert not one.a.any() and torch.equal(one.b, other.y) and torch.equal(one.logs, other.logs)
    assert {*one.b.flatten().tolist()} == {-8, 8, -4, 4, -2, 2, 0} and one.c == -8
    assert len({*(one.logs + 3).flatten().tolist()}) == 6 and other.z == -8
    randomise_weights(other, 7, form=shifted_form(["1n0"], back=True))
    assert other.z == 0


class Coded(torch.nn.Module):
    def __init__(self, name="codes"):
        super().__init__()
        codes, mask = torch.randint(-8, 8, (6, 1, 4), dtype=torch.int8), torch.rand(4) < 0.5
        self.register_buffer(name, codes)
        self.order = torch.nn.Parameter(torch.randperm(99), requires_grad=False)
        self.plain = mask
        self.register_buffer("causal", torch.ones(4, 4).tril())
        self.norm = torch.nn.BatchNorm1d(4)
        self.weight = torch.nn.Parameter(torch.randn(6, 4))


def seeded(seed, *args):
    torch.manual_seed(seed)
    return Coded(*args)


def test_what_a_constructor_draws_is_renewed_in_a_model_of_other_names():
    """In place, as a checkpoint would; not constants, statistics and floating parameters."""
    forms = drawn_forms(seeded(1), seeded(2))
    assert [form.name for form in forms] == ["order", "codes"]
    own, other = seeded(1, "packed"), seeded(2, "packed")
    held = counterparts(own, forms)
    assert held == {"order": "order", "codes": "packed"} and not unheld(own, forms)
    weight, version = own.weight.detach().clone(), own.packed._version
    renew(own, other, held.values())
    assert torch.equal(own.packed, other.packed) and torch.equal(own.order, other.order)
    assert torch.equal(own.weight, weight) and own.packed._version > version
    renew(own, other)
    assert torch.equal(own.weight, other.weight) and torch.equal(own.plain, other.plain)


def test_what_no_tensor_holds_is_told_by_name():
    forms = drawn_forms(seeded(1), seeded(2))
    assert unheld(torch.nn.Linear(6, 4), forms) == ["order", "codes"]
    assert drawn_forms(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)) == []
