"""Watches a candidate's own kernels from inside its process: counts their calls, times them, and
corrupts what they wrote.

Corrupting answers the question whether a kernel matters: if the output stays the same when
everything that the kernels wrote is replaced by something else, they are an ornament. No evidence,
like everything in this process: native code can forge it.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import ModuleType

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from kernels_eval.checks.operators import Named, Values

Function = Callable[..., object]
_now_ns = time.perf_counter_ns


class KernelTracer:
    """Wraps the functions of extensions, operators registered with torch.ops, and Triton
    kernels."""

    def __init__(self, on_gpu: bool) -> None:
        self.calls: Counter[str] = Counter()
        self.timing = False
        self._corrupt: float | None = None
        self._on_gpu, self._inside, self._cpu_ns = on_gpu, False, 0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def wrap_module(self, module: ModuleType) -> None:
        for name in dir(module):
            value = getattr(module, name)
            if callable(value) and not isinstance(value, type) and not name.startswith("__"):
                setattr(module, name, self._wrapped(name, value))

    def _wrapped(self, name: str, function: Function) -> Function:
        return lambda *args, **kwargs: self.watch(name, function, args, kwargs)

    def wrap_triton(self) -> None:
        from triton.runtime.jit import JITFunction

        original = JITFunction.run

        def run(kernel: JITFunction, *args: object, **kwargs: object) -> object:
            name = getattr(kernel, "__name__", None) or kernel.fn.__name__
            return self.watch(name, lambda *a, **k: original(kernel, *a, **k), args, kwargs)

        JITFunction.run = run

    def operators(self) -> TorchDispatchMode:
        """A dispatch mode under which operators of namespaces other than torch's own count as
        kernels."""
        watch = self.watch

        class Watch(TorchDispatchMode):
            def __init__(self) -> None:
                TorchDispatchMode.__init__(self)

            def __torch_dispatch__(
                self, function: OpOverload, types: object, args: Values = (), kwargs: Named = None
            ) -> object:
                namespace, name = function._schema.name.split("::")
                if namespace in ("aten", "prim", "prims"):
                    return function(*args, **(kwargs or {}))
                return watch(f"{namespace}.{name}", function, args, kwargs)

        return Watch()

    def watch(self, name: str, function: Function, args: Values, kwargs: Named) -> object:
        """Call a kernel's function, and count it where it returns: a call that raises did no
        work."""
        if self._inside or not (self.timing or self._corrupt is not None):
            result = function(*args, **(kwargs or {}))
        else:
            self._inside = True
            try:
                how = self._timed if self._corrupt is None else self._corrupted
                result = how(function, args, kwargs)
            finally:
                self._inside = False
        self.calls[name] += 1
        return result

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
    def corrupting(self, value: float) -> Iterator[None]:
        """Meanwhile, replace what kernels write by this value."""
        self._corrupt = value
        try:
            yield
        finally:
            self._corrupt = None

    def _corrupted(self, function: Function, args: Values, kwargs: Named) -> object:
        given = [x for x in _tensors((args, kwargs)) if x.device.type != "meta"]
        before = [x.detach().clone() for x in given]
        result = function(*args, **(kwargs or {}))
        held = {x.data_ptr() for x in given}
        for tensor, old in zip(given, before, strict=True):
            if not torch.equal(tensor, old) and not bool(((tensor != tensor) & (old != old)).all()):
                self._overwrite(tensor)
        for tensor in _tensors(result):
            if tensor.data_ptr() not in held:
                self._overwrite(tensor)
        if isinstance(result, int | float) and not isinstance(result, bool):
            return type(result)(result * 3 + 7)
        return result

    def _overwrite(self, tensor: torch.Tensor) -> None:
        target = tensor.detach()
        with torch.no_grad():
            if target.is_floating_point() or target.is_complex():
                target.fill_(self._corrupt or 0.0)
            elif target.dtype == torch.bool:
                target.logical_not_()
            else:
                # stays in range: it may be an index
                target.copy_(target.flatten().roll(1).reshape(target.shape))


def _tensors(value: object) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]
