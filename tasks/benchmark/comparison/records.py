"""A comparison's inputs: branches, reference models and links of an ablation. Passwords in URLs are
masked, and links without an http(s) address dropped."""

from __future__ import annotations

from collections import Counter
from typing import Annotated, Literal

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from kernels_eval.records import Record
from tasks.benchmark.stage import Answers
from tasks.reporting.text import address, masked

BranchState = Literal["done", "failed"]
Masked = Annotated[str, AfterValidator(masked)]
Url = Annotated[str | None, AfterValidator(lambda url: url and address(url))]


class Branch(Record):
    """One strategy at one size (None: all samples it takes) and seed.

    `rows` are those trained on; `curated`, `trained` and `scores` are fingerprints of the snapshots
    reached. Losses are mean cross entropy per token (nats). Raises ValueError for a done branch
    without answers, and an unfinished one without `error`.
    """

    name: str = Field(min_length=1)
    strategy: str = Field(min_length=1)
    size: PositiveInt | None = None
    seed: int
    state: BranchState
    error: Masked | None = None
    rows: NonNegativeInt | None = None
    curated: str | None = None
    trained: str | None = None
    scores: str | None = None
    loss_last: float | None = None
    held_out_loss_last: float | None = None
    seconds: NonNegativeFloat | None = None
    answers: Answers | None = None
    mlflow_url: Url = None
    prefect_url: Url = None

    @model_validator(mode="after")
    def _ended_one_way(self) -> Branch:
        if self.state == "done" and self.answers is None:
            raise ValueError(f"branch {self.name!r} is done and has no answers")
        if self.state != "done" and not self.error:
            raise ValueError(f"branch {self.name!r} is {self.state} and does not say why")
        return self


class Ablation(Record):
    """An ablation so far. `references` are other models on the same tasks, by name.

    `baseline` is the strategy to compare with; None takes "random" if present, else the first.
    Raises ValueError for a repeated name.
    """

    name: str = Field(min_length=1)
    fingerprint: str
    branches: tuple[Branch, ...]
    base_model: str = ""
    references: tuple[Answers, ...] = ()
    baseline: str | None = None
    min_kernel_share: float | None = None
    """of the track "custom kernel" (`BenchmarkConfig`)"""
    created_at: str = ""
    """when the ablation ended, ISO 8601"""
    cautions: tuple[Masked, ...] = ()
    mlflow_url: Url = None
    prefect_url: Url = None

    @model_validator(mode="after")
    def _told_apart(self) -> Ablation:
        every = {
            "branches": [branch.name for branch in self.branches],
            "references": [answers.model for answers in self.references],
        }
        for what, names in every.items():
            for name, count in Counter(names).items():
                if count > 1:
                    raise ValueError(f"two {what} of the ablation are called {name!r}")
        return self
