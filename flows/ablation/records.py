"""What an ablation leaves beside the snapshots, in `<root>/ablations/<fingerprint>/`: one file a
branch, the device time spent so far, and locks.

Guarantees: a file is replaced whole or not at all; device time counts only while a device is held,
times the devices held, and is on disk within seconds, so that a kill forgets little of it; a lock
ends with its holder. Does not decide what is done again: snapshots do. Does not stop a branch that
takes longer than was expected: the budget decides what is begun.
"""

from __future__ import annotations

import fcntl
import json
import logging
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path

from pydantic import NonNegativeInt

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Record, stable_hash
from tasks.benchmark.comparison.records import Branch
from tasks.files import atomic_write, explain_write_errors
from tasks.progress import hours

HOME = "ablations"
BRANCHES, SPENT, LOCK = "branches", "spent.json", "lock"
POLL_S = 0.2
SAVE_EVERY_S = 5.0
BRANCH: ContextVar[str] = ContextVar("concur_branch", default="")
"""The branch that the current thread works on; empty for what all share."""
SHARED = "shared"
log = logging.getLogger(__name__)
Spent = Mapping[tuple[str, str], float]
"""(branch, phase) -> device seconds."""


class BranchRecord(Record):
    """How a branch ended, and what an estimate of the next ablation may rest on. `phases_s` are
    seconds that a device was held, by phase (train, answer, verify); `train_s` is what the
    training's manifest says; `shares_with` names the branch that did the training.
    """

    branch: Branch
    base_model: str = ""
    max_tokens: int = 0
    answers: NonNegativeInt = 0
    train_s: float | None = None
    phases_s: dict[str, float] = {}
    shares_with: str | None = None

    @property
    def measured(self) -> bool:
        """Whether it did all of its work: one that shares a training measured nothing."""
        return self.branch.state == "done" and not self.shares_with


def ablation_dir(root: str, fingerprint: str) -> Path:
    """The directory of one ablation under a root."""
    return Path(root) / HOME / fingerprint


def write_text(path: Path, text: str) -> None:
    """Replace a file. Raises UsageError where it cannot be written."""
    with explain_write_errors(path, "free some disk space, or choose another root"):
        atomic_write(path, text)


def record_file(directory: Path, name: str) -> Path:
    """The file of a branch's record."""
    return directory / BRANCHES / f"{stable_hash(name)[:16]}.json"


def load_record(path: Path) -> BranchRecord | None:
    """How a branch ended last time; None where it has not, or another version wrote its file."""
    try:
        return BranchRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None


def earlier_records(root: str) -> list[BranchRecord]:
    """Branches of all ablations under a root that did all of their work."""
    found = map(load_record, sorted(Path(root, HOME).glob(f"*/{BRANCHES}/*.json")))
    return [record for record in found if record and record.measured]


def load_spent(directory: Path) -> dict[tuple[str, str], float]:
    """Device seconds by branch and phase that earlier calls of the ablation have spent."""
    try:
        data = json.loads((directory / SPENT).read_text(encoding="utf-8"))["device_s"]
        return {
            (branch, phase): float(seconds)
            for branch, phases in data.items()
            for phase, seconds in phases.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


# -- device time -----------------------------------------------------------------------------------


class Meter:
    """Device seconds of one ablation, by branch and phase, those of earlier calls included. Many
    threads use one meter."""

    def __init__(self, budget_gpu_hours: float | None) -> None:
        self.budget = budget_gpu_hours
        self._directory: Path | None = None
        self._lock = threading.Lock()
        self._running: dict[int, tuple[tuple[str, str], float, int]] = {}
        self._spent: dict[tuple[str, str], float] = defaultdict(float)
        self._saved = time.monotonic()

    def keep_in(self, directory: Path) -> bool:
        """From here on keep what is spent on disk, and count what earlier calls spent. Returns
        whether those had begun a branch."""
        before = load_spent(directory)
        with self._lock:
            self._directory = directory
            for key, seconds in before.items():
                self._spent[key] += seconds
        self.save(now=True)
        return any(branch != SHARED for branch, _ in before)

    @contextmanager
    def held(self, phase: str, devices: int = 1) -> Iterator[None]:
        """The current thread's branch holds so many devices inside the block."""
        thread, key = threading.get_ident(), (BRANCH.get() or SHARED, phase)
        with self._lock:
            self._running[thread] = key, time.monotonic(), devices
        try:
            yield
        finally:
            with self._lock:
                _, begun, _ = self._running.pop(thread)
                self._spent[key] += devices * (time.monotonic() - begun)
            self.save(now=True)

    def _now(self) -> Spent:
        """What was spent so far, with what runs."""
        spent, now = self._spent.copy(), time.monotonic()
        for key, begun, devices in self._running.values():
            spent[key] += devices * (now - begun)
        return spent

    def phases_of(self, branch: str) -> dict[str, float]:
        """Device seconds of one branch by phase."""
        with self._lock:
            spent = self._now()
        return {
            phase: round(seconds, 3) for (name, phase), seconds in spent.items() if name == branch
        }

    @property
    def gpu_hours(self) -> float:
        """Spent so far, by all calls of the ablation, what runs included."""
        with self._lock:
            return sum(self._now().values()) / 3600

    def fits(self, expected_s: float, running: Iterable[str]) -> bool:
        """Whether another branch may begin that takes about `expected_s` device seconds, beside
        those that run. What those are still expected to take counts, so that two that each fit do
        not exceed the budget together."""
        if self.budget is None:
            return True
        rest = (max(0.0, expected_s - sum(self.phases_of(name).values())) for name in running)
        return 3600 * self.gpu_hours + sum(rest) + expected_s <= 3600 * self.budget

    def save(self, *, now: bool = False) -> None:
        """Put what was spent on disk, at most every few seconds."""
        with self._lock:
            if self._directory and (now or time.monotonic() - self._saved >= SAVE_EVERY_S):
                self._saved = time.monotonic()
                nested: dict[str, dict[str, float]] = defaultdict(dict)
                for (branch, phase), seconds in self._now().items():
                    nested[branch][phase] = seconds
                write_text(self._directory / SPENT, json.dumps({"device_s": nested}))

    def describe(self) -> str:
        """`0.12 GPU-hours spent, 0.38 GPU-hours left`."""
        spent = self.gpu_hours
        left = "" if self.budget is None else f", {hours(max(0.0, self.budget - spent))} left"
        return f"{hours(spent)} spent{left}"


# -- locks -----------------------------------------------------------------------------------------


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """One process an ablation. Raises UsageError where another one works on it."""

    def refuse() -> None:
        raise UsageError(
            f"this ablation is already running ({directory / LOCK} is held)",
            "wait for it, or stop it and rerun the command",
        )

    with _locked(directory / LOCK, refuse):
        yield


@contextmanager
def alone_with(path: Path, stopped: threading.Event) -> Iterator[None]:
    """One at a time among threads and processes that share the file system. Raises EvalError where
    the ablation is stopped while waiting. That it waits is logged, once."""
    told = threading.Event()

    def wait() -> None:
        if not told.is_set():
            told.set()
            log.warning("waiting: another run is making the same (%s is held)", path)
        if stopped.wait(POLL_S):
            raise EvalError("the ablation was stopped", "rerun the command to resume it")

    with _locked(path, wait):
        yield


@contextmanager
def _locked(path: Path, while_held: Callable[[], None]) -> Iterator[None]:
    """Hold a lock; `while_held` is called as long as another one holds it. A file system without
    locks has every lock free."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as handle:
        while True:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                while_held()
                continue
            except OSError:
                pass
            break
        yield
