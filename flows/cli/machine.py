"""Commands that check and clean this machine."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path
from typing import Annotated, Any

from typer import Option

from flows.cli.common import Group, Json, Root, command, repeated, setting


@command(Group.MACHINE, succeeded="runnable")
def doctor(
    *,
    profile: Annotated[
        str,
        Option(
            help="Profile (name or YAML file) to check; its requirements decide the exit status."
        ),
    ] = "local",
    overrides: Annotated[list[str], setting("the profile", "language=cuda")],
) -> Json:
    """Check what a profile needs on this machine, and print a fix for each problem."""
    from flows.ops.doctor import examine, runnable

    checks = examine(profile, tuple(overrides))
    return {
        "profile": profile,
        "runnable": runnable(checks),
        "checks": [check.model_dump() for check in checks],
    }


@command(Group.MACHINE, needs=["line"])
def gc(
    *,
    root: Root = ".concur",
    refreshes: Annotated[
        int, Option("--keep", min=0, metavar="N", help="Keep the newest N refreshes.")
    ] = 5,
    younger_than_days: Annotated[
        float,
        Option(
            "--younger-than",
            min=0,
            metavar="DAYS",
            help="Keep finished snapshots younger than this.",
        ),
    ] = 7.0,
    unfinished_days: Annotated[
        float,
        Option(
            "--unfinished",
            min=0,
            metavar="DAYS",
            help="Keep unfinished snapshots changed within DAYS.",
        ),
    ] = 14.0,
    log_days: Annotated[
        float, Option("--logs", min=0, metavar="DAYS", help="Keep logs written within DAYS.")
    ] = 30.0,
    published_folders: Annotated[
        list[str],
        repeated("--published", metavar="DIR", help="A published folder outside the root."),
    ],
    tracking_uri: Annotated[
        str | None,
        Option(
            metavar="URI",
            help="MLflow.",
            show_default="MLFLOW_TRACKING_URI, else the root's mlflow.db",
        ),
    ] = None,
    without_mlflow: Annotated[
        bool, Option("--without-mlflow", help="Ignore references from MLflow.")
    ] = False,
    cache_limit_gb: Annotated[
        float | None,
        Option(
            "--cache-limit",
            min=0.07,
            metavar="GB",
            help="Limit of the build cache.",
            show_default="its present limit",
        ),
    ] = None,
    delete: Annotated[
        bool, Option("--delete", help="Remove the listed items; without it, gc only reports.")
    ] = False,
) -> Json:
    """List the snapshots that nothing refers to; with --delete, remove them.

    What a finished run, a registered model or a published folder refers to is kept, with everything
    it was made from.
    """
    from flows.ops.gc import collect
    from flows.ops.gc_plan import Keep

    keep = Keep(
        refreshes=refreshes, younger_than_days=younger_than_days, unfinished_days=unfinished_days
    )
    data = collect(
        root,
        keep=keep,
        delete=delete,
        tracking_uri=tracking_uri,
        without_mlflow=without_mlflow,
        published_folders=tuple(published_folders),
        cache_limit_gb=cache_limit_gb,
        log_days=log_days,
    )
    return data | {"summary": summarised(data)}


def summarised(data: Json) -> list[Json]:
    """Return number and bytes of what stays and goes by stage and reason, what goes first."""
    went = "gone" if data["deleted"] else "would go"
    groups: dict[tuple[str, str, str], list[int]] = defaultdict(list)
    for one in data["snapshots"]:
        needed = one["reason"].endswith(" needs it")
        reason = "needed by another snapshot that stays" if needed else one["reason"]
        groups["stays" if one["stays"] else went, one["stage"], reason].append(one["bytes"])
    for one in data["others"]:
        stage = Path(one["path"]).parent.name if "log" in one["reason"] else "training"
        groups[went, stage, one["reason"]].append(one["bytes"])
    if data["trash_bytes"]:
        groups[went, ".gc-trash", "left by a gc that was interrupted"].append(data["trash_bytes"])
    order: Any = sorted(groups.items(), key=lambda item: (item[0][0] != went, item[0]))
    return [
        {"outcome": outcome, "stage": stage, "reason": reason}
        | {"number": len(sizes), "bytes": sum(sizes)}
        for (outcome, stage, reason), sizes in order
    ]
