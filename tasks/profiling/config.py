"""How correct candidates are profiled."""

from __future__ import annotations

from pydantic import PositiveFloat

from kernels_eval.records import Json, Record


class JudgeConfig(Record):
    """A model that chooses among the findings of a profile, at an OpenAI-compatible endpoint."""

    base_url: str
    """such as http://127.0.0.1:8000/v1"""
    model: str
    """its name there"""
    api_key_env: str = "OPENAI_API_KEY"
    """environment variable that holds the key; never logged"""
    timeout_s: PositiveFloat = 300
    """deadline of one answer"""


class ProfileConfig(Record):
    """What profiling one correct candidate may take. No part of a verdict's key."""

    enabled: bool = False
    """profile every correct candidate"""
    metrics: bool = True
    """ask ncu for hardware counters, where there is a GPU"""
    timeout_s: PositiveFloat = 120
    """deadline of one program"""
    budget_s: PositiveFloat = 0.3
    """time of the calls that are profiled by operator"""
    judge: JudgeConfig | None = None
    """a model that chooses which finding counts; null: the first"""

    @property
    def identity(self) -> Json:
        """What the result depends on."""
        return self.model_dump(exclude={"enabled": True, "judge": {"api_key_env", "timeout_s"}})
