"""What two lanes on a GPU cost and give: recorded responses judged by one lane, then by several, in
the same call, from libraries that are built before.

    python -m benchmarks.lanes --tasks kernelbench.parquet --responses qwq32b_candidates.parquet
    --limit 60 --out DIR
    python -m benchmarks.lanes              # bundled answers, five a task
    python -m benchmarks.lanes --language cpp --limit 4     # without a GPU

Prints, as JSON, the candidates an hour and device-seconds of each number of lanes, the
ratio, every status that differs, and how far the speedups of correct candidates are apart.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

from benchmarks.timing_budget import build, choosing, chosen
from kernels_eval.config import BuildConfig, EvalConfig, TimingConfig
from kernels_eval.pool.pool import Pool
from kernels_eval.records import Candidate, KernelTask, Language, Verdict

CLOSE = 0.10
"""How far apart speedups may be."""


def main() -> int:
    parser = choosing(__doc__, limit=60)
    parser.add_argument("--lanes", default="1,2", help="the first is what others are compared with")
    parser.add_argument("--level", choices=("screen", "confirm"), default="screen")
    parser.add_argument("--max-s", type=float, default=1.0, help="timing budget, seconds")
    parser.add_argument("--builders", type=int, default=None)
    parser.add_argument("--out", type=Path, help="for what is printed, and every verdict")
    arguments = parser.parse_args()
    language = Language(arguments.language)
    pairs = sorted(chosen(arguments, language), key=lambda pair: pair[0].task_id)
    found, verdicts = compared(arguments, language, pairs)
    print(json.dumps(found, indent=2))
    if arguments.out:
        arguments.out.mkdir(parents=True, exist_ok=True)
        (arguments.out / "lanes.json").write_text(json.dumps(found, indent=2))
        told = [verdict.model_dump(mode="json") for each in verdicts for verdict in each.values()]
        (arguments.out / "verdicts.json").write_text(json.dumps(told))
    return 0


Pairs = list[tuple[KernelTask, Candidate]]
Verdicts = dict[str, Verdict]


def compared(
    arguments: argparse.Namespace, language: Language, pairs: Pairs
) -> tuple[dict[str, object], list[Verdicts]]:
    timing = TimingConfig(max_s=arguments.max_s)
    config = EvalConfig(timing=timing, build=BuildConfig(timeout_s=240))
    config = config.screened() if arguments.level == "screen" else config
    options = {"workers": 1, "builders": arguments.builders}
    build(pairs, arguments.max_s, arguments.builders or max(1, (os.cpu_count() or 2) - 1))
    found: dict[str, object] = {"candidates": len(pairs)}
    reached: list[Verdicts] = []
    for lanes in map(int, arguments.lanes.split(",")):
        pool = Pool(language, config, lanes=lanes, **options)
        verdicts, told = judged(f"{lanes} lanes", pool, pairs)
        found[f"{lanes} lanes"] = told
        reached.append(verdicts)
        if len(reached) > 1:
            base = found[f"{arguments.lanes.split(',')[0]} lanes"]
            ratio = told["candidates_per_hour"] / base["candidates_per_hour"]
            found[f"{lanes} lanes"] = told | {"throughput_ratio": round(ratio, 2)}
            found[f"{lanes} lanes against the first"] = differences(reached[0], verdicts)
    return found, reached


def judged(name: str, pool: Pool, pairs: Pairs) -> tuple[Verdicts, dict]:
    with pool:
        stream = pool.verify(iter(pairs))
        verdicts = [next(stream)]  # the workers have started
        started = time.monotonic()
        verdicts += stream
        wall_s = time.monotonic() - started
        seen = pool.telemetry.summary()
    said = f"{name}: {len(verdicts)} in {wall_s:.0f} s; {pool.quarantined} {pool.cautions}"
    print(said, file=sys.stderr, flush=True)
    slowest = sorted((verdict.run_s for verdict in verdicts), reverse=True)
    told = {
        "wall_s": round(wall_s, 1),
        "candidates_per_hour": round(3600 * (len(verdicts) - 1) / wall_s),
        "device_s_per_candidate": seen["device_s_per_candidate"],
        "device_busy_share": seen["device_busy_share"],
        "run_s_mean": round(statistics.fmean(slowest), 2),
        "run_s_slowest": [round(each, 1) for each in slowest[:3]],
        "seconds": seen["seconds"],
    }
    return {verdict.candidate_id: verdict for verdict in verdicts}, told


def differences(base: Verdicts, now: Verdicts) -> dict[str, object]:
    both = [(verdict, now[name]) for name, verdict in base.items()]
    ratios = [b.speedup / a.speedup for a, b in both if a.timing and b.timing]
    close = sum(1 / (1 + CLOSE) <= ratio <= 1 + CLOSE for ratio in ratios)
    return {
        "statuses_that_differ": [
            f"{a.candidate_id} of {a.task_id}: {a.reason} and {b.reason} ({b.detail[:120]})"
            for a, b in both
            if a.status is not b.status
        ],
        "timed": len(ratios),
        "speedups_within_10_percent": round(close / len(ratios), 3) if ratios else None,
        "median_ratio": round(statistics.median(ratios), 3) if ratios else None,
        "furthest": [round(each, 2) for each in sorted(ratios)[:3] + sorted(ratios)[-3:]],
        "unstable": [sum("unstable" in pair[i].flags for pair in both) for i in (0, 1)],
    }


if __name__ == "__main__":
    sys.exit(main())
