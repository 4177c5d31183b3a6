"""The run forms of the deployments: what a person fills in in Prefect's UI, and the PipelineConfig
that comes of it.

Guarantees: every field has a title, a description, bounds where it is a number and a default, so
that an empty form runs; profiles and strategies are picked from a list; what is left alone is the
profile's; a configuration that cannot be used is one UsageError, raised before any work. Importing
this module loads nothing heavy. Does not hold the whole configuration: `advanced.overrides` reaches
every key.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from flows.config import PipelineConfig, load_profile, profile_names
from kernels_eval.errors import UsageError
from tasks.curation.config import STRATEGY_NAMES

ROOT_VARIABLE = "CONCUR_ROOT"
"""Environment variable of a worker: the root of forms that name none."""
STACK_VARIABLE = "CONCUR_STACK_ROOT"
"""The same, set by `concur up` for its own worker."""
AS_PROFILE = "as the profile says"

Profile = StrEnum("Profile", {name: name for name in profile_names()})
Strategy = StrEnum(
    "Strategy", {"as_profile": AS_PROFILE, **{name: name for name in STRATEGY_NAMES}}
)
StrategyName = StrEnum("StrategyName", {name: name for name in STRATEGY_NAMES})


class Form(BaseModel):
    """One group of fields. `settings` gives the `key=value` overrides of what was filled in."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_enum_values=True)

    def settings(self) -> Iterator[str]:
        yield from ()


class RunForm(Form):
    """Which configuration runs, and where its snapshots go."""

    model_config = ConfigDict(title="Profile and place")

    profile: Profile = Field(
        default=Profile("nightly"),
        title="Profile",
        description="A file of deployments/profiles; the fields below change what it says.",
    )
    root: str = Field(
        default="",
        title="Root of the snapshots",
        description=(
            "An absolute directory or an fsspec URL. Empty: that of `concur up`, or"
            f" {ROOT_VARIABLE} of the worker."
        ),
    )
    name: str = Field(
        default="",
        max_length=60,
        title="Name",
        description="Shown in the names of runs. Empty: the profile's.",
    )

    def settings(self) -> Iterator[str]:
        if self.name:
            yield setting("name", self.name)


class CandidatesForm(Form):
    """How many tasks, and how many kernels are sampled for each."""

    model_config = ConfigDict(title="Candidates")

    tasks: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        title="Tasks at most",
        description="The first so many of the source. 0: all.",
    )
    samples_per_task: int = Field(
        default=0, ge=0, le=1000, title="Samples per task", description="0: as the profile says."
    )

    def settings(self) -> Iterator[str]:
        if self.tasks:
            yield setting("tasks.limit", self.tasks)
        if self.samples_per_task:
            yield setting("synthesis.samples_per_task", self.samples_per_task)


class TrainingSetForm(Form):
    """Which verified samples become the training set."""

    model_config = ConfigDict(title="Training set")

    strategy: Strategy = Field(
        default=Strategy.as_profile,
        title="Strategy",
        description=(
            "concur is the paper's rule, the others are compared with it"
            " (docs/explanation/curation.md)."
        ),
    )
    size: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        title="Samples at most",
        description="0: what the strategy takes.",
    )

    def settings(self) -> Iterator[str]:
        if self.strategy != AS_PROFILE:
            yield setting("curation.strategy", self.strategy)
        if self.size:
            yield setting("curation.size", self.size)


class TrainingForm(Form):
    """The base model and how long it is trained."""

    model_config = ConfigDict(title="Training")

    base_model: str = Field(
        default="",
        title="Base model",
        description="Hub id, directory, or 'small' for the demo's. Empty: as the profile says.",
    )
    epochs: int = Field(
        default=0,
        ge=0,
        le=100,
        title="Epochs",
        description="0: as the profile says (the paper trains 3).",
    )
    workers: int = Field(
        default=0,
        ge=0,
        le=1024,
        title="Training workers",
        description="One a GPU. 0: as the profile says.",
    )

    def settings(self) -> Iterator[str]:
        if self.base_model:
            yield setting("training.base_model", self.base_model)
        if self.epochs:
            yield setting("training.num_epochs", self.epochs)
        if self.workers:
            yield setting("training.workers", self.workers)


class BenchmarkForm(Form):
    """How often each model is asked on the held-out tasks."""

    model_config = ConfigDict(title="Benchmark")

    samples_per_task: int = Field(
        default=0, ge=0, le=1000, title="Samples per task", description="0: as the profile says."
    )

    def settings(self) -> Iterator[str]:
        if self.samples_per_task:
            yield setting("benchmark.samples_per_task", self.samples_per_task)


class CuratedForm(Form):
    """Which finished training set is taken up."""

    model_config = ConfigDict(title="Training set that is there")

    snapshot: str = Field(
        default="",
        pattern=r"^[0-9a-f]*$",
        title="Fingerprint of the curated snapshot",
        description=(
            "The beginning of it is enough. Empty: the newest of the strategy concur, else the"
            " newest."
        ),
    )


class StrategiesForm(Form):
    """One training set is made by each of these."""

    model_config = ConfigDict(title="Strategies")

    strategies: list[StrategyName] = Field(
        default=[StrategyName("concur")],
        min_length=1,
        title="Strategies",
        description="One training set each, of the same verdicts.",
    )
    size: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        title="Samples at most",
        description="0: what each strategy takes.",
    )


class AdapterForm(Form):
    """Which adapter is scored beside its base model."""

    model_config = ConfigDict(title="Adapter")

    snapshot: str = Field(
        default="",
        pattern=r"^[0-9a-f]*$",
        title="Fingerprint of the training snapshot",
        description="The beginning of it is enough. Empty: the newest adapter under the root.",
    )


class AblationForm(Form):
    """Which strategies are compared, and how often each is tried."""

    model_config = ConfigDict(title="Ablation")

    strategies: list[StrategyName] = Field(
        default=[StrategyName(name) for name in ("concur", "min_length", "speedup", "random")],
        min_length=1,
        title="Strategies",
        description="The first is what the others are compared with.",
    )
    seeds: int = Field(
        default=2,
        ge=1,
        le=64,
        title="Seeds",
        description="So many branches of each strategy: 0, 1, 2 and so on.",
    )
    size: int = Field(
        default=0,
        ge=0,
        le=10_000_000,
        title="Samples at most",
        description="Of each training set. 0: what the strategy takes.",
    )
    max_gpu_hours: float = Field(
        default=0.0,
        ge=0,
        le=1_000_000,
        title="Budget, GPU-hours",
        description="No branch begins that does not fit. 0: no limit.",
    )


class AdvancedForm(Form):
    """Everything that has no field of its own."""

    model_config = ConfigDict(title="Advanced")

    overrides: list[str] = Field(
        default=[],
        title="Overrides",
        description=(
            "One KEY=VALUE each, as with --set: verification.workers=2, synthesis.sampler=vllm."
            " They win over the fields above."
        ),
    )

    def settings(self) -> Iterator[str]:
        yield from self.overrides


# what a form is before anybody fills it in: the defaults of the deployed flows
RUN = RunForm()
CANDIDATES = CandidatesForm()
TRAINING_SET = TrainingSetForm()
ADVANCED = AdvancedForm()
ABLATION = AblationForm()
ABLATION_RUN = RunForm(profile=Profile("ablation"))
CURATED = CuratedForm()
STRATEGIES = StrategiesForm()
TRAINING = TrainingForm()
BENCHMARK = BenchmarkForm()
ADAPTER = AdapterForm()


def setting(key: str, value: Any) -> str:
    """`key=value` whose value is read back as what it is: text that looks like a number, or like
    YAML, stays text."""
    import json

    return f"{key}={json.dumps(str(value) if isinstance(value, StrEnum) else value)}"


def configuration(run: RunForm, *forms: Form) -> PipelineConfig:
    """The profile with what the forms say. Raises UsageError for what cannot be used, and for a
    root that a worker cannot mean."""
    overrides = [each for form in (run, *forms) for each in form.settings()]
    config = load_profile(str(run.profile), tuple(overrides))
    return config.model_copy(
        update={"root": _root(run, config, any(each.startswith("root=") for each in overrides))}
    )


def _root(run: RunForm, config: PipelineConfig, overridden: bool) -> str:
    root = run.root or (
        config.root
        if overridden
        else os.environ.get(ROOT_VARIABLE) or os.environ.get(STACK_VARIABLE) or config.root
    )
    if (
        "://" not in root and not Path(root).is_absolute()
    ):  # a process worker starts every run in a directory that it removes at the end
        raise UsageError(
            f"the root {root!r} is relative, and a worker's working directory is a temporary one",
            f"give an absolute root in the form, or set {ROOT_VARIABLE} where the worker is"
            " started",
        )
    return root
