"""A run folder of KernelBench to a scored table, as a user types it: two commands, on the CPU."""

import json
from pathlib import Path

import polars as pl
import pytest

from tests.support import kernels
from tests.support.commands import concur
from tests.support.typed import data_of, refused

MODEL = "Qwen/QwQ-32B"
REFERENCES = {1: "return x * 2.0 + 1.0", 2: "return x * 2.0 + 1.5"}
RIGHT = {1: "return ext.affine(x)", 2: "return ext.shifted(x)"}


def run_folder(place, samples):
    """`runs/mine` as KernelBench's generate_samples.py leaves it, and its tasks by number: the last
    sample of each problem is wrong."""
    run = place / "runs" / "mine"
    run.mkdir(parents=True)
    (run / "generation_config.yaml").write_text(f"run_name: mine\nmodel_name: {MODEL}\n")
    for problem in REFERENCES:
        for sample in range(samples):
            wrong = sample == samples - 1
            code = kernels.module(RIGHT[3 - problem if wrong else problem])
            name = f"level_1_problem_{problem}_sample_{sample}"
            (run / f"{name}_kernel.py").write_text(code)
            (run / f"{name}_prompt.txt").write_text("a prompt")
    rows = [
        {"level": 1, "problem_id": n, "name": f"{n}_x", "code": kernels.task_source(reference)}
        for n, reference in REFERENCES.items()
    ]
    pl.DataFrame(rows).write_parquet(place / "kernelbench.parquet")


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_kernels_to_a_scored_table_in_two_commands(tmp_path):
    run_folder(tmp_path, 10)
    words = "verify-batch runs/mine --tasks kernelbench.parquet --out verified --quick"
    done = concur(*words.split(), cwd=tmp_path, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    assert "20 candidates of 2 tasks (cpp" in done.stdout
    lines = [line for line in done.stderr.splitlines() if "kernelbench/L1/" in line]
    assert len(lines) == 20 and "sample 9" in "".join(lines)
    verdicts = pl.read_parquet(tmp_path / "verified" / "verdicts.parquet")
    assert set(verdicts["generator"]) == {MODEL}
    assert set(verdicts.filter(pl.col("sample_index") == 9)["status"]) == {"incorrect"}
    assert (verdicts["status"] == "correct").sum() == 18, verdicts["reason"].to_list()

    scored = concur("benchmark", "--verdicts", "verified", cwd=tmp_path)
    assert scored.returncode == 0, scored.stderr
    assert MODEL in scored.stdout and "level 1" in scored.stdout and "90.0" in scored.stdout
    table = concur("benchmark", "--verdicts", "verified/verdicts.parquet", "--json", cwd=tmp_path)
    assert {row["model"] for row in json.loads(table.stdout)["scores"]} == {MODEL}


def test_a_minimal_table_is_scored_as_the_page_says(tmp_path, monkeypatch):
    """`task_id` and `code`: no ids, no model. Without code no worker is needed."""
    monkeypatch.chdir(tmp_path)
    Path("mytasks").mkdir()
    for name in ("one", "two"):
        Path("mytasks", f"{name}.py").write_text(kernels.task_source("return x"))
    rows = [{"task_id": name, "response": "no"} for name in ("user/one", "two", "two")]
    pl.DataFrame(rows).write_parquet("answers.parquet")
    Path("answers.jsonl").write_text("\n".join(map(json.dumps, rows)))
    for table in ("answers.parquet", "answers.jsonl"):
        data = data_of(f"verify-batch {table} --tasks mytasks --out verified")
        assert (data["candidates"], data["tasks"]) == (3, 2)
        for verdicts in ("verified", "verified/verdicts.parquet"):
            for more in ("", f" --candidates {table}"):
                scores = data_of(f"benchmark --verdicts {verdicts}{more} --resamples 100")["scores"]
                assert {row["model"] for row in scores} == {"answers"}
                assert max(row["samples"] for row in scores) == 3
    Path("verified").rename("moved")  # the folder is found by what is in it
    assert data_of("benchmark --verdicts moved --resamples 100")["verdicts"] == "moved"
    assert "no.csv does not exist" in refused("benchmark --verdicts moved --candidates no.csv")
    for name in ("summary.json", "snapshots"):  # without them, the table is read
        Path("moved", name).rename(name)
        scores = data_of("benchmark --verdicts moved --resamples 100")["scores"]
        assert {row["model"] for row in scores} == {"answers"}


def test_a_name_that_two_tasks_have_is_no_name_of_one(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    code = kernels.task_source("return x")
    tasks = [{"task_id": f"{n}", "name": "same", "code": code} for n in range(2)]
    pl.DataFrame(tasks).write_parquet("tasks.parquet")
    pl.DataFrame([{"task_id": "same", "code": "x"}]).write_parquet("c.parquet")
    words = "verify-batch c.parquet --tasks tasks.parquet --out out"
    assert "a task that is not in tasks.parquet: 'same'" in refused(words)
