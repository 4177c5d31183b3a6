"""What became of TritonBench-T's operators, and recorded answers under concur's verifier.

python -m experiments.tritonbench.run --operators FILE [--answers FILE [--verify]] --out DIR

Without `--verify` nothing is run. With it, a GPU is needed: the answers are verified as
`concur verify-batch` does, and a second call resumes.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import polars as pl

from experiments.tritonbench.answers import load_answers
from experiments.tritonbench.source import Survey, survey
from kernels_eval.errors import EvalError
from kernels_eval.records import Candidate, KernelTask, Language
from kernels_eval.source.screening import screen
from tasks.synthesis.tables import CandidateTable
from tasks.verification.batch import VERDICTS_FILE, verify_batch
from tasks.verification.config import VerificationConfig

NOT_CALLED = ("no_code", "compile_error", "runtime_error", "timeout", "task_error")
"""Statuses of answers that returned nothing to compare."""
COLUMNS = ("task_id", "generator", "sample_index", "code", "parse_reason", "response")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--operators", required=True, help="Parquet, JSON lines or a folder")
    parser.add_argument("--answers", help="Parquet: model, name, response")
    parser.add_argument("--verify", action="store_true", help="verify the answers; needs a GPU")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    if arguments.verify and not arguments.answers:
        parser.error("--verify needs --answers")
    try:
        print(write_page(arguments))
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def write_page(arguments: argparse.Namespace) -> str:
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    found = survey(arguments.operators)
    lines = adaptation_table(found)
    if arguments.answers:
        answers = load_answers(arguments.answers, found.tasks)
        lines += answers_table(answers)
        if arguments.verify:
            verdicts = verified(found.tasks, answers, out, arguments.workers)
            lines += accuracy_table(verdicts)
    page = "\n".join(lines) + "\n"
    (out / "tritonbench.md").write_text(page, encoding="utf-8")
    return page


def adaptation_table(found: Survey) -> list[str]:
    """What was adapted, refused and left out."""
    total = len(found.tasks) + len(found.refused)
    calls = sum(adapted.calls for adapted in found.adapted.values())
    fixed = sum(adapted.fixed_inputs for adapted in found.adapted.values())
    refused = [(name, "", reason) for name, reason in found.refused.items()]
    left_out = [
        (task_id.partition("/")[2], call, reason)
        for task_id, adapted in found.adapted.items()
        for call, reason in adapted.left_out
    ]
    return [
        f"{len(found.tasks)} of {total} operators become tasks, with {calls} test calls;"
        f" {fixed} of them draw no input at random.",
        "",
        *table(("operator", "call left out", "why"), [*refused, *left_out]),
    ]


def answers_table(answers: Iterable[Candidate]) -> list[str]:
    """What the answers look like before anything is run."""
    counts: Counter[tuple[str, str]] = Counter()
    for answer in answers:
        reason = answer.parse_reason or screen(answer.code or "").reason
        counts[answer.generator, str(reason or "defines the function")] += 1
    rows = [(*key, count) for key, count in counts.items()]
    return table(("model", "before anything is run", "answers"), rows)


def verified(
    tasks: Sequence[KernelTask],
    answers: Sequence[Candidate],
    out: Path,
    workers: int | None,
    language: str = "triton",
) -> pl.DataFrame:
    """Verdicts of the answers, with a column `model`."""
    rows = [answer.model_dump(mode="json", include=set(COLUMNS)) for answer in answers]
    candidates = pl.DataFrame(rows, infer_schema_length=None)
    candidates = candidates.with_columns(language=pl.lit(language))
    candidates.write_parquet(out / "answers.parquet")
    programs = [task.model_dump(mode="json") for task in tasks]
    pl.DataFrame(programs, infer_schema_length=None).write_parquet(out / "tasks.parquet")
    verify_batch(
        CandidateTable(out / "answers.parquet"),
        str(out / "tasks.parquet"),
        str(out / "verified"),
        VerificationConfig(workers=workers),
        Language(language),
    )
    verdicts = pl.read_parquet(out / "verified" / VERDICTS_FILE)
    return verdicts.with_columns(model=candidates["generator"].gather(verdicts["row"]))


def accuracy(verdicts: pl.DataFrame) -> pl.DataFrame:
    """Call accuracy (every test call returned something) and execution accuracy (all right, with a
    kernel of its own) of each model: means over operators whose reference works."""
    failed = verdicts.filter(status="task_error")["task_id"].unique()
    judged = verdicts.filter(~pl.col("task_id").is_in(failed.implode()))
    called = ~pl.col("status").is_in(NOT_CALLED)
    by_operator = judged.group_by("model", "task_id", maintain_order=True).agg(
        call_accuracy=called.mean(), execution_accuracy=(pl.col("status") == "correct").mean()
    )
    return by_operator.group_by("model", maintain_order=True).agg(
        pl.len().alias("operators"), pl.col("call_accuracy", "execution_accuracy").mean()
    )


def accuracy_table(verdicts: pl.DataFrame) -> list[str]:
    """The accuracies, and what the verdicts say."""
    scores = accuracy(verdicts)
    statuses = verdicts.group_by("model", "status", "reason").len()
    statuses = statuses.sort("model", "len", descending=[False, True])
    return [
        *table(scores.columns, scores.rows()),
        *table(("model", "status", "reason", "answers"), statuses.rows()),
    ]


def table(header: Sequence[str], rows: Iterable[Sequence[Any]]) -> list[str]:
    """A Markdown table; nothing without rows."""
    lines = [" | ".join(map(_cell, row)) for row in rows]
    if not lines:
        return []
    rule = " | ".join("---" for _ in header)
    return [*(f"| {line} |" for line in (" | ".join(header), rule, *lines)), ""]


def _cell(value: object) -> str:
    return f"{value:.3f}" if isinstance(value, float) else " ".join(str(value).split())


if __name__ == "__main__":
    sys.exit(main())
