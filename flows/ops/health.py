"""Is a part well? Each is asked at its own endpoint, as its users would ask it.

Guarantees: an answer within `ANSWER_S`; a proxy in the environment is not used. Where a secret is
given, it is tried too: a server that answers but refuses it is not well.
"""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import urllib.error
import urllib.request
from datetime import datetime
from pathlib import Path

from flows.ops.places import Places
from flows.ops.settings import MLFLOW_SECRET, POOL, PREFECT_SECRET, Part, Secrets, StackSettings

ANSWER_S = 5.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
NODES_QUESTION = "/ray.rpc.NodeInfoGcsService/GetAllNodeInfo"
NODES_FIELD = 2
"""Number of the list of nodes in the answer (gcs_service.proto). A head that has just started
answers with an empty one."""


def fault(
    part: Part, places: Places, settings: StackSettings, secrets: Secrets, since: float = 0.0
) -> str | None:
    """Why a part is not well; None where it is. A worker is, once the server has heard of it after
    `since` (seconds since 1970)."""
    if part == "worker":
        return _worker(settings, secrets, since)
    return {"prefect": _prefect, "mlflow": _mlflow, "ray": _ray}[part](places, settings, secrets)


def _prefect(places: Places, settings: StackSettings, secrets: Secrets) -> str | None:
    if found := _asked(f"{settings.prefect_url}/api/health", b"true"):
        return found
    if not secrets.prefect:
        return None
    refused = _asked(f"{settings.prefect_url}/api/admin/version", auth=secrets.prefect)
    return refused and f"it refuses {PREFECT_SECRET}: {refused}"


def _mlflow(places: Places, settings: StackSettings, secrets: Secrets) -> str | None:
    if found := _asked(f"{settings.mlflow_url}/health", b"OK"):
        return found
    if not secrets.mlflow:
        return None
    url = f"{settings.mlflow_url}/api/2.0/mlflow/experiments/get?experiment_id=0"
    refused = _asked(url, auth=f"{secrets.mlflow_user}:{secrets.mlflow}")
    return (
        refused
        and f"it refuses {MLFLOW_SECRET}: {refused}; a user that is there keeps the password it has"
    )


def _worker(settings: StackSettings, secrets: Secrets, since: float) -> str | None:
    if found := _asked(f"http://127.0.0.1:{settings.worker_port}/health"):
        return found
    heard = _last_heard(settings, secrets)  # its own endpoint answers before it can take a run
    return "Prefect has not heard of it yet" if heard is not None and heard < since else None


def _last_heard(settings: StackSettings, secrets: Secrets) -> float | None:
    """When a worker last told the server that it lives, in seconds since 1970; 0 where none did,
    None where the server cannot be asked."""
    try:
        workers = json.loads(
            ask(
                f"{settings.prefect_url}/api/work_pools/{POOL}/workers/filter",
                secrets.prefect,
                b"{}",
            )
        )
    except (OSError, ValueError):
        return None
    return max(
        (
            datetime.fromisoformat(one["last_heartbeat_time"]).timestamp()
            for one in workers
            if one["last_heartbeat_time"]
        ),
        default=0.0,
    )


def ask(url: str, auth: str | None = None, body: bytes | None = None) -> bytes:
    """The answer to a request within `ANSWER_S`; with a body it is a POST of JSON. Raises OSError,
    HTTPError where it is refused."""
    try:
        with DIRECT.open(_request(url, auth, body), timeout=ANSWER_S) as answer:
            return answer.read()
    except http.client.HTTPException as error:
        raise OSError(f"no answer: {error}") from error


def _request(
    url: str, auth: str | None = None, body: bytes | None = None
) -> urllib.request.Request:
    request = urllib.request.Request(
        url, data=body, headers={"Content-Type": "application/json"} if body else {}
    )
    if auth:
        request.add_header("Authorization", "Basic " + base64.b64encode(auth.encode()).decode())
    return request


def _asked(url: str, expected: bytes | None = None, auth: str | None = None) -> str | None:
    try:
        with DIRECT.open(_request(url, auth), timeout=ANSWER_S) as answer:
            said = answer.read(100).strip()
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return None if expected is None or said == expected else "something else answers there"


def _ray(places: Places, settings: StackSettings, secrets: Secrets) -> str | None:
    import grpc

    metadata = []
    with contextlib.suppress(OSError):
        metadata = [
            (
                "authorization",
                f"Bearer {Path(places.ray_token).read_text(encoding='ascii').strip()}",
            )
        ]
    try:
        with grpc.insecure_channel(
            settings.ray_address, options=[("grpc.enable_http_proxy", 0)]
        ) as channel:
            answer = channel.unary_unary(NODES_QUESTION)(b"", timeout=ANSWER_S, metadata=metadata)
    except grpc.RpcError as error:
        return (
            (error.details() or error.code().name)
            .splitlines()[0]
            .rpartition("last error: ")[2][-120:]
        )
    return None if NODES_FIELD in fields(answer) else "no node has joined yet"


def fields(message: bytes) -> set[int]:
    """Numbers of the fields of a protocol buffer: importing Ray's own reader would cost the
    supervisor 60 MB."""
    found, place = set(), 0

    def number() -> int:
        nonlocal place
        value = shift = 0
        while True:
            value |= (message[place] & 0x7F) << shift
            place, shift = place + 1, shift + 7
            if message[place - 1] < 0x80:
                return value

    while place < len(message):
        key = number()
        found.add(key >> 3)
        if key & 7 == 0:
            number()
        else:
            size = number() if key & 7 == 2 else {1: 8, 5: 4}[key & 7]
            place += size
    return found
