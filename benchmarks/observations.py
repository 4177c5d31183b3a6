"""The observations on recorded candidates: real responses of QwQ-32B with the verdicts that
KernelBench's harness gave elsewhere, or ours.

    python -m benchmarks.observations --responses qwq32b_candidates.parquet --out DIR
    python -m benchmarks.observations --responses qwq32b_candidates.parquet --out DIR
        --verdicts A/verdicts.json --verdicts B/verdicts.json

Needs the columns level, problem_id, sample_id, model, response, recorded_correct and
recorded_runtime_ms. Neither token counts nor finish reasons nor reference times were recorded, so
three things stand in for them, and every page names them:

- lengths are characters / 4;
- a response is taken for one that was cut off where it ends inside an open block, or in the middle
  of a sentence;
- speed is compared within a task only: the geometric mean of the task's correct samples over a
  sample's own time.

Which text is reasoning is known only where `</think>` is in it. So there are three reports: `whole`
(length of the whole response, all rows), `tagged` (length of the reasoning, rows with `</think>`),
and `parsed` (what the line's parser calls reasoning, which guesses where the tag is lost). A claim
that only one of them supports is no claim. The recorded verdicts contain faults of that harness.
`--page` writes one page of all reports, with the machine, the date, the commit and the command.

With `--verdicts` (files of benchmarks.recorded_verdicts) our verdicts and speedups take the place
of the recorded ones, in reports of the same names; of one response judged twice, the file given
last counts. A run that its budget stopped has judged what fails early (no code, does not build) of
every task, and the rest of the first tasks only. So whether a task is complete depends on its
verdicts: tasks of which a response has no verdict are left out, and so is every level in which that
is more than a tenth of the tasks. Beside these reports are `recorded-whole`, ...: the recorded
verdicts on the same responses. `samples.parquet` is the table for `concur curate` and `concur
analyze`; `--tasks` adds the operators of each task to it, which curation needs, by running its
reference without storage in a confined child. `missing.parquet` holds the responses without a
verdict, for the next run of benchmarks.recorded_verdicts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import EvalError, UsageError
from tasks.sources.files import existing, read_parquet
from tasks.synthesis.parsing import THINK_CLOSE, is_unfinished, parse_response

if TYPE_CHECKING:
    import polars as pl

NEEDED = (
    "level",
    "problem_id",
    "sample_id",
    "model",
    "response",
    "recorded_correct",
    "recorded_runtime_ms",
)
CHARACTERS_PER_TOKEN = 4
LENGTHS = {
    "whole": "characters / 4 of the whole response (about tokens)",
    "tagged": (
        "characters / 4 of the text before </think> (about tokens), where the response has that tag"
    ),
    "parsed": (
        "characters / 4 of what the parser takes for reasoning (about tokens), a guess where"
        " </think> is lost"
    ),
}
TASK_ID = "kernelbench/L{}/{}"
SPEED = "speed relative to the task's other correct samples"
VERDICTS = (
    "Verdicts as recorded by KernelBench's harness on another GPU (RTX A6000), with that harness's"
    " faults; not ours. Lengths are characters / 4, and which responses were cut off is a guess"
    " from how they end."
)
OURS = (
    "Verdicts and speedups are our verifier's, measured on an H200 in several runs; the latest"
    " counts. Lengths are characters / 4, and which responses were cut off is a guess from how they"
    " end."
)
NEEDED_OF_VERDICTS = ("task_id", "sample_index", "status", "reason", "timing", "custom_kernels")
COMPLETE_SHARE = 0.9  # of the tasks of a level
SAMPLES, MISSING = "samples.parquet", "missing.parquet"
ENDS = tuple(".!?:)]}`*>\"'|")  # of a response that stopped by itself
INSTRUCTION = re.compile(
    r"\s*(You (can|should|must|may|need|are|have|will|do)|Your |Please|Make sure|Ensure|Do not"
    r"|Note that|Remember|I (need|want) you|Also,|Additionally|When (you )?writ|Specifically|If you"
    r"|The (\w+ )?(code|kernels?|answer|solution|implementation) (should|must|needs?|has to))"
)
ROOT = Path(__file__).parents[1]


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
    parser.add_argument(
        "--tasks", help="KernelBench tasks, Parquet: adds each task's operators to samples.parquet"
    )
    parser.add_argument("--out", required=True, help="directory of the reports, one directory each")
    parser.add_argument(
        "--json", action="store_true", dest="as_json", help="print the findings as one JSON object"
    )
    parser.add_argument("--page", help="write one page of all reports there, Markdown")
    arguments = parser.parse_args()
    try:
        found = analyse(arguments.responses, arguments.out, arguments.verdicts, arguments.tasks)
        if arguments.page:
            Path(arguments.page).write_text(page(arguments.out, list(found)), encoding="utf-8")
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if arguments.as_json:
        print(json.dumps(found))
        return 0
    for name, said in found.items():
        print(
            "\n".join(
                [
                    f"## {name}: {LENGTHS[name.removeprefix('recorded-')]}",
                    "",
                    *(f"- {sentence}" for sentence in said),
                    "",
                ]
            )
        )
    return 0


def analyse(
    path: str, out: str, verdicts: Sequence[str] = (), tasks: str | None = None
) -> dict[str, list[str]]:
    """Write a report for each measure of length; returns their sentences. Raises UsageError for a
    file that cannot be used."""
    import polars as pl

    recorded = adapted(path)
    if tasks and not verdicts:
        raise UsageError(
            "--tasks without --verdicts", "operators are for the table that our verdicts go to"
        )
    sampled = template_caution(
        read_parquet(existing(path), NEEDED)["response"].fill_null("").to_list()
    )
    if not verdicts:
        return _reports(recorded, out, (VERDICTS, sampled))
    ours, left_out, missing = judged(recorded, verdicts)
    told = f"{OURS} {left_out}".strip()
    found = _reports(ours, out, (told, sampled))
    same = recorded.join(
        ours.select("task_id", "sample_index"), on=["task_id", "sample_index"], how="semi"
    )
    found |= {
        f"recorded-{name}": said
        for name, said in _reports(same, out, (VERDICTS, sampled), "recorded-").items()
    }
    samples_table(ours, tasks).write_parquet(Path(out) / SAMPLES)
    rows = pl.read_parquet(path).with_columns(
        task_id=pl.format(TASK_ID, "level", "problem_id"), sample_index="sample_id"
    )
    left = rows.join(missing, on=["task_id", "sample_index"], how="semi")
    left.drop("task_id", "sample_index").write_parquet(Path(out) / MISSING)
    return found


def page(out: str, names: Sequence[str]) -> str:
    """The reports in `out` as one page, without the fixed bins and the figures, under a head that
    says where it comes from. Paths of the command are shortened to their names."""
    words = [word if word.startswith("-") else Path(word).name for word in sys.argv[1:]]
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"], capture_output=True, text=True, cwd=ROOT
    ).stdout.strip()
    versions = ", ".join(f"{name} {version(name)}" for name in ("polars", "statsmodels", "numpy"))
    head = (
        "# Reasoning length on recorded candidates",
        f"- Command: `python -m benchmarks.observations {' '.join(words)}`, which writes this page",
        f"- Machine: {os.cpu_count()} cores, no GPU is used. Python {platform.python_version()},"
        f" {versions}. Date {date.today()}, commit {commit}",
    )
    parts = ["\n".join((head[0], "", *head[1:]))]
    for name in names:
        text = (Path(out) / name / "report.md").read_text(encoding="utf-8")
        text = text.partition("## Accuracy in the fixed bins")[0].partition("\n")[2]
        lines = [line for line in text.splitlines() if not line.startswith("![")]
        parts.append(f"## {name}\n" + "\n".join(lines).replace("\n## ", "\n### "))
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(parts)).rstrip() + "\n"


def template_caution(responses: Sequence[str]) -> str:
    """What in the responses shows that no chat template was used."""
    instructs = sum(bool(INSTRUCTION.match(text)) for text in responses)
    begun = sum(not text[:1].isupper() for text in responses)
    tagged = sum(THINK_CLOSE in text for text in responses)
    return (
        f"The responses look sampled without the model's chat template: {instructs:,} of"
        f" {len(responses):,} begin with more instructions to whoever solves the task, {begun:,} do"
        f" not begin with a capital letter, and only {tagged:,} have a {THINK_CLOSE}, which the"
        " template makes the model write after its reasoning."
    )


def _reports(
    frame: pl.DataFrame, out: str, cautions: Sequence[str], prefix: str = ""
) -> dict[str, list[str]]:
    """Speeds compare between tasks where the frame has a `timing`: a speedup over the task's own
    reference."""
    import polars as pl

    from tasks.analysis.config import ObservationConfig
    from tasks.analysis.difficulty import difficulty
    from tasks.analysis.observations import observe
    from tasks.analysis.report import write

    timed, said = "timing" in frame.columns, {}
    for name, unit in LENGTHS.items():
        rows = frame.rename({name: "reasoning_tokens"})
        config = ObservationConfig(length_unit=unit)
        if not timed:
            config = ObservationConfig(
                length_unit=unit, speedup_label=SPEED, speedup_within_tasks_only=True
            )
        observations = observe(rows, config)
        divided = difficulty(rows if timed else rows.with_columns(speedup=pl.lit(None, pl.Float64)))
        observations = observations.model_copy(
            update={"cautions": (*cautions, *observations.cautions)}
        )
        write(observations, divided, Path(out) / f"{prefix}{name}")
        said[name] = [*observations.finding, *divided.finding, *observations.cautions]
    return said


def judged(
    recorded: pl.DataFrame, files: Sequence[str], also: Sequence[str] = ()
) -> tuple[pl.DataFrame, str, pl.DataFrame]:
    """The rows of complete tasks (every response has a verdict in some file) of levels where
    `COMPLETE_SHARE` of them are, with our status, reason, timing and the fields `also` as far as
    they are there; a sentence on what was left out; task_id and sample_index of responses without a
    verdict. Of one response judged twice, the file given last counts.

    Raises UsageError for a file that holds no such verdicts, a verdict of a response that is not
    there, and where no level is complete.
    """
    import polars as pl

    latest: dict[tuple[str, int], dict[str, Any]] = {}
    for file in files:
        latest |= {(row["task_id"], row["sample_index"]): row for row in _verdicts_of(file)}
    known = set(recorded.select("task_id", "sample_index").iter_rows())
    if strange := sorted(latest.keys() - known):
        first = f"{strange[0][0]} #{strange[0][1]}"
        raise UsageError(
            f"{len(strange)} verdicts are of no response, such as {first}",
            "give the responses that were verified",
        )
    rows = [
        {name: row.get(name) for name in (*NEEDED_OF_VERDICTS, *also)} for row in latest.values()
    ]
    table = pl.DataFrame(
        rows,
        infer_schema_length=None,
        schema_overrides={"sample_index": recorded.schema["sample_index"]},
    )
    joined = recorded.drop("status", "reason", "speedup", strict=False).join(
        table, on=["task_id", "sample_index"], how="left"
    )
    joined = joined.with_columns(
        _complete=pl.col("status").is_not_null().all().over("task_id"),
        _level=pl.col("task_id").str.extract(r"(L\d+)/"),
    )
    levels = (
        joined.unique("task_id")
        .group_by("_level")
        .agg(pl.col("_complete").mean(), pl.len().alias("tasks"))
        .sort("_level")
    )
    enough = levels.filter(pl.col("_complete") >= COMPLETE_SHARE)["_level"].to_list()
    whole = joined.filter(pl.col("_complete"), pl.col("_level").is_in(enough)).drop(
        "_complete", "_level"
    )
    if whole.is_empty():
        raise UsageError(
            "of no level enough responses have a verdict",
            f"verify more: {COMPLETE_SHARE:.0%} of a level's tasks wholly",
        )
    missing = joined.filter(pl.col("status").is_null()).select("task_id", "sample_index")
    shares = ", ".join(
        f"{level} {share:.0%} of {tasks}" for level, share, tasks in levels.iter_rows()
    )
    said = (
        f"{len(latest):,} of {joined.height:,} responses have such a verdict. Analysed are the"
        f" {whole.height:,} of {whole['task_id'].n_unique()} tasks that are judged wholly, of"
        f" {', '.join(enough)} (judged wholly: {shares} tasks): runs were stopped, what fails early"
        " was judged first, and elsewhere a task is judged wholly because of how its responses"
        " fail."
    )
    return whole, said if missing.height else "", missing


def _verdicts_of(file: str) -> list[dict[str, Any]]:
    try:
        rows = json.loads(existing(file).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(
            f"cannot read {file}: {error}",
            "give the verdicts.json that benchmarks.recorded_verdicts wrote",
        ) from error
    if not isinstance(rows, list) or not all(
        isinstance(row, dict) and row.keys() >= set(NEEDED_OF_VERDICTS) for row in rows
    ):
        raise UsageError(
            f"{file} holds no list of verdicts",
            "give the verdicts.json that benchmarks.recorded_verdicts wrote",
        )
    return rows


def samples_table(ours: pl.DataFrame, tasks: str | None) -> pl.DataFrame:
    """Our verdicts as `concur curate` and `concur analyze` read them: lengths are those of the
    whole response. With a file of tasks, the operators of each task's reference; without, none, and
    curation takes every task for a fusion.
    """
    import polars as pl

    rows = ours.with_columns(
        candidate_id=pl.format("{}#{}", "task_id", "sample_index"),
        reasoning_tokens=pl.col("whole"),
        reasoning=pl.lit(None, pl.String),
    )
    if tasks is None:
        return rows.with_columns(reference_operators=pl.lit(None, pl.List(pl.String)))
    from tasks.sources.config import TasksConfig
    from tasks.sources.stage import load_tasks
    from tasks.workload.measure import measured

    wanted = set(rows["task_id"])
    chosen = [
        task
        for task in load_tasks(TasksConfig(source="kernelbench", location=tasks))
        if task.task_id in wanted
    ]
    found = [(task.task_id, list(result.workload.operators)) for task, result in measured(chosen)]
    operators = pl.DataFrame(
        found,
        schema={"task_id": pl.String, "reference_operators": pl.List(pl.String)},
        orient="row",
    )
    return rows.join(operators, on="task_id", how="left")


def adapted(path: str) -> pl.DataFrame:
    """The rows as the analysis reads them, with a column of lengths for each of `LENGTHS` (null
    where that length is not known)."""
    import polars as pl

    rows = read_parquet(existing(path), NEEDED).sort("level", "problem_id", "sample_id")
    if rows.is_empty():
        raise UsageError(
            f"{path} holds no response", "give a Parquet file with a row for each response"
        )
    types = {
        "runtime_ms": pl.Float64,
        **dict.fromkeys(LENGTHS, pl.Int64),
    }  # a column may be all null
    frame = pl.DataFrame(
        [_adapted(row) for row in rows.iter_rows(named=True)],
        schema_overrides=types,
        infer_schema_length=None,
    )
    # the reference's time is the same for all samples of a task, so it cancels from a comparison
    # within the task
    typical = pl.col("runtime_ms").log().mean().over("task_id").exp()
    return frame.with_columns(speedup=typical / pl.col("runtime_ms")).drop("runtime_ms")


def _adapted(row: dict[str, Any]) -> dict[str, Any]:
    text = row["response"] or ""
    cut = breaks_off(text)
    parsed = parse_response(text, finish_reason="length" if cut else "stop")
    lengths = {"whole": text, "tagged": text.rpartition(THINK_CLOSE)[0], "parsed": parsed.reasoning}
    correct, runtime_ms = bool(row["recorded_correct"]), row["recorded_runtime_ms"]
    return {
        "task_id": TASK_ID.format(row["level"], row["problem_id"]),
        "status": "correct" if correct else "incorrect",
        "finish_reason": "length" if cut else "stop",
        "generator": row["model"],
        "sample_index": row["sample_id"],
        "runtime_ms": (
            float(runtime_ms) if correct and runtime_ms is not None and runtime_ms > 0 else None
        ),
        **{name: len(part) // CHARACTERS_PER_TOKEN or None for name, part in lengths.items()},
    }


def breaks_off(text: str) -> bool:
    """Does the response end inside an open block, or in the middle of a sentence?"""
    return is_unfinished(text) or not text.rstrip().endswith(ENDS)


if __name__ == "__main__":
    sys.exit(main())
