"""Writes the parts of one run to MLflow: values in batches that a server takes, files, tables,
datasets, the adapter and its registration.

Guarantees: names and texts are made such as MLflow and every database take, and no two names become
the same; paths that are not there are found by `checked_inputs`; a run's adapter becomes one
registered version, however often that is asked for. Does not begin or end runs: the sinks do.
"""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import UsageError
from kernels_eval.records import stable_hash
from tasks.tracking.adapter_model import write_mlmodel
from tasks.tracking.records import Cell, DatasetRef, RunRecord

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

FINGERPRINT_TAG = (  # on parent runs only: what makes a second call find the first
    "concur.run_fingerprint"
)
VERSION_TAG = "concur.model_version"
PARENT_TAG = "mlflow.parentRunId"  # MLflow's own: the UI nests by it
ADAPTER = "adapter"
TABLES = "tables"

# limits of mlflow 3.17 (mlflow/utils/validation.py), in characters and entries
KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
VERSION_TAG_LENGTH = 5000
METRICS_PER_BATCH = 1000
# a server refuses requests above 1 MB; ten of the longest values stay below it even when JSON
# escapes every character to twelve bytes
TEXTS_PER_BATCH = 10


def parents(client: MlflowClient, experiment_id: str, fingerprint: str) -> list[Run]:
    """Parent runs of a fingerprint that nobody deleted, oldest first."""
    return list(
        client.search_runs(
            [experiment_id],
            f"tags.`{FINGERPRINT_TAG}` = '{fingerprint}'",
            order_by=["attributes.start_time ASC"],
        )
    )


def checked_inputs(record: RunRecord) -> list[DatasetInput]:
    """The dataset inputs, with every path of the record looked at. Raises UsageError for the first
    one that is not there."""
    files = [*record.artifacts, *(path for stage in record.stages for path in stage.artifacts)]
    for dataset in (dataset for stage in record.stages for dataset in stage.datasets):
        dataset_input(dataset)  # what is not there is found now
    for path in files:
        if not path.is_file():
            raise UsageError(f"artifact {path} is not a file", "run the stage that writes it again")
    if record.adapter_dir and not (
        record.adapter_dir.is_dir() and any(record.adapter_dir.iterdir())
    ):
        raise UsageError(
            f"adapter directory {record.adapter_dir} is missing or empty", "run training again"
        )
    return [dataset_input(dataset) for dataset in record.datasets]


def log_datasets(client: MlflowClient, run_id: str, inputs: list[DatasetInput]) -> None:
    """What `checked_inputs` has made, if there is any."""
    if inputs:
        client.log_inputs(run_id, inputs)


def dataset_input(dataset: DatasetRef) -> DatasetInput:
    """Name, fingerprint, source, columns and row count, from the Parquet footers alone: a snapshot
    may be larger than memory."""
    import fsspec
    import polars as pl
    import pyarrow.parquet as pq
    from mlflow.data.polars_dataset import infer_schema
    from mlflow.entities import Dataset, DatasetInput

    fs, path = fsspec.core.url_to_fs(str(dataset.path))
    parts = sorted(fs.glob(f"{path}/*.parquet")) if fs.isdir(path) else [path]
    if not parts or not fs.exists(parts[0]):
        raise UsageError(
            f"dataset {dataset.name!r}: there is no Parquet file at {dataset.path}",
            "give a snapshot's directory or a file",
        )
    rows = 0
    for part in parts:
        with fs.open(part, "rb") as handle:
            footer = pq.ParquetFile(handle)
            rows, schema = rows + footer.metadata.num_rows, footer.schema_arrow
    columns = infer_schema(pl.DataFrame(pl.from_arrow(schema.empty_table()))).to_dict()
    uri = fs.unstrip_protocol(path)
    entity = Dataset(
        name=clip(dataset.name, 500),
        digest=dataset.fingerprint[:36],
        source_type="local" if uri.startswith(("file:", "local:")) else uri.partition("://")[0],
        source=json.dumps({"uri": uri}),
        schema=json.dumps({"mlflow_colspec": columns}),
        profile=json.dumps({"num_rows": rows, "num_elements": rows * len(schema)}),
    )
    return DatasetInput(entity)


def log_adapter(client: MlflowClient, run_id: str, record: RunRecord) -> None:
    """The folder as PEFT wrote it, and beside its files the one that makes it a model of
    MLflow's."""
    client.log_artifacts(run_id, str(record.adapter_dir), ADAPTER)
    if record.base_model:
        with tempfile.TemporaryDirectory() as directory:
            client.log_artifact(
                run_id,
                str(write_mlmodel(Path(directory), record.base_model, run_id, record.lineage)),
                ADAPTER,
            )


def log_table(
    client: MlflowClient, run_id: str, name: str, rows: Sequence[Mapping[str, Cell]]
) -> None:
    """Rows of equal columns, for MLflow's table view."""
    client.log_table(
        run_id,
        {column: [row[column] for row in rows] for column in rows[0]},
        f"{TABLES}/{name}.json",
    )


def log_values(
    client: MlflowClient,
    run_id: str,
    params: Mapping[str, str],
    metrics: Mapping[str, float | None],
    series: Mapping[str, Sequence[tuple[int, float]]],
    tags: Mapping[str, str],
) -> None:
    """All of it as of now, in batches; metrics at step 0, without those that are None. `series` are
    (step, value) pairs."""
    from mlflow.entities import Metric, Param, RunTag

    now_ms = time.time_ns() // 1_000_000
    points = [
        Metric(key_of(key), value, now_ms, 0) for key, value in metrics.items() if value is not None
    ]
    points += [
        Metric(key_of(key), value, now_ms, step)
        for key, values in series.items()
        for step, value in values
    ]
    texts = [Param(key_of(key), clip(value, PARAM_LENGTH)) for key, value in params.items()]
    labels = [RunTag(key_of(key), clip(value, TAG_LENGTH)) for key, value in tags.items()]
    for batch in _batches(points, METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=batch)
    for batch in _batches(texts, TEXTS_PER_BATCH):
        client.log_batch(run_id, params=batch)
    for batch in _batches(labels, TEXTS_PER_BATCH):
        client.log_batch(run_id, tags=batch)


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def log_files(client: MlflowClient, run_id: str, paths: Sequence[Path]) -> None:
    """Figures to figures/, the rest beside the run's root."""
    for path in paths:
        client.log_artifact(
            run_id,
            str(path),
            "figures" if path.suffix.lower() in (".png", ".svg", ".pdf") else None,
        )


def key_of(name: str) -> str:
    """A name that MLflow accepts (mlflow/utils/validation.py). One that had to change ends in a
    hash, so that no two become the same."""
    allowed = (
        re.fullmatch(r"[\w. :/-]+", name, flags=re.ASCII) is not None and len(name) <= KEY_LENGTH
    )
    # MLflow treats names as paths, which must be relative and normal
    if allowed and posixpath.normpath(name) == name and not name.startswith((".", "/")):
        return name
    cleaned = re.sub(r"[^\w. -]", "_", name, flags=re.ASCII).lstrip(".")
    return f"{cleaned[: KEY_LENGTH - 9]}-{stable_hash(name)[:8]}"


def clip(text: str, length: int) -> str:
    """Text that fits and that every database takes: PostgreSQL refuses NUL. What was cut ends in
    three dots."""
    text = text.replace("\x00", "\ufffd")
    return text if len(text) <= length else text[: length - 3] + "..."


# -- the registry ----------------------------------------------------------------------------------


def register(client: MlflowClient, run_id: str, record: RunRecord) -> None:
    """Make the run's adapter a version of the registered model, once.

    `mlflow.register_model` wants a folder with an MLmodel file, which a plain adapter is not; the
    client does not. Once the run says which version it became, it is left alone: a version that
    somebody deleted does not come back.
    """
    from mlflow.exceptions import MlflowException

    run, name = client.get_run(run_id), str(record.registered_model)
    if VERSION_TAG in run.data.tags:
        return
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    versions = [
        version
        for version in client.search_model_versions(f"run_id = '{run_id}'")
        if version.name == name
    ]
    if versions:
        version = versions[0]
    else:
        source, description = (
            f"{run.info.artifact_uri}/{ADAPTER}",
            f"LoRA adapter of run {clip(record.run_name, KEY_LENGTH)}",
        )
        tags = {
            key_of(name): clip(value, VERSION_TAG_LENGTH) for name, value in record.lineage.items()
        }
        tags[FINGERPRINT_TAG] = record.run_fingerprint
        version = client.create_model_version(
            name, source, run_id, tags=tags, description=description, await_creation_for=0
        )
    client.set_tag(run_id, VERSION_TAG, f"{name}/{version.version}")
