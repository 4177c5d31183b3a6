"""Training sets by several strategies of existing verdicts: the body of the deployment `curate`.

Guarantees: nothing is sampled or verified; a strategy that cannot be carried out on these verdicts
is a caution, and the others are made. `concur curate` (`flows.curate`) tries strategies on a table
and writes files; here each set is a snapshot that a training can start from.
"""

from __future__ import annotations

from collections.abc import Sequence

from prefect.logging import get_run_logger

from flows.artifacts import (
    create_markdown_artifact,
    create_table_artifact,
    key_of,
    show_snapshots,
    tables_of,
    warn_on_error,
)
from flows.config import PipelineConfig
from flows.set_figures import draw_curated
from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from kernels_eval.settings import validated
from tasks.curation.config import CurationConfig
from tasks.curation.step import curate
from tasks.decontamination.deduplication import equal_kernels
from tasks.policy import ProgressArtifact, call_stage
from tasks.progress import observed_by, report
from tasks.publishing.lineage import find_curated
from tasks.reporting.text import cell
from tasks.samples import Samples
from tasks.store.snapshot import SnapshotRef


def make_training_sets(
    config: PipelineConfig, of: str | None, strategies: Sequence[str], size: int | None
) -> list[SnapshotRef]:
    """One training set per strategy, with the thresholds of `config.curation`, from the verdicts
    that the set `of` (default: the newest) was made from. Raises UsageError where none could be
    made."""
    samples = Samples.above(find_curated(config.root, of).open())
    equal = equal_kernels(config.deduplication)
    names = list(dict.fromkeys(strategies))
    made: dict[str, SnapshotRef] = {}
    problems: list[UsageError] = []
    progress = ProgressArtifact("curation-progress", "share of the training sets that are made")
    with observed_by(progress):
        for number, name in enumerate(names, start=1):
            try:
                made[name] = call_stage(curate, samples, rule_of(config, name, size), equal)
            except UsageError as error:
                problems.append(error)
                get_run_logger().warning("no training set by %s: %s", name, error)
            report("curation", number, len(names), name)
    if not made:
        raise problems[0]
    show_training_sets(samples, made, problems)
    return list(made.values())


def rule_of(config: PipelineConfig, strategy: str, size: int | None) -> CurationConfig:
    """The configured curation by another strategy. Raises UsageError where both contradict."""
    asked = config.curation.model_dump() | {"strategy": strategy}
    if size:
        asked["size"] = size
    return validated(CurationConfig, asked, f"strategy {strategy!r}")


def show_training_sets(
    samples: Samples, made: dict[str, SnapshotRef], problems: Sequence[UsageError]
) -> None:
    """Show what each set took, where it is, and what it holds."""
    table = [row_of(name, ref) for name, ref in made.items()]
    table += [{"strategy": "not made", "samples": "-", "taken": str(each)} for each in problems]
    about = f"Training sets of the verdicts {samples.verdicts.fingerprint}"
    create_table_artifact("training-sets", table, about)
    show_snapshots({f"training set, {name}": ref for name, ref in made.items()})
    for name, ref in made.items():
        with warn_on_error(f"the composition of the set by {name}"):
            if tables := tables_of(draw_curated(name, ref, samples)):
                about = f"What the set by {cell(name)} holds"
                create_markdown_artifact(f"training-set-{key_of(name)}", tables, about)


def row_of(strategy: str, ref: SnapshotRef) -> Json:
    """How many samples a set has, by the criterion that took them."""
    manifest = ref.open().manifest
    counts = manifest["criterion_counts"].items()
    taken = ", ".join(f"{criterion} {count:,}" for criterion, count in counts)
    return {"strategy": strategy, "samples": f"{manifest['rows']:,}", "taken": taken}
