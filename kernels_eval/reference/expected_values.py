"""The trusted role: runs the task's own model, holds expected values, compares what a candidate
returned.

Lives in a process of its own, which no candidate code ever enters.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor

from kernels_eval.checks.correctness import merge
from kernels_eval.checks.inputs import (
    flatten_outputs,
    parameters_of,
    plan_inputs,
    randomise_weights,
    redraw_statistics,
    running_statistics,
    squeezed,
)
from kernels_eval.checks.measurement import (
    all_close,
    computable,
    least_step,
    measure,
    row_differences,
    same,
    same_all,
    unlike,
)
from kernels_eval.checks.operators import reference_operators
from kernels_eval.checks.trials import (
    DECLARED,
    EARLIER,
    LATER,
    Comparison,
    Expectation,
    LoadedTask,
    OutputForm,
    Trial,
    UnseenComparison,
)
from kernels_eval.child.shared_memory import Memory, calls, padded, read, unpack
from kernels_eval.isolation.channel import Channel, Message
from kernels_eval.reference.equal_elements import ANY_ORDER, ChosenAs
from kernels_eval.reference.long_sums import LongSums
from kernels_eval.reference.task_runner import (
    TaskRunner,
    device_memory,
    peak_bandwidth,
    require_tensors,
)

ORACLE_MAX_S = 5.0
"""A float64 oracle that is more work (`work_s`) is computed once and then done without."""
DIGEST_BYTES = 1 << 20
"""Enough to tell whether two answers are one: hashing is the processor's work."""
SAMPLE_ROWS = 4
DOUBTFUL = 5e-6
"""Relative RMS error from which an unseen answer is compared with a float64 oracle, too: sums near
zero may be off by so much in either."""
PROBES = 8
AT_ONCE = 8
ENOUGH_ELEMENTS = 1 << 26
HELD_SHARE = 8
"""Expected values without an oracle hold one part in so many of a GPU's memory: the candidate needs
the rest, several times its inputs and outputs. More are computed again when they are asked for."""
MOST_OPERATORS = 256
OWN_FLOATS = ("reference_rms", "reference_max")
OWN = (*OWN_FLOATS, "sequential_rms")
"""Errors of the reference itself, which gates allow for."""
FEW, FEW_SHARE = 4, 1e-3
"""Elements, and the share of all, that may be off because they hang on a step."""
MOVES, STEP_UNITS = 36, (4, 4, 1)
"""How often operators round otherwise, by how many units in turn, in a look for what is beside a
step: several steps that one value takes seldom agree where it is moved far."""
MOST_OFF = 0.25
"""Where more of the numbers of an output are off, it is not asked whether they hang on steps."""
UNMOVED = 2
"""Before that, runs that take the first and the last of equal elements."""
DRAWS, DRAW_UNITS = 4, 2
"""The same in a look for how far apart outputs are; gates allow for a multiple of that."""
FEW_OUTPUTS = 64
"""Fewer floating elements tell too little of what rounding costs."""
MOST_SCATTER = 0.03
"""Of their errors, what is allowed for: no gate is then as wide as the answer, and hard inputs on
which a reference errs by more than 0.02 are left out."""
RECORDED = ("kernelbench_1e4", "kernelbench_1e2")
"""What is said of outputs exactly as they are."""
REFUSALS = (RuntimeError, TypeError, ValueError, ArithmeticError, LookupError, AssertionError)


class Known(NamedTuple):
    """The expected outputs of a trial, those of the oracle (both empty where memory does not hold
    them), what errors of its own the reference has, and what inputs and weights all of it is
    for."""

    expected: list[Tensor]
    oracle: list[Tensor]
    error: Comparison
    trial: Trial


class Reference(TaskRunner):
    """Serves one task: `do_load`, then `do_expect` for each trial, then `do_compare` for each
    answer of a candidate."""

    def __init__(self, channel: Channel) -> None:
        super().__init__(channel)
        self.known: dict[str, Known] = {}
        self.held_max_bytes = math.inf
        self.samples = True
        self.digests: dict[str, str] = {}
        self.outputs_of: dict[str, Memory] = {}

    def warm_up(self) -> None:
        super().warm_up()
        x = torch.rand(64, 64, device=self.device)
        measure(x, x.double(), x)
        for matrix in (x, x.double()):
            matrix @ matrix
        torch.conv2d(x[None, None], x[None, None, :3, :3])

    def do_share(self, whose: str, on_device: bool, size: int) -> Message:
        """Have memory for outputs: what comes with this message, or device memory, whose descriptor
        the answer carries where the driver can share it."""
        self.outputs_of.pop(whose, None)  # its memory first
        if not on_device:
            self.outputs_of[whose] = self.memory(on_device=False)
            return {"shared": True}
        if (memory := device_memory(size)) is None:
            return {"shared": False}
        self.outputs_of[whose] = memory
        return {"shared": True, "_descriptors": [memory.descriptor]}

    def do_load(self, path: str, spec: Message, *, oracle_max_bytes: int = 0) -> LoadedTask:
        super().do_load(path, spec)
        self.oracle_max_bytes, seed = oracle_max_bytes, self.spec.seed
        inputs = self.inputs(seed)
        self.plan = plan_inputs(inputs[: self.gradients.arguments if self.gradients else None])
        before = copy.deepcopy(inputs)
        leaves, structure = flatten_outputs(self.forward(inputs))
        mutates = not all(map(same, before, inputs))
        require_tensors(leaves)
        again = self.inputs(seed)
        operators = reference_operators(lambda: self.forward(again))
        chooses = any(name.rpartition(".")[2] in ANY_ORDER for name in operators)
        if chooses and self._choice_matters(seed):
            self.plan = self.plan.model_copy(update={"distinct": True})
        self.model = self.build()
        parameters = parameters_of(self.model)
        self.synchronise()
        dtype = next((leaf.dtype for leaf in leaves if leaf.is_floating_point()), torch.float32)
        gpu = torch.cuda.get_device_properties(0) if self.on_gpu else None
        self.held_max_bytes = gpu.total_memory // HELD_SHARE if gpu else math.inf
        return LoadedTask(
            plan=self.plan,
            structure=structure,
            mutates=mutates,
            operators=tuple(operators[:MOST_OPERATORS]),
            parameters=list(map(squeezed, parameters.values())),
            parameter_names=list(parameters),
            statistics=list(map(squeezed, running_statistics(self.model))),
            dtype=str(dtype).removeprefix("torch."),
            device_name=gpu.name if gpu else "cpu",
            precision=self.spec.precision,
            gradients=self.gradients,
            input_bytes=sum(x.nbytes for x in inputs if isinstance(x, Tensor)),
            packed_bytes=self.packed_bytes(inputs),
            argument_bytes=self.packed_bytes(self.arguments(self.spec)),
            peak_bytes_per_s=peak_bandwidth(gpu),
            cache_bytes=gpu.L2_cache_size if gpu else 64 << 20,
        )

    def _choice_matters(self, seed: int) -> bool:
        """Do the outputs depend on which of equal elements the model's operators choose, as far as
        can be told? They do not where each is asked for a stable sort. The inputs are cut to halves
        here, so that many are equal and none is far from what it was: it may be an index."""
        found = []
        for last in (False, True):
            inputs = self.inputs(seed)
            with suppress(*REFUSALS), torch.no_grad():
                for x in inputs:
                    if isinstance(x, Tensor) and x.is_floating_point():
                        x.mul_(2).floor_().div_(2)
            with suppress(*REFUSALS), ChosenAs(last=last):
                found.append(self.outputs(inputs))
        return len(found) < 2 or not all_close(found[0], found[1], 1e-3)

    # -- expected values ---------------------------------------------------------------------------

    def do_expect(
        self,
        name: str,
        seed: int,
        distribution: str,
        weights_seed: int | None,
        shape: str,
        evaluate: bool,
        construct_seed: int | None,
    ) -> Expectation:
        """Compute and keep the expected outputs of one trial: the fp32 reference's, and a float64
        oracle's where it fits."""
        trial = Trial(
            name,
            seed,
            distribution,
            weights_seed=weights_seed,
            shape=shape,
            evaluate=evaluate,
            construct_seed=construct_seed,
        )
        with self._model_for(trial):
            reference = self.outputs(self.inputs(seed, distribution, shape))
            inputs = self.inputs(seed, distribution, shape)
            # a reference that draws random numbers must not draw the same ones again
            torch.manual_seed(seed + 1)
            again = self.outputs(inputs)
            bit_identical = same_all(reference, again)
            deterministic = bit_identical or all_close(reference, again, 1e-3)
            inputs = self.inputs(seed, distribution, shape)
            exact = self._oracle(inputs, reference)
            own_error = self._own_error(inputs, reference, sampled=exact is None and self.samples)
        self.synchronise()
        del again, inputs
        equals = [other for other in self.known if same_all(reference, self._expected(other))]
        known = Known(reference, exact or reference, own_error, trial)
        held = exact or name == DECLARED or self._fits(reference)
        self.known[name] = known if held else known._replace(expected=[], oracle=[])
        self.give_back_memory()
        floats = [torch.isfinite(computable(x)) for x in reference if x.is_floating_point()]
        constants = self._constants(known)
        if name == DECLARED:
            self.own_error = constants[0]
        return Expectation(
            finite=all(bool(x.all()) for x in floats),
            some_finite=all(bool(x.any()) for x in floats if x.numel()),
            deterministic=deterministic,
            bit_identical=bit_identical,
            oracle="float64" if exact else "float32",
            equals=equals,
            constants=constants,
            outputs=list(map(_form, reference)),
        )

    @contextmanager
    def _model_for(self, trial: Trial) -> Iterator[None]:
        """Meanwhile, the model has the weights and the mode of this trial."""
        seeds = trial.weights_seed, trial.construct_seed
        special = trial.evaluate or seeds != (None, None)
        try:
            if special:
                self.model = self.build(trial.construct_seed)
            if trial.weights_seed is not None:
                randomise_weights(self.model, trial.weights_seed)
                redraw_statistics(running_statistics(self.model), trial.weights_seed)
            if trial.evaluate and isinstance(self.model, torch.nn.Module):
                self.model.eval()
            yield
        finally:
            if special:
                self.model = self.build()

    def outputs(self, inputs: list[Any]) -> list[Tensor]:
        return flatten_outputs(self.forward(inputs))[0]

    def _fits(self, outputs: list[Tensor]) -> bool:
        """Is there room for these, too, among what has no oracle?"""
        alone = [one.expected for one in self.known.values() if one.oracle is one.expected]
        return sum(x.nbytes for each in [*alone, outputs] for x in each) <= self.held_max_bytes

    def _kept(self, name: str) -> Known:
        """What is known of a trial; outputs that memory does not hold are computed again."""
        known = self.known[name]
        if known.expected:
            return known
        trial = known.trial
        with self._model_for(trial):
            expected = self.outputs(self.inputs(trial.seed, trial.distribution, trial.shape))
        return known._replace(expected=expected, oracle=expected)

    def _expected(self, name: str) -> list[Tensor]:
        return self._kept(name).expected

    def do_forget(self, trial: str) -> None:
        self.known.pop(trial, None)

    def _constants(self, known: Known) -> list[Comparison]:
        """How answers that ignore the inputs would compare (see Expectation), seen on the first
        elements of large ones."""
        answers = [list(map(torch.zeros_like, known.expected))]
        own = self.like
        if [x.shape for x in own] == [x.shape for x in known.expected]:
            answers += [own, list(map(_mean, own))]
        oracle, first = (list(map(_start, x)) for x in (known.oracle, known.expected))
        return [
            merge([known.error, *map(measure, map(_start, answer), oracle, first)])
            for answer in answers
        ]

    def _own_error(
        self, inputs: list[Any], reference: list[Tensor], *, sampled: bool
    ) -> Comparison:
        """What fp32 costs on these inputs: the error of plain addition in long sums, and with
        `sampled` (where there is no oracle) the reference's own, from a few rows of its batch."""
        found = Comparison(rms=0.0, max=0.0, reference_rms=0.0)
        with suppress(*REFUSALS), LongSums() as sums:
            self.outputs(_copied(inputs))
            found = found.model_copy(update={"sequential_rms": sums.error})
        if 0 < sum(x.numel() for x in reference if x.is_floating_point()) < FEW_OUTPUTS:
            own = self._scatter(inputs, reference)
            found = found.model_copy(update={name: getattr(own, name) for name in OWN_FLOATS})
        for rows in self._narrowed(inputs, reference) if sampled else ():
            with suppress(*REFUSALS):
                wanted, begun = [x[:SAMPLE_ROWS] for x in reference], self.work_stamp()
                if not all_close(self.outputs(_copied(rows)), wanted, 1e-3):
                    continue
                exact = self._in_float64(rows, wanted) or wanted
                own = merge(list(map(measure, wanted, exact, wanted)))
                self.samples = self.work_s(begun) < ORACLE_MAX_S
                own = merge([own, found])
                return found.model_copy(update={name: getattr(own, name) for name in OWN_FLOATS})
        return found

    def _scatter(self, inputs: list[Any], reference: list[Tensor]) -> Comparison:
        """How far apart the outputs are of code that rounds otherwise: of a few that cancel, the
        error of one draw is chance."""
        floats = [index for index, x in enumerate(reference) if x.is_floating_point()]
        found, begun = [Comparison(rms=0.0, max=0.0, reference_rms=0.0)], self.work_stamp()
        for move in range(DRAWS):
            with suppress(*REFUSALS):
                with ChosenAs():
                    moved = self._moved_outputs(inputs, move, DRAW_UNITS)
                found += [measure(reference[i], reference[i], moved[i]) for i in floats]
            if self.work_s(begun) > ORACLE_MAX_S:
                break
        scatter = merge(found)
        most = {name: min(getattr(scatter, name), MOST_SCATTER) for name in OWN_FLOATS}
        return scatter.model_copy(update=most)

    def _narrowed(self, inputs: list[Any], reference: list[Tensor]) -> Iterator[list[Any]]:
        """The inputs cut to their first rows, where that may be the same as the first rows of the
        outputs: of all arguments with the outputs' first dimension, and of the first alone."""
        sizes = {x.shape[0] if x.dim() else 1 for x in reference}
        fits = [isinstance(x, Tensor) and x.dim() > 0 and {x.shape[0]} == sizes for x in inputs]
        for chosen in (fits, [fit and index == fits.index(True) for index, fit in enumerate(fits)]):
            if any(chosen) and max(sizes) > 2 * SAMPLE_ROWS:
                cut = zip(inputs, chosen, strict=True)
                yield [x[:SAMPLE_ROWS] if narrow else x for x, narrow in cut]

    def _oracle(self, inputs: list[Any], reference: list[Tensor]) -> list[Tensor] | None:
        """The outputs in float64. None where they take too much memory or work, or `_in_float64`
        has none."""
        size = sum(x.numel() * 8 for x in [*reference, *inputs] if isinstance(x, Tensor))
        if 4 * size > self.oracle_max_bytes:
            return None
        begun = self.work_stamp()
        outputs = self._in_float64(inputs, reference)
        if self.work_s(begun) > ORACLE_MAX_S:
            self.oracle_max_bytes = 0  # the remaining trials take the fp32 reference
        return outputs

    def _in_float64(self, inputs: list[Any], reference: list[Tensor]) -> list[Tensor] | None:
        """The model's outputs in float64. None where an operator has no such form, or where the
        task casts by itself."""
        model = self.model
        try:
            if isinstance(model, torch.nn.Module):
                self.model = copy.deepcopy(model).double()
            outputs = self.outputs(_copied(inputs, torch.float64))
            if [x.shape for x in outputs] != [x.shape for x in reference]:
                return None
            return list(map(_representable, outputs, reference))
        except REFUSALS:
            return None
        finally:
            self.model = model
            self.synchronise()

    # -- what the task depends on ------------------------------------------------------------------

    def do_ignored_inputs(self, seed: int) -> Message:
        """Positions of arguments that may vary and do not change the output."""
        if sum(x.numel() for x in self.like) > ENOUGH_ELEMENTS:
            return {"ignored": []}  # another copy of everything for a flag is too much
        base = self.outputs(self.inputs(seed))
        ignored = []
        for index in self._varying():
            inputs = self.inputs(seed)
            inputs[index] = self.inputs(seed + 1, "normal")[index]
            if not self._differs(base, inputs):
                ignored.append(index)
        return {"ignored": ignored}

    def _varying(self) -> list[int]:
        assert self.plan
        return [index for index, note in enumerate(self.plan.notes) if note.vary]

    def _differs(self, base: list[Tensor], inputs: list[Any]) -> bool:
        """Is the output of these inputs another one? A task that refuses them depends on them: not
        every matrix has a Cholesky factor."""
        try:
            return not same_all(base, self.outputs(inputs))
        except REFUSALS:
            return True

    def do_used_bytes(self, seed: int) -> Message:
        """Bytes of the arguments that the output depends on, estimated by changing one of 8 spread
        pieces of each at a time."""
        base = self.outputs(self.inputs(seed))
        used = 0.0
        for index in self._varying():
            hits = 0
            for probe in range(PROBES):
                inputs = self.inputs(seed)
                flat = inputs[index].reshape(-1)
                start = flat.numel() * probe // PROBES
                piece = flat[start : start + max(1, flat.numel() // 64)]
                piece.copy_(computable(piece) + 3.0)
                inputs[index] = flat.reshape(inputs[index].shape)
                hits += self._differs(base, inputs)
            used += inputs[index].nbytes * hits / PROBES
        return {"bytes": used}

    def do_weights_matter(self, seed: int, weights_seed: int, only: list[int]) -> Message:
        """Does the output change when these parameters (by position; none: the running statistics)
        get other values?"""
        base = self.outputs(self.inputs(seed))
        try:
            self.model = self.build()
            randomise_weights(self.model, weights_seed, only=only)
            redraw_statistics([] if only else running_statistics(self.model), weights_seed)
            outputs = self.outputs(self.inputs(seed))
        finally:
            self.model = self.build()
        return {"matter": not all_close(outputs, base, 1e-4)}

    # -- comparing ---------------------------------------------------------------------------------

    def do_draw(self, *arguments: Any, **asked: Any) -> Message:
        answer = super().do_draw(*arguments, **asked)
        if "own" not in self.outputs_of:  # else it is needed at once, while time is taken
            self.give_back_memory()
        return answer

    def do_new_candidate(self) -> None:
        self.digests = {}

    def do_end_timing(self) -> None:
        """Give back the memory that only timing needs."""
        self.timed_inputs, self.drawn = [], None
        for whose in ("own", "unseen"):
            self.outputs_of.pop(whose, None)
        self.give_back_memory()

    def do_compare(self, trial: str) -> Comparison:
        """Measure the bytes that the candidate has written against this trial, and against every
        earlier one."""
        known = self._kept(trial)
        actual = read(self.outputs_of["candidate"], known.expected)
        digest = _digest(actual)
        found = self._compared(actual, known)
        del known
        equals_trial = [
            name
            for name in self.known
            if found.rms > 1e-4
            and name != trial
            and name in self.digests  # one that this candidate has been asked
            and all_close(actual, self._expected(name), 1e-4)
        ]
        equals_answer = [
            name
            for name, other in self.digests.items()
            if other == digest and name != trial and not self._alike(name, trial)
        ]
        self.digests[trial] = digest
        del actual
        self.give_back_memory()
        return found.model_copy(
            update={"equals_trial": equals_trial, "equals_answer": equals_answer}
        )

    def _alike(self, one: str, other: str) -> bool:
        """Is the right answer to both the same? It is where a task's inputs are written out, and
        not drawn."""
        both = one in self.known and other in self.known
        return both and same_all(self._expected(one), self._expected(other))

    def do_measure(self, trial: str) -> Comparison:
        """Measure the bytes in the memory that comes with this message against this trial: those of
        the compiled reference, of which nothing is remembered."""
        known = self._kept(trial)
        found = self._compared(read(self.memory(on_device=False), known.expected), known)
        del known
        self.give_back_memory()
        return found

    def do_compare_unseen(
        self, positions: list[int], seeds: list[int], distributions: list[str]
    ) -> UnseenComparison:
        """Measure the candidate's outputs of `do_run_unseen` against this process's own for the
        same inputs, whose seeds and distributions come along: those at these positions, and those
        that are farthest off.

        `equals_trial` says whether a wrong one is the answer of a later or an earlier call,
        `mutates_inputs` whether the candidate has changed its inputs.
        """
        chosen = sorted({*positions, *self._farthest(len(seeds), len(positions))})
        # under a drawn distribution a task may give infinities now and then: no judge of others
        chosen = [x for x in chosen if distributions[x] == DECLARED or self._is_finite(x)]
        assert self.drawn, "do_draw comes first"
        how, memory = self.drawn
        sets = unpack(memory=memory, **how)
        found = []
        for index in chosen:
            inputs = self.inputs(seeds[index], distributions[index])
            mutates = not all(map(same, sets[index], inputs))
            trial = Trial(DECLARED, seeds[index], distributions[index])
            error = self._unseen_error(index, inputs, trial, len(seeds))
            found.append(error.model_copy(update={"mutates_inputs": mutates}))
        del sets, inputs
        self.give_back_memory()
        return UnseenComparison(positions=chosen, found=found)

    def _unseen_error(self, index: int, inputs: list[Any], trial: Trial, count: int) -> Comparison:
        actual, own = self._unseen("unseen", index), self._unseen("own", index)
        error = merge(list(map(measure, actual, own, own)))
        if error.rms > DOUBTFUL:
            exact = self._oracle(inputs, own)
            costs = self._own_error(inputs, own, sampled=exact is None)
            error = self._compared(actual, Known(own, exact or own, costs, trial))
        others = (other for other in range(count) if error.rms > 1e-4 and other != index)
        equal = [x for x in others if all_close(actual, self._unseen("own", x), 1e-4)]
        names = {LATER if other > index else EARLIER for other in equal}
        known = {name: max(getattr(error, name), getattr(self.own_error, name)) for name in OWN}
        return error.model_copy(update={**known, "equals_trial": sorted(names)})

    def _is_finite(self, index: int) -> bool:
        """Is this process's own output finite?"""
        return all(bool(torch.isfinite(computable(x)).all()) for x in self._unseen("own", index))

    def _farthest(self, count: int, wanted: int) -> list[int]:
        """Positions of the outputs that differ most from this process's own: by the largest
        difference, as a share of the largest value."""
        if count <= wanted:
            return []
        step, offset = self._step, 0
        worst = torch.zeros(count, device=self.device)
        for x in self.like:
            actual, own = (
                calls(self.outputs_of[whose], x, count, offset=offset, step=step)
                for whose in ("unseen", "own")
            )
            if x.numel():  # a few at a time: what it takes to compare them is as large as they are
                pairs = zip(actual.split(AT_ONCE), own.split(AT_ONCE), strict=True)
                found = torch.cat([row_differences(*pair) for pair in pairs])
                worst = worst.maximum(found.to(self.device))
            offset += padded(x.nbytes)
        return worst.topk(wanted).indices.tolist()

    def _unseen(self, whose: str, index: int) -> list[Tensor]:
        return read(self.outputs_of[whose], self.like, index * self._step)

    @property
    def like(self) -> list[Tensor]:
        """Tensors of the form of the task's own outputs."""
        return self.known[DECLARED].expected

    @property
    def _step(self) -> int:
        """Bytes from one set of outputs to the next."""
        return sum(padded(x.nbytes) for x in self.like)

    def _compared(self, actual: list[Tensor], known: Known) -> Comparison:
        """Errors of outputs. Where a few elements hang on a step (floor, round, argmax), what the
        reference gives beside it is right, too. On hard inputs, most of an output's integers may do
        so: numbers alone are judged there."""
        if known.trial.hard:
            pairs = zip(actual, known.expected, strict=True)
            actual = [x if least_step(x) else y for x, y in pairs]
        found = list(map(measure, actual, known.oracle, known.expected))
        off = any(error.max > least_step(x) for error, x in zip(found, actual, strict=True))
        if off and max(x.numel() for x in actual) <= ENOUGH_ELEMENTS:
            accepted = self._beside_steps(actual, known)
            again = map(measure, accepted, known.oracle, known.expected)
            found = [
                new.model_copy(update={name: getattr(old, name) for name in RECORDED})
                for old, new in zip(found, again, strict=True)
            ]
        worst = max(range(len(found)), key=lambda index: found[index].rms, default=0)
        return merge([known.error, *found]).model_copy(update={"worst": worst})

    def _beside_steps(self, actual: list[Tensor], known: Known) -> list[Tensor]:
        """These outputs, with the expected element where one is off and the reference gives the
        same: in float64, where it chooses so from equal elements, or where its operators round
        otherwise. Only where few are off, or not many more than of the reference's own."""
        near = [y.to(x.dtype) for x, y in zip(known.expected, known.oracle, strict=True)]
        off = left = list(map(unlike, actual, known.expected))
        numbers = [mask for mask, x in zip(off, actual, strict=True) if least_step(x)]
        if any(int(mask.sum()) > MOST_OFF * mask.numel() for mask in numbers):
            return actual
        few, trial, begun = False, known.trial, self.work_stamp()
        with self._model_for(trial):
            inputs = self.inputs(trial.seed, trial.distribution, trial.shape)
            for move in range(-UNMOVED, MOVES + 1):
                few = few or all(map(_few, off, map(unlike, known.expected, near)))
                left = [mask & unlike(x, y) for mask, x, y in zip(left, actual, near, strict=True)]
                if not any(map(torch.any, left)) or self.work_s(begun) > ORACLE_MAX_S:
                    break
                if move >= DRAWS and not few:
                    return actual
                units = STEP_UNITS[move % len(STEP_UNITS)] if move >= 0 else 0
                with suppress(*REFUSALS), ChosenAs(actual, last=move == -1):
                    near = self._moved_outputs(inputs, move, units)
        return [
            torch.where(mask & ~wrong, x, a)
            for mask, wrong, x, a in zip(off, left, known.expected, actual, strict=True)
        ]

    def _moved_outputs(self, inputs: list[Any], seed: int, units: int) -> list[Tensor]:
        """What other code of the same formula could give, which rounds otherwise by some units."""
        generator = torch.Generator(self.device).manual_seed(seed)
        copied = _copied(inputs)  # not moved themselves
        with LongSums(generator, units) if units else nullcontext():
            return self.outputs(copied)


def _few(off: Tensor, own: Tensor) -> bool:
    """Are so few elements off that they may hang on a step? `own`: where the reference itself is,
    if it rounds otherwise."""
    return int(off.sum()) <= max(FEW, FEW_SHARE * off.numel(), 8 * int(own.sum()))


def _form(x: Tensor) -> OutputForm:
    return OutputForm(shape=list(x.shape), dtype=str(x.dtype), device=x.device.type, bytes=x.nbytes)


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.flatten().view(torch.uint8)[:DIGEST_BYTES].cpu().numpy().tobytes())
    return digest.hexdigest()


def _copied(inputs: list[Any], dtype: torch.dtype | None = None) -> list[Any]:
    """Copies of the tensors, for a model may change its inputs; floating ones in this dtype."""
    return [
        x.to(dtype if dtype and x.is_floating_point() else x.dtype, copy=True)
        if isinstance(x, Tensor)
        else x
        for x in inputs
    ]


def _representable(oracle: Tensor, reference: Tensor) -> Tensor:
    """The oracle, but the reference where the reference's type does not hold what the oracle says:
    torch.finfo(x.dtype).min, say, is another number in float64."""
    if not reference.is_floating_point() and not reference.is_complex():
        return oracle
    held = torch.isfinite(computable(oracle.to(reference.dtype)))
    return oracle if held.all() else torch.where(held, oracle, reference.to(oracle.dtype))


def _start(x: Tensor) -> Tensor:
    """The first elements of a large tensor, flat."""
    return x.reshape(-1)[: ENOUGH_ELEMENTS // 4]


def _mean(x: Tensor) -> Tensor:
    """What does not depend on the place along the first dimension."""
    if not x.dim() or not x.is_floating_point():
        return x
    return x.double().mean(0, keepdim=True).expand_as(x).to(x.dtype)
