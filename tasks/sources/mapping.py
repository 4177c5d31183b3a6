"""Maps: which columns of a foreign table are a task and which an answer. Known maps are the files
of `maps/`, found by their columns; another is given as `task=COLUMN,answer=COLUMN`.

A field of a map is text with `{COLUMN}` in it: `{a|b}` is the first of two that is there, `{a.b}`
what `a` holds under `b`. A field alone keeps its value.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.exchange.flashinfer import Definition, Workload
from kernels_eval.exchange.trace_set import record_of
from kernels_eval.records import Json, KernelTask, Row, stable_hash
from kernels_eval.tables import table_beside
from kernels_eval.written import json_of
from tasks.sources.cells import program_in, samples_of, text_of, with_model_new
from tasks.sources.files import check_task_source, first_line, number_of, read_text, shown
from tasks.typed import typed_row

MAPS = Path(__file__).with_name("maps")
_FIELD = re.compile(r"\{([\w.| -]+)\}")
OF_TASK = ("task_id", "name", "entry_point", "init_form", "level", "source")
OF_ANSWER = ("generator", "language", "sample_index", "reasoning", "finish_reason", "candidate_id")
KEYS = {
    "task": ("task", "code"),
    "answer": ("answer", "text"),
    "id": ("task", "task_id"),
    **{name: ("task", name) for name in OF_TASK},
    "model": ("answer", "generator"),
    **{name: ("answer", name) for name in OF_ANSWER},
    "kernel": ("answer", "code"),
}
"""What --map names, by the section and field of a map."""


class Map(NamedTuple):
    """A map. `columns` are those that tell its tables; `keep` are taken over as they are."""

    name: str
    columns: Sequence[str]
    task: Mapping[str, Any]
    answer: Mapping[str, Any]
    keep: Sequence[str] = ()
    files: Sequence[str] = ()
    """of a folder: which of its files are tables (or rows, where they are no tables)"""
    definitions: bool = False
    """rows are definitions of SOL-ExecBench, with their workloads"""


class Found(NamedTuple):
    """What a row comes to. `skipped` says why there is no task, or no answer."""

    number: int
    tasks: Sequence[KernelTask]
    answers: Sequence[Json]
    skipped: Sequence[str]


class _Skipped(ValueError):
    """A row without a task or an answer."""


@cache
def known_maps() -> dict[str, Map]:
    found = {}
    for path in sorted(MAPS.glob("*.toml")):
        table = table_beside(str(path), path.name)
        columns, task, answer = (table.pop(name, {}) for name in ("columns", "task", "answer"))
        found[path.stem] = Map(path.stem, tuple(columns), task, answer, **table)
    return found


def map_of(columns: Sequence[str]) -> Map | None:
    """The known map of a table's columns, the one that asks for most of them."""
    fitting = [
        each for each in known_maps().values() if each.columns and set(each.columns) <= set(columns)
    ]
    return max(fitting, key=lambda each: len(each.columns), default=None)


def map_named(name: str) -> Map:
    if name not in known_maps():
        raise UsageError(f"there is no map {shown(name)!r}", f"known are {', '.join(known_maps())}")
    return known_maps()[name]


def given_map(text: str, columns: Sequence[str]) -> Map:
    """The map that `task=COLUMN,answer=COLUMN,...` spells. Raises UsageError."""
    sections: dict[str, dict[str, Any]] = {"task": {}, "answer": {}}
    keep = []
    if not columns:
        raise UsageError("the table has no rows", "give a table with an answer or a task per row")
    for pair in text.split(","):
        key, _, column = (each.strip() for each in pair.partition("="))
        if key not in (*KEYS, "label") or not column:
            raise UsageError(
                f"--map {shown(pair)!r} is no KEY=COLUMN", f"keys are {', '.join(KEYS)}, label"
            )
        if not _is_held(column, columns):
            raise UsageError(
                f"there is no column {shown(column)!r}",
                f"the columns are {shown(', '.join(columns), 300)}",
            )
        if key == "label":
            keep.append(column)
        else:
            section, field = KEYS[key]
            sections[section][field] = f"{{{column}}}"
    return Map("map", (), sections["task"], sections["answer"], keep)


def mapped(rows: Iterator[Row], by: Map, name: str, root: Path) -> Iterator[Found]:
    """What each row comes to; `root` is the folder that its paths are of. Raises UsageError, with
    the row, for a cell that holds no answer in a known form."""
    seen: dict[str, KernelTask] = {}
    for number, row in enumerate(rows):
        where = f"{name} row {number}"
        tasks: list[KernelTask] = []
        answers: list[Json] = []
        skipped = []
        try:
            tasks = [_unique(each, seen) for each in _tasks_of(row, by, where, root)]
        except _Skipped as error:
            skipped.append(str(error))
        if tasks or not (skipped and "code" in by.task):  # else its task is here, and is none
            try:
                task = tasks[0] if tasks else None
                answers = list(_answers_of(row, by, where, root, task, number))
            except _Skipped as error:
                skipped.append(str(error))
        yield Found(number, tasks, answers, skipped)


def _unique(task: KernelTask, seen: dict[str, KernelTask]) -> KernelTask:
    """The task, under another id where its own stands for another program."""
    if seen.setdefault(task.task_id, task).code == task.code:
        return task
    return task.model_copy(update={"task_id": f"{task.task_id}~{stable_hash(task.code)[:8]}"})


def _tasks_of(row: Row, by: Map, where: str, root: Path) -> list[KernelTask]:
    if by.definitions:
        return _of_definition(row, by, where)
    if not by.task.get("code") and not by.task.get("file"):
        return []
    given = {name: _value(by.task[name], row) for name in OF_TASK if name in by.task}
    given = {name: value for name, value in given.items() if value is not None}
    text = _text(by.task, row, where, root)
    if text is None:
        raise _Skipped("there is no task")
    program = program_in(text_of(text, where), given.get("entry_point"))
    if program is None:
        raise _Skipped(f"its task defines no {given.get('entry_point') or 'class'} with get_inputs")
    identity = str(given.get("task_id", f"{by.name}/{stable_hash(program.code)[:12]}"))
    level = number_of(given.get("level"))
    whole = {"name": identity, "source": by.name, **program._asdict(), **given}
    whole |= {"task_id": identity, "name": str(whole["name"]), "level": level}
    try:
        task = KernelTask.model_validate(whole)
        check_task_source(task.code, task.entry_point, "its task")
    except (UsageError, ValidationError) as error:
        raise _Skipped(first_line(error)) from None
    return [task]


def _of_definition(row: Row, by: Map, where: str) -> list[KernelTask]:
    loaded = {name: _loaded(value) for name, value in row.items()}
    try:
        definition = record_of(Definition, _without_nulls(loaded), where)
        workloads = [record_of(Workload, each, where) for each in loaded.get("workloads") or ()]
        return [definition.task(each, None) for each in workloads]
    except ValueError as error:
        raise _Skipped(str(error).removeprefix(f"{where} ")) from None


def _without_nulls(row: Row) -> Json:
    return {name: value for name, value in row.items() if value is not None}


def _answers_of(
    row: Row, by: Map, where: str, root: Path, task: KernelTask | None, number: int
) -> Iterator[Json]:
    if not _has_columns(by.answer, row):
        return
    given = {name: _value(by.answer[name], row) for name in OF_ANSWER if name in by.answer}
    about = {name: value for name, value in given.items() if value is not None}
    task_id = task.task_id if task else _value(by.task.get("task_id"), row)
    if task_id is None:
        raise _Skipped("its answer is of no task")
    about = typed_row(about | {"task_id": str(task_id)}, where)
    identity = str(about.pop("candidate_id", f"{by.name}/{number}"))
    about |= {name: _label(_found(name, row)) for name in by.keep}
    cell = _text(by.answer, row, where, root)
    if "code" in by.answer or "file" in by.answer:
        code = None if cell is None else text_of(cell, where)
        if not code or not code.strip():
            raise _Skipped("there is no answer")
        code = with_model_new(code, task) if task else code
        fenced = f"```python\n{code.strip()}\n```"
        yield {"candidate_id": identity, **about, "answer": fenced, "code": code}
        return
    samples = samples_of(cell, where)
    if not samples:
        raise _Skipped("there is no answer")
    for place, turns in enumerate(samples):
        own = f"{identity}/{place}" if len(samples) > 1 else identity
        parent = None
        for turn, answer in enumerate(turns, start=1):
            name = f"{own}@{turn}" if len(turns) > 1 else own
            told = {"candidate_id": name, **about, "turn": turn, "parent": parent}
            told |= {"response": answer.text}
            told |= {"reasoning": answer.reasoning} if answer.reasoning else {}
            told |= {"finish_reason": answer.finish_reason} if answer.finish_reason else {}
            yield told
            parent = name


def _label(value: Any) -> Any:
    return json.dumps(value, default=str) if isinstance(value, Mapping | list) else value


def _has_columns(section: Row, row: Row) -> bool:
    texts = [section[name] for name in ("code", "text", "file") if name in section]
    fields = [field for text in texts for field in _FIELD.findall(text)]
    return any(_is_held(name, row) for field in fields for name in field.split("|"))


def _is_held(name: str, columns: Collection[str]) -> bool:
    """Whether there is a column of this name, or one that may hold the field it names."""
    return name in columns or name.split(".")[0] in columns


def _text(section: Row, row: Row, where: str, root: Path) -> Any:
    if "file" not in section:
        return _value(section.get("code", section.get("text")), row)
    link = _value(section["file"], row)
    if link is None:
        return None
    # a link into a data set on the hub is a path in it, or in a copy of it beside this one
    place = re.sub(r"^.*?/datasets/[^/]+/([^/]+)/(?:blob|resolve|raw)/[^/]+/", r"../\1/", str(link))
    for path in (root / place, root / re.sub(r"^\.\./[^/]+/", "", place)):
        if path.resolve().is_relative_to(root.resolve().parent) and path.is_file():
            return read_text(path)
    raise _Skipped(f"there is no file {shown(place, 80)}")


def _value(template: Any, row: Row) -> Any:
    if not isinstance(template, str):
        return template
    if whole := _FIELD.fullmatch(template):
        return _found(whole[1], row)
    values = {name: _found(name, row) for name in _FIELD.findall(template)}
    if any(value is None for value in values.values()):
        return None
    return _FIELD.sub(lambda field: str(values[field[1]]), template)


def _found(field: str, row: Row) -> Any:
    for name in field.split("|"):
        value = row.get(name)
        if value is None and "." in name:
            value = row
            for part in name.split("."):
                value = _inside(_loaded(value), part)
        if value is not None:
            return value
    return None


def _inside(value: Any, name: str) -> Any:
    if isinstance(value, Mapping):
        return value.get(name)
    known = isinstance(value, Sequence) and name.isdecimal() and int(name) < len(value)
    return value[int(name)] if known else None


def _loaded(value: Any) -> Any:
    if isinstance(value, str) and value.lstrip()[:1] in "{[":
        try:
            return json_of(value)
        except ValueError:
            return value
    return value
