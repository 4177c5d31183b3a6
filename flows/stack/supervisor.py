"""supervisord (https://supervisord.org) as the process manager of a stack: start it, and ask it
through its own RPC.

Guarantees: a part that ends is started again at once; one that ends within seconds of its start
after 1, 2, 3 ... s, and after a few such ends in a row it is FATAL and left alone. Parts end in the
reverse order of their start. Does not restart a part that runs and does not answer: it may be busy.
"""

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
    """The supervisord of one stack. Requests to one that does not run do nothing."""

    def __init__(self, layout: Layout) -> None:
        from supervisor.xmlrpc import SupervisorTransport

        self._layout = layout
        transport = SupervisorTransport(None, None, f"unix://{layout.socket}")
        self._server = ServerProxy("http://127.0.0.1", transport=transport).supervisor

    def start(self) -> None:
        """Start supervisord in a session of its own. Raises OSError."""
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
        """Its process id; None where it does not run."""
        found: int | None = self.ask("getPID")
        return found

    def processes(self) -> dict[str, Json]:
        """What it says of each part: `statename` (STARTING, RUNNING, BACKOFF, FATAL, ...), `pid`
        (0: none), `start` in seconds since 1970, `description`."""
        return {each["name"]: each for each in self.ask("getAllProcessInfo") or []}

    def ask(self, method: str, *arguments: str | bool) -> Any:
        """Call a method of its RPC; None where it does not run or refuses."""
        with suppress(OSError, HTTPException, Error):
            return getattr(self._server, method)(*arguments)
        return None
