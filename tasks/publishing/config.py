"""Publishing options and file names."""

from __future__ import annotations

from pydantic import Field

from kernels_eval.records import Record

PUBLICATION, README = "publication.json", "README.md"
DATA = "data"
TRAIN, TEST = "train", "test"
UNKNOWN = "unknown"
SPLIT_SEED = 0
"""Goes into the hash that splits tasks: another one would move them between splits."""


class PublishOptions(Record):
    """How a set is published. Part of the revision: other options, another revision."""

    name: str = Field(default="ConCuR kernels", min_length=1, max_length=200)
    license: str = Field(default=UNKNOWN, pattern=r"^[a-z0-9][a-z0-9.+-]*$")
    """the hub's identifier, such as apache-2.0"""
    holdout_share: float = Field(default=0.0, ge=0, lt=1)
    """share of the tasks whose rows make the split `test`"""
