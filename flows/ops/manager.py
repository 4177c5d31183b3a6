"""The process manager of a stack: supervisord (https://supervisord.org), configured by us.

Guarantees: a part that dies is started again at once, and after 1, 2, 3 ... s where it dies within
`STEADY_S` of its start; after `RETRIES` such restarts in a row it is `FATAL` and left alone, and
the others go on. SIGTERM ends the parts in the reverse order of their start. A log stays below
`LOG_BYTES`, with one file before it. Parts end soon after a manager that is killed. Does not know
whether a part answers (health.py asks), and does not restart one that does not: it may be busy.

`python -m flows.ops.manager CONFIGURATION`, in a process of its own, becomes the manager.
"""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from contextlib import suppress
from http.client import HTTPException
from typing import Any
from xmlrpc.client import Error, ServerProxy

from flows.ops.places import PART_VARIABLE, ROOT_VARIABLE, Places
from flows.ops.programs import PYTHON
from flows.ops.settings import PARTS, Part
from kernels_eval.errors import EvalError
from kernels_eval.sandbox.process_tree import Identity, identify
from kernels_eval.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, prctl

STEADY_S, RETRIES = 60, 3
"""Ray gives up after 30 s where a machine is busy."""
GRACE_S = 8
LOG_BYTES = 20_000_000
LAUNCHER = (*PYTHON, "flows.ops.part")
COMMON = f"""[supervisord]
nodaemon = true
silent = true
logfile = {{logs}}/supervisor.log
logfile_maxbytes = {LOG_BYTES}
logfile_backups = 1
pidfile = %(here)s/supervisord.pid
childlogdir = %(here)s
user = {{user}}
minfds = 256
minprocs = 1

[unix_http_server]
file = {{socket}}
chmod = 0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""
PROGRAM = f"""
[program:{{part}}]
command = {{command}}
environment = {PART_VARIABLE}="{{mark}}"
priority = {{priority}}
autorestart = true
startsecs = {STEADY_S}
startretries = {RETRIES}
stopsignal = {{signal}}
stopwaitsecs = {GRACE_S}
redirect_stderr = true
stdout_logfile = {{logs}}/{{part}}.log
stdout_logfile_maxbytes = {LOG_BYTES}
stdout_logfile_backups = 1
"""


def configuration(places: Places, parts: tuple[Part, ...]) -> str:
    """What supervisord reads. Holds no secret: those are in the environment of the manager."""
    logs = f"%(ENV_{ROOT_VARIABLE})s/stack/logs"
    programs = [
        PROGRAM.format(
            part=part,
            mark=places.mark(part),
            command=shlex.join([*LAUNCHER, part]).replace("%", "%%"),
            priority=PARTS.index(part),
            # Told to stop, Prefect's worker kills its flow runs at once; killed, it leaves them to
            # whoever stops the stack, who gives them time.
            signal="KILL" if part == "worker" else "TERM",
            logs=logs,
        )
        for part in parts
    ]
    socket = str(places.socket).replace("%", "%%")
    return COMMON.format(logs=logs, socket=socket, user=os.getuid()) + "".join(programs)


def start_manager(places: Places) -> tuple[Identity, subprocess.Popen[bytes]]:
    """Start supervisord with `places.configuration`. It waits until its standard input is closed.

    Raises OSError, and EvalError where it ends at once.
    """
    path = places.log("supervisor")
    path.touch(mode=0o600)
    with path.open("ab") as log:
        started = subprocess.Popen(
            [*PYTHON, "flows.ops.manager", str(places.configuration)],
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=log,
            start_new_session=True,
            env={**os.environ, ROOT_VARIABLE: str(places.root)},
        )
    identity = identify(started.pid)
    if identity is None:
        raise EvalError("the process manager ended", f"its log is {places.log('supervisor')}")
    return identity, started


class Manager:
    """A client of the manager of one root. Where it does not run, nothing is managed and requests
    do nothing."""

    def __init__(self, places: Places) -> None:
        from supervisor.xmlrpc import SupervisorTransport

        self._server = ServerProxy(
            "http://127.0.0.1", transport=SupervisorTransport(None, None, f"unix://{places.socket}")
        ).supervisor

    def processes(self) -> dict[str, dict[str, Any]]:
        """Part -> what supervisord says of its process: `statename` (FATAL where it has given up),
        `pid`, 0 where there is none, `start` in seconds since 1970, `spawnerr`."""
        return {each["name"]: each for each in self.ask("getAllProcessInfo") or []}

    def ask(self, name: str, *arguments: str | bool) -> Any:
        """Call a method of supervisord; None where it does not run or refuses."""
        with suppress(OSError, HTTPException, Error):
            return getattr(self._server, name)(*arguments)
        return None


def main() -> None:
    """Become supervisord, once standard input is closed. What a part leaves behind becomes a child
    of this process, so that it can be found."""
    from supervisor.supervisord import main as supervisord

    os.umask(0o077)
    sys.stdin.read()
    prctl(PR_SET_CHILD_SUBREAPER, 1)
    supervisord(["--configuration", sys.argv[1]])


if __name__ == "__main__":
    main()
