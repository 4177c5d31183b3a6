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

from kernels_eval.records import Record
from tasks.publishing.lineage import CURATION, SYNTHESIS, TASKS, VERIFICATION
from tasks.publishing.sides import Judged, Row, Side, read_side, share
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
    return diff_of(read_side(old, root), read_side(new, root))


def diff_of(old: Side, new: Side) -> RefreshDiff:
    """The same on sides that were read."""
    share(old, new)
    gained = [_absent(row, old, new) for name, row in new.rows.items() if name not in old.rows]
    lost = [_absent(row, new, old) for name, row in old.rows.items() if name not in new.rows]
    both = [_Case(row, new, old) for name, row in old.rows.items() if name in new.rows]
    changed = [found for case in both if (found := case.changed(new.rows[case.name]))]
    tasks = list(_tasks(old, new, {change.candidate_id: change for change in (*gained, *lost)}))
    return RefreshDiff(
        old=_summary(old),
        new=_summary(new),
        settings=tuple(_settings(old, new)),
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
    return SideSummary(
        label=side.label,
        created_at=str(side.facts.get("created_at") or "unknown"),
        rows=len(side.rows),
        tasks=len(side.rows_by_task),
    )


# -- why a sample is on one side only --------------------------------------------------------------


def _absent(row: Row, without: Side, having: Side) -> SampleChange:
    reason, detail = _Case(row, without, having).why_absent()
    return _change(row, reason, detail)


def _change(row: Row, reason: Reason, detail: str) -> SampleChange:
    return SampleChange(
        candidate_id=row.candidate_id,
        task_id=row.task_id,
        criterion=row.criterion,
        reason=reason,
        detail=detail,
    )


@dataclass(frozen=True)
class _Case:
    """A row that `having` has, and the side that lacks it or has it otherwise. The same questions
    whichever side is the older: lost, or gained."""

    row: Row
    without: Side
    having: Side

    @property
    def name(self) -> str:
        return self.row.candidate_id

    @property
    def rules(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The settings of the curation of both sides."""
        return self.without.config(CURATION) or {}, self.having.config(CURATION) or {}

    def threshold(self, name: str) -> str:
        here, there = self.rules
        return f"{name} is {here.get(name)} there and {there.get(name)} here"

    def why_verdict(self, candidate_id: str | None = None) -> str:
        return _why_verdict(candidate_id or self.name, self.without, self.having)

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
        if self.name not in without.candidates:
            return self.why_no_candidate()
        if without.verdicts is None:
            return "unknown", "the verdicts of that side are not there"
        verdict = without.verdict(self.name)
        if verdict is None:
            return "verdict", "it has no verdict there"
        if verdict.status == "correct":
            return self.why_not_taken(verdict)
        status = verdict.status + (f" ({verdict.reason})" if verdict.reason else "")
        return "verdict", f"correct on one side, {status} on the other; {self.why_verdict()}"

    def why_no_candidate(self) -> Why:
        writers = {sample.generator for sample in (self.without.candidates or {}).values()}
        if self.row.generator and self.row.generator not in writers:
            others = _few(sorted(map(str, writers))) or "none"
            return "generator", f"written by {self.row.generator}, that side has {others}"
        changed = _changed_names(self.without.config(SYNTHESIS), self.having.config(SYNTHESIS))
        if changed:
            return "generator", f"synthesis settings differ: {_few(changed)}"
        return "candidate", ""

    def why_not_taken(self, verdict: Judged) -> Why:
        """A correct sample that curation had before it and that this criterion did not take."""
        here, there = self.rules
        if here.get("strategy") != there.get("strategy"):
            return "strategy", f"{here.get('strategy')} there, {there.get('strategy')} here"
        if flags := self.without.excluded.get(self.name):
            return "flag", f"its reasoning is {flags}; {self.threshold('exclude_flags')}"
        bound = here.get(LOWER)
        if bound is not None and verdict.speedup_lower <= bound:
            if there.get(LOWER) != bound:
                return "threshold", self.threshold(LOWER)
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
        here, there = (rule.get("min_speedup") for rule in self.rules)
        if here is None or verdict.speedup > here:
            return "unknown", "it meets the rule there: curation's code may have changed"
        if there is not None and there < verdict.speedup:
            return "threshold", self.threshold("min_speedup")
        other = "" if self.row.speedup is None else f", {self.row.speedup:.3g} on the other side"
        below = f"speedup {verdict.speedup:.3g} is not above {here:g}{other}"
        return "speedup", f"{below}; {self.why_verdict()}"

    def why_not_added(self) -> Why:
        """Single operators are added until their quota is met, one a task."""
        here, there = (rule.get("single_operator_quota") for rule in self.rules)
        for rival in self.without.rows_by_task.get(self.row.task_id, {}).values():
            if rival.criterion == "single_operator":
                tokens = f"{rival.reasoning_tokens} tokens"
                return "outdone", f"{rival.candidate_id} was taken for this task ({tokens})"
        if here != there:
            return "threshold", self.threshold("single_operator_quota")
        return "quota", "single operators came to their share without it"

    def why_outdone(self, verdict: Judged) -> Why:
        """Another correct sample of the task is shorter or faster there. Named: the one that is so
        by the most."""
        tokens = (self.without.candidates or {})[self.name].reasoning_tokens or 0
        rivals = [
            (length >= tokens, length, -other.speedup, name)
            for name, length, other in self.without.correct_of(self.row.task_id)
            if name != self.name and (length < tokens or other.speedup > verdict.speedup)
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
        verdict = having.verdict(name)
        if verdict is None or verdict.status != "correct":
            return f"on the other side it is {verdict.status if verdict else 'not verified'}"
        if flags := having.excluded.get(name):
            return f"on the other side its reasoning, which is {flags}, keeps it out"
        return f"on the other side both were timed otherwise: {self.why_verdict(name)}"

    def changed(self, after: Row) -> SampleChange | None:
        """What is different of a sample that both sides have (`having` is the older one); None
        where nothing is."""
        before, criteria = self.row, f"{self.row.criterion} to {after.criterion}"
        same_criterion = before.criterion == after.criterion
        if (before.speedup, before.speedup_lower) != (after.speedup, after.speedup_lower):
            detail = f"speedup {_number(before.speedup)} to {_number(after.speedup)}"
            detail += self.intervals()
            if not same_criterion:
                detail += f", taken as {after.criterion} instead of {before.criterion}"
            why = _why_verdict(self.name, self.having, self.without)
            return _change(after, "verdict", f"{detail}; {why}")
        if not same_criterion:
            verdict = self.without.verdict(self.name)
            if verdict is None:
                return _change(after, "unknown", f"{criteria}; the verdicts are not there")
            detail = self.why_not_taken(verdict)[1] if self.without.candidates is not None else ""
            return _change(after, "criterion", f"{criteria}; {detail}" if detail else criteria)
        if before.operator_kind != after.operator_kind:
            detail = f"{before.operator_kind} to {after.operator_kind}"
            return _change(after, "verdict", detail)
        return None

    def intervals(self) -> str:
        """Whether the 95 % intervals have anything in common, where both are known."""
        first, second = self.having.verdict(self.name), self.without.verdict(self.name)
        if not (first and second and first.speedup_upper and second.speedup_upper):
            return ""
        lowest_upper = min(first.speedup_upper, second.speedup_upper)
        apart = lowest_upper < max(first.speedup_lower, second.speedup_lower)
        return " (the intervals do not meet)" if apart else " (the intervals meet)"


def _why_verdict(candidate_id: str, a: Side, b: Side) -> str:
    """What made two verdicts on one candidate differ, as far as the manifests tell."""
    devices = [side.fact(VERIFICATION, "device") for side in (a, b)]
    if devices[0] != devices[1]:
        return f"another device ({devices[0]}, {devices[1]})"
    first, second = a.config(VERIFICATION), b.config(VERIFICATION)
    if first is None or second is None:
        return "why is unknown"
    if changed := _changed_names(first, second):
        return f"the protocol differs: {_few(changed)}"
    keys = {verdict.key for side in (a, b) if (verdict := side.verdict(candidate_id))}
    if len(keys) == 2 and None not in keys:
        return "the verifier's code changed"
    if len(keys) == 1 and a.verdicts is not b.verdicts:
        return "measured again under the same conditions"
    return "why is unknown"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


# -- tasks and settings ----------------------------------------------------------------------------


def _tasks(old: Side, new: Side, moved: Mapping[str, SampleChange]) -> Iterator[TaskChange]:
    for task_id in sorted(old.rows_by_task.keys() | new.rows_by_task.keys()):
        was, now = (side.rows_by_task.get(task_id, {}) for side in (old, new))
        reason, detail = _why_task(was, now, moved)
        if reason:
            yield TaskChange(
                task_id=task_id,
                reason=reason,
                detail=detail,
                old_samples=len(was),
                new_samples=len(now),
            )


def _why_task(
    was: Mapping[str, Row], now: Mapping[str, Row], moved: Mapping[str, SampleChange]
) -> tuple[Reason | None, str]:
    if not (was and now):
        changes = [moved[name] for name in was or now]
        reasons = Counter(change.reason for change in changes)
        reason = min(reasons, key=lambda each: (-reasons[each], each))
        details = (change.detail for change in changes if change.reason == reason)
        return reason, min(filter(None, details), default="")
    if {row.program for row in was.values()} != {row.program for row in now.values()}:
        return ANOTHER_PROGRAM
    gained, lost = len(now.keys() - was.keys()), len(was.keys() - now.keys())
    return ("samples", f"{gained} gained, {lost} lost") if gained or lost else (None, "")


def _settings(old: Side, new: Side) -> Iterator[Setting]:
    for part in (TASKS, SYNTHESIS, VERIFICATION, CURATION, "tools"):
        before, after = (dict(_flat(side.facts.get(part) or {})) for side in (old, new))
        for name in sorted(before.keys() | after.keys()):
            if before.get(name) != after.get(name):
                yield Setting(name=f"{part}.{name}", old=before.get(name), new=after.get(name))


def _changed_names(first: Mapping[str, Any] | None, second: Mapping[str, Any] | None) -> list[str]:
    """Names of the settings that differ."""
    return sorted({name for name, _ in {*_flat(first or {})} ^ {*_flat(second or {})}})


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Settings as text, by dotted name. An empty list is a setting that is not used."""
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{name}.")
        elif item not in (None, [], ()):
            yield f"{prefix}{name}", str(item)
