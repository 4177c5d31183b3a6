"""Who judges on this machine: pools without Ray one after the other, as each would disturb the
times of another; pools of Ray side by side, as Ray shares the devices out."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from fcntl import LOCK_EX, LOCK_NB, LOCK_SH, flock
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

import psutil

from kernels_eval.errors import BusyError

if TYPE_CHECKING:
    from kernels_eval.records import Json

LOOK_EVERY_S = 0.5
_called = ""
_own: dict[str, tuple[int, TextIO]] = {}
"""How many pools of this process hold each kind of device, and the locked file."""


def call_it(name: str) -> None:
    """Name what this process does, for those who wait for it, such as `flow run ruby-fox`."""
    global _called
    _called = name


def called() -> str:
    command = [Path(sys.argv[0]).name, *(word for word in sys.argv[1:2] if word[:1].isalpha())]
    return _called or " ".join(command)


def holders(kind: str) -> list[str]:
    """The others that judge on this machine's devices of a kind, each with its beginning."""
    found = []
    for path in sorted(_file(kind).parent.glob(f"{_file(kind).name}.*")):
        with suppress(OSError, ValueError):  # it has just ended, or just begins
            said: Json = json.loads(path.read_text(encoding="utf-8"))
            if said["pid"] != os.getpid() and _lives(said):
                clock = time.strftime("%H:%M", time.localtime(said["since"]))
                found.append(f"{said['name']} (process {said['pid']}, since {clock})")
    return found


@contextmanager
def held(
    kind: str, *, shared: bool, patience_s: float | None, say: Callable[[str], None]
) -> Iterator[None]:
    """Hold a kind of device (cpu, gpu); meanwhile `say` whom it waits for. Raises BusyError after
    `patience_s` seconds."""
    said = _file(kind).with_name(f"{_file(kind).name}.{os.getpid()}")
    if kind not in _own:  # pools of one process do not wait for one another
        said.parent.mkdir(parents=True, exist_ok=True)
        file = _file(kind).open("a")
        with ExitStack() as failed:
            failed.push(file)
            _wait(file, kind, LOCK_SH if shared else LOCK_EX, patience_s, say)
            me = {"pid": os.getpid(), "name": called(), "since": time.time()}
            said.write_text(json.dumps(me), encoding="utf-8")
            failed.pop_all()
        _own[kind] = 0, file
    count, locked = _own[kind]
    _own[kind] = count + 1, locked
    try:
        yield
    finally:
        count, locked = _own.pop(kind)
        if count > 1:
            _own[kind] = count - 1, locked
        else:
            said.unlink(missing_ok=True)
            locked.close()


def _wait(
    file: TextIO, kind: str, how: int, patience_s: float | None, say: Callable[[str], None]
) -> None:
    began = time.monotonic()
    while True:
        try:
            flock(file, how | LOCK_NB)
            return
        except BlockingIOError:
            others = " and ".join(holders(kind)) or "another run"
            say(f"waits for the {kind}, which {others} uses")
            require_patience(began, patience_s, others)
        time.sleep(LOOK_EVERY_S)


def require_patience(began: float, patience_s: float | None, others: str) -> None:
    """Raise BusyError where what began at `began` (time.monotonic) has waited long enough."""
    if patience_s is not None and time.monotonic() - began >= patience_s:
        raise BusyError(
            f"the devices are not free after {patience_s:g} s: {others} uses them",
            "wait for it, give a longer --timeout, or stop it",
        )


def _lives(said: Json) -> bool:
    """Whether its process runs, and has not taken over the number of one that has ended."""
    with suppress(psutil.Error):
        process = psutil.Process(said["pid"])
        ended = process.status() == psutil.STATUS_ZOMBIE
        return not ended and bool(process.create_time() <= said["since"])
    return False


def _file(kind: str) -> Path:
    # not TMPDIR, which the runs of a stack have to themselves
    return Path(os.environ.get("CONCUR_LOCKS") or "/tmp") / f"concur_judging-{os.getuid()}-{kind}"
