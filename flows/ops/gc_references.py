"""Who refers to snapshots from outside of them: MLflow's runs and registered models, and published
folders.

Guarantees: reads only; a tracking server or database that does not answer is an error, never
"nothing refers to it"; every page of every answer is read. Everything that has the form of a
fingerprint counts as one, wherever in a tag, a param or a dataset it stands.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flows.ops.gc_inventory import FINGERPRINT
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Record

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

PAGE = 1000


class Tracked(Record):
    """`names`: fingerprint -> who refers to it. `released`: those that deleted runs name, and
    nothing that is there."""

    names: dict[str, str] = {}
    released: frozenset[str] = frozenset()
    runs: int = 0
    versions: int = 0


def tracking_uri(root: Path, given: str | None) -> str | None:
    """Where runs of a root are tracked: as given, else $MLFLOW_TRACKING_URI, else the root's own
    database; None where there is none."""
    if found := given or os.environ.get("MLFLOW_TRACKING_URI"):
        return found
    own = root / "mlflow.db"
    return f"sqlite:///{own}" if own.is_file() else None


def tracked(uri: str) -> Tracked:
    """What MLflow refers to. Raises EvalError where it does not answer."""
    from tasks.tracking.connection import bounded_and_quiet, connect

    try:
        with bounded_and_quiet():
            return _read(connect(uri))
    except (EvalError, UsageError):
        raise
    except Exception as error:
        # whatever a client, a driver or a server raises: nobody knows then what is referred to
        reason = (str(error).splitlines() or [""])[0][:200]
        raise EvalError(
            f"MLflow does not answer ({type(error).__name__}: {reason})",
            "start it, name it with --tracking-uri, or decide without what it refers to:"
            " --without-mlflow",
        ) from error


def published(folders: tuple[str, ...]) -> dict[str, str]:
    """Training sets that published folders were made of. Raises UsageError for a folder that is
    none."""
    from tasks.publishing.publish import PUBLICATION

    found = {}
    for folder in folders:
        path = Path(folder) / PUBLICATION
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise UsageError(
                f"{folder} is no published folder: {error.strerror}",
                f"give one that holds {PUBLICATION}",
            ) from error
        found |= dict.fromkeys(FINGERPRINT.findall(text), f"published in {folder}")
    return found


def _read(client: MlflowClient) -> Tracked:
    from mlflow.entities import ViewType

    experiments = list(_pages(client.search_experiments, view_type=ViewType.ALL, max_results=PAGE))
    ids = [found.experiment_id for found in experiments]
    alive = {found.experiment_id for found in experiments if found.lifecycle_stage == "active"}
    names: dict[str, str] = {}
    deleted: set[str] = set()
    runs = 0
    for run in (
        _pages(client.search_runs, ids, run_view_type=ViewType.ALL, max_results=PAGE) if ids else ()
    ):
        mentioned = _mentioned(run)
        if run.info.lifecycle_stage == "active" and run.info.experiment_id in alive:
            runs += 1
            names |= {
                name: f"MLflow run {run.info.run_name or run.info.run_id}"
                for name in mentioned
                if name not in names
            }
        else:
            deleted |= mentioned
    versions = 0
    for version in _pages(client.search_model_versions, max_results=PAGE):
        versions += 1
        text = " ".join([*version.tags.values(), version.source or "", version.description or ""])
        names |= dict.fromkeys(
            FINGERPRINT.findall(text), f"registered model {version.name}/{version.version}"
        )
    return Tracked(
        names=names, released=frozenset(deleted - names.keys()), runs=runs, versions=versions
    )


def _mentioned(run: Any) -> set[str]:
    texts = [*run.data.tags.values(), *run.data.params.values()]
    for used in run.inputs.dataset_inputs if run.inputs else ():
        texts += [used.dataset.digest or "", used.dataset.source or ""]
    return {name for text in texts for name in FINGERPRINT.findall(text)} - {run.info.run_id}


def _pages(search: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
    token = None
    while True:
        page = search(*args, **kwargs, page_token=token)
        yield from page
        token = page.token
        if not token:
            return
