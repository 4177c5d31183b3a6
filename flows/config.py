"""PipelineConfig: all stages' configuration, read once from a profile, frozen.

Guarantees: imports none of torch, ray, trl, vllm, mlflow or prefect; a wrong key, type or value is
one UsageError that names the key and the nearest right one."""

from __future__ import annotations

import os
from collections.abc import Iterable
from importlib import resources
from pathlib import Path

from pydantic import Field, ValidationInfo, field_validator

from kernels_eval.errors import UsageError
from kernels_eval.extensions import known_names
from kernels_eval.records import Json, Language, Record, Row
from kernels_eval.settings import nearest, overridden, put
from kernels_eval.written import yaml_of
from tasks.benchmark.config import BenchmarkConfig
from tasks.curation.config import (
    STRATEGY_GROUP,
    STRATEGY_NAMES,
    CurationConfig,
)
from tasks.decontamination.config import DecontaminationConfig, DeduplicationConfig
from tasks.profiling.config import ProfileConfig
from tasks.search.config import SearchConfig
from tasks.sources.config import TasksConfig
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.known_models import sampling_for
from tasks.tracking.config import TrackingConfig
from tasks.training.recipe import ReinforceRecipe, TrainingRecipe
from tasks.verification.config import VerificationConfig


class PipelineConfig(Record, title="concur run"):
    """The whole line: tasks, synthesis, verification, curation, analysis, training, benchmark,
    tracking."""

    name: str = "local"
    """shown in names of runs, except of one that is given a Run Name of its own"""
    root: str = ".concur"
    """folder of the snapshots: a directory, or an fsspec URL"""
    language: Language = Language("cpp")
    """language of the kernels: cpp runs on the CPU, cuda and triton need a GPU"""
    tasks: TasksConfig = TasksConfig()
    decontamination: DecontaminationConfig = DecontaminationConfig()
    deduplication: DeduplicationConfig = DeduplicationConfig()
    synthesis: SynthesisConfig = SynthesisConfig()
    verification: VerificationConfig = VerificationConfig()
    profile: ProfileConfig = ProfileConfig()
    search: SearchConfig = SearchConfig()
    curation: CurationConfig = CurationConfig()
    training: TrainingRecipe = TrainingRecipe()
    reinforcement: ReinforceRecipe = ReinforceRecipe()
    benchmark: BenchmarkConfig = Field(default=BenchmarkConfig(), validate_default=True)
    tracking: TrackingConfig = TrackingConfig()

    @field_validator("benchmark")
    @classmethod
    def _as_the_base_model_wants(
        cls, benchmark: BenchmarkConfig, info: ValidationInfo
    ) -> BenchmarkConfig:
        if "training" not in info.data:  # it has a fault of its own, which is told
            return benchmark
        explicit: frozenset[str] | None = (
            None if "sampling" in benchmark.model_fields_set else frozenset()
        )
        sampling = sampling_for(info.data["training"].base_model, benchmark.sampling, explicit)
        if sampling == benchmark.sampling:
            return benchmark
        return benchmark.model_copy(update={"sampling": sampling})

    @property
    def known_tasks(self) -> TasksConfig:
        """Tasks to exclude from training: the benchmark's, of all its levels."""
        return self.benchmark.tasks.model_copy(update={"levels": None, "limit": None})

    @property
    def tracking_uri(self) -> str:
        """Tracking server: the profile's, else $MLFLOW_TRACKING_URI, else SQLite in the root."""
        return (
            self.tracking.uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{Path(self.root).absolute()}/mlflow.db"
        )


def shipped_dir(kind: str) -> Path:
    """Folder of shipped files of a kind ("profiles", "strategies"), one YAML each."""
    beside = Path(__file__).parent.parent / "deployments" / kind
    return beside if beside.is_dir() else Path(str(resources.files("flows") / kind))


def shipped_names(kind: str) -> list[str]:
    return sorted(path.stem for path in shipped_dir(kind).glob("*.yaml"))


def own_profiles() -> dict[str, Path]:
    """A user's profiles by name: `profiles/*.yaml` under $CONCUR_ROOT, a worker's root."""
    root = os.environ.get("CONCUR_ROOT", "")
    if not root or "://" in root:
        return {}
    return {path.stem: path for path in sorted(Path(root).glob("profiles/*.yaml"))}


def profile_names() -> list[str]:
    return sorted({*shipped_names("profiles"), *own_profiles()})


def about_profile(name: str) -> str:
    """What a profile that ships with concur is for: the first line of its file, a comment."""
    text = (shipped_dir("profiles") / f"{name}.yaml").read_text(encoding="utf-8")
    return text.partition("\n")[0].lstrip("# ")


def load_profile(
    profile: str = "local", overrides: Iterable[str] = (), values: Row | None = None
) -> PipelineConfig:
    """Read a profile by name or path, set `values` (by dotted key), then apply `key.path=value`
    overrides (values are YAML). Raises UsageError for what is missing, unknown or illegal."""
    data = read_profile(profile)
    for key, value in (values or {}).items():
        put(data, key, value)
    return overridden(PipelineConfig, data, overrides, f"profile {profile!r}")


def read_profile(profile: str) -> Json:
    """Keys set by the profile itself. Raises UsageError as `load_profile` does."""
    return _read("profile", "profiles", profile)


def strategy_names(lists: Iterable[str]) -> list[str]:
    """The names in lists with commas, each once; `all` are all that are known."""
    known = known_names(STRATEGY_GROUP, STRATEGY_NAMES)
    names = (name.strip() for text in lists for name in text.split(","))
    found = [each for name in names for each in (known if name == "all" else (name,))]
    return list(dict.fromkeys(found))


def load_strategy(
    name: str, overrides: Iterable[str] = (), base: CurationConfig | None = None
) -> CurationConfig:
    """A strategy by name, or from a YAML file with keys of `curation`, with `key=value` overrides
    (values are YAML); other keys are those of `base`, or the defaults. Raises UsageError."""
    known = known_names(STRATEGY_GROUP, STRATEGY_NAMES)
    plain = name in known and name not in shipped_names("strategies")
    data = {"strategy": name} if plain else _read("strategy", "strategies", name)
    data = (base.model_dump() if base else {}) | data
    return overridden(CurationConfig, data, overrides, f"strategy {name!r}")


def _read(what: str, kind: str, name: str) -> Json:
    is_path = name.endswith((".yaml", ".yml")) or "/" in name
    path = Path(name) if is_path else shipped_dir(kind) / f"{name}.yaml"
    path = own_profiles().get(name, path) if kind == "profiles" else path
    try:
        return keys_in(path, f"{what} {name}", f"deployments/{kind}")
    except UsageError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            raise
        hint = nearest(name, shipped_names(kind), f"{kind} that ship with concur")
        raise UsageError(f"there is no {what} {name!r}", hint) from error


def keys_in(path: Path, what: str, example: str) -> Json:
    """Keys of a YAML file. Raises UsageError where it is unreadable or no mapping."""
    try:
        data = yaml_of(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"cannot read {what}: {error.strerror}", "give the path of a YAML file"
        ) from error
    except ValueError as error:
        cause = "it is not UTF-8" if isinstance(error, UnicodeDecodeError) else error
        raise UsageError(f"{what} is not YAML: {cause}", "correct the file") from error
    if not isinstance(data, dict | None):
        raise UsageError(
            f"{what} is a {type(data).__name__}, not a mapping of keys", f"see {example}"
        )
    return data or {}
