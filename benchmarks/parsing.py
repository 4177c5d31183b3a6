"""Our parser against a recorded extraction: real responses whose code somebody else took out, and
where the two differ.

    python -m benchmarks.parsing --responses qwq32b_candidates.parquet --out parsing.md

Needs the columns level, problem_id, sample_id, response and extracted_code; recorded_compiled,
recorded_correct and finish_reason are used where they are there (without the last, a response that
breaks off is taken for one that was cut). Writes what each yields, and every response where they
differ by more than white space around the code, in groups, without a word of the responses. Says
nothing of verdicts.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from kernels_eval.checks.syntax import parse_source
from kernels_eval.errors import EvalError, UsageError
from tasks.sources.files import existing, read_parquet
from tasks.synthesis.parsing import is_unfinished, parse_response

NEEDED = ("level", "problem_id", "sample_id", "response", "extracted_code")
OPTIONAL = ("recorded_compiled", "recorded_correct", "finish_reason")
_CLASS = re.compile(r"^[ \t]*class[ \t]+ModelNew\b", re.MULTILINE)

SAME = ("same", "neither")
GROUPS = {
    "recorded only: no ModelNew": (
        "The recorded code is a fragment without the class `ModelNew`: no candidate."
    ),
    "recorded only: not Python": (
        "The recorded code names `ModelNew` and does not parse; our parser finds no complete block"
        " with it."
    ),
    "recorded only: cut off": (
        "The response breaks off, in its answer or its reasoning; the recorded module is a draft,"
        " or unfinished."
    ),
    "recorded only: thought on": (
        "The response ends by itself. Its reasoning goes on behind the module, and its answer holds"
        " none."
    ),
    "recorded only: other": "",
    "ours only": "The recorded extraction is empty.",
    "both: recorded has no ModelNew": "The recorded code is another block, without the class.",
    "both: recorded is not Python": (
        "The recorded code names `ModelNew` and does not parse, ours does: it runs over the ends of"
        " blocks."
    ),
    "both: another module": "Each chose another module.",
}


class Code(NamedTuple):
    """What can be said of extracted code without running it."""

    characters: int
    parses: bool
    defines_model: bool

    def __str__(self) -> str:
        said = ["Python" if self.parses else "not Python"] + ["ModelNew"] * self.defines_model
        return f"{self.characters} characters, {', '.join(said)}" if self.characters else "none"


class Compared(NamedTuple):
    """One response. `kind` is one of GROUPS or SAME; `reason` ours for having no code; `cut`
    whether the response breaks off."""

    row: str
    kind: str
    ours: Code
    recorded: Code
    reason: str | None
    cut: bool
    correct: bool
    compiled: bool


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--responses", required=True, help="recorded responses with extracted_code, Parquet"
    )
    parser.add_argument(
        "--json",
        action="store_true",
        dest="as_json",
        help="print the figures and every difference as one JSON object",
    )
    parser.add_argument("--out", help="write the report there, Markdown")
    arguments = parser.parse_args()
    try:
        started = time.monotonic()
        compared = [compare(row) for row in read(arguments.responses)]
        passed_s = time.monotonic() - started
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    text = report(compared, passed_s)
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
    print(json.dumps(as_json(compared, passed_s)) if arguments.as_json else text)
    return 0


def read(path: str) -> list[dict[str, Any]]:
    """The recorded responses, in the order of their ids. Raises UsageError for a file that lacks a
    column or holds no row."""
    rows = (
        read_parquet(existing(path), NEEDED, OPTIONAL)
        .sort("level", "problem_id", "sample_id")
        .to_dicts()
    )
    if not rows:
        raise UsageError(
            f"{path} holds no response", "give a Parquet file with a row for each response"
        )
    return rows


def compare(row: dict[str, Any]) -> Compared:
    """Our code and the recorded one of a response. Equal is what is equal without the white space
    around it."""
    text, theirs = row["response"] or "", row["extracted_code"] or ""
    finish = row.get("finish_reason") or ("length" if is_unfinished(text) else "stop")
    parsed = parse_response(text, finish_reason=finish)
    ours, recorded = described(parsed.code or ""), described(theirs)
    same = (parsed.code or "").strip() == theirs.replace("\r\n", "\n").strip()
    return Compared(
        row=f"L{row['level']}/{row['problem_id']}/{row['sample_id']}",
        kind=kind(ours, recorded, same, parsed.parse_reason),
        ours=ours,
        recorded=recorded,
        reason=parsed.parse_reason,
        cut=finish == "length",
        correct=bool(row.get("recorded_correct")),
        compiled=bool(row.get("recorded_compiled")),
    )


def described(code: str) -> Code:
    return Code(len(code.strip()), bool(code.strip()) and _parses(code), bool(_CLASS.search(code)))


def _parses(code: str) -> bool:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            parse_source(code)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    return True


def kind(ours: Code, recorded: Code, same: bool, reason: str | None) -> str:
    if same:
        return "same" if ours.characters else "neither"
    if not recorded.characters:
        return "ours only"
    if ours.characters:
        if not recorded.defines_model:
            return "both: recorded has no ModelNew"
        return (
            "both: recorded is not Python"
            if ours.parses and not recorded.parses
            else "both: another module"
        )
    if not recorded.defines_model:
        return "recorded only: no ModelNew"
    if reason == "truncated":
        return "recorded only: cut off"
    if not recorded.parses:
        return "recorded only: not Python"
    return "recorded only: thought on" if reason == "no_code_block" else "recorded only: other"


def yields(codes: Iterable[Code]) -> dict[str, int]:
    found = list(codes)
    return {
        "with code": sum(code.characters > 0 for code in found),
        "parses as Python": sum(code.parses for code in found),
        "defines ModelNew": sum(code.defines_model for code in found),
        "both": sum(code.parses and code.defines_model for code in found),
    }


def as_json(compared: list[Compared], passed_s: float) -> dict[str, Any]:
    return {
        "responses": len(compared),
        "milliseconds_per_response": round(passed_s / len(compared) * 1000, 2),
        "ours": yields(each.ours for each in compared),
        "recorded": yields(each.recorded for each in compared),
        "kinds": dict(Counter(each.kind for each in compared)),
        "no_code": dict(Counter(each.reason for each in compared if each.reason)),
        "recorded_correct": sum(each.correct for each in compared),
        "recorded_correct_but_not_the_same": [
            each.row for each in compared if each.correct and each.kind != "same"
        ],
        "different": [
            {**each._asdict(), "ours": each.ours._asdict(), "recorded": each.recorded._asdict()}
            for each in compared
            if each.kind not in SAME
        ],
    }


def report(compared: list[Compared], passed_s: float) -> str:
    """Figures, then every response where the two differ, in groups."""
    facts = as_json(compared, passed_s)
    total, kinds = len(compared), facts["kinds"]
    lines = [
        (
            f"{total} responses, {facts['milliseconds_per_response']} ms each (our parser, and"
            " Python's for both)."
        ),
        "",
    ]
    lines += ["| code extracted | ours | recorded |", "| --- | ---: | ---: |"]
    lines += [
        f"| {name} | {share(count, total)} | {share(facts['recorded'][name], total)} |"
        for name, count in facts["ours"].items()
    ]
    lines += [
        "",
        (
            f"The same code, but for white space around it: {kinds.get('same', 0)}. None in either:"
            f" {kinds.get('neither', 0)}."
        ),
    ]
    lines += [
        f"Ours has none in {sum(facts['no_code'].values())}: "
        + ", ".join(f"{n} {why}" for why, n in facts["no_code"].items())
        + "."
    ]
    lost = [each for each in compared if each.correct and each.kind != "same"]
    lines += [
        "",
        f"## Recorded as correct: {facts['recorded_correct']}, of these not the same: {len(lost)}",
        "",
        *_table(lost),
    ]
    for name, meaning in GROUPS.items():
        rows = [each for each in compared if each.kind == name]
        if rows:
            lines += [
                "",
                f"## {name[0].upper()}{name[1:]} ({len(rows)})",
                "",
                *([meaning, ""] if meaning else []),
                *_table(rows),
            ]
    return "\n".join(lines) + "\n"


def _table(rows: list[Compared]) -> list[str]:
    if not rows:
        return ["None."]
    lines = [
        "| response | ours | recorded | breaks off | recorded verdict |",
        "| --- | --- | --- | --- | --- |",
    ]
    for each in rows:
        said = "correct" if each.correct else "compiled" if each.compiled else "not compiled"
        lines.append(
            f"| {each.row} | {each.reason or each.ours} | {each.recorded} |"
            f" {'yes' if each.cut else 'no'} | {said} |"
        )
    return lines


def share(count: int, total: int) -> str:
    return f"{count} ({100 * count / total:.1f} %)"


if __name__ == "__main__":
    sys.exit(main())
