"""What changed between two refreshes of a curated set, and why: tasks and samples gained, lost and
changed.

Guarantees: every reason follows from what the two sides hold (rows, manifests, verdicts); where
they do not tell, it is `unknown`. A reason is the first that applies, in the order of the stages:
task, program, candidate, verdict, strategy, threshold, rule. Does not guarantee that a change had
no second cause, and cannot see changes of curation's own code other than by its version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from kernels_eval.records import Record, Status
from tasks.publishing.lineage import CURATION, SYNTHESIS, TASKS, VERIFICATION, settings
from tasks.publishing.sides import Judged, Row, Sample, Side, read_side, share
from tasks.reporting.text import by_count
from tasks.store import SnapshotRef

Reason = Literal[
    "task",
    "program",
    "generator",
    "candidate",
    "verdict",
    "strategy",
    "threshold",
    "bound",
    "flag",
    "speedup",
    "outdone",
    "quota",
    "samples",
    "criterion",
    "unknown",
]
Why = tuple[Reason, str]
"""A reason, and what is known of it in detail."""
ANOTHER_PROGRAM: Why = ("program", "the same task_id names another program")
LOWER = "require_speedup_lower_above"


class SampleChange(Record):
    """A sample that one side has and the other has not, or has otherwise."""

    candidate_id: str
    task_id: str
    criterion: str
    reason: Reason
    detail: str = ""


class TaskChange(Record):
    """A task with samples on one side only, or with other samples or another program. Counts are
    rows of each side."""

    task_id: str
    reason: Reason
    detail: str = ""
    old_samples: int
    new_samples: int


class Setting(Record):
    """A setting, a version or a count of a stage that differs, as text; None where a side does not
    have it."""

    name: str
    old: str | None
    new: str | None


class SideSummary(Record):
    """One of the two sets."""

    label: str
    created_at: str
    rows: int
    tasks: int


class RefreshDiff(Record):
    """The difference of two curated sets."""

    old: SideSummary
    new: SideSummary
    settings: tuple[Setting, ...]
    samples_gained: tuple[SampleChange, ...]
    samples_lost: tuple[SampleChange, ...]
    samples_changed: tuple[SampleChange, ...]
    tasks_gained: tuple[TaskChange, ...]
    tasks_lost: tuple[TaskChange, ...]
    tasks_changed: tuple[TaskChange, ...]

    def reasons(self, changes: Iterable[SampleChange | TaskChange]) -> dict[str, int]:
        """How many of these have each reason, the most frequent first."""
        return dict(by_count(Counter(change.reason for change in changes)))


def diff(old: SnapshotRef | Path, new: SnapshotRef | Path, root: str | None = None) -> RefreshDiff:
    """Compare two curated snapshots or published folders. For a folder, `root` is where its
    snapshots may still be.

    Raises UsageError for what is neither.
    """
    was, now = read_side(old, root), read_side(new, root)
    share(was, now)
    gained, lost = (
        [
            _change(row, _Case(row, without, having).why_absent())
            for name, row in having.rows.items()
            if name not in without.rows
        ]
        for without, having in ((was, now), (now, was))
    )
    both = [(row, now.rows[name]) for name, row in was.rows.items() if name in now.rows]
    changed = [found for pair in both if (found := _changed(*pair, was, now))]
    tasks = list(_tasks(was, now, {change.candidate_id: change for change in (*gained, *lost)}))
    return RefreshDiff(
        old=_summary(was),
        new=_summary(now),
        settings=tuple(_settings(was, now)),
        samples_gained=_sorted(gained),
        samples_lost=_sorted(lost),
        samples_changed=_sorted(changed),
        tasks_gained=tuple(task for task in tasks if not task.old_samples),
        tasks_lost=tuple(task for task in tasks if not task.new_samples),
        tasks_changed=tuple(task for task in tasks if task.old_samples and task.new_samples),
    )


def _sorted(changes: Iterable[SampleChange]) -> tuple[SampleChange, ...]:
    return tuple(sorted(changes, key=lambda change: (change.task_id, change.candidate_id)))


def _summary(side: Side) -> SideSummary:
    created_at = str(side.facts.get("created_at") or "unknown")
    rows, tasks = len(side.rows), len(side.rows_by_task)
    return SideSummary(label=side.label, created_at=created_at, rows=rows, tasks=tasks)


def _change(row: Row, why: Why) -> SampleChange:
    known = {name: getattr(row, name) for name in ("candidate_id", "task_id", "criterion")}
    return SampleChange(**known, reason=why[0], detail=why[1])


# -- why a sample is on one side only --------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    """A row that `having` has, and the side that lacks it or has it otherwise. The same questions
    whichever side is the older: lost, or gained."""

    row: Row
    without: Side
    having: Side

    def rules(self, name: str) -> tuple[Any, Any]:
        """A setting of the curation of both sides."""
        without, having = (side.config(CURATION) or {} for side in (self.without, self.having))
        return without.get(name), having.get(name)

    def threshold(self, name: str) -> Why:
        there, here = self.rules(name)
        return "threshold", f"{name} is {there} there and {here} here"

    def why_absent(self) -> Why:
        """Why `without` lacks the row."""
        row, without = self.row, self.without
        if without.tasks is not None:
            if row.task_id not in without.tasks:
                return "task", ""
            if without.tasks[row.task_id] != row.program:
                return ANOTHER_PROGRAM
        if without.candidates is None:
            return "unknown", "the candidates of that side are not there"
        if row.candidate_id not in without.candidates:
            return self.why_no_candidate(without.candidates)
        if without.verdicts is None:
            return "unknown", "the verdicts of that side are not there"
        verdict = without.verdicts.get(row.candidate_id)
        if verdict is None:
            return "verdict", "it has no verdict there"
        if verdict.status == Status.CORRECT:
            return self.why_not_taken(verdict)
        status = verdict.status + (f" ({verdict.reason})" if verdict.reason else "")
        return "verdict", f"correct on one side, {status} on the other; {self.why_verdict()}"

    def why_no_candidate(self, candidates: Mapping[str, Sample]) -> Why:
        writers = {sample.generator for sample in candidates.values()}
        if self.row.generator and self.row.generator not in writers:
            others = _few(sorted(map(str, writers))) or "none"
            return "generator", f"written by {self.row.generator}, that side has {others}"
        if changed := _changed_names(SYNTHESIS, self.without, self.having):
            return "generator", f"synthesis settings differ: {_few(changed)}"
        return "candidate", ""

    def why_not_taken(self, verdict: Judged) -> Why:
        """A correct sample that curation had before it and that this criterion did not take."""
        there, here = self.rules("strategy")
        if there != here:
            return "strategy", f"{there} there, {here} here"
        if flags := self.without.excluded.get(self.row.candidate_id):
            return "flag", f"its reasoning is {flags}; {self.threshold('exclude_flags')[1]}"
        bound, other = self.rules(LOWER)
        if bound is not None and verdict.speedup_lower <= bound:
            if other != bound:
                return self.threshold(LOWER)
            lower = f"lower bound {verdict.speedup_lower:.3g} is not above {bound:g}"
            return "bound", f"{lower}; {self.why_verdict()}"
        match self.row.criterion:
            case "high_speedup":
                return self.why_not_fast(verdict)
            case "concise_and_fast":
                return self.why_outdone(verdict)
            case "single_operator":
                return self.why_not_added()
        return "unknown", f"no rule is known for the criterion {self.row.criterion}"

    def why_not_fast(self, verdict: Judged) -> Why:
        there, here = self.rules("min_speedup")
        if there is None or verdict.speedup > there:
            return "unknown", "it meets the rule there: curation's code may have changed"
        if here is not None and here < verdict.speedup:
            return self.threshold("min_speedup")
        other = "" if self.row.speedup is None else f", {self.row.speedup:.3g} on the other side"
        below = f"speedup {verdict.speedup:.3g} is not above {there:g}{other}"
        return "speedup", f"{below}; {self.why_verdict()}"

    def why_not_added(self) -> Why:
        """Single operators are added until their quota is met, one per task."""
        for rival in self.without.rows_by_task.get(self.row.task_id, ()):
            if rival.criterion == "single_operator":
                tokens = f"{rival.reasoning_tokens} tokens"
                return "outdone", f"{rival.candidate_id} was taken for this task ({tokens})"
        there, here = self.rules("single_operator_quota")
        if there != here:
            return self.threshold("single_operator_quota")
        return "quota", "single operators reached their share without it"

    def why_outdone(self, verdict: Judged) -> Why:
        """Another correct sample of the task is shorter or faster there. Named: the one that is so
        by the most."""
        tokens = (self.without.candidates or {})[self.row.candidate_id].reasoning_tokens or 0
        rivals = [
            (length >= tokens, length, -other.speedup, name)
            for name, length, other in self.without.pool.get(self.row.task_id, ())
            if name != self.row.candidate_id
            and (length < tokens or other.speedup > verdict.speedup)
        ]
        if not rivals:
            return "unknown", "no other sample is shorter or faster there"
        longer, length, slowness, name = min(rivals)
        ways = [] if longer else [f"shorter ({length:,} < {tokens:,} tokens)"]
        if -slowness > verdict.speedup:
            ways.append(f"faster ({-slowness:.3g} > {verdict.speedup:.3g})")
        return "outdone", f"{name} is {' and '.join(ways)}; {self.why_no_rival(name)}"

    def why_no_rival(self, name: str) -> str:
        """Why the rival did not stand in the way on the other side."""
        having = self.having
        if having.candidates is None or having.verdicts is None:
            return "why not on the other side is unknown"
        if name not in having.candidates:
            return "the other side does not have it"
        verdict = having.verdicts.get(name)
        if verdict is None or verdict.status != Status.CORRECT:
            return f"on the other side it is {verdict.status if verdict else 'not verified'}"
        if flags := having.excluded.get(name):
            return f"on the other side its reasoning, which is {flags}, excludes it"
        return f"on the other side both were timed otherwise: {self.why_verdict(name)}"

    def why_verdict(self, name: str | None = None) -> str:
        """What made two verdicts on one candidate differ, as far as the manifests tell."""
        sides = self.without, self.having
        devices = [side.fact(VERIFICATION, "device") for side in sides]
        if devices[0] != devices[1]:
            return f"another device ({devices[0]}, {devices[1]})"
        if None not in [side.config(VERIFICATION) for side in sides]:
            if changed := _changed_names(VERIFICATION, *sides):
                return f"the protocol differs: {_few(changed)}"
            known = [(side.verdicts or {}).get(name or self.row.candidate_id) for side in sides]
            keys = {verdict.key for verdict in known if verdict}
            if len(keys) == 2 and None not in keys:
                return "the verifier's code changed"
            if len(keys) == 1 and self.without.verdicts is not self.having.verdicts:
                return "measured again under the same conditions"
        return "why is unknown"


def _changed(before: Row, after: Row, old: Side, new: Side) -> SampleChange | None:
    """What is different of a sample that both sides have; None where nothing is."""
    name, same_criterion = before.candidate_id, before.criterion == after.criterion
    first, second = ((side.verdicts or {}).get(name) for side in (old, new))
    if (before.speedup, before.speedup_lower) != (after.speedup, after.speedup_lower):
        detail = f"speedup {_number(before.speedup)} to {_number(after.speedup)}"
        if first and second and first.speedup_upper and second.speedup_upper:
            upper = min(first.speedup_upper, second.speedup_upper)
            apart = upper < max(first.speedup_lower, second.speedup_lower)
            detail += " (the intervals do not meet)" if apart else " (the intervals meet)"
        if not same_criterion:
            detail += f", taken as {after.criterion} instead of {before.criterion}"
        why = _Case(after, old, new).why_verdict()
        return _change(after, ("verdict", f"{detail}; {why}"))
    if not same_criterion:
        criteria = f"{before.criterion} to {after.criterion}"
        if second is None:
            return _change(after, ("unknown", f"{criteria}; the verdicts are not there"))
        why = _Case(before, new, old).why_not_taken(second)[1] if new.candidates else ""
        return _change(after, ("criterion", "; ".join(filter(None, (criteria, why)))))
    if before.operator_kind != after.operator_kind:
        return _change(after, ("verdict", f"{before.operator_kind} to {after.operator_kind}"))
    return None


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


# -- tasks and settings ----------------------------------------------------------------------------


def _tasks(old: Side, new: Side, moved: Mapping[str, SampleChange]) -> Iterator[TaskChange]:
    for task_id in sorted(old.rows_by_task.keys() | new.rows_by_task.keys()):
        was, now = (side.rows_by_task.get(task_id, []) for side in (old, new))
        if why := _why_task(was, now, moved):
            counts = {"old_samples": len(was), "new_samples": len(now)}
            yield TaskChange(task_id=task_id, reason=why[0], detail=why[1], **counts)


def _why_task(
    was: Sequence[Row], now: Sequence[Row], moved: Mapping[str, SampleChange]
) -> Why | None:
    if not (was and now):
        changes = [moved[row.candidate_id] for row in was or now]
        reasons = Counter(change.reason for change in changes)
        reason = min(reasons, key=lambda each: (-reasons[each], each))
        details = (change.detail for change in changes if change.reason == reason)
        return reason, min(filter(None, details), default="")
    if {row.program for row in was} != {row.program for row in now}:
        return ANOTHER_PROGRAM
    before, after = ({row.candidate_id for row in rows} for rows in (was, now))
    gained, lost = len(after - before), len(before - after)
    return ("samples", f"{gained} gained, {lost} lost") if gained or lost else None


def _settings(old: Side, new: Side) -> Iterator[Setting]:
    for part in (TASKS, SYNTHESIS, VERIFICATION, CURATION, "tools"):
        before, after = (_texts(side.facts.get(part)) for side in (old, new))
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                yield Setting(name=f"{part}.{name}", old=before.get(name), new=after.get(name))


def _changed_names(stage: str, a: Side, b: Side) -> list[str]:
    """Names of the settings of a stage that differ."""
    first, second = (_texts(side.config(stage)).items() for side in (a, b))
    return sorted({name for name, _ in first ^ second})


def _texts(value: Mapping[str, Any] | None) -> dict[str, str]:
    return {name: str(item) for name, item in settings(value or {})}
