"""The parent's handle on the compiled reference: the second baseline of a task, made once and kept
with its reference process.

Guarantees: whatever goes wrong with it (it does not compile, compiles too long, answers wrongly,
dies, compiles again while it is timed) costs this baseline with a reason, never a verdict; it is
timed only after its answers to two sets of inputs have passed the gates that candidates have to
pass; its outputs lie where no candidate can look, and no longer than they are compared. Does not
guarantee a baseline for every task: `unavailable_reason` says why there is none. A SIGKILL that is not to be
believed passes through as SandboxError.
"""

from __future__ import annotations

import os
import time
from contextlib import suppress
from typing import Any

from kernels_eval.checks import correctness as checks
from kernels_eval.checks.timing import CompiledSampler
from kernels_eval.config import EvalConfig
from kernels_eval.errors import SandboxError
from kernels_eval.isolation.sandbox import Child, ChildFailure, ForkServer
from kernels_eval.parent.handles import ReferenceProcess, Trial
from kernels_eval.parent.messages import Stop, one_line
from kernels_eval.records import CompiledBaseline

ROLE = "compiled"


class Lost(Exception):
    """The compiled reference can no longer be timed; `CompiledReference.unavailable_reason` says why."""


class CompiledReference:
    """One task's reference under torch.compile, in a process of its own."""

    def __init__(self, reference: ReferenceProcess, config: EvalConfig, device: str) -> None:
        self.reference, self.config, self.device = reference, config, device
        self.mode = config.timing.compile_mode
        self.unavailable_reason = ""
        self.graphs = 0
        self._child: Child | None = None
        self._compile_s = 0.0

    def open(self, server: ForkServer, blamed_roles: frozenset[str] = frozenset()) -> None:
        """Compile and check, once; afterwards only repeat what came of it. Raises SandboxError
        where the machine failed."""
        self._compile_s = 0.0
        if self._child is not None:
            self._child.blamed_roles = blamed_roles
        if self.unavailable_reason or (self._child is not None and self._child.dead is None):
            return
        self.close()
        started = time.monotonic()
        try:
            # a file in memory of its own: the device memory that candidates write to is theirs at
            # any time
            self._child = Child(
                server, ROLE, self.config.limits, self.reference.output_bytes, processes=True
            )
            self._child.blamed_roles = blamed_roles
            self._compile()
            for trial in (self.reference.trials[0], self.reference.after):
                self._check(trial)
            self._forget_outputs()
        except Lost:
            pass  # `unavailable_reason` says why
        except SandboxError:
            self.close()
            raise
        self._compile_s = time.monotonic() - started

    def side(self, seeds: list[int]) -> CompiledSampler | None:
        """What is timed, with the inputs of these seeds; None where there is nothing to time."""
        try:
            if not self.unavailable_reason:
                self.graphs = int(self._ask("timing_inputs", seeds=seeds)["graphs"])
                return CompiledSampler(
                    self._sample,
                    {"mode": self.mode, "graphs": self.graphs, "compile_s": self._compile_s},
                )
        except Lost:
            pass
        return None

    def rest(self) -> None:
        """Give back the memory of the inputs: the samples are taken."""
        if not self.unavailable_reason:
            with suppress(Lost):  # it has been timed; the next candidate is told
                self._ask("timing_inputs", seeds=[])

    def absent(self) -> CompiledBaseline:
        """The record of a baseline that is not there."""
        return CompiledBaseline(
            mode=self.mode, compile_s=self._compile_s, unavailable_reason=self.unavailable_reason
        )

    def close(self) -> None:
        if self._child is not None:
            self._child.close()
            self._child = None

    # -- asking ------------------------------------------------------------------------------------

    def _compile(self) -> None:
        task, child = self.reference.task, self._child
        path = child.scratch / "task.py"
        path.write_text(task.code, encoding="utf-8", errors="replace")
        self._ask(
            "load",
            path=str(path),
            entry_point=task.entry_point,
            init_form=task.init_form,
            device=self.device,
            construct_on=self.reference.construct_on,
            threads=self.config.threads,
            seed=self.reference.seed,
        )
        self._ask(
            "compile",
            self.config.timing.compile_s,
            mode=self.mode,
            seed=self.reference.trials[0].seed,
        )

    def _check(self, trial: Trial) -> None:
        """Its answer must pass the gates that a candidate's has to. Raises Lost."""
        answer = self._ask("answer", seed=trial.seed)
        form = [(output["shape"], output["dtype"]) for output in answer["outputs"]]
        if (
            form != [(output["shape"], output["dtype"]) for output in trial.outputs]
            or answer["structure"] != self.reference.structure
        ):
            self._lose("its outputs have another form than those of the eager reference")
        try:
            measured = self.reference.ask(
                "measure", trial=trial.name, path=str(self._child.exchange_path)
            )
        except Stop as stop:
            if self.reference.child.dead:
                raise
            self._lose(f"its output could not be compared: {stop.finding.detail}")
        outcome = checks.judge(measured, self.reference.precision, self.config.correctness)
        if outcome != "ok":
            self._lose(
                f"its output is not the eager reference's ({outcome}): relative RMS error"
                f" {measured['rms']:.2e}"
            )

    def _forget_outputs(self) -> None:
        """One of the two answers is that of the last call under the parent's clock: nobody is to
        find it."""
        os.ftruncate(self._child.exchange, 0)
        self._child.exchange_path.unlink(missing_ok=True)

    def _sample(self, calls: int) -> int:
        answer = self._ask("sample", calls=calls)
        if answer["graphs"] != self.graphs:
            self._lose("torch.compile compiled it again while it was timed")
        return int(answer["ns"])

    def _ask(self, command: str, timeout: float | None = None, **arguments: Any) -> dict[str, Any]:
        """Raises Lost where there is no answer."""
        limit = timeout or self.config.limits.reference_s
        if self._child is None:
            self._lose(self.unavailable_reason or "its process is gone")
        try:
            answer = self._child.request(command, timeout=limit, **arguments)
        except ChildFailure as failure:
            said = f"took longer than {limit:g} s" if failure.reason == "run" else failure.detail
            self._lose(f"{command}: {said}")
        if "error" in answer:
            self._lose(f"{command}: {answer['detail']}")
        return answer

    def _lose(self, why: str) -> None:
        self.unavailable_reason = one_line(why)[:500] or "no reason was given"
        self.close()  # at once: its memory is needed
        raise Lost(self.unavailable_reason)
