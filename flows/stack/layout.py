"""Ports of a stack and its files: ROOT/stack, which only the user can read, and a folder for
sockets."""

from __future__ import annotations

import fcntl
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import psutil
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from kernels_eval.sandbox.process_tree import members
from kernels_eval.sandbox.trees import remove_tree
from tasks.files import atomic_write, explain_write_errors

Part = Literal["prefect", "mlflow", "ray", "worker"]
PARTS: tuple[Part, ...] = ("prefect", "mlflow", "ray", "worker")
"""In starting order; they end in reverse."""
ROOT_VARIABLE = "CONCUR_STACK_ROOT"
"""Every process of a stack inherits it, with the root as value."""
PART_VARIABLE = "CONCUR_STACK_PART"
"""Every process of a part inherits it; flow runs have the worker's."""
UNUSABLE = frozenset("%\"'#;\n")
"""Special characters of supervisord's configuration."""


class StackSettings(Record, title="concur up"):
    """Where a stack listens, on loopback."""

    prefect_port: int = 4200
    mlflow_port: int = 5000
    ray_port: int = 6379
    """The next one is Ray Client's, which cannot be switched off."""

    @property
    def ports(self) -> dict[int, Part]:
        """TCP port -> listening part."""
        return {
            self.prefect_port: "prefect",
            self.mlflow_port: "mlflow",
            self.ray_port: "ray",
            self.ray_client_port: "ray",
        }

    @property
    def ray_client_port(self) -> int:
        return self.ray_port + 1

    @property
    def prefect_url(self) -> str:
        return f"http://127.0.0.1:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        return f"http://127.0.0.1:{self.mlflow_port}"

    @property
    def ray_address(self) -> str:
        return f"127.0.0.1:{self.ray_port}"


class Layout:
    """Paths of a root's stack. Raises UsageError where no stack can be there."""

    def __init__(self, root: str | Path) -> None:
        if "://" in str(root):
            raise UsageError(
                f"root {root} is a URL; a stack keeps its databases on a disk of this machine",
                "give a directory with --root",
            )
        self.root = Path(root).expanduser().absolute()
        if UNUSABLE & set(str(self.root)):
            raise UsageError(
                f"supervisord cannot use the path {self.root}, which has one of % \" ' # ;",
                "give another directory with --root",
            )
        self.stack = self.root / "stack"
        self.logs = self.stack / "logs"
        self.prefect_home = self.root / "prefect"
        self.settings = self.stack / "settings.json"
        self.configuration = self.stack / "supervisord.conf"
        self.ray_token = self.stack / "ray-token"
        # A socket's path may have 107 characters, so sockets cannot lie below a deep root. Every
        # shell must find them, whatever its TMPDIR is.
        name = hashlib.sha256(str(self.root).encode()).hexdigest()[:8]
        self.sockets = Path("/tmp") / f"concur-up-{os.getuid()}-{name}"
        self.socket = self.sockets / "supervisor.sock"
        self.pid_file = self.sockets / "supervisord.pid"

    def log(self, name: str) -> Path:
        return self.logs / f"{name}.log"

    def mark(self, part: str) -> str:
        """Value of `PART_VARIABLE`, unique to each part of each stack."""
        return f"{part} of {self.sockets.name}"

    def make(self) -> None:
        fix = "choose another one with --root DIR, or correct its permissions"
        with explain_write_errors(f"to {self.stack}", fix):
            for folder in (self.stack, self.logs, self.prefect_home):
                folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        self.require_owner()

    def make_sockets(self) -> None:
        """Make the folder of sockets. Raises UsageError where it is another user's."""
        with explain_write_errors(f"to {self.sockets}", "make /tmp writable"):
            for folder in (self.sockets, self.sockets / "ray", self.sockets / "runs"):
                folder.mkdir(exist_ok=True, mode=0o700)
        self.require_owner()

    def require_owner(self) -> None:
        """Raise UsageError where the stack is another user's."""
        for folder in (self.stack, self.sockets):
            if folder.exists() and folder.lstat().st_uid != os.getuid():
                raise UsageError(
                    f"{folder} belongs to another user",
                    "run the command as that user, or give another --root",
                )

    def clean(self) -> None:
        """Remove signs of a running stack. Databases and logs stay."""
        for path in (self.settings, self.configuration, self.ray_token):
            path.unlink(missing_ok=True)
        remove_tree(self.sockets)

    def processes(self) -> list[psutil.Process]:
        """All processes of the stack, whatever their parent; never the caller."""
        return members([], {ROOT_VARIABLE: str(self.root)})

    def read_settings(self) -> StackSettings | None:
        try:
            return StackSettings.model_validate_json(self.settings.read_bytes())
        except (FileNotFoundError, NotADirectoryError, ValidationError):
            return None

    def write_settings(self, settings: StackSettings) -> None:
        atomic_write(self.settings, settings.model_dump_json(), mode=0o600)

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Hold the stack alone, by a lock on its folder that leaves no file. Raises UsageError
        where another command holds it."""
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
