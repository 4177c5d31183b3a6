"""Requests, read: which task, which candidate, and the key of its verdict."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol
from uuid import uuid4

from kernels_eval.config import EvalConfig
from kernels_eval.devices import conditions
from kernels_eval.errors import UsageError
from kernels_eval.languages import languages_of
from kernels_eval.parent.draft import no_code_verdict
from kernels_eval.records import Candidate, KernelTask, Language, Reason, stable_hash
from kernels_eval.service.queue import Submission
from kernels_eval.service.schema import EvaluationRequest
from kernels_eval.versions import PROTOCOL_VERSION


class Parsed(Protocol):
    """A response taken apart: code, or the reason why there is none."""

    @property
    def code(self) -> str | None: ...
    @property
    def parse_reason(self) -> Reason | None: ...


@dataclass
class Intake:
    """Reads requests. `language` is what a source is judged as that shows none, and says which
    languages are judged: those of its device. `parse` reads responses."""

    language: Language
    config: EvalConfig
    tasks: Mapping[str, KernelTask]
    parse: Callable[[str], Parsed] | None = None

    def __post_init__(self) -> None:
        """Raises DeviceError where the language's device is missing."""
        measured = conditions(self.language)
        self.device = measured.device
        self.languages = [each for each in Language if each.needs_gpu == self.language.needs_gpu]
        self._protocol = [self.config.model_dump(mode="json"), measured.model_dump(mode="json")]

    def key(self, task: KernelTask, candidate: Candidate) -> str:
        """The identity of a verdict: hash(task, language, parsed code, protocol and its version,
        device, driver, CUDA, torch). Raises UsageError where the language is not judged here."""
        if candidate.language not in self.languages:
            raise UsageError(
                f"{candidate.language} candidates are not judged here, only"
                f" {', '.join(self.languages)}",
                "ask a service on a machine with that device, or give another language",
            )
        asked = [task.task_id, task.code, task.entry_point, task.init_form]
        given = [candidate.language, candidate.code, candidate.parse_reason]
        return stable_hash([asked, given, self._protocol, PROTOCOL_VERSION])

    def read(self, request: EvaluationRequest) -> Submission:
        """Raises UsageError where the task is unknown, the language is not judged here, or there is
        nothing to parse a response with."""
        task = self._task(request)
        code, reason = request.code, None
        if request.response is not None:
            if self.parse is None:
                raise UsageError("this service parses no responses", "send `code`")
            found = self.parse(request.response)
            code, reason = found.code, found.parse_reason
        language = request.language
        if request.solution and request.definition:
            with _usable(request.solution.name):
                code = request.solution.code(request.definition, request.workload)
                language = language or request.solution.language
        if language is None:
            shown = languages_of(code or "")
            judged = (each for each in shown if each in self.languages)
            language = next(judged, next(iter(shown), self.language))
        candidate = Candidate(
            candidate_id="",
            task_id=task.task_id,
            language=language,
            generator="service",
            code=code,
            parse_reason=reason,
        )
        candidate = candidate.model_copy(update={"candidate_id": self.key(task, candidate)})
        # a field that older clients did not have changes no digest of theirs
        later = {"id"} if request.solution else {"id", "solution"}
        return Submission(
            id=request.id or uuid4().hex,
            digest=stable_hash(request.model_dump(mode="json", exclude=later)),
            task=task,
            candidate=candidate,
            priority=request.priority,
            client=request.client,
            deadline_s=request.deadline_s,
            settled=no_code_verdict(task, candidate) if code is None else None,
        )

    def _task(self, request: EvaluationRequest) -> KernelTask:
        if request.task:
            return request.task.task()
        if request.definition:
            with _usable(f"definition {request.definition.name!r}"):
                return request.definition.task(request.workload)
        if found := self.tasks.get(request.task_id or ""):
            return found
        raise UsageError(
            f"task {request.task_id!r} is not one of the {len(self.tasks)} of this service",
            "send the task's source, or start the service with --tasks",
        )


@contextmanager
def _usable(name: str) -> Iterator[None]:
    """Turn what cannot be taken over of another suite's record into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(f"{name}: {error}") from error
