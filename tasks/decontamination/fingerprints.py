"""By what two tasks are compared, one record a task, and the indexes that find equal ones.

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
from typing import NamedTuple

import polars as pl
from datasketch import MinHash, MinHashLSH

from kernels_eval.errors import UsageError
from tasks.decontamination.config import (
    LEVELS,
    DecontaminationConfig,
    DeduplicationConfig,
    Level,
    Matching,
)
from tasks.decontamination.normalise import Canonical, canonical, digest, specialised_program
from tasks.decontamination.operator_sequence import operator_sequence

PERMUTATIONS = 128
# The least threshold for text that does not parse: its tokens alone speak for it (0.6 took 45 of
# 250 for another task).
TEXT_THRESHOLD = 0.8
MAX_SHOWN_OPERATORS = 12
DETAILS = {
    "exact": "same text",
    "normalised": "same program",
    "shapes": "same program but for its numbers",
}


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a task is compared by."""

    task_id: str
    canonical: Canonical
    operators: tuple[str, ...] | None

    def keys(self, min_operators: int) -> dict[Level, tuple[str, ...]]:
        """Digests by level, of which one must be equal; a level that says nothing about this task
        is left out.

        A sequence of `min_operators` operators counts by itself, a shorter one only together with
        the shapes of the inputs and the arguments that are no sizes.
        """
        operators, own = self.operators or (), self.canonical
        operator_key = None
        if len(operators) >= min_operators:
            operator_key = digest(operators)
        elif operators and own.inputs:
            operator_key = digest([*operators, *own.inputs, *own.details])
        found: dict[Level, tuple[str | None, ...]] = {
            "exact": (own.exact,),
            "normalised": (own.normalised,),
            "shapes": (own.shapes, own.resized),
            "operators": (operator_key,),
        }
        known = {level: tuple(key for key in keys if key) for level, keys in found.items()}
        return {level: keys for level, keys in known.items() if keys}

    def detail(self, level: Level, min_operators: int) -> str:
        """What is equal at a level, in words."""
        operators = self.operators or ()
        if level != "operators":
            return DETAILS[level]
        text = " ".join(operators[:MAX_SHOWN_OPERATORS])
        text += " ..." if len(operators) > MAX_SHOWN_OPERATORS else ""
        return text if len(operators) >= min_operators else f"{text}, same inputs and arguments"


@dataclass(frozen=True)
class Compared:
    """What is kept and what is not: ids in order, and one row for each other one, with its
    `level`."""

    kept: tuple[str, ...]
    removed: pl.DataFrame
    levels: tuple[Level, ...]

    @property
    def counts(self) -> dict[str, int]:
        """Removed rows by level, every level that was tried."""
        found = self.removed["level"].to_list()
        return {level: found.count(level) for level in self.levels}


def fingerprint_of(task_id: str, code: str, entry_point: str = "Model") -> Fingerprint:
    """The fingerprint of one task. About 9 ms on one core."""
    program = specialised_program(code, entry_point)
    return Fingerprint(task_id, canonical(code, entry_point, program), operator_sequence(program))


def fingerprints(tasks: pl.DataFrame) -> list[Fingerprint]:
    """Fingerprints of a frame with `task_id`, `code` and, where there is one, `entry_point`
    ("Model" where null), in order of task_id, each id once."""
    if "entry_point" not in tasks.columns:
        tasks = tasks.with_columns(entry_point=pl.lit("Model"))
    rows = tasks.select("task_id", "code", pl.col("entry_point").fill_null("Model"))
    rows = rows.unique("task_id", keep="first", maintain_order=True).sort("task_id")
    return [fingerprint_of(*row) for row in rows.iter_rows()]


def require_columns(frame: pl.DataFrame, columns: Sequence[str], what: str) -> None:
    """Raises UsageError where a column is missing from the rows called `what`."""
    if missing := [name for name in columns if name not in frame.columns]:
        raise UsageError(
            f"the {what} have no column {', '.join(missing)}",
            f"give a frame with {', '.join(columns)}",
        )


class Match(NamedTuple):
    """An equal task: the first level that found it, its task_id, the similarity (1.0 but for
    "near"), and what is equal."""

    level: Level
    task_id: str
    similarity: float
    detail: str


class Index:
    """Tasks by their key at each level: the first one added with a key is the one that is found."""

    def __init__(self, config: DecontaminationConfig | DeduplicationConfig) -> None:
        self.levels = tuple(level for level in LEVELS if level in config.levels)
        self._min_operators = config.min_operators
        self._near = NearIndex(config) if "near" in self.levels else None
        self._known: dict[tuple[Level, str], str] = {}

    def add(self, task: Fingerprint) -> None:
        for level, keys in task.keys(self._min_operators).items():
            for key in keys:
                self._known.setdefault((level, key), task.task_id)
        if self._near:
            self._near.add(task)

    def find(self, task: Fingerprint) -> Match | None:
        """The equal task at the first level that finds one."""
        for level, keys in task.keys(self._min_operators).items():
            names = [name for key in keys if (name := self._known.get((level, key)))]
            if level in self.levels and names:
                return Match(level, min(names), 1.0, task.detail(level, self._min_operators))
        if self._near and (near := self._near.find(task)):
            return Match("near", *near, f"Jaccard similarity {near[1]:.2f}")
        return None


class NearIndex:
    """Tasks by their shingles: runs of `shingle_tokens` tokens of the class, its names and numbers
    blanked, and of the text as it stands where a task does not parse.

    Near-duplicates share operators too, where both are known: text alone takes one template for
    another.
    """

    def __init__(self, config: Matching) -> None:
        self._config = config
        self._operators: dict[str, tuple[str, ...] | None] = {}
        self._shingles: dict[str, frozenset[int]] = {}
        self._lsh = MinHashLSH(
            threshold=config.near_threshold, num_perm=PERMUTATIONS, weights=(0.1, 0.9)
        )

    def add(self, task: Fingerprint) -> None:
        for kind in ("p", "t") if task.canonical.parsed else ("t",):
            shingles, name = self._shingles_of(task, kind), kind + task.task_id
            if len(shingles) >= self._config.min_shingles:
                self._shingles[name] = shingles
                self._operators[name] = task.operators if kind == "p" else None
                self._lsh.insert(name, _minhash(shingles))

    def find(self, task: Fingerprint, without: Collection[str] = ()) -> tuple[str, float] | None:
        """The most similar task (of those not in `without`) at or above the threshold and its
        Jaccard similarity; of equals the smallest task_id."""
        kind = "p" if task.canonical.parsed else "t"
        shingles = self._shingles_of(task, kind)
        if len(shingles) < self._config.min_shingles or not self._shingles:
            return None
        scored = [
            (-jaccard(shingles, self._shingles[name]), name[1:])
            for name in self._lsh.query(_minhash(shingles))
            if name[0] == kind and name[1:] not in without and self._share_operators(task, name)
        ]
        similarity, best = min(scored, default=(0.0, ""))
        least = self._config.near_threshold
        if kind == "t":
            least = max(least, TEXT_THRESHOLD)
        return (best, -similarity) if -similarity >= least else None

    def _share_operators(self, task: Fingerprint, name: str) -> bool:
        mine, other = task.operators, self._operators[name]
        return not mine or not other or shared(mine, other) >= self._config.min_shared_operators

    def _shingles_of(self, task: Fingerprint, kind: str) -> frozenset[int]:
        """Of a program's tokens ("p") or its text's ("t"): each is compared with its own kind."""
        words = task.canonical.words if kind == "p" else task.canonical.text_words
        return shingles_of(words, self._config.shingle_tokens)


def shingles_of(words: Sequence[str], length: int) -> frozenset[int]:
    """32-bit hashes of every run of `length` tokens."""
    return frozenset(
        zlib.crc32(" ".join(words[i : i + length]).encode("utf-8", "replace"))
        for i in range(len(words) - length + 1)
    )


def jaccard(left: frozenset[int], right: frozenset[int]) -> float:
    """Jaccard similarity of two sets, in [0, 1]."""
    return len(left & right) / len(left | right) if left or right else 0.0


def shared(left: Sequence[str], right: Sequence[str]) -> float:
    """Jaccard similarity of two multisets of operators: conv2d-relu-add and conv2d-relu-mul share 2
    of 4."""
    both = (Counter(left) & Counter(right)).total()
    return both / (len(left) + len(right) - both) if left or right else 0.0


def _minhash(shingles: Iterable[int]) -> object:
    sketch = MinHash(num_perm=PERMUTATIONS, hashfunc=int)  # shingles are hashes already
    sketch.update_batch(list(shingles))
    return sketch
