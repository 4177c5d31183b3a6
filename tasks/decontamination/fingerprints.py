"""By what two tasks are compared, one record a task, and the index that finds near-duplicates.

Guarantees: a task's keys depend on its code and entry point alone; equal keys are found by
equality, near-duplicates by MinHash candidates (https://ekzhu.com/datasketch/lsh.html) whose
Jaccard similarity is then computed, never estimated. Does not guarantee that MinHash proposes every
pair above the threshold: with 128 permutations and recall weighed nine to one it misses few
(measured in benchmarks/results).
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from pydantic import BaseModel, ConfigDict, Field

from tasks.decontamination.normalise import Canonical, canonical, digest, parse_program
from tasks.decontamination.operator_sequence import operator_sequence

if TYPE_CHECKING:
    import polars as pl

Level = Literal["exact", "normalised", "shapes", "operators", "near"]
LEVELS: tuple[Level, ...] = ("exact", "normalised", "shapes", "operators", "near")
PERMUTATIONS = 128
# at least, for text that does not parse: nothing but its tokens speaks for it (0.6 took 45 of 250
# for another task)
TEXT_THRESHOLD = 0.8


class Matching(BaseModel):
    """From where on two tasks are one, for the levels that have a threshold. Measured:
    benchmarks/results/2026-11-21-decontamination.md."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    min_operators: int = Field(
        default=3,
        ge=1,
        description=(
            "a sequence of this many operators counts by itself; a shorter one only where the sizes"
            " of the inputs are equal too"
        ),
    )
    near_threshold: float = Field(
        default=0.6,
        gt=0,
        le=1,
        description="Jaccard similarity of shingles from which tasks are near-duplicates",
    )
    min_shared_operators: float = Field(
        default=0.7,
        ge=0,
        le=1,
        description=(
            "share of operators (multisets) that near-duplicates must have in common, where both"
            " are known"
        ),
    )
    shingle_tokens: int = Field(default=5, ge=2, le=20, description="tokens in a shingle")
    min_shingles: int = Field(
        default=30,
        ge=1,
        description="a class with fewer shingles is mostly boilerplate and never a near-duplicate",
    )


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a task is compared by."""

    task_id: str
    canonical: Canonical
    operators: tuple[str, ...] | None

    def key(self, level: Level, min_operators: int) -> str | None:
        """What must be equal at a level; None where the level says nothing about this task (and for
        "near")."""
        if level == "operators":
            return self._operators_key(min_operators)
        return None if level == "near" else getattr(self.canonical, level)

    def _operators_key(self, min_operators: int) -> str | None:
        """A sequence of `min_operators` speaks for itself, a shorter one only together with the
        sizes of the inputs."""
        if not self.operators:
            return None
        if len(self.operators) >= min_operators:
            return digest(self.operators)
        return digest([*self.operators, *self.canonical.inputs]) if self.canonical.inputs else None


def fingerprint_of(task_id: str, code: str, entry_point: str = "Model") -> Fingerprint:
    program = parse_program(code, entry_point)
    return Fingerprint(task_id, canonical(code, entry_point, program), operator_sequence(program))


def fingerprints(tasks: pl.DataFrame) -> list[Fingerprint]:
    """Of a frame with `task_id`, `code` and, where there is one, `entry_point` ("Model" where
    null): in order of task_id, each id once.

    About 5 ms a task on one core.
    """
    import polars as pl

    entry = (
        pl.col("entry_point").fill_null("Model")
        if "entry_point" in tasks.columns
        else pl.lit("Model").alias("entry_point")
    )
    rows = (
        tasks.select("task_id", "code", entry)
        .unique("task_id", keep="first", maintain_order=True)
        .sort("task_id")
    )
    return [fingerprint_of(*row) for row in rows.iter_rows()]


class NearIndex:
    """Tasks by their shingles: runs of `shingle_tokens` tokens of the class, its names and numbers
    blanked, and of the text as it stands where a task does not parse. Near-duplicates share
    operators too, where both are known: text alone takes one template for another.
    """

    def __init__(self, config: Matching) -> None:
        from datasketch import MinHashLSH

        self.threshold, self.min_shared_operators = (
            config.near_threshold,
            config.min_shared_operators,
        )
        self.shingle_tokens, self.min_shingles = config.shingle_tokens, config.min_shingles
        self._operators: dict[str, tuple[str, ...] | None] = {}
        self._lsh = MinHashLSH(threshold=self.threshold, num_perm=PERMUTATIONS, weights=(0.1, 0.9))
        self._shingles: dict[str, frozenset[int]] = {}

    def add(self, task: Fingerprint) -> None:
        for kind in ("p", "t") if task.canonical.parsed else ("t",):
            shingles = self._of(task, kind)
            if len(shingles) >= self.min_shingles:
                self._shingles[kind + task.task_id] = shingles
                self._operators[kind + task.task_id] = task.operators if kind == "p" else None
                self._lsh.insert(kind + task.task_id, _minhash(shingles))

    def find(self, task: Fingerprint, without: Collection[str] = ()) -> tuple[str, float] | None:
        """The most similar task (of those not in `without`) at or above the threshold and its
        Jaccard similarity; of equals the smallest task_id."""
        kind = "p" if task.canonical.parsed else "t"
        shingles = self._of(task, kind)
        if len(shingles) < self.min_shingles or not self._shingles:
            return None
        names = [
            name
            for name in self._lsh.query(_minhash(shingles))
            if name[0] == kind and name[1:] not in without
        ]
        names = [name for name in names if self._share_operators(task, name)]
        scored = [(-jaccard(shingles, self._shingles[name]), name[1:]) for name in names]
        best = min(scored, default=(0.0, ""))
        least = self.threshold if kind == "p" else max(self.threshold, TEXT_THRESHOLD)
        return (best[1], -best[0]) if -best[0] >= least else None

    def _share_operators(self, task: Fingerprint, name: str) -> bool:
        other = self._operators[name]
        return (
            not task.operators
            or not other
            or shared(task.operators, other) >= self.min_shared_operators
        )

    def _of(self, task: Fingerprint, kind: str) -> frozenset[int]:
        # a program's tokens ("p") and a text's ("t") are different things: each is compared with
        # its own kind
        return shingles_of(
            task.canonical.words if kind == "p" else task.canonical.text_words, self.shingle_tokens
        )


def shingles_of(words: Sequence[str], length: int) -> frozenset[int]:
    """32-bit hashes of every run of `length` tokens."""
    return frozenset(
        zlib.crc32(" ".join(words[i : i + length]).encode("utf-8", "replace"))
        for i in range(len(words) - length + 1)
    )


def jaccard(left: frozenset[int], right: frozenset[int]) -> float:
    return len(left & right) / len(left | right) if left or right else 0.0


def shared(left: Sequence[str], right: Sequence[str]) -> float:
    """Jaccard similarity of two multisets of operators: conv2d-relu-add and conv2d-relu-mul share 2
    of 4."""
    both = (Counter(left) & Counter(right)).total()
    return both / (len(left) + len(right) - both) if left or right else 0.0


def _minhash(shingles: Iterable[int]):
    from datasketch import MinHash

    sketch = MinHash(num_perm=PERMUTATIONS, hashfunc=_itself)
    sketch.update_batch(list(shingles))
    return sketch


def _itself(value: int) -> int:
    return value
