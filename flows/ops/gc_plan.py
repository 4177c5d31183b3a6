"""Which snapshots stay and which go. Pure: the decision is a function of what is there, of who
refers to it, and of the time.

Guarantees: whatever stays, every snapshot that it names stays too, directly or through others; each
snapshot has exactly one reason; what goes is ordered so that nothing goes before what was made of
it, and a sweep that is killed in between leaves a root that is whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from pydantic import Field

from flows.ops.gc_inventory import Stored
from kernels_eval.records import Record

DAY_S = 86_400.0
CURATION = "curation"
OUTCOMES = ("analysis", "training", "benchmark")
"""Stages whose snapshots belong to the refresh that they were made of, although no training set
names them."""


class Keep(Record):
    """How much is kept that nothing refers to."""

    refreshes: int = Field(default=5, ge=0, description="training sets of so many newest refreshes")
    younger_than_days: float = Field(default=7.0, ge=0)
    unfinished_days: float = Field(
        default=14.0,
        ge=0,
        description="unfinished snapshots in which nothing changed for so long may go",
    )


class Decision(Record):
    """One snapshot: does it stay, and why."""

    snapshot: Stored
    stays: bool
    reason: str


def decide(
    there: Iterable[Stored],
    references: Mapping[str, str],
    keep: Keep,
    now_s: float,
    released: frozenset[str] = frozenset(),
) -> list[Decision]:
    """A decision for each snapshot; those that go come last, what was made of others before these.

    `references` maps fingerprints to who refers to them. `released` are fingerprints of which a
    deleted MLflow run says that nobody wants them any more: a report that was made of one, and that
    nothing else refers to, is no reason to keep anything.
    """
    all_of = list(there)
    by_name: dict[str, list[Stored]] = {}
    for snapshot in all_of:
        by_name.setdefault(snapshot.fingerprint, []).append(snapshot)

    reasons: dict[str, str] = {}

    def hold(snapshot: Stored, reason: str) -> None:
        """This one and all that it names, whatever stage they are of."""
        waiting = [(snapshot, reason)]
        while waiting:
            one, why = waiting.pop()
            if one.place in reasons:
                continue
            reasons[one.place] = why
            waiting += [
                (above, f"{one.place[:-20]} needs it")
                for name in one.names
                for above in by_name.get(name, ())
            ]

    for name in sorted(references):
        for snapshot in by_name.get(name, ()):
            hold(snapshot, references[name])
    for snapshot in all_of:
        if snapshot.has_report and not released & set(snapshot.upstream):
            hold(snapshot, "it holds the report of a finished run")
        if not snapshot.finished:
            if snapshot.written_by:
                hold(snapshot, f"unfinished, and {snapshot.written_by}")
            elif snapshot.changed_s > now_s - keep.unfinished_days * DAY_S:
                hold(snapshot, f"unfinished, and changed in the last {keep.unfinished_days:g} days")
        elif snapshot.changed_s > now_s - keep.younger_than_days * DAY_S:
            hold(snapshot, f"younger than {keep.younger_than_days:g} days")
    newest = _newest_refreshes(all_of, keep.refreshes)
    for snapshot in newest:
        hold(snapshot, f"of the newest {keep.refreshes} refreshes")
    _hold_outcomes(all_of, newest, by_name, hold)

    stay = [
        Decision(snapshot=one, stays=True, reason=reasons[one.place])
        for one in all_of
        if one.place in reasons
    ]
    gone = [one for one in all_of if one.place not in reasons]
    return stay + [
        Decision(snapshot=one, stays=False, reason=_why_gone(one, keep))
        for one in _products_first(gone)
    ]


def _newest_refreshes(there: list[Stored], count: int) -> list[Stored]:
    """Training sets of the newest refreshes: sets of the same upstreams, by several strategies, are
    one refresh."""
    refreshes: dict[frozenset[str], list[Stored]] = {}
    for snapshot in there:
        if snapshot.stage == CURATION and snapshot.finished:
            refreshes.setdefault(frozenset(snapshot.upstream), []).append(snapshot)
    ranked = sorted(
        refreshes.values(),
        key=lambda sets: max((one.changed_s, one.fingerprint) for one in sets),
        reverse=True,
    )
    return [snapshot for sets in ranked[:count] for snapshot in sets]


def _hold_outcomes(
    there: list[Stored],
    newest: list[Stored],
    by_name: Mapping[str, list[Stored]],
    hold: Callable[[Stored, str], None],
) -> None:
    """What was learned from the newest refreshes: an outcome all of whose upstreams are theirs, or
    outcomes of theirs."""
    theirs: set[str] = set()
    waiting = list(newest)
    while waiting:
        one = waiting.pop()
        if one.fingerprint not in theirs:
            theirs.add(one.fingerprint)
            waiting += [above for name in one.names for above in by_name.get(name, ())]
    outcomes = [one for one in there if one.stage in OUTCOMES and one.finished and one.upstream]
    found = True
    while found:
        found = [
            one
            for one in outcomes
            if one.fingerprint not in theirs and theirs.issuperset(one.upstream)
        ]
        for one in found:
            theirs.add(one.fingerprint)
            hold(one, "made of one of the newest refreshes")


def _why_gone(one: Stored, keep: Keep) -> str:
    if one.finished:
        return "nothing refers to it"
    return f"unfinished, and nothing changed in it for {keep.unfinished_days:g} days"


def _products_first(gone: list[Stored]) -> list[Stored]:
    """Depth first over what each names, upstreams last. Where two name each other (no stage does
    that) the order between them is any."""
    by_name: dict[str, list[Stored]] = {}
    for one in gone:
        by_name.setdefault(one.fingerprint, []).append(one)
    ordered: list[Stored] = []
    seen: set[str] = set()
    for start in sorted(gone, key=lambda one: one.place):
        stack = [(start, False)]
        while stack:
            one, done = stack.pop()
            if done:
                ordered.append(one)
            elif one.place not in seen:
                seen.add(one.place)
                stack.append((one, True))
                stack += [
                    (above, False) for name in sorted(one.names) for above in by_name.get(name, ())
                ]
    return ordered[::-1]
