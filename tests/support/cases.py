"""Tables of cases and their expected values, which lie in tests/data/cases."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml


def cases(name: str) -> dict[str, Any]:
    """The tables of one file of tests, by their names."""
    path = Path(__file__).parents[1] / "data" / "cases" / f"{name}.yaml"
    return yaml.safe_load(path.read_text(encoding="utf-8"))
