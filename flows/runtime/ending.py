"""Ends a flow run in Prefect without its process and without its worker, and every run below it:
what they hold comes free.

Guarantees: what is below goes first, however deep; a run that has ended is left as it is; one that
was being cancelled ends cancelled, any other crashed. Asks through a function that it is given,
because who ends runs may not afford to import Prefect.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Ask = Callable[[str, Any], Any]
"""Posts a body to a path below Prefect's /api; the JSON of the answer."""
PAGE = 200
"""The most rows that Prefect gives at once."""
FINAL = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def below(ask: Ask, run_id: str) -> list[dict[str, Any]]:
    """All runs below a run, as Prefect's API has them; parents before their children."""
    found: list[dict[str, Any]] = []
    level = [run_id]
    while level:
        wanted, children = (
            {
                "flow_runs": {"parent_flow_run_id": {"any_": level}},
                "sort": "ID_DESC",
            },
            [],
        )
        while page := ask("flow_runs/filter", wanted | {"limit": PAGE, "offset": len(children)}):
            children += page
            if len(page) < PAGE:
                break
        found += children
        level = [child["id"] for child in children]
    return found


def end_run(ask: Ask, run_id: str, state_type: str, message: str) -> str:
    """End a run that is in a state of this type, and what is below it. Returns what it has become:
    CANCELLED or CRASHED."""
    kind = "CANCELLED" if state_type == "CANCELLING" else "CRASHED"
    unfinished = [
        child["id"] for child in reversed(below(ask, run_id)) if child["state_type"] not in FINAL
    ]
    for each in [*unfinished, run_id]:
        ask(
            f"flow_runs/{each}/set_state",
            {"state": {"type": kind, "name": kind.capitalize(), "message": message}, "force": True},
        )
    return kind
