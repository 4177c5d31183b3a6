"""Write one finished run of the line to MLflow: a parent run with the headline, a child run per
stage and per benchmark model.

Guarantees: the same run fingerprint is written once per experiment, so a replay from the snapshots
changes nothing. What a killed or failed attempt left behind never looks finished, and is deleted
(as MLflow deletes: it can be restored) once the run is whole; where that run never comes again, the
next one of the experiment ends what still looks open after `STALE_S`. Missing paths are found
before anything is written. Nothing is printed, MLflow's own globals (active run, tracking URI) are
not touched, and the environment is as before when a call returns. Does not guarantee order between
two processes that write the same fingerprint at the same moment: each takes the other's run for one
that a killed process left. Does not catch MLflow's errors: the caller logs them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tasks.tracking.connection import Destination
from tasks.tracking.records import RunRecord
from tasks.tracking.writing import (
    FINGERPRINT_TAG,
    KIND_TAG,
    PARENT_TAG,
    STAGE_TAG,
    TAG_LENGTH,
    VERSION_TAG,
    clip,
    register,
    require_paths,
    runs_tagged,
    start_run,
    write_parts,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

STALE_S = 3600.0  # a run is written in seconds, the largest adapter in minutes


def log_run(record: RunRecord, to: Destination) -> str:
    """Write one run and return its parent run id; where a finished run has the same fingerprint,
    return that one and write nothing.

    An unfinished run of the same fingerprint is marked KILLED, a new one is written, and the old
    one deleted; one that fails here is marked FAILED. Raises UsageError for paths that do not
    exist, and what `Destination.connected` raises.
    """
    with to.connected() as (client, experiment_id):
        _close_stale(client, experiment_id)
        attempts = runs_tagged(client, experiment_id, {FINGERPRINT_TAG: record.run_fingerprint})
        finished = [str(run.info.run_id) for run in attempts if run.info.status == "FINISHED"]
        if finished:
            run_id = finished[0]
        else:
            require_paths(record)
            for run in attempts:
                _close(client, run, "KILLED")
            run_id = _write(client, experiment_id, record)
        # after the parent is finished, and again if that was never reached: one version per run,
        # whenever the process was killed
        for run in attempts:
            if run.info.status != "FINISHED":
                # the parent last, so that a call that is killed here is made up for by the next
                for each in [*_children(client, run), run]:
                    client.delete_run(each.info.run_id)
        register(client, run_id, record)
        return run_id


def registered_version(run_id: str, to: Destination) -> str | None:
    """`NAME/VERSION` of the registered model that a run's adapter became; None where it has none.
    Raises what MLflow raises."""
    with to.connected() as (client, _):
        version: str | None = client.get_run(run_id).data.tags.get(VERSION_TAG)
        return version


def _close(client: MlflowClient, parent: Run, status: str) -> None:
    """End a parent and its children with a status, except those that have ended already. The parent
    last: it is what is looked for."""
    for run in [*_children(client, parent), parent]:
        if run.info.status in ("RUNNING", "SCHEDULED"):
            client.set_terminated(run.info.run_id, status)


def _children(client: MlflowClient, parent: Run) -> list[Run]:
    return runs_tagged(client, parent.info.experiment_id, {PARENT_TAG: parent.info.run_id})


def _close_stale(client: MlflowClient, experiment_id: str) -> None:
    """End what a process left that died while it wrote, or lost its server, and whose fingerprint
    may never come again."""
    before_ms = int((time.time() - STALE_S) * 1000)
    running = client.search_runs(
        [experiment_id], f"attributes.status = 'RUNNING' AND attributes.start_time < {before_ms}"
    )
    for run in running:
        # the run of an ablation, which has a kind, is open for as long as the ablation works
        if FINGERPRINT_TAG in run.data.tags and KIND_TAG not in run.data.tags:
            _close(client, run, "KILLED")


def _write(client: MlflowClient, experiment_id: str, record: RunRecord) -> str:
    own = {FINGERPRINT_TAG: record.run_fingerprint}
    parent = start_run(client, experiment_id, record.name, own)
    run_id: str = parent.info.run_id
    try:
        for stage in record.stages:
            tags = {PARENT_TAG: run_id, STAGE_TAG: clip(stage.name, TAG_LENGTH)}
            child = start_run(client, experiment_id, stage.name, tags).info.run_id
            write_parts(client, child, stage, tags)
            client.set_terminated(child, "FINISHED")
        write_parts(client, run_id, record, own)
        client.set_terminated(run_id, "FINISHED")
    except Exception:
        # an interrupt or a kill leaves the run RUNNING, and the next call closes it
        _close(client, parent, "FAILED")
        raise
    return run_id
