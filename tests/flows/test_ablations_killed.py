"""A real ablation, killed with SIGKILL in the middle of a training and run again: it ends as one
that nobody killed."""

import json
import shutil
import signal
from pathlib import Path

import pytest
import yaml

from tasks.store.lookup import snapshots
from tests.support.commands import Running, kill_tree, start, tiny

PROFILE = tiny(
    "killed",
    root="out",
    tasks=3,
    # no time is measured anew in an ablation: both compare the same verdicts
    verification={"workers": 1, "builders": 1, "screen": False, "eval": {"timing": {"max_s": 0.3}}},
    training={"batch_size": 1, "checkpoint_every_steps": 1},
    benchmark={
        "models": ["base", "tuned"],
        "sampling": {"temperature": 0.8, "max_tokens": 16},
    },
)
ABLATION = """ablate --profile killed.yaml --strategies min_length,max_length --sizes 2 --seeds 0
    --json""".split()
RUN_S = 1200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def ended(directory, *command):
    """What a command prints that ends well."""
    process = start(*command, cwd=directory)
    try:
        out, err = process.communicate(timeout=RUN_S)
    finally:
        kill_tree(process)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out)


def snapshot(directory, stage, fingerprint):
    (found,) = [
        each for each in snapshots(str(directory / "out"), stage) if each.fingerprint == fingerprint
    ]
    return found


def made_by(directory, branch):
    """What a branch came to: its losses, the adapter's bytes, the answers, the scores."""
    training = snapshot(directory, "training", branch["trained"])
    answers = snapshot(directory, "synthesis", branch["answers"]["candidates"]["fingerprint"])
    adapter = Path(training.path) / "adapter" / "adapter_model.safetensors"
    return {
        "loss": training.read(unique="step").sort("step")["loss"].to_list(),
        "adapter": adapter.read_bytes(),
        "answers": sorted(answers.read(unique="candidate_id")["response"].to_list()),
        "scores": snapshot(directory, "benchmark", branch["scores"]).read().to_dicts(),
    }


def test_a_killed_ablation_goes_on_and_ends_as_one_that_was_not(tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    (whole / "killed.yaml").write_text(yaml.safe_dump(PROFILE))
    ended(whole, "run", "--profile", "killed.yaml", "--only", "refresh", "--json")
    shutil.copytree(
        whole, killed, ignore=shutil.ignore_patterns("prefect")
    )  # timings differ from run to run: both compare the same verdicts

    first = Running(*ABLATION, cwd=killed)
    try:
        first.wait_for(r"^max_length-2-seed0 +training +[1-9]", RUN_S)
    finally:
        kill_tree(first.process)
    assert first.process.returncode == -signal.SIGKILL

    second = ended(killed, *ABLATION)
    other = ended(whole, *ABLATION)
    assert second["complete"]
    assert other["complete"]
    assert second["fingerprint"] == other["fingerprint"]
    assert second["new"] == ["max_length-2-seed0"]  # the branch that was done is not done again
    for mine, theirs in zip(second["branches"], other["branches"], strict=True):
        assert mine["name"] == theirs["name"] and mine["trained"] == theirs["trained"]
        assert made_by(killed, mine) == made_by(whole, theirs)

    from mlflow.tracking import MlflowClient

    client = MlflowClient(tracking_uri=f"sqlite:///{killed}/out/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("concur").experiment_id])
    assert sorted(run.info.run_name for run in runs) == [
        "killed ablation: min_length,max_length",
        "max_length-2-seed0",
        "min_length-2-seed0",
    ]
    assert {run.info.status for run in runs} == {"FINISHED"}
    again = ended(killed, *ABLATION)
    assert again["new"] == []
