"""A generator behind OpenAI-compatible endpoints (vLLM, SGLang, a hosted service), asked through
the openai package.

Guarantees: at most `concurrency` requests in flight; responses come as they finish; transport
faults, answers outside the protocol, 429 and 5xx are tried again with growing pauses, everything
else is not; of several addresses a request goes to the one with the least in flight, and what a
transport fault ends goes to another without a pause (tasks.synthesis.addresses); leaving the loop
early (an exception, Ctrl-C) cancels what is in flight. The API key appears in no message, log line
or repr. Does not guarantee an answer to every request: one that the endpoint refuses (400, 413,
422: the prompt is too long for the model, say) stays unanswered with a log line, unless it refuses
all.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import queue
import random
import threading
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import AsyncExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from kernels_eval.errors import EvalError, UsageError
from tasks.synthesis.addresses import Address, Addresses
from tasks.synthesis.pulse import Pulse, Silence
from tasks.synthesis.sampler import Request, Requests, Response, TokenCounter

if TYPE_CHECKING:
    import openai

log = logging.getLogger(__name__)

CONNECT_TIMEOUT_S = 10.0
LONGEST_PAUSE_S = 60.0
ClientOf = Callable[[str], Awaitable["openai.AsyncOpenAI"]]
REFUSED = frozenset({400, 413, 422})
REFUSALS_BEFORE_GIVING_UP = 8
NO_KEY = "none"
"""Sent where the environment holds no key: local servers ask for none, but the protocol has the
header."""
EXTENSIONS = {"top_k", "min_p", "repetition_penalty"}
"""Settings that OpenAI's protocol has not: fields of the same body for vLLM and SGLang, and sent
only where they are set."""
LONGEST_CAUSE = 300
UNREAD = 256
"""Answers that wait for the caller, before the next request waits too: memory stays flat where the
disk is slower than the server."""
SIGNAL_CHECK_S = 0.5
"""A Ctrl-C that comes just before the wait begins does not wake it: the wait ends now and then to
see it."""


class _ProtocolError(Exception):
    """The endpoint answered 200 with something that is not a chat completion."""


class OpenAISampler(TokenCounter):
    """Chat completions of one model at one endpoint, or at several that serve the same. `generator`
    is `name`, else the model's name.

    `base_url` is an address, several, or `Addresses` that an owner keeps; `api_key` is used
    instead of what `api_key_env` names (`key_place` says in words where a wrong one is put right),
    and with `direct` no proxy of the environment is. `timeout_s` bounds one answer, which is not
    streamed, from request to last byte. `retries` are the further attempts after a fault (at every
    address), with pauses of `backoff_s` doubling up to a minute, or what the server asks for in
    `Retry-After`.
    """

    def __init__(
        self,
        base_url: str | Sequence[str] | Addresses,
        model: str,
        api_key_env: str = "OPENAI_API_KEY",
        concurrency: int = 64,
        timeout_s: float = 3600.0,
        retries: int = 6,
        backoff_s: float = 0.5,
        tokenizer: str | Path | None = None,
        name: str | None = None,
        api_key: str | None = None,
        direct: bool = False,
        key_place: str | None = None,
    ) -> None:
        super().__init__(tokenizer)
        if not isinstance(base_url, Addresses):
            urls = [base_url] if isinstance(base_url, str) else list(base_url)
            wrong = [
                f"base_url {url!r} is not an HTTP address"
                for url in urls
                if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname
            ]
            if wrong or not urls:
                raise UsageError(
                    wrong[0] if wrong else "base_url holds no address",
                    "give something like http://127.0.0.1:8000/v1",
                )
            base_url = Addresses(urls)
        self.generator, self._addresses = name or model, base_url
        self._model, self._api_key, self._direct = model, api_key, direct
        self._key_place = key_place or f"the environment variable {api_key_env}"
        self._api_key_env, self._concurrency = api_key_env, concurrency
        self._timeout_s, self._retries, self._backoff_s = timeout_s, retries, backoff_s

    def __repr__(self) -> str:
        return (
            f"OpenAISampler(base_url={str(self._addresses)!r}, model={self._model!r},"
            f" api_key_env={self._api_key_env!r})"
        )

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses as they finish. Raises UsageError for a wrong key, address or model, EvalError
        once retries are exhausted."""
        if not requests:
            return
        background = _Background(lambda emit: self._ask_all(requests, emit))
        try:
            yield from background.items()
        finally:
            background.stop()

    async def _ask_all(
        self, requests: Requests, emit: Callable[[Response], Awaitable[None]]
    ) -> None:
        import openai

        waiting, answered = iter(requests), 0
        refusals: list[str] = []

        async def work() -> None:
            nonlocal answered
            for request in waiting:  # one iterator for all: each takes the next
                try:
                    await emit(await self._ask(client_of, pulse, request))
                    answered += 1
                except openai.APIStatusError as error:
                    where = _address_of(error)
                    if error.status_code not in REFUSED:
                        # the server's own text may quote the key
                        raise self._fatal(error, where) from None
                    refusals.append(f"{where} refused {request.task.task_id}: {self._cause(error)}")
                    log.warning("%s", refusals[-1])
                if len(refusals) >= REFUSALS_BEFORE_GIVING_UP and not answered:
                    return

        async with AsyncExitStack() as stack:
            client_of = _Clients(stack, self._key(), self._timeout_s, self._direct).of
            pulse = await stack.enter_async_context(Pulse(client_of))
            try:
                async with asyncio.TaskGroup() as group:
                    for _ in range(min(self._concurrency, len(requests))):
                        group.create_task(work())
            except ExceptionGroup as errors:
                raise errors.exceptions[0] from None
        if refusals and not answered:
            raise UsageError(
                refusals[0],
                "check sampling.max_tokens against the model's window; where the endpoint has only"
                " OpenAI's settings: --set synthesis.sampling.top_k=null and the same for min_p and"
                " repetition_penalty",
            )

    async def _ask(self, client_of: ClientOf, pulse: Pulse, request: Request) -> Response:
        """One answer, with further attempts after a fault. Raises openai.APIStatusError for what no
        attempt can change."""
        import openai

        of_transport = (TimeoutError, Silence, openai.APIConnectionError)
        retried = (openai.RateLimitError, openai.InternalServerError, _ProtocolError)
        fault: Exception | None = None
        address: Address | None = None
        attempts = pauses = 0
        while attempts < (self._retries + 1) * max(1, self._addresses.most):
            lost = isinstance(fault, of_transport)
            if fault is not None and not (lost and self._addresses.another_ready(address)):
                pauses += 1
                await asyncio.sleep(self._pause_s(fault, pauses))
            address = await self._addresses.take()
            attempts, fault = attempts + 1, None
            try:
                client = await client_of(address.url)
                # the package bounds the wait for each piece of the answer, not their sum
                async with asyncio.timeout(self._timeout_s):
                    asked = self._ask_once(client, request)
                    return await pulse.during(address.url, asked)
            except (*of_transport, *retried) as error:
                fault = error
            finally:
                self._addresses.release(address, isinstance(fault, of_transport))
        raise EvalError(
            f"{self._addresses} gave no answer for {request.task.task_id} in {attempts} attempts:"
            f" {self._cause(fault)}",
            "check that the server runs and is not overloaded; answers so far are kept, so run the"
            " same command again",
        )

    async def _ask_once(self, client: openai.AsyncOpenAI, request: Request) -> Response:
        sampling = request.sampling
        try:
            completion = await client.chat.completions.create(
                model=self._model,
                messages=[{"role": "user", "content": request.prompt}],
                temperature=sampling.temperature,
                top_p=sampling.top_p,
                max_tokens=sampling.max_tokens,
                seed=sampling.seed,
                extra_body=sampling.model_dump(include=EXTENSIONS, exclude_none=True) or None,
            )
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise _ProtocolError(f"the answer is not JSON ({error})") from error
        return _response(request, completion)

    def _pause_s(self, fault: Exception, attempt: int) -> float:
        """Seconds before an attempt (1 is the first retry): the server's wish, or doubling with
        jitter so that retries spread out."""
        wish = str(getattr(getattr(fault, "response", None), "headers", {}).get("retry-after", ""))
        if wish.isdigit():
            return min(float(wish), LONGEST_PAUSE_S)
        pause_s: float = min(self._backoff_s * 2 ** (attempt - 1), LONGEST_PAUSE_S)
        return pause_s * random.uniform(0.75, 1.25)

    def _fatal(self, error: openai.APIStatusError, where: str) -> UsageError:
        if error.status_code in (401, 403):
            return UsageError(
                f"{where} refused the API key (HTTP {error.status_code})",
                f"put a key that is valid there into {self._key_place}",
            )
        if error.status_code == 404:
            return UsageError(
                f"{where} has no model {self._model!r}, or is not the address of the API (HTTP"
                " 404)",
                "check synthesis.model against BASE_URL/models, and that synthesis.base_url ends"
                " in /v1",
            )
        return UsageError(
            f"{where} does not take the request: {self._cause(error)}", "check synthesis.base_url"
        )

    def _key(self) -> str:
        return self._api_key or os.environ.get(self._api_key_env) or NO_KEY

    def _cause(self, error: Exception | None) -> str:
        """What happened, in one line without the key."""
        import openai

        text = "timed out" if isinstance(error, TimeoutError) else str(error)
        if isinstance(error, openai.APIConnectionError):
            text = f"{error} {error.__cause__ or ''}"
        if self._key() != NO_KEY:
            text = text.replace(self._key(), "***")
        return " ".join(text.split())[:LONGEST_CAUSE]


class _Clients:
    """One client of the openai package for each address, made when it is first needed."""

    def __init__(self, stack: AsyncExitStack, key: str, timeout_s: float, direct: bool) -> None:
        self._stack, self._key, self._timeout_s, self._direct = stack, key, timeout_s, direct
        self._clients: dict[str, openai.AsyncOpenAI] = {}

    async def of(self, url: str) -> openai.AsyncOpenAI:
        import openai

        if url not in self._clients:
            timeout = openai.Timeout(self._timeout_s, connect=CONNECT_TIMEOUT_S)
            http = None
            if self._direct:
                http = openai.DefaultAsyncHttpxClient(
                    trust_env=False, base_url=url, timeout=timeout
                )
            client = openai.AsyncOpenAI(
                api_key=self._key, base_url=url, timeout=timeout, max_retries=0, http_client=http
            )
            self._clients[url] = await self._stack.enter_async_context(client)
        return self._clients[url]


class _Background:
    """A coroutine on a thread with an event loop of its own, so that answers arrive while the
    caller works on the last one and the caller's thread may have a loop itself. `work` gets the
    function that emits an item, and waits there while UNREAD lie unread.
    """

    def __init__(
        self, work: Callable[[Callable[[Response], Awaitable[None]]], Coroutine[Any, Any, None]]
    ) -> None:
        self._work = work
        # None: there will be no more
        self._emitted: queue.SimpleQueue[Response | None] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="synthesis client", daemon=True)
        self._thread.start()

    def items(self) -> Iterator[Response]:
        """What is emitted, as it comes; then the coroutine's exception, if it ended in one."""
        while (item := self._next()) is not None:
            yield item
            with suppress(RuntimeError):  # the loop is closed: nothing waits
                self._loop.call_soon_threadsafe(self._room.release)
        if self._error is not None:
            raise self._error

    def _next(self) -> Response | None:
        while True:
            with suppress(queue.Empty):
                return self._emitted.get(timeout=SIGNAL_CHECK_S)

    def stop(self) -> None:
        """Cancel what still runs and wait until it has ended."""
        self._ready.wait()
        with suppress(RuntimeError):  # the loop is closed: it ended by itself
            self._loop.call_soon_threadsafe(self._cancel)
        self._thread.join()

    def _run(self) -> None:
        try:
            asyncio.run(self._main())
        except asyncio.CancelledError:
            log.debug("cancelled")
        except BaseException as error:
            self._error = error
        finally:
            self._emitted.put(None)

    async def _main(self) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._loop, self._cancel = asyncio.get_running_loop(), task.cancel
        self._room = asyncio.Semaphore(UNREAD)
        self._ready.set()
        await self._work(self._emit)

    async def _emit(self, item: Response) -> None:
        await self._room.acquire()
        self._emitted.put(item)


def _response(request: Request, completion: Any) -> Response:
    """The first choice of a completion. Raises _ProtocolError where there is none: servers do
    answer 200 with anything."""
    choices = getattr(completion, "choices", None)
    choice: Any = choices[0] if isinstance(choices, list) and choices else None
    message: Any = getattr(choice, "message", None)
    if not hasattr(message, "content"):
        raise _ProtocolError("the answer holds no choice with a message")
    # reasoning is not in OpenAI's schema: vLLM and SGLang add it under one of two names
    extra = message.model_extra or {}
    tokens = getattr(getattr(completion, "usage", None), "completion_tokens", None)
    return Response(
        request_key=request.request_key,
        text=_text(message.content) or "",
        reasoning=_text(extra.get("reasoning_content") or extra.get("reasoning")),
        completion_tokens=tokens if isinstance(tokens, int) else None,
        finish_reason=_text(getattr(choice, "finish_reason", None)),
    )


def _address_of(error: openai.APIStatusError) -> str:
    """The base URL that answered so."""
    return str(error.request.url).removesuffix("/chat/completions")


def _text(value: Any) -> str | None:
    """A string that UTF-8 can hold (JSON may carry lone surrogates, records and Parquet may not);
    None for what is no string."""
    return value.encode("utf-8", "replace").decode("utf-8") if isinstance(value, str) else None
