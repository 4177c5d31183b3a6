"""What an ablation leaves beside the snapshots: one file a branch, what was spent so far, and
locks. `<root>/ablations/<fingerprint>/`.

Guarantees: a file is there whole or not at all; what was spent is on disk within seconds, so that a
kill forgets little of it; a lock ends with its holder, however that ends. Does not decide what is
done again: snapshots do, these records only say how a branch ended and what it took.
"""

from __future__ import annotations

import fcntl
import json
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic import Field, ValidationError

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Record, stable_hash
from tasks.benchmark.comparison.records import Branch
from tasks.files import atomic_write, explain_write_errors

HOME = "ablations"
BRANCHES, SPENT, LOCK = "branches", "spent.json", "lock"
POLL_S = 0.2


class BranchRecord(Record):
    """How a branch ended, and what an estimate of the next ablation may rest on. `phases_s` are
    seconds that a device was held, by phase (train, answer, verify); `train_s` is what the
    training's manifest says; `shares_with` names the branch that did the training.
    """

    branch: Branch
    base_model: str = ""
    max_tokens: int = 0
    answers: int = Field(default=0, ge=0)
    train_s: float | None = None
    phases_s: dict[str, float] = {}
    shares_with: str | None = None


def ablation_dir(root: str, fingerprint: str) -> Path:
    return Path(root) / HOME / fingerprint


def write_text(path: Path, text: str) -> None:
    """Replace a file whole or not at all. Raises UsageError where it cannot be written."""
    with explain_write_errors(path, "free some disk, or choose another root"):
        atomic_write(path, text)


def save_record(directory: Path, record: BranchRecord) -> None:
    write_text(
        directory / BRANCHES / f"{stable_hash(record.branch.name)[:16]}.json",
        record.model_dump_json(indent=2),
    )


def load_record(directory: Path, name: str) -> BranchRecord | None:
    """How a branch ended last time; None where it has not, or another version wrote of it."""
    return _read(directory / BRANCHES / f"{stable_hash(name)[:16]}.json")


def earlier_records(root: str) -> list[BranchRecord]:
    """Branches of all ablations under a root that were done by themselves: one that shares a
    training measured nothing."""
    found = (_read(path) for path in sorted(Path(root, HOME).glob(f"*/{BRANCHES}/*.json")))
    return [
        record
        for record in found
        if record and record.branch.state == "done" and not record.shares_with
    ]


def _read(path: Path) -> BranchRecord | None:
    try:
        return BranchRecord.model_validate_json(path.read_text(encoding="utf-8"))
    except (OSError, ValidationError, ValueError):
        return None


def load_spent(directory: Path) -> dict[str, dict[str, float]]:
    """branch -> phase -> device seconds that earlier calls of the ablation have spent."""
    try:
        data = json.loads((directory / SPENT).read_text(encoding="utf-8"))["device_s"]
        return {
            str(branch): {str(phase): float(seconds) for phase, seconds in phases.items()}
            for branch, phases in data.items()
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return {}


def save_spent(directory: Path, device_s: Mapping[str, Mapping[str, float]]) -> None:
    write_text(directory / SPENT, json.dumps({"device_s": device_s}))


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """One process an ablation. Raises UsageError where another one is at it."""
    directory.mkdir(parents=True, exist_ok=True)
    with open(directory / LOCK, "a+", encoding="utf-8") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(
                f"this ablation is running already ({directory / LOCK} is held)",
                "wait for it, or stop it: the same command goes on then",
            ) from None
        except OSError:
            pass  # a file system without locks
        yield


@contextmanager
def alone_with(path: Path, stopped: threading.Event) -> Iterator[None]:
    """One at a time among threads and processes that share the file system. Raises EvalError where
    the ablation is stopped while waiting."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open(path, "a", encoding="utf-8") as handle:
        with suppress(_NoLocks):
            while not _locked(handle):
                if stopped.wait(POLL_S):
                    raise EvalError("the ablation was stopped", "the same command goes on")
        yield


class _NoLocks(Exception):
    """The file system has none."""


def _locked(handle: Any) -> bool:
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        raise _NoLocks from error
    return True
