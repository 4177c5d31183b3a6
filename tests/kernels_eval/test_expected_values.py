"""The process that holds expected values: how long it takes must not decide what it compares."""

import itertools
import time
from types import SimpleNamespace

import pytest
import torch

from kernels_eval.config import ORACLE_MAX_S
from kernels_eval.judge.trial import Trial, TrialRow
from kernels_eval.model import model_runner
from kernels_eval.model.correctness import judge
from kernels_eval.protocol import (
    OTHER_ROUNDING,
    DrawTimingInputs,
    EstimateUsedBytes,
    Expect,
    FindIgnoredInputs,
    FindLasting,
    LoadTask,
    ModelSpec,
    NewCandidate,
    SideEffects,
)
from kernels_eval.records import Reason
from kernels_eval.reference.answers import ReferenceRole
from kernels_eval.reference.infinities import with_infinities
from kernels_eval.reference.lasting_states import LastingStates
from kernels_eval.reference.omitted import Omissions, is_omitted
from tests.support.kernels import task_source

SLOW_S = 2 * ORACLE_MAX_S


def by_steps(monkeypatch, *names):
    """Each reading of these clocks is SLOW_S later than the one before."""
    steps = itertools.count(0, int(SLOW_S * 1e9))
    for name in names:
        monkeypatch.setattr(time, name, lambda: next(steps) / 1e9)
        monkeypatch.setattr(time, f"{name}_ns", lambda: next(steps))


@pytest.fixture
def busy(monkeypatch):
    """Time passes, but this process has little of it."""
    by_steps(monkeypatch, "monotonic", "perf_counter")
    monkeypatch.setattr(model_runner, "now_ns", time.perf_counter_ns)


@pytest.fixture
def reference(tmp_path):
    """Serves a task whose batch has rows enough for a sample of them."""
    return serving(tmp_path, task_source("return x.sum(1)", inputs="[torch.randn(48, 64)]"))


def serving(folder, source):
    path = folder / "task.py"
    path.write_text(source)
    spec = ModelSpec(
        entry_point="Model",
        init_form="args",
        device="cpu",
        construct_on="cpu",
    )
    made = ReferenceRole(None)
    made.values.load(LoadTask(path=str(path), spec=spec, oracle_max_bytes=1 << 30))
    return made


SUMS = "return torch.zeros(8).index_add(0, ids, x)"
IDS = "[torch.randn(64), torch.randint(0, 8, (64,)).sort().values]"


@pytest.mark.parametrize(
    "forward, needed",
    [
        (SUMS, False),
        (f"assert torch.equal(ids, ids.sort().values)\n{SUMS}", True),
        ("return torch.unique_consecutive(ids).float()", True),
    ],
)
def test_an_order_is_needed_where_a_task_refuses_others_or_answers_in_another_form(
    tmp_path, forward, needed
):
    made = serving(tmp_path, task_source(forward, arguments="x, ids", inputs=IDS))
    note = made.values.task.plan.notes[1]
    assert (note.keeps, note.order) == ((("rising",), ()) if needed else ((), ("rising",)))


@pytest.mark.parametrize(
    "forward, singular", [("return x @ x", True), ("return x.inverse()", False)]
)
def test_matrices_are_singular_unless_an_operator_needs_regular_ones(tmp_path, forward, singular):
    source = task_source(f"# torch.linalg.solve(x, x)\n{forward}")
    assert serving(tmp_path, source).values.task.plan.singular is singular


HELD = """state = torch.ones(len(x), dtype=torch.int64)
for taken in x.unbind(1):
    state = (state + torch.where(taken, 1, -1)).clamp(0, 3)
return state"""
MASK = "[torch.rand(32, 96) < 0.5]"


@pytest.mark.parametrize(
    "forward, inputs, found", [(HELD, MASK, True), ("return x * 2", "[torch.randn(32, 96)]", False)]
)
def test_states_are_held_where_the_last_outputs_tell_what_came_first(
    tmp_path, forward, inputs, found
):
    made = serving(tmp_path, task_source(forward, inputs=inputs))
    lasting = next(part for part in made.parts if isinstance(part, LastingStates))
    names = lasting.find_lasting(FindLasting(seed=3, domain="")).found
    assert bool(names) is found
    for name in names:
        assert name.startswith("mutated_")
        assert made.values.expect(Expect(name="lasting", seed=3, distribution=name)).finite_share


DECAY = "return x * torch.exp(-0.004 * x * x)"


@pytest.mark.parametrize(
    "answer, omitted",
    [
        (lambda x: x * torch.exp(-0.004 * x * x), False),
        (lambda x: x.clone(), True),
        # cut off instead of rounded: a bias, and no term
        (lambda x: _cut_off(x.float() * torch.exp(-0.004 * x.float().square())), False),
    ],
)
def test_a_factor_below_the_gate_is_missed(tmp_path, answer, omitted):
    source = task_source(DECAY, inputs="[torch.randn(64, 512).bfloat16()]")
    made = serving(tmp_path, source)
    search = next(part for part in made.parts if isinstance(part, Omissions))
    made.values.expect(Expect(name="declared", seed=1))
    terms = search.terms_of([answer(*made.values.task.inputs(1))], "declared")
    assert any(map(is_omitted, terms)) is omitted


def _cut_off(x):
    return (x.view(torch.int32) & ~0xFFFF).view(torch.float32).bfloat16()


def test_sums_of_integers_leave_32_bits(tmp_path):
    source = task_source("return (x * x).sum(1)", inputs="[torch.randint(0, 10**4, (32, 64))]")
    made = serving(tmp_path, source)
    for name, large in (("declared", False), ("rare", True)):
        made.values.expect(Expect(name=name, seed=1, distribution=name))
        assert bool((made.values.expected_outputs(name)[0] > 2**34).any()) is large


def test_attributes_that_calls_set_by_their_inputs_are_named(tmp_path):
    forward = """self.loss, self.calls = x.mean(), self.calls + 1
self.table, self.map = torch.arange(3.0), x.exp()
return x * 2"""
    source = task_source(forward, init="self.loss, self.map, self.calls = None, None, 0")
    path = tmp_path / "task.py"
    path.write_text(source)
    spec = ModelSpec(entry_point="Model", init_form="args", device="cpu", construct_on="cpu")
    loaded = ReferenceRole(None).values.load(LoadTask(path=str(path), spec=spec))
    assert (loaded.kept, loaded.attributes) == (["loss"], ["map"])


def oracles(reference):
    return [
        reference.values.expect(Expect(name=name, seed=seed, distribution="normal")).oracle
        for seed, name in enumerate(("declared", "normal"))
    ]


def test_the_oracle_stays_where_others_hold_the_processor(reference, busy):
    assert oracles(reference) == ["float64", "float64"]


def test_an_oracle_that_is_much_work_is_computed_once(reference, monkeypatch):
    by_steps(monkeypatch, "process_time")
    assert oracles(reference) == ["float64", "float32"]
    assert not reference.values.errors.samples  # nor is a sample of rows


WEIGHTED = """\
import torch


class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.rand(64))
        self.mask = torch.nn.Dropout()

    def forward(self, x):
        return self.mask(x.half()).float() * self.scale


def get_inputs():
    return [torch.randn(48, 64)]


def get_init_inputs():
    return []
"""
TRIALS = {
    "declared": {"seed": 1},
    "weights": {"seed": 1, "distribution": "normal", "weights": "signed", "weights_seed": 7},
    "shape": {"seed": 2, "distribution": "normal", "shape": "batch_1"},
    "scaled": {"seed": 3, "weights": "scaled", "weights_seed": 9},
    "again": {"seed": 1, "distribution": "normal", "weights": "signed", "weights_seed": 7},
}


def test_values_that_memory_does_not_hold_are_computed_again(tmp_path):
    """A GPU of 80 GB holds not all of a task of 6.4 GB beside the candidate."""
    held, short = (serving(tmp_path, WEIGHTED) for _ in range(2))
    short.values.errors.oracle_max_bytes = held.values.errors.oracle_max_bytes = 0
    short.values.held_max_bytes = 0
    for name, asked in TRIALS.items():
        request = Expect(name=name, evaluate=True, **asked)
        seen, wanted = (each.values.expect(request) for each in (short, held))
        assert seen == wanted and seen.oracle == "float32"
        assert bool(short.values.known[name].expected) == (name == "declared")
        kept = short.values.kept(name)
        assert torch.equal(kept.expected[0], held.values.known[name].expected[0])
        assert kept.error == held.values.known[name].error
    assert seen.equals == ["weights"]
    weights = short.runner.model.scale.clone()
    answer = [2 * short.values.expected_outputs("weights")[0]]
    assert short._compared(answer, short.values.kept("weights")).rms > 0.5
    assert torch.equal(short.runner.model.scale, weights)


TABLE = """\
if len(table) < 48:
    raise SystemExit("places out of bounds, where a GPU ends the process")
return table[ids]"""


def test_no_part_of_a_table_is_asked_for_places_in_all_of_it(tmp_path):
    """Not for a sample of rows, where there is no oracle, nor in a smaller shape."""
    inputs = "[torch.randn(48, 16), torch.randint(0, 48, (48,))]"
    served = serving(tmp_path, task_source(TABLE, arguments="table, ids", inputs=inputs))
    served.values.errors.oracle_max_bytes = 0
    assert served.values.expect(Expect(name="declared", seed=1)).oracle == "float32"
    for shape in served.task.plan.shapes:
        served.task.outputs(served.task.inputs(3, shape=shape))


def test_no_rows_are_sampled_once_that_has_broken_the_process(tmp_path):
    source = task_source("return x.sum(1)", inputs="[torch.randn(48, 64)]")
    served = serving(tmp_path, source)
    served.values.errors.oracle_max_bytes = 0
    calls = []
    served.task.outputs = lambda inputs: calls.append(len(inputs[0])) or [inputs[0].sum(1)]
    for left_out, sampled in (([], True), ([OTHER_ROUNDING], False)):
        served.task.left_out = left_out
        calls.clear()
        served.values.expect(Expect(name="declared", seed=1))
        assert (min(calls) < 48) is sampled


def test_what_has_an_oracle_is_held_whatever_it_takes(reference):
    reference.values.held_max_bytes = 0
    assert oracles(reference) == ["float64", "float64"]
    assert all(known.expected for known in reference.values.known.values())


def test_inputs_are_drawn_in_the_same_time_where_others_hold_the_processor(reference, busy):
    assert reference.task.draw_timing_inputs(DrawTimingInputs(seeds=[1, 2, 3])).seconds < SLOW_S


@pytest.mark.parametrize("cast", ["", ".half()", ".bfloat16()", ".to(torch.complex64)"])
def test_what_only_float64_holds_is_no_oracle(tmp_path, cast):
    """The lowest number of a type marks what is masked: in float64 it is another one, whose square
    has no sum, and next to which every error is small."""
    forward = "return x.masked_fill(x.real > 0, torch.finfo(x.dtype).min)"
    made = serving(tmp_path, task_source(forward, inputs=f"[torch.randn(48, 64){cast}]"))
    assert oracles(made) == ["float64", "float64"]
    expected = made.values.known["declared"].expected[0]
    for actual, reason in (
        (expected.clone(), Reason.OK),
        (torch.zeros_like(expected), Reason.WRONG_OUTPUT),
        (expected.masked_fill(expected.real < -1e4, 7), Reason.WRONG_OUTPUT),
        (expected.masked_fill(expected.real > -1e4, 7), Reason.WRONG_OUTPUT),
    ):
        found = made._compared([actual], made.values.kept("declared"))
        assert judge(found) is reason


@pytest.mark.parametrize(
    "wanted, oracle",
    [
        ("(x >= 0).all()", "float64"),
        ("x.max() <= 1", "float64"),
        ("x.dtype == torch.float32", "float32"),
    ],
)
def test_a_task_that_asserts_something_of_its_inputs_is_asked_for_more(tmp_path, wanted, oracle):
    source = task_source(f"assert {wanted}\nreturn x.sqrt()", inputs="[torch.rand(48, 64)]")
    made = serving(tmp_path, source)
    assert made.values.expect(Expect(name="declared", seed=1)).oracle == oracle
    assert made.dependences.find_ignored_inputs(FindIgnoredInputs(seed=1)).ignored == []
    assert made.dependences.estimate_used_bytes(EstimateUsedBytes(seed=1)).bytes == 48 * 64 * 4


LOG2E = 1.4426950408889634


def in_order(terms):
    return terms.cumsum(1)[:, -1:]


def softmax(x):
    powers = torch.exp2((x - x.amax(1, keepdim=True)) * LOG2E)
    return powers * (1 / in_order(powers))


def normalised(x):
    rest = x - in_order(x) / x.shape[1]
    return rest * (in_order(rest * rest) / x.shape[1] + 1e-5).rsqrt()


def product(x):
    terms = x.t()[:, :, None] * x.t()[:, None]
    return terms.cumsum(0)[-1]


def sorted_stably(x, count=64):
    values, places = x.sort(dim=1, descending=True, stable=True)
    return values[:, :count], places[:, :count]


def routed(x):
    weights, places = sorted_stably(softmax(x.float()), 4)
    return weights / in_order(weights), places


def nucleus(x, share=0.9):
    powers, places = sorted_stably(softmax(x.float()))
    kept = torch.zeros(x.shape).scatter(1, places, (powers.cumsum(1) - powers <= share).float())
    return softmax(x.float().masked_fill(kept == 0, -torch.inf))


def gated(x, count=8):
    values, places = sorted_stably(x, count)
    return torch.zeros_like(x).scatter(1, places, softmax(values.float()).to(x.dtype))


def asymmetric(x):
    low, high = x.amin(1, True), x.amax(1, True)
    inverse = 1 / ((high - low) * (1 / 255)).clamp(min=1e-8)
    zero = (-low * inverse).round()
    return ((x * inverse).round() + zero).clamp(0, 255).to(torch.uint8), zero.int()


NUCLEUS = """\
p, i = torch.softmax(x.float(), 1).sort(1, descending=True)
left = torch.zeros_like(p, dtype=torch.bool).scatter(1, i, p.cumsum(1) - p > 0.9)
return torch.softmax(x.float().masked_fill(left, -torch.inf), 1)"""
GATED = "v, i = x.topk(8)\nreturn torch.zeros_like(x).scatter(1, i, torch.softmax(v, 1))"
ASYMMETRIC = """\
low, high = x.amin(1, True), x.amax(1, True)
scale = ((high - low) / 255).clamp(min=1e-8)
zero = (-low / scale).round()
return ((x / scale).round() + zero).clamp(0, 255).to(torch.uint8), zero.int()"""
STEPS = {
    "nucleus": (NUCLEUS, nucleus),
    "gated": (GATED, gated),
    "asymmetric": (ASYMMETRIC, asymmetric),
    "truncation": (
        "return (torch.softmax(x, 1) * 1e5).long()",
        lambda x: (softmax(x) * 1e5).long(),
    ),
    "masked": (
        "odd = (torch.softmax(x, 1) * 1e5).long() % 2 > 0\nreturn x.masked_fill(odd, -torch.inf)",
        lambda x: x.masked_fill((softmax(x) * 1e5).long() % 2 > 0, -torch.inf),
    ),
    "floor": (
        "return (nn.functional.layer_norm(x, (64,)) * 100).floor().int()",
        lambda x: (normalised(x) * 100).floor().int(),
    ),
    "int8": (
        "return (x / x.abs().amax(1, True) * 127).round().to(torch.int8)",
        lambda x: (x * (127 / x.abs().amax(1, True))).round().to(torch.int8),
    ),
    "sign_of_a_product": ("return x @ x.t() > 0", lambda x: product(x) > 0),
    "largest": ("return torch.softmax(x, 1).argmax(1)", lambda x: softmax(x).argmax(1)),
    "remainder": ("return x.sum(1) % 1", lambda x: in_order(x)[:, 0] % 1),
    "topk": ("return torch.softmax(x, 1).topk(8)", lambda x: sorted_stably(softmax(x), 8)),
    "sort": ("return x.sort(descending=True)", sorted_stably),
    "router": (
        "w, i = torch.softmax(x.float(), 1).topk(4)\nreturn w / w.sum(1, keepdim=True), i",
        routed,
    ),
}


def judged(made, seed, distribution, forward):
    """What a kernel's outputs are on these inputs; None where they are not tried."""
    name = "trial" if distribution == "declared" else distribution
    seen = made.values.expect(Expect(name=name, seed=seed, distribution=distribution))
    if not (seen.finite_share and seen.deterministic):
        return None
    outputs = forward(made.task.inputs(seed, distribution, "declared")[0])
    outputs = list(outputs) if isinstance(outputs, tuple) else [outputs]
    found = made._compared(outputs, made.values.kept(name))
    return judge(found)


@pytest.mark.parametrize("seeds", [3, pytest.param(12, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "name, dtype",
    [(name, "float32") for name in STEPS]
    + [(name, "bfloat16") for name in ("sort", "router", "gated")],
)
def test_what_is_beside_a_step_is_right_on_inputs_of_any_seed(tmp_path, name, dtype, seeds):
    """Softmax by exp2, sums in order, a sort that is stable: all of them honest."""
    source, forward = STEPS[name]
    made = serving(tmp_path, task_source(source, inputs=f"[torch.randn(64, 64).to(torch.{dtype})]"))
    made.values.expect(Expect(name="declared", seed=1))
    for seed, distribution in itertools.product(
        range(8 * seeds if name in ("truncation", "masked") else seeds),
        ("declared", "normal", "mixed", "impulse", "normal_x10", "sparse", "small"),
    ):
        reason = judged(made, seed, distribution, forward)
        assert reason in (None, Reason.OK), (seed, distribution)


def scores(x):
    return x.float() @ x[:8].float().t()


CASTS = {
    "cast": (
        "s = (x.float() @ x[:8].float().t()).bfloat16()\nreturn s, s.float().logsumexp(1)",
        lambda x: (scores(x).bfloat16(), scores(x).logsumexp(1)),
        lambda x: (scores(x).bfloat16(), scores(x).logsumexp(1).bfloat16().float()),
    ),
    "rounded_in_half_of_it": (
        "s = (x @ x[:8].t()).float()\nreturn s.softmax(1).bfloat16() @ x[:8], s.logsumexp(1)",
        lambda x: ((scores(x).softmax(1) @ x[:8].float()).bfloat16(), scores(x).logsumexp(1)),
        lambda x: ((scores(x).softmax(1) @ x[:8].float()).bfloat16(), scores(x).logsumexp(1) * 1.1),
    ),
    "fp32_beside": (
        "s = x.float() @ x[:8].float().t()\nreturn s.bfloat16(), s.logsumexp(1)",
        lambda x: (scores(x).bfloat16(), scores(x).logsumexp(1)),
        lambda x: (scores(x).bfloat16(), scores(x).bfloat16().float().logsumexp(1)),
    ),
    "residual": (
        "x = x.float() / 3\nreturn x.bfloat16(), x - x.bfloat16()",
        lambda x: ((x.float() / 3).bfloat16(), x.float() / 3 - (x.float() / 3).bfloat16()),
        lambda x: ((x.float() / 3).bfloat16(), x.float() * 0),
    ),
    "bits": (
        "return x, (x.float().view(torch.int32) >> 23).float().sum(1)",
        lambda x: (x, (x.float().view(torch.int32) >> 23).float().sum(1)),
        lambda x: (x, (x.float().view(torch.int32) >> 23).float().sum(1) * 1.01),
    ),
}


@pytest.mark.parametrize("name", CASTS)
def test_what_a_task_rounds_on_the_way_is_its_own_error(tmp_path, name):
    """A kernel that keeps its accumulators is right, one of fewer digits than the task is wrong."""
    source, right, wrong = CASTS[name]
    made = serving(tmp_path, task_source(source, inputs="[torch.randn(96, 64).bfloat16()]"))
    made.values.expect(Expect(name="declared", seed=1))
    for forward, accepted in ((right, True), (wrong, False)):
        reasons = {judged(made, seed, "normal", forward) for seed in range(3)}
        assert (reasons == {Reason.OK}) == accepted, reasons


def test_a_long_sum_widens_the_gate_of_what_comes_from_it_alone(tmp_path):
    body = """\
parts = torch.empty(len(x), 2)
parts[:, 0] = x.sum(1)
parts[:, 1] = x[:, 0]
return torch.erf(x), parts, x / x.sum().item()"""
    made = serving(tmp_path, task_source(body, inputs="[torch.rand(16, 65536)]"))
    made.values.expect(Expect(name="declared", seed=1))

    def answer(x, erf=1.0):
        sums = x.cumsum(1)[:, -1]
        whole = x.reshape(-1).cumsum(0)[-1]
        return torch.erf(x) * erf, torch.stack([sums, x[:, 0]], 1), x / whole

    assert judged(made, 1, "declared", answer) is Reason.OK
    assert judged(made, 1, "declared", lambda x: answer(x, 1.00001)) is not Reason.OK


def test_on_hard_inputs_numbers_are_judged_and_integers_are_not(tmp_path):
    made = serving(tmp_path, task_source(STEPS["topk"][0], inputs="[torch.randn(64, 64)]"))
    for name, distribution in (("declared", "declared"), ("large", "normal_x100")):
        made.values.expect(
            Expect(name=name, seed=1, distribution=distribution, hard=name == "large")
        )
    x = made.task.inputs(1, "normal_x100", "declared")[0]

    def reason(powers):
        values, places = sorted_stably(powers / powers.sum(1, keepdim=True), 8)
        found = made._compared([values, places.roll(1, 1)], made.values.kept("large"))
        return judge(found)

    assert reason((x - x.amax(1, keepdim=True)).exp()) is Reason.OK
    assert reason(x.exp()) is Reason.NON_FINITE


def test_few_places_that_are_not_finite_hang_on_rounding_on_hard_inputs(tmp_path):
    source = task_source("return (x - x.mean(1, keepdim=True)).sqrt()")
    made = serving(tmp_path, source)
    made.values.expect(Expect(name="declared", seed=1))
    made.values.expect(Expect(name="offset", seed=1, distribution="offset", hard=True))
    expected = made.values.kept("offset").expected[0]
    assert not expected.isfinite().all()

    def reason(spoilt):
        outputs = expected.clone()
        outputs.view(-1)[:spoilt] = torch.nan
        return judge(made._compared([outputs], made.values.kept("offset")))

    assert reason(4) is Reason.OK
    assert reason(64) is Reason.NON_FINITE


@pytest.mark.parametrize(
    "forward, sound",
    [
        ("return torch.softmax(y, 1)", True),
        ("y = y + 1e6\nreturn (y * y).mean(1) - y.mean(1).square()", False),
    ],
)
def test_a_reference_without_an_oracle_is_a_judge_of_hard_inputs_where_it_scatters_little(
    tmp_path, forward, sound
):
    forward = f"assert x.dtype == torch.float32\ny = x * 0.9\n{forward}"
    source = task_source(forward, inputs="[torch.randn(64, 64)]")
    made = serving(tmp_path, source)
    made.values.expect(Expect(name="declared", seed=1))
    trial = Trial("large", TrialRow("large", hard=True), seed=2, distribution="normal_x100")
    seen = made.values.expect(trial.expect())
    assert (seen.oracle, trial.suits(seen, seen)) == ("float32", sound)


def log_ratio(x):
    first, second = (in_order(each.reshape(1, -1)) for each in x.exp().chunk(2))
    return (first.log() - second.log())[0]


def test_one_number_that_cancels_is_right_on_inputs_of_any_seed(tmp_path):
    """Near zero now and then, as in the worst of 20,000 draws: timed calls find such."""
    source = "a, b = x.exp().chunk(2)\nreturn (a.sum() / b.sum()).log()[None]"
    made = serving(tmp_path, task_source(source, inputs="[torch.randn(64, 64)]"))
    made.values.expect(Expect(name="declared", seed=1))
    for seed in (1, 9940, 18398, 17304):
        assert judged(made, seed, "declared", log_ratio) is Reason.OK
    for seed in (1, 2, 3):
        assert judged(made, seed, "declared", lambda x: 1.001 * log_ratio(x)) is not Reason.OK


def twice(x):
    values, places = sorted_stably(x)
    return values, torch.where(values == values[:, :1], places[:, :1], places)


def next_to(x):
    values, places = sorted_stably(x)
    return values, places.roll(1, 1)


@pytest.mark.parametrize(
    "source, forward",
    [
        ("return x.sort(descending=True)", twice),
        ("return x.sort(descending=True)", next_to),
        ("return x.sort(descending=True)", lambda x: (sorted_stably(x)[0], next_to(x)[1] + 64)),
        (
            "return x.sort(descending=True, stable=True)",
            lambda x: tuple(x.flip(1).sort(descending=True)),
        ),
        (
            "return torch.softmax(x, 1).topk(8)",
            lambda x: sorted_stably(softmax(x.half().float()), 8),
        ),
        (NUCLEUS, lambda x: nucleus(x, 0.91)),
        (GATED, lambda x: gated(x, 7)),
        (GATED, lambda x: gated(x.bfloat16().float())),
        ("return x @ x.t() > 0", lambda x: product(x.bfloat16().float()) > 0),
        ("return x @ x.t() > 0", lambda x: product(x) > -0.01),
    ],
)
def test_what_no_rounding_explains_is_wrong(tmp_path, source, forward):
    inputs = "[torch.randn(64, 64).bfloat16()]" if "sort" in source else "[torch.randn(64, 64)]"
    made = serving(tmp_path, task_source(source, inputs=inputs))
    made.values.expect(Expect(name="declared", seed=1))
    assert judged(made, 11, "sparse" if "sort" in source else "mixed", forward) is not Reason.OK


@pytest.mark.parametrize("distribution", ["normal", "mixed"])
def test_a_sort_that_is_asked_to_be_stable_is_seen_with_equal_elements(tmp_path, distribution):
    made = serving(
        tmp_path, task_source("return x.sort(stable=True)", inputs="[torch.randn(64, 64)]")
    )
    made.values.expect(Expect(name="declared", seed=1))

    def last_first(x):
        values, places = x.flip(1).sort(stable=True)
        return values, 63 - places

    assert judged(made, 7, distribution, lambda x: x.sort(stable=True)) is Reason.OK
    assert judged(made, 7, distribution, last_first) is not Reason.OK


def counts(x, low=0.0):
    places = ((x - low) / 0.01).long().clamp(max=99)
    return places[(x >= low) & (x <= 1)].bincount(minlength=100).float()


def test_a_histogram_may_count_what_is_beside_the_end_of_a_bin_in_either(tmp_path):
    task = task_source("return torch.histc(x, 100, 0, 1)", inputs="[torch.rand(64, 1024)]")
    made = serving(tmp_path, task)
    made.values.expect(Expect(name="declared", seed=1))
    for seed, distribution in itertools.product((2, 6), ("declared", "mixed", "impulse")):
        assert judged(made, seed, distribution, counts) is Reason.OK, (seed, distribution)
    for wrong in (
        lambda x: counts(x, 1e-4),
        lambda x: counts(x[1:]),
        lambda x: counts(x.half().float()),
    ):
        assert judged(made, 6, "declared", wrong) is not Reason.OK


def test_the_largest_product_of_what_was_rounded_to_fp8_is_wrong_in_bf16(tmp_path):
    inputs = "[torch.randn(256, 64).bfloat16()]"
    made = serving(tmp_path, task_source("return (x @ x[:128].t()).argmax(1)", inputs=inputs))
    made.values.expect(Expect(name="declared", seed=1))

    def largest(x):
        return (x @ x[:128].t()).bfloat16().argmax(1)

    exact, rounded = (
        [
            judged(made, seed, name, lambda x, dtype=dtype: largest(x.to(dtype).float()))
            for seed in range(3)
            for name in ("declared", "normal", "mixed")
        ]
        for dtype in (torch.bfloat16, torch.float8_e4m3fn)
    )
    assert set(exact) == {Reason.OK} and set(rounded) != {Reason.OK}


def test_memory_goes_back_unless_it_is_needed_at_once(monkeypatch):
    """Said here of a device that is none: what is cached is more than a process may hoard."""
    made, given_back = ReferenceRole(None), []
    made.runner.device = "cuda:0"
    total = SimpleNamespace(total_memory=80 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: total)
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 70 << 30)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 60 << 30)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: given_back.append(True))
    monkeypatch.setattr(made.runner, "synchronise", lambda: None)

    def gives_back(command):
        given_back.clear()
        made.end_command(command)
        return bool(given_back)

    commands = ["LoadTask", "Expect", "DrawInputs", "Sample", "RunUnseen", "CompareUnseen"]
    assert [c for c in commands if gives_back(c)] == ["LoadTask", "DrawInputs", "CompareUnseen"]
    made.new_candidate(NewCandidate())
    assert gives_back("Expect") and gives_back("DrawInputs")
    made.runner.shared["own"] = None  # a round of the bound
    assert not gives_back("DrawInputs") and gives_back("CompareUnseen")
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda: 69 << 30)
    assert not gives_back("LoadTask"), "little is cached: asking for it again takes longer"


COUNTED = "self.register_buffer('at', torch.zeros((), dtype=torch.int64))"
KEPT = "self.register_buffer('keys', torch.zeros(5, 64)); self.at = 0"
SCALED = "self.weight = nn.Parameter(torch.ones(64))"
NORM = "self.norm = nn.BatchNorm1d(64{})"
WRITTEN = "self.keys[self.at] = x[0]; self.at += 1; return x @ self.keys.T"
NOISE = "return x + torch.randn(64, generator=self.own)"
MADE_ONCE = "self.two = self.two or torch.ones(1); return x * self.two"
APPENDED = "self.past.append(x.mean()); return x + torch.stack(self.past).mean()"


@pytest.mark.parametrize(
    "init, forward, calls, remembers, told",
    [
        ("pass", "return x + 1", 1, False, []),
        (NORM.format(""), "return self.norm(x)", 3, False, []),
        (NORM.format(", momentum=None"), "return self.norm(x)", 3, True, []),
        (COUNTED, "self.at += 1; return x / self.at", 64, True, ["at"]),
        (
            KEPT,
            "self.keys[self.at] = x[0]; self.at += 1; return x @ self.keys.T",
            5,
            True,
            ["keys"],
        ),
        (SCALED, "self.weight.data *= 0.9; return x * self.weight", 64, True, ["weight"]),
        ("self.past = []", APPENDED, 64, True, []),
        (
            "self.g = torch.Generator()",
            "return x + torch.randn(64, generator=self.g)",
            64,
            True,
            [],
        ),
        (
            "self.two = None",
            "self.two = self.two or torch.ones(1); return x * self.two",
            1,
            False,
            [],
        ),
        ("self.used = False", "assert not self.used; self.used = True; return x", 1, True, []),
        ("pass", "return nn.functional.dropout(x)", 1, False, []),
    ],
)
def test_what_a_reference_keeps_from_call_to_call(tmp_path, init, forward, calls, remembers, told):
    source = task_source(forward, init=init, inputs="[torch.randn(48, 64)]")
    effects = serving(tmp_path, source).runner.effects or SideEffects(
        arguments=[], buffers=[], names=[]
    )
    assert (effects.calls, effects.remembers) == (calls, remembers)
    assert [form.name for form in effects.buffers if form.told] == told
    statistics = ["norm.running_mean", "norm.running_var"] if "Norm" in init else told
    assert [form.name for form in effects.buffers] == statistics


def test_a_later_call_has_what_earlier_ones_have_left_and_a_first_one_nothing(tmp_path):
    init, forward = "self.past = []", "self.past.append(x); return torch.stack(self.past).sum(0)"
    made = serving(tmp_path, task_source(forward, init=init, inputs="[torch.randn(48, 64)]"))
    drawn = [made.task.inputs(seed)[0] for seed in (1, 2, 3)]
    trials = [Expect(name="declared", seed=3), Expect(name="later", seed=3, earlier=[])]
    trials[1] = trials[1].model_copy(update={"earlier": [(1, "declared"), (2, "declared")]})
    for trial in trials:
        made.values.expect(trial)
    first, later = (made.values.expected_outputs(trial.name)[0] for trial in trials)
    assert torch.equal(first, drawn[2])
    torch.testing.assert_close(later, sum(drawn))
    assert made.values.kept("later").oracle[0].dtype == torch.float64


def drawn(folder, forward, **expect):
    made = serving(folder, task_source(forward, inputs="[torch.rand(48, 64) + 1.0]"))
    made.values.expect(Expect(name="declared", seed=1))
    return made, made.values.expect(Expect(name="other", seed=1, **expect))


@pytest.mark.parametrize(
    "forward, told",
    [
        ("return x.masked_fill(x < 1, float('inf'))", 1.0),
        ("return torch.where(x < 0, torch.tensor(-torch.inf), x)", 1.0),
        # one by an overflow, or by the log of what underflows, is none
        ("return torch.where(x < -9, torch.inf, (x * 1e38) * 1e38)", None),
        ("return torch.softmax(x * 1e3, 1).log().masked_fill(x < -9, -torch.inf)", None),
        ("return x.masked_fill(x < 1, float('nan'))", None),
    ],
)
def test_infinities_that_float64_gives_too_are_told(tmp_path, forward, told):
    _, found = drawn(tmp_path, forward, distribution="normal")
    assert found.told_share == (told or found.finite_share)


@pytest.mark.parametrize(
    "forward, given",
    [
        ("return x.masked_fill(x < 0, float('-inf'))", True),
        ("return torch.where(x < 0, torch.inf, x)", True),
        ("y = x.clone()\ny[y < 0] = -torch.inf\nreturn y", True),
        ("return 1 / x.relu()", False),
    ],
)
def test_a_task_is_seen_to_give_infinities(tmp_path, forward, given):
    path, made = tmp_path / "task.py", ReferenceRole(None)
    path.write_text(task_source(forward))
    spec = ModelSpec(entry_point="Model", init_form="args", device="cpu", construct_on="cpu")
    loaded = made.values.load(LoadTask(path=str(path), spec=spec, oracle_max_bytes=1 << 30))
    assert loaded.infinite is given


@pytest.mark.parametrize(
    "forward, holds",
    [
        ("return x[x.sum(1) > 0]", True),
        # half of the rows are 0 but for rounding
        ("y = x * 0.1\nreturn x[y.sum(1) - x.sum(1) * 0.1 > 0]", False),
    ],
)
def test_shapes_are_told_unless_they_hang_on_rounding(tmp_path, forward, holds):
    _, found = drawn(tmp_path, forward, distribution="normal")
    assert found.shapes[0][0] not in (0, 48)
    assert found.shapes_hold is holds


@pytest.mark.parametrize(
    "number, same",
    [(-1e9, True), (-3.4e38, True), (-torch.inf, True), (1e9, False), (-2.0, False)],
)
def test_a_number_far_larger_than_others_may_stand_for_an_infinity(number, same):
    expected = torch.randn(48, 64)
    expected[0, :4] = -torch.inf
    actual = torch.where(torch.isinf(expected), number, expected)
    assert torch.equal(with_infinities(actual, expected), expected) is same


def compared(folder, kernel, *task):
    """What a kernel in PyTorch gets on declared inputs."""
    forward, inputs, arguments = task
    made = serving(folder, task_source(forward, inputs=f"[{inputs}]", arguments=arguments))
    made.values.expect(Expect(name="declared", seed=1))
    outputs = [kernel(*made.task.inputs(1))]
    return judge(made._compared(outputs, made.values.known["declared"]), own_inputs=False)


def in_halves(x):
    """The sum of each row, of the sums of its halves."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = torch.cat([x[..., :half] + x[..., half : 2 * half], x[..., 2 * half :]], -1)
    return x


def layer_normalised(x, scale=1.0):
    apart = x - in_halves(x) * (1 / x.shape[-1])
    return scale * apart * (in_halves(apart * apart) / x.shape[-1] + 1e-5).rsqrt()


CONSTANT_ROWS = (
    "return torch.nn.functional.layer_norm(x, x.shape[-1:])",
    "torch.cat([torch.randn(16, 77), torch.full((48, 77), 13.45)])",
    "x",
)


@pytest.mark.parametrize("wrong", [False, True])
def test_the_last_digit_of_a_mean_of_equal_numbers_is_noise(tmp_path, monkeypatch, wrong):
    scale = 1.001 if wrong else 1.0
    found = compared(tmp_path, lambda x: layer_normalised(x, scale), *CONSTANT_ROWS)
    assert (found is Reason.OK) is not wrong
    monkeypatch.setattr("kernels_eval.reference.answers.LINE_NOISE", 0.0)
    assert compared(tmp_path, layer_normalised, *CONSTANT_ROWS) is not Reason.OK


SMALL_BESIDE_LARGE = (
    "return torch.exp(x - y)",
    "torch.cat([torch.randn(16, 77) + 40, torch.randn(48, 77)]), torch.randn(64, 77)",
    "x, y",
)


@pytest.mark.parametrize("small", [1.0, 2.0])
def test_small_rows_beside_large_ones_are_no_noise(tmp_path, small):
    """The difference's last digit is more of its exp than a digit."""

    def kernel(x, y):
        return torch.exp(x - y) * torch.where(x < 20, small, 1.0)

    found = compared(tmp_path, kernel, *SMALL_BESIDE_LARGE)
    assert found is (Reason.OK if small == 1 else Reason.WRONG_OUTPUT)


ROUTED = (
    "share, place = torch.softmax(logits, -1).topk(2, -1)\n"
    "return (experts[place] * share[..., None]).sum(1)",
    "torch.randint(0, 2, (64, 8)).float(), torch.randn(8, 16)",
    "logits, experts",
)


def routed(logits, experts, last=False, places=2):
    """By the first, or the last, of equal logits."""
    shares, left, total = torch.softmax(logits, -1), logits.clone(), 0
    for _ in range(places):
        equal = left == left.amax(-1, keepdim=True)
        order = torch.arange(1, 9) if last else torch.arange(8, 0, -1)
        place = (equal * order).argmax(-1, keepdim=True)
        total = total + experts[place[:, 0]] * shares.gather(-1, place)
        left.scatter_(-1, place, -torch.inf)
    return total


@pytest.mark.parametrize("last", [False, True])
def test_equal_gates_may_route_either_way(tmp_path, last):
    for places, right in ((2, True), (1, False)):
        found = compared(
            tmp_path,
            lambda logits, experts, n=places: routed(logits, experts, last, n),
            *ROUTED,
        )
        assert (found is Reason.OK) is right
