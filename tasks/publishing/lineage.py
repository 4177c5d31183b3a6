"""A curated snapshot's upstreams and publishable settings. `facts` returns no local path, server
address or key location; a model configured by path shows its path."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Row
from tasks.reporting.choice import CHOICE
from tasks.samples import snapshots_above
from tasks.sources.hub import is_hub_id
from tasks.store import Snapshot, SnapshotRef, snapshots
from tasks.store.lookup import find_snapshot, newest_first

CURATION, VERIFICATION, SYNTHESIS, TASKS = "curation", "verification", "synthesis", "tasks"
ANALYSIS = "analysis"
CHOSEN = "training-tasks"
"""The stage that chooses among the source's tasks."""
DEFAULT_STRATEGY = "concur"
PUBLIC_SETTINGS = {
    VERIFICATION: ("eval",),
    SYNTHESIS: ("sampler", "samples_per_task", "sampling", "turns", "refine_below_speedup"),
    TASKS: ("source", "split", "levels", "limit"),
}
"""Settings that may be published. Of the curation all are: they are the rule."""
PUBLIC_FACTS = ("device", "language", "status_counts", "generator", "turn_counts")


@dataclass(frozen=True)
class Lineage:
    """A finished curated snapshot and its existing upstreams."""

    curated: Snapshot
    manifest: Json
    verdicts: Snapshot | None = None
    candidates: Snapshot | None = None
    tasks: Snapshot | None = None
    workloads: Snapshot | None = None
    flags: Snapshot | None = None
    profiles: Snapshot | None = None

    @property
    def strategy(self) -> str:
        return str((self.manifest.get("config") or {}).get("strategy") or DEFAULT_STRATEGY)


def lineage(ref: SnapshotRef) -> Lineage:
    """A curated snapshot's lineage. Raises UsageError if it is unfinished or of another stage."""
    if ref.stage != CURATION:
        raise UsageError(
            f"{ref.stage}/{ref.fingerprint} is no curated set",
            f"give a snapshot of the stage {CURATION}",
        )
    snapshot = ref.open()
    return Lineage(snapshot, snapshot.manifest, **snapshots_above(snapshot))


def analysis_of(line: Lineage) -> Snapshot | None:
    if line.verdicts is None or line.candidates is None:
        return None
    made_from = [line.verdicts.fingerprint, line.candidates.fingerprint]
    analyses = newest_first(line.curated.root, ANALYSIS)
    return next((each for each in analyses if each.manifest.get("upstream") == made_from), None)


def find_curated(root: str, name: str | None = None) -> SnapshotRef:
    """A curated snapshot by directory or, under `root`, by a prefix of its fingerprint; by default
    the newest finished, of `concur` if possible. Raises UsageError where none or several match."""
    if name:
        return find_snapshot(root, name, CURATION)
    sets = newest_first(root, CURATION)
    if not sets:
        hint = (
            "its curation is unfinished: run `concur run` again"
            if snapshots(root, CURATION)
            else "run `concur run` first, or give --root"
        )
        raise UsageError(f"there is no finished curated set under {root}", hint)
    default = [
        each
        for each in sets
        if (each.manifest.get("config") or {}).get("strategy") == DEFAULT_STRATEGY
    ]
    return (default or sets)[0].ref


def facts(line: Lineage) -> Json:
    above = {VERIFICATION: line.verdicts, SYNTHESIS: line.candidates, TASKS: line.tasks}
    return {
        "created_at": line.manifest["created_at"],
        "tools": line.manifest.get("tools") or {},
        CURATION: {
            "fingerprint": line.curated.fingerprint,
            "rows": line.manifest.get("rows"),
            "config": line.manifest.get("config") or {},
            **_present(line.manifest, CHOICE),
        },
        **{stage: _facts_of(stage, each) if each else None for stage, each in above.items()},
    }


def _facts_of(stage: str, snapshot: Snapshot) -> Json:
    manifest, config = snapshot.manifest, source_of(snapshot).manifest.get("config") or {}
    kept = _present(config, PUBLIC_SETTINGS[stage])
    if is_hub_id(config.get("location")) and not Path(config["location"]).exists():
        kept["location"] = config["location"]
    known = {"fingerprint": snapshot.fingerprint, "rows": manifest.get("rows"), "config": kept}
    return known | _present(manifest, PUBLIC_FACTS)


def _present(values: Json, names: Sequence[str]) -> Json:
    return {name: values[name] for name in names if values.get(name) is not None}


def settings(values: Row, prefix: str = "") -> Iterator[tuple[str, object]]:
    """Nested settings by dotted name, without None and empty lists, which are unused."""
    for name, item in values.items():
        if isinstance(item, Mapping):
            yield from settings(item, f"{prefix}{name}.")
        elif item not in (None, [], ()):
            yield f"{prefix}{name}", item


def source_of(snapshot: Snapshot) -> Snapshot:
    """The snapshot that names the rows' origin: for chosen tasks, the one they were chosen from, if
    it exists."""
    if snapshot.stage != CHOSEN:
        return snapshot
    source = Snapshot(snapshot.root, TASKS, str((snapshot.manifest.get("upstream") or [""])[0]))
    return source if source.finished else snapshot
