"""A generator behind OpenAI-compatible endpoints (vLLM, SGLang, a hosted service).

Guarantees: at most `concurrency` requests in flight; responses come as they finish; transport
faults, answers outside the protocol, 429 and 5xx are tried again with growing pauses, everything
else is not; of several addresses a request goes to the one with the least in flight, and what a
transport fault ends goes to another without a pause (tasks.synthesis.addresses); leaving the loop
early (an exception, Ctrl-C) cancels what is in flight. The API key appears in no message, log line
or repr. Does not guarantee an answer to every request: one that the endpoint refuses (400, 413,
422: the prompt is too long for the model, say) stays unanswered with a log line, unless it refuses
all, and so do those that `tail_wait_s` cuts off: their connections are closed, at which vLLM stops
to generate.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import random
from collections.abc import Iterator, Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from urllib.parse import urlsplit

import httpx
from anyio import EndOfStream, create_memory_object_stream
from anyio.from_thread import start_blocking_portal
from anyio.streams.memory import MemoryObjectSendStream

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Json
from tasks.policy import secret
from tasks.progress import caution
from tasks.sources.files import shown
from tasks.synthesis.addresses import Address, Addresses, Pulse
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.sampler import (
    Request,
    Requests,
    Response,
    Sampler,
    required,
    tokenizer_of,
)
from tasks.synthesis.tail import Tail

log = logging.getLogger(__name__)
T = TypeVar("T")

CONNECT_TIMEOUT_S = 10.0
LONGEST_PAUSE_S = 60.0
REFUSED = frozenset({400, 413, 422})
REFUSALS_BEFORE_GIVING_UP = 8
NO_KEY = "none"
"""Sent where the environment holds no key: local servers ask for none, but the protocol has the
header."""
LONGEST_CAUSE = 300
UNREAD = 256
"""Most answers that wait for the caller (and never more than requests may be in flight), before the
next request waits too: memory stays flat where the disk is slower than the server, and a stage that
stops asks for few of them again."""
SIGNAL_CHECK_S = 0.5
"""A Ctrl-C that comes just before the wait begins does not wake it: the wait ends now and then to
see it."""
TRANSPORT = (TimeoutError, httpx.RequestError)
"""The connection failed, or nothing came over it in time."""


class _Later(Exception):
    """An answer that another attempt may correct, after `wish_s` seconds if the server says so."""

    wish_s: float | None = None


class _Refused(Exception):
    """The endpoint does not take this request; it may take others."""


@dataclass(repr=False)
class OpenAISampler(Sampler):
    """Chat completions of one model at one endpoint, or at several that serve the same. `generator`
    is `name`, else the model's name.

    `base_url` is an address, several, or `Addresses` that an owner keeps; `api_key` is used
    instead of what `api_key_env` names (`key_place` says in words where a wrong one is corrected),
    and with `direct` no proxy of the environment is. `timeout_s` bounds one answer, which is not
    streamed, from request to last byte. `retries` are the further attempts after a fault (at every
    address), with pauses of `backoff_s` doubling up to a minute, or what the server asks for in
    `Retry-After`. With `tail_wait_s`, the last `tail_share` of the requests are cancelled so many
    seconds after all were sent and no more than those were unanswered.
    """

    base_url: str | Sequence[str] | Addresses
    model: str
    api_key_env: str = "OPENAI_API_KEY"
    concurrency: int = 64
    timeout_s: float = 3600.0
    retries: int = 6
    backoff_s: float = 0.5
    tokenizer: str | Path | None = None
    name: str | None = None
    api_key: str | None = None
    direct: bool = False
    key_place: str | None = None
    tail_wait_s: float | None = None
    tail_share: float = 0.02
    path: ClassVar[str] = "chat/completions"

    def __post_init__(self) -> None:
        self.generator = self.name or self.model
        if isinstance(self.base_url, Addresses):
            self._addresses = self.base_url
            return
        urls = [self.base_url] if isinstance(self.base_url, str) else self.base_url
        wrong = [f"base_url {url!r} is not an HTTP address" for url in urls if not _is_http(url)]
        if wrong or not urls:
            raise UsageError(
                wrong[0] if wrong else "base_url holds no address",
                "give something like http://127.0.0.1:8000/v1",
            )
        self._addresses = Addresses(url.rstrip("/") for url in urls)

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> OpenAISampler:
        block = config.api_key_block
        return cls(
            required(config, "base_url", "http://HOST:PORT/v1"),
            required(config, "model", "NAME"),
            api_key_env=config.api_key_env,
            api_key=secret(block) if block else None,
            key_place=f"the Prefect secret block {block}" if block else None,
            concurrency=config.concurrency,
            tokenizer=tokenizer_of(config, root),
        )

    def __repr__(self) -> str:
        return f"OpenAISampler({str(self._addresses)!r}, {self.model!r}, {self.api_key_env!r})"

    @property
    def urls(self) -> list[str]:
        """Every address."""
        return str(self._addresses).split(", ")

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses as they finish. Raises UsageError for a wrong key, address or model, EvalError
        once retries are exhausted."""
        if not requests:
            return
        # an event loop on a thread of its own: the caller's may have one
        with start_blocking_portal(name="synthesis client") as portal:
            unread = min(UNREAD, self.concurrency)
            answers, received = create_memory_object_stream[Response](unread)
            asking = portal.start_task_soon(self._ask_all, requests, answers)
            with suppress(EndOfStream):
                while True:
                    yield _result(portal.start_task_soon(received.receive))
            asking.result()

    def require_model(self) -> str:
        """Ask every address which models it has, in words. Raises EvalError where one does not
        answer, UsageError where it refuses the key or lacks the model. One that keeps no list, as
        some gateways, is taken at its word."""
        listed = [self._lists_model(url) for url in self.urls]
        return f"{self._addresses}: " + (
            f"has {self.model}" if all(listed) else f"answers, and does not list {self.model}"
        )

    def _lists_model(self, url: str) -> bool:
        headers = {"authorization": f"Bearer {self._key}"}
        try:
            answer = httpx.get(
                f"{url}/models",
                headers=headers,
                timeout=CONNECT_TIMEOUT_S,
                follow_redirects=True,
                trust_env=not self.direct,
            )
            data = answer.json()["data"] if answer.is_success else ()
            names = [str(each["id"]) for each in data]
        except TRANSPORT as error:
            raise EvalError(
                f"{url} does not answer: {self._line(str(error) or type(error).__name__)}",
                "start the server, or correct synthesis.base_url",
            ) from error
        except (ValueError, LookupError, TypeError):
            return False  # no list in the protocol's form
        if answer.status_code in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            raise self._fatal(answer.status_code, url, "")
        if names and self.model not in names:
            has = shown(self._line(", ".join(names[:5])))
            raise UsageError(
                f"{url} has no model {self.model!r}; it has {has}", "--set synthesis.model=NAME"
            )
        return bool(names)

    async def _ask_all(self, requests: Requests, out: MemoryObjectSendStream[Response]) -> None:
        waiting, answered = iter(requests), 0
        tail = Tail(len(requests), self.tail_share, self.tail_wait_s)
        refusals: list[str] = []

        async def work() -> None:
            nonlocal answered
            for request in waiting:  # one iterator for all: each takes the next
                response = None
                try:
                    with tail.request():
                        response = await self._ask(client, pulse, request)
                except _Refused as error:
                    refusals.append(str(error))
                    log.warning("%s", error)
                if response is not None:
                    answered += 1
                    await out.send(response)
                if len(refusals) >= REFUSALS_BEFORE_GIVING_UP and not answered:
                    return

        async with out, self._client() as client:
            pulse = Pulse(client)
            watching = asyncio.create_task(pulse.watch())
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self.concurrency, len(requests))):
                        group.create_task(work())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
            finally:
                watching.cancel()
        if tail.given_up:
            caution(
                f"{tail.given_up:,} of {len(requests):,} requests stay unanswered: the last were"
                f" cancelled after synthesis.tail_wait_s = {self.tail_wait_s:g} s"
            )
        if refusals and not answered:
            raise UsageError(
                refusals[0],
                "check sampling.max_tokens against the model's window; where the endpoint has only"
                " OpenAI's settings: --set synthesis.sampling.top_k=null and the same for min_p and"
                " repetition_penalty",
            )

    def _client(self) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers={
                "authorization": f"Bearer {self._key}",
                "content-type": "application/json",
            },
            timeout=httpx.Timeout(self.timeout_s, connect=CONNECT_TIMEOUT_S),
            limits=httpx.Limits(max_connections=None),
            follow_redirects=True,
            trust_env=not self.direct,
        )

    async def _ask(self, client: httpx.AsyncClient, pulse: Pulse, request: Request) -> Response:
        """One answer, with further attempts after a fault. Raises _Refused, and UsageError for what
        is wrong with every request."""
        fault: Exception | None = None
        address: Address | None = None
        attempts = pauses = 0
        while attempts < (self.retries + 1) * max(1, self._addresses.most):
            lost = isinstance(fault, TRANSPORT)
            if fault is not None and not (lost and self._addresses.another_ready(address)):
                pauses += 1
                await asyncio.sleep(self._pause_s(fault, pauses))
            address = await self._addresses.take()
            attempts, fault = attempts + 1, None
            try:
                # the client bounds the wait for each piece of the answer, not their sum
                async with pulse.limit(address.url, self.timeout_s):
                    return await self._ask_once(client, address.url, request)
            except (*TRANSPORT, _Later) as error:
                fault = error
            finally:
                self._addresses.release(address, isinstance(fault, TRANSPORT))
        said = str(fault) or type(fault).__name__  # some of httpx's say nothing
        if isinstance(fault, TimeoutError):
            said = "timed out"
        raise EvalError(
            f"{self._addresses} gave no answer for {request.task.task_id} in {attempts} attempts:"
            f" {self._line(said)}",
            "check that the server runs and is not overloaded; answers so far are kept, so run the"
            " same command again",
        )

    async def _ask_once(self, client: httpx.AsyncClient, url: str, request: Request) -> Response:
        # as ASCII: a prompt may hold what UTF-8 has no form for
        content = json.dumps(self.body(request))
        asked = client.stream("POST", f"{url}/{self.path}", content=content)
        async with asked as answer:  # a response that read itself would hold its megabytes for long
            got = b"".join([piece async for piece in answer.aiter_bytes()])
        if answer.is_success:
            try:
                return self.read(request, json.loads(got))
            except (ValueError, LookupError, TypeError, AttributeError) as error:
                raise _Later(f"the answer is no chat completion: {error!r}") from error
        status = answer.status_code
        said = self._line(f"HTTP {status}: {got.decode('utf-8', 'replace')}")
        if status in REFUSED:
            raise _Refused(f"{url} refused {request.task.task_id}: {said}")
        if status == httpx.codes.TOO_MANY_REQUESTS or answer.is_server_error:
            later, wish = _Later(said), answer.headers.get("retry-after", "")
            later.wish_s = float(wish) if wish.isdigit() else None
            raise later
        raise self._fatal(status, url, said)

    def body(self, request: Request) -> Json:
        """What is sent for a request."""
        return {
            "model": self.model,
            "messages": [{"role": "user", "content": request.prompt}],
            **request.sampling.model_dump(exclude_none=True),
        }

    def read(self, request: Request, body: Any) -> Response:
        """The first choice of an answer. Raises what Python does where there is none: servers do
        answer 200 with anything."""
        choice = body["choices"][0]
        message, usage = choice["message"], body.get("usage")
        tokens = usage.get("completion_tokens") if isinstance(usage, dict) else None
        return Response(
            request_key=request.request_key,
            text=_text(message.get("content")) or "",
            # not in OpenAI's schema: vLLM and SGLang add it under one of two names
            reasoning=_text(message.get("reasoning_content") or message.get("reasoning")),
            completion_tokens=tokens if isinstance(tokens, int) else None,
            finish_reason=_text(choice.get("finish_reason")),
        )

    def _pause_s(self, fault: Exception, attempt: int) -> float:
        """Seconds before an attempt (1 is the first retry): the server's wish, or doubling with
        jitter so that retries spread out."""
        if isinstance(fault, _Later) and fault.wish_s is not None:
            return min(fault.wish_s, LONGEST_PAUSE_S)
        pause_s: float = min(self.backoff_s * 2 ** (attempt - 1), LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.75, 1.25)

    def _fatal(self, status: int, url: str, said: str) -> UsageError:
        if status in (httpx.codes.UNAUTHORIZED, httpx.codes.FORBIDDEN):
            place = self.key_place or f"the environment variable {self.api_key_env}"
            return UsageError(
                f"{url} refused the API key (HTTP {status})",
                f"put a valid key for it into {place}",
            )
        if status == httpx.codes.NOT_FOUND:
            return UsageError(
                f"{url} has no model {self.model!r}, or is not the address of the API (HTTP 404)",
                "check synthesis.model against BASE_URL/models, and that synthesis.base_url ends"
                " in /v1",
            )
        return UsageError(f"{url} does not accept the request: {said}", "check synthesis.base_url")

    @property
    def _key(self) -> str:
        return self.api_key or os.environ.get(self.api_key_env) or NO_KEY

    def _line(self, text: str) -> str:
        """What happened, in one line without the key, which servers quote."""
        if self._key != NO_KEY:
            text = text.replace(self._key, "***")
        return " ".join(text.split())[:LONGEST_CAUSE]


def _result(future: Future[T]) -> T:
    while not future.done():
        with suppress(TimeoutError):
            return future.result(SIGNAL_CHECK_S)
    return future.result()


def _is_http(url: str) -> bool:
    parts = urlsplit(url)
    return parts.scheme in ("http", "https") and bool(parts.hostname)


def _text(value: object) -> str | None:
    """A string that UTF-8 can hold (JSON may carry lone surrogates, records and Parquet may not);
    None for what is no string."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else None
