"""The morning report as the last step of a refresh: two files under the root and an artifact."""

from __future__ import annotations

from prefect import task
from prefect.cache_policies import NO_CACHE
from prefect.logging import get_run_logger

from flows.artifacts import create_markdown_artifact, create_table_artifact, warn_on_error
from flows.morning.history import Refresh, before, write_under
from flows.morning.report import report_of
from flows.morning.text import headline, markdown
from flows.morning.trend import METRICS, nights, rows_of, write_trend

MOST_NIGHTS = 30
FILE, FOLDER = "morning.md", "morning"


@task(name="morning report", task_run_name="write the morning report", cache_policy=NO_CACHE)
def write_morning_report(root: str, ended: Refresh) -> None:
    """Write the report of a refresh and show it in Prefect; reads nothing but the history and the
    snapshots of this refresh and of the one before."""
    summary, text, place = write_files(root, ended)
    get_run_logger().info("%s Report: %s", summary, place)
    create_markdown_artifact("morning-report", text, summary)
    with warn_on_error("the trend over nights"):
        path = write_trend(root, ended)
        get_run_logger().info("Trend over nights: %s", path)
        found = nights(root, ended.name, ended.language)
        names = ("night", *(words for words, _ in METRICS.values()))
        rows = [dict(zip(names, row, strict=True)) for row in rows_of(found)]
        create_table_artifact("trend", rows[:MOST_NIGHTS], f"Nights, newest first; figure: {path}")


def write_files(root: str, ended: Refresh) -> tuple[str, str, str]:
    """Write `morning.md`, and `morning/<id>.md`, which stays. Returns the headline, the page and
    the path of the second."""
    found = report_of(ended, *before(root, ended))
    text = markdown(found)
    write_under(root, FILE, text)
    return headline(found), text, write_under(root, f"{FOLDER}/{ended.id}.md", text)
