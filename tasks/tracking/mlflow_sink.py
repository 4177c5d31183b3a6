"""One finished run of the line, written to MLflow: a parent run with the headline, a child run per stage and per benchmark model.

Guarantees: the same run fingerprint is written once per experiment, so a replay from the snapshots changes nothing; what a killed or
failed attempt left behind never looks finished, and is deleted (as MLflow deletes: it can be restored) once the run is whole; where that
run never comes again, the next one of the experiment ends what still looks open after `STALE_S`; paths that are not there are found before
anything is written; a tracking server or database that does not answer is an error within about a minute, never a hang; nothing is
printed, MLflow's own globals (active run, tracking URI) are not touched, and the environment is as before when a call returns. Does not
guarantee order between two processes that write the same fingerprint at the same moment: each takes the other's run for one that a killed
process left. Does not catch MLflow's errors: the caller logs them and the line goes on.
"""

from __future__ import annotations

import json
import posixpath
import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from pydantic import BeforeValidator, Field, model_validator

from kernels_eval.errors import UsageError
from kernels_eval.records import Record, stable_hash
from tasks.tracking.adapter_model import write_mlmodel
from tasks.tracking.connection import artifact_location, bounded_and_quiet, connect, find_experiment

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run
    from mlflow.tracking import MlflowClient

FINGERPRINT_TAG = "concur.run_fingerprint"  # on parent runs only: what makes a second call find the first
STAGE_TAG = "concur.stage"
VERSION_TAG = "concur.model_version"
KIND_TAG = "concur.kind"  # on runs that are written while a sweep works
PARENT_TAG = "mlflow.parentRunId"  # MLflow's own: the UI nests by it
ADAPTER = "adapter"
TABLES = "tables"
STALE_S = 3600.0  # a run is written in seconds, the largest adapter in minutes

# limits of mlflow 3.17 (mlflow/utils/validation.py), in characters and entries
KEY_LENGTH = 250
PARAM_LENGTH = 6000
TAG_LENGTH = 8000
VERSION_TAG_LENGTH = 5000
METRICS_PER_BATCH = 1000
# a server refuses requests above 1 MB; ten of the longest values stay below it even when JSON escapes every character to twelve bytes
TEXTS_PER_BATCH = 10


def flatten(config: Any) -> dict[str, str]:
    """Nested configuration (a mapping or a pydantic model) as flat params: keys joined by dots, strings as they are, the rest as JSON.

    Raises UsageError where two paths give the same key.
    """
    from pydantic_core import to_jsonable_python

    pairs = list(_walk(to_jsonable_python(config, fallback=str), ""))
    twice = [key for key, count in Counter(key for key, _ in pairs).items() if count > 1]
    if twice:
        raise UsageError(f"two configuration values flatten to the same param {twice[0]!r}", "rename one of the two keys")
    return dict(pairs)


def _walk(value: Any, prefix: str) -> Iterator[tuple[str, str]]:
    if isinstance(value, Mapping) and (value or not prefix):
        for key, inner in value.items():
            yield from _walk(inner, f"{prefix}.{key}" if prefix else str(key))
    else:
        yield prefix, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


Params = Annotated[dict[str, str], BeforeValidator(flatten)]
# None is "not reported" (k greater than the number of samples): no metric is written, rather than an invented number
Metrics = dict[str, float | None]
Cell = str | int | float | None
TableName = Annotated[str, Field(pattern=r"^[\w-]{1,100}$")]
Rows = Annotated[tuple[dict[str, Cell], ...], Field(min_length=1)]


class DatasetRef(NamedTuple):
    """A Parquet file, or a directory of Parquet parts (a snapshot), by path or fsspec URL."""

    name: str
    path: str
    fingerprint: str


class StageRecord(Record):
    """One child run: a stage, or one model of the benchmark."""

    name: str = Field(min_length=1)
    params: Params = {}
    metrics: Metrics = {}
    series: dict[str, tuple[tuple[int, float], ...]] = Field(default={}, description="metric -> (step, value) pairs")
    tags: dict[str, str] = {}
    artifacts: tuple[Path, ...] = ()
    datasets: tuple[DatasetRef, ...] = ()
    tables: dict[TableName, Rows] = Field(default={}, description="rows of equal columns, for MLflow's table view: tables/NAME.json")

    @model_validator(mode="after")
    def _one_meaning_per_metric(self) -> StageRecord:
        both = sorted(self.metrics.keys() & self.series.keys())
        if both:  # MLflow would show the series' last value and hide the other
            raise ValueError(f"{both[0]!r} is both a metric and a series of stage {self.name!r}")
        for name, rows in self.tables.items():
            if any(row.keys() != rows[0].keys() for row in rows):
                raise ValueError(f"the rows of table {name!r} of stage {self.name!r} differ in their columns")
        _require_distinct_names(self.artifacts)
        return self


class RunRecord(Record):
    """Everything that MLflow is told about one run of the line. Plain data: whoever knows the stages builds it."""

    run_fingerprint: str = Field(pattern=r"^[0-9A-Za-z_.-]{1,250}$", description="hash over the fingerprints of the run's snapshots")
    run_name: str = Field(min_length=1)
    tags: dict[str, str] = {}
    params: Params = {}
    metrics: Metrics = Field(default={}, description="the headline")
    stages: tuple[StageRecord, ...] = ()
    datasets: tuple[DatasetRef, ...] = ()
    artifacts: tuple[Path, ...] = Field(default=(), description="files; figures go to figures/, the rest beside the run's root")
    adapter_dir: Path | None = None
    base_model: str | None = Field(default=None, description="hub id or directory of what the adapter was trained on")
    registered_model: str | None = Field(default=None, pattern=r"^[^/:]+$", description="name in the model registry, for the adapter")
    lineage: dict[str, str] = Field(default={}, description="what the adapter comes from: tags of the registered version")

    @model_validator(mode="after")
    def _consistent(self) -> RunRecord:
        if self.registered_model and not (self.adapter_dir and self.base_model):
            raise ValueError("registered_model needs an adapter_dir and its base_model")
        _require_distinct_names(self.artifacts)
        return self


def _require_distinct_names(paths: Sequence[Path]) -> None:
    twice = [name for name, count in Counter(path.name for path in paths).items() if count > 1]
    if twice:
        raise ValueError(f"two artifacts are named {twice[0]!r}: the second would replace the first")


def log_run(record: RunRecord, *, tracking_uri: str, artifact_root: str | None, experiment: str) -> str:
    """Write one run and return its parent run id; where a finished run has the same fingerprint, return that one and write nothing.

    `tracking_uri` is `sqlite:///...`, another database or an http(s) server. `artifact_root` (a directory or URL) is where artifacts go
    when the experiment does not exist yet; None leaves it to a server and means `mlartifacts` beside a SQLite file. An unfinished run of
    the same fingerprint is marked KILLED, a new one is written, and the old one deleted; one that fails here is marked FAILED. Raises
    UsageError for paths, URIs or experiments that cannot be used, EvalError for a database that does not answer, and what MLflow
    raises.
    """
    with bounded_and_quiet():
        location = artifact_location(tracking_uri, artifact_root)
        client = connect(tracking_uri)
        experiment_id = find_experiment(client, experiment, location)
        _close_stale(client, experiment_id)
        attempts = _parents(client, experiment_id, record.run_fingerprint)
        finished = [run.info.run_id for run in attempts if run.info.status == "FINISHED"]
        if finished:
            run_id = finished[0]
        else:
            inputs = _checked_inputs(record)
            for run in attempts:
                _close(client, run, "KILLED")
            run_id = _write(client, experiment_id, record, inputs)
        # after the parent is finished, and again if that was never reached: one version per run, whenever the process was killed
        for run in attempts:
            if run.info.status != "FINISHED":
                _delete(client, run)
        if record.registered_model:
            _register(client, run_id, record)
        return run_id


def registered_version(run_id: str, *, tracking_uri: str) -> str | None:
    """`NAME/VERSION` of the registered model that a run's adapter became; None where it has none. Raises what MLflow raises."""
    with bounded_and_quiet():
        return connect(tracking_uri).get_run(run_id).data.tags.get(VERSION_TAG)


# -- finding and closing -------------------------------------------------------------------------------------------------------------


def _parents(client: MlflowClient, experiment_id: str, fingerprint: str) -> list[Run]:
    """Parent runs of a fingerprint that nobody deleted, oldest first."""
    return list(client.search_runs([experiment_id], f"tags.`{FINGERPRINT_TAG}` = '{fingerprint}'", order_by=["attributes.start_time ASC"]))


def _close(client: MlflowClient, parent: Run, status: str) -> None:
    """End a parent and its children with a status, except those that have ended already. The parent last: it is what is looked for."""
    for run in [*_children(client, parent), parent]:
        if run.info.status in ("RUNNING", "SCHEDULED"):
            client.set_terminated(run.info.run_id, status)


def _delete(client: MlflowClient, parent: Run) -> None:
    """As `_close`: the parent last, so that a call that is killed here is made up for by the next."""
    for run in [*_children(client, parent), parent]:
        client.delete_run(run.info.run_id)


def _children(client: MlflowClient, parent: Run) -> list[Run]:
    return list(client.search_runs([parent.info.experiment_id], f"tags.`{PARENT_TAG}` = '{parent.info.run_id}'"))


def _close_stale(client: MlflowClient, experiment_id: str) -> None:
    """End what a process left that died while it wrote, or lost its server, and whose fingerprint may never come again."""
    before_ms = int((time.time() - STALE_S) * 1000)
    running = client.search_runs([experiment_id], f"attributes.status = 'RUNNING' AND attributes.start_time < {before_ms}")
    for run in running:
        if FINGERPRINT_TAG in run.data.tags and KIND_TAG not in run.data.tags:  # that of a sweep is open for as long as the sweep works
            _close(client, run, "KILLED")


# -- writing -------------------------------------------------------------------------------------------------------------------------


def _checked_inputs(record: RunRecord) -> list[DatasetInput]:
    """The dataset inputs, with every path of the record looked at. Raises UsageError for the first one that is not there."""
    files = [*record.artifacts, *(path for stage in record.stages for path in stage.artifacts)]
    for dataset in (dataset for stage in record.stages for dataset in stage.datasets):
        _dataset_input(dataset)  # what is not there is found now
    for path in files:
        if not path.is_file():
            raise UsageError(f"artifact {path} is not a file", "run the stage that writes it again")
    if record.adapter_dir and not (record.adapter_dir.is_dir() and any(record.adapter_dir.iterdir())):
        raise UsageError(f"adapter directory {record.adapter_dir} is missing or empty", "run training again")
    return [_dataset_input(dataset) for dataset in record.datasets]


def _log_datasets(client: MlflowClient, run_id: str, inputs: list[DatasetInput]) -> None:
    if inputs:
        client.log_inputs(run_id, inputs)


def _dataset_input(dataset: DatasetRef) -> DatasetInput:
    """Name, fingerprint, source, columns and row count, from the Parquet footers alone: a snapshot may be larger than memory."""
    import fsspec
    import polars as pl
    import pyarrow.parquet as pq
    from mlflow.data.polars_dataset import infer_schema
    from mlflow.entities import Dataset, DatasetInput

    fs, path = fsspec.core.url_to_fs(str(dataset.path))
    parts = sorted(fs.glob(f"{path}/*.parquet")) if fs.isdir(path) else [path]
    if not parts or not fs.exists(parts[0]):
        raise UsageError(f"dataset {dataset.name!r}: there is no Parquet file at {dataset.path}", "give a snapshot's directory or a file")
    rows = 0
    for part in parts:
        with fs.open(part, "rb") as handle:
            footer = pq.ParquetFile(handle)
            rows, schema = rows + footer.metadata.num_rows, footer.schema_arrow
    columns = infer_schema(pl.DataFrame(pl.from_arrow(schema.empty_table()))).to_dict()
    uri = fs.unstrip_protocol(path)
    entity = Dataset(
        name=_clip(dataset.name, 500),
        digest=dataset.fingerprint[:36],
        source_type="local" if uri.startswith(("file:", "local:")) else uri.partition("://")[0],
        source=json.dumps({"uri": uri}),
        schema=json.dumps({"mlflow_colspec": columns}),
        profile=json.dumps({"num_rows": rows, "num_elements": rows * len(schema)}),
    )
    return DatasetInput(entity)


def _write(client: MlflowClient, experiment_id: str, record: RunRecord, inputs: list[DatasetInput]) -> str:
    own = {FINGERPRINT_TAG: record.run_fingerprint, "mlflow.source.name": "concur"}
    parent = client.create_run(experiment_id, tags=own, run_name=_clip(record.run_name, KEY_LENGTH))
    run_id = parent.info.run_id
    try:
        _log_values(client, run_id, record.params, record.metrics, {}, {key: value for key, value in record.tags.items() if key not in own})
        _log_datasets(client, run_id, inputs)
        for stage in record.stages:
            _write_stage(client, experiment_id, run_id, stage)
        _log_files(client, run_id, record.artifacts)
        if record.adapter_dir:
            _log_adapter(client, run_id, record)
        client.set_terminated(run_id, "FINISHED")
    except Exception:
        # an interrupt or a kill does not come here: the run stays RUNNING and the next call closes it
        _close(client, parent, "FAILED")
        raise
    return run_id


def _log_adapter(client: MlflowClient, run_id: str, record: RunRecord) -> None:
    """The folder as PEFT wrote it, and beside its files the one that makes it a model of MLflow's."""
    client.log_artifacts(run_id, str(record.adapter_dir), ADAPTER)
    if record.base_model:
        with tempfile.TemporaryDirectory() as directory:
            client.log_artifact(run_id, str(write_mlmodel(Path(directory), record.base_model, run_id, record.lineage)), ADAPTER)


def _write_stage(client: MlflowClient, experiment_id: str, parent_id: str, stage: StageRecord) -> None:
    own = {PARENT_TAG: parent_id, STAGE_TAG: _clip(stage.name, TAG_LENGTH), "mlflow.source.name": "concur"}
    run_id = client.create_run(experiment_id, tags=own, run_name=_clip(stage.name, KEY_LENGTH)).info.run_id
    tags = {key: value for key, value in stage.tags.items() if key not in own and key != FINGERPRINT_TAG}
    _log_values(client, run_id, stage.params, stage.metrics, stage.series, tags)
    _log_datasets(client, run_id, [_dataset_input(dataset) for dataset in stage.datasets])
    _log_files(client, run_id, stage.artifacts)
    for name, rows in stage.tables.items():
        client.log_table(run_id, {column: [row[column] for row in rows] for column in rows[0]}, f"{TABLES}/{name}.json")
    client.set_terminated(run_id, "FINISHED")


def _log_values(
    client: MlflowClient,
    run_id: str,
    params: Mapping[str, str],
    metrics: Mapping[str, float | None],
    series: Mapping[str, Sequence[tuple[int, float]]],
    tags: Mapping[str, str],
) -> None:
    from mlflow.entities import Metric, Param, RunTag

    now_ms = time.time_ns() // 1_000_000
    points = [Metric(_key(key), value, now_ms, 0) for key, value in metrics.items() if value is not None]
    points += [Metric(_key(key), value, now_ms, step) for key, values in series.items() for step, value in values]
    texts = [Param(_key(key), _clip(value, PARAM_LENGTH)) for key, value in params.items()]
    labels = [RunTag(_key(key), _clip(value, TAG_LENGTH)) for key, value in tags.items()]
    for batch in _batches(points, METRICS_PER_BATCH):
        client.log_batch(run_id, metrics=batch)
    for batch in _batches(texts, TEXTS_PER_BATCH):
        client.log_batch(run_id, params=batch)
    for batch in _batches(labels, TEXTS_PER_BATCH):
        client.log_batch(run_id, tags=batch)


def _batches(items: list[Any], size: int) -> Iterator[list[Any]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]


def _log_files(client: MlflowClient, run_id: str, paths: Sequence[Path]) -> None:
    for path in paths:
        client.log_artifact(run_id, str(path), "figures" if path.suffix.lower() in (".png", ".svg", ".pdf") else None)


def _key(name: str) -> str:
    """A name that MLflow accepts (mlflow/utils/validation.py). One that had to change ends in a hash, so that no two become the same."""
    allowed = re.fullmatch(r"[\w. :/-]+", name, flags=re.ASCII) is not None and len(name) <= KEY_LENGTH
    # MLflow treats names as paths, which must be relative and normal
    if allowed and posixpath.normpath(name) == name and not name.startswith((".", "/")):
        return name
    cleaned = re.sub(r"[^\w. -]", "_", name, flags=re.ASCII).lstrip(".")
    return f"{cleaned[: KEY_LENGTH - 9]}-{stable_hash(name)[:8]}"


def _clip(text: str, length: int) -> str:
    """Text that fits and that every database takes: PostgreSQL refuses NUL. What was cut ends in three dots."""
    text = text.replace("\x00", "\ufffd")
    return text if len(text) <= length else text[: length - 3] + "..."


# -- the registry --------------------------------------------------------------------------------------------------------------------


def _register(client: MlflowClient, run_id: str, record: RunRecord) -> None:
    """Make the run's adapter a version of the registered model, once.

    `mlflow.register_model` wants a folder with an MLmodel file, which a plain adapter is not; the client does not. Once the run says which
    version it became, it is left alone: a version that somebody deleted does not come back.
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
    versions = [version for version in client.search_model_versions(f"run_id = '{run_id}'") if version.name == name]
    if versions:
        version = versions[0]
    else:
        source, description = f"{run.info.artifact_uri}/{ADAPTER}", f"LoRA adapter of run {_clip(record.run_name, KEY_LENGTH)}"
        tags = {_key(name): _clip(value, VERSION_TAG_LENGTH) for name, value in record.lineage.items()}
        tags[FINGERPRINT_TAG] = record.run_fingerprint
        version = client.create_model_version(name, source, run_id, tags=tags, description=description, await_creation_for=0)
    client.set_tag(run_id, VERSION_TAG, f"{name}/{version.version}")
