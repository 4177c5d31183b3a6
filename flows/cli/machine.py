"""Commands that check and clean this machine."""

from __future__ import annotations

from typing import Annotated

from typer import Option

from flows.cli import pages
from flows.cli.common import Group, Json, Root, command, setting, tell


@command(Group.MACHINE, succeeded="runnable", page=pages.of_doctor)
def doctor(
    *,
    profile: str = "local",
    overrides: list[str] = setting("the profile", "language=cuda"),
) -> Json:
    """Check what a profile needs on this machine, and print a fix for each problem.

    Says of verify, refresh and training (with the benchmark) whether they run; `runnable` is
    whether all do.

    Options:
        profile: Profile (name or YAML file) to check; its requirements decide the exit status.
    """
    from flows.doctor import examine, runs

    checks = examine(profile, tuple(overrides), say=tell)
    found = runs(checks)
    return {
        "profile": profile,
        "runnable": all(found.values()),
        "runs": found,
        "checks": [check.model_dump() for check in checks],
    }


@command(Group.MACHINE, needs=["line"], page=pages.of_gc)
def gc(
    *,
    root: Root = ".concur",
    keep: Annotated[int, Option(min=0)] = 5,
    younger_than_days: Annotated[float, Option(min=0)] = 7.0,
    delete: bool = False,
) -> Json:
    """List the snapshots that are old and not needed; with --delete, remove them.

    The newest snapshots of each stage, young ones, and everything that these were made from are
    kept.

    Options:
        keep N: Keep the newest N snapshots of each stage.
        younger_than_days --younger-than DAYS: Keep snapshots younger than this.
        delete: Remove the listed items; without it, gc only reports.
    """
    from flows.gc import collect

    return collect(root, keep=keep, younger_than_days=younger_than_days, delete=delete)
