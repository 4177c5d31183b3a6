"""Tasks with several right answers: outputs that are factors of a matrix (QR, eigenvectors, SVD),
whose signs are a matter of the code. A right answer is told by what makes it one.

G. Golub, C. Van Loan, Matrix Computations, 4th edition: 2.4 (SVD), 5.2 (QR), 8.1 (eigenvectors of
symmetric matrices).
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.model.operators import Named
from kernels_eval.reference.aten import Values, operator_name

Factors = list[Tensor | None]
LEAST = 1e-300
"""What nothing is divided by less than."""
"""Those of one matrix, in the operator's order; None where a task does not return one."""


class Factoring(NamedTuple):
    """A call that factored `matrix`, and which output of the task is each of its results, or is one
    transposed."""

    operator: str
    matrix: Tensor
    outputs: tuple[int | None, ...]
    transposed: tuple[bool, ...]


@without_compiler
class Factorings(TorchDispatchMode):
    """Notes calls that factor matrices. With `otherwise`, they give another right answer."""

    def __init__(self, *, otherwise: bool = False) -> None:
        TorchDispatchMode.__init__(self)
        self.otherwise = otherwise
        self.calls: list[tuple[str, Tensor, list[Tensor]]] = []

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        result = function(*args, **(kwargs or {}))
        name = operator_name(function)
        if name not in OTHERWISE:
            return result
        found = OTHERWISE[name](*result) if self.otherwise else result
        matrix = args[0]
        if name == "_linalg_eigh" and "U" not in args[1:2]:
            matrix = matrix.tril() + matrix.tril(-1).mT  # it reads one triangle
        elif name == "_linalg_eigh":
            matrix = matrix.triu() + matrix.triu(1).mT
        self.calls.append((name, matrix, list(found)))
        return tuple(found)

    def of(self, outputs: Sequence[Tensor], wanted: Sequence[int]) -> list[Factoring]:
        """Those whose results are these outputs themselves, the wanted ones among them."""
        factorings = []
        for name, matrix, results in self.calls:
            if name not in INVARIANTS:
                continue
            places, transposed = [], []
            for result in results:
                same = [_view_of(x, result) for x in outputs]
                place = next((index for index, how in enumerate(same) if how is not None), None)
                places.append(place)
                transposed.append(place is not None and bool(same[place]))
            if set(places) & set(wanted):
                factorings.append(Factoring(name, matrix, tuple(places), tuple(transposed)))
        return factorings


def residual(factoring: Factoring, outputs: Sequence[Tensor]) -> float:
    """The largest relative error of what must hold of these outputs."""
    factors: Factors = []
    for place, transposed in zip(factoring.outputs, factoring.transposed, strict=True):
        x = None if place is None else outputs[place].double()
        factors.append(x.mT if x is not None and transposed else x)
    found = INVARIANTS[factoring.operator](factoring.matrix.double(), factors)
    worst = float(torch.stack([x.reshape(()) for x in found]).amax())
    return worst if math.isfinite(worst) else sys.float_info.max  # JSON has no infinity


def gram_schmidt_error(factoring: Factoring) -> float:
    """How far from orthogonal Gram and Schmidt's modified method leaves Q: eps times the condition
    of the matrix (Golub and Van Loan, 5.2.9). 0 for other factors."""
    if factoring.operator != "linalg_qr":
        return 0.0
    values = torch.linalg.svdvals(factoring.matrix.double())
    condition = float((values[..., 0] / values[..., -1].clamp(min=LEAST)).amax())
    return torch.finfo(torch.float32).eps * condition


def _view_of(output: Tensor, result: Tensor) -> bool | None:
    """Whether an output is this result transposed; None where it is no view of it."""
    if output.data_ptr() != result.data_ptr() or output.dtype != result.dtype:
        return None
    for transposed in (False, True):
        seen = result.mT if transposed and result.dim() > 1 else result
        if (output.shape, output.stride()) == (seen.shape, seen.stride()):
            return transposed
    return None


def _off(x: Tensor, y: Tensor) -> Tensor:
    """|x - y| / |y| (Frobenius), the worst of a batch."""
    dims = (-2, -1)
    found: Tensor = (x - y).norm(dim=dims) / y.norm(dim=dims).clamp(min=LEAST)
    return found.amax()


def _orthogonal(q: Tensor) -> Tensor:
    made = q.mT @ q
    return _off(made, torch.eye(q.shape[-1], dtype=q.dtype, device=q.device).expand_as(made))


def _qr(a: Tensor, factors: Factors) -> list[Tensor]:
    q, r = factors
    if q is None:
        assert r is not None
        return [_off(r.mT @ r, a.mT @ a), _off(r.triu(), r)]
    r = q.mT @ a if r is None else r
    return [_orthogonal(q), _off(q @ r, a), _off(r.triu(), r)]


def _eigh(a: Tensor, factors: Factors) -> list[Tensor]:
    values, vectors = factors
    assert vectors is not None
    if values is None:
        values = (vectors.mT @ a @ vectors).diagonal(dim1=-2, dim2=-1)
    rising = (-values.diff(dim=-1)).clamp(min=0).sum() / values.abs().amax().clamp(min=LEAST)
    return [_orthogonal(vectors), _off((vectors * values[..., None, :]) @ vectors.mT, a), rising]


def _svd(a: Tensor, factors: Factors) -> list[Tensor]:
    u, s, vh = factors
    held = [_orthogonal(x) for x in (u, None if vh is None else vh.mT) if x is not None]
    few = min(a.shape[-2:])
    u, vh = (None if u is None else u[..., :few], None if vh is None else vh[..., :few, :])
    if u is None:  # the right ones alone, as the left ones of the transposed
        assert vh is not None
        a, u, vh = a.mT, vh.mT, None
    if s is None:
        s = (a.mT @ u).norm(dim=-2)
    falling = (-s).amax().clamp(min=0) + s.diff(dim=-1).clamp(min=0).sum()
    falling /= s.amax().clamp(min=LEAST)
    if vh is None:
        return [*held, _off((u * s.square()[..., None, :]) @ u.mT, a @ a.mT), falling]
    return [*held, _off((u * s[..., None, :]) @ vh, a), falling]


def _flipped(x: Tensor, dim: int) -> Tensor:
    signs = torch.ones(x.shape[dim], dtype=x.dtype, device=x.device)
    signs[::2] = -1
    return x * (signs[:, None] if dim == -2 else signs)


INVARIANTS: dict[str, Callable[[Tensor, Factors], list[Tensor]]] = {
    "linalg_qr": _qr,
    "_linalg_eigh": _eigh,
    "_linalg_svd": _svd,
}
"""What makes factors right: residuals, relative."""
OTHERWISE: dict[str, Callable[..., Sequence[Tensor]]] = {
    "linalg_qr": lambda q, r: (_flipped(q, -1), _flipped(r, -2)),
    "_linalg_eigh": lambda values, v: (values, _flipped(v, -1)),
    "_linalg_svd": lambda u, s, vh: (_flipped(u, -1), s, _flipped(vh, -2)),
    "linalg_eig": lambda values, v: (values.flip(-1), v.flip(-1)),
    "_linalg_eigvals": lambda values: (values.flip(-1),),
}
"""Another right answer of each operator."""
