"""The benchmark of curation on a table small enough for a test: real processes, every figure there
and none of them nonsense."""

import json
import os
import subprocess
import sys
from pathlib import Path

import polars as pl
import pytest

from benchmarks import curation_scale
from benchmarks.curation_scale import PER_TASK, plain_script, synthetic
from tasks.curation.config import CurationConfig
from tasks.curation.decisions import curate


def test_the_synthetic_table_is_what_it_says():
    rows = synthetic(2000)
    assert rows.equals(synthetic(2000)) and not rows.equals(synthetic(2000, seed=1))
    assert rows["candidate_id"].is_unique().all() and rows[
        "candidate_id"
    ].str.len_bytes().unique().to_list() == [32]
    assert rows["task_id"].n_unique() == 2000 // PER_TASK
    assert rows.filter((pl.col("status") == "correct") != pl.col("timing").is_not_null()).is_empty()
    assert (
        rows.group_by("task_id")
        .agg(pl.col("reference_operators").n_unique())["reference_operators"]
        .to_list()
        == [1] * 400
    )


def test_the_plain_script_takes_the_rows_of_concur():
    rows = synthetic(5000)
    assert plain_script(rows).equals(curate(rows, CurationConfig()))


@pytest.mark.slow
def test_it_measures_each_strategy_at_each_size(tmp_path):
    root = Path(curation_scale.__file__).parent.parent
    command = [
        sys.executable,
        "-m",
        "benchmarks.curation_scale",
        "--rows",
        "500",
        "1000",
        "--strategy",
        "concur",
        "random",
    ]
    done = subprocess.run(
        [*command, "--out", str(tmp_path / "out.json")],
        capture_output=True,
        text=True,
        timeout=300,
        cwd=root,
        env={**os.environ, "PYTHONPATH": str(root)},
    )
    assert done.returncode == 0, done.stderr
    runs = json.loads((tmp_path / "out.json").read_text())["runs"]
    assert [(run["rows"], run["strategy"]) for run in runs] == [
        (n, name) for n in (500, 1000) for name in ("concur", "random")
    ]
    assert all(run["taken"] > 0 and run["curate_s"] > 0 and run["peak_mib"] > 20 for run in runs)
    assert runs[0]["taken"] == runs[1]["taken"] and len(done.stdout.splitlines()) == 4
