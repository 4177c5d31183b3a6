"""Verdicts to and from other suites' files: KernelBench's run folders, the traces of
FlashInfer-Bench and SOL-ExecBench, packages of single kernels, and pairs of CUDA and HIP.

Guarantees: what a form does not hold is left out and counted, with why; a folder that holds other
files is not written to. A task's program runs only in its sandbox (to learn the shapes of its
inputs and outputs). Does not guarantee that other harnesses would judge alike: a table made of
their results has their statuses.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any, Literal, NamedTuple

from pydantic import ValidationError

from kernels_eval.__main__ import QUICK
from kernels_eval.checks.trials import Interface
from kernels_eval.errors import UsageError
from kernels_eval.interchange import kernelbench
from kernels_eval.interchange.definitions import definition_of, solution_of, workload_of, written
from kernels_eval.interchange.flashinfer import (
    Definition,
    Solution,
    Suite,
    Workload,
    evaluation_of,
)
from kernels_eval.interchange.package import export_package
from kernels_eval.interchange.trace_set import TraceSet, is_trace_set
from kernels_eval.records import Candidate, KernelTask, Verdict
from kernels_eval.versions import PROTOCOL_VERSION
from tasks.curation.source import Source
from tasks.files import atomic_write, explain_write_errors
from tasks.publishing.pairs import STAGE, write_pairs
from tasks.sources.files import read_text, shown
from tasks.sources.tables import load
from tasks.tables import CANDIDATES, VERDICTS
from tasks.verification.merge import merged
from tasks.workload.measure import Measurer

Form = Literal["flashinfer", "sol", "kernelbench", "package", "hip", "table"]
_OF_CANDIDATES = ("candidate_id", "given_id", "code", "generator", "sample_index", "parse_reason")
_MERGED = (
    "given_id",
    *(n for n in CANDIDATES.names if n not in ("response", "separated_reasoning")),
)
_LEVEL = re.compile(r"level_(\d+)_problem_\d+|^level:\s*(\d+)", re.MULTILINE)


class Judged(NamedTuple):
    """A candidate with its task and verdict; `name` is what its table calls it."""

    name: str
    task: KernelTask
    candidate: Candidate
    verdict: Verdict


def export(sources: Sequence[str], form: Form, out: str, **options: Any) -> dict[str, Any]:
    """Write verdicts in a form; returns a summary. `options`: candidates, tasks, root, candidate,
    name, license, quick. Raises UsageError for what cannot be read, or written."""
    target = Path(out).expanduser()
    with explain_write_errors(target, "choose another --out, or free some disk"):
        if form == "table":
            return _table(sources or ["."], target, options["candidates"], options["root"])
        if len(sources) > 1:
            raise UsageError(f"--as {form} takes one SOURCE", "merge several with --as table first")
        if form == "hip" and (target / STAGE).is_dir():
            pass  # begun before
        elif target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{out} holds other files", "name a new folder with --out")
        source = sources[0] if sources else None
        found = judged(source, options["candidates"], options["tasks"], options["root"])
        if form == "package":
            return _package(found, target, options)
        if form == "hip":
            return _hip(found, target)
        if form == "kernelbench":
            return _kernelbench(found, target)
        return _TraceWriter(form, target, options["tasks"]).write(found)


# -- what comes in ---------------------------------------------------------------------------------


def judged(
    verdicts: str | None, candidates: str | None, tasks: str | None, root: str
) -> Iterator[Judged]:
    """Verdicts with their candidates and tasks, in the order of the verdicts. Raises UsageError
    where one of the three is missing."""
    source = Source(verdicts, candidates, root)
    needed = ["candidate_id", "task_id", "status", "reason", "code"]
    frame = source.verdict_rows(tuple(Verdict.model_fields), _OF_CANDIDATES, needed)
    known: Mapping[str, KernelTask] = {}
    wanted = set(frame["task_id"])
    if tasks is not None:
        known = {task.task_id: task for task in load(tasks, wanted)}
    elif source.tasks is not None:
        rows = source.tasks.read(columns=tuple(KernelTask.model_fields), unique="task_id")
        known = {row["task_id"]: _record(KernelTask, row) for row in rows.iter_rows(named=True)}
    if missing := sorted(wanted - known.keys()):
        raise UsageError(
            f"{len(missing)} tasks of {source.verdicts.path} are not there, such as"
            f" {shown(missing[0])}",
            "name the tasks that were verified with --tasks",
        )
    for row in frame.iter_rows(named=True):
        candidate = _record(Candidate, {"generator": "unnamed", **_without_nulls(row)})
        name = row.get("given_id") or row["candidate_id"]
        yield Judged(str(name), known[row["task_id"]], candidate, _record(Verdict, row))


def _record(kind: Any, row: Mapping[str, Any]) -> Any:
    given = {name: value for name, value in row.items() if name in kind.model_fields}
    try:
        return kind.model_validate(_without_nulls(given))
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(
            f"{shown(row.get('candidate_id') or row.get('task_id'))} is no {kind.__name__}:"
            f" {'.'.join(map(str, first['loc']))}: {first['msg']}",
            "give tables as verification wrote them",
        ) from error


def _without_nulls(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a table without what is null, in structs too."""
    plain = {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in row.items()}
    return {name: value for name, value in plain.items() if value not in (None, {})}


def _table(
    sources: Sequence[str], target: Path, candidates: str | None, root: str
) -> dict[str, Any]:
    """One table of verdicts: the results of another harness, or several sets, merged."""
    import polars as pl

    sets, left_out = {}, Counter[str]()
    for source in dict.fromkeys(sources):
        place = Path(source).expanduser()
        if is_trace_set(place):
            held = TraceSet(place)
            rows = pl.DataFrame(list(held.verdicts()), infer_schema_length=None)
            left_out += held.left_out
        elif (
            results := place / kernelbench.RESULTS if place.is_dir() else place
        ).is_file() and results.suffix != ".parquet":
            rows = pl.DataFrame(_kernelbench_rows(results), infer_schema_length=None)
        elif len(sources) > 1:
            rows = Source(source, candidates, root).read(VERDICTS.names, _MERGED)
        else:
            raise UsageError(
                f"{shown(place)} holds no results of another harness",
                f"give a folder with traces, a run of KernelBench with {kernelbench.RESULTS}, or"
                " several sets of verdicts to merge",
            )
        if rows.is_empty():
            raise UsageError(f"{shown(place)} holds no result", "give a run that was evaluated")
        sets[source] = rows
    frame = merged(sets) if len(sources) > 1 else next(iter(sets.values()))
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write(target, frame.write_parquet)
    told = _summary("table", target, len(frame), left_out)
    if len(sources) > 1:
        counts = frame.group_by("device", "status").len().sort("device", "status").iter_rows()
        told["devices"] = [[device, status, count] for device, status, count in counts]
        told["candidates"] = frame["candidate_id"].n_unique()
    return told


def _kernelbench_rows(results: Path) -> list[dict[str, Any]]:
    config = results.with_name(kernelbench.CONFIG)
    names = "\n".join(sorted(path.name for path in results.parent.glob("level_*")))
    level = _LEVEL.search(names) or _LEVEL.search(read_text(config) if config.is_file() else "")
    if level is None:
        raise UsageError(
            f"{results} does not say its level",
            f"keep the kernels beside it, or write `level: 1` into {kernelbench.CONFIG}",
        )
    from tasks.synthesis.inputs import model_of

    model = model_of(results.parent)
    try:
        rows = list(
            kernelbench.verdict_rows(json.loads(read_text(results)), int(level[1] or level[2]))
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"{results} is none of KernelBench's: {error}") from error
    return [{**row, "generator": model} for row in rows]


# -- what goes out ---------------------------------------------------------------------------------


@cache
def _measurer() -> Measurer:
    return Measurer()


@cache
def _interface(task: KernelTask) -> Interface:
    """Raises ValueError where the task cannot be run."""
    answer = _measurer().ask("interface", task)
    if "error" in answer:
        raise ValueError(f"the task does not run: {answer['error']}: {answer.get('detail')}")
    return Interface.model_validate(answer)


def _package(found: Iterator[Judged], target: Path, options: Mapping[str, Any]) -> dict[str, Any]:
    asked = options["candidate"]
    if not asked:
        raise UsageError("a package is of one kernel", "name it with --candidate")
    one = next((each for each in found if asked in (each.name, each.candidate.candidate_id)), None)
    if one is None:
        raise UsageError(f"there is no candidate {shown(asked)}", "see the ids of the verdicts")
    if not one.verdict.correct_custom:
        said = f"{one.verdict.status.value} ({one.verdict.reason.value})"
        raise UsageError(f"{shown(asked)} is {said}", "only a correct kernel is exported")
    try:
        interface = _interface(one.task)
    except ValueError as error:
        raise UsageError(str(error)) from error
    finally:
        _close()
    more = {name: options[name] for name in ("name", "license") if options[name]}
    config = QUICK if options["quick"] else None
    told = export_package(one.task, one.candidate, interface, target, config=config, **more)
    return {"form": "package", "out": str(target), "written": 1, "left_out": {}, **told}


def _hip(found: Iterator[Judged], target: Path) -> dict[str, Any]:
    """Correct CUDA kernels beside their HIP form."""
    left_out, kernels = Counter[str](), []
    for each in found:
        if not each.candidate.language.needs_nvcc:
            left_out[f"the language is {each.candidate.language}"] += 1
        elif not each.verdict.correct_custom:
            left_out[f"the verdict is {each.verdict.status.value}"] += 1
        else:
            kernels.append((each.task, each.candidate))
    if not kernels:
        raise UsageError("no verdict is of a correct CUDA kernel", "choose other verdicts")
    told = write_pairs(kernels, target)
    return {**_summary("hip", target, told["pairs"], left_out), **told}


def _close() -> None:
    _measurer().close()
    _measurer.cache_clear()


def _kernelbench(found: Iterator[Judged], target: Path) -> dict[str, Any]:
    """One run folder a model and level; the folder itself where there is one of both."""
    runs: dict[tuple[str, str], dict[str, list[Judged]]] = {}
    left_out: Counter[str] = Counter()
    for each in found:
        if place := kernelbench.TASK_ID.fullmatch(each.task.task_id):
            run = runs.setdefault((each.candidate.generator, place["level"]), {})
            run.setdefault(place["problem"], []).append(each)
        else:
            left_out["the task is none of KernelBench's"] += 1
    if not runs:
        raise UsageError("no task is one of KernelBench's", "their ids are kernelbench/L1/23")
    written_rows = 0
    for (model, level), problems in runs.items():
        own = f"{_file_name(model)}_level_{level}"
        folder = target / own if len(runs) > 1 else target
        folder.mkdir(parents=True)
        results: dict[str, list[dict[str, Any]]] = {}
        for problem, samples in sorted(problems.items(), key=lambda pair: int(pair[0])):
            numbers = [each.candidate.sample_index for each in samples]
            if len(set(numbers)) < len(numbers):  # of several tables: numbered anew
                numbers = list(range(len(samples)))
            for number, each in zip(numbers, samples, strict=True):
                name = kernelbench.SAMPLE.format(level=level, problem=problem, sample=number)
                (folder / name).write_text(each.candidate.code or "", encoding="utf-8")
                results.setdefault(problem, []).append(kernelbench.entry_of(each.verdict, number))
                written_rows += 1
        _write(folder / kernelbench.RESULTS, results)
        config = {"run_name": own, "model_name": model, "level": int(level)}
        lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in config.items())
        (folder / kernelbench.CONFIG).write_text(lines, encoding="utf-8")
    return _summary("kernelbench", target, written_rows, left_out)


class _TraceWriter:
    """Writes a trace set. Definitions are those of `tasks` where that is a trace set, else made of
    the tasks."""

    def __init__(self, suite: Suite, target: Path, tasks: str | None) -> None:
        self.suite, self.target = suite, target
        self.left_out: Counter[str] = Counter()
        self.there: dict[str, tuple[Definition, Workload]] = {}
        self.solutions: dict[str, Solution] = {}
        if tasks and is_trace_set(Path(tasks).expanduser()):
            held = TraceSet(Path(tasks).expanduser())
            self.solutions = held.solutions
            for definition in held.definitions.values():
                for identity, workload in held.workloads.get(definition.name, {}).items():
                    if task := held.task(definition, identity):
                        known = workload.model_copy(update={"uuid": identity})
                        self.there[task.task_id] = definition, known
        self.workloads: dict[tuple[str, str], dict[str, Any]] = {}
        self.written = 0

    def write(self, found: Iterator[Judged]) -> dict[str, Any]:
        now, libs = datetime.now(UTC).isoformat(), {"concur_protocol": str(PROTOCOL_VERSION)}
        try:
            for each in found:
                evaluation = evaluation_of(each.verdict, self.suite, now, libs)
                if evaluation is None or each.candidate.code is None:
                    self.left_out[f"{self.suite} has no form for {each.verdict.status.value}"] += 1
                    continue
                try:
                    self._one(each, evaluation)
                except ValueError as error:
                    self.left_out[str(error)] += 1
        finally:
            _close()
        if not self.written:
            why = "; ".join(shown(text) for text in self.left_out) or "there is none"
            raise UsageError(f"no verdict can be written: {why}", "choose another form")
        return _summary(self.suite, self.target, self.written, self.left_out)

    def _one(self, each: Judged, evaluation: dict[str, Any]) -> None:
        known = self.there.get(each.task.task_id)
        definition, workload = known or self._made(each.task)
        name = each.name.partition("@")[0]
        solution = self.solutions.get(name) if known else None
        if solution is None:
            solution = solution_of(
                each.candidate, each.task, _interface(each.task), each.name, each.verdict.device
            ).model_copy(update={"definition": definition.name})
        folder = _file_name(definition.name)
        row = {"definition": definition.name, "workload": written(workload, self.suite)}
        self._write(definition, folder, "definition", "definitions")
        self._write(solution, folder, f"solution_{_file_name(solution.name)}", "solutions")
        if self.workloads.setdefault((folder, str(workload.uuid)), row) is row:
            held = row["workload"] if self.suite == "sol" else row
            self._append(folder, "workload", "workloads", held)
        traced = {**row, "solution": solution.name, "evaluation": evaluation}
        self._append(folder, "trace", "traces", traced)
        self.written += 1

    def _made(self, task: KernelTask) -> tuple[Definition, Workload]:
        found = _interface(task)
        made = definition_of(task, found, self.suite), workload_of(task, found, self.suite)
        self.there[task.task_id] = made
        return made

    def _path(self, folder: str, own: str, kind: str, suffix: str) -> Path:
        if self.suite == "sol":
            return self.target / folder / f"{own}{suffix}"
        stem = own.removeprefix("solution_") if kind == "solutions" else folder
        return self.target / kind / folder / f"{stem}{suffix}"

    def _write(self, record: Definition | Solution, folder: str, own: str, kind: str) -> None:
        path = self._path(folder, own, kind, ".json")
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            _write(path, written(record, self.suite))

    def _append(self, folder: str, own: str, kind: str, row: object) -> None:
        path = self._path(folder, own, kind, ".jsonl")
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(row) + "\n")


def _summary(form: str, target: Path, count: int, left_out: Counter[str]) -> dict[str, Any]:
    return {"form": form, "out": str(target), "written": count, "left_out": dict(left_out)}


def _write(path: Path, value: object) -> None:
    atomic_write(path, json.dumps(value, indent=2) + "\n")


def _file_name(text: str) -> str:
    return re.sub(r"[^\w.-]+", "_", text).strip(".")[:120] or "unnamed"
