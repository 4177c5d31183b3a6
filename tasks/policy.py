"""How Prefect treats every stage: what is retried, what is cached, what is shown. Shared by the step modules."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from kernels_eval.errors import DeviceError, EvalError, UsageError
from kernels_eval.records import stable_hash
from tasks.store import Snapshot, SnapshotRef

RETRIES = 2
RETRY_DELAYS_S = [5, 30]
PROGRESS_EVERY_S = 2.0


def infrastructure_only(task: Any, task_run: Any, state: Any) -> bool:
    """Retry a machine's fault; never a kernel's (that is a record) and never unusable input."""
    try:
        state.result()
    except (UsageError, DeviceError):
        return False
    except (EvalError, ConnectionError, TimeoutError):
        return True
    except Exception:
        return False
    return False


def by_fingerprint(planned: Callable[..., Snapshot]) -> Callable[[Any, dict[str, Any]], str]:
    """Cache key function of a stage task: the fingerprint of the snapshot that `planned` (same arguments as the task) would write."""

    def key(context: Any, parameters: dict[str, Any]) -> str:
        snapshot = planned(**parameters)
        return f"concur-{snapshot.stage}-{snapshot.fingerprint}-{stable_hash(str(snapshot.path))[:8]}"

    return key


def stage_options(planned: Callable[..., Snapshot]) -> dict[str, Any]:
    """Options of every stage's @task: infrastructure faults are retried, results are kept and cached by fingerprint."""
    return {
        "retries": RETRIES,
        "retry_delay_seconds": RETRY_DELAYS_S,
        "retry_condition_fn": infrastructure_only,
        "persist_result": True,
        "cache_key_fn": by_fingerprint(planned),
    }


def call_stage(step: Any, *args: Any, **kwargs: Any) -> SnapshotRef:
    """Call a stage task. Prefect may answer from its cache; a cached snapshot that is no longer on disk is made again."""
    ref = step(*args, **kwargs)
    if not ref.open().finished:
        ref = step.with_options(refresh_cache=True)(*args, **kwargs)
    return ref


class ProgressArtifact:
    """An observer (tasks.progress) that keeps one Prefect progress artifact up to date, at most every two seconds."""

    def __init__(self, key: str, description: str) -> None:
        from prefect.artifacts import create_progress_artifact

        self._id = create_progress_artifact(progress=0.0, key=key, description=description)
        self._last = time.monotonic()

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        from prefect.artifacts import update_progress_artifact

        now = time.monotonic()
        if done < total and now - self._last < PROGRESS_EVERY_S:
            return
        self._last = now
        update_progress_artifact(self._id, progress=round(100.0 * done / max(total, 1), 1))
