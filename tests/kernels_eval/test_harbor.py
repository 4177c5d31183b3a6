"""A folder of tasks for Harbor: read as Harbor reads it, and judged as its container does."""

import os
import subprocess
import sys
import tomllib

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.exchange import harbor
from kernels_eval.records import KernelTask, Language, Verdict
from tests.support import kernels


def request(**fields):
    task = kernels.AFFINE.model_copy(update={"task_id": 'level1/Affine "1"', **fields})
    return harbor.Request(task, f"Make this faster:\n{task.code}")


@pytest.mark.parametrize(
    "language, image, gpus", [("cpp", "concur", None), ("triton", "concur:cuda", 1)]
)
def test_a_task_is_the_files_that_harbor_reads(tmp_path, language, image, gpus):
    (folder,) = harbor.write_tasks([request()], tmp_path, Language(language), "kevin")
    assert folder == tmp_path / "level1-affine-1"
    found = {path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()}
    assert found == {*harbor.FILES, "tests/task.json"}
    told = tomllib.loads((folder / "task.toml").read_text())
    assert told["task"]["name"] == "concur/level1-affine-1"
    assert told["metadata"] == {
        "task_id": 'level1/Affine "1"',
        "language": language,
        "recipe": "kevin",
    }
    assert told["environment"].get("gpus") == gpus
    assert told["verifier"]["timeout_sec"] > 0 and told["agent"]["timeout_sec"] > 0
    lines = (folder / "environment/Dockerfile").read_text().splitlines()
    assert f"FROM {image}" in lines
    instruction = (folder / "instruction.md").read_text()
    assert kernels.AFFINE.code in instruction and "/app/candidate.py" in instruction
    script = folder / "tests/test.sh"
    assert os.access(script, os.X_OK)
    assert f"--language {language} --recipe kevin" in script.read_text()
    stored = KernelTask.model_validate_json((folder / "tests/task.json").read_text())
    assert stored == request().task


def test_two_tasks_of_one_name_and_an_unknown_recipe_are_refused(tmp_path):
    with pytest.raises(UsageError, match="two tasks would be"):
        harbor.write_tasks([request(), request(task_id="level1/affine-1")], tmp_path, Language.CPP)
    with pytest.raises(UsageError, match="no reward recipe"):
        harbor.write_tasks([request()], tmp_path, Language.CPP, "nothing")


def assert_judged(out, reward, status):
    assert float((out / "reward.txt").read_text()) == reward
    verdict = Verdict.model_validate_json((out / "verdict.json").read_text())
    assert (verdict.status, verdict.task_id) == (status, request().task.task_id)


def test_its_script_writes_the_reward_and_the_verdict(tmp_path):
    (folder,) = harbor.write_tasks([request()], tmp_path, Language.CPP)
    out = tmp_path / "logs"
    script = (folder / "tests/test.sh").read_text()
    python = os.path.dirname(sys.executable)
    script = script.replace("/tests/", f"{folder}/tests/").replace("/app/", f"{tmp_path}/")
    done = subprocess.run(
        ["sh", "-c", f"{script.rstrip()} --out {out}"],
        env={**os.environ, "PATH": f"{python}:{os.environ['PATH']}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert_judged(out, 0.0, "no_code")  # nothing was written


@pytest.mark.parametrize(
    "forward, reward, status",
    [("return ext.shifted(x)", 0.0, "incorrect"), ("return x * 2 + 1", -1.0, "rejected")],
)
def test_what_was_written_is_judged(tmp_path, judging_here, forward, reward, status):
    (folder,) = harbor.write_tasks([request()], tmp_path, Language.CPP)
    candidate, out = tmp_path / "candidate.py", tmp_path / "logs"
    candidate.write_text(kernels.module(forward))
    asked = ["--language", "cpp", "--recipe", "concur", "--out", str(out)]
    assert harbor.main([str(folder / "tests/task.json"), str(candidate), *asked]) == 0
    assert_judged(out, reward, status)


def test_a_task_that_fails_leaves_no_reward(tmp_path, monkeypatch):
    (folder,) = harbor.write_tasks([request()], tmp_path, Language.CPP)
    candidate = tmp_path / "candidate.py"
    candidate.write_text(kernels.module("return ext.affine(x)"))
    failed = Verdict(
        candidate_id="c",
        task_id="t",
        language="cpp",
        status="task_error",
        reason="reference_failed",
    )
    monkeypatch.setattr(harbor, "verify", lambda *_: failed)
    told = [str(folder / "tests/task.json"), str(candidate), "--out", str(tmp_path / "logs")]
    assert harbor.main(told) == 1
    assert not (tmp_path / "logs/reward.txt").exists()
    assert (tmp_path / "logs/verdict.json").exists()
