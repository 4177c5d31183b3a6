"""Names of flow runs: a sentence with the strategy and the date, so that a list of runs can be
read.

Guarantees: a name never stops a run: where the parameters do not say what it needs, less is said.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import PurePath
from typing import Any

MOST_NAMED = 4
"""Strategies in the name of an ablation."""


def run_name(verb: str, *, strategy: bool = True) -> Callable[[], str]:
    """A `flow_run_name` of a flow whose `config` is a PipelineConfig: `refresh nightly: cpp,
    strategy concur, 2026-11-22 02:00`."""

    def name() -> str:
        from prefect.runtime import flow_run

        config = (flow_run.parameters or {}).get("config")
        parts = [
            getattr(config, "language", None),
            f"strategy {config.curation.strategy}" if strategy and config else None,
            today(),
        ]
        return (
            f"{verb} {getattr(config, 'name', '')}".rstrip()
            + ": "
            + ", ".join(str(part) for part in parts if part)
        )

    return name


def deployed_name(verb: str) -> Callable[[], str]:
    """A `flow_run_name` of a deployed flow, whose parameters are forms: `refresh nightly, strategy
    concur, 2026-11-22 02:00`."""

    def name() -> str:
        from prefect.runtime import flow_run

        parameters: dict[str, Any] = flow_run.parameters or {}
        run, chosen = parameters.get("run"), parameters.get("curation")
        what = getattr(run, "name", "") or str(getattr(run, "profile", ""))
        strategy = str(getattr(chosen, "strategy", ""))
        by = f", strategy {strategy}" if strategy and " " not in strategy else ""
        return f"{verb} {what}".rstrip() + f"{by}, {today()}"

    return name


def ablation_name() -> str:
    """The `flow_run_name` of an ablation, whose `config` is an AblationConfig: `ablate nightly:
    concur, random, 2026-11-22 03:00`."""
    import yaml
    from prefect.runtime import flow_run

    config = (flow_run.parameters or {}).get("config")
    what, strategies = (
        PurePath(getattr(config, "profile", "")).stem,
        getattr(config, "strategies", ()),
    )
    for override in getattr(config, "overrides", ()):
        if override.startswith("name="):
            with suppress(yaml.YAMLError):
                what = str(yaml.safe_load(override.removeprefix("name=")))
    named = [PurePath(strategy).stem for strategy in strategies[:MOST_NAMED]]
    more = [f"{len(strategies) - MOST_NAMED} more"] if len(strategies) > MOST_NAMED else []
    return f"ablate {what}".rstrip() + f": {', '.join([*named, *more, today()])}"


def today() -> str:
    """When the run was to start, in this machine's time zone, to the minute."""
    from prefect.runtime import flow_run

    planned = flow_run.scheduled_start_time
    return (planned.astimezone() if planned else datetime.now().astimezone()).strftime(
        "%Y-%m-%d %H:%M"
    )
