"""The morning report as the last step of a refresh: two files under the root, and artifacts of the
run itself, because Prefect lists those of its tasks last."""

from __future__ import annotations

from prefect.logging import get_run_logger

from flows.artifacts import create_markdown_artifact
from flows.morning.history import Refresh, before, write_under
from flows.morning.report import report_of
from flows.morning.text import headline, markdown

FILE, FOLDER = "morning.md", "morning"


def write_morning_report(root: str, ended: Refresh) -> None:
    """Write the report of a refresh and show it in Prefect; reads nothing but the history and the
    snapshots of this refresh and of the one before."""
    summary, text, place = write_files(root, ended)
    get_run_logger().info("%s Report: %s", summary, place)
    create_markdown_artifact("morning-report", text, summary)


def write_files(root: str, ended: Refresh) -> tuple[str, str, str]:
    """Write `morning.md`, and `morning/<id>.md`, which stays. Returns the headline, the page and
    the path of the second."""
    found = report_of(ended, *before(root, ended))
    text = markdown(found)
    write_under(root, FILE, text)
    return headline(found), text, write_under(root, f"{FOLDER}/{ended.id}.md", text)
