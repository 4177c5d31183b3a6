"""What a flow shows in Prefect beside its progress: links, figures, tables and the snapshots it
made.

Guarantees: a fault here is one warning in the run's log and never ends a run; a server that is
restarting is waited for; figures are embedded, so they are visible wherever the page is opened;
cells of tables hold no markup. Does not sanitise Markdown: its author does. Call inside a flow.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from httpx import TransportError
from prefect import artifacts
from prefect.logging import get_run_logger

from flows.config import PipelineConfig
from flows.set_figures import TABLES_FILE
from tasks.reporting.charts import FIRST, labelled, new_figure, style
from tasks.reporting.text import cells, interval
from tasks.retry import retry_until_back

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tasks.benchmark.scoring import ScoreRow
    from tasks.store.snapshot import SnapshotRef

MOST_BYTES = 400_000
"""A larger figure stays a file: an artifact is a row of Prefect's database."""
BACK_S = 120.0
"""How long a Prefect server that does not answer is waited for. Its client waits a minute, but only
where it has spoken to it before."""


@contextmanager
def warn_on_error(what: str) -> Iterator[None]:
    """Turn any exception of the block into a warning: a run does not fail for what it shows."""
    try:
        yield
    except Exception as error:
        get_run_logger().warning("%s is not shown: %s: %s", what, type(error).__name__, error)


def create_markdown_artifact(key: str, markdown: str, description: str) -> None:
    _create(artifacts.create_markdown_artifact, key=key, markdown=markdown, description=description)


def create_table_artifact(key: str, table: Iterable[Mapping[str, Any]], description: str) -> None:
    rows = cells(table)
    _create(artifacts.create_table_artifact, key=key, table=rows, description=description)


def _create(create: Callable[..., Any], **told: Any) -> None:
    with warn_on_error(f"the artifact {told['key']}"):
        retry_until_back(
            lambda: create(**told),
            service="the Prefect server",
            is_absent=lambda error: isinstance(error, TransportError),
            log=get_run_logger().warning,
            deadline_s=BACK_S,
        )


def link_mlflow(config: PipelineConfig, run_id: str | None, page: str | None = None) -> None:
    """Link to the MLflow run, and to a page among its files (`report.html`, `comparison.html`).
    Nothing where no browser could follow the links."""
    if run_id is None:
        return
    url = run_url(config, run_id)
    if url is None:
        get_run_logger().info("MLflow run %s in %s", run_id, config.tracking_uri)
        return
    _link("mlflow-run", url, "This run in MLflow", "Metrics, parameters and files")
    if page:
        what, at = Path(page).stem, f"{url}/artifacts/{page}"
        _link(f"{what}-page", at, f"The {what} in MLflow", "The page with its figures")


def show_candidates(config: PipelineConfig) -> None:
    """Write the viewer of the root's candidates, and say where it lies."""
    with warn_on_error("the viewer of candidates"):
        from flows.view import write_view

        page = write_view(config.root)["page"]
        text = f"Every candidate with its code, verdict and log: open `{page}` in a browser."
        create_markdown_artifact("candidates", text, "The viewer of candidates")


def _link(key: str, url: str, text: str, description: str) -> None:
    create = artifacts.create_link_artifact
    _create(create, key=key, link=url, link_text=text, description=description)


def run_url(config: PipelineConfig, run_id: str) -> str | None:
    """The address of an MLflow run for a browser: at the tracking server, or at $CONCUR_MLFLOW_URL
    where runs go to a database. None where neither is known, or MLflow does not answer."""
    from tasks.tracking.connection import bounded_and_quiet, connect

    uri = config.tracking_uri
    served = uri if uri.startswith(("http://", "https://")) else os.environ.get("CONCUR_MLFLOW_URL")
    if not served:
        return None
    try:
        with bounded_and_quiet():
            experiment = connect(uri).get_run(run_id).info.experiment_id
    except Exception:  # a run does not fail for a link
        return None
    return f"{served.rstrip('/')}/#/experiments/{experiment}/runs/{run_id}"


def show_snapshots(refs: Mapping[str, SnapshotRef | None]) -> None:
    """A table of the snapshots that a run made, and where they are."""
    with warn_on_error("the table of snapshots"):
        opened = {name: ref.open() for name, ref in refs.items() if ref}
        rows = [
            {"what": name, "rows": f"{one.manifest['rows']:,}", "where": str(one.path)}
            for name, one in opened.items()
        ]
        create_table_artifact("snapshots", rows, "Where the snapshots of this run are")


def show_drawn(paths: Iterable[Path], descriptions: Mapping[str, str], suffix: str = "") -> str:
    """Show figures beside a snapshot; `descriptions` is by file name without its ending, and
    `suffix` ends the keys of the artifacts. Returns the tables among the files."""
    tables = ""
    for path in paths:
        if path.name == TABLES_FILE:
            tables = path.read_text(encoding="utf-8")
        if path.suffix == ".png" and path.stem in descriptions:
            with warn_on_error(path.name):
                _show(path.read_bytes(), key_of(f"{path.stem} {suffix}"), descriptions[path.stem])
    return tables


def show_loss(steps: Sequence[int], losses: Sequence[float]) -> None:
    """The loss of a training by optimiser step."""

    def draw(axes: Axes) -> None:
        marker = "o" if len(steps) < 60 else ""
        axes.plot(steps, losses, color=FIRST, marker=marker, markersize=3)
        axes.set_ylim(bottom=0)
        labelled(axes, "optimiser step", "loss", grid="both")

    _draw("training-loss", "Training loss by optimiser step", draw)


def show_scores(rows: Sequence[ScoreRow]) -> None:
    """Exec and fast_1 of every model with their 95 % intervals, as a table and as a figure."""
    shown = [
        row
        for row in rows
        if row.track == "custom_kernel" and row.metric in ("exec", "fast_1") and row.k
        if row.value is not None
    ]
    names = [(row.model, f"{row.metric} at {row.k}") for row in shown]
    table = [
        {
            "model": model,
            "metric": metric,
            "value (95 % interval)": interval(row.value, row.lower, row.upper, ".1%"),
            "tasks": row.tasks,
        }
        for (model, metric), row in zip(names, shown, strict=True)
    ]
    create_table_artifact("scores", table, "Exec and fast_1 on the held-out tasks")

    def draw(axes: Axes) -> None:
        for number, row in enumerate(shown):
            known = [each for each in (row.value, row.lower, row.upper) if each is not None]
            axes.hlines(number, min(known), max(known), color=FIRST)
            axes.plot([known[0]], [number], marker="o", color=FIRST)
        axes.set_yticks(range(len(shown)), [", ".join(name) for name in names])
        axes.invert_yaxis()
        axes.set_xlim(0, 1)
        labelled(axes, "share of tasks", "", grid="both")

    if shown:
        _draw("score-figure", "Scores with 95 % intervals", draw, 1.2 + 0.3 * len(shown))


def key_of(name: str) -> str:
    """A name as Prefect accepts it for an artifact's key: small letters, digits and dashes."""
    plain = "".join(c if c.isascii() and c.isalnum() else " " for c in name.lower())
    return "-".join(plain.split())


def _draw(key: str, title: str, draw: Callable[[Axes], None], height_inches: float = 3.6) -> None:
    with warn_on_error(title), style():
        figure, (axes,) = new_figure(7.0, height_inches)
        axes.set_title(title)
        draw(axes)
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png", dpi=110)
        _show(buffer.getvalue(), key, title)


def _show(png: bytes, key: str, description: str) -> None:
    if len(png) <= MOST_BYTES:
        url = f"data:image/png;base64,{base64.b64encode(png).decode()}"
        _create(artifacts.create_image_artifact, image_url=url, key=key, description=description)
