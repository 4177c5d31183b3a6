"""Which tasks a run works on."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, PositiveInt, field_validator

from kernels_eval.extensions import require_known
from kernels_eval.records import Record

GROUP = "concur.task_sources"
BUILT_IN = ("bundled", "kernelbook", "kernelbench", "files")
"""Modules of this folder with a function `from_config`."""
Split = Literal["all", "train", "heldout", "gradients", "demo", "demo_heldout"]


class TasksConfig(Record):
    """A task source. `location` is a Parquet file, a folder or a hub id; the bundled tasks need
    none."""

    source: str = "bundled"
    """where tasks come from: bundled (they ship with concur), kernelbook, kernelbench, files of
    your own, or the name of an extension (docs/how-to/extend.md)"""
    location: str | None = None
    """a file, folder or hub id; not set: bundled with concur, or the set's own hub id"""
    split: Split = "train"
    """of bundled tasks; those that ask for gradients are apart; demo: most of train and pairs of
    operators, of which demo_heldout has others: the small model can learn them"""
    levels: tuple[int, ...] | None = None
    """KernelBench levels"""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """KernelBench: what inputs and parameters are cast to, as its option of that name does"""
    revision: str | None = Field(default=None, min_length=1)
    """commit of the hub's data set; null: kernelbook's pinned one"""
    code_column: str = Field(default="code", min_length=1)
    """files: the column of a table that holds the programs"""
    limit: PositiveInt | None = None
    """take the first N tasks; not set: all"""
    options: dict[str, Any] = {}
    """settings of an extension, by the names it documents"""

    @property
    def in_words(self) -> str:
        """Which tasks these are, such as `bundled tasks (train)`."""
        if self.source != "bundled":
            return f"{self.source} tasks"
        split = "held out for the benchmark" if self.split == "heldout" else self.split
        return f"bundled tasks ({split})"

    @field_validator("source")
    @classmethod
    def _is_known(cls, source: str) -> str:
        return require_known(GROUP, source, BUILT_IN)
