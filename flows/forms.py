"""The run forms of the deployments: what a person fills in in Prefect's UI, and the PipelineConfig
that results.

Guarantees: every field has a title, a description, bounds if it is a number and a default, so that
an empty form runs; profiles and strategies are picked from a list; a field that is left alone keeps
the profile's value; a configuration that cannot be used is one UsageError, raised before any work.
Importing this module loads nothing heavy. Does not hold the whole configuration:
`advanced.overrides` reaches every key.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, Field, WithJsonSchema

from flows.config import PipelineConfig, load_profile, profile_names
from kernels_eval.errors import UsageError
from kernels_eval.extensions import known_names
from kernels_eval.records import Json, Record
from kernels_eval.rewards import RECIPES
from tasks.curation.config import STRATEGY_NAMES
from tasks.search.config import SearchConfig
from tasks.sources import config as sources
from tasks.synthesis import config as synthesis

ROOT_VARIABLE = "CONCUR_ROOT"
"""Environment variable of a worker: the root of forms that name none."""
STACK_VARIABLE = "CONCUR_STACK_ROOT"
"""The same, set by `concur up` for its own worker."""
AS_PROFILE = "as the profile says"


def _one_of(names: list[str]) -> tuple[AfterValidator, WithJsonSchema]:
    """A text that the page offers as a list to pick from."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"is not one of {', '.join(names)}")
        return value

    return AfterValidator(check), WithJsonSchema({"type": "string", "enum": names})


def _choices(config: type[BaseModel], field: str) -> tuple[str, ...]:
    """What a configuration takes for a field."""
    return get_args(config.model_fields[field].annotation)


Profile = Annotated[str, *_one_of(profile_names())]
StrategyName = Annotated[str, *_one_of(list(STRATEGY_NAMES))]
Strategy = Annotated[str, *_one_of([AS_PROFILE, *STRATEGY_NAMES])]
Source = Annotated[str, *_one_of([AS_PROFILE, *known_names(sources.GROUP, sources.BUILT_IN)])]
Reward = Annotated[str, *_one_of([AS_PROFILE, *RECIPES])]
Method = Annotated[str, *_one_of([AS_PROFILE, *_choices(SearchConfig, "method")])]
Sampler = Annotated[str, *_one_of([AS_PROFILE, *known_names(synthesis.GROUP, synthesis.BUILT_IN)])]


class Key(str):
    """Marks a field with the configuration key that it sets."""


def _count(title: str, description: str, most: int) -> Any:
    return Field(default=0, ge=0, le=most, title=title, description=description)


def _text(title: str, description: str, **limits: Any) -> Any:
    return Field(default="", title=title, description=description, **limits)


def _fingerprint(title: str, otherwise: str) -> Any:
    description = f"Its first characters are enough. Empty: {otherwise}."
    return _text(title, description, pattern=r"^[0-9a-f]*$")


class Form(Record):
    """One group of fields."""

    def values(self) -> Json:
        """What was filled in, by configuration key."""
        return {
            str(key): getattr(self, name)
            for name, field in type(self).model_fields.items()
            for key in field.metadata
            if isinstance(key, Key) and getattr(self, name) != field.default
        }


class RunForm(Form, title="Profile and place"):
    """Which configuration runs, and where its snapshots go."""

    profile: Profile = "nightly"
    """One that ships with concur, or a file of your own: ROOT/profiles/NAME.yaml, listed here
    after the next prefect deploy --all. The fields below change what it says."""
    root: str = _text(
        "Root of the snapshots",
        "An absolute directory or an fsspec URL. Empty: that of concur up, or"
        f" {ROOT_VARIABLE} of the worker.",
    )
    name: Annotated[str, Key("name")] = _text(
        "Name", "Shown in the names of runs. Empty: the profile's.", max_length=60
    )


class CandidatesForm(Form, title="Candidates"):
    """Which tasks, who answers them, and how many kernels are sampled for each."""

    source: Annotated[Source, Key("tasks.source")] = Field(
        default=AS_PROFILE, title="Source of the tasks"
    )
    """Where the tasks come from."""
    location: Annotated[str, Key("tasks.location")] = _text(
        "Location of the tasks",
        "A folder, file or Hugging Face id that fits the source. Empty: as the profile says.",
    )
    sampler: Annotated[Sampler, Key("synthesis.sampler")] = AS_PROFILE
    """openai: an existing endpoint. vllm: servers that concur starts."""
    model: Annotated[str, Key("synthesis.model")] = _text(
        "Model", "As the endpoint calls it, or a hub id. Empty: as the profile says."
    )
    endpoint: Annotated[str, Key("synthesis.base_url")] = _text(
        "Endpoint",
        "OpenAI-compatible address, such as http://host:8000/v1. Empty: as the profile says.",
    )
    tasks: Annotated[int, Key("tasks.limit")] = _count(
        "Tasks at most", "Only the first of the source, up to this number. 0: all.", 1_000_000
    )
    samples_per_task: Annotated[int, Key("synthesis.samples_per_task")] = _count(
        "Samples per task", "0: as the profile says.", 1000
    )


class TrainingSetForm(Form, title="Training set"):
    """Which verified samples become the training set."""

    strategy: Annotated[Strategy, Key("curation.strategy")] = AS_PROFILE
    """concur is the paper's rule, the others are compared with it
    (docs/explanation/curation.md)."""
    size: Annotated[int, Key("curation.size")] = _count(
        "Samples at most", "0: what the strategy takes.", 10_000_000
    )


class TrainingForm(Form, title="Training"):
    """The base model and how long it is trained."""

    base_model: Annotated[str, Key("training.base_model")] = _text(
        "Base model", "Hub id, directory, or 'small' for the demo's. Empty: as the profile says."
    )
    epochs: Annotated[int, Key("training.num_epochs")] = _count(
        "Epochs", "0: as the profile says (the paper trains 3).", 100
    )
    workers: Annotated[int, Key("training.workers")] = _count(
        "Training workers", "One per GPU. 0: as the profile says.", 1024
    )


class ReinforcementForm(Form, title="Reinforcement"):
    """What a verdict is worth, and how long the adapter learns from it."""

    reward: Annotated[Reward, Key("reinforcement.reward")] = AS_PROFILE
    """A recipe, with its published numbers (docs/how-to/rewards/index.md)."""
    steps: Annotated[int, Key("reinforcement.steps")] = _count(
        "Optimiser steps", "0: as the profile says.", 1_000_000
    )
    tasks_per_step: Annotated[int, Key("reinforcement.tasks_per_step")] = _count(
        "Tasks per step", "0: as the profile says.", 1000
    )
    samples_per_task: Annotated[int, Key("reinforcement.samples_per_task")] = _count(
        "Samples per task", "Compared with each other; 2 at least. 0: as the profile says.", 1000
    )


class VerdictsForm(Form, title="Verified candidates"):
    """Which verified candidates a search begins with."""

    snapshot: str = _fingerprint(
        "Fingerprint of the verification snapshot", "the newest of sampled candidates"
    )


class SearchForm(Form, title="Search"):
    """How long each kernel is searched for a faster one."""

    evaluations: Annotated[int, Key("search.evaluations")] = _count(
        "Evaluations per task", "Verdicts of changed kernels. 0: as the profile says.", 100_000
    )
    tasks: Annotated[int, Key("search.tasks")] = _count(
        "Tasks at most", "0: all that have a correct kernel.", 1_000_000
    )
    device_s: Annotated[float, Key("search.device_s")] = _count(
        "Budget, device-seconds", "Of all verdicts together. 0: as the profile says.", 1_000_000_000
    )
    method: Annotated[Method, Key("search.method")] = Field(
        default=AS_PROFILE,
        title="Method",
        description="random is the control: the same budget, without learning from verdicts.",
    )


class BenchmarkForm(Form, title="Benchmark"):
    """How often each model is asked on the held-out tasks."""

    samples_per_task: Annotated[int, Key("benchmark.samples_per_task")] = _count(
        "Samples per task", "0: as the profile says.", 1000
    )


class CuratedForm(Form, title="Existing training set"):
    """Which finished training set is used."""

    snapshot: str = _fingerprint(
        "Fingerprint of the curated snapshot", "the newest of the strategy concur, else the newest"
    )


class StrategiesForm(Form, title="Strategies"):
    """One training set is made by each of these."""

    strategies: list[StrategyName] = Field(default=["concur"], min_length=1)
    """One training set per strategy, from the same verdicts."""
    size: int = _count("Samples at most", "0: what each strategy takes.", 10_000_000)


class AdapterForm(Form, title="Adapter"):
    """Which finished adapter is used."""

    snapshot: str = _fingerprint(
        "Fingerprint of its snapshot", "the newest training under the root"
    )


class AblationForm(Form, title="Ablation"):
    """Which strategies are compared, and how often each is tried."""

    strategies: list[StrategyName] = Field(
        default=["concur", "min_length", "speedup", "random"], min_length=1
    )
    """The first is what the others are compared with."""
    seeds: int = Field(default=2, ge=1, le=64)
    """Branches per strategy, with seeds 0, 1, 2 and so on."""
    size: int = _count(
        "Samples at most", "Of each training set. 0: what the strategy takes.", 10_000_000
    )


class AdvancedForm(Form, title="Advanced"):
    """Every configuration key that has no field of its own."""

    overrides: list[str] = []
    """One KEY=VALUE per entry, as with --set: verification.workers=2, synthesis.sampler=vllm.
    They override the fields above."""


# what a form is before anybody fills it in: the defaults of the deployed flows
RUN = RunForm()
CANDIDATES = CandidatesForm()
TRAINING_SET = TrainingSetForm()
ADVANCED = AdvancedForm()
ABLATION = AblationForm()
ABLATION_RUN = RunForm(profile="ablation")
CURATED = CuratedForm()
STRATEGIES = StrategiesForm()
TRAINING = TrainingForm()
REINFORCEMENT = ReinforcementForm()
VERDICTS = VerdictsForm()
SEARCH = SearchForm()
BENCHMARK = BenchmarkForm()
ADAPTER = AdapterForm()


def configuration(run: RunForm, *forms: Form, advanced: AdvancedForm = ADVANCED) -> PipelineConfig:
    """The profile with what the forms say; `advanced` wins over the other forms.

    Raises UsageError for what cannot be used, and for a root that a worker cannot use.
    """
    values = {key: value for form in (run, *forms) for key, value in form.values().items()}
    config = load_profile(run.profile, advanced.overrides, values)
    overridden = any(each.startswith("root=") for each in advanced.overrides)
    of_worker = os.environ.get(ROOT_VARIABLE) or os.environ.get(STACK_VARIABLE)
    root = run.root or (not overridden and of_worker) or config.root
    # a process worker starts every run in a directory that it removes at the end
    if "://" not in root and not Path(root).is_absolute():
        raise UsageError(
            f"the root {root!r} is relative, and a worker's working directory is a temporary one",
            f"give an absolute root in the form, or set {ROOT_VARIABLE} where the worker is"
            " started",
        )
    return config.model_copy(update={"root": root})
