"""Arguments that a task takes in some structure only, drawn anew within it."""

import pytest
import torch

from kernels_eval.model.invariants import note_of
from kernels_eval.model.structures import may_have_structure, restructured, structures_of
from kernels_eval.protocol import FIXED, InputPlan

EVERY = torch.arange(96)
BOUNDS = torch.arange(0, 97, 8)


def is_permutation(x):
    return torch.equal(x.sort().values, torch.arange(len(x)))


def are_pairs(x):
    return torch.equal(x[x], EVERY) and bool((x != EVERY).all())


def is_one_chain(x):
    seen, place = [0], 0
    while int(x[place]) != place and len(seen) <= len(x):
        place = int(x[place])
        seen.append(place)
    return sorted(seen) == list(range(len(x)))


def rises_in_rows(bounds, x):
    return all(bool((row.diff() > 0).all()) for row in x.tensor_split(bounds[1:-1]))


def leads_back_both_ways(edges):
    pairs = set(map(tuple, edges.T.tolist()))
    return pairs == {(j, i) for i, j in pairs} and all(i != j for i, j in pairs)


def takes_steps_of_one_at_most(x):
    return int(x[0]) == 0 and bool(((x.diff() == 0) | (x.diff() == 1)).all()) and int(x[-1]) == 31


def are_others_in_order(x):
    other = bool((x != torch.arange(len(x))[:, None]).all())
    return other and bool((x.diff() > 0).all())


RING = torch.stack([EVERY, (EVERY + 1) % 96])
TASKS = {
    "permutation": ([EVERY.view(8, 12).T.flatten()], is_permutation),
    "pairs": ([EVERY ^ 1], are_pairs),
    "chain": ([(EVERY + 1).clamp(max=95)], is_one_chain),
    "parents": ([((EVERY - 1) // 2).clamp(min=0)], lambda x: bool((x[1:] < EVERY[1:]).all())),
    "columns": ([BOUNDS, EVERY % 8 * 4], rises_in_rows),
    "ends": ([EVERY, EVERY + 2], lambda x, y: bool((x < y).all())),
    "orders": (
        [torch.arange(16).repeat(8, 1)],
        lambda x: all(map(is_permutation, x)),
    ),
    "segments": ([EVERY // 3], takes_steps_of_one_at_most),
    "neighbours": (
        [torch.stack([EVERY - 1, EVERY + 1], 1) % 96],
        lambda x: are_others_in_order(x.sort(1).values),
    ),
    "knots": (
        [torch.linspace(0, 1, 33)],
        lambda x: x[0] == 0 and x[-1] == 1 and bool((x.diff() > 0).all()),
    ),
    "graph": ([torch.cat([RING, RING.flip(0)], 1)], leads_back_both_ways),
    "four_a_row": (
        [torch.eye(32).roll(1, 1) + torch.eye(32) > 0],
        lambda x: bool((x.sum(1) == 2).all()),
    ),
    "at_right_angles": (
        [torch.kron(torch.eye(8), torch.tensor([[0.6, 0.8], [0.8, -0.6]]))],
        lambda x: torch.allclose(x @ x.T, torch.eye(16), atol=1e-5),
    ),
}


def with_structure(values, structure):
    """A plan in which the last one has it."""
    notes = [note_of([value]).model_copy(update={"structure": FIXED}) for value in values]
    notes[-1] = notes[-1].model_copy(update={"structure": structure})
    return InputPlan(notes=notes, shapes={})


@pytest.mark.parametrize("values, takes", TASKS.values(), ids=TASKS)
def test_a_structure_that_a_task_takes_gives_other_values_that_it_takes(values, takes):
    assert takes(*values) and may_have_structure(values[-1])
    for structure in structures_of(values, len(values) - 1, note_of([values[-1]])):
        plan = with_structure(values, structure)
        drawn = [restructured(values, plan, seed) for seed in range(20)]
        last = [each[-1] for each in drawn]
        others = [x for x in last if not torch.equal(x, values[-1])]
        if len(others) >= 18 and all(takes(*each) for each in drawn):
            break
    else:
        pytest.fail("no structure suits")
    assert all(map(torch.equal, last, (restructured(values, plan, i)[-1] for i in range(20))))
    assert len({str(x.tolist()) for x in others}) == len(others)
    assert all(x.dtype == values[-1].dtype and x.shape == values[-1].shape for x in last)
    least, largest = values[-1].aminmax()
    assert all(least <= x.min() and x.max() <= largest for x in last)


def test_what_is_drawn_within_another_argument_follows_it():
    values = [BOUNDS, EVERY % 8 * 4]
    notes = [note_of([value]) for value in values]
    structures = [("rising", "ends"), ("by:0", "rising", "distinct")]
    pairs = zip(notes, structures, strict=True)
    plan = InputPlan(
        notes=[note.model_copy(update={"structure": each}) for note, each in pairs], shapes={}
    )
    for seed in range(8):
        bounds, columns = restructured(values, plan, seed)
        assert not torch.equal(bounds, BOUNDS) and bounds[0] == 0 and bounds[-1] == 96
        if bounds.diff().max() <= 29:  # as many columns as there are
            assert rises_in_rows(bounds, columns)


@pytest.mark.parametrize("value", [torch.ones(8), torch.tensor(3), 3, torch.randn(4) + 1j])
def test_one_number_has_no_structure(value):
    assert not may_have_structure(value)
