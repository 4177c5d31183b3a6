"""One finished run of the line, written to MLflow: a parent run with the headline, a child run per
stage and per benchmark model.

Guarantees: the same run fingerprint is written once per experiment, so a replay from the snapshots
changes nothing; what a killed or failed attempt left behind never looks finished, and is deleted
(as MLflow deletes: it can be restored) once the run is whole; where that run never comes again, the
next one of the experiment ends what still looks open after `STALE_S`; paths that are not there are
found before anything is written; a tracking server or database that does not answer is an error
within about a minute, never a hang; nothing is printed, MLflow's own globals (active run, tracking
URI) are not touched, and the environment is as before when a call returns. Does not guarantee order
between two processes that write the same fingerprint at the same moment: each takes the other's run
for one that a killed process left. Does not catch MLflow's errors: the caller logs them and the
line goes on.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tasks.tracking.connection import artifact_location, bounded_and_quiet, connect, find_experiment
from tasks.tracking.records import RunRecord, StageRecord
from tasks.tracking.writing import (
    FINGERPRINT_TAG,
    KEY_LENGTH,
    PARENT_TAG,
    TAG_LENGTH,
    VERSION_TAG,
    checked_inputs,
    clip,
    dataset_input,
    log_adapter,
    log_datasets,
    log_files,
    log_table,
    log_values,
    parents,
    register,
)

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

STAGE_TAG = "concur.stage"
KIND_TAG = "concur.kind"  # on runs that are written while an ablation works
STALE_S = 3600.0  # a run is written in seconds, the largest adapter in minutes


def log_run(
    record: RunRecord, *, tracking_uri: str, artifact_root: str | None, experiment: str
) -> str:
    """Write one run and return its parent run id; where a finished run has the same fingerprint,
    return that one and write nothing.

    `tracking_uri` is `sqlite:///...`, another database or an http(s) server. `artifact_root` (a
    directory or URL) is where artifacts go when the experiment does not exist yet; None leaves it
    to a server and means `mlartifacts` beside a SQLite file. An unfinished run of the same
    fingerprint is marked KILLED, a new one is written, and the old one deleted; one that fails here
    is marked FAILED. Raises UsageError for paths, URIs or experiments that cannot be used,
    EvalError for a database that does not answer, and what MLflow raises.
    """
    with bounded_and_quiet():
        location = artifact_location(tracking_uri, artifact_root)
        client = connect(tracking_uri)
        experiment_id = find_experiment(client, experiment, location)
        _close_stale(client, experiment_id)
        attempts = parents(client, experiment_id, record.run_fingerprint)
        finished = [run.info.run_id for run in attempts if run.info.status == "FINISHED"]
        if finished:
            run_id = finished[0]
        else:
            inputs = checked_inputs(record)
            for run in attempts:
                _close(client, run, "KILLED")
            run_id = _write(client, experiment_id, record, inputs)
        # after the parent is finished, and again if that was never reached: one version per run,
        # whenever the process was killed
        for run in attempts:
            if run.info.status != "FINISHED":
                _delete(client, run)
        if record.registered_model:
            register(client, run_id, record)
        return run_id


def registered_version(run_id: str, *, tracking_uri: str) -> str | None:
    """`NAME/VERSION` of the registered model that a run's adapter became; None where it has none.
    Raises what MLflow raises."""
    with bounded_and_quiet():
        return connect(tracking_uri).get_run(run_id).data.tags.get(VERSION_TAG)


# -- finding and closing ---------------------------------------------------------------------------


def _close(client: MlflowClient, parent: Run, status: str) -> None:
    """End a parent and its children with a status, except those that have ended already. The parent
    last: it is what is looked for."""
    for run in [*_children(client, parent), parent]:
        if run.info.status in ("RUNNING", "SCHEDULED"):
            client.set_terminated(run.info.run_id, status)


def _delete(client: MlflowClient, parent: Run) -> None:
    """As `_close`: the parent last, so that a call that is killed here is made up for by the
    next."""
    for run in [*_children(client, parent), parent]:
        client.delete_run(run.info.run_id)


def _children(client: MlflowClient, parent: Run) -> list[Run]:
    return list(
        client.search_runs(
            [parent.info.experiment_id], f"tags.`{PARENT_TAG}` = '{parent.info.run_id}'"
        )
    )


def _close_stale(client: MlflowClient, experiment_id: str) -> None:
    """End what a process left that died while it wrote, or lost its server, and whose fingerprint
    may never come again."""
    before_ms = int((time.time() - STALE_S) * 1000)
    running = client.search_runs(
        [experiment_id], f"attributes.status = 'RUNNING' AND attributes.start_time < {before_ms}"
    )
    for run in running:
        if (
            FINGERPRINT_TAG in run.data.tags and KIND_TAG not in run.data.tags
        ):  # that of an ablation is open for as long as the ablation works
            _close(client, run, "KILLED")


# -- writing ---------------------------------------------------------------------------------------


def _write(
    client: MlflowClient, experiment_id: str, record: RunRecord, inputs: list[DatasetInput]
) -> str:
    own = {FINGERPRINT_TAG: record.run_fingerprint, "mlflow.source.name": "concur"}
    parent = client.create_run(experiment_id, tags=own, run_name=clip(record.run_name, KEY_LENGTH))
    run_id = parent.info.run_id
    try:
        log_values(
            client,
            run_id,
            record.params,
            record.metrics,
            {},
            {key: value for key, value in record.tags.items() if key not in own},
        )
        log_datasets(client, run_id, inputs)
        for stage in record.stages:
            _write_stage(client, experiment_id, run_id, stage)
        log_files(client, run_id, record.artifacts)
        if record.adapter_dir:
            log_adapter(client, run_id, record)
        client.set_terminated(run_id, "FINISHED")
    except Exception:
        # an interrupt or a kill does not come here: the run stays RUNNING and the next call closes
        # it
        _close(client, parent, "FAILED")
        raise
    return run_id


def _write_stage(
    client: MlflowClient, experiment_id: str, parent_id: str, stage: StageRecord
) -> None:
    own = {
        PARENT_TAG: parent_id,
        STAGE_TAG: clip(stage.name, TAG_LENGTH),
        "mlflow.source.name": "concur",
    }
    run_id = client.create_run(
        experiment_id, tags=own, run_name=clip(stage.name, KEY_LENGTH)
    ).info.run_id
    tags = {
        key: value for key, value in stage.tags.items() if key not in own and key != FINGERPRINT_TAG
    }
    log_values(client, run_id, stage.params, stage.metrics, stage.series, tags)
    log_datasets(client, run_id, [dataset_input(dataset) for dataset in stage.datasets])
    log_files(client, run_id, stage.artifacts)
    for name, rows in stage.tables.items():
        log_table(client, run_id, name, rows)
    client.set_terminated(run_id, "FINISHED")
