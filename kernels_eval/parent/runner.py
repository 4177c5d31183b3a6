"""The processes of one device: a fork server, the reference of the task at hand, its compiled form,
and a process for each candidate.

Guarantees: a reference is kept while candidates of its task follow one another; a candidate's
process serves one candidate. What is done with them is `kernels_eval.evaluator`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels_eval.config import EvalConfig
from kernels_eval.isolation.sandbox import Child, ForkServer
from kernels_eval.isolation.warm_pool import WarmPool
from kernels_eval.parent.candidate_handle import CandidateProcess
from kernels_eval.parent.compiled_baseline import CompiledReference
from kernels_eval.parent.draft import VerdictDraft
from kernels_eval.parent.prepare import confined_builder
from kernels_eval.parent.reference_handle import ReferenceProcess
from kernels_eval.records import Candidate, KernelTask, Language, Timing

SLOWER = 1.2
"""A reference median that differs by this factor from the first one of this process is flagged."""


class Runner:
    """Starts, keeps and closes the processes that verify candidates on one device."""

    def __init__(
        self,
        config: EvalConfig,
        device: str,
        *,
        cache: Path | None = None,
        cuda_arch: str | None = None,
        server: ForkServer | None = None,
        ahead: bool | None = None,
    ) -> None:
        """`ahead`: start the next processes before there is work for them. By default on a GPU,
        where starting one takes long."""
        self.config, self.device = config, device
        self.builder = confined_builder(config, cache, cuda_arch)
        self.warm_pool = WarmPool(
            config, device, ahead=device.startswith("cuda") if ahead is None else ahead
        )
        self._server = server
        self._reference: ReferenceProcess | None = None
        self._compiled: CompiledReference | None = None
        self._medians: dict[str, float] = {}

    @property
    def server(self) -> ForkServer:
        if self._server is None or not self._server.alive:
            self.drop_reference()
            self._server = ForkServer(
                threads=self.config.threads, readable=[self.builder.tools.cache]
            )
        return self._server

    @property
    def isolation(self) -> tuple[str, ...]:
        """The layers in force; none where no process was needed yet."""
        return self._server.isolation if self._server else ()

    @contextmanager
    def candidate(
        self,
        candidate: Candidate,
        reference: ReferenceProcess,
        draft: VerdictDraft,
        blamed_roles: frozenset[str],
    ) -> Iterator[CandidateProcess]:
        """The process of one candidate; the next one's is started meanwhile."""
        size, descriptor = reference.output_bytes, reference.shared_descriptor
        # Triton and torch.compile run compilers, which a child of the warm pool may not start
        if candidate.language is Language.TRITON or "torch.compile" in (candidate.code or ""):
            child = Child(
                self.server,
                "candidate",
                self.config.limits,
                size,
                processes=True,
                exchange=descriptor,
            )
        else:
            child = self.warm_pool.take(self.server, "candidate", size, descriptor)
        child.blamed_roles = blamed_roles
        self.warm_pool.replenish(self.server)
        try:
            yield CandidateProcess(child, candidate, reference, self.builder, draft)
        finally:
            self.warm_pool.close_async(child.close)

    def reference(
        self, task: KernelTask, blamed_roles: frozenset[str], construct_on: str | None = None
    ) -> ReferenceProcess:
        """The reference process at hand where it serves, else a new one, ready for comparisons. One
        whose weights were made on the CPU serves every candidate."""
        server, held = self.server, self._reference
        if (
            held is None
            or held.task != task
            or held.child.dead
            or held.construct_on != (construct_on or held.construct_on)
        ):
            self.drop_reference()
            held = self._reference = ReferenceProcess(
                lambda: self.warm_pool.take(server, "reference"),
                task,
                self.config,
                self.device,
                construct_on,
            )
            self.warm_pool.wait_closed()
        held.open(blamed_roles)
        return held

    def compiled(
        self, reference: ReferenceProcess, blamed_roles: frozenset[str]
    ) -> CompiledReference | None:
        """The second baseline of this reference, where it is asked for: compiled for the first
        candidate that is to be timed, and kept."""
        if not self.config.timing.compiles:
            return None
        if self._compiled is None:
            self._compiled = CompiledReference(reference)
        self._compiled.open(self.server, blamed_roles)
        return self._compiled

    def drift_flags(self, task: KernelTask, timing: Timing) -> list[str]:
        """What a verdict notes about the machine: another speed than before, or lowered clocks."""
        first = self._medians.setdefault(task.task_id, timing.reference_ms)
        ratio, flags = timing.reference_ms / first, []
        if not 1 / SLOWER <= ratio <= SLOWER:
            flags.append(f"reference_drift:{ratio:.2f}")
        if abs(timing.drift) > 0.1:
            flags.append("clock_drift")
        if timing.throttled:
            flags.append("throttled")
        return flags

    def drop_reference(self) -> None:
        for held in (self._compiled, self._reference):
            if held:
                self.warm_pool.close_async(held.close)
        self._compiled = self._reference = None

    def close(self) -> None:
        self.drop_reference()
        self.warm_pool.close()
        if self._server:
            self._server.close()
