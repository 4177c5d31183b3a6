"""supervisord (https://supervisord.org) as a stack's process manager. Ended parts restart at once,
quickly ended ones after 1, 2, 3 ... s until they are FATAL."""

from __future__ import annotations

import subprocess
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from xmlrpc.client import Error, ServerProxy

from flows.stack.layout import ROOT_VARIABLE, Layout
from flows.stack.programs import PYTHON, inherited
from kernels_eval.records import Json


class Supervisor:
    """The supervisord of one stack. Requests have no effect unless it runs."""

    def __init__(self, layout: Layout) -> None:
        from supervisor.xmlrpc import SupervisorTransport

        self._layout = layout
        transport = SupervisorTransport(None, None, f"unix://{layout.socket}")
        self._server = ServerProxy("http://127.0.0.1", transport=transport).supervisor

    def start(self) -> None:
        with self._layout.log("supervisord-output").open("ab") as output:
            subprocess.Popen(
                [
                    *PYTHON,
                    "supervisor.supervisord",
                    "--nodaemon",
                    "--silent",
                    f"--configuration={self._layout.configuration}",
                ],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                env=inherited() | {ROOT_VARIABLE: str(self._layout.root)},
            )

    def pid(self) -> int | None:
        found: int | None = self.ask("getPID")
        return found

    def processes(self) -> dict[str, Json]:
        """State of each part: `statename` (STARTING, RUNNING, BACKOFF, FATAL, ...), `pid` (0:
        none), `start` in seconds since 1970, `description`."""
        return {each["name"]: each for each in self.ask("getAllProcessInfo") or []}

    def ask(self, method: str, *arguments: str | bool) -> Any:
        with suppress(OSError, HTTPException, Error):
            return getattr(self._server, method)(*arguments)
        return None


def ends(layout: Layout, part: str) -> int:
    """How often a part has ended by itself since this supervisord began."""
    with suppress(OSError):
        text = layout.log("supervisor").read_text(errors="replace")
        return text.rpartition("supervisord started with pid")[2].count(f" exited: {part} ")
    return 0
