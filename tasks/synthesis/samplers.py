"""Choice of the configured sampler, ours or an installed package's."""

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
    "agent": ("tasks.synthesis.agent", "AgentSampler"),
    "vllm": ("tasks.synthesis.server", "VllmSampler"),
}


def sampler_class(name: str) -> type[Sampler]:
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
    """The configured sampler; `adapter` is a LoRA adapter's directory. Raises UsageError naming the
    missing or wrong setting."""
    return sampler_class(config.sampler).from_config(config, root, adapter)


def require_endpoint(config: SynthesisConfig) -> str:
    """Ask the endpoint of `sampler: openai` for its models, in words. Raises UsageError or
    EvalError as `OpenAISampler.require_model`."""
    from tasks.synthesis.client import OpenAISampler

    untokenized = config.model_copy(update={"tokenizer": None})  # asking builds no small model
    return OpenAISampler.from_config(untokenized, "").require_model()
