"""Settings of verification."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field, PositiveInt

from kernels_eval.config import EvalConfig
from kernels_eval.records import Record


class VerificationConfig(Record):
    """The protocol, and the machines that run it (not part of a verdict's key)."""

    eval: EvalConfig = EvalConfig()
    screen: bool = True
    """screen every candidate first, and confirm what is kept; off: every candidate gets the whole
    protocol at once"""
    workers: PositiveInt | None = None
    """devices used at once; default: every GPU, or half of the CPU cores, two at
    least"""
    builders: PositiveInt | None = None
    """build workers; default: the other CPU cores, two at least"""
    lanes: PositiveInt = 1
    """candidates compared side by side on a device, where each is timed alone. Two were 1.1 times
    as fast as one on small tasks of an H100"""
    gpu_type: str | None = None
    """GPUs of a cluster with several types to use, by Ray's name, such as H100; default: those of
    this machine's type. Verdicts of each type are a snapshot of their own"""
    chunk_size: Annotated[int, Field(ge=1, le=1024)] = 128
    """verdicts per Prefect task run"""
    once_per_code: bool = False
    """judge a task's equal code once: the other candidates that hold it get the same verdict and
    timing. For models that repeat themselves, such as small ones"""
    ray_address: str | None = None
    """a Ray cluster; default: this machine alone"""

    @property
    def protocol(self) -> EvalConfig:
        """What candidates are judged by, all of them or, with `confirming`, those that are kept."""
        return self.eval.screened() if self.screen else self.eval

    def confirming(self) -> VerificationConfig:
        whole = self.eval.model_copy(update={"level": "confirm"})
        return self.model_copy(update={"eval": whole, "screen": False})
