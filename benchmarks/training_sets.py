"""What curation leaves out of recorded candidates, and what criterion a had to choose from.

    python -m benchmarks.training_sets --responses qwq32b_candidates.parquet \\
        --tasks kernelbench.parquet

Prints, for each strategy: the samples taken with and without answers that the token limit cut off,
and how many tasks criterion a took that have one correct sample. The verdicts are those that
KernelBench's harness recorded. Lengths are characters / 4 of the whole response, and a speedup is
against the geometric mean of the task's correct samples (`benchmarks.observations` says why), so
criterion b finds few.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import polars as pl

from benchmarks.observations import TASK_ID, adapted, samples_table
from flows.curate import Choice
from tasks.curation.stage import told_of
from tasks.curation.strategies import curate
from tasks.decontamination.config import DeduplicationConfig
from tasks.decontamination.deduplication import deduplicate_samples
from tasks.sources.files import read_parquet
from tasks.synthesis.parsing import guessed_finish, parse_response

STRATEGIES = ("concur", "concur_two_correct", "min_length", "random")


def main() -> int:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--responses", required=True, help="recorded responses, Parquet")
    parser.add_argument("--tasks", help="KernelBench tasks, Parquet: criterion c needs them")
    asked = parser.parse_args()
    rows = read_parquet(Path(asked.responses), ["level", "problem_id", "sample_id", "response"])
    texts = pl.DataFrame([_ending(row) for row in rows.iter_rows(named=True)])
    frame = samples_table(adapted(asked.responses), asked.tasks).drop("finish_reason", "reasoning")
    frame = frame.join(texts, on="candidate_id").with_columns(timing=pl.struct("speedup"))
    correct = frame.filter(pl.col("status") == "correct")
    equal = deduplicate_samples(correct, DeduplicationConfig()).removed.height
    print(f"{frame.height} answers, {correct.height} correct, {equal} of them equal kernels")
    with tempfile.TemporaryDirectory() as folder:
        table = str(Path(folder) / "samples.parquet")
        frame.write_parquet(table)
        for name in STRATEGIES:
            for keep in ("true", "false"):
                choice = Choice(table, strategies=[name], overrides=[f"cut_off_answers={keep}"])
                print(f"{name}, cut_off_answers={keep}: {_said(choice)}")
    return 0


def _ending(row: dict[str, Any]) -> dict[str, Any]:
    """How an answer ended, and its code."""
    text, task_id = row["response"] or "", TASK_ID.format(row["level"], row["problem_id"])
    known = guessed_finish(text)
    code = parse_response(text, finish_reason=known["finish_reason"]).code
    return {"candidate_id": f"{task_id}#{row['sample_id']}", "code": code, **known}


def _said(choice: Choice) -> str:
    (config,) = choice.configs
    frame = choice.frame_for(config)
    taken = curate(frame, config)
    told = told_of(frame, taken, config)
    cut = int((taken["finish_reason"] == "length").sum())
    counts = dict(sorted(taken["criterion"].value_counts().iter_rows()))
    tasks, equal = told["concise_and_fast_tasks"], told["equal_kernels"]["left_out"]
    return (
        f"{taken.height} samples {counts}, {cut} of them cut off,"
        f" {len(equal)} left out for an equal kernel; {tasks['one_correct']} of {tasks['all']}"
        " tasks of (a) have one correct sample;"
        f" correct answers end: {told['answers_end']['correct']}"
    )


if __name__ == "__main__":
    sys.exit(main())
