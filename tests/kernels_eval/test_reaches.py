"""How far a task's floats may leave their declared ranges, and inputs with tiny answers."""

import pytest

from kernels_eval.protocol import POSITIVE, REACHED, Expect, FindFaint, FindFree, FindReach
from kernels_eval.reference import faint, reaches
from kernels_eval.reference.faint import Faint
from kernels_eval.reference.reaches import Reaches
from tests.kernels_eval.test_expected_values import serving
from tests.support.kernels import task_source

DECLARED_SEED = 1


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """The number of tries alone ends a search."""
    for module in (reaches, faint):
        monkeypatch.setattr(module, "REACH_S", float("inf"))


def serve(folder, kind, forward, inputs, arguments="x"):
    made = serving(folder, task_source(forward, inputs=f"[{inputs}]", arguments=arguments))
    made.values.expect(Expect(name="declared", seed=DECLARED_SEED))
    return made, next(part for part in made.parts if isinstance(part, kind))


def reaches_of(folder, *task):
    made, search = serve(folder, Reaches, *task)
    notes = search.find_reach(FindReach(seed=DECLARED_SEED)).plan.notes
    return made, [note.reach for note in notes]


def test_a_range_ends_before_the_numbers_that_a_task_does_not_take(tmp_path):
    task = "return (x - 2.0).log()", "3.0 + torch.rand(32, 16)"
    made, [(least, largest)] = reaches_of(tmp_path, *task)
    assert 2.0 < least < 2.2 and largest > 8
    drawn = made.task.inputs(7, f"normal{REACHED}")[0]
    assert least < float(drawn.min()) < 2.8 and 4.2 < float(drawn.max()) <= largest


@pytest.mark.parametrize(
    "forward, free",
    [
        ("return x / y + y.log()", [True, False]),
        ("return (x * y).log()", [False, False]),
        # each alone, not both
        ("assert x.min() > 0 or y.min() > 0; return x * y", [False, False]),
    ],
)
def test_an_argument_is_free_where_others_are_positive(tmp_path, forward, free):
    inputs = "torch.rand(32, 16) + 0.1, torch.rand(32, 16) + 0.5"
    made, search = serve(tmp_path, Reaches, forward, inputs, "x, y")
    plan = search.find_free(FindFree(seed=DECLARED_SEED)).plan
    assert [note.free for note in plan.notes] == free
    x, y = made.task.inputs(7, f"normal{POSITIVE}")
    assert (float(x.min()) < 0) is free[0] and float(y.min()) > 0


@pytest.mark.parametrize("limit", [3.0, 100.0])
def test_a_float_is_doubled_and_halved_as_long_as_the_task_takes_it(tmp_path, limit):
    task = f"assert t < {limit}; return x * t", "torch.randn(8, 8), 0.8", "x, t"
    _, [_, (least, largest)] = reaches_of(tmp_path, *task)
    assert least == 0.8 / 32
    assert largest == 0.8 * 32 if limit > 30 else limit / 2 < largest < limit


def faint_of(folder, *task):
    made, search = serve(folder, Faint, *task)
    found = search.find_faint(FindFaint(seed=DECLARED_SEED, apart=True)).found
    return made, search, found


def test_an_answer_that_is_tiny_and_no_multiple_is_found(tmp_path):
    _, _, found = faint_of(tmp_path, "return x / (1.0 + x.abs())", "torch.randn(8, 8)")
    assert found == ["faint_-20"]


@pytest.mark.parametrize("forward", ["return 3.0 * x", "return x * x", "return 2.0 + x"])
def test_multiples_and_answers_that_stay_tell_nothing(tmp_path, forward):
    assert faint_of(tmp_path, forward, "torch.randn(8, 8)")[2] == []


def test_one_argument_moves_away_until_the_answer_is_tiny(tmp_path):
    task = "return (-(x[:, None] - y).square()).exp().sum(-1)", "torch.randn(16), torch.randn(32)"
    made, search, [name] = faint_of(tmp_path, *task, "x, y")
    assert faint.LEAST_FAINT <= search._share(DECLARED_SEED, name) < faint.FAINT_SHARE
    moved, kept = made.task.inputs(DECLARED_SEED, name)
    own, other = made.task.inputs(DECLARED_SEED)
    assert float((moved - own).std()) < 1e-5 < float((moved - own).mean())
    assert bool((kept == other).all())
