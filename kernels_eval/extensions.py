"""What installed packages add to concur by entry points (docs/how-to/extend.md), loaded on first
use. An unknown name is a UsageError that lists the known ones."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import entry_points
from typing import TypeVar

from kernels_eval.errors import UsageError, cause_of

T = TypeVar("T")

GROUPS = {
    "concur.task_sources": "task source",
    "concur.samplers": "sampler",
    "concur.search_operators": "search operator",
    "concur.languages": "language",
    "concur.strategies": "strategy",
    "concur.build_transforms": "build transform",
}
"""Groups of entry points, and what an error calls one of their entries."""


def extension_names(group: str) -> list[str]:
    return sorted({entry.name for entry in entry_points(group=group)})


def known_names(group: str, built_in: Iterable[str]) -> list[str]:
    return list(dict.fromkeys([*built_in, *extension_names(group)]))


def require_known(group: str, name: str, built_in: Iterable[str]) -> str:
    """The name, if built in or registered by an installed package. Raises UsageError."""
    built_in = tuple(built_in)
    if name in built_in or name in extension_names(group):
        return name
    raise UsageError(
        f"there is no {GROUPS[group]} {name!r}; known are"
        f" {', '.join(known_names(group, built_in))}",
        f"correct the name, or install the package that registers it in the group {group}"
        " (docs/how-to/extend.md)",
    )


def load_extension(group: str, name: str, expected: type[T], built_in: Iterable[str] = ()) -> T:
    """The object registered under a name. Raises UsageError for one that is unknown, fails to
    import or is not `expected`.
    """
    require_known(group, name, built_in)
    entry = next(iter(entry_points(group=group, name=name)))
    try:
        extension = entry.load()
        if not isinstance(extension, expected):
            raise TypeError(f"it is no {expected.__name__}")
    except Exception as error:
        where = entry.dist.name if entry.dist else "an installed package"
        raise UsageError(
            f"the {GROUPS[group]} {name!r} of {where} cannot be used: {cause_of(error)}",
            f"correct its entry point {entry.value} in the group {group}, or uninstall it",
        ) from error
    return extension
