"""A line on stderr after each twelve seconds in which a command has said nothing: what is silent
looks hung."""

from __future__ import annotations

import os
import re
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from tasks.reporting.text import shortened

QUIET_S, LATER_S, LONG_S = 12.0, 60.0, 600.0
"""Seconds of silence before a line, and after a long silence."""
CHARS = 110
CONTROLS = re.compile(r"\x1b\[[\d;?]*[A-Za-z]|\r")
"""All that bars without a row write, ten times a second."""
CLOCK = re.compile(r"^\s*[\d.]+ s\s+")

STARTED = 19
"""Index of a stat file's time of start, after the name (proc_pid_stat(5))."""

_last = ""
"""What was said last, or is under way."""


class _Heard:
    """A stream that notes when it was written to, and its last line."""

    def __init__(self, stream: TextIO) -> None:
        self.stream, self.written_at = stream, time.monotonic()

    def write(self, text: str) -> int:
        if said := CONTROLS.sub("", text).strip():
            self.written_at = time.monotonic()
            now_at(said.splitlines()[-1])
        return self.stream.write(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


def now_at(stage: str) -> None:
    """Name what is under way without a line of its own."""
    global _last
    _last = shortened(CLOCK.sub("", stage), CHARS)


def age_s() -> float:
    """Seconds since this process began: a person waits for its imports, too."""
    started = Path("/proc/self/stat").read_text().rpartition(")")[2].split()[STARTED]
    return time.clock_gettime(time.CLOCK_BOOTTIME) - int(started) / os.sysconf("SC_CLK_TCK")


@contextmanager
def never_silent(name: str) -> Iterator[None]:
    """Say during the block what the command of this name is at, wherever it says nothing."""
    now_at(name)
    heard = _Heard(sys.stderr)
    ended = threading.Event()

    def speak() -> None:
        told_at = heard.written_at
        while not ended.wait(QUIET_S / 10):
            now = time.monotonic()
            every_s = QUIET_S if now - heard.written_at < LONG_S else LATER_S
            if now - max(told_at, heard.written_at) >= every_s:
                told_at = now
                said = f"{age_s():6.1f} s  still at work: {_last}\n"
                heard.stream.write(said)
                heard.stream.flush()

    speaker = threading.Thread(target=speak, name="silence", daemon=True)
    speaker.start()
    sys.stderr = heard
    try:
        yield
    finally:
        sys.stderr = heard.stream
        ended.set()
        speaker.join()
