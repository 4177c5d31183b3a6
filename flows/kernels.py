"""The code of a refresh's kernels on one Markdown page, for a browser: the fastest correct one of
each task, and one of each error. Text from candidates is never markup."""

from __future__ import annotations

import polars as pl

from flows.view import view_command
from kernels_eval.records import Row
from tasks.benchmark.errors import error_groups
from tasks.reporting.text import SHORT_ID, as_text, fenced, interval, plural
from tasks.store.snapshot import SnapshotRef
from tasks.tables import CORRECT, unconfirmed

READ = (
    *("candidate_id", "task_id", "status", "level", "outputs_match"),
    *("reason", "detail", "log_tail"),
    *("timing.speedup", "timing.speedup_lower", "timing.speedup_upper"),
)
MOST_KERNELS, MOST_ERRORS = 12, 5
CODE_CHARS = 12_000


def kernels_page(verdicts: SnapshotRef, candidates: SnapshotRef) -> str:
    frame = verdicts.open().read(columns=READ, unique="candidate_id")
    fastest = _fastest(frame)
    errors = error_groups(frame.with_columns(model=pl.lit("all")), limit=MOST_ERRORS)
    ids = [*(row["candidate_id"] for row in fastest), *(each.candidate_id for each in errors)]
    code = _code_of(candidates, ids)
    lines = [
        f"The fastest correct kernel of {plural(len(fastest), 'task')}, and one candidate of each"
        " error. All candidates, with reasoning and log, are in the viewer, where this run was:"
        f" `{view_command(verdicts.root)}`",
    ]
    for row in fastest:
        lines += _section(as_text(row["task_id"]), _speed(row), row["candidate_id"], code)
    for each in errors:
        said = f"{each.example or 'no message'} ({plural(each.count, 'candidate')})"
        lines += _section(f"Error: {each.reason}", as_text(said), each.candidate_id, code)
    return "\n\n".join(lines)


def _fastest(frame: pl.DataFrame) -> list[Row]:
    right = frame.filter(CORRECT).sort("speedup", descending=True, nulls_last=True)
    best = right.unique("task_id", keep="first", maintain_order=True)
    best = best.with_columns(screened=unconfirmed(best))
    return list(best.head(MOST_KERNELS).iter_rows(named=True))


def _speed(row: Row) -> str:
    ends = (row["speedup"], row["speedup_lower"], row["speedup_upper"])
    if ends[0] is None:
        return "correct, not timed"
    level = ", only screened" if row["screened"] else ""
    return f"speedup {interval(*ends, '.3g')}{level}"


def _code_of(candidates: SnapshotRef, ids: list[str]) -> dict[str, str]:
    among = pl.DataFrame({"candidate_id": pl.Series(ids, dtype=pl.String)})
    columns = ["candidate_id", "code"]
    found = candidates.open().read(columns=columns, unique="candidate_id", among=among)
    return {name: code or "" for name, code in found.select(columns).iter_rows()}


def _section(title: str, words: str, candidate_id: str, code: dict[str, str]) -> list[str]:
    text = code.get(candidate_id, "")
    return [
        f"## {title}",
        f"{words}, candidate `{candidate_id[:SHORT_ID]}`",
        fenced(text, "python", CODE_CHARS) if text else "no code",
    ]
