"""The morning report as the last step of a refresh: two files under the root, and artifacts of the
run itself, because Prefect lists those of its tasks last."""

from __future__ import annotations

from prefect.logging import get_run_logger

from flows.artifacts import (
    create_markdown_artifact,
    create_table_artifact,
    linked,
    warn_on_error,
)
from flows.morning.history import Refresh, before, write_under
from flows.morning.report import report_of
from flows.morning.text import headline, markdown
from flows.morning.trend import METRICS, nights, rows_of, write_trend

MOST_NIGHTS = 30
FILE, FOLDER = "morning.md", "morning"


def write_morning_report(root: str, ended: Refresh) -> None:
    """Write the report of a refresh and show it in Prefect; reads nothing but the history and the
    snapshots of this refresh and of the one before."""
    summary, text, place = write_files(root, ended)
    get_run_logger().info("%s Report: %s", summary, place)
    with warn_on_error("the trend over nights"):
        found = nights(root, ended.name, ended.language)
        text += f"\n{linked('Trend over nights', write_trend(root, ended, found))}\n"
        names = ("night", *(words for words, _ in METRICS.values()))
        rows = [dict(zip(names, row, strict=True)) for row in rows_of(found)]
        create_table_artifact("trend", rows[:MOST_NIGHTS], "Nights, newest first")
    create_markdown_artifact("morning-report", text, summary)


def write_files(root: str, ended: Refresh) -> tuple[str, str, str]:
    """Write `morning.md`, and `morning/<id>.md`, which stays. Returns the headline, the page and
    the path of the second."""
    found = report_of(ended, *before(root, ended))
    text = markdown(found)
    write_under(root, FILE, text)
    return headline(found), text, write_under(root, f"{FOLDER}/{ended.id}.md", text)
