"""What a flow shows in Prefect beside its progress: links, figures and the snapshots it made.

Guarantees: whatever goes wrong here is one warning in the run's log, never the end of a run; a
server that is started again is waited for; figures are embedded, so that they are seen wherever the
page is opened; nothing that a candidate wrote is shown here, but by who calls
`create_..._artifact`. Call inside a flow.
"""

from __future__ import annotations

import base64
import io
import os
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from prefect import artifacts
from prefect.logging import get_run_logger

from flows.config import PipelineConfig
from tasks.reporting.text import cells

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from tasks.benchmark.scoring import ScoreRow
    from tasks.store.snapshot import SnapshotRef

MOST_BYTES = 400_000
"""A larger figure stays a file: an artifact is a row of Prefect's database."""
BACK_S = 120.0
"""How long a Prefect server that does not answer is waited for. Its client waits a minute, but only
where it has spoken to it before."""
ASK_EVERY_S = 1.0


@contextmanager
def never_in_the_way(what: str) -> Any:
    try:
        yield
    except Exception as error:  # a run is not given up for what is shown of it
        get_run_logger().warning("%s is not shown: %s: %s", what, type(error).__name__, error)


def create_markdown_artifact(key: str, markdown: str, description: str) -> None:
    _create(artifacts.create_markdown_artifact, key=key, markdown=markdown, description=description)


def create_table_artifact(key: str, table: Any, description: str) -> None:
    _create(artifacts.create_table_artifact, key=key, table=table, description=description)


def _create(create: Callable[..., Any], **told: Any) -> None:
    from httpx import TransportError

    deadline = time.monotonic() + BACK_S
    with never_in_the_way(f"the artifact {told['key']}"):
        while True:
            try:
                create(**told)
                return
            except TransportError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(
                ASK_EVERY_S
            )  # between two attempts; what ends the wait is the server's answer


def link_mlflow(config: PipelineConfig, run_id: str | None, page: str | None = None) -> None:
    """Links to the MLflow run, and to the page among its files where it has one (`report.html`,
    `comparison.html`). Nothing where no browser could follow them."""
    with never_in_the_way("the link to MLflow"):
        url = run_url(config, run_id) if run_id else None
        if url is None:
            if run_id:
                get_run_logger().info("MLflow run %s in %s", run_id, config.tracking_uri)
            return
        told = {
            "link_text": "This run in MLflow",
            "key": "mlflow-run",
            "description": "Metrics, parameters and files",
        }
        _create(artifacts.create_link_artifact, link=url, **told)
        if page:
            what = Path(page).stem
            told = {
                "link_text": f"The {what} in MLflow",
                "key": key_of(f"{what} page"),
                "description": "The page with its figures",
            }
            _create(artifacts.create_link_artifact, link=f"{url}/artifacts/{page}", **told)


def run_url(config: PipelineConfig, run_id: str) -> str | None:
    """Where a browser finds a run of MLflow: at the tracking server, or at $CONCUR_MLFLOW_URL where
    runs go to a database.

    None where neither is known, or MLflow does not answer.
    """
    from tasks.tracking.connection import bounded_and_quiet, connect

    uri = config.tracking_uri
    served = uri if uri.startswith(("http://", "https://")) else os.environ.get("CONCUR_MLFLOW_URL")
    if not served:
        return None
    try:
        with bounded_and_quiet():
            experiment = connect(uri).get_run(run_id).info.experiment_id
    except Exception:  # a link is no reason to fail
        return None
    return f"{served.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}"


def show_snapshots(refs: Mapping[str, SnapshotRef | None]) -> None:
    """What was made and where it lies, as a table."""
    with never_in_the_way("the table of snapshots"):
        rows = [
            {
                "what": name,
                "rows": f"{ref.open().manifest['rows']:,}",
                "where": str(ref.open().path),
            }
            for name, ref in refs.items()
            if ref
        ]
        create_table_artifact(
            key="snapshots", table=cells(rows), description="Where the snapshots of this run lie"
        )


def show_files(paths: Iterable[Path], descriptions: Mapping[str, str], suffix: str = "") -> None:
    """Figures that lie beside a snapshot, by the names of their files without the ending; `suffix`
    ends the keys of the artifacts."""
    for path in paths:
        if path.suffix == ".png" and path.stem in descriptions:
            with never_in_the_way(path.name):
                _show(path.read_bytes(), key_of(f"{path.stem} {suffix}"), descriptions[path.stem])


def show_loss(steps: Sequence[int], losses: Sequence[float]) -> None:
    """The loss of a training by optimiser step."""

    def draw(axes: Any) -> None:
        axes.plot(steps, losses, marker="o" if len(steps) < 60 else "", markersize=3)
        axes.set(xlabel="optimiser step", ylabel="loss", ylim=(0, None), title="Training loss")

    _draw("training-loss", "Training loss by optimiser step", draw)


def show_scores(rows: Sequence[ScoreRow]) -> None:
    """Exec and fast_1 of every model with their 95 % intervals, as a figure and as a table."""
    shown = [
        row
        for row in rows
        if row.track == "custom_kernel"
        and row.metric in ("exec", "fast_1")
        and row.k
        and row.value is not None
    ]
    with never_in_the_way("the table of scores"):
        table = [
            {
                "model": row.model,
                "metric": f"{row.metric} at {row.k}",
                "value": f"{row.value:.1%}",
                "95 % interval": (
                    "-"
                    if row.lower is None or row.upper is None
                    else f"{row.lower:.1%} to {row.upper:.1%}"
                ),
                "tasks": row.tasks,
            }
            for row in shown
        ]
        create_table_artifact(
            key="scores", table=cells(table), description="Exec and fast_1 on the held-out tasks"
        )

    def draw(axes: Any) -> None:
        names = [f"{row.model}, {row.metric} at {row.k}" for row in shown]
        low = [
            max(0.0, row.value - (row.value if row.lower is None else row.lower)) for row in shown
        ]
        high = [
            max(0.0, (row.value if row.upper is None else row.upper) - row.value) for row in shown
        ]
        axes.errorbar(
            [row.value for row in shown], range(len(shown)), xerr=[low, high], fmt="o", capsize=3
        )
        axes.set_yticks(range(len(shown)), names)
        axes.invert_yaxis()
        axes.set(xlim=(0, 1), xlabel="share of tasks", title="Scores with 95 % intervals")

    if shown:
        _draw(
            "score-figure", "Scores with 95 % intervals", draw, height_inches=1.2 + 0.3 * len(shown)
        )


def key_of(name: str) -> str:
    """A name as Prefect takes it for an artifact's key: small letters, digits and dashes."""
    return "-".join(
        "".join(c if c.isascii() and c.isalnum() else " " for c in name.lower()).split()
    )


def _draw(
    key: str, description: str, draw: Callable[[Any], None], height_inches: float = 3.6
) -> None:
    with never_in_the_way(description):
        from matplotlib.figure import Figure

        figure: Figure = Figure(figsize=(7.0, height_inches), layout="constrained")
        axes = figure.add_subplot()
        axes.grid(True, alpha=0.3, linewidth=0.6)
        draw(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        _show(buffer.getvalue(), key, description)


def _show(png: bytes, key: str, description: str) -> None:
    if len(png) <= MOST_BYTES:
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        _create(artifacts.create_image_artifact, image_url=url, key=key, description=description)
