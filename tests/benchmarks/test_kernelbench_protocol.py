"""KernelBench's protocol as we time it: what its processes report, what the summary makes of it,
and the comparison with ours."""

import json
import sys

import pytest
import yaml

from benchmarks import kernelbench_protocol as protocol
from benchmarks.kernelbench_protocol import (
    Job,
    Settings,
    choose,
    compare,
    read_outcome,
    run_mode,
    summarise,
)
from tasks.sources import bundled
from tasks.synthesis.parsing import parse_response
from tests.support.commands import ROOT

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


DATA = yaml.safe_load((ROOT / "tests/data/kernelbench_protocol.yaml").read_text(encoding="utf-8"))
MODES = {name: made | {"summary": summarise(made)} for name, made in DATA["modes"].items()}


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
    assert {int(job.task_id[2:]) for job in choose(jobs, None, 4)} == {0, 25, 50, 75}
    assert len(choose(jobs, None, 1000)) == 100
    order = choose(jobs, None, 10)
    assert order == choose(jobs, None, 10) and order != sorted(
        order, key=lambda job: int(job.task_id[2:])
    )
    only = [
        {"task_id": "t/7", "sample_index": 0},
        {"task_id": "t/8", "sample_index": 1},
        {"task_id": "t/7", "sample_index": 0},
    ]
    assert [job.task_id for job in choose(jobs, only, 4)] == ["t/7"]


def test_the_summary_divides_each_phase_by_what_went_through_it():
    for mode, expected in DATA["summaries"].items():
        assert expected.items() <= MODES[mode]["summary"].items()
    split = MODES["sequential"]["summary"]["run_split_mean_s"]
    assert split["load"] == pytest.approx(38 / 3, abs=1e-3)
    assert summarise(MODES["sequential"] | {"rows": [], "run_wall_s": 0.0})["candidates"] == 0
    assert len(protocol.table({"modes": MODES})) > 10


def test_the_same_candidates_are_compared():
    found = compare(MODES, DATA["verdicts"], {"wall_s": 6.0})["modes"]
    assert found == DATA["compared"]
    foreign = [DATA["verdicts"][0] | {"sample_index": 7}]
    assert compare(MODES, foreign, {"wall_s": 6.0})["modes"]["sequential"] == {"candidates": 0}


def test_ours_can_be_compared_later(tmp_path, monkeypatch, capsys):
    verdicts = tmp_path / "verdicts.json"
    verdicts.write_text(json.dumps(DATA["verdicts"][:3]))
    (tmp_path / "summary.json").write_text(json.dumps({"wall_s": 6.0, "candidates": 3}))
    words = ["kernelbench_protocol", "--out", str(tmp_path), "--ours", str(verdicts)]
    monkeypatch.setattr(sys, "argv", words)
    assert protocol.main() == 1  # there is no run yet
    protocol.write_result(tmp_path, {"modes": {"sequential": MODES["sequential"]}})
    assert protocol.main() == 0
    said = "sequential: 3 candidates; 20.0 s each against 2.0 s = 10.0 times"
    assert said in capsys.readouterr().out
    compared = json.loads((tmp_path / "compared.json").read_text())
    assert compared["modes"]["sequential"]["ratio"] == 10.0


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
    found = run_mode(
        jobs,
        Settings("sequential", "cpu", timeout_s=280),
        lambda section: saved.append(len(section["rows"])),
    )
    right, broken = found["rows"]
    assert saved == [1, 2, 2]
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
    found = run_mode(
        jobs, Settings("parallel-builds", "cpu", builders=2, timeout_s=30), lambda section: None
    )
    builds = {row["sample_index"]: row["status"] for row in found["builds"]}
    assert builds == dict(enumerate(["built"] * 4 + ["timeout"]))
    statuses = {row["sample_index"]: row["status"] for row in found["rows"]}
    expected = "correct incorrect runtime_error runtime_error timeout".split()
    assert statuses == dict(enumerate(expected))


@pytest.mark.slow
def test_the_budget_stops_new_candidates_and_cuts_what_is_late():
    jobs = [candidate(number, "x", first="time.sleep(300)") for number in range(2)]
    found = run_mode(
        jobs, Settings("sequential", "cpu", budget_s=10, grace_s=1), lambda section: None
    )
    summary = found["summary"]
    assert (found["rows"], summary["candidates"], summary["chosen"]) == ([], 0, 2)
