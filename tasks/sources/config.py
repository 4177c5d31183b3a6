"""Which tasks a run works on."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, PositiveInt

from kernels_eval.records import Sparing

LATER = {"revision": None, "code_column": "code", "seed": 0, "count": 1000, "sizes": "cpp"}
LATER |= {"precision": "fp32"}
"""Keys that earlier versions did not have, and what they did."""


class TasksConfig(Sparing):
    """A task source. `location` is a Parquet file, a folder or a hub id; the bundled tasks need
    none."""

    source: Literal["bundled", "kernelbook", "kernelbench", "tritonbench", "files", "generated"] = (
        "bundled"
    )
    """where tasks come from: those that ship with concur, a public set, files of your own, or
    programs that are generated from a seed"""
    location: str | None = None
    """a file, folder or hub id; null: bundled with concur, or the set's own hub id"""
    split: Literal["all", "train", "heldout", "gradients"] = "train"
    """bundled and generated tasks only; bundled ones that ask for gradients are apart"""
    seed: int = 0
    """generated: another seed gives other programs"""
    count: PositiveInt = 1000
    """generated: how many programs; `limit` takes the first of them"""
    sizes: Literal["cpp", "cuda"] = "cpp"
    """generated: sizes of the inputs, for a processor's core or for a GPU"""
    levels: tuple[int, ...] | None = None
    """KernelBench levels"""
    precision: Literal["fp32", "fp16", "bf16"] = "fp32"
    """KernelBench: what inputs and parameters are cast to, as its option of that name does"""
    revision: str | None = Field(default=None, min_length=1)
    """commit of the hub's data set; null: kernelbook's pinned one"""
    code_column: str = Field(default="code", min_length=1)
    """files: the column of a table that holds the programs"""
    limit: PositiveInt | None = None
    """take the first N tasks"""

    def _says(self, name: str, value: object) -> bool:
        return name not in LATER or value != LATER[name]
