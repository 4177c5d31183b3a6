"""Whether a part is healthy: each is asked at its own endpoint, as its users would ask it.

Guarantees: an answer within `ANSWER_S`; a proxy in the environment is not used. Where a secret is
given, it is tried too: a server that answers but refuses it is not healthy.
"""

from __future__ import annotations

import base64
import http.client
import json
import urllib.error
import urllib.request
from contextlib import suppress
from datetime import datetime
from importlib import import_module

from flows.ops.programs import Stack
from flows.ops.settings import MLFLOW_SECRET, POOL, PREFECT_SECRET, Part

ANSWER_S = 5.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def fault(part: Part, stack: Stack, since: float = 0.0) -> str:
    """Why a part is not healthy; empty where it is. A worker is, once the server has heard of it
    after `since` (seconds since 1970)."""
    if part == "worker":
        return _worker(stack, since)
    return {"prefect": _prefect, "mlflow": _mlflow, "ray": _ray}[part](stack)


def _prefect(stack: Stack) -> str:
    url, secret = stack.settings.prefect_url, stack.secrets.prefect
    found = _asked(f"{url}/api/health", b"true")
    if found or not secret:
        return found
    refused = _asked(f"{url}/api/admin/version", auth=secret)
    return refused and f"it refuses {PREFECT_SECRET}: {refused}"


def _mlflow(stack: Stack) -> str:
    url, secrets = stack.settings.mlflow_url, stack.secrets
    found = _asked(f"{url}/health", b"OK")
    if found or not secrets.mlflow:
        return found
    login = f"{secrets.mlflow_user}:{secrets.mlflow}"
    refused = _asked(f"{url}/api/2.0/mlflow/experiments/get?experiment_id=0", auth=login)
    fix = "an existing user keeps its password"
    return refused and f"it refuses {MLFLOW_SECRET}: {refused}; {fix}"


def _worker(stack: Stack, since: float) -> str:
    if found := _asked(f"http://127.0.0.1:{stack.settings.worker_port}/health"):
        return found
    with suppress(OSError, ValueError):  # a server that does not answer is not the worker's fault
        workers = json.loads(
            ask(
                f"{stack.settings.prefect_url}/api/work_pools/{POOL}/workers/filter",
                stack.secrets.prefect,
                b"{}",
            )
        )
        heard = [
            datetime.fromisoformat(each["last_heartbeat_time"]).timestamp()
            for each in workers
            if each["last_heartbeat_time"]
        ]
        # Its own endpoint answers before it can take a run.
        if max(heard, default=0.0) < since:
            return "Prefect has not heard of it yet"
    return ""


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


def ask(url: str, auth: str | None = None, body: bytes | None = None) -> bytes:
    """The answer to a request within `ANSWER_S`; with a body it is a POST of JSON. Raises OSError,
    HTTPError where it is refused."""
    headers = {"Content-Type": "application/json"} if body else {}
    if auth:
        headers["Authorization"] = "Basic " + base64.b64encode(auth.encode()).decode()
    request = urllib.request.Request(url, data=body, headers=headers)
    try:
        with DIRECT.open(request, timeout=ANSWER_S) as answer:
            return bytes(answer.read())
    except http.client.HTTPException as error:
        raise OSError(f"no answer: {error}") from error


def _asked(url: str, expected: bytes | None = None, auth: str | None = None) -> str:
    try:
        answer = ask(url, auth).strip()
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except OSError as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return "" if expected in (None, answer) else "something else answers there"
