"""Which tasks cannot tell a right kernel from a wrong one? Loads every reference and computes its
expected values, as verification does.

    python -m benchmarks.degenerate_tasks --tasks kernelbench.parquet --language cuda --out DIR

Prints every task that ends as a task_error with its evidence, and those with flags of their own;
writes degenerate_tasks.json with all of them. `--part 0/4` takes every fourth task (one process a
GPU), `--budget-s` stops in time.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from kernels_eval.config import EvalConfig, LimitsConfig
from kernels_eval.devices import device_for
from kernels_eval.isolation.sandbox import Child, ForkServer
from kernels_eval.parent.messages import Stop
from kernels_eval.parent.reference_handle import ReferenceProcess
from kernels_eval.records import KernelTask, Language
from tasks.sources.config import TasksConfig
from tasks.sources.stage import load_tasks


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", required=True, help="KernelBench tasks, Parquet")
    parser.add_argument("--levels", default="1,2,3")
    parser.add_argument(
        "--language", default="cuda", choices=[language.value for language in Language]
    )
    parser.add_argument("--part", default="0/1", help="which share of the tasks, such as 0/4")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out so many tasks, those of an earlier run"
    )
    parser.add_argument("--budget-s", type=float, default=3600)
    parser.add_argument(
        "--reference-s", type=float, default=60, help="deadline of one command to a reference"
    )
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    levels = {int(level) for level in arguments.levels.split(",")}
    part, parts = map(int, arguments.part.split("/"))
    loaded = load_tasks(TasksConfig(source="kernelbench", location=arguments.tasks))
    tasks = [task for task in loaded if task.level in levels][arguments.skip :]
    config = EvalConfig(limits=LimitsConfig(reference_s=arguments.reference_s))
    device, started, rows = device_for(Language(arguments.language)), time.monotonic(), []
    server = ForkServer(threads=config.threads)
    for task in tasks[part::parts]:
        if time.monotonic() - started > arguments.budget_s:
            break
        if not server.alive:
            server = ForkServer(threads=config.threads)
        rows.append(judged(task, server, config, device))
        print(json.dumps(rows[-1])[:300], flush=True)
    server.close()
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    (out / f"degenerate_tasks-{part}.json").write_text(json.dumps(rows, indent=1))
    report(rows, len(tasks[part::parts]))
    return 0


def judged(task: KernelTask, server: ForkServer, config: EvalConfig, device: str) -> dict[str, Any]:
    started = time.monotonic()
    reference = ReferenceProcess(
        lambda: Child(server, "reference", config.limits), task, config, device
    )
    row: dict[str, Any] = {"task_id": task.task_id, "name": task.name, "reason": "ok", "detail": ""}
    try:
        reference.open()
        row |= {
            "flags": list(reference.flags),
            "trials": [trial.name for trial in reference.trials],
            "oracle": reference.oracle,
        }
    except Stop as stop:
        row |= {"reason": stop.finding.reason, "detail": stop.finding.detail[:300]}
    finally:
        reference.close()
    return row | {"seconds": round(time.monotonic() - started, 2)}


def report(rows: list[dict[str, Any]], wanted: int) -> None:
    print(f"{len(rows)} of {wanted} tasks: {dict(Counter(row['reason'] for row in rows))}")
    for row in rows:
        if row["reason"] != "ok":
            print(f"| {row['task_id']} | {row['reason']} | {row['detail']} |")
        elif row.get("flags"):
            print(f"| {row['task_id']} | flags | {', '.join(row['flags'])} |")


if __name__ == "__main__":
    sys.exit(main())
