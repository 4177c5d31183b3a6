"""Is an endpoint that has a request in hand still there? A long answer and a dead server look alike
for an hour otherwise.

Guarantees: while a request is in flight its address is asked for its models now and then; any
answer at all, an error too, is a sign of life; where `MISSES` askings in a row get none, what is in
flight there is given up as a fault of transport, to be tried again. An address that writes one
answer for an hour and answers such a question meanwhile is waited for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from contextlib import suppress
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    import openai

EVERY_S = 60.0
PATIENCE_S = 20.0
MISSES = 3
log = logging.getLogger(__name__)
T = TypeVar("T")


class Silence(Exception):
    """The address has not said a word for too long."""


class Pulse:
    """Of all addresses that one client asks. Use as an asynchronous context manager, inside the
    loop that asks."""

    def __init__(self, client_of: Callable[[str], Awaitable[openai.AsyncOpenAI]]) -> None:
        self._client_of = client_of
        self._waiting: dict[str, set[asyncio.Future[None]]] = {}
        self._misses: dict[str, int] = {}
        self._task: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Pulse:
        self._task = asyncio.create_task(self._look())
        return self

    async def __aexit__(self, *_: object) -> None:
        if self._task is not None:
            self._task.cancel()
            with suppress(asyncio.CancelledError):
                await self._task

    async def during(self, url: str, request: Coroutine[Any, Any, T]) -> T:
        """The request's answer. Raises Silence where its address is given up, and what the request
        raises."""
        given_up: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(url, set()).add(given_up)
        asked = asyncio.ensure_future(request)
        try:
            both: set[asyncio.Future[Any]] = {asked, given_up}
            await asyncio.wait(both, return_when=asyncio.FIRST_COMPLETED)
            if asked.done():
                self._misses.pop(url, None)
                return asked.result()
            raise Silence(f"{url} has not said a word in {MISSES} askings, {EVERY_S:.0f} s apart")
        finally:
            self._waiting[url].discard(given_up)
            given_up.cancel()
            if not asked.done():
                asked.cancel()
                with suppress(asyncio.CancelledError, Exception):
                    await asked

    async def _look(self) -> None:
        while True:
            await asyncio.sleep(EVERY_S)
            await asyncio.gather(
                *(self._ask(url) for url, waiting in list(self._waiting.items()) if waiting)
            )

    async def _ask(self, url: str) -> None:
        import openai

        try:
            client = (await self._client_of(url)).with_options(timeout=PATIENCE_S, max_retries=0)
            async with asyncio.timeout(PATIENCE_S):
                await client.get("/models", cast_to=object)
            missed = False
        except Exception as error:  # an answer of any other kind is a sign of life
            missed = isinstance(error, openai.APIConnectionError | TimeoutError)
        self._misses[url] = self._misses.get(url, 0) + 1 if missed else 0
        if self._misses.get(url, 0) >= MISSES:
            self._misses.pop(url)
            log.warning("%s is given up for now: it does not answer any more", url)
            for given_up in list(self._waiting[url]):
                if not given_up.done():
                    given_up.set_result(None)
