"""Verdicts to and from KernelBench runs, traces of FlashInfer-Bench and SOL-ExecBench, and
single-kernel packages. What a form cannot hold is counted with its reason."""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from functools import cache, partial
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import polars as pl

from kernels_eval.errors import UsageError
from kernels_eval.exchange import harbor, kernelbench
from kernels_eval.exchange.definitions import (
    definition_of,
    file_name,
    solution_of,
    workload_of,
)
from kernels_eval.exchange.flashinfer import Suite
from kernels_eval.exchange.package import export_package
from kernels_eval.exchange.trace_set import TraceSet, is_trace_set, record_of
from kernels_eval.exchange.traces import evaluation_of
from kernels_eval.protocol import DescribeInterface, Interface
from kernels_eval.records import Candidate, Json, KernelTask, Language, Record, Row, Verdict
from kernels_eval.verify_file import FIX, read_pair
from kernels_eval.versions import PROTOCOL_VERSION
from kernels_eval.written import json_of
from tasks.curation.source import Source
from tasks.files import atomic_write, explain_write_errors
from tasks.sources.files import read_text, shown
from tasks.sources.tables import load
from tasks.synthesis import prompts
from tasks.tables import CANDIDATES, VERDICTS
from tasks.verification.merge import merged
from tasks.workload.measure import Measurer

Form = Literal["flashinfer", "sol", "kernelbench", "package", "harbor", "table"]
Kind = TypeVar("Kind", bound=Record)
Ask = Callable[[KernelTask], Interface]
_OF_CANDIDATES = ("candidate_id", "given_id", "code", "generator", "sample_index", "parse_reason")
_MERGED = (
    "given_id",
    *(n for n in CANDIDATES.names if n not in ("response", "separated_reasoning")),
)
SHOWN_KERNELS = 5
UNCONFIRMED = "correct at level screen alone: verify it without --quick"
_LEVEL = re.compile(r"level_(\d+)_problem_\d+|^level:\s*(\d+)", re.MULTILINE)


class Judged(NamedTuple):
    """A candidate with task and verdict; `name` is its table's name for it."""

    name: str
    task: KernelTask
    candidate: Candidate
    verdict: Verdict

    @property
    def is_unconfirmed(self) -> bool:
        return self.verdict.level == "screen" and self.verdict.correct_custom


def export(sources: Sequence[str], form: Form, out: str, **options: Any) -> Json:
    """Write verdicts in a form; returns a summary. `options`: candidates, tasks, root, candidate,
    name, license, task, language, recipe. Raises UsageError for unreadable input or
    unwritable output."""
    target = Path(out).expanduser()
    if options["task"] and (form != "package" or not sources):
        raise UsageError(
            "--task is that of one candidate's file",
            "concur export CANDIDATE.py --task TASK.py --as package",
        )
    with explain_write_errors(target, "choose another --out, or free some disk"):
        if form == "table":
            return _table(sources or ["."], target, options["candidates"], options["root"])
        if len(sources) > 1:
            raise UsageError(f"--as {form} takes one SOURCE", "merge several with --as table first")
        if target.exists() and (not target.is_dir() or any(target.iterdir())):
            raise UsageError(f"{out} holds other files", "name a new folder with --out")
        source = sources[0] if sources else None
        if form == "harbor":
            return _harbor(source or options["tasks"], target, options)
        if source and options["task"]:
            return _package_of_file(source, target, options)
        found = judged(source, options["candidates"], options["tasks"], options["root"])
        if form == "kernelbench":
            return _kernelbench(found, target)
        with Measurer() as measurer:
            interface = cache(partial(_interface, measurer))
            if form == "package":
                return _package(found, target, interface, options)
            return _traces(found, target, form, interface, options["tasks"])


# -- what comes in ---------------------------------------------------------------------------------


def judged(
    verdicts: str | None, candidates: str | None, tasks: str | None, root: str
) -> Iterator[Judged]:
    """Verdicts with their candidates and tasks, in the verdicts' order. Raises UsageError where one
    of the three is missing."""
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
        plain = {"generator": "unnamed", **_without_nulls(row)}
        name, task = str(row.get("given_id") or row["candidate_id"]), known[row["task_id"]]
        yield Judged(name, task, _record(Candidate, plain), _record(Verdict, plain))


def _record(kind: type[Kind], row: Row) -> Kind:
    try:
        name = row.get("candidate_id") or row.get("task_id")
        return record_of(kind, _without_nulls(row), shown(name))
    except ValueError as error:
        raise UsageError(str(error), "give tables as verification wrote them") from error


def _without_nulls(row: Row) -> Json:
    plain = {k: _without_nulls(v) if isinstance(v, dict) else v for k, v in row.items()}
    return {name: value for name, value in plain.items() if value not in (None, {})}


def _table(sources: Sequence[str], target: Path, candidates: str | None, root: str) -> Json:
    sets, left_out = {}, Counter[str]()
    for source in dict.fromkeys(sources):
        place = Path(source).expanduser()
        if is_trace_set(place):
            held = TraceSet(place)
            rows = pl.DataFrame(list(held.verdicts()), infer_schema_length=None)
            left_out += held.left_out
        elif (
            results := place / kernelbench.RESULTS if place.is_dir() else place
        ).is_file() and results.suffix == ".json":
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
            why = "".join(f": {shown(text, 400)}" for text in list(left_out)[:1])
            raise UsageError(
                f"{shown(place)} holds no result{why}", "give a run that was evaluated"
            )
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


def _kernelbench_rows(results: Path) -> list[Json]:
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
            kernelbench.verdict_rows(json_of(read_text(results)), int(level[1] or level[2]))
        )
    except (ValueError, AttributeError, TypeError) as error:
        raise UsageError(f"{results} is none of KernelBench's: {error}") from error
    return [{**row, "generator": model} for row in rows]


# -- what goes out ---------------------------------------------------------------------------------


def _interface(measurer: Measurer, task: KernelTask) -> Interface:
    """Raises ValueError where the task cannot be run."""
    answer = measurer.ask(DescribeInterface, task)
    if "error" in answer:
        raise ValueError(f"the task does not run: {answer['error']}: {answer.get('detail')}")
    return Interface.model_validate(answer)


def _package(found: Iterator[Judged], target: Path, interface: Ask, options: Row) -> Json:
    asked = options["candidate"]
    judged = list(found)
    correct = [each for each in judged if each.verdict.correct_custom]
    only = correct if len(correct) == 1 else []
    named = _named(judged, asked) if asked else only
    if not named:
        what = f"there is no candidate {shown(asked)}" if asked else "a package is of one kernel"
        fast = sorted(correct, key=_speedup, reverse=True)[:SHOWN_KERNELS]
        ids = ", ".join(shown(each.name, 60) for each in fast) or "none"
        raise UsageError(
            f"{what}; {len(correct)} of {len(judged)} are correct, the fastest are {ids}",
            "name one with --candidate",
        )
    one = named[0]
    if not one.verdict.correct_custom:
        said = f"{one.verdict.status.value} ({one.verdict.reason.value})"
        raise UsageError(f"{shown(asked)} is {said}", "only a correct kernel is exported")
    try:
        forms = interface(one.task)
    except ValueError as error:
        raise UsageError(str(error)) from error
    return _packed(one.task, one.candidate, forms, target, options)


def _named(judged: Sequence[Judged], asked: str) -> list[Judged]:
    """The candidates of this name or id, else the only one whose id begins so."""
    exact = [each for each in judged if asked in (each.name, each.candidate.candidate_id)]
    begun = [each for each in judged if each.candidate.candidate_id.startswith(asked)]
    one = len({each.candidate.candidate_id for each in begun}) == 1
    return exact or (begun if one else [])


def _speedup(each: Judged) -> float:
    return each.verdict.timing.speedup if each.verdict.timing else 0.0


def _package_of_file(source: str, target: Path, options: Row) -> Json:
    task, candidate = read_pair(options["task"], source, options["language"])
    if candidate.code is None:
        raise UsageError(f"{source} does not define ModelNew", FIX)
    with Measurer() as measurer:
        try:
            forms = _interface(measurer, task)
        except ValueError as error:
            raise UsageError(str(error)) from error
    return _packed(task, candidate, forms, target, options)


def _packed(
    task: KernelTask, candidate: Candidate, forms: Interface, target: Path, options: Row
) -> Json:
    more = {name: options[name] for name in ("name", "license") if options[name]}
    told = export_package(task, candidate, forms, target, **more)
    return _summary("package", target, 1, Counter()) | told


def _harbor(source: str | None, target: Path, options: Row) -> Json:
    if source is None:
        raise UsageError("no tasks are named", "concur export TASKS --as harbor --out DIR")
    language = Language(options["language"] or "cpp")
    requests = [harbor.Request(task, prompts.render(task, language)) for task in load(source)]
    folders = harbor.write_tasks(requests, target, language, options["recipe"])
    return _summary("harbor", target, len(folders), Counter())


def _kernelbench(found: Iterator[Judged], target: Path) -> Json:
    runs: dict[tuple[str, str], list[tuple[int, Judged]]] = {}
    left_out: Counter[str] = Counter()
    for each in found:
        if each.is_unconfirmed:
            left_out[UNCONFIRMED] += 1
        elif place := kernelbench.TASK_ID.fullmatch(each.task.task_id):
            run = runs.setdefault((each.candidate.generator, place["level"]), [])
            run.append((int(place["problem"]), each))
        else:
            left_out["the task is none of KernelBench's"] += 1
    if not runs:
        why = "; ".join(left_out) or "there is no verdict"
        fix = "KernelBench's ids are kernelbench/L1/23"
        raise UsageError(f"no verdict can be written: {why}", fix)
    for (model, level), rows in runs.items():
        own = f"{file_name(model)}_level_{level}"
        folder = target / own if len(runs) > 1 else target
        folder.mkdir(parents=True)
        results: dict[str, list[Json]] = {}
        for problem, each in sorted(rows, key=itemgetter(0)):
            entries = results.setdefault(str(problem), [])
            taken = {entry["sample_id"] for entry in entries}
            number = each.candidate.sample_index
            number = max(taken) + 1 if number in taken else number  # of several tables
            name = kernelbench.SAMPLE.format(level=level, problem=problem, sample=number)
            (folder / name).write_text(each.candidate.code or "", encoding="utf-8")
            entries.append(kernelbench.entry_of(each.verdict, number))
        atomic_write(folder / kernelbench.RESULTS, json.dumps(results, indent=2) + "\n")
        config = {"run_name": own, "model_name": model, "level": int(level)}
        lines = "".join(f"{name}: {json.dumps(value)}\n" for name, value in config.items())
        (folder / kernelbench.CONFIG).write_text(lines, encoding="utf-8")
    return _summary("kernelbench", target, sum(map(len, runs.values())), left_out)


def _traces(
    found: Iterator[Judged], target: Path, suite: Suite, interface: Ask, tasks: str | None
) -> Json:
    now, libs = datetime.now(UTC).isoformat(), {"concur_protocol": str(PROTOCOL_VERSION)}
    place = Path(tasks).expanduser() if tasks else None
    held, made = TraceSet(place if place and is_trace_set(place) else None), TraceSet()
    there = {
        task.task_id: (definition, workload.model_copy(update={"uuid": identity}))
        for definition in held.definitions.values()
        for identity, workload in held.workloads.get(definition.name, {}).items()
        if (task := held.task(definition, identity))
    }
    for each in found:
        task, evaluation = each.task, evaluation_of(each.verdict, suite, now, libs)
        with made.counted():
            if each.is_unconfirmed:
                raise ValueError(UNCONFIRMED)
            if evaluation is None or each.candidate.code is None:
                raise ValueError(f"{suite} has no form for {each.verdict.status.value}")
            name = each.name.partition("@")[0]
            solution = held.solutions.get(name) if task.task_id in there else None
            if task.task_id not in there:
                forms = interface(task)
                pair = definition_of(task, forms, suite), workload_of(task, forms, suite)
                there[task.task_id] = pair
            definition, workload = there[task.task_id]
            if solution is None:
                known = each.candidate, task, interface(task), each.name, each.verdict.device
                of = {"definition": definition.name}
                solution = solution_of(*known).model_copy(update=of)
            made.add(definition, workload, solution, evaluation)
    if not made.traces:
        why = "; ".join(shown(text) for text in made.left_out) or "there is none"
        raise UsageError(f"no verdict can be written: {why}", "choose another form")
    made.write(target, suite)
    return _summary(suite, target, len(made.traces), made.left_out)


def _summary(form: str, target: Path, count: int, left_out: Counter[str]) -> Json:
    return {"form": form, "out": str(target), "written": count, "left_out": dict(left_out)}
