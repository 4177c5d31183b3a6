"""What recorded rows become for the analysis, and that a file without the columns is refused."""

from __future__ import annotations

from pathlib import Path

import polars as pl
import pytest

from benchmarks.observations import LENGTHS, VERDICTS, adapted, analyse, breaks_off
from kernels_eval.errors import UsageError

MODULE = "```python\nclass ModelNew:\n    pass\n```"


def row(problem: int, sample: int, response: str, runtime_ms: float) -> dict:
    facts = {"level": 1, "problem_id": problem, "sample_id": sample, "model": "m", "response": response}
    return facts | {"recorded_correct": runtime_ms > 0, "recorded_runtime_ms": runtime_ms}


def test_lengths_cuts_and_speeds_of_recorded_rows(tmp_path: Path) -> None:
    path = tmp_path / "recorded.parquet"
    thought = "x" * 400
    made = [
        row(1, 0, f"{thought}</think>\n\n{MODULE}", 2.0),
        row(1, 1, f"{MODULE}", 8.0),
        row(1, 2, "and so it goes on and", -1.0),
        row(2, 0, "", -1.0),
    ]
    pl.DataFrame(made).write_parquet(path)
    found = adapted(str(path))
    assert found["tagged"].to_list() == [100, None, None, None]
    assert found["whole"].to_list() == [(408 + 2 + len(MODULE)) // 4, len(MODULE) // 4, 5, None]
    assert found["speedup"].to_list() == [pytest.approx(2.0), pytest.approx(0.5), None, None]
    assert found["finish_reason"].to_list() == ["stop", "stop", "length", "length"]
    assert found["status"].to_list() == ["correct", "correct", "incorrect", "incorrect"]
    said = analyse(str(path), str(tmp_path / "out"))
    assert said.keys() == LENGTHS.keys() and all(VERDICTS in sentences for sentences in said.values())
    for name, unit in LENGTHS.items():
        page = (tmp_path / "out" / name / "report.md").read_text(encoding="utf-8")
        assert unit.split(" (")[0].replace("</think>", "\\</think\\>") in page and "another GPU" in page


def test_a_response_breaks_off_in_a_block_or_in_a_sentence() -> None:
    assert breaks_off("```python\nclass ModelNew:\n") and breaks_off("the kernel is") and breaks_off("<think>\nI think.")
    assert not breaks_off("The kernel is done.\n") and not breaks_off(MODULE)


def test_a_file_without_the_columns_is_refused(tmp_path: Path) -> None:
    pl.DataFrame({"response": ["a"]}).write_parquet(tmp_path / "other.parquet")
    with pytest.raises(UsageError, match="recorded_correct"):
        adapted(str(tmp_path / "other.parquet"))
