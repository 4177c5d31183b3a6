"""`concur watchdog`: check the runs of a Prefect server once, and end stuck ones."""

from __future__ import annotations

from flows.cli.common import command, emit
from kernels_eval.errors import UsageError


@command
def watchdog(as_json: bool, dry_run: bool, **limits: object) -> None:
    """End stuck runs, so that their slots are free again.

    Asks the Prefect server in PREFECT_API_URL.
    """
    from prefect.settings import get_current_settings

    from flows.config import validated
    from flows.ops.watchdog import watch
    from flows.runtime.config import WatchdogConfig

    config = validated(WatchdogConfig, limits, "concur watchdog")
    if not get_current_settings().api.url:
        raise UsageError(
            "no Prefect server is named", "set PREFECT_API_URL, such as http://127.0.0.1:4200/api"
        )
    emit(watch(config, dry_run=dry_run), as_json, "watchdog")
