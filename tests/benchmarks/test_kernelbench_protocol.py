"""KernelBench's protocol as we time it: what its processes report, what the summary makes of it,
and the comparison with ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

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


def candidate(number: int, result: str, first: str = "") -> Job:
    return Job("test/scale", number, TASK, CANDIDATE.format(result=result, first=first))


def row(number: int, status: str, wall_s: float, **seconds: float) -> dict[str, Any]:
    return {
        "task_id": "t",
        "sample_index": number,
        "status": status,
        "wall_s": wall_s,
        "seconds": seconds,
    }


def section(
    rows: list[dict], run_wall_s: float, builds: list[dict] | None = None, build_wall_s: float = 0.0
) -> dict[str, Any]:
    mode = "sequential" if builds is None else "parallel-builds"
    settings = {"mode": mode, "builders": 2}
    made = {
        "settings": settings,
        "chosen": 9,
        "builds": builds or [],
        "build_wall_s": build_wall_s,
        "rows": rows,
        "run_wall_s": run_wall_s,
    }
    return made | {"summary": summarise(made)}


SEQUENTIAL = section(
    [
        row(0, "correct", 30.0, load=20.0, reference_timing=4.0),
        row(1, "compile_error", 20.0, load=18.0),
        row(2, "timeout", 10.0),
    ],
    60.0,
)
PARALLEL = section(
    [row(0, "correct", 8.0, reference_timing=4.0), row(1, "compile_error", 20.0)],
    28.0,
    builds=[row(0, "built", 40.0), row(1, "compile_error", 20.0), row(2, "built", 60.0)],
    build_wall_s=60.0,
)


def verdict(number: int, status: str, spent_s: float) -> dict[str, Any]:
    return {
        "task_id": "t",
        "sample_index": number,
        "status": status,
        "build_s": spent_s / 2,
        "run_s": spent_s / 2,
    }


def test_a_process_is_worth_its_last_report() -> None:
    def line(phase: str, status: str | None, **seconds: float) -> str:
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


def test_a_chosen_sample_is_spread_out_and_always_the_same() -> None:
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


def test_the_summary_divides_each_phase_by_what_went_through_it() -> None:
    summary = SEQUENTIAL["summary"]
    assert (summary["candidates"], summary["chosen"], summary["wall_s"]) == (3, 9, 60.0)
    assert (summary["s_per_candidate_mean"], summary["s_per_candidate_median"]) == (20.0, 20.0)
    assert summary["run_split_mean_s"]["load"] == pytest.approx(38 / 3, abs=1e-3)
    summary = PARALLEL["summary"]
    assert summary["wall_s"] == 88.0
    assert summary["s_per_candidate_mean"] == 60 / 3 + 28 / 2  # three were built, two have run
    assert summary["s_per_candidate_mean_without_trying_again"] == 60 / 3 + 8 / 2
    assert (
        summary["builds_failed"],
        summary["builds_tried_again"],
        summary["builds_tried_again_s"],
    ) == (1, 1, 20.0)
    assert section([], 0.0)["summary"]["candidates"] == 0
    assert (
        len(protocol.table({"modes": {"sequential": SEQUENTIAL, "parallel-builds": PARALLEL}})) > 10
    )


def test_the_same_candidates_are_compared() -> None:
    modes = {"sequential": SEQUENTIAL, "parallel-builds": PARALLEL}
    verdicts = [
        verdict(0, "correct", 1.0),
        verdict(1, "incorrect", 2.0),
        verdict(2, "timeout", 3.0),
        verdict(3, "no_code", 0.0),
    ]
    found = compare(modes, verdicts, {"wall_s": 6.0})
    sequential, parallel = found["modes"]["sequential"], found["modes"]["parallel-builds"]
    assert (sequential["candidates"], sequential["exact"], sequential["ours_s_per_candidate"]) == (
        3,
        True,
        2.0,
    )
    assert (sequential["kernelbench_s_per_candidate"], sequential["ratio"]) == (20.0, 10.0)
    assert sequential["ratio_lenient"] == pytest.approx((60 - 4) / 3 / 2, abs=0.01)
    assert sequential["verdicts"] == {
        "correct | ours correct": 1,
        "compile_error | ours incorrect": 1,
        "timeout | ours timeout": 1,
    }
    # candidate 2 was built but never ran: its share of the builds is left out, and so is its share
    # of our time
    assert (parallel["candidates"], parallel["exact"], parallel["ours_s_per_candidate"]) == (
        2,
        False,
        1.5,
    )
    assert parallel["kernelbench_s_per_candidate"] == (28 + 60 * 60 / 120) / 2
    assert parallel["kernelbench_s_per_candidate_lenient"] == (8 - 4 + 30) / 2
    assert compare(modes, [verdict(7, "correct", 1.0)], {"wall_s": 6.0})["modes"]["sequential"] == {
        "candidates": 0
    }


def test_ours_can_be_compared_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    verdicts = tmp_path / "verdicts.json"
    verdicts.write_text(
        json.dumps(
            [verdict(0, "correct", 1.0), verdict(1, "incorrect", 2.0), verdict(2, "timeout", 3.0)]
        )
    )
    (tmp_path / "summary.json").write_text(json.dumps({"wall_s": 6.0, "candidates": 3}))
    monkeypatch.setattr(
        sys, "argv", ["kernelbench_protocol", "--out", str(tmp_path), "--ours", str(verdicts)]
    )
    assert protocol.main() == 1  # there is no run yet
    protocol.write_result(tmp_path, {"modes": {"sequential": SEQUENTIAL}})
    assert protocol.main() == 0
    assert (
        "sequential: 3 candidates; 20.0 s each against 2.0 s = 10.0 times"
        in capsys.readouterr().out
    )
    assert (
        json.loads((tmp_path / "compared.json").read_text())["modes"]["sequential"]["ratio"] == 10.0
    )


def test_the_responses_of_what_was_done_can_be_given_to_ours(tmp_path: Path) -> None:
    import polars as pl

    keys = [(1, 1, 0), (1, 1, 1), (2, 1, 0)]
    recorded = pl.DataFrame(
        keys, schema=["level", "problem_id", "sample_id"], orient="row"
    ).with_columns(response=pl.lit("text"))
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
def test_bundled_candidates_build_and_run_one_after_the_other() -> None:
    task = next(task for task in bundled.load() if task.name == "scale_shift_silu")
    codes = {
        number: parse_response(bundled.responses(task.name, "cpp")[number]).code
        for number in (0, 2)
    }  # 2 does not compile
    jobs = [Job(task.task_id, number, task.code, code) for number, code in codes.items() if code]
    saved: list[int] = []
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
def test_whatever_a_candidate_does_there_is_a_row() -> None:
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
    assert {row["sample_index"]: row["status"] for row in found["builds"]} == dict.fromkeys(
        range(4), "built"
    ) | {4: "timeout"}
    statuses = {row["sample_index"]: row["status"] for row in found["rows"]}
    assert statuses == {
        0: "correct",
        1: "incorrect",
        2: "runtime_error",
        3: "runtime_error",
        4: "timeout",
    }


@pytest.mark.slow
def test_the_budget_stops_new_candidates_and_cuts_what_is_late() -> None:
    jobs = [candidate(number, "x", first="time.sleep(300)") for number in range(2)]
    found = run_mode(
        jobs, Settings("sequential", "cpu", budget_s=10, grace_s=1), lambda section: None
    )
    assert (
        found["rows"] == []
        and found["summary"]["candidates"] == 0
        and found["summary"]["chosen"] == 2
    )
