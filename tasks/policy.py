"""Prefect's retries, caching and display of every stage."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ParamSpec

from kernels_eval.errors import (
    DeviceError,
    DiskFullError,
    EvalError,
    InstallationError,
    UsageError,
)
from kernels_eval.records import Json, stable_hash
from tasks.progress import Pace, report
from tasks.reporting.text import as_text
from tasks.store.snapshot import Snapshot, SnapshotRef

if TYPE_CHECKING:
    from prefect import Task

P = ParamSpec("P")

PROGRESS_EVERY_S = 2.0
NOTE_CHARS = 160


def infrastructure_only(task: Any, task_run: Any, state: Any) -> bool:
    """Retry only machine faults: kernel faults are records, and unusable input needs a fix."""
    try:
        state.result()
    except Exception as error:
        lasting = isinstance(error, UsageError | DeviceError | DiskFullError | InstallationError)
        return not lasting and isinstance(error, EvalError | ConnectionError | TimeoutError)
    return False


RETRIED: Json = {
    "retries": 2,
    "retry_delay_seconds": [5.0, 30.0],
    # up to so much longer, as a share: runs that a fault has hit together do not come back together
    "retry_jitter_factor": 0.5,
    "retry_condition_fn": infrastructure_only,
}
"""Task options that retry machine faults."""


def by_fingerprint(planned: Callable[..., Snapshot]) -> Callable[[Any, Json], str]:
    def key(context: Any, parameters: Json) -> str:
        snapshot = planned(**parameters)
        place = stable_hash(str(snapshot.path))[:8]
        return f"concur-{snapshot.stage}-{snapshot.fingerprint}-{place}"

    return key


def stage_options(planned: Callable[..., Snapshot]) -> Json:
    """Options of a stage's task: retry infrastructure faults, cache by fingerprint."""
    return RETRIED | {"persist_result": True, "cache_key_fn": by_fingerprint(planned)}


def stage_task(
    run: Callable[P, SnapshotRef],
    planned: Callable[..., Snapshot],
    name: str,
    words: Callable[..., str],
) -> Task[P, SnapshotRef]:
    """A stage's `run` as a Prefect task. From its arguments `planned` gives the snapshot, `words`
    the run's name."""
    from prefect import task

    return task(name=name, task_run_name=sentence(words, name), **stage_options(planned))(run)


def call_stage(step: Any, *args: Any, **kwargs: Any) -> SnapshotRef:
    """Call a stage task, whose beginning is reported; make a cached snapshot again where it is no
    longer on disk."""
    report(getattr(step, "name", None) or step.__name__, 0, 0)
    ref: SnapshotRef = step(*args, **kwargs)
    if not ref.open().finished:
        ref = step.with_options(refresh_cache=True)(*args, **kwargs)
    return ref


class ProgressArtifact:
    """An observer (tasks.progress) that updates a Prefect progress artifact, at most every two
    seconds but where what a stage waits for changes. Failures of Prefect do not fail the run."""

    def __init__(self) -> None:
        from prefect.artifacts import create_progress_artifact

        self._id: Any = None
        self._told = False
        with self._never_in_the_way():
            self._id = create_progress_artifact(
                progress=0.0, key="progress", description="the run begins"
            )
        self._last: dict[str, tuple[float, str]] = {}
        """by stage: when it was shown last, and what it waited for"""
        self._pace = Pace()

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        now = time.monotonic()
        if self._id is None:
            return
        self._pace.note(stage, done, now)
        waits = "" if self._pace.has_advanced(stage) else note
        shown_at, waited = self._last.get(stage, (-math.inf, ""))
        if done < total and now - shown_at < PROGRESS_EVERY_S and waits == waited:
            return
        self._last[stage] = now, waits
        share = round(100.0 * done / max(total, 1), 1)
        said = self._pace.words(stage, done, total, now)
        self._show(share, f"{said}: {as_text(waits, NOTE_CHARS)}" if waits else said)

    def end(self) -> None:
        """Say that the run is done, and no more what it did last."""
        if self._id is not None:
            self._show(100.0, "the run is done")

    def _show(self, share: float, words: str) -> None:
        from prefect.artifacts import update_progress_artifact

        with self._never_in_the_way():
            update_progress_artifact(self._id, progress=share, description=words)

    @contextmanager
    def _never_in_the_way(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if not self._told:
                logging.getLogger(__name__).warning(
                    "progress is not shown for now: %s: %s", type(error).__name__, error
                )
            self._told = True


def sentence(words: Callable[..., str], otherwise: str) -> Callable[..., str]:
    def name(parameters: Json) -> str:
        try:
            return words(**parameters)
        except Exception:
            return otherwise

    return name


def rows_of(ref: SnapshotRef | None) -> str:
    return "no" if ref is None else f"{ref.open().manifest['rows']:,}"
