"""What stands between the network and the endpoints.

Guarantees: a body is read up to `BODY_BYTES`, within `SLOW_S`, and only as JSON; what is refused is
one 4xx that repeats nothing of the request; where there is a token, nothing but `/health` is
answered without it (compared in constant time); without one, only requests for a name of this
machine are. No browser takes an answer for a page.
"""

from __future__ import annotations

import asyncio
import hmac
import ipaddress
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from kernels_eval.errors import UsageError

BODY_BYTES = 32 << 20
SLOW_S = 30.0
"""How long the head of a request may take to arrive, and how long its body."""
SAFE = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
LOOPBACK = ["127.0.0.1", "localhost", "[::1]"]


def protect(app: FastAPI, token: str | None) -> None:
    """Put the guards before the routes of an application."""
    app.add_exception_handler(RequestValidationError, _refuse)
    if not token:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)
    app.add_middleware(_Guard, token=token)


def require_token(host: str, token: str | None) -> None:
    """Raise UsageError where the address is not loopback and there is no token of 16 letters."""
    try:
        local = host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        local = False
    if not local and len(token or "") < 16:
        raise UsageError(
            f"{host} is not loopback, and there is no token of 16 letters or more",
            "set CONCUR_SERVE_TOKEN, for example to the output of `openssl rand -hex 32`",
        )


class _StrictRequest(Request):
    """A request whose body is JSON as RFC 8259 has it: no NaN, no lone surrogates, not too deep."""

    async def json(self) -> Any:
        try:
            return from_json(await self.body(), allow_inf_nan=False)
        except ValueError as error:
            raise HTTPException(400, f"the body is no JSON: {error}") from error


class StrictRoute(APIRoute):
    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handle = super().get_route_handler()

        async def strictly(request: Request) -> Response:
            return await handle(_StrictRequest(request.scope, request.receive))

        return strictly


async def _refuse(_: Request, error: Exception) -> JSONResponse:
    """What was wrong with a request, without repeating what it held."""
    assert isinstance(error, RequestValidationError)
    faults = [
        f"{'.'.join(str(part)[:60] for part in fault['loc'])}: {fault['msg'][:300]}"
        for fault in error.errors()[:5]
    ]
    return JSONResponse({"detail": "; ".join(faults)}, 422)


class _Guard:
    """Asks for the token, refuses bodies that are too large or arrive too slowly, and marks every
    answer as data."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        until = asyncio.get_running_loop().time() + SLOW_S
        headers, arriving, size = dict(scope["headers"]), True, 0

        async def bounded() -> Message:
            nonlocal arriving, size
            if not arriving:
                return await receive()
            _require_small(int(headers.get(b"content-length", 0)))
            try:
                async with asyncio.timeout_at(until):
                    message = await receive()
            except TimeoutError as error:
                raise HTTPException(408, f"the body took more than {SLOW_S:g} s") from error
            size += len(message.get("body", b""))
            _require_small(size)
            arriving = bool(message.get("more_body"))
            return message

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *SAFE]
            await send(message)

        given = headers.get(b"authorization", b"")
        if self._token and scope["path"] != "/health":
            if not hmac.compare_digest(given, self._token):
                wants = {"WWW-Authenticate": "Bearer"}
                detail = "give the service's token: Authorization: Bearer TOKEN"
                return await JSONResponse({"detail": detail}, 401, wants)(scope, receive, marked)
        await self._app(scope, bounded, marked)


def _require_small(size: int) -> None:
    if size > BODY_BYTES:
        raise HTTPException(413, f"a body may have {BODY_BYTES >> 20} MiB")


class TimelyProtocol(H11Protocol):
    """Drops connections on which the head of a request does not arrive in time."""

    _slow: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        super().connection_made(transport)
        self._watch()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def _watch(self) -> None:
        if self._slow is None and self._between_requests:
            self._slow = self.loop.call_later(SLOW_S, self._drop)

    def _drop(self) -> None:
        self._slow = None
        if self._between_requests:
            self.transport.close()

    @property
    def _between_requests(self) -> bool:
        return self.cycle is None or self.cycle.response_complete
