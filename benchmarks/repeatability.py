"""Does a speedup repeat? Correct candidates, timed again and again, each time in processes of their
own.

    python -m benchmarks.repeatability --tasks kernelbench.parquet --responses responses.parquet
    --verdicts DIR/verdicts.json --out DIR

`--verdicts` is what benchmarks.recorded_verdicts wrote: its correct candidates are taken, spread
over their speedups. Prints a table: the spread of the speedups ((largest - smallest) / median), and
how often the 95 % interval of one repetition covers the median of a later one.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
from itertools import combinations
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", required=True)
    parser.add_argument("--responses", required=True)
    parser.add_argument("--verdicts", required=True)
    parser.add_argument("--out", required=True)
    parser.add_argument("--count", type=int, default=20)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument(
        "--max-s", type=float, default=1.5, help="timing budget of one measurement, seconds"
    )
    parser.add_argument(
        "--gpus",
        default="",
        help="GPUs that share the candidates, such as 0,1; each candidate stays on its own",
    )
    parser.add_argument("--once", help=argparse.SUPPRESS)
    parser.add_argument("--part", type=int, default=0, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    return measure_once(arguments) if arguments.once else repeat(arguments)


def chosen(arguments: argparse.Namespace) -> list[dict]:
    """Correct candidates at even steps of their speedup."""
    rows = [
        row
        for row in json.loads(Path(arguments.verdicts).read_text())
        if row["status"] == "correct" and row["timing"]
    ]
    rows.sort(key=lambda row: row["timing"]["speedup"])
    step = max(1.0, len(rows) / arguments.count)
    return [rows[int(i * step)] for i in range(min(arguments.count, len(rows)))]


def measure_once(arguments: argparse.Namespace) -> int:
    import polars as pl

    from kernels_eval import Candidate, EvalConfig, Language
    from kernels_eval.config import BuildConfig, TimingConfig
    from kernels_eval.evaluator import Evaluator
    from tasks.sources.config import TasksConfig
    from tasks.sources.stage import load_tasks
    from tasks.synthesis.parsing import parse_response

    tasks = {
        task.task_id: task
        for task in load_tasks(TasksConfig(source="kernelbench", location=arguments.tasks))
    }
    responses = {
        (f"kernelbench/L{row['level']}/{row['problem_id']}", row["sample_id"]): row["response"]
        for row in pl.read_parquet(arguments.responses).iter_rows(named=True)
    }
    config = EvalConfig(
        timing=TimingConfig(max_s=arguments.max_s), build=BuildConfig(timeout_s=240)
    )
    found = []
    with Evaluator(Language.CUDA, config) as evaluator:
        for row in chosen(arguments)[arguments.part :: len(arguments.gpus.split(","))]:
            key = (row["task_id"], row["sample_index"])
            code = parse_response(responses[key]).code
            candidate = Candidate(
                candidate_id=f"{key[0]}#{key[1]}",
                task_id=key[0],
                language=Language.CUDA,
                generator="recorded",
                code=code,
            )
            verdict = evaluator(tasks[row["task_id"]], candidate)
            found.append(verdict.model_dump(mode="json"))
            print(
                f"{candidate.candidate_id}: {verdict.status.value}/{verdict.reason}"
                f" {verdict.speedup:.3f}",
                flush=True,
            )
    Path(arguments.once).write_text(json.dumps(found))
    return 0


def repeat(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    rounds = []
    for index in range(arguments.repeats):
        found: dict[str, dict] = {}
        running = []
        for part, gpu in enumerate(arguments.gpus.split(",")):
            target = out / f"repeat-{index}-{part}.json"
            command = [
                sys.executable,
                "-m",
                "benchmarks.repeatability",
                *sys.argv[1:],
                "--once",
                str(target),
                "--part",
                str(part),
            ]
            environment = os.environ | ({"CUDA_VISIBLE_DEVICES": gpu} if gpu else {})
            running.append((target, subprocess.Popen(command, env=environment)))
        for target, process in running:
            if process.wait():
                raise SystemExit(f"a repetition ended with status {process.returncode}")
            found |= {row["candidate_id"]: row for row in json.loads(target.read_text())}
        rounds.append(found)
    report = summarise(rounds)
    (out / "repeatability.json").write_text(json.dumps(report, indent=2))
    print(json.dumps(report, indent=2))
    return 0


def summarise(rounds: list[dict[str, dict]]) -> dict:
    """Spread and coverage over candidates that were correct in every round."""
    names = [name for name in rounds[0] if all(name in r and r[name]["timing"] for r in rounds)]
    spreads, deviations, covered = {}, [], []
    for name in names:
        timings = [r[name]["timing"] for r in rounds]
        speedups = [timing["speedup"] for timing in timings]
        spreads[name] = (max(speedups) - min(speedups)) / statistics.median(speedups)
        deviations.append(statistics.stdev(speedups) / statistics.fmean(speedups))
        for earlier, later in combinations(timings, 2):
            covered.append(earlier["speedup_lower"] <= later["speedup"] <= earlier["speedup_upper"])
    return {
        "candidates": len(names),
        "left_out": sorted(set(rounds[0]) - set(names)),
        "median_spread": round(statistics.median(spreads.values()), 4),
        "worst_spread": round(max(spreads.values()), 4),
        "standard_deviation_median": round(statistics.median(deviations), 4),
        "covered": round(sum(covered) / len(covered), 3),
        "comparisons": len(covered),
        "spreads": {
            name: round(value, 4)
            for name, value in sorted(spreads.items(), key=lambda pair: -pair[1])
        },
    }


if __name__ == "__main__":
    sys.exit(main())
