"""The verifier over HTTP: from a request to its task, candidate and key, and those who wait for it.

Guarantees: a request answered with 202 is on disk; a refused one changes nothing. On SIGTERM what
is under way may finish, and the journal keeps the rest.
"""

from __future__ import annotations

import asyncio
import signal
import sqlite3
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Annotated, Any, Protocol
from uuid import uuid4

import uvicorn
from fastapi import APIRouter, Depends, FastAPI, HTTPException, Query, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse, RedirectResponse
from fastapi.sse import EventSourceResponse, ServerSentEvent
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from pydantic import Field, model_validator

from kernels_eval.config import EvalConfig
from kernels_eval.devices import conditions
from kernels_eval.errors import UsageError
from kernels_eval.judge.messages import no_code_verdict
from kernels_eval.languages import languages_of
from kernels_eval.records import Candidate, KernelTask, Language, Reason, Record, stable_hash
from kernels_eval.service.engine import Engine
from kernels_eval.service.guard import StrictRoute, protect
from kernels_eval.service.page import page_of
from kernels_eval.service.queue import ConflictError, Evaluations, QueueFullError, Submission
from kernels_eval.service.schema import (
    MOST_REQUESTS,
    Accepted,
    Evaluation,
    EvaluationRequest,
    Identifier,
)
from kernels_eval.versions import PROTOCOL_VERSION

LONGEST_WAIT_S = 60.0
RETRY_S = {"Retry-After": "2"}
EXPIRE_EVERY_S = 0.25
BUCKETS_S = (0.1, 0.5, 1, 2, 5, 10, 20, 60, 120, 300, 600, 1800, 3600)


class Asked(Record):
    """Requests taken over together, all or none. A request alone is a batch of one."""

    requests: Annotated[list[EvaluationRequest], Field(min_length=1, max_length=MOST_REQUESTS)]

    @model_validator(mode="before")
    @classmethod
    def _one_is_a_batch(cls, body: object) -> object:
        return {"requests": [body]} if isinstance(body, dict) and "requests" not in body else body


class Service:
    """What the endpoints share. `drain_s`: seconds that what is under way may take at the end."""

    def __init__(
        self,
        intake: Intake,
        journal: Path,
        options: Mapping[str, object],
        limit: int,
        drain_s: float,
    ) -> None:
        """Raises UsageError where the journal cannot be used."""
        self.intake, self.drain_s, self.draining = intake, drain_s, False
        self._loop: asyncio.AbstractEventLoop | None = None
        self._waiting: dict[str, asyncio.Future[Evaluation | None]] = {}
        self._writer = ThreadPoolExecutor(1)
        """Reads and keeps requests: in a thread each they would wait for one another."""
        self.evaluations = Evaluations(journal, limit, self._changed)
        judged = {"language": intake.language, "config": intake.config}
        self.engine = Engine(self.evaluations, {**options, **judged})
        self.metrics = CollectorRegistry()
        self._ended = Counter(
            "concur_evaluations", "Final ones", ["state", "status"], registry=self.metrics
        )
        self._seconds = Histogram(
            "concur_evaluation_seconds",
            "From request to final state",
            buckets=BUCKETS_S,
            registry=self.metrics,
        )
        for name in ("queued", "running", "workers", "machine_faults"):
            gauge = Gauge(f"concur_{name}", f"`{name}` of /health", registry=self.metrics)
            gauge.set_function(partial(lambda name: float(self.health()[name]), name))

    @asynccontextmanager
    async def running(self, _: FastAPI) -> AsyncIterator[None]:
        self.evaluations.resume(self.intake.key)
        self.engine.start()
        expiry = asyncio.create_task(self._expire())
        try:
            yield
        finally:
            self.stop()
            expiry.cancel()
            await asyncio.to_thread(self.engine.end, self.drain_s)
            self._writer.shutdown()
            self.evaluations.close()

    async def _expire(self) -> None:
        while True:
            await asyncio.sleep(EXPIRE_EVERY_S)
            with suppress(sqlite3.Error):  # a full disk: the next round tries again
                await asyncio.to_thread(self.evaluations.expire)

    def stop(self) -> None:
        """Accept no more requests, and answer all that wait. May be called by a signal's
        handler."""
        self.draining = True
        if self._loop:
            self._loop.call_soon_threadsafe(self._wake_all)

    def _wake_all(self) -> None:
        for identity in list(self._waiting):
            self._wake(identity, None)

    def _changed(self, found: Evaluation) -> None:
        self._ended.labels(found.state, found.verdict.status if found.verdict else "").inc()
        self._seconds.observe((found.finished_s or found.submitted_s) - found.submitted_s)
        if self._loop:
            self._loop.call_soon_threadsafe(self._wake, found.id, found)

    def _wake(self, identity: str, found: Evaluation | None) -> None:
        if waiting := self._waiting.pop(identity, None):
            waiting.set_result(found)

    async def accept(self, asked: Asked) -> list[Evaluation]:
        """Take requests over. Raises HTTPException where they are not."""
        if self.draining:
            raise HTTPException(503, "the service is stopping: ask its next start", RETRY_S)
        loop = asyncio.get_running_loop()
        try:
            kept = await loop.run_in_executor(self._writer, self._keep, asked.requests)
            return [self._noted(each) for each in kept]
        except QueueFullError as error:
            raise HTTPException(429, str(error), RETRY_S) from error
        except ConflictError as error:
            raise HTTPException(409, str(error)) from error
        except UsageError as error:
            raise HTTPException(422, str(error)) from error

    def _keep(self, requests: list[EvaluationRequest]) -> list[Evaluation]:
        submissions = [self.intake.read(each) for each in requests]
        return self.evaluations.submit(submissions)

    async def final(self, identity: str, wait_s: float | None) -> Evaluation:
        """An evaluation when it is final, or as it is after `wait_s` seconds, or when the service
        stops. Raises HTTPException where there is none."""
        if wait_s == 0 or self.draining:
            return await self._found(identity)
        self._loop = asyncio.get_running_loop()
        # before it is read: it may end in between
        waiting = self._waiting.setdefault(identity, self._loop.create_future())
        found = await self._found(identity)
        if found.state.final:
            self._wake(identity, found)
            return found
        await asyncio.wait([waiting], timeout=wait_s)
        return (waiting.result() if waiting.done() else None) or await self._found(identity)

    async def _found(self, identity: str) -> Evaluation:
        """In a thread: while another one writes, requests are answered."""
        try:
            return self._noted(await asyncio.to_thread(self.evaluations.get, identity))
        except KeyError as error:
            self._wake(identity, None)
            raise HTTPException(404, f"there is no evaluation {identity}") from error

    def _noted(self, found: Evaluation) -> Evaluation:
        """A queued one with what it waits for, while no worker judges."""
        if found.state.final or not self.engine.waits_for:
            return found
        return found.model_copy(update={"note": self.engine.waits_for})

    def health(self) -> dict[str, Any]:
        engine = self.engine
        status = "ok" if engine.workers else "starting"
        return {
            "status": "stopping" if self.draining else "degraded" if engine.fault else status,
            "languages": self.intake.languages,
            "device": self.intake.device,
            "tasks": len(self.intake.tasks),
            "workers": engine.workers,
            "waits_for": engine.waits_for,
            "queued": self.evaluations.queued,
            "running": self.evaluations.running,
            "machine_faults": engine.faults,
            "last_fault": engine.fault,
            "cautions": engine.cautions,
        }


async def _no_journal(_: Request, error: Exception) -> JSONResponse:
    return JSONResponse({"detail": f"the journal cannot be used: {error}"}, 503, RETRY_S)


async def _service(request: Request) -> Service:
    found: Service = request.app.state.service
    return found


Shared = Annotated[Service, Depends(_service)]


async def _taken(asked: Asked, service: Shared) -> list[Evaluation]:
    return await service.accept(asked)


Taken = Annotated[list[Evaluation], Depends(_taken)]
router = APIRouter(route_class=StrictRoute)


@router.post("/v1/evaluate", status_code=202)
async def evaluate(asked: Asked, service: Shared) -> Accepted:
    """Submit one request, or a batch of them."""
    return Accepted(evaluations=await service.accept(asked))


@router.post("/v1/evaluate/events", response_class=EventSourceResponse)
async def events(taken: Taken, service: Shared) -> AsyncIterator[ServerSentEvent]:
    """Submit requests, and get each evaluation as an event when it is final. The same call with the
    same ids continues a broken stream."""
    waiting = [asyncio.create_task(service.final(each.id, None)) for each in taken]
    try:
        for coming in asyncio.as_completed(waiting):
            found = await coming
            if found.state.final:
                yield ServerSentEvent(data=found, event="evaluation", id=found.id)
    finally:
        for task in waiting:
            task.cancel()


@router.get("/v1/results/{identity}")
async def result(
    identity: Identifier,
    service: Shared,
    wait_s: Annotated[float, Query(ge=0, le=LONGEST_WAIT_S)] = 0,
) -> Evaluation:
    """An evaluation, when it is final or after `wait_s` seconds."""
    return await service.final(identity, wait_s)


@router.get("/v1/tasks")
def tasks(service: Shared) -> list[KernelTask]:
    """The tasks that requests may name."""
    return list(service.intake.tasks.values())


@router.delete("/v1/results/{identity}")
async def cancel(identity: Identifier, service: Shared) -> Evaluation:
    """Give an evaluation up; one that is final stays as it is."""
    await asyncio.to_thread(service.evaluations.cancel, identity)
    return await service.final(identity, 0)


@router.get("/health")
def health(service: Shared) -> JSONResponse:
    """How the service is; 503 before workers judge, and while it stops."""
    found = service.health()
    if found["status"] in ("starting", "stopping"):
        return JSONResponse(found, 503, RETRY_S)
    return JSONResponse(found)


@router.get("/", include_in_schema=False)
async def home() -> RedirectResponse:
    return RedirectResponse("docs")


@router.get("/docs", include_in_schema=False)
def docs(request: Request, service: Shared) -> HTMLResponse:
    health = service.health()
    has = f"has {health['workers']} workers and builders"
    state = f"The service is {health['status']}: it {health['waits_for'] or has}"
    return HTMLResponse(page_of(request.app.openapi(), state))


@router.get("/metrics")
def metrics(service: Shared) -> Response:
    """Counters for Prometheus."""
    return Response(generate_latest(service.metrics), media_type="text/plain; version=0.0.4")


def create_app(service: Service, token: str | None = None) -> FastAPI:
    """The application; with a token it asks for it, without one it answers to the names of this
    machine alone."""
    app = FastAPI(
        title="concur serve",
        lifespan=service.running,
        routes=router.routes,
        docs_url=None,  # FastAPI's pages load scripts from elsewhere
        redoc_url=None,
    )
    app.state.service = service
    app.add_exception_handler(sqlite3.Error, _no_journal)
    protect(app, token)
    return app


def run(service: Service, host: str, port: int, token: str | None) -> None:
    """Serve until SIGTERM or SIGINT."""

    class Server(uvicorn.Server):
        def handle_exit(self, sig: int, frame: FrameType | None) -> None:
            service.stop()
            super().handle_exit(sig, frame)

    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: None)  # uvicorn raises it again when it has ended
    config = uvicorn.Config(
        create_app(service, token),
        host=host,
        port=port,
        ws="none",
        access_log=False,
        log_level="warning",
        server_header=False,
        limit_concurrency=4096,
        timeout_graceful_shutdown=5,
    )
    Server(config).run()


class Parsed(Protocol):
    """A parsed response: code, or the reason why there is none."""

    @property
    def code(self) -> str | None: ...
    @property
    def parse_reason(self) -> Reason | None: ...


class Parser(Protocol):
    """Reads a response; `finish_reason` is "length" where it was cut off."""

    def __call__(self, text: str, *, finish_reason: str | None = None) -> Parsed: ...


@dataclass
class Intake:
    """Reads requests. `language`: the default, whose device decides which are judged; `parse` reads
    responses.
    """

    language: Language
    config: EvalConfig
    tasks: Mapping[str, KernelTask]
    parse: Parser | None = None

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
            found = self.parse(request.response, finish_reason=request.finish_reason)
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
        return Submission(
            id=request.id or uuid4().hex,
            digest=stable_hash(request.model_dump(mode="json", exclude={"id"})),
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
