"""Shared rules of Jinja templates. A missing value is an error; a line with only a block leaves no
line."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


def environment(*folders: Path, filters: Mapping[str, Any], **options: Any) -> Environment:
    """Templates of these folders, the first one's first, with these filters beside Jinja's. Other
    `options` are those of `jinja2.Environment`."""
    made = Environment(
        loader=FileSystemLoader(folders),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        **options,
    )
    made.filters.update(filters)
    return made
