"""`concur analyze` on paper-sized data with planted truth, beside a plain script of the same
results: seconds, peak memory, and whether the truth comes back.

    python -m benchmarks.observations_scale --rows 90810 500000 [--out observations-scale.md]

Each program and size runs in a process of its own, which reads Parquet files as a user's would be:
verdicts and candidates with ids, five samples a task (`tests.support.planted`). Seconds are those
of the work, after imports; `cpu_s` is the processor time of the same, which other work on the
machine stretches less. The plain script computes the bins with Wilson's intervals, the odds
ratio within tasks, Spearman's rho with its jackknife, and Exec and speedup of the thirds by ARL
with their intervals: in polars, numpy and scipy, without a check of its input. It draws nothing and
writes nothing; what ours takes for the page and the figures is `page_s`.
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

PROGRAMS = ("ours", "plain")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, nargs="+", default=[90_810])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write the table there, Markdown")
    parser.add_argument("--one", nargs=2, metavar=("PROGRAM", "DIR"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measured(arguments.one[0], Path(arguments.one[1]))))
        return 0
    from tests.support.planted import plant

    rows = []
    for count in arguments.rows:
        with tempfile.TemporaryDirectory() as directory:
            plant(Path(directory), count, arguments.seed)
            for program in PROGRAMS:
                options = ("-m", "benchmarks.observations_scale", "--one", program, directory)
                command = [sys.executable, *options]
                done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
                rows.append({"rows": count, **json.loads(done.stdout)})
                print(json.dumps(rows[-1]), flush=True)
    text = table(rows)
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    print(text)
    return 0


def measured(program: str, directory: Path) -> dict[str, Any]:
    """Seconds, peak memory and headline numbers of one program, in this process."""
    found = {"ours": ours, "plain": plain}[program](directory)
    peak_mib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"program": program, "peak_mib": round(peak_mib), **found}


def ours(directory: Path) -> dict[str, Any]:
    import scipy.stats  # noqa: F401
    import statsmodels.stats.proportion  # noqa: F401

    from flows.analyze import read
    from tasks.curation.source import Source
    from tasks.observe.observations import observe
    from tasks.observe.page import write

    places = [str(directory / name) for name in ("verdicts", "candidates")]
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    found = observe(read(Source(*places, "nowhere", unfinished=True)))
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    began_s = time.perf_counter()
    write(found, directory / "out")
    page_s = time.perf_counter() - began_s
    odds, rho = (
        found.estimate(key) for key in ("odds_ratio_within_tasks", "spearman_of_length_and_speedup")
    )
    return {
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "page_s": round(page_s, 2),
        "odds": [odds.value, odds.lower, odds.upper],
        "rho": [rho.value, rho.lower, rho.upper],
        "exec": [row["exec"] for row in found.thirds],
    }


def plain(directory: Path) -> dict[str, Any]:
    from itertools import combinations

    import numpy as np
    import polars as pl
    from scipy.stats import rankdata, t
    from statsmodels.stats.proportion import proportion_confint

    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    tokens, correct = pl.col("reasoning_tokens"), pl.col("status") == "correct"
    verdicts = pl.scan_parquet(directory / "verdicts" / "*.parquet").select(
        "candidate_id", "task_id", "status", speedup=pl.col("timing").struct.field("speedup")
    )
    candidates = pl.scan_parquet(directory / "candidates" / "*.parquet")
    samples = verdicts.join(
        candidates.select("candidate_id", "reasoning_tokens"), on="candidate_id"
    ).collect()
    bins = samples.group_by(tokens.clip(upper_bound=20_224) // 256).agg(pl.len(), correct.sum())
    proportion_confint(bins["status"].to_numpy(), bins["len"].to_numpy(), method="wilson")

    mixed = samples.filter(correct.mean().over("task_id").is_between(0, 1, closed="none"))
    rank = tokens.rank("average") / pl.len()
    tasks = (
        mixed.select("task_id", y=correct, x=(rank - rank.mean()).over("task_id"))
        .group_by("task_id")
        .agg("x", "y", n=pl.len(), k=pl.col("y").sum())
    )
    squares = tasks["x"].explode().pow(2).sum()
    deviation = math.sqrt(squares / (mixed.height - tasks.height))
    sums, observed = [], 0.0
    for (n, k), part in tasks.group_by("n", "k"):
        x = np.array(part["x"].to_list()) / deviation
        observed += x[np.array(part["y"].to_list())].sum()
        sums.append(np.stack([x[:, list(each)].sum(1) for each in combinations(range(n), k)]))
    slope = 0.0
    for _ in range(8):
        information = expected = 0.0
        for each in sums:
            weights = np.exp(slope * each)
            weights /= weights.sum(0)
            mean = (weights * each).sum(0)
            expected += mean.sum()
            information += ((weights * each**2).sum(0) - mean**2).sum()
        slope += (observed - expected) / information
    odds = [math.exp(slope + z / math.sqrt(information)) for z in (0, -1.959964, 1.959964)]

    timed = samples.filter(correct, pl.col("speedup") > 0).with_columns(
        task=pl.col("task_id").rank("dense")
    )
    length, speed, task = (
        timed[name].to_numpy() for name in ("reasoning_tokens", "speedup", "task")
    )
    groups = np.random.default_rng(0).permutation(task.max()) % 50
    group = groups[task - 1]

    def rho(keep: Any) -> float:
        return float(np.corrcoef(rankdata(length[keep]), rankdata(speed[keep]))[0, 1])

    whole = rho(group >= 0)
    left = np.arctanh([rho(group != each) for each in range(50)])
    reach = t.ppf(0.975, 49) * math.sqrt(49 / 50 * ((left - left.mean()) ** 2).sum())
    bounds = [whole, *np.tanh([math.atanh(whole) - reach, math.atanh(whole) + reach])]

    of_task = samples.group_by("task_id").agg(
        arl=tokens.mean(),
        right=correct.mean(),
        log=pl.col("speedup").log().sum(),
        timed=pl.col("speedup").count(),
    )
    third = (pl.struct("arl", "task_id").rank("ordinal") * 3 - 1) // pl.len()
    of_third = of_task.with_columns(third=third).sort("third")
    execs, draws = [], max(200, min(2000, 4_000_000 // of_task.height))
    for part in of_third.partition_by("third"):
        right, log, count = (part[name].to_numpy() for name in ("right", "log", "timed"))
        execs.append(float(right.mean()))
        drawn = np.random.default_rng(0).integers(0, len(log), (draws, len(log)))
        np.quantile(np.exp(log[drawn].sum(1) / count[drawn].sum(1)), [0.025, 0.975])
        t.interval(0.95, len(right) - 1, right.mean(), right.std() / math.sqrt(len(right)))
    seconds, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    return {
        "seconds": round(seconds, 2),
        "cpu_s": round(cpu_s, 2),
        "odds": odds,
        "rho": bounds,
        "exec": execs,
    }


def table(rows: list[dict[str, Any]]) -> str:
    lines = [
        "| rows | program | seconds | CPU | peak memory | odds ratio | Spearman | Exec by ARL |",
        "| ---: | --- | ---: | ---: | ---: | --- | --- | --- |",
    ]
    for row in rows:
        odds, rho = (
            f"{v:.3f} ({low:.3f} to {high:.3f})" for v, low, high in (row["odds"], row["rho"])
        )
        execs = ", ".join(f"{value:.3f}" for value in row["exec"])
        cells = [f"{row['rows']:,}", row["program"], f"{row['seconds']}", f"{row['cpu_s']}"]
        cells += [f"{row['peak_mib']} MiB", odds, rho, execs]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
