"""What a task decides, and the search of inputs that change what trials leave as it is."""

import itertools

import pytest
import torch

from kernels_eval.config import DECISION_TRIES
from kernels_eval.model.invariants import note_of
from kernels_eval.model.mutations import mutated
from kernels_eval.protocol import Expect, FindDecisive, InputPlan
from kernels_eval.reference import decisions
from kernels_eval.reference.decisions import Decisive
from tests.kernels_eval.test_expected_values import serving
from tests.support.kernels import task_source

DUPLICATES = """
same = (x[:, None] == x).all(-1)
weights = 1 / same.float().sum(-1)
return x * weights[:, None]"""
NGRAMS = """
windows = x.unfold(1, 4, 1)
again = (windows[:, :, None] == windows[:, None]).all(-1).tril(-1).any(-1)
return 2.0 * again + x[:, 3:]"""
PALINDROMES = """
windows = x.unfold(1, 16, 1)
return (windows == windows.flip(-1)).all(-1).float() + x[:, 15:]"""
PATTERN = """
windows = x.unfold(0, 6, 1).unfold(1, 6, 1)
return (windows == y).flatten(2).all(-1).float()"""
SEARCHED = {
    "equal_rows": (DUPLICATES, "torch.randn(64, 32)"),
    "equal_rows_of_bits": (DUPLICATES, "torch.rand(64, 64) < 0.5"),
    "runs_that_come_again": (NGRAMS, "torch.randint(0, 999, (4, 128))"),
    "palindromes": (PALINDROMES, "torch.randint(0, 4, (4, 512))"),
    "a_pattern_in_an_image": (PATTERN, "torch.rand(64, 64) < 0.5, torch.rand(6, 6) < 0.5"),
}


def serve(folder, forward, inputs, arguments="x"):
    """A task whose own answer is known, and the search."""
    made = serving(folder, task_source(forward.strip(), inputs=f"[{inputs}]", arguments=arguments))
    made.values.expect(Expect(name="declared", seed=1))
    return made, next(part for part in made.parts if isinstance(part, Decisive))


def search(decisive, *others, seed=0):
    return decisive.find_decisive(FindDecisive(trials=["declared", *others], seed=seed, domain=""))


@pytest.fixture(autouse=True)
def no_clock(monkeypatch):
    """The number of tries alone ends a search."""
    monkeypatch.setattr(decisions, "DECISION_S", float("inf"))


@pytest.mark.parametrize("forward, inputs", SEARCHED.values(), ids=SEARCHED)
def test_inputs_are_found_that_change_what_is_seldom_decided_otherwise(tmp_path, forward, inputs):
    arguments = "x, y" if "== y" in forward else "x"
    reference, decisive = serve(tmp_path, forward, inputs, arguments)
    names = ["declared"]
    for number in range(2):
        found = decisive.find_decisive(FindDecisive(trials=names, seed=5, domain=""))
        assert found.distribution
        assert bool(found.lines) == (number == 0)  # the one that was found asks for them
        names.append(f"found_{number}")
        reference.values.expect(
            Expect(name=names[-1], seed=found.seed, distribution=found.distribution)
        )
    assert not search(decisive, *names[1:]).distribution  # two are enough


def test_what_trials_change_is_not_searched(tmp_path):
    reference, decisive = serve(tmp_path, "return x * (x > 0)", "torch.randn(64, 64)")
    for seed, name in enumerate(("normal", "again"), 2):
        reference.values.expect(Expect(name=name, seed=seed, distribution="normal"))
    assert search(decisive, "normal", "again").distribution == ""
    assert decisive.tried == 0


@pytest.mark.parametrize(
    "forward",
    [
        "return x.cumsum(0)",
        "return x.masked_fill(torch.arange(64) > 5, 0)",
        "return torch.where(x != x, 0, x)",
    ],
    ids=["no_decision", "not_of_the_inputs", "not_a_number"],
)
def test_tasks_without_a_decision_of_their_inputs_have_no_search(tmp_path, forward):
    _, decisive = serve(tmp_path, forward, "torch.randn(64, 64)")
    found = search(decisive)
    assert (found.distribution, found.lines, decisive.tried) == ("", [], 0)


def test_a_decision_that_no_inputs_change_is_named_by_its_line(tmp_path):
    forward = "y = torch.sigmoid(x)\nreturn x + (y > 2)"
    _, decisive = serve(tmp_path, forward, "torch.randn(64, 64)")
    found = search(decisive)
    source = (tmp_path / "task.py").read_text().splitlines()
    assert [source[line - 1].strip() for line in found.lines] == ["return x + (y > 2)"]
    assert not found.distribution and decisive.tried == DECISION_TRIES


@pytest.mark.parametrize(
    "forward",
    [
        "return x.sum(1) + 0.0 * (x.sum(1) > 30)",
        "return (x.sum(1) - x.double().sum(1).float() != 0).float() + x[:, 0]",
    ],
    ids=["without_effect", "by_rounding"],
)
def test_what_changes_no_answer_or_hangs_on_rounding_is_no_trial(tmp_path, forward):
    _, decisive = serve(tmp_path, forward, "torch.randn(64, 64)")
    assert search(decisive).distribution == ""


def test_a_decision_that_changes_no_answer_is_not_searched_for_long(tmp_path):
    """What is equal is near, too."""
    forward = "near = (x - y).abs() < 1e-3\nreturn (near | (x == y)).float()"
    inputs = "torch.randn(64, 64), torch.randn(64, 64)"
    reference, decisive = serve(tmp_path, forward, inputs, "x, y")
    for seed, name in enumerate(("again", "once_more"), 2):
        reference.values.expect(Expect(name=name, seed=seed))
    found = search(decisive, "again", "once_more")
    assert not found.distribution and not found.lines
    assert decisive.tried < DECISION_TRIES


def test_operators_of_one_expression_are_one_decision(tmp_path):
    """`isclose` compares with infinity, too, which no inputs are."""
    forward = "return torch.isclose(x, y, atol=1e-3, rtol=0).float()"
    inputs = "torch.randn(64, 64), torch.randn(64, 64)"
    reference, decisive = serve(tmp_path, forward, inputs, "x, y")
    for seed, name in enumerate(("again", "once_more"), 2):
        reference.values.expect(Expect(name=name, seed=seed))
    assert search(decisive, "again", "once_more").lines == []
    assert decisive.tried == 0


SETS = """
apart = (x[:, None] - x).abs().amax(-1)
return x / (1 - torch.sign(apart)).sum(-1, keepdim=True)"""
OPPOSED = """
cosines = torch.cosine_similarity(x[:, None], y, dim=-1)
return x[:, 0] + torch.relu(-cosines - 0.99).sum(1)"""
MARKED = """
valid = torch.sign(torch.abs(x + 9999.0))
return x * valid"""
CHIPS = """
code = torch.tensor([1.0, -1, -1, 1, 1, 1, -1, 1] * 4)
return x[:, 31:] + torch.relu((x.unfold(-1, 32, 1) * code).amin(-1))"""
CHANNELS = "return x[:, 0] + torch.relu(x.amin(1))"
PIECES = {
    "equal_rows_by_their_sign": (SETS, "torch.randn(48, 32)"),
    "opposed_rows_behind_a_relu": (OPPOSED, "torch.randn(32, 48), torch.randn(24, 48)"),
    "a_number_that_marks": (MARKED, "torch.rand(64, 64)"),
    "signs_of_a_constant": (CHIPS, "torch.randn(4, 256)"),
    "a_sign_of_all_channels": (CHANNELS, "torch.randn(8, 40, 32)"),
}


@pytest.mark.parametrize("forward, inputs", PIECES.values(), ids=PIECES)
def test_inputs_are_found_that_change_what_numbers_decide(tmp_path, forward, inputs):
    arguments = "x, y" if ", y, " in forward else "x"
    _, decisive = serve(tmp_path, forward, inputs, arguments)
    found = search(decisive)
    assert found.distribution and not found.lines


def test_a_sign_of_complex_numbers_decides_nothing_and_ends_no_search(tmp_path):
    forward = "return torch.view_as_real(torch.sgn(torch.fft.rfft(x))).sum(-1) + (x[:, :33] > 99)"
    _, decisive = serve(tmp_path, forward, "torch.randn(8, 64)")
    search(decisive)
    assert {place.way for place in decisive.asked} == {""}


def test_inputs_are_found_that_are_like_weights(tmp_path):
    forward = "return x + torch.exp(-torch.cdist(x, self.centers)).sum(1, keepdim=True)"
    init = "self.centers = nn.Parameter(torch.randn(48, 64))"
    source = task_source(forward, init=init, inputs="[torch.randn(32, 64)]")
    made = serving(tmp_path, source)
    made.values.expect(Expect(name="declared", seed=1))
    decisive = next(part for part in made.parts if isinstance(part, Decisive))
    found = search(decisive)
    assert "_near" in found.distribution
    (x,) = made.values.task.inputs(found.seed, found.distribution)
    apart = torch.cdist(x, made.values.runner.model.centers)
    assert float(apart.detach().min()) < 1


def test_calls_of_one_expression_are_one_place(tmp_path):
    forward = "for row in range(64):\n    x = x + (x[row] > 1)\nreturn x"
    reference, decisive = serve(tmp_path, forward, "torch.randn(64, 64)")
    search(decisive)
    assert len(decisive.asked) == 1
    (calls,) = decisive.usual.digests.values()
    assert len(calls) == 64


ALIKE = {
    "numbers": torch.randn(48, 64),
    "bits": torch.rand(48, 64) < 0.5,
    "tokens": torch.randint(0, 4000, (8, 64)),
    "long": torch.randn(512),
    "image": torch.randn(4, 3, 16, 16),
}


@pytest.mark.parametrize("value", ALIKE.values(), ids=ALIKE)
def test_few_parts_become_like_others_and_every_element_is_one_that_was_there(value):
    plan = InputPlan(notes=[note_of([value], {"reads embedding.indices"})], shapes={})
    before, changed, exact = value.clone(), 0, 0
    for seed in range(40):
        (found,) = mutated([value], plan, seed, domain="_within", alike=True)
        assert found.shape == value.shape and found.dtype == value.dtype
        changed += not torch.equal(found, value)
        exact += bool(torch.isin(found.double().abs(), value.double().abs()).all())
    assert torch.equal(value, before)
    assert changed > 25 and exact > 20  # or a negative; rows may have a number added


def test_a_block_of_one_argument_lies_in_another():
    values = [torch.randint(0, 9999, (32, 32)), torch.randint(0, 9999, (5, 5))]
    notes = [note_of([value], {"reads embedding.indices"}) for value in values]
    plan = InputPlan(notes=notes, shapes={})
    found = [mutated(values, plan, seed, alike=True) for seed in range(0, 4000, 100)]
    blocks = [
        sum(
            torch.equal(large[i : i + 5, j : j + 5], small)
            for i, j in itertools.product(range(28), repeat=2)
        )
        for large, small in found
    ]
    assert sum(map(bool, blocks)) >= 3
