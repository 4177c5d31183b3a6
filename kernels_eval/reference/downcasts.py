"""Whether a wrong answer of an fp32 task is what its reference gives where products take factors of
a shorter mantissa, or those of one kind, or all operators do: TF32, fp16 or bf16; or where GELU is
computed by tanh in place of erf.

Tensor cores round TF32 factors to nearest or cut them (PTX ISA, `mma`, `wgmma`: the low 13 bits are
ignored), which on inputs of one sign looks like a constant factor.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only
from torch.utils.weak import WeakTensorKeyDictionary

from kernels_eval.config import FORMULA_SAMPLE
from kernels_eval.model.correctness import MANTISSA
from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.measurement import precision_of
from kernels_eval.model.operators import Named
from kernels_eval.protocol import GELU_BY_TANH, operands_in
from kernels_eval.reference.aten import Values, operator_name
from kernels_eval.reference.long_sums import PRODUCTS

Rounding = Callable[[Tensor], Tensor]
EXPLAINED = 0.5
"""Share of a squared error that a format must explain: chance explains none of it."""
AS_MUCH = 2
"""How many times larger one of two errors of one size may be. A choice."""
SHORTEST, FEWEST, SPREAD = 4, 32, 1 << 16
"""Bits of the mantissa that outputs lack, and of how many at least and at most, that keep fewer."""
BITS = {torch.float32: torch.int32, torch.float64: torch.int64}
ATTENTION = "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention".split()
FACTORS = PRODUCTS | {"convolution": 0}
FACTORS |= {f"_scaled_dot_product_{kind}": 0 for kind in ATTENTION}
"""Operators that sum products, and which argument their first factor is."""
LAYERS = frozenset({"mm", "mv", "dot", "addmm", "addmv"})
KINDS = LAYERS, frozenset({"convolution"}), FACTORS.keys() - LAYERS - {"convolution"}
"""Of layers, convolutions and attention: a kernel may compute one, and leave the rest to torch."""

COPIES = ("clone", "_to_copy")


def _cut(x: Tensor) -> Tensor:
    return (x.view(torch.int32) >> 13 << 13).view(torch.float32)


FORMATS: Mapping[str, Sequence[Rounding]] = {
    "TF32": (lambda x: _cut((x.view(torch.int32) + (1 << 12)).view(torch.float32)), _cut),
    "bf16": (lambda x: x.bfloat16().float(),),
    "fp16": (lambda x: x.half().float(),),
}


@without_compiler
class Rounded(TorchDispatchMode):
    """Rounds the fp32 factors of sums of products by these operators, and notes which were
    called."""

    def __init__(self, rounding: Rounding, operators: Collection[str] = FACTORS) -> None:
        TorchDispatchMode.__init__(self)
        self.rounding, self.operators = rounding, operators
        self.called = set[str]()

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        name = operator_name(function)
        if name in self.operators:
            self.called.add(name)
            first = FACTORS[name]
            factors = map(self._rounded, args[first : first + 2])
            args = (*args[:first], *factors, *args[first + 2 :])
        return function(*args, **(kwargs or {}))

    def _rounded(self, x: Tensor) -> Tensor:
        return self.rounding(x.contiguous()) if x.dtype == torch.float32 else x


@without_compiler
class RoundedOperands(Rounded):
    """Rounds the fp32 tensors that operators take which compute: all, or without what others have
    computed."""

    def __init__(self, rounding: Rounding, *, computed: bool) -> None:
        Rounded.__init__(self, rounding)
        self.computed, self.results = computed, WeakTensorKeyDictionary()

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        given = [x for x in tree_leaves(args) if isinstance(x, Tensor)]
        if computes := _computes(function):
            args = tree_map_only(Tensor, self._operand, args)
        result = function(*args, **(kwargs or {}))
        if computes or any(x in self.results for x in given):
            made = [x for x in tree_leaves(result) if isinstance(x, Tensor)]
            self.results.update(dict.fromkeys(made))
        return result

    def _operand(self, x: Tensor) -> Tensor:
        return self._rounded(x) if self.computed or x not in self.results else x


def _computes(function: OpOverload) -> bool:
    """Whether it makes numbers: no view, no copy, and nothing in place."""
    schema = function._schema
    views = any(result.alias_info for result in schema.returns)
    return not (schema.is_mutable or views or operator_name(function) in COPIES)


@without_compiler
class GeluByTanh(TorchDispatchMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        by_tanh = {"approximate": "tanh"} if operator_name(function) == "gelu" else {}
        return function(*args, **{**(kwargs or {}), **by_tanh})


def _in_products(name: str) -> Iterator[Rounded]:
    """In all products; and in those of each kind, once the first mode has seen several."""
    for rounding in FORMATS[name]:
        yield (every := Rounded(rounding))
        kinds = [kind for kind in KINDS if not every.called.isdisjoint(kind)]
        if len(kinds) > 1:
            yield from (Rounded(rounding, kind) for kind in kinds)


def _in_operands(name: str) -> Iterator[Rounded]:
    for rounding in FORMATS[name]:
        for computed in (False, True):
            yield RoundedOperands(rounding, computed=computed)


EXPLANATIONS: Mapping[str, Callable[[], Iterator[TorchDispatchMode]]] = {
    GELU_BY_TANH: lambda: iter([GeluByTanh()]),
    **{name: partial(_in_products, name) for name in FORMATS},
    **{operands_in(name): partial(_in_operands, name) for name in FORMATS},
}
"""Modes to run a reference in, one after the other, by the name of what each computes
otherwise."""


def explains(actual: Tensor, expected: Tensor, oracle: Tensor, rounded: Tensor) -> bool:
    """Whether an error is mostly what rounding has changed in the expected output: but for a
    multiple of the output or of its size, which a constant explains as well."""
    step = -(-oracle.numel() // FORMULA_SAMPLE)
    given = oracle, actual, expected, rounded
    y, a, r, p = (x.reshape(-1)[::step].double() for x in given)
    usable = torch.isfinite(y + a + r + p)
    y, a, r, p = (x[usable] for x in (y, a, r, p))
    if y.numel() < FEWEST or not bool(y.any()):
        return False
    scale = y.square().mean().sqrt()
    errors = torch.stack([a - y, p - r], 1) / scale
    outputs = torch.stack([y, y.abs()], 1) / scale
    error, change = (errors - outputs @ (torch.linalg.pinv(outputs) @ errors)).unbind(1)
    left = (error - change).square().sum()
    return bool(left < (1 - EXPLAINED) * error.square().sum())


def errs_as_much(actual: Tensor, expected: Tensor, oracle: Tensor, rounded: Tensor) -> bool:
    """Whether rounding has changed the expected output by about as much as an answer is off: in
    many layers errors are of one size, but at other places."""
    pairs = (actual, oracle), (rounded, expected)
    own, change = (float((x - y).double().norm()) for x, y in pairs)
    return 0 < own < AS_MUCH * change and change < AS_MUCH * own


def lost_bits(actual: Tensor, expected: Tensor) -> int:
    """How many bits of the mantissa of fp32 or fp64 an output lacks in all of its elements, where
    the expected one has them; 0 for a few, which chance explains."""
    if actual.dtype not in BITS or actual.numel() < FEWEST:
        return 0
    mantissa, bits = MANTISSA[precision_of(actual.dtype)], BITS[actual.dtype]
    step = -(-actual.numel() // SPREAD)
    a, y = (x.reshape(-1)[::step].contiguous() for x in (actual, expected))
    told = y.abs() > y.square().mean().sqrt() / 1000  # what underflows or overflows tells nothing
    a, y = (x[told].view(bits) for x in (a, y))
    lost = next((bit for bit in range(mantissa) if bool((a & ((2 << bit) - 1)).any())), mantissa)
    held = (y & ((1 << SHORTEST) - 1) != 0).float().mean()
    return lost if len(a) >= FEWEST and lost >= SHORTEST and bool(held > 0.5) else 0
