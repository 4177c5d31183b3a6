"""Candidates sampled elsewhere: tasks.synthesis.inputs in, tasks.tables.CANDIDATES out. Identified
by content, so that changed code reuses no verdict."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
from pydantic import ValidationError

from kernels_eval.errors import UsageError
from kernels_eval.languages import languages_of
from kernels_eval.records import (
    Candidate,
    Json,
    KernelTask,
    Language,
    Reason,
    SamplingParams,
    stable_hash,
)
from tasks.progress import caution, report
from tasks.sources.files import first_line, shown
from tasks.store import Snapshot, SnapshotRef
from tasks.synthesis.inputs import candidate_parts, model_of, task_id_of
from tasks.synthesis.parsing import answer_of, guessed_finish, parse_response
from tasks.tables import CANDIDATES
from tasks.versions import CANDIDATE_TABLE_VERSION, PARSER_VERSION

STAGE = "candidates"
SCHEMA = CANDIDATES.append(pa.field("given_id", pa.string())).append(pa.field("row", pa.int64()))
"""`given_id`: the table's candidate_id, or null. `row`: row of the table, from 0, over all its
files."""

Row = tuple[int, str, Json]
"""Row number over all files, its place in words, and some of its columns."""

_KEPT = (
    *("prompt_hash", "response", "reasoning", "answer", "reasoning_tokens", "completion_tokens"),
    "finish_reason",
)


class _Placed(NamedTuple):
    candidate_id: str
    sample_index: int


class CandidateTable:
    """The candidates of one location. Raises UsageError, when made, for a file without the columns
    of candidates."""

    def __init__(self, location: str | Path, model: str | None = None) -> None:
        self.location, self._parts = shown(location), candidate_parts(location)
        self._model = model or model_of(location)

    def language(self, asked: Language | None) -> Language:
        """The language to verify: the requested one, else the table's only one, else C++. Raises
        UsageError where the table holds several, not the requested one, or nothing."""
        if not self._languages:
            raise UsageError(f"{self.location} has no rows", "give a table of candidates")
        shown_by = Counter(language for language, _ in self._languages if language)
        found = Counter(language for language, sure in self._languages if language and sure)
        found = found or shown_by
        counts = ", ".join(f"{name.value} ({count})" for name, count in sorted(found.items()))
        if asked is None and len(found) > 1:
            raise UsageError(
                f"{self.location} holds candidates in {len(found)} languages: {counts}",
                "choose one with --language",
            )
        chosen = asked or next(iter(found), Language("cpp"))
        if found and chosen not in found:
            raise UsageError(
                f"{self.location} holds no {chosen.value} candidate",
                f"its language is {', '.join(sorted(found))}: leave out --language",
            )
        if len(found) > 1:
            caution(f"the candidates are {counts}: only those in {chosen.value} are verified")
        return chosen

    @cached_property
    def _languages(self) -> list[tuple[Language | None, bool]]:
        return [language_of(row, where) for _, where, row in self._rows()]

    def asked_tasks(self, language: Language) -> Counter[str]:
        return Counter(task_id_of(row, where) for _, where, row in self._rows_in(language))

    def write(
        self, tasks: Mapping[str, KernelTask], upstream: SnapshotRef, language: Language
    ) -> SnapshotRef:
        """Write a finished snapshot of `SCHEMA` beside `upstream`, the tasks' snapshot, without the
        candidates of other tasks. Raises UsageError for a row without candidate, and one id of two
        different candidates."""
        digests = [part.digest() for part in self._parts]
        versions = (CANDIDATE_TABLE_VERSION, PARSER_VERSION)
        identity = [digests, language.value, self._model]
        snapshot = Snapshot.planned(STAGE, identity, [upstream], versions)
        if snapshot.finished:
            return snapshot.ref
        asked = self.asked_tasks(language)
        total = sum(count for task_id, count in asked.items() if task_id in tasks)

        def rows() -> Iterator[Json]:
            for done, row in enumerate(self._candidates(tasks, language), start=1):
                report(STAGE, done, total, "read")
                yield row

        snapshot.append(rows(), SCHEMA, key="row")
        return snapshot.publish(config={"language": language.value}).ref

    def _candidates(self, tasks: Mapping[str, KernelTask], language: Language) -> Iterator[Json]:
        named: dict[str, str] = {}
        repeats: Counter[str] = Counter()
        samples: Counter[str] = Counter()
        placed: dict[str, _Placed] = {}
        for number, where, row in self._rows_in(language):
            if (task := tasks.get(task_id_of(row, where))) is None:
                continue
            content = _content(row)
            given_id = row.get("candidate_id")
            given_id = None if given_id is None else str(given_id)
            index = row.get("sample_index")
            program = [task.task_id, task.code, task.entry_point, task.init_form]
            answer = [language.value, content["code"], content["parse_reason"]]
            identity = stable_hash([program, *answer, given_id, index])
            if given_id is None:  # rows that differ in nothing are samples of their own
                repeats[identity] += 1
                identity = stable_hash([identity, repeats[identity]])
            elif named.setdefault(given_id, identity) != identity:
                raise UsageError(
                    f"{where}: candidate_id {shown(given_id)!r} already names another candidate",
                    "give every row its own",
                )
            parent = placed.get(str(row.get("parent")))  # of a turn whose attempt is here, too
            turn = {"turn": row.get("turn") or 1, "parent": parent.candidate_id} if parent else {}
            if index is None:
                index = parent.sample_index if parent else samples[task.task_id]
            try:
                candidate = Candidate(
                    candidate_id=identity,
                    task_id=task.task_id,
                    language=language,
                    generator=str(row.get("generator") or self._model),
                    sampling=SamplingParams(**_given(row.get("sampling") or {})),
                    sample_index=index,
                    **_given({name: row.get(name) for name in _KEPT}) | content | turn,
                )
            except ValidationError as error:
                fault = f"{where}: {shown(first_line(error))}"
                raise UsageError(fault, "correct the row") from error
            samples[task.task_id] += parent is None
            if given_id is not None and row.get("turn") is not None:
                placed[given_id] = _Placed(identity, candidate.sample_index)
            added = {"request_key": None, "given_id": given_id, "row": number} | _finish(row)
            yield candidate.model_dump(mode="json") | added

    def _rows_in(self, language: Language) -> Iterator[Row]:
        for each in self._rows():
            own, sure = self._languages[each[0]]
            if own is language or not sure:
                yield each

    def _rows(self) -> Iterator[Row]:
        number = 0
        for part in self._parts:
            for index, row in enumerate(part.rows()):
                yield number, f"{part.name} row {index}", row
                number += 1


def language_of(row: Mapping[str, Any], where: str) -> tuple[Language | None, bool]:
    """A row's language, or what its source shows, and whether that is sure: C++ alone may be half
    of another's. Raises UsageError for an unknown one."""
    given = row.get("language")
    try:
        if given is not None:
            return Language(str(given).lower()), True
    except ValueError:
        names = ", ".join(Language)
        fault = f"{where}: there is no language {shown(given, 40)!r}"
        raise UsageError(fault, f"languages are {names}") from None
    answer = answer_of(str(row.get("response") or ""))
    found = languages_of(row.get("code") or (answer if "ModelNew" in answer else ""))
    return (found[0], not found[0].half_of_others) if len(found) == 1 else (None, False)


def _content(row: Mapping[str, Any]) -> Json:
    code, reason, response = row.get("code"), row.get("parse_reason"), row.get("response")
    if code is not None and code.strip():
        if not code.lstrip().startswith("```"):
            return {"code": code, "parse_reason": None}
        reason, response = None, code
    if reason is not None or response is None:
        return {"code": None, "parse_reason": reason or Reason.NO_CODE_BLOCK}
    finish = row.get("finish_reason") or guessed_finish(response)["finish_reason"]
    parsed = parse_response(response, reasoning=row.get("reasoning"), finish_reason=finish)
    return parsed.model_dump()


def _finish(row: Mapping[str, Any]) -> Json:
    if row.get("finish_reason") or row.get("response") is None:
        return {"finish_reason": row.get("finish_reason"), "finish_guessed": None}
    return guessed_finish(row["response"])


def _given(values: Mapping[str, object]) -> Json:
    return {name: value for name, value in values.items() if value is not None}
