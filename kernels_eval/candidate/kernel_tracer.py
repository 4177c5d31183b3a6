"""Watches a candidate's own kernels in its process: counts, times and corrupts them. Kernels whose
replaced values leave the output unchanged are an ornament. Native code can forge all of it."""

from __future__ import annotations

import gc
import os
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from ctypes import CDLL, c_char_p, c_double, c_int, c_long, c_void_p, create_string_buffer
from functools import partial
from types import ModuleType
from typing import cast

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from kernels_eval.config import DEEPEST_CLASS, LOWEST_ADDRESS
from kernels_eval.model.measurement import same
from kernels_eval.model.operators import Named, Values

Function = Callable[..., object]
Call = partial[object]
Around = Callable[[str, Call], object]
Disturbance = AbstractContextManager[None]
_now_ns = time.perf_counter_ns
_live_objects = gc.get_objects
PYTHON_NAMES = frozenset(
    "__init__ __call__ __getitem__ __add__ __sub__ __mul__ __matmul__ __truediv__".split()
)
"""Methods of a bound class that may do work although Python names them."""
CPP_NODE = "torch::autograd::CppNode<"


def registered_operators() -> set[str]:
    return set(torch._C._dispatch_get_all_op_names())


class KernelTracer:
    """Wraps an extension's functions and classes, torch.ops operators, and a language's launches
    (`Language.watch`).
    """

    def __init__(self, on_gpu: bool) -> None:
        self.calls: Counter[str] = Counter()
        self.around: Around | None = None
        """Called in place of a kernel's function, unless another kernel calls it."""
        self.paused = self.follows_graphs = False
        """Leaves kernels alone, though still timed."""
        self.overwrote: set[str] = set()
        """Kernels of which a written value was replaced."""
        self.own_operators: set[str] = set()
        self._results: dict[str, object] = {}
        self._kept: dict[str, list[list[Tensor]]] = {}
        self.swapped: Counter[str] = Counter()
        """What `swapping` put in: "other" values, the "same", a "constant"; or "unseen" results."""
        self._on_gpu, self._inside, self._cpu_ns = on_gpu, False, 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wrap_module(self, owner: ModuleType | type, root: str, prefix: str = "") -> None:
        """Watch every function of an extension's module, named `root`."""
        for name, value in list(vars(owner).items()):
            if name.startswith("__") and (name not in PYTHON_NAMES or not isinstance(owner, type)):
                continue
            if isinstance(value, ModuleType | type):
                home = value.__name__ if isinstance(value, ModuleType) else value.__module__
                # its own only, and not itself: a module may hold torch as well
                if home.partition(".")[0] == root and prefix.count(".") < DEEPEST_CLASS:
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
        for name in {name.partition(".")[0] for name in names}:
            namespace, _, operator = name.partition("::")
            self.own_operators.add(f"{namespace}.{operator}")
            packet = getattr(getattr(torch.ops, namespace), operator)
            for called in (packet, *(getattr(packet, each) for each in packet.overloads())):
                called._op = self._watched(f"{namespace}.{operator}", called._op)

    def watch(self, name: str, function: Function, args: Values, kwargs: Named) -> object:
        """Call a kernel's function; count it only where it returns, as work was done."""
        call = partial(function, *args, **(kwargs or {}))
        if self._inside or self.around is None:
            result = call()
        else:
            self._inside = True
            try:
                result = self.around(name, call)
            finally:
                self._inside = False
        self.calls[name] += 1
        if self.follows_graphs:
            self._watch_nodes(result)
        return result

    def _watch_nodes(self, result: object) -> None:
        """Watch backward functions that C++ put into a result's graph: no Python calls them."""
        leaves = [x for x in pytree.tree_leaves(result) if isinstance(x, Tensor)]
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

        def after(made: tuple[Tensor, ...], _: object) -> object:
            self._cpu_ns += (_now_ns() - began) * (self.around == self.timed)
            return self.watch(name, lambda: made, (), {})

        node.register_prehook(before)
        node.register_hook(after)

    def timed(self, _: str, call: Call) -> object:
        if not self._on_gpu:
            started = _now_ns()
            result = call()
            self._cpu_ns += _now_ns() - started
            return result
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        result = call()
        end.record()
        self._events.append((begin, end))
        return result

    def spent_ns(self) -> float:
        """Nanoseconds in watched calls since the last question; synchronise the device first."""
        spent = self._cpu_ns + sum(begin.elapsed_time(end) * 1e6 for begin, end in self._events)
        self._cpu_ns, self._events = 0, []
        return float(spent)

    def corrupting(self, value: float, *, skip: bool = False) -> Disturbance:
        """For the block, replace what kernels write by this value. `skip`: do not call kernels
        whose writes are out of sight.
        """
        return self._disturbing(partial(self._corrupted, value, skip))

    def swapping(self, swap: bool) -> Disturbance:
        """For the block, keep what kernels write, or (`swap`) replace it by the kept values."""
        self._kept = self._kept if swap else {}
        return self._disturbing(partial(self._swapped, swap))

    @contextmanager
    def _disturbing(self, around: Around) -> Iterator[None]:
        self.around = lambda name, call: call() if self.paused else around(name, call)
        try:
            yield
        finally:
            self.around = None

    def _corrupted(self, value: float, skip: bool, name: str, call: Call) -> object:
        silent = name not in self.overwrote and not name.endswith("__init__")
        if skip and silent and name in self._results:
            return self._results[name]
        result, changed, held = _observed(call)
        self._results[name] = result
        for tensor in changed:
            self._overwrite(name, tensor, value)

        def replaced(leaf: object) -> object:
            tensor = _as_tensor(leaf)
            if tensor is not None and tensor.data_ptr() not in held:
                self._overwrite(name, tensor, value)
            if isinstance(leaf, bool):
                return not leaf
            return leaf * 3 + 7 if isinstance(leaf, int | float) else leaf

        return pytree.tree_map(replaced, result)

    def _swapped(self, swap: bool, name: str, call: Call) -> object:
        result, changed, _ = _observed(call)
        tensors = map(_as_tensor, pytree.tree_leaves(result))
        written = [x.detach() for x in (*changed, *tensors) if x is not None]
        if not swap:
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

    def _overwrite(self, name: str, tensor: Tensor, value: float) -> None:
        target = tensor.detach()
        for dim, stride in enumerate(target.stride()):  # expanded: one element many times
            target = target if stride else target.narrow(dim, 0, min(1, target.shape[dim]))
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


def _observed(call: Call) -> tuple[object, list[Tensor], set[int]]:
    given = _reachable((call.args, call.keywords))
    before = [x.detach().clone() for x in given]
    result = call()
    changed = [x for x, old in zip(given, before, strict=True) if not same(x, old)]
    return result, changed, {x.data_ptr() for x in given}


def _as_tensor(value: object) -> Tensor | None:
    if isinstance(value, Tensor):
        return None if value.device.type == "meta" else value
    if type(value).__module__ == "numpy" and hasattr(value, "__array_interface__"):
        with suppress(TypeError, ValueError):  # a dtype that torch does not have
            return torch.from_numpy(value)
    return None


def _reachable(arguments: object) -> list[Tensor]:
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
        isinstance(value, Tensor)
        and type(value) in (Tensor, torch.nn.Parameter)
        and value.layout is torch.strided
    )


LIBRARY = "libconcur_launch.so"


class Launches:
    def __init__(self, library: CDLL) -> None:
        def function(
            name: str, result: type[c_long | c_double] | None, *arguments: type
        ) -> Callable[..., float]:
            found = library[f"concur_launch_{name}"]
            found.restype, found.argtypes = result, arguments
            return found

        self.reset = function("reset", None)
        """Forget counts and times; mode and expected stream stay."""
        self.expect_stream = function("expect_stream", None, c_void_p)
        """Count launches on other streams than this cudaStream_t (0: the default) as off stream."""
        self.elapsed_ms = function("ms", c_double)
        """Milliseconds in timed launches since the reset; waits for them."""
        self._mode = function("mode", None, c_int, c_int)
        self._wanted = False, False
        self._total, self._off_stream = function("total", c_long), function("off_stream", c_long)
        self._names = function("names", c_long, c_char_p, c_long)

    @classmethod
    def find(cls) -> Launches | None:
        """This process's counters; None where no CUDA library of a candidate is loaded."""
        try:
            return cls(CDLL(LIBRARY, mode=os.RTLD_NOLOAD | os.RTLD_NOW))
        except OSError:
            return None

    def mode(self, *, null: bool = False, timed: bool = False) -> None:
        """`null`: count launches without making them. `timed`: put each between two CUDA events."""
        self._wanted = null, timed
        self._mode(null, timed)

    def pause(self, on: bool) -> None:
        null, timed = self._wanted
        if null:
            self._mode(not on, timed)

    @contextmanager
    def nulled(self) -> Iterator[None]:
        """Count launches in the block without making them."""
        self.mode(null=True)
        try:
            yield
        finally:
            self.mode()

    @property
    def total(self) -> int:
        return int(self._total())

    @property
    def off_stream(self) -> int:
        return int(self._off_stream())

    def names(self) -> dict[str, int]:
        needed = int(self._names(None, 0))
        buffer = create_string_buffer(needed)
        self._names(buffer, needed)
        lines = buffer.value.decode(errors="replace").splitlines()
        found = (line.rpartition("\t") for line in lines)
        return {name: int(count) for name, _, count in found}
