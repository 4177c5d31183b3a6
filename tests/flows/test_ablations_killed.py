"""A real ablation, killed with SIGKILL in the middle of a training and run again: it ends as one
that nobody killed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

from tasks.store.snapshot import snapshots
from tests.support.commands import CONCUR, environment

PROFILE = {
    "name": "killed",
    "root": "out",
    "language": "cpp",
    "tasks": {"source": "bundled", "split": "train", "limit": 3},
    "synthesis": {"sampler": "recorded", "tokenizer": "small", "samples_per_task": 2},
    "workload": {"jobs": 1},
    "verification": {"workers": 1, "builders": 1, "eval": {"timing": {"max_s": 0.3}}},
    "training": {
        "base_model": "small",
        "max_length": 8192,
        "batch_size": 1,
        "gradient_accumulation": 1,
        "checkpoint_every_steps": 1,
    },
    "benchmark": {
        "tasks": {"source": "bundled", "split": "heldout", "limit": 1},
        "models": ["base", "tuned"],
        "samples_per_task": 2,
        "sampling": {"temperature": 0.8, "max_tokens": 16},
        "ks": [1],
    },
}
ABLATION = [
    "ablate",
    "--profile",
    "killed.yaml",
    "--strategies",
    "min_length,max_length",
    "--sizes",
    "2",
    "--seeds",
    "0",
    "--json",
]
RUN_S = 1200

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3600)]


def started(directory: Path, command: list[str]) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [*CONCUR, *command],
        cwd=directory,
        env=environment(HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def kill(process: subprocess.Popen[str]) -> None:
    """SIGKILL to the command and to all that it had started, whichever group that is in."""
    try:
        children = psutil.Process(process.pid).children(recursive=True)
    except psutil.NoSuchProcess:
        children = []
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    for child in children:
        if child.is_running():
            child.kill()
    psutil.wait_procs(children, timeout=30)


def run_ablation(directory: Path) -> dict[str, Any]:
    process = started(directory, ABLATION)
    try:
        out, err = process.communicate(timeout=RUN_S)
    finally:
        kill(process)
    assert process.returncode == 0, err[-4000:]
    return json.loads(out)


def made_by(directory: Path, branch: dict[str, Any]) -> dict[str, Any]:
    """What a branch came to: its losses, the adapter's bytes, the answers, the scores."""
    root = directory / "out"
    training = root / "training" / branch["trained"]
    (log,) = [
        found.read(unique="step").sort("step")
        for found in snapshots(str(root), "training")
        if found.fingerprint == training.name
    ]
    answers = branch["answers"]["candidates"]["fingerprint"]
    (said,) = [
        found.read(unique="candidate_id")
        for found in snapshots(str(root), "synthesis")
        if found.fingerprint == answers
    ]
    (scores,) = [
        found.read()
        for found in snapshots(str(root), "benchmark")
        if found.fingerprint == branch["scores"]
    ]
    return {
        "loss": log["loss"].to_list(),
        "adapter": (training / "adapter" / "adapter_model.safetensors").read_bytes(),
        "answers": sorted(said["response"].to_list()),
        "scores": scores.to_dicts(),
    }


def test_a_killed_ablation_goes_on_and_ends_as_one_that_was_not(tmp_path: Path) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    whole.mkdir()
    (whole / "killed.yaml").write_text(yaml.safe_dump(PROFILE))
    refresh = started(whole, ["run", "--profile", "killed.yaml", "--only", "refresh", "--json"])
    try:
        _, err = refresh.communicate(timeout=RUN_S)
    finally:
        kill(refresh)
    assert refresh.returncode == 0, err[-4000:]
    shutil.copytree(
        whole, killed, ignore=shutil.ignore_patterns("prefect")
    )  # timings differ from run to run: both compare the same verdicts

    first = started(killed, ABLATION)
    seen: list[str] = []
    assert first.stderr is not None
    try:
        for text in first.stderr:
            seen.append(text)
            if re.match(r"max_length-2-seed0 +training +[1-9]", text):
                break
        else:
            raise AssertionError(
                f"the second branch was never seen training:\n{''.join(seen)[-4000:]}"
            )
    finally:
        kill(first)
    assert first.returncode == -signal.SIGKILL
    (spent,) = (killed / "out" / "ablations").glob("*/spent.json")
    before = json.loads(spent.read_text())["device_s"]
    assert before["min_length-2-seed0"]["train"] > 0

    second = run_ablation(killed)
    other = run_ablation(whole)
    assert (
        second["complete"] and other["complete"] and second["fingerprint"] == other["fingerprint"]
    )
    assert second["new"] == ["max_length-2-seed0"]  # the branch that was done is not done again
    assert second["gpu_hours"] * 3600 > sum(sum(phases.values()) for phases in before.values())
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
    again = run_ablation(killed)
    assert again["new"] == [] and again["gpu_hours"] == second["gpu_hours"]
