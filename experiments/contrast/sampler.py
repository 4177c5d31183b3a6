"""The sampler `contrast`: it shows earlier kernels in every prompt, and another sampler answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from experiments.contrast.prompts import (
    CONTRAST_VERSION,
    ContrastOptions,
    contrast_prompt,
    read_kernels,
)
from experiments.wrapped import WrappedSampler, inner_config, read_options
from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, stable_hash
from tasks.files import file_sha256
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.earlier import Kernel
from tasks.synthesis.sampler import Sampler
from tasks.synthesis.samplers import make_sampler, sampler_class


class ContrastSampler(WrappedSampler):
    """`inner`, asked with prompts that show `kernels`, which are known by task_id."""

    def __init__(
        self, inner: Sampler, kernels: Mapping[str, Sequence[Kernel]], options: ContrastOptions
    ) -> None:
        super().__init__(inner)
        self.kernels, self.options = kernels, options

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> ContrastSampler:
        options = read_options(ContrastOptions, config.options, "synthesis.options")
        inner = make_sampler(inner_config(config, options.sampler), root, adapter)
        return cls(inner, read_kernels(options.kernels), options)

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        options = read_options(ContrastOptions, config.options, "synthesis.options")
        path = Path(options.kernels)
        if not path.is_file():
            raise UsageError(
                f"{path} is not a file",
                "give earlier kernels with --set synthesis.options.kernels=PATH",
            )
        asked = inner_config(config, options.sampler)
        inner = sampler_class(asked.sampler).data_version(asked)
        chosen = options.model_dump(mode="json", exclude={"kernels"})
        return stable_hash([CONTRAST_VERSION, file_sha256(path), chosen, inner])

    def prompt(self, task: KernelTask, prompt: str) -> str:
        prompt = self.inner.prompt(task, prompt)
        return contrast_prompt(prompt, self.kernels.get(task.task_id, ()), self.options)
