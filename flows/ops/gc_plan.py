"""Which snapshots stay and which go: a pure function of what exists, who refers to it, and the
time.

Guarantees: whatever stays, every snapshot that it names stays too, directly or through others; each
snapshot has exactly one reason; what goes is ordered so that a snapshot goes after everything made
from it: a collection that is killed halfway leaves a consistent root.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from pydantic import Field

from flows.ops.gc_inventory import Stored
from kernels_eval.records import Record

DAY_S = 86_400.0
CURATION = "curation"
OUTCOMES = ("analysis", "training", "benchmark")
"""Stages whose snapshots belong to the refresh they were made from, although no training set names
them."""


class Keep(Record):
    """How much is kept that nothing refers to."""

    refreshes: int = Field(default=5, ge=0, description="keep the training sets of N refreshes")
    younger_than_days: float = Field(default=7.0, ge=0)
    unfinished_days: float = Field(
        default=14.0, ge=0, description="keep unfinished snapshots that changed since"
    )


class Decision(Record):
    """One snapshot: whether it stays, and why."""

    snapshot: Stored
    stays: bool
    reason: str


class Lineage:
    """The snapshots of a root by fingerprint, and what each was made from."""

    def __init__(self, snapshots: Iterable[Stored]) -> None:
        self.all = list(snapshots)
        self.named: dict[str, list[Stored]] = defaultdict(list)
        for one in self.all:
            self.named[one.fingerprint].append(one)

    def above(self, one: Stored) -> list[Stored]:
        """The snapshots that this one names."""
        return [above for name in sorted(one.names) for above in self.named.get(name, ())]


def decide(
    there: Iterable[Stored],
    references: Mapping[str, str],
    keep: Keep,
    now_s: float,
    released: frozenset[str] = frozenset(),
) -> list[Decision]:
    """A decision for each snapshot; those that go come last, products before their sources.

    `references` maps fingerprints to who refers to them. `released` are fingerprints that only
    deleted MLflow runs name: a report made from one is no reason to keep anything.
    """
    lineage = Lineage(there)
    reasons: dict[str, str] = {}
    for start, reason in _kept(lineage, references, keep, now_s, released):
        waiting = [(start, reason)]
        while waiting:
            one, why = waiting.pop()
            if one.place not in reasons:
                reasons[one.place] = why
                needed = f"{one.place[:-20]} needs it"
                waiting += [(above, needed) for above in lineage.above(one)]
    unused = {
        True: "nothing refers to it",
        False: f"unfinished, and unchanged for {keep.unfinished_days:g} days",
    }
    stay = [one for one in lineage.all if one.place in reasons]
    going = _products_first([one for one in lineage.all if one.place not in reasons])
    return [Decision(snapshot=one, stays=True, reason=reasons[one.place]) for one in stay] + [
        Decision(snapshot=one, stays=False, reason=unused[one.finished]) for one in going
    ]


def _kept(
    lineage: Lineage,
    references: Mapping[str, str],
    keep: Keep,
    now_s: float,
    released: frozenset[str],
) -> Iterator[tuple[Stored, str]]:
    """Snapshots that stay on their own account, each with its reason; the first reason counts."""
    for name in sorted(references):
        yield from ((one, references[name]) for one in lineage.named.get(name, ()))
    for one in lineage.all:
        if one.has_report and not released & set(one.upstream):
            yield one, "it holds the report of a finished run"
        if one.finished:
            if now_s - one.changed_s < keep.younger_than_days * DAY_S:
                yield one, f"younger than {keep.younger_than_days:g} days"
        elif one.written_by:
            yield one, f"unfinished, and {one.written_by}"
        elif now_s - one.changed_s < keep.unfinished_days * DAY_S:
            yield one, f"unfinished, and changed in the last {keep.unfinished_days:g} days"
    newest = _newest_refreshes(lineage, keep.refreshes)
    yield from ((one, f"of the newest {keep.refreshes} refreshes") for one in newest)
    yield from (
        (one, "made from one of the newest refreshes") for one in _outcomes(lineage, newest)
    )


def _newest_refreshes(lineage: Lineage, count: int) -> list[Stored]:
    """Training sets of the newest refreshes: sets of the same upstreams, by several strategies, are
    one refresh."""
    refreshes: dict[frozenset[str], list[Stored]] = defaultdict(list)
    for one in lineage.all:
        if one.stage == CURATION and one.finished:
            refreshes[frozenset(one.upstream)].append(one)
    ranked = sorted(
        refreshes.values(),
        key=lambda sets: max((one.changed_s, one.fingerprint) for one in sets),
        reverse=True,
    )
    return [one for sets in ranked[:count] for one in sets]


def _outcomes(lineage: Lineage, newest: list[Stored]) -> Iterator[Stored]:
    """What was learned from the newest refreshes: outcomes all of whose upstreams are theirs, or
    outcomes of theirs."""
    theirs: set[str] = set()
    waiting = list(newest)
    while waiting:
        one = waiting.pop()
        if one.fingerprint not in theirs:
            theirs.add(one.fingerprint)
            waiting += lineage.above(one)
    candidates = [
        one for one in lineage.all if one.stage in OUTCOMES and one.finished and one.upstream
    ]
    while found := [
        one
        for one in candidates
        if one.fingerprint not in theirs and theirs.issuperset(one.upstream)
    ]:
        theirs.update(one.fingerprint for one in found)
        yield from found


def _products_first(going: list[Stored]) -> list[Stored]:
    """What was made from others before these. Snapshots that name each other (no stage makes such)
    come in any order."""
    lineage = Lineage(sorted(going, key=lambda one: one.place))
    by_place = {one.place: one for one in lineage.all}
    graph = {one.place: [above.place for above in lineage.above(one)] for one in lineage.all}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError:
        order = list(by_place)
    return [by_place[place] for place in reversed(order)]
