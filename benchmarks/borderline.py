"""Do verdicts repeat? Thirty cases near a gate, a draw or the clock, judged again and again.

    python -m benchmarks.borderline --runs 10 --processes 12 --load 6 --out verdicts.jsonl

Each verdict is one at level `confirm`, with secret seeds and a new process of the reference; those
of `TIMED` are timed, in half a second. `--load` spins as many processes beside them. Verdicts are
appended to --out as they come, and a run that is stopped resumes. Prints how often each case was
given each reason. Needs what kernels_eval needs, and pyyaml.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

from kernels_eval.config import TimingConfig
from tests.support.adversarial import CORPUS, VERDICTS, Trial, trials_of
from tests.support.kernels import verifying

UNTIMED = """
t82-factor_beside_the_gate-cheat
t82-eighteen_bits-cheat
t82-fp16_terms_of_a_loss-cheat
t82-terms_of_a_long_mean_off_by_a_ten_thousandth-cheat
t64-int8_in_groups-cheat
t52-long_mean_in_bf16-cheat
t61-part_of_a_long_sum-cheat
t61-part_of_a_running_variance-cheat
t62-few_iterations_where_weights_are_drawn_alike-cheat
t48-no_row_is_near_a_far_one-cheat
t61-upper_third_of_each_window-cheat
t62-few_iterations_of_an_implicit_layer-cheat
t85-one_past_the_end-cheat
t82-factor_beside_the_gate-honest
t82-largest_by_arithmetic-cheat
t49-quantised_by_the_reciprocal-cheat
honest_forms-one_number_that_cancels
t17-sliding_sum_of_few_digits-honest
t49-one_pass_variance_by_tree-honest
t49-one_pass_variance_of_products-cheat
honest_forms-a_router_with_fp32_accumulators
t85-one_past_the_end-honest
""".split()
TIMED = """
t45-works_while_the_reference_is_timed-cheat
t78-divided_times-cheat
t28-filled_later-cheat
t44-threads_that_end-honest
honest_forms-two_openmp_threads
honest_forms-one_hot_rows_of_a_megabyte
honest_forms-as_fast_as_memory
t62-gain_of_zero_skipped-cheat
""".split()
TIMING = TimingConfig(max_s=0.5, min_pairs=10)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="a line of JSON for each verdict")
    parser.add_argument("--runs", type=int, default=10)
    parser.add_argument("--processes", type=int, default=1, help="verdicts at a time")
    parser.add_argument("--load", type=int, default=0, help="processes that spin beside them")
    parser.add_argument("--only", default="", help="cases whose name holds this")
    options = parser.parse_args()
    trials = [trial for trial in borderline() if options.only in trial.name]
    spin = [sys.executable, "-c", "while True: pass"]
    spinning = [subprocess.Popen(spin) for _ in range(options.load)]
    try:
        judge_all(trials, options.runs, options.processes, options.out)
    finally:
        for process in spinning:
            process.kill()
    print(table(trials, rows_of(options.out)))
    return 0


def borderline() -> list[Trial]:
    trials = {trial.name: trial for trial in (*trials_of(CORPUS), *trials_of(VERDICTS))}
    return [trials[name] for name in (*UNTIMED, *TIMED)]


def rows_of(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def judge_all(trials: list[Trial], runs: int, processes: int, out: Path) -> None:
    """Append what is not there yet. Where the machine fails, the next run of the same tries it."""
    known = {(row["case"], row["run"]) for row in rows_of(out)}
    missing = [(t, run) for run in range(runs) for t in trials if (t.name, run) not in known]
    spawned = get_context("spawn")
    with out.open("a") as file, ProcessPoolExecutor(processes, spawned) as pool:
        for judged in as_completed([pool.submit(judge, *each) for each in missing]):
            if error := judged.exception():
                print(f"no verdict: {error!r}", file=sys.stderr)
                continue
            print(json.dumps(judged.result()), file=file, flush=True)


def judge(trial: Trial, run: int) -> dict:
    config = trial.config.model_copy(update={"timing": TIMING})
    with verifying(config) as verify:
        timed = trial.name in TIMED
        verdict = verify(trial.task, trial.code, language=trial.language, timed=timed)
    told = verdict.model_dump(mode="json", include={"reason", "detail", "flags", "run_s"})
    speedup = verdict.timing and verdict.timing.speedup
    return {"case": trial.name, "run": run, "load": os.getloadavg()[0], "speedup": speedup} | told


def table(trials: list[Trial], rows: list[dict]) -> str:
    lines = ["| case | expected | reasons |", "| --- | --- | --- |"]
    expected = 0
    for trial in trials:
        reasons = Counter(row["reason"] for row in rows if row["case"] == trial.name)
        expected += sum(reasons[reason] for reason in trial.expect)
        counts = ", ".join(f"`{reason}` {count}" for reason, count in reasons.most_common())
        lines.append(f"| {trial.name} | {' or '.join(trial.expect)} | {counts} |")
    return "\n".join([*lines, "", f"{expected} of {len(rows)} as expected"])


if __name__ == "__main__":
    sys.exit(main())
