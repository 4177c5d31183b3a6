"""The owner's side of a supervised server: one process tree that is started, renewed, looked at and
stopped. Knows nothing of vLLM's flags.

Guarantees: what `start` started is gone when `ended` is set, and is being stopped once this process
is gone or has not called `renew` for `lease_s` (see supervisor.py). `unhealthy` asks without
proxies. Does not start anything twice.
"""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).parents[2]
SUPERVISOR = (
    f"import sys; sys.path.insert(0, {str(ROOT)!r});"
    " from tasks.synthesis.supervisor import main; main()"
)
START_LINE = re.compile(r"^--- \d{4}-.*\n", re.MULTILINE)
TAIL_BYTES, TAIL_LINES = 16_384, 30
ORPHAN_S = 5.0
"""A server whose supervisor was killed has its SIGTERM from the kernel; so long after it, its group
is killed."""
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Supervised:
    """One server process with everything below it. All times are in seconds, sizes in bytes."""

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log_dir: str,
        log_name: str,
        log_bytes: int,
        lease_s: float,
        grace_s: float,
    ) -> None:
        self.pid: int | None = None
        self.log: Path | None = None
        self.status: int | None = None
        self.fault: str | None = None
        """Why there was no server at all: the command cannot be run, say."""
        self.ended = threading.Event()
        self._lock = threading.Lock()
        spec = {
            "command": list(command),
            "log_dir": log_dir,
            "log_name": log_name,
            "log_bytes": log_bytes,
            "lease_s": lease_s,
            "grace_s": grace_s,
        }
        process = subprocess.Popen(
            [sys.executable, "-I", "-c", SUPERVISOR],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=dict(env),
            bufsize=0,
        )
        assert process.stdin and process.stdout
        self._stdin, self._stdout = process.stdin, process.stdout
        self._say(json.dumps(spec).encode() + b"\n")
        process.wait()  # what was started forks the supervisor and ends
        threading.Thread(target=self._listen, name="supervised server", daemon=True).start()

    def renew(self) -> None:
        """The owner, or who it works for, is alive."""
        self._say(b"r")

    def stop(self, at_once: bool = False) -> None:
        """Ask for the end; `ended` says when it has come. `at_once`: do not wait for the answers
        in flight."""
        self._say(b"k" if at_once else b"q")

    def tail(self) -> str:
        """The last lines of what this server has written, empty where it has written nothing."""
        if self.log is None:
            return ""
        try:
            with open(self.log, "rb") as handle:
                handle.seek(max(0, handle.seek(0, os.SEEK_END) - TAIL_BYTES))
                text = handle.read().decode("utf-8", "replace")
        except OSError:
            return ""
        return "\n".join(START_LINE.split(text)[-1].splitlines()[-TAIL_LINES:])

    def _say(self, words: bytes) -> None:
        with self._lock, suppress(OSError, ValueError):  # it has ended, and its pipe may be closed
            self._stdin.write(words)

    def _listen(self) -> None:
        for line in self._stdout:  # to its end: the supervisor itself is gone then, too
            event = json.loads(line)
            if event["event"] == "started":
                self.pid, self.log = event["pid"], Path(event["log"])
            elif event["event"] == "exited":
                self.status = event["status"]
            else:
                self.fault = event["error"]
        if self.status is None and self.fault is None:
            self._end_group()  # the supervisor was killed
        for pipe in (self._stdin, self._stdout):
            pipe.close()
        self.ended.set()

    def _end_group(self) -> None:
        if self.pid is None:
            return
        deadline = time.monotonic() + ORPHAN_S
        with suppress(ProcessLookupError, PermissionError):
            while time.monotonic() < deadline:
                os.killpg(self.pid, 0)  # raises once the group is empty
                time.sleep(0.05)
            os.killpg(self.pid, signal.SIGKILL)


def free_port(host: str, wanted: int | None = None) -> int:
    """A port that is free: the wanted one if possible. Another program may take it before
    the server does."""
    for port in (wanted, 0):
        if port is not None:
            with socket.socket() as probe, suppress(OSError):
                probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                probe.bind((host, port))
                return int(probe.getsockname()[1])
    raise OSError(f"no port is free at {host}")


def unhealthy(address: str, names: Sequence[str], api_key: str, timeout_s: float) -> str | None:
    """What keeps the server at http://HOST:PORT from serving these models; None where it does."""
    try:
        with _OPENER.open(f"{address}/health", timeout=timeout_s):
            pass
        asked = urllib.request.Request(
            f"{address}/v1/models", headers={"Authorization": f"Bearer {api_key}"}
        )
        with _OPENER.open(asked, timeout=timeout_s) as answer:
            served = {model["id"] for model in json.load(answer)["data"]}
    except (OSError, ValueError, KeyError, TypeError) as error:  # URLError is an OSError
        return str(error)
    missing = [name for name in names if name not in served]
    return (
        f"it serves {', '.join(sorted(served))} and not {', '.join(missing)}" if missing else None
    )
