"""Two minutes of random kills over 500 candidates: one verdict each, and the same as in peace."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

import benchmarks
from benchmarks.chaos import Run, candidates, compared

ROOT = Path(benchmarks.__file__).parent.parent


@pytest.mark.slow
@pytest.mark.timeout(3 * 3600)
def test_a_run_whose_processes_are_killed_ends_with_the_verdicts_of_a_calm_one(tmp_path):
    command = [
        sys.executable,
        "-m",
        "benchmarks.chaos",
        "--candidates",
        "500",
        "--seconds",
        "120",
        "--seed",
        "7",
        "--out",
        str(tmp_path),
    ]
    done = subprocess.run(
        command, env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, text=True
    )
    report = json.loads((tmp_path / "report.json").read_text())
    assert done.returncode == 0 and report["faults"] == []
    chaos = report["chaos"]
    assert chaos["rows"] == len(chaos["verdicts"]) == 500 and report["differences"] == []
    assert sum(chaos["kills"].values()) >= 20
    assert {"driver", "fork server", "child", "compiler", "build worker", "kernel worker"} <= set(
        chaos["kills"]
    )


def test_candidates_are_of_every_kind_and_each_has_an_identity():
    made = candidates(500)
    assert len({candidate.candidate_id for _, candidate in made}) == 500
    assert [candidate.candidate_id for _, candidate in candidates(500)] == [
        candidate.candidate_id for _, candidate in made
    ]
    assert len({task.task_id for task, _ in made}) > 8


def calm():
    return Run(
        verdicts={"a": ["correct", "ok", ""], "b": ["timeout", "run", ""]},
        rows=2,
        builds={"k": ["ok", "loads"]},
        killing_s=120,
    )


FAULTS = yaml.safe_load((ROOT / "tests/data/chaos_faults.yaml").read_text(encoding="utf-8"))


@pytest.mark.parametrize("case", FAULTS, ids=str)
def test_what_the_comparison_finds(case):
    chaos = calm()
    for name in case.keys() - {"fault"}:
        setattr(chaos, name, case[name])
    faults = compared(2, 120, 7, calm(), chaos).faults
    assert bool(faults) is bool(case["fault"]) and case["fault"] in "; ".join(faults)
