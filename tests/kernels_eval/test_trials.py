"""The table of trials and its two loops, on a reference and a candidate that answer by script."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from kernels_eval.config import (
    EXPECTED_MAX_BYTES,
    SHAPE_SCOPES,
    TAILS,
    CorrectnessConfig,
    EvalConfig,
)
from kernels_eval.judge import comparison
from kernels_eval.judge.candidate_handle import MOMENTS, described_fault
from kernels_eval.judge.conditions import takes_infinities
from kernels_eval.judge.expectations import Expectations
from kernels_eval.judge.explanation import explained
from kernels_eval.judge.gates import TaskGates
from kernels_eval.judge.messages import Stop, VerdictDraft
from kernels_eval.judge.quarantine import few_trials
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.judge.trial import Stage, TaskFindings, Trial
from kernels_eval.judge.trials import TRIALS
from kernels_eval.protocol import (
    Comparison,
    Done,
    Expectation,
    Explained,
    FoundDecisive,
    FoundFaint,
    FoundLasting,
    FoundSettings,
    FoundShifted,
    IgnoredInputs,
    InputNote,
    InputPlan,
    UnvariedArguments,
)
from kernels_eval.protocol import OutputForm as Form
from kernels_eval.records import Reason

OWN = ["declared", "normal", "mixed", "impulse", "large", "offset", "small", "in_place"]
SHAPES = ["batch_1", "each_1", "each_2", "each_odd"]
UNTAMED = ["lasting_weights", "large_weights"]
FEW = [
    "other_weights",
    "lone",
    "outliers",
    "mutated",
    "related",
    "few_slices",
    *UNTAMED,
    "non_finite",
]
ALL = [*OWN, *FEW, *SHAPES, "eval_mode"]
SCREENED = ["declared", "normal", "large", "in_place", "other_weights"]
EVERY_SHAPE = {f"{scope}_{tail}": [] for scope in SHAPE_SCOPES for tail in TAILS} | {"batch_1": []}
MIXED = ("ends", "edges", "mixed")
IN_DOMAINS = [f"{x}{domain}" for domain in ("", "_positive", "_unit") for x in MIXED]
RIGHT = Comparison(rms=0.0, max=0.0, reference_rms=0.0)
WRONG = Comparison(rms=1.0, max=1.0, reference_rms=1e-7)


class Reference:
    """Expects something on all inputs but those of the distributions, shapes and forms of weights
    that are `refused`; the answer of `declared` again in `same`. The `decisive` inputs are found
    one by one. Arguments of `unvaried` never vary; `lasting` inputs hold a state, weights may be
    `shifted`."""

    answer_if_suitable, trying = ReferenceProcess.answer_if_suitable, ReferenceProcess.trying
    settings = ()

    def __init__(
        self,
        refused=(),
        same=(),
        output_bytes=64,
        decisive=(),
        unvaried=(),
        lasting=(),
        shifted=(),
    ):
        self.lasting, self.shifted = lasting, shifted
        self.refused, self.same, self.output_bytes = refused, same, output_bytes
        self.unvaried = unvaried
        self.asked, self.decisive, self.searched = [], list(decisive), []
        self.unsuitable, self.child = set(), SimpleNamespace(dead=None)
        self._tried, self._refusal_counts = (), False

    def request(self, request):
        if request.command == "FindIgnoredInputs":
            return IgnoredInputs(ignored=[])
        if request.command == "FindDecisive":
            self.searched.append(request)
            name = self.decisive.pop(0) if self.decisive else ""
            return FoundDecisive(seed=3, distribution=name, lines=[] if name else [7])
        if request.command == "FindUnvaried":
            return UnvariedArguments(arguments=[*self.unvaried])
        if request.command == "FindFaint":
            return FoundFaint(found=[])
        if request.command == "FindLasting":
            return FoundLasting(found=[*self.lasting])
        if request.command == "FindSettings":
            return FoundSettings(found=[*self.settings])
        if request.command == "FindShifted":
            return FoundShifted(found=[*self.shifted])
        if request.command in ("FindStructures", "FindReach", "FindFree"):
            raise Stop(Reason.REFERENCE_FAILED, "looks for none")
        if request.command != "Expect":
            return Done()
        alike = [x.name for x in self.asked if x.name in ("declared", *self.same)]
        self.asked.append(request)
        if {request.distribution, request.shape, request.weights} & {*self.refused}:
            raise Stop(Reason.REFERENCE_FAILED, "labels out of range")
        form = Form(shape=[4], dtype="float32", bytes=self.output_bytes)
        return Expectation(
            finite_share=0.5 if request.name == "non_finite" else 1.0,
            reference_rms=0.0,
            sequential_rms=0.0,
            deterministic=True,
            bit_identical=True,
            oracle="float64",
            equals=alike if request.name in self.same else [],
            constants=[WRONG] * 3 if request.constants else [],
            outputs=[form],
        )


def expected(
    reference,
    *,
    varies=True,
    shapes=EVERY_SHAPE,
    unsuitable=(),
    level="confirm",
    calls=1,
    remembers=False,
    note=None,
    **config,
):
    plan = InputPlan(notes=[InputNote(**({"vary": varies} | (note or {})))], shapes=shapes)
    loaded = SimpleNamespace(
        plan=plan,
        parameters=[[4]],
        statistics=[],
        drawn=[],
        operators=(),
        depth=1,
        infinite=False,
        widens=False,
        dtype="float32",
        attributes=[],
        kept=[],
        calls_in_a_row=calls,
        long_row=min(calls, 12),
        remembers=remembers,
    )
    task = TaskFindings(loaded, CorrectnessConfig(**config), level)
    reference.unsuitable = {*unsuitable}
    found = Expectations(reference, TaskGates(), task)
    found.declare()
    assert [trial.name for trial in task.trials] == ["declared"]
    found.complete()
    return found


def without(*names):
    return [name for name in ALL if name not in names]


ALIKE = "alike_calls", "alike_calls_2"


def in_a_row(*counts):
    """After all else that is expected of a task's own shape."""
    place = ALL.index("non_finite")
    names = (x if isinstance(x, str) else f"call_{x}_in_a_row" for x in counts)
    return [*ALL[:place], *names, *ALL[place:]]


NOTES = {
    "unsorted": {"varied": "resampled", "order": ("rising",)},
    "lasting_inputs": {"varied": "shuffled", "rare": "one_hot"},
}


@pytest.mark.parametrize("name", NOTES)
def test_what_an_argument_is_has_a_row_of_its_own(name):
    found = [trial.name for trial in expected(Reference(), note=NOTES[name]).task.trials]
    other = [
        trial.name for trial in expected(Reference(refused=[name]), note=NOTES[name]).task.trials
    ]
    assert name in found and name not in other
    assert name != "unsorted" or found.index(name) < found.index("mutated")


@pytest.mark.parametrize(
    "reference, options, names",
    [
        ({}, {}, ALL),
        ({}, {"shapes": {}}, without(*SHAPES)),
        ({}, {"varies": False}, without(*OWN[1:7], "lone", "outliers", "non_finite")),
        ({}, {"distributions": ("declared", "offset", "normal")}, None),
        ({"refused": ["offset"]}, {}, without("offset")),
        ({"refused": [*(f"{x}_within" for x in MIXED), *IN_DOMAINS]}, {}, without("mixed")),
        ({"refused": ["each_1"]}, {}, [name.replace("each", "all") for name in ALL]),
        ({"same": ["eval_mode"]}, {}, without("eval_mode")),
        ({}, {"level": "screen"}, [*SCREENED, "each_1"]),
        ({}, {"level": "screen", "shapes": {}}, SCREENED),
        ({}, {"unsuitable": ["mixed"]}, without("mixed")),
        ({}, {"calls": 3}, in_a_row(3)),
        ({}, {"calls": 2, "remembers": True}, in_a_row(2)),
        ({}, {"calls": 64, "remembers": True}, in_a_row(2, 3, *ALIKE, "long_row")),
        ({}, {"level": "screen", "calls": 3}, [*SCREENED, "each_1"]),
        # three distributions and its own trials are all that there is memory for
        (
            {"output_bytes": EXPECTED_MAX_BYTES},
            {},
            without("impulse", *OWN[3:7], "mixed", "normal"),
        ),
    ],
)
def test_a_task_is_tried_in_the_rows_that_suit_it_and_in_their_order(reference, options, names):
    found = [trial.name for trial in expected(Reference(**reference), **options).task.trials]
    if names is None:
        assert found[:4] == ["declared", "offset", "normal", "in_place"]
    else:
        assert found == names


@pytest.mark.parametrize(
    "change",
    [
        {"distribution": "normal"},
        {"shape": "batch_1"},
        {"weights": "signed"},
        {"earlier_seeds": (2,)},
    ],
)
def test_a_baseline_is_compared_on_first_calls_of_the_task_itself(change):
    declared = Trial("declared", ROWS["declared", OUTPUTS], 1)
    assert declared.as_drawn
    assert not replace(declared, **change).as_drawn


@pytest.mark.parametrize(
    "depth, weights, wanted",
    [(40, [[64, 64]], True), (1, [[64, 64]], False), (16, [[4, 4]] * 16, False), (40, [], False)],
)
def test_leading_weights_are_drawn_where_a_task_iterates(depth, weights, wanted):
    loaded = SimpleNamespace(depth=depth, parameters=weights, statistics=[])
    task = TaskFindings(loaded, CorrectnessConfig(), "confirm")
    assert ROWS["leading_weights", OUTPUTS].when(task) is wanted


def test_inputs_that_decide_otherwise_are_searched_last_and_make_three_trials_at_most():
    reference = Reference(refused=["b"], decisive="abcde")
    found = expected(reference)
    made = [trial for trial in found.task.trials if trial.name not in ALL]
    assert [(x.name, x.distribution, x.seed) for x in made] == [
        ("decisions", "a", 3),
        ("decisions_3", "c", 3),
        ("decisions_4", "d", 3),
    ]
    first, *_, last = reference.searched
    assert first.trials[:3] == ["declared", "normal", "mixed"] and first.domain == ""
    # where an answer may be wrong tells nothing of a decision
    assert not {"large", "offset", "non_finite", *SHAPES, "eval_mode"}.intersection(first.trials)
    assert {*last.trials} - {*first.trials} == {"decisions", "decisions_3"}


def test_inputs_that_hold_a_state_make_two_trials_at_most():
    found = expected(Reference(lasting="abc")).task.trials
    made = [(x.name, x.distribution) for x in found if x.name not in ALL]
    assert made == [("lasting_states", "a"), ("lasting_states_2", "b")]
    screened = expected(Reference(lasting="abc"), level="screen").task.trials
    assert not any(x.name.startswith("lasting_states") for x in screened)


def test_whole_numbers_that_nothing_bounds_have_a_row_of_their_own():
    note = {"vary": False, "varied": "resampled", "rare": "unbounded"}
    drawn = [
        {x.name: x.distribution for x in expected(Reference(refused), note=note).task.trials}
        for refused in ((), ("beyond",), ("beyond", "above", "above_x4"))
    ]
    assert [each.get("beyond") for each in drawn] == ["beyond", "above", None]


def test_lines_whose_decisions_no_inputs_change_are_flagged():
    assert "decision_not_reached:7" in expected(Reference()).flags
    assert "decision_not_reached:7" not in expected(Reference(), level="screen").flags
    none = expected(Reference(decisive="a"), unsuitable=["FindDecisive"])
    assert not any(flag.startswith("decision") for flag in none.flags)


def test_arguments_that_no_trial_changes_are_flagged():
    assert "argument_never_varies:0" in expected(Reference(unvaried=[0])).flags
    assert not any("never_varies" in flag for flag in expected(Reference()).flags)


def test_screening_calls_no_task_degenerate_that_all_rows_tell_enough_of():
    """As a mask of what is not zero: few rows draw zeros."""
    same = SCREENED[1:]
    trials = expected(Reference(same=same), level="screen").task.trials
    assert {trial.name for trial in trials} == {*OWN, "other_weights", "each_1"}
    for level in ("screen", "confirm"):
        with pytest.raises(Stop, match=Reason.DEGENERATE_TASK):
            expected(Reference(same=ALL[1:]), level=level)


@pytest.mark.parametrize(
    "refused, name, asked",
    [
        (["ends", "edges"], "mixed", ["ends", "edges", "mixed"]),
        ([*MIXED, "ends_positive"], "mixed", [*MIXED, "ends_positive", "edges_positive"]),
        (IN_DOMAINS, "mixed", [*IN_DOMAINS, "ends_within"]),
        # the widest domain that was accepted before
        (["normal", "normal_positive"], "offset", ["offset_unit"]),
        (["normal_x10000"], "large", ["normal_x10000", "normal_x1000"]),
    ],
)
def test_the_first_form_that_suits_the_task_is_drawn_under_one_seed(refused, name, asked):
    reference = Reference(refused=refused)
    trials = expected(reference).task.trials
    requests = [each for each in reference.asked if each.name == name]
    assert [each.distribution for each in requests] == asked
    assert next(x for x in trials if x.name == name).distribution == asked[-1]
    assert len({each.seed for each in requests}) == 1


def test_weights_that_the_task_refuses_are_halved_twice():
    reference = Reference(refused=["large", "large_less"])
    expected(reference)
    asked = [each.weights for each in reference.asked if each.name == "large_weights"]
    assert asked == ["large", "large_less", "large_less_less"]


def test_successive_calls_are_alike_in_rows_of_their_own():
    """But for a few places, and for a part of each number, in either order."""
    trials = expected(Reference(), calls=3, remembers=True).task.trials
    one, other = (next(x for x in trials if x.name == name) for name in ALIKE)
    assert {*one.earlier_seeds} == {one.seed} and one.distributions[-1] == "declared"
    kinds = [[x.rstrip("0123456789") for x in _kinds(each)] for each in (one, other)]
    assert kinds == [["few", "moved"], ["moved", "few"]]
    pairs = list(zip(one.earlier_seeds, one.distributions, strict=False))
    assert one.expect().earlier == pairs and len(pairs) == 2


def _kinds(trial):
    return ["few" if x.endswith("_few") else x.partition("_")[2] for x in trial.earlier_draws]


def test_weights_are_shifted_as_far_as_the_task_takes():
    reference = Reference(shifted=["shifted_6n0", "shiftedback_6n0"], refused=["shiftedback_6n0"])
    trials = expected(reference).task.trials
    asked = [each.weights for each in reference.asked if each.weights.startswith("shifted")]
    assert asked == ["shifted_6n0", "shiftedback_6n0"]
    assert [x.weights for x in trials if x.name.startswith("shifted")] == ["shifted_6n0"]
    assert not [x for x in expected(Reference(), level="screen").task.trials if "shift" in x.name]


def test_a_scope_that_the_task_refuses_is_asked_for_once():
    reference = Reference(refused=["each_1", "all_2"])
    expected(reference)
    shapes = [each.shape for each in reference.asked if each.shape != "declared"]
    assert shapes == ["batch_1", "each_1", "all_1", "all_2", "last_2", "last_odd"]


def test_one_seed_where_only_what_a_row_changes_shall_differ():
    seeds = {trial.name: trial.seed for trial in expected(Reference()).task.trials}
    own = [name for name, seed in seeds.items() if seed == seeds["declared"]]
    assert own == [
        "declared",
        "impulse",
        "other_weights",
        "lone",
        "outliers",
        *UNTAMED,
        "eval_mode",
    ]


def test_what_ignores_the_inputs_is_measured_where_somebody_asks_what_it_tells():
    reference = Reference()
    expected(reference)
    asked = {each.name for each in reference.asked if each.constants}
    assert asked == {*OWN, "other_weights", *SHAPES}


OUTPUTS, VARIED, LAST = Stage
ROWS = {(row.name, row.stage): row for row in TRIALS}
FLAGS_SHAPES = {"shapes": "flag"}


@pytest.mark.parametrize(
    "rare, operators, depth, parameters, wanted",
    [
        ("", ["torch.softmax"], 1, [], []),
        ("large", ["torch.Tensor.max"], 1, [], [("rare", OUTPUTS)]),
        ("full_rows", ["torch.Tensor.clamp_min", "torch.Tensor.div"], 1, [], [("rare", OUTPUTS)]),
        ("full_rows", ["torch.Tensor.amax"], 1, [], [("rare", LAST)]),
        ("full_rows", ["torch.nn.functional.softmax"], 1, [], [("rare", LAST)]),
        ("", [], 6, [], [("blocks", OUTPUTS), ("path", OUTPUTS)]),
        ("", [], 6, [[4, 4], [], [1], [1], [1], [1]], [("blocks", OUTPUTS), ("path", OUTPUTS)]),
        ("", ["torch.mm"] * 16, 3, [], []),
        ("", [], 16, [[4, 4]] * 16, []),
    ],
)
def test_rare_values_are_drawn_where_a_task_may_be_given_them(
    rare, operators, depth, parameters, wanted
):
    plan = InputPlan(notes=[InputNote(vary=False, rare=rare)], shapes={})
    loaded = SimpleNamespace(plan=plan, operators=operators, depth=depth, parameters=parameters)
    task = TaskFindings(loaded, CorrectnessConfig(), "screen")
    rows = [ROWS[key] for key in ROWS if key[0] in ("rare", "blocks", "path")]
    assert [(row.name, row.stage) for row in rows if row.when(task)] == wanted


@pytest.mark.parametrize(
    "name, stage, outcome, options, found",
    [
        ("normal", OUTPUTS, "wrong_output", {}, "wrong_output"),
        ("offset", OUTPUTS, "wrong_output", {}, "wrong_output"),
        ("offset", OUTPUTS, "wrong_output", {"products": True}, ["offset_inputs_differ"]),
        ("offset", OUTPUTS, "non_finite", {"products": True}, "non_finite"),
        ("batch_1", VARIED, "wrong_output", {}, "shape_specialised"),
        ("tail_1", VARIED, "wrong_output", FLAGS_SHAPES, ["shape_specialised"]),
        ("tail_1", VARIED, "exception", {}, ["declared_shape_only"]),
        ("tail_1", VARIED, "build_failed", {}, ["declared_shape_only"]),
        ("tail_1", VARIED, "cuda_error", FLAGS_SHAPES, "shape_specialised"),
        ("other_settings", VARIED, "wrong_output", {}, "shape_specialised"),
        ("other_settings", VARIED, "build_failed", {}, ["declared_shape_only"]),
        ("eval_mode", VARIED, "exception", {}, ["eval_mode_fails"]),
        ("eval_mode", VARIED, "wrong_output", {}, ["wrong_in_eval_mode"]),
        ("non_finite", LAST, "non_finite", {}, ["non_finite_inputs_differ"]),
        ("non_finite", LAST, "exception", {}, ["non_finite_inputs_differ"]),
        ("non_finite", OUTPUTS, "non_finite", {}, "non_finite"),
        ("rare", OUTPUTS, "non_finite", {}, "non_finite"),
        ("rare", LAST, "non_finite", {}, ["full_masks_differ"]),
        ("general_values", LAST, "wrong_output", {}, ["general_values_differ"]),
    ],
)
def test_a_wrong_answer_is_what_its_row_says(name, stage, outcome, options, found):
    """A reason ends the protocol, flags do not."""
    declared, trial = Trial("declared", TRIALS[0], 1), Trial(name, ROWS[name, stage], 1)
    products = options.get("products", False)
    config = {key: value for key, value in options.items() if key == "shapes"}

    def call(trial, **_):
        if trial is not declared and outcome in ("exception", "build_failed", "cuda_error"):
            raise Stop(Reason(outcome), "no")
        return RIGHT

    reference = SimpleNamespace(
        trials=[declared, trial],
        judge=lambda _, trial: Reason.OK if trial is declared else Reason(outcome),
        sums_products=products,
        expected=SimpleNamespace(oracle="float64"),
        loaded=SimpleNamespace(gradients=None, effects=None, layout=0),
    )
    process = SimpleNamespace(
        reference=reference,
        draft=VerdictDraft(),
        config=EvalConfig(correctness=CorrectnessConfig(**config)),
        calls=[],
        compared={},
        trial_s=[],
        work_s=float,
        call=call,
        child=SimpleNamespace(dead=None),
        compiler_flags=(),
        request=lambda _: SimpleNamespace(changed={}),
    )
    if isinstance(found, list):
        comparison.compare_trials(process, stage)
        assert process.draft.flags == found
    else:
        with pytest.raises(Stop) as stop:
            comparison.compare_trials(process, stage)
        assert stop.value.finding.reason == found and process.draft.flags == []


@pytest.mark.parametrize(
    "trial_s, stage, left",
    [
        ([0.1, 0.1], OUTPUTS, False),
        ([40.0], OUTPUTS, False),
        ([0.1, 0.6, 0.6], OUTPUTS, True),
        ([0.1, 0.6, 0.6], VARIED, True),
        ([40.0], VARIED, True),
    ],
)
@pytest.mark.parametrize("level", ["screen", "confirm"])
def test_screening_leaves_to_confirm_what_takes_long(trial_s, stage, left, level):
    trial, called = Trial("next", ROWS["normal", OUTPUTS], 1), []
    if stage is VARIED:
        trial = Trial("next", ROWS["batch_1", VARIED], 1)
    process = SimpleNamespace(
        reference=SimpleNamespace(
            trials=[trial],
            judge=lambda *_: Reason.OK,
            expected=SimpleNamespace(oracle="float64"),
        ),
        draft=VerdictDraft(),
        config=EvalConfig() if level == "confirm" else EvalConfig().screened(),
        compared={"declared": (Trial("declared", TRIALS[0], 1), RIGHT)},
        trial_s=list(trial_s),
        work_s=float,
        call=lambda trial, **_: called.append(trial) or RIGHT,
    )
    comparison.compare_trials(process, stage)
    left = left and level == "screen"
    assert process.draft.flags == ["left_to_confirm"] * left
    assert called == [trial] * (not left)


@pytest.mark.parametrize("again, reason", [(1e-2, "wrong_output"), (1.2e-2, "non_deterministic")])
def test_other_bits_explain_a_wrong_answer_only_where_its_error_differs(again, reason):
    """A convolution of torch may differ in the last bits; a race differs by what it loses."""
    trial, found = (
        Trial("normal", ROWS["normal", OUTPUTS], 1, distribution="normal"),
        Comparison(rms=1e-2, reference_rms=0, max=1),
    )
    call = SimpleNamespace(rerun_differs=True, previous_changed=False)
    process = to_explain(trial)
    process.calls = [call]
    process.call = lambda trial: found.model_copy(update={"rms": again})
    stop = explained(trial, Reason.WRONG_OUTPUT, found, process)
    assert stop.finding.reason == reason


def to_explain(trial, *, by="", as_large="", depth=0, layers=0, flags=(), device="cpu"):
    """A candidate that was wrong in this trial, and what is known of its task and its error."""
    operators = ["torch.nn.functional.linear"] * layers
    loaded = SimpleNamespace(
        gradients=None, effects=None, layout=0, depth=depth, parameters=[], operators=operators
    )
    return SimpleNamespace(
        calls=[],
        compiler_flags=flags,
        reference=SimpleNamespace(
            trials=[trial],
            loaded=loaded,
            expected=SimpleNamespace(task=SimpleNamespace(loaded=loaded)),
            explain=lambda *_: Explained(by=by, as_large=as_large),
            device=device,
        ),
    )


@pytest.mark.parametrize(
    "name, form, reason",
    [
        ("leading_weights", "leading", "wrong_output"),
        ("large_weights", "large_less", "wrong_output"),
        ("other_weights", "signed", "precision_downcast"),
    ],
)
@pytest.mark.parametrize("depth", [1, 40])
def test_no_downcast_is_named_under_weights_that_forget_late(name, form, reason, depth):
    """Ordinary ones would have shown it; what fewer iterations leave out may err as much."""
    trial = Trial(name, ROWS[name, OUTPUTS], 1, weights=form)
    found = Comparison(rms=8e-4, reference_rms=1e-7, max=8e-3, precision="fp32")
    process = to_explain(trial, by="fp16", depth=depth)
    stop = explained(trial, Reason.PRECISION_DOWNCAST, found, process)
    assert stop.finding.reason == reason
    fewer = reason == "wrong_output" and depth > 1
    assert ("fewer steps" in stop.finding.detail) == fewer


@pytest.mark.parametrize("rms, named", [(3e-6, True), (1e-2, False)])
@pytest.mark.parametrize("flag", ["--use_fast_math", "-ffast-math", "-Ofast", "-O3"])
@pytest.mark.parametrize("outcome", ["wrong_output", "precision_downcast"])
def test_flags_that_give_up_digits_are_named_where_few_are_missing(outcome, flag, rms, named):
    trial = Trial("lasting_weights", ROWS["lasting_weights", OUTPUTS], 1, weights="lasting")
    found = Comparison(rms=rms, reference_rms=1e-7, max=3 * rms, precision="fp32")
    process = to_explain(trial, flags=["-std=c++17", flag])
    stop = explained(trial, Reason(outcome), found, process)
    assert stop.finding.reason == "wrong_output"
    assert (f"built with {flag}" in stop.finding.detail) == (named and flag != "-O3")


@pytest.mark.parametrize("layers, named", [(1, False), (24, True)])
def test_an_error_as_large_as_tf32s_is_said_to_be_so_in_models_of_many_layers(layers, named):
    trial = Trial("declared", ROWS["declared", OUTPUTS], 1)
    found = Comparison(rms=2.1e-3, reference_rms=1e-7, max=4.6e-3, precision="fp32")
    process = to_explain(trial, as_large="TF32", layers=layers)
    process.reference.drawn_again = None
    process.copies_weights = True
    stop = explained(trial, Reason.PRECISION_DOWNCAST, found, process)
    assert stop.finding.reason == "wrong_output"
    assert ("errs as much with TF32" in stop.finding.detail) == named


@pytest.mark.parametrize("name, says", [("mixed", True), ("normal", False)])
def test_nan_among_large_and_ordinary_numbers_may_come_of_an_exp(name, says):
    trial = Trial(name, ROWS[name, OUTPUTS], 1, distribution="ends")
    found = Comparison(rms=4e-8, reference_rms=1e-7, max=1e-7, masks_match=False)
    process = to_explain(trial)
    process.call, process.reference.judge = lambda _: found, lambda *_: Reason.NON_FINITE
    detail = explained(trial, Reason.NON_FINITE, found, process).finding.detail
    assert ("an exp that overflows?" in detail) == says and "halves, thresholds" in detail


@pytest.mark.parametrize("far, reason", [(True, "input_independent"), (False, "wrong_output")])
def test_one_number_ignores_the_inputs_where_it_is_the_answer_to_larger_ones_too(far, reason):
    """Of a clamp, say, it is not."""
    declared, normal = (Trial(x, ROWS[x, OUTPUTS], 1) for x in ("declared", "normal"))
    found = Comparison(rms=1.0, reference_rms=0, max=1, equals_answer=["declared"], constant=True)
    process = to_explain(normal)
    process.reference.trials = [declared, normal]
    process.call = lambda trial: found.model_copy(update={"constant": far})
    stop = explained(normal, Reason.WRONG_OUTPUT, found, process)
    assert stop.finding.reason == reason


@pytest.mark.parametrize(
    "command, said",
    [
        ("Call", "CUDA error: an illegal memory access was encountered on each_1 inputs: it"),
        ("Sample", "CUDA error: an illegal memory access was encountered in timed calls: it"),
        ("Rebuild", "CUDA error: an illegal memory access was encountered: it"),
    ],
)
def test_a_fault_of_a_device_is_said_in_one_line_with_the_call_it_came_in(command, said):
    detail = "CUDA error: an illegal memory access was encountered\nCompile with TORCH_USE_CUDA_DSA"
    described = described_fault(detail, MOMENTS.get(command, "").format("each_1"))
    assert described.startswith(said) and "TORCH_USE_CUDA_DSA" not in described
    assert "negative" in described_fault(detail, "", wraps=True) and "negative" not in described


@pytest.mark.parametrize("device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("by, reason", [("TF32", "precision_downcast"), ("", "wrong_output")])
def test_a_downcast_is_named_where_it_explains_the_error_in_words_of_the_device(device, by, reason):
    trial = Trial("normal", ROWS["normal", OUTPUTS], 1, distribution="normal")
    found = Comparison(rms=9e-4, reference_rms=1e-7, max=4e-3, precision="fp32")
    process = to_explain(trial, by=by, device=device)
    stop = explained(trial, Reason.PRECISION_DOWNCAST, found, process)
    assert stop.finding.reason == reason
    assert ("Triton" in stop.finding.detail) == (device != "cpu")


@pytest.mark.parametrize("by, reason", [("TF32", "precision_downcast"), ("", "wrong_output")])
def test_a_statistic_is_a_downcast_where_fewer_digits_explain_it_itself(by, reason):
    trial = Trial("normal", ROWS["normal", OUTPUTS], 1, distribution="normal")
    trial.outputs = [Form(shape=[4], dtype="float32")] * 2
    found = Comparison(rms=7e-4, reference_rms=1e-7, max=5e-4, precision="fp32", worst=1)
    process, asked = to_explain(trial), []
    process.reference.loaded.effects = SimpleNamespace(names=["buffer running_mean"])
    process.reference.explain = lambda _, place: asked.append(place) or Explained(by=by)
    stop = explained(trial, Reason.PRECISION_DOWNCAST, found, process)
    assert (stop.finding.reason, asked) == (reason, [1])
    assert ("running_mean" in stop.finding.detail) == (not by)


def seen(finite=1.0, told=1.0, shape=(4, 3), holds=True, dtype="float32"):
    return Expectation(
        finite_share=finite,
        told_share=told,
        reference_rms=0.0,
        sequential_rms=0.0,
        deterministic=True,
        bit_identical=True,
        oracle="float64",
        equals=[],
        constants=[],
        outputs=[Form(shape=[*shape], dtype=dtype)],
        shapes_hold=holds,
    )


@pytest.mark.parametrize(
    "name, found, suits",
    [
        ("mutated", seen(), True),
        ("mutated", seen(shape=(3, 3)), True),
        ("mutated", seen(shape=(3, 3), holds=False), False),
        ("mutated", seen(shape=(0, 3)), False),
        ("mutated", seen(shape=(12,)), False),
        ("mutated", seen(shape=(3, 3), dtype="float64"), False),
        ("mixed", seen(shape=(3, 3)), True),
        ("rare", seen(shape=(3, 3)), True),
        ("large", seen(shape=(3, 3)), False),
        ("varied", seen(shape=(3, 3)), False),
        ("non_finite", seen(0.5, 0.5, shape=(3, 3)), False),
    ],
)
def test_outputs_may_have_other_sizes_where_no_rounding_decides_them(name, found, suits):
    trial = Trial(name, ROWS[name, OUTPUTS], 1, distribution=name)
    assert trial.suits(found, seen()) is suits


def test_one_more_of_what_an_integer_counts_gives_other_sizes():
    """topk(x, count): the row is one of the task's other shapes."""
    row = ROWS["other_integer", Stage.VARIATIONS]
    trial = Trial("other_integer", row, 1, distribution="one_more")
    assert trial.suits(seen(shape=(3, 3)), seen())


@pytest.mark.parametrize(
    "name, found, infinite, suits",
    [
        ("mutated", seen(0.9, 1.0), True, True),
        ("mutated", seen(0.9, 1.0), False, False),
        ("mutated", seen(0.9, 0.95), True, False),
        ("mutated", seen(0.4, 1.0), True, False),
        ("large", seen(0.9, 1.0), True, False),
        ("varied", seen(0.9, 1.0), True, False),
        ("non_finite", seen(0.4, 0.4), False, True),
    ],
)
def test_infinities_are_answers_where_the_task_gives_them_itself(name, found, infinite, suits):
    trial = Trial(name, ROWS[name, OUTPUTS], 1, distribution=name)
    assert trial.suits(found, seen(), takes_infinities=infinite) is suits


@pytest.mark.parametrize(
    "rare, operators, infinite, takes",
    [
        ("", ["torch.Tensor.masked_fill"], True, True),
        ("", ["torch.Tensor.masked_fill"], False, False),
        ("", ["torch.Tensor.amin"], True, True),
        ("full_rows", ["torch.softmax"], True, False),
    ],
)
def test_what_a_row_masked_whole_gives_is_a_matter_of_taste(rare, operators, infinite, takes):
    plan = InputPlan(notes=[InputNote(vary=False, rare=rare)], shapes={})
    loaded = SimpleNamespace(plan=plan, operators=operators, infinite=infinite)
    assert takes_infinities(TaskFindings(loaded, CorrectnessConfig(), "confirm")) is takes


@pytest.mark.parametrize(
    "name, distribution, few",
    [
        ("declared", "declared", True),
        ("in_place", "declared", True),
        ("non_finite", "non_finite", True),
        ("mutated", "mutated_1", False),
        ("mixed", "ends", False),
    ],
)
@pytest.mark.parametrize("varies", [True, False])
def test_few_trials_are_those_on_own_inputs_alone(name, distribution, few, varies):
    plan = InputPlan(notes=[InputNote(vary=varies, varied="resampled")], shapes={})
    task = TaskFindings(SimpleNamespace(plan=plan), CorrectnessConfig(), "confirm")
    task.trials = [Trial(name, ROWS[name, OUTPUTS], 1, distribution=distribution)]
    task.expected = {"declared": seen(), "in_place": seen()}
    assert few_trials(task) is few
