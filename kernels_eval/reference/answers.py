"""The trusted role: holds expected values and compares what a candidate returned, in a process that
no candidate code ever enters.
"""

from __future__ import annotations

import hashlib
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor

from kernels_eval.config import (
    DIGEST_BYTES,
    DOUBTFUL_RMS,
    DOWNCAST_SPREAD,
    ENOUGH_ELEMENTS,
    EQUAL_ELEMENT_RUNS,
    EXACT_ZERO,
    FACTORING_ERROR,
    FEW_BESIDE_STEP,
    FEW_BESIDE_STEP_SHARE,
    FORMULA_SAMPLE,
    GATES,
    HARD_GATES,
    LINE_NOISE,
    MOST_BESIDE_STEP_SHARE,
    MOST_FACTORING_ERROR,
    ORACLE_MAX_S,
    OUTPUTS_AT_ONCE,
    REFERENCE_FACTOR,
    SAME_ANSWER_RTOL,
    SCATTER_DRAWS,
    STEP_MOVES,
    STEP_UNITS,
)
from kernels_eval.model.correctness import (
    answer_of,
    hangs_on_scatter,
    judge,
    judge_terms,
    merge,
    most_scatter,
)
from kernels_eval.model.measurement import (
    all_close,
    as_real,
    computable,
    least_step,
    measure,
    misplaced,
    precision_of,
    row_differences,
    same,
    same_all,
    unlike,
    unwritten,
)
from kernels_eval.model.shared_memory import calls, padded, read, unpack
from kernels_eval.protocol import (
    DECLARED,
    EARLIER,
    LATER,
    NON_FINITE,
    Compare,
    CompareSums,
    CompareUnseen,
    Comparison,
    Done,
    DrawInputs,
    EndTiming,
    Expect,
    ExpectWithout,
    Explained,
    ExplainError,
    LikenError,
    Likeness,
    MeasureCompiled,
    NewCandidate,
    RedrawWeights,
    Shared,
    ShareMemory,
    UnseenComparison,
    handles,
)
from kernels_eval.records import Reason
from kernels_eval.reference.decisions import Decisive
from kernels_eval.reference.dependences import Dependences
from kernels_eval.reference.downcasts import EXPLANATIONS, errs_as_much, explains, lost_bits
from kernels_eval.reference.equal_elements import ChosenAs
from kernels_eval.reference.expected_values import ExpectedValues, Known
from kernels_eval.reference.factorings import Factoring, gram_schmidt_error, residual
from kernels_eval.reference.faint import Faint
from kernels_eval.reference.infinities import with_infinities
from kernels_eval.reference.lasting_states import LastingStates
from kernels_eval.reference.omitted import Omissions
from kernels_eval.reference.own_errors import both, same_shapes
from kernels_eval.reference.reaches import Reaches
from kernels_eval.reference.settings import Settings
from kernels_eval.reference.shifted import Shifted
from kernels_eval.reference.structure_search import Structures
from kernels_eval.reference.task_model import REFUSALS, TaskModel, device_memory
from kernels_eval.sandbox.channel import Channel

NARROW = (torch.float32, torch.float16, torch.bfloat16)
RECORDED = ("kernelbench_1e4", "kernelbench_1e2")
"""What is said of outputs exactly as they are."""
AS_THEY_ARE = (*RECORDED, "masks_match")
"""And of those of which several are right."""


class ReferenceRole:
    """Serves one task, and then compares each answer of a candidate with its expected values."""

    def __init__(self, channel: Channel) -> None:
        self.task = TaskModel(channel)
        self.runner = self.task.runner
        self.values = ExpectedValues(self.task)
        self.dependences = Dependences(self.values)
        kinds = Decisive, Faint, LastingStates, Omissions, Reaches, Settings, Shifted, Structures
        searches = (kind(self.values) for kind in kinds)
        self.parts = self, self.values, self.dependences, *searches, self.task, self.runner
        self.digests: dict[str, str] = {}
        self.without: list[int] = []
        self.error: Tensor | None = None
        self.alone = True

    @handles(ShareMemory)
    def share_memory(self, request: ShareMemory) -> Shared:
        self.runner.shared.pop(request.whose, None)  # its memory first
        if not request.on_device:
            self.runner.shared[request.whose] = self.runner.memory()
            return Shared(shared=True)
        if (memory := device_memory(request.size)) is None:
            return Shared(shared=False)
        self.runner.shared[request.whose] = memory
        self.task.channel.attached.append(memory.descriptor)
        return Shared(shared=True)

    def end_command(self, command: str) -> None:
        """Raise RuntimeError where the command has broken the device, which may show late."""
        self.runner.synchronise()
        # in a round, what follows is timed, and before a candidate comes nobody else needs memory
        kept = {DrawInputs.command: "own" in self.runner.shared, Expect.command: self.alone}
        if not kept.get(command):
            self.runner.trim_memory(command)

    @handles(NewCandidate)
    def new_candidate(self, _: NewCandidate) -> Done:
        self.digests, self.alone, self.without = {}, False, []
        if self.runner.redrawn:  # the last one did not come to the end of it
            self.runner.redraw_weights(RedrawWeights(seed=None))
        return Done()

    @handles(ExpectWithout)
    def expect_without(self, request: ExpectWithout) -> Done:
        self.without = request.positions
        return Done()

    def _known_of(self, actual: list[Tensor], expected: list[Tensor]) -> list[Tensor]:
        """An answer, with the expected state where a candidate keeps it in its own way."""
        for position in self.without:
            actual[-position] = expected[-position]
        return actual

    @handles(EndTiming)
    def end_timing(self, _: EndTiming) -> Done:
        self.runner.timed_inputs, self.task.drawn = [], None
        for whose in ("inputs", "own", "unseen"):
            self.runner.shared.pop(whose, None)
        return Done()

    @handles(Compare)
    def compare(self, request: Compare) -> Comparison:
        """Measure the candidate's bytes against this trial and every earlier one."""
        trial = request.trial
        known = self.values.kept(trial)
        actual = read(self.runner.shared["candidate"], known.expected)
        actual = self._known_of(actual, known.expected)
        digest = _digest(actual)
        if request.marks:
            actual = list(map(with_infinities, actual, known.expected))
        found = self._compared(actual, known)
        del known
        constant = all(map(_is_constant, actual))
        equals_trial = [
            name
            for name in self.values.known
            if found.rms > SAME_ANSWER_RTOL
            and not constant
            and name != trial
            and name in self.digests  # one that this candidate has been asked
            and all_close(actual, self.values.expected_outputs(name), SAME_ANSWER_RTOL)
        ]
        equals_answer = [
            name
            for name, other in self.digests.items()
            if other == digest and name != trial and not self._alike(name, trial)
        ]
        self.digests[trial] = digest
        far = found.rms > 1 or not found.masks_match
        return found.model_copy(
            update={
                "unwritten": sum(map(unwritten, actual)) if far else 0,
                "equals_trial": equals_trial,
                "equals_answer": equals_answer,
                "constant": constant,
            }
        )

    def _alike(self, one: str, other: str) -> bool:
        values = self.values
        both = one in values.known and other in values.known
        return both and same_all(values.expected_outputs(one), values.expected_outputs(other))

    @handles(ExplainError)
    def explain_error(self, request: ExplainError) -> Explained:
        known = self.values.kept(request.trial)
        actual = read(self.runner.shared["candidate"], known.expected)
        trial, as_large = known.trial, ""
        places = range(len(actual)) if request.place is None else [request.place]
        with self.values.model_for(trial):
            for name, modes in EXPLANATIONS.items():
                for mode in modes():
                    inputs = self.task.inputs_of(trial)
                    with suppress(*REFUSALS), mode:
                        predicted = self.task.outputs(inputs)
                        found = actual, known.expected, known.oracle, predicted
                        if any(explains(*(each[place] for each in found)) for place in places):
                            return Explained(by=name)
                        as_large = as_large or name * any(map(errs_as_much, *found))
        return Explained(as_large=as_large)

    @handles(LikenError)
    def liken_error(self, request: LikenError) -> Likeness:
        known = self.values.kept(request.trial)
        actual = read(self.runner.shared["candidate"], known.expected)
        before, self.error = self.error, torch.cat(list(map(_error, actual, known.oracle)))
        if before is None or len(before) != len(self.error) or not before.any():
            return Likeness()
        return Likeness(distance=float((self.error - before).norm() / before.norm()))

    @handles(MeasureCompiled)
    def measure_compiled(self, request: MeasureCompiled) -> Comparison:
        known = self.values.kept(request.trial)
        return self._compared(read(self.runner.memory(), known.expected), known)

    @handles(CompareUnseen)
    def compare_unseen(self, request: CompareUnseen) -> UnseenComparison:
        """Measure the candidate's outputs of a round against this process's own for the
        same inputs, whose seeds and distributions come along: those at these positions, and those
        that are farthest off.

        `equals_trial` says whether a wrong one is the answer of a later or an earlier call,
        `mutates_inputs` whether the candidate has changed its inputs.
        """
        seeds, distributions = request.seeds, request.distributions
        farthest = self._farthest(len(seeds), request.farthest)
        chosen = sorted({*request.positions, *farthest})
        # under a drawn distribution a task may give infinities now and then: no judge of others
        chosen = [x for x in chosen if distributions[x] == DECLARED or self._is_finite(x)]
        assert self.task.drawn, "inputs are drawn first"
        how, memory = self.task.drawn
        sets = unpack(how.packed, memory, how.count, how.stride)
        found = []
        for index in chosen:
            inputs = self.task.inputs(seeds[index], distributions[index])
            kept = self.runner.unchanged(sets[index])
            mutates = not all(map(same, kept, self.runner.unchanged(inputs)))
            trial = Expect(name=DECLARED, seed=seeds[index], distribution=distributions[index])
            if self.runner.remembers:
                earlier = zip(seeds[:index], distributions[:index], strict=True)
                trial = trial.model_copy(update={"earlier": [*earlier]})
            error = self._unseen_error(index, inputs, trial, len(seeds))
            found.append(error.model_copy(update={"mutates_inputs": mutates}))
        return UnseenComparison(positions=chosen, found=found)

    @handles(CompareSums)
    def compare_sums(self, request: CompareSums) -> UnseenComparison:
        """What a sum may cost is measured on few terms, too: on these very ones only where those of
        another draw do not allow for an error."""
        found: list[Comparison] = []
        cost = self.values.cost_of_few_terms[request.kind]
        for index, seed in enumerate(request.seeds):
            actual, own = self._both_unseen(index)
            error = answer_of(list(map(measure, actual, own, own)), cost)
            if judge_terms(error, request.kind) is not Reason.OK:
                inputs = self.task.inputs(seed, request.kind)
                exact = self.values.errors.oracle(inputs, own)
                costs = self.values.errors.of(inputs, own, exact=exact is not None)
                trial = Expect(name=DECLARED, seed=seed, distribution=request.kind)
                error = self._compared(actual, Known(own, exact or own, costs, trial))
            found.append(error)
            if judge_terms(error, request.kind) is not Reason.OK:
                break  # one is enough
        return UnseenComparison(positions=list(range(len(found))), found=found)

    def _unseen_error(self, index: int, inputs: list[Any], trial: Expect, count: int) -> Comparison:
        actual, own = self._both_unseen(index)
        error = answer_of(list(map(measure, actual, own, own)), self.values.own_errors)
        if error.rms > DOUBTFUL_RMS or judge(error) is not Reason.OK:
            with self.values.model_for(trial):
                exact = self.values.errors.oracle(inputs, own)
                costs = self.values.errors.of(inputs, own, exact=exact is not None)
            costs = both(costs, self.values.own_errors)
            error = self._compared(actual, Known(own, exact or own, costs, trial))
        telling = error.rms > SAME_ANSWER_RTOL and not all(map(_is_constant, actual))
        others = (other for other in range(count) if telling and other != index)
        equal = [x for x in others if all_close(actual, self._unseen("own", x), SAME_ANSWER_RTOL)]
        names = {LATER if other > index else EARLIER for other in equal}
        return error.model_copy(update={"equals_trial": sorted(names)})

    def _is_finite(self, index: int) -> bool:
        return all(bool(torch.isfinite(computable(x)).all()) for x in self._unseen("own", index))

    def _farthest(self, count: int, wanted: int) -> list[int]:
        if not 0 < wanted < count:
            return []
        step, offset = self._step, 0
        worst = torch.zeros(count, device=self.runner.device)
        for x in self.values.like:
            actual, own = (
                calls(self.runner.shared[whose], x, count, offset=offset, step=step)
                for whose in ("unseen", "own")
            )
            if x.numel():  # a few at a time: what it takes to compare them is as large as they are
                pairs = zip(actual.split(OUTPUTS_AT_ONCE), own.split(OUTPUTS_AT_ONCE), strict=True)
                found = torch.cat([row_differences(*pair) for pair in pairs])
                worst = worst.maximum(found.to(self.runner.device))
            offset += padded(x.nbytes)
        return worst.topk(wanted).indices.tolist()

    def _both_unseen(self, index: int) -> tuple[list[Tensor], list[Tensor]]:
        own = self._unseen("own", index)
        return self._known_of(self._unseen("unseen", index), own), own

    def _unseen(self, whose: str, index: int) -> list[Tensor]:
        return read(self.runner.shared[whose], self.values.like, index * self._step)

    @property
    def _step(self) -> int:
        return sum(padded(x.nbytes) for x in self.values.like)

    def _compared(self, actual: list[Tensor], known: Known) -> Comparison:
        if known.glanced:
            return answer_of(list(map(measure, actual, known.oracle, known.expected)), known.error)
        if known.trial.hard:
            actual = list(map(_numbers_alone, actual, known.expected))
            actual = list(map(_without_noise, actual, known.expected, self.values.like))
        factorings = self.values.factorings(known.trial)
        found = self._measured(actual, known, factorings)
        if not known.trial.hard and any(each.rms > GATES.fp32 for each in found):
            actual = list(map(_without_lines_of_noise, actual, known.oracle, known.expected))
            found = self._measured(actual, known, factorings)
        moved: list[tuple[Tensor, ...]] = []
        if (
            any(each.of_slice for each in found)
            and judge(answer_of(found, known.error)) is not Reason.OK
        ):
            moved = self._moved(known)
            found = self._measured(actual, known, factorings, moved)
        off = any(error.max > least_step(x) for error, x in zip(found, actual, strict=True))
        off = off or (not merge(found).masks_match and known.trial.distribution != NON_FINITE)
        if off and max(x.numel() for x in actual) <= ENOUGH_ELEMENTS:
            accepted = self._beside_steps(actual, known)
            again = self._measured(accepted, known, factorings, moved)
            found = [
                new.model_copy(update={name: getattr(old, name) for name in RECORDED})
                for old, new in zip(found, again, strict=True)
            ]
        hard = known.trial.hard
        if known.trial.distribution != NON_FINITE:
            found = [
                each.model_copy(update={"misplaced": misplaced(x, y) if own.ordered else 0})
                for each, own, x, y in zip(found, known.error, actual, known.expected, strict=True)
            ]
        if not hard:
            lost = map(lost_bits, actual, known.expected)
            found = [
                each.model_copy(update={"lost_bits": bits})
                for each, bits in zip(found, lost, strict=True)
            ]
        whole = answer_of(found, known.error, hard=hard)
        few = max(x.numel() for x in actual) <= ENOUGH_ELEMENTS
        if hard or not few or not hangs_on_scatter(whole):
            return whole
        return answer_of(found, self._with_scatter(known, found))

    def _moved(self, known: Known) -> list[tuple[Tensor, ...]]:
        """Each expected output where operators round otherwise, some times."""
        with self.values.model_for(known.trial):
            moves = self.values.errors.moves(self.task.inputs_of(known.trial))
            found = [moved for moved in moves if same_shapes(moved, known.expected)]
        return [*zip(*found, strict=True)]

    def _measured(
        self,
        actual: list[Tensor],
        known: Known,
        factorings: list[Factoring],
        moved: Sequence[Sequence[Tensor]] = (),
    ) -> list[Comparison]:
        moved = moved or [()] * len(actual)
        found = list(map(measure, actual, known.oracle, known.expected, moved))
        for each in factorings:
            error, own = (residual(each, x) for x in (actual, known.expected))
            own = max(own, FACTORING_ERROR, min(gram_schmidt_error(each), MOST_FACTORING_ERROR))
            # farther than a downcast's: it says nothing of single elements
            told = Comparison(
                rms=error,
                reference_rms=own,
                max=min(1.001 * DOWNCAST_SPREAD * error, sys.float_info.max),
                reference_max=1.001 * DOWNCAST_SPREAD * own,
            )
            for place in self.values.factors:
                if place in each.outputs:
                    as_they_are = {name: getattr(found[place], name) for name in AS_THEY_ARE}
                    found[place] = told.model_copy(update=as_they_are)
        return found

    def _with_scatter(self, known: Known, found: list[Comparison]) -> list[Comparison]:
        """The reference's own errors, with what outputs scatter, which is kept."""
        trial, values = known.trial, self.values
        with values.model_for(trial):
            inputs = self.task.inputs_of(trial)
            pairs = zip(known.error, found, strict=True)
            most = [most_scatter(own.widest, each.precision) for own, each in pairs]
            costs = both(known.error, values.errors.scatter(inputs, known.expected, most))
        if values.known.get(trial.name) is known:
            values.known[trial.name] = known._replace(error=costs)
        return costs

    def _beside_steps(self, actual: list[Tensor], known: Known) -> list[Tensor]:
        """These outputs, with the expected element where few are off and the reference may give
        both.
        """
        near = [y.to(x.dtype) for x, y in zip(known.expected, known.oracle, strict=True)]
        off = left = list(map(unlike, actual, known.expected))
        numbers = [mask for mask, x in zip(off, actual, strict=True) if least_step(x)]
        # where many are off, only which of equal elements was chosen may explain it
        many = any(int(mask.sum()) > MOST_BESIDE_STEP_SHARE * mask.numel() for mask in numbers)
        few, trial, started = False, known.trial, self.task.work_stamp()
        with self.values.model_for(trial):
            inputs = self.task.inputs_of(trial)
            for move in range(-EQUAL_ELEMENT_RUNS, STEP_MOVES + 1):
                few = few or all(map(_few, off, map(unlike, known.expected, near)))
                left = [mask & unlike(x, y) for mask, x, y in zip(left, actual, near, strict=True)]
                late = self.task.work_s(started) > ORACLE_MAX_S
                if late or (many and not move) or not any(map(torch.any, left)):
                    break
                if move >= SCATTER_DRAWS and not few:
                    return actual
                units = STEP_UNITS[move % len(STEP_UNITS)] if move >= 0 else 0
                with suppress(*REFUSALS), ChosenAs(actual, last=move == -1):
                    moved = self.values.errors.moved_outputs(inputs, move, units)
                    near = moved if same_shapes(moved, actual) else near
        return [
            torch.where(mask & ~wrong, x, a)
            for mask, wrong, x, a in zip(off, left, known.expected, actual, strict=True)
        ]


def _error(actual: Tensor, oracle: Tensor) -> Tensor:
    """Of some elements, in units of the output's size; 0 where one is not finite."""
    step = actual.numel() // FORMULA_SAMPLE + 1
    a, y = (as_real(computable(x)).reshape(-1)[::step].double() for x in (actual, oracle))
    size = y.nan_to_num(0, 0, 0).square().mean().sqrt().clamp(min=1e-300)
    return ((a - y) / size).nan_to_num(0, 0, 0)


def _numbers_alone(x: Tensor, y: Tensor) -> Tensor:
    """An output, with the expected one's integers, and few of the places where that is not finite:
    on hard inputs these hang on rounding."""
    if not least_step(x):
        return y
    finite = torch.isfinite(computable(y))
    off = finite != torch.isfinite(computable(x))
    if finite.all() or int(off.sum()) > max(FEW_BESIDE_STEP, FEW_BESIDE_STEP_SHARE * x.numel()):
        return x
    return torch.where(off, y, x)


def _without_noise(x: Tensor, y: Tensor, declared: Tensor) -> Tensor:
    """An output, with zeros for what is small beside the declared one where all that is right is
    zero: of a constant group the mean's last digit, divided by a small number, is left."""
    if not least_step(x) or torch.count_nonzero(computable(y)):
        return x
    size = computable(declared).nan_to_num(0, 0, 0).abs().square().double().mean().sqrt()
    return torch.where(computable(x).abs() <= HARD_GATES.of(precision_of(x.dtype)) * size, y, x)


def _without_lines_of_noise(x: Tensor, oracle: Tensor, own: Tensor) -> Tensor:
    """An output, with zeros for what is small beside the others along each line of the first or the
    last dimension where all that is right is zero: what normalising leaves of equal numbers. What
    the reference has digits of itself (an exp's small values beside large ones) is none of it.
    """
    if x.dim() < 2 or oracle.dtype != torch.float64 or x.dtype not in NARROW:
        return x
    zero = torch.zeros_like(oracle, dtype=torch.bool)
    size = oracle.nan_to_num(0, 0, 0).square().mean().sqrt()
    for dim in (0, -1):
        zero |= oracle.abs().amax(dim, keepdim=True) <= EXACT_ZERO * size
    if not zero.any():
        return x
    zero &= (own - oracle).abs() >= oracle.abs() / 2
    return x.masked_fill(zero & (x.abs() <= LINE_NOISE * size), 0)


def _is_constant(x: Tensor) -> bool:
    """Whether several elements are one number, as where all are clamped."""
    return x.numel() > 1 and bool((x == x.reshape(-1)[0]).all())


def _few(off: Tensor, own: Tensor) -> bool:
    few = max(FEW_BESIDE_STEP, FEW_BESIDE_STEP_SHARE * off.numel())
    return int(off.sum()) <= max(few, REFERENCE_FACTOR * int(own.sum()))


def _digest(tensors: list[Tensor]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for tensor in tensors:
        digest.update(tensor.flatten().view(torch.uint8)[:DIGEST_BYTES].cpu().numpy().tobytes())
    return digest.hexdigest()
