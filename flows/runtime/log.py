"""The log of a run: what it does, every half a minute; and Prefect's own lines of tasks, with the
task's name, and no crash where a run was cancelled."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tasks.progress import Pace, duration, observed_by
from tasks.reporting.text import shortened

SAY_EVERY_S = 30.0
NOTE_CHARS = 110
TASKS = "prefect.task_runs"
SIGNALLED = "Execution was aborted by a termination signal."
STOPPED = "stopped, as when its run is cancelled"


@contextmanager
def tasks_named() -> Iterator[None]:
    """Name the task in the lines that Prefect's engine writes of it in the block."""
    logger = logging.getLogger(TASKS)
    logger.addFilter(name_task)
    try:
        yield
    finally:
        logger.removeFilter(name_task)


def name_task(record: logging.LogRecord) -> bool:
    """A filter of the logger of tasks: change such a record, and keep one line of a task that a
    signal has ended."""
    name = getattr(record, "task_run_name", None) or getattr(record, "task_name", None)
    if record.module != "task_engine" or not name:
        return True
    message = record.getMessage()
    if SIGNALLED in message:
        if not message.startswith("Crash"):
            return False
        message = STOPPED
        record.levelno, record.levelname = logging.WARNING, "WARNING"
    record.msg, record.args = f"{name}: {message}", ()
    return True


@contextmanager
def under_way(say: Callable[[str], None], every_s: float = SAY_EVERY_S) -> Iterator[None]:
    """Say every `every_s` seconds of the block which stage is under way, how far it is, how long it
    still takes and for how long it goes on, also while it reports nothing. Thread-safe where `say`
    is."""
    name, began, last = "", 0.0, ""
    counts = 0, 0
    pace, ended = Pace(), threading.Event()
    lock = threading.Lock()

    def observe(stage: str, done: int, total: int, note: str) -> None:
        nonlocal name, began, last, counts
        with lock:
            now = time.monotonic()
            pace.note(stage, done, now)
            if stage != name:
                name, began = stage, now
            last = f": {shortened(note, NOTE_CHARS)}" if note and total else ""
            counts = done, total

    def words() -> str:
        with lock:
            now, (done, total) = time.monotonic(), counts
            if not name or 0 < total <= done:
                return ""
            return f"{pace.words(name, done, total, now)}, for {duration(now - began)}{last}"

    def speak() -> None:
        while not ended.wait(every_s):
            if line := words():
                say(line)

    speaker = threading.Thread(target=speak, name="log of progress", daemon=True)
    speaker.start()
    try:
        with observed_by(observe):
            yield
    finally:
        ended.set()
        speaker.join()
