"""Frees what stuck flow runs hold: the slot of a deployment that runs one at a time, above all.

Guarantees: a run that gave any sign of life within its limit is left alone; the state of a run that
was ended says which limit it passed, and by how much; a run that moved between the look and the act
is left alone; a run is never touched twice for one reason, because its state has changed. Does not
end processes itself: `cancel` asks the worker, `crash` is for runs whose process is gone. Looks at
runs that are no subflows; the unfinished runs below one that is crashed are crashed with it. What
Prefect can find by itself (pending, no heartbeat), `deployments/automations/free-the-slot.yaml`
does without this. Times are UTC; limits are minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Any, Literal, cast

from prefect import flow

from flows.ops.runs import Ask, end_run, matching_runs, runs_below, set_state
from flows.runtime.config import WatchdogConfig
from kernels_eval.errors import EvalError, cause_of
from kernels_eval.records import Json, Record
from tasks.reporting.text import cells

if TYPE_CHECKING:
    from prefect.client.orchestration.routes import ServerRoutes

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
Action = Literal["crash", "cancel", "drop", "tell"]
"""End it without its process, ask its worker to end it, drop it before it starts, or only tell."""


class RunFacts(Record):
    """What is known of one flow run."""

    run_id: str
    name: str
    deployment_id: str | None
    state: str
    """Prefect's state type: PENDING, RUNNING, CANCELLING or SCHEDULED."""

    state_name: str
    since: datetime
    """When it came into this state; for a scheduled run when it should have started."""

    last_sign: datetime
    """The newest of: state, task runs and subflows, artifacts, log lines."""

    last_heartbeat: datetime | None = None
    """None where none was ever sent: heartbeats are off, or the run is younger than the first."""

    workers_online: int | None = None
    """Of its work pool; None where it has none."""


class Stuck(Record):
    """One run, and what is to be done."""

    run_id: str
    name: str
    state: str
    minutes: float
    action: Action
    why: str


@flow(name="watch over runs", flow_run_name="watch over runs", log_prints=False)
def watch_runs(config: WatchdogConfig | None = None, dry_run: bool = False) -> list[Json]:
    """Find stuck runs, act, and report it in a table. To be scheduled every few minutes on a pool
    that always has a worker."""
    from prefect.artifacts import create_table_artifact
    from prefect.logging import get_run_logger
    from prefect.runtime import flow_run

    done = watch(config or WatchdogConfig(), dry_run=dry_run, without=str(flow_run.id))
    for each in done:
        get_run_logger().warning("{action} {name}: {why} ({done})".format_map(each))
    create_table_artifact(
        key="watchdog", table=cells(done), description="Runs that were stuck, and what was done"
    )
    return done


def watch(
    config: WatchdogConfig, *, dry_run: bool = False, without: str = "", now: datetime | None = None
) -> list[Json]:
    """Every stuck run, with `done`: what came of it. `without` is a run that is not looked at.

    Raises EvalError where Prefect does not answer.
    """
    with _prefect() as ask:
        found = judge(list(_facts(ask, config, without)), now or datetime.now(UTC), config)
        return [
            stuck.model_dump() | {"done": "nothing: a dry run" if dry_run else _act(ask, stuck)}
            for stuck in found
        ]


# -- what is stuck: a pure function of the facts ---------------------------------------------------


def judge(runs: list[RunFacts], now: datetime, config: WatchdogConfig) -> list[Stuck]:
    """Findings: runs that have begun in their order, then late ones."""
    begun = [stuck for run in runs if (stuck := _stuck(run, now, config))]
    return [*begun, *_late([run for run in runs if run.state == "SCHEDULED"], now, config)]


def _stuck(run: RunFacts, now: datetime, config: WatchdogConfig) -> Stuck | None:
    """The first limit that a run has passed."""
    in_state, quiet = _minutes(now, run.since), _minutes(now, run.last_sign)
    silent = min(quiet, _minutes(now, run.last_heartbeat or run.last_sign))
    rules: list[tuple[float, float, Action, str]] = []
    if run.state == "PENDING":
        why = "pending for {}: its process never started"
        rules.append((in_state, config.pending_min, "crash", why))
    elif run.state == "CANCELLING":
        why = "cancelling for {}: no worker ended it"
        rules.append((in_state, config.cancelling_min, "crash", why))
    elif run.state == "RUNNING":
        if run.last_heartbeat is not None:
            why = "no heartbeat and no other sign of life for {}: its process has ended"
            rules.append((silent, config.heartbeat_min, "crash", why))
        elif run.workers_online == 0:
            why = "no sign for {}, and its pool has no worker online"
            rules.append((silent, config.heartbeat_min, "crash", why))
        rules.append(
            (
                quiet,
                config.silent_min,
                "cancel",
                "no progress for {}, although its process is alive",
            )
        )
    for minutes, limit, action, why in rules:
        if minutes > limit:
            return _found(run, minutes, action, why.format(f"{minutes:.0f} min (limit {limit:g})"))
    return None


def _late(runs: list[RunFacts], now: datetime, config: WatchdogConfig) -> Iterator[Stuck]:
    """Of several late runs of a deployment only the newest has work that the others would not do as
    well."""
    newest: dict[str | None, datetime] = {}
    for run in runs:
        newest[run.deployment_id] = max(run.since, newest.get(run.deployment_id, run.since))
    for run in runs:
        minutes = _minutes(now, run.since)
        if minutes <= config.late_min:
            continue
        abandoned = ", and its pool has no worker online" if run.workers_online == 0 else ""
        why = f"late by {minutes:.0f} min (limit {config.late_min:g}){abandoned}"
        if run.deployment_id and run.since < newest[run.deployment_id]:
            why += "; a later run of its deployment is waiting and does the same work"
            yield _found(run, minutes, "drop", why)
        else:
            yield _found(run, minutes, "tell", why)


def _found(run: RunFacts, minutes: float, action: Action, why: str) -> Stuck:
    return Stuck(
        run_id=run.run_id,
        name=run.name,
        state=run.state_name,
        minutes=round(minutes, 1),
        action=action,
        why=why,
    )


def _minutes(now: datetime, then: datetime) -> float:
    return max(0.0, (now - then).total_seconds() / 60)


# -- Prefect ---------------------------------------------------------------------------------------


@contextmanager
def _prefect() -> Iterator[Ask]:
    from httpx import HTTPError
    from prefect.client.orchestration import get_client
    from prefect.settings import get_current_settings

    def ask(path: str, body: Any) -> Any:
        route = cast("ServerRoutes", f"/{path}")
        return client.request("GET" if body is None else "POST", route, json=body).json()

    try:
        with get_client(sync_client=True) as client:
            yield ask
    except (HTTPError, OSError, RuntimeError) as error:
        address = get_current_settings().api.url or "no address"
        reason = cause_of(error)
        raise EvalError(
            f"Prefect at {address} does not answer: {reason}",
            "check that its server runs, and PREFECT_API_URL",
        ) from error


def _facts(ask: Ask, config: WatchdogConfig, without: str) -> Iterator[RunFacts]:
    online: dict[str | None, int | None] = {None: None}
    for run in _candidates(ask, config):
        if run["id"] == without:
            continue
        pool, state = run["work_pool_name"], run["state"]
        if pool not in online:
            wanted = {"workers": {"status": {"any_": ["ONLINE"]}}}
            online[pool] = len(ask(f"work_pools/{pool}/workers/filter", wanted))
        since = datetime.fromisoformat(state["timestamp"])
        scheduled = state["type"] == "SCHEDULED"
        if scheduled and (due := run["next_scheduled_start_time"] or run["expected_start_time"]):
            since = datetime.fromisoformat(due)
        yield RunFacts(
            run_id=run["id"],
            name=run["name"],
            deployment_id=run["deployment_id"],
            state=state["type"],
            state_name=state["name"],
            since=since,
            last_sign=since if scheduled else max([since, *_signs(ask, run["id"])]),
            last_heartbeat=_last_heartbeat(ask, run["id"]) if state["type"] == "RUNNING" else None,
            workers_online=online[pool],
        )


def _candidates(ask: Ask, config: WatchdogConfig) -> Iterator[Json]:
    """Top-level runs in a state that can be stuck, and those that are late."""
    common: Json = {"parent_task_run_id": {"is_null_": True}}
    if config.tag:
        common["tags"] = {"all_": [config.tag]}
    late = (datetime.now(UTC) - timedelta(minutes=config.late_min)).isoformat()
    scheduled = {"type": {"any_": ["SCHEDULED"]}, "name": {"any_": ["Late", "Scheduled"]}}
    for condition in (
        {"state": {"type": {"any_": ["PENDING", "RUNNING", "CANCELLING"]}}},
        {"state": scheduled, "next_scheduled_start_time": {"before_": late}},
    ):
        yield from matching_runs(ask, common | condition, "EXPECTED_START_TIME_ASC")


def _signs(ask: Ask, run: str) -> Iterator[datetime]:
    """The times of what a run left while it worked, its subflows' included."""
    ids = [run, *(child["id"] for child in runs_below(ask, run))]
    for path, (table, column), order, key in SIGNS:
        rows = ask(path, {table: {column: {"any_": ids}}, "sort": order, "limit": 20})
        yield from (datetime.fromisoformat(row[key]) for row in rows if row.get(key))


def _last_heartbeat(ask: Ask, run: str) -> datetime | None:
    wanted = {
        "event": {"name": [HEARTBEAT]},
        "resource": {"id": [f"prefect.flow-run.{run}"]},
        "order": "DESC",
    }
    events = ask("events/filter", {"filter": wanted, "limit": 1})["events"]
    return datetime.fromisoformat(events[0]["occurred"]) if events else None


def _act(ask: Ask, stuck: Stuck) -> str:
    """Act, unless the run has moved meanwhile. Returns what came of it."""
    if stuck.action == "tell":
        return "told"
    state = ask(f"flow_runs/{stuck.run_id}", None)["state"]
    if state["name"] != stuck.state:
        return f"nothing: it is {state['name']} by now"
    message = f"{SIGNATURE}: {stuck.why}"
    if stuck.action == "cancel":
        set_state(ask, stuck.run_id, "CANCELLING", message)
        return "its worker was asked to cancel it"
    if stuck.action == "drop":
        set_state(ask, stuck.run_id, "CANCELLED", message)
        return "dropped before it started"
    ended = end_run(ask, stuck.run_id, state["type"], message)
    return (
        "cancelled without its worker" if ended == "CANCELLED" else "crashed, and its slot is free"
    )
