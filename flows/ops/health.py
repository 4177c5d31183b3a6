"""Whether a part is healthy: each is asked at its own endpoint, as its users would ask it.

Guarantees: an answer within `ANSWER_S`; a proxy in the environment is not used. Where a secret is
given, it is tried too: a server that answers but refuses it is not healthy.
"""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime
from importlib import import_module
from typing import Any

import httpx

from flows.ops.programs import TABLE, Stack
from flows.ops.settings import POOL, Part
from tasks.tracking.config import page_of

ANSWER_S = 5.0


def fault(part: Part, stack: Stack, since: float = 0.0) -> str:
    """Why a part is not healthy; empty where it is. A worker is, once the server has heard of it
    after `since` (seconds since 1970)."""
    if part == "ray":
        return _ray(stack)
    health, url = TABLE[part]["health"], stack.url(part)
    found = _asked(url + health["path"], health.get("answer"))
    if not found and (login := stack.filled(health.get("login", ""))):
        refused = _asked(url + health["private"], login=login)
        return refused and f"it refuses {health['secret']}: {refused}{health.get('note', '')}"
    if not found and part == "worker" and _last_heard(stack) < since:
        return "Prefect has not heard of it yet"  # its own endpoint answers before it takes runs
    return found


def mlflow_page(url: str, login: str | None = None) -> str:
    """The runs of the newest experiment at a tracking server: from MLflow's list of experiments a
    click leads to the pages for GenAI. The list where there is none yet."""
    asked = {"max_results": 1, "filter": "name != 'Default'", "order_by": ["creation_time DESC"]}
    with suppress(httpx.HTTPError, ValueError, LookupError):
        answer = ask(f"{url}/api/2.0/mlflow/experiments/search", login, asked).json()
        return page_of(url, answer["experiments"][0]["experiment_id"], "runs", "scores")
    return page_of(url)


def _last_heard(stack: Stack) -> float:
    """When Prefect heard of a worker last (seconds since 1970). A server that does not answer is
    not the worker's fault: infinity."""
    with suppress(httpx.HTTPError, ValueError):
        path = f"{stack.settings.prefect_url}/api/work_pools/{POOL}/workers/filter"
        heard = [
            each["last_heartbeat_time"] for each in ask(path, stack.secrets.prefect, {}).json()
        ]
        times = [datetime.fromisoformat(each).timestamp() for each in heard if each]
        return max(times, default=0.0)
    return float("inf")


def _ray(stack: Stack) -> str:
    import grpc

    metadata = []
    with suppress(OSError):
        token = stack.places.ray_token.read_text(encoding="ascii").strip()
        metadata = [("authorization", f"Bearer {token}")]
    options = [("grpc.enable_http_proxy", 0)]
    try:
        with grpc.insecure_channel(stack.settings.ray_address, options=options) as channel:
            ask_nodes = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
            answer = ask_nodes(b"", timeout=ANSWER_S, metadata=metadata)
    except grpc.RpcError as error:
        said = (error.details() or error.code().name).splitlines()[0]
        return str(said.rpartition("last error: ")[2][-120:])
    # A head that has just started answers with an empty list.
    messages = import_module("ray.core.generated.gcs_service_pb2")
    nodes = messages.GetAllNodeInfoReply.FromString(answer).node_info_list
    return "" if nodes else "no node has joined yet"


def ask(url: str, login: str | None = None, body: Any = None) -> httpx.Response:
    """The answer to a request within `ANSWER_S`; with a body it is a POST of JSON. Raises
    httpx.HTTPError, HTTPStatusError where it is refused."""
    user, _, password = (login or "").partition(":")
    answer = httpx.request(
        "GET" if body is None else "POST",
        url,
        json=body,
        auth=(user, password) if login else None,
        timeout=ANSWER_S,
        trust_env=False,
    )
    return answer.raise_for_status()


def _asked(url: str, expected: str | None = None, login: str | None = None) -> str:
    try:
        answer = ask(url, login).text.strip()
    except httpx.HTTPStatusError as error:
        return f"status {error.response.status_code}"
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return "" if expected in (None, answer) else "something else answers there"
