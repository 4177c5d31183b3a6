"""The table of degenerate tasks: each task opened by the reference process that verification
uses."""

import json
import sys

import polars as pl
import pytest

from benchmarks import degenerate_tasks

TASK = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def forward(self, x):
        return {answer}

def get_inputs():
    return [torch.randn(16, 32)]

def get_init_inputs():
    return []
"""


@pytest.mark.slow
def test_a_task_whose_answer_is_always_the_same_is_listed(tmp_path, monkeypatch, capsys):
    rows = [
        (TASK.format(answer="x * 2 + 1"), 1, "1_linear", 1),
        (TASK.format(answer="torch.ones(4)"), 1, "2_constant", 2),
    ]
    tasks = tmp_path / "tasks.parquet"
    pl.DataFrame(rows, schema=["code", "level", "name", "problem_id"], orient="row").write_parquet(
        tasks
    )
    monkeypatch.setattr(
        sys,
        "argv",
        ["x", "--tasks", str(tasks), "--language", "cpp", "--out", str(tmp_path / "out")],
    )
    assert degenerate_tasks.main() == 0
    seen = {
        row["name"]: row
        for row in json.loads((tmp_path / "out" / "degenerate_tasks-0.json").read_text())
    }
    assert (seen["1_linear"]["reason"], seen["1_linear"]["oracle"]) == ("ok", "float64")
    assert seen["2_constant"]["reason"] == "degenerate_task"
    assert "| kernelbench/L1/2 | degenerate_task |" in capsys.readouterr().out
