"""Names of flow runs: profile, strategy and date.

Guarantees: a name never stops a run; parts that parameters lack are left out."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from pathlib import PurePath

import yaml

from kernels_eval.records import Json

MOST_NAMED = 4
"""Strategies in the name of an ablation."""


def run_name(verb: str, *, strategy: bool = True) -> Callable[[], str]:
    """A `flow_run_name` for a PipelineConfig `config`: `refresh nightly: cpp, strategy concur,
    2026-11-22 02:00`."""

    def name() -> str:
        config = _parameters().get("config")
        what = f"{verb} {getattr(config, 'name', '')}".rstrip()
        by = f"strategy {config.curation.strategy}" if strategy and config else None
        parts = (getattr(config, "language", None), by, today())
        return f"{what}: {', '.join(str(part) for part in parts if part)}"

    return name


def deployed_name(verb: str) -> Callable[[], str]:
    """A `flow_run_name` of a deployed flow, from its forms: `refresh nightly, strategy concur,
    2026-11-22 02:00`."""

    def name() -> str:
        run, chosen = (_parameters().get(form) for form in ("run", "curation"))
        what = getattr(run, "name", "") or getattr(run, "profile", "")
        strategy = getattr(chosen, "strategy", "")
        by = f", strategy {strategy}" if strategy and " " not in strategy else ""
        return f"{verb} {what}".rstrip() + f"{by}, {today()}"

    return name


def ablation_name() -> str:
    """An ablation's `flow_run_name`, from an AblationConfig `config`: `ablate nightly: concur,
    random, 2026-11-22 03:00`."""
    config = _parameters().get("config")
    what = PurePath(getattr(config, "profile", "")).stem
    strategies = [PurePath(strategy).stem for strategy in getattr(config, "strategies", ())]
    for override in getattr(config, "overrides", ()):
        if override.startswith("name="):
            with suppress(yaml.YAMLError):
                what = str(yaml.safe_load(override.removeprefix("name=")))
    named, more = strategies[:MOST_NAMED], len(strategies) - MOST_NAMED
    parts = [*named, *([f"{more} more"] if more > 0 else []), today()]
    return f"ablate {what}".rstrip() + f": {', '.join(parts)}"


def today() -> str:
    """The run's scheduled start in local time, to the minute."""
    from prefect.runtime import flow_run

    planned = flow_run.scheduled_start_time or datetime.now()
    return planned.astimezone().strftime("%Y-%m-%d %H:%M")


def _parameters() -> Json:
    from prefect.runtime import flow_run

    return flow_run.parameters or {}
