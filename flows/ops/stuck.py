"""Which flow runs are stuck, and what is to be done about each: a pure function of what Prefect
says of them.

Guarantees: a run that gave any sign of life within its limit is left alone; each finding says which
limit was passed and by how much. Times are UTC; limits are minutes.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.records import Record


class WatchdogConfig(BaseModel):
    """How many minutes a run may be in each state without a sign of life."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Watchdog")

    pending_min: float = Field(
        default=10,
        gt=0,
        title="Pending, min",
        description="from being taken by a worker to its process running; after it: crashed",
    )
    heartbeat_min: float = Field(
        default=15,
        gt=3,
        title="Without heartbeat, min",
        description=(
            "a process that lives sends one every 3 minutes (PREFECT_FLOWS_HEARTBEAT_FREQUENCY);"
            " after it: crashed"
        ),
    )
    silent_min: float = Field(
        default=180,
        gt=0,
        title="Without progress, min",
        description=(
            "no new state, task run, artifact or log line, though its process lives; after it:"
            " cancelled, so that it ends"
        ),
    )
    cancelling_min: float = Field(
        default=5,
        gt=0,
        title="Cancelling, min",
        description="for the worker that should end it; after it: cancelled without its worker",
    )
    late_min: float = Field(
        default=60,
        gt=0,
        title="Late, min",
        description=(
            "a scheduled run that no worker takes; after it: reported, and dropped where a later"
            " one waits"
        ),
    )
    tag: str | None = Field(
        default=None,
        min_length=1,
        title="Tag",
        description="watch over runs with this tag only; null: all runs",
    )


class RunFacts(Record):
    """What is known of one flow run. Times are UTC."""

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


Action = Literal["crash", "cancel", "drop", "tell"]


class Stuck(Record):
    """One run, and what is to be done: `crash` it, ask its worker to `cancel` it, `drop` it before
    it starts, or only `tell`."""

    run_id: str
    name: str
    state: str
    minutes: float
    action: Action
    why: str


def judge(runs: list[RunFacts], now: datetime, config: WatchdogConfig) -> list[Stuck]:
    """Findings, in the order of the runs; a run that is not stuck has none."""
    late = [run for run in runs if run.state == "SCHEDULED"]
    found = [stuck for run in runs if (stuck := _judge(run, now, config))]
    return [*found, *_late(late, now, config)]


def _judge(run: RunFacts, now: datetime, config: WatchdogConfig) -> Stuck | None:
    """The first limit that a run has passed."""
    in_state, quiet = _minutes(now, run.since), _minutes(now, run.last_sign)
    silent = min(quiet, _minutes(now, run.last_heartbeat or run.last_sign))
    running = run.state == "RUNNING"
    beats, alone = run.last_heartbeat is not None, run.workers_online == 0
    pending, cancelling = config.pending_min, config.cancelling_min
    heartbeat, progress = config.heartbeat_min, config.silent_min
    rules: tuple[tuple[bool, float, float, Action, str], ...] = (
        (
            run.state == "PENDING",
            in_state,
            pending,
            "crash",
            "pending for {}: the process never came up",
        ),
        (
            run.state == "CANCELLING",
            in_state,
            cancelling,
            "crash",
            "cancelling for {}: no worker ended it",
        ),
        (
            running and beats,
            silent,
            heartbeat,
            "crash",
            "no heartbeat and no other sign for {}: its process is gone",
        ),
        (
            running and alone,
            silent,
            heartbeat,
            "crash",
            "no sign for {}, and its pool has no worker online",
        ),
        (running, quiet, progress, "cancel", "no progress for {}, though its process lives"),
    )
    for applies, minutes, limit, action, why in rules:
        if applies and minutes > limit:
            return _stuck(run, minutes, action, why.format(f"{minutes:.0f} min (limit {limit:g})"))
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
            why += "; a later run of its deployment waits, which does the same work"
            yield _stuck(run, minutes, "drop", why)
        else:
            yield _stuck(run, minutes, "tell", why)


def _stuck(run: RunFacts, minutes: float, action: Action, why: str) -> Stuck:
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
