"""One built candidate to its verdict: the protocol on the device, in the order it happens.

What comes before, without a device, is `kernels_eval.parent.prepare`; `kernels_eval.evaluate` is
both in one call. Guarantees: every candidate gets exactly one verdict, whatever its code does; a
process that is killed from outside changes no verdict, for what it did is done again
(`kernels_eval.parent.kill_retry`); an exception from here means that the machine failed, not the
kernel.
"""

from __future__ import annotations

import math
import re
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernels_eval.checks import correctness as checks
from kernels_eval.config import EvalConfig
from kernels_eval.isolation.sandbox import Child, ForkServer
from kernels_eval.isolation.warm_pool import Spares
from kernels_eval.parent.compiled_baseline import CompiledReference
from kernels_eval.parent.handles import (
    LOG_BYTES,
    CandidateProcess,
    MadeElsewhere,
    ReferenceProcess,
    Trial,
    unmatched_shapes,
)
from kernels_eval.parent.kill_retry import retry_killed
from kernels_eval.parent.messages import (
    REASON_OF_CHANGE,
    Finding,
    Notice,
    Ornamental,
    Seen,
    Share,
    State,
    Stop,
    believe_form,
    one_line,
)
from kernels_eval.parent.paired_timing import PairedClock
from kernels_eval.parent.prepare import Prepared, confined_builder
from kernels_eval.records import (
    STATUS_OF,
    Candidate,
    Correctness,
    KernelTask,
    Language,
    Phases,
    Verdict,
)

MAY_DIFFER = re.compile(r"atomic|reduction\s*\(", re.IGNORECASE)
"""Sources whose results may differ in the last bits between two runs: the order of their additions
is not fixed."""
OPERATORS_MAY_DIFFER = re.compile(
    r"aten\.(_?conv|cudnn_conv|miopen_conv|mkldnn_conv|slow_conv|index_(add|copy|put|reduce)|scatter|put_|cumsum|histc|bincount|kthvalue"
    r"|median|_?embedding_bag|upsample|grid_sampl)"
)
"""Operators of torch for which the same holds on a GPU (the list in the documentation of
torch.use_deterministic_algorithms)."""
IDLE_S = 0.02
IDLE_SHARE = 0.5
SLOWER = (
    1.2  # a reference median above this multiple of the first one seen on this worker is flagged
)


class Stopwatch:
    """Adds up wall time by phase."""

    def __init__(self) -> None:
        self._seconds: dict[str, float] = {}

    @contextmanager
    def on(self, phase: str) -> Iterator[None]:
        started = time.monotonic()
        try:
            yield
        finally:
            self._seconds[phase] = self._seconds.get(phase, 0.0) + time.monotonic() - started

    @property
    def phases(self) -> Phases:
        return Phases(**self._seconds)


class Runner:
    """Runs built candidates on one device. Owns a fork server and the reference process of the task
    at hand."""

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
        self._server = server
        self._reference: ReferenceProcess | None = None
        self._compiled: CompiledReference | None = None
        self._spares = Spares(
            config, device, ahead=device.startswith("cuda") if ahead is None else ahead
        )
        self._medians: dict[str, float] = {}

    @property
    def server(self) -> ForkServer:
        if self._server is None or not self._server.alive:
            self._drop_reference()
            self._server = ForkServer(
                threads=self.config.threads, readable=[self.builder.tools.cache]
            )
        return self._server

    def run(self, task: KernelTask, candidate: Candidate, prepared: Prepared) -> Verdict:
        """The verdict of one prepared candidate. Raises EvalError only where the machine fails."""
        return retry_killed(lambda blamed_roles: self._run(task, candidate, prepared, blamed_roles))

    def _run(
        self,
        task: KernelTask,
        candidate: Candidate,
        prepared: Prepared,
        blamed_roles: frozenset[str],
    ) -> Verdict:
        started = time.monotonic()
        facts: dict[str, Any] = {}
        spent = Stopwatch()
        try:
            if prepared.finding:
                raise Stop(prepared.finding.reason, prepared.finding.detail, prepared.finding.log)
            self._verify(task, candidate, prepared, facts, spent, blamed_roles)
            finding = Finding(reason="ok")
        except Stop as stop:
            finding = stop.finding
            facts.pop("timing", None)
        facts.update(isolation=self._server.isolation if self._server else (), phases=spent.phases)
        return verdict_of(
            task, candidate, prepared, finding, run_s=time.monotonic() - started, **facts
        )

    # -- the protocol ------------------------------------------------------------------------------

    def _verify(
        self,
        task: KernelTask,
        candidate: Candidate,
        prepared: Prepared,
        facts: dict[str, Any],
        spent: Stopwatch,
        blamed_roles: frozenset[str],
    ) -> None:
        with spent.on("reference_s"):
            reference = self._reference_for(task, blamed_roles)
        try:
            self._verify_against(reference, task, candidate, prepared, facts, spent, blamed_roles)
        except MadeElsewhere:
            with spent.on("reference_s"):
                reference = self._reference_for(task, blamed_roles, construct_on="cpu")
            self._verify_against(reference, task, candidate, prepared, facts, spent, blamed_roles)

    def _verify_against(
        self,
        reference: ReferenceProcess,
        task: KernelTask,
        candidate: Candidate,
        prepared: Prepared,
        facts: dict[str, Any],
        spent: Stopwatch,
        blamed_roles: frozenset[str],
    ) -> None:
        facts.update(
            device=reference.device_name,
            reference_operators=reference.operators,
            flags=reference.flags,
        )
        with self._candidate_child(candidate, reference, blamed_roles) as child:
            process = CandidateProcess(child, self.builder, self.config, facts)
            reference.ask("new_candidate")
            self.builder.cache.renew(
                prepared.libraries.values()
            )  # it may have waited long; what is gone is built again on its request
            try:
                with spent.on("load_s"):
                    process.load(task, candidate, reference, prepared.libraries, self.device)
                    self._spares.buried()
                with spent.on("correctness_s"):
                    self._compare_all(reference, process, candidate, facts)
                with spent.on("attribution_s"):
                    self._custom_kernel(process, facts)
                    self._repeatable(candidate, reference, process, facts)
                with spent.on("correctness_s"):
                    self._other_shapes(reference, process, facts)
                with spent.on("attribution_s"):
                    self._behaviour(process, facts)
                if self.config.time_correct:
                    with spent.on("reference_s"):
                        compiled = self._compiled_for(reference, blamed_roles)
                    with spent.on("timing_s"):
                        self._spares.settle()
                        self._time(
                            task,
                            PairedClock(reference, process, self.config, self.device, compiled),
                            facts,
                        )
                with spent.on("attribution_s"):
                    self._behaviour(process, facts)
                    self._ornamental(reference, process, facts)
            except Stop as stop:
                self._blame(stop, reference)
                raise

    @contextmanager
    def _candidate_child(
        self, candidate: Candidate, reference: ReferenceProcess, blamed_roles: frozenset[str]
    ) -> Iterator[Child]:
        """The process of one candidate; the next one's is started meanwhile."""
        exchange = reference.output_bytes, reference.shared_descriptor
        if candidate.language is Language.TRITON or "torch.compile" in (
            candidate.code or ""
        ):  # these run compilers
            child = Child(
                self.server,
                "candidate",
                self.config.limits,
                exchange[0],
                processes=True,
                exchange=exchange[1],
            )
        else:
            child = self._spares.take(self.server, "candidate", *exchange)
        child.blamed_roles = blamed_roles
        self._spares.replenish(self.server)
        try:
            yield child
        finally:
            self._spares.bury(child.close)

    def _compare_all(
        self,
        reference: ReferenceProcess,
        process: CandidateProcess,
        candidate: Candidate,
        facts: dict[str, Any],
    ) -> None:
        """Every trial: right outputs, for unseen inputs, other distributions, reused storage and
        other weights."""
        facts["outputs_match"] = False
        measured: list[tuple[Trial, dict[str, Any]]] = []
        for trial in [
            trial for trial in reference.trials if trial.shape == "declared" and not trial.evaluate
        ]:
            if trial.weights_seed is not None:
                trial = self._other_weights(trial, reference, process, facts)
            result = process.call(
                trial, reference, reruns=0 if measured else self.config.correctness.reruns
            )
            measured.append((trial, result))
            facts["correctness"] = _correctness(measured, reference)
            outcome = checks.judge(result, reference.precision, self.config.correctness)
            if outcome != "ok":
                self._state(
                    process, facts
                )  # a changed default dtype, say, explains more than the wrong output it leads to
                raise Stop(*self._explain(trial, outcome, result, reference, process))
        facts["outputs_match"] = True
        facts["precision_class"] = reference.precision
        _raise_for_notices(process.notices, reference)

    @staticmethod
    def _repeatable(
        candidate: Candidate,
        reference: ReferenceProcess,
        process: CandidateProcess,
        facts: dict[str, Any],
    ) -> None:
        """The same inputs give the same bits, unless atomics or an operator of torch whose own bits
        vary had a part in it."""
        if not any(notice.rerun_differs for notice in process.notices):
            return
        library = any(OPERATORS_MAY_DIFFER.match(name) for name in facts["library_calls"])
        if reference.bit_identical and not library and not MAY_DIFFER.search(candidate.code or ""):
            raise Stop(
                "non_deterministic",
                "repeating the call on the same inputs gives other bits, and nothing in it uses"
                " atomics",
            )
        _flag(facts, "not_bit_identical")

    def _other_weights(
        self,
        trial: Trial,
        reference: ReferenceProcess,
        process: CandidateProcess,
        facts: dict[str, Any],
    ) -> Trial:
        """The trial that shows whether the candidate uses its weights as they are now, however it
        keeps them."""
        missing, spare = unmatched_shapes(reference.parameters, process.parameters)
        if not missing or not reference.weights_matter(missing):
            return trial
        wanted = sum(math.prod(reference.parameters[index]) for index in missing)
        if spare < wanted:
            shapes = [reference.parameters[index] for index in missing]
            raise Stop(
                "stale_weights",
                f"has no parameter that could hold the reference's of shape {shapes[:4]}, which"
                " change its output",
            )
        _flag(
            facts, "weights_not_mappable"
        )  # packed, perhaps: other weights are then made by constructing both anew
        return reference.built_otherwise()

    def _custom_kernel(self, process: CandidateProcess, facts: dict[str, Any]) -> None:
        seen: Seen = believe_form(Seen, process.ask("operators", seed=secrets.randbits(31)))
        facts["custom_kernels"] = tuple(one_line(name)[:200] for name in seen.custom[:32])
        facts["library_calls"] = tuple(one_line(name)[:200] for name in seen.operators[:64])
        if seen.off_stream:
            _flag(facts, "side_stream")  # joined before the return, or `_behaviour` says so
        idle = [notice for notice in process.notices if not notice.custom_calls]
        if idle:
            calls = ", ".join(facts["library_calls"][:6]) or "no operator at all"
            share = f"{len(idle)} of {len(process.notices)} calls"
            raise Stop(
                "no_custom_kernel", f"no custom kernel ran in {share}; the work was done by {calls}"
            )
        share: Share = believe_form(Share, process.ask("share", seed=secrets.randbits(31)))
        facts["custom_kernel_time_share"] = min(1.0, max(0.0, share.share))

    def _other_shapes(
        self, reference: ReferenceProcess, process: CandidateProcess, facts: dict[str, Any]
    ) -> None:
        """Shapes and modes that the task accepts besides its own. An honest refusal is a flag; a
        silent wrong answer is a finding."""
        for trial in [
            trial for trial in reference.trials if trial.shape != "declared" or trial.evaluate
        ]:
            try:
                outcome = checks.judge(
                    process.call(trial, reference), reference.precision, self.config.correctness
                )
            except Stop as stop:
                if stop.finding.reason == "exception" and not process.child.dead:
                    _flag(facts, "eval_mode_fails" if trial.evaluate else "declared_shape_only")
                    continue
                outcome = stop.finding.reason
                detail = stop.finding.detail
            else:
                detail = (
                    f"wrong on {trial.name} inputs of shape"
                    f" {trial.outputs[0]['shape'] if trial.outputs else ''}"
                )
            if outcome == "ok":
                continue
            if trial.evaluate and not process.child.dead:
                _flag(facts, "wrong_in_eval_mode")
            elif (
                self.config.correctness.shapes == "require"
                or process.child.dead
                or outcome == "cuda_error"
            ):
                raise Stop(
                    "shape_specialised",
                    f"right for the declared shape only: {outcome} on {trial.name}: {detail}",
                )
            else:
                _flag(facts, "shape_specialised")

    def _behaviour(self, process: CandidateProcess, facts: dict[str, Any]) -> None:
        """Nothing left running, and nothing left changed."""
        if all(_busy_share(process.child) > IDLE_SHARE for _ in range(2)):
            raise Stop(
                "background_work", "the process goes on computing after its call has returned"
            )
        outstanding = sorted(notice.outstanding_share for notice in process.notices)
        if outstanding and outstanding[len(outstanding) // 2] > 0.3:
            raise Stop(
                "stream_escape",
                "work goes on after the current stream has finished: it runs on another stream",
            )
        self._state(process, facts)

    @staticmethod
    def _state(process: CandidateProcess, facts: dict[str, Any]) -> None:
        changed = believe_form(State, process.ask("state")).changed
        for name, reason in REASON_OF_CHANGE.items():
            if name in changed:
                raise Stop(reason, f"changes {name}: {one_line(changed[name])[:200]}")
        for name in changed:
            _flag(facts, f"changes:{one_line(name)[:40]}")

    def _time(self, task: KernelTask, clock: PairedClock, facts: dict[str, Any]) -> None:
        """Both sides in turn; then once more unseen inputs under the parent's clock, whose last
        answer must be right."""
        reference, process = clock.reference, clock.process
        timing, after = clock.measure()
        outcome = checks.judge(after, reference.precision, self.config.correctness)
        if outcome != "ok":
            facts["outputs_match"] = False
            raise Stop(*self._explain(reference.after, outcome, after, reference, process))
        if clock.idle_samples:
            raise Stop(
                "no_custom_kernel", f"no custom kernel ran in {clock.idle_samples} timed samples"
            )
        first = self._medians.setdefault(task.task_id, timing.reference_ms)
        if timing.reference_ms > SLOWER * first or first > SLOWER * timing.reference_ms:
            _flag(facts, f"reference_drift:{timing.reference_ms / first:.2f}")
        if abs(timing.drift) > 0.1:
            _flag(facts, "clock_drift")
        if timing.throttled:
            _flag(facts, "throttled")
        facts["timing"] = timing

    def _ornamental(
        self, reference: ReferenceProcess, process: CandidateProcess, facts: dict[str, Any]
    ) -> None:
        """Do the kernels matter? Last, since spoiled values may lead a kernel astray: a crash shows
        that they were used."""
        plain = [
            trial
            for trial in reference.trials
            if trial.shape == "declared" and not trial.evaluate and trial.weights_seed is None
        ]
        distributions = list(dict.fromkeys(trial.distribution for trial in plain))
        try:
            answer = process.ask(
                "ornamental", seed=secrets.randbits(31), distributions=distributions
            )
        except Stop:
            return
        if believe_form(Ornamental, answer).ornamental:
            calls = ", ".join(facts["library_calls"][:6]) or "other code"
            raise Stop(
                "no_custom_kernel",
                "the output does not depend on what the custom kernels write; the work is done by"
                f" {calls}",
            )

    # -- explaining --------------------------------------------------------------------------------

    def _explain(
        self,
        trial: Trial,
        outcome: str,
        result: dict[str, Any],
        reference: ReferenceProcess,
        process: CandidateProcess,
    ) -> tuple[str, str]:
        """The reason and one line for an output that is not the reference's, in the light of how it
        was obtained."""
        seen = (
            f"relative RMS error {result['rms']:.2e}, worst element {result['max']:.2e} on"
            f" {trial.name} inputs"
        )
        if trial.weights_seed is not None and "declared" in result.get("equals_trial", ()):
            return "stale_weights", f"right for the weights seen at construction only; {seen}"
        if result.get("equals_trial"):
            return (
                "stale_cache",
                (
                    f"returns the answer of an earlier call ({result['equals_trial'][0]}) for new"
                    f" inputs; {seen}"
                ),
            )
        notices = process.notices
        if any(notice.previous_changed for notice in notices):
            return "output_aliased", f"a later call overwrites an earlier output; {seen}"
        if any(notice.rerun_differs for notice in notices):
            return (
                "non_deterministic",
                f"repeating the call on the same inputs gives another answer; {seen}",
            )
        if outcome == "wrong_output" and self._ignores_inputs(trial, result, reference, process):
            return "input_independent", f"gives the same answer for different inputs; {seen}"
        if outcome == "wrong_output" and result["systematic"]:
            return (
                outcome,
                (
                    "another formula (an approximation?): the error is a function of the output;"
                    f" {seen}"
                ),
            )
        return outcome, seen

    @staticmethod
    def _ignores_inputs(
        trial: Trial, result: dict[str, Any], reference: ReferenceProcess, process: CandidateProcess
    ) -> bool:
        if result.get("equals_answer"):
            return True
        others = [
            other
            for other in reference.trials
            if other.shape == "declared" and other.weights_seed is None and other is not trial
        ]
        if trial.name != "declared" or not others:
            return False
        try:
            return "declared" in process.call(others[0], reference).get("equals_answer", ())
        except Stop:
            return False

    def _blame(self, stop: Stop, reference: ReferenceProcess) -> None:
        """A reference that runs out of memory while a candidate is alive has a neighbour that takes
        it all: no fault of the task."""
        if (
            stop.finding.reason == "reference_failed"
            and "out of memory" in f"{stop.finding.detail} {stop.finding.log}".lower()
        ):
            self._drop_reference()
            raise Stop(
                "out_of_memory", "the candidate leaves no memory for the reference beside it"
            ) from stop

    # -- the reference -----------------------------------------------------------------------------

    def _reference_for(
        self, task: KernelTask, blamed_roles: frozenset[str], construct_on: str | None = None
    ) -> ReferenceProcess:
        """The reference process at hand where it serves, else a new one. One whose weights were
        made on the CPU serves every candidate."""
        server, held = self.server, self._reference
        if (
            held is None
            or held.task != task
            or held.child.dead
            or held.construct_on != (construct_on or held.construct_on)
        ):
            self._drop_reference()
            self._reference = ReferenceProcess(
                lambda: self._spares.take(server, "reference"),
                task,
                self.config,
                self.device,
                construct_on,
            )
            self._spares.buried()
        self._reference.open(blamed_roles)
        return self._reference

    def _compiled_for(
        self, reference: ReferenceProcess, blamed_roles: frozenset[str]
    ) -> CompiledReference | None:
        """The second baseline of this reference, where it is asked for: compiled for the first
        candidate that is to be timed, and kept."""
        if not self.config.timing.compiles:
            return None
        if self._compiled is None:
            self._compiled = CompiledReference(reference, self.config, self.device)
        self._compiled.open(self.server, blamed_roles)
        return self._compiled

    def _drop_reference(self) -> None:
        if self._compiled:
            self._spares.bury(self._compiled.close)
            self._compiled = None
        if self._reference:
            self._spares.bury(self._reference.close)
            self._reference = None

    def close(self) -> None:
        self._drop_reference()
        self._spares.close()
        if self._server:
            self._server.close()


def verdict_of(
    task: KernelTask, candidate: Candidate, prepared: Prepared, finding: Finding, **facts: Any
) -> Verdict:
    """The record of a finding. Also what the pool uses for candidates that never reach a device."""
    return Verdict(
        candidate_id=candidate.candidate_id,
        task_id=task.task_id,
        language=candidate.language,
        status=STATUS_OF[finding.reason],
        reason=finding.reason,
        detail=one_line(finding.detail),
        log_tail=finding.log[-LOG_BYTES:]
        .encode("utf-8", "replace")
        .decode(),  # a lone surrogate can be neither stored nor shown
        flags=tuple(dict.fromkeys((*prepared.flags, *facts.pop("flags", ())))),
        build_tier=facts.pop("late_tier", None) or prepared.tier,
        build_cached=prepared.cached,
        build_s=prepared.seconds,
        **facts,
    )


# -- what a finding says ---------------------------------------------------------------------------


def _flag(facts: dict[str, Any], flag: str) -> None:
    facts["flags"] = (*facts.get("flags", ()), flag)


def _busy_share(child: Child) -> float:
    """Share of a short window in which a child that was asked nothing used a processor. 0 where the
    kernel does not tell."""
    clock = child.cpu_clock(
        waiting=True
    )  # on a busy machine, who wants to run does not always get to
    if clock is None:
        return 0.0
    started, used = time.monotonic(), clock()
    time.sleep(IDLE_S)  # the window that is measured, not a wait for something
    return (clock() - used) / 1e9 / (time.monotonic() - started)


def _raise_for_notices(notices: list[Notice], reference: ReferenceProcess) -> None:
    if any(notice.previous_changed for notice in notices):
        raise Stop("output_aliased", "a later call overwrites the output of an earlier one")
    if any(notice.mutated for notice in notices) and not reference.mutates:
        raise Stop(
            "input_mutated", "the inputs are changed in place; the reference leaves them alone"
        )


def _correctness(
    measured: list[tuple[Trial, dict[str, Any]]], reference: ReferenceProcess
) -> Correctness:
    """The worst over all trials; KernelBench's tolerances over the trials on the task's own inputs,
    which is where they belong."""
    worst = checks.merge([result for _, result in measured])
    own = checks.merge([result for trial, result in measured if trial.own_inputs])
    return Correctness(
        trials=len(measured),
        rms_error=worst["rms"],
        reference_rms_error=worst["reference_rms"],
        max_error=worst["max"],
        kernelbench_1e4=own["kernelbench_1e4"],
        kernelbench_1e2=own["kernelbench_1e2"],
        oracle=reference.oracle,
    )
