"""How often a task applies one operator to what that operator gave: steps of an iteration."""

from __future__ import annotations

from collections import Counter

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.weak import WeakIdKeyDictionary

from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.operators import Named
from kernels_eval.reference.aten import MOVES, SOURCES, Values, operator_name


@without_compiler
class Depth(TorchDispatchMode):
    """Counts, on the longest path to a value, the calls of each operator that is not elementwise;
    `most`: of any.
    """

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.most = 0
        self._paths = WeakIdKeyDictionary()

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        path: Counter[str] = Counter()
        for x in tree_leaves((args, kwargs)):
            path |= self._paths.get(x, Counter()) if isinstance(x, Tensor) else Counter()
        name = operator_name(function)
        if not (
            function.is_view or name in MOVES | SOURCES or torch.Tag.pointwise in function.tags
        ):
            path[name] += 1
            self.most = max(self.most, path[name])
        for x in tree_leaves(result) if path else ():
            if isinstance(x, Tensor):
                self._paths[x] = path
        return result
