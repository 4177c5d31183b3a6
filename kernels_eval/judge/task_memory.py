"""Memory that the reference process shares with a candidate's: inputs, constructor arguments, and
outputs.
"""

from __future__ import annotations

import os
from typing import Protocol

from kernels_eval.config import COPIED_BYTES
from kernels_eval.protocol import (
    DECLARED,
    DrawInputs,
    F,
    HandOver,
    InputLayout,
    LoadedTask,
    MemoryRequest,
    PackedValues,
    SharedMemory,
    ShareMemory,
)
from kernels_eval.sandbox import machine
from kernels_eval.sandbox.channel import Channel, Fds


class RequestWithMemory(Protocol):
    """The reference process's answer to a request that descriptors come with."""

    def __call__(self, request: MemoryRequest[F], fds: Fds, /) -> F: ...


class TaskMemory:
    loaded: LoadedTask
    """what says how much its values take, once the task is loaded"""

    def __init__(self, request: RequestWithMemory, channel: Channel, *, on_device: bool) -> None:
        self._request, self._channel, self._on_device = request, channel, on_device
        self._descriptors: dict[str, int] = {}
        self._shared: dict[str, SharedMemory] = {}

    def share(self, size: int, *names: str) -> None:
        """Make memory for outputs: of a "candidate" call, or in a round the candidate's "unseen"
        and the reference's "own"; or for the "inputs" of rounds. All of these on the device, or
        none: outputs are compared where they lie, and a round is charged for writing them.
        """
        if not all([self._share(size, name, self._on_device) for name in names]):
            for name in names:
                self._share(size, name, on_device=False)

    def _share(self, size: int, whose: str, on_device: bool) -> bool:
        request = ShareMemory(whose=whose, on_device=on_device, size=size)
        _, found = self._with_memory(request, whose)
        self._shared[whose] = SharedMemory(on_device=found, size=size)
        return found

    def shared(self, whose: str) -> tuple[SharedMemory, int]:
        return self._shared[whose], self._descriptors[whose]

    def draw(
        self, seeds: list[int], distribution: str | list[str] = DECLARED, shape: str = DECLARED
    ) -> tuple[PackedValues, int]:
        """Inputs of these seeds in shared memory, and a descriptor, valid until the next draw."""
        names = [distribution] * len(seeds) if isinstance(distribution, str) else distribution
        size = max(1, len(seeds)) * self.loaded.packed_bytes
        request = DrawInputs(
            seeds=seeds,
            distributions=names,
            shape=shape,
            on_device=self._on_device and size > COPIED_BYTES,
            size=size,
        )
        return self._handed_over(request, "drawn")

    def draw_for_round(self, seeds: list[int], distributions: list[str]) -> InputLayout:
        """Put the inputs of these seeds where those of rounds are."""
        request = DrawInputs(
            seeds=seeds,
            distributions=distributions,
            size=len(seeds) * self.loaded.packed_bytes,
            of_round=True,
        )
        answer = self._request(request, ())
        return InputLayout(packed=answer.packed, count=answer.count, stride=answer.stride)

    def arguments(self, settings: str = "") -> tuple[PackedValues, int]:
        """The constructor's arguments, or those of this name, in shared memory, and a
        descriptor."""
        request = HandOver(size=self.loaded.argument_bytes, settings=settings)
        return self._handed_over(request, "arguments")

    def weights(self) -> tuple[PackedValues, int]:
        """The reference's weights, as constructed."""
        request = HandOver(weights=True, size=max(1, self.loaded.weight_bytes))
        return self._handed_over(request, "weights")

    def _handed_over(self, request: DrawInputs | HandOver, use: str) -> tuple[PackedValues, int]:
        answer, on_device = self._with_memory(request, use)
        values = PackedValues(
            on_device=on_device,
            size=request.size,
            packed=answer.packed,
            count=answer.count,
            stride=answer.stride,
        )
        return values, self._descriptors[use]

    def _with_memory(self, request: MemoryRequest[F], use: str) -> tuple[F, bool]:
        self.release(use)
        fds: Fds = ()
        if not request.on_device:
            self._descriptors[use] = machine.sealed_memory(request.size)
            fds = (self._descriptors[use],)
        answer = self._request(request, fds)
        if not answer.shared:
            return self._with_memory(request.model_copy(update={"on_device": False}), use)
        if request.on_device:
            self._descriptors[use] = self._channel.descriptors.pop()
        return answer, request.on_device

    def release(self, *uses: str) -> None:
        for use in uses:
            if (descriptor := self._descriptors.pop(use, None)) is not None:
                os.close(descriptor)

    def close(self) -> None:
        self.release(*self._descriptors)
