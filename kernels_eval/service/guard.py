"""Between the network and the endpoints: a body is JSON up to `BODY_BYTES`; a refusal is a 4xx that
repeats nothing of the request; a token guards all but `/health`; without one, only requests for
this machine's names are answered."""

from __future__ import annotations

import hmac
import ipaddress
from collections.abc import Callable, Coroutine
from typing import Any

from fastapi import FastAPI, HTTPException, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from pydantic_core import from_json
from starlette.middleware.body_limit import RequestBodyLimitMiddleware
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from kernels_eval.errors import UsageError

BODY_BYTES = 32 << 20
SAFE = [(b"x-content-type-options", b"nosniff"), (b"cache-control", b"no-store")]
LOOPBACK = ["127.0.0.1", "localhost", "[::1]"]


def protect(app: FastAPI, token: str | None) -> None:
    app.add_exception_handler(RequestValidationError, _refuse)
    if not token:
        app.add_middleware(TrustedHostMiddleware, allowed_hosts=LOOPBACK)
    app.add_middleware(RequestBodyLimitMiddleware, max_body_size=BODY_BYTES)
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
    """A request with strict JSON (RFC 8259): no NaN, no lone surrogates, not too deep."""

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


async def _refuse(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    faults = [
        f"{'.'.join(str(part)[:60] for part in fault['loc'])}: {fault['msg'][:300]}"
        for fault in error.errors()[:5]
    ]
    if "json" not in request.headers.get("content-type", "json"):
        faults.append("send JSON with the header Content-Type: application/json")
    return JSONResponse({"detail": "; ".join(faults)}, 422)


class _Guard:
    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = f"Bearer {token}".encode() if token else None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)

        async def marked(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *SAFE]
            await send(message)

        given = dict(scope["headers"]).get(b"authorization", b"")
        if self._token and scope["path"] != "/health":
            if not hmac.compare_digest(given, self._token):
                wants = {"WWW-Authenticate": "Bearer"}
                detail = "give the service's token: Authorization: Bearer TOKEN"
                return await JSONResponse({"detail": detail}, 401, wants)(scope, receive, marked)
        await self._app(scope, receive, marked)
