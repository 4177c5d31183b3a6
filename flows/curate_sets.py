"""Training sets by several strategies of verdicts that are there: the body of the deployment
`curate`.

Guarantees: nothing is sampled or verified; a strategy that cannot be carried out on these verdicts
is a caution, and the others are made.
"""

from __future__ import annotations

from prefect.logging import get_run_logger
from pydantic import ValidationError

from flows.artifacts import (
    create_markdown_artifact,
    create_table_artifact,
    key_of,
    show_files,
    show_snapshots,
    warn_on_error,
)
from flows.config import PipelineConfig, explained
from flows.refresh import Refreshed
from flows.set_figures import TABLES_FILE, draw_curated
from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.step import curate
from tasks.policy import ProgressArtifact, call_stage
from tasks.progress import observed_by, report
from tasks.publishing.lineage import Lineage, find_curated, lineage
from tasks.reporting.text import cell, cells
from tasks.store.snapshot import SnapshotRef

FIGURES = {"composition": "What the training set holds, by operator family"}


def curate_again(
    config: PipelineConfig, of: str | None, strategies: list[str], size: int | None
) -> list[SnapshotRef]:
    """One training set per strategy, with the thresholds of `config.curation`. Raises UsageError
    where none could be made."""
    line = lineage(find_curated(config.root, of))
    if line.verdicts is None or line.candidates is None or line.tasks is None:
        raise UsageError(
            f"the verdicts, candidates or tasks of {line.curated.path} are gone",
            "restore their snapshots, or refresh again",
        )
    made: dict[str, SnapshotRef] = {}
    problems: list[UsageError] = []
    names = list(dict.fromkeys(strategies))
    with observed_by(
        ProgressArtifact("curation-progress", "share of the training sets that are made")
    ):
        for number, name in enumerate(names, start=1):
            try:
                made[name] = _set(config, name, size, line)
            except UsageError as error:
                problems.append(error)
                get_run_logger().warning("no training set by %s: %s", name, error)
            report("curation", number, len(names), name)
    if not made:
        raise problems[0]
    rows = [_row(name, ref) for name, ref in made.items()] + [
        {"strategy": "not made", "samples": "-", "taken": str(p)} for p in problems
    ]
    create_table_artifact(
        key="training-sets",
        table=cells(rows),
        description=f"Training sets of the verdicts {line.verdicts.fingerprint}",
    )
    show_snapshots({f"training set, {name}": ref for name, ref in made.items()})
    for name, ref in made.items():
        _figures(name, ref, line)
    return list(made.values())


def _set(config: PipelineConfig, name: str, size: int | None, line: Lineage) -> SnapshotRef:
    asked = config.curation.model_dump() | {"strategy": name} | ({"size": size} if size else {})
    try:
        rule = CurationConfig.model_validate(asked)
    except ValidationError as error:
        raise explained(error, f"strategy {name!r}", CurationConfig) from error
    assert line.verdicts and line.candidates and line.tasks  # `curate_again` looked
    others = (above.ref if above else None for above in (line.workloads, line.flags))
    return call_stage(curate, line.verdicts.ref, line.candidates.ref, line.tasks.ref, rule, *others)


def _row(name: str, ref: SnapshotRef) -> dict[str, str]:
    manifest = ref.open().manifest
    taken = ", ".join(
        f"{criterion} {count:,}" for criterion, count in manifest["criterion_counts"].items()
    )
    return {"strategy": name, "samples": f"{manifest['rows']:,}", "taken": taken}


def _figures(name: str, ref: SnapshotRef, line: Lineage) -> None:
    with warn_on_error(f"the composition of the set by {name}"):
        assert line.verdicts and line.candidates and line.tasks
        upstream = {"workloads": line.workloads, "flags": line.flags}
        others = {key: above.ref for key, above in upstream.items() if above}
        refs = {
            "tasks": line.tasks.ref,
            "candidates": line.candidates.ref,
            "verdicts": line.verdicts.ref,
        }
        files = draw_curated(Refreshed(**refs, curated=ref, **others), name)
        key = key_of(name)
        show_files(files, {stem: f"{text} ({name})" for stem, text in FIGURES.items()}, suffix=key)
        if tables := next((path for path in files if path.name == TABLES_FILE), None):
            text = tables.read_text(encoding="utf-8")
            create_markdown_artifact(
                key=f"training-set-{key}",
                markdown=text,
                description=f"What the set by {cell(name)} holds",
            )
