"""A folder of definitions, workloads, solutions and traces: FlashInfer-Bench's trace set, or
SOL-ExecBench's, with a folder per problem. Content tells a file's kind; `left_out` counts what is
not taken over."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from kernels_eval.errors import UsageError, first_problem
from kernels_eval.exchange.definitions import file_name, written
from kernels_eval.exchange.flashinfer import Definition, Solution, Suite, Workload
from kernels_eval.exchange.traces import Evaluation, verdict_row
from kernels_eval.records import Json, KernelTask, Record
from kernels_eval.sandbox.trees import named
from kernels_eval.tables import table_beside
from kernels_eval.written import json_of

Kind = TypeVar("Kind", bound=Record)


LAYOUTS = table_beside(__file__)


def is_trace_set(path: Path) -> bool:
    if not path.is_dir():
        return False
    patterns = ("definition.json", "*/definition.json", "*/*/definition.json")
    return any(next(path.glob(each), None) for each in patterns) or bool(
        named(path / "definitions", "*.json")
    )


class TraceSet:
    """A folder's content, without incomplete records and second ones of a name. Raises UsageError
    for a file that is not JSON.
    """

    def __init__(self, root: Path | None = None) -> None:
        self.root = root
        self.definitions: dict[str, Definition] = {}
        self.solutions: dict[str, Solution] = {}
        self.workloads: dict[str, dict[str, Workload]] = {}
        self.traces: list[Json] = []
        self.left_out: Counter[str] = Counter()
        """Counts of what could not be taken over, by reason."""
        if root:
            self._read(root)

    def _read(self, root: Path) -> None:
        places: dict[Path, str] = {}
        for path in named(root, "*.json"):
            row = _object(path.read_bytes(), str(path))
            with self.counted():
                if {"reference", "inputs"} <= row.keys():
                    definition = record_of(Definition, row, path)
                    _once(self.definitions, definition, path)
                    places[path.parent] = definition.name
                elif {"sources", "spec"} <= row.keys():
                    _once(
                        self.solutions, record_of(Solution, _filled(row, path.parent), path), path
                    )
        for path in named(root, "*.jsonl"):
            for number, line in enumerate(path.read_bytes().splitlines(), start=1):
                where = f"{path} line {number}"
                with self.counted():
                    if line.strip():
                        self._line(_object(line, where), where, places.get(path.parent))

    @contextmanager
    def counted(self) -> Iterator[None]:
        try:
            yield
        except ValueError as error:
            self.left_out[str(error)] += 1

    def _line(self, row: Json, where: str, near: str | None) -> None:
        held = row.get("workload") if "definition" in row else row
        workload = record_of(Workload, held, where)
        name = row.get("definition", near)
        if not isinstance(name, str) or name not in self.definitions:
            raise ValueError(f"{where} is of definition {str(name)[:80]!r}, which is not here")
        known = self.workloads.setdefault(name, {})
        identity = workload.uuid or f"{len(known)}"
        if known.setdefault(identity, workload) != workload:
            raise ValueError(f"{where}: the uuid {identity!r} stands for another workload already")
        if row.get("evaluation"):
            record_of(Evaluation, row["evaluation"], where)
            self.traces.append({**row, "uuid": identity})

    def add(
        self,
        definition: Definition,
        workload: Workload,
        solution: Solution,
        evaluation: dict[str, object],
    ) -> None:
        """Add one trace with what it is of; known names keep their definition or solution."""
        self.definitions.setdefault(definition.name, definition)
        self.solutions.setdefault(solution.name, solution)
        uuid = str(workload.uuid)
        self.workloads.setdefault(definition.name, {})[uuid] = workload
        known = {"definition": definition.name, "uuid": uuid, "solution": solution.name}
        self.traces.append(known | {"evaluation": evaluation})

    def write(self, root: Path, suite: Suite) -> None:
        def put(kind: str, rows: Iterable[object], *names: str, indent: int | None = None) -> None:
            path = root / LAYOUTS[suite][kind].format(*map(file_name, names))
            path.parent.mkdir(parents=True, exist_ok=True)
            lines = [json.dumps(row, indent=indent) + "\n" for row in rows]
            path.write_text("".join(lines), encoding="utf-8")

        for name, definition in self.definitions.items():
            put("definition", [written(definition, suite)], name, indent=2)
            workloads = {
                uuid: written(workload, suite) for uuid, workload in self.workloads[name].items()
            }
            traces = []
            for trace in self.traces:
                if trace["definition"] == name:
                    known = {key: value for key, value in trace.items() if key != "uuid"}
                    traces.append(known | {"workload": workloads[trace["uuid"]]})
            rows = list(workloads.values())
            if suite == "flashinfer":
                rows = [{"definition": name, "workload": workload} for workload in rows]
            put("workload", rows, name)
            put("trace", traces, name)
        for solution in self.solutions.values():
            row = written(solution, suite)
            put("solution", [row], solution.definition, solution.name, indent=2)

    def tasks(self) -> Iterator[KernelTask]:
        """One task per definition and workload."""
        for name, definition in self.definitions.items():
            for identity in self.workloads.get(name, ()):
                if task := self.task(definition, identity):
                    yield task

    def task(self, definition: Definition, identity: str) -> KernelTask | None:
        with self.counted():
            return definition.task(self.workloads[definition.name][identity], self.root)
        return None

    def candidates(self) -> Iterator[dict[str, object]]:
        for solution in self.solutions.values():
            with self.counted():
                definition = self.definitions.get(solution.definition)
                if definition is None:
                    raise ValueError(f"definition {solution.definition!r} is not here")
                language = solution.language
                for identity, workload in self.workloads.get(definition.name, {}).items():
                    if task := self.task(definition, identity):
                        yield {
                            "candidate_id": f"{solution.name}@{identity}",
                            "task_id": task.task_id,
                            "code": solution.code(definition, workload),
                            "language": language and language.value,
                            "generator": solution.author,
                        }

    def verdicts(self) -> Iterator[dict[str, object]]:
        """One row per trace, as in verdict tables; tasks that cannot be drawn have their workload's
        name.
        """
        for trace in self.traces:
            definition, name = self.definitions[trace["definition"]], str(trace.get("solution"))
            task, solution = self.task(definition, trace["uuid"]), self.solutions.get(name)
            unknown = f"definition/{definition.name}/{trace['uuid']}"
            yield {
                "candidate_id": f"{name}@{trace['uuid']}",
                "task_id": task.task_id if task else unknown,
                "generator": solution.author if solution else name,
                **verdict_row(trace["evaluation"]),
            }


def _object(text: bytes, where: str) -> Json:
    try:
        found = json_of(text)
    except ValueError as error:
        raise UsageError(f"{where} is not JSON: {error}", "give a complete file") from error
    if not isinstance(found, dict):
        raise UsageError(f"{where} is not a JSON object", "give a complete file")
    return found


def _filled(row: Json, folder: Path) -> Json:
    """A solution, with its files beside it where it holds no text of them."""
    sources = row["sources"] if isinstance(row["sources"], list) else []
    told = []
    for each in sources:
        if isinstance(each, dict) and not each.get("content"):
            place = (folder / str(each.get("path"))).resolve()
            if place.is_relative_to(folder.resolve()) and place.is_file():
                each = {**each, "content": place.read_text(encoding="utf-8")}
        told.append(each)
    return {**row, "sources": told or row["sources"]}


def record_of(kind: type[Kind], row: object, where: object) -> Kind:
    """A row as a record, without unknown fields. Raises ValueError."""
    try:
        return kind.model_validate(row, extra="ignore")
    except ValidationError as error:
        place, said = first_problem(error)
        what = f"{where} is no {kind.__name__}: {place or 'all of it'}: {said}"
        raise ValueError(what) from error


def _once(known: dict[str, Kind], found: Kind, where: Path) -> None:
    name = str(getattr(found, "name", ""))
    if known.setdefault(name, found) != found:
        raise ValueError(f"{where}: the name {name!r} stands for another one already")
