"""A real Prefect server and a real MLflow server, each a process on a free port of the loopback,
for tests.

Guarantees: when a block begins the server answers its health endpoint; when it ends no process of
it is left. Data lie in the folder that the test gave. Does not share anything with a server that
the user runs: the homes are those of the test, and every setting of Prefect and MLflow in the
environment is left out.
"""

import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import b64encode
from collections.abc import Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import psutil

READY_S = 300.0  # 10 s on a machine that does nothing else
ENDS_S = 20.0
ATTEMPTS = 3
LOOPBACK = ("--host", "127.0.0.1", "--port")


@dataclass(frozen=True)
class Served:
    """`url` is the page, `api_url` what a client is given, `environment` what a client's process
    needs to reach it."""

    url: str
    api_url: str
    environment: Mapping[str, str]
    log: Path
    pid: int
    folder: Path
    headers: Mapping[str, str] = field(default_factory=dict)


def free_port():
    """A port of the loopback that is free now. Another process may take it before it is used:
    `serve` tries again then."""
    return free_ports(1)[0]


def free_ports(count):
    """Several such ports, each another one."""
    with ExitStack() as stack:
        held = [stack.enter_context(socket.socket()) for _ in range(count)]
        for each in held:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in held]


def two_ports():
    """A port that is free now, and so is the next one."""
    while True:
        port = free_port()
        with suppress(OSError, OverflowError), socket.socket() as next_one:
            next_one.bind(("127.0.0.1", port + 1))
            return port


@contextmanager
def prefect_server(folder, *, auth_string=None, **settings):
    """A Prefect server on SQLite in `folder`, with `settings` in its environment; with
    `auth_string` (USER:PASSWORD) it asks for it."""

    def environment(port):
        told = {
            "PREFECT_HOME": str(folder / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "DO_NOT_TRACK": "1",
            # `--port` alone leaves the page asking :4200
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_SERVER_UI_API_URL": f"http://127.0.0.1:{port}/api",
        } | settings
        return told | ({"PREFECT_SERVER_API_AUTH_STRING": auth_string} if auth_string else {})

    def command(port):
        return ["prefect", "server", "start", *LOOPBACK, str(port)]

    with serve("prefect", folder, command, environment, "/api/health") as (port, log, pid):
        url = f"http://127.0.0.1:{port}"
        client = {
            "PREFECT_HOME": str(folder / "client"),
            "PREFECT_API_URL": f"{url}/api",
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        }
        client |= {"PREFECT_API_AUTH_STRING": auth_string} if auth_string else {}
        yield Served(url, f"{url}/api", client, log, pid, folder, _basic(auth_string))


@contextmanager
def mlflow_server(folder, *, user=None, password=None, port=None):
    """An MLflow server on SQLite in `folder`, artifacts in `folder`/mlartifacts; with a password it
    asks for it (MLflow's basic auth). With a `port` it takes the place of one that has ended
    there."""
    folder.mkdir(parents=True, exist_ok=True)
    asked = bool(user and password)
    settings = folder / "basic_auth.ini"
    if asked:
        settings.write_text(
            "[mlflow]\ndefault_permission = READ\ndatabase_uri ="
            f" sqlite:///{folder / 'basic_auth.db'}\nadmin_username = {user}\nadmin_password ="
            f" {password}\n"
        )
        settings.chmod(0o600)

    def environment(port):
        told = {
            "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
            "MLFLOW_DISABLE_TELEMETRY": "true",
            "DO_NOT_TRACK": "1",
        }
        login = {
            "MLFLOW_AUTH_CONFIG_PATH": str(settings),
            "MLFLOW_FLASK_SERVER_SECRET_KEY": os.urandom(16).hex(),
        }
        return told | (login if asked else {})

    def command(port):
        told = ["mlflow", "server", *LOOPBACK, str(port), "--workers", "1"]
        told += ["--backend-store-uri", f"sqlite:///{folder / 'mlflow.db'}"]
        told += ["--artifacts-destination", str(folder / "mlartifacts")]
        return told + (["--app-name", "basic-auth"] if asked else [])

    with serve("mlflow", folder, command, environment, "/health", port) as (taken, log, pid):
        url = f"http://127.0.0.1:{taken}"
        client = {"MLFLOW_TRACKING_URI": url, "MLFLOW_DISABLE_TELEMETRY": "true"}
        if user and password:
            client |= {"MLFLOW_TRACKING_USERNAME": user, "MLFLOW_TRACKING_PASSWORD": password}
        login = _basic(f"{user}:{password}" if asked else None)
        yield Served(url, url, client, log, pid, folder, login)


def clean_environment():
    """This process's environment without any setting of Prefect or MLflow."""
    return {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PREFECT_", "MLFLOW_"))
    }


@contextmanager
def serve(
    name,
    folder,
    command,
    environment,
    health,
    wanted=None,
):
    """Port, log and process id of `python -m COMMAND`, once it answers at `health`; command and
    environment are made for a port, a free one where none is `wanted`."""
    folder.mkdir(parents=True, exist_ok=True)
    log = folder / f"{name}-server.log"
    for attempt in range(1, ATTEMPTS + 1):
        port = wanted or free_port()
        with open(log, "ab") as handle:
            process = subprocess.Popen(
                [sys.executable, "-m", *command(port)],
                env=clean_environment() | environment(port),
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=handle,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            if _healthy(process, f"http://127.0.0.1:{port}{health}"):
                yield port, log, process.pid
                return
            text = log.read_text(errors="replace")
            if attempt == ATTEMPTS or "address already in use" not in text.lower():
                raise RuntimeError(f"the {name} server did not start:\n{text[-3000:]}")
        finally:
            end(process)


def _healthy(process, url):
    """Wait until the server answers, for at most five minutes; False as soon as its process is
    gone."""
    until = time.monotonic() + READY_S
    while time.monotonic() < until and process.poll() is None:
        with suppress(OSError, urllib.error.URLError):
            with urllib.request.urlopen(url, timeout=5) as answer:
                if answer.status == 200:
                    return True
        time.sleep(0.1)  # between two questions; what ends the wait is the answer
    return False


@contextmanager
def logged(words, log, **options):
    """A process that runs until the block ends, and appends what it prints to a file."""
    with open(log, "ab") as printed:
        process = subprocess.Popen(
            words, stdout=printed, stderr=printed, start_new_session=True, **options
        )
    try:
        yield process
    finally:
        end(process)


def end(process):
    """End a process that leads a session, and everything it started."""
    below = []
    with suppress(psutil.NoSuchProcess):
        below = psutil.Process(process.pid).children(recursive=True)
    for how in (signal.SIGTERM, signal.SIGKILL):
        with suppress(ProcessLookupError):
            os.killpg(process.pid, how)
        with suppress(subprocess.TimeoutExpired):
            process.wait(ENDS_S)
        below = psutil.wait_procs(below, timeout=ENDS_S)[1]
        if process.poll() is not None and not below:
            return
    for left in below:  # one that made a session of its own
        with suppress(psutil.NoSuchProcess):
            left.kill()


def _basic(login):
    return {"Authorization": f"Basic {b64encode(login.encode()).decode()}"} if login else {}
