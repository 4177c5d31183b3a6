"""How far plain fp32 addition would be off in the sums of a reference, measured on a few outputs of
every long sum.

Adding n terms in order in fp32 is honest; its relative error is about 0.4 u sqrt(n) for random
signs (u = 2**-24), and up to u n / 2 where all are alike (N. Higham, Accuracy and Stability of
Numerical Algorithms, chapter 4). Does not see sums in convolutions, recurrent layers, attention and
FFTs.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map_only

from kernels_eval.config import (
    ARGUMENT,
    ENOUGH_TERMS,
    FEWEST_SUMS,
    LONG_PRODUCT,
    LONG_SUM,
    MOST_SUMS,
    MOST_TERMS,
    ORDERS,
    REORDERED_TERMS,
    TERMS_AT_ONCE,
    WIDEST,
    WINOGRAD,
)
from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.measurement import least_mark, precision_of
from kernels_eval.model.operators import Named
from kernels_eval.protocol import (
    DECISIVE,
    FEW_TERMS,
    LARGEST,
    LONE_TERMS,
    ORDINARY_TERMS,
    UNIT_FACTORS,
)
from kernels_eval.reference.aten import MOVES, NORMALISATIONS, SOURCES, Values, operator_name
from kernels_eval.reference.equal_elements import ANY_ORDER

PRODUCTS = {"mm": 0, "bmm": 0, "mv": 0, "dot": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}
"""Operators that sum products, and which argument their first factor is."""
SUMS = frozenset("sum nansum mean cumsum".split())
SQUARES = frozenset("linalg_vector_norm var std var_mean std_mean".split())
EXPONENTIALS = frozenset("_softmax _log_softmax logsumexp".split())
LOSSES = {"mse_loss": 2, "smooth_l1_loss": 2, "huber_loss": 2, "soft_margin_loss": 2}
LOSSES |= {"binary_cross_entropy": 3, "nll_loss_forward": 3, "binary_cross_entropy_with_logits": 4}
"""Operators that sum a loss over elements, and which argument says how."""
SORTS = frozenset({"sort", "topk", "msort"})
LARGEST_OF = frozenset("amax amin max min argmax argmin".split())
"""Operators that choose an element."""
MEANS_OF_WINDOWS = frozenset({"avg_pool2d", "avg_pool3d"})
"""Operators that honest code may compute by a sum that slides from window to window."""
DECIDING = frozenset("any all".split())
"""Operators that one element may decide."""
ARITHMETIC = frozenset("add sub rsub mul div".split())
"""Operators whose exact results other code has, too."""
UNREDUCED = 0
ADDING = NORMALISATIONS | PRODUCTS.keys() | SUMS | SQUARES | EXPONENTIALS | LOSSES.keys()
ADDING |= set("convolution _cdist_forward _euclidean_dist".split())
"""Operators whose terms may cancel: other code errs by a share of these, not of the sum."""
CURVES = frozenset(
    """exp exp2 expm1 log log2 log10 log1p log_sigmoid_forward pow sin cos tan sinh cosh tanh
    sigmoid silu gelu mish softplus elu erf erfc logaddexp""".split()
)
"""Operators of which other code errs by an error of the argument, too: exp as 2^(x log2(e))."""
EXACT = (MOVES - {"_to_copy"}) | ANY_ORDER
EXACT |= set(
    """amax amin max min aminmax maximum minimum fmax fmin cummax cummin clamp clamp_min clamp_max
    relu abs neg max_pool2d_with_indices max_pool3d_with_indices adaptive_max_pool2d""".split()
)
"""Operators that round nothing: other code chooses alike from the same values."""
CHOOSING = EXACT | set(
    """_to_copy _unsafe_view index_copy index_fill adaptive_max_pool3d hardtanh threshold
    nan_to_num sign sgn copysign rot90""".split()
)
"""Operators whose results are numbers among their arguments, or constants; or lose digits."""
STATISTICS = frozenset({"running_mean", "running_var"})
"""Arguments that batch normalisation changes, though its schema does not say so."""
PROGRESSIONS = frozenset("arange linspace logspace".split())
"""Sources that compute what they make."""


FP64_UNITS = torch.finfo(torch.float64).eps / torch.finfo(torch.float32).eps


class MadeWith(NamedTuple):
    """What a tensor comes from."""

    error: float = 0.0
    """largest relative RMS error of adding the terms of one operator in order"""
    widest: float = 0.0
    """how wide the scatter of a 16-bit type may make a gate, of the coarsest that was rounded to"""
    computed: bool = False
    """whether any operator did more than move and choose numbers"""
    ordered: bool = False
    """whether it was sorted, and only moved or changed one by one since then"""


def _worst(*made: MadeWith) -> MadeWith:
    return MadeWith(*map(max, zip(*made, strict=True)))


@without_compiler
class LongSums(TorchDispatchMode):
    """Measures the sums of operators called under it: what each tensor is `made_with`, and the
    `lengths` of the longest, by the kind of inputs that tells of their terms.

    With a generator, each result is moved by that much, or by this many units in its last place
    (RMS; `units_half` in a 16-bit type, by default half as many), evenly spread so that two moves
    seldom cancel, but not where arithmetic is exact, and terms of sums by these units (of a 16-bit
    type by default alone).
    """

    def __init__(
        self,
        moving: torch.Generator | None = None,
        units: float = 0,
        units_half: float | None = None,
    ) -> None:
        TorchDispatchMode.__init__(self)
        self.moving, self.units = moving, units
        self.lengths = Counter[str]()
        self._by_memory: dict[int, MadeWith] = {}
        self._numbers = MadeWith()
        # kernels of a smaller type compute in fp32: more would hide the rounding to FP8
        self.units_half = units / 2 if units_half is None else units_half
        self.terms_half = units / 2 if units_half is None else 0.0

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        name, given = operator_name(function), kwargs or {}
        error, moves = self._largest_errors(name, args)
        # views, and what is written in place or only chosen, are moved where they are made
        made = name not in EXACT and not any(x.alias_info for x in function._schema.returns)
        if self.moving is None:
            before = _worst(self._numbers, self.made_with(args, given))
            result = function(*args, **given)
            computed = _computes(function, args, given, result)
            own = MadeWith(error, self._rounding(name, args, result), computed, name in SORTS)
            if not _keeps_order(function):
                before = before._replace(ordered=False)
            self._note(function, before, own, args, given, result)
            return result
        if not made:
            return function(*args, **given)
        if name in ADDING or name in CURVES or _quantises(name):
            far = WINOGRAD if name == "convolution" else ARGUMENT if name in CURVES else 1
            args = tree_map_only(Tensor, partial(self._moved, error=0.0, far=far), args)
        if name == "histc":
            args = self._across_bins(*args)
        result = function(*args, **given)
        moved = tree_map_only(Tensor, partial(self._moved, error=moves), result)
        if name not in ARITHMETIC or "rounding_mode" in given or not isinstance(moved, Tensor):
            return moved
        with _disable_current_modes():
            exact = function(*tree_map_only(Tensor, Tensor.double, args), **given) == result
            if name == "div":  # as by the reciprocal
                exact &= args[0] * (1 / args[1]) == result
            return torch.where(exact, result, moved)

    def made_with(self, *values: object) -> MadeWith:
        memories = (_memory(x) for x in tree_leaves(values) if isinstance(x, Tensor))
        found = [self._by_memory.get(memory, MadeWith()) for memory in memories]
        return _worst(MadeWith(), *found)

    def only_chosen(self, output: Tensor) -> bool:
        """Whether its elements are numbers that were given: there is one right answer."""
        known = _memory(output) in self._by_memory
        return known and not _worst(self._numbers, self.made_with(output)).computed

    def _rounding(self, name: str, args: Values, result: object) -> float:
        """The gate of what an operator computes in 16 bits: an input that is cast is exact."""
        given = name == "_to_copy" and _memory(args[0]) not in self._by_memory
        if given or name in EXACT or name in SOURCES:
            return 0.0
        floats = [x for x in tree_leaves(result) if isinstance(x, Tensor) and x.is_floating_point()]
        return max((WIDEST.of(precision_of(x.dtype)) for x in floats if x.itemsize == 2), default=0)

    def _note(
        self,
        function: OpOverload,
        before: MadeWith,
        own: MadeWith,
        args: Values,
        kwargs: dict[str, object],
        result: object,
    ) -> None:
        """Memory that is written to keeps what it has; new memory has nothing of an earlier one."""
        name = operator_name(function)
        made = own if name in SOURCES else _worst(own, before)
        if name == "_local_scalar_dense":
            self._numbers = made
        values = _named(function, args, kwargs)
        for each in function._schema.arguments:
            if each.name in STATISTICS or (each.alias_info and each.alias_info.is_write):
                self._keep(values.get(each.name), made, new=False)
        new = not any(x.alias_info for x in function._schema.returns)
        self._keep(result, made, new=new)

    def _keep(self, values: object, made: MadeWith, *, new: bool) -> None:
        for x in tree_leaves(values):
            if isinstance(x, Tensor):
                kept = MadeWith() if new else self._by_memory.get(_memory(x), MadeWith())
                self._by_memory[_memory(x)] = _worst(kept, made)

    def _largest_errors(self, name: str, args: Values) -> tuple[float, float]:
        """As `sequential_errors`; 0 without a long sum."""
        refused = RuntimeError, IndexError, TypeError, ValueError
        with suppress(*refused), _disable_current_modes():  # others need not see these operators
            if name in LARGEST_OF or name in DECIDING:
                kind = LARGEST if name in LARGEST_OF else DECISIVE
                self.lengths |= Counter({kind: _rows(args[0], _first(args[1:])).shape[1]})
            terms = _terms(name, args)
            if terms is not None and terms.shape[-1] >= LONG_SUM and terms.is_floating_point():
                error, moves = sequential_errors(terms[:, :MOST_TERMS])
                kinds = [ORDINARY_TERMS, UNIT_FACTORS][: 1 + (name in PRODUCTS)]
                least = LONG_PRODUCT if name in PRODUCTS else LONG_SUM
                if name not in MEANS_OF_WINDOWS and terms.shape[-1] >= least:
                    kinds += [FEW_TERMS, LONE_TERMS]
                self.lengths |= Counter(dict.fromkeys(kinds, terms.shape[-1]))
                if terms.dtype == torch.float64:  # measured in fp32, whose errors are alike
                    return error * FP64_UNITS, moves * FP64_UNITS
                return error, moves
        return 0.0, 0.0

    def _across_bins(self, x: Tensor, bins: int = 100, low: float = 0, high: float = 0) -> Values:
        """A histogram's arguments, moved: other code counts values near a bin's end in the next
        bin.
        """
        start = x.amin() if low == high else low
        return self._moved(x - start, error=0.0) + start, bins, low, high

    def _moved(self, x: Tensor, error: float, far: float | None = None) -> Tensor:
        assert self.moving
        if not x.is_floating_point() or x.device.type != self.moving.device.type:
            return x
        if x.itemsize == 1:
            return x  # the step to FP8 is exact: what is moved comes before it
        with _disable_current_modes():
            return self._moved_by(x, error, far)

    def _moved_by(self, x: Tensor, error: float, far: float | None) -> Tensor:
        eps = torch.finfo(x.dtype).eps
        if bool(((x == x.round()) & (x.abs() < 1 / eps)).all()):
            return x  # whole numbers are exact
        if x.element_size() > 2:
            units = self.units * (far or 1)
        else:
            units = self.units_half if far is None else self.terms_half
        most = math.sqrt(3) * max(units * eps, error)
        wide = torch.promote_types(x.dtype, torch.float32)
        drawn = torch.rand(x.shape, generator=self.moving, device=x.device, dtype=wide)
        moved = (x * (1 + most * (2 * drawn - 1))).to(x.dtype)
        return torch.where(x.abs() < least_mark(x.reshape(-1)), moved, x)


def _memory(x: Tensor) -> int:
    return x.untyped_storage()._cdata if x.layout == torch.strided else id(x)


def _named(function: OpOverload, args: Values, kwargs: dict[str, object]) -> dict[str, object]:
    """An operator's arguments by name; defaults are left out."""
    names = (x.name for x in function._schema.arguments)
    return dict(zip(names, args, strict=False)) | kwargs


def _computes(function: OpOverload, args: Values, given: dict[str, object], result: object) -> bool:
    """Whether an operator makes floats that are not among its arguments. What Python reads, it may
    compute with.
    """
    name = operator_name(function)
    values = _named(function, args, given)
    made = [x for x in tree_leaves(result) if not isinstance(x, Tensor) or _has_digits(x)]
    if function.is_view or not made:
        return False
    if name in SOURCES:
        return name in PROGRESSIONS or isinstance(values.get("value"), Tensor)
    adds = bool(values.get("accumulate")) or "reduce" in values
    if adds or name not in CHOOSING:
        return True
    read = [x for x in tree_leaves((args, given)) if isinstance(x, Tensor) and _has_digits(x)]
    return not all(_holds(x, y) for x in made for y in read)


def _quantises(name: str) -> bool:
    """Whether an operator divides by a scale and rounds: other code multiplies instead."""
    return "quantize" in name and "dequantize" not in name


def _keeps_order(function: OpOverload) -> bool:
    each = torch.Tag.pointwise in function.tags or operator_name(function) in CHOOSING
    return each or function.is_view


def _has_digits(x: Tensor) -> bool:
    return x.is_floating_point() or x.is_complex()


def _holds(made: object, read: Tensor) -> bool:
    """Whether a result has room for all digits of an argument."""
    if not isinstance(made, Tensor):
        return False
    return made.dtype == read.dtype or made.itemsize > read.itemsize


def sequential_errors(terms: Tensor) -> tuple[float, float]:
    """RMS errors of adding each row of `terms` (outputs, length) in order in fp32, divided by what
    such sums are where signs are random (the root of the sum of squared terms), if that is larger
    than what they are, and by what they are: of sums that cancel, most of what follows adds little.

    A one-signed row's relative error counts where larger: a ratio of sums may follow. The worst
    point on the way counts. What is not finite is left out. The error of one sum is chance: a
    short row is added in other orders, too, as atomic additions do.
    """
    terms = terms.float().nan_to_num(0.0, 0.0, 0.0)
    if terms.numel() <= REORDERED_TERMS:
        generator = torch.Generator().manual_seed(0)
        orders = [torch.randperm(terms.shape[1], generator=generator) for _ in range(ORDERS)]
        terms = torch.cat([terms, *(terms[:, order.to(terms.device)] for order in orders)])
    off, totals = _added_in_order(terms)
    error, size = off.square().sum(), totals.square().sum()
    least = terms.square().sum(dtype=torch.float64)
    found = [float((error / x).sqrt()) for x in (size.maximum(least), size)]
    alike = ((terms.amin(1) >= 0) | (terms.amax(1) <= 0)) & (totals != 0)
    relative = [0.0, *(off / totals.abs())[alike].tolist()]
    one, other = (max(x if math.isfinite(x) else 0.0 for x in (y, *relative)) for y in found)
    return one, other


def _added_in_order(terms: Tensor) -> tuple[Tensor, Tensor]:
    """Each row's largest difference between fp32 and float64 sums on the way, and its sum."""
    rows = len(terms)
    off, totals = torch.zeros(2, rows, dtype=torch.float64, device=terms.device)
    end = np.zeros(rows, np.float32)
    for part in terms.split(max(1, TERMS_AT_ONCE // max(1, rows)), 1):
        plain = part.cpu().numpy().copy()
        plain[:, 0] += end
        plain = np.add.accumulate(plain, 1)
        end = plain[:, -1]
        exact = part.double().cumsum(1) + totals[:, None]
        off = torch.maximum(off, (torch.from_numpy(plain).to(exact) - exact).abs().amax(1))
        totals = exact[:, -1]
    return off, totals


def _terms(name: str, args: Values) -> Tensor | None:
    """The terms of a few spread outputs (outputs, length). None for an operator without sums."""
    if name in PRODUCTS:
        a, b = args[PRODUCTS[name] :][:2]
        a = a[None] if a.dim() == 1 else a
        b = b[:, None] if b.dim() < a.dim() else b
        a, b = (x[None] if x.dim() == 2 else x for x in (a, b))
        batch, row, column = _spread((*a.shape[:2], b.shape[2]), a.shape[2])
        found: Tensor = a[batch, row] * b[batch, :, column]
        return found
    if name in NORMALISATIONS:
        return _squares(_rows(*_layer(name, args)))
    if name in LOSSES:
        return _losses(name, LOSSES[name], args)
    if name in SUMS | SQUARES | EXPONENTIALS:
        rows = _rows(args[0], _first(args[2 if name == "linalg_vector_norm" else 1 :]))
        if name in EXPONENTIALS:
            return (rows - rows.amax(1, keepdim=True)).exp()
        return _squares(rows) if name in SQUARES else rows
    if name in MEANS_OF_WINDOWS and args[2:3] and args[2][-1] == 1:
        return _slid(args[0], args[1][-1])
    return None


def _first(args: Values) -> int | Sequence[int] | None:
    dims: int | Sequence[int] | None = args[0] if args else None
    return dims


def _slid(x: Tensor, size: int) -> Tensor:
    """What is added to and taken from a sum as its window of this size slides along a row."""
    rows = _rows(x, -1)
    left = torch.nn.functional.pad(rows, (size, 0))[:, : rows.shape[1]]
    return torch.stack([rows, -left], -1).flatten(1)


def _losses(name: str, place: int, args: Values) -> Tensor | None:
    if args[place : place + 1] == (UNREDUCED,):
        return None
    given = [*args[:place], *[None] * (place - len(args))]
    if name != "nll_loss_forward" and given[0].shape == given[1].shape and not any(given[2:]):
        given[:2] = [x.reshape(-1)[:MOST_TERMS] for x in given[:2]]
    each = getattr(torch.ops.aten, name)(*given, UNREDUCED, *args[place + 1 :])
    found: Tensor = each[0] if isinstance(each, tuple) else each
    return found.reshape(1, -1)


def _squares(rows: Tensor) -> Tensor:
    """Squares, squares around the mean, and what Welford's updates add."""
    squares = torch.cat([rows, rows - rows.mean(1, keepdim=True)]).square()
    if rows.shape[1] > MOST_TERMS:
        return squares
    count = torch.arange(1, rows.shape[1] + 1, device=rows.device)
    means = rows.cumsum(1, dtype=torch.float64) / count
    updates = (rows - means) * (rows - torch.nn.functional.pad(means, (1, -1)))
    return torch.cat([squares, updates.to(squares.dtype)])


def _layer(name: str, args: Values) -> tuple[Tensor, list[int]]:
    x = args[0]
    if name == "native_layer_norm":
        return x, list(range(-len(args[1]), 0))
    if name == "native_group_norm":
        return x.reshape(args[3], args[6], -1), [-1]
    return x, [dim for dim in range(x.dim()) if dim != 1]


def _rows(x: Tensor, dims: int | Sequence[int] | None) -> Tensor:
    dims = [dims] if isinstance(dims, int) else list(dims or range(x.dim()))
    x = x.movedim(dims, tuple(range(-len(dims), 0)))
    kept = x.shape[: x.dim() - len(dims)]
    if not kept:
        return x.reshape(1, -1)
    return x[_spread(kept, math.prod(x.shape[len(kept) :]))].flatten(1)


def _spread(sizes: Sequence[int], length: int) -> tuple[Tensor, ...]:
    """Indices of up to MOST_SUMS spread places; fewer where `length` terms each are much."""
    total = math.prod(sizes)
    count = min(MOST_SUMS, max(FEWEST_SUMS, ENOUGH_TERMS // max(length, 1)), total)
    index = np.arange(count)  # one further each time, for other columns
    places = (index * total // max(count, 1) + index) % total
    # not torch's, whose first use imports a library for symbols (1 s)
    return tuple(map(torch.from_numpy, np.unravel_index(places, tuple(sizes))))
