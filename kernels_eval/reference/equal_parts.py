"""Which dimensions a task cuts into equal parts, as a rotary embedding does: its kernels may rely
on that in other shapes, too.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from kernels_eval.config import MOST_PARTS
from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.operators import Named
from kernels_eval.reference.aten import Values

Place = tuple[int, torch.Size, int]
"""A tensor's memory and shape, and a dimension."""


@without_compiler
class EqualParts(TorchDispatchMode):
    """Records each dimension that `chunk`, `split` or slices cut into few parts of one size: (size,
    how many).
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.found: list[tuple[int, int]] = []
        self._cut: dict[Place, list[int]] = defaultdict(list)

    @property
    def counts(self) -> list[int]:
        return [count for _, count in self.found]

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        whole = args[0] if function.is_view else None
        if isinstance(whole, Tensor) and whole.layout == torch.strided and not whole.is_nested:
            for part in tree_leaves(result):
                self._note(whole, part)
        return result

    def _note(self, whole: Tensor, part: Tensor) -> None:
        pairs = enumerate(zip(whole.shape, part.shape, strict=False))
        fewer = [dim for dim, (size, left) in pairs if left != size]
        if whole.dim() != part.dim() or len(fewer) != 1:
            return
        size, left = whole.shape[fewer[0]], part.shape[fewer[0]]
        parts = self._cut[whole.data_ptr(), whole.shape, fewer[0]]
        if parts and parts[0] != left:
            parts.clear()
        parts.append(left)
        if left * len(parts) == size and len(parts) <= MOST_PARTS:
            self.found.append((size, len(parts)))
        if left * len(parts) >= size:
            parts.clear()
