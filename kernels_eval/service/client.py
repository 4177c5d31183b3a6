"""Clients of `concur serve`: an asynchronous and a blocking one.

An id has every request judged once; transmission faults (no connection, 429, 502 to 504) are
retried until `timeout_s`, verdicts never. Raises ServiceError where the service fails, UsageError
where it refuses (other 4xx). A `failed` evaluation is an answer without verdict.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from functools import cached_property
from typing import TypeVar
from urllib.parse import quote
from uuid import uuid4

import anyio
import httpx
from anyio.from_thread import BlockingPortal, start_blocking_portal
from pydantic import BaseModel, HttpUrl, RootModel, ValidationError

from kernels_eval.errors import ServiceError, UsageError
from kernels_eval.records import KernelTask
from kernels_eval.service.schema import MOST_REQUESTS, Accepted, Evaluation, EvaluationRequest, Json

POLL_S = 30.0
"""Seconds that the service may hold a question for a result."""
SILENT_S = 90.0
"""Seconds that it may send nothing: longer than it holds any question."""
SLOWEST_S = 8.0
"""Longest pause between two attempts, where the service names none."""
BATCH_LETTERS = 4_000_000
"""Requests travel together up to this size, and alone above it."""
REPEATED = (429, 502, 503, 504)
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)


class _Tasks(RootModel[list[KernelTask]]):
    """The answer of /v1/tasks."""


class _NoRoomError(Exception):
    """The queue has no room for these requests together."""


class AsyncVerifierClient:
    """Calls the service, from one event loop. Await `close()`, or use it as a context manager."""

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 3600.0) -> None:
        """`timeout_s` bounds each method's call, retries included. Raises UsageError for an
        unusable address or token.
        """
        try:
            HttpUrl(url)
        except ValidationError as error:
            raise UsageError(
                f"{url!r} is no address of a service: {error.errors()[0]['msg']}",
                "give one such as http://127.0.0.1:8700",
            ) from error
        if token and not (token.isascii() and token.isprintable()):
            raise UsageError("no header can hold this token", "give that of the service")
        self.url, self.timeout_s = url, timeout_s
        self.headers = {"Content-Type": "application/json"}
        if token:
            self.headers["Authorization"] = f"Bearer {token}"
        self.transport: httpx.AsyncBaseTransport | None = None
        """What carries requests; by default HTTP."""

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        patience = httpx.Timeout(
            min(SILENT_S, self.timeout_s), connect=min(10.0, self.timeout_s), pool=None
        )
        # Each that waits for a result holds a connection. Few are kept idle: httpcore looks
        # through all of them, for each of them that is idle, at each request.
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=20)
        return httpx.AsyncClient(
            base_url=self.url,
            headers=self.headers,
            timeout=patience,
            limits=limits,
            transport=self.transport,
        )

    # -- what is asked -----------------------------------------------------------------------------

    async def evaluate(self, request: EvaluationRequest) -> Evaluation:
        return (await self.evaluate_batch([request]))[0]

    async def evaluate_batch(self, requests: Sequence[EvaluationRequest]) -> list[Evaluation]:
        """The final evaluations, in the order of the requests."""
        until = self._until()
        found = await self._submit(requests, until)
        return [await self._final(evaluation, until) for evaluation in found]

    async def submit(self, request: EvaluationRequest) -> Evaluation:
        """Submit a request; returns once it is on the service's disk."""
        return (await self._submit([request], self._until()))[0]

    async def result(self, identity: str, wait_s: float = 0.0) -> Evaluation:
        """An evaluation as it is, or final where it becomes so within `wait_s` (at most 60)
        seconds.
        """
        return await self._result(identity, wait_s, self._until())

    async def cancel(self, identity: str) -> Evaluation:
        path = f"/v1/results/{quote(identity, safe='')}"
        return await self._send(self._until(), "DELETE", path, Evaluation)

    async def tasks(self) -> list[KernelTask]:
        """The tasks that requests may name."""
        return (await self._send(self._until(), "GET", "/v1/tasks", _Tasks)).root

    async def health(self) -> Json:
        """Ask for the service's health once: `status` "ok". Raises ServiceError."""
        answer = await self._answer("GET", "/health")
        with suppress(ValueError):
            found: Json = answer.json()
            if "status" in found:
                return found
        raise ServiceError(f"the service does not say how it is: {_detail(answer)}")

    # -- how it is asked ---------------------------------------------------------------------------

    async def _submit(
        self, requests: Sequence[EvaluationRequest], until: float
    ) -> list[Evaluation]:
        """Halve batches that find no room: one may be larger than the whole queue."""
        found: list[Evaluation] = []
        waiting = list(_batches(requests))
        while waiting:
            batch = waiting.pop(0)
            content = f'{{"requests": [{", ".join(batch)}]}}'
            half = len(batch) // 2
            try:
                answer = await self._send(
                    until, "POST", "/v1/evaluate", Accepted, content, many=half > 0
                )
                found += answer.evaluations
            except _NoRoomError:
                waiting[:0] = batch[:half], batch[half:]
        return found

    async def _final(self, evaluation: Evaluation, until: float) -> Evaluation:
        while not evaluation.state.final:
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise ServiceError(
                    f"evaluation {evaluation.id} is {evaluation.state} after {self.timeout_s:g} s",
                    "raise timeout_s, or give requests a deadline_s",
                )
            evaluation = await self._result(evaluation.id, min(POLL_S, left_s), until)
        return evaluation

    async def _result(self, identity: str, wait_s: float, until: float) -> Evaluation:
        path = f"/v1/results/{quote(identity, safe='')}?wait_s={wait_s:g}"
        return await self._send(until, "GET", path, Evaluation)

    async def _send(
        self,
        until: float,
        method: str,
        path: str,
        kind: type[M],
        content: str | None = None,
        many: bool = False,
    ) -> M:
        """The answer, retried until `until` (time.monotonic). Raises _NoRoomError."""
        pause_s = 0.25
        while True:
            answer = await self._answer(method, path, content)
            if answer.is_success:
                return _read(answer, kind, f"{method} {path}")
            why = _detail(answer)
            if many and answer.status_code == 429:
                raise _NoRoomError
            if answer.status_code not in REPEATED:
                fault = UsageError if answer.is_client_error else ServiceError
                raise fault(f"the service refuses {method} {path}: {why}")
            wait_s = max(pause_s, _seconds(answer.headers.get("Retry-After", "")))
            if time.monotonic() + wait_s > until:
                raise ServiceError(
                    f"no answer to {method} {path} within {self.timeout_s:g} s: {why}",
                    "is `concur serve` running at this address? GET /health says how it is",
                )
            await anyio.sleep(wait_s)
            pause_s = min(2 * pause_s, SLOWEST_S)

    async def _answer(self, method: str, path: str, content: str | None = None) -> httpx.Response:
        try:
            return await self._http.request(method, path, content=content)
        except httpx.TransportError as error:
            return httpx.Response(503, json={"detail": f"{type(error).__name__}: {error}"})

    def _until(self) -> float:
        return time.monotonic() + self.timeout_s

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncVerifierClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class VerifierClient:
    """`AsyncVerifierClient` for blocking code and several threads. Close it, or use it as a context
    manager.
    """

    def __init__(self, url: str, token: str | None = None, timeout_s: float = 3600.0) -> None:
        self.calls = AsyncVerifierClient(url, token, timeout_s)
        self._running = ExitStack()
        self._portal: BlockingPortal | None = None
        self._starting = threading.Lock()

    def _begin(self, method: Callable[..., Awaitable[T]], *arguments: object) -> Future[T]:
        with self._starting:
            if self._portal is None:
                self._portal = self._running.enter_context(start_blocking_portal())
        return self._portal.start_task_soon(method, *arguments)

    def _call(self, method: Callable[..., Awaitable[T]], *arguments: object) -> T:
        return self._begin(method, *arguments).result()

    def evaluate(self, request: EvaluationRequest) -> Evaluation:
        return self._call(self.calls.evaluate, request)

    def begin_batch(self, requests: Sequence[EvaluationRequest]) -> Future[list[Evaluation]]:
        """Begin `evaluate_batch`, for callers that wait in an event loop of their own."""
        return self._begin(self.calls.evaluate_batch, requests)

    def evaluate_batch(self, requests: Sequence[EvaluationRequest]) -> list[Evaluation]:
        return self._call(self.calls.evaluate_batch, requests)

    def submit(self, request: EvaluationRequest) -> Evaluation:
        return self._call(self.calls.submit, request)

    def result(self, identity: str, wait_s: float = 0.0) -> Evaluation:
        return self._call(self.calls.result, identity, wait_s)

    def cancel(self, identity: str) -> Evaluation:
        return self._call(self.calls.cancel, identity)

    def health(self) -> Json:
        return self._call(self.calls.health)

    def close(self) -> None:
        if self._portal:
            self._call(self.calls.close)
            self._running.close()
            self._portal = None

    def __enter__(self) -> VerifierClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _batches(requests: Sequence[EvaluationRequest]) -> Iterator[list[str]]:
    batch: list[str] = []
    letters = 0
    for request in requests:
        named = request if request.id else request.model_copy(update={"id": uuid4().hex})
        text = named.model_dump_json(exclude_unset=True)
        letters += len(text)
        if batch and (letters > BATCH_LETTERS or len(batch) == MOST_REQUESTS):
            yield batch
            batch, letters = [], len(text)
        batch.append(text)
    if batch:
        yield batch


def _read(answer: httpx.Response, kind: type[M], question: str) -> M:
    try:
        return kind.model_validate_json(answer.content)
    except ValidationError as error:
        raise ServiceError(
            f"no answer of `concur serve` to {question}: {_detail(answer)}",
            "is it the service, of this version, that has this address?",
        ) from error


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, LookupError, TypeError):
        return f"{answer.status_code} {answer.text[:200]}"


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0
