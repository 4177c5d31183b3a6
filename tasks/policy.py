"""How Prefect treats every stage: what is retried, what is cached, what is shown. Shared by the step modules."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import Any

from kernels_eval.errors import DeviceError, DiskFullError, EvalError, UsageError
from kernels_eval.records import stable_hash
from tasks.store import Snapshot, SnapshotRef

RETRIES = 2
RETRY_DELAYS_S = [5, 30]
RETRY_JITTER = 0.5
"""Up to so much longer, as a share: runs that a fault has hit together do not come back together."""
PROGRESS_EVERY_S = 2.0


def infrastructure_only(task: Any, task_run: Any, state: Any) -> bool:
    """Retry a machine's fault; never a kernel's (that is a record), never unusable input, and never what only a person can mend."""
    try:
        state.result()
    except (UsageError, DeviceError, DiskFullError):
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
        "retry_jitter_factor": RETRY_JITTER,
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


def secret(block: str) -> str:
    """The text of a Prefect secret block, for a caller in a task or outside of any. It appears in no message and no cause of an exception.

    Raises UsageError where there is no such block or it holds no text, EvalError where Prefect does not answer.
    """
    from prefect.blocks.system import Secret

    try:
        value = Secret.load(block, _sync=True).get()  # told outright: otherwise it is a coroutine where some event loop runs
    except ValueError:  # what Prefect raises for a name that it does not know; a validation error, which is one too, may quote the value
        value = None
    except Exception as error:
        fault = f"Prefect could not be asked for the secret block {block!r} ({type(error).__name__})"
        raise EvalError(fault, "check PREFECT_API_URL, and that the server runs") from None
    if not isinstance(value, str) or not value.strip():
        raise UsageError(f"{_prefect_in_use()} has no secret block {block!r} that holds a text", f"store it there: {_storing(block)}")
    return value.strip()


def _prefect_in_use() -> str:
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    return f"Prefect at {settings.api.url}" if settings.api.url else f"Prefect in PREFECT_HOME={settings.home}"


def _storing(block: str) -> str:
    """A command that asks for the secret, so that it is in no shell's history and in no list of processes."""
    from prefect.settings import get_current_settings

    settings = get_current_settings()
    where = f"PREFECT_API_URL={settings.api.url}" if settings.api.url else f"PREFECT_HOME={settings.home}"
    ask = f"from getpass import getpass; from prefect.blocks.system import Secret; Secret(value=getpass()).save({block!r}, overwrite=True)"
    return f'{where} {sys.executable} -c "{ask}"'


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
