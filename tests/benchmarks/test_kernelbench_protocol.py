"""KernelBench's protocol as we time it: what its processes report, what the summary makes of it,
and the comparison with ours."""

import json
import sys

import pytest

from benchmarks import kernelbench_protocol as protocol
from benchmarks.kernelbench_protocol import (
    Job,
    choose,
    compare,
    read_outcome,
    run,
    summarise,
)
from tasks.sources import bundled
from tasks.synthesis.parsing import parse_response

TASK = """
import torch
import torch.nn as nn

class Model(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return x * self.weight

def get_inputs():
    return [torch.randn(8, 16)]

def get_init_inputs():
    return [16]
"""

CANDIDATE = """
import os, subprocess, sys, time
import torch
import torch.nn as nn
{first}
class ModelNew(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(width))

    def forward(self, x):
        return {result}
"""


def candidate(number, result, first=""):
    return Job("test/scale", number, TASK, CANDIDATE.format(result=result, first=first))


ROWS = [
    {"task_id": "t", "sample_index": number, "status": status, "wall_s": wall_s, "seconds": seconds}
    for number, (status, wall_s, seconds) in enumerate(
        [
            ("correct", 30.0, {"load": 20.0, "reference_timing": 4.0}),
            ("compile_error", 20.0, {"load": 18.0}),
            ("timeout", 10.0, {}),
        ]
    )
]
RESULT = {"chosen": 9, "rows": ROWS, "wall_s": 60.0}
RESULT |= {"summary": summarise(RESULT)}
VERDICTS = [
    {"task_id": "t", "sample_index": number, "status": status}
    for number, status in enumerate(["correct", "incorrect", "timeout", "no_code"])
]


def test_a_process_is_worth_its_last_report():
    def line(phase, status, **seconds):
        return json.dumps({"phase": phase, "seconds": seconds, "status": status, "detail": ""})

    lines = [line("load", None, **{"import": 2.0}), "no JSON", "[1]", '{"status": "correct"}']
    killed = read_outcome(lines, 30.0, "timeout", -9, "")
    assert (killed["status"], killed["seconds"]) == ("timeout", {"import": 2.0, "load": 28.0})
    crashed = read_outcome(lines, 5.0, "exit", -11, "the log")
    assert (crashed["status"], crashed["log_tail"]) == (
        "runtime_error",
        "the log",
    ) and "signal 11" in crashed["detail"]
    assert read_outcome([], 5.0, "exit", 1, "no torch")["status"] == "harness_error"
    whole = read_outcome([*lines, line("timing", "correct", load=1.0)], 3.5, "exit", 0, "")
    assert (whole["status"], whole["seconds"]) == ("correct", {"load": 1.0, "end": 2.5})


def test_a_chosen_sample_is_spread_out_and_always_the_same():
    jobs = [Job(f"t/{number}", 0, "", "") for number in range(100)]
    assert {int(job.task_id[2:]) for job in choose(jobs, 4)} == {0, 25, 50, 75}
    assert len(choose(jobs, 1000)) == 100
    order = choose(jobs, 10)
    assert order == choose(jobs, 10) and order != sorted(
        order, key=lambda job: int(job.task_id[2:])
    )


def test_the_summary_divides_by_what_ran():
    summary = RESULT["summary"]
    assert (summary["candidates"], summary["chosen"], summary["wall_s"]) == (3, 9, 60.0)
    assert summary["s_per_candidate_mean"] == summary["s_per_candidate_median"] == 20.0
    assert summary["split_mean_s"]["load"] == pytest.approx(38 / 3, abs=1e-3)


def test_only_the_same_candidates_are_compared():
    with pytest.raises(SystemExit, match="2 candidates in common"):
        compare(RESULT, VERDICTS[:2], {"wall_s": 6.0})


def test_ours_can_be_compared_later(tmp_path, monkeypatch):
    verdicts = tmp_path / "verdicts.json"
    verdicts.write_text(json.dumps(VERDICTS))
    (tmp_path / "summary.json").write_text(json.dumps({"wall_s": 6.0, "candidates": 3}))
    words = ["kernelbench_protocol", "--out", str(tmp_path), "--ours", str(verdicts)]
    monkeypatch.setattr(sys, "argv", words)
    assert protocol.main() == 1  # there is no run yet
    protocol.write_result(tmp_path, RESULT)
    assert protocol.main() == 0
    compared = json.loads((tmp_path / "compared.json").read_text())
    assert compared == {
        "candidates": 3,
        "ours_s_per_candidate": 2.0,
        "kernelbench_s_per_candidate": 20.0,
        "ratio": 10.0,
        "verdicts": {
            "correct | ours correct": 1,
            "compile_error | ours incorrect": 1,
            "timeout | ours timeout": 1,
        },
    }


def test_the_responses_of_what_was_done_can_be_given_to_ours(tmp_path):
    import polars as pl

    keys = {"level": [1, 1, 2], "problem_id": [1, 1, 1], "sample_id": [0, 1, 0]}
    recorded = pl.DataFrame(keys | {"response": ["text"] * 3})
    recorded.write_parquet(tmp_path / "responses.parquet")
    done = [
        {"task_id": "kernelbench/L1/1", "sample_index": 1},
        {"task_id": "kernelbench/L2/1", "sample_index": 0},
    ]
    protocol.write_responses(str(tmp_path / "responses.parquet"), done, tmp_path / "done.parquet")
    assert pl.read_parquet(tmp_path / "done.parquet").rows() == [
        (1, 1, 1, "text"),
        (2, 1, 0, "text"),
    ]


@pytest.mark.slow
def test_bundled_candidates_build_and_run_one_after_the_other():
    task = next(task for task in bundled.load() if task.name == "scale_shift_silu")
    codes = {
        number: parse_response(bundled.responses(task.name, "cpp")[number]).code
        for number in (0, 2)
    }  # 2 does not compile
    jobs = [Job(task.task_id, number, task.code, code) for number, code in codes.items() if code]
    saved = []
    found = run(jobs, "cpu", 280, lambda result: saved.append(len(result["rows"])))
    right, broken = found["rows"]
    assert saved == [1, 2]
    assert right["status"] == "correct", right
    assert right["latency_ms"]["candidate"]["mean"] > 0 and right["speedup"] > 0
    assert right["seconds"]["load"] > right["seconds"]["correctness"] > 0
    assert sum(right["seconds"].values()) == pytest.approx(right["wall_s"], abs=0.01)
    assert broken["status"] == "compile_error" and "shadows a parameter" in broken["detail"]


@pytest.mark.slow
def test_whatever_a_candidate_does_there_is_a_row():
    forged = json.dumps({"phase": "end", "seconds": {}, "status": "incorrect"})
    jobs = [
        candidate(
            0, "x * self.weight", first=f"print({forged!r}); subprocess.Popen(['sleep', '300'])"
        ),
        candidate(1, "x + self.weight"),
        candidate(2, "os._exit(0)"),
        candidate(3, "sys.exit(0)"),
        candidate(4, "x", first="time.sleep(300)"),
    ]
    found = run(jobs, "cpu", 60, lambda result: None)
    statuses = {row["sample_index"]: row["status"] for row in found["rows"]}
    expected = "correct incorrect runtime_error runtime_error timeout".split()
    assert statuses == dict(enumerate(expected))
