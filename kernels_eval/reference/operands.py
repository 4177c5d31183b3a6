"""What a task computes its inputs with: weights, buffers and constants, as operators get them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels_eval.config import LARGEST_OPERAND, MOST_OPERANDS, OPERAND_ELEMENTS, OPERAND_ROWS
from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.operators import Named
from kernels_eval.model.values import leaves_of
from kernels_eval.reference.aten import Values

FACTORS = ("alpha", "beta")
"""Numbers of an operator that multiply."""
NUMBERS = ("number", "Optional[number]", "Tensor")
"""Types of arguments that may be numbers, by operators' schemas."""


class Derived:
    """Memory that inputs, and what is computed from them, are held in."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        # weak references keep an address from being taken again
        self._memory: set[StorageWeakRef] = set()
        self._add(leaves_of(inputs))

    def note(self, given: object, result: object) -> bool:
        """Whether any of what is given is derived; then the result is."""
        found = any(self.holds(x) for x in tree_leaves(given) if isinstance(x, Tensor))
        if found:
            self._add(result)
        return found

    def holds(self, x: Tensor) -> bool:
        return not self._memory.isdisjoint(_memory_of(x))

    def _add(self, values: object) -> None:
        for x in tree_leaves(values):
            if isinstance(x, Tensor):
                self._memory.update(_memory_of(x))


def _memory_of(x: Tensor) -> list[StorageWeakRef]:
    """None of what is no array of elements in memory."""
    plain = x.layout == torch.strided and not x.is_nested
    return [StorageWeakRef(x.untyped_storage())] if plain else []


@without_compiler
class Operands(TorchDispatchMode):
    """Copies the first tensors and numbers that stand beside what hangs on these inputs."""

    def __init__(self, inputs: Sequence[Any]) -> None:
        TorchDispatchMode.__init__(self)
        self.derived = Derived(inputs)
        self.found: list[Tensor] = []
        self._numbers: set[float] = set()
        self._tensors: set[object] = set()

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        beside = self.derived.note((args, kwargs), ())
        if beside and len(self.found) < MOST_OPERANDS:
            self._add_numbers(function, args, kwargs)
            for x in tree_leaves((args, kwargs)):
                if isinstance(x, Tensor) and not self.derived.holds(x):
                    self._add_tensor(x)
        result = function(*args, **(kwargs or {}))
        self.derived.note((args, kwargs), result)
        return result

    def _add_numbers(self, function: OpOverload, args: Values, kwargs: Named) -> None:
        arguments = function._schema.arguments
        given = {each.name: value for each, value in zip(arguments, args, strict=False)}
        given |= kwargs or {}
        for each in arguments:
            value = given.get(each.name)
            takes = str(each.type) in NUMBERS and each.name not in FACTORS
            if takes and isinstance(value, int | float) and not isinstance(value, bool):
                self._add_number(float(value))

    def _add_number(self, value: float) -> None:
        if abs(value) <= LARGEST_OPERAND and value not in self._numbers:
            self._numbers.add(value)
            self.found.append(torch.tensor(value))

    def _add_tensor(self, x: Tensor) -> None:
        if x.layout != torch.strided or x.is_nested or x.is_complex() or not x.numel():
            return
        if x.numel() == 1:
            self._add_number(float(x))
            return
        known = x.data_ptr(), x.shape, x.stride()
        if known not in self._tensors and bool(x.isfinite().all()):
            self._tensors.add(known)
            self.found += _parts(x.detach())


def _parts(x: Tensor) -> Iterator[Tensor]:
    """A copy; of what is large, of some rows and of some columns."""
    if x.numel() <= OPERAND_ELEMENTS:
        yield x.clone()
    elif x.dim() > 1:
        yield from (each[..., :OPERAND_ROWS, :].clone() for each in (x, x.mT))
