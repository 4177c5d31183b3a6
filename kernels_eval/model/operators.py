"""Which operators run, and where a call spends its time: seen by executing. Self time goes to the
outermost aten operator (`linear`, `layer_norm`) or own kernel (`recorded`), on a GPU that of
launched kernels."""

from __future__ import annotations

import json
import re
import statistics
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from typing import Any

import torch
from torch._ops import OpOverload
from torch.autograd.profiler_util import FunctionEvent
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_eval.compile.cubins import plain_name
from kernels_eval.compile.linked import NO_COMPUTE
from kernels_eval.model.lazy_compiler import without_compiler
from kernels_eval.protocol import OperatorTimes
from kernels_eval.sandbox.channel import Answer
from kernels_eval.sandbox.trees import temporary_tree

Function = Callable[..., object]
Values = tuple[object, ...]
Named = dict[str, object] | None
NOT_NAMED = frozenset(
    """view reshape transpose permute expand expand_as unsqueeze squeeze flatten contiguous clone
    detach to t size dim numel stride shape device dtype is_contiguous split chunk unbind
    __getitem__ type float zeros ones full empty arange zeros_like ones_like full_like empty_like
    tensor view_as narrow select unfold swapaxes movedim __get__ __set__ __len__ requires_grad
    data_ptr element_size is_floating_point new_zeros tril triu bool copy_ broadcast_to __format__
    __repr__ item get_device storage is_cuda ndimension T mT""".split()
)
"""Functions of torch that make, move, view or describe tensors."""
INTERNAL = ("aten::", "prim::", "profiler::")
EXPORTS = ("numpy", "__dlpack__")
"""Methods by which a tensor leaves torch; `__array__` calls the first."""
EXCHANGES = ((torch, "from_numpy"), (torch, "frombuffer"), (torch._C, "_to_dlpack"))
"""Functions that convert between tensors and others' arrays."""
BEGIN, END = "concur begin", "concur end"
UNTRACED = "untraced"
"""Stands among a call's operators where its record is missing or torn."""
NAME = re.compile(rb'"name":\s*"(\w+::\w+)"')


@without_compiler
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


EQUALITIES = ("eq", "ne", "not_equal")
"""Of a tensor with itself they ask for NaN alone."""


class _Functions(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_function__(
        self, function: Function, types: object, args: Values = (), kwargs: Named = None
    ) -> object:
        name = resolve_name(function) or getattr(function, "__name__", "unknown")
        if len(args) == 2 and args[0] is args[1] and name.strip("_").endswith(EQUALITIES):
            name = "torch.isnan"
        if "." in name and name.rsplit(".", 1)[-1] not in NOT_NAMED:
            self.seen.append(name)
        return function(*args, **(kwargs or {}))


def compute_operators(run: Callable[[], object]) -> list[str]:
    mode = _Operators()
    with mode:
        run()
    return mode.seen


def traced_operators(run: Callable[[], object]) -> set[str]:
    """The operators of `run()`, also in other threads, below guards, in other operators, or by
    NumPy. Takes most of a millisecond a call.
    """
    nodes: list[Answer] = []
    torn = set[str]()
    _unrecorded.clear()
    with _recorded(nodes, torn):
        run()
    unrecorded = {name for name in _unrecorded if name.removeprefix("aten.") not in NO_COMPUTE}
    return _outermost(nodes) | _foreign(nodes) | torn | unrecorded - {""}


_unrecorded: set[str] = set()
"""What Python has called past the dispatcher's record, since it was emptied."""


def watch_unrecorded() -> None:
    """Note operators called past the record, and tensors that leave torch. Once per process: a
    candidate would notice a later start.
    """
    api: Any = torch._C

    def noting(function: Any, name_of: Callable[[Any], str]) -> Function:
        def noted(*args: Any, **kwargs: object) -> object:
            _unrecorded.add(name_of(args[0] if args else None))
            return function(*args, **kwargs)

        return noted

    def operator(name: str) -> str:
        return name.partition(".")[0].replace("::", ".")

    def watch(kind: Any, method: str, name_of: Callable[[Any], str]) -> None:
        setattr(kind, method, noting(getattr(kind, method), name_of))

    for method in EXPORTS:
        watch(torch.Tensor, method, f"Tensor.{method}".format)
    # of whole numbers, sizes: no work
    watch(torch.Tensor, "tolist", lambda x: "Tensor.tolist" if x.is_floating_point() else "")
    for module, function in EXCHANGES:
        setattr(module, function, noting(getattr(module, function), f"torch.{function}".format))
    handle, kernel = api._DispatchOperatorHandle, api._SafeKernelFunction
    watch(handle, "redispatch_boxed", lambda each: operator(each.schema().name))
    watch(kernel, "call_boxed", lambda each: operator(each.op_handle.schema().name))
    get_overload, own = api._get_operation_overload, "_op_dk"

    def overload(name: str, overload_name: str) -> object:
        found = get_overload(name, overload_name)
        return found and (found[0], noting(found[1], lambda _: operator(name)), *found[2:])

    api._get_operation_overload = overload
    watched = property(
        lambda self: noting(vars(self)[own], lambda _: operator(self._name)),
        lambda self, function: vars(self).__setitem__(own, function),
    )
    setattr(OpOverload, own, watched)


@contextmanager
def _recorded(nodes: list[Answer], torn: set[str]) -> Iterator[None]:
    """Record dispatcher calls of all threads into `nodes`; a torn record's names go to `torn`."""
    written = b""
    with temporary_tree("trace-") as folder:
        trace, tracing = folder / "trace.json", torch._C._profiler
        tracing._add_execution_trace_observer(str(trace))
        tracing._enable_execution_trace_observer()
        try:
            _mark(BEGIN)
            yield
            _mark(END)
        finally:
            tracing._disable_execution_trace_observer()
            tracing._remove_execution_trace_observer()
        with suppress(OSError):
            written = trace.read_bytes()
    with suppress(ValueError, LookupError, TypeError):
        nodes += json.loads(written)["nodes"]
    if not {BEGIN, END} <= {node["name"] for node in nodes}:
        names = (name.decode().replace("::", ".") for name in NAME.findall(written))
        torn |= {UNTRACED, *(name for name in names if _is_named(name))}


def _mark(name: str) -> None:
    with torch.profiler.record_function(name):
        pass


def _is_named(name: str) -> bool:
    namespace, _, operator = name.partition(".")
    if f"{namespace}::" in INTERNAL[1:]:
        return False
    return namespace != "aten" or operator not in NO_COMPUTE


def _outermost(nodes: list[Answer]) -> set[str]:
    """Recorded compute operators that no other called. A label, without schema, hides nothing."""
    above = {node["id"]: node["ctrl_deps"] for node in nodes}
    computing = {node["id"]: node["name"] for node in nodes if _computes(node)}
    hiding = {node["id"] for node in nodes if any(map(_is_schema, node["attrs"]))}
    inner = set()
    for node in computing:
        at, path = above[node], {node}
        while at in above and at not in path:  # a forged trace may go in circles
            path.add(at)
            if at in computing and at in hiding:
                inner.add(node)
                break
            at = above[at]
    return {name.replace("::", ".") for node, name in computing.items() if node not in inner}


def _foreign(nodes: list[Answer]) -> set[str]:
    names = {node["name"] for node in nodes if any(map(_is_schema, node["attrs"]))}
    return {x.replace("::", ".") for x in names if "::" in x and not x.startswith(INTERNAL)}


def _is_schema(attribute: Answer) -> bool:
    return bool(attribute["name"] == "op_schema" and attribute["value"])


def _computes(node: Answer) -> bool:
    namespace, _, name = node["name"].partition("::")
    if namespace != "aten" or name in NO_COMPUTE or name.startswith("resolve_"):
        return False
    schema = next((each["value"] for each in node["attrs"] if each["name"] == "op_schema"), "")
    overload = schema.partition("(")[0] or node["name"]
    return not torch._C._dispatch_has_kernel_for_dispatch_key(overload, "CompositeImplicitAutograd")


def warm_up() -> None:
    """List torch's functions by name once, before processes are forked that each would do it."""
    resolve_name(torch.add)


def reference_operators(run: Callable[[], object]) -> list[str]:
    """The outermost torch functions that `run()` calls, such as torch.nn.functional.layer_norm."""
    mode = _Functions()
    with torch.no_grad(), mode:
        run()
    return mode.seen


MOST_CALLS = 20
MOST_OPERATORS = 64
CALL = "forward call "
OWN = "kernel::"


def recorded(name: str) -> AbstractContextManager[object]:
    """A context whose time is that of the program's own kernel of this name."""
    return torch.profiler.record_function(f"{OWN}{name}")


def time_operators(
    call: Callable[[], object], on_gpu: bool, budget_s: float, own: Collection[str] = ()
) -> OperatorTimes:
    """Microseconds per call of every outermost operator and own kernel, slowest first, and by which
    clock.

    After a first call, makes 1 to `MOST_CALLS` calls in about `budget_s`. `own`: the program's
    kernels on a GPU.
    """
    started = time.perf_counter()
    call()
    _synchronise(on_gpu)
    fitting = budget_s / max(time.perf_counter() - started, 1e-6)
    calls = int(min(MOST_CALLS, max(1, fitting)))
    activities = [torch.profiler.ProfilerActivity.CPU]
    if on_gpu:
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    with torch.profiler.profile(activities=activities) as seen:
        for number in range(calls):
            with torch.profiler.record_function(f"{CALL}{number}"):
                call()
        _synchronise(on_gpu)
    events = [event for event in seen.events() if event.device_type.name == "CPU"]
    kernels = _launched(seen, set(map(plain_name, own)), calls) if own and on_gpu else []
    clock, times = "device", _by_outermost(events, "self_device_time_total", calls)
    # without a GPU, or without CUPTI, no kernel has a time: then the processor's counts
    if not on_gpu or not (kernels or any(us > 0 for us, _ in times.values())):
        clock, times = "cpu", _by_outermost(events, "self_cpu_time_total", calls)
        kernels = [_row(name.removeprefix(OWN), *times.pop(name)) for name in _owned(times)]
    for name in _owned(times):
        del times[name]
    operators = [_row(name, *found) for name, found in times.items()]
    total = sum(row["us"] for row in (*operators, *kernels))
    return OperatorTimes(
        operators=_slowest(operators), kernels=_slowest(kernels), total_us=total, clock=clock
    )


def _owned(times: Collection[str]) -> list[str]:
    return [name for name in times if name.startswith(OWN)]


def _row(name: str, us: float, calls: int) -> Answer:
    return {"name": name, "us": us, "calls": calls}


def _slowest(rows: list[Answer]) -> list[Answer]:
    return sorted(rows, key=lambda row: -row["us"])[:MOST_OPERATORS]


def _launched(seen: torch.profiler.profile, own: set[str], calls: int) -> list[Answer]:
    with temporary_tree("trace-") as folder:
        path = folder / "trace.json"
        seen.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    launches: dict[str, list[Answer]] = {}
    for event in events:
        name = plain_name(event.get("name", ""))
        if event.get("cat") == "kernel" and name in own:
            launches.setdefault(name, []).append(event)
    rows = []
    for name, found in launches.items():
        about = max(found, key=lambda event: event["dur"])["args"]
        row = _row(name, sum(event["dur"] for event in found) / calls, len(found) // calls)
        rows.append(
            row
            | {
                "grid": about.get("grid"),
                "block": about.get("block"),
                "registers": about.get("registers per thread"),
                "shared_bytes": about.get("shared memory"),
                "blocks_per_sm": about.get("blocks per SM"),
                "occupancy": about.get("est. achieved occupancy %", 0) / 100 or None,
            }
        )
    return rows


def _by_outermost(
    events: list[FunctionEvent], clock: str, calls: int
) -> dict[str, tuple[float, int]]:
    spent: dict[str, list[float]] = {}
    counts: Counter[str] = Counter()
    for event in events:
        outermost, above = None, event
        while above.cpu_parent is not None:
            outermost = above if above.name.startswith(("aten::", OWN)) else outermost
            above = above.cpu_parent
        if outermost is None or not above.name.startswith(CALL):
            continue
        name = outermost.name.removeprefix("aten::")
        spent.setdefault(name, [0.0] * calls)[int(above.name.removeprefix(CALL))] += float(
            getattr(event, clock, 0.0)
        )
        counts[name] += outermost is event
    return {name: (statistics.median(each), counts[name] // calls) for name, each in spent.items()}


def _synchronise(on_gpu: bool) -> None:
    if on_gpu:
        torch.cuda.synchronize()
