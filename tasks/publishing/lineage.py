"""A curated snapshot and the snapshots it was made from: which they are, and what of their settings
may be told to anybody.

Guarantees: what `facts` tells names no path of this machine, no address of a server and no place of
a key. Does not guarantee the same of a generator's name, which is in every row: a model that was
configured by its path is published under that path.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kernels_eval.errors import UsageError
from tasks.sources.hub import is_hub_id
from tasks.store import MANIFEST, Snapshot, SnapshotRef, combine_parts, snapshots

if TYPE_CHECKING:
    import polars as pl

CURATION, VERIFICATION, SYNTHESIS, TASKS = "curation", "verification", "synthesis", "tasks"
ANALYSIS, WORKLOADS, FLAGS = "analysis", "workloads", "trace-flags"
CHOSEN = "training-tasks"
"""The stage that chooses among the source's tasks. A set that was made from its snapshot was made
from tasks."""
PLACES = (
    *((VERIFICATION, VERIFICATION), (SYNTHESIS, SYNTHESIS), (TASKS, CHOSEN), (TASKS, TASKS)),
    *((WORKLOADS, WORKLOADS), (FLAGS, FLAGS)),
)
"""What a snapshot above a set is, by the stage that wrote it; what stands first goes first."""
DEFAULT_STRATEGY = "concur"
BATCH_ROWS = 4096
TOLD = {
    VERIFICATION: ("eval",),
    SYNTHESIS: ("sampler", "samples_per_task", "sampling", "turns", "refine_below_speedup"),
    TASKS: ("source", "split", "levels", "limit"),
}
"""Settings that may be published. Of the curation all are: they are the rule."""


@dataclass(frozen=True)
class Lineage:
    """One curated snapshot, finished, and those of its upstreams that are there."""

    curated: Snapshot
    manifest: dict[str, Any]
    verdicts: Snapshot | None
    candidates: Snapshot | None
    tasks: Snapshot | None
    workloads: Snapshot | None = None
    flags: Snapshot | None = None

    @property
    def strategy(self) -> str:
        return str((self.manifest.get("config") or {}).get("strategy") or DEFAULT_STRATEGY)


def lineage(ref: SnapshotRef) -> Lineage:
    """The lineage of a finished curated snapshot. Raises UsageError where it is unfinished or of
    another stage."""
    if ref.stage != CURATION:
        raise UsageError(
            f"{ref.stage}/{ref.fingerprint} is no curated set",
            f"give a snapshot of the stage {CURATION}",
        )
    snapshot = ref.open()
    manifest = manifest_of(snapshot)
    found: dict[str, Snapshot] = {}
    for fingerprint in manifest.get("upstream") or []:
        for stage, place in PLACES:
            above = Snapshot(ref.root, place, str(fingerprint))
            if stage not in found and above.finished:
                found[stage] = above
    return Lineage(
        snapshot,
        manifest,
        *(found.get(stage) for stage in (VERIFICATION, SYNTHESIS, TASKS, WORKLOADS, FLAGS)),
    )


def manifest_of(snapshot: Snapshot) -> dict[str, Any]:
    """A snapshot's manifest. Raises UsageError where it is unfinished, or its manifest is none."""
    problem: object = "it is no object with created_at"
    try:
        manifest = snapshot.manifest
        if (
            isinstance(manifest, dict)
            and isinstance(manifest.get("created_at"), str)
            and isinstance(manifest.get("upstream") or [], list)
        ):
            return manifest
    except (OSError, ValueError) as error:
        problem = error
    raise UsageError(
        f"the manifest of {snapshot.path} cannot be read: {problem}",
        "restore it, or run its stage again under another root",
    )


def analysis_of(line: Lineage) -> Snapshot | None:
    """The newest finished analysis of the samples that a set was taken from, where there is one."""
    if line.verdicts is None or line.candidates is None:
        return None
    made_from = [line.verdicts.fingerprint, line.candidates.fingerprint]
    there = [
        (found, manifest_of(found))
        for found in snapshots(line.curated.root, ANALYSIS)
        if found.finished
    ]
    of_these = [
        (manifest["created_at"], found.fingerprint, found)
        for found, manifest in there
        if manifest.get("upstream") == made_from
    ]
    return max(of_these, key=lambda each: each[:2])[2] if of_these else None


def find_curated(root: str, name: str | None = None) -> SnapshotRef:
    """A curated snapshot by its directory, or under `root` by (the beginning of) its fingerprint;
    without a name the newest finished one, of the strategy `concur` where there is one. Raises
    UsageError where there is none, or several begin so.
    """
    if name and (Path(name) / MANIFEST).is_file():
        directory = Path(name).resolve()
        return SnapshotRef(
            root=str(directory.parent.parent),
            stage=directory.parent.name,
            fingerprint=directory.name,
        )
    there = snapshots(root, CURATION)
    if name:
        found = [snapshot for snapshot in there if snapshot.fingerprint.startswith(name)]
        if len(found) != 1:
            problem = f"{len(found)} curated snapshots" if found else "no curated snapshot"
            raise UsageError(
                f"{problem} under {root} begin with {name!r}",
                "give its directory or more of its fingerprint",
            )
        return found[0].ref
    finished = [(snapshot, manifest_of(snapshot)) for snapshot in there if snapshot.finished]
    if not finished:
        hint = (
            "its curation is unfinished: run `concur run` again"
            if there
            else "run `concur run` first, or give --root"
        )
        raise UsageError(f"there is no finished curated set under {root}", hint)

    def rank(pair: tuple[Snapshot, dict[str, Any]]) -> tuple[bool, str, str]:
        snapshot, manifest = pair
        return (
            (manifest.get("config") or {}).get("strategy") == DEFAULT_STRATEGY,
            manifest["created_at"],
            snapshot.fingerprint,
        )

    return max(finished, key=rank)[0].ref


def facts(line: Lineage) -> dict[str, Any]:
    """What the manifests of a lineage tell, as plain data that may be published. A stage that is
    not there is None."""
    told: dict[str, Any] = {
        "created_at": line.manifest["created_at"],
        "tools": line.manifest.get("tools") or {},
        CURATION: {
            "fingerprint": line.curated.fingerprint,
            "rows": line.manifest.get("rows"),
            "config": line.manifest.get("config") or {},
        },
    }
    for stage, snapshot in (
        (VERIFICATION, line.verdicts),
        (SYNTHESIS, line.candidates),
        (TASKS, line.tasks),
    ):
        told[stage] = _told(stage, snapshot) if snapshot else None
    return told


def _told(stage: str, snapshot: Snapshot) -> dict[str, Any]:
    manifest = manifest_of(snapshot)
    config = manifest_of(source_of(snapshot)).get("config") or {}
    kept = {name: config[name] for name in TOLD[stage] if config.get(name) is not None}
    if is_hub_id(config.get("location")) and not Path(config["location"]).exists():
        kept["location"] = config["location"]
    told = {"fingerprint": snapshot.fingerprint, "rows": manifest.get("rows"), "config": kept}
    extra = ("device", "language", "status_counts", "generator", "turn_counts")
    return told | {name: manifest[name] for name in extra if manifest.get(name) is not None}


def source_of(snapshot: Snapshot) -> Snapshot:
    """Whose configuration says where rows come from: of chosen tasks the snapshot that they were
    chosen from, where it is there."""
    if snapshot.stage != CHOSEN:
        return snapshot
    source = Snapshot(snapshot.root, TASKS, str((manifest_of(snapshot).get("upstream") or [""])[0]))
    return source if source.finished else snapshot


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Raises UsageError where what is read inside is damaged or gone, or its parts do not fit
    together: not to be taken for a fault of what is written."""
    import polars as pl
    import pyarrow as pa

    try:
        yield
    except (OSError, pa.ArrowException, pl.exceptions.PolarsError) as error:
        cause = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"cannot read {what}: {cause}", "restore it, or run its stage again under another root"
        ) from error


def select(
    snapshot: Snapshot, columns: Sequence[str], on: str, keys: pl.DataFrame | None = None
) -> pl.DataFrame:
    """Some columns of the rows whose `on` is among the keys (all where None), each key once, in the
    order of writing.

    Columns that the snapshot's parts lack are left out. Takes memory for what it returns and for
    one batch. Raises UsageError where a part lacks `on`, and for a column that is of two kinds in
    two parts.
    """
    import polars as pl

    frames = []
    for frame in batches(snapshot, columns):
        if on not in frame.columns:
            raise UsageError(
                f"a part of {snapshot.path} has no column {on}",
                "it was not written by this version: run its stage again",
            )
        frames.append(
            frame if keys is None else frame.join(keys, on=on, how="semi", maintain_order="left")
        )
    if not frames:
        return pl.DataFrame(schema={on: pl.String})
    return combine_parts(frames, snapshot.path).unique(subset=on, keep="first", maintain_order=True)


def batches(snapshot: Snapshot, columns: Sequence[str]) -> Iterator[pl.DataFrame]:
    """Some columns of every row, in the order of writing, a few thousand rows at a time; columns
    that a part lacks are left out."""
    import polars as pl
    import pyarrow as pa

    for part in snapshot.parts():
        with readable(part), snapshot.open_part(part) as file:
            there = [name for name in columns if name in file.schema_arrow.names]
            for batch in file.iter_batches(BATCH_ROWS, columns=there):
                yield pl.from_arrow(pa.Table.from_batches([batch]))
