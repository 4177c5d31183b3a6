"""Progress on stderr: bars on a terminal, elsewhere a line every few seconds."""

from __future__ import annotations

import sys
import threading
import time
from contextlib import ExitStack
from typing import Any, Self

from tasks.progress import observed_by
from tasks.reporting.text import printable, shortened

LINE_EVERY_S, SAME_EVERY_S = 5.0, 60.0
"""Seconds between lines of a stage, and between equal ones."""
NOTE_CHARS = 110
WIDE = 120
"""Columns of a terminal that has room for bars."""


class TerminalProgress:
    """An observer (tasks.progress) with a row for each stage, inside its block; `worked` are those
    with work. Thread-safe."""

    def __init__(self) -> None:
        self.worked: set[str] = set()
        self._began_s = time.monotonic()
        self._lock = threading.Lock()
        self._bars: Any = None
        self._observing = ExitStack()
        self._ids: dict[str, Any] = {}
        self._printed: dict[str, tuple[float, str]] = {}

    @property
    def seconds(self) -> float:
        return round(time.monotonic() - self._began_s, 1)

    def __enter__(self) -> Self:
        if sys.stderr.isatty():
            self._bars = _bars()
            self._bars.start()
        self._observing.enter_context(observed_by(self))
        return self

    def __exit__(self, *_: object) -> None:
        self._observing.close()
        if self._bars:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        """Show a stage's progress, once it has a number of units. `note` may hold any text."""
        if not total:
            return
        note = shortened(printable(note), NOTE_CHARS)
        with self._lock:
            self.worked.add(stage.partition(",")[0])  # without its round
            if self._bars:
                if stage not in self._ids:
                    self._ids[stage] = self._bars.add_task(stage, total=total, note="")
                self._bars.update(self._ids[stage], completed=done, total=total, note=note)
                return
            now = time.monotonic()
            line = f"{stage:<14} {done}/{total}  {note}"
            printed, last = self._printed.get(stage, (0.0, ""))
            every_s = SAME_EVERY_S if line == last else LINE_EVERY_S
            if done >= total or now - printed >= every_s:
                self._printed[stage] = now, line
                print(line, file=sys.stderr, flush=True)


def _bars() -> Any:
    """Rows in which only the note is folded; the bar is left out where the note needs its room."""
    from rich import progress
    from rich.console import Console
    from rich.table import Column

    console = Console(stderr=True)

    def whole() -> Column:
        return Column(no_wrap=True)

    bar = [progress.BarColumn()] if console.width >= WIDE else []
    return progress.Progress(
        progress.TextColumn("{task.description:<14}", markup=False, table_column=whole()),
        *bar,
        progress.MofNCompleteColumn(table_column=whole()),
        progress.TimeElapsedColumn(table_column=whole()),
        progress.TimeRemainingColumn(table_column=whole()),
        progress.TextColumn(
            "{task.fields[note]}", markup=False, table_column=Column(ratio=1, overflow="fold")
        ),
        console=console,
        expand=True,
    )
