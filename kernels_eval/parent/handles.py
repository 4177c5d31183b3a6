"""The parent's handles on the two processes of a verification: the reference of a task, and the
candidate.

Guarantees: every question has a deadline; what the reference's side cannot answer is the task's
fault, what the candidate's side cannot answer is the candidate's, and both end the verification as
a `Stop`. A SIGKILL that is not blamed on its process, and the death of the fork server, pass through as
SandboxError.
"""

from __future__ import annotations

import math
import os
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from kernels_eval.build.extensions import Builder
from kernels_eval.build.spec import ExtensionSpec
from kernels_eval.checks import correctness as checks
from kernels_eval.checks.native_screening import screen_native
from kernels_eval.config import EvalConfig
from kernels_eval.isolation.sandbox import Child, ChildFailure
from kernels_eval.parent.messages import MAY_CLAIM, Notice, Stop, believe_form
from kernels_eval.records import Candidate, KernelTask

LOG_BYTES = 8192
ALIGNMENT = 16  # each output starts at a multiple of this (kernels_eval.child.output_buffer)
DECLARED = "declared"
SHAPE_VARIANTS = (("batch_1",), ("odd_all", "odd_last", "odd_first"))
"""Of each group the first that the task accepts is tried."""


@dataclass
class Trial:
    """One comparison: which inputs, with which weights, in which mode."""

    name: str
    seed: int
    distribution: str = DECLARED
    weights_seed: int | None = None
    in_place: bool = False
    shape: str = DECLARED
    evaluate: bool = False
    construct_seed: int | None = None
    outputs: list[dict[str, Any]] = field(default_factory=list)

    @property
    def own_inputs(self) -> bool:
        """Are the inputs what the task itself draws, in its own shape?"""
        return self.distribution == DECLARED and self.shape == DECLARED


class ReferenceProcess:
    """The trusted process of one task: its model, expected values under secret seeds, and its side
    of the stopwatch."""

    def __init__(
        self,
        start: Callable[[], Child],
        task: KernelTask,
        config: EvalConfig,
        device: str,
        construct_on: str | None = None,
    ) -> None:
        """`start` gives a child with the role "reference". `construct_on`: where weights are made,
        for both sides; by default the device that they are used on."""
        self.task, self.config, self.device, self.construct_on = (
            task,
            config,
            device,
            construct_on or device,
        )
        self.seed = secrets.randbits(31)
        self.failure: Stop | None = None
        self.trials: list[Trial] = []
        self.unsuitable: set[str] = set()
        self._start = start
        self._blamed_roles: frozenset[str] = frozenset()
        self.child = self._started()
        self.flags: tuple[str, ...] = ()
        self._matters: dict[tuple[int, ...], bool] = {}
        self._used_bytes: float | None = None
        self.shared_bytes = 0
        self.shared_descriptor: int | None = None

    def _started(self) -> Child:
        child = self._start()
        child.blamed_roles = self._blamed_roles
        self.path = child.scratch / "task.py"
        self.path.write_text(self.task.code, encoding="utf-8", errors="replace")
        return child

    def open(self, blamed_roles: frozenset[str] = frozenset()) -> None:
        """Load the task and compute the expected values, once; afterwards repeat what came of it.
        Raises Stop with a task_error.

        `blamed_roles` holds until the next call: where it names the reference, a SIGKILL is a
        task_error too.
        """
        self._blamed_roles = self.child.blamed_roles = blamed_roles
        if self.failure:
            raise self.failure
        if self.trials:
            return
        while True:
            try:
                self._load()
                self._expect()
                return
            except _Unsuitable as unsuitable:
                # its process is of no more use: once more from the start, without that trial
                self.unsuitable.add(unsuitable.trial)
                self.child.close()
                self.trials, self.child = [], self._started()
            except Stop as stop:
                self.failure = stop
                raise

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        try:
            answer = self.child.request(
                command, timeout=self.config.limits.reference_s, **arguments
            )
        except ChildFailure as failure:
            raise Stop(
                "reference_failed",
                f"the reference: {failure.detail}",
                self.child.log_tail(LOG_BYTES),
            ) from failure
        if "error" in answer:
            short = "out of memory: " if answer["error"] == "out_of_memory" else ""
            raise Stop(
                "reference_failed",
                f"the reference: {short}{answer['detail']}",
                answer.get("trace", ""),
            )
        return answer

    def _load(self) -> None:
        task = self.task
        loaded = self.ask(
            "load",
            path=str(self.path),
            entry_point=task.entry_point,
            init_form=task.init_form,
            device=self.device,
            construct_on=self.construct_on,
            threads=self.config.threads,
            seed=self.seed,
            oracle_max_bytes=self.config.correctness.oracle_max_bytes,
        )
        self.plan, self.structure = loaded["plan"], loaded["structure"]
        self.mutates, self.parameters = loaded["mutates"], loaded["parameters"]
        self.operators = tuple(loaded["operators"])
        self.precision = checks.PRECISION_OF.get(loaded["precision"], "fp32")
        self.device_name = loaded["device_name"]
        self.input_bytes = sum(loaded["input_bytes"])
        self.peak_bytes_per_s, self.cache_bytes = loaded["peak_bytes_per_s"], loaded["cache_bytes"]

    # -- expected values ---------------------------------------------------------------------------

    def _expect(self) -> None:
        config = self.config.correctness
        first = self._own(Trial(DECLARED, secrets.randbits(31)))
        self.output_bytes = sum(output["bytes"] + ALIGNMENT for output in self.trials[0].outputs)
        known = {DECLARED: first}
        for trial in self._affordable(self._varied()):
            if trial.name in ("in_place", "other_weights"):
                known[trial.name] = self._own(trial)
            elif seen := self._expected(trial):
                known[trial.name] = seen
                self.trials.append(trial)
        memorable = self._against_memory(known)
        self._quarantine_degenerate(list(known.values()))
        self.flags += memorable
        if config.shapes != "off":
            self._expect_other_shapes()
        mode = Trial("eval_mode", self.trials[0].seed, evaluate=True)
        if self.parameters and (seen := self._expected(mode)) and DECLARED not in seen["equals"]:
            self.trials.append(mode)
        self.after = Trial("after_timing", secrets.randbits(31))
        self._own(self.after)
        self.trials.remove(self.after)
        self._share_memory()
        self.bit_identical = all(seen["bit_identical"] for seen in known.values())
        self.oracle = (
            "float64" if all(seen["oracle"] == "float64" for seen in known.values()) else "float32"
        )

    def _varied(self) -> list[Trial]:
        varies = any(note["vary"] for note in self.plan["notes"])
        names = (
            [name for name in self.config.correctness.distributions if name != DECLARED]
            if varies
            else []
        )
        drawn = [Trial(name, secrets.randbits(31), name) for name in names]
        return self._with_other_weights(
            [*drawn, Trial("in_place", secrets.randbits(31), in_place=True)]
        )

    def _with_other_weights(self, trials: list[Trial]) -> list[Trial]:
        """The same inputs as "declared" under other weights: an answer that ignores the new weights
        is then recognised."""
        if not self.parameters:
            return trials
        return [
            *trials,
            Trial("other_weights", self.trials[0].seed, weights_seed=secrets.randbits(31)),
        ]

    def _affordable(self, wanted: list[Trial]) -> list[Trial]:
        """Expected values are kept for all trials: where outputs are huge, the varied distributions
        are the first to go."""
        keep = (
            max(4, int(self.config.correctness.expected_max_bytes // max(3 * self.output_bytes, 1)))
            - 2
        )
        own = [trial for trial in wanted if trial.distribution == DECLARED]
        varied = [trial for trial in wanted if trial.distribution != DECLARED]
        return [*varied[: max(0, keep - len(own))], *own]

    def _own(self, trial: Trial) -> dict[str, Any]:
        """Expected values on the task's own inputs: the task must give them. Raises Stop with a
        task_error."""
        seen = self.ask("expect", **_arguments(trial))
        if not seen["deterministic"]:
            raise Stop("degenerate_task", "two runs of the reference on the same inputs differ")
        if not seen["some_finite"]:
            raise Stop(
                "degenerate_task", "the reference's output on its own inputs holds no finite number"
            )
        trial.outputs = seen["outputs"]
        self.trials.append(trial)
        return seen

    def _expected(self, trial: Trial) -> dict[str, Any] | None:
        """One trial's expected values; None where this variation does not suit the task. Raises
        _Unsuitable where trying it ended the process's use of its device (labels out of range, say,
        which only the CPU refuses politely).
        """
        if trial.name in self.unsuitable:
            return None
        try:
            seen = self.ask("expect", **_arguments(trial))
        except Stop as stop:
            if not self.child.dead and "CUDA error" in stop.finding.detail:
                raise _Unsuitable(trial.name) from stop
            if self.child.dead:
                raise
            return None
        trial.outputs = seen["outputs"]
        if seen["finite"] and seen["deterministic"]:
            return seen
        self.ask("forget", trial=trial.name)
        return None

    def _against_memory(self, known: dict[str, dict[str, Any]]) -> tuple[str, ...]:
        """A task whose inputs are written out has one answer, which a kernel could hold as a
        constant: its inputs are tried in another order, too. Adds what that gives to `known`;
        returns flags for what a memorised answer could still do.
        """
        if "in_place" not in known or DECLARED not in known["in_place"]["equals"]:
            return ()
        if not _one_answer(known.values()) or any(note["vary"] for note in self.plan["notes"]):
            return ("own_answers_never_vary",)
        trial = Trial("permuted", secrets.randbits(31), "permuted")
        seen = self._expected(trial)
        if seen and DECLARED not in seen["equals"]:
            known[trial.name] = seen
            self.trials.append(trial)
            return ("own_answers_never_vary",)
        return ("own_answers_never_vary", "answers_never_vary")

    def _quarantine_degenerate(self, known: list[dict[str, Any]]) -> None:
        if any(note["vary"] for note in self.plan["notes"]) and len(known) > 2:
            if _one_answer(known):
                raise Stop(
                    "degenerate_task",
                    f"the reference's output is the same for all inputs ({len(known)} draws, one"
                    " answer)",
                )
        if all(
            checks.judge(seen["zeros"], self.precision, self.config.correctness) == "ok"
            for seen in known
        ):
            seen = known[0]["zeros"]
            raise Stop(
                "degenerate_task",
                f"an output of zeros would pass: relative RMS error {seen['rms']:.2e}, the"
                f" reference's own {seen['reference_rms']:.2e}",
            )
        if self.plan["notes"] and not self.child.dead:
            ignored = self.ask("ignored_inputs", seed=self.trials[0].seed)["ignored"]
            self.flags = tuple(f"task_ignores_input:{index}" for index in ignored)
        if checks.judge(known[0]["zeros"], self.precision, self.config.correctness) == "ok":
            self.flags += (
                "zeros_pass_declared",
            )  # its own inputs and weights tell nothing; other ones do

    def _expect_other_shapes(self) -> None:
        for group in SHAPE_VARIANTS:
            for name in group:
                trial = Trial(name, secrets.randbits(31), shape=name)
                if name in self.plan["shapes"] and (seen := self._expected(trial)):
                    if (
                        checks.judge(seen["zeros"], self.precision, self.config.correctness) != "ok"
                    ):  # an empty or all-zero answer
                        self.trials.append(trial)
                    break

    # -- questions about the task ------------------------------------------------------------------

    def weights_matter(self, positions: list[int]) -> bool:
        """Do these parameters of the reference change its output?"""
        key = tuple(positions)
        if key not in self._matters:
            asked = {
                "seed": self.trials[0].seed,
                "weights_seed": secrets.randbits(31),
                "only": positions,
            }
            self._matters[key] = self.ask("weights_matter", **asked)["matter"]
        return self._matters[key]

    def built_otherwise(self) -> Trial:
        """A trial whose model was constructed under another seed: other weights, however they are
        kept."""
        trial = Trial(
            "other_construction", self.trials[0].seed, construct_seed=secrets.randbits(31)
        )
        trial.outputs = self.ask("expect", **_arguments(trial))["outputs"]
        return trial

    def least_bytes(self) -> float:
        """Bytes that any kernel for this task must move at least: its outputs, and what it uses of
        its inputs."""
        if self._used_bytes is None:
            self._used_bytes = self.ask("used_bytes", seed=self.trials[0].seed)["bytes"]
        return self._used_bytes + self.output_bytes

    def _share_memory(self) -> None:
        """Device memory for the outputs, where the driver can share it; else they go through a file
        in memory."""
        if not self.device.startswith("cuda"):
            return
        self.child.channel.accepts_descriptors = True
        if self.ask("share_memory", size=self.output_bytes)["shared"]:
            self.shared_descriptor = self.child.channel.descriptors.pop()
            self.shared_bytes = self.output_bytes

    def close(self) -> None:
        if self.shared_descriptor is not None:
            os.close(self.shared_descriptor)
            self.shared_descriptor = None
        self.child.close()


def unmatched_shapes(
    reference: list[list[int]], candidate: list[list[int]]
) -> tuple[list[int], int]:
    """Which of the reference's parameters (indices) have no counterpart of their shape among the
    candidate's, and how many elements the candidate's own unmatched parameters hold."""
    left = list(candidate)
    missing = []
    for index, shape in enumerate(reference):
        if shape in left:
            left.remove(shape)
        else:
            missing.append(index)
    return missing, sum(math.prod(shape) for shape in left)


def _one_answer(known: Iterable[dict[str, Any]]) -> bool:
    """Is the answer of every trial that of all before it?"""
    return all(len(seen["equals"]) == index for index, seen in enumerate(known))


def _arguments(trial: Trial) -> dict[str, Any]:
    return {
        "trial": trial.name,
        "seed": trial.seed,
        "distribution": trial.distribution,
        "weights_seed": trial.weights_seed,
        "shape": trial.shape,
        "evaluate": trial.evaluate,
        "construct_seed": trial.construct_seed,
    }


class MadeElsewhere(Exception):
    """The candidate's constructor made parameters on the CPU, as under KernelBench: the reference's
    have to be made there, too."""


class _Unsuitable(Exception):
    """A variation of the inputs under which the reference breaks its CUDA context."""

    def __init__(self, trial: str) -> None:
        super().__init__(trial)
        self.trial = trial


class CandidateProcess:
    """The process that runs the kernel."""

    def __init__(
        self, child: Child, builder: Builder, config: EvalConfig, facts: dict[str, Any]
    ) -> None:
        self.child, self.builder, self.config, self.facts = child, builder, config, facts
        self.notices: list[Notice] = []
        self.parameters: list[list[int]] = []

    def load(
        self,
        task: KernelTask,
        candidate: Candidate,
        reference: ReferenceProcess,
        libraries: dict[str, str],
        device: str,
    ) -> None:
        path, task_path = self.child.scratch / "candidate.py", self.child.scratch / "task.py"
        path.write_text(candidate.code or "", encoding="utf-8", errors="replace")
        task_path.write_text(task.code, encoding="utf-8", errors="replace")
        answer = self._request(
            "load",
            self.config.limits.load_s,
            "load",
            path=str(path),
            task_path=str(task_path),
            entry_point=task.entry_point,
            init_form=task.init_form,
            device=device,
            construct_on=reference.construct_on,
            threads=self.config.threads,
            seed=reference.seed,
            plan=reference.plan,
            libraries=libraries,
            language=candidate.language.value,
            exchange_bytes=reference.shared_bytes,
        )
        self.parameters = answer.get("parameters", [])
        if (
            answer.get("made_elsewhere") is True
            and reference.parameters
            and reference.construct_on != "cpu"
        ):
            raise MadeElsewhere

    def ask(self, command: str, **arguments: Any) -> dict[str, Any]:
        return self._request(command, self.config.limits.run_s, "run", **arguments)

    def _request(
        self, command: str, timeout: float, deadline: str, **arguments: Any
    ) -> dict[str, Any]:
        try:
            answer = self.child.request(command, timeout=timeout, **arguments)
            while "build" in answer:
                answer = self._late_build(answer["build"], timeout)
        except ChildFailure as failure:
            raise Stop(
                deadline if failure.reason == "run" else failure.reason,
                failure.detail,
                self.child.log_tail(LOG_BYTES),
            ) from failure
        if "error" in answer:
            claimed = answer["error"]
            reason = claimed if isinstance(claimed, str) and claimed in MAY_CLAIM else "exception"
            raise Stop(
                reason,
                str(answer.get("detail", "")),
                f"{answer.get('trace', '')}\n{self.child.log_tail(LOG_BYTES // 2)}",
            )
        return answer

    def _late_build(self, spec: Any, timeout: float) -> dict[str, Any]:
        """Build what a constructor or a first call asks for; the child waits, its deadline does not
        run."""
        asked: ExtensionSpec = believe_form(ExtensionSpec, spec)
        screened = screen_native(asked.text)
        if screened.reason:
            raise Stop(screened.reason, screened.detail)
        self.facts["flags"] = tuple(dict.fromkeys((*self.facts.get("flags", ()), *screened.flags)))
        build = self.builder.build(asked)
        self.facts["late_tier"] = build.tier or None
        return self.child.resume(
            {"ok": build.ok, "path": build.path, "reason": build.reason, "log": build.log}, timeout
        )

    def call(self, trial: Trial, reference: ReferenceProcess, *, reruns: int = 0) -> dict[str, Any]:
        """One forward call, compared. Raises Stop where the outputs are not even of the right
        form."""
        if trial.weights_seed is not None:
            self.ask("weights", seed=trial.weights_seed)
        if trial.construct_seed is not None:
            self.ask("rebuild", seed=trial.construct_seed)
        answer = self.ask(
            "call",
            seed=trial.seed,
            distribution=trial.distribution,
            in_place=trial.in_place,
            shape=trial.shape,
            evaluate=trial.evaluate,
            reruns=reruns,
            output_bytes=sum(output["bytes"] for output in trial.outputs),
            devices=[output["device"] for output in trial.outputs],
        )
        if trial.weights_seed is not None or trial.construct_seed is not None:
            self.ask("rebuild")
        return self.compare(
            answer, trial, reference, keep=trial.shape == DECLARED and not trial.evaluate
        )

    def compare(
        self,
        answer: dict[str, Any],
        trial: Trial,
        reference: ReferenceProcess,
        *,
        keep: bool = True,
    ) -> dict[str, Any]:
        """Compare what the last answer published. Raises Stop where its form is wrong."""
        notice: Notice = believe_form(Notice, answer)
        if keep:
            self.notices.append(notice)
        if not notice.plain:
            kind = notice.kinds[0] if notice.kinds else "nothing"
            raise Stop(
                "lazy_output" if notice.tensors and notice.kinds else "wrong_shape",
                f"returns {kind}, not a plain tensor",
            )
        wanted = [output["device"] for output in trial.outputs]
        if len(notice.devices) == len(wanted) and notice.devices != wanted:
            raise Stop(
                "wrong_device", f"returns tensors on {notice.devices}, the reference on {wanted}"
            )
        _check_form(notice, trial, reference)
        return reference.ask("compare", trial=trial.name, path=str(self.child.exchange_path))


def _check_form(notice: Notice, trial: Trial, reference: ReferenceProcess) -> None:
    outputs, expected = notice.outputs, trial.outputs
    shapes, wanted = [o.shape for o in outputs], [o["shape"] for o in expected]
    if shapes != wanted:
        raise Stop("wrong_shape", f"returns {shapes}, the reference {wanted}")
    if notice.structure != reference.structure:
        raise Stop(
            "wrong_shape",
            f"returns the structure {notice.structure}, the reference {reference.structure}",
        )
    dtypes, wanted_dtypes = [o.dtype for o in outputs], [o["dtype"] for o in expected]
    if dtypes != wanted_dtypes:
        raise Stop("wrong_dtype", f"returns {dtypes}, the reference {wanted_dtypes}")
