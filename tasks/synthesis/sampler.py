"""The interface to generators: a `Sampler` takes requests and yields responses as they finish."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

from pydantic import NonNegativeInt, PositiveInt

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, Language, Record, SamplingParams, stable_hash
from tasks.files import file_sha256
from tasks.models import count_tokens, thought_opening
from tasks.sources.small_model import resolve_model
from tasks.synthesis.config import SynthesisConfig


class Request(Record):
    """One response wanted. `request_key` identifies everything that was asked: task, prompt,
    generator, sampling, sample index. A `turn` above 1 is a follow-up on the candidate `parent`."""

    request_key: str
    task: KernelTask
    language: Language
    prompt: str
    sample_index: NonNegativeInt
    sampling: SamplingParams
    turn: PositiveInt = 1
    parent: str | None = None


class Requests(Protocol):
    """Requests made as they are read; each reading starts anew. A list will do."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[Request]: ...


class Response(Record):
    """What came back, as the generator said it. `reasoning` only where the server separates it;
    token counts None where unknown. `finish_guessed`: the text says it, nobody recorded it."""

    request_key: str
    text: str
    reasoning: str | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None
    finish_reason: str | None = None
    finish_guessed: bool | None = None
    attempts: tuple[Response, ...] = ()
    """what an agent verified before this answer: earlier turns"""


class Sampler:
    """A generator of responses. `generator` is its identity in candidates; `tokenizer` a directory,
    a hub id, or None where tokens are not counted; `served` describes its servers."""

    generator: str
    served: str | None = None
    tokenizer: str | Path | None = None
    answers_follow_ups: ClassVar[bool] = True
    """whether it can answer later turns"""

    most_attempts: int = 0
    """attempts of one response, at most"""

    def __init__(self, tokenizer: str | Path | None = None) -> None:
        self.tokenizer = tokenizer

    @classmethod
    def from_config(
        cls, config: SynthesisConfig, root: str, adapter: Path | None = None
    ) -> Sampler:
        """Make the configured sampler; `root` is the folder of snapshots, `adapter` a LoRA
        adapter's directory. Raises UsageError naming the wrong setting."""
        raise NotImplementedError

    @classmethod
    def data_version(cls, config: SynthesisConfig) -> str:
        """What else decides its answers, such as a file's content; part of every request's key.
        Raises UsageError for a missing file."""
        return ""

    def prompt(self, task: KernelTask, prompt: str) -> str:
        return prompt

    def feedback(self, task: KernelTask, code: str | None, feedback: str) -> str:
        """Follow-up text of an attempt, from its verdict's `feedback`. Must be deterministic, or a
        resumed turn asks anew."""
        return feedback

    def sample(self, requests: Requests) -> Iterator[Response]:
        """Responses in any order, at most one per request. Raises EvalError only for infrastructure
        faults."""
        raise NotImplementedError

    def count_tokens(self, texts: Sequence[str]) -> list[int] | None:
        """Tokens of each text; None without a tokenizer. Raises UsageError where it cannot be
        loaded."""
        return None if self.tokenizer is None else count_tokens(self.tokenizer, texts)

    def whole_text(self, response: Response) -> str:
        """The response's text; of one that was cut off, with the mark by which the prompt opened
        its thought, so that no draft counts as its answer."""
        cut_off = response.finish_reason == "length" and not response.finish_guessed
        if self.tokenizer is None or response.reasoning is not None or not cut_off:
            return response.text
        return thought_opening(self.tokenizer) + response.text

    def close(self) -> None:
        """Free resources; by default there are none."""


def required(config: SynthesisConfig, setting: str, example: str) -> Any:
    value = getattr(config, setting)
    if value is None:
        raise UsageError(
            f"synthesis.sampler is {config.sampler!r} but synthesis.{setting} is not set",
            f"--set synthesis.{setting}={example}",
        )
    return value


def tokenizer_of(config: SynthesisConfig, root: str) -> str | None:
    """The generator's tokenizer, a directory or hub id; None where tokens are not counted here."""
    return resolve_model(config.tokenizer, root) if config.tokenizer else None


def adapter_of(config: SynthesisConfig, adapter: Path | None) -> Path | None:
    """Directory of the adapter to sample from: the trained one, else the configured one. Raises
    UsageError where it holds none."""
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
    return adapter.parent.name[:12] if adapter.name == "adapter" else adapter.name


def adapter_digest(config: SynthesisConfig, *others: str) -> str:
    """Hash of the content of the configured adapter's files and of `others`, wherever they lie;
    empty without either."""
    adapter = adapter_of(config, None)
    files = sorted(adapter.glob("adapter_*")) if adapter else []
    digests = [[path.name, file_sha256(path)] for path in files]
    return stable_hash([digests, others]) if digests or others else ""


def model_name(model: str | None, adapter: Path | None) -> str:
    return f"{model}+{adapter_name(adapter)}" if adapter else str(model)
