"""`concur profiles` and `concur config`: which profiles there are, what a run with one would do,
and what a profile may say."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

import click

from flows.cli.common import command, emit


@command
def profiles(as_json: bool) -> None:
    """List the profiles that ship with concur, and what each is for."""
    from flows.config import load_profile, profile_names, shipped_dir

    found = []
    for name in profile_names():
        path, config = shipped_dir("profiles") / f"{name}.yaml", load_profile(name)
        first = path.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ")
        told = {"name": name, "language": config.language.value, "root": config.root}
        found.append(told | {"about": first, "path": str(path)})
    emit({"profiles": found}, as_json, "profiles")


@command
@click.argument("what", type=click.Choice(["show", "schema"]))
def config(what: str, profile: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show the configuration that a run with a profile would have, or the JSON Schema of profiles.

    `show` says of every key whether its value comes from --set, the profile or the defaults.
    `schema` is for editors: name the file in the first line of a profile, as
    `# yaml-language-server: $schema=FILE`.
    """
    from flows.config import PipelineConfig, load_profile, read_profile
    from tasks.reporting.text import masked

    if what == "schema":
        emit(PipelineConfig.model_json_schema(), True, "")
        return
    values = masked(load_profile(profile, overrides).model_dump(mode="json"))
    said = dict(_keys(read_profile(profile)))
    given = [override.partition("=")[0] for override in overrides]

    def source(key: str) -> str:
        ways = {"--set": given, "profile": said}
        return next((way for way, keys in ways.items() if _named(key, keys)), "default")

    sources = {key: source(key) for key, _ in _keys(values)}
    data = {"profile": profile, "configuration": values, "sources": sources}
    rows = [(key, json.dumps(value), sources[key]) for key, value in _keys(values)]
    emit(data, as_json, "config", rows=rows)


def _keys(values: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    """Every key with its dotted path that holds a value, not keys."""
    for name, value in values.items():
        if isinstance(value, Mapping) and value:
            yield from _keys(value, f"{above}{name}.")
        else:
            yield f"{above}{name}", value


def _named(key: str, keys: Any) -> bool:
    """Whether a key is among these, or below one of them."""
    return any(key == each or key.startswith(f"{each}.") for each in keys)
