"""The refreshes of a root, in the order they began: `<root>/refreshes/<id>.began.json`, and
`<id>.json` when it ended, however it ended.

Guarantees: a file is there whole or not at all, and never changes; a refresh that was killed has
begun and not ended, and is listed so; two refreshes at once do not disturb each other's files.
Works on a local root and on an fsspec URL. Does not guarantee that snapshots of an old refresh are
still there. Importing this module loads nothing heavy.
"""

from __future__ import annotations

import json
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime
from typing import Any, Literal

from pydantic import ValidationError

from flows.config import PipelineConfig
from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.files import atomic_write_at, explain_write_errors
from tasks.store.snapshot import SnapshotRef

PLACE = "refreshes"
BEGAN, ENDED = ".began.json", ".json"
ERROR_CHARS = 2000
Ending = Literal["finished", "failed", "stopped", "unknown"]
"""unknown: begun and not ended. It still runs, or it was killed."""


class Refresh(Record):
    """One refresh. `snapshots` are by name (tasks, candidates, verdicts, ...), none unless it
    finished; times are UTC, ISO 8601."""

    id: str
    name: str
    language: str
    strategy: str
    began_at: str
    gpus: int = 0
    """GPUs that this machine showed; 0 where the language needs none."""
    sampling_gpus: int = 0
    """Of these, those that servers of ours held while candidates were sampled."""
    flow_run: str | None = None
    """Prefect's id of the run, where there is one."""
    ending: Ending = "unknown"
    ended_at: str | None = None
    error: str = ""
    snapshots: dict[str, SnapshotRef] = {}
    cautions: tuple[str, ...] = ()

    @property
    def seconds(self) -> float | None:
        """Wall time, s. None where it has not ended."""
        if self.ended_at is None:
            return None
        return (
            datetime.fromisoformat(self.ended_at) - datetime.fromisoformat(self.began_at)
        ).total_seconds()


class Entry:
    """A refresh that has begun: `ends` writes how it ended, once."""

    def __init__(self, root: str, begun: Refresh) -> None:
        self._root, self.begun = root, begun
        self.ended: Refresh | None = None

    def ends(self, ending: Ending, **found: Any) -> Refresh:
        self.ended = self.begun.model_copy(update={"ending": ending, "ended_at": now(), **found})
        _write(self._root, self.begun.id + ENDED, self.ended.model_dump(mode="json"))
        return self.ended


@contextmanager
def entered(config: PipelineConfig, flow_run: str | None = None) -> Iterator[Entry]:
    """One refresh in the history. A block that raises is written down as failed, or as stopped
    where somebody stopped it; one that ends without `ends` is as if killed. Raises UsageError where
    the root cannot be written."""
    began = datetime.now(UTC)
    gpus = _gpus() if config.language.needs_gpu else 0
    begun = Refresh(
        id=f"{began:%Y%m%dT%H%M%S%f}Z-{uuid.uuid4().hex[:8]}",
        name=config.name,
        language=config.language.value,
        strategy=config.curation.strategy,
        began_at=began.isoformat(timespec="milliseconds"),
        gpus=gpus,
        sampling_gpus=_sampling_gpus(config, gpus),
        flow_run=flow_run,
    )
    _write(config.root, begun.id + BEGAN, begun.model_dump(mode="json"))
    entry = Entry(config.root, begun)
    try:
        yield entry
    except BaseException as error:
        if entry.ended is None:
            ending: Ending = "failed" if isinstance(error, Exception) else "stopped"
            with suppress(UsageError):  # a disk that is full is what the error says already
                entry.ends(ending, error=f"{type(error).__name__}: {error}"[:ERROR_CHARS])
        raise


def refreshes(root: str) -> list[Refresh]:
    """Every refresh of a root, oldest first. A file that cannot be read is passed over: the others
    are still the history."""
    fs, place = _place(root)
    if not fs.exists(place):
        return []
    found: dict[str, Refresh] = {}
    for path in sorted(
        fs.ls(place, detail=False), key=lambda path: path.endswith(BEGAN), reverse=True
    ):  # what ended replaces what began
        if path.endswith(ENDED) and not path.rsplit("/", 1)[-1].startswith("."):
            with suppress(OSError, ValueError, ValidationError):
                refresh = Refresh.model_validate(json.loads(fs.cat_file(path)))
                found[refresh.id] = refresh
    return [found[name] for name in sorted(found)]


def before(root: str, refresh: Refresh) -> tuple[Refresh | None, list[Refresh]]:
    """The last finished refresh of the same name and language before this one, and those between
    the two, which did not finish."""
    earlier = [
        each
        for each in refreshes(root)
        if each.id < refresh.id and (each.name, each.language) == (refresh.name, refresh.language)
    ]
    finished = [place for place, each in enumerate(earlier) if each.ending == "finished"]
    return (earlier[finished[-1]], earlier[finished[-1] + 1 :]) if finished else (None, earlier)


def now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def write_beside(root: str, name: str, text: str) -> str:
    """Put a file under a root, whole or not at all. Returns its path. Raises UsageError where that
    cannot be."""
    fs, place = _base(root)
    target = f"{place}/{name}"
    hint = "free some disk, or correct its permissions; what was already written is intact"
    with explain_write_errors(target, hint):
        atomic_write_at(fs, target, lambda handle: handle.write(text.encode("utf-8", "replace")))
    return target


def _write(root: str, name: str, data: dict[str, Any]) -> None:
    write_beside(root, f"{PLACE}/{name}", json.dumps(data, indent=2) + "\n")


def _base(root: str) -> tuple[Any, str]:
    import fsspec

    fs, path = fsspec.core.url_to_fs(str(root))
    return fs, path.rstrip("/")


def _place(root: str) -> tuple[Any, str]:
    fs, path = _base(root)
    return fs, f"{path}/{PLACE}"


def _gpus() -> int:
    from kernels_eval.devices import visible_gpus

    return len(visible_gpus())


def _sampling_gpus(config: PipelineConfig, gpus: int) -> int:
    """GPUs of the servers that concur starts; those of somebody's endpoint are not ours to
    count."""
    if config.synthesis.sampler != "vllm":
        return 0
    server = config.synthesis.server
    return min(gpus, server.replicas * server.tensor_parallel) if server.replicas else gpus
