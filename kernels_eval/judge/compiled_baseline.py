"""The compiled reference, timed once against the eager one.

Guarantees: its failures cost this baseline with an `unavailable_reason`, never a verdict; it is
timed after two answers passed the candidates' gates; its process ends before the candidate goes on.
"""

from __future__ import annotations

import os
from typing import NoReturn

from kernels_eval.config import MOST_DRIFT, REMEASURED
from kernels_eval.judge.messages import Stop, one_line, parse_answer, parse_report
from kernels_eval.judge.paired_timing import draw_sets, most_calls
from kernels_eval.judge.reference_handle import ReferenceProcess, alone
from kernels_eval.judge.timing import measure, ratio_of_speedups
from kernels_eval.judge.trial import Trial
from kernels_eval.protocol import (
    A,
    AnswerCompiled,
    Compile,
    DrawTimingInputs,
    ErrorReport,
    LoadModel,
    MeasureCompiled,
    Request,
    Sample,
)
from kernels_eval.records import CompiledBaseline, Reason, Timing
from kernels_eval.sandbox import machine
from kernels_eval.sandbox.channel import Fds
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.sandbox.server_handle import ForkServer

ROLE = "compiled"


class Lost(Exception):
    """The compiled reference can no longer be timed; its `unavailable_reason` says why."""


class CompiledReference:
    def __init__(self, reference: ReferenceProcess) -> None:
        self.reference, self.config = reference, reference.config
        self.mode = self.config.timing.compile_mode
        self.unavailable_reason = ""
        self.graphs = 0
        self.timing: Timing | None = None
        self._child: Child | None = None
        self._compile_s = 0.0

    def measure(self, server: ForkServer) -> None:
        """Compile, check and time it once, in its own process. Raises SandboxError."""
        self._compile_s = 0.0
        if self.timing or self.unavailable_reason:
            return
        clock = self.reference.turns.clock
        started = clock()
        try:
            if self.reference.loaded.remembers:  # each copy of it is compiled again
                self._lose("the reference keeps something from call to call")
            child = self._child = Child(server, ROLE, self.config.limits, processes=True)
            self._compile(child)
            for trial in [trial for trial in self.reference.trials if trial.as_drawn]:
                self._check(trial)
            self._compile_s = clock() - started
            with self.reference.turns.alone():
                self.timing = self._time()
        except Lost:
            self._compile_s = self._compile_s or clock() - started
        finally:
            self._close()

    def against(self, timing: Timing) -> CompiledBaseline:
        if self.timing is None:
            return CompiledBaseline(
                mode=self.mode,
                compile_s=self._compile_s,
                unavailable_reason=self.unavailable_reason,
            )
        speedup, lower, upper = ratio_of_speedups(timing, self.timing)
        return CompiledBaseline(
            mode=self.mode,
            compile_s=self._compile_s,
            graphs=self.graphs,
            reference_ms=timing.reference_ms / self.timing.speedup,
            speedup=speedup,
            speedup_lower=lower,
            speedup_upper=upper,
        )

    def _close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    # -- requests ----------------------------------------------------------------------------------

    def _compile(self, child: Child) -> None:
        path = child.write_file("task.py", self.reference.task.code)
        self._request(LoadModel(path=str(path), spec=self.reference.spec))
        seed = self.reference.trials[0].seed
        self._request(Compile(mode=self.mode, seed=seed), limit=self.config.timing.compile_s)

    def _check(self, trial: Trial) -> None:
        memory = machine.sealed_memory(self.reference.output_bytes)  # which no candidate ever sees
        try:
            self._compare(trial, memory)
        finally:
            os.close(memory)

    def _compare(self, trial: Trial, memory: int) -> None:
        reference = self.reference
        answer = self._request(AnswerCompiled(seed=trial.seed), (memory,))
        form = [(output.shape, output.dtype) for output in answer.outputs]
        wanted = [(output.shape, output.dtype) for output in trial.outputs]
        if form != wanted or answer.structure != reference.loaded.structure:
            self._lose("its outputs have another form than those of the eager reference")
        try:
            measured = reference.request(MeasureCompiled(trial=trial.name), (memory,))
        except Stop as stop:
            if reference.child.dead:
                raise
            self._lose(f"its output could not be compared: {stop.finding.detail}")
        outcome = reference.judge(measured)
        if outcome is not Reason.OK:
            self._lose(
                f"its output is not the eager reference's ({outcome}): relative RMS error"
                f" {measured.rms:.2e}"
            )

    def _time(self) -> Timing:
        reference = self.reference
        seeds, _ = draw_sets(reference)
        self.graphs = self._request(DrawTimingInputs(seeds=seeds)).graphs
        try:
            for _ in range(1 + REMEASURED):
                timing = measure(
                    lambda calls: reference.request(self._asked(calls)).ns,
                    self._sample,
                    self.config.timing,
                    bound=None,  # no foreign code runs there
                    most_calls=most_calls(reference, len(seeds)),
                )
                if abs(timing.drift) <= MOST_DRIFT:
                    break
            return timing
        finally:
            if not reference.child.dead:
                reference.request(DrawTimingInputs(seeds=[]))  # gives back their memory

    def _asked(self, calls: int) -> Sample:
        on_cpu = not self.reference.device.startswith("cuda")
        return Sample(calls=calls, by_processor=on_cpu and self.reference.child.alone)

    def _sample(self, calls: int) -> int:
        answer = self._request(self._asked(calls))
        if answer.graphs != self.graphs:
            self._lose("torch.compile compiled it again while it was timed")
        return answer.ns

    def _request(self, request: Request[A], fds: Fds = (), *, limit: float = 0.0) -> A:
        limit = limit or self.config.limits.reference_s
        if self._child is None:
            self._lose(self.unavailable_reason or "its process is gone")
        self.reference.turns.give_way()
        try:
            with alone(self.reference.beside):
                answer = self._child.request(request, limit, fds)
        except ChildFailure as failure:
            late = failure.reason is Reason.RUN
            said = f"took longer than {limit:g} s" if late else failure.detail
            self._lose(f"{request.command}: {said}")
        try:
            if "error" in answer:
                self._lose(f"{request.command}: {parse_report(ErrorReport, answer).detail}")
            return parse_answer(request, answer)
        except Stop as stop:
            self._lose(f"{request.command}: {stop.finding.detail}")

    def _lose(self, why: str) -> NoReturn:
        self.unavailable_reason = one_line(why) or "no reason was given"
        self._close()  # at once: its memory is needed
        raise Lost(self.unavailable_reason)
