"""TritonBench-T's operators (https://github.com/thunlp/TritonBench) as tasks, and recorded answers
to them as candidates.

Guarantees: one task an operator, `task_id` = `tritonbench/{name}`, `level` its difficulty where
that is known; its one forward call makes all of the operator's test calls
(`tasks.sources.functions` says how), so an answer is correct exactly where every call is, and what
is refused or left out is listed with its reason. Nothing is run here. Does not guarantee the scores
of TritonBench's own scripts: inputs are drawn anew for every seed here, and compared more strictly.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any

from kernels_eval.errors import UsageError
from kernels_eval.records import Candidate, KernelTask, Language, candidate_id
from tasks.sources.files import JSON_LINES, existing, read_lines, read_parquet, read_text
from tasks.sources.functions import Adapted, Refused, adapt, operator_of, with_model_new

COLUMNS = ("name", "code_with_tests")
OPTIONAL_COLUMNS = ("difficulty",)
ANSWERS = ("model", "name", "response")
SOURCE = "tritonbench"
NOT_FINITE = "has no finite number in its answer, so there is nothing to compare"
ROUNDING = (
    "has an answer that is rounding alone (the matrix is singular), and would loosen the tolerance"
    " of the others"
)
NOT_JUDGED: Mapping[str, Mapping[str, str]] = MappingProxyType(
    {
        "determinant_via_qr": {"test_case_2": ROUNDING},
        "erfc_sqrt": {"test_case_2": NOT_FINITE},
        "matrix_power_eig": {"test_case_2": NOT_FINITE},
        "pseudoinverse_svd": {"test_case_4": ROUNDING},
        "rad2deg_sqrt": {"test_case_3": NOT_FINITE},
        "sqrt_tanh": {"test_case_2": NOT_FINITE},
        "torch.asin": {"test_case_2": NOT_FINITE},
        "torch.log": {"test_case_3": NOT_FINITE},
        "torch.rsqrt": {"test_case_3": NOT_FINITE, "test_case_4": NOT_FINITE},
        "torch.special.digamma": {"test_case_2": NOT_FINITE},
        "torch.special.zeta": {"test_case_4": NOT_FINITE},
    }
)
"""Test calls of TritonBench-T that were run on a CPU and cannot be judged: with one of them, its
whole operator could not be."""


@dataclass(frozen=True)
class Survey:
    """What became of a file's operators: `tasks` in its order, `adapted` by task_id, `refused` by
    name with the reason."""

    tasks: list[KernelTask] = field(default_factory=list)
    adapted: dict[str, Adapted] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)


def load(location: str | Path) -> list[KernelTask]:
    """The tasks of those operators that can be adapted. Raises UsageError naming what cannot be
    read, and where none can."""
    found = survey(location)
    if not found.tasks:
        raise UsageError(
            f"{location} holds no operator that becomes a task:"
            f" {next(iter(found.refused.values()), 'it is empty')}",
            _FORM,
        )
    return found.tasks


def survey(location: str | Path) -> Survey:
    """Every operator of a Parquet or JSONL file with the columns name and code_with_tests, or of a
    folder of .py files, one an operator: a reference function, a line of `#`, and a test function
    that calls it.

    Raises UsageError naming what cannot be read, and a name that is there twice.
    """
    found = Survey()
    for row in _rows(existing(location)):
        name = row["name"]
        task_id = f"{SOURCE}/{name}"
        if task_id in found.adapted or name in found.refused:
            raise UsageError(
                f"{location} holds {name} twice", "give every operator a name of its own"
            )
        try:
            adapted = adapt(name, row["code_with_tests"], NOT_JUDGED.get(name, {}))
        except Refused as refused:
            found.refused[name] = str(refused)
            continue
        task = KernelTask(
            task_id=task_id,
            name=adapted.operator,
            code=adapted.code,
            source=SOURCE,
            level=_difficulty(row.get("difficulty")),
        )
        found.tasks.append(task)
        found.adapted[task_id] = adapted
    return found


def texts(location: str | Path) -> Iterator[tuple[str, str]]:
    """task_id and the file's own text, of every operator. Raises UsageError as `survey` does."""
    for row in _rows(existing(location)):
        yield f"{SOURCE}/{row['name']}", row["code_with_tests"]


def load_answers(location: str | Path, tasks: Sequence[KernelTask]) -> list[Candidate]:
    """Recorded answers (Parquet: model, name, response) to these tasks as candidates, `generator`
    the model. Others are left out.

    An answer is a module that defines the operator's function: it gets a `ModelNew` that calls it.
    One that does not define it has no code (`missing_model_new`). Of a model's several answers to
    an operator the order is the sample index. Raises UsageError for a file that cannot be read, or
    holds a row without one of these.
    """
    path, known = existing(location), {task.task_id: task for task in tasks}
    seen: dict[tuple[str, str], int] = {}
    found = []
    for number, row in enumerate(read_parquet(path, ANSWERS).iter_rows(named=True)):
        if missing := [name for name in ANSWERS if not isinstance(row[name], str)]:
            raise UsageError(
                f"{path} row {number} has no {', '.join(missing)}",
                "a row is an answer: model, name and response, as text",
            )
        if (task := known.get(f"{SOURCE}/{row['name']}")) is not None:
            key = (row["model"], task.task_id)
            seen[key] = seen.get(key, -1) + 1
            found.append(answer_to(task, row["response"], row["model"], seen[key]))
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
        parse_reason=None if code is not None else "missing_model_new",
    )
    return base.model_copy(
        update={
            "candidate_id": candidate_id(task, generator, base.sampling, sample_index, response)
        }
    )


def operator_name(task: KernelTask) -> str:
    """The name of the function that a task's calls go to."""
    return operator_of(task.code)


# -- reading ---------------------------------------------------------------------------------------

_FORM = (
    "an operator is a reference function, a line of #, and a test function that calls it and keeps"
    " what it returns"
)


def _rows(path: Path) -> Iterator[dict[str, Any]]:
    if path.is_dir():
        files = sorted(file for file in path.glob("*.py") if not file.name.startswith("_"))
        if not files:
            raise UsageError(
                f"{path} holds no .py file",
                "give a folder of operator files, or a Parquet or JSONL file",
            )
        rows: Iterator[dict[str, Any]] = (
            {"name": file.stem, "code_with_tests": read_text(file)} for file in files
        )
    elif path.suffix == ".py":
        rows = iter([{"name": path.stem, "code_with_tests": read_text(path)}])
    elif path.suffix in JSON_LINES:
        rows = read_lines(path)
    else:
        rows = read_parquet(path, COLUMNS, OPTIONAL_COLUMNS).iter_rows(named=True)
    for number, row in enumerate(rows):
        if missing := [
            name for name in COLUMNS if not isinstance(row.get(name), str) or not row[name].strip()
        ]:
            raise UsageError(
                f"{path} row {number} has no {', '.join(missing)}",
                f"a row has {' and '.join(COLUMNS)}, as text",
            )
        yield row


def _difficulty(value: object) -> int | None:
    try:
        return None if value is None else int(str(value))
    except ValueError:
        return None
