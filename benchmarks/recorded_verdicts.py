"""Our verdicts against recorded ones: real responses of QwQ-32B to KernelBench tasks, through the
line's own stages.

    python -m benchmarks.recorded_verdicts --tasks kernelbench.parquet --responses
    qwq32b_candidates.parquet --limit 64 --out DIR

Needs a GPU. Prints a table of our status against what KernelBench's harness recorded, wall time,
and seconds per candidate split into build and run; writes the verdicts and `summary.json` to --out.
Synthesis and verification are the line's stages, without Prefect.
"""

from __future__ import annotations

import argparse
import json
import signal
import statistics
import sys
import time
from collections import Counter
from pathlib import Path

from kernels_eval.config import BuildConfig, EvalConfig, TimingConfig
from kernels_eval.errors import EvalError
from kernels_eval.records import Language
from tasks.progress import observed_by
from tasks.sources.config import TasksConfig
from tasks.sources.stage import load_tasks
from tasks.store import Snapshot, fingerprint
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.stage import Synthesis
from tasks.tables import VERDICTS
from tasks.verification import stage as verification
from tasks.verification.config import VerificationConfig

DETAILS = (
    *(
        "task_id",
        "sample_index",
        "status",
        "reason",
        "detail",
        "recorded_compiled",
        "recorded_correct",
        "build_s",
        "run_s",
        "build_tier",
    ),
    *("timing", "correctness", "log_tail", "library_calls", "custom_kernels", "flags", "phases"),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", required=True, help="KernelBench tasks, Parquet")
    parser.add_argument("--responses", required=True, help="recorded responses, Parquet")
    parser.add_argument("--limit", type=int, default=64, help="candidates, spread over tasks")
    parser.add_argument("--levels", default="1,2,3,4", help="of which levels")
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out so many of them (those of an earlier run)"
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--builders", type=int, default=None)
    parser.add_argument(
        "--budget-s",
        type=int,
        default=0,
        help="stop after so many seconds and report what is there; 0: never",
    )
    parser.add_argument(
        "--max-s", type=float, default=4.0, help="timing budget of one candidate, seconds"
    )
    arguments = parser.parse_args()
    try:
        return compare(arguments)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def compare(arguments: argparse.Namespace) -> int:
    import polars as pl

    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    levels = [int(level) for level in arguments.levels.split(",")]
    recorded = pl.read_parquet(arguments.responses).filter(pl.col("level").is_in(levels))
    # one response of every task, then a second of every task, ... until the limit: many tasks, few
    # samples each
    in_turn = recorded.sort("sample_id", "problem_id", "level").slice(
        arguments.skip, arguments.limit
    )
    chosen = in_turn.sort("level", "problem_id", "sample_id")
    selected = out / "responses.parquet"
    chosen.write_parquet(selected)
    wanted = {
        f"kernelbench/L{level}/{problem}"
        for level, problem in chosen.select("level", "problem_id").unique().iter_rows()
    }
    root = str(out / "snapshots")
    tasks = [
        task
        for task in load_tasks(TasksConfig(source="kernelbench", location=arguments.tasks))
        if task.task_id in wanted
    ]
    ref = _tasks_snapshot(root, tasks)
    samples = int(chosen["sample_id"].max()) + 1
    config = SynthesisConfig(sampler="recorded", responses=str(selected), samples_per_task=samples)
    candidates = Synthesis(ref, config, Language.CUDA).run()
    started = time.monotonic()
    protocol = EvalConfig(
        timing=TimingConfig(max_s=arguments.max_s), build=BuildConfig(timeout_s=240)
    )
    config = VerificationConfig(eval=protocol, screen=False, builders=arguments.builders)
    pools = []

    class Watched(verification.Verification):
        """Lets the telemetry be read after an interruption, too."""

        def pool(self):
            pools.append(super().pool())
            return pools[-1]

    work = Watched(candidates, ref, config, Language.CUDA)
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    signal.alarm(arguments.budget_s)
    try:
        with observed_by(_print_progress(started)):
            verification.run(candidates, ref, config, Language.CUDA, verification=Watched)
    except KeyboardInterrupt:
        print(
            f"stopped after {time.monotonic() - started:.0f} s; the table holds what was finished",
            flush=True,
        )
        work.snapshot.recover(VERDICTS)
    finally:
        signal.alarm(0)
    wall = time.monotonic() - started
    _report(
        work.snapshot.read(unique="candidate_id"),
        candidates.open().read(unique="candidate_id"),
        chosen,
        wall,
        out,
        pools,
    )
    return 0


def _tasks_snapshot(root: str, tasks: list):
    from tasks.tables import TASKS

    rows = [task.model_dump(mode="json") for task in tasks]
    snapshot = Snapshot(root, "tasks", fingerprint("tasks", rows))
    if not snapshot.finished:
        snapshot.append(rows, TASKS)
        snapshot.publish(config={}, rows=len(rows))
    return snapshot.ref


def _print_progress(started: float):
    def show(stage: str, done: int, total: int, note: str) -> None:
        print(f"{time.monotonic() - started:6.1f} s  {stage} {done}/{total}  {note}", flush=True)

    return show


def _report(verdicts, candidates, chosen, wall: float, out: Path, pools: list) -> None:
    import polars as pl

    keyed = candidates.select("candidate_id", "task_id", "sample_index").with_columns(
        pl.col("task_id").str.extract(r"L(\d+)/", 1).cast(pl.Int64).alias("level"),
        pl.col("task_id").str.extract(r"/(\d+)$", 1).cast(pl.Int64).alias("problem_id"),
    )
    joined = verdicts.join(keyed.drop("task_id"), on="candidate_id").join(
        chosen.select(
            "level",
            "problem_id",
            pl.col("sample_id").alias("sample_index"),
            "recorded_compiled",
            "recorded_correct",
            "recorded_error",
        ),
        on=["level", "problem_id", "sample_index"],
    )
    rows = list(joined.iter_rows(named=True))

    def said(row: dict) -> str:
        return (
            "correct"
            if row["recorded_correct"]
            else ("compiled, not correct" if row["recorded_compiled"] else "not compiled")
        )

    table = Counter((f"{row['status']}/{row['reason']}", said(row)) for row in rows)
    columns = ("correct", "compiled, not correct", "not compiled")
    lines = [
        "| our verdict | " + " | ".join(f"recorded: {c}" for c in columns) + " |",
        "| --- | ---: | ---: | ---: |",
    ]
    for name in sorted({name for name, _ in table}):
        lines.append(f"| {name} | " + " | ".join(str(table[name, c]) for c in columns) + " |")
    ran = [row["run_s"] for row in rows if row["run_s"] > 0]
    built = [row["build_s"] for row in rows if row["build_s"] > 0]
    timed = [row["timing"]["speedup"] for row in rows if row["timing"]]
    summary = {
        "candidates": len(rows),
        "wall_s": round(wall, 1),
        "wall_s_per_candidate": round(wall / max(len(rows), 1), 2),
        "build_s_median": round(statistics.median(built), 2) if built else None,
        "build_s_mean": round(statistics.fmean(built), 2) if built else None,
        "run_s_median": round(statistics.median(ran), 2) if ran else None,
        "run_s_mean": round(statistics.fmean(ran), 2) if ran else None,
        "tiers": dict(Counter(str(row["build_tier"]) for row in rows)),
        "device": sorted({row["device"] for row in rows if row["device"]}),
        "isolation": sorted(
            {", ".join(row["isolation"] or []) for row in rows if row["isolation"]}
        ),
        "speedup_median": round(statistics.median(timed), 3) if timed else None,
        "telemetry": pools[-1].telemetry.summary() if pools else None,
        "phase_s_median_correct": _phases([row for row in rows if row["status"] == "correct"]),
        "phase_s_mean_on_device": _phases(
            [row for row in rows if row["run_s"] > 0], statistics.fmean
        ),
        "table": {
            f"{ours} | recorded {theirs}": count for (ours, theirs), count in sorted(table.items())
        },
    }
    (out / "summary.json").write_text(json.dumps(summary, indent=2))
    (out / "table.md").write_text("\n".join(lines) + "\n")
    details = [
        {name: row[name] for name in DETAILS}
        | {"recorded_error": (row["recorded_error"] or "")[:400]}
        for row in rows
    ]
    (out / "verdicts.json").write_text(json.dumps(details, indent=1, default=str))
    print("\n".join(lines))
    print(json.dumps({key: value for key, value in summary.items() if key != "table"}, indent=2))


def _phases(rows: list[dict], middle=statistics.median) -> dict[str, float]:
    phases = [row["phases"] for row in rows if row["phases"]]
    return (
        {name: round(middle(phase[name] for phase in phases), 3) for name in phases[0]}
        if phases
        else {}
    )


if __name__ == "__main__":
    sys.exit(main())
