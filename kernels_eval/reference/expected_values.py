"""What a task's own model gives: expected values, their own errors, and what they depend on.
`kernels_eval.reference.answers` compares a candidate's outputs with them.
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
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from kernels_eval.config import (
    BYTES_PROBES,
    CPU_CACHE_BYTES,
    ELEMENT_FACTOR,
    ENOUGH_ELEMENTS,
    EXPECTED_HELD_SHARE,
    FEW_OUTPUTS,
    FIRST_ELEMENTS,
    LEAST_LEFT_OUT,
    MOST_TASK_OPERATORS,
    ORACLE_MAX_S,
    REPEATABLE_RTOL,
    SAME_ANSWER_RTOL,
    SAMPLE_ROWS,
    SCATTER_DRAWS,
    SCATTER_UNITS,
    SCATTER_UNITS_HALF,
    SPREAD_ELEMENTS,
    TERMS_IN_ALL,
    UNKNOWN_OWN_ERROR,
)
from kernels_eval.model.correctness import answer_of, merge
from kernels_eval.model.distributions import warm_up
from kernels_eval.model.few_terms import draws_for
from kernels_eval.model.inputs import flatten_outputs
from kernels_eval.model.invariants import note_of
from kernels_eval.model.measurement import (
    all_close,
    computable,
    least_step,
    measure,
    precision_of,
    same_all,
)
from kernels_eval.model.operators import reference_operators
from kernels_eval.model.seeding import seed_generators
from kernels_eval.model.side_effects import buffers_of, side_effects
from kernels_eval.model.weights import (
    is_constant,
    parameters_of,
    randomise_weights,
    redraw_statistics,
    redrawn_of,
    running_statistics,
    squeezed,
    weights_of,
)
from kernels_eval.protocol import (
    DECLARED,
    FEW_TERMS,
    FEWER_TERMS,
    Comparison,
    Done,
    EstimateUsedBytes,
    Expect,
    Expectation,
    FewTerms,
    FindIgnoredInputs,
    ForgetTrial,
    IgnoredInputs,
    LeaveOut,
    LeftOut,
    LoadedTask,
    LoadTask,
    OutputForm,
    Prepare,
    TryOtherWeights,
    UsedBytes,
    WeightsMatter,
    handles,
)
from kernels_eval.reference.equal_elements import ANY_ORDER, ChosenAs
from kernels_eval.reference.factorings import Factoring, Factorings
from kernels_eval.reference.long_sums import FP64_UNITS, LongSums
from kernels_eval.reference.task_model import (
    REFUSALS,
    TaskModel,
    peak_bandwidth,
    require_tensors,
)
from kernels_eval.reference.uses import plan_of, with_choices

T = TypeVar("T")
OWN_FLOATS = ("reference_rms", "reference_max")
NO_ERROR = Comparison(rms=0.0, max=0.0, reference_rms=0.0)
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


class ExpectedValues:
    """The expected values of one task: it is loaded, then each trial is expected."""

    def __init__(self, task: TaskModel) -> None:
        self.task, self.runner = task, task.runner
        self.known: dict[str, Known] = {}
        self.held_max_bytes = math.inf
        self.samples = True
        self.factors: list[int] = []
        """Outputs of which several answers are right."""
        self.longest_sum = 0
        self.cost_of_few_terms: list[Comparison] = []

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
        self.oracle_max_bytes = request.oracle_max_bytes
        seed = self.runner.spec.seed
        inputs = self.task.inputs(seed)
        before, buffers = copy.deepcopy(inputs), buffers_of(self.runner.model)
        leaves, structure = flatten_outputs(self.runner.forward(inputs))
        require_tensors(leaves)
        effects = side_effects(before, inputs, buffers, buffers_of(self.runner.model))
        text = Path(request.path).read_text(errors="replace")
        self.task.plan = plan_of(self.task, self.outputs, seed, text)
        operators = self._operators_called(seed)

        self.runner.model = self.runner.build()
        if effects.names:
            self.runner.effects = effects
            leaves, structure = flatten_outputs(self.runner.forward(self.task.inputs(seed)))
        parameters = parameters_of(self.runner.model)
        ambiguous = self._ambiguous(seed) if any(map(FACTORS.search, operators)) else ""
        self.runner.synchronise()
        dtype = next((leaf.dtype for leaf in leaves if least_step(leaf)), torch.float32)
        gpu = torch.cuda.get_device_properties(0) if self.runner.on_gpu else None
        self.held_max_bytes = gpu.total_memory // EXPECTED_HELD_SHARE if gpu else math.inf
        input_bytes = sum(x.nbytes for x in tree_leaves(inputs) if isinstance(x, Tensor))
        cache_bytes = gpu.L2_cache_size if gpu else CPU_CACHE_BYTES
        fits_cache = 2 * (input_bytes + sum(x.nbytes for x in leaves)) < cache_bytes
        return LoadedTask(
            plan=self.task.plan,
            structure=structure,
            operators=tuple(operators[:MOST_TASK_OPERATORS]),
            parameters=list(map(squeezed, parameters.values())),
            parameter_names=list(parameters),
            statistics=list(map(squeezed, running_statistics(self.runner.model))),
            constant_weights=any(map(is_constant, redrawn_of(self.runner.model))),
            constant_parameters=[i for i, x in enumerate(parameters.values()) if is_constant(x)],
            dtype=str(dtype).removeprefix("torch."),
            device_name=gpu.name if gpu else "cpu",
            precision=self.runner.spec.precision,
            gradients=self.runner.gradients,
            effects=self.runner.effects,
            input_bytes=input_bytes,
            packed_bytes=self.task.packed_bytes(inputs),
            argument_bytes=self.task.packed_bytes(self.task.arguments(self.runner.spec)),
            weight_bytes=self.task.packed_bytes(weights_of(self.runner.model)),
            peak_bytes_per_s=0.0 if fits_cache else peak_bandwidth(gpu),
            cache_bytes=cache_bytes,
            ambiguous=ambiguous,
            memory_share=torch.cuda.max_memory_allocated() / gpu.total_memory if gpu else 0.0,
        )

    def _operators_called(self, seed: int) -> list[str]:
        inputs = self.task.inputs(seed)
        operators = reference_operators(lambda: self.runner.forward(inputs))
        chooses = any(name.rpartition(".")[2] in ANY_ORDER for name in operators)
        if self.task.plan and chooses:
            self.task.plan = with_choices(self.task.plan, self.task, self.outputs, seed)
        return operators

    def _ambiguous(self, seed: int) -> str:
        """Finds the outputs that depend on the signs or order of factors; says where these are not
        factors themselves."""
        with Factorings() as own:
            one = self.outputs(self.task.inputs(seed))
        with Factorings(otherwise=True):
            other = self.outputs(self.task.inputs(seed))
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
            outputs = self.outputs(self.task.inputs(trial.seed, trial.distribution, trial.shape))
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
            reference = self.outputs(_copied(inputs))
            # a reference that draws random numbers must not draw the same ones again
            seed_generators(seed + 1)
            again = self.outputs(_copied(inputs))
            bit_identical = same_all(reference, again)
            deterministic = bit_identical or all_close(reference, again, REPEATABLE_RTOL)
            exact = self.oracle_outputs(inputs, reference)
            own_error = self.own_error_of(
                inputs, reference, exact=exact is not None, hard=request.hard
            )
        self.runner.synchronise()
        del again, inputs
        few = list(map(_few_of, reference))
        known = Known(reference, exact or reference, own_error, request, few)
        equals = [
            name
            for name, other in self.known.items()
            if same_all(self._returned(known.few), self._returned(other.few))
            and same_all(self._returned(reference), self._returned(self.expected_outputs(name)))
        ]
        held = exact or name == DECLARED or self._fits(reference)
        self.known[name] = known if held else known._replace(expected=[], oracle=[])
        floats = [torch.isfinite(computable(x)) for x in reference if x.is_floating_point()]
        constants = self._constants(known)
        if name == DECLARED:
            first = map(_start, known.expected), map(_start, known.oracle)
            self.own_errors = both(own_error, list(map(_own_error, *first)))
        return Expectation(
            finite_share=min((_share(x) for x in floats if x.numel()), default=1.0),
            deterministic=deterministic,
            bit_identical=bit_identical,
            oracle="float64" if exact else "float32",
            equals=equals,
            constants=constants,
            outputs=list(map(_form, reference)),
        )

    @contextmanager
    def model_for(self, trial: Expect) -> Iterator[None]:
        seeds = trial.weights_seed, trial.construct_seed
        special = trial.evaluate or seeds != (None, None)
        try:
            if special:
                self.runner.model = self.runner.build(trial.construct_seed)
            if trial.weights_seed is not None:
                randomise_weights(self.runner.model, trial.weights_seed)
                redraw_statistics(running_statistics(self.runner.model), trial.weights_seed)
            if trial.evaluate and isinstance(self.runner.model, torch.nn.Module):
                self.runner.model.eval()
            yield
        finally:
            if special:
                self.runner.model = self.runner.build()

    def outputs(self, inputs: list[Any]) -> list[Tensor]:
        return flatten_outputs(self.runner.forward(inputs))[0]

    def _returned(self, outputs: Sequence[T]) -> Sequence[T]:
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
            expected = self.outputs(self.task.inputs(trial.seed, trial.distribution, trial.shape))
        return known._replace(expected=expected, oracle=expected)

    def expected_outputs(self, name: str) -> list[Tensor]:
        return self.kept(name).expected

    @handles(ForgetTrial)
    def forget_trial(self, request: ForgetTrial) -> Done:
        self.known.pop(request.trial, None)
        return Done()

    def _constants(self, known: Known) -> list[Comparison]:
        returned = map(self._returned, (known.oracle, known.expected))
        oracle, first = (list(map(_start, x)) for x in returned)
        answers, own = [list(map(torch.zeros_like, first))], self._returned(self.like)
        if [x.shape for x in self.like] == [x.shape for x in known.expected]:
            answers += [list(map(_start, x)) for x in (own, map(_mean, own))]
        own_errors = self._returned(known.error)
        return [answer_of(list(map(measure, x, oracle, first)), own_errors) for x in answers]

    def own_error_of(
        self, inputs: list[Any], reference: list[Tensor], *, exact: bool, hard: bool = False
    ) -> list[Comparison]:
        """What rounding costs each output on these inputs: plain addition's error in long sums, the
        scatter of few outputs and, unless an oracle is exact, the reference's error on a few rows,
        or (`hard`, as it must be known there) the scatter of all.
        """
        error = NO_ERROR
        with suppress(*REFUSALS), LongSums() as sums:
            self.outputs(_copied(inputs))
            error = NO_ERROR.model_copy(update={"sequential_rms": sums.error})
            self.longest_sum = max(self.longest_sum, sums.length)
        found = [error] * len(reference)
        if 0 < sum(map(_telling, reference)) < FEW_OUTPUTS:
            found = both(found, self.scatter(inputs, reference))
        if exact:
            return found
        for rows in self._narrowed(inputs, reference) if self.samples else ():
            with suppress(*REFUSALS):
                wanted, started = [x[:SAMPLE_ROWS] for x in reference], self.task.work_stamp()
                if not all_close(self.outputs(_copied(rows)), wanted, REPEATABLE_RTOL):
                    continue
                right = self._in_float64(rows, wanted)
                if right is None:
                    continue
                own = list(map(_own_error, wanted, right))
                self.samples = self.task.work_s(started) < ORACLE_MAX_S
                return both(found, own)
        units = [FP64_UNITS if precision_of(x.dtype) == "fp64" else 1 for x in reference]
        own_rms = [UNKNOWN_OWN_ERROR * unit for unit in units]
        if hard and sum(x.numel() for x in reference) > ENOUGH_ELEMENTS:
            own_rms = [1.0] * len(reference)
        elif hard:
            scatter = self.scatter(inputs, reference)
            own_rms = [
                max(own, each.scatter_rms) for own, each in zip(own_rms, scatter, strict=True)
            ]
        return [
            each.model_copy(update={"reference_rms": rms})
            for each, rms in zip(found, own_rms, strict=True)
        ]

    def scatter(
        self, inputs: list[Any], reference: list[Tensor], most: float = 1.0
    ) -> list[Comparison]:
        """The spread of each output where operators round otherwise: the error of a single draw is
        chance."""
        found, started = [NO_ERROR] * len(reference), self.task.work_stamp()
        for move in range(SCATTER_DRAWS):
            with suppress(*REFUSALS):
                with ChosenAs():
                    moved = self.moved_outputs(inputs, move, SCATTER_UNITS, SCATTER_UNITS_HALF)
                again = map(measure, reference, reference, moved)
                found = both(found, [x if x.precision else NO_ERROR for x in again])
            if self.task.work_s(started) > ORACLE_MAX_S:
                break
        scatter = [
            {
                "scatter_rms": min(each.reference_rms, most),
                "scatter_max": min(each.reference_max, ELEMENT_FACTOR * most),
            }
            for each in found
        ]
        return [NO_ERROR.model_copy(update=each) for each in scatter]

    def _narrowed(self, inputs: list[Any], reference: list[Tensor]) -> Iterator[list[Any]]:
        sizes = {x.shape[0] if x.dim() else 1 for x in reference}
        fits = [isinstance(x, Tensor) and x.dim() > 0 and {x.shape[0]} == sizes for x in inputs]
        for chosen in (fits, [fit and index == fits.index(True) for index, fit in enumerate(fits)]):
            if any(chosen) and max(sizes) > 2 * SAMPLE_ROWS:
                cut = zip(inputs, chosen, strict=True)
                yield [x[:SAMPLE_ROWS] if narrow else x for x, narrow in cut]

    def oracle_outputs(self, inputs: list[Any], reference: list[Tensor]) -> list[Tensor] | None:
        """The outputs in float64; None where impossible, or too much memory or work."""
        leaves = [*reference, *tree_leaves(inputs)]
        size = sum(x.numel() * 8 for x in leaves if isinstance(x, Tensor))
        if 4 * size > self.oracle_max_bytes:
            return None
        started = self.task.work_stamp()
        outputs = self._in_float64(inputs, reference)
        if self.task.work_s(started) > ORACLE_MAX_S:
            self.oracle_max_bytes = 0  # the remaining trials take the fp32 reference
        return outputs

    def _in_float64(self, inputs: list[Any], reference: list[Tensor]) -> list[Tensor] | None:
        """The model's float64 outputs, or None, also where the task casts itself."""
        model = self.runner.model
        try:
            if isinstance(model, torch.nn.Module):
                self.runner.model = copy.deepcopy(model)._apply(_in_double)
            outputs = self.outputs(_copied(inputs, double=True))
            if [x.shape for x in outputs] != [x.shape for x in reference]:
                return None
            return list(map(_representable, outputs, reference))
        except REFUSALS:
            return None
        finally:
            self.runner.model = model
            self.runner.synchronise()

    # -- what the task depends on ------------------------------------------------------------------

    @handles(FindIgnoredInputs)
    def find_ignored_inputs(self, request: FindIgnoredInputs) -> IgnoredInputs:
        seed = request.seed
        if sum(x.numel() for x in self.like) > ENOUGH_ELEMENTS:
            return IgnoredInputs(ignored=[])  # another copy of everything for a flag is too much
        base = self.outputs(self.task.inputs(seed))
        ignored = []
        for index in self._varying():
            leaves, form = tree_flatten(self.task.inputs(seed))
            leaves[index] = tree_leaves(self.task.inputs(seed + 1, "normal"))[index]
            if not self._differs(base, tree_unflatten(leaves, form)):
                ignored.append(index)
        return IgnoredInputs(ignored=ignored)

    def _varying(self) -> list[int]:
        assert self.task.plan
        return [index for index, note in enumerate(self.task.plan.notes) if note.vary]

    def _differs(self, base: list[Tensor], inputs: list[Any]) -> bool:
        """Whether these inputs change the output; a refusal depends on them."""
        try:
            return not same_all(base, self.outputs(inputs))
        except REFUSALS:
            return True

    @handles(EstimateUsedBytes)
    def estimate_used_bytes(self, request: EstimateUsedBytes) -> UsedBytes:
        """Estimated by changing one of 8 spread pieces of each argument at a time."""
        seed = request.seed
        base = self.outputs(self.task.inputs(seed))
        used = 0.0
        for index in self._varying():
            hits = 0
            for probe in range(BYTES_PROBES):
                leaves, form = tree_flatten(self.task.inputs(seed))
                flat = leaves[index].reshape(-1)
                start = flat.numel() * probe // BYTES_PROBES
                piece = flat[start : start + max(1, flat.numel() // 64)]
                piece.copy_(computable(piece) + 3.0)
                leaves[index] = flat.reshape(leaves[index].shape)
                hits += self._differs(base, tree_unflatten(leaves, form))
            used += leaves[index].nbytes * hits / BYTES_PROBES
        return UsedBytes(bytes=used)

    @handles(TryOtherWeights)
    def try_other_weights(self, request: TryOtherWeights) -> WeightsMatter:
        seed, weights_seed, only = request.seed, request.weights_seed, request.only
        base = self.outputs(self.task.inputs(seed))
        try:
            self.runner.model = self.runner.build()
            randomise_weights(self.runner.model, weights_seed, only=only)
            redraw_statistics([] if only else running_statistics(self.runner.model), weights_seed)
            outputs = self.outputs(self.task.inputs(seed))
        finally:
            self.runner.model = self.runner.build()
        return WeightsMatter(matter=not all_close(outputs, base, SAME_ANSWER_RTOL))

    @handles(LeaveOut)
    def leave_out(self, request: LeaveOut) -> LeftOut:
        """The reference's own answer without one term of each long sum; no error where it has none,
        or cannot take such inputs.
        """
        assert self.task.plan
        if self.longest_sum < LEAST_LEFT_OUT:
            return LeftOut()
        asked = FewTerms(
            length=self.longest_sum, terms=request.terms, background=request.background
        )
        self.task.plan = self.task.plan.model_copy(update={"few_terms": asked})
        with suppress(*REFUSALS):
            inputs = self.task.inputs(request.seed, FEW_TERMS)
            whole = self.outputs(_copied(inputs))
            floats = [computable(x) for x in whole if x.is_floating_point()]
            if not floats or not all(bool(torch.isfinite(x).all()) for x in floats):
                return LeftOut(length=asked.length)
            exact = self.oracle_outputs(inputs, whole)
            own = self.own_error_of(inputs, whole, exact=exact is not None)
            right = exact or whole
            self.cost_of_few_terms = both(own, list(map(measure, whole, right, whole)))
            less = self.outputs(self.task.inputs(request.seed, FEWER_TERMS))
            error = answer_of(list(map(measure, less, right, whole)), own)
            largest = max(x.numel() for x in tree_leaves(inputs) if isinstance(x, Tensor))
            draws = draws_for(largest, asked, TERMS_IN_ALL)
            return LeftOut(length=asked.length, less=error, draws=draws)
        return LeftOut(length=asked.length)

    @property
    def like(self) -> list[Tensor]:
        return self.known[DECLARED].expected

    def moved_outputs(
        self, inputs: list[Any], seed: int, units: float, units_half: float | None = None
    ) -> list[Tensor]:
        """Outputs of other code of the same formula, which rounds otherwise by some units."""
        generator = torch.Generator(self.runner.device).manual_seed(seed)
        copied = _copied(inputs)  # not moved themselves
        with LongSums(generator, units, units_half) if units else nullcontext():
            return self.outputs(copied)


def both(one: Sequence[Comparison], other: Sequence[Comparison]) -> list[Comparison]:
    """The worst of two errors of each output."""
    return [merge(each) for each in zip(one, other, strict=True)]


def _own_error(reference: Tensor, oracle: Tensor) -> Comparison:
    found = measure(reference, oracle, reference)
    return NO_ERROR.model_copy(update={name: getattr(found, name) for name in OWN_FLOATS})


def _form(x: Tensor) -> OutputForm:
    return OutputForm(shape=list(x.shape), dtype=str(x.dtype), device=x.device.type, bytes=x.nbytes)


def _copied(inputs: list[Any], *, double: bool = False) -> list[Any]:
    def copy_of(x: Any) -> Any:
        if not isinstance(x, Tensor):
            return x
        return _in_double(x.clone()) if double else x.clone()

    copies: list[Any] = tree_map(copy_of, inputs)
    return copies


def _in_double(x: Tensor) -> Tensor:
    if x.is_complex():
        return x.to(torch.complex128)
    return x.double() if x.is_floating_point() else x


def _representable(oracle: Tensor, reference: Tensor) -> Tensor:
    """The oracle, but the reference where its type cannot hold the value."""
    if not reference.is_floating_point() and not reference.is_complex():
        return oracle
    held = torch.isfinite(computable(oracle.to(reference.dtype)))
    return oracle if held.all() else torch.where(held, oracle, reference.to(oracle.dtype))


def _start(x: Tensor) -> Tensor:
    if x.numel() > FIRST_ELEMENTS and x.dim():
        x = x[: -(-FIRST_ELEMENTS * len(x) // x.numel())]
    return x.reshape(-1)[:FIRST_ELEMENTS]


def _few_of(x: Tensor) -> Tensor:
    return x.reshape(-1)[:: x.numel() // SPREAD_ELEMENTS | 1].clone()


def _telling(x: Tensor) -> int:
    """How many elements tell what rounding costs: of a small output, those that are not zero."""
    if not x.is_floating_point():
        return 0
    return x.numel() if x.numel() > SPREAD_ELEMENTS else int(torch.count_nonzero(computable(x)))


def _share(mask: Tensor) -> float:
    return int(mask.sum()) / mask.numel()


def _mean(x: Tensor) -> Tensor:
    if not x.dim() or not x.is_floating_point():
        return x
    return computable(x).mean(0, keepdim=True, dtype=torch.float64).to(x.dtype).expand_as(x)
