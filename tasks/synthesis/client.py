"""A generator behind an OpenAI-compatible endpoint (vLLM, SGLang, a hosted service).

Guarantees: at most `concurrency` requests in flight, cancelled on leaving the loop; retries; the
API key is in no message, log line or repr. Refused requests (400, 413, 422) are
logged, unless all are refused."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeVar
from urllib.parse import urlsplit

import anyio
from anyio.from_thread import start_blocking_portal
from anyio.streams.memory import MemoryObjectSendStream

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.protocol import storable
from kernels_eval.records import Json
from tasks.sources.files import shown
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.sampler import (
    Request,
    Requests,
    Response,
    Sampler,
    required,
    tokenizer_of,
)

if TYPE_CHECKING:
    from openai import APIStatusError, AsyncOpenAI

log = logging.getLogger(__name__)
T = TypeVar("T")

PATH = "/chat/completions"
CONNECT_TIMEOUT_S = 10.0
ATTEMPTS = 3
"""Attempts of a request, each with the client's own retries: an answer may be malformed, too."""
UNAUTHORIZED, NOT_FOUND = (401, 403), 404
REFUSED = (400, 413, 422)
RETRIED = (408, 409, 429)
REFUSALS_BEFORE_GIVING_UP = 8
KEY_VARIABLE = "OPENAI_API_KEY"
NO_KEY = "none"
"""Sent without a key in the environment: local servers need none, but the protocol has the
header."""
LONGEST_CAUSE = 300
UNREAD = 256
"""Most unread answers before the next request waits: memory stays flat on a slow disk, and a
stopped stage repeats few."""
SIGNAL_CHECK_S = 0.5
"""Interval of checks for a Ctrl-C that came just before a wait began and did not wake it."""


class _Refused(Exception):
    """The endpoint refuses this request; it may accept others."""


@dataclass(repr=False)
class OpenAISampler(Sampler):
    """Chat completions of one model (`generator`).

    `api_key` replaces KEY_VARIABLE's value; `direct` ignores the environment's proxies. `timeout_s`
    bounds the wait for an answer. `retries` after a fault pause 0.5 s, doubling up to 8 s, or as
    `Retry-After` says."""

    base_url: str
    model: str
    concurrency: int = 64
    timeout_s: float = 3600.0
    retries: int = 6
    tokenizer: str | Path | None = None
    api_key: str | None = None
    direct: bool = False

    def __post_init__(self) -> None:
        self.generator = self.model
        parts = urlsplit(self.base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise UsageError(
                f"base_url {self.base_url!r} is not an HTTP address",
                "give something like http://127.0.0.1:8000/v1",
            )

    @classmethod
    def from_config(cls, config: SynthesisConfig, root: str, adapter: Path | None = None) -> Self:
        return cls(
            required(config, "base_url", "http://HOST:PORT/v1"),
            required(config, "model", "NAME"),
            concurrency=config.concurrency,
            tokenizer=tokenizer_of(config, root),
        )

    def __repr__(self) -> str:
        return f"OpenAISampler({self.base_url!r}, {self.model!r})"

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses as they finish. Raises UsageError for a wrong key, address or model, EvalError
        once retries are exhausted."""
        if not requests:
            return
        # an event loop on a thread of its own: the caller's may have one
        with start_blocking_portal(name="synthesis client") as portal:
            unread = min(UNREAD, self.concurrency)
            answers, received = anyio.create_memory_object_stream[Response](unread)
            asking = portal.start_task_soon(self._ask_all, requests, answers)
            with suppress(anyio.EndOfStream):
                while True:
                    yield _result(portal.start_task_soon(received.receive))
            asking.result()

    def require_model(self) -> str:
        """Ask for the endpoint's models, and report them in words. Raises EvalError where it does
        not answer, UsageError where it refuses the key or lacks the model. One without a list is
        trusted."""
        with start_blocking_portal() as portal:
            names = portal.call(self._models)
        if not names:
            return f"{self.base_url}: answers, and does not list {self.model}"
        if self.model not in names:
            has = shown(self._line(", ".join(names[:5])))
            raise UsageError(
                f"{self.base_url} has no model {self.model!r}; it has {has}",
                "--set synthesis.model=NAME",
            )
        return f"{self.base_url}: has {self.model}"

    async def _models(self) -> list[str]:
        from openai import APIConnectionError, APIStatusError

        async with self._client() as client:
            try:
                once = client.with_options(max_retries=0, timeout=CONNECT_TIMEOUT_S)
                page = await once.models.list()
                return [str(model.id) for model in page.data]
            except APIConnectionError as error:
                cause = self._line(str(error.__cause__ or error))
                raise EvalError(
                    f"{self.base_url} does not answer: {cause}",
                    "start the server, or correct synthesis.base_url",
                ) from error
            except APIStatusError as error:
                if error.status_code in UNAUTHORIZED:
                    raise self._fatal(error) from error
            except (ValueError, TypeError, AttributeError):
                pass  # no list in the protocol's form
        return []

    async def _ask_all(self, requests: Requests, out: MemoryObjectSendStream[Response]) -> None:
        waiting, answered = iter(requests), 0
        refusals: list[str] = []

        async def work() -> None:
            nonlocal answered
            for request in waiting:  # one iterator for all: each takes the next
                try:
                    response = await self._ask(client, request)
                except _Refused as error:
                    refusals.append(str(error))
                    log.warning("%s", error)
                else:
                    answered += 1
                    await out.send(response)
                if len(refusals) >= REFUSALS_BEFORE_GIVING_UP and not answered:
                    return

        async with out, self._client() as client:
            try:
                async with anyio.create_task_group() as group:
                    for _ in range(min(self.concurrency, len(requests))):
                        group.start_soon(work)
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        if refusals and not answered:
            raise UsageError(
                refusals[0],
                "check sampling.max_tokens against the model's window; where the endpoint has only"
                " OpenAI's settings: --set synthesis.sampling.top_k=null and the same for min_p and"
                " repetition_penalty",
            )

    def _client(self) -> AsyncOpenAI:
        import httpx2
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient

        connections = httpx2.Limits(max_connections=None, max_keepalive_connections=None)
        return AsyncOpenAI(
            api_key=self._key,
            base_url=self.base_url,
            max_retries=self.retries,
            timeout=httpx2.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S),
            http_client=DefaultAsyncHttpxClient(limits=connections, trust_env=not self.direct),
        )

    async def _ask(self, client: AsyncOpenAI, request: Request) -> Response:
        """Raises _Refused, UsageError or EvalError."""
        return (await self._complete(client, request, self.body(request)))[1]

    async def _complete(
        self, client: AsyncOpenAI, request: Request, body: Json
    ) -> tuple[Json, Response]:
        from openai import APIConnectionError, APIStatusError

        cause = ""
        for _ in range(ATTEMPTS):
            try:
                found = _parsed(await client.post(PATH, body=body, cast_to=object))
                return found["choices"][0]["message"], self.read(request, found)
            except APIStatusError as error:
                self._raise_unless_retried(error, request)
                cause = str(error)
            except APIConnectionError as error:
                cause = str(error.__cause__ or error) or type(error).__name__
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                cause = f"the answer is no chat completion: {error!r}"
        task_id = request.task.task_id
        raise EvalError(
            f"{self.base_url} gave no answer for {task_id}: {self._line(cause)}",
            "check that the server runs and is not overloaded; answers so far are kept, so run the"
            " same command again",
        )

    def body(self, request: Request) -> Json:
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": request.prompt}],
            **request.sampling.model_dump(exclude_none=True),
        }

    def read(self, request: Request, body: Any) -> Response:
        """The first choice of an answer. Raises Python's errors for a malformed one: servers answer
        200 with anything."""
        choice = body["choices"][0]
        message, usage = choice["message"], body.get("usage")
        usage = usage if isinstance(usage, dict) else {}
        details = usage.get("completion_tokens_details")
        return Response(
            request_key=request.request_key,
            text=_text(message.get("content")) or "",
            # not in OpenAI's schema: vLLM and SGLang add it under one of two names
            reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
            completion_tokens=_count(usage.get("completion_tokens")),
            reasoning_tokens=_count((details or {}).get("reasoning_tokens")),
            finish_reason=_text(choice.get("finish_reason")),
        )

    def _raise_unless_retried(self, error: APIStatusError, request: Request) -> None:
        status = error.status_code
        if status in REFUSED:
            said = self._line(str(error))
            raise _Refused(f"{self.base_url} refused {request.task.task_id}: {said}") from None
        if status not in RETRIED and status < 500:
            raise self._fatal(error) from None

    def _fatal(self, error: APIStatusError) -> UsageError:
        status, url = error.status_code, self.base_url
        if status in UNAUTHORIZED:
            return UsageError(
                f"{url} refused the API key (HTTP {status})",
                f"put a valid key for it into the environment variable {KEY_VARIABLE}",
            )
        if status == NOT_FOUND:
            return UsageError(
                f"{url} has no model {self.model!r}, or is not the address of the API (HTTP 404)",
                "check synthesis.model against BASE_URL/models, and that synthesis.base_url ends"
                " in /v1",
            )
        said = self._line(str(error))
        return UsageError(f"{url} does not accept the request: {said}", "check synthesis.base_url")

    @property
    def _key(self) -> str:
        return self.api_key or os.environ.get(KEY_VARIABLE) or NO_KEY

    def _line(self, text: str) -> str:
        if self._key != NO_KEY:
            text = text.replace(self._key, "***")
        return " ".join(text.split())[:LONGEST_CAUSE]


def _result(future: Future[T]) -> T:
    while not future.done():
        with suppress(TimeoutError):
            return future.result(SIGNAL_CHECK_S)
    return future.result()


def _parsed(body: object) -> Any:
    return json.loads(body) if isinstance(body, str) else body


def _count(value: object) -> int | None:
    return value if isinstance(value, int) else None


def _text(value: object) -> str | None:
    """A string without lone surrogates, which Parquet cannot hold."""
    return storable(value) if isinstance(value, str) else None
