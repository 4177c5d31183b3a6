"""Requests to a generator: one per sample of each task, later one per attempt to follow up.
Requests are made when read."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Set
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Any, NamedTuple

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import KernelTask, Language, Row, Status, Verdict, stable_hash
from tasks.store import Snapshot
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.prompts import render
from tasks.synthesis.refine import LIMIT, follow_up_prompt, followed_up, limit_words, said_of
from tasks.synthesis.sampler import Request, Sampler

SEED_STEP = 1_000_000
"""Distance of the seeds of a sample's turns: more than the samples of any task, so that no two
answers share a seed."""
ATTEMPT = ("candidate_id", "task_id", "sample_index", "code")
SAID = (
    *("candidate_id", "task_id", "language", "status", "reason", "detail", "timing"),
    *("correctness", "log_tail"),
)


class RequestSet:
    """Requests by key, made by `make` when read; `places` maps each key to its source, in order."""

    def __init__(self, places: Row, make: Callable[[Any], Request]) -> None:
        self._places, self._make = places, make

    @property
    def keys(self) -> Set[str]:
        return self._places.keys()

    def __len__(self) -> int:
        return len(self._places)

    def __iter__(self) -> Iterator[Request]:
        return map(self._make, self._places.values())

    def __getitem__(self, key: str) -> Request:
        return self._make(self._places[key])

    def without(self, done: Set[str]) -> RequestSet:
        left = {key: place for key, place in self._places.items() if key not in done}
        return RequestSet(left, self._make)


@dataclass(frozen=True)
class Questions:
    """What all requests of a run share."""

    tasks: list[KernelTask]
    config: SynthesisConfig
    language: Language
    sampler: Sampler

    @cached_property
    def _data(self) -> str:
        return self.sampler.data_version(self.config)

    def prompt(self, task: KernelTask) -> str:
        return self.sampler.prompt(task, render(task, self.language, self.config.hardware))

    def request(
        self, task: KernelTask, prompt: str, sample_index: int, *follow_up: int | str
    ) -> Request:
        """One request; `follow_up` is its turn and parent. Each later turn of a sample adds
        `SEED_STEP` to the seed."""
        turn, parent = follow_up or (1, None)
        seed = self.config.sampling.seed + sample_index + (int(turn) - 1) * SEED_STEP
        sampling = self.config.sampling.model_copy(update={"seed": seed})
        asked = [
            task.code,
            prompt,
            self.sampler.generator,
            sampling.identity,
            sample_index,
            self._data,
        ]
        return Request.model_validate(
            {
                "request_key": stable_hash([*asked, *follow_up]),
                "task": task,
                "language": self.language,
                "prompt": prompt,
                "sample_index": sample_index,
                "sampling": sampling,
                "turn": turn,
                "parent": parent,
            }
        )


def first_requests(asked: Questions) -> RequestSet:
    """All requests of a first turn in task order; those of a task are adjacent, to share a
    prefix."""

    def make(place: tuple[int, int]) -> Request:
        number, index = place
        return asked.request(asked.tasks[number], prompts[number], index)

    prompts = [asked.prompt(task) for task in asked.tasks]
    places = product(range(len(asked.tasks)), range(asked.config.samples_per_task))
    return RequestSet({make(place).request_key: place for place in places}, make)


class _FollowUp(NamedTuple):
    task: int
    sample_index: int
    parent: str
    prompt: bytes


def follow_up_requests(
    asked: Questions,
    candidates: Snapshot,
    verdicts: Snapshot,
    turn: int,
    profiles: Snapshot | None = None,
) -> RequestSet:
    """All requests of turn `turn` (2 or later), by task. With `profiles`, those of correct kernels
    say what limits them. Raises UsageError where one's task is missing."""
    attempts = _attempts(candidates, turn - 1)
    limits = _limits(profiles) if profiles else {}
    feedback = _feedback(asked, verdicts, set(attempts["candidate_id"]), limits)
    numbers = {task.task_id: number for number, task in enumerate(asked.tasks)}

    def make(place: _FollowUp) -> Request:
        prompt = _unpacked(place.prompt)
        return asked.request(
            asked.tasks[place.task], prompt, place.sample_index, turn, place.parent
        )

    places = []
    wanted = attempts.filter(attempts["candidate_id"].is_in(list(feedback)))
    for row in candidates.rows_of(wanted, ATTEMPT):
        parent, number = row["candidate_id"], numbers.get(row["task_id"])
        if number is None:
            raise UsageError(
                f"task {row['task_id']} of a candidate is not among the tasks",
                "refine candidates with the tasks they answer",
            )
        said, correct = feedback.pop(parent)
        task = asked.tasks[number]
        words = asked.sampler.feedback(task, row["code"], _unpacked(said))
        prompt = follow_up_prompt(asked.prompt(task), row["code"], words, correct)
        places.append(_FollowUp(number, row["sample_index"], parent, _packed(prompt)))
    return RequestSet({make(place).request_key: place for place in sorted(places)}, make)


def _feedback(
    asked: Questions, verdicts: Snapshot, attempts: set[str], limits: Mapping[str, str]
) -> dict[str, tuple[bytes, bool]]:
    found: dict[str, tuple[bytes, bool]] = {}
    below = asked.config.refine_below_speedup
    for row in verdicts.rows_of(verdicts.index(["candidate_id"]), SAID):
        name = row["candidate_id"]
        if name not in attempts or name in found:
            continue
        verdict = Verdict.model_validate(row)
        if verdict.language is asked.language and followed_up(verdict, below):
            correct = verdict.status is Status.CORRECT
            words = said_of(verdict) + (limits.get(name, "") if correct else "")
            found[name] = _packed(words), correct
    return found


def _packed(text: str) -> bytes:
    return zlib.compress(text.encode("utf-8", "surrogatepass"), 1)


def _unpacked(data: bytes) -> str:
    return zlib.decompress(data).decode("utf-8", "surrogatepass")


def _limits(profiles: Snapshot) -> dict[str, str]:
    rows = profiles.read(columns=["candidate_id", *LIMIT], unique="candidate_id")
    return {row.pop("candidate_id"): limit_words(**row) for row in rows.to_dicts() if row["limit"]}


def _attempts(candidates: Snapshot, turn: int) -> pl.DataFrame:
    return candidates.index(["candidate_id", "turn"], unique=True).filter(pl.col("turn") == turn)
