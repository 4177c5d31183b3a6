"""The morning report of a refresh: two files under the root, and the artifact of a run that
finished, with links."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import httpx
from prefect.logging import get_run_logger
from prefect.runtime import deployment, flow_run

from flows.artifacts import Links, create_markdown_artifact, listed, warn_on_error
from flows.morning.history import Entry, Refresh, before, entered, read_under, write_under
from flows.morning.report import report_of
from flows.morning.text import headline, markdown
from flows.runtime.guard import optional
from kernels_eval.installation import command_at, command_name

FILE, FOLDER = "morning.md", "morning"
ASK_S = 3.0


@contextmanager
def reported(
    root: str, name: str, language: str, strategy: str, run_name: str = ""
) -> Iterator[Entry]:
    """Enter a refresh in the history, and write its report however the block ends, short of a
    kill."""
    entry = None
    try:
        again = command_to_resume(root)
        with entered(root, name, language, strategy, run_name, again, stopped_by) as entry:
            yield entry
    except BaseException:
        if entry and entry.ended:
            with suppress(Exception):  # the error of the refresh is the one to leave
                write_files(root, entry.ended)
        raise
    if entry.ended:
        optional("The files of the morning report", write_morning_report, root, entry.ended)


def page_of(refresh_id: str) -> str:
    """The report of a refresh that stays, below the root."""
    return f"{FOLDER}/{refresh_id}.md"


def stopped_by(stop: BaseException) -> str:
    """Who or what ended this run. Asks Prefect for a few seconds: what was told to stop is killed
    soon."""
    if isinstance(stop, KeyboardInterrupt):
        return "Ctrl-C in its terminal"
    with suppress(httpx.HTTPError, ValueError, KeyError):
        url = f"{os.environ['PREFECT_API_URL']}/flow_runs/{flow_run.id}"
        answer = httpx.get(url, timeout=ASK_S, trust_env=False).json()
        if answer["state_name"] in ("Cancelling", "Cancelled"):
            return "Cancel in Prefect"
    return "a signal, such as that of `concur down`"


def command_to_resume(root: str) -> str:
    """The command that continues this run: of a deployment, Prefect's retry; else what was typed.
    Empty where neither is known."""
    if deployment.id:
        retry = shlex.join([command_name("prefect"), "flow-run", "retry", str(flow_run.id)])
        return retry if "://" in root else f'eval "$({command_at("env", root)})"; {retry}'
    program, *arguments = sys.argv
    return shlex.join([command_name(), *arguments]) if Path(program).name == "concur" else ""


def write_morning_report(root: str, ended: Refresh) -> None:
    """Write a refresh's report; reads only the history and the snapshots of this refresh and the
    last."""
    summary, place = write_files(root, ended)
    get_run_logger().info("%s Report: %s", summary, place)


def show_morning_report(root: str, refresh_id: str, links: Links) -> None:
    """Show a refresh's report in Prefect, with links below its first lines."""
    with warn_on_error("the morning report"):
        text = read_under(root, page_of(refresh_id))
        head, heading, sections = text.partition("\n## ")
        shown = f"{head}\n{listed(links)}\n{heading}{sections}" if links else text
        create_markdown_artifact("morning-report", shown, "Read this first: what came, and links")


def write_files(root: str, ended: Refresh) -> tuple[str, str]:
    """Write `morning.md` and the permanent `morning/<id>.md`. Returns the headline and the second
    path."""
    found = report_of(ended, *before(root, ended))
    text = markdown(found)
    write_under(root, FILE, text)
    return headline(found), write_under(root, page_of(ended.id), text)
