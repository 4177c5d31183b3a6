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

Write an ablation to MLflow while it works: one parent run, one child run per branch.

Guarantees: one parent per ablation fingerprint and one child per branch, however often the ablation
was killed and run again; a finished child is left alone as long as its branch is what it was. What
a killed call left half-written is deleted, as MLflow deletes (it can be restored), so that no chart
shows a branch twice. Call it from one thread. Does not catch MLflow's errors: the caller logs them.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from tasks.tracking import writing
from tasks.tracking.config import page_of
from tasks.tracking.connection import Destination
from tasks.tracking.records import Cell, RunRecord, Series, StageRecord

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


BRANCH_TAG = "concur.branch"
MADE_OF_TAG = "concur.branch_fingerprint"
TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's own: its pages find tables by it


class AblationSink:
    """The parent run of an ablation and its children."""

    def __init__(self, to: Destination) -> None:
        self._to = to
        self.experiment_id = self.run_id = ""

    def open(self, record: RunRecord) -> str:
        """The parent's id: the one of an earlier call, which runs again, or a new one. Name, tags
        and params of `record` are written. Raises what MLflow raises."""
        with self._to.connected() as runs:
            self.experiment_id = runs.experiment_id
            own = {writing.FINGERPRINT_TAG: record.run_fingerprint}
            known: Mapping[str, str] = {}
            if there := runs.tagged(own):
                self.run_id, known = there[0].info.run_id, there[0].data.params
                if there[0].info.status != "RUNNING":
                    runs.client.update_run(self.run_id, status="RUNNING")
            else:
                tags = {writing.key_of(key): text for key, text in record.tags.items()}
                own[writing.KIND_TAG] = "ablation"
                self.run_id = runs.start(record.name, tags | own)
            # some are missing where an earlier call died on its way; MLflow refuses another value
            missing = [key for key in record.params if writing.key_of(key) not in known]
            runs.values(self.run_id, {key: record.params[key] for key in missing})
            return self.run_id

    def child(self, branch: str, record: RunRecord) -> str:
        """Write a branch, once, and return the child's id. A branch with an error ends FAILED, and
        is replaced when it is run again. `run_fingerprint` is what the branch was made of; `stages`
        are not written.

        Raises UsageError for files that do not exist, and what MLflow raises.
        """
        with self._to.connected() as runs:
            own = {writing.PARENT_TAG: self.run_id, BRANCH_TAG: branch}
            found = runs.tagged(own)
            for run in found:
                same = run.data.tags.get(MADE_OF_TAG) == record.run_fingerprint
                if same and run.info.status == "FINISHED" and record.error is None:
                    runs.register(run.info.run_id, record)
                    return str(run.info.run_id)
            writing.require_paths(record)
            for run in found:
                runs.client.delete_run(run.info.run_id)
            own |= {writing.KIND_TAG: "branch", MADE_OF_TAG: record.run_fingerprint}
            if record.error:
                own["concur.error"] = record.error
            run_id = runs.write(record, own, "FAILED" if record.error else "FINISHED")
            runs.register(run_id, record)
            return run_id

    def close(self, record: StageRecord) -> None:
        """End the parent with its summary. A value that is written already is not written again;
        files and tables replace those of an earlier call, which knew of fewer branches."""
        with self._to.connected() as runs:
            known = runs.client.get_run(self.run_id).data.metrics
            changed = {
                name: value for name, value in record.metrics.items() if known.get(name) != value
            }
            runs.values(self.run_id, metrics=changed, tags=record.tags)
            runs.add_points(self.run_id, record.series)
            runs.files(self.run_id, record.artifacts)
            for name, rows in record.tables.items():
                self._replace_table(runs, name, rows)
            runs.client.set_terminated(self.run_id, "FINISHED")

    def url(self, run_id: str) -> str | None:
        """The run's page, where MLflow is a server."""
        uri = self._to.tracking_uri
        if not uri.startswith(("http://", "https://")) or not self.experiment_id:
            return None
        return page_of(uri, self.experiment_id, f"runs/{run_id}")

    def _replace_table(
        self, runs: writing.Runs, name: str, rows: Sequence[dict[str, Cell]]
    ) -> None:
        """MLflow's own `log_table` adds rows to an existing table. The file is in its form."""
        place = f"{writing.TABLES}/{name}.json"
        table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
        runs.client.log_dict(self.run_id, table, place)
        tables = json.loads(runs.client.get_run(self.run_id).data.tags.get(TABLES_TAG, "[]"))
        if (entry := {"path": place, "type": "table"}) not in tables:
            runs.client.set_tag(self.run_id, TABLES_TAG, json.dumps([*tables, entry]))
