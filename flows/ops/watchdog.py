"""Frees what stuck flow runs hold: the slot of a deployment that runs one at a time, above all.

Guarantees: the state of a run that was ended says which limit it passed; a run that moved between
the look and the act is left alone; a run is never touched twice for one reason, because its state
has changed. Does not end processes itself: `cancel` asks the worker, `crash` is for runs whose
process is gone. Looks at runs that are no subflows; the unfinished runs below one that is crashed
are crashed with it. `judge` (flows.ops.stuck) decides, this module asks Prefect and acts.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, cast
from uuid import UUID

from prefect import flow

from flows.ops.runs import PAGE, Ask, end_run, runs_below
from flows.ops.stuck import RunFacts, Stuck, WatchdogConfig, judge
from kernels_eval.errors import EvalError
from tasks.reporting.text import cells

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient
    from prefect.client.orchestration.routes import ServerRoutes
    from prefect.client.schemas.objects import FlowRun

WATCHED = ("PENDING", "RUNNING", "CANCELLING")
HEARTBEAT = "prefect.flow-run.heartbeat"
SIGNATURE = "concur watchdog"
SIGNS = (
    ("task_runs/filter", ("flow_runs", "id"), "EXPECTED_START_TIME_DESC", "updated"),
    ("flow_runs/filter", ("flow_runs", "id"), "START_TIME_DESC", "updated"),
    ("artifacts/filter", ("artifacts", "flow_run_id"), "UPDATED_DESC", "updated"),
    ("logs/filter", ("logs", "flow_run_id"), "TIMESTAMP_DESC", "timestamp"),
)
"""What a run leaves while it works: where it is asked for, by what, in which order, and its
time."""


@flow(name="watch over runs", flow_run_name="watch over runs", log_prints=False)
def watch_runs(config: WatchdogConfig | None = None, dry_run: bool = False) -> list[dict[str, Any]]:
    """Find stuck runs, act, and report it in a table. To be scheduled every few minutes on a pool
    that always has a worker."""
    from prefect.artifacts import create_table_artifact
    from prefect.logging import get_run_logger
    from prefect.runtime import flow_run

    done = watch(config or WatchdogConfig(), dry_run=dry_run, without=str(flow_run.id))
    for each in done:
        get_run_logger().warning(
            "%s %s: %s (%s)", each["action"], each["name"], each["why"], each["done"]
        )
    create_table_artifact(
        key="watchdog", table=cells(done), description="Runs that were stuck, and what was done"
    )
    return done


def watch(
    config: WatchdogConfig, *, dry_run: bool = False, without: str = "", now: datetime | None = None
) -> list[dict[str, Any]]:
    """Every stuck run, with `done`: what came of it. `without` is a run that is not looked at.

    Raises EvalError where Prefect does not answer.
    """
    with _prefect() as client:
        found = judge(list(_facts(client, config, without)), now or datetime.now(UTC), config)
        return [
            stuck.model_dump() | {"done": "nothing: a dry run" if dry_run else _act(client, stuck)}
            for stuck in found
        ]


@contextmanager
def _prefect() -> Iterator[SyncPrefectClient]:
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    try:
        with get_client(sync_client=True) as client:
            yield client
    except (HTTPError, OSError, RuntimeError) as error:
        address = get_current_settings().api.url or "no address"
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise EvalError(
            f"Prefect at {address} does not answer: {reason}",
            "check that its server runs, and PREFECT_API_URL",
        ) from error


def _asking(client: SyncPrefectClient) -> Ask:
    def ask(path: str, body: Any) -> Any:
        return client.request("POST", cast("ServerRoutes", f"/{path}"), json=body).json()

    return ask


def _facts(client: SyncPrefectClient, config: WatchdogConfig, without: str) -> Iterator[RunFacts]:
    online: dict[str, int] = {}
    for run in _runs(client, config):
        if str(run.id) == without or run.state is None:
            continue
        pool = run.work_pool_name
        if pool and pool not in online:
            wanted = {"workers": {"status": {"any_": ["ONLINE"]}}}
            online[pool] = len(_asking(client)(f"work_pools/{pool}/workers/filter", wanted))
        since = run.state.timestamp
        if run.state.is_scheduled():
            since = run.next_scheduled_start_time or run.expected_start_time or since
        yield RunFacts(
            run_id=str(run.id),
            name=run.name,
            deployment_id=str(run.deployment_id) if run.deployment_id else None,
            state=run.state.type.value,
            state_name=run.state.name or run.state.type.value,
            since=since,
            last_sign=since if run.state.is_scheduled() else _last_sign(client, run),
            last_heartbeat=_last_heartbeat(client, run.id) if run.state.is_running() else None,
            workers_online=online.get(pool) if pool else None,
        )


def _runs(client: SyncPrefectClient, config: WatchdogConfig) -> Iterator[FlowRun]:
    """Top-level runs in a state that can be stuck, and those that are late."""
    from prefect.client.schemas.filters import FlowRunFilter
    from prefect.client.schemas.sorting import FlowRunSort

    common: dict[str, Any] = {"parent_task_run_id": {"is_null_": True}}
    if config.tag:
        common["tags"] = {"all_": [config.tag]}
    late = (datetime.now(UTC) - timedelta(minutes=config.late_min)).isoformat()
    scheduled = {"type": {"any_": ["SCHEDULED"]}, "name": {"any_": ["Late", "Scheduled"]}}
    for condition in (
        {"state": {"type": {"any_": list(WATCHED)}}},
        {"state": scheduled, "next_scheduled_start_time": {"before_": late}},
    ):
        offset = 0
        while page := client.read_flow_runs(
            flow_run_filter=FlowRunFilter.model_validate(common | condition),
            sort=FlowRunSort.EXPECTED_START_TIME_ASC,
            limit=PAGE,
            offset=offset,
        ):
            yield from page
            offset += PAGE
            if len(page) < PAGE:
                break


def _last_sign(client: SyncPrefectClient, run: FlowRun) -> datetime:
    """The newest of everything that a run leaves while it works, its subflows' included."""
    ids = [str(run.id), *(child["id"] for child in runs_below(_asking(client), str(run.id)))]
    signs = [run.state.timestamp if run.state else run.created]
    for path, (table, column), order, key in SIGNS:
        body = {table: {column: {"any_": ids}}, "sort": order, "limit": 20}
        rows = _asking(client)(path, body)
        signs += [datetime.fromisoformat(row[key]) for row in rows if row.get(key)]
    return max(sign for sign in signs if sign is not None)


def _last_heartbeat(client: SyncPrefectClient, run_id: UUID) -> datetime | None:
    wanted = {
        "event": {"name": [HEARTBEAT]},
        "resource": {"id": [f"prefect.flow-run.{run_id}"]},
        "order": "DESC",
    }
    events = _asking(client)("events/filter", {"filter": wanted, "limit": 1})["events"]
    return datetime.fromisoformat(events[0]["occurred"]) if events else None


def _act(client: SyncPrefectClient, stuck: Stuck) -> str:
    """Act, unless the run has moved meanwhile. Returns what came of it."""
    from prefect.states import Cancelled, Cancelling

    if stuck.action == "tell":
        return "told"
    run = client.read_flow_run(UUID(stuck.run_id))
    state = run.state
    if state is None or (state.name or state.type.value) != stuck.state:
        return f"nothing: it is {state.name if state else 'gone'} by now"
    message = f"{SIGNATURE}: {stuck.why}"
    if stuck.action == "cancel":
        client.set_flow_run_state(run.id, Cancelling(message=message))
        return "its worker was asked to cancel it"
    if stuck.action == "drop":
        client.set_flow_run_state(run.id, Cancelled(message=message))
        return "dropped before it started"
    ended = end_run(_asking(client), str(run.id), state.type.value, message)
    return (
        "cancelled without its worker" if ended == "CANCELLED" else "crashed, and its slot is free"
    )
