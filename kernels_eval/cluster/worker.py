"""Ray actors: one `KernelWorker` per GPU (or CPU slot), and `BuildWorker`s on CPU cores that feed
them.

An actor owns its fork server; what misbehaves, or is killed, below it does not leave it as an
exception (kernels_eval.parent.kill_retry). After a verdict that a broken GPU may have caused, a
canary runs on it; where that fails twice, GpuLostError leaves it and no verdict.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from kernels_eval.config import EvalConfig
from kernels_eval.records import Candidate, KernelTask, Reason, Verdict

if TYPE_CHECKING:
    from kernels_eval.isolation.health import Pulse


TOGETHER_S = 0.05
"""Calls that have taken less than this together may travel together: a Ray call costs a few
milliseconds of processor time."""


def several(
    one: Callable[..., dict[str, Any]], calls: list[tuple[dict[str, Any], ...]]
) -> tuple[list[dict[str, Any]], float]:
    """The answers to the first of these calls, as many as begin within `TOGETHER_S`, at least one;
    and the seconds they took.

    What is quick (a rejected source, a build from the cache) shares the cost of a Ray call; what is
    slow makes nothing wait behind it.
    """
    started, answers = time.monotonic(), []
    for arguments in calls:
        answers.append(one(*arguments))
        if time.monotonic() - started > TOGETHER_S:
            break
    return answers, time.monotonic() - started


class BuildWorker:
    """Screens and builds candidates on one CPU core."""

    def __init__(
        self, config: EvalConfig, cuda_arch: str | None, share: int = 0, shares: int = 1
    ) -> None:
        from kernels_eval.parent.prepare import Preparer

        os.nice(
            19
        )  # where a core is shared with a worker that times kernels, the worker always goes first
        self._preparer = Preparer(config, cuda_arch=cuda_arch)
        self._share = (share, shares)
        self._warm = False

    def several(
        self, calls: list[tuple[dict[str, Any], ...]]
    ) -> tuple[list[dict[str, Any]], float]:
        return several(self.prepare, calls)

    def prepare(self, task: dict[str, Any], candidate: dict[str, Any]) -> dict[str, Any]:
        records = Candidate.model_validate(candidate), KernelTask.model_validate(task)
        if not self._warm:
            self._preparer.builder.warm(*self._share)
            self._warm = True
        return self._preparer.prepare(*records).model_dump(mode="json")


BLAMES_THE_DEVICE = frozenset({Reason.CUDA_ERROR, Reason.CRASHED, Reason.LOAD, Reason.RUN})
"""Reasons that a broken or wedged GPU produces as well as a broken kernel does. Believed once a
canary has answered."""


class KernelWorker:
    """Runs prepared candidates on one device. `pulse` replaces the canary (for tests); the health
    of CPUs is not watched without it."""

    def __init__(
        self,
        config: EvalConfig,
        device: str,
        cuda_arch: str | None,
        pulse: Callable[..., Pulse] | None = None,
    ) -> None:
        from kernels_eval.evaluator import Evaluator
        from kernels_eval.isolation.health import DeviceHealth, take_pulse

        self._evaluator = Evaluator(device, config, cuda_arch=cuda_arch)
        runner = self._evaluator.runner
        self._health: DeviceHealth | None = None
        if pulse or device.startswith("cuda"):
            self._health = DeviceHealth(
                lambda: runner.server, device, config.limits, runner.close, pulse or take_pulse
            )

    def several(
        self, calls: list[tuple[dict[str, Any], ...]]
    ) -> tuple[list[dict[str, Any]], float]:
        return several(self.run, calls)

    def run(
        self, task: dict[str, Any], candidate: dict[str, Any], prepared: dict[str, Any]
    ) -> dict[str, Any]:
        """One verdict. Raises GpuLostError where the device does not work (any more), other
        EvalErrors where the machine fails."""
        from kernels_eval.parent.prepare import Prepared

        records = (
            KernelTask.model_validate(task),
            Candidate.model_validate(candidate),
            Prepared.model_validate(prepared),
        )
        if self._health:
            self._health.remember()
        verdict: Verdict = self._evaluator.run(*records)
        if self._health and verdict.reason in BLAMES_THE_DEVICE:
            self._health.confirm()
        return verdict.model_dump(mode="json")
