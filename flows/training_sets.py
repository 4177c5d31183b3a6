"""Training sets by several strategies, for the deployment `curate`. A strategy that these verdicts
cannot serve is a caution."""

from __future__ import annotations

from collections.abc import Sequence

from prefect.logging import get_run_logger

from flows.artifacts import (
    create_markdown_artifact,
    create_table_artifact,
    key_of,
    show_snapshots,
    warn_on_error,
)
from flows.config import PipelineConfig, load_strategy
from flows.set_tables import table_of_set
from kernels_eval.errors import UsageError
from kernels_eval.records import Json
from tasks.curation.step import curate
from tasks.decontamination.deduplication import equal_kernels
from tasks.policy import call_stage
from tasks.progress import report
from tasks.publishing.lineage import find_curated
from tasks.reporting.text import cell
from tasks.samples import Samples
from tasks.store.snapshot import SnapshotRef


def make_training_sets(
    config: PipelineConfig, of: str | None, strategies: Sequence[str], size: int | None
) -> list[SnapshotRef]:
    """Make a training set per strategy, with thresholds of `config.curation`, from the verdicts of
    the set `of` (default: the newest). Raises UsageError where none could be made."""
    samples = Samples.above(find_curated(config.root, of).open())
    equal = equal_kernels(config.deduplication)
    names = list(dict.fromkeys(strategies))
    sized = [f"size={size}"] if size else []
    made: dict[str, SnapshotRef] = {}
    problems: list[UsageError] = []
    for number, name in enumerate(names, start=1):
        try:
            rule = load_strategy(name, sized, config.curation)
            made[name] = call_stage(curate, samples, rule, equal)
        except UsageError as error:
            problems.append(error)
            get_run_logger().warning("no training set by %s: %s", name, error)
        report("curation", number, len(names), name)
    if not made:
        raise problems[0]
    show_training_sets(samples, made, problems)
    return list(made.values())


def show_training_sets(
    samples: Samples, made: dict[str, SnapshotRef], problems: Sequence[UsageError]
) -> None:
    table = [row_of(name, ref) for name, ref in made.items()]
    table += [{"strategy": "not made", "samples": "-", "taken": str(each)} for each in problems]
    create_table_artifact("training-sets", table, "The training sets of the same verdicts")
    show_snapshots({f"training set, {name}": ref for name, ref in made.items()})
    for name, ref in made.items():
        with warn_on_error(f"the composition of the set by {name}"):
            about = f"What the set by {cell(name)} holds"
            text = table_of_set(name, ref, samples)
            create_markdown_artifact(f"training-set-{key_of(name)}", text, about)


def row_of(strategy: str, ref: SnapshotRef) -> Json:
    manifest = ref.open().manifest
    counts = manifest["criterion_counts"].items()
    taken = ", ".join(f"{criterion} {count:,}" for criterion, count in counts)
    if screened := manifest["unconfirmed"]:
        taken += f"; {screened:,} not confirmed"
    return {"strategy": strategy, "samples": f"{manifest['rows']:,}", "taken": taken}
