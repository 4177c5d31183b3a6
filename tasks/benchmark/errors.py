"""Failures grouped by first error line, apart from names, numbers and paths. A group may have
several causes."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence

import polars as pl
from pydantic import PositiveInt

from kernels_eval.records import Json, Record, Status
from tasks.reporting.text import by_count

COLUMNS = ("model", "task_id", "status", "reason", "detail", "log_tail")
FAILED = (Status.COMPILE_ERROR, Status.RUNTIME_ERROR, Status.TIMEOUT)
SIGNATURE_CHARS = 160
TOP_NAMES = 3

_ESCAPES = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")
_RAISED = re.compile(r"^[A-Za-z_][\w.]{0,80}(?:Error|Exception|Interrupt|Exit)\b")
_ERROR = re.compile(
    r"\berror\b|undefined symbol|undefined reference|cannot open|out of memory|segmentation"
    r" fault|assert",
    re.IGNORECASE,
)
_PLACE = re.compile(
    r"^\s*[^\s:()]{1,300}(?::\d+(?::\d+)?|\(\d+\))\s*:\s*"
)  # main.cpp:12:30: and main.cu(12):
_LABEL = re.compile(r"^(?:fatal )?error:\s*", re.IGNORECASE)
_HINT = re.compile(r"[;,]?\s*did you mean .*$", re.IGNORECASE)
_QUOTED = re.compile(
    r"(?<!\w)'([^'\n]{1,300})'(?!\w)|\"([^\"\n]{1,300})\"|‘([^’\n]{1,300})’|`([^`\n]{1,300})`"
)
_PATH = re.compile(r"(?<![\w/])(?:[A-Za-z]:)?(?:\.{0,2}/)+[\w.+@-]+(?:/[\w.+@-]+)*")
_NUMBER = re.compile(r"\b0x[0-9a-fA-F]+\b|(?<![A-Za-z_])[-+]?\d+(?:\.\d+)?(?:[eE][-+]?\d+)?")


class ErrorGroup(Record):
    """Failures of one signature: `names` are the commonest at '…', `example` a first line, and
    `candidate_id` whose it is, where the rows say so."""

    reason: str
    signature: str
    count: PositiveInt
    tasks: PositiveInt
    models: dict[str, int]
    """model -> failures, most first"""
    names: tuple[str, ...] = ()
    example: str = ""
    candidate_id: str = ""


def error_groups(frame: pl.DataFrame, *, limit: int = 10) -> list[ErrorGroup]:
    """The commonest failures to build or run, at most `limit`, from verdict rows with COLUMNS.

    Wrong outputs are not grouped: their reason says enough.
    """
    if "candidate_id" not in frame.columns:
        frame = frame.with_columns(candidate_id=pl.lit(""))
    rows = frame.filter(pl.col("status").is_in(FAILED)).select(*COLUMNS, "candidate_id")
    lines = [
        first_error(log or "", detail or "")
        for log, detail in rows.select("log_tail", "detail").iter_rows()
    ]
    groups = (
        rows.with_columns(
            line=pl.Series(lines, dtype=pl.String),
            signature=pl.Series(map(signature, lines), dtype=pl.String),
        )
        .group_by("reason", "signature")
        .agg("model", "line", "candidate_id", count=pl.len(), tasks=pl.col("task_id").n_unique())
        .sort("count", "reason", "signature", descending=[True, False, False])
    )
    return [
        ErrorGroup(**group, **_told(models, lines, ids))
        for group in groups.head(limit).iter_rows(named=True)
        for models, lines, ids in [[group.pop(name) for name in ("model", "line", "candidate_id")]]
    ]


def first_error(log: str, detail: str = "") -> str:
    """A log's decisive line: the traceback's exception, else the first line that speaks of an
    error, else `detail`."""
    lines = _ESCAPES.sub("", log).splitlines()
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        raised = [line for line in lines if _RAISED.match(line)]
        if raised:
            return raised[-1].strip()
    spoken = next((line for line in lines if _ERROR.search(line)), None)
    return (spoken if spoken is not None else detail.partition("\n")[0]).strip()


def signature(line: str) -> str:
    """The line without its place, with names as '…', PATH and N, at most SIGNATURE_CHARS long."""
    text = _HINT.sub("", _LABEL.sub("", _PLACE.sub("", line[:2000])))
    text = _PATH.sub("PATH", _QUOTED.sub("'…'", text))
    return " ".join(_NUMBER.sub("N", text).split())[:SIGNATURE_CHARS]


def names_in(line: str) -> list[str]:
    return ["".join(match.groups("")) for match in _QUOTED.finditer(_HINT.sub("", line[:2000]))]


def _told(models: Iterable[str], lines: Sequence[str], ids: Sequence[str]) -> Json:
    example, whose = min(zip(lines, ids, strict=True))
    names = Counter(name for line in lines for name in dict.fromkeys(names_in(line)))
    return {
        "models": dict(by_count(Counter(models))),
        "names": tuple(name[:60] for name, _ in by_count(names)[:TOP_NAMES]),
        "example": _HINT.sub("", example[:300]),
        "candidate_id": whose,
    }
