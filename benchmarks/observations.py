"""The observations on recorded candidates: real responses of QwQ-32B with the verdicts that KernelBench's harness gave elsewhere.

    python -m benchmarks.observations --responses qwq32b_candidates.parquet --out DIR

Needs the columns level, problem_id, sample_id, model, response, recorded_correct and recorded_runtime_ms. Neither token counts nor finish
reasons nor reference times were recorded, so three things stand in for them, and every page names them:

- lengths are characters / 4;
- a response is taken for one that was cut off where it ends inside an open block, or in the middle of a sentence;
- speed is compared within a task only: the geometric mean of the task's correct samples over a sample's own time.

Which text is reasoning is known only where `</think>` is in it. So there are three reports: `whole` (length of the whole response, all
rows), `tagged` (length of the reasoning, rows with `</think>`), and `parsed` (what the line's parser calls reasoning, which guesses where
the tag is lost). A claim that only one of them supports is no claim. The verdicts contain faults of that harness.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import EvalError, UsageError
from tasks.sources.files import existing, read_parquet
from tasks.synthesis.parsing import THINK_CLOSE, is_unfinished, parse_response

if TYPE_CHECKING:
    import polars as pl

NEEDED = ("level", "problem_id", "sample_id", "model", "response", "recorded_correct", "recorded_runtime_ms")
CHARACTERS_PER_TOKEN = 4
LENGTHS = {
    "whole": "characters / 4 of the whole response (about tokens)",
    "tagged": "characters / 4 of the text before </think> (about tokens), where the response has that tag",
    "parsed": "characters / 4 of what the parser takes for reasoning (about tokens), a guess where </think> is lost",
}
SPEED = "speed relative to the task's other correct samples"
VERDICTS = (
    "Verdicts as recorded by KernelBench's harness on another GPU (RTX A6000), with that harness's faults; not ours. "
    "Lengths are characters / 4, and which responses were cut off is a guess from how they end."
)
ENDS = tuple(".!?:)]}`*>\"'|")  # of a response that stopped by itself


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--responses", required=True, help="recorded responses with verdicts, Parquet")
    parser.add_argument("--out", required=True, help="directory of the three reports")
    parser.add_argument("--json", action="store_true", dest="as_json", help="print the findings as one JSON object")
    arguments = parser.parse_args()
    try:
        found = analyse(arguments.responses, arguments.out)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.as_json:
        print(json.dumps(found))
        return 0
    for name, said in found.items():
        print("\n".join([f"## {name}: {LENGTHS[name]}", "", *(f"- {sentence}" for sentence in said), ""]))
    return 0


def analyse(path: str, out: str) -> dict[str, list[str]]:
    """Write a report for each measure of length; returns their sentences. Raises UsageError for a file that cannot be used."""
    import polars as pl

    from tasks.analysis.difficulty import difficulty
    from tasks.analysis.observations import ObservationConfig, observe
    from tasks.analysis.report import write

    recorded = adapted(path)
    said = {}
    for name, unit in LENGTHS.items():
        frame = recorded.rename({name: "reasoning_tokens"})
        config = ObservationConfig(length_unit=unit, speedup_label=SPEED, speedup_within_tasks_only=True)
        observations, divided = observe(frame, config), difficulty(frame.with_columns(speedup=pl.lit(None, pl.Float64)))
        observations = observations.model_copy(update={"cautions": (VERDICTS, *observations.cautions)})
        write(observations, divided, Path(out) / name)
        said[name] = [*observations.finding, *divided.finding, *observations.cautions]
    return said


def adapted(path: str) -> pl.DataFrame:
    """The rows as the analysis reads them, with a column of lengths for each of `LENGTHS` (null where that length is not known)."""
    import polars as pl

    rows = read_parquet(existing(path), NEEDED).sort("level", "problem_id", "sample_id")
    if rows.is_empty():
        raise UsageError(f"{path} holds no response", "give a Parquet file with a row for each response")
    frame = pl.DataFrame([_adapted(row) for row in rows.iter_rows(named=True)], infer_schema_length=None)
    # the reference's time is the same for all samples of a task, so it cancels from a comparison within the task
    typical = pl.col("runtime_ms").log().mean().over("task_id").exp()
    return frame.with_columns(speedup=typical / pl.col("runtime_ms")).drop("runtime_ms")


def _adapted(row: dict[str, Any]) -> dict[str, Any]:
    text = row["response"] or ""
    cut = breaks_off(text)
    parsed = parse_response(text, finish_reason="length" if cut else "stop")
    lengths = {"whole": text, "tagged": text.rpartition(THINK_CLOSE)[0], "parsed": parsed.reasoning}
    correct, runtime_ms = bool(row["recorded_correct"]), row["recorded_runtime_ms"]
    return {
        "task_id": f"kernelbench/L{row['level']}/{row['problem_id']}",
        "status": "correct" if correct else "incorrect",
        "finish_reason": "length" if cut else "stop",
        "generator": row["model"],
        "sample_index": row["sample_id"],
        "runtime_ms": float(runtime_ms) if correct and runtime_ms is not None and runtime_ms > 0 else None,
        **{name: len(part) // CHARACTERS_PER_TOKEN or None for name, part in lengths.items()},
    }


def breaks_off(text: str) -> bool:
    """Does the response end inside an open block, or in the middle of a sentence?"""
    return is_unfinished(text) or not text.rstrip().endswith(ENDS)


if __name__ == "__main__":
    sys.exit(main())
