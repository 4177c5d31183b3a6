"""Training sets by several strategies of existing verdicts: the body of the deployment `curate`.

Guarantees: nothing is sampled or verified; a strategy that cannot be carried out on these verdicts
is a caution, and the others are made.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from prefect.logging import get_run_logger

from flows.artifacts import (
    create_markdown_artifact,
    create_table_artifact,
    key_of,
    show_files,
    show_snapshots,
    warn_on_error,
)
from flows.config import PipelineConfig, validated
from flows.set_figures import TABLES_FILE, draw_curated
from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.step import curate
from tasks.policy import ProgressArtifact, call_stage
from tasks.progress import observed_by, report
from tasks.publishing.lineage import find_curated, lineage
from tasks.reporting.text import cell, cells
from tasks.store import SnapshotRef

FIGURES = {"composition": "What the training set holds, by operator family"}


def curate_again(
    config: PipelineConfig, of: str | None, strategies: list[str], size: int | None
) -> list[SnapshotRef]:
    """One training set per strategy, with the thresholds of `config.curation`. Raises UsageError
    where none could be made."""
    line = lineage(find_curated(config.root, of))
    if not (line.verdicts and line.candidates and line.tasks):
        raise UsageError(
            f"the verdicts, candidates or tasks of {line.curated.path} are gone",
            "restore their snapshots, or refresh again",
        )
    verdicts, candidates = line.verdicts.ref, line.candidates.ref
    others = [above.ref if above else None for above in (line.workloads, line.flags)]
    rows, made, problems = [], dict[str, SnapshotRef](), []
    names = list(dict.fromkeys(strategies))
    progress = ProgressArtifact("curation-progress", "share of the training sets that are made")
    with observed_by(progress):
        for number, name in enumerate(names, start=1):
            asked = config.curation.model_dump() | {"strategy": name}
            asked |= {"size": size} if size else {}
            try:
                rule = validated(CurationConfig, asked, f"strategy {name!r}")
                ref = call_stage(curate, verdicts, candidates, line.tasks.ref, rule, *others)
            except UsageError as error:
                problems.append(error)
                get_run_logger().warning("no training set by %s: %s", name, error)
            else:
                made[name] = ref
                rows.append(_row(name, ref))
            report("curation", number, len(names), name)
    if not made:
        raise problems[0]
    rows += [{"strategy": "not made", "samples": "-", "taken": str(each)} for each in problems]
    create_table_artifact(
        key="training-sets",
        table=cells(rows),
        description=f"Training sets of the verdicts {verdicts.fingerprint}",
    )
    show_snapshots({f"training set, {name}": ref for name, ref in made.items()})
    for name, ref in made.items():
        with warn_on_error(f"the composition of the set by {name}"):
            _show_figures(name, draw_curated(name, ref, verdicts, candidates, *others))
    return list(made.values())


def _row(name: str, ref: SnapshotRef) -> dict[str, str]:
    manifest = ref.open().manifest
    counts = manifest["criterion_counts"].items()
    taken = ", ".join(f"{criterion} {count:,}" for criterion, count in counts)
    return {"strategy": name, "samples": f"{manifest['rows']:,}", "taken": taken}


def _show_figures(name: str, files: Sequence[Path]) -> None:
    key = key_of(name)
    show_files(files, {stem: f"{text} ({name})" for stem, text in FIGURES.items()}, suffix=key)
    for tables in (path for path in files if path.name == TABLES_FILE):
        create_markdown_artifact(
            key=f"training-set-{key}",
            markdown=tables.read_text(encoding="utf-8"),
            description=f"What the set by {cell(name)} holds",
        )
