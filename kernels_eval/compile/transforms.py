"""Build transforms: what changes a library between its link and its first use.

Guarantees: the transforms that `build.transforms` names are applied in that order, to every library
that is linked, before it is cached; their names and versions are part of the build's key; a tool
that a transform runs is confined as the compilers are, and shares the build's deadline. Does not
guarantee anything of the changed library: it is verified as any other.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels_eval.config import TRANSFORMS
from kernels_eval.extensions import load_extension
from kernels_eval.source.spec import ExtensionSpec

Tool = Callable[[Sequence[str]], str]
"""Runs a command and returns what it prints. Where the command fails or runs past the deadline, the
build ends there."""


@dataclass(frozen=True)
class BuildTransform:
    """A change of built libraries.

    `change(library, spec, tool)` changes the file `library` in its place; `spec` is what the
    candidate asked to be built. It raises UsageError where the candidate asks for what cannot be
    done, which is `build_failed` with that text. `version` is raised when the same library may
    become another one.
    """

    change: Callable[[Path, ExtensionSpec, Tool], None]
    version: int


def load_transforms(names: Iterable[str]) -> Mapping[str, BuildTransform]:
    """The transforms of installed packages, by their names and in their order. Raises UsageError
    for one that nobody registers, or that cannot be used."""
    return {name: load_extension(TRANSFORMS, name, BuildTransform) for name in names}
