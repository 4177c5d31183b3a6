"""Where a stack keeps things, and its state file: everything under ROOT/stack, readable by its user
alone.

Guarantees: the state file is whole or absent, holds no secret, and one of an earlier start of the
machine is known as such; one command at a time changes a stack, and the lock goes with the process
that holds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from pydantic import ValidationError

from flows.ops.processes import Identity, alive, boot_id
from flows.ops.settings import Part, StackSettings
from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.files import atomic_write

Phase = Literal["waiting", "starting", "healthy", "unhealthy", "restarting", "failed", "stopping"]


class PartState(Record):
    """One part: its process, since when (seconds since 1970), how often it was started again, how
    many processes it has below it, and why it is not well."""

    phase: Phase
    identity: Identity | None = None
    since: float = 0.0
    restarts: int = 0
    processes: int = 0
    reason: str = ""


class StackState(Record):
    """What the supervisor says of itself and of its parts."""

    user: int
    root: str
    settings: StackSettings
    authenticated: bool = False
    supervisor: Identity
    parts: dict[Part, PartState] = {}

    @property
    def living(self) -> list[Part]:
        return [part for part, state in self.parts.items() if alive(state.identity)]


class Places:
    """Paths of the stack of one root."""

    def __init__(self, root: str | Path) -> None:
        if "://" in str(root):
            raise UsageError(
                f"root {root} is a URL; a stack keeps its databases on a disk of this machine",
                "give a directory with --root",
            )
        self.root = Path(root).expanduser().absolute()
        self.stack = self.root / "stack"
        self.logs = self.stack / "logs"
        self.prefect_home = self.stack / "prefect"
        self.state = self.stack / "state.json"
        self.ray_token = self.stack / "ray-token"
        self.runs_file = self.stack / "runs.json"
        """Flow runs that are under way, so that a start after a power cut knows which it was that
        ended."""
        name = hashlib.sha256(str(self.root).encode()).hexdigest()[:8]
        self.temporary = (
            Path(tempfile.gettempdir()) / f"concur-up-{self.owner}-{name}"
        )  # concur-NUMBER-... is a sandbox's
        """Ray's sockets: their paths may have 107 characters, so they cannot be under a root that
        lies deep."""
        self.ray, self.runs = self.temporary / "ray", self.temporary / "t"

    @property
    def owner(self) -> int:
        """Id of the user whose stack it is, or would be."""
        try:
            return self.stack.stat().st_uid
        except OSError:
            return os.getuid()

    def require_owner(self, *also: int) -> None:
        """Raises UsageError where the stack is another user's, and this one is not among `also`."""
        if os.getuid() not in (self.owner, *also):
            raise UsageError(
                f"the stack of {self.root} belongs to {_name(self.owner)}",
                "run the command as that user, or give another --root",
            )

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def make(self) -> None:
        """Make the directories. Raises OSError."""
        for place in (self.stack, self.logs, self.prefect_home):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)


def read_state(places: Places) -> StackState | None:
    """The state of this start of the machine; None where there is none. Raises UsageError where it
    may not be read."""
    try:
        state = StackState.model_validate_json(places.state.read_bytes())
    except FileNotFoundError:
        return None
    except NotADirectoryError:
        return None
    except PermissionError as error:
        owner = _name(places.owner)
        raise UsageError(
            f"the stack of {places.root} belongs to {owner}",
            "run the command as that user, or give another --root",
        ) from error
    except ValidationError:
        return None
    return state if state.supervisor.boot == boot_id() else None


def write_state(places: Places, state: StackState) -> None:
    """Replace the state file. Raises OSError."""
    write_private(places.state, state.model_dump_json(indent=1).encode())


def write_private(path: Path, data: bytes) -> None:
    """Replace a file that its user alone can read. Raises OSError."""
    atomic_write(path, data, mode=0o600)


@contextmanager
def changing(places: Places) -> Iterator[None]:
    """Alone with this stack. Raises UsageError where another command changes it; the lock is on the
    directory and leaves no file."""
    handle = os.open(places.stack, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise UsageError(
            f"another `concur up` or `concur down` works on {places.root}", "wait until it is done"
        ) from error
    finally:
        os.close(handle)


def _name(user: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(user).pw_name}"
    except KeyError:
        return f"user {user}"
