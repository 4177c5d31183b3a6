"""Progress on stderr: bars on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from typing import Any, Self

LINE_EVERY_S = 5.0
NOTE_CHARS = 60


class ProgressRows:
    """A row for each working thing. A context manager; thread-safe."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._lock = threading.Lock()
        self._bars: Any = None
        self._ids: dict[str, Any] = {}
        self._printed: dict[tuple[str, str], float] = {}

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            from rich import progress
            from rich.console import Console

            self._bars = progress.Progress(
                progress.TextColumn(f"{{task.description:<{self._width}}}", markup=False),
                progress.BarColumn(),
                progress.MofNCompleteColumn(),
                progress.TimeElapsedColumn(),
                progress.TimeRemainingColumn(),
                progress.TextColumn("{task.fields[note]}", markup=False),
                console=Console(stderr=True),
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def update(self, row: str, done: int, total: int, note: str, stage: str = "") -> None:
        """Show a row's progress; `stage` is its current work. `note` may hold any text."""
        note = "".join(c if c.isprintable() else " " for c in note)[:NOTE_CHARS]
        with self._lock:
            if self._bars:
                if row not in self._ids:
                    self._ids[row] = self._bars.add_task(row, total=total, note="")
                text = f"{stage} {note}".lstrip()
                self._bars.update(self._ids[row], completed=done, total=total, note=text)
                return
            now = time.monotonic()
            if done >= total or now - self._printed.get((row, stage), 0.0) >= LINE_EVERY_S:
                self._printed[row, stage] = now
                middle = f"{stage:<14} " if stage else ""
                self._print(f"{row:<{self._width}} {middle}{done}/{total}  {note}")

    def say(self, text: str) -> None:
        with self._lock:
            if self._bars:
                self._bars.console.print(text, markup=False, highlight=False)
            else:
                self._print(text)

    @staticmethod
    def _print(line: str) -> None:
        print(line, file=sys.stderr, flush=True)
