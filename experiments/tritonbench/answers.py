"""Recorded answers to TritonBench-T as candidates of its adapted tasks."""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from experiments.tritonbench.source import SOURCE
from experiments.tritonbench.syntax import text_of
from kernels_eval.errors import UsageError
from kernels_eval.records import Candidate, KernelTask, Language, Reason, candidate_id
from kernels_eval.source.syntax import UNPARSABLE, parse_source
from tasks.sources.files import existing, read_parquet
from tasks.sources.syntax import defined_names, names

ANSWERS = ("model", "name", "response")


def load_answers(location: str | Path, tasks: Sequence[KernelTask]) -> list[Candidate]:
    """Recorded answers (Parquet: model, name, response) to these tasks as candidates, `generator`
    the model. Others are left out.

    An answer is a module that defines the operator's function: it gets a `ModelNew` that calls it.
    One that does not define it has no code (`missing_model_new`). Of a model's several answers to
    an operator the order is the sample index. Raises UsageError for a file that cannot be read, or
    holds a row without one of these.
    """
    path, known = existing(location), {task.task_id: task for task in tasks}
    seen: Counter[tuple[str, str]] = Counter()
    found = []
    for number, row in enumerate(read_parquet(path, ANSWERS).iter_rows(named=True)):
        if missing := [name for name in ANSWERS if not isinstance(row[name], str)]:
            raise UsageError(
                f"{path} row {number} has no {', '.join(missing)}",
                "a row is an answer: model, name and response, as text",
            )
        if (task := known.get(f"{SOURCE}/{row['name']}")) is not None:
            key = (row["model"], task.task_id)
            found.append(answer_to(task, row["response"], row["model"], seen[key]))
            seen[key] += 1
    return found


def answer_to(task: KernelTask, response: str, generator: str, sample_index: int = 0) -> Candidate:
    """A module that defines the operator's function, as a candidate for its task."""
    code = with_model_new(response, task.code)
    base = Candidate(
        candidate_id="-",
        task_id=task.task_id,
        language=Language.TRITON,
        generator=generator,
        sample_index=sample_index,
        response=response,
        answer=response,
        code=code,
        parse_reason=None if code is not None else Reason.MISSING_MODEL_NEW,
    )
    identity = candidate_id(task, generator, base.sampling, sample_index, response)
    return base.model_copy(update={"candidate_id": identity})


def with_model_new(candidate: str, task_code: str) -> str | None:
    """The candidate's text with a `ModelNew` after it that makes the task's calls of the
    candidate's function; None where it has no such function. `task_code` is the code of an adapted
    task. Text that is no Python comes back as it is: that is for the verdict to say.
    """
    try:
        there = parse_source(candidate)
    except UNPARSABLE:
        return candidate
    if operator_of(task_code) not in defined_names(there.body):
        return None
    # in a function of its own, so that the task's imports change nothing of the candidate's
    factory = parse_source("def _model_new():\n    return ModelNew").body[0]
    assert isinstance(factory, ast.FunctionDef)
    body = parse_source(task_code).body
    model = next(node for node in body if isinstance(node, ast.ClassDef))
    model.name = "ModelNew"
    imports = [
        node
        for node in parse_source(task_code).body
        if isinstance(node, ast.Import | ast.ImportFrom)
    ]
    factory.body[:0] = [*imports, model]
    return f"{candidate.rstrip()}\n\n\n{text_of(factory)}\n\n\nModelNew = _model_new()\n"


def operator_of(task_code: str) -> str:
    """The name of the function that an adapted task calls."""
    for node in parse_source(task_code).body:
        if isinstance(node, ast.Assign) and names(*node.targets) == {"OPERATOR"}:
            return str(ast.literal_eval(node.value))
    raise ValueError("not the code of an adapted task")
