"""Is a part well? Each is asked at its own endpoint, as its users would ask it.

Guarantees: an answer within `ANSWER_S`; a proxy in the environment is not used. Where a secret is given, it is tried too: a server that
answers but refuses it is not well.
"""

from __future__ import annotations

import base64
import http.client
import urllib.error
import urllib.request
from pathlib import Path

from flows.stack.places import Places
from flows.stack.settings import MLFLOW_SECRET, PREFECT_SECRET, Part, Secrets, StackSettings

ANSWER_S = 5.0
DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))
HEAD_QUESTION = "/ray.rpc.NodeInfoGcsService/GetClusterId"


def fault(part: Part, places: Places, settings: StackSettings, secrets: Secrets) -> str | None:
    """Why a part is not well; None where it is."""
    return {"prefect": _prefect, "mlflow": _mlflow, "worker": _worker, "ray": _ray}[part](places, settings, secrets)


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
    return refused and f"it refuses {MLFLOW_SECRET}: {refused}; a user that is there keeps the password it has"


def _worker(places: Places, settings: StackSettings, secrets: Secrets) -> str | None:
    return _asked(f"http://127.0.0.1:{settings.worker_port}/health")


def _asked(url: str, expected: bytes | None = None, auth: str | None = None) -> str | None:
    request = urllib.request.Request(url)
    if auth:
        request.add_header("Authorization", "Basic " + base64.b64encode(auth.encode()).decode())
    try:
        with DIRECT.open(request, timeout=ANSWER_S) as answer:
            said = answer.read(100).strip()
    except urllib.error.HTTPError as error:
        return f"status {error.code}"
    except (OSError, http.client.HTTPException) as error:
        return str(getattr(error, "reason", error)) or type(error).__name__
    return None if expected is None or said == expected else "something else answers there"


def _ray(places: Places, settings: StackSettings, secrets: Secrets) -> str | None:
    import grpc

    metadata = []
    try:
        metadata = [("authorization", f"Bearer {Path(places.ray_token).read_text(encoding='ascii').strip()}")]
    except OSError:
        pass
    try:
        with grpc.insecure_channel(settings.ray_address, options=[("grpc.enable_http_proxy", 0)]) as channel:
            channel.unary_unary(HEAD_QUESTION)(b"", timeout=ANSWER_S, metadata=metadata)
    except grpc.RpcError as error:
        return (error.details() or error.code().name).splitlines()[0].rpartition("last error: ")[2][-120:]
    return None
