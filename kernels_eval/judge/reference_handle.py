"""The parent's handle on the reference process of a task.

Guarantees: every question has a deadline; its failures are the task's and end in a `Stop`. A
SIGKILL not blamed on it, and the fork server's death, pass through as SandboxError.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Collection, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from functools import cached_property
from typing import Any

from pydantic import ValidationError

from kernels_eval.config import (
    FEW_TERMS_KINDS,
    LOG_BYTES,
    ORACLE_MAX_BYTES,
    TIMED_INPUT_BYTES,
    EvalConfig,
)
from kernels_eval.installation import require_unchanged
from kernels_eval.judge.conditions import reduces_masked, sums_products
from kernels_eval.judge.expectations import Expectations
from kernels_eval.judge.gates import TaskGates
from kernels_eval.judge.messages import Stop, one_line
from kernels_eval.judge.quarantine import degenerate
from kernels_eval.judge.task_memory import TaskMemory
from kernels_eval.judge.trial import TaskFindings, Trial, TrialRow
from kernels_eval.judge.turns import Turns
from kernels_eval.model.correctness import MANTISSA, PRECISION_OF
from kernels_eval.protocol import (
    DECLARED,
    DOMAINS,
    MOVED,
    OTHER_INPUTS,
    OTHER_ROUNDING,
    RENEWALS,
    RENEWED,
    SCALED,
    VARIED,
    A,
    Compare,
    Comparison,
    EndTiming,
    EstimateUsedBytes,
    Explained,
    ExplainError,
    ForgetTrial,
    GlanceAt,
    LeaveOut,
    LeftOut,
    LoadTask,
    ModelSpec,
    Request,
    TryOtherWeights,
    parsed,
)
from kernels_eval.records import KernelTask, Reason
from kernels_eval.sandbox.channel import Answer, Fds, Message
from kernels_eval.sandbox.child import Child, ChildFailure

OUT_OF_MEMORY = "out of memory"
CRASHES = (Reason.CRASHED, Reason.EXITED_EARLY)


class ReferenceRestarted(Exception):
    """A request broke its process, which begins again without what was asked: expected values are
    to be computed anew, and a candidate that shares its memory begins again, too.
    """


class Crowded(Exception):
    """The task must have its device alone: beside a neighbour there is not memory enough."""

    def __init__(self, *, ran_out: bool = False) -> None:
        super().__init__(ran_out)
        self.ran_out = ran_out


class ReferenceProcess:
    """The trusted process of one task: model, expected values under secret seeds, half of the
    timing.
    """

    expected: Expectations
    """once it is declared: of its own inputs; once it is opened: of every trial"""

    def __init__(
        self,
        start: Callable[[], Child],
        task: KernelTask,
        config: EvalConfig,
        device: str,
        construct_on: str | None = None,
        turns: Turns | None = None,
    ) -> None:
        """`start` gives a child with the role "reference". Both processes make weights on
        `construct_on`, by default the device that uses them.
        """
        self.task, self.config, self.device = task, config, device
        self.construct_on = construct_on or device
        self.seed = secrets.randbits(31)
        self.failure: Stop | None = None
        self.opened = False
        self.turns = turns or Turns()
        self.crowded = False
        """Whether a neighbour may have held the device's memory since it was loaded."""
        self.beside: Child | None = None
        """A candidate's process, stopped while this one works: it could sway times and
        deadlines.
        """
        self.unsuitable: set[str] = set()
        """Trials, distributions and searches that break its process (labels out of range end a
        CUDA context, say), and are left out."""
        self._tried: tuple[str, ...] = ()
        self._refusal_counts = False
        self._start = start
        self._matters: dict[tuple[int, ...], bool] = {}
        self._used_bytes: float | None = None
        self._found: dict[str, Any] = {}
        """of the model's specification, by running it"""
        self._start_child()

    def _start_child(self) -> None:
        self.__dict__.pop("timed_distribution", None)  # other trials may suit without one
        self.child = self._start()
        self._is_loaded = self._is_declared = False
        self._few_terms: dict[str, LeftOut] = {}
        self.child.channel.accepts_descriptors = True  # it runs the task's code, which is trusted
        self.path = self.child.write_file("task.py", self.task.code)
        on_device = self.device.startswith("cuda")
        self.memory = TaskMemory(self.request, self.child.channel, on_device=on_device)

    def begin_load(self) -> None:
        """Have its process load the task while others work; `load` waits for it."""
        if not (self._is_loaded or self.failure or self.child.owed):
            with suppress(ChildFailure):  # `load` meets it again
                self.child.begin(self._load_request.message())

    def load(self) -> None:
        """Load the task, once; later calls repeat its failure. Raises Stop with a task_error."""
        while not self._is_loaded:
            with suppress(ReferenceRestarted):
                self._attempt(self._load)
                self._is_loaded = True

    def declare(self) -> None:
        """Load the task, and compute what is right on its own inputs, once."""
        self.load()
        if not self._is_declared:
            self._attempt(self._declare)
            self._is_declared = True

    def open(self) -> None:
        """Load the task, and compute all expected values, once. Raises ReferenceRestarted beside a
        candidate.
        """
        while not self.opened:
            try:
                self.declare()
                self._attempt(self.expected.complete)
                self.opened = True
            except ReferenceRestarted:
                if self.beside:
                    raise

    def _attempt(self, work: Callable[[], None]) -> None:
        if self.failure:
            raise self.failure
        try:
            work()
        except Stop as stop:
            self.failure = stop
            raise

    def _load(self) -> None:
        self.begin_load()
        with self.trying(OTHER_INPUTS), self._unbroken(), memory_shared(self.crowded):
            limit = self.config.limits.reference_s
            answer = _answered(self.child, lambda: self.child.finish(limit))
        self.loaded = self.memory.loaded = _parsed(self._load_request, answer)
        self._found = {name: getattr(self.loaded, name) for name in FOUND}
        if self.loaded.ambiguous:
            raise degenerate(self.loaded.ambiguous)
        self.gates = TaskGates()

    def _declare(self) -> None:
        findings = TaskFindings(self.loaded, self.config.correctness, self.config.level)
        self.expected = Expectations(self, self.gates, findings)
        self.expected.declare()
        self.memory.share(self.expected.most_output_bytes, "candidate")

    @property
    def _load_request(self) -> LoadTask:
        return LoadTask(
            path=str(self.path),
            spec=self.spec,
            oracle_max_bytes=ORACLE_MAX_BYTES,
            left_out=sorted(self.unsuitable),
        )

    @property
    def spec(self) -> ModelSpec:
        return ModelSpec(
            entry_point=self.task.entry_point,
            init_form=self.task.init_form,
            device=self.device,
            construct_on=self.construct_on,
            threads=self.config.threads,
            seed=self.seed,
            **self._found,
        )

    # -- requests ----------------------------------------------------------------------------------

    def request(self, request: Request[A], fds: Fds = ()) -> A:
        """The answer to a request. Raises Stop (REFERENCE_FAILED) where there is none."""
        return _parsed(request, self.request_unread(request, fds))

    def request_unread(self, request: Request[Any], fds: Fds = ()) -> Message:
        limit = self.config.limits.reference_s
        self.turns.give_way()
        # a stop takes 3 ms; what a candidate can gain without it, `confirm` does not grant
        beside = self.beside if self.config.level == "confirm" else None
        with self._unbroken(), alone(beside), memory_shared(self.crowded):
            return _answered(self.child, lambda: self.child.request(request, limit, fds))

    def answer_if_suitable(self, request: Request[A], name: str = "") -> A | None:
        """The answer to a request about inputs that the task may refuse; None where it does, or
        where what has this `name` (the request's own) is left out. Raises ReferenceRestarted where
        it breaks the process.
        """
        name = name or request.command
        if name in self.unsuitable:
            return None
        try:
            with self.trying(name):
                return self.request(request)
        except Stop:
            if self.child.dead:
                raise
            return None

    @contextmanager
    def trying(self, *names: str, refusal_counts: bool = False) -> Iterator[None]:
        """Leave these out, from a new start on, where a request of the block breaks the process or,
        if `refusal_counts`, has no answer.
        """
        before = self._tried, self._refusal_counts
        self._tried, self._refusal_counts = names, refusal_counts
        try:
            yield
        finally:
            self._tried, self._refusal_counts = before

    def trying_draws(self, distributions: Collection[str]) -> AbstractContextManager[None]:
        """Of these distributions, of which the task has taken other draws."""
        names = {trial.distribution: trial.name for trial in reversed(self.trials)}
        drawn = {names.get(name, name) for name in distributions if name != DECLARED}
        return self.trying(*drawn, refusal_counts=bool(drawn))

    @contextmanager
    def _unbroken(self) -> Iterator[None]:
        """Begin again, and raise ReferenceRestarted, where leaving something out may help: what is
        tried, else runs that round otherwise, which most requests make.
        """
        try:
            yield
        except Stop as stop:
            left = {*(self._tried or (OTHER_ROUNDING,))} - self.unsuitable
            detail = stop.finding.detail
            refused = self._refusal_counts and OUT_OF_MEMORY not in detail and not self.child.dead
            if not left or not (refused or self._is_broken(detail)):
                raise
            self.unsuitable |= left
            self.opened = False
            self.close()
            self._start_child()
            raise ReferenceRestarted from stop

    def _is_broken(self, detail: str) -> bool:
        """Whether its process is of no more use. What killed it, or held it up, was not the task's
        own error."""
        dead = self.child.dead
        if isinstance(dead, ChildFailure):
            return dead.reason in CRASHES and "SIGKILL" not in dead.detail
        return "CUDA error" in detail and OUT_OF_MEMORY not in detail

    # -- trials ------------------------------------------------------------------------------------

    @property
    def trials(self) -> list[Trial]:
        return self.expected.task.trials

    @cached_property
    def timed_distribution(self) -> str:
        """The task's own inputs, moved, where it takes these; others where these could save work,
        or are always the same, and a trial of others suits the task.
        """
        fixed = self.expected.task.own_answer_is_fixed
        varied = fixed or any(note.timed for note in self.loaded.plan.notes)
        wanted = (*((VARIED,) if varied else ()), *(("mixed",) if fixed else ()))
        suit = (trial for trial in self.trials if trial.regular and trial.name in wanted)
        found = [trial.distribution for trial in suit]
        return found[0] if found else MOVED if self.takes(MOVED) else DECLARED

    def takes(self, distribution: str) -> bool:
        """Whether the task answers such inputs: it may refuse what it demands of its own."""
        seed = secrets.randbits(31)
        trial = Trial(DRAWN_AGAIN.name, DRAWN_AGAIN, seed, distribution=distribution)
        seen = self.answer_if_suitable(GlanceAt(trial=trial.expect()), distribution)
        if seen is None:
            return False
        self.request(ForgetTrial(trial=trial.name))
        return [x.shape for x in seen.outputs] == [x.shape for x in self.trials[0].outputs]

    @property
    def timed_weights(self) -> Trial | None:
        """The trial whose weights timed calls have."""
        return next((x for x in self.trials if x.weights and x.weights not in RENEWALS), None)

    def compare(self, trial: Trial) -> Comparison:
        marks = trial.row.other_forms and reduces_masked(self.expected.task)
        return self.request(Compare(trial=trial.name, marks=marks))

    def explain(self, trial: str, place: int | None = None) -> Explained:
        """What explains the last answer's error, of any tensor or of the one at a place."""
        return self.answer_if_suitable(ExplainError(trial=trial, place=place)) or Explained()

    def judge(self, comparison: Comparison, trial: Trial | None = None) -> Reason:
        if trial is None:
            return self.gates.judge(comparison)
        return self.gates.judge(comparison, own_inputs=trial.own_inputs, hard=trial.row.hard)

    @contextmanager
    def drawn_again(self, distribution: str = DECLARED) -> Iterator[Trial]:
        """A trial of another draw of the task's own inputs, or of others, which is then forgotten.
        Raises Stop where the task refuses them.
        """
        seed = secrets.randbits(31)
        trial = Trial(DRAWN_AGAIN.name, DRAWN_AGAIN, seed, distribution=distribution)
        if distribution != DECLARED and not self.takes(distribution):
            raise Stop(Reason.REFERENCE_FAILED, f"the reference takes no {distribution} inputs")
        try:
            yield self._added(trial)
        finally:
            self.request(ForgetTrial(trial=DRAWN_AGAIN.name))

    def doubtful(self, reason: Reason, *, compared: bool) -> bool:
        """Whether a task may be to blame for a wrong answer: it may not tell right from wrong, or
        the shape of its outputs depends on values.
        """
        if reason is Reason.WRONG_SHAPE:
            with self.drawn_again() as other:
                return other.outputs != self.trials[0].outputs
        return compared and self.expected.doubtful

    def packed_weights(self, form: str) -> Trial:
        """What a candidate is asked for whose weights cannot be redrawn one by one."""
        seeds = self.trials[0].seed, secrets.randbits(31)
        row = PACKED_WEIGHTS[form]
        return self._added(Trial(form, row, seeds[0], weights=form, weights_seed=seeds[1]))

    def _added(self, trial: Trial) -> Trial:
        trial.outputs = self.request(trial.expect()).outputs
        return trial

    # -- questions about the task ------------------------------------------------------------------

    def weights_matter(self, positions: list[int]) -> bool:
        """Do these parameters of the reference (none: its running statistics) change its output?"""
        key = tuple(positions)
        if key not in self._matters:
            request = TryOtherWeights(seed=self.trials[0].seed, only=positions)
            found = self.answer_if_suitable(request)
            self._matters[key] = found.matter if found else True
        return self._matters[key]

    def drawn_matter(self, names: list[str]) -> bool:
        """Do these that the constructor draws, and that are no parameters, change the output?"""
        request = TryOtherWeights(seed=self.trials[0].seed, only=[], drawn=names)
        found = self.answer_if_suitable(request)
        return found.matter if found else True

    def used_statistics(self) -> list[list[int]]:
        return self.loaded.statistics if self.loaded.statistics and self.weights_matter([]) else []

    def few_terms(self, kind: str) -> LeftOut:
        """What shows that a term is left out, or of few digits; no draws where the task has no long
        sum (or maximum), or no inputs show it.
        """
        if kind not in self._few_terms:
            self._few_terms[kind] = next(self._telling_terms(kind), LeftOut())
        return self._few_terms[kind]

    def _telling_terms(self, kind: str) -> Iterator[LeftOut]:
        asked = FEW_TERMS_KINDS[kind]
        terms = asked.terms if self.output_precision in MANTISSA else asked.half
        any_number = self.expected.task.domains[0] == DOMAINS[0]
        for around, size in asked.backgrounds if terms else ():
            if size is None and not any_number:
                continue  # what is around would be no input of the task
            seed = secrets.randbits(31)
            request = LeaveOut(seed=seed, kind=kind, terms=terms, around=around, size=size)
            found = self.answer_if_suitable(request, kind)
            if found is None or not found.length:
                return
            if found.less and self.gates.judge(found.less) is not Reason.OK:
                yield found

    @property
    def output_precision(self) -> str:
        return PRECISION_OF.get(self.loaded.dtype, "fp32")

    @property
    def sums_products(self) -> bool:
        return sums_products(self.expected.task)

    @property
    def output_bytes(self) -> int:
        return self.expected.output_bytes

    @property
    def task_bytes(self) -> int:
        return self.loaded.input_bytes + self.output_bytes

    @property
    def needs_room(self) -> bool:
        return self.task_bytes > TIMED_INPUT_BYTES

    def least_bytes(self) -> float:
        """Bytes that any kernel moves at least: outputs and used inputs."""
        if self._used_bytes is None:
            found = self.answer_if_suitable(EstimateUsedBytes(seed=self.trials[0].seed))
            self._used_bytes = found.bytes if found else 0.0
        return self._used_bytes + self.output_bytes

    # -- its end -----------------------------------------------------------------------------------

    def end_timing(self) -> None:
        self.memory.release("inputs", "own", "unseen")
        self.request(EndTiming())

    def close(self) -> None:
        self.memory.close()
        self.child.close()


FOUND = "precision", "gradients", "effects", "padded", "drawn"
DRAWN_AGAIN = TrialRow("drawn_again")
"""Tells whether a candidate whose first answer is wrong ignores its inputs."""
PACKED_WEIGHTS = {form: TrialRow(form) for form in (SCALED, RENEWED)}
"""Replace rows of other weights where a candidate's cannot be redrawn: all times one number, and
all as another seed's constructor draws them."""


@contextmanager
def memory_shared(crowded: bool) -> Iterator[None]:
    """Raise Crowded where memory runs out beside a neighbour: a trial would be left out."""
    try:
        yield
    except Stop as stop:
        if crowded and OUT_OF_MEMORY in stop.finding.detail:
            raise Crowded(ran_out=True) from stop
        raise


def alone(beside: Child | None) -> AbstractContextManager[None]:
    """Stop the candidate's process, if any, for the block."""
    return beside.stopped() if beside else nullcontext()


def _answered(child: Child, request: Callable[[], Answer]) -> Message:
    try:
        answer = request()
    except ChildFailure as failure:
        raise _failed(failure.detail, child.log_tail(LOG_BYTES)) from failure
    if answer.get("error"):
        short = f"{OUT_OF_MEMORY}: " if answer["error"] == Reason.OUT_OF_MEMORY else ""
        raise _failed(short + answer["detail"], answer.get("trace", ""))
    return answer


def _parsed(request: Request[A], answer: Message) -> A:
    try:
        return parsed(request, answer)
    except ValidationError as error:
        said = f"{request.command}: {one_line(str(error))[:200]}"
        raise _failed(said, "") from error


def _failed(detail: str, log: str) -> Stop:
    require_unchanged()
    return Stop(Reason.REFERENCE_FAILED, f"the reference: {detail}", log)
