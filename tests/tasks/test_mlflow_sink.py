"""The sink against a real MLflow on SQLite, read back with MLflow's own client."""

import json
import math
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError

from kernels_eval.errors import EvalError, UsageError
from tasks.tables import VERDICTS
from tasks.tracking import connection, mlflow_sink, writing
from tasks.tracking.config import page_of
from tasks.tracking.connection import Destination
from tasks.tracking.mlflow_sink import log_run, registered_version
from tasks.tracking.records import DatasetRef, RunRecord, StageRecord, flatten
from tasks.tracking.writing import FINGERPRINT_TAG, PARENT_TAG, STAGE_TAG, VERSION_TAG
from tests.support.cases import cases
from tests.support.waiting import within

CASES = cases("mlflow_sink")

FINGERPRINT = CASES["record"]["run_fingerprint"]


class Home:
    """One database, one artifact root and the files a run brings."""

    def __init__(self, path):
        self.path = path
        self.uri = f"sqlite:///{path}/mlflow.db"
        self.artifacts = path / "artifact root"

        self.destination = Destination(self.uri, str(self.artifacts), "refresh")

    def log(self, record):
        return log_run(record, self.destination)

    @property
    def client(self):
        from mlflow.tracking import MlflowClient

        return MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)

    def runs(self, query=""):
        return list(
            self.client.search_runs(
                [self.client.get_experiment_by_name("refresh").experiment_id], query
            )
        )

    def parents(self):
        """run id -> status of every parent run."""
        return {
            run.info.run_id: run.info.status
            for run in self.runs()
            if FINGERPRINT_TAG in run.data.tags
        }

    def children(self, parent):
        return {run.info.run_name: run for run in self.runs(f"tags.`{PARENT_TAG}` = '{parent}'")}

    def data(self, piece):
        """A piece of CASES, with the paths of this test."""
        return json.loads(json.dumps(piece).replace("{home}", str(self.path)))

    def record(self, fingerprint=FINGERPRINT, **changes):
        snapshot = self.path / "verification"
        snapshot.mkdir(exist_ok=True)
        for name, content in CASES["files"].items():
            (self.path / name).parent.mkdir(exist_ok=True)
            (self.path / name).write_text(content)
        for part in range(2):
            rows = [{"candidate_id": f"{part}-{index}", "status": "correct"} for index in range(3)]
            table = pa.Table.from_pylist(rows, schema=VERDICTS)
            pq.write_table(table, snapshot / f"part-{part}.parquet")
        values = self.data(CASES["record"]) | {"run_fingerprint": fingerprint}
        return RunRecord(**(values | changes))


@pytest.fixture(scope="module")
def database(tmp_path_factory):
    """An MLflow database with its tables and nothing else: making one takes seconds, copying one
    does not."""
    from mlflow.tracking import MlflowClient

    path = tmp_path_factory.mktemp("template") / "mlflow.db"
    MlflowClient(tracking_uri=f"sqlite:///{path}").search_experiments()
    return path.read_bytes()


@pytest.fixture
def home(tmp_path, database):
    (tmp_path / "mlflow.db").write_bytes(database)
    return Home(tmp_path)


def test_everything_of_a_run_reads_back(home):
    run_id = home.log(home.record())
    run = home.client.get_run(run_id)
    assert run.info.status == "FINISHED" and run.info.run_name == "local refresh"
    assert run.data.tags[FINGERPRINT_TAG] == FINGERPRINT
    children = home.children(run_id)
    for name, found in {"run": run, **children}.items():
        expected = CASES["read_back"][name]
        assert (found.data.params, found.data.metrics) == (expected["params"], expected["metrics"])
        assert expected["tags"].items() <= found.data.tags.items()
    assert {"run", *children} == set(CASES["read_back"])
    assert {child.info.status for child in children.values()} == {"FINISHED"}
    assert children["training"].data.tags[STAGE_TAG] == "training"
    history = home.client.get_metric_history(children["training"].info.run_id, "loss")
    assert [(point.step, point.value) for point in history] == [(1, 2.5), (2, 1.5), (3, 0.75)]


def test_runs_have_the_times_of_their_work_and_links_open_on_scores(home):
    fields = {"name": "line", "run_fingerprint": "f1", "tags": {writing.NOTE_TAG: "3 of 4"}}
    stages = [StageRecord(name=str(ms), times=(ms, ms + 500)) for ms in (5000, 1000)]
    run_id = home.log(RunRecord(**fields, stages=(*stages, StageRecord(name="unknown"))))
    run = home.client.get_run(run_id)
    assert (run.info.start_time, run.info.end_time) == (1000, 5500)
    assert run.data.tags["mlflow.note.content"] == "3 of 4"
    (child,) = home.runs("attributes.run_name = '1000'")
    assert (child.info.start_time, child.info.end_time) == (1000, 1500)
    assert home.log(RunRecord(**fields)) == run_id  # long ago, and not taken for left behind
    shown = home.client.get_experiment_by_name("refresh").tags
    view = json.loads(shown["mlflow.sharedViewState.scores"])
    for metric in ("tuned.exec_at_1", "exec_at_1"):
        assert f"metrics.`{metric}`" in view["selectedColumns"]
        assert metric in [chart["dataAccessKey"] for chart in view["compareRunCharts"]]
    titles = {chart["dataAccessKey"]: chart["metricKey"] for chart in view["compareRunCharts"]}
    assert titles["correct"] == "Correct, count"
    assert not [name for name, title in titles.items() if name in title or "_at_" in title]
    page = page_of("http://host/", "1", "runs", "scores")
    query = "workflowType=machine_learning&viewStateShareKey=scores&compareRunsMode=CHART"
    assert page == f"http://host/#/experiments/1/runs?{query}"
    query = json.loads(shown["mlflow.sharedViewState.scores"])["searchFilter"]
    assert home.runs(query) == []
    home.log(RunRecord(**fields | {"run_fingerprint": "f2", "tags": {"profile": "local"}}))
    assert [run.info.run_name for run in home.runs(query)] == ["line"], "without its stages"
    assert "One bar a run, the newest first" in shown["mlflow.note.content"]
    assert "`concur ablate`\nprints the page" in shown["mlflow.note.content"]


def test_artifacts_lie_under_the_given_root(home):
    run_id = home.log(home.record())
    files = {
        str(path.relative_to(home.artifacts))
        for path in home.artifacts.rglob("*")
        if path.is_file()
    }
    loss = home.children(run_id)["training"].info.run_id
    expected = {f"{run_id}/artifacts/{name}" for name in CASES["artifacts"]}
    assert files == expected | {f"{loss}/artifacts/figures/loss.svg"}


def test_a_table_reads_back_and_a_replay_does_not_lengthen_it(home, monkeypatch):
    stages = [{"name": "verification", "tables": {"phases": CASES["phases"]}}]
    record = home.record(stages=stages)
    for _ in range(2):
        home.log(record)
    monkeypatch.setenv(
        "MLFLOW_TRACKING_URI", home.uri
    )  # what load_table reads, whatever the client was given
    found = home.client.load_table(
        home.client.get_experiment_by_name("refresh").experiment_id,
        "tables/phases.json",
        extra_columns=["run_id"],
    )
    assert list(found.columns) == ["phase", "candidates", "median_s", "run_id"]
    assert found["phase"].to_list() == ["load", "timing"] and found["candidates"].to_list() == [
        3,
        0,
    ]
    assert found["median_s"][0] == 1.5 and math.isnan(found["median_s"][1])


def test_dataset_inputs_are_of_the_run_or_of_the_stage_that_read_them(home):
    import mlflow.data

    run_id = home.log(home.record())
    children = home.children(run_id)
    runs = (run_id, children["training"].info.run_id, children["verification"].info.run_id)
    entries = [home.client.get_run(each).inputs.dataset_inputs for each in runs]
    (entry,), (read,), none = entries
    assert (entry.dataset.name, entry.dataset.digest) == ("verification", FINGERPRINT)
    assert (read.dataset.name, read.dataset.digest) == ("curated", "c0ffee") and none == []
    assert json.loads(entry.dataset.profile)["num_rows"] == 6, "over all parts"
    columns = {
        column["name"]: column["type"]
        for column in json.loads(entry.dataset.schema)["mlflow_colspec"]
    }
    assert list(columns) == VERDICTS.names
    assert (columns["status"], columns["timing"]) == ("string", "object")
    source = mlflow.data.get_source(entry)
    assert sorted(Path(source.load()).iterdir()) == sorted((home.path / "verification").iterdir())

    path = str(home.path / "verification" / "part-0.parquet")
    datasets = [DatasetRef("one-file", path, FINGERPRINT)]
    one_file = home.log(home.record("one-file", datasets=datasets))
    (entry,) = home.client.get_run(one_file).inputs.dataset_inputs
    assert json.loads(entry.dataset.profile)["num_rows"] == 3


def test_the_registered_version_is_the_adapter(home, monkeypatch):
    import mlflow.artifacts

    run_id = home.log(home.record())
    (version,) = home.client.search_model_versions("name = 'concur-adapter'")
    assert (
        version.run_id == run_id
        and version.status == "READY"
        and version.tags[FINGERPRINT_TAG] == FINGERPRINT
    )
    assert home.client.get_run(run_id).data.tags[VERSION_TAG] == "concur-adapter/1"
    assert CASES["record"]["adapter"]["lineage"].items() <= version.tags.items()
    assert registered_version(run_id, home.destination) == "concur-adapter/1"
    weights = mlflow.artifacts.download_artifacts(
        f"{version.source}/adapter_model.safetensors", tracking_uri=home.uri
    )
    assert Path(weights).read_bytes() == b"weights"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", home.uri)
    folder = mlflow.artifacts.download_artifacts("models:/concur-adapter/1")
    assert (Path(folder) / "adapter_model.safetensors").read_bytes() == b"weights"


def test_a_second_call_writes_nothing(home):
    record = home.record()
    first = home.log(record)
    before = [(run.info.run_id, run.info.end_time, run.data.to_dictionary()) for run in home.runs()]
    (home.path / "report.html").unlink()  # a replay does not even need the files
    assert home.log(record) == first
    assert [
        (run.info.run_id, run.info.end_time, run.data.to_dictionary()) for run in home.runs()
    ] == before
    assert len(home.client.search_model_versions("name = 'concur-adapter'")) == 1


def test_another_fingerprint_is_another_run_and_a_deleted_run_is_written_again(home):
    first = home.log(home.record())
    other = home.log(home.record("another"))
    assert home.parents() == {first: "FINISHED", other: "FINISHED"}
    assert len(home.client.search_model_versions("name = 'concur-adapter'")) == 2
    home.client.delete_run(first)
    second = home.log(home.record())
    assert home.parents() == {second: "FINISHED", other: "FINISHED"}


def test_a_deleted_version_does_not_come_back(home):
    run_id = home.log(home.record())
    home.client.delete_model_version("concur-adapter", "1")
    assert home.log(home.record()) == run_id
    assert home.client.search_model_versions("name = 'concur-adapter'") == []


KILLED_WRITER = """
    import os, signal, sys
    from pathlib import Path
    from mlflow.tracking import MlflowClient
    from tasks.tracking.connection import Destination
    from tasks.tracking.mlflow_sink import log_run
    from tasks.tracking.records import RunRecord

    def die(*_args, **_kwargs):
        os.kill(os.getpid(), signal.SIGKILL)

    setattr(MlflowClient, sys.argv[1], die)
    record = RunRecord.model_validate_json(Path(sys.argv[2]).read_text())
    log_run(record, Destination(sys.argv[3], sys.argv[4], "refresh"))
"""


def _killed_at(call, home, record):
    """A real process that is killed (SIGKILL) when it comes to the first such call of MLflow's
    client."""
    written = home.path / "record.json"
    written.write_text(record.model_dump_json())
    command = [
        sys.executable,
        "-c",
        textwrap.dedent(KILLED_WRITER),
        call,
        str(written),
        home.uri,
        str(home.artifacts),
    ]
    env = os.environ | {"PYTHONPATH": str(Path(mlflow_sink.__file__).parents[2])}
    assert subprocess.run(command, env=env, cwd=home.path).returncode == -signal.SIGKILL


@pytest.mark.slow
def test_what_a_killed_process_left_is_written_anew_and_deleted(home):
    record = home.record()
    _killed_at(
        "log_artifact", home, record
    )  # the first file is a child's: parent and child are both open
    assert list(home.parents().values()) == ["RUNNING"]
    (left,) = home.parents()
    new = home.log(record)
    assert home.parents() == {new: "FINISHED"} and not home.children(left)
    gone = home.client.get_run(left).info
    assert gone.lifecycle_stage == "deleted"  # not lost: `mlflow` can restore it
    assert home.log(record) == new


@pytest.mark.parametrize("call", ["create_model_version", "set_tag"])
@pytest.mark.slow
def test_a_process_killed_before_or_after_registration_registers_once(home, call):
    record = home.record()
    _killed_at(call, home, record)
    (left,) = home.parents()
    found = home.client.search_model_versions("name = 'concur-adapter'")
    assert len(found) == (call == "set_tag")
    assert home.log(record) == left  # the run was whole
    (version,) = home.client.search_model_versions("name = 'concur-adapter'")
    assert version.run_id == left
    assert home.client.get_run(left).data.tags[VERSION_TAG] == "concur-adapter/1"


def test_a_failing_write_is_marked_failed_and_raised(home):
    home.log(home.record("first"))
    home.artifacts.rename(home.path / "elsewhere")
    home.artifacts.write_text("a file where the artifact root was")
    with pytest.raises(OSError):
        home.log(home.record())
    (failed,) = (run_id for run_id, status in home.parents().items() if status == "FAILED")
    assert {child.info.status for child in home.children(failed).values()} == {"FINISHED", "FAILED"}
    home.artifacts.unlink()
    new = home.log(home.record())
    assert home.parents()[new] == "FINISHED" and failed not in home.parents()


@pytest.mark.parametrize("broken", CASES["missing"])
def test_a_missing_path_is_named_before_anything_is_written(home, broken):
    with pytest.raises(UsageError, match="not there"):
        home.log(home.record(**home.data(CASES["missing"][broken])))
    assert home.runs() == []


def test_hostile_and_huge_values_fit(home):
    params = {f"key {index}": "x" for index in range(230)}
    params |= {
        "long": "é" * 7000,
        "pass@1 > 2": "a",
        "pass@1 < 2": "b",
        "../up": "c",
        "n" * 300: "d",
    }
    tags = {
        "detail": "<script>\x00" + "y" * 9000,
        FINGERPRINT_TAG: "forged",
        "mlflow.note.content": "what a person wrote",
    }
    series = {"loss": [(step, 1 / step) for step in range(1, 2402)], "grad_norm": [(1, math.nan)]}
    stage = StageRecord(
        name="training " * 100,
        series=series,
        tags={FINGERPRINT_TAG: FINGERPRINT, PARENT_TAG: "forged"},
    )
    run_id = home.log(home.record(params=params, tags=tags, stages=(stage,)))
    data = home.client.get_run(run_id).data
    assert len(data.params) == len(params)
    assert data.params["long"] == "é" * 5997 + "..."
    assert sorted(data.params[key] for key in data.params if key.startswith("pass_1")) == ["a", "b"]
    assert data.tags["detail"].startswith("<script>\ufffdyyy") and len(data.tags["detail"]) == 8000
    assert (
        data.tags[FINGERPRINT_TAG] == FINGERPRINT
        and data.tags["mlflow.note.content"] == "what a person wrote"
    )
    (child,) = home.children(run_id).values()
    history = home.client.get_metric_history(child.info.run_id, "loss")
    assert sorted(point.step for point in history) == list(range(1, 2402))
    assert math.isnan(child.data.metrics["grad_norm"])
    assert FINGERPRINT_TAG not in child.data.tags


@given(st.lists(st.text(max_size=400), min_size=1, unique=True))
def test_every_name_becomes_a_legal_and_distinct_key(names):
    from mlflow.utils.validation import _validate_param, _validate_tag

    keys = [writing.key_of(name) for name in names]
    assert len(set(keys)) == len(names)
    for key in keys:
        assert _validate_param(key, "value").key == key and _validate_tag(key, "value").key == key


def test_a_batch_of_the_longest_values_stays_under_the_servers_limit():
    from mlflow.utils import validation

    assert (writing.PARAM_LENGTH, writing.TAG_LENGTH) == (
        validation.MAX_PARAM_VAL_LENGTH,
        validation.MAX_TAG_VAL_LENGTH,
    )
    longest = {"key": "k" * writing.KEY_LENGTH, "value": "\U0001f600" * writing.TAG_LENGTH}
    worst = json.dumps([longest] * writing.TEXTS_PER_BATCH)
    assert len(worst) < validation.MAX_BATCH_LOG_REQUEST_SIZE


def test_flatten():
    class Inner(BaseModel):
        path: Path = Path("a/b")
        empty: dict[str, int] = {}

    given = {"a": {"b": 1.5, "c": [1, {"d": None}]}, "e": Inner(), "f": True, "g": "text"}
    assert flatten(given) == CASES["flat"]
    assert flatten({}) == {}
    with pytest.raises(UsageError, match=r"a\.b"):
        flatten({"a.b": 1, "a": {"b": 2}})


@pytest.mark.parametrize("fault", CASES["illegal"])
def test_illegal_records_cannot_be_built(home, fault):
    with pytest.raises(ValidationError):
        home.record(**CASES["illegal"][fault])


def test_the_password_of_a_database_server_stays_secret(home):
    nobody = Destination("postgresql://me:secret@127.0.0.1:1/mlflow", str(home.path), "refresh")
    with pytest.raises(EvalError, match="cannot open the tracking database") as caught:
        log_run(home.record(), nobody)
    assert "secret" not in str(caught.value)


def test_a_file_that_is_no_database_fails_at_once(home):
    (home.path / "mlflow.db").write_text("this is not SQLite " * 100)
    with within(90), pytest.raises(EvalError, match="cannot open the tracking database"):
        home.log(home.record())  # MLflow's own retries: 100 s


def test_a_deleted_experiment_is_named(home):
    home.log(home.record())
    home.client.delete_experiment(home.client.get_experiment_by_name("refresh").experiment_id)
    with pytest.raises(UsageError, match="restore"):
        home.log(home.record())


@pytest.fixture
def silent_server():
    """Takes connections and never answers."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(16)
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"


def test_a_server_that_never_answers_is_an_error_soon(home, silent_server, monkeypatch):
    from mlflow.exceptions import MlflowException

    monkeypatch.setattr(connection, "HTTP_TIMEOUT_S", 1)
    before = dict(os.environ)
    with within(60), pytest.raises(MlflowException):  # MLflow's own defaults: over ten minutes
        log_run(home.record(), Destination(silent_server, "", "refresh"))
    assert dict(os.environ) == before


@pytest.fixture
def once_away(monkeypatch):
    """A tracking server that drops its first two connections, and then knows no experiment."""
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")

    class Handler(BaseHTTPRequestHandler):
        dropped = 0

        def do_GET(self):
            if Handler.dropped < 2:
                Handler.dropped += 1
                self.close_connection = True
                return
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"{}")

        do_POST = do_GET

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


def test_a_server_that_dies_is_waited_for_and_written_to_again(once_away):
    told = []

    def write():
        with connection.bounded_and_quiet():
            return len(connection.connect(once_away).search_experiments())

    assert connection.try_mlflow(once_away, write, log=told.append, failed=pytest.fail) == 0
    assert len(told) == 1 and once_away in told[0]


def test_a_server_that_stays_away_or_refuses_is_not_written_to_again(once_away, monkeypatch):
    from mlflow.exceptions import RestException

    monkeypatch.setattr(connection, "BACK_S", 0.0)
    refusal = RestException({"error_code": "INTERNAL_ERROR", "message": "a bug"})
    for uri, error in (
        (once_away, refusal),
        ("http://127.0.0.1:1", ConnectionRefusedError()),
        ("sqlite:///a.db", ConnectionRefusedError()),
    ):
        calls, failures = [], []

        def failing(error=error, calls=calls):
            calls.append(error)
            raise error

        connection.try_mlflow(uri, failing, log=lambda line: None, failed=failures.append)
        assert len(calls) == len(failures) == 1 and type(error).__name__ in failures[0]


def test_what_the_user_set_in_the_environment_wins(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "77")
    monkeypatch.delenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", raising=False)
    with connection.bounded_and_quiet():
        assert os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
        assert os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] == str(connection.HTTP_RETRIES)
    assert (
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] == "77"
        and "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    )


@pytest.mark.slow
def test_a_first_write_in_a_fresh_process_prints_nothing(tmp_path):
    """No template here: the database does not exist, nor does its directory, and MLflow is imported
    for the first time."""
    script = f"""
        import sys
        from tasks.tracking.connection import Destination
        from tasks.tracking.mlflow_sink import log_run
        from tasks.tracking.records import RunRecord
        assert "mlflow" not in sys.modules, "importing the sink imports mlflow"
        record = RunRecord(run_fingerprint="f", name="first", stages=({{"name": "synthesis"}},))
        place = "{tmp_path}/new"
        log_run(record, Destination(f"sqlite:///{{place}}/mlflow.db", place, "refresh"))
    """
    env = os.environ | {"PYTHONPATH": str(Path(mlflow_sink.__file__).parents[2])}
    command = [sys.executable, "-c", textwrap.dedent(script)]
    done = subprocess.run(command, env=env, cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert (tmp_path / "new" / "mlflow.db").is_file()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new"]
