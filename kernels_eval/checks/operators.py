"""Which operators run: seen by executing, never read from the text."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_eval.checks.linked import NO_COMPUTE
from kernels_eval.isolation.channel import Message

Function = Callable[..., Any]
Values = tuple[Any, ...]
Named = dict[str, Any] | None
NOT_NAMED = frozenset(
    """view reshape transpose permute expand expand_as unsqueeze squeeze flatten contiguous clone
    detach to t size dim numel stride shape device dtype is_contiguous split chunk unbind
    __getitem__ type float zeros ones full empty arange zeros_like ones_like full_like empty_like
    tensor view_as narrow select unfold swapaxes movedim __get__ __set__ __len__ requires_grad
    data_ptr element_size is_floating_point new_zeros tril triu bool copy_ broadcast_to __format__
    __repr__ item get_device storage is_cuda ndimension T mT""".split()
)
"""Functions of torch that make, move, view or describe tensors."""


class _Operators(TorchDispatchMode):
    def __init__(self) -> None:
        TorchDispatchMode.__init__(self)
        self.seen: list[str] = []

    def __torch_dispatch__(
        self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        namespace, name = function._schema.name.split("::")
        if namespace != "aten" or name not in NO_COMPUTE:
            self.seen.append(f"{namespace}.{name}")
        return function(*args, **(kwargs or {}))


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Function, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        name = resolve_name(function) or getattr(function, "__name__", "unknown")
        if "." in name and name.rsplit(".", 1)[-1] not in NOT_NAMED:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def compute_operators(run: Callable[[], object]) -> list[str]:
    """Names of the aten compute operators executed while `run()` runs."""
    mode = _Operators()
    with mode:
        run()
    return mode.seen


def traced_operators(run: Callable[[], object]) -> set[str]:
    """The same, without repetitions, by a record that also has what no dispatch mode sees: other
    threads, what runs below a guard, and what another operator's kernel calls. It takes most of a
    millisecond a call."""
    nodes: list[Message] = []
    with _recorded(nodes):
        run()
    return _outermost(nodes)


@contextmanager
def _recorded(nodes: list[Message]) -> Iterator[None]:
    """Meanwhile, record what the dispatcher calls in any thread, by PyTorch's execution trace.
    Adds it to `nodes` in the end; nothing where that fails."""
    with tempfile.TemporaryDirectory() as folder:
        trace, tracing = Path(folder) / "trace.json", torch._C._profiler
        tracing._add_execution_trace_observer(str(trace))
        tracing._enable_execution_trace_observer()
        try:
            yield
        finally:
            tracing._disable_execution_trace_observer()
            tracing._remove_execution_trace_observer()
        with suppress(OSError, ValueError):  # none, or cut off
            nodes += json.loads(trace.read_bytes())["nodes"]


def _outermost(nodes: list[Message]) -> set[str]:
    """The compute operators among recorded calls that no other of them called."""
    above = {node["id"]: node["ctrl_deps"] for node in nodes}
    computing = {node["id"]: node["name"] for node in nodes if _computes(node)}
    inner = set()
    for node in computing:
        at, path = above[node], {node}
        while at in above and at not in path:  # a forged trace may go in circles
            path.add(at)
            if at in computing:
                inner.add(node)
                break
            at = above[at]
    return {name.replace("::", ".") for node, name in computing.items() if node not in inner}


def _computes(node: Message) -> bool:
    """Is this a call of an aten operator that computes, and is not composed of others?"""
    namespace, _, name = node["name"].partition("::")
    if namespace != "aten" or name in NO_COMPUTE or name.startswith("resolve_"):
        return False
    schema = next((each["value"] for each in node["attrs"] if each["name"] == "op_schema"), "")
    overload = schema.partition("(")[0] or node["name"]
    return not torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd")


def reference_operators(run: Callable[[], object]) -> list[str]:
    """Names of the outermost torch functions called while `run()` runs, such as
    torch.nn.functional.layer_norm: what a person would call the operators of a module, before torch
    takes them apart."""
    mode = _Functions()
    with torch.no_grad(), mode:
        run()
    return mode.seen


def warm_modes() -> None:
    """Use both recorders once: their first use imports for more than a second, which forked
    children then need not."""
    compute_operators(lambda: torch.ones(2) + 1)
    reference_operators(lambda: torch.ones(2) + 1)
