"""Build transforms: what changes a library between its link and its first use. Those of
`build.transforms` are applied in order before caching, confined, within the build's deadline; names
and versions are in its key."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels_eval.config import TRANSFORMS
from kernels_eval.extensions import load_extension
from kernels_eval.source.spec import ExtensionSpec

Tool = Callable[[Sequence[str]], str]
"""Runs a command and returns its output; a failure or a passed deadline ends the build."""


@dataclass(frozen=True)
class BuildTransform:
    """A change of built libraries.

    `change(library, spec, tool)` changes the file in place, or raises UsageError, which becomes
    `build_failed`. Raise `version` when the result may differ.
    """

    change: Callable[[Path, ExtensionSpec, Tool], None]
    version: int


def load_transforms(names: Iterable[str]) -> Mapping[str, BuildTransform]:
    """The named transforms of installed packages, in order. Raises UsageError."""
    return {name: load_extension(TRANSFORMS, name, BuildTransform) for name in names}
