"""`concur doctor`: what a profile needs on this machine, and how to fix what is missing."""

from __future__ import annotations

import sys

from flows.cli.common import command, emit


@command
def doctor(profile: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Check what a profile needs on this machine, and print a fix for each problem."""
    from flows.ops.doctor import examine, runnable

    checks = examine(profile, overrides)
    fine = runnable(checks)
    told = [check.model_dump() for check in checks]
    emit({"profile": profile, "runnable": fine, "checks": told}, as_json, "doctor")
    sys.exit(0 if fine else 1)
