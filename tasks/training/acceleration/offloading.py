"""MLP activations kept in main memory between the passes of a layer, instead of recomputed, with
overlapping copies. `worth_moving` says whether that is faster."""

from __future__ import annotations

import functools
import os
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any, NamedTuple

import psutil
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from kernels_eval.sandbox.machine import machine_memory_bytes
from tasks.training.acceleration.recomputation import AHEAD, BYTES, LayerShape, RecomputationPlan

WIDE = 2
"""tensors of the MLP's width that a layer saves: gate and up"""
SHARE = 0.6
"""share of the machine's main memory for the activations of all its workers"""
LATE = 2.0
"""Accepted ratio of a layer's copy to its products: attention and the spared MLP take about as long
again. On an H100, 33 ms and 23 ms cost nothing (measured)."""


def free_bytes() -> int:
    """Bytes of main memory that this worker may lock: SHARE of the machine's divided by
    LOCAL_WORLD_SIZE, at most SHARE of what is free."""
    each = machine_memory_bytes() / int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    return int(SHARE * min(each, psutil.virtual_memory().available))


def worth_moving(shape: LayerShape, tokens: int, device: torch.device) -> bool:
    """Whether copying gate and up to main memory is about as fast as computing the layer, timed on
    one copy and one product. CUDA only."""
    from triton.testing import do_bench

    hidden = torch.ones(tokens, shape.hidden, dtype=torch.bfloat16, device=device)
    weight = torch.ones(shape.hidden, shape.intermediate, dtype=torch.bfloat16, device=device)
    made = hidden @ weight
    page_locked = torch.empty(2**28 // BYTES, dtype=torch.bfloat16, pin_memory=True)
    part = made.view(-1)[: page_locked.numel()]
    product_ms = do_bench(lambda: torch.mm(hidden, weight, out=made), return_mode="median")
    copy_ms = do_bench(
        lambda: page_locked[: part.numel()].copy_(part, non_blocking=True), return_mode="median"
    )
    products = sum(wide * out for wide, out in shape.products)
    layer_ms = product_ms * products / (shape.hidden * shape.intermediate)
    return bool(WIDE * copy_ms * made.numel() / part.numel() <= LATE * layer_ms)


class Place(NamedTuple):
    """Autograd's stand-in for a saved tensor."""

    layer: int
    number: int
    forward_pass: int
    kept: Tensor | None


class MainMemory:
    """Page-locked buffers for the `moved` layers, and the order of their copies. The last layers
    stay: their backward passes come first and free room."""

    def __init__(
        self, plan: RecomputationPlan, shape: LayerShape, tokens: int, device: torch.device
    ) -> None:
        """Allocate buffers for at most `tokens` of a micro batch. Raises RuntimeError (CUDA's)
        where the memory cannot be page-locked."""
        self.moved, self.resident = plan.moved, plan.keep + AHEAD
        self.width, self.device = shape.intermediate, device
        self.memory = torch.zeros(plan.host, WIDE, tokens * self.width, dtype=torch.bfloat16)
        self.stream = None
        if device.type == "cuda":
            self.stream = torch.cuda.Stream(device)
            # torch's own page-locked memory comes in powers of two
            runtime, address = torch.cuda.cudart(), self.memory.data_ptr()
            torch.cuda.check_error(runtime.cudaHostRegister(address, self.memory.nbytes, 0))
            weakref.finalize(self, runtime.cudaHostUnregister, address)
        self.forward_pass, self.tokens = 0, 0
        self.shapes: dict[tuple[int, int], torch.Size] = {}
        self.leaving: deque[tuple[Tensor, torch.cuda.Event | None]] = deque()
        self.returned: dict[tuple[int, int], tuple[Tensor, torch.cuda.Event | None]] = {}
        self.next_back = self.moved.stop - 1

    def around(self, layer: nn.Module, number: int, forward: Callable[..., Any]) -> Any:
        if number < self.moved.start:
            return forward

        def moving(hidden: Tensor, *inputs: Any, **options: Any) -> Any:
            if not torch.is_grad_enabled():
                return forward(hidden, *inputs, **options)
            if number == self.moved.start:
                self._begin()
            self.tokens = hidden.numel() // hidden.shape[-1]
            self._let_leave(self.resident - max(0, number - self.moved.stop + 1))
            save = functools.partial(self._save, layer, number)
            with saved_tensors_hooks(save, self._give):
                return forward(hidden, *inputs, **options)

        return moving

    def _begin(self) -> None:
        self.forward_pass += 1
        self.shapes.clear()
        self.returned.clear()
        self._let_leave(0)
        self.next_back = self.moved.stop - 1

    def _save(self, layer: Any, number: int, tensor: Tensor) -> Tensor | Place:
        wide = tensor.dtype is torch.bfloat16 and tensor.numel() == self.tokens * self.width
        if not wide or any(tensor.data_ptr() == each.data_ptr() for each in layer.parameters()):
            return tensor
        if number not in self.moved:
            return Place(number, 0, self.forward_pass, tensor)
        key = number, sum(layer == number for layer, _ in self.shapes)
        # code that is not compiled saves more of that width
        if key[1] >= WIDE or tensor.numel() > self.memory.shape[-1]:
            return tensor
        self.shapes[key] = tensor.shape
        self.leaving.append((tensor, self._copy(tensor, self._buffer(key, tensor))))
        self._let_leave(self.resident)
        return Place(*key, self.forward_pass, None)

    def _give(self, saved: Tensor | Place) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        if saved.forward_pass != self.forward_pass:
            raise RuntimeError(
                "activations of this forward pass were overwritten by those of a later one: set"
                " AccelerationOptions.host_memory_gb to 0, or training.acceleration to off, where"
                " two forward passes come before a backward pass"
            )
        self._let_leave(0)
        kept = max(0, saved.layer - self.moved.stop + 1)
        while (
            self.next_back in self.moved
            and kept + min(saved.layer, self.moved.stop - 1) - self.next_back < self.resident
        ):
            self._bring_back(self.next_back)
            self.next_back -= 1
        if saved.kept is not None:
            return saved.kept
        tensor, arrived = self.returned.pop(saved[:2])
        self._wait(arrived)
        return tensor

    def _bring_back(self, layer: int) -> None:
        for key, shape in self.shapes.items():
            if key[0] == layer:
                target = torch.empty(shape, dtype=torch.bfloat16, device=self.device)
                arrived = self._copy(self._buffer(key, target), target)
                self.returned[key] = target, arrived

    def _buffer(self, key: tuple[int, int], like: Tensor) -> Tensor:
        layer, number = key
        memory = self.memory[layer - self.moved.start, number]
        return memory[: like.numel()].view(like.shape)

    def _let_leave(self, layers: int) -> None:
        while len(self.leaving) > WIDE * max(0, layers):
            self._wait(self.leaving.popleft()[1])

    def _copy(self, source: Tensor, target: Tensor) -> torch.cuda.Event | None:
        """Copy after queued work. Keep the device tensor until computing awaits the event."""
        if self.stream is None:
            target.copy_(source)
            return None
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(self.stream):
            target.copy_(source, non_blocking=True)
        done: torch.cuda.Event = self.stream.record_event()
        return done

    def _wait(self, event: torch.cuda.Event | None) -> None:
        if event is not None:
            torch.cuda.current_stream(self.device).wait_event(event)
