"""What samplers that change a prompt have in common: another sampler answers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, TypeVar

from pydantic import ValidationError

from kernels_eval.errors import UsageError, first_problem
from kernels_eval.records import KernelTask, Record
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.sampler import Requests, Response, Sampler
from tasks.synthesis.samplers import sampler_class

Options = TypeVar("Options", bound=Record)


def read_options(model: type[Options], given: Mapping[str, Any], key: str) -> Options:
    """The settings in a free mapping. Raises UsageError naming the key and what is wrong."""
    try:
        return model.model_validate(given)
    except ValidationError as error:
        name, message = first_problem(error)
        place = f"{key}.{name}" if name else key
        raise UsageError(
            f"{place}: {message}", f"settings are {', '.join(model.model_fields)}"
        ) from error


def inner_config(config: SynthesisConfig, sampler: str) -> SynthesisConfig:
    """What the sampler behind another one is asked with. Raises UsageError for one that answers no
    other prompt."""
    if not sampler_class(sampler).answers_follow_ups:
        raise UsageError(
            f"{sampler} responses answer no other prompt",
            "set synthesis.options.sampler to a model",
        )
    return config.model_copy(update={"sampler": sampler, "options": {}})


class WrappedSampler(Sampler):
    """`inner` under its own name; a subclass changes what it is asked."""

    def __init__(self, inner: Sampler) -> None:
        super().__init__(inner.tokenizer)
        self.inner, self.generator, self.served = inner, inner.generator, inner.served

    def prompt(self, task: KernelTask, prompt: str) -> str:
        return self.inner.prompt(task, prompt)

    def feedback(self, task: KernelTask, code: str | None, feedback: str) -> str:
        return self.inner.feedback(task, code, feedback)

    def count_tokens(self, texts: Any) -> list[int] | None:
        return self.inner.count_tokens(texts)

    def sample(self, requests: Requests) -> Iterator[Response]:
        yield from self.inner.sample(requests)
        self.served = self.inner.served

    def close(self) -> None:
        self.inner.close()
