"""A bounded pipeline: build on CPU cores, run on devices, yield verdicts as they finish. Its
workers are actors of Ray where a cluster or several GPUs are used, else processes of this machine.

Guarantees: one verdict per candidate; killed workers are replaced, their candidates retried;
workers with a broken GPU are quarantined; leaving stops all. Raises GpuLostError without workers or
where a candidate takes down too many, UsageError where nodes differ, ClusterError where Ray fails,
BusyError where others use the devices for too long.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from kernels_eval.compile.extensions import Builder, parts_made
from kernels_eval.config import EvalConfig
from kernels_eval.devices import device_for, gpu_arch, require_device
from kernels_eval.errors import ClusterError, DeviceError, GpuLostError, SandboxError
from kernels_eval.judge.messages import Prepared, verdict_of
from kernels_eval.pool.held import held, holders, require_patience
from kernels_eval.pool.lanes import Lanes
from kernels_eval.pool.local import FailedError, LostError, Machine
from kernels_eval.pool.ray import (
    Cluster,
    Place,
    gpu_type_for,
    gpu_types,
    is_needed,
    measured_on,
    place,
    require_alike,
    shortage,
    start_ray,
)
from kernels_eval.pool.slots import Item, Slot
from kernels_eval.pool.telemetry import BUILDERS, DEVICES, Telemetry
from kernels_eval.pool.worker import BuildWorker, KernelWorker
from kernels_eval.records import Candidate, KernelTask, Language, Verdict
from kernels_eval.sandbox.deaths import DEATHS, WORKER, role_of

RESUMES = "verified candidates are kept; rerun the same command to resume"
START_S = 600
"""Seconds to wait for a first worker: a loaded machine, or nodes added on demand."""
SHORT_S = 60.0
"""Seconds that a worker may lack a device before a warning: nodes may restart."""
ASK_S = 0.02
"""Seconds between looks for new work when the caller has none."""
WATCH_S = 10.0
"""Seconds without an answer before the pool checks its node: a lost node never answers."""
SAY_S = 4.0
"""Seconds without any worker before it is said whom they wait for."""

NAMED = 2
"""Workers of a kind whose tasks are named before the first verdict."""

T = TypeVar("T")


def arriving(queue: SimpleQueue[T | None]) -> Iterator[T | None]:
    """Yield what is put into a queue, None while it is empty; end at a put None."""
    while True:
        try:
            found = queue.get_nowait()
        except Empty:
            yield None
            continue
        if found is None:
            return
        yield found


def _say_nothing(_: str) -> None: ...


@dataclass
class Pool:
    """Verifies many candidates on all devices of a machine or of a Ray cluster. Use as a context
    manager."""

    language: Language
    config: EvalConfig = EvalConfig()
    workers: int | None = None
    builders: int | None = None
    lanes: int = 1
    """Workers that share a device."""
    address: str | None = None
    cuda_arch: str | None = None
    gpu_type: str | None = None
    """Ray's name of the GPU type to use; default: that of this node."""
    builder: Callable[..., Any] = BuildWorker
    """Class of the build workers; replaced by tests and to measure the pool itself."""
    runner: Callable[..., Any] = KernelWorker
    quarantined: list[str] = field(default_factory=list)
    """One line per worker whose device was given up, with what its health checks saw."""
    cautions: list[str] = field(default_factory=list)
    """One line each time that fewer workers have a device than were asked for."""
    telemetry: Telemetry = field(default_factory=Telemetry)
    """Since the pool was started."""
    waiting: Callable[[str], None] = _say_nothing
    """Told what the pool waits for before its first verdict, again and again."""
    patience_s: float | None = None
    """Seconds to wait for them; default: until they end."""
    waited_s: float = 0.0
    """Seconds that it waited for other pools of this machine."""
    cancelled: SimpleQueue[Candidate] | None = None
    """Candidates, the objects that were given, whose work ends at once and without a verdict."""
    _host: Any = None
    _holds: ExitStack | None = None
    """The hold on this machine's devices, while there is work."""
    _builder_cpus: float = 1.0
    _shares: bool = False
    """Whether others may judge on this machine meanwhile, as Ray shares its devices out."""
    _here: Place | None = None
    _builders: list[Slot] = field(default_factory=list)
    _runners: list[Slot] = field(default_factory=list)
    _lanes: Lanes = field(default_factory=lambda: Lanes([], 1))
    _lost: list[Slot] = field(default_factory=list)
    _given_up: list[Candidate] = field(default_factory=list)
    """Cancelled before they were taken."""
    _short: int = 0
    _checked: float = 0.0
    _looked: float = 0.0
    _headers: list[Path] | None = None
    """What all builds need, where a part was missing when nothing was built for long."""
    _said: str | None = ""
    """What was said to be under way; None once there is a verdict."""
    _full_at: float = 0.0
    """When others were last seen to use all devices (time.monotonic)."""

    def __enter__(self) -> Pool:
        require_device(self.language)
        self._shares = is_needed(self.address, self.language, self.workers)
        self._hold()
        try:
            self.waiting("starts the workers")
            if self._shares:
                self._join()
            else:
                self._host = Machine(gpus=int(self.language.needs_gpu))
            self._start_workers()
        except BaseException:
            self._let_go()
            raise
        return self

    def _hold(self) -> None:
        """Keep others off the devices, once they let go. Raises BusyError."""
        if self._holds is None:
            device = "gpu" if self.language.needs_gpu else "cpu"
            taken, began_s = ExitStack(), time.monotonic()
            taken.enter_context(
                held(device, shared=self._shares, patience_s=self.patience_s, say=self.waiting)
            )
            self.waited_s += time.monotonic() - began_s
            self._holds = taken

    def _let_go(self) -> None:
        if self._holds:
            self._holds.close()
        self._holds = None

    def _join(self) -> None:
        start_ray(self.address)
        self._host, self._here = Cluster(), place()
        if not self.language.needs_gpu:
            return
        if not self._host.gpus:
            raise DeviceError(
                "Ray sees no GPU in its cluster",
                "start Ray where nvidia-smi lists one, or set language to cpp",
            )
        if chosen := gpu_type_for(self.gpu_type):
            self.gpu_type, self._host.gpus = chosen, gpu_types()[chosen]
            self.cuda_arch = self.cuda_arch or measured_on(chosen, self.language)[1]

    def _start_workers(self) -> None:
        cpus, gpus = self._host.cpus, self._host.gpus
        # Two of each on two cores: they wait often, and beside load each has a share of its own.
        few = min(2, cpus)
        workers = self.workers or (gpus if self.language.needs_gpu else max(few, cpus // 2))
        builders = self.builders or max(few, cpus - workers)
        self._builder_cpus = max(0.0, min(1.0, (cpus - workers) / builders))
        self.cuda_arch = self.cuda_arch or (gpu_arch() if self.language.needs_gpu else None)
        lanes = range(workers * self.lanes)
        self._runners = [Slot(self._host, self._new_runner) for _ in lanes]
        self._lanes = Lanes(self._runners, self.lanes)
        self._builders = [
            Slot(self._host, partial(self._new_builder, share, builders))
            for share in range(builders)
        ]
        self.telemetry = Telemetry(builders, workers, self.lanes)

    def __exit__(self, *_: object) -> None:
        for slot in (*self._slots, *self._lost):
            self._host.kill(slot.actor)
        self._builders, self._runners, self._lost = [], [], []
        self._let_go()

    @property
    def _slots(self) -> list[Slot]:
        return [*self._builders, *self._runners]

    def _new_builder(self, share: int, shares: int) -> Any:
        given = (self.config, self.cuda_arch, share, shares)
        return self._host.start(self.builder, given, num_cpus=self._builder_cpus)

    def _new_runner(self) -> Any:
        given = (self.config, device_for(self.language), self.cuda_arch, None, self.lanes)
        return self._host.start(
            self.runner,
            given,
            num_gpus=1 / self.lanes if self.language.needs_gpu else None,
            num_cpus=1 / self.lanes,
            accelerator_type=self.gpu_type if self.language.needs_gpu else None,
        )

    # -- the pipeline ------------------------------------------------------------------------------

    def verify(
        self, pairs: Iterable[tuple[KernelTask, Candidate] | None]
    ) -> Generator[Verdict, None, None]:
        """Yield verdicts in the order they finish.

        Takes from `pairs` as fast as it can work; None means none now, ask again in `ASK_S`
        seconds. Closing drops candidates in flight.
        """
        waiting = iter(pairs)
        retry: deque[Item] = deque()
        ready: deque[Item] = deque()
        finished: Verdict | None = None
        exhausted = paused = False

        def to_build() -> Item | None:
            nonlocal exhausted, paused
            while not retry:
                try:
                    pair = next(waiting)
                except StopIteration:
                    exhausted = True
                    return None
                paused = pair is None
                if pair is None:
                    return None
                item = Item(*pair)
                if not self._is_given_up(item):
                    self._hold()
                    return item
            return retry.popleft()

        limit = 2 * len(self._builders) + 4 * len(self._runners)
        first: Slot | None = None
        since = 0.0
        try:
            while True:
                self._require_device()
                self._end_cancelled(ready, retry)
                for slot in self._builders:
                    if slot.idle and len(ready) < limit and (item := to_build()):
                        slot.build(item, gives_way=self._have_next(ready))
                waiting_for = {item.task.task_id for item in ready}
                # who has a task at hand comes first
                for slot in sorted(self._runners, key=lambda s: s.last_task not in waiting_for):
                    if slot.idle:
                        self._lanes.give_work(slot, ready)
                self.telemetry.tick(len(ready))
                if finished:
                    self.telemetry.reached(finished)
                    # Every worker has its next work by now: no device waits for the caller.
                    yield finished
                self._say_work()
                busy = [slot for slot in self._slots if not slot.idle]
                left = ready or retry or any(slot.item or slot.reserved for slot in self._slots)
                if exhausted and not left:
                    return  # nothing is under way, and nothing is left to begin
                if paused and not left:
                    self._let_go()
                if first or not since or (paused and not ready):
                    since = time.monotonic()  # nothing has waited yet for a worker to start
                silent = self.cancelled is None and (exhausted or not paused)
                first = self._first_done(busy, since, math.inf if silent else ASK_S)
                finished = self._collect(first, ready, retry) if first else None
                self._check_devices()
        finally:
            self._drop_work()

    def _have_next(self, ready: deque[Item]) -> bool:
        """Whether each worker's next work is built, beside what a free one is about to take."""
        free = sum(slot.item is None for slot in self._runners)
        return len(ready) >= len(self._runners) + free

    def _drop_work(self) -> None:
        self._said = ""
        for slot in self._slots:
            slot.reserved = None
            if slot.item:
                slot.item = slot.pending = None

    def _end_cancelled(self, *waiting: deque[Item]) -> None:
        """End the work on what was cancelled: its worker dies, and another takes its place."""
        if self.cancelled is None or self.cancelled.empty():
            return
        while not self.cancelled.empty():
            self._given_up.append(self.cancelled.get())
        for items in waiting:
            kept = [item for item in items if not self._is_given_up(item)]
            items.clear()
            items.extend(kept)
        for slot in self._slots:
            if slot.reserved and self._is_given_up(slot.reserved):
                slot.reserved = None
            if slot.item and self._is_given_up(slot.item):
                self._replace(slot)

    def _is_given_up(self, item: Item) -> bool:
        """Whether an item was cancelled, which is then known no more."""
        before = len(self._given_up)
        self._given_up = [each for each in self._given_up if each is not item.candidate]
        return len(self._given_up) < before

    def _collect(self, slot: Slot, ready: deque[Item], retry: deque[Item]) -> Verdict | None:
        item, pending = slot.item, slot.pending
        if item is None:
            self._started(slot)
            return None
        slot.item = slot.pending = None
        building = slot in self._builders
        self.telemetry.worked(BUILDERS if building else DEVICES, time.monotonic() - slot.since)
        try:
            answer: Prepared | Verdict = self._host.get(pending)
        except (LostError, FailedError) as error:
            ready.extendleft(self._failed(slot, item, error))
            (retry if building else ready).appendleft(item)
            return None
        if isinstance(answer, Verdict):
            if not self._lanes.doubts(slot, answer):
                self._said = None
                return answer
            item.keep_alone()
            ready.appendleft(item)
            return None
        if answer.finding:
            return verdict_of(item.task, item.candidate, answer, answer.finding)
        item.prepared = answer
        if answer.asked:
            retry.append(item)  # back to the builders, before new ones
        else:
            if answer.alone and not building:
                self._lanes.large.add(item.task.task_id)
            ready.append(item)
        return None

    def _failed(self, slot: Slot, item: Item, error: LostError | FailedError) -> list[Item]:
        """Note who died; returns what else was under way there. Raises where its item must not be
        retried.
        """
        others: list[Item] = []
        cause = error.cause if isinstance(error, FailedError) else None
        if cause is None:
            self._replace(slot)
        elif isinstance(cause, GpuLostError):
            others = self._quarantine(slot, cause)
        elif not isinstance(cause, SandboxError):
            raise cause from error
        spent = item.deaths.note(role_of(cause) if cause else WORKER)
        if spent and cause is None:
            name = item.candidate.candidate_id
            raise GpuLostError(
                f"a worker died {DEATHS} times on candidate {name}: {error}",
                f"{self._host.logs}; {RESUMES}",
            ) from error
        if cause is not None and (spent or not self._runners):
            raise cause from error
        return others

    def _started(self, slot: Slot) -> None:
        try:
            found = self._host.get(slot.pending)
        except FailedError as error:
            raise ClusterError(
                f"a worker did not start: {error.cause!r}",
                "install the same version of concur on every node",
            ) from error
        except LostError as error:
            slot.failures += 1
            self._replace(slot)
            if slot.failures >= DEATHS:
                slot.failures = 0
                raise GpuLostError(
                    f"a worker died {DEATHS} times while it started: {error}",
                    self._host.logs,
                ) from error
        else:
            if found:
                slot.device = found.node, found.device
                if self._here:
                    require_alike(self._here, found)
            slot.pending, slot.failures = None, 0
            if self._looked and slot in self._runners:
                self._looked = 0.0
                self.waiting("a worker has started")
            lost = [lane.device for lane in self._lost] if self.lanes > 1 else []
            if slot in self._runners and slot.device in lost:
                self._give_up(slot)

    def _check_devices(self) -> None:
        now = time.monotonic()
        if now < self._checked + SHORT_S / 2:
            return
        self._checked = now
        if not any(
            slot.pending is not None and not slot.item and now - slot.since > SHORT_S
            for slot in self._runners
        ):
            self._short = 0
            return
        kind = "GPU" if self.language.needs_gpu else "CPU"
        wanted = math.ceil(len(self._runners) / self.lanes)
        short, warning = shortage(wanted, kind, SHORT_S, self.gpu_type)
        if short > self._short:
            self.cautions.append(warning)
        self._short = short

    def _replace(self, slot: Slot) -> None:
        self._host.kill(slot.actor)  # it may be out of reach only, and would keep its place
        slot.start()

    def _first_done(self, busy: list[Slot], since: float, wait_s: float) -> Slot | None:
        """The slot that answers first. Raises GpuLostError, BusyError or ClusterError."""
        began = time.monotonic()
        starting = not any(slot.item for slot in busy)
        pending = [slot.pending for slot in busy]
        while True:
            patience_s = min(SAY_S if starting else WATCH_S, START_S, wait_s)
            done = self._host.first_of(pending, patience_s) if pending else None
            if done is not None:
                return next(slot for slot in busy if slot.pending is done)
            if not pending:
                time.sleep(patience_s)
            if not starting and patience_s == WATCH_S:
                self._say_headers()
            self._host.require_node()
            now = time.monotonic()
            if starting and self._waits_for_others(since):
                self._full_at = now  # they end some time
            if starting and now > max(since, self._full_at) + START_S:
                raise GpuLostError(
                    f"no worker has started within {START_S} s",
                    f"`ray status` shows what the cluster lacks; {RESUMES}",
                )
            if now > began + wait_s:
                return None

    def _say_work(self) -> None:
        """Say what is under way before the first verdict, where it is no longer what was said."""
        if self._said is None:
            return
        words = []
        for verb, slots in (("judges", self._runners), ("builds", self._builders)):
            names = [slot.item.task.task_id for slot in slots if slot.item][:NAMED]
            words += [f"{verb} {', '.join(names)}"] if names else []
        work = "; ".join(words)
        if work and work != self._said:
            self._said = work
            self.waiting(work)

    def _say_headers(self) -> None:
        """Say how far the headers are that this node's builders make once, until they are made."""
        here = self._here and self._here.node
        elsewhere = here and all(slot.device and slot.device[0] != here for slot in self._builders)
        if self.language.jit or elsewhere:
            return
        if self._headers is None:
            builder = Builder(self.config.build, cuda_arch=self.cuda_arch)
            parts = list(builder.parts(cuda=self.language.needs_gpu))
            self._headers = [] if all(path.exists() for path in parts) else parts
        if self._headers:
            left = [path for path in self._headers if not path.exists()]
            self.waiting(parts_made(len(self._headers), left, "once for all kernels"))
            self._headers = self._headers if left else []

    def _waits_for_others(self, since: float) -> bool:
        """Whether no worker can start before others end; says so. Raises BusyError."""
        now = time.monotonic()
        if now < max(since, self._looked) + SAY_S or any(slot.idle for slot in self._runners):
            return False
        self._looked = now
        kind = "GPU" if self.language.needs_gpu else "CPU"
        if not self._host.is_full(kind, 1 / self.lanes):
            return False
        unknown = "another driver of the cluster, or an earlier stage of this run,"
        others = " and ".join(holders(kind.lower())) or unknown
        self.waiting(f"waits for a {kind} of the cluster; {others} uses them")
        require_patience(since, self.patience_s, others)
        return True

    def _quarantine(self, slot: Slot, cause: GpuLostError) -> list[Item]:
        """Give a device no more work; returns what was there. Its actors keep the broken GPU, which
        Ray would reuse.
        """
        under_way: list[Item] = []
        for lane in (slot, *self._lanes.beside(slot)):
            self._give_up(lane)
            under_way += filter(None, (lane.item, lane.reserved))
            lane.item = lane.reserved = lane.pending = None
        self.quarantined.append(str(cause.args[0]))
        return under_way

    def _give_up(self, slot: Slot) -> None:
        self._runners.remove(slot)
        self._lost.append(slot)

    def _require_device(self) -> None:
        if not self._runners:
            raise GpuLostError(
                f"no worker has a working device left: {'; '.join(self.quarantined)}",
                "see nvidia-smi -q and dmesg",
            )
