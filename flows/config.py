"""PipelineConfig: every stage's configuration, read once from a profile at the edge and handed
inward frozen.

Guarantees: importing this module loads none of torch, ray, trl, vllm, mlflow or prefect; an unknown
key, a wrong type or a value out of range is one UsageError that names the key and the nearest right
one.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from flows.runtime.config import GuardConfig
from kernels_eval.config import EvalConfig
from kernels_eval.errors import UsageError
from kernels_eval.records import Language
from tasks.analysis.config import ObservationConfig
from tasks.benchmark.config import BenchmarkConfig
from tasks.curation.quality import QualityConfig
from tasks.curation.strategies import CurationConfig
from tasks.decontamination.config import DecontaminationConfig, DeduplicationConfig
from tasks.sources.config import TasksConfig
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.known_models import sampling_for
from tasks.tracking.config import TrackingConfig
from tasks.training.recipe import TrainingRecipe
from tasks.verification.config import VerificationConfig
from tasks.workload.config import WorkloadConfig


class PipelineConfig(BaseModel):
    """The whole line: tasks, synthesis, verification, curation, analysis, training, benchmark,
    tracking."""

    model_config = ConfigDict(frozen=True, extra="forbid", title="concur run")

    name: str = Field(default="local", description="shown in run names")
    root: str = Field(
        default=".concur", description="where snapshots go: a directory, or an fsspec URL"
    )
    language: Language = Field(
        default=Language.CPP,
        description="what kernels are written in: cpp runs on the CPU, cuda and triton need a GPU",
    )
    tasks: TasksConfig = TasksConfig()
    decontamination: DecontaminationConfig = DecontaminationConfig()
    deduplication: DeduplicationConfig = DeduplicationConfig()
    workload: WorkloadConfig = WorkloadConfig()
    synthesis: SynthesisConfig = SynthesisConfig()
    verification: VerificationConfig = VerificationConfig()
    quality: QualityConfig = QualityConfig()
    curation: CurationConfig = CurationConfig()
    analysis: ObservationConfig = ObservationConfig()
    training: TrainingRecipe = TrainingRecipe()
    benchmark: BenchmarkConfig = Field(default=BenchmarkConfig(), validate_default=True)
    tracking: TrackingConfig = TrackingConfig()
    guard: GuardConfig = GuardConfig()

    @field_validator("benchmark")
    @classmethod
    def _as_the_base_model_wants(
        cls, benchmark: BenchmarkConfig, info: ValidationInfo
    ) -> BenchmarkConfig:
        """Base and tuned model are asked as the base model's card says, in what
        `benchmark.sampling` does not set."""
        if "training" not in info.data:  # it has a fault of its own, which is told
            return benchmark
        explicit = None if "sampling" in benchmark.model_fields_set else frozenset()
        sampling = sampling_for(info.data["training"].base_model, benchmark.sampling, explicit)
        return (
            benchmark
            if sampling == benchmark.sampling
            else benchmark.model_copy(update={"sampling": sampling})
        )

    @property
    def known_tasks(self) -> TasksConfig:
        """What training tasks are compared with: the benchmark's, whichever of its levels are
        scored."""
        return self.decontamination.against or self.benchmark.tasks.model_copy(
            update={"levels": None, "limit": None}
        )

    @property
    def tracking_uri(self) -> str:
        """Where runs are compared: what the profile says, else $MLFLOW_TRACKING_URI, else SQLite in
        the root."""
        return (
            self.tracking.uri
            or os.environ.get("MLFLOW_TRACKING_URI")
            or f"sqlite:///{Path(self.root).absolute()}/mlflow.db"
        )


def profiles_dir() -> Path:
    """The profiles that ship with concur (`deployments/profiles`)."""
    beside = Path(__file__).parent.parent / "deployments" / "profiles"
    return beside if beside.is_dir() else Path(str(resources.files("flows") / "profiles"))


def profile_names() -> list[str]:
    return sorted(path.stem for path in profiles_dir().glob("*.yaml"))


def load_profile(
    profile: str = "local", overrides: list[str] | tuple[str, ...] = ()
) -> PipelineConfig:
    """Read a profile by name or path and apply `key.path=value` overrides (values are YAML).

    Raises UsageError for a profile that is not there, text that is not YAML, an unknown key or an
    illegal value.
    """
    data = _read(profile)
    for override in overrides:
        apply_override(data, override)
    try:
        return PipelineConfig.model_validate(data)
    except ValidationError as error:
        raise explained(error, f"profile {profile!r}") from error


def load_protocol(overrides: Sequence[str]) -> EvalConfig:
    """The verification protocol with `key.path=value` overrides, such as `timing.max_s=1.0`. Raises
    UsageError as `load_profile` does."""
    data: dict[str, Any] = {}
    for override in overrides:
        apply_override(data, override)
    try:
        return EvalConfig.model_validate(data)
    except ValidationError as error:
        raise explained(error, "--set", EvalConfig) from error


def _read(profile: str) -> dict[str, Any]:
    import yaml

    path = (
        Path(profile)
        if profile.endswith((".yaml", ".yml")) or "/" in profile
        else profiles_dir() / f"{profile}.yaml"
    )
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        close = difflib.get_close_matches(profile, profile_names(), n=1)
        hint = (
            f"did you mean {close[0]}?"
            if close
            else f"profiles that ship with concur: {', '.join(profile_names())}"
        )
        raise UsageError(f"there is no profile {profile!r}", hint) from error
    except OSError as error:
        raise UsageError(
            f"cannot read profile {profile}: {error.strerror}", "give the path of a YAML file"
        ) from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        where = getattr(error, "problem_mark", None)
        raise UsageError(
            f"profile {profile} is not YAML{f': line {where.line + 1}' if where else ''}",
            "mend the file",
        ) from error
    if data is None:
        return {}
    if not isinstance(data, dict):
        raise UsageError(
            f"profile {profile} is a {type(data).__name__}, not a mapping of keys",
            "see deployments/profiles/local.yaml",
        )
    return data


def apply_override(data: dict[str, Any], override: str) -> None:
    import yaml

    path, separator, text = override.partition("=")
    if not separator or not path:
        raise UsageError(
            f"--set {override!r} is not key=value", "for example --set verification.workers=2"
        )
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise UsageError(f"--set {override!r}: the value is not YAML", "quote it") from error
    *parents, last = path.split(".")
    node = data
    for parent in parents:
        node = node.setdefault(parent, {})
        if not isinstance(node, dict):
            raise UsageError(
                f"--set {override!r}: {parent} holds a value, not keys", "see concur run --help"
            )
    node[last] = value


def explained(
    error: ValidationError, where: str, model: type[BaseModel] = PipelineConfig
) -> UsageError:
    """The first problem, in words: which key, what is wrong, what would be right."""
    problem = error.errors()[0]
    path = [str(part) for part in problem["loc"]]
    key = ".".join(path)
    if problem["type"] == "extra_forbidden":
        known = _known_keys(path[:-1], model)
        close = difflib.get_close_matches(path[-1], known, n=1)
        hint = (
            f"did you mean {'.'.join([*path[:-1], close[0]])}?"
            if close
            else f"known keys here: {', '.join(known)}"
        )
        return UsageError(f"{where} has an unknown key {key!r}", hint)
    return UsageError(
        f"{where}: {key} = {problem.get('input')!r}: {problem['msg']}",
        "correct the value in the profile or with --set",
    )


def _known_keys(path: list[str], model: Any) -> list[str]:
    for part in path:
        annotation = (
            model.model_fields[part].annotation
            if part in getattr(model, "model_fields", {})
            else None
        )
        if not (isinstance(annotation, type) and issubclass(annotation, BaseModel)):
            return []
        model = annotation
    return sorted(model.model_fields)
