"""Sources of candidates: tables, folders of .py files, KernelBench runs, hub data sets. The same
place gives the same rows in order, and a digest that changes with them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from kernels_eval.errors import UsageError
from kernels_eval.exchange.trace_set import TraceSet, is_trace_set
from kernels_eval.records import Json, Row, stable_hash
from kernels_eval.tables import table_beside
from tasks.files import file_sha256
from tasks.sources.cells import Answer, samples_of
from tasks.sources.files import columns_of, local, number_of, read_text, rows_of, shown
from tasks.sources.foreign import Foreign, of_file, of_folder, of_rows
from tasks.sources.hub import load_rows
from tasks.sources.tables import holds_tables, on_hub, part_files, tell_left_out, unusable
from tasks.synthesis.folders import SUFFIXES, has_modules, rows_of_modules
from tasks.typed import typed_row

ALIASES: dict[str, list[str]] = table_beside(__file__)
"""Columns, and their names in other tables; the first existing one is used."""
MOST_SPLIT = "train"
FORMS = (
    ("task_id", "code"),
    ("task_id", "response"),
    ("level", "problem_id", "code"),
    ("level", "problem_id", "response"),
)
"""Columns that make a table of candidates; level and problem_id are KernelBench's."""

READ = (
    *("task_id", "level", "problem_id", "candidate_id", "language", "generator", "sampling"),
    *("sample_index", "code", "parse_reason", "prompt_hash", "response", "reasoning", "answer"),
    *("reasoning_tokens", "completion_tokens", "finish_reason", "turn", "parent"),
)
"""Columns that rows have, where the place has them."""


class Part(NamedTuple):
    """Rows of one file, folder or data set. `columns` maps the names of `rows` to its own; `given`
    are all of its own."""

    name: str
    given: Sequence[str]
    columns: Mapping[str, str]
    own_rows: Callable[[], Iterable[Row]]
    digest: Callable[[], str]

    def rows(self) -> Iterator[Json]:
        for index, row in enumerate(self.own_rows()):
            where = f"{self.name} row {index}"
            found = {name: row.get(own) for name, own in self.columns.items()}
            if not isinstance(found.get("response"), str | None):
                found |= _only_answer(found["response"], where)
            yield typed_row(found, where)


def _only_answer(cell: object, where: str) -> Json:
    samples = samples_of(cell, f"{where}: the column response")
    answers = [answer for turns in samples for answer in turns]
    if len(answers) > 1:
        fix = "make a row of each: `concur import --map id=task_id,answer=response`"
        raise UsageError(f"{where} holds {len(answers)} answers", fix)
    answer = answers[0] if answers else Answer("")
    told = {"response": answer.text, "reasoning": answer.reasoning}
    return {**told, "finish_reason": answer.finish_reason} if answer.finish_reason else told


def parts_of(location: str | Path, references: bool = False) -> list[Part]:
    """Parts of a table, a folder or a glob of them, a .py file, a folder of kernels
    (tasks.synthesis.folders; with `references` also the programs in it) or solutions
    (FlashInfer-Bench, SOL-ExecBench), or a hub id (`OWNER/NAME`, `OWNER/NAME:SPLIT`). Raises
    UsageError."""
    path = local(location)
    hub_id, _, split = str(location).partition(":")
    if on_hub(hub_id):
        rows = load_rows(hub_id, split or MOST_SPLIT, None, ())
        return [_of_map(of_rows(shown(location), rows, path)) or _in_memory(shown(location), rows)]
    if foreign := of_folder(path):
        if part := _of_map(foreign):
            return [part]
        raise UsageError(
            f"{shown(path)} holds tasks alone", "give the kernels, and this as --tasks"
        )
    if is_trace_set(path):
        held = TraceSet(path)
        rows = list(held.candidates())
        tell_left_out(held)
        if not rows:
            fix = "give a folder with definitions, workloads and solutions"
            raise UsageError(f"{shown(path)} holds no solution that can be verified", fix)
        return [_in_memory(shown(location), rows)]
    if path.suffix in SUFFIXES or (path.is_dir() and not holds_tables(path)):
        return [_in_memory(shown(location), list(rows_of_modules(path, references)))]
    parts = [_of_file(file) for file in part_files(location)]
    if (
        path.is_dir()
        and not any(holds_candidates(part.columns) for part in parts)
        and has_modules(path)
    ):
        # scores beside kernels, such as KernelBench's or a results.jsonl
        return [_in_memory(shown(location), list(rows_of_modules(path, references)))]
    return parts


def candidate_parts(location: str | Path, references: bool = False) -> list[Part]:
    """The parts of a location. Raises UsageError for one without the columns of candidates."""
    parts = parts_of(location, references)
    for part in parts:
        if not holds_candidates(part.columns):
            raise unusable(part.name, part.given, "candidates", FORMS)
    return parts


def holds_candidates(columns: Iterable[str]) -> bool:
    return any(set(form) <= set(columns) for form in FORMS)


def task_id_of(row: Mapping[str, object], where: str) -> str:
    """The task that a row answers. Raises UsageError where it names none."""
    if row.get("task_id") is not None:
        return str(row["task_id"])
    level, problem = number_of(row.get("level")), number_of(row.get("problem_id"))
    if level is None or problem is None:
        raise UsageError(
            f"{where} names no task",
            "every candidate has a task_id, or KernelBench's level and problem_id",
        )
    return f"kernelbench/L{level}/{problem}"


def model_of(location: str | Path) -> str:
    """Model name for a place that gives none: from KernelBench's `generation_config.yaml`, else the
    folder's or file's name."""
    path = local(location)
    note = path / "generation_config.yaml"
    if note.is_file() and (
        found := re.search(r"^model_name:[ \t]*[\'\"]?([^\s\'\"]+)", read_text(note), re.MULTILINE)
    ):
        return shown(found[1])
    name = path.resolve().stem if path.is_file() else path.resolve().name
    return shown(name.partition(":")[0])


def _in_memory(name: str, rows: Sequence[Json]) -> Part:
    given = list(dict.fromkeys(column for row in rows for column in row))
    return Part(name, given, _own_names(given), lambda: rows, lambda: stable_hash(rows))


def is_mapped(foreign: Foreign) -> bool:
    """Whether a map reads a table. One that asks for a single column, such as `messages`, does not
    where the others are those of candidates."""
    weak = foreign.by is not None and len(foreign.by.columns) == 1
    plain = weak and holds_candidates(_own_names(foreign.columns))
    return foreign.by is not None and not plain


def _of_map(foreign: Foreign) -> Part | None:
    if foreign.by is None or not foreign.by.answer or not is_mapped(foreign):
        return None
    names = {name: name for name in READ}
    return Part(foreign.name, foreign.columns, names, foreign.answers, foreign.digest)


def _of_file(path: Path) -> Part:
    if part := _of_map(of_file(path)):
        return part
    given = columns_of(path)
    columns = _own_names(given)
    read = list(dict.fromkeys(columns.values()))
    return Part(shown(path), given, columns, lambda: rows_of(path, read), lambda: file_sha256(path))


def _own_names(given: Sequence[str]) -> dict[str, str]:
    found = {}
    for name in READ:
        for own in (name, *ALIASES.get(name, ())):
            if own in given:
                found[name] = own
                break
    if "task_id" not in given and {"level", "problem_id"} <= found.keys():
        found.pop("task_id", None)  # a name beside the numbers
    return found
