"""What a reference computes, as digests of the ATen graph of one forward call: equal for the same
operators on the same values, however written (names, views, in-place writes, dead code, commuted
operands, equal decompositions). Does not follow a value that leaves torch and returns."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.func import functional_call, functionalize
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from kernels_eval.compile.linked import NO_COMPUTE

MOST_OPERATORS = 512
RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})
COMMUTATIVE = frozenset("add mul maximum minimum logical_and logical_or eq ne".split())
MOVES = frozenset(
    """view _unsafe_view reshape _reshape_alias contiguous clone detach alias _to_copy to lift_fresh
    convert_element_type squeeze unsqueeze view_of lift copy""".split()
)
"""Operators that change neither values nor their order."""
CREATIONS = frozenset("empty empty_like new_empty empty_strided new_empty_strided".split())
IGNORED = frozenset(
    """device dtype layout pin_memory memory_format non_blocking running_mean running_var
    momentum""".split()
)
AXES = frozenset("dim dims dim0 dim1 start_dim end_dim".split())
EXACT = frozenset("p ord exponent correction diagonal step".split())
"""Arguments whose number makes another operator."""
WINDOWS = frozenset("kernel_size stride padding dilation output_padding output_size".split())
"""Arguments of which one number stands for as many equal ones."""
SIZED = WINDOWS | frozenset(
    """size shape sizes repeats length groups group start end index split_size split_sizes pad
    normalized_shape N C HxW""".split()
)
"""Size arguments. Only 0 and 1 are kept, which are other operators (a pointwise window, a stride of
1).
"""
PADDING = frozenset("padding output_padding pad".split())
"""Sizes of which only 0 is kept."""
TUNED = frozenset("alpha beta threshold negative_slope eps lambd".split())
"""Numbers that are a matter of taste."""
LARGEST_AXIS = 4
"""Largest other whole number kept where sizes are left out: exponents and the like."""


class Graph(NamedTuple):
    """Digests of one forward call, each hexadecimal.

    `normalised` has every number and shape; `shapes` omits sizes; `structure` has only operators
    and what flows between them. `operators`: the first `MOST_OPERATORS` ATen operators that compute
    and reach an output, in order.
    """

    normalised: str
    shapes: str
    structure: str
    operators: list[str]


class Names(NamedTuple):
    """How a tensor was computed: with sizes, without, by operators alone; and the call that made
    it. `order`: the axes of `base` in a permuted tensor; `viewed`: digest and shape of what a
    view shows.
    """

    full: str
    unsized: str
    structure: str
    call: int | None = None
    base: Names | None = None
    order: tuple[int, ...] = ()
    viewed: tuple[str, torch.Size] | None = None


class Call(NamedTuple):
    name: str
    made_of: frozenset[int]


class Argument(NamedTuple):
    name: str
    value: object


class GraphTracer(TorchDispatchMode):
    """Names every tensor by what it was computed from, while the mode is on."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.calls: list[Call] = []
        self._names = WeakIdKeyDictionary()
        self._nested = False
        self._decompositions = _decompositions()

    def given(self, tensor: Tensor, place: int) -> None:
        unsized = _digest("input", place, tensor.dim())
        self._names[tensor] = Names(_digest("input", place, *_form(tensor)), unsized, unsized)

    def names_of(self, tensor: Tensor) -> Names:
        """A tensor from before (a parameter, a buffer, a constant) is named by its shape."""
        if tensor not in self._names:
            windows = [size == 1 for size in tensor.shape[2:]]
            unsized = _digest("own", tensor.dim(), windows)
            structure = _digest("own", tensor.dim())
            self._names[tensor] = Names(_digest("own", *_form(tensor)), unsized, structure)
        found: Names = self._names[tensor]
        return found

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        arguments = _arguments(function, args, kwargs)
        given = [each.value for each in arguments if isinstance(each.value, Tensor)]
        before = [self.names_of(tensor) for tensor in given]
        out = self._decomposed(function, args, kwargs)
        if out is NotImplemented:
            out = function(*args, **kwargs)
            pointwise = torch.Tag.pointwise in function.tags
            before = _broadcast(given, before) if pointwise else before
            self._name_results(_name_of(function, given), arguments, given, before, out)
        if not self._nested:
            self._note_call(_name_of(function, given), before, out)
        return out

    def _decomposed(self, function: OpOverload, args: Any, kwargs: Any) -> object:
        decompose = self._decompositions.get(function)
        if decompose is None:
            return NotImplemented
        outermost, self._nested = self._nested, True
        try:
            with self:
                return decompose(*args, **kwargs)
        finally:
            self._nested = outermost

    def _name_results(
        self,
        name: str,
        arguments: Sequence[Argument],
        given: Sequence[Tensor],
        before: Sequence[Names],
        out: object,
    ) -> None:
        for place, result in enumerate(_tensors(out)):
            if given and (name in MOVES or _changes_nothing(name, arguments)):
                source = -1 if name == "copy" else 0
                self._names[result] = _viewed(before[source], given[source], result)
            elif name == "permute":
                order = tuple(each.value for each in arguments if each.name == "dims")
                self._names[result] = _permuted(before[0], given[0], result, order)
            elif name == "expand":
                spread = _spread(before[0].unsized, given[0].shape, result.shape)
                expanded = _digest(name, before[0].full, tuple(result.shape))
                self._names[result] = Names(expanded, spread, structure="")
            elif name in CREATIONS:
                empty = _digest("empty")
                self._names[result] = Names(_digest("empty", tuple(result.shape)), empty, empty)
            else:
                full, unsized = _named_arguments(name, arguments, given, before)
                of = (_digest(name, full, place), _digest(name, unsized, place))
                self._names[result] = Names(*of, structure="")

    def _note_call(self, name: str, before: Sequence[Names], out: object) -> None:
        structures = [names.structure for names in before]
        if name in COMMUTATIVE:
            structures.sort()
        made_of = frozenset(names.call for names in before if names.call is not None)
        for place, result in enumerate(_tensors(out)):
            names = self.names_of(result)
            if name in MOVES and before:
                source = before[-1] if name == "copy" else before[0]
                structure, call = source.structure, source.call
            else:
                if place == 0:
                    self.calls.append(Call(name, made_of))
                structure, call = _digest(name, structures, place), len(self.calls) - 1
            self._names[result] = names._replace(structure=structure, call=call)

    def graph(self, results: Sequence[Tensor]) -> Graph:
        names = [self.names_of(each) for each in results]
        wanted = [each.call for each in names if each.call is not None]
        reached = set[int]()
        while wanted:
            number = wanted.pop()
            if number not in reached:
                reached.add(number)
                wanted += self.calls[number].made_of
        operators = [self.calls[number].name for number in sorted(reached)]
        return Graph(
            _digest([each.full for each in names]),
            _digest([each.unsized for each in names]),
            _digest([each.structure for each in names]),
            [name for name in operators if name not in NO_COMPUTE][:MOST_OPERATORS],
        )


class OneStep(TorchFunctionMode):
    """Runs one step of a recurrent layer, which shows all its operators."""

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: Any = (), kwargs: Any = None
    ) -> object:
        kwargs = kwargs or {}
        packed = len(args) != 9 or isinstance(args[3], list | tuple)
        if function not in RECURRENT or kwargs or packed:
            return function(*args, **kwargs)
        given = args[0]
        axis = 1 if args[8] and given.dim() == 3 else 0
        out, *state = function(given.narrow(axis, 0, 1), *args[1:])
        shape = list(out.shape)
        shape[axis] = given.shape[axis]
        return (out.expand(shape), *state)


def trace_graph(model: nn.Module, inputs: Sequence[object]) -> Graph:
    """The graph of `model(*inputs)`. Raises what the call raises."""
    try:
        return _traced(model, inputs, functionalize_=True)
    except Exception:  # a tensor that is no buffer is written: then as it stands
        return _traced(model, inputs, functionalize_=False)


def _traced(model: nn.Module, inputs: Sequence[object], functionalize_: bool) -> Graph:
    tracer = GraphTracer()
    for place, each in enumerate(inputs):
        if isinstance(each, Tensor):
            tracer.given(each, place)
    state = dict(model.named_parameters()) | dict(model.named_buffers())

    def call(state: dict[str, Tensor], inputs: list[object]) -> list[Tensor]:
        with OneStep():
            out = functional_call(model, state, tuple(inputs), tie_weights=False)
        return [each for each in tree_leaves(out) if isinstance(each, Tensor)]

    run: Any = functionalize(call, remove="mutations_and_views") if functionalize_ else call
    with torch.no_grad(), tracer:
        results = run(state, list(inputs))
    return tracer.graph(results)


@cache
def _decompositions() -> Mapping[Any, Callable[..., object]]:
    """Collecting takes 0.15 s: the fork server does it once for all children."""
    from torch._decomp import core_aten_decompositions, get_decompositions

    found: dict[Any, Callable[..., object]] = dict(core_aten_decompositions())
    return found | dict(get_decompositions([torch.ops.aten.addmm]))


def _tensors(values: object) -> list[Tensor]:
    return [each for each in tree_leaves(values) if isinstance(each, Tensor)]


def _name_of(function: OpOverload, given: Sequence[Tensor]) -> str:
    name = str(function._schema.name).split("::")[-1]
    name = name.removesuffix("_").removesuffix("_copy") or name
    if name == "bmm" and given[0].shape[0] == 1:
        return "mm"
    return name


def _arguments(function: OpOverload, args: Any, kwargs: Any) -> list[Argument]:
    found: list[Argument] = []
    for place, spec in enumerate(function._schema.arguments):
        value = args[place] if place < len(args) else kwargs.get(spec.name, spec.default_value)
        if spec.name in IGNORED:
            continue
        if spec.name == "stride" and not value:  # a window's stride is its size
            value = next(each.value for each in found if each.name == "kernel_size")
        if spec.name in WINDOWS and isinstance(value, list | tuple):
            found.append(Argument(spec.name, tuple(value)))
        else:
            values = tree_leaves(value) if isinstance(value, list | tuple) else [value]
            found += [Argument(spec.name, each) for each in values]
    return found


def _changes_nothing(name: str, arguments: Sequence[Argument]) -> bool:
    other = next((each.value for each in arguments if each.name == "other"), None)
    return name in ("mul", "div") and isinstance(other, int | float) and other == 1


def _named_arguments(
    name: str, arguments: Sequence[Argument], given: Sequence[Tensor], before: Sequence[Names]
) -> tuple[list[str], list[str]]:
    known = iter(before)
    rank = given[0].dim() if given else 0
    full, unsized = [], []
    for each in arguments:
        if isinstance(each.value, Tensor):
            names = next(known)
            full.append(names.full)
            unsized.append(names.unsized)
        else:
            full.append(f"{each.name}={_number(each.value)}")
            unsized.append(f"{each.name}={_without_size(each, rank)}")
    if name in COMMUTATIVE:
        full[:2], unsized[:2] = sorted(full[:2]), sorted(unsized[:2])
    return full, unsized


def _broadcast(given: Sequence[Tensor], before: Sequence[Names]) -> list[Names]:
    shape = torch.broadcast_shapes(*(tensor.shape for tensor in given))
    return [
        names._replace(unsized=_spread(names.unsized, tensor.shape, shape))
        for tensor, names in zip(given, before, strict=True)
    ]


def _spread(unsized: str, own: torch.Size, shape: torch.Size) -> str:
    if own.numel() in (1, shape.numel()):
        return unsized
    first = len(shape) - len(own)
    extends = [first + axis for axis, size in enumerate(own) if size != 1]
    return _digest("spread", unsized, extends)


def _viewed(names: Names, source: Tensor, result: Tensor) -> Names:
    if result.shape == source.shape:
        return names
    full, shape = names.viewed or (names.full, source.shape)
    if result.shape == shape:
        return names._replace(full=full, base=None, order=(), viewed=None)
    named = _digest("view", full, tuple(result.shape))
    return names._replace(full=named, base=None, order=(), viewed=(full, shape))


def _permuted(names: Names, source: Tensor, result: Tensor, order: tuple[Any, ...]) -> Names:
    """Axes of one element have no order; two permutations are one."""
    base, before = (names.base, names.order) if names.base else (names, range(source.dim()))
    composed = tuple(before[axis] for axis in order)
    moved = [composed[axis] for axis in range(len(order)) if result.shape[axis] != 1]
    if moved == sorted(moved):
        return _viewed(base, source, result)._replace(base=base, order=composed)
    places = [sorted(moved).index(axis) for axis in moved]
    return Names(
        _digest("permute", base.full, places, tuple(result.shape)),
        _digest("permute", base.unsized, places),
        structure="",
        base=base,
        order=composed,
    )


def _form(tensor: Tensor) -> tuple[object, ...]:
    return tuple(tensor.shape), str(tensor.dtype)


def _number(value: object) -> object:
    """2 is 2.0, and True is no number. One number stands for as many equal ones."""
    if isinstance(value, tuple):
        return _once([_number(each) for each in value])
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else value


def _once(values: Sequence[object]) -> object:
    return values[0] if len(set(values)) == 1 else values


def _without_size(argument: Argument, rank: int) -> object:
    name, value = argument
    if isinstance(value, tuple):
        return _once([_without_size(Argument(name, each), rank) for each in value])
    if name in TUNED:
        return "n"
    if isinstance(value, bool) or not isinstance(value, int | float):
        return value
    if name in EXACT:
        return float(value)
    if name in AXES:
        return value % rank if rank else value
    if name in SIZED:
        kept = (0,) if name in PADDING else (0, 1)
        return value if value in kept else "n"
    largest = LARGEST_AXIS if isinstance(value, int) else 1
    return float(value) if value == value // 1 and abs(value) <= largest else "n"


def _digest(*parts: object) -> str:
    return hashlib.blake2b(repr(parts).encode(), digest_size=16).hexdigest()
