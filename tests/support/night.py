"""A Prefect server and a process worker of a test's own, and what a night's run leaves behind on
the machine.

Guarantees: everything that is started here ends with its block, whatever happens in it; the
processes of a run are found by the tree below the worker, sampled while it works, and by a marker
in the environment: what leaves the tree keeps one of the two.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

import flows

ROOT = Path(flows.__file__).parent.parent
POOL = "nights"
MARK = "CONCUR_TEST_NIGHT"
ENDED = ("COMPLETED", "FAILED", "CRASHED", "CANCELLED")


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


def until(
    condition: Callable[[], Any],
    timeout_s: float,
    what: str | Callable[[], str],
    every_s: float = 0.1,
) -> Any:
    """The first true answer of `condition`. Fails the test after `timeout_s` seconds."""
    deadline = time.monotonic() + timeout_s
    while not (found := condition()):
        late = time.monotonic() >= deadline
        assert not late, f"{what() if callable(what) else what}: not within {timeout_s:.0f} s"
        time.sleep(every_s)
    return found


class Night:
    """A client of the server at `url`, in this process: plain HTTP, so that no setting of Prefect's
    leaks into the tests."""

    def __init__(
        self, url: str, environment: dict[str, str], log: Path, server: subprocess.Popen[bytes]
    ) -> None:
        self.url, self.environment, self.log, self.server = url, environment, log, server
        self.mark = environment[MARK]

    def ask(self, path: str, body: Any = None, method: str | None = None) -> Any:
        request = urllib.request.Request(
            f"{self.url}/{path}",
            data=None if body is None else json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
            method=method,
        )
        for attempt in range(5):
            try:
                with urllib.request.urlopen(request, timeout=30) as response:
                    text = response.read()
                break
            except urllib.error.HTTPError as error:
                if (
                    error.code != 503 or attempt == 4
                ):  # its database was busy for a moment: Prefect's own client asks again, too
                    raise
                time.sleep(1)
        return json.loads(text) if text else None

    def deployment(self, name: str, flow: str, entrypoint: str, **more: Any) -> str:
        """The id of a deployment on the pool."""
        flow_id = self.ask("flows/", {"name": flow})["id"]
        body = {
            "name": name,
            "flow_id": flow_id,
            "entrypoint": entrypoint,
            "work_pool_name": POOL,
            "enforce_parameter_schema": False,
        }
        return self.ask("deployments/", body | more)["id"]

    def start(self, deployment: str, **parameters: Any) -> str:
        """The id of a flow run."""
        return self.ask(
            f"deployments/{deployment}/create_flow_run",
            {"parameters": parameters, "state": {"type": "SCHEDULED"}},
        )["id"]

    def state(self, run: str) -> dict[str, Any]:
        return self.ask(f"flow_runs/{run}")["state"]

    def set_state(self, run: str, kind: str, name: str, message: str = "") -> dict[str, Any]:
        """What the UI's buttons do."""
        return self.ask(
            f"flow_runs/{run}/set_state",
            {"state": {"type": kind, "name": name, "message": message}, "force": False},
        )

    def ended(self, run: str, timeout_s: float) -> dict[str, Any]:
        def over() -> dict[str, Any] | None:
            state = self.state(run)
            return state if state["type"] in ENDED else None

        return until(
            over,
            timeout_s,
            lambda: f"the end of {run} ({self.log.read_text(errors='replace')[-3000:]})",
            every_s=0.5,
        )

    def artifacts(self, key: str) -> list[dict[str, Any]]:
        return self.ask(
            "artifacts/filter", {"artifacts": {"key": {"any_": [key]}}, "sort": "CREATED_DESC"}
        )

    # -- processes ---------------------------------------------------------------------------------

    def processes(self) -> set[psutil.Process]:
        """All with this night's marker in their environment, the server and the worker apart."""
        found = set()
        for process in psutil.process_iter():
            with suppress(psutil.Error, OSError):
                if f"{MARK}={self.mark}".encode() in Path(
                    f"/proc/{process.pid}/environ"
                ).read_bytes().split(b"\0"):
                    found.add(process)
        return found


class Watched:
    """Every process that is ever seen below a worker, and every one that carries the marker. A
    thread looks five times a second."""

    def __init__(self, night: Night, worker: subprocess.Popen[bytes]) -> None:
        self.worker = worker
        self._night, self._seen, self._stop = night, set(), threading.Event()
        self._own = {psutil.Process(worker.pid), psutil.Process(night.server.pid)}
        self._own |= set(psutil.Process(night.server.pid).children(recursive=True))
        self._thread = threading.Thread(target=self._look, daemon=True)
        self._thread.start()

    def _look(self) -> None:
        while not self._stop.wait(0.2):
            with suppress(psutil.Error):
                self._seen |= set(psutil.Process(self.worker.pid).children(recursive=True))

    def left(self) -> list[psutil.Process]:
        """Those that still run."""
        server = set()
        with suppress(psutil.Error):
            server = set(psutil.Process(self._night.server.pid).children(recursive=True))
        found = []
        for process in (self._seen | self._night.processes()) - self._own - server:
            with suppress(psutil.Error):
                # the worker's own: it runs the hooks of a run that has ended, in a process of its
                # own
                hook = (
                    "_workspace_runtime_bootstrap" in " ".join(process.cmdline())
                    and "hook" in process.cmdline()
                )
                if process.is_running() and process.status() != psutil.STATUS_ZOMBIE and not hook:
                    found.append(process)
        return found

    def names(self) -> list[str]:
        said = []
        for process in self.left():
            with suppress(psutil.Error):
                said.append(f"{process.pid} {' '.join(process.cmdline())[:160]}")
        return said

    def end(self) -> None:
        self._stop.set()
        self._thread.join()
        for process in self.left():
            with suppress(psutil.Error):
                process.kill()


@contextmanager
def night(home: Path, port: int | None = None, **settings: str) -> Iterator[Night]:
    """A server whose environment, with `settings` on top, is the worker's, too."""
    port = port or free_port()
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")
    } | {
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_API_URL": f"http://127.0.0.1:{port}/api",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "PYTHONPATH": str(ROOT),
        MARK: uuid.uuid4().hex,
        **settings,
    }
    log = home / "night.log"
    command = [
        sys.executable,
        "-m",
        "prefect",
        "server",
        "start",
        "--host",
        "127.0.0.1",
        "--port",
        str(port),
    ]
    with log.open("ab") as output:
        process = subprocess.Popen(
            command, env=environment, stdout=output, stderr=output, start_new_session=True, cwd=home
        )
    found = Night(environment["PREFECT_API_URL"], environment, log, process)

    def healthy() -> bool:
        assert process.poll() is None, log.read_text(errors="replace")[-3000:]
        with suppress(OSError):
            found.ask("health")
            return True
        return False

    try:
        until(healthy, 180, "a Prefect server")
        found.ask(
            "work_pools/",
            {"name": POOL, "type": "process", "base_job_template": process_template()},
        )
        yield found
    finally:
        end_group(process)


@contextmanager
def worker(night: Night, **environment: str) -> Iterator[Watched]:
    """A process worker of the pool; what it leaves behind is killed at the end."""
    command = [
        sys.executable,
        "-m",
        "prefect",
        "worker",
        "start",
        "--pool",
        POOL,
        "--type",
        "process",
    ]
    with night.log.open("ab") as output:
        process = subprocess.Popen(
            command,
            env=night.environment | environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
            cwd=night.log.parent,
        )
    watched = Watched(night, process)
    try:
        yield watched
    finally:
        end_group(process)
        watched.end()


def process_template() -> Mapping[str, Any]:
    """The base job template of process workers, as `prefect work-pool create --type process` takes
    it."""
    from prefect.workers.process import ProcessWorker

    return ProcessWorker.get_default_base_job_template()


def end_group(process: subprocess.Popen[bytes]) -> None:
    for number in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=15)
            break
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
