"""A health check of a device: a small computation with a known answer, in a child of its own, and
its free memory."""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass

import psutil
from pydantic import ValidationError

from kernels_eval.config import CHECK_S, ENOUGH_MEMORY, MEMORY_RETURN_S, SOON_S, LimitsConfig
from kernels_eval.errors import GpuLostError, SandboxError
from kernels_eval.protocol import CheckHealth, HealthReport, handles, parsed
from kernels_eval.records import Reason
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.sandbox.server_handle import ForkServer

SIZE = 256
PAUSE_S = 0.05


@handles(CheckHealth)
def check(request: CheckHealth) -> HealthReport:
    import torch

    device = request.device
    row, column = torch.arange(SIZE).view(1, -1), torch.arange(SIZE).view(-1, 1)
    left, right = (3 * row + 5 * column) % 7 - 3, (row + 2 * column) % 5 - 2
    expected = left @ right  # in integers; the sums are small enough to be exact in TF32 too
    actual = (left.to(device).float() @ right.to(device).float()).cpu()

    def free_bytes() -> int:
        if device.startswith("cuda"):
            return torch.cuda.mem_get_info(device)[0]
        return int(psutil.virtual_memory().available)

    deadline = time.monotonic() + request.patience_s
    while (free := free_bytes()) < request.wanted_bytes and time.monotonic() < deadline:
        time.sleep(PAUSE_S)  # the driver does not tell when memory comes back
    return HealthReport(right=torch.equal(actual.long(), expected), free_bytes=free)


def check_health(
    server: ForkServer,
    device: str,
    limits: LimitsConfig,
    wanted_bytes: int = 0,
    patience_s: float = 0.0,
) -> HealthReport:
    """Check in a new child, which waits up to `patience_s` for free memory. Raises ChildFailure."""
    request = CheckHealth(device=device, wanted_bytes=wanted_bytes, patience_s=patience_s)
    with Child(server, "health", limits) as child:
        answer = child.request(request, CHECK_S + patience_s)
        try:
            return parsed(request, answer)
        except ValidationError:
            detail = str(answer.get("detail", answer))[:500]
            raise ChildFailure(Reason.EXCEPTION, detail) from None


@dataclass
class DeviceHealth:
    """Whether a worker's device still works, by its fork server; may `free_memory` and
    `restart`.
    """

    server: Callable[[], ForkServer]
    device: str
    limits: LimitsConfig
    free_memory: Callable[[], None]
    restart: Callable[[], None]
    check: Callable[..., HealthReport] = check_health
    _free_at_start: int | None = None

    def remember(self) -> None:
        """Note the free memory before any candidate. Raises GpuLostError."""
        if self._free_at_start is None:
            self._free_at_start = self._check_twice(0).free_bytes

    def confirm(self, *, crowded: bool = False) -> None:
        """Check the device after a suspect verdict; its memory, too, unless `crowded`. Raises
        GpuLostError after two failures.
        """
        self._check_twice(0 if crowded else int(ENOUGH_MEMORY * (self._free_at_start or 0)))

    def _check_twice(self, wanted_bytes: int) -> HealthReport:
        faults: list[str] = []
        for patience_s in (SOON_S, MEMORY_RETURN_S):
            asked = self.server(), self.device, self.limits, wanted_bytes, patience_s
            try:
                found = self.check(*asked)
            except (SandboxError, ChildFailure) as error:
                faults.append(str(error))
            else:
                free, wanted = found.free_bytes >> 20, wanted_bytes >> 20
                if found.right and found.free_bytes >= wanted_bytes:
                    return found
                if found.right:
                    faults.append(f"memory did not come back ({free} MB free of {wanted} MB)")
                    self.free_memory()
                    continue
                faults.append("a matrix product was wrong")
            self.restart()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        which = f" (CUDA_VISIBLE_DEVICES={visible})" if visible else ""
        raise GpuLostError(
            f"{self.device} of {socket.gethostname()}{which} failed its health check twice:"
            f" {'; then '.join(faults)}",
            "look at nvidia-smi -q and dmesg (Xid) there",
        )
