"""The pages under a root over HTTP, so that Prefect's pages can link to them: the viewer of
candidates, reports, the trend, comparisons, figures.

Guarantees: serves files of the root that are pages or parts of one (`SHOWN`), and nothing else;
follows no symbolic link out of the root; asks for Prefect's user and password where the stack has
them; answers only requests that name this machine, so that no other site reads it through a
browser.
"""

from __future__ import annotations

import os
from base64 import b64encode
from pathlib import PurePath
from secrets import compare_digest

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.trustedhost import TrustedHostMiddleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Mount, Route
from starlette.staticfiles import StaticFiles

from flows.ops.places import ROOT_VARIABLE

SHOWN = (".html", ".css", ".js", ".svg", ".png")


class Pages(StaticFiles):
    """The files of a directory that are pages or parts of one."""

    def lookup_path(self, path: str) -> tuple[str, os.stat_result | None]:
        return super().lookup_path(path) if PurePath(path).suffix in SHOWN else ("", None)


def site() -> Starlette:
    """The pages of the root that the environment names, to the hosts that it names."""
    hosts = os.environ["CONCUR_PAGES_HOSTS"].split(",")
    routes = [
        Route("/health", lambda request: PlainTextResponse("OK")),
        Mount("/", Pages(directory=os.environ[ROOT_VARIABLE])),
    ]
    checks = [
        Middleware(TrustedHostMiddleware, allowed_hosts=hosts, www_redirect=False),
        Middleware(BaseHTTPMiddleware, dispatch=_require_login),
    ]
    return Starlette(routes=routes, middleware=checks)


async def _require_login(request: Request, answer: RequestResponseEndpoint) -> Response:
    login = os.environ.get("CONCUR_PAGES_LOGIN", "").encode()
    given = request.headers.get("authorization", "").encode()
    if login and request.url.path != "/health":
        if not compare_digest(given, b"Basic " + b64encode(login)):
            headers = {"WWW-Authenticate": 'Basic realm="concur"'}
            return PlainTextResponse("user and password, please", 401, headers)
    return await answer(request)
