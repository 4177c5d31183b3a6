"""How correct candidates are profiled."""

from __future__ import annotations

from typing import Annotated

from pydantic import PositiveFloat

from kernels_eval.records import Record
from tasks.keys import UNKEYED


class ProfileConfig(Record):
    """What profiling one correct candidate may take. No part of a verdict's key."""

    enabled: Annotated[bool, UNKEYED] = False
    """profile every correct candidate"""
    metrics: bool = True
    """ask ncu for hardware counters, where there is a GPU"""
    timeout_s: PositiveFloat = 120
    """deadline of one program"""
    budget_s: PositiveFloat = 0.3
    """time of the calls that are profiled by operator"""
