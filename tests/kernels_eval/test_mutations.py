"""Arguments that are mutated at random: what changes about them, and what they mean and keep."""

from functools import partial

import pytest
import torch

from kernels_eval.config import BEYOND
from kernels_eval.model.invariants import note_of
from kernels_eval.model.mutations import mutated, mutated_as
from kernels_eval.protocol import POSITIVE, WITHIN, InputPlan

SEEDS = range(0, 4000, 100)


def plan_of(values, uses=(), text="", **fields):
    notes = [note_of([value], uses, text) for value in values]
    return InputPlan(notes=notes, shapes={}, **fields)


def drawn(*values, seeds=SEEDS, uses=(), text="", **fields):
    plan = plan_of(values, uses, text, **fields)
    return [mutated(list(values), plan, seed) for seed in seeds]


def matrix():
    x = torch.randn(16, 16)
    return x @ x.T + torch.eye(16)


VALUES = {
    "numbers": (torch.randn(48, 64), ()),
    "half": (torch.rand(48, 64, dtype=torch.float16), ()),
    "complex": (torch.randn(24, 16, dtype=torch.complex64), ()),
    "long": (torch.randn(5000), ()),
    "mask": (torch.rand(16, 64) < 0.5, ()),
    "probabilities": (torch.softmax(torch.randn(16, 16), -1), ()),
    "ones": (torch.ones(64, 64), ()),
    "all_true": (torch.ones(16, 64, dtype=torch.bool), ()),
    "labels": (torch.randint(0, 40, (64,)), {"reads index_select.index"}),
    "tokens": (torch.randint(0, 40, (8, 64)), {"reads embedding.indices"}),
    "offsets": (torch.arange(0, 1040, 16), {"embedding_bag.offsets"}),
    "lengths": (torch.full((64,), 8), {"segment_reduce.lengths"}),
    "repeats": (torch.randint(0, 9, (64,)), {"repeat_interleave.repeats"}),
    "read_lengths": (torch.randint(1, 65, (64,)), {"_local_scalar_dense.self"}),
    "count": (torch.tensor(8), {"_local_scalar_dense.self"}),
    "switch": (torch.tensor(0), {"_local_scalar_dense.self"}),
    "temperature": (torch.tensor(0.5), ()),
}


@pytest.mark.parametrize("value, uses", VALUES.values(), ids=VALUES)
def test_hardly_an_argument_is_left_as_it_is_and_one_seed_gives_the_same(value, uses):
    before = value.clone()
    found = [x for (x,) in drawn(value, uses=uses)]
    assert torch.equal(value, before)
    assert all(x.shape == value.shape and x.dtype == value.dtype for x in found)
    assert sum(torch.equal(x, value) for x in found) <= 5  # equal ones may change places
    again = [x for (x,) in drawn(value, uses=uses)]
    assert all(map(torch.equal, found, again))


def test_rows_far_from_each_other_are_alike_in_every_draw():
    value = torch.randn(96, 64)
    least = float(torch.pdist(value).min())
    apart = []
    for (x,) in drawn(value):
        norms = x.norm(dim=1, keepdim=True).clamp(min=1e-3)
        scaled = x / norms * value.norm(dim=1, keepdim=True)
        near = torch.cdist(scaled, scaled) < least / 2
        apart.append(max(abs(i - j) for i, j in near.nonzero().tolist()))
    assert sum(far > 32 for far in apart) > 0.8 * len(apart)


def test_with_fewer_changes_rows_alike_look_as_others_do():
    value = torch.randn(256, 96)
    plan = plan_of([value])
    for seed in SEEDS:
        (x,) = mutated([value], plan, seed, less=True)
        near = torch.cdist(x, x).fill_diagonal_(99).amin(1) < 7
        squares = x.square().mean(1)
        assert near.sum() >= 4 and squares.min() > 0.5 and squares.max() < 1.8
        assert x.sum().abs() < 5 * 2 * value.numel() ** 0.5


def test_an_argument_is_an_earlier_one_shifted_by_any_share_of_its_length():
    values = torch.randint(0, 90, (16, 64)), torch.randint(0, 90, (16, 64))
    shares = set()
    for one, other in drawn(*values, uses={"ne.self"}):
        for row, like in zip(one, other, strict=True):
            equal = [int((row[: 64 - by] == like[by:]).sum()) for by in range(52)]
            shares |= {equal.index(max(equal)) // 13} if max(equal) > 7 else set()
    assert shares == {0, 1, 2, 3}


def shifted(one, other):
    """Whether a row is most of the other one's, shifted by an eighth of its length or more."""
    size = one.shape[1]
    lags = range(size // 8, 5 * size // 8)
    pairs = [pair for lag in lags for pair in ((one, other, lag), (other, one, lag))]
    return any(
        (a[:, lag:] == b[:, : size - lag]).float().mean(1).max() > 0.6 for a, b, lag in pairs
    )


TOKENS = partial(torch.randint, 0, 1000)
PAIRS = {
    "pairs": ([TOKENS((12, 2, 48))], lambda x: x.unbind(1)),
    "halves_of_a_batch": ([TOKENS((12, 48))], lambda x: x.chunk(2)),
    "neighbours": ([TOKENS((12, 48))], lambda x: (x[1:], x[:-1])),
    "to_the_first": ([TOKENS((12, 48))], lambda x: (x[1:], x[:1].expand(11, -1))),
    "halves_of_rows": ([TOKENS((12, 96))], lambda x: x.chunk(2, 1)),
    "one_of_two": ([TOKENS((2, 48))], lambda x: x.chunk(2)),
    "one_for_all": ([TOKENS((48,)), TOKENS((12, 48))], lambda y, x: (x, y.expand(12, -1))),
    "all_to_one": ([TOKENS((12, 48)), TOKENS((48,))], lambda x, y: (x, y.expand(12, -1))),
}


@pytest.mark.parametrize("name", PAIRS)
def test_parts_of_one_argument_and_of_others_are_shifted_against_each_other(name):
    values, pair = PAIRS[name]
    plan = plan_of(values, {"ne.both"})
    found = [shifted(*pair(*mutated(values, plan, seed, less=True))) for seed in SEEDS]
    assert not shifted(*pair(*values)) and sum(found) > len(found) / 2


@pytest.mark.parametrize("uses", [{"embedding.indices"}, {"_local_scalar_dense.self"}, set()])
def test_integers_stay_in_their_range(uses):
    free, rising = torch.randint(3, 40, (64,)), torch.randint(0, 900, (64,)).sort().values
    columns = torch.stack([torch.arange(64) % 7, torch.arange(64) * 9], 1)
    for one, other, each in drawn(free, rising, columns, uses=uses):
        assert one.min() >= 3 and one.max() < 40
        assert torch.equal(other, other.sort().values) or uses == {"embedding.indices"}
        assert torch.equal(each.clamp(columns.amin(0), columns.amax(0)), each)


@pytest.mark.parametrize("uses, kept", [({"embedding.indices"}, 1 / 2), ({"reads lt.self"}, 1)])
def test_an_order_that_nothing_needs_is_in_half_of_the_draws(uses, kept):
    value = torch.randint(0, 900, (64,)).sort().values
    found = [x for (x,) in drawn(value, uses=uses, seeds=range(0, 40000, 100))]
    shares = [torch.equal(x, x.sort().values) for x in found]
    assert abs(sum(shares) / len(shares) - kept) < 0.1


ALIKE = {
    "bits": (torch.rand(64, 96) < 0.5, ()),
    "codes": (torch.randn(64, 96).sign(), ()),
    "sets": (torch.randint(0, 5000, (64, 16)).sort(-1).values, {"eq.self"}),
}


@pytest.mark.parametrize("value, uses", ALIKE.values(), ids=ALIKE)
def test_rows_of_what_is_whole_are_the_same_in_most_draws(value, uses):
    plan, counts = plan_of([value], uses), []
    for seed in SEEDS:
        (x,) = mutated([value], plan, seed, less=True)
        assert set(x.unique().tolist()) <= set(range(5000)) | set(value.unique().tolist())
        counts.append(len(x) - len(x.unique(dim=0)))
    assert sum(count > 0 for count in counts) > len(counts) / 3


def test_a_mask_is_a_part_of_an_earlier_one_or_made_of_it():
    image, pattern = torch.rand(64, 64) < 0.5, torch.rand(16, 16) < 0.5
    for values in ((image, pattern), (pattern, image)):
        plan, found = plan_of(values), 0
        for seed in SEEDS:
            both = sorted(mutated(values, plan, seed, less=True), key=torch.numel)
            small, large = (2 * x.float()[None, None] - 1 for x in both)
            tiled = torch.cat([large, large], 2), torch.cat([large, large], 3)
            most = max(float(torch.conv2d(x, small).max()) for x in tiled)
            found += most > 0.9 * 256
        assert found > len(SEEDS) / 5


def test_what_a_sum_requires_is_kept():
    values = torch.full((64,), 8), torch.randint(0, 5, (64,)), torch.arange(64, 0, -1)
    for found in drawn(*values, uses={"segment_reduce.lengths"}):
        assert [int(x.sum()) for x in found] == [int(x.sum()) for x in values]
        assert found[0].min() >= 1 and found[1].min() >= 0
        assert torch.equal(found[2], found[2].sort(descending=True).values)


def test_places_to_write_at_stay_distinct():
    value = torch.randperm(64)
    for (x,) in drawn(value, uses={"scatter.index"}):
        assert torch.equal(x.sort().values, torch.arange(64))


def test_numbers_of_rows_in_order_stay_distinct():
    value = torch.arange(0, 640).view(64, 10)[:, ::3].flatten()
    for (x,) in drawn(value, uses={"sparse_compressed_tensor.plain_indices"}):
        assert bool((x.diff() > 0).all()) and x[0] == value[0] and x[-1] == value[-1]


@pytest.mark.parametrize("number, others", [(8, set(range(1, 8))), (2, {1}), (1, {0}), (0, {1})])
def test_one_integer_is_another_within_its_range(number, others):
    value = torch.tensor(number)
    assert {int(x) for (x,) in drawn(value, uses={"_local_scalar_dense.self"})} == others


def test_rows_of_a_mask_are_sparse_and_dense_with_both_numbers_in_each_row_that_had_both():
    value = torch.rand(32, 64) < 0.5
    value[3], value[5] = True, False
    for (x,) in drawn(value):
        both = x.any(1) & ~x.all(1)
        assert both[value.any(1) & ~value.all(1)].all() and x[3].any() and not x[5].all()
        shares = x.float().mean(1)
        assert min(int((shares < 0.25).sum()), int((shares > 0.75).sum())) >= 2


def test_a_mask_of_one_row_is_sparse_or_dense():
    shares = [float(x.float().mean()) for (x,) in drawn(torch.rand(256) < 0.5)]
    assert {0.1 < share < 0.9 for share in shares} == {False}
    assert min(shares) < 0.5 < max(shares)


def test_structure_is_kept():
    values = torch.softmax(torch.randn(16, 16), -1), matrix(), torch.linspace(-2, 2, 33)
    uses = (), {"cholesky.self"}, {"bucketize.boundaries"}
    notes = [note_of([value], of) for value, of in zip(values, uses, strict=True)]
    for seed in SEEDS:
        found = mutated(list(values), InputPlan(notes=notes, shapes={}), seed)
        assert torch.allclose(found[0].sum(-1), torch.ones(16)) and found[0].min() >= 0
        assert torch.linalg.cholesky_ex(found[1]).info == 0
        assert torch.equal(found[2], found[2].sort().values)


@pytest.mark.parametrize(
    "domain, least, largest", [("", -BEYOND, BEYOND), (POSITIVE, 0, BEYOND), (WITHIN, 0, 1)]
)
def test_numbers_stay_in_the_domain(domain, least, largest):
    value = torch.rand(48, 64)
    ranges = [
        mutated([value], plan_of([value]), seed, domain=domain)[0].aminmax() for seed in SEEDS
    ]
    assert min(x.min for x in ranges) >= least and max(x.max for x in ranges) <= largest
    assert bool(max(x.max for x in ranges) > 1) is (domain != WITHIN)


def test_matrices_that_must_be_regular_have_no_slices_alike():
    for (x,) in drawn(torch.randn(24, 24), singular=False):
        assert torch.linalg.matrix_rank(x) == 24
        assert torch.pdist(torch.nn.functional.normalize(x)).min() > 0.1


def test_fewer_changes_leave_some_arguments_alike():
    values = [torch.tensor(8), torch.tensor(9)]
    plan = plan_of(values, {"_local_scalar_dense.self"})
    found = [list(map(torch.equal, values, mutated(values, plan, x, less=True))) for x in SEEDS]
    assert {tuple(x) for x in found} == {(a, b) for a in (True, False) for b in (True, False)}
    named = mutated_as("mutated_700_less_positive", values, plan)
    assert named == mutated(values, plan, 700, less=True, domain=POSITIVE)


HELD_VALUES = {name: VALUES[name] for name in ("numbers", "mask", "tokens")}


@pytest.mark.parametrize("name", HELD_VALUES)
def test_states_are_held_along_one_axis_but_for_a_part_at_the_start(name):
    value, uses = HELD_VALUES[name]
    plan, length, shares = plan_of([value], uses), value.shape[1], []
    for seed in SEEDS:
        (x,) = mutated_as(f"mutated_{seed}_held{length}", [value], plan)
        assert x.dtype == value.dtype and x.shape == value.shape
        late = x[:, length // 4 :].float()
        near = [(late[:, by:] - late[:, :-by]).abs() < 1 / 8 for by in (1, 2, 3, 4)]
        held = [each.float().mean(1) > 1 / 2 for each in near]
        shares.append(float(torch.stack(held).any(0).float().mean()))
        assert shares[-1] > 0.9 or torch.equal(x, value)
    assert sum(share > 0.9 for share in shares) > len(shares) / 2


def test_what_may_not_be_others_is_held_nowhere():
    offsets = torch.arange(0, 1040, 16)
    (x,) = mutated([offsets], plan_of([offsets], {"embedding_bag.offsets"}), 5, held=65)
    assert torch.equal(x, offsets)
    matrix = torch.randn(24, 24)
    (x,) = mutated([matrix], plan_of([matrix], singular=False), 5, held=24)
    assert torch.equal(x, matrix)


def test_each_row_of_a_mask_that_holds_a_state_has_both_numbers():
    value = torch.rand(32, 64) < 0.5
    for seed in SEEDS:
        (x,) = mutated([value], plan_of([value]), seed, held=(32, 64)[seed // 100 % 2])
        assert bool((x.any(1) & ~x.all(1)).all())


def places_in(changed):
    """Places along the first axis at which most of a slice has changed."""
    return set((changed.float().mean(1) > 1 / 2).nonzero().flatten().tolist())


def test_one_to_eight_slices_change_at_places_that_arguments_share():
    values = [torch.randn(96, 128), torch.randn(96, 112)]
    plan, counts = plan_of(values), []
    for seed in range(0, 8000, 40):
        found = mutated(values, plan, seed, few=True)
        changed = [x != value for x, value in zip(found, values, strict=True)]
        if any(float(x.float().mean()) > 1 / 2 for x in changed):
            continue  # all but few
        rows, columns = map(places_in, changed), map(places_in, (x.T for x in changed))
        counts.append(len(set().union(*rows)))
        assert counts[-1] <= 8 and all(len(each) <= 8 for each in columns)
    assert set(counts) >= set(range(1, 9)) and len(counts) > 100


@pytest.mark.parametrize("name", ["mask", "ones", "all_true", "labels", "tokens", "repeats"])
def test_few_elements_of_what_is_no_number_change(name):
    value, uses = VALUES[name]
    plan = plan_of([value], uses)
    found = [mutated([value], plan, seed, few=True)[0] for seed in SEEDS]
    shares = [float((x != value).float().mean()) for x in found]
    assert sum(0 < share < 0.3 for share in shares) > len(shares) / 3


def test_each_change_has_its_own_form():
    values = [torch.randn(48, 64)]
    plan = plan_of(values)
    first = mutated(values, plan, 5, few=True)
    expected = mutated(mutated(first, plan, 7), plan, 9, less=True)
    assert torch.equal(*mutated_as("mutated_5_few_7_9_less", values, plan), *expected)


def test_what_is_moved_is_a_little_smaller_and_the_same_otherwise():
    plan = plan_of([torch.randn(64, 8), 3])
    x, one = torch.randn(64, 8), 3
    mutated, moved = (
        mutated_as(name, [x.clone(), one], plan) for name in ("mutated_5", "mutated_moved1_5")
    )
    ratio = moved[0][mutated[0] != 0] / mutated[0][mutated[0] != 0]
    assert moved[1] == mutated[1]
    assert 0.9 < float(ratio.min()) < 0.95 and float(ratio.max()) <= 1


def test_an_argument_of_other_dimensions_is_not_stretched_over_two_long_axes():
    """Between them, shapes (2, n, 8) and (2, n, 2, 8) made (2, n, n, 8)."""
    long = 1 << 16
    values = torch.randn(2, long, 8), torch.randn(2, long, 2, 8)
    for changed in drawn(*values, seeds=SEEDS[:8]):
        assert [x.shape for x in changed] == [x.shape for x in values]
