"""Runs the line from a terminal: an embedded Prefect, progress while it works, one table when it
ends."""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from types import TracebackType
from typing import Any

from flows.config import PipelineConfig
from kernels_eval.errors import UsageError
from tasks.files import atomic_write
from tasks.progress import observed_by

LINE_EVERY_S = 5.0
QUIET = {
    "DO_NOT_TRACK": "1",
    "RAY_USAGE_STATS_ENABLED": "0",
    "TOKENIZERS_PARALLELISM": "false",
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
}
"""Environment of every run: no telemetry, no progress bars of libraries."""


def require_ready(config: PipelineConfig) -> None:
    """Check what must hold before any work: a device for the language, the cluster if one is named,
    and a root that can be written. Raises DeviceError, ClusterError or UsageError."""
    from kernels_eval.cluster.ray import address_of, require_cluster
    from kernels_eval.devices import require_device

    require_device(config.language)
    if (address := address_of(config.verification.ray_address)) != "local":
        require_cluster(address)
    if "://" in config.root:
        return
    root = Path(config.root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write to root {config.root}: {error.strerror}",
            "choose another one with --set root=DIR, or fix its permissions",
        ) from error


def embed(config: PipelineConfig) -> None:
    """Set up an embedded run, unless the user has set these variables. Must run before prefect is
    imported."""
    user_chose = {"PREFECT_API_URL", "PREFECT_HOME"} & os.environ.keys()
    if not user_chose and "://" not in config.root:
        os.environ["PREFECT_HOME"] = str(Path(config.root).absolute() / "prefect")
    for name, value in {
        **QUIET,
        # an error ends as one line of the command, not after two tracebacks
        "PREFECT_LOGGING_LEVEL": "CRITICAL",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_SERVER_EPHEMERAL_STARTUP_TIMEOUT_SECONDS": "120",
    }.items():
        os.environ.setdefault(name, value)


def launch(
    config: PipelineConfig, *, refresh_only: bool = False, quiet: bool = False
) -> dict[str, Any]:
    """Run the flow in this process. Returns what the summary table shows, as plain data; prints it
    unless `quiet`."""
    embed(config)
    started = time.monotonic()
    start_server_apart()
    with TerminalProgress() as progress, observed_by(progress):
        if refresh_only:
            from flows.refresh import refresh_dataset, summary_rows

            rows = summary_rows(refresh_dataset(config))
            summary = [
                (
                    str(row["snapshot"]),
                    f"{row['rows']}" + (f" ({row['counts']})" if row["counts"] else ""),
                )
                for row in rows
            ]
            extra: dict[str, Any] = {}
        else:
            from flows.pipeline import concur_line
            from flows.report import read_summary

            result = concur_line(config)
            summary = read_summary(result.report_dir)
            extra = {
                "report": _copy_report(config, result.report_dir),
                "mlflow_run": result.mlflow_run,
            }
    data = {
        "name": config.name,
        "seconds": round(time.monotonic() - started, 1),
        "new_work_in": sorted(progress.worked),
        "summary": dict(summary),
        **extra,
    }
    if not quiet:
        _print(config, summary, data)
    return data


def start_server_apart() -> None:
    """Start the embedded server with Ctrl-C blocked, which a child inherits: a terminal sends it to
    every process of the group, and a run whose server is gone tries to tell it how it ended for
    more than a minute."""
    from prefect.client.orchestration import get_client

    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        get_client(sync_client=True)
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _copy_report(config: PipelineConfig, directory: str) -> str:
    """The newest report under a name that does not change, beside the snapshots."""
    source = Path(directory) / "report.html"
    target = Path(config.root) / "report.html"
    return str(atomic_write(target, source.read_bytes()))


def _print(config: PipelineConfig, summary: list[tuple[str, str]], data: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(title=f"concur {config.name} ({config.language.value})", show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, value in summary:
        table.add_row(escape(name), escape(value))
    console.print(table)
    if data["new_work_in"]:
        console.print(
            f"done in {data['seconds']:.0f} s; new work in: {', '.join(data['new_work_in'])}"
        )
    else:
        console.print(
            f"done in {data['seconds']:.0f} s: nothing was new, everything was served from finished"
            " snapshots"
        )
    if "report" not in data:
        return
    print(f"report:      {data['report']}")  # plain lines: a wrapped command cannot be copied
    if served := os.environ.get("PREFECT_API_URL"):
        print(f"Prefect UI:  {served.removesuffix('/api')}")
    else:
        print(
            f"Prefect UI:  PREFECT_HOME={os.environ.get('PREFECT_HOME', '')} {_tool('prefect')}"
            " server start   (http://127.0.0.1:4200)"
        )
    if config.tracking.enabled and config.tracking_uri.startswith("http"):
        print(f"MLflow UI:   {config.tracking_uri}")
    elif config.tracking.enabled:
        artifacts = f"{Path(config.root).absolute()}/mlartifacts"
        print(
            f"MLflow UI:   {_tool('mlflow')} server --backend-store-uri {config.tracking_uri}"
            f" --artifacts-destination {artifacts}   (http://127.0.0.1:5000)"
        )


def _tool(name: str) -> str:
    """The command as this user can type it: beside the running interpreter where it is installed
    there."""
    beside = Path(sys.executable).with_name(name)
    if not beside.exists():
        return name
    try:
        return str(beside.relative_to(Path.cwd()))
    except ValueError:
        return str(beside)


class TerminalProgress:
    """An observer that shows stages on stderr: bars on a terminal, a line every few seconds
    elsewhere."""

    def __init__(self) -> None:
        self.worked: set[str] = set()
        self._bars: Any = None
        self._ids: dict[str, Any] = {}
        self._last: dict[str, float] = {}

    def __enter__(self) -> TerminalProgress:
        if sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import (
                BarColumn,
                MofNCompleteColumn,
                Progress,
                TextColumn,
                TimeElapsedColumn,
                TimeRemainingColumn,
            )

            columns = (
                TextColumn("{task.description:<14}"),
                BarColumn(),
                MofNCompleteColumn(),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
            )
            self._bars = Progress(
                *columns,
                TextColumn("{task.fields[note]}", markup=False),
                console=Console(stderr=True),
            )
            self._bars.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self._bars:
            self._bars.stop()

    def __call__(self, stage: str, done: int, total: int, note: str) -> None:
        self.worked.add(stage)
        note = "".join(c if c.isprintable() else " " for c in note)[:60]
        if self._bars:
            if stage not in self._ids:
                self._ids[stage] = self._bars.add_task(stage, total=total, note=note)
            self._bars.update(self._ids[stage], completed=done, total=total, note=note)
            return
        now = time.monotonic()
        if done >= total or now - self._last.get(stage, 0.0) >= LINE_EVERY_S:
            self._last[stage] = now
            print(f"{stage:<14} {done}/{total}  {note}", file=sys.stderr, flush=True)
