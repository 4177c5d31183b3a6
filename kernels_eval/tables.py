"""Tables of data that stand beside the code that reads them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def table_beside(module: str) -> dict[str, Any]:
    """NAME.toml beside a module NAME.py, which gives its `__file__`."""
    return tomllib.loads(Path(module).with_suffix(".toml").read_text(encoding="utf-8"))
