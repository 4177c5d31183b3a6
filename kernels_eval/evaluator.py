"""One candidate from source to verdict: the verification protocol, in order.

Guarantees: every candidate gets exactly one verdict; a process killed from outside changes none
(`kernels_eval.sandbox.deaths`); an exception means that the machine failed.
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from kernels_eval.config import EvalConfig
from kernels_eval.devices import device_for
from kernels_eval.judge import (
    attribution,
    comparison,
    kept,
    memory_errors,
    omitted,
    points,
    sanitizer,
    sums,
)
from kernels_eval.judge.candidate_handle import CandidateProcess, MadeElsewhere, NeedsBuild
from kernels_eval.judge.messages import Finding, Prepared, Stop, VerdictDraft, verdict_of
from kernels_eval.judge.paired_timing import PairedClock
from kernels_eval.judge.prepare import Preparer
from kernels_eval.judge.reference_handle import Crowded, ReferenceProcess, ReferenceRestarted
from kernels_eval.judge.runner import Runner, starts_compilers
from kernels_eval.judge.trial import Stage
from kernels_eval.protocol import NewCandidate
from kernels_eval.records import Candidate, KernelTask, Language, Phases, Reason, Verdict
from kernels_eval.sandbox.deaths import retried
from kernels_eval.sandbox.server_handle import ForkServer


class Evaluator:
    """Verifies candidates one after the other. Keeps its processes: use one for many, as a context
    manager.
    """

    def __init__(
        self,
        target: Language | str,
        config: EvalConfig | None = None,
        *,
        cache: Path | None = None,
        cuda_arch: str | None = None,
        server: ForkServer | None = None,
        turns_file: Path | None = None,
        on_phase: Callable[[str], None] | None = None,
    ) -> None:
        """`target`: a language or torch device; `on_phase` gets each phase's field; others are
        Runner's. Raises DeviceError.
        """
        device = device_for(target) if isinstance(target, Language) else target
        self.config, self.on_phase = config or EvalConfig(), on_phase
        self.runner = Runner(
            self.config,
            device,
            cache=cache,
            cuda_arch=cuda_arch,
            server=server,
            turns_file=turns_file,
        )
        self.preparer = Preparer(self.config, host=self.runner)

    def __call__(self, task: KernelTask, candidate: Candidate) -> Verdict:
        """One verdict, also where a process is killed meanwhile. Raises ToolchainError and
        SandboxError.
        """

        def attempt() -> Verdict:
            def begin() -> None:
                if memory_errors.wanted(self.config, candidate):
                    memory_errors.begin(self.runner)
                self.runner.begin_reference(task)

            prepared = self.preparer.prepare(candidate, task, beside=begin)
            return self.run(task, candidate, prepared)

        return retried(attempt)

    def run(self, task: KernelTask, candidate: Candidate, prepared: Prepared) -> Verdict:
        """The verdict of a prepared candidate; builds that it asks for late are made between runs.
        Raises EvalError, KilledError at the first killed process.
        """
        while isinstance(found := self.run_once(task, candidate, prepared), Prepared):
            prepared = self.preparer.add_build(candidate, found)
        return found

    def run_once(
        self, task: KernelTask, candidate: Candidate, prepared: Prepared
    ) -> Verdict | Prepared:
        """The verdict, or what is prepared with the build that was `asked` for, or must be run
        `alone`. Raises as `run`.
        """
        clock = self.runner.turns.clock
        began = clock() - prepared.run_s
        draft = VerdictDraft(on_phase=self.on_phase, clock=clock, seconds={**prepared.phase_s})
        finding = prepared.finding or Finding(reason=Reason.OK)
        try:
            if prepared.finding is None:
                self._verify(task, candidate, prepared, draft)
        except Stop as stop:
            finding = stop.finding
        except (NeedsBuild, Crowded) as needed:
            if isinstance(needed, Crowded) and needed.ran_out:
                self.runner.drop_reference()
            now = {"asked": needed.spec} if isinstance(needed, NeedsBuild) else {"alone": True}
            spent = {"run_s": clock() - began, "phase_s": draft.seconds}
            return prepared.model_copy(update={**now, **spent})
        draft.isolation, draft.phases = self.runner.isolation, Phases(**draft.seconds)
        draft.run_s = clock() - began
        return verdict_of(task, candidate, prepared, finding, draft)

    def _verify(
        self, task: KernelTask, candidate: Candidate, prepared: Prepared, draft: VerdictDraft
    ) -> None:
        draft.level = self.config.level
        construct_on = None
        while True:
            with draft.phase("reference_s"):
                reference = self.runner.reference(task, construct_on)
            self.runner.require_room(reference)
            draft.device = reference.loaded.device_name
            draft.reference_operators = reference.loaded.operators
            try:
                return self._verify_against(reference, candidate, prepared, draft)
            except MadeElsewhere:
                construct_on = "cpu"
            except ReferenceRestarted:
                continue

    def _verify_against(
        self,
        reference: ReferenceProcess,
        candidate: Candidate,
        prepared: Prepared,
        draft: VerdictDraft,
    ) -> None:
        try:
            if self.config.level == "confirm":
                self._try_declared(reference, candidate, prepared, draft)
            with sanitizer.begun(self.runner, self.config, candidate) as tool:
                libraries = self._verify_on_device(reference, candidate, prepared, draft)
                self._find_memory_errors(reference, candidate, prepared, draft)
                self._sanitize(reference, candidate, libraries, draft, tool)
        except Stop as stop:
            if not reference.opened:
                with draft.phase("reference_s"):
                    self._blame_task(reference, stop, draft)
            raise

    def _blame_task(self, reference: ReferenceProcess, stop: Stop, draft: VerdictDraft) -> None:
        compared = draft.correctness is not None
        if reference.doubtful(stop.finding.reason, compared=compared):
            self.runner.warm_pool.wait_closed()
            reference.open()

    def _try_declared(
        self,
        reference: ReferenceProcess,
        candidate: Candidate,
        prepared: Prepared,
        draft: VerdictDraft,
    ) -> None:
        """Compare a candidate on the task's own inputs, where most wrong ones end; end its process,
        so that it has no say in the other values; and compute these. Not for a JIT, which would
        compile twice.
        """
        if not (reference.opened or starts_compilers(candidate)):
            with draft.phase("reference_s"):
                reference.declare()
            running = self.runner.candidate(candidate, prepared, reference, draft)
            with running as process, self._blaming():
                self._compare_declared(process)
            draft.correctness = draft.outputs_match = None  # of one trial
            self.runner.warm_pool.wait_closed()  # it has no say in what can be computed
        with draft.phase("reference_s"):
            reference.open()

    def _compare_declared(self, process: CandidateProcess) -> None:
        reference, phase = process.reference, process.draft.phase
        reference.request(NewCandidate())
        self._load(process)
        with phase("correctness_s"):
            comparison.compare_trials(process, Stage.OUTPUTS)

    def _load(self, process: CandidateProcess) -> None:
        # It may have waited long: what was evicted meanwhile is built again when it asks.
        self.runner.builder.cache.renew(process.libraries.values())
        with process.draft.phase("load_s"):
            process.load()
            if process.reference.needs_room:
                self.runner.warm_pool.wait_closed()

    def _verify_on_device(
        self,
        reference: ReferenceProcess,
        candidate: Candidate,
        prepared: Prepared,
        draft: VerdictDraft,
    ) -> dict[str, str]:
        phase = draft.phase
        with phase("reference_s"):
            reference.declare()
        running = self.runner.candidate(candidate, prepared, reference, draft)
        with running as process, self._blaming():
            self._compare_declared(process)
            with phase("reference_s"):
                reference.open()
            draft.flags += reference.expected.flags
            with phase("correctness_s"):
                comparison.compare_outputs(process)
                sums.compare_sums(process)
            with phase("attribution_s"):
                attribution.attribute_work(process)
                attribution.check_repeatable(process)
            with phase("correctness_s"):
                comparison.compare_trials(process, Stage.VARIATIONS)
                if self.config.level == "confirm":
                    points.explore(process)
            with phase("attribution_s"):
                attribution.check_idle(process)
            if self.config.level == "confirm":
                with phase("correctness_s"):
                    omitted.check_terms(process)
                    kept.compare_attributes(process)
            with process.telling_weights():
                if self.config.time_correct and draft.outputs_match:
                    self._time(process)
                if self.config.level == "confirm":
                    self._confirm_work(process)
            if self.config.level == "confirm":
                with phase("correctness_s"):
                    comparison.compare_non_finite(process)
            process.keep_kernels()
            comparison.check_formula(process)
        return process.libraries

    def _confirm_work(self, process: CandidateProcess) -> None:
        with process.draft.phase("attribution_s"):
            if process.draft.timing:  # it may work otherwise by now
                attribution.check_idle(process)
                attribution.measure_share(process)
            attribution.check_ornamental(process)

    def _time(self, process: CandidateProcess) -> None:
        draft, reference = process.draft, process.reference
        with draft.phase("reference_s"):
            compiled = self.runner.compiled(reference)
        self.runner.sanitizing()  # it may have begun to start
        quiet = self.runner.warm_pool.quiet()
        with self.runner.turns.alone(), draft.phase("timing_s"), quiet:
            clock = PairedClock(process)
            timing = clock.measure()
            if compiled:
                timing = timing.model_copy(update={"compiled": compiled.against(timing)})
            reference.end_timing()
            clock.check_idle_samples()
            draft.flags += self.runner.drift_flags(reference.task, timing)
            draft.flags += ["unstable"] if clock.contended else []
            draft.timing = timing

    def _sanitize(
        self,
        reference: ReferenceProcess,
        candidate: Candidate,
        libraries: dict[str, str],
        draft: VerdictDraft,
        begun: sanitizer.Tool | None,
    ) -> None:
        if sanitizer.wanted(self.config, candidate):
            with draft.phase("attribution_s"):
                sanitizer.sanitize(self.runner, reference, candidate, libraries, draft, begun)

    def _find_memory_errors(
        self,
        reference: ReferenceProcess,
        candidate: Candidate,
        prepared: Prepared,
        draft: VerdictDraft,
    ) -> None:
        if memory_errors.wanted(self.config, candidate, draft.late_tier or prepared.tier):
            with draft.phase("attribution_s"):
                memory_errors.find(self.runner, reference, candidate, prepared, draft)

    @contextmanager
    def _blaming(self) -> Iterator[None]:
        """A reference out of memory beside a candidate is no fault of the task."""
        try:
            yield
        except Stop as stop:
            finding = stop.finding
            message = f"{finding.detail} {finding.log}".lower()
            if finding.reason is not Reason.REFERENCE_FAILED or "out of memory" not in message:
                raise
            self.runner.drop_reference()
            detail = "the candidate leaves no memory for the reference beside it"
            raise Stop(Reason.OUT_OF_MEMORY, detail, f"{finding.detail}\n{finding.log}") from stop

    def close(self) -> None:
        self.runner.turns.end()
        self.preparer.close()
        self.runner.close()

    def __enter__(self) -> Evaluator:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@functools.cache
def _kept_evaluator(language: Language, config: EvalConfig) -> Evaluator:
    evaluator = Evaluator(language, config)
    atexit.register(evaluator.close)
    return evaluator


def evaluate(task: KernelTask, candidate: Candidate, config: EvalConfig | None = None) -> Verdict:
    """Verify one candidate. Keeps its processes for the next call with the same config. For many at
    once use `kernels_eval.Pool`.

    Raises DeviceError where the language's device is missing, ToolchainError and SandboxError where
    the machine fails.
    """
    evaluator = _kept_evaluator(candidate.language, config or EvalConfig())
    return evaluator(task, candidate)
