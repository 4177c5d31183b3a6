"""What must hold before any part is started: a root that can be written, free ports, databases
that answer, packages that are installed.

Guarantees: when `check` has returned, nothing of it stood in the way a moment ago, and nothing was
started; each fault is one UsageError with its fix. Does not keep ports from being taken between the
look and the start.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from importlib.util import find_spec
from urllib.parse import urlsplit

import psutil

from flows.ops.places import Places
from flows.ops.programs import DRIVERS, Stack, database_url
from flows.ops.settings import (
    MLFLOW_DATABASE,
    PREFECT_DATABASE,
    Secrets,
    StackSettings,
    masked,
)
from kernels_eval.errors import UsageError
from kernels_eval.isolation.process_tree import command_line

LEAST_FREE_BYTES = 500_000_000
PROBE_BYTES = 1 << 20
DATABASE_S = 10.0
OPTIONS = {
    "ray_client_port": "Ray Client",
    "ray_dashboard_port": "Ray's dashboard",
    "prefect_port": "Prefect",
    "mlflow_port": "MLflow",
    "worker_port": "the worker",
    "ray_port": "Ray",
}


def check(stack: Stack) -> None:
    """Raises UsageError for the first thing that keeps the stack from being started."""
    require_place(stack.places)
    require_packages(stack)
    require_ports(stack.settings)
    require_databases(stack.settings, stack.secrets)


def require_place(places: Places) -> None:
    """Make the directories, and write a megabyte there. Raises UsageError."""
    try:
        places.make()
        probe = places.stack / f".probe-{os.getpid()}"
        try:
            with open(probe, "wb", buffering=0) as handle:
                left = PROBE_BYTES - handle.write(b"\0" * PROBE_BYTES)
                if left:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                os.fsync(handle.fileno())
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UsageError(
                f"no room to write at {places.root}: {error.strerror}",
                "free some, or choose another disk with --root DIR",
            ) from error
        raise UsageError(
            f"cannot write at {error.filename or places.root}: {error.strerror}",
            "choose another one with --root DIR, or correct its permissions",
        ) from error
    free = shutil.disk_usage(places.stack).free
    if free < LEAST_FREE_BYTES:
        raise UsageError(
            f"{free / 1e6:.0f} MB are free at {places.root}; the databases and logs of a stack want"
            f" {LEAST_FREE_BYTES / 1e6:.0f} MB",
            "free some, or choose another disk with --root DIR",
        )


def require_packages(stack: Stack) -> None:
    wanted = "mlflow" in stack.settings.parts and stack.secrets.mlflow
    if wanted and not find_spec("flask_wtf"):
        raise UsageError(
            "MLflow asks for passwords only with the package Flask-WTF, which is not installed",
            "pip install 'concur[server]'",
        )


def require_ports(settings: StackSettings) -> None:
    """Raises UsageError where a port cannot be listened on."""
    for name, port in settings.ports().items():
        host = settings.host if name in ("prefect_port", "mlflow_port") else "127.0.0.1"
        option = f"--{name.replace('_', '-')}"
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
                # a port whose last owner has just gone is free
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind((host, port))
        except PermissionError as error:
            raise UsageError(
                f"port {port} for {OPTIONS[name]} is for root only",
                f"give one above 1023 with {option}",
            ) from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UsageError(
                    f"this machine has no address {host}",
                    "give one of its own with --host, or leave it out",
                ) from error
            raise UsageError(
                f"port {port} for {OPTIONS[name]} is in use{_holder(port)}",
                f"give another one with {option}, or stop what holds it",
            ) from error


def _holder(port: int) -> str:
    try:
        pids = [
            found.pid
            for found in psutil.net_connections("tcp")
            if found.laddr and found.laddr.port == port and found.status == psutil.CONN_LISTEN
        ]
    except (psutil.Error, OSError):
        pids = []
    if not pids or pids[0] is None:
        return " by a process that this user cannot see"
    return f" by process {pids[0]} ({command_line(pids[0])[:100]})"


def require_databases(settings: StackSettings, secrets: Secrets) -> None:
    """Raises UsageError where a PostgreSQL database cannot be used."""
    given = {
        "prefect": secrets.prefect_database or settings.prefect_database,
        "mlflow": secrets.mlflow_database or settings.mlflow_database,
    }
    names = {
        "prefect": PREFECT_DATABASE if secrets.prefect_database else "--prefect-database",
        "mlflow": MLFLOW_DATABASE if secrets.mlflow_database else "--mlflow-database",
    }
    places = [urlsplit(url)[1:3] for url in given.values() if url]
    if len(places) == 2 and places[0] == places[1]:
        raise UsageError(
            "Prefect and MLflow are given the same database, where each would take the other's"
            " tables for its own",
            "make a second database (createdb)",
        )
    for part, url in given.items():
        if url and part in settings.parts:
            _require_database(part, database_url(part, url), names[part])


def _require_database(part: str, url: str, name: str) -> None:
    parts = urlsplit(url)
    scheme, _, driver = parts.scheme.partition("+")
    form = f"give one like postgresql+{DRIVERS[part]}://USER@HOST:PORT/NAME"
    try:
        port = parts.port
    except ValueError:
        raise UsageError(f"{name}: the port of the URL is no number", form) from None
    if scheme != "postgresql":
        what = f"{masked(url)!r} is not the URL of a PostgreSQL database"
        raise UsageError(f"{name}: {what}", f"{form}; without it SQLite is used")
    if not parts.path.strip("/"):
        what = f"{masked(url)!r} names no database"
        raise UsageError(f"{name}: {what}", f"{form}; without it SQLite is used")
    if part == "prefect" and driver != DRIVERS[part]:
        raise UsageError(f"{name}: Prefect cannot use the driver {driver}", form)
    if not driver or not find_spec(driver):
        raise UsageError(
            f"{name}: the driver {driver} is not installed", "pip install 'concur[server]'"
        )
    if reason := asyncio.run(_refusal(parts._replace(scheme="postgresql").geturl())):
        where = f"{parts.hostname or 'the local socket'}:{port or 5432}"
        raise UsageError(
            f"{name}: cannot use {masked(url)}: {reason}",
            f"check that PostgreSQL answers at {where}, its user and password",
        )


async def _refusal(url: str) -> str | None:
    """Why PostgreSQL refuses a connection; None where it does not."""
    import asyncpg

    try:
        connection = await asyncpg.connect(url, timeout=DATABASE_S)
    except TimeoutError:
        return f"no answer within {DATABASE_S:.0f} s"
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, ValueError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    await connection.close()
    return None
