"""Recorded verdicts and ours become tables that `concur benchmark` reads, on the same responses."""

import json

import polars as pl
import pytest

from benchmarks.kernelbench_scores import agreement, our_verdicts, recorded_verdicts, scored
from kernels_eval.errors import UsageError


def recorded(path):
    rows = [
        {
            "level": level,
            "problem_id": problem,
            "sample_id": sample,
            "model": "m",
            "recorded_compiled": sample < 2,
            "recorded_correct": sample == 0,
        }
        for level, problem in ((1, 1), (1, 2), (2, 1))
        for sample in range(3)
    ]
    pl.DataFrame(rows).write_parquet(path)
    return str(path)


def ours(path, *names):
    timing = {"speedup": 2.0}
    rows = [
        {
            "task_id": f"kernelbench/{task}",
            "sample_index": sample,
            "status": status,
            "reason": "ok" if status == "correct" else "run",
            "timing": timing if status == "correct" else None,
            "custom_kernels": [],
        }
        for task, sample, status in names
    ]
    path.write_text(json.dumps(rows))
    return str(path)


def test_recorded_outcomes_in_our_words(tmp_path):
    found = recorded_verdicts(recorded(tmp_path / "r.parquet"))
    assert found["status"].to_list()[:3] == ["correct", "incorrect", "compile_error"]
    assert found["candidate_id"][0] == "kernelbench/L1/1#0" and found.height == 9


def test_the_latest_verdict_counts_and_levels_that_are_not_whole_are_left_out(tmp_path):
    level_1 = [(f"L1/{problem}", sample, "timeout") for problem in (1, 2) for sample in range(3)]
    first = ours(tmp_path / "a.json", *level_1, ("L2/1", 0, "correct"))
    second = ours(tmp_path / "b.json", ("L1/1", 1, "correct"))
    table = recorded_verdicts(recorded(tmp_path / "r.parquet"))
    found, said = our_verdicts(table, [first, second], "H200")
    assert (
        found.height == 6
        and set(found["task_id"]) == {"kernelbench/L1/1", "kernelbench/L1/2"}
        and set(found["device"]) == {"H200"}
    )
    assert "7 of 9 responses" in said and "L1 100% of 2, L2 0% of 1" in said
    counts = agreement(found, table)
    assert counts[-2] == "| L1 | 0 | 1 | 2 | 3 |"
    page = scored(
        str(tmp_path / "r.parquet"), [first, second], tmp_path / "out", "H200", resamples=100
    )
    assert "## Our verdicts" in page and (tmp_path / "out" / "scores.md").read_text().startswith(
        "## All 9 responses"
    )
    assert pl.read_parquet(tmp_path / "out" / "same.parquet").height == 6


def test_files_that_cannot_be_used_are_refused(tmp_path):
    table = recorded_verdicts(recorded(tmp_path / "r.parquet"))
    with pytest.raises(
        UsageError, match="1 verdicts are of no response, such as kernelbench/L9/1 #0"
    ):
        our_verdicts(table, [ours(tmp_path / "a.json", ("L9/1", 0, "correct"))], "")
    with pytest.raises(UsageError, match="of no level enough"):
        our_verdicts(table, [ours(tmp_path / "b.json", ("L1/1", 0, "correct"))], "")
    (tmp_path / "c.json").write_text("{}")
    with pytest.raises(UsageError, match="no list of verdicts"):
        our_verdicts(table, [str(tmp_path / "c.json")], "")
