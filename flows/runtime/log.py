"""Prefect's own lines of tasks, in the log of a run: with the task's name, and no crash where a run
was cancelled."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager

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
