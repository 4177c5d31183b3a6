"""What changed between two refreshes of a curated set, and why: tasks and samples gained, lost and
changed.

Guarantees: every reason follows from what the two sides hold (rows, manifests, verdicts); where
they do not tell, it is `unknown`. A reason is the first that applies, in the order of the line:
task, program, candidate, verdict, strategy, threshold, rule. Does not guarantee that a change had
no second cause, and cannot see changes of curation's own code other than by its version.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from kernels_eval.records import Record
from tasks.publishing.lineage import CURATION, SYNTHESIS, TASKS, VERIFICATION
from tasks.publishing.sides import Row, Side, Verdict, read_side, share
from tasks.store.snapshot import SnapshotRef

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
THRESHOLDS = ("min_speedup", "single_operator_quota", "require_speedup_lower_above")


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
    """A setting, a version or a count of the line that differs, as text; None where a side does not
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
        return dict(
            sorted(
                Counter(change.reason for change in changes).items(),
                key=lambda pair: (-pair[1], pair[0]),
            )
        )


def diff(old: SnapshotRef | Path, new: SnapshotRef | Path, root: str | None = None) -> RefreshDiff:
    """Compare two curated snapshots or published folders. For a folder, `root` is where its
    snapshots may still be.

    Raises UsageError for what is neither.
    """
    return diff_of(read_side(old, root), read_side(new, root))


def diff_of(old: Side, new: Side) -> RefreshDiff:
    """The same on sides that were read."""
    share(old, new)
    gained = [
        _absent(new.rows[name], old, new) for name in sorted(new.rows.keys() - old.rows.keys())
    ]
    lost = [_absent(old.rows[name], new, old) for name in sorted(old.rows.keys() - new.rows.keys())]
    changed = [
        found
        for name in sorted(old.rows.keys() & new.rows.keys())
        if (found := _changed(old.rows[name], new.rows[name], old, new))
    ]
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
    tasks = len({row.task_id for row in side.rows.values()})
    return SideSummary(
        label=side.label,
        created_at=str(side.facts.get("created_at") or "unknown"),
        rows=len(side.rows),
        tasks=tasks,
    )


# -- why a sample is on one side only --------------------------------------------------------------


def _absent(row: Row, without: Side, having: Side) -> SampleChange:
    reason, detail = _why_absent(row, without, having)
    return SampleChange(
        candidate_id=row.candidate_id,
        task_id=row.task_id,
        criterion=row.criterion,
        reason=reason,
        detail=detail,
    )


def _why_absent(row: Row, without: Side, having: Side) -> tuple[Reason, str]:
    """Why `without` lacks a row that `having` has. The same question whichever side is the older:
    lost, or gained."""
    if without.tasks is not None:
        if row.task_id not in without.tasks:
            return "task", ""
        if without.tasks[row.task_id] != row.program:
            return "program", "the same task_id names another program"
    if without.candidates is None:
        return "unknown", "the candidates of that side are not there"
    if row.candidate_id not in without.candidates:
        return _why_no_candidate(row, without, having)
    if without.verdicts is None:
        return "unknown", "the verdicts of that side are not there"
    verdict = without.verdicts.get(row.candidate_id)
    if verdict is None:
        return "verdict", "it has no verdict there"
    if verdict.status != "correct":
        why = verdict.status + (f" ({verdict.reason})" if verdict.reason else "")
        return (
            "verdict",
            (
                f"correct on one side, {why} on the other;"
                f" {_why_verdict(row.candidate_id, without, having)}"
            ),
        )
    return _why_not_taken(row, row.criterion, verdict, without, having)


def _why_no_candidate(row: Row, without: Side, having: Side) -> tuple[Reason, str]:
    writers = {generator for _, _, generator in (without.candidates or {}).values()}
    if row.generator and row.generator not in writers:
        return (
            "generator",
            (
                f"written by {row.generator}, that side has"
                f" {_few(sorted(map(str, writers))) or 'none'}"
            ),
        )
    changed = [
        name for name, _, _ in _differences(without.config(SYNTHESIS), having.config(SYNTHESIS))
    ]
    return (
        ("generator", f"synthesis settings differ: {_few(changed)}")
        if changed
        else ("candidate", "")
    )


def _why_verdict(candidate_id: str, a: Side, b: Side) -> str:
    """What made two verdicts on one candidate differ, as far as the manifests tell."""
    if a.told(VERIFICATION, "device") != b.told(VERIFICATION, "device"):
        return (
            f"another device ({a.told(VERIFICATION, 'device')}, {b.told(VERIFICATION, 'device')})"
        )
    first, second = a.config(VERIFICATION), b.config(VERIFICATION)
    if first is None or second is None:
        return "why is unknown"
    if changed := [name for name, _, _ in _differences(first, second)]:
        return f"the protocol differs: {_few(changed)}"
    keys = {
        side.verdicts[candidate_id].key
        for side in (a, b)
        if side.verdicts and candidate_id in side.verdicts
    }
    if len(keys) == 2 and None not in keys:
        return "the verifier's code changed"
    return (
        "measured again under the same conditions"
        if len(keys) == 1 and a.verdicts is not b.verdicts
        else "why is unknown"
    )


def _why_not_taken(
    row: Row, criterion: str, verdict: Verdict, without: Side, having: Side
) -> tuple[Reason, str]:
    """A correct sample that curation had before it and that this criterion did not take."""
    here, there = without.config(CURATION) or {}, having.config(CURATION) or {}
    if here.get("strategy") != there.get("strategy"):
        return "strategy", f"{here.get('strategy')} there, {there.get('strategy')} here"
    if flags := without.excluded.get(row.candidate_id):
        return "flag", f"its reasoning is {flags}; {_threshold('exclude_flags', here, there)}"
    bound = here.get("require_speedup_lower_above")
    if bound is not None and verdict.speedup_lower <= bound:
        if there.get("require_speedup_lower_above") != bound:
            return "threshold", _threshold("require_speedup_lower_above", here, there)
        return (
            "bound",
            (
                f"lower bound {verdict.speedup_lower:.3g} is not above {bound:g};"
                f" {_why_verdict(row.candidate_id, without, having)}"
            ),
        )
    if criterion == "high_speedup":
        return _why_not_fast(row, verdict, without, having)
    if criterion == "concise_and_fast":
        return _why_outdone(row, verdict, without, having)
    if criterion == "single_operator":
        rivals = [
            other for other in without.rows_of(row.task_id) if other.criterion == "single_operator"
        ]
        if rivals:
            return (
                "outdone",
                (
                    f"{rivals[0].candidate_id} was taken for this task"
                    f" ({rivals[0].reasoning_tokens} tokens)"
                ),
            )
        if here.get("single_operator_quota") != there.get("single_operator_quota"):
            return "threshold", _threshold("single_operator_quota", here, there)
        return "quota", "single operators came to their share without it"
    return "unknown", f"no rule is known for the criterion {criterion}"


def _why_not_fast(row: Row, verdict: Verdict, without: Side, having: Side) -> tuple[Reason, str]:
    here, there = without.config(CURATION) or {}, having.config(CURATION) or {}
    limit, other = here.get("min_speedup"), there.get("min_speedup")
    if limit is None or verdict.speedup > limit:
        return "unknown", "it meets the rule there: curation's code may have changed"
    if other is not None and other < verdict.speedup:
        return "threshold", _threshold("min_speedup", here, there)
    measured = "" if row.speedup is None else f", {row.speedup:.3g} on the other side"
    why = _why_verdict(row.candidate_id, without, having)
    return "speedup", f"speedup {verdict.speedup:.3g} is not above {limit:g}{measured}; {why}"


def _why_outdone(row: Row, verdict: Verdict, without: Side, having: Side) -> tuple[Reason, str]:
    """Another correct sample of the task is shorter or faster there. Named: the one that is so by
    the most."""
    tokens = (without.candidates or {})[row.candidate_id][1] or 0
    rivals = [
        (name, length, other)
        for name, length, other in without.correct_of(row.task_id)
        if name != row.candidate_id and (length < tokens or other.speedup > verdict.speedup)
    ]
    if not rivals:
        return "unknown", "no other sample is shorter or faster there"
    name, length, other = min(
        rivals, key=lambda rival: (rival[1] >= tokens, rival[1], -rival[2].speedup, rival[0])
    )
    ways = [f"shorter ({length:,} < {tokens:,} tokens)"] if length < tokens else []
    ways += (
        [f"faster ({other.speedup:.3g} > {verdict.speedup:.3g})"]
        if other.speedup > verdict.speedup
        else []
    )
    return "outdone", f"{name} is {' and '.join(ways)}; {_why_no_rival(name, without, having)}"


def _why_no_rival(name: str, without: Side, having: Side) -> str:
    """Why the rival did not stand in the way on the other side."""
    if having.candidates is None or having.verdicts is None:
        return "why not on the other side is unknown"
    if name not in having.candidates:
        return "the other side does not have it"
    verdict = having.verdicts.get(name)
    if verdict is None or verdict.status != "correct":
        return f"on the other side it is {verdict.status if verdict else 'not verified'}"
    if flags := having.excluded.get(name):
        return f"on the other side its reasoning, which is {flags}, keeps it out"
    return f"on the other side both were timed otherwise: {_why_verdict(name, without, having)}"


def _few(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def _threshold(name: str, here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    return f"{name} is {here.get(name)} there and {there.get(name)} here"


# -- samples on both sides, tasks, settings --------------------------------------------------------


def _changed(before: Row, after: Row, old: Side, new: Side) -> SampleChange | None:
    """What is different of a sample that both sides have; None where nothing is."""
    told = {
        "candidate_id": after.candidate_id,
        "task_id": after.task_id,
        "criterion": after.criterion,
    }
    if before.speedup != after.speedup or before.speedup_lower != after.speedup_lower:
        numbers = (
            f"speedup {_number(before.speedup)} to"
            f" {_number(after.speedup)}{_beyond(after.candidate_id, old, new)}"
        )
        taken = (
            ""
            if before.criterion == after.criterion
            else f", taken as {after.criterion} instead of {before.criterion}"
        )
        return SampleChange(
            reason="verdict",
            detail=f"{numbers}{taken}; {_why_verdict(after.candidate_id, old, new)}",
            **told,
        )
    if before.criterion != after.criterion:
        verdict = (new.verdicts or {}).get(after.candidate_id)
        reason, detail = (
            ("unknown", "the verdicts are not there") if verdict is None else ("criterion", "")
        )
        if verdict is not None and new.candidates is not None:
            _, detail = _why_not_taken(before, before.criterion, verdict, new, old)
        return SampleChange(
            reason=reason,
            detail=f"{before.criterion} to {after.criterion}" + (f"; {detail}" if detail else ""),
            **told,
        )
    if before.operator_kind != after.operator_kind:
        return SampleChange(
            reason="verdict", detail=f"{before.operator_kind} to {after.operator_kind}", **told
        )
    return None


def _number(value: float | None) -> str:
    return "unknown" if value is None else f"{value:.3g}"


def _beyond(candidate_id: str, old: Side, new: Side) -> str:
    """Do the 95 % intervals have nothing in common? Said only where both are known."""
    first, second = (old.verdicts or {}).get(candidate_id), (new.verdicts or {}).get(candidate_id)
    if not first or not second or not first.speedup_upper or not second.speedup_upper:
        return ""
    apart = first.speedup_upper < second.speedup_lower or second.speedup_upper < first.speedup_lower
    return " (the intervals do not meet)" if apart else " (the intervals meet)"


def _tasks(old: Side, new: Side, moved: Mapping[str, SampleChange]) -> Iterator[TaskChange]:
    before, after = _by_task(old), _by_task(new)
    for task_id in sorted(before.keys() | after.keys()):
        was, now = before.get(task_id, {}), after.get(task_id, {})
        counts = {"task_id": task_id, "old_samples": len(was), "new_samples": len(now)}
        if not was or not now:
            reasons = Counter(moved[name].reason for name in was or now)
            reason = min(reasons, key=lambda name: (-reasons[name], name))
            details = sorted(
                {
                    moved[name].detail
                    for name in was or now
                    if moved[name].reason == reason and moved[name].detail
                }
            )
            yield TaskChange(reason=reason, detail=details[0] if details else "", **counts)
        elif {row.program for row in was.values()} != {row.program for row in now.values()}:
            yield TaskChange(
                reason="program", detail="the same task_id names another program", **counts
            )
        elif was.keys() != now.keys():
            detail = f"{len(now.keys() - was.keys())} gained, {len(was.keys() - now.keys())} lost"
            yield TaskChange(reason="samples", detail=detail, **counts)


def _by_task(side: Side) -> dict[str, dict[str, Row]]:
    found: dict[str, dict[str, Row]] = {}
    for name, row in side.rows.items():
        found.setdefault(row.task_id, {})[name] = row
    return found


def _settings(old: Side, new: Side) -> Iterator[Setting]:
    for stage in (TASKS, SYNTHESIS, VERIFICATION, CURATION):
        first, second = old.facts.get(stage), new.facts.get(stage)
        for name, before, after in _differences(first, second):
            yield Setting(name=f"{stage}.{name}", old=before, new=after)
    for name, before, after in _differences(old.facts.get("tools"), new.facts.get("tools")):
        yield Setting(name=f"tools.{name}", old=before, new=after)


def _differences(
    first: Mapping[str, Any] | None, second: Mapping[str, Any] | None
) -> list[tuple[str, str | None, str | None]]:
    """Names and both values, as text, of what differs."""
    before, after = dict(_flat(first or {})), dict(_flat(second or {}))
    return [
        (name, before.get(name), after.get(name))
        for name in sorted({*before, *after})
        if before.get(name) != after.get(name)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for name, item in value.items():
        if isinstance(item, Mapping):
            yield from _flat(item, f"{prefix}{name}.")
        elif item not in (None, [], ()):  # a list that is empty is a key that is not used
            yield f"{prefix}{name}", str(item)
