"""The parent's handle on the reference process of a task, and the trials that it is compared on.

Guarantees: every question has a deadline; what this process cannot answer is the task's fault and
ends the verification as a `Stop`; a task that cannot tell right from wrong is found here, before a
candidate is compared. A SIGKILL that is not blamed on it, and the death of the fork server, pass
through as SandboxError.
"""

from __future__ import annotations

import math
import os
import re
import secrets
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

from pydantic import ValidationError

from kernels_eval.config import EvalConfig
from kernels_eval.judge.messages import LOG_BYTES, Stop, one_line
from kernels_eval.model.correctness import GATES, PRECISION_OF, Gates, judge
from kernels_eval.model.trials import HARD, SHAPE_SCOPES, TAILS, Trial
from kernels_eval.protocol import (
    DECLARED,
    A,
    Compare,
    Comparison,
    DrawArguments,
    DrawInputs,
    EndTiming,
    EstimateUsedBytes,
    Expect,
    Expectation,
    F,
    FindIgnoredInputs,
    ForgetTrial,
    Gradients,
    LoadTask,
    MemoryRequest,
    ModelSpec,
    PackedValues,
    Request,
    SharedMemory,
    ShareMemory,
    TryOtherWeights,
    parsed,
)
from kernels_eval.records import KernelTask, Reason
from kernels_eval.sandbox import machine
from kernels_eval.sandbox.channel import Fds, Message
from kernels_eval.sandbox.sandbox import Child, ChildFailure

NON_FINITE = "non_finite"
ORACLE_MAX_BYTES = 8 << 30
"""Above this estimate the oracle is computed in float32."""
EXPECTED_MAX_BYTES = 16 << 30
"""Memory for expected values of one task; above it fewer distributions are tried."""
ALIGNMENT = 256  # each tensor in shared memory starts at a multiple of this
HARD_GATES = Gates(fp32=0.1, half=0.1, bf16=0.1, elementwise_fp32=1.0)
"""Of those trials. Measured in fp32 with `offset`, up to 4e6 elements a row: one by one in two
passes at most 0.008, by Welford's updates 0.013, in one pass 0.5 and more."""
HARD_OWN_ERROR = 0.02
"""A reference that errs by more is no judge of such inputs."""
CONSTANTS = ("zeros", "one draw's answer", "one draw's mean")
"""Answers that ignore the inputs (`Expectation.constants`), the last one over the batch."""
PRODUCTS = re.compile(r"conv|matmul|mm$|einsum|linear$|attention|lstm|gru", re.IGNORECASE)
"""Operators of torch whose sums of products are an offset that long sums round with a bias."""


class ReferenceProcess:
    """The trusted process of one task: its model, expected values under secret seeds, and its half
    of the paired timing."""

    def __init__(
        self,
        start: Callable[[], Child],
        task: KernelTask,
        config: EvalConfig,
        device: str,
        construct_on: str | None = None,
    ) -> None:
        """`start` gives a child with the role "reference". `construct_on` is where both processes
        make weights, by default the device that they are used on."""
        self.task, self.config, self.device = task, config, device
        self.construct_on = construct_on or device
        self.seed = secrets.randbits(31)
        self.failure: Stop | None = None
        self.opened = self._is_loaded = False
        self.beside: Child | None = None
        """The process of a candidate: it is stopped while this one works, whose times and deadlines
        it could else sway."""
        self.trials: list[Trial] = []
        self.unsuitable: set[str] = set()
        self.loosest = math.inf
        self.flags: list[str] = []
        self.non_finite: Trial | None = None
        self._on_device = device.startswith("cuda")
        self._descriptors: dict[str, int] = {}
        self._shared: dict[str, SharedMemory] = {}
        self._start = start
        self._matters: dict[tuple[int, ...], bool] = {}
        self._used_bytes: float | None = None
        self._precision = ""
        self._gradients: Gradients | None = None
        self.child = self._started()

    def _started(self) -> Child:
        child = self._start()
        child.channel.accepts_descriptors = True  # it runs the task's code, which is trusted
        self.path = child.write_file("task.py", self.task.code)
        return child

    def load(self) -> None:
        """Load the task, once; later calls only repeat its failure. Raises Stop with a
        task_error."""
        if self._is_loaded:
            return
        self._attempt(self._load)
        self._is_loaded = True

    def open(self) -> None:
        """The same, and then the expected values."""
        self.load()
        while not self.opened:
            try:
                self._attempt(self._expect_all)
                self.opened = True
            except _Unsuitable as unsuitable:
                # its process is of no more use: once more from the start, without that trial
                self.unsuitable.add(unsuitable.trial)
                self.child.close()
                self.trials, self.child = [], self._started()
                self._attempt(self._load)

    def _attempt(self, work: Callable[[], None]) -> None:
        """Do this work. Its failure is raised here, and whenever work is asked for again."""
        if self.failure:
            raise self.failure
        try:
            work()
        except Stop as stop:
            self.failure = stop
            raise

    def ask(self, request: Request[A], fds: Fds = ()) -> A:
        """The answer to a request. Raises Stop (REFERENCE_FAILED) where there is none."""
        answer = self.tell(request, fds)
        try:
            return parsed(request, answer)
        except ValidationError as error:
            said = f"{request.command}: {one_line(str(error))[:200]}"
            raise _failed(said, "") from error

    def tell(self, request: Request[Any], fds: Fds = ()) -> Message:
        """The unparsed answer to a request. Raises Stop (REFERENCE_FAILED) where there is none."""
        limit = self.config.limits.reference_s
        try:
            with alone(self.beside):
                answer = self.child.request(request, limit, fds)
        except ChildFailure as failure:
            raise _failed(failure.detail, self.child.log_tail(LOG_BYTES)) from failure
        if answer.get("error"):
            short = "out of memory: " if answer["error"] == Reason.OUT_OF_MEMORY else ""
            raise _failed(short + answer["detail"], answer.get("trace", ""))
        return answer

    def compare(self, trial: Trial) -> Comparison:
        """Compare what the candidate has written with this trial's expected values, and with those
        of earlier trials."""
        return self.ask(Compare(trial=trial.name))

    def judge(self, comparison: Comparison, trial: Trial | None = None) -> Reason:
        """What these errors mean on the inputs of this trial, or on the task's own."""
        gates, loosest, own = GATES, self.loosest, True
        if trial:
            own = trial.own_inputs
        if trial and trial.hard:
            gates, loosest = HARD_GATES, math.inf
            comparison = comparison.model_copy(update={"wrong_share": 0.0})
        return judge(comparison, self.precision, gates, own_inputs=own, loosest=loosest)

    @property
    def spec(self) -> ModelSpec:
        """What every process that constructs this task's model is told."""
        return ModelSpec(
            entry_point=self.task.entry_point,
            init_form=self.task.init_form,
            device=self.device,
            construct_on=self.construct_on,
            threads=self.config.threads,
            seed=self.seed,
            precision=self._precision,
            gradients=self._gradients,
        )

    def _load(self) -> None:
        request = LoadTask(path=str(self.path), spec=self.spec, oracle_max_bytes=ORACLE_MAX_BYTES)
        self.loaded = self.ask(request)
        self._precision, self._gradients = self.loaded.precision, self.loaded.gradients
        self.precision = PRECISION_OF.get(self.loaded.dtype, "fp32")
        self.share("candidate", 1)  # of a call that is compared with nothing

    # -- expected values ---------------------------------------------------------------------------

    def _expect_all(self) -> None:
        known = {DECLARED: self._expect_own(Trial(DECLARED))}
        outputs = self.trials[0].outputs
        self.output_bytes = sum(-(-x.bytes // ALIGNMENT) * ALIGNMENT for x in outputs)
        for trial in self._affordable(self._varied()):
            if trial.weights_seed is not None:
                known[trial.name] = self._expect_weights(trial)
            elif trial.name == "in_place":
                known[trial.name] = self._expect_own(trial)
            elif seen := self._expect_varied(trial):
                known[trial.name] = seen
        memorable = self._against_memory(known)
        self._quarantine_degenerate(known)
        self.flags += memorable
        self._expect_non_finite()
        if self.config.correctness.shapes != "off":
            self._expect_other_shapes()
        if self.loaded.parameters:
            trial = Trial("eval_mode", self.trials[0].seed, evaluate=True)
            self._expect_if_suitable(trial, lambda seen: DECLARED not in seen.equals)
        self.share("candidate", self.output_bytes)
        self.bit_identical = all(seen.bit_identical for seen in known.values())
        self.oracle = min(seen.oracle for seen in known.values())  # float32 where any of them is

    def _varied(self) -> list[Trial]:
        """Other distributions, reused storage, and the inputs of "declared" with a few elements
        changed, and under other weights: an answer that is kept for what looks like them, or that
        ignores the new weights, is then recognised."""
        names = self.config.correctness.distributions if self.loaded.plan.varies else ()
        trials = [Trial(name, distribution=name) for name in names if name != DECLARED]
        for trial in trials:
            if trial.name == "impulse":
                trial.seed = self.trials[0].seed
        if "large" in names:
            trials.append(Trial("small", distribution="small"))
        trials.append(Trial("in_place", in_place=True))
        if self.loaded.parameters or self.loaded.statistics:
            seed = self.trials[0].seed
            trials.append(Trial("other_weights", seed, weights_seed=secrets.randbits(30) * 2))
        return trials

    def _affordable(self, wanted: list[Trial]) -> list[Trial]:
        """Expected values are kept for all trials: where outputs are huge, the varied distributions
        are the first to go."""
        room = EXPECTED_MAX_BYTES // max(3 * self.output_bytes, 1)
        own = [trial for trial in wanted if trial.distribution == DECLARED]
        varied = [trial for trial in wanted if trial.distribution != DECLARED]
        return [*varied[: max(0, max(4, room) - 2 - len(own))], *own]

    def _expect(self, trial: Trial) -> Expectation:
        """Have a trial's expected values computed and kept. `in_place` concerns the candidate
        alone."""
        request = Expect(
            name=trial.name,
            seed=trial.seed,
            distribution=trial.distribution,
            weights_seed=trial.weights_seed,
            shape=trial.shape,
            evaluate=trial.evaluate,
            construct_seed=trial.construct_seed,
        )
        seen = self.ask(request)
        trial.outputs = seen.outputs
        return seen

    def _expect_own(self, trial: Trial) -> Expectation:
        """Expected values on the task's own inputs: the task must give them. Raises Stop with a
        task_error."""
        seen = self._expect(trial)
        if not seen.deterministic:
            raise _degenerate("two runs of the reference on the same inputs differ")
        if not seen.some_finite:
            raise _degenerate("the reference's output on its own inputs holds no finite number")
        self.trials.append(trial)
        return seen

    def _expect_weights(self, trial: Trial) -> Expectation:
        """Expected values under other weights: with vectors of either sign (odd seeds), or with
        positive ones alone where those do not suit the task (a square root of one, say)."""
        signed = replace(trial, weights_seed=secrets.randbits(30) * 2 + 1)
        return self._expect_if_suitable(signed) or self._expect_own(trial)

    def _expect_varied(self, trial: Trial) -> Expectation | None:
        """Add a trial in the first of its forms that suits the task."""
        for form in trial.forms:
            trial.distribution = form
            if seen := self._expect_if_suitable(trial):
                return seen
        return None

    def _expect_if_suitable(
        self, trial: Trial, wanted: Callable[[Expectation], bool] = lambda seen: True
    ) -> Expectation | None:
        """Add a trial where the task accepts this variation and its expected values are `wanted`.

        None where the variation does not suit the task. Raises _Unsuitable where trying it broke
        the process's CUDA context (labels out of range, say, which only the CPU refuses politely).
        """
        if trial.name in self.unsuitable:
            return None
        try:
            seen = self._expect(trial)
        except Stop as stop:
            if self.child.dead:
                raise
            if "CUDA error" in stop.finding.detail:
                raise _Unsuitable(trial.name) from stop
            return None
        finite = seen.some_finite if trial.distribution == NON_FINITE else seen.finite
        if not (finite and seen.deterministic) or (trial.hard and not _well_conditioned(seen)):
            self.ask(ForgetTrial(trial=trial.name))
            return None
        if wanted(seen):
            self.trials.append(trial)
        return seen

    def _expect_non_finite(self) -> None:
        """A trial with a NaN and infinities among the inputs: one of all where they are required
        to spread as in the reference, else asked last and for a flag."""
        trial, wanted = Trial(NON_FINITE, distribution=NON_FINITE), self.config.correctness
        if not self.loaded.plan.varies or wanted.non_finite == "off":
            return
        if self._expect_if_suitable(trial) and wanted.non_finite == "flag":
            self.trials.remove(trial)
            self.non_finite = trial

    def _against_memory(self, known: dict[str, Expectation]) -> list[str]:
        """A task whose inputs are written out has one answer, which a kernel could hold as a
        constant: its inputs are tried in another order, too.

        Adds what that gives to `known`; returns flags for what a memorised answer could still do.
        """
        if "in_place" not in known or DECLARED not in known["in_place"].equals:
            return []
        flags = ["own_answers_never_vary"]
        if _one_answer(known.values()) and not self.loaded.plan.varies:
            trial = Trial("permuted", distribution="permuted")
            seen = self._expect_if_suitable(trial, lambda seen: DECLARED not in seen.equals)
            if seen and trial in self.trials:
                known[trial.name] = seen
            else:
                flags.append("answers_never_vary")
        return flags

    def _pass(self, known: dict[str, Expectation], constant: int = 0) -> bool:
        """Would this answer that ignores the inputs (one of CONSTANTS) pass in all these trials?"""
        return all(
            self.judge(seen.constants[constant], Trial(name)) is Reason.OK
            for name, seen in known.items()
        )

    def _quarantine_constant(self, known: dict[str, Expectation]) -> None:
        """Raise Stop (DEGENERATE_TASK) where an answer that ignores the inputs would pass for all
        inputs and weights.

        Where one passes under the task's own weights, the gate is narrowed to a quarter of that
        answer's error, which the judge does as far as the reference's own error allows.
        """
        own = {name: seen for name, seen in known.items() if name != "other_weights"}
        for index, what in enumerate(CONSTANTS):
            if index and _one_answer(own.values()):
                break  # `own_answers_never_vary`
            if not self._pass(own, index):
                continue
            tame = [seen.constants[index] for name, seen in own.items() if name not in HARD]
            worst = max(tame, key=lambda error: error.rms)
            self.loosest = min(self.loosest, worst.rms / 4)
            if self._pass(known, index):
                raise _degenerate(
                    f"an output of {what} would pass: relative RMS error {worst.rms:.2e}, the"
                    f" reference's own {worst.reference_rms:.2e}"
                )
            if index and self._pass(own, index):
                self.flags.append("constant_passes_own_weights")

    def _quarantine_degenerate(self, known: dict[str, Expectation]) -> None:
        """Raise Stop (DEGENERATE_TASK) for a task that cannot tell right from wrong."""
        shapes = [[output.shape for output in trial.outputs] for trial in self.trials]
        if other := next((each for each in shapes if each != shapes[0]), None):
            raise _degenerate(
                "the shapes of the reference's outputs depend on the values of its inputs:"
                f" {shapes[0]}, and {other} for other inputs"
            )
        if self.loaded.plan.varies and len(known) > 2 and _one_answer(known.values()):
            raise _degenerate(
                f"the reference's output is the same for all inputs ({len(known)} draws, one"
                " answer)"
            )
        self._quarantine_constant(known)
        if self.loaded.plan.notes:
            ignored = self.ask(FindIgnoredInputs(seed=self.trials[0].seed)).ignored
            self.flags += [f"task_ignores_input:{index}" for index in ignored]
        if self._pass({DECLARED: known[DECLARED]}):
            # its own inputs and weights tell nothing; other ones do
            self.flags.append("zeros_pass_declared")

    def _expect_other_shapes(self) -> None:
        """A batch of one, and each tail in the first of the shapes that the task accepts, unless
        the answer is empty or all zero. The inputs are other draws of `impulse`; of its own shape,
        too, where the task accepts no others, for a few elements may hide from one draw."""
        drawn = [trial.distribution for trial in self.trials if trial.name == "impulse"]
        distribution = drawn[0] if drawn else DECLARED
        self._accepts_shape("batch_1", distribution)
        scopes = list(SHAPE_SCOPES)
        for tail in TAILS:
            while scopes and not self._accepts_shape(f"{scopes[0]}_{tail}", distribution):
                scopes.pop(0)
        if drawn and not scopes:
            self._expect_if_suitable(Trial("impulse_again", distribution=distribution))

    def _accepts_shape(self, name: str, distribution: str) -> bool:
        trial = Trial(name, shape=name, distribution=distribution)
        return name in self.loaded.plan.shapes and bool(
            self._expect_if_suitable(trial, lambda seen: not self._pass({name: seen}))
        )

    # -- questions about the task ------------------------------------------------------------------

    def weights_matter(self, positions: list[int]) -> bool:
        """Do these parameters of the reference (none: its running statistics) change its output?"""
        key = tuple(positions)
        if key not in self._matters:
            request = TryOtherWeights(
                seed=self.trials[0].seed, weights_seed=secrets.randbits(30) * 2, only=positions
            )
            self._matters[key] = self.ask(request).matter
        return self._matters[key]

    @property
    def sums_products(self) -> bool:
        return any(map(PRODUCTS.search, self.loaded.operators))

    def used_statistics(self) -> list[list[int]]:
        """Shapes of the reference's running statistics, where they change its output."""
        return self.loaded.statistics if self.loaded.statistics and self.weights_matter([]) else []

    def constructed_otherwise(self) -> Trial:
        """A trial whose model was constructed under another seed: other weights, however they are
        kept."""
        seeds = self.trials[0].seed, secrets.randbits(31)
        trial = Trial("other_construction", seeds[0], construct_seed=seeds[1])
        self._expect(trial)
        return trial

    @property
    def task_bytes(self) -> int:
        """Bytes of one set of inputs and its outputs."""
        return self.loaded.input_bytes + self.output_bytes

    def least_bytes(self) -> float:
        """Bytes that any kernel for this task must move at least: its outputs, and what it uses of
        its inputs."""
        if self._used_bytes is None:
            self._used_bytes = self.ask(EstimateUsedBytes(seed=self.trials[0].seed)).bytes
        return self._used_bytes + self.output_bytes

    # -- shared memory -----------------------------------------------------------------------------

    def share(self, whose: str, size: int) -> None:
        """New memory for outputs: of one call of a "candidate", or of `run_unseen`: "unseen" the
        candidate's, "own" the reference's."""
        request = ShareMemory(whose=whose, on_device=self._on_device, size=size)
        _, on_device = self._with_memory(request, whose)
        self._shared[whose] = SharedMemory(on_device=on_device, size=size)

    def outputs_of(self, whose: str) -> tuple[SharedMemory, int]:
        """Where a process writes its outputs, and the descriptor of that memory."""
        return self._shared[whose], self._descriptors[whose]

    def draw(
        self, seeds: list[int], distribution: str | list[str] = DECLARED, shape: str = DECLARED
    ) -> tuple[PackedValues, int]:
        """The inputs of these seeds (of one distribution, or of one each), in shared memory of
        their own, and a descriptor, which is valid until the next draw."""
        names = [distribution] * len(seeds) if isinstance(distribution, str) else distribution
        request = DrawInputs(
            seeds=seeds,
            distributions=names,
            shape=shape,
            on_device=self._on_device,
            size=max(1, len(seeds)) * self.loaded.packed_bytes,
        )
        return self._handed_over(request, "inputs")

    def arguments(self, seed: int | None = None) -> tuple[PackedValues, int]:
        """The same for what the constructor is called with under this seed."""
        seed = self.seed if seed is None else seed
        request = DrawArguments(seed=seed, size=self.loaded.argument_bytes)
        return self._handed_over(request, "arguments")

    def _handed_over(
        self, request: DrawInputs | DrawArguments, use: str
    ) -> tuple[PackedValues, int]:
        """New shared memory that a request fills, and its descriptor."""
        answer, on_device = self._with_memory(request, use)
        values = PackedValues(
            on_device=on_device,
            size=request.size,
            packed=answer.packed,
            count=answer.count,
            stride=answer.stride,
        )
        return values, self._descriptors[use]

    def _with_memory(self, request: MemoryRequest[F], use: str) -> tuple[F, bool]:
        """The answer to a request that takes new memory for this use, and whether the memory is the
        device's. Where that cannot be had, it is the host's, and everything crosses the bus."""
        self._release(use)
        fds: Fds = ()
        if not request.on_device:
            self._descriptors[use] = machine.sealed_memory(request.size)
            fds = (self._descriptors[use],)
        answer = self.ask(request, fds)
        if not answer.shared:
            return self._with_memory(request.model_copy(update={"on_device": False}), use)
        if request.on_device:
            self._descriptors[use] = self.child.channel.descriptors.pop()
        return answer, request.on_device

    def end_timing(self) -> None:
        """Give back the memory that only timing needs: what comes next may need it."""
        for whose in ("own", "unseen"):
            self._release(whose)
        self.ask(EndTiming())

    def _release(self, use: str) -> None:
        if (descriptor := self._descriptors.pop(use, None)) is not None:
            os.close(descriptor)

    def close(self) -> None:
        for use in list(self._descriptors):
            self._release(use)
        self.child.close()


def alone(beside: Child | None) -> AbstractContextManager[None]:
    """Meanwhile the process of a candidate, where there is one, does nothing."""
    return beside.stopped() if beside else nullcontext()


class _Unsuitable(Exception):
    """A variation of the inputs under which the reference breaks its CUDA context."""

    def __init__(self, trial: str) -> None:
        super().__init__(trial)
        self.trial = trial


def _failed(detail: str, log: str) -> Stop:
    return Stop(Reason.REFERENCE_FAILED, f"the reference: {detail}", log)


def _degenerate(detail: str) -> Stop:
    return Stop(Reason.DEGENERATE_TASK, detail)


def _well_conditioned(seen: Expectation) -> bool:
    """Is the reference itself right on hard inputs, as the float64 oracle has it?"""
    return (
        seen.oracle == "float64"
        and seen.constants[0].reference_rms <= HARD_OWN_ERROR
        and any("float" in output.dtype for output in seen.outputs)
    )


def _one_answer(known: Iterable[Expectation]) -> bool:
    """Is the answer of every trial that of all before it?"""
    return all(len(seen.equals) == index for index, seen in enumerate(known))
