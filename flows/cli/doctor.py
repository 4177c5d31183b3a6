"""`concur doctor`: what a profile needs on this machine, and how to fix what is missing."""

from __future__ import annotations

import sys

import click

from flows.cli.common import command, emit, json_option, print_table, profile_options


@command()
@profile_options(
    "language=cuda", profile="Profile (name or YAML file) whose needs decide the exit status."
)
@json_option("the checks")
def doctor(profile: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check what this machine has, what is missing, and print the line that fixes it."""
    from flows.ops.doctor import Check, examine, runnable

    checks = examine(profile, overrides)
    fine = runnable(checks)

    def show(_: object) -> None:
        def mark(check: Check) -> str:
            return "ok" if check.ok else ("MISSING" if check.need == "required" else "-")

        rows = [(mark(check), check.name, check.found, check.fix) for check in checks]
        print_table(f"concur doctor (profile {profile})", ("", "what", "found", "fix"), rows)
        click.echo(
            f"profile {profile} can run here"
            if fine
            else f"profile {profile} cannot run here: fix the items marked MISSING"
        )

    told = [check.model_dump() for check in checks]
    emit({"profile": profile, "runnable": fine, "checks": told}, as_json, show)
    sys.exit(0 if fine else 1)
