"""Configurations from what a person writes: `key.path=value` overrides. An unknown key or a wrong
value is one UsageError that names the key and the nearest right one."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from kernels_eval.config import EvalConfig
from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from kernels_eval.written import yaml_of

Model = TypeVar("Model", bound=BaseModel)


def load_protocol(overrides: Iterable[str], base: EvalConfig | None = None) -> EvalConfig:
    """The verification protocol (`base`, else the default) with overrides such as
    `timing.max_s=1.0`, also as `verification.eval.KEY`. Raises UsageError.
    """
    keys = [re.sub(r"^(verification\.)?eval\.", "", each) for each in overrides]
    data = base.model_dump(mode="json") if base else {}
    return overridden(EvalConfig, data, keys, "--set")


def overridden(model: type[Model], data: Json, overrides: Iterable[str], where: str) -> Model:
    """The model of `data` (changed) with YAML overrides. Raises UsageError, naming `where`."""
    for override in overrides:
        key, separator, text = override.partition("=")
        if not separator or not key:
            raise UsageError(
                f"--set {override!r} is not key=value", "for example --set verification.workers=2"
            )
        try:
            value = yaml_of(text)
        except ValueError as error:
            cause = f"--set {override!r:.200}: the value is not YAML"
            raise UsageError(f"{cause}: {error}", "quote it") from error
        put(data, key, value)
    return validated(model, data, where)


def put(data: Json, key: str, value: Any) -> None:
    """Set a dotted key of nested mappings. Raises UsageError where the path holds a value."""
    *parents, last = key.split(".")
    for parent in parents:
        data = data.setdefault(parent, {})
        if not isinstance(data, dict):
            raise UsageError(
                f"--set {key}: {parent} is a value, not a mapping of keys", "see concur run --help"
            )
    data[last] = value


def validated(model: type[Model], data: Any, where: str) -> Model:
    """The model of some data. Raises UsageError for its first problem, with the fix."""
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = error.errors()[0]
        *parents, last = map(str, problem["loc"] or ("",))
        key = ".".join([*parents, last])
        if problem["type"] == "extra_forbidden":
            hint = nearest(last, _known_keys(parents, model), "known keys here", parents)
            raise UsageError(f"{where} has an unknown key {key!r}", hint) from error
        raise UsageError(
            f"{where}: {key} = {problem.get('input')!r:.200}: {problem['msg']}",
            "correct the value in the profile or with --set",
        ) from error


def nearest(word: str, known: list[str], what: str, parents: Sequence[str] = ()) -> str:
    """A hint for an unknown word: the nearest known one, else all."""
    close = difflib.get_close_matches(word, known, n=1)
    if close:
        return f"did you mean {'.'.join([*parents, *close])}?"
    return f"{what}: {', '.join(known)}"


def _known_keys(path: Sequence[str], model: Any) -> list[str]:
    for part in path:
        field = getattr(model, "model_fields", {}).get(part)
        model = field.annotation if field else None
        if not (isinstance(model, type) and issubclass(model, BaseModel)):
            return []
    return sorted(model.model_fields)
