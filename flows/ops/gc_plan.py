"""Which snapshots stay and which go: a pure function of what exists, who refers to it, and the
time.

Guarantees: whatever stays, every snapshot that it names stays too, directly or through others; each
snapshot has exactly one reason; what goes is ordered so that a snapshot goes after everything made
from it: a collection that is killed halfway leaves a consistent root.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from graphlib import CycleError, TopologicalSorter

from pydantic import NonNegativeFloat, NonNegativeInt

from flows.ops.gc_inventory import Stored
from kernels_eval.grouping import grouped
from kernels_eval.records import Record

DAY_S = 86_400.0
OUTCOMES = ("analysis", "training", "benchmark")
"""Stages whose snapshots belong to the refresh they were made from, although no training set names
them."""
Sources = Mapping[str, list[Stored]]
"""Place of a snapshot -> the snapshots that it names."""


class Keep(Record):
    """How much is kept that nothing refers to."""

    refreshes: NonNegativeInt = 5
    """keep the training sets of N refreshes"""
    younger_than_days: NonNegativeFloat = 7.0
    unfinished_days: NonNegativeFloat = 14.0
    """keep unfinished snapshots that changed since"""


class Decision(Record):
    """One snapshot: whether it stays, and why."""

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
    """A decision for each snapshot; those that go come last, products before their sources.

    `references` maps fingerprints to who refers to them. `released` are fingerprints that only
    deleted MLflow runs name: a report made from one is no reason to keep anything.
    """
    snapshots = list(there)
    sources = _sources(snapshots)
    reasons: dict[str, str] = {}
    waiting = [
        *_of_refreshes(snapshots, sources, keep.refreshes),
        *_by_themselves(snapshots, keep, now_s, released),
        *((one, references[one.fingerprint]) for one in snapshots if one.fingerprint in references),
    ]
    while waiting:  # the last one is taken first: a reference is the best reason
        one, why = waiting.pop()
        if one.place not in reasons:
            reasons[one.place] = why
            waiting += [(source, f"{one.place[:-20]} needs it") for source in sources[one.place]]
    unused = f"unfinished, and unchanged for {keep.unfinished_days:g} days"
    stay = [one for one in snapshots if one.place in reasons]
    going = _products_first([one for one in snapshots if one.place not in reasons])
    return [Decision(snapshot=one, stays=True, reason=reasons[one.place]) for one in stay] + [
        Decision(
            snapshot=one, stays=False, reason="nothing refers to it" if one.finished else unused
        )
        for one in going
    ]


def _sources(snapshots: Iterable[Stored]) -> Sources:
    named = grouped((one.fingerprint, one) for one in snapshots)
    return {
        one.place: [source for name in sorted(one.names) for source in named.get(name, ())]
        for one in snapshots
    }


def _by_themselves(
    snapshots: list[Stored], keep: Keep, now_s: float, released: frozenset[str]
) -> Iterator[tuple[Stored, str]]:
    """Snapshots that stay on their own account, each with its reason."""
    for one in snapshots:
        age_days = (now_s - one.changed_s) / DAY_S
        if one.finished and age_days < keep.younger_than_days:
            yield one, f"younger than {keep.younger_than_days:g} days"
        if one.has_report and not released & set(one.upstream):
            yield one, "it holds the report of a finished run"
        if one.written_by:
            yield one, f"unfinished, and {one.written_by}"
        elif not one.finished and age_days < keep.unfinished_days:
            yield one, f"unfinished, and changed in the last {keep.unfinished_days:g} days"


def _of_refreshes(
    snapshots: list[Stored], sources: Sources, count: int
) -> Iterator[tuple[Stored, str]]:
    """Outcomes of the newest refreshes, that is with all upstreams of theirs or outcomes of theirs,
    and the training sets: sets of the same upstreams, by several strategies, are one refresh."""
    sets = (one for one in snapshots if one.stage == "curation" and one.finished)
    refreshes = grouped((frozenset(one.upstream), one) for one in sets)
    ranked = sorted(
        refreshes.values(),
        key=lambda sets: max((one.changed_s, one.fingerprint) for one in sets),
        reverse=True,
    )
    newest = [one for sets in ranked[:count] for one in sets]
    theirs: set[str] = set()
    waiting = list(newest)
    while waiting:
        one = waiting.pop()
        if one.fingerprint not in theirs:
            theirs.add(one.fingerprint)
            waiting += sources[one.place]
    outcomes = [one for one in snapshots if one.stage in OUTCOMES and one.finished and one.upstream]
    while found := [
        one for one in outcomes if one.fingerprint not in theirs and theirs.issuperset(one.upstream)
    ]:
        theirs.update(one.fingerprint for one in found)
        yield from ((one, "made from one of the newest refreshes") for one in found)
    yield from ((one, f"of the newest {count} refreshes") for one in newest)


def _products_first(going: list[Stored]) -> list[Stored]:
    """What was made from others before these. Snapshots that name each other (no stage makes such)
    come in any order."""
    by_place = {one.place: one for one in sorted(going, key=lambda one: one.place)}
    sources = _sources(by_place.values())
    graph = {place: [source.place for source in sources[place]] for place in by_place}
    try:
        order = list(TopologicalSorter(graph).static_order())
    except CycleError:
        order = list(by_place)
    return [by_place[place] for place in reversed(order)]
