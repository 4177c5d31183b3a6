"""Prefect artifacts of a flow: links, tables and the snapshots it made. A failure is one warning in
the run's log. Does not sanitise Markdown."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import polars as pl
from httpx import TransportError
from prefect import artifacts
from prefect.logging import get_run_logger

from flows.config import PipelineConfig
from kernels_eval.records import Row
from tasks.reporting.text import cells, interval
from tasks.retry import retry_until_back
from tasks.tracking.config import page_of

if TYPE_CHECKING:
    from tasks.store.snapshot import SnapshotRef

Links = dict[str, str]
"""Addresses by their words."""
OWN_PAGE = "This run in MLflow"
BACK_S = 120.0
"""Seconds to wait for a Prefect server that does not answer. Its client waits a minute, but only
after a first contact."""


@contextmanager
def warn_on_error(what: str) -> Iterator[None]:
    """Turn any exception of the block into a warning, so that artifacts never fail a run."""
    try:
        yield
    except Exception as error:
        get_run_logger().warning("could not show %s: %s: %s", what, type(error).__name__, error)


def create_markdown_artifact(key: str, markdown: str, description: str) -> str:
    """The page of the artifact, seen from another's: an absolute path would lead to Prefect's
    former pages. Empty where it could not be made."""
    create = artifacts.create_markdown_artifact
    made = _create(create, key=key, markdown=markdown, description=description)
    return f"../artifact/{made}" if made else ""


def create_table_artifact(key: str, table: Iterable[Row], description: str) -> None:
    rows = cells(table)
    _create(artifacts.create_table_artifact, key=key, table=rows, description=description)


def _create(create: Callable[..., object], **told: object) -> object:
    with warn_on_error(f"the artifact {told['key']}"):
        return retry_until_back(
            lambda: create(**told),
            service="the Prefect server",
            is_absent=lambda error: isinstance(error, TransportError),
            log=get_run_logger().warning,
            deadline_s=BACK_S,
        )
    return None


def link_mlflow(config: PipelineConfig, run_id: str | None, page: str | None = None) -> None:
    """An artifact of `mlflow_links`, unless no browser could follow."""
    if links := mlflow_links(config, run_id, page):
        create_markdown_artifact("mlflow-run", listed(links), "Links: this run beside others")


def mlflow_links(config: PipelineConfig, run_id: str | None, page: str | None = None) -> Links:
    """Links to the MLflow run, a page among its files (`report.html`, `comparison.html`) and the
    scores of all runs or branches, by their words; none where no browser could follow. The first
    run has none to be compared with."""
    if run_id is None:
        return {}
    what, view = ("branches", run_id) if page == "comparison.html" else ("all runs", "scores")
    places = {OWN_PAGE: f"runs/{run_id}", f"Compare {what} in MLflow": "runs"}
    if page:
        places[f"The {Path(page).stem} in MLflow"] = f"runs/{run_id}/artifacts/{page}"
    found: Links = {}
    for text, at in places.items():
        url = run_url(config, run_id, at, view if at == "runs" else "")
        if url is None:
            get_run_logger().info("MLflow run %s in %s", run_id, config.tracking_uri)
            return {}
        if url in found.values():
            found = {f"{OWN_PAGE} (from the second run on, a comparison too)": url}
        else:
            found[text] = url
    return found


def listed(links: Links) -> str:
    return "\n".join(f"- [{text}]({url})" for text, url in links.items())


def show_kernels(verdicts: SnapshotRef, candidates: SnapshotRef) -> str:
    """Code of the best kernels and of one of each error; and write the viewer of the root. Returns
    the page, empty without one."""
    page = ""
    with warn_on_error("the code of the kernels"):
        from flows.kernels import kernels_page

        text = kernels_page(verdicts, candidates)
        about = "Code: the fastest of each task, and errors"
        page = create_markdown_artifact("kernels", text, about)
    with warn_on_error("the viewer of candidates"):
        from flows.view import write_view

        write_view(verdicts.root)
    return page


def run_url(config: PipelineConfig, run_id: str, place: str, view: str) -> str | None:
    """Browser address of a run's MLflow experiment: at the tracking server, or, for a database, at
    $CONCUR_MLFLOW_URL. None where unknown. Of the first run, which has none to be compared with,
    its own page in place of `scores`."""
    from tasks.tracking.connection import SCORES, bounded_and_quiet, connect, is_only

    uri = config.tracking_uri
    served = uri if uri.startswith(("http://", "https://")) else os.environ.get("CONCUR_MLFLOW_URL")
    if not served:
        return None
    try:
        with bounded_and_quiet():
            client = connect(uri)
            experiment = client.get_run(run_id).info.experiment_id
            if view == SCORES and is_only(client, experiment):
                place, view = f"runs/{run_id}", ""
    except Exception:  # a run does not fail for a link
        return None
    return page_of(served, experiment, place, view)


def show_snapshots(refs: Mapping[str, SnapshotRef | None]) -> None:
    with warn_on_error("the table of snapshots"):
        opened = {name: ref.open() for name, ref in refs.items() if ref}
        rows = [
            {"what": name, "rows": f"{one.manifest['rows']:,}", "where": str(one.path)}
            for name, one in opened.items()
        ]
        create_table_artifact("snapshots", rows, "Where its snapshots are")


def show_scores(scores: pl.DataFrame) -> None:
    shown = scores.filter(
        pl.col("metric").is_in(["exec", "fast_1"]), pl.col("value").is_not_null()
    ).filter(track="custom_kernel")
    table = [
        {
            "model": row["model"],
            "metric": f"{row['metric']} at {row['k']}",
            "value (95 % interval)": interval(row["value"], row["lower"], row["upper"], ".1%"),
            "tasks": row["tasks"],
        }
        for row in shown.iter_rows(named=True)
    ]
    create_table_artifact("scores", table, "Scores on the held-out tasks")


GAIN = ("gain", "gain_lower", "gain_upper")


def show_gains(summary: Row) -> None:
    all_tasks = zip(GAIN, summary["gain"].values(), strict=True)
    rows = [*summary["results"], {"task_id": "all, geometric mean", **dict(all_tasks)}]
    table = [
        {
            "task": row["task_id"],
            "gain (95 % interval)": interval(row[GAIN[0]], row[GAIN[1]], row[GAIN[2]], ".3f"),
        }
        for row in rows
    ]
    create_table_artifact("gains", table, "Confirmed: winner / start in speed")


def key_of(name: str) -> str:
    plain = "".join(c if c.isascii() and c.isalnum() else " " for c in name.lower())
    return "-".join(plain.split())
