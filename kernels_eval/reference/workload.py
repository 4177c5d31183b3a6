"""The role that counts what a task's reference computes and moves, run once, without storage where
possible.

Floating-point operations are by torch's formulas; a byte counts once, where its value is read.
Counts only the branch that ran. The task's code may do anything: the parent trusts no number.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry

from kernels_eval.config import MOST_TASK_OPERATORS
from kernels_eval.model.inputs import (
    construct,
    declared,
    flatten_outputs,
    load_module,
    make_inputs,
    moved,
)
from kernels_eval.model.operators import Named, reference_operators
from kernels_eval.protocol import (
    DECLARED,
    AboutTask,
    ArgumentForm,
    DescribeInterface,
    GraphReport,
    Interface,
    MeasureWorkload,
    ModelSpec,
    WorkloadReport,
    handles,
)
from kernels_eval.reference.aten import SOURCES, Values, operator_name
from kernels_eval.reference.graph import trace_graph
from kernels_eval.reference.task_model import require_tensors

Tensors = list[Tensor]
View = tuple[object, ...]
VIEWS = frozenset({"_unsafe_view", "_reshape_alias", "detach", "alias"})
PICKS = frozenset("embedding index_select gather index take _unsafe_index".split())
"""Operators that read only what they pick, not the rest of their table."""
T = TypeVar("T")
RECURRENT = frozenset({torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu})


class Storages:
    """Bytes of touched storages, by views: each byte of a view once, at most what the storage
    holds.
    """

    def __init__(self) -> None:
        self._views: dict[int, dict[View, int]] = {}
        # held, so that no later storage gets their address
        self._held: dict[int, torch.UntypedStorage] = {}

    def touch(self, tensor: Tensor, at_most: float = math.inf) -> None:
        """Count a view of it, which alone matters from now on."""
        view = (tensor.storage_offset(), tuple(tensor.shape), tensor.stride())
        key = _key(tensor)
        self._views.setdefault(key, {})[view] = int(min(_bytes(tensor), at_most))
        self._held[key] = tensor.untyped_storage()

    @property
    def bytes(self) -> int:
        return sum(
            min(sum(views.values()), self._held[key].nbytes()) for key, views in self._views.items()
        )


class Tally(TorchDispatchMode):
    """Counts floating-point operations, and bytes of earlier tensors that are read or written."""

    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.flops = 0
        self.read, self.written = Storages(), Storages()
        self._made: set[int] = set()
        # held for the same reason
        self._given: dict[int, torch.UntypedStorage] = {}

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        kwargs = kwargs or {}
        out = function(*args, **kwargs)
        name, results = operator_name(function), tensors(out)
        if not function.is_view and name not in VIEWS:
            self.flops += _flops(function, args, kwargs, out)
            self._arguments(function, name, args, kwargs, results)
        elif name != "lift_fresh":
            for tensor in tensors(args, kwargs):
                self._was_given(tensor)
        self._made |= {key for key in map(_key, results) if key not in self._given}
        return out

    def _arguments(
        self,
        function: OpOverload,
        name: str,
        args: Values,
        kwargs: dict[str, object],
        results: Tensors,
    ) -> None:
        produced = sum(map(_bytes, results))
        position = 0
        for index, spec in enumerate(function._schema.arguments):
            value = args[index] if index < len(args) else kwargs.get(spec.name)
            writes = spec.alias_info is not None and spec.alias_info.is_write
            for tensor in tensors(value):
                position += 1
                if name == "lift_fresh" or not self._was_given(tensor):
                    continue
                if writes:
                    self.written.touch(tensor)
                overwritten = writes and (spec.is_out or name == "copy")
                if name not in SOURCES and not overwritten:
                    picked = name in PICKS and position == 1
                    self.read.touch(tensor, produced if picked else math.inf)

    def _was_given(self, tensor: Tensor) -> bool:
        key = _key(tensor)
        if key in self._made:
            return False
        self._given.setdefault(key, tensor.untyped_storage())
        return True

    def read_whole(self, tensor: Tensor) -> None:
        if self._was_given(tensor):
            self.read.touch(tensor)

    def bytes_written(self, outputs: list[Tensor]) -> int:
        """Bytes of outputs and of earlier tensors that changed; an unchanged argument costs
        nothing.
        """
        for leaf in outputs:
            if _key(leaf) not in self._given:
                self.written.touch(leaf)
        return self.written.bytes


class TwoSteps(TorchFunctionMode):
    """Runs two steps of a recurrent layer; without values, others count as the second."""

    def __init__(self, tally: Tally) -> None:
        super().__init__()
        self._tally = tally

    def __torch_function__(
        self, function: Callable[..., Any], types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        kwargs = kwargs or {}
        packed = len(args) != 9 or isinstance(args[3], list | tuple)
        if function not in RECURRENT or kwargs or packed or not args[0].is_meta:
            return function(*args, **kwargs)
        given, tally = args[0], self._tally
        dim = 1 if args[8] and given.dim() == 3 else 0
        steps, before = given.shape[dim], tally.flops
        if steps <= 2:
            return function(*args)
        function(given.narrow(dim, 0, 1), *args[1:])
        one = tally.flops - before
        out, *state = function(given.narrow(dim, 0, 2), *args[1:])
        two = tally.flops - before - one
        tally.flops = before + one + (steps - 1) * (two - one)
        tally.read_whole(given)
        shape = list(out.shape)
        shape[dim] = steps
        return (out.new_empty(shape), *state)


def tensors(*values: object) -> Tensors:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _flops(function: OpOverload, args: Values, kwargs: dict[str, Any], out: object) -> int:
    """Floating-point operations of one call by torch's formulas (a multiply-add is 2), or 0."""
    formula = flop_registry.get(function._overloadpacket)
    computes = any(each.is_floating_point() or each.is_complex() for each in tensors(out))
    return int(formula(*args, **kwargs, out_val=out)) if formula and computes else 0


def _key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)


def _bytes(tensor: Tensor) -> int:
    count = tensor.element_size()
    for size, stride in zip(tensor.shape, tensor.stride(), strict=True):
        count *= size if stride or size == 0 else 1
    return count


class TooLarge(Exception):
    """The declared inputs take more memory than the caller allows."""


@handles(MeasureWorkload)
def measure_workload(task: MeasureWorkload) -> WorkloadReport:
    """Raises what the task raises on its declared inputs."""
    module = _loaded(task.path)
    try:
        return _without_storage(_workload_of, module, task)
    except Exception as error:
        input_bytes = 0
        with suppress(Exception):
            inputs = tensors(_inputs(module, declared(task, "meta", "meta")))
            input_bytes = sum(tensor.nbytes for tensor in inputs)
        if input_bytes > task.declared_max_bytes:
            failed = f"{type(error).__name__}: {error}".splitlines()[0][:300]
            raise TooLarge(
                f"it does not run without storage ({failed}), and its inputs are"
                f" {input_bytes / 1e9:.3g} GB"
            ) from error
    return _workload_of(module, declared(task, "cpu", "cpu"))


def _workload_of(module: ModuleType, spec: ModelSpec) -> WorkloadReport:
    device, inputs = spec.device, _inputs(module, spec)
    model = moved(construct(module, module, spec), device)
    tally, outputs = Tally(), []
    # outside the recorder, which then sees the reference's own calls only
    with torch.device(device), TwoSteps(tally), tally:
        operators = reference_operators(lambda: outputs.append(model(*inputs)))
    leaves, _ = flatten_outputs(outputs[0])
    require_tensors(leaves)
    graph = None
    # what cannot be traced has been counted all the same
    with suppress(Exception), torch.device(device):
        graph = GraphReport.model_validate(trace_graph(model, inputs)._asdict())
    return WorkloadReport(
        operators=operators[:MOST_TASK_OPERATORS],
        flops=tally.flops,
        bytes_min=tally.read.bytes + tally.bytes_written(leaves),
        executed="meta" if device == "meta" else "declared inputs",
        graph=graph,
    )


@handles(DescribeInterface)
def describe_interface(task: DescribeInterface) -> Interface:
    """Without storage where possible. Raises what the task raises on its declared inputs."""
    module = _loaded(task.path)
    with suppress(Exception):
        return _without_storage(_interface, module, task)
    return _interface(module, declared(task, "cpu", "cpu"))


def _interface(module: ModuleType, spec: ModelSpec) -> Interface:
    inputs = _inputs(module, spec)
    model = moved(construct(module, module, spec), spec.device)
    names = [*inspect.signature(model.forward).parameters]
    state = [*model.named_parameters(), *model.named_buffers()]
    with torch.device(spec.device), torch.no_grad():
        leaves, structure = flatten_outputs(model(*inputs))
    require_tensors(leaves)
    names += [f"x{number}" for number in range(len(names), len(inputs))]
    return Interface(
        inputs=[_form(name, x) for name, x in zip(names, inputs, strict=False)],
        state=[_form(name, x) for name, x in state],
        outputs=[_form(f"output{number}", leaf) for number, leaf in enumerate(leaves)],
        structure=structure,
        mutates=any(x._version for x in tree_leaves(inputs) if isinstance(x, Tensor)),
    )


def _loaded(path: str) -> ModuleType:
    torch.set_num_threads(1)
    # its fused recurrent layers tell nothing about what they compute
    torch._C._set_mkldnn_enabled(False)
    return load_module(path, "task")


def _inputs(module: ModuleType, spec: ModelSpec) -> list[Any]:
    return make_inputs(module, spec.seed, DECLARED, None, spec.device)


def _without_storage(
    work: Callable[[ModuleType, ModelSpec], T], module: ModuleType, task: AboutTask[Any]
) -> T:
    """Work on a task on "meta". Raises where an operator needs values or lacks that form."""
    try:
        return work(module, declared(task, "meta", "meta"))
    except Exception:
        # Constructors that look at values make their weights with storage, which are then given up.
        with suppress(Exception):
            return work(module, declared(task, "meta", "cpu"))
        raise


def _form(name: str, value: object) -> ArgumentForm:
    if not isinstance(value, Tensor):
        return ArgumentForm.model_validate({"name": name, "value": value})
    of = {"shape": list(value.shape), "stride": list(value.stride()), "dtype": str(value.dtype)}
    return ArgumentForm.model_validate({"name": name} | of)


def warm_up() -> None:
    """Import and compile, for seconds, what torch needs without storage, so that forked children
    need not.
    """
    functional = nn.functional
    with torch.no_grad(), torch.device("meta"), Tally() as tally, TwoSteps(tally):
        x = torch.rand(2, 4, 4, 4) + torch.randn(4)
        y = functional.conv2d(x, torch.ones(4, 4, 3, 3), torch.zeros(4), padding=1).relu_()
        functional.max_pool2d(functional.batch_norm(y, None, None, training=True), 2)
        y = functional.gelu(functional.linear(x, torch.ones(4, 4)))
        functional.softmax(y, -1).sum((1, 2)).sqrt()
        functional.layer_norm(x.sigmoid() * x, (4,)).mean(-1).exp().max(-1)
    layers = nn.Linear(2, 2), nn.Conv2d(1, 1, 1), nn.BatchNorm2d(1)
    nn.Sequential(*layers).to("meta")
    with torch.device("meta"):
        x = torch.rand(1, 1, 4, 4)
        trace_graph(nn.Sequential(nn.Conv2d(1, 1, 1), nn.ReLU(), nn.Softmax(1)), [x])
