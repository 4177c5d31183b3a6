"""An ablation in MLflow whose server dies on the way: what was to be written is there once, and the
ablation was not ended by it."""

from contextlib import ExitStack

import pytest

from flows.ablation.track import AblationTracker
from flows.config import PipelineConfig
from tasks.benchmark.comparison.records import Branch
from tasks.tracking import connection, writing
from tasks.tracking.config import TrackingConfig
from tasks.tracking.connection import Destination
from tasks.tracking.mlflow_sink import AblationSink
from tasks.tracking.records import RunRecord
from tests.support.servers import free_port, mlflow_server


def failed(name):
    return Branch(name=name, strategy=name, seed=0, state="failed", error="out of memory", rows=3)


@pytest.fixture
def servers():
    with ExitStack() as stack:
        yield stack


@pytest.mark.slow
def test_an_ablation_outlives_its_mlflow(tmp_path, servers):
    from mlflow.tracking import MlflowClient

    home, port = tmp_path / "mlflow", free_port()
    pipeline = PipelineConfig(
        root=str(tmp_path), tracking=TrackingConfig(uri=f"http://127.0.0.1:{port}")
    )
    told = []

    def back(line):
        told.append(line)
        servers.enter_context(mlflow_server(home, port=port))

    tracker = AblationTracker(pipeline, "f" * 64, back)
    with mlflow_server(home, port=port):
        tracker.open([])
        tracker.branch(pipeline, failed("concur"))
    tracker.branch(pipeline, failed("random"))
    assert len(told) == 1 and "retrying" in told[0] and not tracker.failures
    tracker.branch(pipeline, failed("random"))
    tracker.close([failed("concur"), failed("random")], [], [])
    client = MlflowClient(tracker._pipeline.tracking_uri)
    runs = client.search_runs(
        [client.get_experiment_by_name(pipeline.tracking.experiment).experiment_id]
    )
    parent = next(run for run in runs if run.info.run_id == tracker.run_id)
    assert parent.info.status == "FINISHED" and parent.data.metrics["branches_failed"] == 2.0
    assert sorted(run.data.tags["concur.branch"] for run in runs if run is not parent) == [
        "concur",
        "random",
    ]
    assert set(tracker.runs) == {"concur", "random"}


def test_a_parent_that_was_left_half_written_gets_the_rest(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    uri = f"sqlite:///{tmp_path}/mlflow.db"
    params = {f"p{n}": str(n) for n in range(150)}
    record = RunRecord(
        run_fingerprint="f", name="ablation", tags={"language": "cpp"}, params=params
    )
    first, again = (AblationSink(Destination(uri, str(tmp_path), "e")) for _ in range(2))

    def dies(*_):
        raise ConnectionResetError("on its way")

    with monkeypatch.context() as broken:
        broken.setattr(writing.Runs, "values", dies)
        with pytest.raises(ConnectionResetError):
            first.open(record)
    run_id = again.open(record)
    data = MlflowClient(uri).get_run(run_id).data
    assert data.params == params and data.tags["language"] == "cpp"
    changed = record.model_copy(update={"params": {**params, "p0": "another"}})
    assert again.open(changed) == run_id, "what is there is kept: MLflow refuses another value"


def test_a_server_that_stays_away_costs_an_ablation_one_wait(tmp_path, monkeypatch):
    monkeypatch.setattr(connection, "BACK_S", 0.0)
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    pipeline = PipelineConfig(
        root=str(tmp_path), tracking=TrackingConfig(uri=f"http://127.0.0.1:{free_port()}")
    )
    said = []
    tracker = AblationTracker(pipeline, "f" * 64, said.append)
    tracker.open([])
    tracker.branch(pipeline, failed("concur"))
    tracker.close([failed("concur")], [], [])
    assert ["retrying" in line for line in said] == [True, False]
    assert len(tracker.failures) == 1 and "the same command writes it" in tracker.failures[0]


def test_a_typed_run_name_is_the_parent_s(tmp_path, monkeypatch):
    opened = []
    monkeypatch.setattr(AblationSink, "open", lambda self, record: opened.append(record.name))
    monkeypatch.setattr("prefect.runtime.flow_run.parameters", {}, raising=False)
    pipeline = PipelineConfig(root=str(tmp_path), name="mine")
    for name in ("tonight", "jasper-cuttlefish"):
        monkeypatch.setattr("prefect.runtime.flow_run.name", name, raising=False)
        AblationTracker(pipeline, "f" * 64, opened.append).open([])
    assert opened == ["tonight", "mine ablation: "]
