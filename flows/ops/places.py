"""Where a stack keeps things: everything under ROOT/stack, readable by its user alone.

Guarantees: the state file is whole or absent, holds no secret, and one of an earlier start of the
machine is ignored; one command at a time changes a stack, and the lock goes with the process that
holds it.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import pwd
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pydantic import ValidationError

from flows.ops.settings import StackSettings
from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from kernels_eval.sandbox.process_tree import Identity, alive, boot_id, members
from tasks.files import atomic_write

ROOT_VARIABLE = "CONCUR_STACK_ROOT"
"""Every process of a stack inherits it; its value is the root."""
PART_VARIABLE = "CONCUR_STACK_PART"
"""Every process of a part inherits it, flow runs from the worker."""


class StackState(Record):
    """What a stack was started with, and the process that manages it."""

    settings: StackSettings
    authenticated: bool = False
    manager: Identity

    @property
    def running(self) -> bool:
        return alive(self.manager)


class Places:
    """Paths of the stack of one root. Raises UsageError where the root is no directory of this
    machine."""

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
        self.mlflow_auth = self.stack / "mlflow-auth.ini"
        self.flow_runs = self.stack / "runs"
        """A file for each flow run that has a process here: after a power cut the next start knows
        which have ended."""
        name = hashlib.sha256(str(self.root).encode()).hexdigest()[:8]
        # Paths of sockets may have 107 characters, so they cannot be under a root that lies deep.
        # The name differs from that of a sandbox, concur-NUMBER-...
        self.temporary = Path(tempfile.gettempdir()) / f"concur-up-{self.owner}-{name}"
        self.ray, self.runs = self.temporary / "ray", self.temporary / "t"
        self.configuration = self.temporary / "supervisord.conf"
        self.socket = self.temporary / "supervisor.sock"

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
            raise self._belongs_to_another()

    def _belongs_to_another(self) -> UsageError:
        try:
            owner = pwd.getpwuid(self.owner).pw_name
        except KeyError:
            owner = str(self.owner)
        return UsageError(
            f"the stack of {self.root} belongs to user {owner}",
            "run the command as that user, or give another --root",
        )

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def mark(self, part: str) -> str:
        """The value of `PART_VARIABLE`, different for each part of each stack."""
        return f"{part} of {self.temporary.name}"

    def starts(self, part: str) -> Path:
        """A file with a byte for each start of a part."""
        return self.temporary / f"{part}.starts"

    def make(self) -> None:
        """Make the directories under the root. Raises OSError."""
        for place in (self.stack, self.logs, self.prefect_home, self.flow_runs):
            place.mkdir(parents=True, exist_ok=True, mode=0o700)

    def make_temporary(self) -> None:
        """Make those for sockets. Raises OSError, and UsageError where another user made them."""
        self.temporary.mkdir(mode=0o700, exist_ok=True)
        found = self.temporary.lstat()
        if self.temporary.is_symlink() or found.st_uid != os.getuid() or found.st_mode & 0o077:
            raise UsageError(
                f"{self.temporary} does not belong to this user alone",
                "remove it, or set TMPDIR to another directory",
            )
        for place in (self.ray, self.runs):
            place.mkdir(mode=0o700, exist_ok=True)

    def clean(self) -> None:
        """Remove what says that a stack runs. Databases, logs and notes of flow runs stay."""
        for path in (self.state, self.ray_token, self.mlflow_auth, *self.stack.glob("*.tmp")):
            path.unlink(missing_ok=True)
        shutil.rmtree(self.temporary, ignore_errors=True)

    def processes(self) -> list[Identity]:
        """All processes of the stack, whoever is their parent by now; never the caller."""
        state = self.read_state()
        leaders = [state.manager] if state else []
        return members(leaders, {ROOT_VARIABLE: str(self.root)})

    def read_state(self) -> StackState | None:
        """The state of this start of the machine; None where there is none. Raises UsageError where
        it may not be read."""
        try:
            state = StackState.model_validate_json(self.state.read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None
        except PermissionError as error:
            raise self._belongs_to_another() from error
        return state if state.manager.boot == boot_id() else None

    def write_state(self, state: StackState) -> None:
        """Replace the state file. Raises OSError."""
        atomic_write(self.state, state.model_dump_json(indent=1), mode=0o600)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the stack alone. The lock is on the directory and leaves no file.

        Raises UsageError where another command holds it.
        """
        handle = os.open(self.stack, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            yield
        except BlockingIOError as error:
            raise UsageError(
                f"another `concur up` or `concur down` works on {self.root}",
                "wait until it has finished",
            ) from error
        finally:
            os.close(handle)
