"""Tables of data that stand beside the code that reads them."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any


def table_beside(module: str, name: str = "") -> dict[str, Any]:
    """NAME.toml beside a module NAME.py, given its `__file__`, or the file of this name."""
    path = Path(module).parent / name if name else Path(module).with_suffix(".toml")
    return tomllib.loads(path.read_text(encoding="utf-8"))
