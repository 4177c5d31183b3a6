"""How far a reader must go who follows a configuration from the command line to the judge."""

import json
import subprocess
import sys

import pytest

from tests.support.walk import ROOT

MOST_FILES = 12
TASK = """
import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x + 1
def get_inputs():
    return [torch.rand(4)]
def get_init_inputs():
    return []
"""
KERNEL = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x + 1
"""
JUDGE = "kernels_eval.evaluator:Evaluator.__call__"
POOL = "kernels_eval.pool.pool:Pool.__enter__"


@pytest.mark.parametrize(
    "end, words",
    [
        (JUDGE, ["verify", "task.py", "kernel.py"]),
        (POOL, ["verify-batch", "kernels", "--tasks", "tasks", "--out", "out", "--workers", "1"]),
    ],
    ids=["verify", "verify-batch"],
)
def test_a_configuration_comes_to_the_judge_through_few_files(tmp_path, end, words):
    for folder, name, code in (("tasks", "task", TASK), ("kernels", "kernel", KERNEL)):
        (tmp_path / f"{name}.py").write_text(code)
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.py").write_text(code)
    command = [sys.executable, "-m", "tests.support.walk", end, *words, "--set", "timing.max_s=1"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.splitlines()[-1])
    assert {"flows/cli/verify.py", "kernels_eval/settings.py"} <= files.keys()
    assert "flows/config.py" not in files  # the judge needs no other stage's configuration
    assert len(files) <= MOST_FILES, files
