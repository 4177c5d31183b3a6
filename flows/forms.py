"""The run forms of the deployments in Prefect's UI, and the PipelineConfig that results. A field
left alone keeps the profile's value; `advanced.overrides` reaches every key. Light to import."""

from __future__ import annotations

import os
from contextlib import suppress
from functools import cache
from operator import attrgetter
from pathlib import Path
from typing import Annotated, Any, get_args

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, WithJsonSchema

from flows.config import PipelineConfig, about_profile, load_profile, profile_names
from kernels_eval.errors import UsageError
from kernels_eval.extensions import known_names
from kernels_eval.installation import ROOT_VARIABLE
from kernels_eval.records import Json, Record
from kernels_eval.rewards import RECIPES
from tasks.curation.config import STRATEGY_NAMES
from tasks.search.config import SearchConfig
from tasks.sources import config as sources
from tasks.synthesis import config as synthesis

AS_PROFILE = "as the profile says"
MOST_VALUES = 3
"""Different values of the profiles that a hint tells."""
MOST = 1_000_000
"""Bound of every count of a form."""


def _one_of(names: list[str]) -> tuple[AfterValidator, WithJsonSchema]:
    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"is not one of {', '.join(names)}")
        return value

    return AfterValidator(check), WithJsonSchema({"type": "string", "enum": names})


def _choices(config: type[BaseModel], field: str) -> tuple[str, ...]:
    return get_args(config.model_fields[field].annotation)


Profile = Annotated[str, *_one_of(profile_names())]
StrategyName = Annotated[str, *_one_of(list(STRATEGY_NAMES))]
Strategy = Annotated[str, *_one_of([AS_PROFILE, *STRATEGY_NAMES])]
Source = Annotated[str, *_one_of([AS_PROFILE, *known_names(sources.GROUP, sources.BUILT_IN)])]
Reward = Annotated[str, *_one_of([AS_PROFILE, *RECIPES])]
Method = Annotated[str, *_one_of([AS_PROFILE, *_choices(SearchConfig, "method")])]
Sampler = Annotated[str, *_one_of([AS_PROFILE, *known_names(synthesis.GROUP, synthesis.BUILT_IN)])]


@cache
def _profiles() -> dict[str, PipelineConfig]:
    """Every profile of the list, but those of one's own that cannot be read."""
    found = {}
    for name in profile_names():
        with suppress(UsageError):
            found[name] = load_profile(name)
    return found


def _what_profiles_say(key: str, unset: str) -> str:
    """The value of every profile, whichever is chosen above, `unset` where it is None:
    ` (5; paper: 10)`. Nothing where each has its own."""
    named: dict[str, list[str]] = {}
    for name, config in _profiles().items():
        value = attrgetter(key)(config)
        named.setdefault(unset if value is None else str(value), []).append(name)
    if not 0 < len(named) <= MOST_VALUES:
        return ""
    usual, *others = sorted(named, key=lambda value: -len(named[value]))
    told = [usual, *(f"{', '.join(named[value])}: {value}" for value in others)]
    return f" ({'; '.join(told)})"


def _sets(key: str, empty: str | int, otherwise: str, unset: str = "none", **more: Any) -> Any:
    found: Any = PipelineConfig
    for name in key.split("."):
        field = found.model_fields[name]
        found = field.annotation
    # what a key that is not set means, the hint says of the profiles
    text = " ".join(str(field.description).split()).partition("; not set: ")[0]
    description = f"{text[0].upper()}{text[1:]}. {otherwise}{_what_profiles_say(key, unset)}."
    return Field(default=empty, description=description, json_schema_extra={"key": key}, **more)


def _pick(key: str) -> Any:
    return _sets(key, AS_PROFILE, "Left alone: as the profile says")


def _text(key: str, unset: str = "none", **more: Any) -> Any:
    return _sets(key, "", "Empty: as the profile says", unset, **more)


def _count(key: str, unset: str = "none", **more: Any) -> Any:
    return _sets(key, 0, "0: as the profile says", unset, ge=0, le=MOST, **more)


def _fingerprint(title: str, otherwise: str) -> Any:
    description = f"Its first characters are enough. Empty: {otherwise}."
    return Field(default="", title=title, description=description, pattern=r"^[0-9a-f]*$")


class Form(Record):
    """One group of fields."""

    model_config = ConfigDict(
        field_title_generator=lambda name, _: name.replace("_", " ").capitalize()
    )

    def values(self) -> Json:
        found = {}
        for name, field in type(self).model_fields.items():
            extra, value = field.json_schema_extra, getattr(self, name)
            if isinstance(extra, dict) and value != field.default:
                found[str(extra["key"])] = value
        return found


class RunForm(Form):
    """Which configuration runs, and where its snapshots go."""

    profile: Profile = Field(
        default="nightly",
        description=(
            "What all fields left alone are set to. One that ships with concur, such as nightly"
            f" ({about_profile('nightly').partition('.')[0].lower()}; `concur profiles` explains"
            " each), or your own ROOT/profiles/NAME.yaml, listed after prefect deploy --all."
        ),
    )
    root: str = Field(default="", title="Root of the snapshots")
    """An absolute directory or an fsspec URL. Empty: CONCUR_ROOT of the worker, which `concur up`
    sets to its own."""
    name: str = _text("name", title="Name of the configuration", max_length=60)


class CandidatesForm(Form):
    """Which tasks, who answers them, and how many kernels are sampled for each."""

    tasks: int = _count("tasks.limit", "all", title="Tasks at most")
    samples_per_task: int = _count("synthesis.samples_per_task")
    source: Source = _pick("tasks.source")
    location: str = _text("tasks.location", "the source's own")
    sampler: Sampler = _pick("synthesis.sampler")
    model: str = _text("synthesis.model", "none, answers are recorded")
    endpoint: str = _text("synthesis.base_url")


class TrainingSetForm(Form):
    """Which verified samples become the training set."""

    strategy: Strategy = _pick("curation.strategy")
    size: int = _count("curation.size", "what the strategy takes", title="Samples at most")


class TrainingForm(Form):
    """The base model and how long it is trained."""

    base_model: str = _text("training.base_model")
    epochs: int = _count("training.num_epochs")
    workers: int = _count("training.workers")


class ReinforcementForm(Form):
    """What a verdict is worth, and how long the adapter learns from it."""

    reward: Reward = _pick("reinforcement.reward")
    steps: int = _count("reinforcement.steps")
    tasks_per_step: int = _count("reinforcement.tasks_per_step")
    samples_per_task: int = _count("reinforcement.samples_per_task")


class VerdictsForm(Form):
    """Which verified candidates a search begins with."""

    snapshot: str = _fingerprint(
        "Fingerprint of the verification snapshot", "the newest of sampled training candidates"
    )


class SearchForm(Form):
    """How long each kernel is searched for a faster one."""

    evaluations: int = _count("search.evaluations")
    tasks: int = _count("search.tasks", "all", title="Tasks at most")
    device_s: float = _count("search.device_s", "no limit", title="Budget, device-seconds")
    method: Method = _pick("search.method")


class BenchmarkForm(Form):
    """How often each model is asked on the held-out tasks."""

    samples_per_task: int = _count("benchmark.samples_per_task")


class CuratedForm(Form):
    """Which finished training set is used."""

    snapshot: str = _fingerprint(
        "Fingerprint of the curated snapshot", "the newest of the strategy concur, else the newest"
    )


class StrategiesForm(Form):
    """One training set is made by each of these."""

    strategies: list[StrategyName] = Field(default=["concur"], min_length=1)
    """One training set per strategy, from the same verdicts."""
    size: int = Field(default=0, ge=0, le=MOST, title="Samples at most")
    """Of each training set. 0: what the strategy takes."""


class AdapterForm(Form):
    """Which finished adapter is used."""

    snapshot: str = _fingerprint(
        "Fingerprint of its snapshot", "the newest training under the root"
    )


class AblationForm(Form):
    """Which strategies are compared, and how often each is tried."""

    strategies: list[StrategyName] = Field(
        default=["concur", "min_length", "speedup", "random"], min_length=1
    )
    """The first is what the others are compared with."""
    seeds: int = Field(default=2, ge=1, le=64)
    """Branches per strategy, with seeds 0, 1, 2 and so on."""
    size: int = Field(default=0, ge=0, le=MOST, title="Samples at most")
    """Of each training set. 0: what the strategy takes."""


class AdvancedForm(Form):
    """Every configuration key that has no field of its own."""

    overrides: list[str] = []
    """One KEY=VALUE per entry, as with --set: verification.workers=2, synthesis.sampler=vllm.
    They override the fields above."""


def _titled(title: str) -> Any:
    return Field(json_schema_extra={"title": title})


# Forms as a flow's parameters. The title is the parameter's: pydantic drops one that the form has
# too, and Prefect then shows the parameter's name.
Run = Annotated[RunForm, _titled("Profile and place")]
Candidates = Annotated[CandidatesForm, _titled("Candidates")]
TrainingSet = Annotated[TrainingSetForm, _titled("Training set")]
Training = Annotated[TrainingForm, _titled("Training")]
Reinforcement = Annotated[ReinforcementForm, _titled("Reinforcement")]
Verdicts = Annotated[VerdictsForm, _titled("Verified candidates")]
Search = Annotated[SearchForm, _titled("Search")]
Benchmark = Annotated[BenchmarkForm, _titled("Benchmark")]
Curated = Annotated[CuratedForm, _titled("Existing training set")]
Strategies = Annotated[StrategiesForm, _titled("Strategies")]
Adapter = Annotated[AdapterForm, _titled("Adapter")]
Ablation = Annotated[AblationForm, _titled("Ablation")]
Advanced = Annotated[AdvancedForm, _titled("Advanced")]


def configuration(
    run: RunForm, *forms: Form, advanced: AdvancedForm = AdvancedForm()
) -> PipelineConfig:
    """The profile with what the forms say; `advanced` wins over the other forms.

    Raises UsageError for what cannot be used, and for a root that a worker cannot use.
    """
    values = {key: value for form in (run, *forms) for key, value in form.values().items()}
    config = load_profile(run.profile, advanced.overrides, values)
    overridden = any(each.startswith("root=") for each in advanced.overrides)
    root = run.root or (not overridden and os.environ.get(ROOT_VARIABLE)) or config.root
    # a process worker starts every run in a directory that it removes at the end
    if "://" not in root and not Path(root).is_absolute():
        raise UsageError(
            f"the root {root!r} is relative, and a worker's working directory is a temporary one",
            f"give an absolute root in the form, or set {ROOT_VARIABLE} where the worker is"
            " started",
        )
    return config.model_copy(update={"root": root})
