"""A verdict as an Evaluation of FlashInfer-Bench and SOL-ExecBench, and back. Unmeasured numbers
are NaN there, never 0; evaluations of other harnesses have a status here, and no reason."""

from __future__ import annotations

import re
from collections.abc import Mapping

from pydantic import NonNegativeFloat, field_validator

from kernels_eval.exchange.flashinfer import Finite, Suite
from kernels_eval.records import Reason, Row, Status, Verdict
from kernels_eval.tables import table_beside

_STATUSES, _ONLY_OF_SOL, _TIMES = table_beside(__file__).values()
_OURS = {theirs: ours for ours, theirs in reversed(_STATUSES.items())}
_SAID = re.compile(r"(\w+) \((\w+)\)")


class Performance(Finite):
    """Times of a kernel that passed; 0 stands for none."""

    latency_ms: NonNegativeFloat | None = None
    reference_latency_ms: NonNegativeFloat | None = None
    speedup_factor: NonNegativeFloat | None = None


class Environment(Finite):
    hardware: str | None = None


class Evaluation(Finite):
    status: str
    log: str | None = None
    environment: Environment | None = None
    performance: Performance | None = None

    @field_validator("status")
    @classmethod
    def _known(cls, status: str) -> str:
        if status not in _OURS:
            raise ValueError(f"{status[:40]!r} is no status of an evaluation")
        return status


def evaluation_of(
    verdict: Verdict, suite: Suite, timestamp: str, libs: Mapping[str, str]
) -> dict[str, object] | None:
    """A verdict as their Evaluation, in words in its log. None without a status of theirs, or for
    an untimed correct kernel.
    """
    status = _STATUSES.get(verdict.reason, _STATUSES.get(verdict.status))
    if suite == "flashinfer":
        status = _ONLY_OF_SOL.get(status, status)
    timing, measured = verdict.timing, None
    if not status or (status == "PASSED" and timing is None):
        return None
    if status in ("PASSED", "INCORRECT_NUMERICAL"):
        known = verdict.correctness.model_dump(mode="json") if verdict.correctness else {}
        error = known.get("max_error")
        measured = {
            "max_relative_error": "NaN" if error is None else error,
            "max_absolute_error": "NaN",
            "extra": known,
        }
    said = f"{verdict.status.value} ({verdict.reason.value}): {verdict.detail}"
    return {
        "status": status,
        "environment": {"hardware": verdict.device or "none", "libs": dict(libs)},
        "timestamp": timestamp,
        "log": f"{said}\n{verdict.log_tail}".strip(),
        "correctness": measured,
        "performance": timing and {name: getattr(timing, x) for x, name in _TIMES.items()},
    }


def verdict_row(evaluation: Row) -> dict[str, object]:
    """An Evaluation as a verdict's `status`, `reason` (null for another harness), `outputs_match`,
    `timing` (without intervals), `device`, `detail`. Raises ValueError.
    """
    told = Evaluation.model_validate(evaluation, extra="ignore")
    key, log = _OURS[told.status], told.log or ""
    reason = Reason(key) if key in set(Reason) else None
    if (said := _SAID.match(log)) and said[2] in set(Reason) and Reason(said[2]).status == said[1]:
        reason = Reason(said[2])
    status = reason.status if reason else Status(key)
    return {
        "status": status.value,
        "reason": reason and reason.value,
        "outputs_match": status is Status.CORRECT or None,
        "timing": {
            ours: getattr(told.performance, name, None) or None for ours, name in _TIMES.items()
        },
        "device": (told.environment and told.environment.hardware) or "",
        "detail": log.partition("\n")[0][:500],
    }
