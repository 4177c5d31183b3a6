"""Which operators use a task's inputs, and what therefore may vary about these."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from kernels_eval.config import JUMP, MOST_NUMBERS, NEARLY, NOTE_BYTES, NOTE_DRAWS, REPEATABLE_RTOL
from kernels_eval.model.inputs import plan_inputs
from kernels_eval.model.invariants import is_square, is_triangular, uses_matter
from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.measurement import all_close, as_real, computable, same_all
from kernels_eval.model.operators import Named
from kernels_eval.model.redraws import redrawn, tied
from kernels_eval.model.task_text import promised_by
from kernels_eval.model.values import arrays_in, flattened, leaves_of
from kernels_eval.protocol import OTHER_INPUTS, UNSORTED, VARIED, WIDENED, InputPlan
from kernels_eval.reference.aten import SOURCES, Values, operator_name
from kernels_eval.reference.equal_elements import ChosenAs
from kernels_eval.reference.task_model import REFUSALS, TaskModel

WITHIN_ITSELF = frozenset("slice sub index gather index_select".split())
COPIES = frozenset("clone _to_copy".split())
LOOKED_UP = re.compile(r"^(gather|scatter\w*|index_(select|add|copy|fill|reduce))$")
"""Operators whose `index` are places along `dim` of `self`."""
COMPARISONS = frozenset("eq ne lt le gt ge".split())
REGULAR = re.compile(
    r"linalg[._](?!\w*(norm|cross|dot|matmul|exp|diagonal))"
    r"|\.(qr|svd|lu\w*|cholesky\w*|p?inverse|\w*det|\w*solve\w*)$"
)
"""Functions of matrices that not every method takes where these are singular."""
HALF_READ = re.compile(r"eigh|cholesky|triangular|ldl")
"""Operators that read one half of a matrix."""
NEARLY_ALIKE = 1e-4
"""The largest difference between halves that are rounded otherwise, as a share of the largest
element."""
BY_NUMPY = "numpy.sorted_sequence"
"""The use of an array that torch does not see: its order may be needed."""
AS_MATRIX = {"varied": "moved", "timed": False}
Outputs = Callable[[list[Any]], list[Tensor]]
Change = Callable[[Tensor], Tensor]


@without_compiler
class Uses(TorchDispatchMode):
    """Records the operators' arguments (`operator.argument`) that each value flows into."""

    def __init__(self, values: Sequence[Any], arrays: Sequence[int] = ()) -> None:
        TorchDispatchMode.__init__(self)
        self.found: list[set[str]] = [set() for _ in values]
        self._values = values
        self._numbers: dict[int, set[Any]] = defaultdict(set)
        """what each is compared with"""
        self.computed: set[int] = set()
        """which of 64 bits integers are computed from, or compared with each other"""
        self._from = WeakIdKeyDictionary()
        self._arrays = {values[index].data_ptr(): index for index in arrays}
        for index, value in enumerate(values):
            if isinstance(value, Tensor):
                self._from[value] = {index}

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        kwargs = kwargs or {}
        result = function(*args, **kwargs)
        name = operator_name(function)
        names = [argument.name for argument in function._schema.arguments]
        given = dict(zip(names, args, strict=False)) | kwargs
        adds = "_add" * bool(given.get("accumulate"))
        self._found_in_itself(name, given, result)
        if name == "view" and "dtype" in given:
            for index in self._sources(given["self"]):
                self.found[index].add("view.dtype")
        for argument, places, size in _looked_up(name, given):
            for index in self._sources(places):
                known = size if self._is_whole(index, places) else 0
                self.found[index].add(f"{name}{adds}.{argument} below {known}")
        flows: set[int] = set()
        copies = name in COPIES or any(x.alias_info for x in function._schema.returns)
        both = name in COMPARISONS and len(list(filter(self._sources, given.values()))) == 2
        number = given.get("other") if name in COMPARISONS else None
        for argument, value in given.items():
            place = f"{name}.both" if both else f"{name}{adds}.{argument}"
            for index in self._sources(value):
                numbers = self._numbers[index]
                if isinstance(number, int | float) and len(numbers | {number}) <= MOST_NUMBERS:
                    numbers.add(number)
                    place = f"{name}.number"
                self.found[index].add(place)
                flows.add(index)
            for index in self._sources(_integers(value)) if not copies else ():
                self.found[index].add(f"reads {place}")
        if both or (not copies and any(x.dtype is torch.int64 for x in _integers(result))):
            self.computed |= self._sources(_integers((args, kwargs)))
        ends = both or name in SOURCES  # what was compared tells nothing of its numbers
        for x in tree_leaves(result) if flows and not ends else ():
            if isinstance(x, Tensor):
                self._from[x] = self._sources(x) | flows
        return result

    def _found_in_itself(self, name: str, given: dict[str, Any], result: object) -> None:
        """Integers that are used beside their neighbours, or as places in themselves, by axis."""
        own = given.get("self")
        if name not in WITHIN_ITSELF or not isinstance(own, Tensor) or not own.dim():
            return
        axis = int(given.get("dim") or 0) % own.dim()
        other = {"sub": given.get("other"), "slice": own}.get(name)
        one_less = isinstance(result, Tensor) and result.shape[axis:][:1] == (own.shape[axis] - 1,)
        if name == "sub" or one_less:
            for index in self._both(own, other):
                self.found[index].add(f"{name}.neighbours")
        indices = given.get("indices") if name == "index" else [given.get("index")]
        for place, each in enumerate(indices or ()):
            for index in self._both(own, each):
                self.found[index].add(f"{name}.itself{place if name == 'index' else axis}")

    def _is_whole(self, index: int, place: Tensor) -> bool:
        """Whether these places seem to be the argument itself, not what is computed from it."""
        own = self._values[index]
        if len(self._sources(place)) > 1 or not own.numel() or not place.numel():
            return False
        return list(map(int, own.aminmax())) == list(map(int, place.aminmax()))

    def _both(self, one: object, other: object) -> set[int]:
        """What integers of both come from."""
        return self._sources(_integers(one)) & self._sources(_integers(other))

    def _sources(self, value: object) -> set[int]:
        tensors = (x for x in tree_leaves(value) if isinstance(x, Tensor))
        return set().union(*map(self._sources_of, tensors))

    def _sources_of(self, x: Tensor) -> set[int]:
        """Torch's tensor of an array is another at each place, in the same memory."""
        found = self._from.get(x)
        if found is not None or not self._arrays or x.device.type != "cpu":
            return found or set()
        return {self._arrays[x.data_ptr()]} if x.data_ptr() in self._arrays else set()


def _looked_up(name: str, given: Mapping[str, Any]) -> list[tuple[str, Tensor, int]]:
    """The arguments of an operator that are places, and the sizes of what they are places in."""
    own, index = given.get("self"), given.get("index")
    if name == "embedding":
        return [("indices", given["indices"], len(given["weight"]))]
    if not isinstance(own, Tensor) or not own.dim():
        return []
    if LOOKED_UP.search(name) and isinstance(index, Tensor):
        return [("index", index, own.shape[int(given["dim"])])]
    if name == "nll_loss_forward":
        return [("target", given["target"], own.shape[-1])]
    indices = given["indices"] if name in ("index", "index_put") else []
    tensors = [x for x in indices if isinstance(x, Tensor)]
    if any(x.dtype in (torch.bool, torch.uint8) for x in tensors):
        return []
    pairs = zip(indices, own.shape, strict=False)
    return [("indices", x, size) for x, size in pairs if isinstance(x, Tensor)]


@without_compiler
class Halves(TorchDispatchMode):
    """Counts matrices whose halves differ that operators read one half of."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.unlike = 0

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        if HALF_READ.search(operator_name(function)):
            self.unlike += sum(isinstance(x, Tensor) and _halves_differ(x) for x in args)
        return function(*args, **(kwargs or {}))


def _halves_differ(x: Tensor) -> bool:
    if not is_square(x) or is_triangular(x):
        return False
    return bool((x - x.mH).abs().max() > NEARLY_ALIKE * x.abs().max())


def _integers(value: object) -> list[Tensor]:
    tensors = (x for x in tree_leaves(value) if isinstance(x, Tensor))
    return [x for x in tensors if not x.is_floating_point() and x.dtype != torch.bool]


def plan_of(
    task: TaskModel, outputs: Outputs, seed: int, text: str, parts: Mapping[int, int]
) -> InputPlan:
    """What may vary about a task's inputs, by declared draws, the operators that use them, the
    task's source, and the `parts` that it cuts sizes into. Floats that are whole stay so where its
    outputs jump between them.
    """
    count = task.runner.gradients.arguments if task.runner.gradients else None
    inputs = task.inputs(seed)
    draws = [inputs[:count]]
    leaves, form = flattened(draws[0])
    arrays = arrays_in(form)
    tensors = [x for x in leaves if isinstance(x, Tensor)]
    few = sum(x.nbytes for x in tensors) <= NOTE_BYTES
    for other in range(1, NOTE_DRAWS if few else 1):
        drawn = task.inputs(seed + other)[:count]
        if list(map(_shape, leaves_of(drawn))) == list(map(_shape, leaves)):
            draws.append(drawn)
    uses = Uses(leaves, arrays)
    if any(map(uses_matter, tensors)):
        with suppress(*REFUSALS), torch.no_grad(), uses:
            outputs(inputs)
    for index in arrays:
        uses.found[index] = uses.found[index] or {BY_NUMPY}
        draws[0] = task.inputs(seed)[:count]  # as before the call
    plan = plan_inputs(draws, uses.found, text, seed, parts)
    forms = {note.varied for note in plan.notes}
    if "between" in forms and not _stays(plan, "between", _nearly, task, outputs):
        plan = _replaced(plan, "between", "resampled")
    # where the task divides by their sum, that is 1 by chance
    if "probabilities" in forms and _stays(plan, "probabilities", _twice, task, outputs):
        plan = _replaced(plan, "probabilities", "shuffled")
    promised = promised_by(text)
    for index, note in enumerate(plan.notes):
        changed: dict[str, Any] = {}
        if note.order and not _takes_unsorted(plan, index, task, outputs):
            changed = {"keeps": note.order, "order": ()}
        elif note.matrix and not _takes_unstructured(plan, index, task, outputs):
            changed = AS_MATRIX | {"matrix": ""}
        elif note.matrix in promised:
            changed = AS_MATRIX | {"promised": True}
        changed["wide"] = index in uses.computed and note.rare in WIDENED
        notes = [*plan.notes[:index], note.model_copy(update=changed), *plan.notes[index + 1 :]]
        plan = plan.model_copy(update={"notes": notes})
    return plan


def _takes_unsorted(plan: InputPlan, index: int, task: TaskModel, outputs: Outputs) -> bool:
    """Whether a task gives an answer of its usual form where this argument is in no order."""
    seed = task.runner.spec.seed
    inputs = task.inputs(seed)
    x = leaves_of(inputs)[index]
    with suppress(*REFUSALS):
        task.require(OTHER_INPUTS)
        x.copy_(redrawn(x, plan.notes[index], seed, UNSORTED))
        return list(map(_form, outputs(inputs))) == list(map(_form, outputs(task.inputs(seed))))
    return False


def _takes_unstructured(plan: InputPlan, index: int, task: TaskModel, outputs: Outputs) -> bool:
    """Whether a task gives an answer of its usual form where this argument is no symmetric or
    triangular matrix, and gives none to an operator that reads half of it."""
    seed = task.runner.spec.seed
    inputs = task.inputs(seed)
    x = leaves_of(inputs)[index].detach()
    with suppress(*REFUSALS):
        task.require(OTHER_INPUTS)
        with Halves() as usual:
            own = list(map(_form, outputs(task.inputs(seed))))
        x.copy_(redrawn(x, plan.notes[index], seed, VARIED))
        with Halves() as halves:
            return list(map(_form, outputs(inputs))) == own and halves.unlike <= usual.unlike
    return False


def _form(value: Tensor) -> object:
    return value.shape, value.dtype, bool(computable(as_real(value)).isfinite().all())


def _shape(value: object) -> object:
    return value.shape if isinstance(value, Tensor) else type(value)


def _stays(plan: InputPlan, form: str, change: Change, task: TaskModel, outputs: Outputs) -> bool:
    """Whether the answer stays where arguments of this form change."""
    seed = task.runner.spec.seed
    inputs = task.inputs(seed)
    for x, note in zip(leaves_of(inputs), plan.notes, strict=False):
        if note.varied == form:
            x.detach().copy_(change(x))
    with suppress(*REFUSALS):
        task.require(OTHER_INPUTS)
        return all_close(outputs(inputs), outputs(task.inputs(seed)), JUMP)
    return False


def _nearly(x: Tensor) -> Tensor:
    return x * (1 - max(NEARLY, 2 * torch.finfo(x.dtype).eps))


def _twice(x: Tensor) -> Tensor:
    return 2 * x


def _replaced(plan: InputPlan, form: str, other: str) -> InputPlan:
    changed = {"varied": other}
    notes = [x.model_copy(update=changed if x.varied == form else {}) for x in plan.notes]
    return plan.model_copy(update={"notes": notes})


def with_choices(plan: InputPlan, task: TaskModel, outputs: Outputs, seed: int) -> InputPlan:
    """A plan of distinct elements where it matters which of equal ones is chosen; `varied` ones are
    equal where integer outputs tell the choice, and nothing else depends on it.
    """
    first, last = (_chosen(ChosenAs(last=x), task, outputs, seed) for x in (False, True))
    if first and all_close(first, last, REPEATABLE_RTOL):
        return plan
    again = _chosen(ChosenAs(last), task, outputs, seed)
    values, others = ([x for x in each if x.is_floating_point()] for each in (first, last))
    told = bool(last) and same_all(again, last) and all_close(values, others, REPEATABLE_RTOL)
    notes = [
        note.model_copy(
            update={
                "varied": "tied" if told and free else note.varied,
                "rare": "" if note.rare == "one_hot" else note.rare,
            }
        )
        for note in plan.notes
        for free in [note.varied == "moved" and not note.keeps]
    ]
    return plan.model_copy(update={"distinct": True, "notes": notes})


def with_regular(plan: InputPlan, operators: Collection[str]) -> InputPlan:
    """A plan with singular matrices, unless an operator that has run needs regular ones."""
    return plan.model_copy(update={"singular": not any(map(REGULAR.search, operators))})


def _chosen(chosen: ChosenAs, task: TaskModel, outputs: Outputs, seed: int) -> list[Tensor]:
    """The outputs for inputs with equal elements; none, if they are refused."""
    inputs = task.inputs(seed)
    for x in leaves_of(inputs):
        if isinstance(x, Tensor) and x.is_floating_point():
            x.detach().copy_(tied(x))
    with suppress(*REFUSALS), chosen:
        task.require(OTHER_INPUTS)
        return outputs(inputs)
    return []
