"""The morning report as the last step of a refresh: two files under the root and an artifact."""

from __future__ import annotations

from prefect.logging import get_run_logger

from flows.artifacts import create_markdown_artifact
from flows.morning.history import Refresh, write_under
from flows.morning.report import morning
from flows.morning.text import headline, markdown

FILE, FOLDER = "morning.md", "morning"


def write_morning_report(root: str, ended: Refresh) -> None:
    """Write the report and show it in Prefect. Call inside a flow.

    A failure is an error in the log: the refresh itself is finished.
    """
    log = get_run_logger()
    try:
        summary, text, place = write_files(root, ended)
    except Exception as error:
        log.error(
            "the morning report was not written (%s: %s); `concur morning` makes it again",
            type(error).__name__,
            error,
        )
        return
    log.info("%s Report: %s", summary, place)
    create_markdown_artifact(key="morning-report", markdown=text, description=summary)


def write_files(root: str, ended: Refresh) -> tuple[str, str, str]:
    """Write `morning.md`, and `morning/<id>.md`, which stays. Returns the headline, the page and
    the path of the second."""
    found = morning(root, ended)
    text = markdown(found)
    write_under(root, FILE, text)
    return headline(found), text, write_under(root, f"{FOLDER}/{ended.id}.md", text)
