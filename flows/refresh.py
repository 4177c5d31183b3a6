"""The nightly refresh: tasks, candidates, verdicts, training set, and what the samples say of
reasoning length."""

from __future__ import annotations

from prefect import flow
from prefect.logging import get_run_logger
from prefect.runtime import flow_run

from flows.artifacts import (
    create_markdown_artifact,
    create_table_artifact,
    show_files,
    show_snapshots,
)
from flows.config import PipelineConfig
from flows.morning.history import entered
from flows.morning.step import write_morning_report
from flows.naming import run_name
from flows.runtime.disk import require_room
from flows.runtime.guard import guarded, shown
from flows.runtime.notices import NOTICES
from flows.runtime.root_lock import in_use
from flows.set_figures import TABLES_FILE, draw_curated
from kernels_eval.records import Record
from tasks.analysis.stage import found_in
from tasks.analysis.step import analyse
from tasks.curation.step import curate, flag_traces
from tasks.decontamination.step import choose_tasks
from tasks.policy import ProgressArtifact, call_stage
from tasks.progress import observed_by
from tasks.reporting.text import as_text, cells
from tasks.sources.step import load_tasks
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.step import refine, synthesise
from tasks.verification.step import verify
from tasks.workload.step import measure_workloads

COUNTS = ("status_counts", "criterion_counts", "turn_counts", "flag_counts")
"""What a manifest may count its rows by."""

FIGURES = {
    "status-by-family": "Verdicts by operator family",
    "composition": "What the training set holds, by operator family",
}


class Samples(Record):
    """Verified candidates, and what is known of their tasks and reasoning."""

    tasks: SnapshotRef
    candidates: SnapshotRef
    verdicts: SnapshotRef
    workloads: SnapshotRef | None = None
    flags: SnapshotRef | None = None


class Refreshed(Samples):
    """The snapshots of one refresh. `analysis` is None where it failed; `cautions` then say why."""

    curated: SnapshotRef
    analysis: SnapshotRef | None = None
    cautions: tuple[str, ...] = ()

    @property
    def snapshots(self) -> dict[str, SnapshotRef]:
        """Those that are there, by name."""
        return {name: ref for name, ref in self if isinstance(ref, SnapshotRef)}


@flow(name="refresh the data set", flow_run_name=run_name("refresh"), **NOTICES)
def refresh_dataset(config: PipelineConfig) -> Refreshed:
    """Write, verify, refine as often as is configured, and curate candidates. Pays only for tasks,
    samples and verdicts that are new."""
    with in_use(config.root), entered(config, str(flow_run.id) if flow_run.id else None) as entry:
        refreshed = run_stages(config)
        ended = entry.ends("finished", snapshots=refreshed.snapshots, cautions=refreshed.cautions)
    write_morning_report(config.root, ended)
    return refreshed


def run_stages(config: PipelineConfig) -> Refreshed:
    """The stages of a refresh, one after the other, each shown while it works."""
    with (
        guarded(config) as noted,
        observed_by(
            ProgressArtifact("refresh-progress", "share of the current stage that is done")
        ),
    ):
        samples = verified_samples(config)
        tasks, candidates, verdicts = samples.tasks, samples.candidates, samples.verdicts
        curated = call_stage(
            curate, verdicts, candidates, tasks, config.curation, samples.workloads, samples.flags
        )
        analysis, cautions = analysed(config, verdicts, candidates)
    refreshed = draw_figures(
        config,
        Refreshed(
            **dict(samples), curated=curated, analysis=analysis, cautions=(*noted, *cautions)
        ),
    )
    show_snapshots(refreshed.snapshots)
    if refreshed.cautions:
        text = "\n".join(f"- {shown(caution)}" for caution in refreshed.cautions)
        create_markdown_artifact(
            key="cautions", markdown=text, description="What to know of this refresh"
        )
    create_table_artifact(
        key="refresh",
        table=cells(summary_rows(refreshed)),
        description="What this refresh produced",
    )
    return refreshed


def verified_samples(config: PipelineConfig) -> Samples:
    """Everything before the choice of a training set: what an ablation of strategies does once."""
    tasks = training_tasks(config)
    require_room(config, tasks)
    workloads = call_stage(measure_workloads, tasks, config.workload)
    candidates = call_stage(synthesise, tasks, config.synthesis, config.language)
    verdicts = verify(candidates, tasks, config.verification, config.language)
    for turn in range(2, config.synthesis.turns + 1):
        candidates = call_stage(
            refine, tasks, candidates, verdicts, config.synthesis, config.language, turn
        )
        verdicts = verify(candidates, tasks, config.verification, config.language)
    flags = call_stage(flag_traces, verdicts, candidates, config.quality)
    return Samples(
        tasks=tasks, workloads=workloads, candidates=candidates, verdicts=verdicts, flags=flags
    )


def training_tasks(config: PipelineConfig) -> SnapshotRef:
    """The source's tasks without those that the benchmark knows, and each once."""
    benchmark = (
        load_tasks(config.known_tasks, config.root) if config.decontamination.enabled else None
    )
    chosen = call_stage(
        choose_tasks,
        load_tasks(config.tasks, config.root),
        benchmark,
        config.decontamination,
        config.deduplication,
    )
    create_markdown_artifact(
        key="decontamination",
        markdown=chosen.open().manifest["report"],
        description="Tasks the benchmark knows",
    )
    return chosen


def analysed(
    config: PipelineConfig, verdicts: SnapshotRef, candidates: SnapshotRef
) -> tuple[SnapshotRef | None, tuple[str, ...]]:
    """The observations, or the caution that stands in their place: the training set is finished,
    and is not given up for words about it."""
    try:
        analysis = call_stage(analyse, verdicts, candidates, config.analysis)
        found = found_in(analysis)
    except Exception as error:
        # whatever a model or a figure could not do; the next run of the same configuration tries it
        # again
        caution = f"The observations of this refresh are missing: {type(error).__name__}: {error}"
        get_run_logger().error("%s", caution)
        create_markdown_artifact(
            key="observations", markdown=as_text(caution), description="What reasoning length says"
        )
        return None, (caution,)
    place = f"\nThe page with figures and tables: `{found.files[0]}`\n" if found.files else ""
    create_markdown_artifact(
        key="observations",
        markdown=found.markdown() + place,
        description="What reasoning length says",
    )
    return analysis, ()


def draw_figures(config: PipelineConfig, refreshed: Refreshed) -> Refreshed:
    """Figures of the verdicts and the training set, beside its table and as an artifact; where they
    fail there is one caution more."""
    try:
        files = draw_curated(refreshed, config.curation.strategy)
    except Exception as error:  # a night is not given up for a picture
        caution = f"The figures of the training set are missing: {type(error).__name__}: {error}"
        get_run_logger().error("%s", caution)
        return refreshed.model_copy(update={"cautions": (*refreshed.cautions, caution)})
    if tables := next((path for path in files if path.name == TABLES_FILE), None):
        shown = "\n".join(f"- `{path}`" for path in files if path.suffix == ".png")
        show_files(files, FIGURES)
        text = f"{tables.read_text(encoding='utf-8')}\nFigures:\n\n{shown}\n"
        create_markdown_artifact(
            key="training-set", markdown=text, description="What the training set holds"
        )
    return refreshed


def summary_rows(refreshed: Refreshed) -> list[dict[str, str | int]]:
    """One row per snapshot: how many rows, and the counts its manifest holds."""
    rows: list[dict[str, str | int]] = []
    for name in ("tasks", "workloads", "candidates", "verdicts", "flags", "curated", "analysis"):
        ref: SnapshotRef | None = getattr(refreshed, name)
        if ref is None:
            continue
        manifest = ref.open().manifest
        counts = next((manifest[name] for name in COUNTS if manifest.get(name)), {})
        text = ", ".join(f"{key} {value}" for key, value in counts.items())
        rows.append(
            {
                "snapshot": name,
                "rows": manifest["rows"],
                "counts": text,
                "fingerprint": ref.fingerprint,
            }
        )
    return rows
