"""A run outlives who reads its output: a worker that dies takes along the other end of the pipe
that the run's log goes through.

Without this the next line of the log ends the run: rich, through which Prefect prints, takes a
broken pipe for an order to exit.
Guarantees: within milliseconds of the reader's death stdout and stderr go to the log of the stack's
worker, or nowhere where there is no stack, and a line that was quicker is lost here and nothing
else (Prefect has it, too); children that are started afterwards write there as well. Does nothing
where the output is no pipe. Not for commands of a terminal: `concur run | head` is meant to end.
"""

from __future__ import annotations

import logging
import os
import select
import stat
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

STACK_VARIABLE = "CONCUR_STACK_ROOT"
OUTPUTS = (1, 2)
_lock = threading.Lock()
_watched = False


def outlive_the_reader() -> None:
    """From now until this process ends. Calling it twice does nothing more."""
    global _watched
    pipes = [number for number in OUTPUTS if _is_pipe(number)]
    with _lock:
        if _watched or not pipes:
            return
        _watched = True
    threading.Thread(target=_watch, args=(pipes,), name="outlives its reader", daemon=True).start()
    for console in _consoles():
        console.on_broken_pipe = _redirect


def _is_pipe(number: int) -> bool:
    try:
        mode = os.fstat(number).st_mode
    except OSError:
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _watch(pipes: list[int]) -> None:
    poll = select.poll()
    for number in pipes:
        poll.register(number, 0)  # an error is told unasked, and a pipe that nobody reads is one
    poll.poll()
    _redirect()


def _redirect() -> None:
    """Both at once: one process reads them. Where the log cannot be opened, nothing is written any
    more."""
    root = os.environ.get(STACK_VARIABLE)
    log = Path(root, "stack", "logs", "worker.log") if root else Path(os.devnull)
    try:
        handle = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CLOEXEC)
    except OSError:
        handle = os.open(os.devnull, os.O_WRONLY | os.O_CLOEXEC)
    with _lock:
        for number in OUTPUTS:
            if _is_pipe(number):
                os.dup2(handle, number)
    os.close(handle)


def _consoles() -> Iterator[Any]:
    """Those of rich that log handlers of this process print through. That of Prefect is one."""
    if "rich.console" not in sys.modules:
        return
    from rich.console import Console

    for name in (None, *logging.root.manager.loggerDict):
        for handler in logging.getLogger(name).handlers:
            if isinstance(console := getattr(handler, "console", None), Console):
                yield console
