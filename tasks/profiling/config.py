"""How correct candidates are profiled."""

from __future__ import annotations

from typing import Annotated

from kernels_eval.records import Record
from tasks.keys import UNKEYED


class ProfileConfig(Record):
    """What profiling one correct candidate may take. No part of a verdict's key."""

    enabled: Annotated[bool, UNKEYED] = False
    """profile every correct candidate"""
    metrics: bool = True
    """ask ncu for hardware counters, where there is a GPU"""
