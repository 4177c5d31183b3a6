"""`concur analyze` on paper-sized data with planted truth: seconds, peak memory, and whether the
truth comes back.

    python -m benchmarks.analysis_scale --rows 90810 --rows 500000 --out analysis-scale.md

Each size runs in a process of its own, reading Parquet files as a user's would be: verdicts and
candidates with ids, five samples a task.
Planted: within a task, a sample a standard deviation longer has odds of being correct lower by the
factor PLANTED_ODDS; tasks differ in difficulty and in length; speedup does not depend on length.
--curate adds the time of curation on the same rows.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

SAMPLES_PER_TASK = 5
PLANTED_ODDS = 0.7  # per PLANTED_SD_TOKENS longer than the task's mean
PLANTED_SD_TOKENS = 1500.0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--rows", type=int, action="append", help="candidates; may be given again  [default: 90810]"
    )
    parser.add_argument("--curate", action="store_true", help="curate the same rows too")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", help="write the table there, Markdown")
    parser.add_argument("--one", metavar="DIR", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(Path(arguments.one), arguments.curate)))
        return 0
    found = []
    for rows in arguments.rows or [90_810]:
        with tempfile.TemporaryDirectory() as directory:
            plant(Path(directory), rows, arguments.seed)
            command = [
                sys.executable,
                "-m",
                "benchmarks.analysis_scale",
                "--one",
                directory,
                *(["--curate"] if arguments.curate else []),
            ]
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode:
                print(done.stderr, file=sys.stderr)
                return 1
            found.append({"rows": rows, **json.loads(done.stdout.splitlines()[-1])})
            print(json.dumps(found[-1]))
    text = table(found)
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
    print(text)
    return 0


def planted_frame(rows: int, seed: int, *, odds: float = PLANTED_ODDS) -> Any:
    """`rows` samples, five a task, with the columns of verdicts and candidates that are read
    (polars)."""
    import numpy as np
    import polars as pl

    random = np.random.default_rng(seed)
    task = np.arange(rows) // SAMPLES_PER_TASK
    tasks = int(task[-1]) + 1
    hardness = random.normal(size=tasks)
    deviation = random.normal(scale=PLANTED_SD_TOKENS, size=rows)
    tokens = np.maximum(1, np.rint(9000 + 1500 * hardness[task] + deviation)).astype(np.int64)
    chance = 1 / (
        1 + np.exp(0.3 + 1.2 * hardness[task] - math.log(odds) * deviation / PLANTED_SD_TOKENS)
    )
    correct = random.random(rows) < chance
    speedup = np.exp(
        random.normal(scale=0.4, size=tasks)[task] + random.normal(scale=0.4, size=rows)
    )
    numbers = pl.select(pl.int_range(rows, dtype=pl.Int64).alias("row")).to_series()
    return pl.DataFrame(
        {
            # as long as real ids are: joins and groups pay for their length
            "candidate_id": "candidate-" + numbers.cast(pl.String).str.zfill(22),
            "task_id": "kernelbook/" + pl.Series(task).cast(pl.String).str.zfill(21),
            "status": (
                pl.Series(correct).replace_strict(
                    {True: "correct", False: "incorrect"}, return_dtype=pl.String
                )
            ),
            "reason": (
                pl.Series(correct).replace_strict(
                    {True: "ok", False: "wrong_output"}, return_dtype=pl.String
                )
            ),
            "speedup": pl.select(pl.when(pl.Series(correct)).then(pl.Series(speedup))).to_series(),
            "reasoning_tokens": tokens,
            "finish_reason": pl.repeat("stop", rows, eager=True),
            "generator": pl.repeat("planted", rows, eager=True),
            "sample_index": np.arange(rows) % SAMPLES_PER_TASK,
        }
    )


def plant(directory: Path, rows: int, seed: int) -> None:
    """Write the two tables, in parts, with the speedup in a struct as verdicts have it."""
    import polars as pl

    frame = planted_frame(rows, seed)
    verdicts = frame.select(
        "candidate_id",
        "task_id",
        "status",
        "reason",
        pl.when(pl.col("speedup").is_not_null())
        .then(
            pl.struct(
                pl.col("speedup"),
                pl.col("speedup").alias("speedup_lower"),
                pl.lit(1.0).alias("candidate_ms"),
            )
        )
        .alias("timing"),
        pl.lit(["torch.nn.functional.linear", "torch.nn.functional.gelu"]).alias(
            "reference_operators"
        ),
    )
    candidates = frame.select(
        "candidate_id", "task_id", "generator", "sample_index", "reasoning_tokens", "finish_reason"
    )
    for name, table in (("verdicts", verdicts), ("candidates", candidates)):
        (directory / name).mkdir()
        for part, start in enumerate(range(0, rows, 100_000)):
            table.slice(start, 100_000).write_parquet(directory / name / f"part-{part:05d}.parquet")


def measure(directory: Path, curation: bool) -> dict[str, Any]:
    """Analyse (and curate) what `plant` wrote, in this process."""
    from flows.cli.analyze import analysis_of

    began_s = time.monotonic()
    found = analysis_of(
        str(directory / "verdicts"), str(directory / "candidates"), out=str(directory / "out")
    )
    analyze_s = time.monotonic() - began_s
    used = resource.getrusage(resource.RUSAGE_SELF)
    peak_gb, cpu_s = used.ru_maxrss / 1e6, used.ru_utime + used.ru_stime
    curate_s = _curate(directory) if curation else None
    observed = found.observations
    within, spearman = observed.everything.within, observed.speedup.spearman
    sd = within.sd_tokens or math.nan
    planted_unit = PLANTED_ODDS ** (within.unit_tokens / PLANTED_SD_TOKENS)
    per_unit = within.odds_ratio_per_unit
    return {
        "analyze_s": round(analyze_s, 2),
        "cpu_s": round(cpu_s, 2),
        "curate_s": round(curate_s, 2) if curate_s is not None else None,
        "peak_gb": round(peak_gb, 2),
        "tasks_with_both": within.tasks,
        "sd_tokens": round(sd, 1),
        "planted_odds_per_unit": round(planted_unit, 4),
        "odds_per_unit": [per_unit.value, per_unit.lower, per_unit.upper],
        "odds_recovered": bool(
            per_unit.bounded and per_unit.lower <= planted_unit <= per_unit.upper
        ),
        "spearman": [spearman.value, spearman.lower, spearman.upper],
        "zero_recovered": bool(spearman.bounded and spearman.lower <= 0 <= spearman.upper),
        "finding": list(observed.finding),
    }


def _curate(directory: Path) -> float:
    import polars as pl

    from tasks.curation.config import CurationConfig
    from tasks.curation.decisions import curate

    began_s = time.monotonic()
    verdicts, candidates = (
        pl.read_parquet(directory / name / "*.parquet") for name in ("verdicts", "candidates")
    )
    curate(
        verdicts.join(
            candidates.drop("task_id"), on="candidate_id", how="inner", maintain_order="left"
        ),
        CurationConfig(),
    )
    return time.monotonic() - began_s


def table(found: list[dict[str, Any]]) -> str:
    head = (
        "| rows | analyze | CPU seconds, start included | CPU microseconds a row | curate | peak"
        " memory "
    )
    lines = [f"{head}| odds ratio per 1,000 tokens (planted) | Spearman (planted 0) |"]
    lines.append("| ---: | ---: | ---: | ---: | ---: | ---: | --- | --- |")
    for each in found:
        odds, rho = (_bounds(each[name]) for name in ("odds_per_unit", "spearman"))
        curated = "" if each["curate_s"] is None else f"{each['curate_s']} s"
        cells = (
            f"{each['rows']:,}",
            f"{each['analyze_s']} s",
            str(each["cpu_s"]),
            f"{1e6 * each['cpu_s'] / each['rows']:.1f}",
            curated,
        )
        lines.append(
            f"| {' | '.join(cells)} | {each['peak_gb']} GB | {odds}"
            f" ({each['planted_odds_per_unit']}) | {rho} |"
        )
    return "\n".join(lines) + "\n"


def _bounds(values: list[float | None]) -> str:
    return "none" if None in values else f"{values[0]:.3f}, {values[1]:.3f} to {values[2]:.3f}"


if __name__ == "__main__":
    sys.exit(main())
