"""What does the verifier say of the scripted teacher's answers, by planted fault and by style?

    python -m experiments.proof.check_teacher write --out DIR
    concur verify-batch DIR/candidates.parquet --tasks DIR/tasks.parquet --out DIR/verified --quick
    python -m experiments.proof.check_teacher report --out DIR

`write` draws generated tasks and their answers, each with what was planted into it; `report` prints
Markdown tables.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import polars as pl

from experiments.proof import generated
from experiments.proof.modules import FLAGS, faults_of, module_of
from experiments.proof.options import TeacherOptions
from experiments.proof.program import Program, parse
from experiments.proof.teacher import ScriptedSampler
from kernels_eval.records import KernelTask, Language, SamplingParams
from tasks.synthesis.parsing import parse_response
from tasks.synthesis.sampler import Request


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("action", choices=["write", "report"])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--tasks", type=int, default=66)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--seed", type=int, default=100)
    parser.add_argument("--wrong", type=float, default=0.7)
    parser.add_argument("--language", type=Language, default=Language.CPP)
    asked = parser.parse_args()
    if asked.action == "write":
        tasks = generated.load(asked.seed, asked.tasks, "train", asked.language.value)
        rows = answers(tasks, asked.samples, asked.wrong, asked.language)
        asked.out.mkdir(parents=True, exist_ok=True)
        pl.DataFrame([task.model_dump() for task in tasks]).write_parquet(
            asked.out / "tasks.parquet"
        )
        pl.DataFrame(rows).write_parquet(asked.out / "candidates.parquet")
    else:
        report(asked.out)


def answers(
    tasks: list[KernelTask], samples: int, wrong: float, language: Language
) -> list[dict[str, Any]]:
    """Rows of a candidate table, with `style`, `fault` and `family`."""
    faults = {fault: 1.0 for fault in TeacherOptions().faults if fault != "no_code"}
    requests = requests_of(tasks, samples, language)
    sampler = ScriptedSampler(TeacherOptions(wrong=wrong, faults=faults))
    rows = []
    for request, response in zip(requests, sampler.sample(requests), strict=True):
        code = parse_response(response.text, finish_reason="stop").code
        program = parse(request.task.code)
        assert program and code
        style, fault = planted(program, language, code)
        rows.append(
            {
                "task_id": request.task.task_id,
                "candidate_id": request.request_key,
                "language": language.value,
                "sample_index": request.sample_index,
                "code": code,
                "style": style,
                "fault": fault,
                "family": request.task.family,
            }
        )
    return rows


def requests_of(tasks: list[KernelTask], samples: int, language: Language) -> list[Request]:
    """So many requests for each task, each with its index as seed."""
    return [
        Request(
            request_key=f"{task.task_id}:{index}",
            task=task,
            language=language,
            prompt="",
            sample_index=index,
            sampling=SamplingParams(seed=index),
        )
        for task in tasks
        for index in range(samples)
    ]


def planted(program: Program, language: Language, code: str) -> tuple[str, str]:
    """Style and fault of an answer's module; several styles of one text are the first."""
    return next(
        (style, fault or "none")
        for style in FLAGS
        for fault in (None, *faults_of(program))
        if module_of(program, language, style, fault).strip() == code.strip()
    )


def report(folder: Path) -> None:
    candidates = pl.read_parquet(folder / "candidates.parquet").drop("code", "language")
    verdicts = pl.read_parquet(folder / "verified" / "verdicts.parquet")
    rows = verdicts.join(
        candidates.select("task_id", "sample_index", "style", "fault", "family"),
        on=["task_id", "sample_index"],
    ).with_columns(
        speedup=pl.col("timing").struct.field("speedup"),
        reference_ms=pl.col("timing").struct.field("reference_ms"),
        correct=pl.col("status") == "correct",
    )
    said = pl.concat_str("status", "reason", separator="/")
    counts = rows.group_by("fault", verdict=said).len("answers").sort("fault", "verdict")
    right = rows.filter(fault="none")
    measures = [
        pl.len().alias("answers"),
        pl.col("correct").sum(),
        pl.col("speedup").filter("correct").median().round(3).alias("median speedup"),
        (pl.col("speedup") > 1).sum().alias("above 1"),
        pl.col("reference_ms").median().round(3).alias("median reference, ms"),
    ]
    print(f"{len(rows)} answers, {rows['correct'].sum()} correct.\n")
    show("What the verifier said, by planted fault", counts)
    show("Without a fault, by style", right.group_by("style").agg(measures).sort("style"))
    show("Without a fault, by family", right.group_by("family").agg(measures).sort("family"))
    seconds = rows.select(
        pl.col("build_s", "run_s").mean().round(2).name.suffix(" mean"),
        pl.col("build_s").filter(pl.col("build_s") > 0).median().round(2).alias("build_s median"),
    )
    show("Seconds of a candidate", seconds)
    odd = rows.filter(pl.col("correct") != (pl.col("fault") == "none"))
    show("Against what was planted", odd.select("task_id", "style", "fault", "status", "detail"))


def show(title: str, frame: pl.DataFrame) -> None:
    print(f"## {title}\n")
    print(f"| {' | '.join(frame.columns)} |")
    print(f"|{' --- |' * frame.width}")
    for row in frame.iter_rows():
        print(f"| {' | '.join(map(str, row))} |")
    print()


if __name__ == "__main__":
    main()
