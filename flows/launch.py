"""Run the line from a terminal: an embedded Prefect, progress, and plain data at the end."""

from __future__ import annotations

import os
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING

from flows.config import PipelineConfig, load_profile
from flows.runtime.terminal import TerminalProgress
from kernels_eval.installation import command_at
from kernels_eval.records import Json
from kernels_eval.sandbox import reaper
from tasks.files import explain_write_errors, make_writable

if TYPE_CHECKING:
    from flows.ablation.plan import AblationConfig
    from flows.ready import Part

STARTS_SERVER = "starts a Prefect server of its own"
NOTHING_NEW = "nothing was new, all snapshots existed already"
REPORT_COMES = "comes with training and benchmark: the same command without --only refresh"
QUIET = {
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Environment of every run: no telemetry, no progress bars of libraries."""


def require_ready(config: PipelineConfig, *parts: Part) -> None:
    """Check before any work what would fail hours later: device, named cluster, writable root,
    needs of these parts of a run. Raises an EvalError."""
    from flows.ready import checks
    from kernels_eval.devices import require_device
    from kernels_eval.pool.ray import require_cluster

    require_device(config.language)
    require_cluster(config.verification.ray_address)
    if "://" not in config.root:
        fix = "choose another one with --set root=DIR, or fix its permissions"
        with explain_write_errors(f"to root {config.root}", fix):
            make_writable(Path(config.root))
    for name, look in checks(config, parts):
        if name != "tasks":  # the first stage loads them
            look()


def embed(config: PipelineConfig) -> None:
    """Set up an embedded run, unless the user has set these variables. Call before importing
    prefect."""
    user_chose = {"PREFECT_API_URL", "PREFECT_HOME"} & os.environ.keys()
    if not user_chose and "://" not in config.root:
        os.environ["PREFECT_HOME"] = str(Path(config.root).absolute() / "prefect")
        # Prefect warns where the root is missing; the command says so itself
        warnings.filterwarnings("ignore", "Failed to create the Prefect home directory")
    for name, value in {
        **QUIET,
        # an error ends as one line of the command, not after two tracebacks
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "600",
    }.items():
        os.environ.setdefault(name, value)


def joined_configuration(profile: str, overrides: list[str], root: str) -> PipelineConfig:
    """The configuration of a command that works in a root, whose stack it joins where one runs.
    Call before importing prefect. Raises UsageError."""
    from flows.stack.control import join_stack

    join_stack(root)
    config = load_profile(profile, overrides, {"root": root})
    embed(config)
    return config


def launch(config: PipelineConfig, *, refresh_only: bool = False) -> Json:
    """Run the flow in this process, with progress on stderr. Returns the summary as plain data."""
    began_s = time.monotonic()
    embed(config)
    Thread(target=make_headers, args=(config,), daemon=True).start()
    with served_and_shown() as progress:
        found, run = _refresh(config) if refresh_only else _whole_line(config)
    return {
        "name": config.name,
        "seconds": round(time.monotonic() - began_s, 1),
        "new_work_in": sorted(progress.worked),
        **({} if progress.worked else {"note": NOTHING_NEW}),
        **found,
        "training_set": command_at("publish", config.root) + " --out FOLDER",
        "viewer": command_at("view", config.root) + " --open",
        **mlflow_pages(config, run),
    }


def make_headers(config: PipelineConfig) -> None:
    """Make here what every build needs, a minute's work the first time, while the first stages run.
    Build workers wait for it."""
    from kernels_eval.judge.prepare import confined_builder
    from kernels_eval.pool.ray import address_of

    here = address_of(config.verification.ray_address) == "local"
    if here and not config.language.jit:
        with suppress(Exception):
            builder = confined_builder(config.verification.eval)
            builder.begin_warm(cuda=config.language.needs_gpu)
            builder.end_warm()


def _refresh(config: PipelineConfig) -> tuple[Json, str | None]:
    from flows.refresh import summary_rows
    from flows.track import refresh_and_track
    from tasks.reporting.choice import choice_of

    refreshed, run = refresh_and_track(config)
    summary = {
        str(row["snapshot"]): f"{row['rows']}" + (f" ({row['counts']})" if row["counts"] else "")
        for row in summary_rows(refreshed)
    }
    choice = choice_of(refreshed.curated.open().manifest)
    return {"summary": summary, "choice": choice, "report": REPORT_COMES}, run


def _whole_line(config: PipelineConfig) -> tuple[Json, str | None]:
    from flows.pipeline import concur_line
    from tasks.benchmark.report.files import read_summary

    result = concur_line(config)
    summary = dict(read_summary(result.report_dir))
    return {"summary": summary, "report": result.report}, result.mlflow_run


def mlflow_pages(config: PipelineConfig, run: str | None, view: str = "scores") -> Json:
    """A run in MLflow, and its page; where no server shows this root, the command that starts
    one."""
    from flows.artifacts import run_url
    from flows.stack.control import how_to_start

    page = run and run_url(config, run, "runs", view)
    command = how_to_start(config.root) if run and not page else None
    return {"mlflow_run": run, "mlflow_page": page, "start_mlflow": command}


def launch_ablation(config: AblationConfig, pipeline: PipelineConfig) -> Json:
    """Run an ablation in this process, with progress on stderr. Returns its result as plain data.
    An interrupt ends the local Ray first, so that no training continues."""
    embed(pipeline)
    try:
        with served_and_shown() as progress:
            from flows.ablation.flow import ablate

            result = ablate(config)
    except KeyboardInterrupt:
        import ray

        ray.shutdown()
        raise
    data = result.model_dump(mode="json")
    ablation, run = data.pop("ablation"), result.mlflow_run
    return data | {
        **{name: ablation[name] for name in ("name", "fingerprint", "branches", "cautions")},
        "complete": result.complete,
        "seconds": progress.seconds,
        "experiment": pipeline.tracking.experiment,
        "tracking_uri": pipeline.tracking_uri,
        **mlflow_pages(pipeline, run, run or ""),
    }


def start_server_apart() -> None:
    """Start the embedded server with Ctrl-C blocked, which a child inherits: without it, a run
    spends over a minute on reporting its end."""
    import psutil
    from prefect.client.orchestration import get_client

    own = psutil.Process()
    others = own.children()
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        get_client(sync_client=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        for child in own.children():
            if child not in others:
                reaper.watch(child.pid)


@contextmanager
def served_and_shown() -> Iterator[TerminalProgress]:
    """Run flows in the block: Prefect's server is there, and progress is shown on stderr."""
    progress = TerminalProgress()  # its seconds begin here: a person waits for the server, too
    if "PREFECT_API_URL" not in os.environ:
        print(STARTS_SERVER, file=sys.stderr, flush=True)
    start_server_apart()
    with progress:
        yield progress
