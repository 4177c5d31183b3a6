"""Evaluations on disk: what is asked, what is under way, what was found.

Guarantees: what `submit` returns is on disk, and survives the death of any process (a power failure
may take the last second); every evaluation ends in exactly one final state, which nothing changes;
one candidate under one protocol is judged once, however many ask for it; what a killed service had
under way is queued again by the next one; two services cannot share a file. Higher priorities go
first, and clients of one priority take turns. Does not judge anything itself.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.records import Candidate, KernelTask, Verdict
from kernels_eval.service.schema import Evaluation, State

FAULTS = 3
"""Machine faults while a candidate is under way after which its evaluations fail."""
_TABLES = """
CREATE TABLE IF NOT EXISTS work (key TEXT PRIMARY KEY, pair TEXT, verdict TEXT);
CREATE TABLE IF NOT EXISTS evaluations (
    id TEXT PRIMARY KEY, key TEXT NOT NULL, digest TEXT NOT NULL, state TEXT NOT NULL, error TEXT,
    cached INTEGER NOT NULL, priority INTEGER NOT NULL, client TEXT NOT NULL, deadline_s REAL,
    submitted_s REAL NOT NULL, started_s REAL, finished_s REAL);
CREATE INDEX IF NOT EXISTS unfinished ON evaluations (state) WHERE state IN ('queued', 'running');
"""
_FIELDS = "id, state, error, cached, submitted_s, started_s, finished_s"
Pair = tuple[KernelTask, Candidate]


class QueueFullError(Exception):
    """There is no room for these requests now."""


class ConflictError(Exception):
    """An id already stands for another request."""


class Submission(NamedTuple):
    """A request that was read: the candidate's id is the key of its verdict. `settled` is a verdict
    that needs no worker."""

    id: str
    digest: str
    task: KernelTask
    candidate: Candidate
    priority: int
    client: str
    deadline_s: float | None
    settled: Verdict | None = None


class FairQueue:
    """Keys by priority; clients of one priority take turns, each in its own order."""

    def __init__(self) -> None:
        self._levels: dict[int, OrderedDict[str, OrderedDict[str, None]]] = {}
        self._places: dict[str, tuple[int, str]] = {}

    def push(self, key: str, priority: int, client: str) -> None:
        """Add a key at the end of its client's; one that is there moves to a higher priority."""
        if key in self._places:
            if self._places[key][0] >= priority:
                return
            self.remove(key)
        level = self._levels.setdefault(priority, OrderedDict())
        level.setdefault(client, OrderedDict())[key] = None
        self._places[key] = priority, client

    def pop(self) -> str | None:
        """The next key; its client goes to the end of the turns."""
        if not self._places:
            return None
        priority = max(self._levels)
        client, keys = next(iter(self._levels[priority].items()))
        key = next(iter(keys))
        self.remove(key)
        if client in self._levels.get(priority, ()):
            self._levels[priority].move_to_end(client)
        return key

    def remove(self, key: str) -> None:
        """Without effect where the key is not there."""
        if key not in self._places:
            return
        priority, client = self._places.pop(key)
        level = self._levels[priority]
        del level[client][key]
        if not level[client]:
            del level[client]
        if not level:
            del self._levels[priority]

    def __len__(self) -> int:
        return len(self._places)


@dataclass
class _Work:
    """One candidate, and the evaluations that wait for its verdict."""

    pair: Pair
    waiting: set[str] = field(default_factory=set)
    faults: int = 0
    """machine faults while it was under way"""


class _Open(NamedTuple):
    key: str
    priority: int
    client: str
    deadline_s: float | None


class Evaluations:
    """The queue and its journal. All methods may be called from any thread; `changed` is called
    with each evaluation that has become final, by the thread that made it so."""

    def __init__(self, path: Path, limit: int, changed: Callable[[Evaluation], None]) -> None:
        """Raises UsageError where the file cannot be used, or another service uses it."""
        self.limit, self.client_limit = limit, max(1, limit // 2)
        self._changed, self._lock = changed, threading.RLock()
        self._queue, self._suspects = FairQueue(), deque[str]()
        self._work: dict[str, _Work] = {}
        self._running: set[str] = set()
        self._open: dict[str, _Open] = {}
        self._clients: Counter[str] = Counter()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(path, timeout=1.0, check_same_thread=False)
            path.chmod(0o600)
            for name, value in (("locking_mode", "EXCLUSIVE"), ("journal_mode", "WAL")):
                self._db.execute(f"PRAGMA {name} = {value}")
            self._db.execute("PRAGMA synchronous = NORMAL")
            self._db.executescript(_TABLES)
        except (OSError, sqlite3.Error) as error:
            raise UsageError(
                f"cannot use {path} as the journal: {error}",
                "end the other service that uses it, or give another file with --journal",
            ) from error

    # -- asking ------------------------------------------------------------------------------------

    def submit(self, submissions: Sequence[Submission]) -> list[Evaluation]:
        """Take requests over, all or none. Raises QueueFullError and ConflictError."""
        now = time.time()
        with self._lock:
            fresh = self._unknown(submissions)
            left = [each for each in fresh if not each.settled and not self._row(each)[1]]
            self._require_room(left)
            with self._db:
                for each in fresh:
                    self._insert(each, now)
            for each in left:
                deadline_s = now + each.deadline_s if each.deadline_s else None
                place = _Open(each.candidate.candidate_id, each.priority, each.client, deadline_s)
                self._add(each.id, place, (each.task, each.candidate))
            for each in fresh:
                if each.id not in self._open and (found := self.get(each.id)):
                    self._changed(found)
            return [found for each in submissions if (found := self.get(each.id))]

    def _unknown(self, submissions: Sequence[Submission]) -> list[Submission]:
        fresh: dict[str, Submission] = {}
        for each in submissions:
            select = "SELECT digest FROM evaluations WHERE id = ?"
            row = self._db.execute(select, (each.id,)).fetchone()
            digest = row[0] if row else fresh.setdefault(each.id, each).digest
            if digest != each.digest:
                raise ConflictError(f"id {each.id!r} stands for another request: use a new one")
        return list(fresh.values())

    def _row(self, each: Submission) -> tuple[bool, str | None]:
        """Whether the candidate is known, and its verdict as JSON, where there is one."""
        key = each.candidate.candidate_id
        row = self._db.execute("SELECT verdict FROM work WHERE key = ?", (key,)).fetchone()
        return (True, row[0]) if row else (False, None)

    def _require_room(self, left: Sequence[Submission]) -> None:
        if len(self._open) + len(left) > self.limit:
            raise QueueFullError(f"{len(self._open)} evaluations wait, of at most {self.limit}")
        for client, count in Counter(each.client for each in left).items():
            if self._clients[client] + count > self.client_limit:
                raise QueueFullError(
                    f"{self._clients[client]} evaluations of client {client!r} wait, of at most"
                    f" {self.client_limit}"
                )

    def _insert(self, each: Submission, now: float) -> None:
        key, (known, verdict) = each.candidate.candidate_id, self._row(each)
        if not known:
            verdict = each.settled.model_dump_json() if each.settled else None
            pair = None if verdict else _pair_text((each.task, each.candidate))
            self._db.execute("INSERT INTO work VALUES (?, ?, ?)", (key, pair, verdict))
        running = key in self._running
        state = State.DONE if verdict else State.RUNNING if running else State.QUEUED
        deadline_s = now + each.deadline_s if each.deadline_s else None
        row = (each.id, key, each.digest, state, None, known, each.priority, each.client)
        times = (deadline_s, now, now if verdict or running else None, now if verdict else None)
        self._db.execute(f"INSERT INTO evaluations VALUES (?{', ?' * 11})", (*row, *times))

    def _add(self, identity: str, place: _Open, pair: Pair) -> None:
        work = self._work.setdefault(place.key, _Work(pair))
        work.waiting.add(identity)
        self._open[identity] = place
        self._clients[place.client] += 1
        if place.key not in self._running and not work.faults:
            self._queue.push(place.key, place.priority, place.client)

    def resume(self, rekey: Callable[[KernelTask, Candidate], str]) -> int:
        """Queue what an earlier service left unfinished, and return how many evaluations that are.

        `rekey` gives the key under the protocol of now; where it raises UsageError, because
        candidates of that language are not judged any more, the evaluation fails with its text.
        """
        select = (
            "SELECT id, evaluations.key, priority, client, deadline_s, pair, verdict"
            " FROM evaluations LEFT JOIN work USING (key)"
            " WHERE state IN ('queued', 'running') ORDER BY evaluations.rowid"
        )
        with self._lock:
            rows = self._db.execute(select).fetchall()
            for identity, key, priority, client, deadline_s, text, verdict in rows:
                place = _Open(key, priority, client, deadline_s)
                if not verdict:
                    pair = _pair(text)
                    try:
                        place = place._replace(key=rekey(*pair))
                    except UsageError as error:
                        self._open[identity] = place
                        self._finish([identity], State.FAILED, str(error))
                        continue
                    candidate = pair[1].model_copy(update={"candidate_id": place.key})
                    verdict = self._requeue(identity, place, (pair[0], candidate))
                if verdict:
                    self._open[identity] = place
                    self._finish([identity], State.DONE)
            with self._db:
                self._db.execute(
                    "DELETE FROM work WHERE verdict IS NULL AND key NOT IN (SELECT key FROM"
                    " evaluations WHERE state IN ('queued', 'running'))"
                )
            return len(rows)

    def _requeue(self, identity: str, place: _Open, pair: Pair) -> str | None:
        """Queue an evaluation of an earlier service; its verdict, where it is known by now."""
        with self._db:
            known = (place.key, _pair_text(pair))
            self._db.execute("INSERT OR IGNORE INTO work VALUES (?, ?, NULL)", known)
            update = "UPDATE evaluations SET state = 'queued', key = ? WHERE id = ?"
            self._db.execute(update, (place.key, identity))
        select = "SELECT verdict FROM work WHERE key = ?"
        found: str | None = self._db.execute(select, (place.key,)).fetchone()[0]
        if not found:
            self._add(identity, place, pair)
        return found

    # -- working -----------------------------------------------------------------------------------

    def take(self) -> Pair | None:
        """What to judge next; None where there is nothing to begin now.

        A candidate that was under way when the machine failed is judged while nothing else is: so
        the one at fault is found.
        """
        with self._lock:
            alone = any(self._work[key].faults for key in self._running)
            if alone or (self._suspects and self._running):
                return None
            key = self._suspects.popleft() if self._suspects else self._queue.pop()
            if key is None:
                return None
            self._mark(self._work[key].waiting, "state = 'running', started_s = ?", time.time())
            self._running.add(key)
            return self._work[key].pair

    def reached(self, verdict: Verdict) -> None:
        """Keep a verdict, and end what waits for it."""
        key = verdict.candidate_id
        with self._lock:
            with self._db:
                keep = "INSERT OR REPLACE INTO work VALUES (?, NULL, ?)"
                self._db.execute(keep, (key, verdict.model_dump_json()))
            waiting = self._work[key].waiting if key in self._work else ()
            self._finish(list(waiting), State.DONE)
            self._forget(key)

    def returned(self, error: str, blame: bool) -> None:
        """Queue again what was under way when the machine failed. What was so `FAULTS` times fails
        with this text, where `blame` says that a candidate may be the cause."""
        with self._lock:
            for key in list(self._running):
                self._running.discard(key)
                work = self._work[key]
                work.faults += blame
                if work.faults >= FAULTS:
                    self._finish(list(work.waiting), State.FAILED, error)
                if not work.waiting:
                    self._forget(key)
                    continue
                self._mark(work.waiting, "state = ?", State.QUEUED)
                if work.faults:
                    self._suspects.append(key)
                else:
                    place = max((self._open[each] for each in work.waiting), key=_priority)
                    self._queue.push(key, place.priority, place.client)

    # -- ending ------------------------------------------------------------------------------------

    def cancel(self, identity: str) -> Evaluation | None:
        """Give an evaluation up; None where there is none. A final one stays as it is."""
        with self._lock:
            if identity in self._open:
                self._give_up([identity], State.CANCELLED)
            return self.get(identity)

    def expire(self) -> None:
        """End the evaluations whose deadline has passed."""
        now = time.time()
        with self._lock:
            late = [each for each, place in self._open.items() if now > (place.deadline_s or now)]
            self._give_up(late, State.EXPIRED)

    def _give_up(self, identities: list[str], state: State) -> None:
        keys = {self._open[each].key for each in identities}
        self._finish(identities, state)
        for key in keys:
            if not self._work[key].waiting and key not in self._running:
                self._forget(key)

    def _finish(self, identities: list[str], state: State, error: str | None = None) -> None:
        self._mark(identities, "state = ?, error = ?, finished_s = ?", state, error, time.time())
        for identity in identities:
            place = self._open.pop(identity)
            self._clients[place.client] -= 1
            if place.key in self._work:
                self._work[place.key].waiting.discard(identity)
        for identity in identities:
            if found := self.get(identity):
                self._changed(found)

    def _forget(self, key: str) -> None:
        """Drop a candidate that nobody waits for, and its texts where it has no verdict."""
        self._running.discard(key)
        self._queue.remove(key)
        if key in self._suspects:
            self._suspects.remove(key)
        self._work.pop(key, None)
        with self._db:
            self._db.execute("DELETE FROM work WHERE key = ? AND verdict IS NULL", (key,))

    def _mark(self, identities: Iterable[str], change: str, *values: object) -> None:
        with self._db:
            update = f"UPDATE evaluations SET {change} WHERE id = ?"
            self._db.executemany(update, [(*values, identity) for identity in identities])

    # -- looking -----------------------------------------------------------------------------------

    def get(self, identity: str) -> Evaluation | None:
        select = f"SELECT {_FIELDS}, verdict FROM evaluations LEFT JOIN work USING (key)"
        with self._lock:
            row = self._db.execute(f"{select} WHERE id = ?", (identity,)).fetchone()
        if row is None:
            return None
        *values, verdict = row
        fields = dict(zip(_FIELDS.split(", "), values, strict=True))
        if fields["state"] == State.DONE:
            fields["verdict"] = Verdict.model_validate_json(verdict)
        return Evaluation.model_validate(fields)

    @property
    def queued(self) -> int:
        """Candidates that wait for a worker."""
        return len(self._queue) + len(self._suspects)

    @property
    def running(self) -> int:
        """Candidates under way."""
        return len(self._running)

    def close(self) -> None:
        with self._lock:
            self._db.close()


def _priority(place: _Open) -> int:
    return place.priority


def _pair_text(pair: Pair) -> str:
    return json.dumps([each.model_dump(mode="json", exclude_defaults=True) for each in pair])


def _pair(text: str) -> Pair:
    task, candidate = json.loads(text)
    return KernelTask.model_validate(task), Candidate.model_validate(candidate)
