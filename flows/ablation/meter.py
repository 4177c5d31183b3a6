"""What an ablation has spent and where each branch is, while it works: one meter that branches in
threads write and everybody reads.

Guarantees: seconds count only while a device is held, times the devices held; what a killed run
spent counts, to within seconds; an observer tells branches apart, however many report at once. Does
not stop a branch that takes longer than was expected: the budget decides what is begun.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any

from flows.ablation.estimate import hours
from flows.ablation.records import load_spent, save_spent

BRANCH: ContextVar[str] = ContextVar("concur_branch", default="")
"""The branch that the current thread works on; empty for what all share."""
SAVE_EVERY_S = 5.0
LINE_EVERY_S = 5.0
SHARED = "shared"


class Meter:
    """Device seconds of one ablation, by branch and phase, those of earlier calls included."""

    def __init__(self, budget_gpu_hours: float | None) -> None:
        self.budget = budget_gpu_hours
        self._directory: Path | None = None
        self._lock = threading.Lock()
        self._running: dict[int, tuple[str, str, float, int]] = {}
        self._by_branch: dict[str, dict[str, float]] = {}
        self._saved = time.monotonic()

    def keep_in(self, directory: Path) -> bool:
        """From here on what is spent is on disk, and what earlier calls spent is part of it.
        Returns whether those had begun a branch."""
        before = load_spent(directory)
        with self._lock:
            self._directory = directory
            for branch, phases in before.items():
                for phase, seconds in phases.items():
                    self._add(self._by_branch, branch, phase, seconds)
        self.save(now=True)
        return bool(before.keys() - {SHARED})

    @contextmanager
    def held(self, phase: str, devices: int = 1) -> Iterator[None]:
        """The current thread's branch holds so many devices inside the block."""
        key, branch, begun = threading.get_ident(), BRANCH.get() or SHARED, time.monotonic()
        with self._lock:
            self._running[key] = (branch, phase, begun, devices)
        try:
            yield
        finally:
            with self._lock:
                del self._running[key]
                self._add(self._by_branch, branch, phase, devices * (time.monotonic() - begun))
            self.save(now=True)

    @staticmethod
    def _add(table: dict[str, dict[str, float]], branch: str, phase: str, seconds: float) -> None:
        phases = table.setdefault(branch, {})
        phases[phase] = phases.get(phase, 0.0) + seconds

    def _now(self) -> dict[str, dict[str, float]]:
        """Everything spent, what runs included. Under the lock."""
        table = {branch: dict(phases) for branch, phases in self._by_branch.items()}
        now = time.monotonic()
        for branch, phase, begun, devices in self._running.values():
            self._add(table, branch, phase, devices * (now - begun))
        return table

    def phases_of(self, branch: str) -> dict[str, float]:
        """Device seconds of one branch, by phase."""
        with self._lock:
            return {
                phase: round(seconds, 3) for phase, seconds in self._now().get(branch, {}).items()
            }

    @property
    def gpu_hours(self) -> float:
        """Spent so far, by all calls of the ablation, what runs included."""
        with self._lock:
            return _total(self._now()) / 3600

    def fits(self, expected_s: float, running: Iterable[str]) -> bool:
        """May another branch begin, that takes about `expected_s` device seconds, beside those that
        run? What those are expected to take still counts, so that two that each fit do not pass the
        budget together."""
        if self.budget is None:
            return True
        with self._lock:
            now = self._now()
        to_come = (
            sum(max(0.0, expected_s - sum(now.get(name, {}).values())) for name in running)
            + expected_s
        )
        return _total(now) + to_come <= 3600 * self.budget

    def save(self, *, now: bool = False) -> None:
        """Put what was spent on disk, at most every few seconds."""
        with self._lock:
            if self._directory is None or (
                not now and time.monotonic() - self._saved < SAVE_EVERY_S
            ):
                return
            self._saved = time.monotonic()
            save_spent(self._directory, self._now())

    def said(self) -> str:
        """`0.12 GPU-hours spent, 0.38 GPU-hours left`."""
        spent = self.gpu_hours
        left = "" if self.budget is None else f", {hours(max(0.0, self.budget - spent))} left"
        return f"{hours(spent)} spent{left}"


def _total(table: Mapping[str, Mapping[str, float]]) -> float:
    return sum(seconds for phases in table.values() for seconds in phases.values())


class AblationProgress:
    """An observer (tasks.progress) that says on stderr which branch is where, what was spent and
    what is left.

    Bars on a terminal, elsewhere a line every few seconds. Use as a context manager.
    """

    def __init__(self) -> None:
        self.worked: set[str] = set()
        self.meter: Meter | None = None
        self.done = self.total = 0
        self._lock = threading.Lock()
        self._said: dict[tuple[str, str], float] = {}
        self._rows: dict[str, Any] = {}
        self._bars: Any = None

    def __enter__(self) -> AblationProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
            )

            columns = (
                TextColumn("{task.description:<28}", markup=False),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
            )
            self._bars = Progress(
                *columns,
                TextColumn("{task.fields[note]}", markup=False),
                console=Console(stderr=True),
            )
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        if self.meter:
            self.meter.save()
        branch, text = (
            BRANCH.get() or SHARED,
            "".join(c if c.isprintable() else " " for c in note)[:60],
        )
        with self._lock:
            self.worked.add(stage)
            if self._bars:
                if branch not in self._rows:
                    self._rows[branch] = self._bars.add_task(branch, total=total, note="")
                self._bars.update(
                    self._rows[branch], completed=done, total=total, note=f"{stage} {text}"
                )
                return
            now = time.monotonic()
            if done < total and now - self._said.get((branch, stage), 0.0) < LINE_EVERY_S:
                return
            self._said[branch, stage] = now
            print(f"{branch:<28} {stage:<14} {done}/{total}  {text}", file=sys.stderr, flush=True)

    def counted(self, done: int, total: int, line: str) -> None:
        """A branch ended: how many have, and a sentence on it."""
        with self._lock:
            self.done, self.total = done, total
            spent = f"  ({self.meter.said()})" if self.meter else ""
            text = f"ablation {done}/{total}  {line}{spent}"
            if self._bars:
                self._bars.console.print(text, markup=False, highlight=False)
            else:
                print(text, file=sys.stderr, flush=True)
