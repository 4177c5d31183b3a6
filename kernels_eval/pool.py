"""A bounded pipeline over Ray: build on CPU cores, run on devices, yield verdicts as they finish.

Guarantees: exactly one verdict per candidate; at most a fixed number of candidates in memory, however many there are; a candidate that
does not build never reaches a device; work is handed out by task so that references are reused; a worker that dies is replaced and its
candidate tried again; a worker whose GPU fails its canary is put into quarantine, its candidate goes to the others, and `Pool.quarantined`
names it. Raises GpuLostError where none is left, or where the same candidate takes down three workers; ToolchainError and DeviceError as
they come. Leaving the generator early (Ctrl-C, an exception) stops every worker.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from kernels_eval.config import EvalConfig
from kernels_eval.errors import DeviceError, GpuLostError
from kernels_eval.protocol import Prepared, verdict_of
from kernels_eval.records import Candidate, KernelTask, Language, Verdict
from kernels_eval.worker import gpu_arch, require_device

ATTEMPTS = 3


def start_ray(address: str | None = None) -> None:
    """Connect to a Ray cluster, or start one in this process. Does nothing where Ray runs already."""
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")  # Ray's coming default: zero-GPU actors keep the variable as it is
    import logging

    import ray

    if not ray.is_initialized():
        ray.init(address=address, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, configure_logging=False)


@dataclass
class _Item:
    task: KernelTask
    candidate: Candidate
    prepared: Prepared | None = None
    attempts: int = 0


@dataclass
class _Slot:
    """One actor and what it is doing."""

    actor: Any
    item: _Item | None = None
    pending: Any = None
    last_task: str = ""


@dataclass
class Pool:
    """Workers that live for several batches. Use as a context manager."""

    language: Language
    config: EvalConfig = EvalConfig()
    workers: int | None = None
    builders: int | None = None
    address: str | None = None
    cuda_arch: str | None = None
    _builder_cpus: float = 1.0
    _builders: list[_Slot] = field(default_factory=list)
    _runners: list[_Slot] = field(default_factory=list)
    _lost: list[_Slot] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    """One line for each worker whose device was given up: which it was, and what its canaries saw."""

    def __enter__(self) -> Pool:
        require_device(self.language)
        start_ray(self.address)
        import ray

        resources = ray.cluster_resources()
        cpus, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
        if self.language.needs_gpu and not gpus:
            raise DeviceError("Ray sees no GPU in its cluster", "start Ray where nvidia-smi lists one, or set language to cpp")
        workers = self.workers or (gpus if self.language.needs_gpu else max(1, cpus // 2))
        # builds run at the lowest priority, so on the CPU they may use every core: the workers that time kernels go first
        builders = self.builders or (max(1, cpus - workers) if self.language.needs_gpu else cpus)
        self._builder_cpus = max(0.0, min(1.0, (cpus - workers) / builders))
        self.cuda_arch = self.cuda_arch or (gpu_arch() if self.language.needs_gpu else None)
        self._runners = [_Slot(self._new_runner()) for _ in range(workers)]
        self._builders = [_Slot(self._new_builder(index, builders)) for index in range(builders)]
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for slot in (*self._builders, *self._runners, *self._lost):
            ray.kill(slot.actor)
        self._builders, self._runners, self._lost = [], [], []

    def _new_builder(self, share: int = 0, shares: int = 1) -> Any:
        import ray

        from kernels_eval.worker import BuildWorker

        return ray.remote(BuildWorker).options(num_cpus=self._builder_cpus).remote(self.config, self.cuda_arch, share, shares)

    def _new_runner(self) -> Any:
        import ray

        from kernels_eval.worker import KernelWorker

        options = {"num_gpus": 1, "num_cpus": 1} if self.language.needs_gpu else {"num_cpus": 1}
        return (
            ray.remote(KernelWorker).options(**options).remote(self.config, "cuda:0" if self.language.needs_gpu else "cpu", self.cuda_arch)
        )

    # -- the pipeline ----------------------------------------------------------------------------------------------------------------

    def verify(self, pairs: Iterable[tuple[KernelTask, Candidate]]) -> Iterator[Verdict]:
        """Verdicts in the order they finish. Takes from `pairs` only as fast as it can work."""
        import ray

        waiting: Iterator[tuple[KernelTask, Candidate]] = iter(pairs)
        retry: deque[_Item] = deque()
        ready: deque[_Item] = deque()
        limit = 2 * len(self._builders) + 4 * len(self._runners)
        exhausted = False
        while True:
            for slot in self._builders:
                if slot.item is None and len(ready) < limit and not exhausted:
                    item = retry.popleft() if retry else next((_Item(*pair) for pair in waiting), None)
                    exhausted = item is None
                    if item:
                        slot.item = item
                        slot.pending = slot.actor.prepare.remote(*(r.model_dump(mode="json") for r in (item.task, item.candidate)))
            for slot in self._runners:
                if slot.item is None and ready:
                    item = self._next_for(slot, ready)
                    slot.item, slot.last_task = item, item.task.task_id
                    slot.pending = slot.actor.run.remote(*(r.model_dump(mode="json") for r in (item.task, item.candidate, item.prepared)))
            busy = [slot for slot in (*self._builders, *self._runners) if slot.item]
            if not busy:
                if exhausted and not ready and not retry:
                    return
                exhausted = False if retry else exhausted
                continue
            done, _ = ray.wait([slot.pending for slot in busy], num_returns=1)
            for slot in busy:
                if slot.pending in done:
                    verdict = self._collect(slot, ready, retry)
                    exhausted = exhausted and not retry
                    if verdict:
                        yield verdict

    def _collect(self, slot: _Slot, ready: deque[_Item], retry: deque[_Item]) -> Verdict | None:
        """Take a finished call off a slot. A finished build moves on; a finished run is a verdict; a dead actor is replaced."""
        import ray

        item, pending, slot.item, slot.pending = slot.item, slot.pending, None, None
        building = slot in self._builders
        try:
            answer = ray.get(pending)
        except ray.exceptions.RayActorError as error:
            item.attempts += 1
            if item.attempts >= ATTEMPTS:
                raise GpuLostError(
                    f"a worker died {ATTEMPTS} times on candidate {item.candidate.candidate_id}: {error}", "see the Ray logs of this node"
                ) from error
            slot.actor = self._new_builder() if building else self._new_runner()
            (retry if building else ready).appendleft(item)
            return None
        except ray.exceptions.RayTaskError as error:
            if not isinstance(error.cause, GpuLostError):
                raise error.as_instanceof_cause() from error
            self._quarantine(slot, error.cause)
            item.attempts += 1
            if item.attempts >= ATTEMPTS or not self._runners:
                raise error.cause from error
            ready.appendleft(item)
            return None
        if not building:
            return Verdict.model_validate(answer)
        item.prepared = Prepared.model_validate(answer)
        if item.prepared.finding:
            return verdict_of(item.task, item.candidate, item.prepared, item.prepared.finding)
        ready.append(item)
        return None

    def _quarantine(self, slot: _Slot, cause: GpuLostError) -> None:
        """Give a worker no more work. Its actor lives on: it holds the broken GPU, which Ray would hand to the next actor otherwise."""
        self._runners.remove(slot)
        self._lost.append(slot)
        self.quarantined.append(str(cause.args[0]))

    @staticmethod
    def _next_for(slot: _Slot, ready: deque[_Item]) -> _Item:
        """The oldest item of the task this worker has just served, else the oldest of all."""
        for index, item in enumerate(ready):
            if item.task.task_id == slot.last_task:
                del ready[index]
                return item
        return ready.popleft()
