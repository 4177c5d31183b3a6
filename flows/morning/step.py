"""The morning report, last step of a refresh: two files under the root, and artifacts of the
run."""

from __future__ import annotations

from prefect.logging import get_run_logger

from flows.artifacts import create_markdown_artifact
from flows.morning.history import Refresh, before, write_under
from flows.morning.report import report_of
from flows.morning.text import headline, markdown

FILE, FOLDER = "morning.md", "morning"


def write_morning_report(root: str, ended: Refresh) -> None:
    """Write a refresh's report and show it in Prefect; reads only the history and the snapshots of
    this refresh and the last."""
    summary, text, place = write_files(root, ended)
    get_run_logger().info("%s Report: %s", summary, place)
    create_markdown_artifact("morning-report", text, "What this refresh brought")


def write_files(root: str, ended: Refresh) -> tuple[str, str, str]:
    """Write `morning.md` and the permanent `morning/<id>.md`. Returns the headline, the page and
    the second path."""
    found = report_of(ended, *before(root, ended))
    text = markdown(found)
    write_under(root, FILE, text)
    return headline(found), text, write_under(root, f"{FOLDER}/{ended.id}.md", text)
