"""The morning report: what a refresh brought that the one before had not, what failed and why, and
what it cost.

Guarantees: compares snapshots, never the words of a run; a refresh whose snapshots are those of the
one before it has nothing new, and nothing is read to say so; text of candidates is escaped in
`markdown`. Costs count what this refresh made: a snapshot that was there before costs nothing. Does
not see the time of runs that were killed before they finished a snapshot, nor that of endpoints of
others.
"""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import TYPE_CHECKING, Any

from flows.morning.history import Refresh, before, refreshes, write_beside
from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.benchmark.errors import FAILED, ErrorGroup

if TYPE_CHECKING:
    import polars as pl

    from tasks.store.snapshot import Snapshot, SnapshotRef

NAMED = 10
"""Tasks and samples that are named; the others are counted."""
FILE, FOLDER = "morning.md", "morning"
COMPARED = ("tasks", "candidates", "verdicts", "curated")
KEYS = {
    "tasks": "task_id",
    "candidates": "candidate_id",
    "verdicts": "verdict_key",
    "curated": "candidate_id",
}


class Change(Record):
    """Rows of one snapshot that this refresh has and the one before had not (`new`), and the other
    way round (`gone`)."""

    what: str
    rows: int
    new: int
    gone: int
    examples: tuple[str, ...] = ()
    reasons: dict[str, int] = {}
    """Of the training set: why samples came in (`+`) or went out (`-`), with how many."""


class Cost(Record):
    """One stage that this refresh did: wall time in seconds, devices held, GPU-hours (0 on a CPU),
    and what that rests on."""

    stage: str
    wall_s: float
    devices: int
    gpu_hours: float
    rests_on: str


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
    errors: tuple[ErrorGroup, ...] = ()
    cautions: tuple[str, ...] = ()
    costs: tuple[Cost, ...] = ()

    @property
    def nothing_new(self) -> bool:
        return not any(change.new or change.gone for change in self.changes)

    @property
    def gpu_hours(self) -> float:
        return sum(cost.gpu_hours for cost in self.costs)

    @property
    def headline(self) -> str:
        from flows.morning.text import headline

        return headline(self)

    def markdown(self) -> str:
        from flows.morning.text import markdown

        return markdown(self)

    def as_json(self) -> dict[str, Any]:
        return {
            "headline": self.headline,
            "nothing_new": self.nothing_new,
            "gpu_hours": round(self.gpu_hours, 4),
            "wall_s": self.refresh.seconds,
            **self.model_dump(mode="json"),
        }


def morning(root: str, refresh: Refresh | None = None) -> Morning:
    """The report of a refresh, the newest that ended where None. Raises UsageError where the root
    knows none."""
    if refresh is None:
        ended = [each for each in refreshes(root) if each.ending != "unknown"]
        if not ended:
            raise UsageError(
                f"no refresh ended under {root}",
                "run `concur run --only refresh` first, or give --root",
            )
        refresh = ended[-1]
    previous, unfinished = before(root, refresh)
    told = {
        "refresh": refresh,
        "compared_with": previous,
        "unfinished": tuple(unfinished),
        "cautions": refresh.cautions,
    }
    if not refresh.snapshots:
        return Morning(**told)
    cautions = list(refresh.cautions)
    changes = tuple(_changes(refresh, previous, cautions))
    verdicts = refresh.snapshots["verdicts"].open()
    cautions += [
        f"A worker was put aside: {line}" for line in verdicts.manifest.get("quarantined") or []
    ]
    fresh = _new_verdicts(refresh, previous)
    return Morning(
        **told | {"cautions": tuple(cautions)},
        changes=changes,
        status_counts=verdicts.manifest.get("status_counts") or {},
        new_status_counts=_counted(fresh, "status"),
        reason_counts=_counted(fresh, "reason", failed=True),
        errors=_errors(fresh),
        costs=tuple(_costs(refresh)),
    )


def write_morning(root: str, refresh: Refresh) -> tuple[Morning, str]:
    """Write the report under the root: `morning/<id>.md`, which stays, and `morning.md`. Returns
    it, and the path of the first."""
    found = morning(root, refresh)
    text = found.markdown()
    write_beside(root, FILE, text)
    return found, write_beside(root, f"{FOLDER}/{refresh.id}.md", text)


# -- what is new -----------------------------------------------------------------------------------


def _changes(refresh: Refresh, previous: Refresh | None, cautions: list[str]) -> list[Change]:
    return [
        _change(name, refresh.snapshots[name], _of(previous, name), cautions)
        for name in COMPARED
        if name in refresh.snapshots
    ]


def _of(previous: Refresh | None, name: str) -> SnapshotRef | None:
    return previous.snapshots.get(name) if previous else None


def _change(name: str, ref: SnapshotRef, old: SnapshotRef | None, cautions: list[str]) -> Change:
    rows = int(ref.open().manifest["rows"])
    if old is not None and old == ref:
        return Change(what=name, rows=rows, new=0, gone=0)
    if old is not None and not old.open().finished:
        cautions.append(
            f"The {name} of the refresh before are gone from the root: all of this one's count as"
            " new."
        )
        old = None
    names = _keys(ref, name)
    known = _keys(old, name) if old else {}
    new, gone = names.keys() - known.keys(), known.keys() - names.keys()
    reasons = _why(old, ref, cautions) if name == "curated" and old and (new or gone) else {}
    examples = (
        tuple(sorted({names[key] for key in new})[:NAMED])
        if name in ("tasks", "curated") and old
        else ()
    )
    return Change(
        what=name, rows=rows, new=len(new), gone=len(gone), examples=examples, reasons=reasons
    )


def _keys(ref: SnapshotRef, name: str) -> dict[str, str]:
    """The rows by their key, with the name of their task."""
    key = KEYS[name]
    shown = {"tasks": "name", "curated": "task_name"}.get(name, key)
    frame = ref.open().read(columns=list(dict.fromkeys((key, shown))), unique=key)
    if frame.is_empty():
        return {}
    return dict(
        zip(
            frame[key],
            (str(value) for value in frame[shown if shown in frame.columns else key]),
            strict=True,
        )
    )


def _why(old: SnapshotRef, new: SnapshotRef, cautions: list[str]) -> dict[str, int]:
    from tasks.publishing.diff import diff
    from tasks.publishing.diff_report import GAINED, LOST

    try:
        found = diff(old, new)
    except UsageError as error:
        cautions.append(f"Why the training set changed cannot be said: {error}")
        return {}
    gained = {
        f"+ {GAINED[reason]}": count
        for reason, count in found.reasons(found.samples_gained).items()
    }
    return gained | {
        f"- {LOST[reason]}": count for reason, count in found.reasons(found.samples_lost).items()
    }


# -- what failed -----------------------------------------------------------------------------------


def _new_verdicts(refresh: Refresh, previous: Refresh | None) -> pl.DataFrame:
    """Verdicts that the refresh before did not have: status, reason, and of failures what they
    said."""
    import polars as pl

    ref, old = refresh.snapshots["verdicts"], _of(previous, "verdicts")
    columns = ["verdict_key", "candidate_id", "task_id", "status", "reason", "detail", "log_tail"]
    if old == ref:
        return pl.DataFrame(schema=dict.fromkeys(columns, pl.String))
    frame = ref.open().read(columns=columns, unique="candidate_id")
    known = old.open().keys("verdict_key") if old and old.open().finished else set()
    return (
        frame.filter(~pl.col("verdict_key").is_in(list(known)))
        if known and not frame.is_empty()
        else frame
    )


def _counted(frame: pl.DataFrame, column: str, *, failed: bool = False) -> dict[str, int]:
    if frame.is_empty():
        return {}
    values = frame.filter(frame["status"] != "correct")[column] if failed else frame[column]
    return dict(Counter(str(value) for value in values).most_common())


def _errors(frame: pl.DataFrame) -> tuple[ErrorGroup, ...]:
    import polars as pl

    from tasks.benchmark.errors import error_groups

    if frame.is_empty() or not frame["status"].is_in(FAILED).any():
        return ()
    return tuple(error_groups(frame.with_columns(model=pl.lit("all")), limit=5))


# -- what it cost ----------------------------------------------------------------------------------


def _costs(refresh: Refresh) -> list[Cost]:
    """Stages that this refresh finished, in order. A stage lasted from the end of the one before
    it; manifests say when each ended."""
    began = datetime.fromisoformat(refresh.began_at).replace(
        microsecond=0
    )  # as coarse as the manifests' times
    made = sorted(_made_since(refresh, began), key=lambda pair: pair[0])
    costs, since = [], began
    for ended, name, snapshot in made:
        costs.append(_cost(name, (ended - since).total_seconds(), snapshot, refresh))
        since = ended
    return costs


def _made_since(refresh: Refresh, began: datetime) -> list[tuple[datetime, str, Snapshot]]:
    opened = [(name, ref.open()) for name, ref in refresh.snapshots.items()]
    dated = [
        (datetime.fromisoformat(snapshot.manifest["created_at"]), name, snapshot)
        for name, snapshot in opened
        if snapshot.finished
    ]
    return [each for each in dated if each[0] >= began]


def _cost(name: str, wall_s: float, snapshot: Snapshot, refresh: Refresh) -> Cost:
    if name == "verdicts" and (seen := snapshot.manifest.get("telemetry")):
        held_s, devices = float(seen["wall_s"]), int(seen["devices"])
        hours = held_s * devices / 3600 if refresh.gpus else 0.0
        busy = (
            f"telemetry of the workers: {seen['candidates']:,} candidates, devices"
            f" {seen['device_busy_share']:.0%} busy"
        )
        return Cost(stage=name, wall_s=wall_s, devices=devices, gpu_hours=hours, rests_on=busy)
    if name == "candidates" and refresh.sampling_gpus:
        gpus = refresh.sampling_gpus
        return Cost(
            stage=name,
            wall_s=wall_s,
            devices=gpus,
            gpu_hours=wall_s * gpus / 3600,
            rests_on="wall time on the GPUs of our own servers",
        )
    return Cost(
        stage=name, wall_s=wall_s, devices=0, gpu_hours=0.0, rests_on="wall time; no GPU of ours"
    )
