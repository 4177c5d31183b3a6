"""How a run guards itself. None of it decides what a snapshot holds, so none of it is part of a
fingerprint."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from kernels_eval.records import Record


class NotifyConfig(BaseModel):
    """Who is told when a run ends badly. `flows.runtime.notices` lists what is told; no text of a
    candidate is."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Notices")

    command: tuple[str, ...] = Field(
        default=(),
        title="Command",
        description=(
            "a program and its arguments, run without a shell; it gets the notice as JSON on"
            " standard input, and CONCUR_NOTICE_* in its environment"
        ),
    )
    webhook_env: str | None = Field(
        default=None,
        min_length=1,
        title="Webhook (environment)",
        description=(
            "name of the environment variable that holds the address which the notice is posted to"
            " as JSON; the address is a secret and is never logged"
        ),
    )
    webhook_block: str | None = Field(
        default=None,
        min_length=1,
        title="Webhook (secret block)",
        description="name of a Prefect secret block that holds the address instead",
    )
    timeout_s: float = Field(
        default=10.0,
        gt=0,
        le=60,
        title="Time limit, s",
        description="for the command, and for the webhook",
    )


class GuardConfig(BaseModel):
    """Disk, and notices."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="Guard")

    reserve_gib: float = Field(
        default=2.0,
        ge=0,
        title="Disk reserve, GiB",
        description=(
            "free space that a run leaves on every file system it writes to: below it, no run"
            " starts and a running one stops, resumable; 0: no check"
        ),
    )
    notify: NotifyConfig = NotifyConfig()


class GuardedRun(Record):
    """What the guards know of a run."""

    root: str
    reserve_gib: float = 2.0
    candidates_per_task: int = 1
    answer_tokens: int | None = None
    """The most tokens of an answer; None where answers are recorded ones."""
