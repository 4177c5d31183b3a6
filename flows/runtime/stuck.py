"""Which runs are stuck, and what is to be done about each. Pure: what Prefect says of a run in, a
finding out.

Guarantees: a run that gave any sign of life within its limit is left alone, whatever else is odd
about it; each finding says which limit was passed, by how much, and why it matters. All times are
UTC; limits are minutes.
"""

from __future__ import annotations

from datetime import datetime
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.records import Record


class WatchdogConfig(BaseModel):
    """How long a run may be in each state without a sign of life."""

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
            "a scheduled run that nobody takes; after it: told, and dropped where a later one waits"
        ),
    )
    tag: str | None = Field(
        default=None,
        min_length=1,
        title="Tag",
        description="watch over runs with this tag only; null: all runs",
    )


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
    found = [
        each for run in runs if run.state != "SCHEDULED" and (each := _judged(run, now, config))
    ]
    return [*found, *_late([run for run in runs if run.state == "SCHEDULED"], now, config)]


def _judged(run: RunFacts, now: datetime, config: WatchdogConfig) -> Stuck | None:
    in_state, silent = (
        _minutes(now, run.since),
        _minutes(now, max(run.last_sign, run.last_heartbeat or run.last_sign)),
    )
    if run.state == "PENDING" and in_state > config.pending_min:
        return _stuck(
            run,
            in_state,
            "crash",
            f"pending for {in_state:.0f} min (limit {config.pending_min:g}): the process never"
            " came up",
        )
    if run.state == "CANCELLING" and in_state > config.cancelling_min:
        return _stuck(
            run,
            in_state,
            "crash",
            f"cancelling for {in_state:.0f} min (limit {config.cancelling_min:g}): no worker"
            " ended it",
        )
    if run.state != "RUNNING":
        return None
    if run.last_heartbeat is not None and silent > config.heartbeat_min:
        return _stuck(
            run,
            silent,
            "crash",
            f"no heartbeat and no other sign for {silent:.0f} min (limit {config.heartbeat_min:g}):"
            " its process is gone",
        )
    if run.workers_online == 0 and silent > config.heartbeat_min:
        return _stuck(
            run,
            silent,
            "crash",
            f"no sign for {silent:.0f} min (limit {config.heartbeat_min:g}), and its pool has no"
            " worker online",
        )
    quiet = _minutes(now, run.last_sign)
    if quiet > config.silent_min:
        return _stuck(
            run,
            quiet,
            "cancel",
            f"no progress for {quiet:.0f} min (limit {config.silent_min:g}), though its process"
            " lives",
        )
    return None


def _late(runs: list[RunFacts], now: datetime, config: WatchdogConfig) -> list[Stuck]:
    """Of several late runs of a deployment only the newest has work that the others would not do as
    well."""
    newest: dict[str, datetime] = {}
    for run in runs:
        if run.deployment_id:
            newest[run.deployment_id] = max(run.since, newest.get(run.deployment_id, run.since))
    found = []
    for run in runs:
        late = _minutes(now, run.since)
        if late <= config.late_min:
            continue
        nobody = ", and its pool has no worker online" if run.workers_online == 0 else ""
        why = f"late by {late:.0f} min (limit {config.late_min:g}){nobody}"
        if run.deployment_id and run.since < newest[run.deployment_id]:
            found.append(
                _stuck(
                    run,
                    late,
                    "drop",
                    f"{why}; a later run of its deployment waits, which does the same work",
                )
            )
        else:
            found.append(_stuck(run, late, "tell", why))
    return found


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
