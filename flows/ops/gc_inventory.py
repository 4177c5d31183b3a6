"""What lies under a root, and who refers to it: other files of the root, published folders, MLflow.

Guarantees: reads only; a symbolic link is never followed; a directory is a finished snapshot only
if its manifest names that very stage and fingerprint, and an unfinished one only if its name is a
fingerprint and a stage has begun to write there; a tracking server that does not answer is an
error, never "nothing refers to it". Everything that has the form of a fingerprint counts as one.
Does not guarantee a picture of one moment while others write: `root_lock.alone` is for that.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import psutil

from kernels_eval.errors import EvalError, UsageError, cause_of
from kernels_eval.records import Record
from tasks.store.snapshot import MANIFEST

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

FINGERPRINT = re.compile(r"(?<![0-9a-f])[0-9a-f]{32}(?![0-9a-f])")
TRASH = ".gc-trash"
NOT_STAGES = ("prefect", "mlartifacts", "mlruns", "stack", "logs", "ray", TRASH)
NOTES_DEPTH = 3
NOTES_BYTES = 64 << 20  # a larger JSON file is data, and would be held in memory
WRITERS = re.compile(r"^\.(?:scratch-[0-9a-f]+-(\d+)|.+\.(\d+)\.tmp)$")
CHECKPOINTS = "checkpoints"
MLFLOW_PAGE = 1000


class Stored(Record):
    """One snapshot's directory. `names` are the fingerprints that its manifest and its reports
    name; `changed_s` is in Unix seconds."""

    stage: str
    fingerprint: str
    finished: bool
    rows: int | None = None
    upstream: tuple[str, ...] = ()
    names: frozenset[str] = frozenset()
    changed_s: float
    bytes: int
    has_report: bool = False
    written_by: str = ""

    @property
    def place(self) -> str:
        return f"{self.stage}/{self.fingerprint}"


class Tracked(Record):
    """What MLflow refers to: `names` maps fingerprints to who refers to them; `released` are those
    that only deleted runs name."""

    names: dict[str, str] = {}
    released: frozenset[str] = frozenset()
    runs: int = 0
    versions: int = 0


# -- snapshots -------------------------------------------------------------------------------------


def scan(root: Path) -> list[Stored]:
    """Every snapshot under a root. Raises UsageError for a manifest that cannot be read: what its
    snapshot needs is then unknown."""
    return [
        snapshot
        for stage in _folders(root)
        for directory in _listed(stage, "dir")
        if (snapshot := _stored(stage.name, directory))
    ]


def size_of(path: Path) -> int:
    """Bytes on the disk of a file, or of a directory with its contents; links count as links."""
    return sum(found.st_blocks * 512 for found in _stats(path))


def _stats(path: Path) -> Iterator[os.stat_result]:
    """Of a path and everything below it; a link is not followed."""
    with suppress(OSError):
        yield path.lstat()
    for below in path.rglob("*") if not path.is_symlink() else ():
        with suppress(OSError):
            yield below.lstat()


def _stored(stage: str, directory: Path) -> Stored | None:
    manifest = directory / MANIFEST
    place = {"stage": stage, "fingerprint": directory.name}
    if manifest.is_symlink() or not manifest.is_file():
        if not _half_written(directory):
            return None
        return Stored(
            **place,
            finished=False,
            # a training writes to a checkpoint deep inside
            changed_s=max((found.st_mtime for found in _stats(directory)), default=0.0),
            bytes=size_of(directory),
            written_by=_writer(directory),
        )
    try:
        told = json.loads(manifest.read_text(encoding="utf-8"))
        if place != {name: told[name] for name in place}:
            return None
        upstream = tuple(str(name) for name in told["upstream"])
        created_s = datetime.fromisoformat(told["created_at"]).timestamp()
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise UsageError(
            f"cannot read the manifest of {directory} ({type(error).__name__}: {error}), so what it"
            " needs is unknown",
            "restore the manifest, or remove that directory yourself",
        ) from error
    reports = [path for path in _listed(directory / "report", "file") if path.suffix == ".json"]
    names = _named_in(manifest).union(upstream, *map(_named_in, reports)) - {directory.name}
    return Stored(
        **place,
        finished=True,
        rows=told.get("rows"),
        upstream=upstream,
        names=names,
        changed_s=created_s,
        bytes=size_of(directory),
        has_report=bool(reports),
    )


def _half_written(directory: Path) -> bool:
    """Whether a stage has begun a snapshot here: other directories, such as a sweep's, may be named
    by a fingerprint too."""
    return bool(FINGERPRINT.fullmatch(directory.name)) and any(
        path.name.startswith((".journal-", "part-", ".part-"))
        if path.is_file()
        else path.name == CHECKPOINTS
        for path in _listed(directory)
        if not path.is_symlink()
    )


def _writer(directory: Path) -> str:
    """Who writes to an unfinished snapshot now: a locked journal, or a temporary file of a living
    process. Empty if none is seen."""
    for path in _listed(directory, "file"):
        if path.name.startswith(".journal-"):
            with suppress(OSError), path.open("rb") as handle:
                try:
                    fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
                except BlockingIOError:
                    return "its journal is open"
    for writer in filter(None, (WRITERS.match(path.name) for path in _listed(directory))):
        pid = writer[1] or writer[2]
        if psutil.pid_exists(int(pid)):
            return f"process {pid} writes there"
    return ""


# -- references ------------------------------------------------------------------------------------


def noted(root: Path) -> dict[str, str]:
    """Fingerprints in JSON files of the root that belong to no snapshot (published folders,
    sweeps), and which file names each."""
    return {
        name: f"named in {path.relative_to(root)}"
        for path in _notes(root, NOTES_DEPTH)
        for name in _named_in(path)
    }


def published(folders: tuple[str, ...]) -> dict[str, str]:
    """Training sets that published folders were made from. Raises UsageError for any other
    folder."""
    from tasks.publishing.config import PUBLICATION

    found: dict[str, str] = {}
    for folder in folders:
        try:
            text = (Path(folder) / PUBLICATION).read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"{folder} is not a published folder: {error.strerror}",
                f"give one that holds {PUBLICATION}",
            ) from error
        found |= dict.fromkeys(FINGERPRINT.findall(text), f"published in {folder}")
    return found


def tracked(root: Path, uri: str | None) -> Tracked:
    """What MLflow refers to: at `uri`, else $MLFLOW_TRACKING_URI, else the root's own database.

    Raises EvalError where there is none, or it does not answer.
    """
    from tasks.tracking.connection import bounded_and_quiet, connect

    own = root / "mlflow.db"
    uri = uri or os.environ.get("MLFLOW_TRACKING_URI")
    uri = f"sqlite:///{own}" if not uri and own.is_file() else uri
    ways = "name it with --tracking-uri, or ignore its references with --without-mlflow"
    if not uri:
        raise EvalError(
            f"no MLflow is known for {root}: it holds no mlflow.db, and MLFLOW_TRACKING_URI is not"
            " set",
            ways,
        )
    try:
        with bounded_and_quiet():
            return _read(connect(uri))
    except (EvalError, UsageError):
        raise
    except Exception as error:  # whatever a client, a driver or a server raises
        reason = cause_of(error)[:200]
        raise EvalError(
            f"MLflow does not answer ({type(error).__name__}: {reason})", f"start it, {ways}"
        ) from error


def _read(client: MlflowClient) -> Tracked:
    from mlflow.entities import ViewType

    every = ViewType.ALL
    experiments = list(_pages(client.search_experiments, view_type=every))
    ids = [found.experiment_id for found in experiments]
    alive = {found.experiment_id for found in experiments if found.lifecycle_stage == "active"}
    names: dict[str, str] = {}
    deleted: set[str] = set()
    runs = 0
    for run in _pages(client.search_runs, experiment_ids=ids, run_view_type=every) if ids else ():
        if run.info.lifecycle_stage == "active" and run.info.experiment_id in alive:
            runs += 1
            by = f"MLflow run {run.info.run_name or run.info.run_id}"
            names = dict.fromkeys(_mentioned(run), by) | names
        else:
            deleted |= _mentioned(run)
    versions = list(_pages(client.search_model_versions))
    for version in versions:
        text = " ".join([*version.tags.values(), version.source or "", version.description or ""])
        by = f"registered model {version.name}/{version.version}"
        names |= dict.fromkeys(FINGERPRINT.findall(text), by)
    released = frozenset(deleted - names.keys())
    return Tracked(names=names, released=released, runs=runs, versions=len(versions))


def _mentioned(run: Any) -> set[str]:
    texts = [*run.data.tags.values(), *run.data.params.values()]
    for used in run.inputs.dataset_inputs if run.inputs else ():
        texts += [used.dataset.digest or "", used.dataset.source or ""]
    return {name for text in texts for name in FINGERPRINT.findall(text)} - {run.info.run_id}


def _pages(search: Callable[..., Any], **wanted: Any) -> Iterator[Any]:
    page = search(**wanted, max_results=MLFLOW_PAGE)
    yield from page
    while page.token:
        page = search(**wanted, max_results=MLFLOW_PAGE, page_token=page.token)
        yield from page


# -- files -----------------------------------------------------------------------------------------


def _named_in(path: Path) -> frozenset[str]:
    try:
        return frozenset(FINGERPRINT.findall(path.read_text(encoding="utf-8", errors="replace")))
    except FileNotFoundError:  # gone since it was listed
        return frozenset()
    except OSError as error:
        raise UsageError(
            f"cannot read {path}: {error.strerror}, and it may name snapshots",
            "fix its permissions",
        ) from error


def _notes(directory: Path, depth: int) -> Iterator[Path]:
    for path in _listed(directory, "file"):
        if path.suffix in (".json", ".jsonl") and path.stat().st_size <= NOTES_BYTES:
            yield path
    for inner in _folders(directory) if depth > 1 else ():
        if not (inner / MANIFEST).is_file() and not _half_written(inner):
            yield from _notes(inner, depth - 1)


def _folders(path: Path) -> list[Path]:
    """Directories that may hold what stages and commands wrote."""
    found = _listed(path, "dir")
    return [each for each in found if each.name not in NOT_STAGES and each.name[0] != "."]


def _listed(path: Path, kind: Literal["file", "dir", "any"] = "any") -> list[Path]:
    """What a directory holds; a link is neither a file nor a directory. Empty where there is none.
    Raises UsageError where it may not be read."""
    if path.is_symlink():
        return []
    try:
        return sorted(
            Path(entry)
            for entry in os.scandir(path)
            if kind == "any" or getattr(entry, f"is_{kind}")(follow_symlinks=False)
        )
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        raise UsageError(
            f"cannot list {path}: {error.strerror}",
            "fix its permissions; what it holds may refer to others",
        ) from error
