"""Comparable forms of tasks (text and traced graph), and an index of equal ones.

MinHash (https://ekzhu.com/datasketch/lsh.html) proposes near copies, whose Jaccard similarity is
computed: 128 permutations, recall weighed nine to one.
"""

from __future__ import annotations

import hashlib
import re
import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Row
from tasks.decontamination.config import LEVELS, Level

if TYPE_CHECKING:
    from datasketch import MinHash, MinHashLSH

MIN_OPERATORS = 3
"""Fewer operators say too little of a task once their numbers are left out."""
NEAR_OPERATORS = 6
"""Shorter sequences of operators differ by one operator where the tasks are others."""
NEAR_THRESHOLD = 0.8
"""Jaccard similarity of shingles from which tasks are near copies."""
OPERATORS_IN_SHINGLE, WORDS_IN_SHINGLE = 3, 5
MIN_TEXT_SHINGLES = 30
PERMUTATIONS = 128
CODE_LIMIT = 200_000
"""Characters of a text that are compared."""
MAX_SHOWN_OPERATORS = 12
DETAILS = {
    "exact": "same text",
    "normalised": "same operators on the same shapes",
    "shapes": "same operators but for sizes",
}
COLUMNS = ("task_id", "code")
_WORD = re.compile(r"[A-Za-z_]\w{0,200}|\d[\w.]{0,200}|[^\w\s]")
_COMMENT = re.compile(r"#[^\n]*")


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What a task is compared by; `graph` is None where its reference could not be run."""

    task_id: str
    code: str
    graph: Row | None

    @property
    def operators(self) -> Sequence[str]:
        return self.graph["operators"] if self.graph else ()

    def digests(self) -> Iterator[tuple[Level, str]]:
        """Digests by level, without those that say nothing of the task."""
        lines = (line.rstrip() for line in self.code.strip().splitlines())
        yield "exact", _digest("\n".join(lines))
        if self.operators and self.graph:
            yield "normalised", self.graph["normalised"]
            yield "shapes", self.graph["shapes"]
            if len(self.operators) >= MIN_OPERATORS:
                yield "operators", self.graph["structure"]

    def detail(self, level: Level) -> str:
        shown = self.operators[:MAX_SHOWN_OPERATORS]
        named = " ".join(shown) + (" ..." if len(shown) < len(self.operators) else "")
        return DETAILS.get(level, named)


def fingerprints(tasks: pl.DataFrame) -> list[Fingerprint]:
    """Fingerprints of `task_id`, `code` and, if measured, `graph`, each id once, by task_id. Raises
    UsageError for a missing column."""
    require_columns(tasks, COLUMNS, "tasks")
    columns = [*COLUMNS, *(["graph"] if "graph" in tasks.columns else [])]
    rows = tasks.select(columns).unique("task_id", keep="first", maintain_order=True)
    return [
        Fingerprint(row["task_id"], row["code"], row.get("graph"))
        for row in rows.sort("task_id").iter_rows(named=True)
    ]


def require_columns(frame: pl.DataFrame, columns: Sequence[str], what: str) -> None:
    if missing := [name for name in columns if name not in frame.columns]:
        raise UsageError(
            f"the {what} have no column {', '.join(missing)}",
            f"give a frame with {', '.join(columns)}",
        )


class Match(NamedTuple):
    """An equal task: first matching level, task_id, similarity (1.0 except for "near"), detail."""

    level: Level
    task_id: str
    similarity: float
    detail: str


class Index:
    """Tasks by their keys at each level; the first added per key is found."""

    def __init__(self, levels: tuple[Level, ...] = LEVELS) -> None:
        self.levels = levels
        self._near = NearIndex() if "near" in self.levels else None
        self._known: dict[tuple[Level, str], str] = {}

    def add(self, task: Fingerprint) -> None:
        for key in task.digests():
            self._known.setdefault(key, task.task_id)
        if self._near:
            self._near.add(task)

    def find(self, task: Fingerprint) -> Match | None:
        for level, key in task.digests():
            if level in self.levels and (name := self._known.get((level, key))):
                return Match(level, name, 1.0, task.detail(level))
        if self._near and (near := self._near.find(task)):
            return Match("near", *near, f"Jaccard similarity {near[1]:.2f}")
        return None


class NearIndex:
    """Tasks by shingles: runs of a graph's operators, or of the text's words without a graph. Each
    kind is compared apart."""

    def __init__(self) -> None:
        self._shingles: dict[str, frozenset[int]] = {}
        self._lsh = {kind: _lsh() for kind in ("operators", "text")}

    def add(self, task: Fingerprint) -> None:
        for kind in ("operators", "text"):
            if shingles := _shingles(task, kind):
                name = f"{kind} {task.task_id}"
                self._shingles[name] = shingles
                self._lsh[kind].insert(name, _minhash(shingles))

    def find(self, task: Fingerprint) -> tuple[str, float] | None:
        kind = "operators" if task.graph else "text"
        shingles = _shingles(task, kind)
        if not shingles:
            return None
        scored = [
            (-jaccard(shingles, self._shingles[name]), name.partition(" ")[2])
            for name in self._lsh[kind].query(_minhash(shingles))
        ]
        similarity, best = min(scored, default=(0.0, ""))
        return (best, -similarity) if -similarity >= NEAR_THRESHOLD else None


def _shingles(task: Fingerprint, kind: str) -> frozenset[int]:
    if kind == "text":
        words = _WORD.findall(_COMMENT.sub("", task.code[:CODE_LIMIT]))
        found = frozenset(_runs(words, WORDS_IN_SHINGLE))
        return found if len(found) >= MIN_TEXT_SHINGLES else frozenset()
    if len(task.operators) < NEAR_OPERATORS:
        return frozenset()
    # a shingle that occurs again counts again: a network of four blocks is not one of eight
    counted = Counter(_runs(task.operators, OPERATORS_IN_SHINGLE))
    return frozenset(
        _hash(f"{shingle} {number}")
        for shingle, count in counted.items()
        for number in range(count)
    )


def _runs(words: Sequence[str], length: int) -> Iterator[int]:
    for start in range(len(words) - length + 1):
        yield _hash(" ".join(words[start : start + length]))


def jaccard(left: frozenset[int], right: frozenset[int]) -> float:
    """Jaccard similarity of two sets, in [0, 1]."""
    return len(left & right) / len(left | right) if left or right else 0.0


def _lsh() -> MinHashLSH:
    from datasketch import MinHashLSH  # it imports scipy, two seconds

    return MinHashLSH(threshold=NEAR_THRESHOLD, num_perm=PERMUTATIONS, weights=(0.1, 0.9))


def _minhash(shingles: frozenset[int]) -> MinHash:
    from datasketch import MinHash

    sketch = MinHash(num_perm=PERMUTATIONS, hashfunc=int)  # shingles are hashes already
    sketch.update_batch(list(shingles))
    return sketch


def _hash(text: str) -> int:
    return zlib.crc32(text.encode("utf-8", "replace"))


def _digest(text: str) -> str:
    return hashlib.blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()
