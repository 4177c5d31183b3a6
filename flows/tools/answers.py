"""What the tools of `concur mcp` answer. Their JSON schemas are made from these classes.

Guarantees: text by candidates is bounded and fenced as data, and a rejected kernel is told which
rule it broke, never how that was found (`tasks.synthesis.refine`).
"""

from __future__ import annotations

from kernels_eval.flags import meaning_of
from kernels_eval.profile.bottleneck import Finding
from kernels_eval.records import Language, Reason, Record, Status, Verdict
from tasks.synthesis.refine import WORDS, quoted, said_of


class TaskEntry(Record):
    """A task of the service."""

    task_id: str
    name: str
    code: str | None = None
    """its program, where sources were asked for"""


class TaskList(Record):
    """A page of the tasks that match; `total` counts all of them."""

    total: int
    tasks: list[TaskEntry]


class Verification(Record):
    """The verdict on a kernel: whether it may be used, its times, and what to do next."""

    evaluation_id: str
    """for explain_verdict"""
    correct: bool
    status: Status
    reason: Reason
    language: Language
    feedback: str
    speedup: float | None = None
    """reference time / kernel time"""
    speedup_lower: float | None = None
    """lower bound of its 95 % interval"""
    reference_ms: float | None = None
    candidate_ms: float | None = None


class Explanation(Record):
    """Why a verdict is what it is."""

    status: Status
    reason: Reason
    rule: str
    """what every kernel must keep to, where this one did not"""
    feedback: str
    flags: dict[str, str] = {}
    """flag -> what it means for the kernel's user; of kernels that were not rejected"""
    custom_kernels: list[str] = []
    """the kernels that did the work"""
    device: str = ""


class Profiled(Record):
    """Where the time of a correct kernel goes. `problem` says why there is no profile."""

    verification: Verification
    bottlenecks: list[Finding] = []
    """the most decisive first"""
    kernels_us: dict[str, float] = {}
    """own kernel -> microseconds of one call"""
    operators_us: dict[str, float] = {}
    """PyTorch operator -> microseconds of one call"""
    least_ms: float | None = None
    """what the task's bytes and operations take at least (roofline model)"""
    speed_of_light: float | None = None
    """least_ms / the kernel's time"""
    problem: str | None = None


class Variant(Record):
    """A kernel with other numbers in its source."""

    change: str
    verification: Verification


class Searched(Record):
    """The fastest of a kernel and its variants. The best of several measured times is optimistic:
    the gain of an independent measurement is smaller."""

    code: str
    """the fastest correct module; the given one where no variant is faster"""
    best: Verification
    original: Verification
    variants: list[Variant]
    """by falling speedup"""


def verification_of(evaluation_id: str, verdict: Verdict) -> Verification:
    timing = verdict.timing
    return Verification(
        evaluation_id=evaluation_id,
        correct=verdict.status is Status.CORRECT,
        status=verdict.status,
        reason=verdict.reason,
        language=verdict.language,
        feedback=_feedback(verdict),
        speedup=timing.speedup if timing else None,
        speedup_lower=timing.speedup_lower if timing else None,
        reference_ms=timing.reference_ms if timing else None,
        candidate_ms=timing.candidate_ms if timing else None,
    )


def explanation_of(verdict: Verdict) -> Explanation:
    known = {
        "status": verdict.status,
        "reason": verdict.reason,
        "rule": WORDS.get(verdict.reason, ""),
        "feedback": _feedback(verdict),
    }
    if verdict.status is Status.REJECTED:
        return Explanation(**known)
    return Explanation(
        **known,
        flags={flag: meaning_of(flag) for flag in verdict.flags},
        custom_kernels=list(verdict.custom_kernels),
        device=verdict.device,
    )


def _feedback(verdict: Verdict) -> str:
    if verdict.status is Status.TASK_ERROR:
        told = f"The task itself fails ({verdict.reason}): no kernel can answer it."
        return told + quoted(verdict.detail)
    return said_of(verdict)
