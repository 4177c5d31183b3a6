"""What a refresh added since the last one, what failed and why, and what to do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import polars as pl

from flows.morning.history import Refresh, before, refreshes
from flows.view import view_command
from kernels_eval.errors import UsageError
from kernels_eval.installation import command_at
from kernels_eval.records import Json, Record, Status
from tasks.benchmark.errors import FAILED, ErrorGroup, error_groups
from tasks.reporting.choice import choice_of
from tasks.reporting.text import SHORT_ID, moment, plural

if TYPE_CHECKING:
    from tasks.store.snapshot import SnapshotRef

KEYS = {
    "tasks": "task_id",
    "candidates": "candidate_id",
    "verdicts": "verdict_key",
    "curated": "candidate_id",
}
"""Compared snapshots: key of a row."""
VERDICT_COLUMNS = "verdict_key candidate_id task_id status reason detail log_tail".split()

FREQUENT = 0.1
"""Share of new candidates from which one error is something to do."""


class Change(Record):
    """Rows of a snapshot that this refresh has and the last had not (`new`), and the reverse
    (`gone`)."""

    what: str
    rows: int
    new: int = 0
    gone: int = 0


class Morning(Record):
    """The report. `compared_with` is None for the first refresh of a root."""

    refresh: Refresh
    compared_with: Refresh | None
    unfinished: tuple[Refresh, ...] = ()
    """Refreshes between the two that failed, were stopped or were killed."""
    changes: tuple[Change, ...] = ()
    status_counts: dict[str, int] = {}
    new_status_counts: dict[str, int] = {}
    reason_counts: dict[str, int] = {}
    reason_examples: dict[str, str] = {}
    """a candidate of each reason, by its id"""
    confirmation: Json = {}
    """What confirming came to (tasks.verification.confirmation), where some verdicts were only
    screened; `reused_of` is when an earlier run did it."""
    choice: tuple[str, ...] = ()
    """what the training set kept of the correct candidates, and what is slow of it"""
    errors: tuple[ErrorGroup, ...] = ()
    cautions: tuple[str, ...] = ()

    @property
    def changed(self) -> list[str]:
        """What has rows that are new or gone."""
        return [change.what for change in self.changes if change.new or change.gone]

    @property
    def nothing_new(self) -> bool:
        return not self.changed

    @property
    def next_steps(self) -> tuple[str, ...]:
        """What to do now, a sentence each; none after a refresh with neither news nor faults."""
        steps = []
        if self.refresh.error.startswith(f"{UsageError.__name__}: "):
            steps.append(f"Mend the cause, or the same fails again: {self.refresh.error}")
        elif self.refresh.ending != "finished":
            steps.append(_resuming(self.refresh))
        most = next(iter(self.errors), None)
        if most and most.count >= FREQUENT * sum(self.new_status_counts.values()):
            steps.append(self._look_at(most))
        if not self.nothing_new:
            new = "training set" if self.changed == ["curated"] else "new candidates"
            root = self.refresh.snapshots["verdicts"].root
            steps.append(
                f"See the {new}: in Prefect the run's artifact kernels, in a shell"
                f" {view_command(root)}"
            )
        if self.cautions:
            steps.append("Read the cautions before you use this refresh.")
        return tuple(steps)

    def _look_at(self, most: ErrorGroup) -> str:
        said = most.example or "no message"
        root = self.refresh.snapshots["verdicts"].root
        show = f"{command_at('show', root)} {most.candidate_id[:SHORT_ID]}"
        times = plural(most.count, "time")
        return f"The most frequent error of new candidates, {times}: {said}. One of them: {show}"


def _resuming(refresh: Refresh) -> str:
    how = f": `{refresh.goes_on}`" if refresh.goes_on else ""
    if refresh.ending == "stopped":
        by = f"{refresh.error[:1].upper()}{refresh.error[1:]}."
        return f"{by} To go on, start it again{how}. What is finished is kept."
    mend = "Mend the error, and start" if refresh.error else "Start"
    return f"{mend} the refresh again{how}. It resumes: what is finished is kept."


def newest(root: str) -> Morning:
    """The report of the newest refresh that ended or was killed. Raises UsageError without one."""
    begun = refreshes(root)
    ended = [each for each in begun if each.ending not in ("running", "unknown")]
    if begun and not ended:
        state = "is under way" if begun[-1].ending == "running" else "has not ended"
        raise UsageError(
            f"no refresh ended under {root} yet: {begun[-1].name} {state}, since"
            f" {moment(begun[-1].began_at)}",
            f"`{command_at('status', root)}` says how far a run of the stack is; ask again once it"
            " has ended; if nothing runs, start it again: it resumes",
        )
    if not ended:
        raise UsageError(
            f"no refresh ended under {root}",
            "`concur run --only refresh` makes one, as does a run in Prefect that has begun"
            f" (`{command_at('status', root)}`); another root: --root",
        )
    return report_of(ended[-1], *before(root, ended[-1]))


def report_of(refresh: Refresh, previous: Refresh | None, unfinished: Sequence[Refresh]) -> Morning:
    """Report of a refresh against the last finished one; `unfinished` lie between."""
    bare = Morning(
        refresh=refresh,
        compared_with=previous,
        unfinished=tuple(unfinished),
        cautions=refresh.cautions,
    )
    if not refresh.snapshots:
        return bare
    cautions = list(refresh.cautions)
    confirmed = refresh.snapshots["verdicts"].open().manifest
    confirmation = dict(confirmed.get("confirmation") or {})
    if confirmation and confirmed["created_at"] < refresh.began_at:
        confirmation["reused_of"] = confirmed["created_at"]
    snapshots = as_screened(refresh.snapshots)
    old = as_screened(previous.snapshots) if previous else {}
    changes = [
        _change(name, ref, old.get(name), cautions)
        for name, ref in snapshots.items()
        if name in KEYS
    ]
    verdicts = snapshots["verdicts"]
    manifest = verdicts.open().manifest
    cautions += [f"A worker was quarantined: {line}" for line in manifest.get("quarantined") or []]
    fresh = _new_verdicts(verdicts, old.get("verdicts"))
    failed = fresh.filter(fresh["status"] != Status.CORRECT.value)
    found = {
        "cautions": tuple(cautions),
        "changes": tuple(changes),
        "status_counts": manifest.get("status_counts") or {},
        "new_status_counts": dict(Counter(fresh["status"]).most_common()),
        "reason_counts": dict(Counter(failed["reason"]).most_common()),
        "reason_examples": dict(failed.select("reason", "candidate_id").reverse().iter_rows()),
        "errors": tuple(_errors(failed)),
        "confirmation": confirmation,
        "choice": tuple(choice_of(snapshots["curated"].open().manifest)),
    }
    return bare.model_copy(update=found)


# -- what is new -----------------------------------------------------------------------------------


def as_screened(snapshots: Mapping[str, SnapshotRef]) -> dict[str, SnapshotRef]:
    """The snapshots with every candidate's own verdict: what is confirmed depends on all
    candidates."""
    found = dict(snapshots)
    if screened := found.pop("screened", None):
        found["verdicts"] = screened
    return found


def _change(name: str, ref: SnapshotRef, old: SnapshotRef | None, cautions: list[str]) -> Change:
    rows = int(ref.open().manifest["rows"])
    if old == ref:
        return Change(what=name, rows=rows)
    if old is not None and not old.open().finished:
        cautions.append(
            f"The {name} of the previous refresh are no longer under the root: all of this one's"
            " count as new."
        )
        old = None
    keys = ref.open().keys(KEYS[name])
    known = old.open().keys(KEYS[name]) if old else set()
    return Change(what=name, rows=rows, new=len(keys - known), gone=len(known - keys))


# -- what failed -----------------------------------------------------------------------------------


def _new_verdicts(ref: SnapshotRef, old: SnapshotRef | None) -> pl.DataFrame:
    frame = pl.DataFrame(schema=dict.fromkeys(VERDICT_COLUMNS, pl.String))
    if old != ref:
        found = ref.open().read(columns=VERDICT_COLUMNS, unique="candidate_id")
        frame = frame if found.is_empty() else found
        known = old.open().keys("verdict_key") if old and old.open().finished else set()
        frame = frame.filter(~pl.col("verdict_key").is_in(list(known)))
    return frame


def _errors(failed: pl.DataFrame) -> list[ErrorGroup]:
    if not failed["status"].is_in(FAILED).any():
        return []
    return error_groups(failed.with_columns(model=pl.lit("all")), limit=5)
