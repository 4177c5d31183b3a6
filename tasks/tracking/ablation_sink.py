"""An ablation in MLflow: one parent run for the whole of it, one child run a branch, written
as branches end.

Guarantees: one parent per ablation fingerprint and one child per branch, however often the ablation
was killed and run again; a child that is finished is left alone as long as its branch is what it
was; nothing is written by more than one thread of an ablation, if one thread calls. What a killed
call left half-written is deleted, as MLflow deletes (it can be restored), so that no chart shows a
branch twice. Does not catch MLflow's errors: the caller logs them and the ablation goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from kernels_eval.records import Record
from tasks.tracking.connection import artifact_location, bounded_and_quiet, connect, find_experiment
from tasks.tracking.mlflow_sink import KIND_TAG
from tasks.tracking.records import Metrics, Params, Rows, RunRecord, TableName
from tasks.tracking.writing import (
    FINGERPRINT_TAG,
    KEY_LENGTH,
    PARENT_TAG,
    TABLES,
    TAG_LENGTH,
    VERSION_TAG,
    checked_inputs,
    clip,
    key_of,
    log_adapter,
    log_datasets,
    log_files,
    log_table,
    log_values,
    parents,
    register,
)

if TYPE_CHECKING:
    from mlflow.entities import Run
    from mlflow.tracking import MlflowClient

BRANCH_TAG = "concur.branch"
MADE_OF_TAG = "concur.branch_fingerprint"
TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's own: its pages find tables by it
Series = dict[str, tuple[tuple[int, float], ...]]


class ChildRecord(Record):
    """One branch that ended. `run` holds what any run has: of its fields `run_fingerprint` is what
    the branch was made of, and `stages` are not written. `error` is why it failed; such a child
    ends FAILED, and is replaced when the branch is run again.
    """

    run: RunRecord
    series: Series = {}
    tables: dict[TableName, Rows] = {}
    error: str | None = Field(default=None, min_length=1)


class AblationSink:
    """The parent run of an ablation and its children. `tracking_uri`, `artifact_root` and
    `experiment` as in `mlflow_sink.log_run`."""

    def __init__(
        self, fingerprint: str, *, tracking_uri: str, artifact_root: str | None, experiment: str
    ) -> None:
        self._fingerprint, self._uri, self._root, self._experiment = (
            fingerprint,
            tracking_uri,
            artifact_root,
            experiment,
        )
        self.experiment_id = self.run_id = ""

    def open(self, name: str, tags: Mapping[str, str], params: Params) -> str:
        """The parent's id: the one of an earlier call, which runs again, or a new one. Raises what
        MLflow raises."""
        with bounded_and_quiet():
            client = self._connected()
            there = parents(client, self.experiment_id, self._fingerprint)
            own = {
                FINGERPRINT_TAG: self._fingerprint,
                KIND_TAG: "sweep",
                "mlflow.source.name": "concur",
            }
            if there:
                self.run_id = there[0].info.run_id
                if there[0].info.status != "RUNNING":
                    client.update_run(self.run_id, status="RUNNING")
            else:
                told = {key_of(key): clip(value, TAG_LENGTH) for key, value in tags.items()} | own
                self.run_id = client.create_run(
                    self.experiment_id, tags=told, run_name=clip(name, KEY_LENGTH)
                ).info.run_id
            known = (
                there[0].data.params if there else {}
            )  # without some of them where an earlier call died on its way
            log_values(
                client,
                self.run_id,
                {key: value for key, value in params.items() if key_of(key) not in known},
                {},
                {},
                {},
            )
            return self.run_id

    def child(self, branch: str, record: ChildRecord) -> str:
        """Write a branch, once. Returns the child's id. Raises UsageError for files that are not
        there, and what MLflow raises."""
        with bounded_and_quiet():
            client = self._connected()
            found = self._children(client, branch)
            for run in found:
                same = run.data.tags.get(MADE_OF_TAG) == record.run.run_fingerprint
                if same and run.info.status == "FINISHED" and record.error is None:
                    if record.run.registered_model:
                        register(client, run.info.run_id, record.run)
                    return run.info.run_id
            inputs = checked_inputs(record.run)
            for run in found:
                client.delete_run(run.info.run_id)
            own = {
                PARENT_TAG: self.run_id,
                BRANCH_TAG: clip(branch, TAG_LENGTH),
                KIND_TAG: "branch",
                MADE_OF_TAG: record.run.run_fingerprint,
                "mlflow.source.name": "concur",
            }
            if record.error:
                own["concur.error"] = clip(record.error, TAG_LENGTH)
            run_id = client.create_run(
                self.experiment_id, tags=own, run_name=clip(record.run.run_name, KEY_LENGTH)
            ).info.run_id
            tags = {key: value for key, value in record.run.tags.items() if key not in own}
            log_values(client, run_id, record.run.params, record.run.metrics, record.series, tags)
            log_datasets(client, run_id, inputs)
            log_files(client, run_id, record.run.artifacts)
            for name, rows in record.tables.items():
                log_table(client, run_id, name, rows)
            if record.run.adapter_dir:
                log_adapter(client, run_id, record.run)
            client.set_terminated(run_id, "FAILED" if record.error else "FINISHED")
            if record.run.registered_model:
                register(client, run_id, record.run)
            return run_id

    def progress(self, metrics: Metrics, step: int) -> None:
        """Numbers of the parent that grow while the ablation runs, once a step."""
        with bounded_and_quiet():
            client = self._connected()
            self._missing(
                client,
                {name: ((step, value),) for name, value in metrics.items() if value is not None},
            )

    def close(
        self,
        *,
        metrics: Metrics,
        series: Series,
        tags: Mapping[str, str],
        files: Sequence[Path] = (),
        tables: Mapping[str, Sequence[Mapping[str, str | int | float | None]]] | None = None,
    ) -> None:
        """End the parent with its summary. What is there with the same value is not written again;
        files and tables take the place of those of an earlier call, which knew of fewer
        branches."""
        with bounded_and_quiet():
            client = self._connected()
            there = client.get_run(self.run_id).data.metrics
            changed = {
                name: value
                for name, value in metrics.items()
                if value is not None and there.get(name) != value
            }
            log_values(client, self.run_id, {}, changed, {}, tags)
            self._missing(client, series)
            log_files(client, self.run_id, files)
            for name, rows in (tables or {}).items():
                if rows:
                    self._replace_table(client, name, rows)
            client.set_terminated(self.run_id, "FINISHED")

    def model_version(self, run_id: str) -> str | None:
        with bounded_and_quiet():
            return self._connected().get_run(run_id).data.tags.get(VERSION_TAG)

    def url(self, run_id: str) -> str | None:
        """The run's page, where MLflow is a server."""
        if not self._uri.startswith(("http://", "https://")) or not self.experiment_id:
            return None
        return f"{self._uri.rstrip('/')}/#/experiments/{self.experiment_id}/runs/{run_id}"

    # -- how ---------------------------------------------------------------------------------------

    def _connected(self) -> MlflowClient:
        location = artifact_location(self._uri, self._root)
        client = connect(self._uri)
        if not self.experiment_id:
            self.experiment_id = find_experiment(client, self._experiment, location)
        return client

    def _children(self, client: MlflowClient, branch: str) -> list[Run]:
        query = f"tags.`{PARENT_TAG}` = '{self.run_id}' and tags.`{BRANCH_TAG}` = '{branch}'"
        return list(
            client.search_runs([self.experiment_id], query, order_by=["attributes.start_time ASC"])
        )

    def _missing(
        self, client: MlflowClient, series: Mapping[str, Sequence[tuple[int, float]]]
    ) -> None:
        """Write the points that the parent does not have yet."""
        for name, points in series.items():
            there = {
                (metric.step, metric.value)
                for metric in client.get_metric_history(self.run_id, name)
            }
            left = tuple(point for point in points if point not in there)
            if left:
                log_values(client, self.run_id, {}, {}, {name: left}, {})

    def _replace_table(
        self,
        client: MlflowClient,
        name: str,
        rows: Sequence[Mapping[str, str | int | float | None]],
    ) -> None:
        """MLflow's own `log_table` adds rows to a table that is there. The file is in its form."""
        place, columns = f"{TABLES}/{name}.json", list(rows[0])
        client.log_dict(
            self.run_id,
            {"columns": columns, "data": [[row[column] for column in columns] for row in rows]},
            place,
        )
        tables = json.loads(client.get_run(self.run_id).data.tags.get(TABLES_TAG, "[]"))
        if (entry := {"path": place, "type": "table"}) not in tables:
            client.set_tag(self.run_id, TABLES_TAG, json.dumps([*tables, entry]))
