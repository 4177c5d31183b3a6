"""Names of flow runs: what they do, and for which configuration."""

from __future__ import annotations

from collections.abc import Callable


def run_name(verb: str) -> Callable[[], str]:
    """A `flow_run_name`: the verb, and the name in the overrides of `advanced`, else the name or
    the profile of `config` or `run`. Never stops a run: a name that parameters lack is left out."""

    def name() -> str:
        from prefect.runtime import flow_run

        parameters = flow_run.parameters or {}
        told = parameters.get("config") or parameters.get("run")
        about = getattr(told, "name", "") or getattr(told, "profile", "")
        for setting in getattr(parameters.get("advanced"), "overrides", ()):
            key, _, value = setting.partition("=")
            if key == "name":
                about = value
        return f"{verb} {about}".rstrip()

    return name
