"""Files of an ablation in `<root>/ablations/<fingerprint>/`: one per branch, the comparison, and
locks."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from kernels_eval.errors import UsageError
from kernels_eval.records import stable_hash
from tasks.benchmark.comparison.records import Branch
from tasks.files import atomic_write, explain_write_errors
from tasks.store import SnapshotRef

HOME = "ablations"
LOCK = "lock"


def ablation_dir(root: str, fingerprint: str) -> Path:
    return Path(root) / HOME / fingerprint


def write_text(path: Path, text: str) -> None:
    """Replace a file. Raises UsageError where it cannot be written."""
    with explain_write_errors(path, "free some disk space, or choose another root"):
        atomic_write(path, text)


def save_branch(directory: Path, branch: Branch) -> None:
    """Record how a branch ended. Raises UsageError where that cannot be written."""
    write_text(_record_file(directory, branch.name), branch.model_dump_json(indent=2))


def finished_branch(directory: Path, name: str, root: str) -> Branch | None:
    try:
        text = _record_file(directory, name).read_text(encoding="utf-8")
        branch = Branch.model_validate_json(text)
    except (OSError, ValueError):
        return None
    if branch.state != "done" or not branch.answers:
        return None
    made = [
        *(branch.answers.candidates, branch.answers.verdicts),
        SnapshotRef(root=root, stage="training", fingerprint=str(branch.trained)),
        SnapshotRef(root=root, stage="benchmark", fingerprint=str(branch.scores)),
    ]
    return branch if all(ref.open().finished for ref in made) else None


def _record_file(directory: Path, name: str) -> Path:
    return directory / "branches" / f"{stable_hash(name)[:16]}.json"


@contextmanager
def sole_writer(directory: Path) -> Iterator[None]:
    """Hold an ablation's lock. Raises UsageError where another process has it."""
    directory.mkdir(parents=True, exist_ok=True)
    try:
        held = FileLock(directory / LOCK).acquire(timeout=0)
    except Timeout:
        raise UsageError(
            f"this ablation is already running ({directory / LOCK} is held)",
            "wait for it, or stop it and rerun the command",
        ) from None
    with held:
        yield
