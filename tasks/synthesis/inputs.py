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
from tasks.sources.files import columns_of, read_text, rows_of, shown
from tasks.sources.hub import load_rows
from tasks.sources.tables import holds_tables, on_hub, part_files, tell_left_out
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
    *("reasoning_tokens", "completion_tokens", "finish_reason"),
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
            found = {name: row.get(own) for name, own in self.columns.items()}
            yield typed_row(found, f"{self.name} row {index}")


def parts_of(location: str | Path) -> list[Part]:
    """Parts of a table, a folder or a glob of them, a .py file, a folder of kernels
    (tasks.synthesis.folders) or solutions (FlashInfer-Bench, SOL-ExecBench), or a hub id
    (`OWNER/NAME`, `OWNER/NAME:SPLIT`). Raises UsageError."""
    path = Path(location).expanduser()
    hub_id, _, split = str(location).partition(":")
    if on_hub(hub_id):
        return [_in_memory(shown(location), load_rows(hub_id, split or MOST_SPLIT, None, ()))]
    if is_trace_set(path):
        held = TraceSet(path)
        rows = list(held.candidates())
        tell_left_out(held)
        if not rows:
            fix = "give a folder with definitions, workloads and solutions"
            raise UsageError(f"{shown(path)} holds no solution that can be verified", fix)
        return [_in_memory(shown(location), rows)]
    if path.suffix in SUFFIXES or (path.is_dir() and not holds_tables(path)):
        return [_in_memory(shown(location), list(rows_of_modules(path)))]
    parts = [_of_file(file) for file in part_files(location)]
    if path.is_dir() and not any(map(holds_candidates, parts)) and has_modules(path):
        # scores beside kernels, such as KernelBench's or a results.jsonl
        return [_in_memory(shown(location), list(rows_of_modules(path)))]
    return parts


def holds_candidates(part: Part) -> bool:
    return any(set(form) <= set(part.columns) for form in FORMS)


def model_of(location: str | Path) -> str:
    """Model name for a place that gives none: from KernelBench's `generation_config.yaml`, else the
    folder's or file's name."""
    path = Path(location).expanduser()
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


def _of_file(path: Path) -> Part:
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
