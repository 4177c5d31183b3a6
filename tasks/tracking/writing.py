"""Write the parts of MLflow runs: values in batches, files, tables, datasets and adapters.
`mlflow_sink` decides which runs to write."""

from __future__ import annotations

import json
import posixpath
import re
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import fsspec
import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, stable_hash
from tasks.reporting.text import shortened
from tasks.tracking.records import DatasetRef, Rows, RunRecord, StageRecord

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

FINGERPRINT_TAG = "concur.run_fingerprint"  # on parent runs: a second call finds the first by it
STAGE_TAG = "concur.stage"
KIND_TAG = "concur.kind"  # an ablation or one of its branches
VERSION_TAG = "concur.model_version"
PARENT_TAG = "mlflow.parentRunId"  # MLflow's own: the UI nests by it
SOURCE_TAG = "mlflow.source.name"
NOTE_TAG = "mlflow.note.content"  # MLflow's own: the description on the run's page
TABLES_TAG = "mlflow.loggedArtifacts"  # MLflow's own: its pages find tables by it
ADAPTER = "adapter"
FIGURES = (".png", ".svg", ".pdf")

# limits of mlflow 3.17 (mlflow/utils/validation.py), in characters and entries
KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
VERSION_TAG_LENGTH = 5000
METRICS_PER_BATCH = 1000
# a server refuses requests above 1 MB; ten of the longest values stay below it even when JSON
# escapes every character to twelve bytes
TEXTS_PER_BATCH = 10


class Runs(NamedTuple):
    """The runs of one experiment."""

    client: MlflowClient
    experiment_id: str

    def tagged(self, tags: Mapping[str, str]) -> list[Run]:
        """Undeleted runs with all these tags, oldest first."""
        query = " and ".join(f"tags.`{name}` = '{value}'" for name, value in tags.items())
        order = ["attributes.start_time ASC"]
        return list(self.client.search_runs([self.experiment_id], query, order_by=order))

    def start(self, name: str, tags: Mapping[str, str], began_ms: int | None = None) -> str:
        """The id of a new run that began at `began_ms` (ms since 1970; None: now)."""
        tags = {key: clip(text, TAG_LENGTH) for key, text in tags.items()} | {SOURCE_TAG: "concur"}
        name = clip(name, KEY_LENGTH)
        run = self.client.create_run(self.experiment_id, began_ms, tags=tags, run_name=name)
        return str(run.info.run_id)

    def delete(self, run_id: str) -> None:
        """Delete a run after its children, so that a repeat after a kill finds the parent."""
        for child in self.tagged({PARENT_TAG: run_id}):
            self.client.delete_run(child.info.run_id)
        self.client.delete_run(run_id)

    def write(self, record: StageRecord, own: Mapping[str, str], status: str = "FINISHED") -> str:
        """Write a record as a new run, after its stages' runs; return its id. `own` are tags that
        the record may not set. Errors mark the run FAILED; interrupts and kills leave it
        RUNNING."""
        stages = record.stages if isinstance(record, RunRecord) else ()
        times = [record.times] if record.times else [stage.times for stage in stages]
        known = [each for each in times if each]
        run_id = self.start(record.name, own, min((began for began, _ in known), default=None))
        try:
            for stage in stages:
                self.write(stage, {PARENT_TAG: run_id, STAGE_TAG: stage.name})
            reserved = {*own, FINGERPRINT_TAG, SOURCE_TAG}
            tags = {key: text for key, text in record.tags.items() if key not in reserved}
            self.values(run_id, record.params, record.metrics, record.series, tags)
            if record.datasets:
                self.client.log_inputs(run_id, [*map(dataset_input, record.datasets)])
            self.files(run_id, record.artifacts)
            self.tables(run_id, record.tables)
            if isinstance(record, RunRecord) and (adapter := record.adapter):
                self.client.log_artifacts(run_id, str(adapter.directory), ADAPTER)
        except Exception:
            self.client.set_terminated(run_id, "FAILED")
            raise
        ended_ms = max((ended for _, ended in known), default=None)
        self.client.set_terminated(run_id, status, ended_ms)
        return run_id

    def values(
        self,
        run_id: str,
        params: Mapping[str, str] = {},
        metrics: Mapping[str, float | None] = {},
        series: Mapping[str, Sequence[tuple[int, float]]] = {},
        tags: Mapping[str, str] = {},
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        now_ms = time.time_ns() // 1_000_000
        single = {name: ((0, value),) for name, value in metrics.items() if value is not None}
        points = [
            Metric(key_of(name), value, now_ms, step)
            for name, pairs in {**single, **series}.items()
            for step, value in pairs
        ]
        texts = [Param(key_of(key), clip(text, PARAM_LENGTH)) for key, text in params.items()]
        labels = [RunTag(key_of(key), clip(text, TAG_LENGTH)) for key, text in tags.items()]
        entries: tuple[tuple[str, Sequence[object], int], ...] = (
            ("metrics", points, METRICS_PER_BATCH),
            ("params", texts, TEXTS_PER_BATCH),
            ("tags", labels, TEXTS_PER_BATCH),
        )
        for kind, found, size in entries:
            for start in range(0, len(found), size):
                batch: Json = {kind: found[start : start + size]}
                self.client.log_batch(run_id, **batch)

    def add_points(self, run_id: str, series: Mapping[str, Sequence[tuple[int, float]]]) -> None:
        """Add points that are missing."""
        for name, points in series.items():
            history = self.client.get_metric_history(run_id, name)
            known = {(metric.step, metric.value) for metric in history}
            self.values(run_id, series={name: [each for each in points if each not in known]})

    def files(self, run_id: str, paths: Sequence[Path]) -> None:
        """Figures to figures/, the rest to the run's root."""
        for path in paths:
            folder = "figures" if path.suffix.lower() in FIGURES else None
            self.client.log_artifact(run_id, str(path), folder)

    def tables(self, run_id: str, tables: Mapping[str, Rows]) -> None:
        """Write tables/NAME.json as MLflow's `log_table` does, which would append to it."""
        entries = []
        for name, rows in tables.items():
            table = {"columns": list(rows[0]), "data": [list(row.values()) for row in rows]}
            entries.append({"path": f"tables/{name}.json", "type": "table"})
            self.client.log_dict(run_id, table, entries[-1]["path"])
        if entries:
            self.client.set_tag(run_id, TABLES_TAG, json.dumps(entries))

    def register(self, run_id: str, record: RunRecord) -> None:
        """Make the run's adapter, if any, a version of its registered model, once: a deleted
        version does not come back."""
        from mlflow.exceptions import MlflowException

        if record.adapter is None:
            return
        run, name = self.client.get_run(run_id), record.adapter.registered_model
        if VERSION_TAG in run.data.tags:
            return
        try:
            self.client.create_registered_model(name)
        except MlflowException as error:
            if error.error_code != "RESOURCE_ALREADY_EXISTS":
                raise
        found = self.client.search_model_versions(f"run_id = '{run_id}'")
        version = next((version for version in found if version.name == name), None)
        if version is None:
            lineage = record.adapter.lineage | {FINGERPRINT_TAG: record.run_fingerprint}
            version = self.client.create_model_version(
                name,
                f"{run.info.artifact_uri}/{ADAPTER}",
                run_id,
                tags={key_of(key): clip(text, VERSION_TAG_LENGTH) for key, text in lineage.items()},
                description=f"LoRA adapter of run {clip(record.name, KEY_LENGTH)}",
                await_creation_for=0,
            )
        self.client.set_tag(run_id, VERSION_TAG, f"{name}/{version.version}")


def require_paths(record: StageRecord) -> None:
    """Raise UsageError for the first missing path of a run or its stages."""
    for path in record.artifacts:
        if not path.is_file():
            raise UsageError(f"artifact {path} is not a file", "run the stage that writes it again")
    for dataset in record.datasets:
        dataset_input(dataset)
    if isinstance(record, RunRecord):
        for stage in record.stages:
            require_paths(stage)
        folder = record.adapter and record.adapter.directory
        if folder and not (folder.is_dir() and any(folder.iterdir())):
            raise UsageError(
                f"adapter directory {folder} is missing or empty", "run training again"
            )


def dataset_input(dataset: DatasetRef) -> DatasetInput:
    """Name, fingerprint, source, columns and row count, from the Parquet footers alone to save
    memory."""
    import pyarrow.dataset  # it imports pandas
    from mlflow.data.polars_dataset import infer_schema
    from mlflow.entities import Dataset, DatasetInput

    fs, path = fsspec.core.url_to_fs(str(dataset.path))
    parts = sorted(fs.glob(f"{path}/*.parquet")) if fs.isdir(path) else [path]
    if not parts or not fs.exists(parts[0]):
        raise UsageError(
            f"dataset {dataset.name!r}: there is no Parquet file at {dataset.path}",
            "give a snapshot's directory or a file",
        )
    table = pyarrow.dataset.dataset(parts, filesystem=fs)
    rows = table.count_rows()
    columns = infer_schema(pl.DataFrame(pl.from_arrow(table.schema.empty_table()))).to_dict()
    uri = fs.unstrip_protocol(path)
    entity = Dataset(
        name=clip(dataset.name, 500),
        digest=dataset.fingerprint[:36],
        source_type="local" if uri.startswith(("file:", "local:")) else uri.partition("://")[0],
        source=json.dumps({"uri": uri}),
        schema=json.dumps({"mlflow_colspec": columns}),
        profile=json.dumps({"num_rows": rows, "num_elements": rows * len(table.schema)}),
    )
    return DatasetInput(entity)


def key_of(name: str) -> str:
    """A name that MLflow accepts (mlflow/utils/validation.py). A hash keeps changed names apart."""
    allowed = len(name) <= KEY_LENGTH and re.fullmatch(r"[\w. :/-]+", name, flags=re.ASCII)
    # MLflow treats names as paths, which must be relative and normal
    if allowed and posixpath.normpath(name) == name and not name.startswith((".", "/")):
        return name
    cleaned = re.sub(r"[^\w. -]", "_", name, flags=re.ASCII).lstrip(".")
    return f"{cleaned[: KEY_LENGTH - 9]}-{stable_hash(name)[:8]}"


def clip(text: str, length: int) -> str:
    """Text cut to fit, ending in three dots, without NUL, which PostgreSQL refuses."""
    text = text.replace("\x00", "\ufffd")
    return shortened(text, length)
