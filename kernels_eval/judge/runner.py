"""The processes of one device: a fork server, the task's reference, its compiled form, and a
process per candidate."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

from kernels_eval.config import (
    MOST_DRIFT,
    REFERENCE_DRIFT,
    ROOM_COPIES,
    ROOM_SHARE,
    EvalConfig,
)
from kernels_eval.devices import free_share
from kernels_eval.errors import SandboxError
from kernels_eval.judge.candidate_handle import CandidateProcess
from kernels_eval.judge.compiled_baseline import CompiledReference
from kernels_eval.judge.messages import Prepared, VerdictDraft
from kernels_eval.judge.prepare import Workplace
from kernels_eval.judge.reference_handle import Crowded, ReferenceProcess, alone
from kernels_eval.judge.timing import unsettled
from kernels_eval.judge.turns import Turns
from kernels_eval.records import Candidate, KernelTask, Timing
from kernels_eval.sandbox.server_handle import ForkServer
from kernels_eval.sandbox.server_process import ServerProcess
from kernels_eval.sandbox.warm_pool import CANDIDATE, REFERENCE, WarmPool

COMPILES = re.compile(
    r"torch\.(?:compile|_dynamo)\b|^[ \t]*from torch import [^\n]*\bcompile\b|\.compile\(\)",
    re.MULTILINE,
)
"""Sources that may use torch.compile, which starts compilers."""


def starts_compilers(candidate: Candidate) -> bool:
    return candidate.language.jit or bool(COMPILES.search(candidate.code or ""))


class Runner(Workplace):
    """Starts, keeps and closes the processes that verify candidates on one device."""

    def __init__(
        self,
        config: EvalConfig,
        device: str,
        *,
        cache: Path | None = None,
        cuda_arch: str | None = None,
        server: ForkServer | None = None,
        turns_file: Path | None = None,
    ) -> None:
        """`turns_file`: of a device with other lanes."""
        super().__init__(config, cache=cache, cuda_arch=cuda_arch, server=server)
        self.device = device
        self.warm_pool = WarmPool(config, device, ahead=device.startswith("cuda"))
        self.turns = Turns(turns_file, self._aside, self.warm_pool.settle)
        self.neighbours = 0
        """How many other lanes may be at work on the device now."""
        self._reference: ReferenceProcess | None = None
        self._compiled: CompiledReference | None = None
        self._medians: dict[str, float] = {}
        """by code: tasks of files may share an id"""
        self._sanitizing: ForkServer | None = None

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Nothing starts or ends, and the candidate, which may have left work, is stopped."""
        candidate = self._reference.beside if self._reference else None
        with self.warm_pool.quiet(), alone(candidate):
            yield

    @contextmanager
    def candidate(
        self,
        candidate: Candidate,
        prepared: Prepared,
        reference: ReferenceProcess,
        draft: VerdictDraft,
    ) -> Iterator[CandidateProcess]:
        """The process of one candidate; the next one's is started meanwhile."""
        if starts_compilers(candidate):
            child = self.warm_pool.start_compiling(self.server, candidate.language)
        else:
            child = self.warm_pool.start_child(self.server, CANDIDATE)
        self.warm_pool.replenish(self.server)
        reference.beside = child
        try:
            yield CandidateProcess(child, candidate, prepared, reference, self.builder, draft)
        finally:
            reference.beside = None
            self.warm_pool.close_async(child.close)

    def reference(self, task: KernelTask, construct_on: str | None = None) -> ReferenceProcess:
        """The task's reference process, loaded. Raises Stop with a task_error."""
        held = self.begin_reference(task, construct_on)
        held.load()
        if held.loaded.memory_share * ROOM_COPIES > ROOM_SHARE:
            self.warm_pool.wait_closed()
        return held

    def begin_reference(
        self, task: KernelTask, construct_on: str | None = None
    ) -> ReferenceProcess:
        """The present reference process where it serves, as one with weights made on the CPU does;
        else a new one.
        """
        server, held = self.server, self._reference
        if (
            held is None
            or (held.failure and held.crowded and not self.neighbours)
            or held.task != task
            or held.child.dead
            or held.construct_on != (construct_on or held.construct_on)
        ):
            self.drop_reference()
            held = self._reference = ReferenceProcess(
                lambda: self.warm_pool.start_child(server, REFERENCE),
                task,
                self.config,
                self.device,
                construct_on,
                self.turns,
            )
            self.warm_pool.replenish(server)  # while this one computes
            if not self.device.startswith("cuda") or (free_share() or 0.0) < ROOM_SHARE:
                self.warm_pool.wait_closed()
            held.begin_load()
        held.crowded = bool(self.neighbours)
        return held

    def require_room(self, reference: ReferenceProcess) -> None:
        """Raise Crowded for a task that would leave too little of the memory to neighbours."""
        if self.neighbours:
            most = 1 / (1 + self.neighbours)
            if ROOM_COPIES * reference.loaded.memory_share > most:
                raise Crowded

    def compiled(self, reference: ReferenceProcess) -> CompiledReference | None:
        """This reference's second baseline, if configured, measured for the first candidate to be
        timed.
        """
        if not self.config.timing.compiles:
            return None
        if self._compiled is None:
            self._compiled = CompiledReference(reference)
            self.warm_pool.settle()  # nothing starts or ends while it is timed
        self._compiled.measure(self.server)
        return self._compiled

    def drift_flags(self, task: KernelTask, timing: Timing) -> list[str]:
        """What a verdict notes about the machine: another speed than before, or lowered clocks."""
        ratio = timing.reference_ms / self._medians.setdefault(task.code, timing.reference_ms)
        flags = {
            f"reference_drift:{ratio:.2f}": not 1 / REFERENCE_DRIFT <= ratio <= REFERENCE_DRIFT,
            "clock_drift": abs(timing.drift) > MOST_DRIFT,
            "throttled": timing.throttled,
            "unstable": unsettled(timing, self.config.timing),
        }
        return [name for name, seen in flags.items() if seen]

    def begin_sanitizing(self, libraries: str, environment: Mapping[str, str]) -> None:
        """Start a fork server that loads these libraries first, if any, beside other work."""
        if libraries and not (self._sanitizing and self._sanitizing.alive):
            environment = {"LD_PRELOAD": libraries, **environment}
            started = ServerProcess(threads=self.config.threads, environment=environment)
            readable = [self.builder.tools.cache]
            self._sanitizing = ForkServer(started=started, readable=readable)

    def sanitizing(self) -> ForkServer | None:
        """Wait until it has started; None without one, or where it does not start: a sanitizer
        needs addresses that some kernels do not leave it.
        """
        with suppress(SandboxError):
            if self._sanitizing:
                self._sanitizing.start()
                return self._sanitizing
        return None

    def drop_reference(self) -> None:
        if self._reference:
            self.warm_pool.close_async(self._reference.close)
        self._compiled = self._reference = None

    def close(self) -> None:
        if self._reference:
            self._reference.close()  # in this thread: none starts where the interpreter ends
        self._compiled = self._reference = None
        self.warm_pool.close()
        if self._sanitizing:
            self._sanitizing.close()
        super().close()
