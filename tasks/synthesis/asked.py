"""What a generator is asked at first: one request for each sample of each task, made when it is
read; and how fast answers come.

Guarantees: a request's key names everything that was asked (task, prompt, generator, sampling,
sample index, recorded data), and the same key gives the same request. Any number of requests takes
the memory of the tasks, and of a key each.
"""

from __future__ import annotations

import hashlib
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Set
from pathlib import Path
from typing import Any

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, Language, SamplingParams, stable_hash
from tasks.progress import duration
from tasks.sources.stage import read_tasks
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.prompts import render
from tasks.synthesis.sampler import Request, Response

ENOUGH = 5
"""Answers before a rate is told."""


def request_key(
    task: KernelTask,
    prompt: str,
    generator: str,
    sampling: SamplingParams,
    sample_index: int,
    data: str,
    *later: Any,
) -> str:
    """Identity of a request. `data` is `data_version`; `later` the turn and the parent where they
    are not the first."""
    return stable_hash(
        [task.code, prompt, generator, sampling.identity, sample_index, data, *later]
    )


class RequestSet(ABC):
    """Requests by their keys, each made when it is read. `_places` says of each key what it is made
    from, in the order of asking."""

    _places: Mapping[str, Any]

    @property
    def keys(self) -> Set[str]:
        return self._places.keys()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        return iter(self.without(frozenset()))

    @abstractmethod
    def __getitem__(self, key: str) -> Request: ...

    def without(self, done: Set[str]) -> Left:
        """Those whose keys are not among these."""
        return Left(self, [key for key in self._places if key not in done])


class Asked(RequestSet):
    """All requests of a first turn, in the order of the tasks; those of one task one after the
    other, so that they share a prefix."""

    def __init__(
        self, tasks: SnapshotRef, config: SynthesisConfig, language: Language, generator: str
    ) -> None:
        self._config, self._language, self._generator = config, language, generator
        self._data = data_version(config)
        self._tasks = read_tasks(tasks)
        self._places = {
            request.request_key: (number, request.sample_index)
            for number, task in enumerate(self._tasks)
            for request in self._of(task, range(config.samples_per_task))
        }

    def __getitem__(self, key: str) -> Request:
        number, index = self._places[key]
        return next(self._of(self._tasks[number], [index]))

    def _of(self, task: KernelTask, indices: list[int] | range) -> Iterator[Request]:
        prompt = render(task, self._language, self._config.hardware)
        for index in indices:
            sampling = self._config.sampling.model_copy(
                update={"seed": self._config.sampling.seed + index}
            )
            key = request_key(task, prompt, self._generator, sampling, index, self._data)
            yield Request(
                request_key=key,
                task=task,
                language=self._language,
                prompt=prompt,
                sample_index=index,
                sampling=sampling,
            )


class Left:
    """Some of the requests, in their order."""

    def __init__(self, asked: RequestSet, keys: list[str]) -> None:
        self._asked, self._keys = asked, keys

    def __len__(self) -> int:
        return len(self._keys)

    def __iter__(self) -> Iterator[Request]:
        return (self._asked[key] for key in self._keys)


class Speed:
    """Tokens a second and the time left, from the answers of this run."""

    def __init__(self) -> None:
        self._began = time.monotonic()
        self._answers = self._tokens = 0

    def count(self, response: Response) -> None:
        self._answers += 1
        self._tokens += response.completion_tokens or 0

    def line(self, left: int) -> str:
        """For a progress line: empty until a few answers are there."""
        if self._answers < ENOUGH:
            return ""
        passed_s = max(1e-6, time.monotonic() - self._began)
        tokens = f"{self._tokens / passed_s:,.0f} tokens/s, " if self._tokens else ""
        return f" ({tokens}{duration(left * passed_s / self._answers)} left)"


def data_version(config: SynthesisConfig) -> str:
    """Recorded responses are data: their content is part of what was asked. So are an adapter's,
    and arguments of a server."""
    if config.sampler == "vllm":
        said = [config.server.identity, _adapter_digest(config)]
        return stable_hash(said) if any(said) else ""
    if config.sampler != "recorded":
        return ""
    if config.responses:
        path = Path(config.responses)
        if not path.is_file():
            raise UsageError(
                f"{config.responses} is not a file",
                "give a Parquet file of responses with --set synthesis.responses=PATH",
            )
        return stable_hash([path.stat().st_size, path.stat().st_mtime_ns])
    from tasks.sources.models import bundled_texts

    return stable_hash(bundled_texts())


def _adapter_digest(config: SynthesisConfig) -> str:
    """Of the files of the adapter that is asked by name: its content counts, not where it lies.
    Empty where none is asked."""
    location = Path(config.server.adapters.get(config.adapter or "", "")).expanduser()
    if not config.adapter or not location.is_dir():
        return ""  # none is asked; or the sampler says what is missing
    files = [
        path
        for path in sorted(location.iterdir())
        if path.name.startswith("adapter_") and path.is_file()
    ]
    digests = []
    for path in files:
        with open(path, "rb") as handle:
            digests.append([path.name, hashlib.file_digest(handle, "sha256").hexdigest()])
    return stable_hash(digests)
