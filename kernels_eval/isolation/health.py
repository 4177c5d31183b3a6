"""A small computation with a known answer, in a child of its own: whether a device still works, and
how much of its memory is free.

Guarantees: two canaries that fail, one after the other, mean that the device is lost
(`DeviceHealth.confirm` raises GpuLostError); memory that a killed process still holds is waited
for, with a bound. Does not guarantee that every unit of the device is sound.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from typing import Any

from pydantic import ValidationError

from kernels_eval.config import LimitsConfig
from kernels_eval.errors import GpuLostError, SandboxError
from kernels_eval.isolation.channel import Channel, ChannelClosed
from kernels_eval.records import Record

SIZE = 256
CANARY_S = 60.0
MEMORY_RETURN_S = 20.0
ENOUGH_MEMORY = 0.9
"""Share of the memory that was free at the start that must be free again; the reference of the task
at hand may hold the rest."""
PAUSE_S = 0.05


class Pulse(Record):
    """What one canary saw."""

    right: bool
    free_bytes: int


def serve_canary(channel: Channel) -> None:
    """The child's side: one computation a request, until the channel closes."""
    while True:
        try:
            message = channel.receive(None)
        except ChannelClosed:
            return
        try:
            answer: dict[str, Any] = _sing(
                message["device"], message["wanted_bytes"], message["patience_s"]
            )
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"[:500]}
        channel.send(answer)


def _sing(device: str, wanted_bytes: int, patience_s: float) -> dict[str, Any]:
    import torch

    row, column = torch.arange(SIZE).view(1, -1), torch.arange(SIZE).view(-1, 1)
    left, right = (3 * row + 5 * column) % 7 - 3, (row + 2 * column) % 5 - 2
    expected = (
        left @ right
    )  # in integers; the sums are small enough to be exact in float32 and TF32
    actual = (left.to(device).float() @ right.to(device).float()).cpu()
    deadline = time.monotonic() + patience_s
    while (free := _free_bytes(device)) < wanted_bytes and time.monotonic() < deadline:
        time.sleep(
            PAUSE_S
        )  # between two looks at a condition: the driver does not tell when memory comes back
    return {"right": bool(torch.equal(actual.long(), expected)), "free_bytes": free}


def _free_bytes(device: str) -> int:
    if device.startswith("cuda"):
        import torch

        return int(torch.cuda.mem_get_info(device)[0])
    import psutil

    return int(psutil.virtual_memory().available)


def take_pulse(
    server: Any,
    device: str,
    limits: LimitsConfig,
    *,
    wanted_bytes: int = 0,
    patience_s: float = 0.0,
) -> Pulse:
    """Run one canary in a new child of `server` (a ForkServer). Raises ChildFailure where the child
    does not answer."""
    from kernels_eval.isolation.sandbox import Child, ChildFailure

    with Child(server, "canary", limits) as child:
        answer = child.request(
            "canary",
            device=device,
            wanted_bytes=wanted_bytes,
            patience_s=patience_s,
            timeout=CANARY_S + patience_s,
        )
        try:
            return Pulse.model_validate(answer)
        except ValidationError:
            raise ChildFailure("exception", str(answer.get("error", answer))[:500]) from None


class DeviceHealth:
    """Whether one worker's device still works. `server` gives its fork server; `release` makes it
    give up the memory it holds itself."""

    def __init__(
        self,
        server: Callable[[], Any],
        device: str,
        limits: LimitsConfig,
        release: Callable[[], None],
        pulse: Callable[..., Pulse] = take_pulse,
    ) -> None:
        self._server, self._device, self._limits, self._release, self._pulse = (
            server,
            device,
            limits,
            release,
            pulse,
        )
        self._free_at_start: int | None = None

    def remember(self) -> None:
        """Note how much memory is free before any candidate has run. Raises GpuLostError where the
        device does not work to begin with."""
        if self._free_at_start is None:
            self._free_at_start = self._twice(0).free_bytes

    def confirm(self) -> None:
        """After a verdict that a broken device may have caused. Raises GpuLostError after two
        canaries that failed."""
        self._twice(int(ENOUGH_MEMORY * (self._free_at_start or 0)))

    def _twice(self, wanted_bytes: int) -> Pulse:
        seen: list[str] = []
        for _ in range(2):
            try:
                pulse = self._pulse(
                    self._server(),
                    self._device,
                    self._limits,
                    wanted_bytes=wanted_bytes,
                    patience_s=MEMORY_RETURN_S if wanted_bytes else 0.0,
                )
            except (SandboxError, *_failures()) as error:
                seen.append(str(error))
            else:
                if pulse.right and pulse.free_bytes >= wanted_bytes:
                    return pulse
                short = f"{pulse.free_bytes >> 20} MB free of {wanted_bytes >> 20} MB"
                seen.append(
                    f"memory did not come back ({short})"
                    if pulse.right
                    else "a matrix product was wrong"
                )
            self._release()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        which = f"{self._device} of {socket.gethostname()}" + (
            f" (CUDA_VISIBLE_DEVICES={visible})" if visible else ""
        )
        raise GpuLostError(
            f"{which} failed its canary twice: {'; then '.join(seen)}",
            "look at nvidia-smi -q and dmesg (Xid) there",
        )


def _failures() -> tuple[type[Exception], ...]:
    from kernels_eval.isolation.sandbox import ChildFailure

    return (ChildFailure,)
