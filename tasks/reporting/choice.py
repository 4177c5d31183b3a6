"""What a training set's manifest says of its choice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

CHOICE = ("kept", "instead", "slower")
"""How many of the correct ones a set kept and why not the others, what it took instead, and which
are slower than their reference."""


def choice_of(manifest: Mapping[str, Any]) -> list[str]:
    """What the manifest says, in words."""
    return [manifest[name] for name in CHOICE if manifest.get(name)]
