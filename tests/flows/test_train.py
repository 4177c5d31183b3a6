"""`concur train`: which set, which prompts, what it prints, and what MLflow is told of a training
by itself."""

import json
import math
from pathlib import Path

import pyarrow as pa
import pytest
from click.testing import CliRunner

from flows.cli.main import main
from flows.config import PipelineConfig
from flows.track import training_run_record
from flows.train import of_line
from kernels_eval.errors import UsageError
from tasks.benchmark.report.inputs import training_steps
from tasks.store.snapshot import ADAPTER, Snapshot
from tasks.tracking.connection import Destination
from tasks.tracking.mlflow_sink import log_run, registered_version
from tasks.tracking.writing import PARENT_TAG
from tests.support.cases import cases
from tests.support.commands import concur
from tests.support.curated import line, sample

CASES = cases("flows")

SAMPLES = [sample("t/1", 0, 10, 6.0), sample("t/1", 1, 30, 5.5), sample("t/2", 0, 10, 6.0)]
LOG = pa.schema(
    [("step", pa.int64())]
    + [
        (name, pa.float64())
        for name in "epoch loss learning_rate held_out_loss tokens_per_s system/cpu".split()
    ]
    + [("note", pa.string())]
)


def trained_on(curated):
    """A training snapshot with columns that today's trainer may not know, one of them not of
    numbers."""
    snapshot = Snapshot(curated.root, "training", "f00d")
    values = [
        (0, 0.0, None, None, 3.0, None, None, None),
        (1, 0.5, 2.0, 1e-4, None, 100.0, 50.0, "a"),
        (2, 1.0, math.nan, 5e-5, 2.5, 120.0, 70.0, "b"),
    ]
    snapshot.append([dict(zip(LOG.names, row, strict=True)) for row in values], LOG)
    adapter = snapshot.local_dir("adapter")
    (adapter / "adapter_config.json").write_text("{}")
    (snapshot.local_dir() / ADAPTER).touch()
    extra = CASES["training_facts"]
    return snapshot.publish(config={}, upstream=[curated.fingerprint], extra=extra).ref


def test_a_training_by_itself_is_a_run_with_its_data_series_and_lineage(tmp_path, monkeypatch):
    import mlflow

    curated = line(tmp_path / "root", SAMPLES)
    trained = trained_on(curated)
    config = PipelineConfig(root=str(tmp_path / "root"), name="tiny")
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    run_id = log_run(
        training_run_record(config, curated, trained), Destination(uri, str(tmp_path), "concur")
    )
    client = mlflow.tracking.MlflowClient(tracking_uri=uri, registry_uri=uri)
    run = client.get_run(run_id)
    assert run.data.metrics == CASES["training_metrics"]
    assert run.data.params["training.lora_rank"] == "32"
    assert [entry.dataset.digest for entry in run.inputs.dataset_inputs] == [
        curated.fingerprint[:36]
    ]

    (child,) = client.search_runs([run.info.experiment_id], f"tags.`{PARENT_TAG}` = '{run_id}'")
    assert [entry.dataset.digest for entry in child.inputs.dataset_inputs] == [
        curated.fingerprint[:36]
    ]
    series = {
        name: [[p.step, p.value] for p in client.get_metric_history(child.info.run_id, name)]
        for name in child.data.metrics
    }
    assert series == CASES["training_series"]

    assert registered_version(run_id, Destination(uri, str(tmp_path), "concur")) == "concur-tiny/1"
    (version,) = client.search_model_versions("name = 'concur-tiny'")
    upstream = curated.open().manifest["upstream"]
    assert version.tags["concur.curated"] == curated.fingerprint
    assert version.tags["concur.training"] == trained.fingerprint
    assert {version.tags[f"concur.{name}"] for name in ("verdicts", "candidates", "tasks")} <= set(
        upstream
    )
    assert (version.tags["concur.strategy"], version.tags["concur.base_model"]) == (
        "concur",
        "org/base",
    )
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    monkeypatch.setenv("MLFLOW_REGISTRY_URI", uri)
    folder = Path(mlflow.artifacts.download_artifacts("models:/concur-tiny/1"))
    assert (folder / "adapter_config.json").is_file(), "a plain folder of PEFT"


def test_the_report_takes_of_the_log_the_steps_and_the_columns_that_it_shows(tmp_path):
    steps = training_steps(trained_on(line(tmp_path / "root", SAMPLES)).open())
    assert [(step.step, step.epoch) for step in steps] == [(1, 0.5), (2, 1.0)]


def test_the_prompts_are_those_of_the_sets_own_line(tmp_path):
    curated = line(tmp_path / "root", SAMPLES, synthesis={"hardware": "a card with 40 cores"})
    profile = PipelineConfig(language="triton", root="elsewhere", name="mine")
    config, tasks, found = of_line(str(tmp_path / "root"), None, profile)
    assert found == curated and tasks.open().finished and tasks.stage == "tasks"
    assert (config.language.value, config.synthesis.hardware, config.name) == (
        "cuda",
        "a card with 40 cores",
        "mine",
    )
    assert config.root == str(tmp_path / "root"), "snapshots and MLflow go where the set is"
    assert (
        of_line("anywhere", curated.open().path, profile)[2].open().fingerprint
        == curated.fingerprint
    )


def test_a_set_that_cannot_be_trained_on_is_told(tmp_path):
    config = PipelineConfig()
    empty = Snapshot(str(tmp_path / "empty"), "curation", "e").publish(config={})
    with pytest.raises(UsageError, match="is empty"):
        of_line(empty.root, None, config)
    curated = line(tmp_path / "root", SAMPLES)
    tasks = of_line(curated.root, None, config)[1]
    (Path(tasks.open().path) / "manifest.json").unlink()
    with pytest.raises(UsageError, match="tasks of the curated set .* are not under"):
        of_line(curated.root, None, config)


@pytest.mark.parametrize("arguments, said", CASES["bad_trainings"])
def test_bad_input_is_told_at_once(tmp_path, arguments, said):
    line(tmp_path / "root", SAMPLES)
    done = CliRunner().invoke(
        main, ["train", *(argument.format(tmp=tmp_path) for argument in arguments)]
    )
    assert done.exit_code == 2 and said in done.stderr and done.stdout == ""


@pytest.mark.slow
def test_the_command_trains_once_and_says_where(tmp_path):
    """The real command in a process of its own: small model, three rows, Prefect, Ray, MLflow; then
    again for nothing."""
    line(tmp_path / "root", SAMPLES)
    settings = ("training.num_epochs=1", "training.max_length=8192", "training.lora_rank=4")
    command = ["train", "--root", tmp_path / "root", "--json"]
    command += [word for setting in settings for word in ("--set", setting)]

    def trained(*more):
        done = concur(*command, *more, cwd=tmp_path, HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    first = trained("--merged", tmp_path / "merged", "--merged-dtype", "float32")
    assert first["rows"] == 3
    assert first["new_work"]
    assert first["model_version"] == "concur-local/1"
    assert (Path(first["adapter"]) / "adapter_model.safetensors").is_file()
    assert first["rank"] == 4
    assert (tmp_path / "merged" / "model.safetensors").is_file()
    assert first["merged"]["relative_difference"] <= 1e-3
    again = trained()
    assert not again["new_work"]
    assert again["adapter"] == first["adapter"]
    assert again["mlflow"] == first["mlflow"]
