"""Scores of recorded candidates by the verdicts that were recorded with them, beside those by ours,
on the same responses.

    python -m benchmarks.kernelbench_scores --responses qwq32b_candidates.parquet --out DIR python
    -m benchmarks.kernelbench_scores --responses qwq32b_candidates.parquet --verdicts A.json
    --verdicts B.json --out DIR

`--responses` holds level, problem_id, sample_id, model, recorded_compiled and recorded_correct:
what KernelBench's harness said elsewhere, with that harness's faults. No reference time was
recorded, so there is no fast_p of it. `--verdicts` are files of benchmarks.recorded_verdicts; of
one response judged twice, the file given last counts. A run that was stopped has judged what fails
early of every task and the rest of the first tasks only, so a task counts where every response of
it has a verdict, and a level where nine in ten of its tasks do. Writes recorded.parquet,
ours.parquet and same.parquet (recorded verdicts of the same tasks), which `concur benchmark
--verdicts FILE` reads, and scores.md.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.observations import judged
from flows.cli.benchmark import score_table
from kernels_eval.errors import EvalError, UsageError
from tasks.benchmark.score_table import table_of
from tasks.sources.files import existing, read_parquet

if TYPE_CHECKING:
    import polars as pl

NEEDED = ("level", "problem_id", "sample_id", "model", "recorded_compiled", "recorded_correct")
RECORDED = "recorded by KernelBench's harness (RTX A6000)"
OURS = "our verdicts"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--responses", required=True, help="recorded responses with verdicts, Parquet"
    )
    parser.add_argument(
        "--verdicts",
        action="append",
        default=[],
        help="verdicts.json of a run of ours; repeat, the latest last",
    )
    parser.add_argument("--device", default="", help="what the runs of ours were on")
    parser.add_argument("--resamples", type=int, default=2000)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    try:
        lines = scored(
            arguments.responses,
            arguments.verdicts,
            Path(arguments.out),
            arguments.device,
            arguments.resamples,
        )
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


def scored(
    responses: str, verdicts: Sequence[str], out: Path, device: str = "", resamples: int = 2000
) -> list[str]:
    """Write the tables and the page; returns the page's lines. Raises UsageError for files that
    cannot be used."""
    out.mkdir(parents=True, exist_ok=True)
    recorded = recorded_verdicts(responses)
    recorded.write_parquet(out / "recorded.parquet")
    asked: dict[str, Any] = {"resamples": resamples}
    page = [f"## All {recorded.height:,} responses: {RECORDED}", ""]
    page += _section(score_table(str(out / "recorded.parquet"), label=RECORDED, **asked))
    if verdicts:
        ours, said = our_verdicts(recorded, verdicts, device)
        same = recorded.join(
            ours.select("candidate_id"), on="candidate_id", how="semi", maintain_order="left"
        )
        ours.write_parquet(out / "ours.parquet")
        same.write_parquet(out / "same.parquet")
        page += [
            "## Our verdicts",
            "",
            said,
            "",
            *_section(score_table(str(out / "ours.parquet"), label=OURS, **asked)),
        ]
        page += [f"## The same responses: {RECORDED}", ""]
        page += _section(score_table(str(out / "same.parquet"), label=RECORDED, **asked))
        page += ["## Response by response", "", *agreement(ours, same)]
    (out / "scores.md").write_text("\n".join(page).rstrip() + "\n", encoding="utf-8")
    return page


def recorded_verdicts(path: str) -> pl.DataFrame:
    """The rows as verdicts: correct, incorrect where it compiled, else compile_error. The words are
    ours, the outcome is the harness's."""
    import polars as pl

    rows = read_parquet(existing(path), NEEDED).sort("level", "problem_id", "sample_id")
    if rows.is_empty():
        raise UsageError(
            f"{path} holds no response", "give a Parquet file with a row for each response"
        )
    correct = pl.col("recorded_correct").fill_null(False)
    compiled = pl.col("recorded_compiled").fill_null(False)
    status = (
        pl.when(correct)
        .then(pl.lit("correct"))
        .when(compiled)
        .then(pl.lit("incorrect"))
        .otherwise(pl.lit("compile_error"))
    )
    reason = (
        pl.when(correct)
        .then(pl.lit("ok"))
        .when(compiled)
        .then(pl.lit("wrong_output"))
        .otherwise(pl.lit("build_failed"))
    )
    task_id = pl.format("kernelbench/L{}/{}", "level", "problem_id")
    return rows.select(
        candidate_id=pl.format("{}#{}", task_id, "sample_id"),
        task_id=task_id,
        sample_index="sample_id",
        model="model",
        status=status,
        reason=reason,
    )


def our_verdicts(
    recorded: pl.DataFrame, files: Sequence[str], device: str
) -> tuple[pl.DataFrame, str]:
    """Our verdicts of the tasks that are judged wholly, of levels where most are, and a sentence on
    the rest. Raises UsageError as `observations.judged` does."""
    import polars as pl

    whole, said, _ = judged(recorded, files, also=("correctness",))
    return whole.with_columns(device=pl.lit(device)), said


def agreement(ours: pl.DataFrame, recorded: pl.DataFrame) -> list[str]:
    """How often both say correct, level by level."""
    import polars as pl

    both = ours.select("candidate_id", "task_id", ours="status").join(
        recorded.select("candidate_id", theirs="status"), on="candidate_id", maintain_order="left"
    )
    both = both.with_columns(
        level=pl.col("task_id").str.extract(r"(L\d+)/"),
        a=pl.col("ours") == "correct",
        b=pl.col("theirs") == "correct",
    )
    counts = (
        both.group_by("level")
        .agg(
            both=(pl.col("a") & pl.col("b")).sum(),
            ours=(pl.col("a") & ~pl.col("b")).sum(),
            theirs=(~pl.col("a") & pl.col("b")).sum(),
            neither=(~pl.col("a") & ~pl.col("b")).sum(),
        )
        .sort("level")
    )
    lines = [
        "| level | both correct | ours only | recorded only | neither |",
        "| --- | ---: | ---: | ---: | ---: |",
    ]
    return [*lines, *(f"| {' | '.join(map(str, row))} |" for row in counts.iter_rows()), ""]


def _section(data: dict[str, Any]) -> list[str]:
    notes = [f"- {note}" for note in data["notes"]]
    notes += [f"- {name} is degenerate: {why}" for name, why in data["degenerate_tasks"].items()]
    names, rows = table_of(data)
    lines = [" | ".join(cell.replace("|", "/") for cell in row) for row in (names, *rows)]
    lines.insert(1, " | ".join("---" for _ in names))
    return [*(f"| {line} |" for line in lines), "", *notes, *([""] if notes else [])]


if __name__ == "__main__":
    sys.exit(main())
