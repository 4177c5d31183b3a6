"""What a generator is asked after the first turn: one follow-up for each attempt of the turn before
that needs it.

Guarantees: a request's key names everything that was asked, the turn and the attempt that is
followed up among it, and the same key gives the same request. Candidates and verdicts are read
once, part by part; prompts wait in a file of a directory that the caller gives and removes, so that
any number of follow-ups takes the memory of the tasks, and of a key and two places each. Does not
notice rows that are added meanwhile: both snapshots are to be finished.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.records import Language, SamplingParams, Status, Verdict
from tasks.sources.stage import read_tasks
from tasks.store.snapshot import Snapshot, SnapshotRef
from tasks.synthesis.asked import RequestSet, data_version, request_key
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.prompts import render
from tasks.synthesis.refine import follow_up_prompt, followed_up, said_of
from tasks.synthesis.sampler import Request

if TYPE_CHECKING:
    import polars as pl

SEED_STEP = 1_000_000
"""Between the seeds of a sample's turns: more than anybody draws samples of a task, so that no two
answers of one share a seed."""
ATTEMPT = ("candidate_id", "task_id", "sample_index", "code")
SAID = (
    "candidate_id",
    "task_id",
    "language",
    "status",
    "reason",
    "detail",
    "timing",
    "correctness",
    "log_tail",
)


class _Place(NamedTuple):
    """What a request is made from; in the order in which requests are asked."""

    task: int
    sample_index: int
    parent: str
    prompt: tuple[int, int]


class FollowUps(RequestSet):
    """All requests of turn `turn` (2 or later), by task as in the first one, so that those of one
    task share a prefix.

    What is followed up are candidates of the turn before, in `language`, whose verdict says so
    (tasks.synthesis.refine.followed_up); a candidate without a verdict is not. Raises UsageError
    where the task of one is not among the tasks. Use as a context manager.
    """

    def __init__(
        self,
        tasks: SnapshotRef,
        candidates: SnapshotRef,
        verdicts: SnapshotRef,
        config: SynthesisConfig,
        language: Language,
        generator: str,
        turn: int,
        directory: Path,
    ) -> None:
        self._config, self._language, self._generator, self._turn = (
            config,
            language,
            generator,
            turn,
        )
        self._data = data_version(config)
        self._tasks = read_tasks(tasks)
        directory.mkdir(parents=True, exist_ok=True)
        self._said, self._prompts = _Spool(directory / "said"), _Spool(directory / "prompts")
        try:
            attempts = _attempts(candidates.open(), turn - 1)
            verdict_of = self._listen(verdicts.open(), set(attempts["candidate_id"]))
            wanted = attempts.filter(attempts["candidate_id"].is_in(list(verdict_of)))
            found = sorted(self._render(candidates.open(), wanted, verdict_of))
        except BaseException:
            self.close()
            raise
        self._places: dict[str, _Place] = {key: place for place, key in found}

    def __enter__(self) -> FollowUps:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._said.close()
        self._prompts.close()

    def __getitem__(self, key: str) -> Request:
        place = self._places[key]
        return Request(
            request_key=key,
            task=self._tasks[place.task],
            language=self._language,
            prompt=self._prompts.read(place.prompt),
            sample_index=place.sample_index,
            sampling=self._sampling(place.sample_index),
            turn=self._turn,
            parent=place.parent,
        )

    def _sampling(self, sample_index: int) -> SamplingParams:
        """The seed of a sample's later turn is `SEED_STEP` further on than that of its last one."""
        seed = self._config.sampling.seed + sample_index + (self._turn - 1) * SEED_STEP
        return self._config.sampling.model_copy(update={"seed": seed})

    def _listen(
        self, verdicts: Snapshot, attempts: set[str]
    ) -> dict[str, tuple[tuple[int, int], bool]]:
        """Of each attempt that is followed up: where what its verdict says is kept, and whether it
        was correct."""
        found = {}
        for row in verdicts.rows_of(verdicts.index(["candidate_id"]), SAID):
            if row["candidate_id"] not in attempts or row["candidate_id"] in found:
                continue
            verdict = Verdict.model_validate(row)
            if verdict.language is self._language and followed_up(
                verdict, self._config.refine_below_speedup
            ):
                found[verdict.candidate_id] = (
                    self._said.add(said_of(verdict)),
                    verdict.status is Status.CORRECT,
                )
        return found

    def _render(
        self, candidates: Snapshot, wanted: pl.DataFrame, verdict_of: Mapping[str, Any]
    ) -> Iterator[tuple[_Place, str]]:
        numbers = {task.task_id: number for number, task in enumerate(self._tasks)}
        for row in candidates.rows_of(wanted, ATTEMPT):
            number = numbers.get(row["task_id"])
            if number is None:
                raise UsageError(
                    f"task {row['task_id']} of a candidate is not among the tasks",
                    "refine candidates with the tasks they answer",
                )
            task, (said, correct) = self._tasks[number], verdict_of[row["candidate_id"]]
            first = render(task, self._language, self._config.hardware)
            prompt = follow_up_prompt(first, row["code"], self._said.read(said), correct)
            index, parent = row["sample_index"], row["candidate_id"]
            later = (self._turn, parent)
            key = request_key(
                task, prompt, self._generator, self._sampling(index), index, self._data, *later
            )
            yield _Place(number, index, parent, self._prompts.add(prompt)), key


def _attempts(candidates: Snapshot, turn: int) -> pl.DataFrame:
    """Ids and places of the candidates of one turn, each once. Snapshots of older versions know no
    turns: all of theirs are the first."""
    import polars as pl

    if not candidates.has_column("turn"):
        every = candidates.index(["candidate_id"])
        return (every if turn == 1 else every.clear()).unique(
            "candidate_id", keep="first", maintain_order=True
        )
    every = candidates.index(["candidate_id", "turn"])
    return every.filter(pl.col("turn") == turn).unique(
        "candidate_id", keep="first", maintain_order=True
    )


class _Spool:
    """Texts in a file, compressed, each found again by its place. Reading is safe from several
    threads."""

    def __init__(self, path: Path) -> None:
        self._file = open(path, "w+b")
        self._end = 0

    def add(self, text: str) -> tuple[int, int]:
        data = zlib.compress(text.encode("utf-8", "surrogatepass"), 1)
        place = self._end, len(data)
        self._file.write(data)
        self._end += len(data)
        return place

    def read(self, place: tuple[int, int]) -> str:
        self._file.flush()
        start, length = place
        return zlib.decompress(os.pread(self._file.fileno(), length, start)).decode(
            "utf-8", "surrogatepass"
        )

    def close(self) -> None:
        self._file.close()
