"""The sampler `contrast`: it shows earlier kernels in every prompt, and another sampler answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import ValidationError

from experiments.contrast.prompts import (
    CONTRAST_VERSION,
    ContrastOptions,
    contrast_prompt,
    read_kernels,
)
from kernels_eval.errors import UsageError, first_problem
from kernels_eval.records import KernelTask, stable_hash
from tasks.files import file_sha256
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.earlier import Kernel
from tasks.synthesis.sampler import Requests, Response, Sampler
from tasks.synthesis.samplers import make_sampler, sampler_class


class ContrastSampler(Sampler):
    """`inner`, asked with prompts that show `kernels`, which are known by task_id."""

    def __init__(
        self, inner: Sampler, kernels: Mapping[str, Sequence[Kernel]], options: ContrastOptions
    ) -> None:
        super().__init__(inner.tokenizer)
        self.inner, self.kernels, self.options = inner, kernels, options
        self.generator, self.served = inner.generator, inner.served

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> ContrastSampler:
        options = options_of(config)
        inner = make_sampler(inner_config(config, options), root, adapter)
        return cls(inner, read_kernels(options.kernels), options)

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        options = options_of(config)
        path = Path(options.kernels)
        if not path.is_file():
            raise UsageError(
                f"{path} is not a file",
                "give earlier kernels with --set synthesis.options.kernels=PATH",
            )
        asked = inner_config(config, options)
        inner = sampler_class(asked.sampler).data_version(asked)
        chosen = options.model_dump(mode="json", exclude={"kernels"})
        return stable_hash([CONTRAST_VERSION, file_sha256(path), chosen, inner])

    def prompt(self, task: KernelTask, prompt: str) -> str:
        prompt = self.inner.prompt(task, prompt)
        return contrast_prompt(prompt, self.kernels.get(task.task_id, ()), self.options)

    def sample(self, requests: Requests) -> Iterator[Response]:
        yield from self.inner.sample(requests)
        self.served = self.inner.served

    def close(self) -> None:
        self.inner.close()


def options_of(config: SynthesisConfig) -> ContrastOptions:
    """The sampler's own settings. Raises UsageError naming the one that is wrong."""
    try:
        return ContrastOptions.model_validate(config.options)
    except ValidationError as error:
        name, message = first_problem(error)
        raise UsageError(
            f"synthesis.options.{name}: {message}",
            f"settings are {', '.join(ContrastOptions.model_fields)}",
        ) from error


def inner_config(config: SynthesisConfig, options: ContrastOptions) -> SynthesisConfig:
    """What the sampler behind it is asked with. Raises UsageError for one that has no other
    prompt."""
    inner = config.model_copy(update={"sampler": options.sampler, "options": {}})
    if not sampler_class(options.sampler).answers_follow_ups:
        raise UsageError(
            f"{options.sampler} responses answer no other prompt",
            "set synthesis.options.sampler to a model",
        )
    return inner
