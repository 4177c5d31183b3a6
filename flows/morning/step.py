"""The morning report, last step of a refresh: two files under the root, and an artifact of a run
that finished."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from prefect.logging import get_run_logger

from flows.artifacts import create_markdown_artifact
from flows.morning.history import Entry, Refresh, before, entered, write_under
from flows.morning.report import report_of
from flows.morning.text import headline, markdown
from flows.runtime.guard import optional

FILE, FOLDER = "morning.md", "morning"


@contextmanager
def reported(
    root: str, name: str, language: str, strategy: str, run_name: str = ""
) -> Iterator[Entry]:
    """Enter a refresh in the history, and write its report however the block ends, short of a
    kill."""
    entry = None
    try:
        with entered(root, name, language, strategy, run_name) as entry:
            yield entry
    except BaseException:
        if entry and entry.ended:
            with suppress(Exception):  # the error of the refresh is the one to leave
                write_files(root, entry.ended)
        raise
    if entry.ended:
        optional("The files of the morning report", write_morning_report, root, entry.ended)


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
