"""What is found of a candidate, and the verdict that this becomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

from pydantic import ValidationError

from kernels_eval.config import LOG_BYTES
from kernels_eval.protocol import A, Request, storable
from kernels_eval.records import (
    Candidate,
    Correctness,
    KernelTask,
    Level,
    Phases,
    Reason,
    Record,
    Timing,
    Verdict,
)
from kernels_eval.sandbox.child import Child, ChildFailure
from kernels_eval.source.spec import Build, ExtensionSpec

NO_MODULE = "no complete module: the file or the response is empty, cut off, or holds no code"


class Finding(Record):
    """Why a verification ended before every check had passed."""

    reason: Reason
    detail: str = ""
    log: str = ""


class Prepared(Record):
    """The build side's result: libraries, or the finding that ends the verification. A run that
    needs another build ends with what was prepared, and that build is `asked` for.
    """

    candidate_id: str
    libraries: dict[str, str] = {}
    specs: tuple[ExtensionSpec, ...] = ()
    """what they are built from"""
    finding: Finding | None = None
    flags: tuple[str, ...] = ()
    tier: str | None = None
    cached: bool = False
    seconds: float = 0.0
    alone: bool = False
    """whether no neighbour may be on its device"""
    asked: ExtensionSpec | None = None
    late: tuple[Build, ...] = ()
    """builds made since a first run asked for one"""
    run_s: float = 0.0
    phase_s: dict[str, float] = {}
    """wall seconds of runs that ended so, and of their phases"""


class Stop(Exception):
    """Ends the protocol: the verdict is known."""

    def __init__(self, reason: Reason, detail: str = "", log: str = "") -> None:
        super().__init__(reason)
        self.finding = Finding(reason=reason, detail=storable(detail[:2000]), log=storable(log))


def unanswered(failure: ChildFailure, child: Child, late: Reason) -> Stop:
    """What a missing answer of a child means; `late`: its deadline passed."""
    reason = late if failure.reason is Reason.RUN else failure.reason
    return Stop(reason, failure.detail, child.log_tail(LOG_BYTES))


CLAIMABLE = frozenset(
    map(
        Reason,
        """exception cuda_error out_of_memory undefined_symbol no_module syntax_error build_failed
        forbidden_call build missing_model_new""".split(),
    )
)
"""Reasons that a candidate's process may give for its own error."""


REASON_OF_CHANGE: Mapping[str, Reason] = {
    "current_stream": Reason.STREAM_ESCAPE,
    "patched": Reason.HARNESS_TAMPERING,
    **dict.fromkeys(
        "default_dtype default_device threads current_device persisting_l2 deterministic".split(),
        Reason.GLOBAL_STATE_CHANGED,
    ),
    "modes": Reason.HARNESS_TAMPERING,
    "operators": Reason.HARNESS_TAMPERING,
    "refused": Reason.FORBIDDEN_CALL,
}
"""The reason for a change of each setting; honest code writes others."""

FIX_OF_CHANGE: Mapping[str, str] = {
    "current_stream": "launch on the current stream, or make it the current one again",
    "patched": "leave functions of torch, time and Python as they are",
    "default_dtype": "pass dtype= to what makes tensors",
    "default_device": "pass device= to what makes tensors",
    "threads": "calls of the model set the number of torch's threads (torch.set_num_threads,"
    " at::set_num_threads or omp_set_num_threads); set it at import, where it is without effect, or"
    " give a parallel region its own by `num_threads(n)`",
    "current_device": "use the device of the inputs",
    "persisting_l2": "leave cudaDeviceSetLimit alone",
    "deterministic": "leave torch.use_deterministic_algorithms alone",
    "modes": "leave every mode of torch that is entered",
    "operators": "register operators in a namespace of your own",
    "refused": "leave frames, trace functions, the garbage collector and ctypes alone",
}
"""What a candidate should do instead."""

R = TypeVar("R", bound=Record)


def parse_report(model: type[R], answer: object) -> R:
    """The answer as `model`. Raises Stop (EXITED_EARLY) for a form our code did not send."""
    try:
        return model.model_validate(answer)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Stop(
            Reason.EXITED_EARLY,
            "the process answered with something that the protocol does not know:"
            f" {one_line(where + ': ' + first['msg'])[:200]}",
        ) from error


def parse_answer(request: Request[A], answer: object) -> A:
    found: A = parse_report(request.answer, answer)
    return found


def one_line(text: str) -> str:
    """Candidate text as data: one line, no control characters, at most 500 characters."""
    return "".join(c if c.isprintable() else " " for c in text[:500]).strip()


@dataclass
class VerdictDraft:
    """What is known of a verdict while it is reached.

    Fields with names of `Verdict`'s become those. `late_tier`: header tier of a constructor's
    build; `approximation`: what was seen of one; `log`: what a tool said of a candidate that
    passed. `on_phase` gets each phase's name as it begins.
    """

    level: Level = "confirm"
    """of one that reached no device, where no check is left out"""
    device: str = ""
    isolation: tuple[str, ...] = ()
    reference_operators: tuple[str, ...] = ()
    precision_class: str | None = None
    outputs_match: bool | None = None
    correctness: Correctness | None = None
    custom_kernels: tuple[str, ...] = ()
    custom_kernel_time_share: float | None = None
    library_calls: tuple[str, ...] = ()
    timing: Timing | None = None
    phases: Phases | None = None
    run_s: float = 0.0
    flags: list[str] = field(default_factory=list)
    late_tier: str | None = None
    approximation: str = ""
    log: str = ""
    seconds: dict[str, float] = field(default_factory=dict)
    on_phase: Callable[[str], None] | None = None
    clock: Callable[[], float] = time.monotonic

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        if self.on_phase:
            self.on_phase(name)
        started = self.clock()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self.clock() - started


def verdict_of(
    task: KernelTask,
    candidate: Candidate,
    prepared: Prepared,
    finding: Finding,
    draft: VerdictDraft | None = None,
) -> Verdict:
    """The record of a finding; without a draft, of a candidate that never reached a device."""
    draft = draft or VerdictDraft(run_s=prepared.run_s)
    known = {name: value for name, value in vars(draft).items() if name in Verdict.model_fields}
    if finding.reason is not Reason.OK:
        known["timing"] = None
    return Verdict(
        **known
        | {
            "candidate_id": candidate.candidate_id,
            "task_id": task.task_id,
            "language": candidate.language,
            "status": finding.reason.status,
            "reason": finding.reason,
            "detail": one_line(finding.detail),
            "log_tail": (finding.log or draft.log)[-LOG_BYTES:],
            "flags": tuple(dict.fromkeys((*prepared.flags, *draft.flags))),
            "build_tier": draft.late_tier or prepared.tier,
            "build_cached": prepared.cached,
            "build_s": prepared.seconds,
        }
    )


def no_code_verdict(task: KernelTask, candidate: Candidate) -> Verdict:
    reason = candidate.parse_reason or Reason.NO_CODE_BLOCK
    finding = Finding(reason=reason, detail=NO_MODULE)
    return verdict_of(task, candidate, Prepared(candidate_id=candidate.candidate_id), finding)
