"""Foreign tables and folders as a table of tasks and one of answers, which the other commands read:
tasks.sources.mapping says what is what. What was not taken is counted with its reason and rows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import polars as pl
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.exchange.trace_set import TraceSet, is_trace_set
from kernels_eval.installation import command_name
from kernels_eval.languages import languages_of
from kernels_eval.records import Json, KernelTask, Language
from tasks.files import atomic_write, explain_write_errors, make_writable
from tasks.models import count_tokens
from tasks.progress import report
from tasks.reporting.text import plural
from tasks.sources.cells import program_in, with_model_new
from tasks.sources.files import columns_of, local, number_of, shown
from tasks.sources.foreign import Foreign, of_file, of_folder, of_rows
from tasks.sources.hub import load_rows
from tasks.sources.mapping import Found, Map, given_map, map_named
from tasks.sources.tables import holds_tables, on_hub, part_files
from tasks.synthesis.folders import SUFFIXES
from tasks.synthesis.inputs import MOST_SPLIT, candidate_parts, is_mapped, task_id_of
from tasks.synthesis.parsing import guessed_finish, parse_response
from tasks.synthesis.tables import language_of

TASKS_FILE, ANSWERS_FILE = "tasks.parquet", "answers.parquet"
MOST_ROWS = 5
"""Rows that are named for each reason."""
REPORTED = 1000
"""Rows between two reports of progress."""
PLAIN = "none needed"


def import_source(
    source: str, columns: str | None, name: str | None, out: str, tokenizer: str | None = None
) -> Json:
    """Write the tasks and answers of `source` to a folder; returns counts. `columns` maps its
    columns (`task=COLUMN,...`), else `name` is a known map's, else the columns tell it; `tokenizer`
    counts the reasoning. Raises UsageError for what cannot be read or written, and a cell in no
    known form, with its row."""
    if columns and name:
        raise UsageError("--map and --as both say how to read the columns", "leave out one of them")
    opened = _opened(source, columns, map_named(name) if name else None)
    tasks: dict[str, KernelTask] = {}
    answers: list[Json] = []
    skipped: dict[str, list[str]] = {}
    rows = 0
    for place, found in _rows(source, opened):
        rows += 1
        others = [tasks.setdefault(each.task_id, each).code != each.code for each in found.tasks]
        unjudged = [each for each in found.answers if not _is_judged(each)]
        answers += [each for each in found.answers if _is_judged(each)]
        reasons = [f"no language {shown(each['language'], 40)} is judged" for each in unjudged]
        reasons += ["its task has another program already"] * sum(others)
        for why in [*found.skipped, *reasons]:
            skipped.setdefault(why, []).append(f"{place} row {found.number}")
        if rows % REPORTED == 0:
            report(
                "import",
                rows,
                rows + 1,
                f"{plural(len(tasks), 'task')}, {plural(len(answers), 'answer')}",
            )
    if not tasks and not answers:
        why = next(iter(skipped), "it has no rows")
        raise UsageError(
            f"{shown(source)} holds no task and no answer: {shown(why)}",
            "say which columns are the task and the answer with --map task=COLUMN,answer=COLUMN",
        )
    for each in answers:
        if each.get("code") and each["task_id"] in tasks:
            each["code"] = with_model_new(each["code"], tasks[each["task_id"]])
    _name_languages(answers)
    if tokenizer:
        _count_reasoning(answers, tokenizer)
    return {
        "source": source,
        "map": ", ".join(
            dict.fromkeys(each.by.name if each.by and is_mapped(each) else PLAIN for each in opened)
        ),
        "rows": rows,
        "tasks": len(tasks),
        "answers": len(answers),
        **_about(answers),
        "skipped": [
            {"why": why, "rows": len(places), "such as": ", ".join(places[:MOST_ROWS])}
            for why, places in sorted(skipped.items(), key=lambda each: -len(each[1]))
        ],
        **_write(out, tasks.values(), answers),
    }


# -- what comes in ---------------------------------------------------------------------------------


def _opened(source: str, columns: str | None, by: Map | None) -> list[Foreign]:
    path = local(source)
    hub_id, _, split = source.partition(":")
    if on_hub(hub_id):
        rows = load_rows(hub_id, split or MOST_SPLIT, None, ())
        given = list(rows[0]) if rows else []
        return [of_rows(shown(source), rows, path, given_map(columns, given) if columns else by)]
    if not columns and (folder := of_folder(path, by)):
        return [folder]
    if path.suffix in SUFFIXES or (path.is_dir() and not holds_tables(path)):
        return [Foreign(shown(source), (), tuple, path, str, None)]
    files = part_files(source)
    if columns:
        by = given_map(columns, columns_of(files[0]))
    return [of_file(file, None, by) for file in files]


def _rows(source: str, opened: Sequence[Foreign]) -> Iterator[tuple[str, Found]]:
    if any(is_mapped(each) for each in opened):
        yield from ((each.name, found) for each in opened for found in each.found())
        return
    path = local(source)
    defined = list(TraceSet(path).tasks()) if is_trace_set(path) else []
    if defined:
        yield opened[0].name, Found(0, defined, (), ())
    try:
        parts = candidate_parts(source, references=True)
    except UsageError:
        if defined:
            return
        if opened[0].columns:
            opened[0].found()  # which says what would help
        raise
    for part in parts:
        for number, row in enumerate(part.rows()):
            told = {name: value for name, value in row.items() if value is not None}
            told["task_id"] = task_id_of(row, f"{part.name} row {number}")
            task = _task_of(told)
            yield part.name, Found(number, [task] if task else (), () if task else [told], ())


def _task_of(row: Json) -> KernelTask | None:
    """The task that a row is which is no answer: a program with its inputs, without a kernel."""
    code = row.get("code") or ""
    program = None if "ModelNew" in code or languages_of(code) else program_in(code, None)
    if program is None:
        return None
    name = str(row.get("problem_id") or row["task_id"])
    known = {"task_id": row["task_id"], "name": name, "level": number_of(row.get("level"))}
    try:
        return KernelTask.model_validate(known | {"source": "import"} | program._asdict())
    except ValidationError:
        return None


# -- what goes out ---------------------------------------------------------------------------------


def _about(answers: Sequence[Json]) -> Json:
    if not answers:
        return {}
    texts = [str(each.get("code") or each.get("response") or "") for each in answers]
    told: Json = {"of_tasks": len({each["task_id"] for each in answers})}
    told["without_ModelNew"] = sum("ModelNew" not in text for text in texts)
    codes = [each["code"] for each in answers if "ModelNew" in (each.get("code") or "")]
    if plain := sum(not languages_of(code) for code in codes):
        told["without_a_kernel"] = plain
    if later := sum((each.get("turn") or 1) > 1 for each in answers):
        told["later_turns"] = later
    for name in ("language", "generator"):
        counts = Counter(str(each[name]) for each in answers if each.get(name) is not None)
        told[name] = dict(counts.most_common(8)) or "not said"
    return told


def _is_judged(answer: Json) -> bool:
    given = answer.get("language")
    return given is None or str(given).lower() in set(Language)


def _name_languages(answers: Sequence[Json]) -> None:
    """Give answers what their sources show, doubtful ones the table's usual language."""
    shown_by = [language_of(each, "an answer") for each in answers]
    sure = Counter(language for language, known in shown_by if language and known)
    doubtful = Counter(language for language, _ in shown_by if language)
    usual = max(sure or doubtful, key=(sure or doubtful).__getitem__, default=None)
    for each, (language, known) in zip(answers, shown_by, strict=True):
        if chosen := language if known else usual:
            each["language"] = chosen.value


def _count_reasoning(answers: Sequence[Json], tokenizer: str) -> None:
    for start in range(0, len(answers), REPORTED):
        batch = answers[start : start + REPORTED]
        texts = [
            each.get("reasoning") or "" if "code" in each else _reasoning_of(each) for each in batch
        ]
        for each, count in zip(batch, count_tokens(tokenizer, texts), strict=True):
            each["reasoning_tokens"] = count


def _reasoning_of(answer: Json) -> str:
    ended = answer.get("finish_reason") or guessed_finish(answer["response"])["finish_reason"]
    given = {"reasoning": answer.get("reasoning"), "finish_reason": ended}
    return parse_response(answer["response"], **given).reasoning


def _write(out: str, tasks: Iterable[KernelTask], answers: Sequence[Json]) -> Json:
    programs = [task.model_dump(mode="json") for task in tasks]
    tables: Mapping[str, Sequence[Json]] = {TASKS_FILE: programs, ANSWERS_FILE: answers}
    with explain_write_errors(f"to {shown(out)}", "choose another --out"):
        folder = make_writable(Path(out).expanduser())
        for name, rows in tables.items():
            (folder / name).unlink(missing_ok=True)
            if rows:
                frame = pl.DataFrame(rows, infer_schema_length=None, strict=False)
                atomic_write(folder / name, frame.write_parquet)
    programs_at = str(folder / TASKS_FILE) if programs else "TASKS"
    if not answers:
        return {
            "out": str(folder),
            "next": f"--set tasks.source=files tasks.location={programs_at}",
        }
    given = f"{folder / ANSWERS_FILE} --tasks {programs_at} --out verified"
    return {"out": str(folder), "next": f"{command_name()} verify-batch {given}"}
