"""Typical errors: failures whose first error line is the same but for names, numbers and paths.

Guarantees: a signature holds no path, no number and no line of code; two candidates that fail alike
have the same one; time linear in the log. Does not guarantee that a group has one cause: "no
matching function" has many.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import TYPE_CHECKING

from pydantic import Field

from kernels_eval.records import Record

if TYPE_CHECKING:
    import polars as pl

COLUMNS = ("model", "task_id", "status", "reason", "detail", "log_tail")
FAILED = ("compile_error", "runtime_error", "timeout")
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
    """Failures with one signature. `names` are the commonest names that stood where the signature
    has '…'; `example` is one first line."""

    reason: str
    signature: str
    count: int = Field(ge=1)
    tasks: int = Field(ge=1)
    models: dict[str, int] = Field(description="model -> failures, most first")
    names: tuple[str, ...] = ()
    example: str = ""


def error_groups(frame: pl.DataFrame, *, limit: int = 10) -> list[ErrorGroup]:
    """The commonest failures to build or run, most first: rows of verdicts with the columns
    COLUMNS. At most `limit` groups.

    Wrong outputs are no errors and not grouped: their reason says what there is to say.
    """
    import polars as pl

    found: dict[tuple[str, str], list[tuple[str, str, str]]] = {}
    for row in frame.filter(pl.col("status").is_in(FAILED)).select(COLUMNS).iter_rows(named=True):
        line = first_error(row["log_tail"] or "", row["detail"] or "")
        found.setdefault((row["reason"], signature(line)), []).append(
            (row["model"], row["task_id"], line)
        )
    ranked = sorted(found.items(), key=lambda item: (-len(item[1]), item[0]))
    return [_group(reason, text, members) for (reason, text), members in ranked[:limit]]


def first_error(log: str, detail: str = "") -> str:
    """The line of a log that says what went wrong: what a traceback raised, else the first line
    that speaks of an error, else `detail`."""
    lines = _ESCAPES.sub("", log).splitlines()
    if any(line.startswith("Traceback (most recent call last)") for line in lines):
        raised = [line for line in lines if _RAISED.match(line)]
        if raised:
            return raised[-1].strip()
    spoken = next((line for line in lines if _ERROR.search(line)), None)
    return (spoken if spoken is not None else detail.partition("\n")[0]).strip()


def signature(line: str) -> str:
    """The line without where it happened, and with names as '…', paths as PATH and numbers as N; at
    most SIGNATURE_CHARS long."""
    text = _HINT.sub("", _LABEL.sub("", _PLACE.sub("", line[:2000])))
    text = _PATH.sub("PATH", _QUOTED.sub("'…'", text))
    return " ".join(_NUMBER.sub("N", text).split())[:SIGNATURE_CHARS]


def names_in(line: str) -> list[str]:
    """What the line quotes, in order: names of the candidate's, mostly."""
    return ["".join(match.groups("")) for match in _QUOTED.finditer(_HINT.sub("", line[:2000]))]


def _group(reason: str, text: str, members: list[tuple[str, str, str]]) -> ErrorGroup:
    names = Counter(name for _, _, line in members for name in dict.fromkeys(names_in(line)))
    ranked = sorted(names.items(), key=lambda item: (-item[1], item[0]))
    models = Counter(model for model, _, _ in members)
    return ErrorGroup(
        reason=reason,
        signature=text,
        count=len(members),
        tasks=len({task for _, task, _ in members}),
        models=dict(sorted(models.items(), key=lambda item: (-item[1], item[0]))),
        names=tuple(name[:60] for name, _ in ranked[:TOP_NAMES]),
        example=min(line for _, _, line in members)[:300],
    )
