"""What a reference changes besides its outputs: arguments in place, and buffers of its model. Both
are outputs.

Guarantees: a compared call leaves buffers as it found them, so all start alike; a model that
remembers its calls otherwise is made anew for each.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map

from kernels_eval.config import MOST_KEPT_NUMBERS
from kernels_eval.model.measurement import same
from kernels_eval.model.values import leaves_of, names_of, results_in
from kernels_eval.model.weights import squeezed
from kernels_eval.protocol import BufferForm, KeptNumbers, SideEffects, by_kind

COUNTER = "num_batches_tracked"
"""A buffer of torch's normalisations that no layer reads, unless its momentum is None."""
STRUCTURE = frozenset(vars(nn.Module()))
State = dict[str, list[Any]]
Tensors = dict[str, Tensor]


def state_of(model: Any) -> State:
    """What the modules of a model hold besides their structure, by name: copies of tensors,
    Python's values, and what tells a parameter's values."""
    found: State = {}
    for path, module in model.named_modules() if isinstance(model, nn.Module) else ():
        prefix = f"{path}." if path else ""
        for name, value in (vars(module) | module._buffers).items():
            unread = name == COUNTER and getattr(module, "momentum", None) is not None
            if name not in STRUCTURE and not unread:
                leaves, form = tree_flatten(value)
                inside = tree_leaves([vars(x) for x in leaves if _is_own(x, model)])
                found[prefix + name] = [str(form), *map(_leaf, leaves + inside)]
        for name, x in module.named_parameters(recurse=False):
            found[prefix + name] = [x._version, torch.sum(x.detach(), dtype=_summed_as(x))]
    return found


def plain_values(model: Any, names: Collection[str]) -> list[str]:
    """Those of these names of its state that are no buffers and hold a tensor or a number."""
    state, held = state_of(model), tensors_of(model)
    plain = [name for name in names if name not in held]
    return [name for name in plain if any(isinstance(x, Tensor | int | float) for x in state[name])]


def numbers_after(
    model: Any, calls: Sequence[Sequence[Any]], names: Collection[str]
) -> KeptNumbers:
    """What attributes of these names hold before and after these calls of a model."""
    before = _numbers_of(model, names)
    with torch.no_grad():
        for inputs in calls:
            model(*inputs)
    return KeptNumbers(before=before, after=_numbers_of(model, names))


def _numbers_of(model: Any, names: Collection[str]) -> dict[str, list[float]]:
    state = state_of(model)
    return {name: _numbers_in(state[name]) for name in names if name in state}


def _numbers_in(held: Sequence[Any]) -> list[float]:
    """How many numbers state holds, and some of them, spread."""
    tensors = [torch.tensor(x) if isinstance(x, int | float) else x for x in held]
    parts = [
        (torch.view_as_real(x) if x.is_complex() else x).detach().cpu().double().flatten()
        for x in tensors
        if isinstance(x, Tensor)
    ]
    every = torch.cat([torch.zeros(0, dtype=torch.float64), *parts])
    step = len(every) // (MOST_KEPT_NUMBERS // 2) | 1
    return [float(len(every)), *every[::step][: MOST_KEPT_NUMBERS - 1].nan_to_num().tolist()]


def _is_own(x: Any, model: Any) -> bool:
    """Whether it is an object of a class that the model's source defines, and no module."""
    plain = not isinstance(x, nn.Module) and hasattr(x, "__dict__")
    return plain and type(x).__module__ == type(model).__module__


def _leaf(x: Any) -> Any:
    return x.get_state() if isinstance(x, torch.Generator) else copy_of(x)


def _summed_as(x: Tensor) -> torch.dtype:
    return torch.complex64 if x.is_complex() else torch.float32


def changed_state(was: State, now: State) -> list[str]:
    """Names of what differs, or is new."""
    return [name for name, held in now.items() if not _alike(was.get(name, []), held)]


def _alike(one: list[Any], other: list[Any]) -> bool:
    return len(one) == len(other) and all(
        a is b or (isinstance(a, int | float | str | Tensor) and same(a, b))
        for a, b in zip(one, other, strict=True)
    )


def holds_integers(model: Any, names: Collection[str]) -> bool:
    """Whether a tensor of this state may be an index."""
    leaves = (x for name, held in state_of(model).items() if name in names for x in held)
    return any(isinstance(x, Tensor) and not x.is_floating_point() for x in leaves)


def side_effects(
    before: list[Any], after: list[Any], model: Any, names: Collection[str]
) -> SideEffects:
    """What a call changed, by its arguments before and after it and the names of a model's state
    that did.
    """
    pairs = zip(before, after, strict=True)
    arguments = [index for index, pair in enumerate(pairs) if not same(*pair)]
    buffers = [
        BufferForm(name=name, shape=list(x.shape), dtype=str(x.dtype))
        for name, x in tensors_of(model).items()
        if name in names and name.rpartition(".")[2] != COUNTER
    ]
    kinds = [" and ".join(form.name for form in kind) for kind in by_kind(buffers)]
    return SideEffects(
        arguments=arguments,
        buffers=buffers,
        names=[
            f"argument {index}"
            for index in arguments
            for _ in results_in(after[index], names_of(before[index]))
        ]
        + [f"buffer {kind}" for kind in kinds],
    )


def tensors_of(model: Any) -> Tensors:
    """Parameters and buffers."""
    held = isinstance(model, nn.Module)
    return {**dict(model.named_parameters()), **dict(model.named_buffers())} if held else {}


def lacking(model: Any, asked: SideEffects) -> list[str]:
    """Buffers that a model does not hold as the reference does."""
    held = held_buffers(model, asked.buffers)
    return [form.name for form, x in zip(asked.buffers, held, strict=True) if x is None]


def with_side_effects(
    call: Callable[..., Any], model: Any, inputs: tuple[Any, ...], asked: SideEffects
) -> tuple[Any, list[Any], list[Tensor]]:
    """A call's output, and what the arguments and buffers that the reference changes then hold.
    Buffers that a model lacks are zeros; those of one kind follow each other in one tensor.
    """
    known = {index: names_of(inputs[index]) for index in asked.arguments}
    with kept_state(model, asked) as held:
        output = call(*inputs)
        after = held_buffers(model, asked.buffers)
        shared = {x.untyped_storage().data_ptr() for x in [*held, *after] if x is not None}
        output = tree_map(lambda x: _apart(x, shared), output)
        arguments = [results_in(inputs[index], names) for index, names in known.items()]
        device = next((x.device for x in leaves_of(inputs) if isinstance(x, Tensor)), None)
        found = {
            form.name: _zeros(form, device) if x is None else x.detach()
            for form, x in zip(asked.buffers, after, strict=True)
        }
        buffers = [
            torch.cat([found[form.name].reshape(-1) for form in kind])
            for kind in by_kind(asked.buffers)
        ]
    return output, arguments, buffers


@contextmanager
def kept_state(model: Any, asked: SideEffects | None) -> Iterator[list[Tensor | None]]:
    """Put the buffers that the reference changes back at the end of the block, unless the model is
    made anew.
    """
    forms = asked.buffers if asked else ()
    held = held_buffers(model, forms)
    if asked and asked.remembers:
        yield held
        return
    before = [None if x is None else x.clone() for x in held]
    yield held
    with torch.no_grad():
        for now, x in zip(held_buffers(model, forms), before, strict=True):
            if now is not None and x is not None:
                now.copy_(x)


def held_buffers(model: Any, forms: Sequence[BufferForm]) -> list[Tensor | None]:
    """A model's buffers of these names where it has all, else of these forms in order, also those
    that are plain attributes. What later outputs tell of, by its name alone.
    """
    if not isinstance(model, nn.Module) or not forms:
        return [None] * len(forms)
    named = tensors_of(model)
    own = [named.get(form.name) for form in forms]
    if all(
        x is not None and list(x.shape) == form.shape for form, x in zip(forms, own, strict=True)
    ):
        return own  # an oracle's are of another type
    plain = [x for each in model.modules() for x in vars(each).values() if isinstance(x, Tensor)]
    left, found = [*model.buffers(), *plain], list[Tensor | None]()
    for form, x in zip(forms, own, strict=True):
        if form.told:
            found.append(x if x is not None and _fits(form, x) else None)
            continue
        place = next((at for at, x in enumerate(left) if _fits(form, x)), None)
        found.append(None if place is None else left.pop(place))
    return found


def _fits(form: BufferForm, x: Tensor) -> bool:
    return squeezed(x) == [n for n in form.shape if n != 1] and str(x.dtype) == form.dtype


def _zeros(form: BufferForm, device: torch.device | None) -> Tensor:
    dtype: torch.dtype = getattr(torch, form.dtype.removeprefix("torch."))
    return torch.zeros(form.shape, dtype=dtype, device=device)


def copy_of(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, Tensor) else x


def _apart(x: Any, shared: set[int]) -> Any:
    """An output, not in memory that is put back."""
    return copy_of(x) if type(x) is Tensor and x.untyped_storage().data_ptr() in shared else x
