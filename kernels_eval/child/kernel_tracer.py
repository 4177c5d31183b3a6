"""Watches a candidate's own kernels from inside its process: counts their calls, times them, and
corrupts what they wrote.

Corrupting answers the question whether a kernel matters: if the output stays the same when
everything that the kernels wrote is replaced by something else, they are an ornament. No evidence,
like everything in this process: native code can forge it.
"""

from __future__ import annotations

import gc
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from types import ModuleType
from typing import cast

import torch
from torch.utils import _pytree as pytree

from kernels_eval.checks.measurement import computable, same
from kernels_eval.checks.operators import Named, Values

Function = Callable[..., object]
_now_ns = time.perf_counter_ns
_live_objects = gc.get_objects
PYTHON_NAMES = frozenset(
    "__init__ __call__ __getitem__ __add__ __sub__ __mul__ __matmul__ __truediv__".split()
)
"""Methods of a bound class that may do work although Python names them."""
DEEPEST = 4
CPP_NODE = "torch::autograd::CppNode<"
LOWEST_ADDRESS = 1 << 20
"""Integers below are no pointers."""


def registered_operators() -> set[str]:
    """Names, as namespace::operator.overload, of all operators that are registered now."""
    return set(torch._C._dispatch_get_all_op_names())


class KernelTracer:
    """Wraps functions, classes and submodules of extensions, operators registered with torch.ops,
    and what a language launches (`Language.watch`)."""

    def __init__(self, on_gpu: bool) -> None:
        self.calls: Counter[str] = Counter()
        self.timing = self.paused = self.follows_graphs = False
        self.overwrote: set[str] = set()
        """Kernels of which something they wrote was replaced."""
        self.own_operators: set[str] = set()
        self._corrupt: float | None = None
        self._skip = False
        self._results: dict[str, object] = {}
        self._kept: dict[str, list[list[torch.Tensor]]] = {}
        self._swap: bool | None = None
        self.swapped: Counter[str] = Counter()
        """Results that `swapping` replaced: "other" values, the "same" ones, or the same "constant"
        everywhere; and calls of which it saw nothing ("unseen")."""
        self._on_gpu, self._inside, self._cpu_ns = on_gpu, False, 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wrap_module(self, owner: ModuleType | type, root: str, prefix: str = "") -> None:
        """Watch every function of an extension's module, of its submodules and of its classes.
        `root` is the extension's name."""
        for name, value in list(vars(owner).items()):
            if name.startswith("__") and (name not in PYTHON_NAMES or not isinstance(owner, type)):
                continue
            if isinstance(value, ModuleType | type):
                home = value.__name__ if isinstance(value, ModuleType) else value.__module__
                # its own only, and not itself: a module may hold torch as well
                if home.partition(".")[0] == root and prefix.count(".") < DEEPEST:
                    self.wrap_module(value, root, f"{prefix}{name}.")
                continue
            with suppress(AttributeError, TypeError):  # a class that cannot be changed
                setattr(owner, name, self._wrapped(prefix + name, value))

    def _wrapped(self, name: str, value: object) -> object:
        if isinstance(value, staticmethod):
            return staticmethod(self._watched(name, value.__func__))
        if type(value) is property and value.fget:
            return property(self._watched(name, value.fget), value.fset, value.fdel)
        return self._watched(name, value) if callable(value) else value

    def _watched(self, name: str, function: Function) -> Function:
        return lambda *args, **kwargs: self.watch(name, function, args, kwargs)

    def wrap_operators(self, names: Iterable[str]) -> None:
        """Watch operators that a library has registered, however Python calls them."""
        for name in {name.partition(".")[0] for name in names}:
            namespace, _, operator = name.partition("::")
            self.own_operators.add(f"{namespace}.{operator}")
            packet = getattr(getattr(torch.ops, namespace), operator)
            for called in (packet, *(getattr(packet, each) for each in packet.overloads())):
                called._op = self._watched(f"{namespace}.{operator}", called._op)

    def watch(self, name: str, function: Function, args: Values, kwargs: Named) -> object:
        """Call a kernel's function, and count it where it returns: a call that raises did no
        work."""
        disturbed = self._corrupt is not None or self._swap is not None
        watched = self.timing or (disturbed and not self.paused)
        if self._inside or not watched:
            result = function(*args, **(kwargs or {}))
        else:
            self._inside = True
            try:
                if self._swap is not None:
                    result = self._swapped(name, function, args, kwargs)
                elif self._corrupt is None:
                    result = self._timed(function, args, kwargs)
                else:
                    result = self._corrupted(name, function, args, kwargs)
            finally:
                self._inside = False
        self.calls[name] += 1
        if self.follows_graphs:
            self._watch_nodes(result)
        return result

    def _watch_nodes(self, result: object) -> None:
        """Watch the backward functions that C++ has put into the graph of a result
        (torch::autograd::Function): no Python calls them."""
        leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]
        waiting = [x.grad_fn for x in leaves if x.grad_fn]
        while waiting:
            node = waiting.pop()
            known = cast(dict[str, bool], node.metadata)
            if known.setdefault("watched", False):
                continue
            known["watched"] = True
            waiting += [each for each, _ in node.next_functions if each]
            if node.name().startswith(CPP_NODE):
                self._watch_node(node, node.name().removeprefix(CPP_NODE)[:-1])

    def _watch_node(self, node: torch.autograd.graph.Node, name: str) -> None:
        began = 0

        def before(_: object) -> None:
            nonlocal began
            began = _now_ns()

        def after(made: tuple[torch.Tensor, ...], _: object) -> object:
            self._cpu_ns += (_now_ns() - began) * self.timing
            return self.watch(name, lambda: made, (), {})

        node.register_prehook(before)
        node.register_hook(after)

    def _timed(self, function: Function, args: Values, kwargs: Named) -> object:
        if not self._on_gpu:
            started = _now_ns()
            result = function(*args, **(kwargs or {}))
            self._cpu_ns += _now_ns() - started
            return result
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = function(*args, **(kwargs or {}))
        end.record()
        self._events.append((begin, end))
        return result

    def take_ns(self) -> float:
        """Nanoseconds spent in watched calls since the last question; the device must be
        synchronised."""
        spent = self._cpu_ns + sum(begin.elapsed_time(end) * 1e6 for begin, end in self._events)
        self._cpu_ns, self._events = 0, []
        return float(spent)

    @contextmanager
    def corrupting(self, value: float, *, skip: bool = False) -> Iterator[None]:
        """Meanwhile, replace what kernels write by this value. With `skip`, do not call those of
        which nothing could be replaced: what they write may be out of sight."""
        self._corrupt, self._skip = value, skip
        try:
            yield
        finally:
            self._corrupt, self._skip = None, False

    def _corrupted(self, name: str, function: Function, args: Values, kwargs: Named) -> object:
        silent = name not in self.overwrote and not name.endswith("__init__")
        if self._skip and silent and name in self._results:
            return self._results[name]
        given = _reachable((args, kwargs))
        before = [x.detach().clone() for x in given]
        result = self._results[name] = function(*args, **(kwargs or {}))
        held = {x.data_ptr() for x in given}
        for tensor, old in zip(given, before, strict=True):
            if not torch.equal(computable(tensor), computable(old)) and not bool(
                ((tensor != tensor) & (old != old)).all()
            ):
                self._overwrite(name, tensor)

        def replaced(leaf: object) -> object:
            tensor = _as_tensor(leaf)
            if tensor is not None and tensor.data_ptr() not in held:
                self._overwrite(name, tensor)
            if isinstance(leaf, bool):
                return not leaf
            return leaf * 3 + 7 if isinstance(leaf, int | float) else leaf

        return pytree.tree_map(replaced, result)

    @contextmanager
    def swapping(self, swap: bool) -> Iterator[None]:
        """Meanwhile, keep what kernels write; or put what was kept last in its place (`swap`)."""
        self._swap = swap
        try:
            yield
        finally:
            self._swap = None
            if swap:
                self._kept = {}

    def _swapped(self, name: str, function: Function, args: Values, kwargs: Named) -> object:
        given = _reachable((args, kwargs))
        before = [x.detach().clone() for x in given]
        result = function(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(result)
        changed = [x for x, old in zip(given, before, strict=True) if not same(x, old)]
        tensors = [_as_tensor(leaf) for leaf in leaves]
        written = [x.detach() for x in (*changed, *tensors) if x is not None]
        if not self._swap:
            self._kept.setdefault(name, []).append([x.clone() for x in written])
            return result
        kept = self._kept[name].pop(0) if self._kept.get(name) else []
        forms = [[(x.shape, x.dtype) for x in each] for each in (written, kept)]
        if not written or forms[0] != forms[1]:
            self.swapped["unseen"] += 1
            return result
        for now, old in zip(written, kept, strict=True):
            alike = same(now, old)
            constant = alike and now.numel() > 0 and bool((now == now.flatten()[0]).all())
            self.swapped["constant" if constant else "same" if alike else "other"] += 1
            if not alike:
                with torch.no_grad():
                    now.copy_(old)
        return result

    def _overwrite(self, name: str, tensor: torch.Tensor) -> None:
        target = tensor.detach()
        for dim, stride in enumerate(target.stride()):  # expanded: one element many times
            target = target if stride else target.narrow(dim, 0, min(1, target.shape[dim]))
        value = self._corrupt or 0.0
        with torch.no_grad(), suppress(RuntimeError):  # not every dtype and view can be written
            if target.is_floating_point() or target.is_complex():
                most = torch.finfo(target.dtype).max  # 448 in FP8
                target.fill_(max(-most, min(value, most)))
            elif target.dtype == torch.bool:
                target.logical_not_()
            elif value > 0:  # stays in range: it may be an index
                target.copy_(target.flatten().roll(1).reshape(target.shape))
            else:  # one number, or many alike
                target.copy_(target == 0)
            if target.numel():
                self.overwrote.add(name)


def _as_tensor(value: object) -> torch.Tensor | None:
    """A tensor, or the memory of a NumPy array as one."""
    if isinstance(value, torch.Tensor):
        return None if value.device.type == "meta" else value
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        with suppress(TypeError, ValueError):  # a dtype that torch does not have
            return torch.from_numpy(value)
    return None


def _reachable(arguments: object) -> list[torch.Tensor]:
    """Tensors among these arguments, and those that an integer among them points into."""
    leaves = pytree.tree_leaves(arguments)
    found = [tensor for leaf in leaves if (tensor := _as_tensor(leaf)) is not None]
    pointers = [leaf for leaf in leaves if type(leaf) is int and leaf > LOWEST_ADDRESS]
    if pointers:
        for tensor in filter(_is_plain, _live_objects()):
            storage = tensor.untyped_storage()
            start = storage.data_ptr()
            if any(start <= pointer < start + storage.nbytes() for pointer in pointers):
                found.append(tensor)
    return found


def _is_plain(value: object) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and type(value) in (torch.Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
    )
