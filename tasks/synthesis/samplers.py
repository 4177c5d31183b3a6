"""Which sampler a configuration asks for: one of ours, or one of an installed package."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.extensions import load_extension
from tasks.synthesis.config import BUILT_IN, GROUP, SynthesisConfig
from tasks.synthesis.sampler import Sampler

CLASSES = {
    "recorded": ("tasks.synthesis.recorded", "RecordedSampler"),
    "transformers": ("tasks.synthesis.local", "TransformersSampler"),
    "openai": ("tasks.synthesis.client", "OpenAISampler"),
    "vllm": ("tasks.synthesis.server", "VllmSampler"),
}


def sampler_class(name: str) -> type[Sampler]:
    """The class of a sampler by its name in the configuration. Raises UsageError."""
    if name in CLASSES:
        module, class_name = CLASSES[name]
        found: type[Sampler] = getattr(import_module(module), class_name)
        return found
    extension = load_extension(GROUP, name, type, BUILT_IN)
    if not issubclass(extension, Sampler):
        raise UsageError(
            f"the sampler {name!r} is no subclass of tasks.synthesis.sampler.Sampler",
            f"correct its entry point in the group {GROUP}, or uninstall it",
        )
    return extension


def make_sampler(config: SynthesisConfig, root: str, adapter: Path | None = None) -> Sampler:
    """The configured sampler; `adapter` is the directory of a LoRA adapter to sample from. Raises
    UsageError naming the setting that is missing or wrong."""
    return sampler_class(config.sampler).from_config(config, root, adapter)


def require_endpoint(config: SynthesisConfig) -> str:
    """Ask the endpoint of `sampler: openai` for its models, in words. Raises UsageError or
    EvalError where it does not answer, refuses the key or lacks the model."""
    from tasks.synthesis.client import OpenAISampler

    return OpenAISampler.from_config(config, "").require_model()
