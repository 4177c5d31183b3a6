"""Decisions of a task: places of its source where an operator gives booleans that hang on the
inputs, or numbers by pieces (`kernels_eval.reference.pieces`). Where one gives the same in all
trials, no trial asks for it, and a candidate could leave it out: then inputs are searched that
change it, and with it the answer.

Guarantees: on what is found the reference gives another answer than with that decision as on
declared inputs, and, rounding otherwise, the same decisions. Does not follow a value that leaves
torch and returns.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from random import Random
from types import FrameType
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_eval.config import (
    DECISION_BYTES,
    DECISION_S,
    DECISION_TRIES,
    ENOUGH_ASKED,
    MOST_DECIDED,
    REPEATABLE_RTOL,
    SCATTER_UNITS,
)
from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.measurement import all_close
from kernels_eval.model.operators import Named
from kernels_eval.protocol import (
    ALIKE,
    FEW,
    LESS,
    MUTATED,
    NEAR,
    FindDecisive,
    FoundDecisive,
    handles,
)
from kernels_eval.reference.aten import MOVES, SOURCES, Values, operator_name
from kernels_eval.reference.expected_values import ExpectedValues
from kernels_eval.reference.operands import Derived
from kernels_eval.reference.own_errors import copied
from kernels_eval.reference.pieces import PIECES
from kernels_eval.reference.task_model import REFUSALS

FORMS = (ALIKE, NEAR, ALIKE, NEAR, LESS, ALIKE, NEAR, FEW, ALIKE, "")
"""How inputs are changed, one after the other, each perhaps twice more."""
LOOKED_AT_SHARE = 1 / 2
"""Of the time, what is spent on what trials decide."""
FEWEST_TRIES, SLOW_TIMES = 8, 4
"""How many inputs are tried also of a slow task, in how many times the usual time."""
EARLY, OTHERS = FEWEST_TRIES, ("normal_x100", "edges", "sparse", "outliers")
"""After how many tries other distributions are drawn, each once."""
FIRMNESS = 2
"""Runs that round otherwise, whose answers must be the same."""
ENOUGH_IDLE = 4
"""Changes of a decision without another answer, from which on it is searched no more."""
UNDECIDED = MOVES | SOURCES
UNDECIDED |= set(
    "_unsafe_view bitwise_not logical_not isnan isinf isfinite isposinf isneginf".split()
)
"""Operators that decide nothing new, or ask for NaN and infinities."""


class Place(NamedTuple):
    """An expression of the task's source, with all operators that it is made of."""

    line: int
    instruction: int
    way: str = ""
    """Of numbers, which piece; empty: a boolean."""


class Decided(NamedTuple):
    """What a place gave, and which pieces its elements were on: of a boolean, itself."""

    result: Tensor
    pieces: Tensor


@without_compiler
class Decisions(TorchDispatchMode):
    """Records what decisions give, a digest of each call; `pinned` ones give these."""

    def __init__(
        self,
        path: str,
        of: Sequence[Any],
        *,
        kept: Collection[Place] = (),
        pinned: Mapping[Place, Sequence[Decided]] | None = None,
    ) -> None:
        """`of`: record only what hangs on these inputs; `kept`: places whose results are kept."""
        TorchDispatchMode.__init__(self)
        self.path, self.pinned = path, pinned or {}
        self.digests: dict[Place, list[int]] = defaultdict(list)
        self.mixed: set[Place] = set()
        """Places where elements differ in what is decided."""
        self.kept: dict[Place, list[Decided]] = {place: [] for place in kept}
        self.derived = Derived(of)
        self.left = {True: MOST_DECIDED, False: MOST_DECIDED}
        """How many results are recorded, of booleans and of numbers."""
        self.bytes_left = DECISION_BYTES

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        ways = PIECES.get(operator_name(function), {})
        given = args
        if ways and function._schema.is_mutable:
            given = (args[0].clone(), *args[1:])
        result = function(*args, **(kwargs or {}))
        derived = self.derived.note((args, kwargs), result)
        if not derived or not isinstance(result, Tensor) or result.layout != torch.strided:
            return result
        ways = {} if result.is_complex() else ways
        whole = _decides(function, args, result)
        fits = 0 < result.numel() <= DECISION_BYTES
        if not fits or not (whole or ways) or not self.left[whole]:
            return result
        if place := self._place():
            self.left[whole] -= 1
            if whole:
                self._record(place, result, result)
            for way, view in ways.items():
                self._record(place._replace(way=way), result, view(given, result))
        return result

    def _place(self) -> Place | None:
        """None where it stands in no line of the task: in its gradients, say."""
        frame: FrameType | None = sys._getframe(2)
        while frame and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        return Place(frame.f_lineno, frame.f_lasti) if frame else None

    def _record(self, place: Place, result: Tensor, pieces: Tensor) -> None:
        calls = self.digests[place]
        pinned = self.pinned.get(place, ())
        if len(calls) < len(pinned) and pinned[len(calls)].result.shape == result.shape:
            usual = pinned[len(calls)]
            result.copy_(usual.result.where(usual.pieces != pieces, result))
        calls.append(hash((pieces.shape, pieces.numpy(force=True).tobytes())))
        if bool(pieces.any()) and not bool(pieces.all()):
            self.mixed.add(place)
        if place in self.kept and result.nbytes <= self.bytes_left:
            self.bytes_left -= result.nbytes
            self.kept[place].append(Decided(result.clone(), pieces.clone()))

    def changed(self, places: Collection[Place], usual: Decisions) -> set[Place]:
        """Which of these places give something else here than there."""
        return {each for each in places if self.digests.get(each) != usual.digests[each]}


def _decides(function: OpOverload, args: Values, result: Tensor) -> bool:
    """Whether an operator decides; x != x asks for NaN, too."""
    if result.dtype != torch.bool or function.is_view or operator_name(function) in UNDECIDED:
        return False
    own = len(args) > 1 and args[0] is args[1]
    return not own


class Decisive:
    """Searches inputs of one task that change what is decided alike in all trials."""

    def __init__(self, values: ExpectedValues) -> None:
        self.values, self.task, self.runner = values, values.task, values.runner
        self.usual: Decisions | None = None
        self.asked: Counter[Place] = Counter()
        """How many trials change what each place decides."""
        self.idle: Counter[Place] = Counter()
        """How often what it decides changed no answer."""
        self.seen: set[str] = set()
        self.tried, self.found, self.used_s = 0, 0, 0.0

    @handles(FindDecisive)
    def find_decisive(self, request: FindDecisive) -> FoundDecisive:
        """Find inputs that no place of `trials` decides alike; none once time or tries are over."""
        self._look_at(request.trials)
        told = self.seen.issuperset(request.trials)
        found = self._search(request)
        never = {place.line for place, count in self.asked.items() if not count and not place.way}
        lines = sorted(never) if told else []
        if found is None:
            return FoundDecisive(lines=lines)
        return FoundDecisive(seed=found[0], distribution=found[1], lines=lines)

    @property
    def over(self) -> bool:
        """Of a slow task, after a few tries."""
        most = DECISION_S * (1 if self.tried >= FEWEST_TRIES else SLOW_TIMES)
        return self.used_s > most

    @property
    def rare(self) -> set[Place]:
        """Places that few trials ask for; once two were found, that none does."""
        enough = ENOUGH_ASKED if self.found < ENOUGH_ASKED else 1
        return {place for place, count in self.asked.items() if count < enough}

    @property
    def wanted(self) -> set[Place]:
        """Of rare places, first those that no trial asks for, and of these those that decide all
        elements alike."""
        assert self.usual
        never = {place for place in self.rare if not self.asked[place]}
        uniform = never - self.usual.mixed
        halfway = DECISION_S * (1 + LOOKED_AT_SHARE) / 2
        early = self.tried < DECISION_TRIES // 2 and self.used_s < halfway
        return (uniform or never or self.rare) if early else self.rare

    def _look_at(self, trials: Sequence[str]) -> None:
        """Count what trials ask for, the declared one first."""
        for name in trials:
            known = self.usual is not None or name == trials[0]
            late = self.used_s > LOOKED_AT_SHARE * DECISION_S
            if name in self.seen or late or not known or (self.usual and not self.rare):
                continue
            self.seen.add(name)
            started = self.task.work_stamp()
            trial = self.values.known[name].trial
            with suppress(*REFUSALS), self.values.model_for(trial):
                inputs = self.task.inputs_of(trial)
                if self.usual is None:
                    self.usual, _ = self._decided(inputs)
                    self.asked = Counter(dict.fromkeys(self.usual.digests, 0))
                else:
                    found, _ = self._decided(inputs)
                    self.asked.update(found.changed(self.rare, self.usual))
            self.used_s += self.task.work_s(started)

    def _decided(self, inputs: list[Any], **how: Any) -> tuple[Decisions, list[Tensor]]:
        decisions = Decisions(str(self.runner.module.__file__), inputs, **how)
        with decisions:
            return decisions, self.task.outputs(inputs)

    def _search(self, request: FindDecisive) -> tuple[int, str] | None:
        """A seed and a distribution."""
        random = Random(f"{request.seed} {self.tried}")
        if self.rare and not self.tried:
            self._keep(request.trials[0])
        while self.rare and self.tried < DECISION_TRIES and not self.over:
            started, found = self.task.work_stamp(), False
            seed, name = random.getrandbits(31), self._name(random) + request.domain
            with suppress(*REFUSALS):
                found = self._is_decisive(self.task.inputs(seed, name))
            self.tried += 1
            self.used_s += self.task.work_s(started)
            if found:
                self.found += 1
                return seed, name
        return None

    def _keep(self, declared: str) -> None:
        """Keep what is decided on declared inputs, of the places that are left."""
        inputs = self.task.inputs_of(self.values.known[declared].trial)
        self.usual, _ = self._decided(inputs, kept=self.rare)

    def _name(self, random: Random) -> str:
        if EARLY <= self.tried < EARLY + len(OTHERS):
            return OTHERS[self.tried - EARLY]
        forms = [FORMS[self.tried % len(FORMS)]]
        forms += random.choices(FORMS, k=random.choice((0, 1, 1, 2)))
        changes = (f"_{random.getrandbits(31)}{form}" for form in forms)
        return f"{MUTATED}{''.join(changes)}"

    def _is_decisive(self, inputs: list[Any]) -> bool:
        """Whether the answer hangs on what is decided otherwise here, and not on rounding."""
        assert self.usual
        found, outputs = self._decided(copied(inputs))
        changed = found.changed(self.wanted, self.usual)
        if not changed:
            return False
        pinned = {place: self.usual.kept[place] for place in changed}
        if self._tells(inputs, outputs, pinned):
            return self._firm(inputs, outputs)
        for place in changed:
            self.idle[place] += 1
            if self.idle[place] == ENOUGH_IDLE:
                del self.asked[place]
        return False

    def _tells(self, inputs: list[Any], outputs: list[Tensor], pinned: Any) -> bool:
        try:
            _, without = self._decided(copied(inputs), pinned=pinned)
        except REFUSALS:
            return True
        return not all_close(without, outputs, REPEATABLE_RTOL)

    def _firm(self, inputs: list[Any], outputs: list[Tensor]) -> bool:
        errors = self.values.errors
        exact = errors.oracle(inputs, outputs) or outputs
        if not all_close(
            [x.to(y.dtype) for x, y in zip(exact, outputs, strict=True)], outputs, REPEATABLE_RTOL
        ):
            return False
        runs = (errors.moved_outputs(inputs, move, SCATTER_UNITS) for move in range(FIRMNESS))
        return all(all_close(run, outputs, REPEATABLE_RTOL) for run in runs)
