"""How a run guards itself, and when it counts as stuck. None of it decides what a snapshot holds,
so none of it is part of a fingerprint."""

from __future__ import annotations

from pydantic import Field

from kernels_eval.records import Record


class NotifyConfig(Record, title="Notices"):
    """Notices of runs that fail. `flows.runtime.notices` lists their content; it contains no text
    of a candidate."""

    command: tuple[str, ...] = Field(default=(), title="Command")
    """a program and its arguments, run without a shell; it gets the notice as JSON on standard
    input, and CONCUR_NOTICE_* in its environment"""

    webhook_env: str | None = Field(default=None, min_length=1, title="Webhook (environment)")
    """name of the environment variable that holds the address which the notice is posted to as
    JSON; the address is a secret and is never logged"""

    webhook_block: str | None = Field(default=None, min_length=1, title="Webhook (secret block)")
    """name of a Prefect secret block that holds the address instead"""

    timeout_s: float = Field(default=10.0, gt=0, le=60, title="Time limit, s")
    """for the command, and for the webhook"""


class GuardConfig(Record, title="Guard"):
    """Disk, and notices."""

    reserve_gib: float = Field(default=2.0, ge=0, title="Disk reserve, GiB")
    """free space that a run leaves on every file system it writes to: below it, no run starts
    and a running one stops, resumable; 0: no check"""

    notify: NotifyConfig = NotifyConfig()


class GuardedRun(Record):
    """What the guards know of a run."""

    root: str
    reserve_gib: float = 2.0
    candidates_per_task: int = 1
    answer_tokens: int | None = None
    """The most tokens of an answer; None where answers are recorded ones."""


class WatchdogConfig(Record, title="Watchdog"):
    """How many minutes a run may be in each state without a sign of life."""

    pending_min: float = Field(default=10, gt=0, title="Pending, min")
    """from being taken by a worker to its process running; after it: crashed"""

    heartbeat_min: float = Field(default=15, gt=3, title="Without heartbeat, min")
    """a process that lives sends one every 3 minutes (PREFECT_FLOWS_HEARTBEAT_FREQUENCY);
    after it: crashed"""

    silent_min: float = Field(default=180, gt=0, title="Without progress, min")
    """no new state, task run, artifact or log line, though its process lives; after it:
    cancelled, so that it ends"""

    cancelling_min: float = Field(default=5, gt=0, title="Cancelling, min")
    """for the worker that should end it; after it: cancelled without its worker"""

    late_min: float = Field(default=60, gt=0, title="Late, min")
    """a scheduled run that no worker takes; after it: reported, and dropped where a later one
    waits"""

    tag: str | None = Field(default=None, min_length=1, title="Tag")
    """watch over runs with this tag only; null: all runs"""
