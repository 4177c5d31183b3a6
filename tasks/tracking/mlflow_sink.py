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

from tasks.tracking import writing
from tasks.tracking.connection import Destination
from tasks.tracking.records import RunRecord, Series

if TYPE_CHECKING:
    from mlflow.entities import Run

STALE_S = 3600.0  # a run is written in seconds, the largest adapter in minutes


def log_run(record: RunRecord, to: Destination) -> str:
    """Write one run and return its parent run id; where a finished run has the same fingerprint,
    return that one and write nothing.

    An unfinished run of the same fingerprint is marked KILLED, a new one is written, and the old
    one deleted; one that fails here is marked FAILED. Raises UsageError for paths that do not
    exist, and what `Destination.connected` raises.
    """
    with to.connected() as runs:
        _close_stale(runs)
        own = {writing.FINGERPRINT_TAG: record.run_fingerprint}
        attempts = runs.tagged(own)
        finished = [str(run.info.run_id) for run in attempts if run.info.status == "FINISHED"]
        unfinished = [run for run in attempts if run.info.status != "FINISHED"]
        if not finished:
            writing.require_paths(record)
            for run in unfinished:
                _close(runs, run)
            finished = [runs.write(record, own)]
        # after the parent is finished, and again if that was never reached: one version per run,
        # whenever the process was killed
        for run in unfinished:
            for each in _family(runs, run):
                runs.client.delete_run(each.info.run_id)
        runs.register(finished[0], record)
        return finished[0]


def log_trend(name: str, key: str, series: Series, to: Destination) -> str:
    """Add what is new of these series to the one run that `key` names, made where there is none;
    return its id. Raises what `Destination.connected` raises."""
    with to.connected() as runs:
        own = {writing.FINGERPRINT_TAG: key, writing.KIND_TAG: "trend"}
        found = runs.tagged(own)
        run_id = str(found[0].info.run_id) if found else runs.start(name, own)
        runs.add_points(run_id, series)
        runs.client.set_terminated(run_id, "FINISHED")
        return run_id


def registered_version(run_id: str, to: Destination) -> str | None:
    """`NAME/VERSION` of the registered model that a run's adapter became; None where it has none.
    Raises what MLflow raises."""
    with to.connected() as runs:
        version: str | None = runs.client.get_run(run_id).data.tags.get(writing.VERSION_TAG)
        return version


def _family(runs: writing.Runs, parent: Run) -> list[Run]:
    """Children, then the parent: it is what is looked for, so a call that is killed while it goes
    through them is made up for by the next."""
    return [*runs.tagged({writing.PARENT_TAG: parent.info.run_id}), parent]


def _close(runs: writing.Runs, parent: Run) -> None:
    for run in _family(runs, parent):
        if run.info.status in ("RUNNING", "SCHEDULED"):
            runs.client.set_terminated(run.info.run_id, "KILLED")


def _close_stale(runs: writing.Runs) -> None:
    """End what a process left that died while it wrote, or lost its server, and whose fingerprint
    may never come again."""
    before_ms = int((time.time() - STALE_S) * 1000)
    old = f"attributes.status = 'RUNNING' AND attributes.start_time < {before_ms}"
    for run in runs.client.search_runs([runs.experiment_id], old):
        # the run of an ablation, which has a kind, is open for as long as the ablation works
        tags = run.data.tags
        written_ms = int(tags.get(writing.WRITTEN_TAG, run.info.start_time))
        if writing.FINGERPRINT_TAG in tags and writing.KIND_TAG not in tags:
            if written_ms < before_ms:
                _close(runs, run)
