"""What curation costs: seconds and peak memory of every strategy on synthetic verdicts of any
number of rows, beside a plain polars script that takes the same rows as concur.

    python -m benchmarks.curation_scale --rows 90810 500000 [--strategy NAME ...] [--out FILE.json]

Each strategy of each size runs in a process of its own that reads the table from disk and decides
on every row, as `concur curate` does; "plain" is `plain_script`, which takes rows and decides no
more. `read_s` and `curate_s` are wall seconds after a first call on a few rows, which imports what
is needed; `cpu_s` is the processor time of both, which other work on the machine stretches less;
`peak_mib` is the peak resident memory, reading included. Rows are five a task; lengths, speedups,
statuses and operators are drawn with one seed. The tables hold what strategies decide by, no texts.
Says nothing of writing training sets.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tasks.curation.config import STRATEGY_NAMES, CurationConfig

if TYPE_CHECKING:
    import polars as pl

PLAIN = "plain"
PAPER_ROWS, PER_TASK, SEED = 90_810, 5, 20
OPERATORS = ("linear", "gelu", "softmax", "conv2d", "layer_norm", "relu", "matmul", "sum")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[PAPER_ROWS])
    parser.add_argument(
        "--strategy",
        choices=(PLAIN, *STRATEGY_NAMES),
        nargs="+",
        default=[PLAIN, *STRATEGY_NAMES],
    )
    parser.add_argument("--out", help="write the figures there, JSON")
    parser.add_argument("--one", nargs=2, metavar=("TABLE", "STRATEGY"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(Path(arguments.one[0]), arguments.one[1])))
        return 0
    found = []
    with tempfile.TemporaryDirectory() as directory:
        for rows in arguments.rows:
            table = Path(directory) / f"{rows}.parquet"
            subprocess.run(
                [
                    sys.executable,
                    "-c",
                    f"from benchmarks.curation_scale import *; write(Path({str(table)!r}), {rows})",
                ],
                check=True,
            )
            for strategy in arguments.strategy:
                command = [
                    sys.executable,
                    "-m",
                    "benchmarks.curation_scale",
                    "--one",
                    str(table),
                    strategy,
                ]
                done = subprocess.run(command, check=True, capture_output=True, text=True)
                found.append(json.loads(done.stdout))
                print(
                    "{rows:>10,} rows  {strategy:<28} read {read_s:6.2f} s  curate {curate_s:6.2f}"
                    " s  cpu {cpu_s:6.2f} s  {us_per_row:6.2f} us a row  {peak_mib:7,.0f} MiB "
                    " {taken:,} taken".format(**found[-1]),
                    flush=True,
                )
    if arguments.out:
        Path(arguments.out).write_text(
            json.dumps({"cpus": os.cpu_count(), "runs": found}, indent=2) + "\n", encoding="utf-8"
        )
    return 0


def measured(table: Path, strategy: str) -> dict[str, Any]:
    """One strategy on one table, in this process."""
    import polars as pl

    from tasks.curation.decisions import decide

    def taken_of(frame: pl.DataFrame) -> pl.DataFrame:
        if strategy == PLAIN:
            return plain_script(frame)
        return decide(frame, CurationConfig(strategy=strategy)).taken

    taken_of(synthetic(1000))
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    frame = pl.read_parquet(table)
    read_s = time.perf_counter() - began_s
    began_s = time.perf_counter()
    taken = taken_of(frame)
    curate_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {
        "rows": frame.height,
        "strategy": strategy,
        "taken": taken.height,
        "read_s": round(read_s, 3),
        "curate_s": round(curate_s, 3),
        "cpu_s": round(cpu_s, 3),
        "us_per_row": round((read_s + curate_s) / frame.height * 1e6, 3),
        "peak_mib": round(peak_mib, 1),
    }


def plain_script(rows: pl.DataFrame) -> pl.DataFrame:
    """The rows that concur takes of a table such as `synthetic`, in its order, with `criterion`."""
    import polars as pl

    tokens, speedup = pl.col("reasoning_tokens"), pl.col("speedup")
    columns = ["candidate_id", "task_id", "sample_index", "reasoning_tokens"]
    pool = (
        rows.with_row_index("row")
        .filter(pl.col("status") == "correct", tokens > 0)
        .unique("candidate_id", keep="first")
        .select(
            *("row", *columns),
            speedup=pl.col("timing").struct.field("speedup").fill_null(0.0),
            single=pl.col("reference_operators").list.len() == 1,
        )
        .sort("task_id", "sample_index", "candidate_id")
    )
    shortest = tokens == tokens.min().over("task_id")
    fastest = speedup == speedup.max().over("task_id")
    winners = pool.filter(shortest, fastest, speedup > 0)
    winners = winners.unique("task_id", keep="first", maintain_order=True)
    fast = pool.filter(speedup > 5).join(winners, on="row", how="anti", maintain_order="left")
    taken = pl.concat(
        [
            winners.with_columns(criterion=pl.lit("concise_and_fast")),
            fast.with_columns(criterion=pl.lit("high_speedup")),
        ]
    )
    singles = pool.filter("single").join(taken, on="row", how="anti", maintain_order="left")
    singles = singles.sort("task_id", tokens, -speedup, "sample_index", "candidate_id")
    singles = singles.unique("task_id", keep="first", maintain_order=True)
    wanted = math.ceil(2 * (taken.height / 2 - int(taken["single"].sum())))
    singles = singles.head(max(0, wanted)).with_columns(criterion=pl.lit("single_operator"))
    taken = pl.concat([taken, singles])
    return rows[taken["row"]].with_columns(taken["criterion"])


def write(path: Path, rows: int, seed: int = SEED) -> None:
    """A table of `rows` synthetic verdicts with their candidates, in no order, as Parquet."""
    synthetic(rows, seed).write_parquet(path)


def synthetic(rows: int, seed: int = SEED) -> Any:
    """The frame: hexadecimal ids, log-normal lengths and speedups, correctness falling with length
    as the paper observes."""
    import numpy as np
    import polars as pl

    rng = np.random.default_rng(seed)
    number = rng.permutation(rows)
    task = number // PER_TASK
    tokens = np.clip(rng.lognormal(8.8, 0.6, rows), 50, 32768).astype(np.int64)
    correct = rng.random(rows) < np.clip(0.95 - tokens / 30000, 0.04, 1)
    speedup = rng.lognormal(0.1, 0.8, rows)
    # a list of operators per task: one in three has one
    lists = [
        [OPERATORS[i % 8]] if i % 3 == 0 else [OPERATORS[i % 8], OPERATORS[i % 7], OPERATORS[i % 5]]
        for i in range(840)
    ]
    operators = pl.Series("reference_operators", lists, dtype=pl.List(pl.String))
    return pl.DataFrame(
        {
            "number": number,
            "task": task,
            "status": correct,
            "sample_index": number % PER_TASK,
            "reasoning_tokens": tokens,
        }
    ).select(
        pl.format(
            "{}{}", pl.lit("0" * 20), pl.col("number").cast(pl.String).str.pad_start(12, "0")
        ).alias("candidate_id"),
        pl.format("kernelbook/{}", pl.col("task").cast(pl.String).str.pad_start(8, "0")).alias(
            "task_id"
        ),
        pl.when("status").then(pl.lit("correct")).otherwise(pl.lit("incorrect")).alias("status"),
        pl.when("status")
        .then(
            pl.struct(
                speedup=pl.Series(speedup),
                speedup_lower=pl.Series(speedup * 0.95),
                speedup_upper=pl.Series(speedup * 1.05),
            )
        )
        .alias("timing"),
        operators.gather(task % len(lists)),
        pl.lit("org/writer").alias("generator"),
        "sample_index",
        "reasoning_tokens",
    )


if __name__ == "__main__":
    sys.exit(main())
