"""Training sets by several strategies of existing verdicts: the body of the deployment `curate`.

Guarantees: nothing is sampled or verified; a strategy that cannot be carried out on these verdicts
is a caution, and the others are made.
"""

from __future__ import annotations

from prefect.logging import get_run_logger

from flows.artifacts import (
    create_markdown_artifact,
    create_table_artifact,
    key_of,
    show_snapshots,
    tables_of,
    warn_on_error,
)
from flows.config import PipelineConfig, validated
from flows.set_figures import draw_curated
from kernels_eval.errors import UsageError
from tasks.curation.config import CurationConfig
from tasks.curation.step import curate
from tasks.decontamination.deduplication import equal_kernels
from tasks.policy import ProgressArtifact, call_stage
from tasks.progress import observed_by, report
from tasks.publishing.lineage import find_curated, lineage
from tasks.reporting.text import cell
from tasks.store import SnapshotRef


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
    others = [known.ref if known else None for known in (line.workloads, line.flags)]
    rows, made, problems = [], dict[str, SnapshotRef](), []
    names = list(dict.fromkeys(strategies))
    progress = ProgressArtifact("curation-progress", "share of the training sets that are made")
    with observed_by(progress):
        for number, name in enumerate(names, start=1):
            asked = config.curation.model_dump() | {"strategy": name}
            asked |= {"size": size} if size else {}
            try:
                rule = validated(CurationConfig, asked, f"strategy {name!r}")
                above = (verdicts, candidates, line.tasks.ref, rule, *others)
                ref = call_stage(curate, *above, equal_kernels(config.deduplication))
            except UsageError as error:
                problems.append(error)
                get_run_logger().warning("no training set by %s: %s", name, error)
            else:
                made[name], manifest = ref, ref.open().manifest
                counts = manifest["criterion_counts"].items()
                taken = ", ".join(f"{criterion} {count:,}" for criterion, count in counts)
                rows.append((name, f"{manifest['rows']:,}", taken))
            report("curation", number, len(names), name)
    if not made:
        raise problems[0]
    rows += [("not made", "-", str(each)) for each in problems]
    table = [dict(zip(("strategy", "samples", "taken"), row, strict=True)) for row in rows]
    about = f"Training sets of the verdicts {verdicts.fingerprint}"
    create_table_artifact("training-sets", table, about)
    show_snapshots({f"training set, {name}": ref for name, ref in made.items()})
    for name, ref in made.items():
        with warn_on_error(f"the composition of the set by {name}"):
            key, figures = key_of(name), draw_curated(name, ref, verdicts, candidates, *others)
            if tables := tables_of(figures):
                about = f"What the set by {cell(name)} holds"
                create_markdown_artifact(f"training-set-{key}", tables, about)
    return list(made.values())
