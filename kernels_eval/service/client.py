"""Clients of `concur serve`: one to call, one to await.

Guarantees: every request is judged once however often its transmission is repeated, for each goes
out under an id; what is repeated, until `timeout_s` has passed, is what failed between the machines
(no connection, 429, 502 to 504), never a verdict. Raises ServiceError where the service stays away
for that long or fails, UsageError where it refuses the request (the other 4xx). An evaluation that
`failed` is an answer: its verdict is None.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from contextlib import suppress
from functools import cached_property
from typing import Any, TypeVar
from urllib.parse import quote
from uuid import uuid4

import anyio
import httpx
from pydantic import BaseModel, HttpUrl, ValidationError

from kernels_eval.errors import ServiceError, UsageError
from kernels_eval.service.schema import MOST_REQUESTS, Accepted, Evaluation, EvaluationRequest, Json

POLL_S = 30.0
"""How long the service may hold a question for a result that is not there yet."""
SILENT_S = 90.0
"""How long it may send nothing: longer than it holds any question."""
SLOWEST_S = 8.0
"""Longest pause between two attempts, where the service names none."""
BATCH_LETTERS = 4_000_000
"""Requests travel together up to this size, and alone above it."""
REPEATED = (429, 502, 503, 504)
T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
_Call = Generator[tuple[float, str, str, str | None], httpx.Response, T]
"""Yields what to send (seconds to wait before, method, path, content) and is sent the answer: one
description of each call for both clients."""


class _NoRoomError(Exception):
    """The queue has no room for these requests together."""


class _Calls:
    def __init__(self, url: str, token: str | None = None, timeout_s: float = 3600.0) -> None:
        """`timeout_s` bounds each call of a method, repetitions and waiting included. Raises
        UsageError for an address or a token that HTTP cannot use."""
        try:
            HttpUrl(url)
        except ValidationError as error:
            raise UsageError(
                f"{url!r} is no address of a service: {error.errors()[0]['msg']}",
                "give one such as http://127.0.0.1:8700",
            ) from error
        if token and not (token.isascii() and token.isprintable()):
            raise UsageError("no header can hold this token", "give that of the service")
        self.timeout_s = timeout_s
        login = {"Authorization": f"Bearer {token}"} if token else {}
        self._options: dict[str, Any] = {
            "base_url": url,
            "headers": {"Content-Type": "application/json"} | login,
            "timeout": httpx.Timeout(
                min(SILENT_S, timeout_s), connect=min(10.0, timeout_s), pool=None
            ),
            # Each that waits for a result holds a connection. Few are kept idle: httpcore looks
            # through all of them, for each of them that is idle, at each request.
            "limits": httpx.Limits(max_connections=None, max_keepalive_connections=20),
        }

    def _send(
        self,
        until: float,
        method: str,
        path: str,
        kind: type[M],
        content: str | None = None,
        many: bool = False,
    ) -> _Call[M]:
        """The answer, asked for until `until` (time.monotonic). Raises _NoRoomError where there is
        no room for `many` requests."""
        wait_s, pause_s = 0.0, 0.25
        while True:
            answer = yield wait_s, method, path, content
            if answer.is_success:
                try:
                    return kind.model_validate_json(answer.content)
                except ValidationError as error:
                    raise ServiceError(
                        f"no answer of `concur serve` to {method} {path}: {_detail(answer)}",
                        "is it the service, of this version, that has this address?",
                    ) from error
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
            pause_s = min(2 * pause_s, SLOWEST_S)

    def _submit(
        self, requests: Sequence[EvaluationRequest], until: float
    ) -> _Call[list[Evaluation]]:
        """Batches that find no room are halved, for one may be larger than the whole queue."""
        found: list[Evaluation] = []
        waiting = list(_batches(requests))
        while waiting:
            batch = waiting.pop(0)
            content, half = f'{{"requests": [{", ".join(batch)}]}}', len(batch) // 2
            try:
                answer = yield from self._send(
                    until, "POST", "/v1/evaluate", Accepted, content, many=half > 0
                )
                found += answer.evaluations
            except _NoRoomError:
                waiting[:0] = batch[:half], batch[half:]
        return found

    def _result(self, identity: str, wait_s: float, until: float) -> _Call[Evaluation]:
        path = f"/v1/results/{quote(identity, safe='')}?wait_s={wait_s:g}"
        return (yield from self._send(until, "GET", path, Evaluation))

    def _evaluate(self, requests: Sequence[EvaluationRequest]) -> _Call[list[Evaluation]]:
        until = self._until()
        found = yield from self._submit(requests, until)
        for index, evaluation in enumerate(found):
            while not evaluation.state.final:
                left_s = until - time.monotonic()
                if left_s <= 0:
                    raise ServiceError(
                        f"evaluation {evaluation.id} is {evaluation.state} after"
                        f" {self.timeout_s:g} s",
                        "raise timeout_s, or give requests a deadline_s",
                    )
                evaluation = yield from self._result(evaluation.id, min(POLL_S, left_s), until)
            found[index] = evaluation
        return found

    def _cancel(self, identity: str) -> _Call[Evaluation]:
        path = f"/v1/results/{quote(identity, safe='')}"
        return (yield from self._send(self._until(), "DELETE", path, Evaluation))

    def _health(self) -> _Call[Json]:
        answer = yield 0.0, "GET", "/health", None
        with suppress(ValueError):
            found: Json = answer.json()
            if "status" in found:
                return found
        raise ServiceError(f"the service does not say how it is: {_detail(answer)}")

    def _until(self) -> float:
        return time.monotonic() + self.timeout_s


def _batches(requests: Sequence[EvaluationRequest]) -> Iterator[list[str]]:
    """The requests as JSON, each under an id, as many together as one body may hold."""
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


def _detail(answer: httpx.Response) -> str:
    try:
        return str(answer.json()["detail"])
    except (ValueError, LookupError, TypeError):
        return f"{answer.status_code} {answer.text[:200]}"


def _seconds(text: str) -> float:
    return float(text) if text.isdecimal() else 0.0


def _gone(error: httpx.TransportError) -> httpx.Response:
    """A connection that failed, as an answer after which the question is repeated."""
    return httpx.Response(503, json={"detail": f"{type(error).__name__}: {error}"})


class VerifierClient(_Calls):
    """Calls the service; several threads may share one. Close it, or use it as a context
    manager."""

    @cached_property
    def _http(self) -> httpx.Client:
        return httpx.Client(**self._options)

    def _run(self, call: _Call[T]) -> T:
        try:
            asked = next(call)
            while True:
                wait_s, method, path, content = asked
                time.sleep(wait_s)
                try:
                    answer = self._http.request(method, path, content=content)
                except httpx.TransportError as error:
                    answer = _gone(error)
                asked = call.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    def evaluate(self, request: EvaluationRequest) -> Evaluation:
        """Hand a request over and wait until its evaluation is final."""
        return self.evaluate_batch([request])[0]

    def evaluate_batch(self, requests: Sequence[EvaluationRequest]) -> list[Evaluation]:
        """The final evaluations, in the order of the requests."""
        return self._run(self._evaluate(requests))

    def submit(self, request: EvaluationRequest) -> Evaluation:
        """Hand a request over; returns as soon as it is on the service's disk."""
        found: list[Evaluation] = self._run(self._submit([request], self._until()))
        return found[0]

    def result(self, identity: str, wait_s: float = 0.0) -> Evaluation:
        """An evaluation as it is, or as it is when it becomes final within `wait_s` (at most 60)
        seconds."""
        return self._run(self._result(identity, wait_s, self._until()))

    def cancel(self, identity: str) -> Evaluation:
        """Give an evaluation up; one that is final stays as it is."""
        return self._run(self._cancel(identity))

    def health(self) -> Json:
        """How the service is, asked once: `status` is "ok" where it works. Raises ServiceError
        where nothing answers."""
        return self._run(self._health())

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> VerifierClient:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncVerifierClient(_Calls):
    """The calls of `VerifierClient`, to be awaited. Await `close()`, or use it as an async context
    manager."""

    @cached_property
    def _http(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(**self._options)

    async def _run(self, call: _Call[T]) -> T:
        try:
            asked = next(call)
            while True:
                wait_s, method, path, content = asked
                await anyio.sleep(wait_s)
                try:
                    answer = await self._http.request(method, path, content=content)
                except httpx.TransportError as error:
                    answer = _gone(error)
                asked = call.send(answer)
        except StopIteration as done:
            result: T = done.value
            return result

    async def evaluate(self, request: EvaluationRequest) -> Evaluation:
        return (await self.evaluate_batch([request]))[0]

    async def evaluate_batch(self, requests: Sequence[EvaluationRequest]) -> list[Evaluation]:
        return await self._run(self._evaluate(requests))

    async def submit(self, request: EvaluationRequest) -> Evaluation:
        found: list[Evaluation] = await self._run(self._submit([request], self._until()))
        return found[0]

    async def result(self, identity: str, wait_s: float = 0.0) -> Evaluation:
        return await self._run(self._result(identity, wait_s, self._until()))

    async def cancel(self, identity: str) -> Evaluation:
        return await self._run(self._cancel(identity))

    async def health(self) -> Json:
        return await self._run(self._health())

    async def close(self) -> None:
        await self._http.aclose()

    async def __aenter__(self) -> AsyncVerifierClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
