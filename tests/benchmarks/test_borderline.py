"""Thirty borderline cases: each is kept, and their verdicts are counted by reason."""

import json

from benchmarks.borderline import borderline, judge_all, rows_of, table
from tests.flows.test_architecture import loaded_by


def test_half_of_thirty_cases_are_right_and_what_was_judged_is_only_counted(tmp_path):
    trials, out = borderline(), tmp_path / "verdicts.jsonl"
    right = [trial.name for trial in trials if "ok" in trial.expect]
    assert len({trial.name for trial in trials}) == 30 and len(right) == 14
    rows = [{"case": name, "run": run, "reason": "ok"} for name in right for run in range(3)]
    rows[0]["reason"] = "wrong_output"
    out.write_text("".join(json.dumps(row) + "\n" for row in rows))
    kept = [trial for trial in trials if trial.name in right]
    judge_all(kept, 3, 1, out)
    assert rows_of(out) == rows
    printed = table(trials, rows).splitlines()
    assert f"| {right[0]} | ok | `ok` 2, `wrong_output` 1 |" in printed
    assert printed[-1] == "41 of 42 as expected" and len(printed) == 34


def test_a_machine_that_has_what_the_verifier_needs_is_enough():
    loaded = loaded_by("import benchmarks.borderline")
    assert "kernels_eval" in loaded
    assert loaded.isdisjoint({"pytest", "ray", "polars", "prefect", "torch"})
