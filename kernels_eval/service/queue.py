"""Evaluations on disk: queued, under way, final.

Guarantees: submitted work survives any death; one final state each; one judgement per candidate and
protocol; one service per file. Higher priorities first, clients in turn by start tags (Goyal, Vin
and Cheng 1996, "Start-time Fair Queueing").
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.records import Candidate, KernelTask, Verdict
from kernels_eval.service.schema import Evaluation, State

FAULTS = 3
"""Machine faults while a candidate is under way after which its evaluations fail."""
OPEN = "state IN ('queued', 'running')"
_TABLE = f"""
CREATE TABLE IF NOT EXISTS evaluations (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, digest TEXT NOT NULL, state TEXT NOT NULL,
    cached INTEGER NOT NULL, submitted_s REAL NOT NULL, started_s REAL, finished_s REAL,
    pair TEXT, verdict TEXT, error TEXT, priority INTEGER NOT NULL, client TEXT NOT NULL,
    turn INTEGER NOT NULL, faults INTEGER NOT NULL DEFAULT 0, deadline_s REAL);
CREATE INDEX IF NOT EXISTS keys ON evaluations (key, state);
CREATE INDEX IF NOT EXISTS unfinished ON evaluations (client, deadline_s) WHERE {OPEN};
CREATE INDEX IF NOT EXISTS waiting ON evaluations (faults DESC, priority DESC, turn)
    WHERE state = 'queued';
"""
_FIELDS = "id, state, error, cached, submitted_s, started_s, finished_s, verdict"
Pair = tuple[KernelTask, Candidate]


class QueueFullError(Exception):
    """There is no room for these requests now."""


class ConflictError(Exception):
    """An id already stands for another request."""


class Submission(NamedTuple):
    """A parsed request; the candidate's id is the verdict's key. `settled`: a verdict without
    work.
    """

    id: str
    digest: str
    task: KernelTask
    candidate: Candidate
    priority: int
    client: str
    deadline_s: float | None
    settled: Verdict | None = None


class Evaluations:
    """The queue and its journal, for any thread; `changed` gets each final evaluation."""

    def __init__(self, path: Path, limit: int, changed: Callable[[Evaluation], None]) -> None:
        """Raises UsageError where the file is unusable or another service's."""
        self.limit, self.client_limit = limit, max(1, limit // 2)
        self._changed, self._lock = changed, threading.RLock()
        self._running: dict[str, int] = {}
        """Machine faults that each candidate under way has seen, by key."""
        self._dropped: list[str] = []
        """Keys of candidates that were under way when the last who asked gave up."""
        self._served: dict[int, int] = {}
        """The turn now served, by priority."""
        self._last: dict[tuple[int, str], int] = {}
        """The last turn of each client."""
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.touch(mode=0o600)
            self._db = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
            for told in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL"):
                self._db.execute(f"PRAGMA {told}")
            self._db.executescript(_TABLE)
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"cannot use {path} as the journal: {error}",
                "end the other service that uses it, or give another file with --journal",
            ) from error

    # -- asking ------------------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission]) -> list[Evaluation]:
        """Take requests over, all or none. Raises QueueFullError and ConflictError."""
        with self._lock:
            with self._db:
                fresh = {each.id: each.client for each in submissions if self._insert(each)}
                found = {each.id: self.get(each.id) for each in submissions}
                ended = [found[name] for name in fresh if found[name].state.final]
                if len(fresh) > len(ended):
                    self._require_room(set(fresh.values()))
            for made in ended:
                self._changed(made)
        return [found[each.id] for each in submissions]

    def _insert(self, each: Submission) -> bool:
        """Whether the request is new."""
        if row := self._row("SELECT digest FROM evaluations WHERE id = ?", each.id):
            if row[0] != each.digest:
                raise ConflictError(f"id {each.id!r} stands for another request: use a new one")
            return False
        now, key = time.time(), each.candidate.candidate_id
        verdict = known = self._verdict(key)
        if each.settled and not known:
            verdict = each.settled.model_dump_json()
        running = key in self._running
        asked = self._row(f"SELECT 1 FROM evaluations WHERE key = ? AND {OPEN}", key)
        pair = [part.model_dump(mode="json") for part in (each.task, each.candidate)]
        values: dict[str, object] = {
            "id": each.id,
            "key": key,
            "digest": each.digest,
            "state": State.DONE if verdict else State.RUNNING if running else State.QUEUED,
            "cached": bool(known or running or asked),
            "submitted_s": now,
            "started_s": now if verdict or running else None,
            "finished_s": now if verdict else None,
            "pair": None if verdict else json.dumps(pair),
            "verdict": verdict,
            "priority": each.priority,
            "client": each.client,
            "turn": self._turn(each.priority, each.client),
            "deadline_s": now + each.deadline_s if each.deadline_s else None,
        }
        names, marks = ", ".join(values), ", ".join(f":{name}" for name in values)
        self._db.execute(f"INSERT INTO evaluations ({names}) VALUES ({marks})", values)
        return True

    def _turn(self, priority: int, client: str) -> int:
        last = max(self._last.get((priority, client), 0), self._served.get(priority, 0))
        self._last[priority, client] = last + 1
        return last + 1

    def _verdict(self, key: str) -> str | None:
        row = self._row("SELECT verdict FROM evaluations WHERE key = ? AND verdict NOTNULL", key)
        return str(row[0]) if row else None

    def _require_room(self, clients: set[str]) -> None:
        """Raise QueueFullError where the total or one of these clients is above its limit."""
        counted = "SELECT client, COUNT(*) FROM evaluations INDEXED BY unfinished"
        unfinished = dict(self._db.execute(f"{counted} WHERE {OPEN} GROUP BY client"))
        total = sum(unfinished.values())
        own = max(unfinished.get(client, 0) for client in clients)
        if total > self.limit or own > self.client_limit:
            raise QueueFullError(
                f"at most {self.limit} evaluations may be unfinished, {self.client_limit} of"
                f" one client: with these there are {total} and {own}"
            )

    def resume(self, rekey: Callable[[KernelTask, Candidate], str]) -> int:
        """Queue what an earlier service left unfinished; return how many. `rekey` gives present
        keys; its UsageError fails an evaluation.
        """
        select = f"SELECT id, pair, priority, client FROM evaluations WHERE {OPEN}"
        with self._lock:
            rows = self._db.execute(f"{select} ORDER BY priority DESC, turn").fetchall()
            for identity, pair, priority, client in rows:
                try:
                    key = rekey(*_pair(pair))
                except UsageError as error:
                    self._end("id = ?", identity, State.FAILED, error=str(error))
                    continue
                if verdict := self._verdict(key):
                    self._end("id = ?", identity, State.DONE, verdict=verdict)
                turn = self._turn(priority, client)
                change = "key = ?, turn = ?, state = 'queued'"
                self._update(change, f"id = ? AND {OPEN}", key, turn, identity)
        return len(rows)

    # -- working -----------------------------------------------------------------------------------

    def take(self) -> Pair | None:
        """What to judge next, or None; alone, where it was under way when the machine failed."""
        with self._lock:
            row = self._row(
                "SELECT key, pair, faults, priority, turn FROM evaluations WHERE state = 'queued'"
                " ORDER BY faults DESC, priority DESC, turn"
            )
            if not row or (self._running and (row[2] or any(self._running.values()))):
                return None
            key, pair, faults, priority, turn = row
            self._running[key], self._served[priority] = faults, turn
            change = "state = 'running', started_s = ?"
            self._update(change, "key = ? AND state = 'queued'", time.time(), key)
        task, candidate = _pair(pair)
        return task, candidate.model_copy(update={"candidate_id": key})

    def reached(self, verdict: Verdict) -> None:
        key, text = verdict.candidate_id, verdict.model_dump_json()
        with self._lock:
            # of one that was given up as well: the next who asks gets it
            self._update("verdict = ?", "key = ?", text, key)
            self._end("key = ?", key, State.DONE, verdict=text)
            self._running.pop(key, None)

    def returned(self, error: str, blame: bool) -> None:
        """Requeue what was under way when the machine failed; after `FAULTS` times fail it, where
        `blame` suspects a candidate.
        """
        with self._lock:
            for key, faults in self._running.items():
                if faults + blame >= FAULTS:
                    self._end("key = ?", key, State.FAILED, error=error)
            self._update("state = 'queued', faults = faults + ?", "state = 'running'", blame)
            self._running.clear()

    # -- ending ------------------------------------------------------------------------------------

    def cancel(self, identity: str) -> None:
        """Give an evaluation up, and its candidate with the last one that asks for it."""
        with self._lock:
            row = self._row("SELECT key FROM evaluations WHERE id = ?", identity)
            self._end("id = ?", identity, State.CANCELLED)
            asked = f"SELECT 1 FROM evaluations WHERE key = ? AND {OPEN}"
            if row and row[0] in self._running and not self._row(asked, row[0]):
                del self._running[row[0]]
                self._dropped.append(row[0])

    def dropped(self) -> list[str]:
        """Keys of candidates whose work is to end without a verdict, each once."""
        with self._lock:
            found, self._dropped = self._dropped, []
        return found

    def expire(self) -> None:
        with self._lock:
            self._end("deadline_s < ?", time.time(), State.EXPIRED)

    def _end(
        self,
        where: str,
        value: object,
        state: State,
        verdict: str | None = None,
        error: str | None = None,
    ) -> None:
        change = "state = ?, verdict = ?, error = ?, finished_s = ?, pair = NULL"
        which = f"{OPEN} AND {where} RETURNING {_FIELDS}"
        for row in self._update(change, which, state, verdict, error, time.time(), value):
            self._changed(_evaluation(row))

    # -- rows --------------------------------------------------------------------------------------

    def _update(self, change: str, where: str, *values: object) -> list[tuple[Any, ...]]:
        with self._db:
            update = f"UPDATE evaluations SET {change} WHERE {where}"
            return self._db.execute(update, values).fetchall()

    def _row(self, select: str, *values: object) -> tuple[Any, ...] | None:
        row: tuple[Any, ...] | None = self._db.execute(f"{select} LIMIT 1", values).fetchone()
        return row

    def get(self, identity: str) -> Evaluation:
        """Raises KeyError where there is none."""
        with self._lock:
            row = self._row(f"SELECT {_FIELDS} FROM evaluations WHERE id = ?", identity)
        if row is None:
            raise KeyError(identity)
        return _evaluation(row)

    @property
    def queued(self) -> int:
        with self._lock:
            row = self._row("SELECT COUNT(*) FROM evaluations WHERE state = 'queued'")
        return int(row[0]) if row else 0

    @property
    def running(self) -> int:
        return len(self._running)

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _evaluation(row: tuple[Any, ...]) -> Evaluation:
    fields = dict(zip(_FIELDS.split(", "), row, strict=True))
    if fields["state"] != State.DONE:
        fields["verdict"] = None
    elif text := fields["verdict"]:
        fields["verdict"] = Verdict.model_validate_json(text)
    return Evaluation.model_validate(fields)


def _pair(text: str) -> Pair:
    task, candidate = json.loads(text)
    return KernelTask.model_validate(task), Candidate.model_validate(candidate)
