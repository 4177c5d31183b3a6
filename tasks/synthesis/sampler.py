"""The one way to ask a generator for kernels: a `Sampler` takes requests and yields responses as
they finish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import NonNegativeInt, PositiveInt

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, Language, Record, SamplingParams, stable_hash
from tasks.files import file_sha256
from tasks.models import count_tokens
from tasks.sources.small_model import resolve_model
from tasks.synthesis.config import USAGE, SynthesisConfig


class Request(Record):
    """One response wanted. `request_key` identifies everything that was asked: task, prompt,
    generator, sampling, sample index.

    `turn` is 1 where the prompt is the task's own. A later one is a follow-up on the candidate
    `parent`.
    """

    request_key: str
    task: KernelTask
    language: Language
    prompt: str
    sample_index: NonNegativeInt
    sampling: SamplingParams
    turn: PositiveInt = 1
    parent: str | None = None


class Requests(Protocol):
    """Any number of requests, made as they are read: each reading begins anew. A list of them will
    do."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class Response(Record):
    """What came back, as the generator said it. `reasoning` only where the server separates it;
    token counts None where unknown (`reasoning_tokens` is the server's own count, for samplers
    without a tokenizer). `finish_guessed`: the text says it, nobody recorded it. `tokens`: the ids
    that were drawn, where they were asked for."""

    request_key: str
    text: str
    tokens: tuple[int, ...] | None = None
    reasoning: str | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    finish_reason: str | None = None
    finish_guessed: bool | None = None


class Sampler:
    """A generator of responses.

    `generator` is its identity, recorded in every candidate; `tokenizer` a directory, a hub id, or
    None where tokens are not counted. `served` says what servers it started with which settings.
    """

    generator: str
    served: str | None = None
    answers_follow_ups: ClassVar[bool] = True
    """whether a later turn can be asked of it"""

    def __init__(self, tokenizer: str | Path | None = None) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> Sampler:
        """The sampler that a configuration asks for; `root` is the folder of snapshots, `adapter`
        the directory of a LoRA adapter to sample from. Raises UsageError naming the setting that
        is wrong."""
        raise NotImplementedError

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        """What beside the configuration decides its answers, such as the content of a file; part
        of every request's key. Raises UsageError where a file is missing."""
        return ""

    def prompt(self, task: KernelTask, prompt: str) -> str:
        """The prompt that it is asked with; `prompt` is the task's own."""
        return prompt

    def feedback(self, task: KernelTask, code: str | None, feedback: str) -> str:
        """What a follow-up says of an attempt; `feedback` is what its verdict says. The same
        arguments give the same text, or a turn that is resumed asks anew."""
        return feedback

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses in any order, at most one per request. Raises an EvalError only for
        infrastructure faults."""
        raise NotImplementedError

    def count_tokens(self, texts: Sequence[str]) -> list[int] | None:
        """Tokens of each text; None without a tokenizer. Raises UsageError where the tokenizer
        cannot be loaded."""
        return None if self.tokenizer is None else count_tokens(self.tokenizer, texts)

    def close(self) -> None:
        """Nothing is held between calls of `sample`."""


def required(config: SynthesisConfig, setting: str, example: str) -> Any:
    """A setting of the configuration. Raises UsageError where it is not set."""
    value = getattr(config, setting)
    if value is None:
        raise UsageError(
            f"synthesis.sampler is {config.sampler!r} but synthesis.{setting} is not set",
            f"--set synthesis.{setting}={example}",
        )
    return value


def tokenizer_of(config: SynthesisConfig, root: str) -> str | None:
    """The generator's tokenizer, as a directory or hub id; None where it is not counted here."""
    if config.tokenizer in (None, USAGE):
        return None
    return resolve_model(config.tokenizer, root)


def adapter_of(config: SynthesisConfig, adapter: Path | None) -> Path | None:
    """The directory of the adapter to sample from: the one that was trained, else the configured
    one. Raises UsageError where it holds none."""
    if adapter is not None or config.adapter is None:
        return adapter
    directory = Path(config.adapter).expanduser().absolute()
    if not (directory / "adapter_config.json").is_file():
        raise UsageError(
            f"synthesis.adapter: {directory} holds no adapter_config.json",
            "give the directory of a LoRA adapter",
        )
    return directory


def adapter_name(adapter: Path) -> str:
    """An adapter by the fingerprint of the snapshot it lies in, else by its directory."""
    return adapter.parent.name[:12] if adapter.name == "adapter" else adapter.name


def adapter_digest(config: SynthesisConfig, *others: str) -> str:
    """Hash of the configured adapter's files and of `others`; empty where there are neither. Its
    content counts, not where it lies."""
    adapter = adapter_of(config, None)
    files = sorted(adapter.glob("adapter_*")) if adapter else []
    digests = [[path.name, file_sha256(path)] for path in files]
    return stable_hash([digests, others]) if digests or others else ""


def model_name(model: str | None, adapter: Path | None) -> str:
    """The generator's identity: the model, and the adapter."""
    return f"{model}+{adapter_name(adapter)}" if adapter else str(model)
