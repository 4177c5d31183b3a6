"""The verified candidates of one data set, as one record of snapshots."""

from __future__ import annotations

from collections.abc import Mapping

from kernels_eval.errors import UsageError
from kernels_eval.records import Record
from tasks.store.snapshot import Snapshot, SnapshotRef

STAGES: Mapping[str, tuple[str, ...]] = {
    "tasks": ("training-tasks", "tasks"),
    "candidates": ("synthesis", "improved"),
    "verdicts": ("verification",),
    "workloads": ("workloads",),
    "flags": ("trace-flags",),
    "profiles": ("kernel-profiles",),
}
"""The stages that may have written each snapshot of `Samples`; the first found counts."""


class Samples(Record):
    """Verified candidates, and what was measured of their tasks, reasoning and kernels."""

    tasks: SnapshotRef
    candidates: SnapshotRef
    verdicts: SnapshotRef
    workloads: SnapshotRef | None = None
    flags: SnapshotRef | None = None
    profiles: SnapshotRef | None = None

    @classmethod
    def above(cls, snapshot: Snapshot) -> Samples:
        """The samples that a finished snapshot, such as a training set, was made from.

        Raises UsageError where its tasks, candidates or verdicts are gone.
        """
        found = snapshots_above(snapshot)
        needed = [name for name, field in cls.model_fields.items() if field.is_required()]
        if missing := [name for name in needed if found[name] is None]:
            raise UsageError(
                f"the {' and '.join(missing)} that {snapshot.path} was made from are gone",
                "restore their snapshots, or refresh again",
            )
        return cls.model_validate({name: each and each.ref for name, each in found.items()})

    @property
    def snapshots(self) -> dict[str, SnapshotRef]:
        return {name: ref for name, ref in self if isinstance(ref, SnapshotRef)}


def snapshots_above(snapshot: Snapshot) -> dict[str, Snapshot | None]:
    """What a finished snapshot was made from, by the names of `STAGES`; None where it is gone."""
    return {name: snapshot.above(*stages) for name, stages in STAGES.items()}
