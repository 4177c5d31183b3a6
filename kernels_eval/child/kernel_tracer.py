"""Watches a candidate's own kernels from inside its process: counts their calls, times them, and
spoils what they did.

Spoiling answers the question whether a kernel matters: if the output stays the same when everything
that the kernels wrote is replaced by something else, they are an ornament. Testimony, like
everything in this process: native code can forge it.
"""

from __future__ import annotations

import time
from collections import Counter
from types import ModuleType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_now_ns = time.perf_counter_ns


class Witness:
    """Wraps the functions of extensions, operators registered with torch.ops, and Triton
    kernels."""

    def __init__(self, on_gpu: bool) -> None:
        self.calls: Counter[str] = Counter()
        self.spoil: float | None = None
        self.timing = False
        self._on_gpu, self._depth, self._cpu_ns = on_gpu, 0, 0
        self._events: list[tuple[Any, Any]] = []

    def wrap_module(self, module: ModuleType) -> None:
        for name in dir(module):
            value = getattr(module, name)
            if callable(value) and not isinstance(value, type) and not name.startswith("__"):
                setattr(module, name, self._wrapped(name, value))

    def wrap_triton(self) -> None:
        from triton.runtime.jit import JITFunction

        original, witness = JITFunction.run, self

        def run(kernel: Any, *args: Any, **kwargs: Any) -> Any:
            name = getattr(kernel, "__name__", None) or kernel.fn.__name__
            return witness.watch(name, lambda *a, **k: original(kernel, *a, **k), args, kwargs)

        JITFunction.run = run

    def operators(self) -> TorchDispatchMode:
        """A dispatch mode under which operators of namespaces other than torch's own count as
        kernels."""
        witness = self

        class Watch(TorchDispatchMode):
            def __torch_dispatch__(
                self, function: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                namespace, name = function._schema.name.split("::")
                if namespace in ("aten", "prim", "prims"):
                    return function(*args, **(kwargs or {}))
                return witness.watch(f"{namespace}.{name}", function, args, kwargs or {})

        return Watch()

    def _wrapped(self, name: str, function: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            return self.watch(name, function, args, kwargs)

        return call

    def watch(self, name: str, function: Any, args: Any, kwargs: Any) -> Any:
        if self.spoil is not None and not self._depth:
            result = self._spoiled(function, args, kwargs)
        elif self.timing and not self._depth:
            result = self._timed(function, args, kwargs)
        else:
            result = function(*args, **kwargs)
        self.calls[name] += 1  # only what came back: a call that raises did no work
        return result

    # -- time --------------------------------------------------------------------------------------

    def _timed(self, function: Any, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        try:
            if not self._on_gpu:
                started = _now_ns()
                result = function(*args, **kwargs)
                self._cpu_ns += _now_ns() - started
                return result
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            result = function(*args, **kwargs)
            end.record()
            self._events.append((begin, end))
            return result
        finally:
            self._depth -= 1

    def take_ns(self) -> float:
        """Nanoseconds spent in watched calls since the last question; the device must be
        synchronised."""
        spent = self._cpu_ns + sum(begin.elapsed_time(end) * 1e6 for begin, end in self._events)
        self._cpu_ns, self._events = 0, []
        return spent

    # -- spoiling ----------------------------------------------------------------------------------

    def _spoiled(self, function: Any, args: Any, kwargs: Any) -> Any:
        self._depth += 1
        try:
            given = [x for x in _tensors([args, kwargs]) if x.device.type != "meta"]
            before = [x.detach().clone() for x in given]
            result = function(*args, **kwargs)
            made = {x.data_ptr() for x in given}
            for tensor, old in zip(given, before, strict=True):
                if not torch.equal(tensor, old) and not bool(
                    ((tensor != tensor) & (old != old)).all()
                ):
                    self._spoil_tensor(tensor)
            for tensor in _tensors(result):
                if tensor.data_ptr() not in made:
                    self._spoil_tensor(tensor)
            return (
                result
                if not isinstance(result, int | float) or isinstance(result, bool)
                else type(result)(result * 3 + 7)
            )
        finally:
            self._depth -= 1

    def _spoil_tensor(self, tensor: Any) -> None:
        with torch.no_grad():
            target = tensor.detach()
            if target.is_floating_point() or target.is_complex():
                target.fill_(self.spoil)
            elif target.dtype == torch.bool:
                target.logical_not_()
            else:
                target.copy_(
                    target.flatten().roll(1).reshape(target.shape)
                )  # stays in range: it may be an index


def _tensors(value: Any) -> list[Any]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        return [x for item in value.values() for x in _tensors(item)]
    if isinstance(value, list | tuple):
        return [x for item in value for x in _tensors(item)]
    return []
