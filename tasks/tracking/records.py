"""An MLflow run as plain data, independent of MLflow."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from kernels_eval.errors import UsageError
from kernels_eval.records import Record


def flatten(config: object) -> dict[str, str]:
    """Nested configuration as flat params: keys joined by dots, strings as they are, the rest as
    JSON. Raises UsageError where two paths give the same key."""
    from pydantic_core import to_jsonable_python

    pairs = list(_walk(to_jsonable_python(config, fallback=str), ""))
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise UsageError(
            f"two configuration values flatten to the same param {twice[0]!r}",
            "rename one of the two keys",
        )
    return dict(pairs)


def _walk(value: object, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from _walk(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Params = Annotated[dict[str, str], BeforeValidator(flatten)]
# None means "not reported" (k greater than the number of samples): no metric is written
Metrics = dict[str, float | None]
Series = dict[str, tuple[tuple[int, float], ...]]
Cell = str | int | float | None
TableName = Annotated[str, Field(pattern=r"^[\w-]{1,100}$")]
Rows = Annotated[tuple[dict[str, Cell], ...], Field(min_length=1)]


class DatasetRef(NamedTuple):
    """A Parquet file or a snapshot's directory of parts, by path or fsspec URL."""

    name: str
    path: str
    fingerprint: str


class AdapterRecord(Record):
    """A LoRA adapter, and the registered model of which it becomes a version."""

    directory: Path
    base_model: str
    """hub id or directory of what the adapter was trained on"""
    registered_model: str = Field(pattern=r"^[^/:]+$")
    lineage: dict[str, str] = {}
    """what the adapter comes from: tags of the registered version"""


class StageRecord(Record):
    """One run of MLflow. By itself a child run: a stage, or one model of the benchmark."""

    name: str = Field(min_length=1)
    times: tuple[int, int] | None = None
    """begin and end, ms since 1970; None: those of the stages, else of the writing"""
    params: Params = {}
    metrics: Metrics = {}
    series: Series = {}
    """metric -> (step, value) pairs"""
    tags: dict[str, str] = {}
    artifacts: tuple[Path, ...] = ()
    """files; figures go to figures/, the rest beside the run's root"""
    datasets: tuple[DatasetRef, ...] = ()
    tables: dict[TableName, Rows] = {}
    """rows of equal columns, for MLflow's table view: tables/NAME.json"""

    @model_validator(mode="after")
    def _consistent(self) -> StageRecord:
        both = sorted(self.metrics.keys() & self.series.keys())
        if both:  # MLflow would show the series' last value and hide the other
            raise ValueError(f"{both[0]!r} is both a metric and a series of {self.name!r}")
        for name, rows in self.tables.items():
            if any(row.keys() != rows[0].keys() for row in rows):
                raise ValueError(f"the rows of table {name!r} of {self.name!r} differ in columns")
        counts = Counter(path.name for path in self.artifacts)
        if twice := [name for name, count in counts.items() if count > 1]:
            raise ValueError(f"two artifacts of {self.name!r} are named {twice[0]!r}")
        return self


class RunRecord(StageRecord):
    """A run that is found again by its fingerprint: one of the line, an ablation or its branch."""

    run_fingerprint: str = Field(pattern=r"^[0-9A-Za-z_.-]{1,250}$")
    """hash over the fingerprints of the run's snapshots"""
    stages: tuple[StageRecord, ...] = ()
    """child runs"""
    adapter: AdapterRecord | None = None
    error: str | None = Field(default=None, min_length=1)
    """why a branch failed"""
