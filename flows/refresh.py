"""The nightly refresh: tasks, candidates, verdicts, training set, and observations."""

from __future__ import annotations

from flows.artifacts import create_markdown_artifact
from flows.config import PipelineConfig
from flows.confirm import confirmed_samples
from flows.morning.step import reported
from flows.naming import typed_name
from flows.runtime.guard import optional
from flows.set_tables import table_of_set
from kernels_eval.devices import conditions, device_for
from tasks.curation.step import curate, flag_traces
from tasks.decontamination.deduplication import equal_kernels
from tasks.decontamination.step import choose_tasks
from tasks.observe.stage import found_in
from tasks.observe.step import analyse
from tasks.policy import call_stage
from tasks.profiling.stage import Line
from tasks.profiling.step import profile_kernels
from tasks.progress import gathering
from tasks.reporting.choice import choice_of
from tasks.reporting.page import markdown
from tasks.reporting.parts import fields_table
from tasks.reporting.text import as_text
from tasks.samples import Samples
from tasks.sources.step import load_tasks
from tasks.store.snapshot import SnapshotRef
from tasks.synthesis.step import refine, synthesise
from tasks.verification.step import verify
from tasks.workload.measure import counting
from tasks.workload.step import measure_workloads, profile_references

COUNTS = ("status_counts", "criterion_counts", "turn_counts", "flag_counts", "limit_counts")
"""Row counts that a manifest may hold."""


class Refreshed(Samples):
    """Snapshots of one refresh. `screened` are the verdicts before any was confirmed, None where
    they are `verdicts` themselves; `analysis` is None where it failed, and `cautions` say why.
    `began_at` is UTC, ISO 8601; `id` is that of the history."""

    screened: SnapshotRef | None = None
    curated: SnapshotRef
    analysis: SnapshotRef | None = None
    cautions: tuple[str, ...] = ()
    began_at: str = ""
    id: str = ""


def refresh(config: PipelineConfig) -> Refreshed:
    """Inside a guarded flow run: run the stages, enter them in the history of the root, and write
    the morning report."""
    about = (config.name, config.language.value, config.curation.strategy)
    with reported(config.root, *about, typed_name()) as entry:
        refreshed = run_stages(config)
        entry.ends("finished", snapshots=refreshed.snapshots, cautions=refreshed.cautions)
    return refreshed.model_copy(update={"began_at": entry.begun.began_at, "id": entry.begun.id})


def run_stages(config: PipelineConfig) -> Refreshed:
    with gathering() as noted:
        verified = verified_samples(config)
        samples = confirmed_samples(config, verified, [config.curation])
        equal = equal_kernels(config.deduplication)
        curated = call_stage(curate, samples, config.curation, equal)
        analysis, cautions = analysed(samples)
    screened = verified.verdicts if verified != samples else None
    made = Refreshed(**dict(samples), screened=screened, curated=curated, analysis=analysis)
    strategy = config.curation.strategy
    table, undrawn = optional(
        "The table of the training set", table_of_set, strategy, curated, made
    )
    refreshed = made.model_copy(update={"cautions": (*noted, *cautions, *undrawn)})
    show_set(refreshed, table or "")
    return refreshed


def verified_samples(config: PipelineConfig) -> Samples:
    """Everything before the choice of a training set, which an ablation shares."""
    synthesis, language = config.synthesis, config.language
    tasks = training_tasks(config)
    workloads = call_stage(measure_workloads, tasks)
    candidates = call_stage(synthesise, tasks, synthesis, language)
    verdicts = call_stage(verify, candidates, tasks, config.verification, language)
    profiles = profiled(config, verdicts, candidates, tasks, workloads)
    for turn in range(2, synthesis.turns + 1):
        asked = (tasks, synthesis, language, None, candidates, verdicts, turn, profiles)
        candidates = call_stage(refine, *asked)
        verdicts = call_stage(verify, candidates, tasks, config.verification, language)
        profiles = profiled(config, verdicts, candidates, tasks, workloads)
    flags = call_stage(flag_traces, verdicts, candidates)
    return Samples(
        tasks=tasks,
        workloads=workloads,
        candidates=candidates,
        verdicts=verdicts,
        flags=flags,
        profiles=profiles,
    )


def profiled(
    config: PipelineConfig,
    verdicts: SnapshotRef,
    candidates: SnapshotRef,
    tasks: SnapshotRef,
    workloads: SnapshotRef,
) -> SnapshotRef | None:
    """Profiles of correct candidates, where requested or shown to the generator."""
    if not config.profile.enabled and config.synthesis.profiles == "withheld":
        return None
    device, name = device_for(config.language), conditions(config.language).device
    threads = config.verification.eval.threads
    references = call_stage(profile_references, tasks, threads, device, name)
    line = Line(
        verdicts=verdicts,
        candidates=candidates,
        tasks=tasks,
        workloads=workloads,
        references=references,
    )
    protocol = config.verification.eval
    return call_stage(profile_kernels, line, config.profile, protocol, config.language)


def training_tasks(config: PipelineConfig) -> SnapshotRef:
    """The source's tasks, deduplicated, without the benchmark's."""
    source = call_stage(load_tasks, config.tasks, config.root)
    known = known_workloads = None
    with counting():
        workloads = call_stage(measure_workloads, source)
        if config.decontamination.enabled:
            known = call_stage(load_tasks, config.known_tasks, config.root)
            known_workloads = call_stage(measure_workloads, known)
    compared = (config.decontamination, config.deduplication, workloads, known_workloads)
    chosen = call_stage(choose_tasks, source, known, *compared)
    return chosen


def analysed(samples: Samples) -> tuple[SnapshotRef | None, tuple[str, ...]]:
    """The observations. Failures become a caution; the next run retries."""
    of = (samples.verdicts, samples.candidates)
    result, cautions = optional("The observations of this refresh", _observed, *of)
    analysis, text = result or (None, "".join(map(as_text, cautions)))
    create_markdown_artifact("observations", text, "What reasoning length says")
    return analysis, cautions


def _observed(verdicts: SnapshotRef, candidates: SnapshotRef) -> tuple[SnapshotRef, str]:
    analysis = call_stage(analyse, verdicts, candidates)
    found = found_in(analysis)
    page = f"The page with figures and tables: `{found.files[0]}`" if found.files else ""
    return analysis, f"{found.markdown()}\n{page}\n"


def show_set(refreshed: Refreshed, table: str) -> None:
    """The table of the training set, the snapshots behind it, and what its tasks left out."""
    names = ("snapshot", "rows", "counts", "choice", "fingerprint")
    snapshots = markdown(fields_table(summary_rows(refreshed), *names))
    left_out = refreshed.tasks.open().manifest["report"]
    text = "\n\n".join([table, "## Snapshots", snapshots, left_out])
    create_markdown_artifact("training-set", text, "What it holds, and every snapshot behind it")


def summary_rows(refreshed: Refreshed) -> list[dict[str, str | int]]:
    rows: list[dict[str, str | int]] = []
    for name, ref in refreshed.snapshots.items():
        manifest = ref.open().manifest
        counts: dict[str, int] = next(filter(None, map(manifest.get, COUNTS)), {})
        if unanswered := manifest.get("unanswered"):
            counts = {**counts, "unanswered": unanswered}
        if told := manifest.get("confirmation"):
            counts = {key: told[key] for key in ("proposed", "confirmed", "rounds")} | counts
        said = ", ".join(f"{key} {value}" for key, value in counts.items())
        row = {"snapshot": name, "rows": manifest["rows"], "counts": said}
        row["choice"] = "; ".join(choice_of(manifest))
        rows.append(row | {"fingerprint": ref.fingerprint})
    return rows
