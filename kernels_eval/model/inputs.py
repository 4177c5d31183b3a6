"""Inputs and weights made from a seed, the same in two processes that never exchange them.

Guarantees: one task source, seed, distribution and device give bit-identical inputs, whose meaning
(integers, labels, masks, matrix structure, probabilities) is kept.
"""

from __future__ import annotations

import importlib.util
import math
import os
import shutil
import sys
from collections import OrderedDict
from collections.abc import Sequence
from itertools import pairwise
from random import Random, SystemRandom
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from kernels_eval.config import (
    CONSTANT_SAMPLE,
    CONSTANT_SHARE,
    DISTINCT_STEP,
    IMPULSE_RANGE,
    MOST_DISTINCT,
    OFFSET_MEAN,
    SHAPE_SCOPES,
    SINGLES,
    SMALL_DEVIATION,
    TAILS,
    VARIED_SHARE,
)
from kernels_eval.model.few_terms import with_few_terms
from kernels_eval.model.measurement import computable
from kernels_eval.model.seeding import seed_generators
from kernels_eval.protocol import (
    DECLARED,
    FEW_TERMS,
    FEWER_TERMS,
    AboutTask,
    InputNote,
    InputPlan,
    ModelSpec,
)
from kernels_eval.records import Json, stable_hash

PERMUTED = "permuted"
"""Not a distribution: floating arguments in another order, which keeps labels, masks and
targets.
"""
BLOCKS = (DECLARED, "uniform", "normal", "normal_x10", "sparse", "small_integers")
"""What the blocks of `mixed` are drawn from."""
STATISTICS = ("running_mean", "running_var")
COUNTED = (*STATISTICS, "num_batches_tracked")
"""Buffers that a call changes in training."""

PRECISIONS = {"": None, "fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}
"""What a task's constant `PRECISION` casts floating inputs and parameters to, as KernelBench's
option does (`src/kernelbench/eval.py`, `_process_input_tensor`, and
`model.to(dtype=precision)`).
"""
VARIED, VARIED_POSITIVE = "varied", "varied_positive"
"""As declared, but for arguments whose elements are all one number: of ones, one in eight is 0; of
zeros, each is uniform in [0, 1]; of any other number, and of ones in `varied_positive`, uniform in
[0.5, 1.5] times that. One in eight booleans is the other one. Integers stay: they may count, or
name a class.
"""
Arguments = tuple[list[Any], Json]


def load_module(path: str, name: str) -> ModuleType:
    """Execute a source file as a module, kept on disk: Triton and inspect read it again."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def load_candidate(path: str) -> ModuleType:
    """Load a copy in the working directory: many candidates write beside their file."""
    return load_module(os.path.abspath(shutil.copy(path, os.curdir)), "candidate")


def construct(module: ModuleType, task: ModuleType, spec: ModelSpec) -> nn.Module:
    """Build a task's model as KernelBench does: one seed before the arguments and again before the
    constructor.

    Weights are made on `construct_on` (large ones take seconds on a CPU core), then `moved`.
    """
    own = spec.model_copy(update={"precision": precision_of(task)})
    return constructed(module, constructor_arguments(task, spec), own)


def declared(task: AboutTask[Any], device: str, construct_on: str) -> ModelSpec:
    return ModelSpec(
        entry_point=task.entry_point,
        init_form=task.init_form,
        device=device,
        construct_on=construct_on,
    )


def precision_of(task: ModuleType) -> str:
    """A task module's precision. Raises ValueError for an unknown one."""
    found = str(getattr(task, "PRECISION", ""))
    if found not in PRECISIONS:
        raise ValueError(f"PRECISION is {found!r}, which is none of {', '.join(PRECISIONS)[2:]}")
    return found


def constructor_arguments(module: ModuleType, spec: ModelSpec) -> Arguments:
    seed_generators(spec.seed)
    with torch.device(spec.construct_on):
        made = module.get_init_inputs()
    args, kwargs = made[:2] if spec.init_form == "args_kwargs" else (made, {})
    dtype, device = PRECISIONS[precision_of(module)], spec.construct_on
    moved_kwargs = {name: _to_device(value, device, dtype) for name, value in kwargs.items()}
    return [_to_device(value, device, dtype) for value in args], moved_kwargs


def constructed(module: ModuleType, arguments: Arguments, spec: ModelSpec) -> nn.Module:
    args, kwargs = arguments
    seed_generators(spec.seed)
    with torch.device(spec.construct_on):
        model: nn.Module = getattr(module, spec.entry_point)(*args, **kwargs)
    dtype = PRECISIONS[spec.precision]
    return model.to(dtype) if dtype and isinstance(model, nn.Module) else model


def moved(model: Any, device: str) -> Any:
    return model.to(device) if isinstance(model, nn.Module) else model


def made_elsewhere(model: Any, device: str) -> bool:
    """Whether parameters were made on another device than asked: another generator, so other
    weights.
    """
    kind = torch.device(device).type
    return isinstance(model, nn.Module) and any(
        parameter.device.type != kind for parameter in model.parameters()
    )


def make_inputs(
    task: ModuleType,
    seed: int,
    distribution: str,
    plan: InputPlan | None,
    device: str,
    shape: str = DECLARED,
) -> list[Any]:
    """Arguments for one call. `plan`: which may be redrawn and resized; None: as declared."""
    seed_generators(seed)
    with torch.device(device):
        made, dtype = task.get_inputs(), PRECISIONS[precision_of(task)]
        values = [_to_device(value, device, dtype) for value in made]
    if plan is None:
        return values
    for index, dim, size in plan.shapes.get(shape, ()):
        part = values[index].narrow(dim, 0, size)
        values[index] = _laid_out(part, part)  # dense, in the order of its strides
    if distribution in (FEW_TERMS, FEWER_TERMS):
        return with_few_terms(values, plan, seed, fewer=distribution == FEWER_TERMS)
    if distribution != DECLARED:  # drawn last: what it changes lies within the smaller shape
        values = [
            _redraw(value, note, seed + index, distribution)
            for index, (value, note) in enumerate(zip(values, plan.notes, strict=True))
        ]
    if plan.distinct:
        for value, note in zip(values, plan.notes, strict=True):
            if note.vary and not note.pattern and not note.symmetric:
                _make_distinct(value)
    return values


def plan_inputs(inputs: list[Any]) -> InputPlan:
    """What may vary: floating tensors but labels, masks or probabilities, keeping zeros and
    symmetry.
    """
    sizes = [list(value.shape) if isinstance(value, Tensor) else None for value in inputs]
    return InputPlan(notes=[_note(value) for value in inputs], shapes=smaller_shapes(sizes))


def smaller_shapes(
    shapes: list[list[int] | None], random: Random | None = None
) -> dict[str, list[tuple[int, int, int]]]:
    """Ways to make all arguments smaller, so that no dimension starts to broadcast.

    `batch_1`: the first dimension becomes 1, where its size is unique. Others are named by what
    shrinks and the tail left (`TAILS`): `each_1` every dimension alone, counted from the last (of
    matrices and vectors: kernels may rely on square images); `all_1` equal sizes together; `last_1`
    and `first_1` those equal to the first tensor's last or first. The reference says which are
    accepted. Sizes are secret without a `random`.
    """
    dims = [
        (i, d, d - len(shape), size)
        for i, shape in enumerate(shapes)
        if shape
        for d, size in enumerate(shape)
    ]
    sized = [shape for shape in shapes if shape]
    if not sized or 0 in {size for *_, size in dims}:
        return {}
    lead = next((shape for shape in sized if len(shape) > 1), sized[0])
    first = [dim for dim in dims if dim[-1] == lead[0]]
    last = [dim for dim in dims if dim[-1] == lead[-1]]
    variants = {}
    if lead[0] > 1 and all(d == 0 for _, d, *_ in first):
        variants["batch_1"] = [(i, d, 1) for i, d, *_ in first]
    each = dims if max(map(len, sized)) <= 2 else []
    for name, tail in TAILS.items():
        for scope, chosen in zip(SHAPE_SCOPES, (each, dims, last, first), strict=True):
            changed = _shrunk(chosen, scope == "each", tail, random or SystemRandom())
            if changed:
                variants[f"{scope}_{name}"] = changed
    return variants


def _shrunk(
    dims: list[tuple[int, int, int, int]], by_place: bool, tail: int, random: Random
) -> list[tuple[int, int, int]]:
    keyed = [((size, by_place and place), i, d, place) for i, d, place, size in dims if size > 4]
    ends = {key for key, *_, place in keyed if place == -1} or {key for key, *_ in keyed}
    drawn = {
        key: drawn_size(key[0], tail if key in ends else 1, random)
        for key in dict.fromkeys(key for key, *_ in keyed)
    }
    return [(i, d, drawn[key]) for key, i, d, _ in keyed]


def drawn_size(size: int, tail: int, random: Random) -> int:
    """A size from half of this one on, with `tail` elements left over (-1: all but one) in blocks
    of every power of two up to the largest (at most 1,024) that allows a choice.
    """
    block = 4
    while block < 1024 and 8 * block <= size:
        block *= 2
    least = max(2, size // 2)
    fitting = range(least + (tail - least) % block, size, block)
    return random.choice(fitting) if fitting else max(2, size - abs(tail))


def _note(value: Any) -> InputNote:
    if not isinstance(value, Tensor) or value.numel() == 0:
        return InputNote(vary=False)
    sample = computable(value.detach())
    constant = bool((sample == sample.reshape(-1)[0]).all())
    if not value.is_floating_point():
        return InputNote(vary=False, constant=constant and value.dtype == torch.bool)
    # labels, masks and targets of +-1 mean something by being integers
    integers = bool((sample == sample.round()).all())
    if integers or _probabilities(sample):
        return InputNote(vary=False, constant=constant)
    return InputNote(
        vary=True,
        constant=constant,
        pattern=bool((sample == 0).float().mean() > 0.2),
        symmetric=sample.dim() >= 2 and torch.equal(sample, sample.mT),
    )


def _probabilities(sample: Tensor) -> bool:
    if sample.dim() == 0 or sample.shape[-1] <= 1 or not bool((sample >= 0).all()):
        return False
    sums = sample.sum(-1)
    return torch.allclose(sums, torch.ones_like(sums), atol=1e-3)


def _redraw(value: Any, note: InputNote, seed: int, distribution: str) -> Any:
    if distribution == PERMUTED and isinstance(value, Tensor) and value.is_floating_point():
        return _permuted(value, seed)
    if distribution in (VARIED, VARIED_POSITIVE):
        return _varied(value, seed, distribution) if note.constant else value
    if not note.vary:
        return value
    generator = torch.Generator(device=value.device).manual_seed(seed)
    name = distribution.removesuffix("_positive")
    drawn = _mixed(value, generator) if name == "mixed" else _drawn(value, generator, name)
    if name != distribution:
        drawn = drawn.abs() + 0.01
    if note.pattern:
        drawn = drawn.masked_fill(value == 0, 0)
    if note.symmetric and drawn.shape[-1] == drawn.shape[-2]:
        drawn = (drawn + drawn.mT) / 2
    return _laid_out(drawn.to(value.dtype), value)  # a kernel may rely on the declared strides


def draw_each(value: Tensor) -> None:
    """Plan and draw a tensor's every distribution once: a GPU loads each kernel on its first
    use.
    """
    plan_inputs([value])
    names = (*BLOCKS[1:], "mixed", "impulse", "offset", "small", "singles", "non_finite", PERMUTED)
    for name in names:
        _redraw(value, InputNote(vary=True), 0, name)


def _drawn(value: Tensor, generator: torch.Generator, name: str) -> Tensor:
    """A tensor of one distribution. `impulse` and `non_finite` change few elements of `value`: two
    and one in 2,048 (at most 1,024)."""
    shape, device, size = value.shape, value.device, value.numel()
    kind, _, factor = name.partition("_x")
    if kind == "uniform":
        return torch.rand(shape, generator=generator, device=device) * 2 - 1
    if kind == "small_integers":
        return torch.randint(-3, 4, shape, generator=generator, device=device).float()
    drawn = torch.randn(shape, generator=generator, device=device) * float(factor or 1)
    if kind == "sparse":
        drawn *= torch.rand(shape, generator=generator, device=device) < 0.1
    elif kind == "singles":
        others = torch.randperm(size, generator=generator, device=device)[SINGLES:]
        drawn.view(-1)[others] = 0
    elif kind == "normal":
        _make_uneven(drawn, float(factor or 1))
    elif kind == "small":
        drawn *= SMALL_DEVIATION
        if shape:  # a maximum that starts at 0 is wrong here, too
            drawn[shape[0] // 2 :].abs_().neg_()
    elif kind == "offset":
        drawn += min(OFFSET_MEAN, 2**-7 / torch.finfo(value.dtype).eps)
    elif kind in ("impulse", "non_finite"):
        drawn, random = _flat_copy(value), Random(generator.initial_seed())
        odd = [math.nan, math.inf, -math.inf]
        if kind == "impulse":
            count = 2 + min(size // 2048, 1022)
            odd = [random.uniform(*IMPULSE_RANGE) * (-1) ** index for index in range(count)]
        places = random.sample(range(size), min(len(odd), size))
        if kind == "impulse" and size - 1 not in places and random.random() < 0.5:
            places[-1] = size - 1
        drawn.view(-1)[places] = torch.tensor(odd[: len(places)], device=device)
    return drawn


def _make_uneven(drawn: Tensor, spread: float) -> None:
    """Make maxima wrong that leave out the last element or start at 0, also behind a clamp."""
    if drawn.dim() > 1:
        drawn[..., ::2, :] /= 8
    ends = torch.tensor([0, 1.5, -1.5], device=drawn.device) * spread
    for dim in range(drawn.dim()):
        if drawn.shape[dim] >= 8:
            end = drawn.select(dim, -1)
            index = torch.arange(end.numel(), device=drawn.device)
            end.copy_(ends[index % len(ends)].view(end.shape))
    for dim in (0, -1) if drawn.dim() > 1 else ():
        if drawn.shape[dim] > 3:
            negative = drawn.select(dim, 1)
            negative.abs_().neg_().sub_(spread)


def _make_distinct(value: Tensor) -> None:
    """Separate equal elements beyond rounding, also after a softmax before topk."""
    if value.dtype != torch.float32 or not 1 < value.numel() <= MOST_DISTINCT:
        return
    rising, order = value.reshape(-1).sort(stable=True)
    places = torch.arange(len(order), device=value.device)
    nth = places - (places * (rising.diff(prepend=rising[:1]) != 0)).cummax(0).values
    moves = nth * min(DISTINCT_STEP, 1 / (8 + 8 * float(nth.max())))
    scale = rising[rising != 0].abs().nanmedian().nan_to_num(1)
    rising = torch.where(rising != 0, rising * (1 - moves), scale * moves)
    value.copy_(torch.empty_like(rising).scatter_(0, order, rising).view_as(value))


def _mixed(value: Tensor, generator: torch.Generator) -> Tensor:
    """The declared tensor with 16 blocks of other distributions: no few elements tell the rest."""
    random, drawn = Random(generator.initial_seed()), _flat_copy(value)
    flat = drawn.view(-1)
    cuts = sorted(random.randrange(len(flat)) for _ in range(16))
    for start, end in pairwise([0, *cuts, len(flat)]):
        part = flat[start : end : random.choice((1, 1, 2, 3, 7))]
        kind = random.choice(BLOCKS)
        if kind != DECLARED and len(part):
            part.copy_(_drawn(part, generator, kind))
    return drawn


def _laid_out(drawn: Tensor, value: Tensor) -> Tensor:
    return drawn if value.is_contiguous() else torch.empty_like(value).copy_(drawn)


def _flat_copy(value: Tensor) -> Tensor:
    return value.float().clone(memory_format=torch.contiguous_format)


def _varied(value: Tensor, seed: int, distribution: str) -> Tensor:
    generator = torch.Generator(device=value.device).manual_seed(seed)
    drawn = torch.rand(value.shape, generator=generator, device=value.device)
    drawn.view(-1)[drawn.argmin()] = 0.0  # one element of few changes, too
    number = float(value.reshape(-1)[0])
    if value.dtype == torch.bool:
        varied = value ^ (drawn < VARIED_SHARE)
    elif number == 1 and value.numel() > 1 and distribution == VARIED:
        varied = (drawn >= VARIED_SHARE).to(value.dtype)
    elif number == 0 and value.numel() > 1:
        varied = drawn.to(value.dtype)
    else:
        varied = ((drawn + 0.5) * (number or 1.0)).to(value.dtype)
    return _laid_out(varied, value)


def _permuted(value: Tensor, seed: int) -> Tensor:
    generator = torch.Generator(device=value.device).manual_seed(seed)
    flat, order = value.reshape(-1), torch.randperm
    drawn = flat[order(value.numel(), generator=generator, device=value.device)]
    return (flat.roll(1) if torch.equal(drawn, flat) else drawn).reshape(value.shape)


def parameters_of(model: Any) -> dict[str, Tensor]:
    held = model.named_parameters() if isinstance(model, nn.Module) else ()
    return {name: p for name, p in held if p.is_floating_point()}


def redrawn_of(model: Any) -> list[Tensor]:
    return [*parameters_of(model).values(), *running_statistics(model)]


def is_constant(weight: Tensor) -> bool:
    """Whether one number stands for many elements: what multiplies by 0 or 1 could be left out."""
    flat = computable(weight.detach().reshape(-1))
    _, counts = flat[:: flat.numel() // CONSTANT_SAMPLE + 1].unique(return_counts=True)
    most = int(counts.max()) if len(counts) else 0
    return flat.numel() == 1 or most >= max(2, CONSTANT_SHARE * int(counts.sum()))


def squeezed(parameter: Tensor) -> list[int]:
    return [size for size in parameter.shape if size != 1]


def running_statistics(model: Any, *, renamed: bool = False) -> list[Tensor]:
    """Running statistics of normalisation layers, and buffers made of zeros or of ones, in order;
    else, if `renamed`, floating buffers and plain tensor attributes.
    """
    if not isinstance(model, nn.Module):
        return []
    buffers = {name: b for name, b in model.named_buffers() if b.is_floating_point()}
    statistics = {name for name in buffers if name.rpartition(".")[2] in STATISTICS}
    if statistics or not renamed:
        return [b for name, b in buffers.items() if name in statistics or _is_gain(b)]
    held = [value for each in model.modules() for value in vars(each).values()]
    plain = [x for x in held if isinstance(x, Tensor) and x.is_floating_point()]
    return [*buffers.values(), *plain]


def _is_gain(buffer: Tensor) -> bool:
    """Whether a buffer was made of zeros or ones, as weights are. One number alone is a setting."""
    if buffer.numel() < 2:
        return False
    first = float(buffer.reshape(-1)[0])
    return first in (0.0, 1.0) and bool((computable(buffer) == first).all())


def redraw_statistics(tensors: list[Tensor], seed: int) -> None:
    """Refill running statistics, uniform in [0.5, 1.5]; a mean and its variance get the same
    values.
    """
    seen: dict[tuple[int, ...], int] = {}
    for tensor in tensors:
        shape = tuple(squeezed(tensor))
        nth = seen[shape] = seen.get(shape, -1) + 1
        _refill(tensor, [seed, "statistics", shape, nth // 2], uniform=True)


def _refill(
    tensor: Tensor, identity: list[object], *, uniform: bool = False, signed: bool = False
) -> None:
    """Refill from a hash: vectors uniform in [0.5, 1.5], others normal, std 1 / sqrt(fan-in)."""
    shape, device = squeezed(tensor), tensor.device
    generator = torch.Generator(device).manual_seed(int(stable_hash(identity)[:15], 16))
    if uniform or len(shape) < 2:
        drawn = torch.rand(shape, generator=generator, device=device) + 0.5
        if signed and shape:
            drawn[1::2].neg_()
    else:
        drawn = torch.randn(shape, generator=generator, device=device)
        drawn /= max(1, math.prod(shape[1:])) ** 0.5
    with torch.no_grad():
        tensor.copy_(drawn.reshape(tensor.shape))


def randomise_weights(
    model: nn.Module,
    seed: int,
    only: list[int] | None = None,
    names: Sequence[str] = (),
) -> None:
    """Refill floating parameters from (seed, shape, how many of that shape came before), whatever
    their names and dimensions of size 1.

    A model with all `names` is filled in their order first. `only`: positions. Odd seeds give
    vectors either sign.
    """
    seen: dict[tuple[int, ...], int] = {}
    own = {name: p for name, p in model.named_parameters() if p.is_floating_point()}
    if names and set(names) <= own.keys():
        own = {name: own[name] for name in (*names, *own)}
    for index, parameter in enumerate(own.values()):
        shape = tuple(squeezed(parameter))
        if only is None or index in only:
            nth = seen[shape] = seen.get(shape, -1) + 1
            _refill(parameter, [seed, shape, nth], signed=seed % 2 == 1)


def weights_of(model: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The values of its floating parameters, and of buffers that calls leave alone, by name."""
    buffers = model.named_buffers() if isinstance(model, nn.Module) else ()
    kept = {name: b.detach() for name, b in buffers if name.rpartition(".")[2] not in COUNTED}
    return {name: p.detach() for name, p in parameters_of(model).items()}, kept


def copy_weights(model: Any, parameters: dict[str, Tensor], buffers: dict[str, Tensor]) -> None:
    """Give a model these values: parameters by name where it has all of them in their shapes, else
    by shape and order; buffers by name."""
    own, left = parameters_of(model), dict(parameters)
    named = all(
        name in own and squeezed(own[name]) == squeezed(value) for name, value in left.items()
    )
    with torch.no_grad():
        for name, parameter in own.items():
            fitting = [other for other in left if squeezed(left[other]) == squeezed(parameter)]
            if named:
                fitting = [name] if name in left else []
            for other in fitting[:1]:
                parameter.copy_(left.pop(other).reshape(parameter.shape))
        for name, buffer in model.named_buffers() if isinstance(model, nn.Module) else ():
            if name in buffers and buffers[name].shape == buffer.shape:
                buffer.copy_(buffers[name])


def transpose_weights(model: nn.Module) -> None:
    """Transpose all square parameter matrices: a candidate may keep them so."""
    with torch.no_grad():
        for parameter in parameters_of(model).values():
            if parameter.dim() == 2 and parameter.shape[0] == parameter.shape[1]:
                parameter.copy_(parameter.t().clone())


def flatten_outputs(output: Any) -> tuple[list[Any], str]:
    """Leaves of a nested output in order, and its structure as text, None included."""
    if output is None:
        return [], "None"
    if isinstance(output, dict):
        items = [(f"{key}:", output[key]) for key in sorted(output, key=str)]
        form = "{{{}}}"
    elif isinstance(output, list | tuple):
        items, form = [("", item) for item in output], "({})"
    else:
        return [output], "."
    leaves, structure = [], []
    for label, item in items:
        inner, text = flatten_outputs(item)
        leaves += inner
        structure.append(label + text)
    return leaves, form.format(",".join(structure))


def plain_containers(output: Any) -> bool:
    """Whether a nested output has only containers that run no code when read."""
    kind = type(output)
    if kind in (dict, OrderedDict):
        return all(map(plain_containers, dict.values(output)))
    if kind is list or (issubclass(kind, tuple) and kind.__iter__ is tuple.__iter__):
        return all(map(plain_containers, output))
    return not isinstance(output, list | tuple | dict)


def _to_device(value: Any, device: str, dtype: torch.dtype | None = None) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, dtype if value.is_floating_point() else None)
    if isinstance(value, list | tuple):
        return type(value)(_to_device(item, device, dtype) for item in value)
    return value
