"""Write an ablation to MLflow while it works: one parent run, one child run a branch.

Guarantees: one parent per ablation fingerprint and one child per branch, however often the ablation
was killed and run again; a finished child is left alone as long as its branch is what it was. What
a killed call left half-written is deleted, as MLflow deletes (it can be restored), so that no chart
shows a branch twice. Call it from one thread. Does not catch MLflow's errors: the caller logs them.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from tasks.tracking.connection import Destination
from tasks.tracking.records import Cell, Metrics, RunRecord, Series, StageRecord
from tasks.tracking.writing import (
    FINGERPRINT_TAG,
    KIND_TAG,
    PARENT_TAG,
    TABLES,
    TAG_LENGTH,
    clip,
    key_of,
    log_files,
    log_values,
    register,
    require_paths,
    runs_tagged,
    start_run,
    write_parts,
)

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

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
        with self._to.connected() as (client, self.experiment_id):
            # the value of this tag is part of what finds the runs of earlier versions
            own = {FINGERPRINT_TAG: record.run_fingerprint, KIND_TAG: "sweep"}
            there = runs_tagged(
                client, self.experiment_id, {FINGERPRINT_TAG: record.run_fingerprint}
            )
            if there:
                parent = there[0]
                if parent.info.status != "RUNNING":
                    client.update_run(parent.info.run_id, status="RUNNING")
            else:
                tags = {key_of(key): clip(text, TAG_LENGTH) for key, text in record.tags.items()}
                parent = start_run(client, self.experiment_id, record.name, tags | own)
            self.run_id = parent.info.run_id
            # some are missing where an earlier call died on its way; MLflow refuses another value
            known = parent.data.params
            params = {key: text for key, text in record.params.items() if key_of(key) not in known}
            log_values(client, self.run_id, params)
            return self.run_id

    def child(self, branch: str, record: RunRecord) -> str:
        """Write a branch, once, and return the child's id. A branch with an error ends FAILED, and
        is replaced when it is run again. `run_fingerprint` is what the branch was made of; `stages`
        are not written.

        Raises UsageError for files that do not exist, and what MLflow raises.
        """
        with self._to.connected() as (client, experiment_id):
            found = runs_tagged(
                client, experiment_id, {PARENT_TAG: self.run_id, BRANCH_TAG: branch}
            )
            for run in found:
                same = run.data.tags.get(MADE_OF_TAG) == record.run_fingerprint
                if same and run.info.status == "FINISHED" and record.error is None:
                    register(client, run.info.run_id, record)
                    return str(run.info.run_id)
            require_paths(record)
            for run in found:
                client.delete_run(run.info.run_id)
            own = {
                PARENT_TAG: self.run_id,
                BRANCH_TAG: clip(branch, TAG_LENGTH),
                KIND_TAG: "branch",
                MADE_OF_TAG: record.run_fingerprint,
            }
            if record.error:
                own["concur.error"] = clip(record.error, TAG_LENGTH)
            run_id: str = start_run(client, experiment_id, record.name, own).info.run_id
            write_parts(client, run_id, record, own)
            client.set_terminated(run_id, "FAILED" if record.error else "FINISHED")
            register(client, run_id, record)
            return run_id

    def progress(self, metrics: Metrics, step: int) -> None:
        """Numbers of the parent that grow while the ablation runs, once a step."""
        series: Series = {
            name: ((step, value),) for name, value in metrics.items() if value is not None
        }
        with self._to.connected() as (client, _):
            self._add_points(client, series)

    def close(self, record: StageRecord) -> None:
        """End the parent with its summary. A value that is written already is not written again;
        files and tables replace those of an earlier call, which knew of fewer branches."""
        with self._to.connected() as (client, _):
            known = client.get_run(self.run_id).data.metrics
            changed = {
                name: value for name, value in record.metrics.items() if known.get(name) != value
            }
            log_values(client, self.run_id, metrics=changed, tags=record.tags)
            self._add_points(client, record.series)
            log_files(client, self.run_id, record.artifacts)
            for name, rows in record.tables.items():
                self._replace_table(client, name, rows)
            client.set_terminated(self.run_id, "FINISHED")

    def url(self, run_id: str) -> str | None:
        """The run's page, where MLflow is a server."""
        uri = self._to.tracking_uri
        if not uri.startswith(("http://", "https://")) or not self.experiment_id:
            return None
        return f"{uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{run_id}"

    def _add_points(self, client: MlflowClient, series: Series) -> None:
        """Write the points that the parent does not have yet."""
        for name, points in series.items():
            history = client.get_metric_history(self.run_id, name)
            known = {(metric.step, metric.value) for metric in history}
            if new := tuple(point for point in points if point not in known):
                log_values(client, self.run_id, series={name: new})

    def _replace_table(
        self, client: MlflowClient, name: str, rows: Sequence[dict[str, Cell]]
    ) -> None:
        """MLflow's own `log_table` adds rows to an existing table. The file is in its form."""
        place, columns = f"{TABLES}/{name}.json", list(rows[0])
        data = [[row[column] for column in columns] for row in rows]
        client.log_dict(self.run_id, {"columns": columns, "data": data}, place)
        tables = json.loads(client.get_run(self.run_id).data.tags.get(TABLES_TAG, "[]"))
        if (entry := {"path": place, "type": "table"}) not in tables:
            client.set_tag(self.run_id, TABLES_TAG, json.dumps([*tables, entry]))
