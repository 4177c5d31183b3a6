"""TritonBench-T through the same verifier: which operators become tasks, whether the tasks say what
the files said, and recorded answers.

    python -m benchmarks.tritonbench --operators tritonbench_t.parquet --out DIR python -m
    benchmarks.tritonbench --operators tritonbench_t.parquet --answers
    tritonbench_t_candidates.parquet --verify --out DIR

The first needs no GPU. It prints what became of every operator, runs every adapted reference in a
confined child, and compares the task with its file: the file's own test function and the task's
`forward`, both on the CPU from one seed, must call the function with the same arguments and return
the same values; where a call was left out, the calls that remain must be among the file's, by the
shapes of their arguments. Files name the GPU; 'cuda' is read as 'cpu' for that.

`--verify` needs a GPU. It verifies recorded answers (Parquet: model, name, response) as `concur
verify-batch` does, and reports for each model call accuracy (every test call returned something to
compare), execution accuracy (right, on both tracks) and speedup over the reference, with 95 %
intervals over operators. These are not the numbers of TritonBench's own scripts: inputs are drawn
anew and compared more strictly, random calls are left out, and an operator's speedup is that of all
its test calls together.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.tritonbench_answers import load_answers
from kernels_eval.errors import EvalError
from kernels_eval.records import KernelTask, Language
from tasks.sources.tritonbench import SOURCE, Survey, operator_rows, survey

if TYPE_CHECKING:
    import polars as pl

SHOWN = 160
NOT_CALLED = frozenset({"no_code", "compile_error", "runtime_error", "timeout", "task_error"})
"""Statuses of answers that returned nothing to compare."""

COMPARISON = """

_FILE = {text!r}


def _leaves(value):
    if isinstance(value, dict):
        return [leaf for key in sorted(value, key=str) for leaf in _leaves(value[key])]
    if isinstance(value, (list, tuple)):
        return [leaf for item in value for leaf in _leaves(item)]
    return [value]


def _recorded(namespace):
    calls, function = [], namespace[OPERATOR]

    def recorder(*args, **kwargs):
        leaves = _leaves([args, kwargs])
        calls.append([torch.as_tensor(x).clone() for x in leaves if isinstance(x, torch.Tensor)])
        return function(*args, **kwargs)

    namespace[OPERATOR] = recorder
    return calls


def _same(a, b):
    a, b = torch.as_tensor(a), torch.as_tensor(b)
    if a.shape != b.shape:
        return f"shape {{tuple(a.shape)}} against {{tuple(b.shape)}}"
    if not torch.allclose(a.to(b.dtype), b, rtol=1e-5, atol=1e-6, equal_nan=True):
        return "other values"


class Agreement(torch.nn.Module):
    def forward(self):
        with torch.device("cpu"):
            space = {{"__name__": "file"}}
            exec(compile(_FILE, "file", "exec"), space)
            of_file, of_task = _recorded(space), _recorded(globals())
            own = {{k: v for k, v in space.items() if getattr(v, "__module__", "") == "file"}}
            function = next(v for k, v in own.items() if k.startswith("test"))
            torch.manual_seed(3)
            expected = function()
            torch.manual_seed(3)
            found = Model()(*get_inputs())
        if not {whole}:
            shapes = [[tuple(x.shape) for x in call] for call in of_file]
            strange = [call for call in of_task if [tuple(x.shape) for x in call] not in shapes]
            assert of_task and not strange, f"{{len(strange)}} calls are not among the file's"
            return torch.zeros(1)
        assert len(of_file) == len(of_task), f"{{len(of_task)}} calls against {{len(of_file)}}"
        for number, (theirs, ours) in enumerate(zip(of_file, of_task)):
            counts = f"{{len(ours)}} tensors against {{len(theirs)}}"
            assert len(theirs) == len(ours), f"call {{number}}: {{counts}}"
            for a, b in zip(theirs, ours):
                assert not _same(a, b), f"call {{number}}: an argument of {{_same(a, b)}}"
        expected = _leaves(expected if isinstance(expected, dict) else {{"result": expected}})
        found = _leaves(found)
        assert len(expected) == len(found), f"{{len(found)}} outputs against {{len(expected)}}"
        for number, (a, b) in enumerate(zip(expected, found)):
            assert not _same(a, b), f"output {{number}}: {{_same(a, b)}}"
        return torch.zeros(1)


def get_inputs_of_none():
    return []
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--operators",
        required=True,
        help="TritonBench-T: Parquet, JSON lines, or a folder of its files",
    )
    parser.add_argument("--answers", help="recorded answers, Parquet: model, name, response")
    parser.add_argument("--verify", action="store_true", help="verify the answers; needs a GPU")
    parser.add_argument("--no-run", action="store_true", help="do not run the references")
    parser.add_argument("--limit", type=int, default=None, help="the first so many operators only")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    if arguments.verify and not arguments.answers:
        parser.error("--verify needs --answers")
    try:
        return work(arguments)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1


def work(arguments: argparse.Namespace) -> int:
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    found = survey(arguments.operators)
    tasks = found.tasks[: arguments.limit]
    lines = adaptation_table(found)
    if not arguments.no_run:
        rows = operator_rows(arguments.operators)
        texts = {f"{SOURCE}/{row['name']}": row["code_with_tests"] for row in rows}
        lines += run_table(tasks, found, texts)
    if arguments.answers:
        lines += answers_table(load_answers(arguments.answers, tasks))
    if arguments.verify:
        lines += verified(tasks, arguments.answers, out, arguments.workers)
    text = "\n".join(lines) + "\n"
    (out / "tritonbench.md").write_text(text, encoding="utf-8")
    print(text)
    return 0


# -- adaptation ------------------------------------------------------------------------------------


def adaptation_table(found: Survey) -> list[str]:
    total = len(found.tasks) + len(found.refused)
    calls = sum(adapted.calls for adapted in found.adapted.values())
    fixed = sum(adapted.fixed_inputs for adapted in found.adapted.values())
    left_out = [
        (task_id, *each) for task_id, adapted in found.adapted.items() for each in adapted.left_out
    ]
    lines = [
        (
            f"{len(found.tasks)} of {total} operators become tasks, with {calls} test calls;"
            f" {fixed} of them draw no input at random."
        ),
        "",
        "| operator refused | reason |",
        "| --- | --- |",
        *(f"| {name} | {reason} |" for name, reason in found.refused.items()),
        "",
        (
            f"{len(left_out)} test calls of {len({task_id for task_id, *_ in left_out})} operators"
            " are left out:"
        ),
        "",
        "| operator | call | why |",
        "| --- | --- | --- |",
        *(
            f"| {task_id.partition('/')[2]} | {call} | {reason} |"
            for task_id, call, reason in left_out
        ),
        "",
    ]
    return lines


def run_table(tasks: Sequence[KernelTask], found: Survey, files: dict[str, str]) -> list[str]:
    """What running the references on the CPU, in confined children, says."""
    from tasks.workload.measure import Measurer

    started, rows, ran, agreed = time.monotonic(), [], 0, 0
    with Measurer() as measurer:
        for task in tasks:
            problem = measurer.measure(task).workload.problem
            other = measurer.measure(
                agreement_task(
                    task, files[task.task_id], whole=not found.adapted[task.task_id].left_out
                )
            )
            ran, agreed = ran + (problem is None), agreed + (other.workload.problem is None)
            for what, said in (
                ("does not run", problem),
                ("differs from its file", other.workload.problem),
            ):
                if said:
                    rows.append(
                        f"| {task.task_id.partition('/')[2]} | {what} |"
                        f" {' '.join(said.split())[:SHOWN]} |"
                    )
    seconds = time.monotonic() - started
    return [
        (
            f"{ran} of {len(tasks)} references run in a confined child, without storage where that"
            f" is possible; on the CPU {agreed} of {len(tasks)} tasks agree with their file"
            f" ({seconds:.0f} s)."
        ),
        "",
        *(["| operator | | what was said |", "| --- | --- | --- |", *rows, ""] if rows else []),
    ]


def agreement_task(task: KernelTask, text: str, whole: bool) -> KernelTask:
    """A task whose one call compares the adapted task with its file, and raises where they differ.
    To be run in a confined child.

    `whole`: no test call was left out, so that all arguments and values must be equal; else the
    shapes of the remaining calls.
    """
    text = re.sub(r"(?m)^\w+ = test_?\w*\(\)\s*$", "", text)  # run once, by the comparison
    text = re.sub(r"(?m)^from (\w+) import \1\s*$", "", text)  # the operator's own file
    text = text.replace(
        "torch.empty", "torch.zeros"
    )  # as the task has it: what is in such memory differs from run to run
    text = text.replace("'cuda'", "'cpu'").replace('"cuda"', '"cpu"').replace(".cuda()", "")
    code = task.code + COMPARISON.format(text=text, whole=whole)
    code = re.sub(r"(?m)^def get_inputs\(\):", "def _inputs_of_task():", code).replace(
        "(*get_inputs())", "(*_inputs_of_task())"
    )
    code = code.replace("def get_inputs_of_none():", "def get_inputs():")
    return task.model_copy(
        update={"task_id": f"{task.task_id}#agreement", "code": code, "entry_point": "Agreement"}
    )


# -- recorded answers ------------------------------------------------------------------------------


def answers_table(answers: Iterable[Any]) -> list[str]:
    from kernels_eval.source.screening import screen

    counts: dict[str, Counter[str]] = {}
    for answer in answers:
        said = answer.parse_reason or screen(answer.code).reason or "defines the function"
        counts.setdefault(answer.generator, Counter())[said] += 1
    rows = [
        f"| {model} | {said} | {count} |"
        for model, found in counts.items()
        for said, count in found.most_common()
    ]
    return [
        "Recorded answers to these tasks, before anything is run:",
        "",
        "| model | | answers |",
        "| --- | --- | ---: |",
        *rows,
        "",
    ]


def verified(
    tasks: Sequence[KernelTask],
    answers: str,
    out: Path,
    workers: int | None,
    language: Language = Language.TRITON,
) -> list[str]:
    """Verify and score; writes the tables, the verdicts and scores.json to `out`. The same call
    goes on after an interruption."""
    import polars as pl

    from tasks.synthesis.tables import CandidateTable
    from tasks.verification.batch import VERDICTS_FILE, verify_batch
    from tasks.verification.config import VerificationConfig

    candidates = load_answers(answers, tasks)
    columns = (
        "task_id",
        "language",
        "generator",
        "sample_index",
        "code",
        "parse_reason",
        "response",
    )
    rows = [
        {name: candidate.model_dump(mode="json")[name] for name in columns}
        | {"language": language.value}
        for candidate in candidates
    ]
    pl.DataFrame(rows, infer_schema_length=None).write_parquet(out / "answers.parquet")
    pl.DataFrame(
        [task.model_dump(mode="json") for task in tasks], infer_schema_length=None
    ).write_parquet(out / "tasks.parquet")
    started = time.monotonic()
    verify_batch(
        CandidateTable(out / "answers.parquet"),
        str(out / "tasks.parquet"),
        str(out / "verified"),
        VerificationConfig(workers=workers),
        language,
    )
    seconds = time.monotonic() - started
    verdicts = pl.read_parquet(out / "verified" / VERDICTS_FILE)
    frame = verdicts.with_columns(
        model=pl.Series([row["generator"] for row in rows]).gather(verdicts["row"])
    )
    lines, scores = accuracy(frame)
    (out / "scores.json").write_text(json.dumps(scores, indent=1), encoding="utf-8")
    device = ", ".join(sorted({name for name in verdicts["device"].drop_nulls() if name}))
    return [
        f"{len(rows)} answers verified in {seconds:.0f} s on {device or 'no device'}.",
        "",
        *lines,
    ]


def accuracy(frame: pl.DataFrame) -> tuple[list[str], list[dict[str, Any]]]:
    """Call accuracy, execution accuracy and geometric-mean speedup of every model, as a table and
    as plain data. `frame` is verdicts with a column `model`. Operators whose reference fails are
    left out for every model."""
    import numpy as np
    import polars as pl

    from tasks.benchmark.metrics import bootstrap_interval, mean, wilson_interval
    from tasks.benchmark.samples import excluded_tasks
    from tasks.benchmark.scoring import GEOMETRIC_MEAN, score

    excluded = excluded_tasks(frame)
    kept = frame.filter(~pl.col("task_id").is_in(excluded))
    data: list[dict[str, Any]] = []
    for (model,), group in kept.group_by("model", maintain_order=True):
        called = group.with_columns(called=~pl.col("status").is_in(sorted(NOT_CALLED)))
        rates = np.array(
            called.group_by("task_id", maintain_order=True).agg(
                pl.col("called").cast(pl.Float64).mean()
            )["called"]
        )
        bounds = bootstrap_interval(rates, mean, seed=0) or wilson_interval(
            float(rates.sum()), len(rates)
        )
        data.append(
            {
                "model": model,
                "metric": "call_accuracy",
                "track": "any",
                "value": mean(rates),
                "lower": bounds[0],
                "upper": bounds[1],
                "tasks": len(rates),
            }
        )
    for row in score(kept, ks=(1,), ps=(1.0,)):
        if row.metric in ("exec", "fast_1", GEOMETRIC_MEAN):
            name = "execution_accuracy" if row.metric == "exec" else row.metric
            data.append(
                {
                    "model": row.model,
                    "metric": name,
                    "track": row.track,
                    "value": row.value,
                    "lower": row.lower,
                    "upper": row.upper,
                    "tasks": row.tasks,
                }
            )
    lines = [
        f"Left out, because the reference fails or is degenerate: {', '.join(excluded) or 'none'}.",
        "",
    ]
    lines += [
        "| model | metric | track | value | 95 % interval | operators |",
        "| --- | --- | --- | ---: | --- | ---: |",
    ]
    for row in data:
        value, low, high = (
            f"{row[name]:.3f}" if row[name] is not None else "-"
            for name in ("value", "lower", "upper")
        )
        lines.append(
            f"| {row['model']} | {row['metric']} | {row['track']} | {value} | {low} to {high} |"
            f" {row['tasks']} |"
        )
    statuses = (
        kept.group_by("model", "status", "reason")
        .len()
        .sort("model", "len", descending=[False, True])
    )
    lines += ["", "| model | status | reason | answers |", "| --- | --- | --- | ---: |"]
    lines += [
        f"| {model} | {status} | {reason} | {count} |"
        for model, status, reason, count in statuses.iter_rows()
    ]
    return [*lines, ""], data


if __name__ == "__main__":
    sys.exit(main())
