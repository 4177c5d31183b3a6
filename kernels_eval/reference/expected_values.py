"""What a task's own model gives: the expected values of each trial, with which
`kernels_eval.reference.answers` compares a candidate's outputs.
"""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from kernels_eval.config import (
    CPU_CACHE_BYTES,
    EXPECTED_HELD_SHARE,
    FEW_TERMS_KINDS,
    FIRST_ELEMENTS,
    LEAST_LEFT_OUT,
    LONG_SUM,
    MOST_TASK_OPERATORS,
    REPEATABLE_RTOL,
)
from kernels_eval.model.correctness import answer_of
from kernels_eval.model.distributions import warm_up
from kernels_eval.model.few_terms import draws_for
from kernels_eval.model.inputs import flatten_outputs
from kernels_eval.model.invariants import note_of
from kernels_eval.model.measurement import (
    all_close,
    computable,
    few_of,
    least_step,
    measure,
    same_all,
)
from kernels_eval.model.model_runner import layout_of, storages
from kernels_eval.model.operators import reference_operators
from kernels_eval.model.renewals import drawn_forms, may_be_drawn
from kernels_eval.model.seeding import seed_generators
from kernels_eval.model.side_effects import changed_state, numbers_after, side_effects, state_of
from kernels_eval.model.values import leaves_of
from kernels_eval.model.weights import (
    digest_of,
    is_structured,
    parameters_of,
    randomise_weights,
    redraw_statistics,
    squeezed,
    weights_of,
)
from kernels_eval.protocol import (
    DECISIVE,
    DECLARED,
    LONE_TERMS,
    RENEWALS,
    UNIT_FACTORS,
    Comparison,
    Done,
    Expect,
    Expectation,
    FewTerms,
    ForgetTrial,
    GlanceAt,
    Glimpse,
    KeepNumbers,
    KeptNumbers,
    LeaveOut,
    LeftOut,
    LoadedTask,
    LoadTask,
    OutputForm,
    Prepare,
    handles,
    is_untamed,
)
from kernels_eval.reference.depth import Depth
from kernels_eval.reference.equal_elements import ANY_ORDER
from kernels_eval.reference.equal_parts import EqualParts
from kernels_eval.reference.factorings import Factoring, Factorings
from kernels_eval.reference.in_float64 import Widens
from kernels_eval.reference.infinities import GivenInfinities, finite_share
from kernels_eval.reference.kept_state import attributes_set, calls_in_a_row
from kernels_eval.reference.overflows import Overflows
from kernels_eval.reference.own_errors import OwnErrors, both, copied, own_error, same_shapes
from kernels_eval.reference.task_model import (
    REFUSALS,
    TaskModel,
    peak_bandwidth,
    require_plain,
    require_repeatable,
    require_tensors,
)
from kernels_eval.reference.uses import plan_of, with_choices, with_regular

T = TypeVar("T")
FACTORS = re.compile(r"linalg|svd|qr|eig")
"""Functions that may factor a matrix."""


class Known(NamedTuple):
    """A trial's expected outputs and oracle (empty where too large), own errors, inputs and
    weights.
    """

    expected: list[Tensor]
    oracle: list[Tensor]
    error: list[Comparison]
    trial: Expect
    few: Sequence[Tensor] = ()
    """Spread elements of the expected outputs: where these differ, all do."""
    glanced: bool = False
    """only how large an error is matters"""


class ExpectedValues:
    """The expected values of one task: it is loaded, then each trial is expected."""

    def __init__(self, task: TaskModel) -> None:
        self.task, self.runner = task, task.runner
        self.errors = OwnErrors(task)
        self.parts: list[int] = []
        """How many equal parts the declared call cuts dimensions into."""
        self.wraps = False
        """Whether the declared call computes integers that 64 bits do not hold, as a hash does."""
        self.known: dict[str, Known] = {}
        self.held_max_bytes = math.inf
        self.factors: list[int] = []
        """Outputs of which several answers are right."""
        self.cost_of_few_terms: dict[str, list[Comparison]] = {}
        self.shapes_vary = False
        """Whether any inputs have given outputs of other shapes."""

    @handles(Prepare)
    def prepare(self, request: Prepare) -> Done:
        """Also load the kernels that comparing needs."""
        done = self.runner.prepare(request)
        if self.runner.on_gpu:
            self._warm_up()
            self.runner.synchronise()
        return done

    def _warm_up(self) -> None:
        x = torch.rand(64, 64, device=self.runner.device)
        note_of([x])
        warm_up(x)
        for y in (x, x.masked_fill(x < 0.5, math.nan)):
            measure(y, y.double(), y)
        for matrix in (x, x.double()):
            matrix @ matrix
        torch.conv2d(x[None, None], x[None, None, :3, :3])

    @handles(LoadTask)
    def load(self, request: LoadTask) -> LoadedTask:
        self.task.load(request.path, request.spec)
        self.task.left_out = request.left_out
        self.errors.oracle_max_bytes, self.runner.effects = request.oracle_max_bytes, None
        seed = self.runner.spec.seed
        inputs = self.task.inputs(seed)
        require_plain("get_inputs() gives", leaves_of(inputs))
        require_repeatable(inputs, self.task.inputs(seed))
        require_plain("the model holds", leaves_of(weights_of(self.runner.model)))
        before, state = copy.deepcopy(inputs), state_of(self.runner.model)
        with EqualParts() as parts:
            leaves, structure = flatten_outputs(self.runner.forward(inputs))
        require_tensors(leaves)
        now = state_of(self.runner.model)
        changed = changed_state(state, now)
        known = [name for name in changed if name in state]
        effects = side_effects(before, inputs, self.runner.model, known)
        if changed:
            effects = calls_in_a_row(self.task, effects, copied(leaves), changed)
        kept, views = list[str](), list[str]()
        if not effects.remembers:
            kept, views = attributes_set(self.task, changed, now, leaves)
        if effects.remembers:  # each call is then a first one
            self.runner.model = self.runner.build()
            self.runner.effects = effects.model_copy(
                update={"arguments": [], "buffers": [], "names": []}
            )
        text = Path(request.path).read_text(errors="replace")
        self.task.plan = plan_of(self.task, self.task.outputs, seed, text, dict(parts.found))
        with Depth() as depth, GivenInfinities() as infinities, Widens() as widens:
            operators = self._operators_called(seed)
        self.errors.infinite = infinities.given

        self.runner.model = self.runner.build()
        if effects.names or effects.remembers:
            self.runner.effects = effects
            inputs = self.task.inputs(seed)
            leaves, structure = flatten_outputs(self.runner.forward(inputs))
        self._find_drawn()
        parameters = parameters_of(self.runner.model)
        ambiguous = self._ambiguous(seed) if any(map(FACTORS.search, operators)) else ""
        self.runner.synchronise()
        dtype = next((leaf.dtype for leaf in leaves if least_step(leaf)), torch.float32)
        gpu = torch.cuda.get_device_properties(0) if self.runner.on_gpu else None
        self.held_max_bytes = gpu.total_memory // EXPECTED_HELD_SHARE if gpu else math.inf
        input_bytes = sum(x.nbytes for x in leaves_of(inputs) if isinstance(x, Tensor))
        cache_bytes = gpu.L2_cache_size if gpu else CPU_CACHE_BYTES
        fits_cache = 2 * (input_bytes + sum(x.nbytes for x in leaves)) < cache_bytes
        return LoadedTask(
            plan=self.task.plan,
            structure=structure,
            operators=tuple(operators[:MOST_TASK_OPERATORS]),
            depth=depth.most,
            infinite=infinities.given,
            widens=widens.found,
            parameters=list(map(squeezed, parameters.values())),
            parameter_names=list(parameters),
            parameter_digests=list(map(digest_of, parameters.values())),
            statistics=list(map(squeezed, self.runner.statistics)),
            structured=[i for i, x in enumerate(parameters.values()) if is_structured(x)],
            dtype=str(dtype).removeprefix("torch."),
            device_name=gpu.name if gpu else "cpu",
            precision=self.runner.spec.precision,
            gradients=self.runner.gradients,
            effects=self.runner.effects,
            padded=self.runner.spec.padded,
            drawn=self.runner.spec.drawn,
            kept=kept,
            attributes=views,
            input_bytes=input_bytes,
            packed_bytes=self.task.packed_bytes(inputs),
            argument_bytes=self.task.packed_bytes(self.task.arguments(self.runner.spec)),
            weight_bytes=self.task.packed_bytes(weights_of(self.runner.model)),
            peak_bytes_per_s=0.0 if fits_cache else peak_bandwidth(gpu),
            cache_bytes=cache_bytes,
            ambiguous=ambiguous,
            layout=layout_of(leaves, inputs, storages(self.runner.model)),
            memory_share=torch.cuda.max_memory_allocated() / gpu.total_memory if gpu else 0.0,
        )

    def _find_drawn(self) -> None:
        runner = self.runner
        if may_be_drawn(runner.model, runner.told):
            drawn = drawn_forms(runner.build(), runner.build(runner.spec.seed + 1), runner.told)
            runner.spec = runner.spec.model_copy(update={"drawn": drawn})

    @handles(KeepNumbers)
    def keep_numbers(self, request: KeepNumbers) -> KeptNumbers:
        calls = [self.task.inputs(seed) for seed in request.seeds]
        return numbers_after(self.runner.build(), calls, request.names)

    def _operators_called(self, seed: int) -> list[str]:
        inputs = self.task.inputs(seed)
        operators = reference_operators(lambda: self.runner.forward(inputs))
        chooses = any(name.rpartition(".")[2] in ANY_ORDER for name in operators)
        if self.task.plan:
            self.task.plan = with_regular(self.task.plan, operators)
        if self.task.plan and chooses:
            self.task.plan = with_choices(self.task.plan, self.task, self.task.outputs, seed)
        return operators

    def _ambiguous(self, seed: int) -> str:
        """Finds the outputs that depend on the signs or order of factors; says where these are not
        factors themselves."""
        with Factorings() as own:
            one = self.task.outputs(self.task.inputs(seed))
        with Factorings(otherwise=True):
            other = self.task.outputs(self.task.inputs(seed))
        pairs = enumerate(zip(one, other, strict=True))
        self.factors = [i for i, (x, y) in pairs if not all_close([x], [y], REPEATABLE_RTOL)]
        told = {place for each in own.of(one, self.factors) for place in each.outputs}
        if told.issuperset(self.factors):
            return ""
        names = ", ".join(sorted({name.strip("_") for name, *_ in own.calls}))
        return (
            f"several answers are right, and nothing tells which: the reference's depends on the"
            f" signs or the order of what {names} gives"
        )

    def factorings(self, trial: Expect) -> list[Factoring]:
        if not self.factors:
            return []
        calls = Factorings()
        with self.model_for(trial), calls:
            outputs = self.task.outputs(self.task.inputs_of(trial))
        return calls.of(outputs, self.factors)

    # -- expected values ---------------------------------------------------------------------------

    @handles(Expect)
    def expect(self, request: Expect) -> Expectation:
        """Compute and keep a trial's expected outputs: the reference's, and a float64 oracle's
        where it fits.
        """
        name, seed = request.name, request.seed
        with self.model_for(request):
            inputs = self.task.inputs(seed, request.distribution, request.shape)
            overflows, plan = Overflows(), self.task.plan
            integers = plan is not None and (plan.extends or plan.narrow)
            with EqualParts() as parts, overflows if integers else nullcontext():
                reference = self.task.outputs(copied(inputs))
            if name == DECLARED:
                self.parts, self.wraps = parts.counts, overflows.found
            elif overflows.found and not self.wraps:
                raise ValueError("their type does not hold these, as it does declared integers")
            elif request.shape != DECLARED and parts.counts != self.parts:
                raise ValueError("in this shape its parts are not equal")
            # a reference that draws random numbers must not draw the same ones again
            seed_generators(seed + 1)
            again = self.task.outputs(copied(inputs))
            bit_identical = same_all(reference, again)
            deterministic = bit_identical or all_close(reference, again, REPEATABLE_RTOL)
            exact = self.errors.oracle(inputs, reference)
            error = self.errors.of(inputs, reference, exact=exact is not None, hard=request.hard)
            if request.explored or is_untamed(request.weights):
                error = both(error, self.errors.beside(inputs, reference))
            told = self.errors.told_share(inputs, reference, exact)
            holds = self._shapes_hold(request, inputs, reference, exact=exact is not None)
        self.runner.synchronise()
        del again, inputs
        few = list(map(few_of, reference))
        known = Known(reference, exact or reference, error, request, few)
        equals = [
            name
            for name, other in self.known.items()
            if same_all(self.returned(known.few), self.returned(other.few))
            and same_all(self.returned(reference), self.returned(self.expected_outputs(name)))
        ]
        held = exact or name == DECLARED or self._fits(reference)
        self.known[name] = known if held else known._replace(expected=[], oracle=[])
        constants = self._constants(known) if request.constants else []
        first = map(_start, known.expected), map(_start, known.oracle)
        costs = both(error, list(map(own_error, *first)))
        if name == DECLARED:
            self.own_errors = costs
        return Expectation(
            reference_rms=max(each.reference_rms for each in costs),
            sequential_rms=max(each.sequential_rms for each in costs),
            finite_share=finite_share(reference),
            told_share=told,
            deterministic=deterministic,
            bit_identical=bit_identical,
            oracle="float64" if exact else "float32",
            equals=equals,
            constants=constants,
            outputs=list(map(_form, reference)),
            shapes_hold=holds,
        )

    def _shapes_hold(
        self, request: Expect, inputs: list[Any], reference: list[Tensor], *, exact: bool
    ) -> bool:
        """Whether the shapes of outputs, if these ever vary, come from the inputs alone."""
        if DECLARED not in self.known or request.shape != DECLARED:
            return True
        self.shapes_vary = self.shapes_vary or not same_shapes(reference, self.like)
        return not self.shapes_vary or (exact and self.errors.keeps_shapes(inputs, reference))

    @handles(GlanceAt)
    def glance_at(self, request: GlanceAt) -> Glimpse:
        trial = request.trial
        with self.model_for(trial):
            inputs = self.task.inputs_of(trial)
            outputs = self.task.outputs(copied(inputs))
        self.task.kept = (trial.seed, trial.distribution, trial.shape), inputs
        self.runner.synchronise()
        self.known[trial.name] = Known(outputs, outputs, self.own_errors, trial, glanced=True)
        finite = all(bool(torch.isfinite(computable(x)).all()) for x in outputs)
        return Glimpse(finite=finite, outputs=list(map(_form, outputs)))

    @contextmanager
    def model_for(self, trial: Expect) -> Iterator[None]:
        before = self.runner.earlier
        self.runner.earlier = [self.task.inputs(*each, trial.shape) for each in trial.earlier]
        special, own = trial.evaluate or trial.weights or trial.explored, self.runner.model
        special = special or trial.settings
        try:
            if special:
                with self.task.under(trial.settings):
                    self.runner.model = self.runner.build()
            if trial.weights:
                padded = self.runner.spec.padded
                seed, form = trial.weights_seed, trial.weights
                if form in RENEWALS:
                    self.runner.renew_weights(self.runner.model, form, seed)
                else:
                    randomise_weights(self.runner.model, seed, form=form, padded=padded)
                    redraw_statistics(self.runner.statistics, seed)
            if trial.evaluate and isinstance(self.runner.model, torch.nn.Module):
                self.runner.model.eval()
            yield
        finally:
            self.runner.earlier = before
            if special:
                self.runner.model = own if trial.explored else self.runner.build()

    def returned(self, outputs: Sequence[T]) -> Sequence[T]:
        effects = self.runner.effects
        return outputs[: len(outputs) - len(effects.names)] if effects else outputs

    def _fits(self, outputs: list[Tensor]) -> bool:
        alone = [one.expected for one in self.known.values() if one.oracle is one.expected]
        return sum(x.nbytes for each in [*alone, outputs] for x in each) <= self.held_max_bytes

    def kept(self, name: str) -> Known:
        """What is known of a trial; outputs that memory does not hold are computed again."""
        known = self.known[name]
        if known.expected:
            return known
        trial = known.trial
        with self.model_for(trial):
            expected = self.task.outputs(self.task.inputs_of(trial))
        return known._replace(expected=expected, oracle=expected)

    def expected_outputs(self, name: str) -> list[Tensor]:
        return self.kept(name).expected

    @handles(ForgetTrial)
    def forget_trial(self, request: ForgetTrial) -> Done:
        self.known.pop(request.trial, None)
        return Done()

    def _constants(self, known: Known) -> list[Comparison]:
        returned = map(self.returned, (known.oracle, known.expected))
        oracle, first = (list(map(_start, x)) for x in returned)
        answers, own = [list(map(torch.zeros_like, first))], self.returned(self.like)
        if same_shapes(self.like, known.expected):
            answers += [list(map(_start, x)) for x in (own, map(_mean, own))]
        own_errors = self.returned(known.error)
        return [answer_of(list(map(measure, x, oracle, first)), own_errors) for x in answers]

    @handles(LeaveOut)
    def leave_out(self, request: LeaveOut) -> LeftOut:
        """The reference's own answer without one term of each long sum; no error where it has none,
        or cannot take such inputs.
        """
        kind, errors = request.kind, self.errors
        length = errors.lengths[kind]
        if length < (LONG_SUM if kind in (LONE_TERMS, UNIT_FACTORS) else LEAST_LEFT_OUT):
            return LeftOut()
        given = request.model_dump(include={"terms", "around", "size"})
        asked = FewTerms(length=length, **given)
        with suppress(*REFUSALS):
            self._plan_terms(kind, asked.model_copy(update={"fewer": True}))
            less = self.task.outputs(self.task.inputs(request.seed, kind))
            self._plan_terms(kind, asked)
            inputs = self.task.inputs(request.seed, kind)
            whole = self.task.outputs(copied(inputs))
            told = [computable(x) for x in whole if kind == DECISIVE or x.is_floating_point()]
            if not told or not all(bool(torch.isfinite(x).all()) for x in told):
                return LeftOut(length=length)
            largest = max(x.numel() for x in leaves_of(inputs) if isinstance(x, Tensor))
            if asked.size is None and largest < length:
                return LeftOut(length=length)  # its terms are no elements of the inputs
            exact = errors.oracle(inputs, whole)
            own = errors.of(inputs, whole, exact=exact is not None)
            right = exact or whole
            self.cost_of_few_terms[kind] = both(own, list(map(measure, whole, right, whole)))
            error = answer_of(list(map(measure, less, right, whole)), own)
            draws = draws_for(largest, asked, FEW_TERMS_KINDS[kind].in_all)
            return LeftOut(length=length, less=error, draws=draws)
        return LeftOut(length=length)

    def _plan_terms(self, kind: str, asked: FewTerms) -> None:
        plan = self.task.plan
        assert plan
        self.task.plan = plan.model_copy(update={"few_terms": plan.few_terms | {kind: asked}})

    @property
    def like(self) -> list[Tensor]:
        return self.known[DECLARED].expected


def _form(x: Tensor) -> OutputForm:
    return OutputForm(
        shape=list(x.shape),
        strides=list(x.stride()),
        dtype=str(x.dtype),
        device=x.device.type,
        bytes=x.nbytes,
    )


def _start(x: Tensor) -> Tensor:
    if x.numel() > FIRST_ELEMENTS and x.dim():
        x = x[: -(-FIRST_ELEMENTS * len(x) // x.numel())]
    return x.reshape(-1)[:FIRST_ELEMENTS]


def _mean(x: Tensor) -> Tensor:
    if not x.dim() or not x.is_floating_point():
        return x
    return computable(x).mean(0, keepdim=True, dtype=torch.float64).to(x.dtype).expand_as(x)
