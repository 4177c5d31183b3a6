"""What a reference changes besides its outputs: arguments in place, and buffers of its model. Both
are outputs.

Guarantees: a compared call leaves buffers as it found them, so all start alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from kernels_eval.model.measurement import same
from kernels_eval.model.weights import squeezed
from kernels_eval.protocol import BufferForm, SideEffects

COUNTER = "num_batches_tracked"
"""A buffer of torch's normalisations that no layer reads, unless its momentum is None."""
States = dict[str, Tensor]


def buffers_of(model: Any) -> States:
    held = model.named_buffers() if isinstance(model, nn.Module) else ()
    return {name: x.clone() for name, x in held if name.rpartition(".")[2] != COUNTER}


def side_effects(before: list[Any], after: list[Any], was: States, now: States) -> SideEffects:
    """What a call changed, by its arguments and the buffers before and after it."""
    pairs = zip(before, after, strict=True)
    arguments = [index for index, pair in enumerate(pairs) if not same(*pair)]
    changed = {name: x for name, x in now.items() if name in was and not same(was[name], x)}
    return SideEffects(
        arguments=arguments,
        buffers=[
            BufferForm(name=name, shape=list(x.shape), dtype=str(x.dtype))
            for name, x in changed.items()
        ],
        names=[f"argument {index}" for index in arguments for _ in tree_leaves(after[index])]
        + [f"buffer {' and '.join(names)}" for names in _alike(list(changed), changed).values()],
    )


def with_side_effects(
    call: Callable[..., Any], model: Any, inputs: tuple[Any, ...], asked: SideEffects
) -> tuple[Any, list[Any], list[Tensor]]:
    """A call's output, and what the arguments and buffers that the reference changes then hold.
    Buffers that a model lacks are zeros; those of one kind follow each other in one tensor.
    """
    with kept_state(model, asked) as held:
        output = call(*inputs)
        after = held_buffers(model, asked.buffers)
        shared = {x.untyped_storage().data_ptr() for x in [*held, *after] if x is not None}
        output = tree_map(lambda x: _apart(x, shared), output)
        arguments = tree_map(copy_of, [inputs[index] for index in asked.arguments])
        device = next((x.device for x in tree_leaves(inputs) if isinstance(x, Tensor)), None)
        found = {
            form.name: _zeros(form, device) if x is None else x.detach()
            for form, x in zip(asked.buffers, after, strict=True)
        }
        kinds = _alike(list(found), found).values()
        buffers = [torch.cat([found[name].reshape(-1) for name in names]) for names in kinds]
    return output, arguments, buffers


@contextmanager
def kept_state(model: Any, asked: SideEffects | None) -> Iterator[list[Tensor | None]]:
    """Put the buffers that the reference changes back at the end of the block."""
    forms = asked.buffers if asked else ()
    held = held_buffers(model, forms)
    before = [None if x is None else x.clone() for x in held]
    yield held
    with torch.no_grad():
        for now, x in zip(held_buffers(model, forms), before, strict=True):
            if now is not None and x is not None:
                now.copy_(x)


def held_buffers(model: Any, forms: Sequence[BufferForm]) -> list[Tensor | None]:
    """A model's buffers of these names where it has all, else of these forms in order, also those
    that are plain attributes.
    """
    if not isinstance(model, nn.Module) or not forms:
        return [None] * len(forms)
    named = dict(model.named_parameters()) | dict(model.named_buffers())
    own = [named.get(form.name) for form in forms]
    if all(
        x is not None and list(x.shape) == form.shape for form, x in zip(forms, own, strict=True)
    ):
        return own  # an oracle's are of another type
    plain = [x for each in model.modules() for x in vars(each).values() if isinstance(x, Tensor)]
    left, found = [*model.buffers(), *plain], list[Tensor | None]()
    for form in forms:
        place = next((at for at, x in enumerate(left) if _fits(form, x)), None)
        found.append(None if place is None else left.pop(place))
    return found


def _fits(form: BufferForm, x: Tensor) -> bool:
    return squeezed(x) == [n for n in form.shape if n != 1] and str(x.dtype) == form.dtype


def _alike(names: list[str], tensors: States) -> dict[tuple[str, torch.dtype], list[str]]:
    """Names of buffers of one kind together: the running means of all layers, say."""
    kinds: dict[tuple[str, torch.dtype], list[str]] = {}
    for name in names:
        kinds.setdefault((name.rpartition(".")[2], tensors[name].dtype), []).append(name)
    return kinds


def _zeros(form: BufferForm, device: torch.device | None) -> Tensor:
    dtype: torch.dtype = getattr(torch, form.dtype.removeprefix("torch."))
    return torch.zeros(form.shape, dtype=dtype, device=device)


def copy_of(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _apart(x: Any, shared: set[int]) -> Any:
    """An output, not in memory that is put back."""
    return copy_of(x) if type(x) is Tensor and x.untyped_storage().data_ptr() in shared else x
