"""The flows that `prefect.yaml` deploys: a form in, a flow of the line inside, artifacts out. Flows
that need devices queue (`devices`)."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager

from httpx import TransportError
from prefect import flow
from prefect.client.orchestration import get_client
from prefect.concurrency.sync import concurrency
from prefect.logging import get_run_logger

from flows import forms
from flows.ablation.flow import AblationResult, ablate
from flows.ablation.plan import AblationConfig
from flows.artifacts import (
    link_mlflow,
    show_gains,
    show_scores,
    show_snapshots,
)
from flows.benchmark import Benchmarked, benchmark_models
from flows.config import PipelineConfig
from flows.forms import configuration
from flows.launch import QUIET, require_ready
from flows.naming import run_name
from flows.pipeline import LineResult, concur_line
from flows.ready import PARTS, Part
from flows.refresh import Refreshed
from flows.reinforce import of_training, reinforce_and_track
from flows.runtime import ahead
from flows.runtime.guard import guarding
from flows.runtime.shutdown import write_to_log
from flows.search import Searched, begun_with, search_and_track, summary_of
from flows.stack.worker import DEVICES, limit_devices
from flows.track import benchmark_record, refresh_and_track, track
from flows.train import of_line, train_and_track
from flows.training_sets import make_training_sets
from kernels_eval.errors import UsageError
from kernels_eval.pool.ray import address_of
from tasks.benchmark.stage import scores_of
from tasks.store.lookup import find_snapshot, newest_first
from tasks.store.snapshot import SnapshotRef
from tasks.training.reinforce import STAGE as REINFORCEMENT
from tasks.training.stage import STAGE as TRAINING
from tasks.verification.stage import wait_for_head


@flow(name="nightly refresh", flow_run_name=run_name("refresh"))
def nightly_refresh(
    candidates: forms.Candidates = forms.CandidatesForm(),
    curation: forms.TrainingSet = forms.TrainingSetForm(),
    run: forms.Run = forms.RunForm(),
    advanced: forms.Advanced = forms.AdvancedForm(),
) -> Refreshed:
    """Tasks, candidates, verdicts and the training set; the morning report says what is new."""
    config = prepared(configuration(run, candidates, curation, advanced=advanced), "refresh")
    with devices(config, config.verification.workers):
        ahead.begin(config)
        refreshed, _ = refresh_and_track.fn(config)
    return refreshed


@flow(name="curate training sets", flow_run_name=run_name("curate"))
def curate_sets(
    verdicts: forms.Curated = forms.CuratedForm(),
    sets: forms.Strategies = forms.StrategiesForm(),
    run: forms.Run = forms.RunForm(),
    advanced: forms.Advanced = forms.AdvancedForm(),
) -> list[SnapshotRef]:
    """Training sets by several strategies, of the verdicts that a finished training set was made
    from. Nothing is sampled or verified."""
    config = prepared(configuration(run, advanced=advanced))
    with guarding(config.root):
        of, size = verdicts.snapshot or None, sets.size or None
        return make_training_sets(config, of, sets.strategies, size)


@flow(name="train an adapter", flow_run_name=run_name("train"))
def train_on_set(
    curated: forms.Curated = forms.CuratedForm(),
    training: forms.Training = forms.TrainingForm(),
    run: forms.Run = forms.RunForm(),
    advanced: forms.Advanced = forms.AdvancedForm(),
) -> SnapshotRef:
    """A LoRA adapter on an existing training set, registered in MLflow."""
    config = prepared(configuration(run, training, advanced=advanced), "training")
    config, tasks, found = of_line(config.root, curated.snapshot or None, config)
    with devices(config, config.training.workers):
        trained, tracked = train_and_track.fn(config, tasks, found)
    show_snapshots({"training set": found, "adapter and training log": trained})
    link_mlflow(config, tracked)
    return trained


@flow(name="reinforce an adapter", flow_run_name=run_name("reinforce"))
def reinforce_with_rewards(
    adapter: forms.Adapter = forms.AdapterForm(),
    reinforcement: forms.Reinforcement = forms.ReinforcementForm(),
    run: forms.Run = forms.RunForm(),
    advanced: forms.Advanced = forms.AdvancedForm(),
) -> SnapshotRef:
    """A better adapter from an existing one: it answers tasks, and verdicts are its rewards."""
    config = configuration(run, reinforcement, advanced=advanced)
    config, tasks, trained = of_training(config, adapter.snapshot or None)
    prepared(config)  # now that the language of the training set is known
    with devices(config, config.verification.workers):
        reinforced, tracked = reinforce_and_track.fn(config, tasks, trained)
    show_snapshots({"training": trained, "adapter and log": reinforced})
    link_mlflow(config, tracked)
    return reinforced


@flow(name="search kernels", flow_run_name=run_name("search"))
def search_for_faster(
    verdicts: forms.Verdicts = forms.VerdictsForm(),
    search: forms.Search = forms.SearchForm(),
    run: forms.Run = forms.RunForm(),
    advanced: forms.Advanced = forms.AdvancedForm(),
) -> Searched:
    """Faster variants of correct kernels, confirmed by fresh measurements."""
    asked = configuration(run, search, advanced=advanced)
    config, *begun = begun_with(asked, verdicts.snapshot or None)
    prepared(config)  # now that the language of the kernels is known
    with devices(config, config.verification.workers):
        searched, tracked = search_and_track.fn(config, *begun)
    show_gains(summary_of(searched))
    show_snapshots(dict(searched))
    link_mlflow(config, tracked)
    return searched


@flow(name="score the models", flow_run_name=run_name("benchmark"))
def score_models(
    adapter: forms.Adapter = forms.AdapterForm(),
    benchmark: forms.Benchmark = forms.BenchmarkForm(),
    run: forms.Run = forms.RunForm(),
    advanced: forms.Advanced = forms.AdvancedForm(),
) -> Benchmarked:
    """Exec, fast_p and pass@k of the recorded answers, the base model and an existing adapter,
    on held-out tasks."""
    config = prepared(configuration(run, benchmark, advanced=advanced), "benchmark")
    trained = newest_adapter(config, adapter.snapshot)
    with guarding(config.root), devices(config, config.verification.workers):
        benchmarked = benchmark_models(config, trained)
    show_scores(scores_of(benchmarked.scores))
    show_snapshots({"adapter": trained, "scores": benchmarked.scores})
    link_mlflow(config, track(benchmark_record, config, benchmarked))
    return benchmarked


@flow(name="whole line", flow_run_name=run_name("the whole line of"))
def whole_line(
    candidates: forms.Candidates = forms.CandidatesForm(),
    curation: forms.TrainingSet = forms.TrainingSetForm(),
    training: forms.Training = forms.TrainingForm(),
    benchmark: forms.Benchmark = forms.BenchmarkForm(),
    run: forms.Run = forms.RunForm(),
    advanced: forms.Advanced = forms.AdvancedForm(),
) -> LineResult:
    """From tasks to scores: refresh, training, benchmark and the report."""
    config = prepared(
        configuration(run, candidates, curation, training, benchmark, advanced=advanced), *PARTS
    )
    with devices(config, None):
        ahead.begin(config)
        return concur_line.fn(config)


@flow(name="weekly ablations", flow_run_name=run_name("compare strategies of"))
def weekly_ablations(
    sweep: forms.Ablation = forms.AblationForm(),
    run: forms.Run = forms.RunForm(profile="ablation"),
    advanced: forms.Advanced = forms.AdvancedForm(),
) -> AblationResult:
    """Every strategy with every seed is curated, trained and benchmarked on the same samples, and
    compared."""
    config = prepared(configuration(run, advanced=advanced), *PARTS)
    asked = AblationConfig(
        profile=run.profile,
        overrides=(
            *advanced.overrides,
            f"name={json.dumps(config.name)}",
            f"root={json.dumps(config.root)}",
        ),
        strategies=tuple(sweep.strategies),
        sizes=(sweep.size or None,),
        seeds=tuple(range(sweep.seeds)),
    )
    with devices(config, None):
        result = ablate.fn(asked)
    link_mlflow(config, result.mlflow_run, "comparison.html" if result.comparison else None)
    return result


def prepared(config: PipelineConfig, *parts: Part) -> PipelineConfig:
    """Check that these parts of a configuration can run here, and return it. Waits for a restarting
    Ray head, and keeps the run alive if its worker dies. Raises UsageError, DeviceError or
    ClusterError."""
    write_to_log()
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    wait_for_head(config.verification.ray_address, get_run_logger().warning)
    require_ready(config, *parts)
    return config


def newest_adapter(config: PipelineConfig, name: str) -> SnapshotRef | None:
    """The finished training or reinforcement whose fingerprint begins with `name`; without a name
    the newest training, or None. Raises UsageError where not exactly one matches, or it has no
    adapter."""
    if name:
        found = find_snapshot(config.root, name)
        _ = found.open().manifest  # it is finished
        if found.stage not in (TRAINING, REINFORCEMENT):
            raise UsageError(
                f"{name} is a snapshot of the stage {found.stage}, which has no adapter",
                "give that of a training or a reinforcement",
            )
        return found
    there = newest_first(config.root, TRAINING)
    return there[0].ref if there else None


@contextmanager
def devices(config: PipelineConfig, workers: int | None) -> Iterator[None]:
    """Keep other deployed flows off the same GPUs, or off the CPU without any.

    On a named Ray cluster, which assigns GPUs itself, `workers` slots are held (None: all);
    elsewhere all, because two Rays of one machine both begin with its first GPU. A missing limit
    gets a slot per GPU; a user's own is kept.
    """
    log = get_run_logger()
    slots = _slots()
    if slots == 0:
        log.warning(
            "the concurrency limit %s is 0 or not active: two flows may share a device", DEVICES
        )
        yield
        return
    shared = address_of(config.verification.ray_address) != "local"
    held = min(workers or slots, slots) if shared else slots
    done = False
    device = "the GPUs" if config.language.needs_gpu else "the CPU"
    log.info(
        "asks for %d of %d slots of the limit %s (%s here)",
        held,
        slots,
        DEVICES,
        device,
    )
    try:
        # a run whose lease could not be renewed, because the server was away, continues
        with concurrency(DEVICES, occupy=held, raise_on_lease_renewal_failure=False):
            log.info("holds %d of %d slots of the limit %s", held, slots, DEVICES)
            yield
            done = True
    except TransportError as error:
        if not done:
            raise
        log.warning(
            "the limit %s could not be released (%s): it is released within five minutes",
            DEVICES,
            error,
        )


def _slots() -> int:
    with get_client(sync_client=True) as client:
        limit_devices(client)
        found = client.read_global_concurrency_limit_by_name(DEVICES)
    return found.limit if found.active else 0
