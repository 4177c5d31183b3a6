"""KernelGYM's `/evaluate` and `/workflow/submit`, in its schema (hkust-nlp/KernelGYM, commit
3a84417, `kernelgym/server/api/models.py`), and what its trainer asks besides (`/status`,
`/results`): its trainers can be pointed at this service.

What differs: the verdict is ours, so numbers of trials, tolerances, devices and `timeout` of a
request are ignored, as is `force_refresh`; every rejected candidate is a `decoy_kernel`; coverage
is the share of kernel time that the verifier attributes to the candidate; only the workflow
`kernelbench` is answered. A machine fault is 503, which its client repeats.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

from fastapi import HTTPException
from pydantic import BaseModel, Field, model_validator

from kernels_eval.records import Language, Reason, Status, Verdict, stable_hash
from kernels_eval.service.schema import Evaluation, EvaluationRequest, Json, State, TaskSource

PRIORITIES = {"low": -1, "normal": 0, "high": 1}
CODES = {
    Status.COMPILE_ERROR: "COMPILATION_ERROR",
    Status.NO_CODE: "VALIDATION_ERROR",
    Status.RUNTIME_ERROR: "RUNTIME_ERROR",
    Status.TIMEOUT: "TIMEOUT_ERROR",
    Status.INCORRECT: "CORRECTNESS_ERROR",
    Status.REJECTED: "CORRECTNESS_ERROR",
    Status.TASK_ERROR: "SYSTEM_ERROR",
}
Source = Annotated[str, Field(min_length=10, max_length=100_000)]
TaskId = Annotated[str, Field(min_length=1, max_length=100)]


class KernelGymRequest(BaseModel):
    """KernelGYM's EvaluationRequest, as far as it is used here."""

    task_id: TaskId
    reference_code: Source
    kernel_code: Source
    backend: Language = Language("triton")
    priority: Literal["low", "normal", "high"] = "normal"
    entry_point: str = Field(default="Model", pattern=r"^[A-Za-z_][A-Za-z0-9_]{0,99}$")
    workflow: Literal["kernelbench"] = "kernelbench"

    def ours(self) -> EvaluationRequest:
        alias = "" if self.entry_point == "Model" else f"\nModelNew = {self.entry_point}New\n"
        return EvaluationRequest(
            task=TaskSource(code=self.reference_code, entry_point=self.entry_point),
            code=self.kernel_code + alias,
            language=self.backend,
            priority=PRIORITIES[self.priority],
            client="kernelgym",
            id=identity(self.task_id),
        )


class WorkflowRequest(BaseModel):
    """KernelGYM's WorkflowRequest; its `task_id`, where it is there, is that of the payload."""

    workflow: Literal["kernelbench"] = "kernelbench"
    payload: KernelGymRequest

    @model_validator(mode="before")
    @classmethod
    def _one_task_id(cls, asked: Any) -> Any:
        match asked:
            case {"task_id": str(task_id), "payload": {**payload}}:
                return asked | {"payload": payload | {"task_id": task_id}}
        return asked


def identity(task_id: str) -> str:
    return f"kernelgym-{stable_hash(task_id)}"


def response(task_id: str, found: Evaluation) -> Json:
    """An evaluation as KernelGYM's EvaluationResponse. Raises HTTPException where the machine
    failed."""
    if found.state is State.FAILED or not found.state.final:
        raise HTTPException(503, found.error or "the service is stopping", {"Retry-After": "5"})
    times = {
        "submitted_at": _iso(found.submitted_s),
        "completed_at": _iso(found.finished_s or found.submitted_s),
        "processing_time": (found.finished_s or found.submitted_s) - found.submitted_s,
    }
    if found.verdict is None:
        status = "timeout" if found.state is State.EXPIRED else "failed"
        return {"task_id": task_id, "status": status, "error_message": found.state.value} | times
    return {"task_id": task_id} | _of_verdict(found.verdict) | times


def status(task_id: str, found: Evaluation) -> str:
    """KernelGYM's TaskStatus."""
    if found.state.final and found.state is not State.FAILED:
        return str(response(task_id, found)["status"])
    return {State.QUEUED: "pending", State.RUNNING: "processing"}.get(found.state, "failed")


def _of_verdict(verdict: Verdict) -> Json:
    compiled = verdict.status not in (Status.COMPILE_ERROR, Status.NO_CODE, Status.TASK_ERROR)
    compiled &= verdict.reason is not Reason.BUILD
    timing = verdict.timing
    total_us = 1000 * timing.candidate_ms if timing else 0.0
    message = f"{verdict.status.value} ({verdict.reason.value}): {verdict.detail}"
    return {
        "status": "completed" if compiled else "failed",
        "compiled": compiled,
        "correctness": verdict.correct_custom,
        "decoy_kernel": verdict.status is Status.REJECTED,
        "reference_runtime": timing.reference_ms if timing else None,
        "kernel_runtime": timing.candidate_ms if timing else None,
        "speedup": verdict.speedup,
        "error_message": None if verdict.correct_custom else message,
        "error_code": CODES.get(verdict.status),
        "metadata": {
            "status": verdict.status,
            "reason": verdict.reason,
            "device": verdict.device,
            "num_custom_kernels": len(verdict.custom_kernels),
            "num_total_kernels": len(verdict.custom_kernels) + len(verdict.library_calls),
            "custom_kernel_cuda_time_in_profiling_us": total_us
            * (verdict.custom_kernel_time_share or 0.0),
            "total_kernel_run_time_in_profiling_us": total_us,
        },
    }


def workflow_response(found: Json) -> Json:
    """The same as KernelGYM's WorkflowResponse."""
    told = {name: found.get(name) for name in ("task_id", "status", "error_message", "error_code")}
    told |= {name: found.get(name) for name in ("submitted_at", "completed_at")}
    return told | {"result": {name: value for name, value in found.items() if name != "status"}}


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()
