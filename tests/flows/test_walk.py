"""How far a reader must go who follows a configuration from the command line to the judge."""

import json
import subprocess
import sys

import pytest

from tests.support.programs import ADDS_ONE
from tests.support.walk import ROOT

MOST_FILES = 12
KERNEL = """
import torch
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return x + 1
"""
JUDGE = "kernels_eval.evaluator:Evaluator.__call__"
POOL = "kernels_eval.pool.pool:Pool.__enter__"


BATCH = "verify-batch kernels --tasks tasks --out out --workers 1"
REFRESH = """run --only refresh --root out --set tasks.limit=1 --set synthesis.samples_per_task=1
    --set decontamination.enabled=false"""


@pytest.mark.parametrize(
    "end, words",
    [
        pytest.param(JUDGE, "verify task.py kernel.py", id="verify"),
        pytest.param(POOL, BATCH, id="verify-batch"),
        pytest.param(POOL, REFRESH, id="refresh", marks=pytest.mark.slow),
    ],
)
def test_a_configuration_comes_to_the_judge_through_few_files(tmp_path, request, end, words):
    for folder, name, code in (("tasks", "task", ADDS_ONE), ("kernels", "kernel", KERNEL)):
        (tmp_path / f"{name}.py").write_text(code)
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "task.py").write_text(code)
    key = "verification.eval.timing.max_s=1"
    command = [sys.executable, "-m", "tests.support.walk", end, *words.split(), "--set", key]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    if words.startswith("run"):
        env |= request.getfixturevalue("prefect_api")
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    files = json.loads(done.stdout.splitlines()[-1])
    assert "kernels_eval/settings.py" in files
    # the judge needs no other stage's configuration
    assert ("flows/config.py" in files) == words.startswith("run")
    assert len(files) <= MOST_FILES, files
