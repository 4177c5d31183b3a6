"""The morning report as Markdown and JSON. Text from candidates, tasks or errors is never
markup."""

from __future__ import annotations

from collections.abc import Mapping

from flows.morning.history import Refresh
from flows.morning.report import Change, Morning
from kernels_eval.installation import command_at
from kernels_eval.records import Json
from tasks.benchmark.errors import ErrorGroup
from tasks.progress import duration
from tasks.reporting.page import write_page
from tasks.reporting.parts import Bullets, Section, Table, fields_table
from tasks.reporting.text import SHORT_ID, by_count, cut, moment, plural

ENDINGS = {
    "finished": "finished",
    "failed": "failed",
    "stopped": "was stopped",
    "killed": "was killed",
    "running": "is running",
    "unknown": "did not end: it was killed or is still running",
}
WORDS = {"curated": "training samples", "flags": "flags of traces"}
ERROR_CHARS = 600
QUANTILES = {"0.05": "5th percentile", "0.5": "median", "0.95": "95th percentile"}


def headline(morning: Morning) -> str:
    refresh = morning.refresh
    took = duration(refresh.seconds or 0.0)
    if refresh.ending != "finished":
        after = f" after {took}." if refresh.seconds is not None else "."
        return f"The refresh {ENDINGS[refresh.ending]}{after}"
    if morning.compared_with is None:
        counts = ", ".join(_some(change.rows, change) for change in morning.changes)
        return f"First refresh of this name, in {took}: {counts}."
    if morning.nothing_new:
        return f"Nothing new: all snapshots existed already, in {took}."
    new = [_some(change.new, change, "new ") for change in morning.changes if change.new]
    gone = [f"{_some(change.gone, change)} gone" for change in morning.changes if change.gone]
    return f"{', '.join([*new, *gone])}; in {took}."


def _some(count: int, change: Change, which: str = "") -> str:
    words = WORDS.get(change.what, change.what)
    return f"{count:,} {which}{words.removesuffix('s') if count == 1 else words}"


def markdown(morning: Morning) -> str:
    refresh, previous = morning.refresh, morning.compared_with
    compared_with = _compared_with(refresh, previous) if previous else "no earlier refresh"
    return write_page(
        "md",
        title=refresh.title,
        facts=(
            refresh.language,
            f"training set by the strategy {refresh.strategy}",
            f"compared with {compared_with}",
        ),
        sentence=headline(morning),
        sections=_sections(morning),
        drawn={},
    )


def _compared_with(refresh: Refresh, previous: Refresh) -> str:
    """When the other began, and what of it was chosen otherwise."""
    other = [
        f"{word} {value}"
        for word, value, own in (
            ("language", previous.language, refresh.language),
            ("strategy", previous.strategy, refresh.strategy),
        )
        if value != own
    ]
    whose = f", which had the {' and the '.join(other)}" if other else ""
    return f"{moment(previous.began_at)}{whose}"


def _sections(morning: Morning) -> list[Section]:
    verdicts = [
        {"verdict": name, "all": count, "new": morning.new_status_counts.get(name, 0)}
        for name, count in by_count(morning.status_counts)
    ]
    reused = "reused_of" in morning.confirmation
    failed = {} if reused else morning.confirmation.get("failed") or {}
    return [
        Section("What to do", _bullets(morning.next_steps)),
        Section(
            "What came",
            (
                fields_table(morning.changes, "what", "rows", "new", "gone"),
                confirmed(morning.confirmation),
                *_bullets(morning.choice),
            ),
        ),
        Section("Verdicts", (fields_table(verdicts, "verdict", "all", "new"),)),
        Section(
            "What failed",
            (
                cut(morning.refresh.error, ERROR_CHARS),
                fields_table(morning.unfinished, "name", "began_at", "ending", "error"),
                _reasons("new_candidates", morning.reason_counts, morning.reason_examples),
                _how_to_see(morning),
                _reasons("failed_when_confirmed", failed, {}),
                fields_table(map(error_row, morning.errors), *ERROR_ROW),
            ),
        ),
        Section("Cautions", _bullets(morning.cautions)),
    ]


def _reasons(number: str, counts: Mapping[str, int], examples: Mapping[str, str]) -> Table:
    rows: list[Json] = [{"reason": reason, number: count} for reason, count in by_count(counts)]
    for row in rows if examples else []:
        row["candidate"] = examples[row["reason"]][:SHORT_ID]
    return fields_table(rows, "reason", number, *(["candidate"] if examples else []))


def _how_to_see(morning: Morning) -> str:
    if not morning.reason_examples:
        return ""
    show = command_at("show", morning.refresh.snapshots["verdicts"].root)
    return f"What was seen of a candidate, and its code: {show} CANDIDATE"


ERROR_ROW = ("count", "tasks", "reason", "example", "candidate")


def error_row(group: ErrorGroup) -> Json:
    """A group of errors in the words of one of its candidates."""
    counted = {name: getattr(group, name) for name in ERROR_ROW[:-1]}
    return {**counted, "candidate": group.candidate_id[:SHORT_ID]}


def confirmed(confirmation: Json) -> str:
    """What confirming came to, in a sentence; empty where nothing was only screened."""
    if not confirmation:
        return ""
    ratio = confirmation["speedup_ratio"]
    named = [f"{name} {ratio[share]:.2f}" for share, name in QUANTILES.items() if share in ratio]
    said = ", ".join(named)
    times = f"; confirmed / screened speedup: {said}" if said else ""
    reused = confirmation.get("reused_of")
    by = f"Reused from an earlier run ({moment(reused)}): confirmed" if reused else "Confirmed"
    return (
        f"{by} {confirmation['confirmed']:,} of {confirmation['proposed']:,} candidates"
        f" proposed for the training set in {plural(confirmation['rounds'], 'round')}{times}."
    )


def _bullets(lines: tuple[str, ...]) -> tuple[Bullets, ...]:
    return (Bullets(lines),) if lines else ()


def as_json(morning: Morning) -> Json:
    return {
        "headline": headline(morning),
        "next_steps": list(morning.next_steps),
        "nothing_new": morning.nothing_new,
        "title": morning.refresh.title,
        "wall_s": morning.refresh.seconds,
        **morning.model_dump(mode="json"),
    }
