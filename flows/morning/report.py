"""What a refresh added that the one before did not have, what failed and why, and what it cost.

Guarantees: compares snapshots, never log lines; where a snapshot is that of the refresh before,
nothing is read. Costs count what this refresh made: a snapshot that existed before costs nothing.
Does not see the time of runs that were killed before they finished a snapshot, nor that of other
endpoints.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import TYPE_CHECKING

import polars as pl

from flows.morning.history import Refresh, before, refreshes
from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record, Status
from tasks.benchmark.errors import FAILED, ErrorGroup, error_groups

if TYPE_CHECKING:
    from tasks.store.snapshot import SnapshotRef

NAMED = 10
"""Tasks and samples that are named; the others are counted."""
KEYS = {
    "tasks": ("task_id", "name"),
    "candidates": ("candidate_id", "candidate_id"),
    "verdicts": ("verdict_key", "verdict_key"),
    "curated": ("candidate_id", "task_name"),
}
"""The snapshots that are compared: the key of a row, and the column that names it."""
VERDICT_COLUMNS = (
    *("verdict_key", "candidate_id", "task_id", "status", "reason", "detail", "log_tail"),
)


class Change(Record):
    """Rows of one snapshot that this refresh has and the one before had not (`new`), and the other
    way round (`gone`)."""

    what: str
    rows: int
    new: int = 0
    gone: int = 0
    examples: tuple[str, ...] = ()
    reasons: dict[str, int] = {}
    """Of the training set: why samples came in (`+`) or went out (`-`), with how many."""


class Cost(Record):
    """One stage that this refresh ran: wall time in seconds, devices held, GPU-hours (0 on a CPU),
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


def newest(root: str) -> Morning:
    """The report of the newest refresh that ended. Raises UsageError where the root has none."""
    ended = [each for each in refreshes(root) if each.ending != "unknown"]
    if not ended:
        raise UsageError(
            f"no refresh ended under {root}",
            "run `concur run --only refresh` first, or give --root",
        )
    return report_of(ended[-1], *before(root, ended[-1]))


def report_of(refresh: Refresh, previous: Refresh | None, unfinished: Sequence[Refresh]) -> Morning:
    """The report of a refresh, compared with the last one that finished; `unfinished` lie between
    the two."""
    bare = Morning(
        refresh=refresh,
        compared_with=previous,
        unfinished=tuple(unfinished),
        cautions=refresh.cautions,
    )
    if not refresh.snapshots:
        return bare
    cautions = list(refresh.cautions)
    old = previous.snapshots if previous else {}
    changes = [
        _change(name, ref, old.get(name), cautions)
        for name, ref in refresh.snapshots.items()
        if name in KEYS
    ]
    verdicts = refresh.snapshots["verdicts"]
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
        "errors": tuple(_errors(failed)),
        "costs": tuple(_costs(refresh)),
    }
    return bare.model_copy(update=found)


# -- what is new -----------------------------------------------------------------------------------


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
    names, known = _names(ref, name), _names(old, name)
    new, gone = names.keys() - known.keys(), known.keys() - names.keys()
    named = new if name in ("tasks", "curated") and old else ()
    return Change(
        what=name,
        rows=rows,
        new=len(new),
        gone=len(gone),
        examples=tuple(sorted({names[key] for key in named})[:NAMED]),
        reasons=_why(old, ref, cautions) if name == "curated" and old and (new or gone) else {},
    )


def _names(ref: SnapshotRef | None, name: str) -> dict[str, str]:
    """The rows by their key, with the name of their task."""
    key, shown = KEYS[name]
    columns = list(dict.fromkeys((key, shown)))
    frame = ref.open().read(columns=columns, unique=key) if ref else None
    if frame is None or frame.is_empty():
        return {}
    names = frame[shown if shown in frame.columns else key]
    return dict(zip(frame[key], map(str, names), strict=True))


def _why(old: SnapshotRef, new: SnapshotRef, cautions: list[str]) -> dict[str, int]:
    from tasks.curation.diff import changes, reason_counts
    from tasks.curation.stage import decisions_of

    try:
        rows = changes(decisions_of(old.open()), decisions_of(new.open()))
    except UsageError as error:
        cautions.append(f"Why the training set changed is unknown: {error}")
        return {}
    counts = reason_counts(rows)
    return {
        f"{sign} {reason.replace('_', ' ')}": count
        for sign, change in (("+", "gained"), ("-", "lost"))
        for reason, count in counts[change].items()
    }


# -- what failed -----------------------------------------------------------------------------------


def _new_verdicts(ref: SnapshotRef, old: SnapshotRef | None) -> pl.DataFrame:
    """Verdicts that the refresh before did not have: status, reason, and the error of failures."""
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


# -- what it cost ----------------------------------------------------------------------------------


def _costs(refresh: Refresh) -> Iterator[Cost]:
    """Stages that this refresh finished, in order. A stage lasted from the end of the one before
    it; manifests say when each ended, to the second."""
    since = began = datetime.fromisoformat(refresh.began_at).replace(microsecond=0)
    opened = {name: ref.open() for name, ref in refresh.snapshots.items()}
    manifests = {name: one.manifest for name, one in opened.items() if one.finished}
    ended = {
        name: datetime.fromisoformat(manifest["created_at"]) for name, manifest in manifests.items()
    }
    for name in sorted(ended, key=lambda name: ended[name]):
        if ended[name] >= began:
            yield _cost(name, (ended[name] - since).total_seconds(), manifests[name], refresh)
            since = ended[name]


def _cost(name: str, wall_s: float, manifest: Json, refresh: Refresh) -> Cost:
    seen, gpus = manifest.get("telemetry"), refresh.sampling_gpus
    devices, hours, rests_on = 0, 0.0, "wall time; no GPU of this machine"
    if name == "verdicts" and seen:
        devices = int(seen["devices"])
        hours = float(seen["wall_s"]) * devices / 3600 if refresh.gpus else 0.0
        busy = f"{seen['candidates']:,} candidates, devices {seen['device_busy_share']:.0%} busy"
        rests_on = f"telemetry of the workers: {busy}"
    elif name == "candidates" and gpus:
        devices, hours = gpus, wall_s * gpus / 3600
        rests_on = "wall time on the GPUs of servers that concur started"
    return Cost(stage=name, wall_s=wall_s, devices=devices, gpu_hours=hours, rests_on=rests_on)
