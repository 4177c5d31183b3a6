"""A bounded pipeline over Ray: build on CPU cores, run on devices, yield verdicts as they finish.

Guarantees: exactly one verdict per candidate; at most a fixed number of candidates in memory,
however many there are; a candidate that does not build never reaches a device; work is handed out
by task so that references are reused; a worker that dies is replaced, and its candidate tried
again, as it is where a sandbox fails; nothing waits for a worker that does not start (its node is
lost, say) while another one works; a worker whose GPU fails its canary is put into quarantine, its
candidate goes to the others, and `Pool.quarantined` names it. Raises GpuLostError where no worker
is left, where none starts, or where the same candidate takes down three workers; UsageError where
the nodes of a cluster are not alike; ClusterError where Ray fails; ToolchainError and DeviceError
as they come. Leaving the pool, however early (Ctrl-C, an exception), stops every worker.
"""

from __future__ import annotations

import math
import os
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable
from dataclasses import dataclass, field
from typing import Any

from kernels_eval.cluster.ray import (
    Place,
    address_of,
    interruptible,
    keeping_sigterm,
    place,
    require_alike,
    require_cluster,
    shortage,
)
from kernels_eval.cluster.telemetry import BUILDERS, DEVICES, Telemetry
from kernels_eval.cluster.worker import TOGETHER_S
from kernels_eval.config import EvalConfig
from kernels_eval.devices import gpu_arch, require_device
from kernels_eval.errors import ClusterError, DeviceError, EvalError, GpuLostError, SandboxError
from kernels_eval.isolation import reaper as orphans
from kernels_eval.parent.draft import verdict_of
from kernels_eval.parent.prepare import Prepared
from kernels_eval.records import Candidate, KernelTask, Language, Verdict

DEATHS = 5
"""Of workers (or of their sandboxes) on one candidate, after which it is believed to be why."""
DEVICES_LOST = 3
"""Devices that fail their canary after one candidate, after which it is believed to be why."""
RESUMES = "what was verified is kept: run the same again"
START_S = 600
"""How long work waits where no worker has started: a machine under load, or a cluster that gets its
nodes only when they are asked for."""
SHORT_S = 60.0
"""How long a worker may want a device before it is said, while others work: nodes that restart are
back by then, or a replacement is."""
WATCH_S = 10.0
"""After so long without an answer the pool asks whether its own node is still there: calls that
went through it are never answered then."""


def start_ray(address: str | None = None) -> None:
    """Connect to a Ray cluster (`address`, else `$RAY_ADDRESS`), or start one in this process,
    which then ends with it, however it ends. Does nothing where Ray runs already. Raises UsageError
    where no cluster answers at the address, ClusterError where Ray fails.
    """
    os.environ.setdefault(
        "RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0"
    )  # Ray's coming default: zero-GPU actors keep the variable as it is
    import logging

    import ray

    if ray.is_initialized():
        return
    # without an address Ray looks for the last `ray start`, whether it lives or not
    address = address_of(address)
    if address != "local":
        require_cluster(address)
    try:
        if address == "local":
            orphans.ray_begins()
        with keeping_sigterm():
            ray.init(
                address=address,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                configure_logging=False,
            )
    except (
        Exception
    ) as error:  # of many kinds: a bare Exception where a server of its own did not come up in time
        where = "here" if address == "local" else f"at {address}"
        hint = "see /tmp/ray/session_latest/logs; on a machine under load the same again may do"
        if address != "local":
            hint = (
                "is this machine a node of that cluster? `ray start --address=HOST:PORT` makes"
                " it one"
            )
        raise ClusterError(f"Ray did not start {where}: {error}", hint) from error


@dataclass
class _Item:
    task: KernelTask
    candidate: Candidate
    prepared: Prepared | None = None
    deaths: int = 0
    devices_lost: int = 0
    forms: tuple[dict[str, Any], ...] = ()
    """What travels: task, candidate and, once there is one, what was prepared. Made once, sent
    twice."""

    def __post_init__(self) -> None:
        self.forms = tuple(record.model_dump(mode="json") for record in (self.task, self.candidate))


@dataclass
class _Slot:
    """One actor and what it is doing."""

    actor: Any
    items: list[_Item] = field(default_factory=list)
    pending: Any = None
    last_task: str = ""
    at_once: int = 1
    """How many items travel in the next call."""

    since: float = 0.0
    """When its work was given to it, or it was started (time.monotonic)."""

    failures: int = 0
    """How often in a row its actor has died before it had started."""

    def __post_init__(self) -> None:
        self.start(self.actor)

    def start(self, actor: Any) -> None:
        """A new actor, which gets no work before it has answered: one that Ray cannot place never
        does."""
        self.actor, self.items, self.at_once = actor, [], 1
        self.pending, self.since = actor.__ray_call__.remote(place), time.monotonic()

    @property
    def idle(self) -> bool:
        return self.pending is None

    def give(self, items: list[_Item], calls: list[tuple[dict[str, Any], ...]]) -> None:
        self.items, self.pending, self.since = (
            items,
            self.actor.several.remote(calls),
            time.monotonic(),
        )


@dataclass
class Pool:
    """Workers that live for several batches. Use as a context manager."""

    language: Language
    config: EvalConfig = EvalConfig()
    workers: int | None = None
    builders: int | None = None
    address: str | None = None
    cuda_arch: str | None = None
    builder: Callable[..., Any] | None = None
    """The class of the build workers. Default: kernels_eval.cluster.worker.BuildWorker. For
    measuring the pool itself, and for tests."""
    runner: Callable[..., Any] | None = None
    """The class of the workers that run candidates. Default:
    kernels_eval.cluster.worker.KernelWorker."""
    at_once: int = 8
    """Candidates that travel in one call at most, while calls cost more than their work: see
    `several` in kernels_eval.cluster.worker."""
    _builder_cpus: float = 1.0
    _here: Place | None = None
    _builders: list[_Slot] = field(default_factory=list)
    _runners: list[_Slot] = field(default_factory=list)
    _lost: list[_Slot] = field(default_factory=list)
    quarantined: list[str] = field(default_factory=list)
    """One line for each worker whose device was given up: which it was, and what its canaries
    saw."""
    cautions: list[str] = field(default_factory=list)
    """One line each time that fewer workers have a device than were asked for, while the run goes
    on with the others."""
    telemetry: Telemetry = field(default_factory=Telemetry)
    """Since the pool was started."""
    _short: int = 0
    """How many workers were last told to have no device."""
    _minded: float = 0.0
    """When that was last looked at (time.monotonic)."""

    def __enter__(self) -> Pool:
        require_device(self.language)
        start_ray(self.address)
        import ray

        resources = ray.cluster_resources()
        cpus, gpus = int(resources.get("CPU", 1)), int(resources.get("GPU", 0))
        if self.language.needs_gpu and not gpus:
            raise DeviceError(
                "Ray sees no GPU in its cluster",
                "start Ray where nvidia-smi lists one, or set language to cpp",
            )
        workers = self.workers or (gpus if self.language.needs_gpu else max(1, cpus // 2))
        # builds run at the lowest priority, so on the CPU they may use every core: the workers that
        # time kernels go first
        builders = self.builders or (max(1, cpus - workers) if self.language.needs_gpu else cpus)
        self._builder_cpus = max(0.0, min(1.0, (cpus - workers) / builders))
        self.cuda_arch = self.cuda_arch or (gpu_arch() if self.language.needs_gpu else None)
        self._here = place()
        self._runners = [_Slot(self._new_runner()) for _ in range(workers)]
        self._builders = [_Slot(self._new_builder(index, builders)) for index in range(builders)]
        self.telemetry = Telemetry(builders, workers)
        return self

    def __exit__(self, *_: object) -> None:
        import ray

        for slot in (*self._builders, *self._runners, *self._lost):
            ray.kill(slot.actor)
        self._builders, self._runners, self._lost = [], [], []

    def _new_builder(self, share: int = 0, shares: int = 1) -> Any:
        import ray

        from kernels_eval.cluster.worker import BuildWorker

        actor = ray.remote(self.builder or BuildWorker).options(num_cpus=self._builder_cpus)
        return actor.remote(self.config, self.cuda_arch, share, shares)

    def _new_runner(self) -> Any:
        import ray

        from kernels_eval.cluster.worker import KernelWorker

        options = {"num_gpus": 1, "num_cpus": 1} if self.language.needs_gpu else {"num_cpus": 1}
        device = "cuda:0" if self.language.needs_gpu else "cpu"
        return (
            ray.remote(self.runner or KernelWorker)
            .options(**options)
            .remote(self.config, device, self.cuda_arch)
        )

    # -- the pipeline ------------------------------------------------------------------------------

    def verify(
        self, pairs: Iterable[tuple[KernelTask, Candidate]]
    ) -> Generator[Verdict, None, None]:
        """Verdicts in the order they finish. Takes from `pairs` only as fast as it can work.

        What is under way when the generator is left, or raises, is forgotten: the next call may be
        given the same candidates again.
        """
        if not self._runners:
            raise GpuLostError(
                f"no worker is left with a device that works: {'; '.join(self.quarantined)}",
                "see nvidia-smi -q and dmesg",
            )

        waiting = (_Item(*pair) for pair in pairs)
        retry: deque[_Item] = deque()
        ready: deque[_Item] = deque()
        finished: list[Verdict] = []
        exhausted = False

        def to_build() -> _Item | None:
            nonlocal exhausted
            item = retry.popleft() if retry else next(waiting, None)
            exhausted |= item is None
            return item

        limit = 2 * len(self._builders) + 4 * len(self._runners)
        try:
            while True:
                for slot in self._builders:
                    if slot.idle and len(ready) < limit:
                        items = _together(slot.at_once, to_build, retry)
                        if items:
                            slot.give(items, [item.forms[:2] for item in items])
                for slot in self._runners:
                    if slot.idle and ready:
                        items = _together(
                            slot.at_once, lambda slot=slot: self._next_for(slot, ready), ready
                        )
                        slot.give(items, [item.forms for item in items])
                self.telemetry.tick(len(ready))
                for verdict in finished:
                    self.telemetry.reached(verdict)
                # now that every worker has its next work: whatever the caller does with them keeps
                # no device waiting
                yield from finished
                busy = [slot for slot in (*self._builders, *self._runners) if not slot.idle]
                if exhausted and not ready and not retry and not any(slot.items for slot in busy):
                    return  # nothing is under way, and nothing is left to begin
                finished = self._collect(self._first_done(busy), ready, retry)
                self._mind_devices()
        finally:
            for slot in (*self._builders, *self._runners):
                if slot.items:
                    slot.items, slot.pending = [], None

    def _collect(self, slot: _Slot, ready: deque[_Item], retry: deque[_Item]) -> list[Verdict]:
        """Take a finished call off a slot. A finished build moves on; a finished run is a verdict;
        a dead actor is replaced."""
        import ray

        if not slot.items:
            self._started(slot)
            return []
        items, pending, slot.items, slot.pending = slot.items, slot.pending, [], None
        building = slot in self._builders
        self.telemetry.worked(BUILDERS if building else DEVICES, time.monotonic() - slot.since)
        again = retry if building else ready
        try:
            with interruptible():
                answers, seconds = ray.get(pending)
        except _lost() as error:
            self._replace(slot)
            for item in items:
                item.deaths += 1
                if item.deaths >= DEATHS:
                    name = item.candidate.candidate_id
                    hint = f"see the Ray logs of this node; {RESUMES}"
                    raise GpuLostError(
                        f"a worker died {DEATHS} times on candidate {name}: {error}", hint
                    ) from error
            again.extendleft(reversed(items))
            return []
        except ray.exceptions.RayTaskError as error:
            if isinstance(error.cause, GpuLostError):
                self._quarantine(slot, error.cause)
            elif not isinstance(error.cause, SandboxError):
                raise (
                    error.cause
                    if isinstance(error.cause, EvalError)
                    else error.as_instanceof_cause()
                ) from error
            for item in items:
                item.deaths += isinstance(error.cause, SandboxError)
                item.devices_lost += isinstance(error.cause, GpuLostError)
                if item.deaths >= DEATHS or item.devices_lost >= DEVICES_LOST or not self._runners:
                    raise error.cause from error
            slot.at_once = 1
            again.extendleft(reversed(items))
            return []
        slot.at_once = min(2 * slot.at_once, self.at_once) if seconds < TOGETHER_S else 1
        again.extendleft(reversed(items[len(answers) :]))
        if not building:
            return [Verdict.model_validate(answer) for answer in answers]
        verdicts = []
        for item, answer in zip(items, answers, strict=False):
            item.prepared = Prepared.model_validate(answer)
            if item.prepared.finding:
                verdicts.append(
                    verdict_of(item.task, item.candidate, item.prepared, item.prepared.finding)
                )
            else:
                item.forms = (*item.forms, answer)
                ready.append(item)
        return verdicts

    def _started(self, slot: _Slot) -> None:
        """A worker has answered for the first time, or died before it could: then another one
        starts in its place.

        Raises UsageError where it is on a node that must not verify: see `require_alike`.
        """
        import ray

        try:
            found = ray.get(slot.pending)
        except ray.exceptions.RayTaskError as error:
            raise ClusterError(
                f"a worker does not start: {error.cause!r}",
                "install the same version of concur on every node",
            ) from error
        except _lost() as error:
            slot.failures += 1
            self._replace(slot)
            if slot.failures >= DEATHS:
                slot.failures = 0
                raise GpuLostError(
                    f"a worker died {DEATHS} times while it started: {error}",
                    "see the Ray logs of this node",
                ) from error
        else:
            if self._here:
                require_alike(self._here, found)
            slot.pending, slot.failures = None, 0

    def _mind_devices(self) -> None:
        """Says, once for each change for the worse, that the cluster has fewer devices than workers
        want: a node is missing, or was lost.

        A worker that only takes its time to start is none that lacks a device.
        """
        now = time.monotonic()
        if now < self._minded + SHORT_S / 2:
            return
        self._minded = now
        if not any(
            slot.pending is not None and not slot.items and now - slot.since > SHORT_S
            for slot in self._runners
        ):
            self._short = 0
            return
        short, said = shortage(
            len(self._runners), "GPU" if self.language.needs_gpu else "CPU", SHORT_S
        )
        if short > self._short:
            self.cautions.append(said)
        self._short = short

    def _replace(self, slot: _Slot) -> None:
        import ray

        ray.kill(slot.actor)  # it may be out of reach only, and would keep its place
        slot.start(self._new_builder() if slot in self._builders else self._new_runner())

    @staticmethod
    def _first_done(busy: list[_Slot]) -> _Slot:
        """The slot that has answered first. Raises GpuLostError where nothing is under way and none
        starts, ClusterError where no answer can come any more."""
        import ray

        deadline = math.inf if any(slot.items for slot in busy) else time.monotonic() + START_S
        while True:
            with interruptible():
                done, _ = ray.wait(
                    [slot.pending for slot in busy], num_returns=1, timeout=min(WATCH_S, START_S)
                )
            if done:
                return next(slot for slot in busy if slot.pending in done)
            here = ray.get_runtime_context().get_node_id()
            if not any(node["Alive"] for node in ray.nodes() if node["NodeID"] == here):
                raise ClusterError(
                    "Ray has lost the node that this process is on (was its raylet killed?)",
                    RESUMES,
                )
            if time.monotonic() > deadline:
                raise GpuLostError(
                    f"no worker has started within {START_S} s",
                    f"`ray status` shows what the cluster lacks; {RESUMES}",
                )

    def _quarantine(self, slot: _Slot, cause: GpuLostError) -> None:
        """Give a worker no more work. Its actor lives on: it holds the broken GPU, which Ray would
        hand to the next actor otherwise."""
        self._runners.remove(slot)
        self._lost.append(slot)
        self.quarantined.append(str(cause.args[0]))

    def _next_for(self, slot: _Slot, ready: deque[_Item]) -> _Item | None:
        """The oldest item of the task this worker serves, so that its reference is used again; else
        the oldest of a task that no other worker serves; else the oldest of all. None where there
        is none."""
        served = {other.last_task for other in self._runners if other is not slot}
        names = [item.task.task_id for item in ready]
        own = (index for index, name in enumerate(names) if name == slot.last_task)
        free = (index for index, name in enumerate(names) if name not in served)
        index = next(own, next(free, 0))
        if not ready:
            return None
        item = ready[index]
        del ready[index]
        slot.last_task = item.task.task_id
        return item


def _lost() -> tuple[type[Exception], ...]:
    """What Ray raises where a worker, or the node that held it or its answer, is gone."""
    from ray import exceptions as ray

    return (
        ray.RayActorError,
        ray.NodeDiedError,
        ray.ObjectLostError,
        ray.WorkerCrashedError,
        ray.OutOfMemoryError,
    )


def _together(count: int, take: Callable[[], _Item | None], back: deque[_Item]) -> list[_Item]:
    """What travels in one call. An item that was under way when a worker was lost travels alone: so
    the one that does it is found."""
    items: list[_Item] = []
    while len(items) < count and (item := take()):
        suspect = bool(item.deaths or item.devices_lost)
        if suspect and items:
            back.appendleft(item)
            break
        items.append(item)
        if suspect:
            break
    return items
