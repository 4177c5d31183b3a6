"""Terms and factors of a task's formula that a candidate leaves out, or scales, by less than a gate
tells: a step of a solver beside its state, a small correction, parts of an output beside larger
ones.

The task's own answer is computed again in float64 without each term, and the candidate's error
regressed on what that changes: what is left out has a coefficient of 1, what rounding has to do
with it about none. `benchmarks/results` has both distributions.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import suppress
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_eval.config import (
    ENOUGH_ELEMENTS,
    LEAST_COEFFICIENT,
    LEAST_FORMULA_TERMS,
    MOST_FORMULA_TERMS,
    OMITTED_FEWEST,
    OMITTED_SAMPLE,
    OMITTED_UNITS,
    OMITTED_UNITS_HALF,
    SIGNIFICANT,
    TERMS_S,
)
from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.operators import Named
from kernels_eval.model.shared_memory import read
from kernels_eval.protocol import FindOmitted, Omitted, OmittedTerm, handles
from kernels_eval.reference.aten import Values, operator_name
from kernels_eval.reference.in_float64 import InFloat64
from kernels_eval.reference.task_model import REFUSALS

if TYPE_CHECKING:
    from kernels_eval.reference.expected_values import ExpectedValues, Known

TERMS = dict.fromkeys(
    "add sub rsub addcmul addcdiv addmm addmv addbmm baddbmm addr".split(), (0, 1)
)
"""Operators that add, and which arguments they have no term without."""
FACTORS = {"mul": (0, 1), "div": (1,)}
"""The same of operators that multiply."""
STEPS = {"lerp": (1,)}
"""What goes from the first argument to this one."""
REDUCED = frozenset({"sum", "mean"})
"""Operators that add up a dimension; of few elements, each is a term."""
MOST_REDUCED = 8
FEW_ELEMENTS, SMALL = 1 << 12, 1e-30


class Place(NamedTuple):
    """An argument of an operator's call, or an index of what a sum adds up, of which number it is
    among all."""

    call: int
    argument: int


class Term(NamedTuple):
    """A term or factor: where it is, and how it is called."""

    place: Place
    name: str
    share: float
    """how much of its operator's result it makes out"""


@without_compiler
class Omitting(TorchDispatchMode):
    """Runs a task without one term, or notes all (`terms`) of it."""

    def __init__(self, path: str, left_out: Place | None = None) -> None:
        TorchDispatchMode.__init__(self)
        self.path, self.left_out = path, left_out
        self.calls, self.terms = 0, list[Term]()

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        kwargs = kwargs or {}
        places = [] if "out" in kwargs else list(_places(function, args))
        if not places:
            return function(*args, **kwargs)
        call, self.calls = self.calls, self.calls + 1
        if self.left_out:
            if call == self.left_out.call:
                args = _without(function, args, self.left_out.argument)
            return function(*args, **kwargs)
        if len(self.terms) >= MOST_FORMULA_TERMS:
            return function(*args, **kwargs)
        shares = [_share(function, args, argument) for argument in places]
        what = f"{operator_name(function)}{self._line()}"
        for argument, share in zip(places, shares, strict=True):
            name = f"argument {argument} of {what}"
            self.terms.append(Term(Place(call, argument), name, share))
        return function(*args, **kwargs)

    def _line(self) -> str:
        frame: FrameType | None = sys._getframe(2)
        while frame and frame.f_code.co_filename != self.path:
            frame = frame.f_back
        return f" in line {frame.f_lineno}" if frame else ""


def _places(function: OpOverload, args: Values) -> Iterator[int]:
    """Which arguments, or indices of what is added up, may be left out of a call."""
    name = operator_name(function)
    if name in REDUCED and isinstance(args[0], Tensor) and args[0].is_floating_point():
        dims = args[1] if len(args) > 1 else ()
        size = args[0].shape[dims[0]] if isinstance(dims, Sequence) and len(dims) == 1 else 0
        if 1 < size <= MOST_REDUCED:
            yield from range(size)
        return
    for place in {**TERMS, **FACTORS, **STEPS}.get(name, ()):
        written = place == 0 and function._schema.is_mutable
        x = args[place] if place < len(args) else None
        if isinstance(x, Tensor) and x.is_floating_point() and x.numel() and not written:
            yield place


def _without(function: OpOverload, args: Values, place: int) -> Values:
    name = operator_name(function)
    if name in REDUCED:
        less = args[0].clone()
        less.select(args[1][0], place).zero_()
        return (less, *args[1:])
    if name in STEPS:
        given = args[0].expand_as(args[place]) if args[0].dim() < args[place].dim() else args[0]
    else:
        neutral = torch.zeros_like if name in TERMS else torch.ones_like
        given = neutral(args[place])
    return (*args[:place], given, *args[place + 1 :])


def _share(function: OpOverload, args: Values, place: int) -> float:
    """About how much of a call's result an argument makes out, by some of its elements."""
    name, tensors = operator_name(function), (x for x in args[:2] if isinstance(x, Tensor))
    if name in REDUCED:
        return 1 / int(args[0].shape[args[1][0]])
    x, *others = (_few(x) for x in (args[place], *tensors))
    if name in FACTORS:
        return float((x - 1).norm() / x.norm().clamp(min=SMALL))
    if name in STEPS:
        x = x - others[0] if x.shape == others[0].shape else x
    largest = max(float(other.square().mean()) for other in others)
    return math.sqrt(float(x.square().mean())) / max(math.sqrt(largest), SMALL)


def _few(x: Tensor) -> Tensor:
    return x.reshape(-1)[:: x.numel() // FEW_ELEMENTS | 1]


class Change(NamedTuple):
    """What an output changes by without a term: `known` places, and by how much there."""

    name: str
    output: int
    known: Tensor
    change: Tensor


class Omissions:
    """Searches for terms that the candidate leaves out whose answer was compared last."""

    def __init__(self, values: ExpectedValues) -> None:
        self.values, self.task = values, values.task
        self.changes: dict[str, list[Change]] = {}
        """by trial"""

    @handles(FindOmitted)
    def find(self, request: FindOmitted) -> Omitted:
        known = self.values.kept(request.trial)
        actual = read(self.task.runner.shared["candidate"], known.expected)
        terms = self.terms_of(actual, request.trial)
        return Omitted(terms=[term for term in terms if request.every or is_omitted(term)])

    def terms_of(self, actual: Sequence[Tensor], trial: str) -> list[OmittedTerm]:
        """The coefficients of all terms in an answer's error that could be within its gate."""
        known = self.values.kept(trial)
        large = max(x.numel() for x in known.expected) > ENOUGH_ELEMENTS
        if large or known.oracle is known.expected:
            return []
        # without buffers, which a candidate may keep in its own way
        answers = self.values.returned(list(zip(actual, known.expected, known.oracle, strict=True)))
        if not any(_differs(x, y) for x, _, y in answers):
            return []
        found = []
        for change in self._changes(trial, known):
            if change.output >= len(answers):
                continue
            coefficient, error = regressed(*answers[change.output], change)
            if coefficient or error < math.inf:
                term = OmittedTerm(name=change.name, coefficient=coefficient, standard_error=error)
                found.append(term)
        return found

    def _changes(self, name: str, known: Known) -> list[Change]:
        if name not in self.changes:
            self.changes[name] = []
            with suppress(*REFUSALS), self.values.model_for(known.trial):
                self.changes[name] = list(self._found(known))
        return self.changes[name]

    def _found(self, known: Known) -> Iterator[Change]:
        inputs = self.task.inputs_of(known.trial)
        path = str(getattr(self.task.runner.module, "__file__", ""))
        generator = torch.Generator().manual_seed(known.trial.seed)
        samples = [_sample(x, generator) for x in known.oracle]
        for index, (y, places) in enumerate(zip(known.oracle, samples, strict=True)):
            for position, x in enumerate(inputs):
                if isinstance(x, Tensor) and x.is_floating_point() and x.shape == y.shape:
                    change = x.reshape(-1)[places].double() - y.reshape(-1)[places]
                    yield Change(f"argument {position} is given back", index, places, change)
        for widens in (True, False):
            watched = Omitting(path)
            right = self._outputs(inputs, known, watched, widens=widens)
            if right and all(map(_nearly, right, known.oracle)):
                break
        else:
            return
        started = self.task.work_stamp()
        smallest = sorted(watched.terms, key=lambda term: term.share)
        for count, term in enumerate(smallest):
            if count >= LEAST_FORMULA_TERMS and self.task.work_s(started) > TERMS_S:
                return
            mode = Omitting(path, term.place)
            less = self._outputs(inputs, known, mode, widens=widens)
            if not less or mode.calls != watched.calls:
                continue
            for index, (x, y) in enumerate(zip(less, right, strict=True)):
                if y.is_floating_point():
                    change = (x - y).reshape(-1)[samples[index]]
                    yield Change(term.name, index, samples[index], change)

    def _outputs(
        self, inputs: list[Any], known: Known, mode: Omitting, *, widens: bool
    ) -> list[Tensor] | None:
        widened = InFloat64(widens=widens)
        return self.values.errors.widened_outputs(inputs, known.expected, widened, mode)


def _nearly(one: Tensor, other: Tensor) -> bool:
    return torch.allclose(one.double(), other.double(), rtol=1e-9, atol=1e-9, equal_nan=True)


def _sample(x: Tensor, generator: torch.Generator) -> Tensor:
    count = x.numel()
    if count <= OMITTED_SAMPLE:
        return torch.arange(count, device=x.device)
    return torch.randint(count, (OMITTED_SAMPLE,), generator=generator).to(x.device)


def _differs(actual: Tensor, oracle: Tensor) -> bool:
    """Whether more than few elements are farther off than rounding alone makes them."""
    if not actual.is_floating_point() or actual.element_size() == 1:
        return False
    eps = torch.finfo(actual.dtype).eps
    a, y = actual.reshape(-1).double(), oracle.reshape(-1)
    units = 0.6 if actual.element_size() == 2 else OMITTED_UNITS / 2
    off = (a - y).abs() > units * eps * y.abs()
    return bool(off.sum() > a.numel() // 20)


def regressed(
    actual: Tensor, expected: Tensor, oracle: Tensor, change: Change
) -> tuple[float, float]:
    """The coefficient of a term in a candidate's error beyond the reference's own, and its standard
    error; (0, inf) where nothing can be told."""
    a, r, y = (x.reshape(-1)[change.known].double() for x in (actual, expected, oracle))
    d = change.change.double()
    usable = torch.isfinite(a + r + y + d)
    usable &= d.abs() > 1e-3 * d.masked_fill(~usable, 0).square().mean().sqrt()
    a, r, y, d = (x[usable] for x in (a, r, y, d))
    half, nothing = actual.element_size() == 2, (0.0, math.inf)
    if len(d) < OMITTED_FEWEST:
        return nothing
    size = y.square().mean().sqrt()
    controls = [torch.ones_like(y), y / size, y.abs() / size] if half else [torch.ones_like(y)]
    q = torch.linalg.qr(torch.stack(controls, 1)).Q
    d, error, own = (x - q @ (q.T @ x) for x in (d, a - y, r - y))
    eps = torch.finfo(actual.dtype).eps
    least = OMITTED_UNITS_HALF * eps * size if half else OMITTED_UNITS * eps * size
    least = least if half else torch.maximum(least, 4 * own.square().mean().sqrt())
    if not bool(d.square().mean().sqrt() > least):
        return nothing
    energy = d.square().sum()
    given, of_reference = (float(x @ d / energy) for x in (error, own))
    left = error - given * d
    standard_error = float((d * left).square().sum().sqrt() / energy)
    low, high = min(0.0, of_reference), max(0.0, of_reference)
    return given - min(max(given, low), high), standard_error


def is_omitted(term: OmittedTerm) -> bool:
    """Not what is counted twice, which saves no work: numbers cut off look like that."""
    return term.coefficient > max(LEAST_COEFFICIENT, SIGNIFICANT * term.standard_error)
