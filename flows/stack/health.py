"""Health of a stack's parts, each asked at its own endpoint as users would, without the
environment's proxies."""

from __future__ import annotations

import socket
from contextlib import suppress
from datetime import UTC, datetime
from functools import partial
from typing import Any

import httpx

from flows.stack.layout import Layout, Part, StackSettings
from kernels_eval.records import Json
from tasks.tracking.config import PARENTS, TrackingConfig, page_of

ANSWER_S = 5.0
POOL = "concur"
UNDER_WAY = ["RUNNING", "PENDING", "SCHEDULED", "PAUSED", "CANCELLING"]
"""Prefect's types of states in which a run is not over."""
NOT_YET = "not listening yet"
RAY_SAYS = {
    "UNAVAILABLE": NOT_YET,
    "DEADLINE_EXCEEDED": f"listens, but has not answered within {ANSWER_S:.0f} s",
    "UNAUTHENTICATED": "another Ray answers there",
    "UNIMPLEMENTED": "something else answers there",
}
"""What an error of gRPC means for its head."""
NODE_INFO_LIST = 2
"""The field of ray.rpc.GetAllNodeInfoReply that holds a cluster's nodes (gcs_service.proto)."""


def fault(part: Part, layout: Layout, settings: StackSettings, since: float = 0.0) -> str:
    """Why a part is not healthy, or empty. A worker is once Prefect has heard of it after `since`
    (seconds since 1970)."""
    match part:
        case "prefect":
            return _http_fault(f"{settings.prefect_url}/api/health", "true")
        case "mlflow":
            return _http_fault(f"{settings.mlflow_url}/health", "OK")
        case "worker":
            return _worker_fault(settings, since)
        case "ray":
            return _ray_fault(layout, settings)


def scores_page(settings: StackSettings) -> str | None:
    """MLflow's charts of all runs, of the only one its page; None before the first run."""
    name, api = TrackingConfig().experiment, f"{settings.mlflow_url}/api/2.0/mlflow"
    try:
        found = _request(f"{api}/experiments/get-by-name?experiment_name={name}").json()
        experiment = str(found["experiment"]["experiment_id"])
        asked = {"experiment_ids": [experiment], "filter": PARENTS, "max_results": 2}
        runs = _request(f"{api}/runs/search", asked).json().get("runs", [])
        ids = [run["info"]["run_id"] for run in runs]
    except (httpx.HTTPError, ValueError, KeyError, TypeError):
        return None
    if len(ids) == 1:
        return page_of(settings.mlflow_url, experiment, f"runs/{ids[0]}")
    return page_of(settings.mlflow_url, experiment, "runs", "scores")


def runs_under_way(settings: StackSettings) -> list[Json]:
    """Prefect's runs that have begun or are due: state, seconds since then, and what each is at."""
    api, now = f"{settings.prefect_url}/api", datetime.now(UTC)
    asked = {
        "state": {"type": {"any_": UNDER_WAY}},
        "parent_task_run_id": {"is_null_": True},
        "expected_start_time": {"before_": now.isoformat()},
    }
    try:
        runs = _request(f"{api}/flow_runs/filter", {"flow_runs": asked}).json()
        ids = [run["id"] for run in runs]
        of_these = {"flow_run_id": {"any_": ids}, "type": {"any_": ["progress"]}}
        told = _request(f"{api}/artifacts/filter", {"artifacts": of_these}).json() if ids else []
    except (httpx.HTTPError, ValueError):
        return []
    at = {artifact["flow_run_id"]: artifact["description"] for artifact in told}
    return [
        {
            "run": run["name"],
            "state": run["state_name"].lower(),
            "under_way_s": round((now - _began(run)).total_seconds()),
            "at": at.get(run["id"], ""),
        }
        for run in runs
    ]


def _began(run: Json) -> datetime:
    return datetime.fromisoformat(run["start_time"] or run["expected_start_time"])


def worker_name() -> str:
    return f"{POOL}-{socket.gethostname()}"


def _http_fault(url: str, expected: str) -> str:
    try:
        answer = _request(url).text.strip()
    except httpx.HTTPStatusError as error:
        return f"status {error.response.status_code}"
    except httpx.ConnectError:
        return NOT_YET
    except httpx.HTTPError as error:
        return str(error) or type(error).__name__
    return "" if answer == expected else "something else answers there"


def _worker_fault(settings: StackSettings, since: float) -> str:
    url = f"{settings.prefect_url}/api/work_pools/{POOL}/workers/filter"
    try:
        workers = _request(url, {}).json()
    except httpx.HTTPStatusError:
        return "Prefect does not know it yet"
    except (httpx.HTTPError, ValueError):
        return "Prefect does not answer yet"
    for worker in workers:
        heard = datetime.fromisoformat(worker["last_heartbeat_time"]).timestamp()
        if worker["name"] == worker_name() and heard >= since:
            return "" if worker["status"] == "ONLINE" else "it sends Prefect no heartbeat"
    return "Prefect has not heard of it yet"


def _ray_fault(layout: Layout, settings: StackSettings) -> str:
    import grpc
    from google.protobuf.empty_pb2 import Empty
    from google.protobuf.unknown_fields import UnknownFieldSet

    metadata = []
    with suppress(OSError):
        token = layout.ray_token.read_text(encoding="ascii").strip()
        metadata = [("authorization", f"Bearer {token}")]
    options = [("grpc.enable_http_proxy", 0)]
    try:
        with grpc.insecure_channel(settings.ray_address, options=options) as channel:
            ask_nodes = channel.unary_unary("/ray.rpc.NodeInfoGcsService/GetAllNodeInfo")
            answer = ask_nodes(b"", timeout=ANSWER_S, metadata=metadata)
    except grpc.RpcError as error:
        return RAY_SAYS.get(error.code().name, f"answers {error.code().name.lower()}")
    # A head that has just started answers with an empty list. Ray's own messages would import Ray.
    fields = UnknownFieldSet(Empty.FromString(answer))
    nodes = any(field.field_number == NODE_INFO_LIST for field in fields)
    return "" if nodes else "no node has joined yet"


def _request(url: str, body: Any = None) -> httpx.Response:
    method = "GET" if body is None else "POST"
    # to load certificates, which http needs none of, takes 60 ms of a core
    ask = partial(httpx.request, timeout=ANSWER_S, trust_env=False, verify=False)
    return ask(method, url, json=body).raise_for_status()
