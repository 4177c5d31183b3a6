"""The parent's handle on the process that runs a candidate's kernel.

Guarantees: every question has a deadline; its failures are the candidate's and end in a `Stop`. A
SIGKILL not blamed on it, and the fork server's death, pass through as SandboxError.
"""

from __future__ import annotations

import math
import random
import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from kernels_eval.compile.extensions import Builder
from kernels_eval.config import LOG_BYTES, LOOK_S, LOOK_WORK_NS
from kernels_eval.judge.messages import (
    CLAIMABLE,
    Prepared,
    Stop,
    VerdictDraft,
    parse_answer,
    parse_report,
    unanswered,
)
from kernels_eval.judge.prepare import BoundedBuilds
from kernels_eval.judge.reference_handle import ReferenceProcess
from kernels_eval.judge.trial import Trial
from kernels_eval.protocol import (
    DECLARED,
    RENEWALS,
    A,
    Call,
    CallReport,
    Comparison,
    CopyWeights,
    ErrorReport,
    ExpectWithout,
    LateBuildAnswer,
    LoadCandidate,
    LoadedTask,
    LoadReport,
    PackedValues,
    PackKernels,
    Rebuild,
    Reconstruct,
    RecordSample,
    RedrawWeights,
    Renew,
    Request,
    RunUnseen,
    Sample,
    ShowKept,
    SpoilOutputs,
)
from kernels_eval.records import Candidate, Reason, stable_hash
from kernels_eval.sandbox.channel import Fds, Message
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.sandbox.program_counters import program_counters
from kernels_eval.source.spec import Build, ExtensionSpec


class MadeElsewhere(Exception):
    """The candidate's constructor made parameters on the CPU: the reference's must be, too."""


class NeedsBuild(Exception):
    """The candidate asks for a build that takes a compiler: it is run again once that is made."""

    def __init__(self, spec: ExtensionSpec) -> None:
        super().__init__(spec.name)
        self.spec = spec


@dataclass
class BuildsAtHand(BoundedBuilds):
    """What one process is answered: no compiler runs while it holds the device. Libraries are given
    for whole requests alone, so that none tells what an earlier run has seen.
    """

    prepared: Prepared = field(kw_only=True)

    def make(self, spec: ExtensionSpec) -> Build:
        """Raises NeedsBuild."""
        late = {build.key: build for build in self.prepared.late}
        found = late.get(spec.key)
        if spec.key in self.prepared.libraries or (found and found.ok):
            # it was evicted meanwhile, or built on a node with a disk of its own
            return self.builder.build(spec)
        found = found or self.builder.known(spec)
        if found is None:
            raise NeedsBuild(spec)
        return found


NO_BUILD = Build(ok=False, key="", reason=Reason.BUILD_FAILED, log="other settings need a build")
"""The answer while it is constructed with other settings."""
MOMENTS = {
    LoadCandidate.command: " while it is loaded",
    Call.command: " on {} inputs",
    **dict.fromkeys(
        (Sample.command, RecordSample.command, ShowKept.command, SpoilOutputs.command),
        " in timed calls",
    ),
    RunUnseen.command: " in calls on unseen inputs",
}
"""When a request is made."""


def described_fault(detail: str, moment: str, *, wraps: bool = False) -> str:
    """A CUDA error's first line, without torch's advice to those who set its environment. `wraps`:
    the task takes negative indices."""
    first = detail.partition("\n")[0]
    if "illegal memory access" in first:
        missing = ", or x[index]'s count from the end for a negative one" if wraps else ""
        moment += f": it reaches outside of its tensors (is a mask or a bound missing{missing}?)"
    return first + moment


@dataclass
class CandidateProcess:
    """A candidate in its process, its reference, and the draft of its verdict."""

    child: Child
    candidate: Candidate
    prepared: Prepared
    reference: ReferenceProcess
    builder: Builder
    draft: VerdictDraft
    calls: list[CallReport] = field(default_factory=list)
    loaded: LoadReport = field(default_factory=LoadReport)
    names: list[str] = field(default_factory=list)
    """of its parameters, in the order of the reference's"""
    libraries: dict[str, str] = field(default_factory=dict)
    """that it was given, late ones included"""
    compared: dict[str, tuple[Trial, Comparison]] = field(default_factory=dict)
    """by trials of the table"""
    fenced: bool = True
    """whether its inputs lie between bytes that tell who reaches outside"""
    trial_s: list[float] = field(default_factory=list)
    """seconds that each trial took, those without an answer included"""
    transposed: bool = False
    """whether it keeps square matrices of weights transposed"""
    frozen_statistics: bool = False
    """whether it keeps running statistics in parameters without gradient"""
    trial: str = ""
    """the name of the one that it was asked last"""
    builds_anew: bool = True
    """whether it is given what it asks to build"""

    def __post_init__(self) -> None:
        self.config, self.libraries = self.reference.config, {**self.prepared.libraries}
        given = self.builder, self.candidate, self.draft.flags
        self.builds = BuildsAtHand(*given, prepared=self.prepared)

    @cached_property
    def by_processor(self) -> bool:
        """Whether it is timed by its processor: what a process has computed that has ended is in no
        clock of its parent's.
        """
        on_gpu = self.reference.device.startswith("cuda")
        return not on_gpu and self.child.alone and self.child.processor_ns() > 0

    @property
    def compiler_flags(self) -> list[str]:
        """Of all that it asks to build."""
        specs = (*self.prepared.specs, *self.builds.specs.values())
        return [flag for x in specs for flag in (*x.extra_cflags, *x.extra_cuda_cflags)]

    def work_s(self) -> float:
        """Now, in seconds of its own work where it is timed by its processor."""
        if self.by_processor:
            return self.child.processor_ns() / 1e9 / self.config.threads
        return self.draft.clock()

    @property
    def needs_copy(self) -> bool:
        """Whether its outputs have no memory of their own, or are not in order, where the
        reference's are.
        """
        return any(call.layout > self.reference.loaded.layout for call in self.calls)

    def load(self) -> None:
        """Import and construct the module. Raises MadeElsewhere, NeedsBuild as all requests do."""
        reference, limits = self.reference, self.config.limits
        arguments, given = reference.memory.arguments()
        outputs, taken = reference.memory.shared("candidate")
        with ExitStack() as held:
            kept = self._kept_kernels()
            kernels = (held.enter_context(open(kept, "rb")).fileno(),) if kept else ()
            request = LoadCandidate(
                path=str(self.child.write_file("candidate.py", self.candidate.code or "")),
                libraries=self.prepared.libraries,
                language=self.candidate.language,
                kernels=bool(kernels),
                spec=reference.spec,
                arguments=arguments,
                outputs=outputs,
            )
            fds = (given, taken, *kernels)
            answer = self._send(request, limits.load_s, Reason.LOAD, fds)
        self.loaded = parse_report(LoadReport, answer)
        self.names = matched_names(reference.loaded, self.loaded)
        if effects := reference.loaded.effects:
            reference.request(ExpectWithout(positions=effects.told(self.loaded.lacks)))
        drawn = reference.loaded.parameters and reference.construct_on != "cpu"
        if self.copies_weights:
            self.copy_weights()
        elif self.loaded.made_elsewhere and drawn:
            raise MadeElsewhere

    @property
    def may_overwrite(self) -> bool:
        """Whether a later call may overwrite an earlier output."""
        return self.config.correctness.output_buffer == "flag"

    @property
    def copies_weights(self) -> bool:
        return self.config.correctness.weights == "copy"

    def copy_weights(self) -> None:
        """Give the candidate the reference's weights."""
        weights, descriptor = self.reference.memory.weights()
        self.request_unread(CopyWeights(weights=weights), (descriptor,))

    @property
    def _kernels_key(self) -> str:
        language = self.candidate.language
        return stable_hash(["jit", language, language.versions(), self.candidate.code])

    def _kept_kernels(self) -> str:
        found = self.candidate.language.jit_cache and self.builder.cache.find(self._kernels_key)
        return found.path if found else ""

    def keep_kernels(self) -> None:
        """Keep a JIT's kernels, in an archive that the candidate's process makes; never read it
        here.
        """
        if not self.candidate.language.jit_cache or self.child.gone or self._kept_kernels():
            return
        folder, key = self.builder.work_root, self._kernels_key
        archive = tempfile.NamedTemporaryFile(dir=folder, suffix=".zip")
        with archive, suppress(Stop):  # it is no part of the verdict
            self.request_unread(PackKernels(), (archive.fileno(),))
            self.builder.cache.store(key, Build(ok=True, key=key, path=archive.name))

    def request_unread(self, request: Request[Any], fds: Fds = ()) -> Message:
        """The unparsed answer to a request. Raises Stop where there is none."""
        return self._send(request, self.config.limits.run_s, Reason.RUN, fds)

    def request(self, request: Request[A], fds: Fds = ()) -> A:
        """The answer to a request. Raises Stop where it is missing or malformed."""
        return parse_answer(request, self.request_unread(request, fds))

    def look_at(self, request: Request[Any]) -> list[list[int]]:
        """Where its threads are at random moments of its work on a request: addresses of their
        instructions at each. Raises Stop as `request`."""
        looks: list[list[int]] = []
        family, worked_ns = self.child.family(), self.child.processor_ns()

        def look() -> None:
            nonlocal worked_ns
            time.sleep(LOOK_S * random.uniform(0.2, 1.8))  # no moment that it could foresee
            if self.child.processor_ns() - worked_ns < LOOK_WORK_NS:
                return  # on a busy machine it is where it was
            with self.child.stopped(family):
                looks.append([found for pid in family for found in program_counters(pid)])
                worked_ns = self.child.processor_ns()

        self._send(request, self.config.limits.run_s, Reason.RUN, look=look)
        return looks

    def unseen_inputs(
        self, count: int = 1, distribution: str = DECLARED
    ) -> tuple[PackedValues, int]:
        seeds = [secrets.randbits(31) for _ in range(count)]
        return self.reference.memory.draw(seeds, distribution)

    def _send(
        self,
        request: Request[Any],
        timeout: float,
        late: Reason,
        fds: Fds = (),
        look: Callable[[], None] | None = None,
    ) -> Message:
        self.reference.turns.give_way()
        try:
            if look is None:
                answer = self.child.request(request, timeout, fds)
            else:
                answer = self._looked_at(request, timeout, look)
            while "build" in answer:
                answer = self._late_build(answer["build"], timeout)
        except ChildFailure as failure:
            raise unanswered(failure, self.child, late) from failure
        if "error" not in answer:
            return answer
        report = parse_report(ErrorReport, answer)
        reason = Reason(report.error) if report.error in CLAIMABLE else Reason.EXCEPTION
        detail = report.detail
        if reason is Reason.CUDA_ERROR:
            moment = MOMENTS.get(request.command, "").format(self.trial)
            wraps = any(note.wraps for note in self.reference.loaded.plan.notes)
            detail = described_fault(detail, moment, wraps=wraps)
        raise Stop(
            reason,
            detail,
            f"{report.trace}\n{self.child.log_tail(LOG_BYTES // 2)}",
        )

    def _looked_at(
        self, request: Request[Any], timeout: float, look: Callable[[], None]
    ) -> Message:
        self.child.begin(request.message())
        ends = time.monotonic() + timeout
        while not self.child.channel.pending() and time.monotonic() < ends:
            look()
        return self.child.finish(timeout)

    def _late_build(self, spec: object, timeout: float) -> Message:
        build = self.builds.build(spec) if self.builds_anew else NO_BUILD
        if build.ok:
            self.draft.late_tier = build.tier or None
            self.libraries[build.key] = build.path
        answer = LateBuildAnswer(ok=build.ok, path=build.path, reason=build.reason, log=build.log)
        return self.child.resume(answer.model_dump(mode="json"), timeout)

    def call(self, trial: Trial, *, reruns: int = 0, transposed: bool = False) -> Comparison:
        """One compared call; `transposed`: other weights, square matrices transposed. Raises Stop
        for a wrong form.
        """
        if trial.weights:
            given = self._weights(trial, transposed=transposed)
            before = self.config.level == "confirm" and not self.reference.loaded.effects
            if before and trial.name == "other_weights":
                # what is kept for weights that look alike shows in the next call
                self.request_unread(given.model_copy(update={"nearly": True}))
                self._answer(trial)
            elif before and trial.weights in RENEWALS:  # what a first call keeps, too
                self._answer(trial)
            self._redraw(given)
        if trial.row.evaluate:
            self.rebuild()  # as new: calls change statistics
        with self._under(trial.settings):
            answer = self._answer(trial, reruns=reruns)
        if trial.weights and not trial.row.explored:
            self.rebuild()
        return self.compare(answer, trial, keep=trial.own_mode)

    def _answer(self, trial: Trial, *, reruns: int = 0) -> Message:
        self.trial, seeds = trial.name, [*trial.earlier_seeds, trial.seed]
        inputs, descriptor = self.reference.memory.draw(seeds, trial.distributions, trial.shape)
        request = Call(
            inputs=inputs,
            in_place=trial.row.in_place,
            evaluate=trial.row.evaluate,
            reruns=reruns,
            fenced=self.fenced,
            output_bytes=sum(output.bytes for output in trial.outputs),
            devices=[output.device for output in trial.outputs],
        )
        deadline = self.config.limits.call_s(compiles=bool(self.candidate.language.jit_cache))
        return self._send(request, deadline, Reason.RUN, (descriptor,))

    def _redraw(self, given: RedrawWeights) -> None:
        if given.form in RENEWALS and self.copies_weights:  # its constructor draws others
            self.reference.request(given)
            self.copy_weights()
            self.reference.request(RedrawWeights(seed=None))
        else:
            self.request_unread(given)

    def _weights(self, trial: Trial, *, transposed: bool = False) -> RedrawWeights:
        return RedrawWeights(
            seed=trial.weights_seed,
            statistics=self.reference.used_statistics(),
            names=self.names,
            frozen=self.frozen_statistics,
            transposed=transposed,
            form=trial.weights,
        )

    @contextmanager
    def telling_weights(self) -> Iterator[None]:
        """For the block, give both sides the weights of the trial with others: no work can be left
        out for what the constructor's happen to be. Packed ones stay.
        """
        reference, trial = self.reference, self.reference.timed_weights
        mapped = "weights_not_mappable" not in self.draft.flags
        if trial is None or trial.name not in self.compared or not mapped:
            yield
            return
        reference.request(self._weights(trial).model_copy(update={"names": []}))
        self.request_unread(self._weights(trial, transposed=self.transposed))
        yield
        reference.request(RedrawWeights(seed=None))
        if not self.child.gone:
            self.rebuild()

    @contextmanager
    def _under(self, settings: str) -> Iterator[None]:
        """For the block, it is constructed with other arguments, of this name, and is given no new
        build: a compiler would take as long as all else."""
        if not settings:
            yield
            return
        self.trial, self.builds_anew = settings, False
        arguments, descriptor = self.reference.memory.arguments(settings)
        try:
            self.request_unread(Reconstruct(arguments=arguments), (descriptor,))
            yield
        finally:
            self.builds_anew = True
            if not self.child.gone:
                self.request_unread(Reconstruct())

    def renew(self) -> None:
        """Have both sides begin anew a model that remembers: their next calls are alike."""
        if self.reference.loaded.remembers:
            self.reference.request(Renew())
            self.request(Renew())

    def rebuild(self) -> None:
        self.request_unread(Rebuild())
        if self.copies_weights:
            self.copy_weights()

    def compare(self, answer: Message, trial: Trial, *, keep: bool = True) -> Comparison:
        """Compare what was written before the last answer. Raises Stop where its form is wrong."""
        report = parse_report(CallReport, answer)
        if keep:
            self.calls.append(report)
        if report.overrun:
            raise Stop(Reason.MEMORY_ERROR, "writes before or after the memory of its inputs")
        self.check_form(report, trial)
        return self.reference.compare(trial)

    @property
    def _leaves_in_arguments(self) -> bool:
        effects = self.reference.loaded.effects
        return bool(effects and effects.arguments)

    def check_form(self, report: CallReport, trial: Trial) -> None:
        """Raise Stop where outputs lack the form of this trial's."""
        if not report.plain:
            kind, *_ = report.kinds or ["nothing"]
            lazy = report.tensors and report.kinds
            reason = Reason.LAZY_OUTPUT if lazy else Reason.WRONG_SHAPE
            raise Stop(reason, f"returns {kind}, not a plain tensor")
        found, wanted = report.outputs, trial.outputs
        devices = [output.device for output in wanted]
        elsewhere = len(report.devices) == len(wanted) and report.devices
        structure = self.reference.loaded.structure
        for reason, what, seen, expected in (
            (Reason.WRONG_DEVICE, "tensors on ", elsewhere or devices, devices),
            (Reason.WRONG_SHAPE, "", [x.shape for x in found], [x.shape for x in wanted]),
            (Reason.WRONG_SHAPE, "the structure ", report.structure, structure),
            (Reason.WRONG_DTYPE, "", [x.dtype for x in found], [x.dtype for x in wanted]),
        ):
            if seen == expected:
                continue
            detail = f"returns {what}{seen}, the reference {expected}"
            if self._leaves_in_arguments:
                detail += " (what a call leaves in its arguments is an output, too)"
            if reason is Reason.WRONG_SHAPE and trial.row.other_forms:
                why = "what the task keeps, drops or counts depends on their values"
                raise Stop(Reason.WRONG_OUTPUT, f"{detail} on {trial.name} inputs: {why}")
            raise Stop(reason, detail)


def matched_names(reference: LoadedTask, candidate: LoadReport) -> list[str]:
    """The candidate's parameters in the order of the reference's: those of one shape that were
    constructed alike and have one name, then those constructed alike, those of one name, and others
    as they come.
    """
    wanted, left = (
        list(zip(it.parameters, it.parameter_digests, it.parameter_names, strict=False))
        for it in (reference, candidate)
    )
    found: dict[int, str] = {}
    for parts in ((0, 1, 2), (0, 1), (0, 2), (0,)):
        for index, each in enumerate(wanted):
            if index in found:
                continue
            alike = (x for x in left if all(x[part] == each[part] for part in parts))
            if one := next(alike, None):
                left.remove(one)
                found[index] = one[2]
    return [found[index] for index in sorted(found)]


def unmatched_shapes(
    reference: list[list[int]], candidate: list[list[int]]
) -> tuple[list[int], int]:
    """The reference's parameters (indices) whose shape the candidate lacks, and how many elements
    its own unmatched ones hold.
    """
    left = list(candidate)
    missing = []
    for index, shape in enumerate(reference):
        if shape in left:
            left.remove(shape)
        else:
            missing.append(index)
    return missing, sum(map(math.prod, left))
