"""The metrics that ncu is asked for; `metrics.toml` is the table."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import NamedTuple


class Metric(NamedTuple):
    name: str
    unit: str
    meaning: str


_TABLE = tomllib.loads(Path(__file__).with_name("metrics.toml").read_text(encoding="utf-8"))
CUDAFORGE = tuple(Metric(*row) for row in _TABLE["cudaforge"])
METRICS = (*CUDAFORGE, *(Metric(*row) for row in _TABLE["others"]))
