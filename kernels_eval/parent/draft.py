"""A verdict in the making, and the record it becomes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from kernels_eval.parent.messages import LOG_BYTES, Finding, one_line
from kernels_eval.parent.prepare import Prepared
from kernels_eval.records import (
    Candidate,
    Correctness,
    KernelTask,
    Phases,
    Reason,
    Timing,
    Verdict,
)


@dataclass
class VerdictDraft:
    """What is known of a verdict while it is reached: each step of the protocol adds its part.

    Fields with the names of `Verdict`'s become those. `late_tier` is the header tier of a build
    that a constructor asked for, `approximation` what was seen of one, `log` what a tool said of a
    candidate that passed. `on_phase` is called with the name of each phase as it begins.
    """

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

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the wall seconds spent inside to this field of Phases."""
        if self.on_phase:
            self.on_phase(name)
        started = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + time.monotonic() - started


def verdict_of(
    task: KernelTask,
    candidate: Candidate,
    prepared: Prepared,
    finding: Finding,
    draft: VerdictDraft | None = None,
) -> Verdict:
    """The record of a finding. Without a draft, of a candidate that never reached a device."""
    draft = draft or VerdictDraft()
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
            "architectures": prepared.architectures,
            "build_s": prepared.seconds,
        }
    )


def no_code_verdict(task: KernelTask, candidate: Candidate) -> Verdict:
    """The verdict of a response that holds no code, which needs no worker."""
    reason = candidate.parse_reason or Reason.NO_CODE_BLOCK
    finding = Finding(reason=reason, detail="the response holds no complete module")
    return verdict_of(task, candidate, Prepared(candidate_id=candidate.candidate_id), finding)
