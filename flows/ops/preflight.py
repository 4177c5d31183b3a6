"""What must hold before any part is started: a place that can be written, free ports, databases
that answer, packages that are there.

Guarantees: when `check` has returned nothing of it stood in the way a moment ago, and nothing was
started; each fault is one UsageError with its fix. Does not keep ports from being taken between the
look and the start.
"""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
import socket
from collections.abc import Iterable
from importlib.util import find_spec
from urllib.parse import urlsplit

from flows.ops.parts import mlflow_database, prefect_database
from flows.ops.places import Places
from flows.ops.processes import command_of
from flows.ops.settings import (
    MLFLOW_DATABASE,
    PREFECT_DATABASE,
    Part,
    Secrets,
    StackSettings,
    masked,
)
from kernels_eval.errors import UsageError

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


def check(
    places: Places, settings: StackSettings, secrets: Secrets, missing: Iterable[Part]
) -> None:
    """Raises UsageError for the first thing that keeps the `missing` parts from being started."""
    missing = set(missing)
    require_place(places)
    require_packages(settings, secrets, missing)
    require_ports(settings, missing)
    require_databases(settings, secrets, missing)


def require_place(places: Places) -> None:
    """Make the directories and write a megabyte there."""
    fix = "choose another one with --root DIR, or mend its permissions"
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
            f"cannot write at {error.filename or places.root}: {error.strerror}", fix
        ) from error
    free = shutil.disk_usage(places.stack).free
    if free < LEAST_FREE_BYTES:
        raise UsageError(
            f"{free / 1e6:.0f} MB are free at {places.root}; the databases and logs of a stack want"
            f" {LEAST_FREE_BYTES / 1e6:.0f} MB",
            "free some, or choose another disk with --root DIR",
        )


def require_packages(settings: StackSettings, secrets: Secrets, missing: set[Part]) -> None:
    if "mlflow" in missing and secrets.mlflow and not find_spec("flask_wtf"):
        raise UsageError(
            "MLflow asks for passwords only with the package Flask-WTF, which is not installed",
            "pip install 'concur[server]'",
        )


def require_ports(settings: StackSettings, missing: set[Part]) -> None:
    for name, port in settings.ports().items():
        part = name.split("_")[0]
        if part not in missing:
            continue
        host = settings.host if part in ("prefect", "mlflow") else "127.0.0.1"
        option = f"--{name.replace('_', '-')}"
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
                tried.setsockopt(
                    socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                )  # a port whose last owner has just gone is free
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
    import psutil

    try:
        pids = [
            c.pid
            for c in psutil.net_connections("tcp")
            if c.laddr and c.laddr.port == port and c.status == psutil.CONN_LISTEN and c.pid
        ]
    except (psutil.Error, OSError):
        pids = []
    return (
        f" by process {pids[0]} ({command_of(pids[0])})"
        if pids
        else " by a process that this user cannot see"
    )


def require_databases(settings: StackSettings, secrets: Secrets, missing: set[Part]) -> None:
    given = {
        "prefect": secrets.prefect_database or settings.prefect_database,
        "mlflow": secrets.mlflow_database or settings.mlflow_database,
    }
    names = {
        "prefect": PREFECT_DATABASE if secrets.prefect_database else "--prefect-database",
        "mlflow": MLFLOW_DATABASE if secrets.mlflow_database else "--mlflow-database",
    }
    if (
        given["prefect"]
        and given["mlflow"]
        and urlsplit(given["prefect"])[1:3] == urlsplit(given["mlflow"])[1:3]
    ):
        raise UsageError(
            "Prefect and MLflow are given the same database, where each would take the other's"
            " tables for its own",
            "make a second database (createdb)",
        )
    for part, url in given.items():
        if url and part in missing:
            _require_database(
                prefect_database(url) if part == "prefect" else mlflow_database(url),
                names[part],
                part,
            )


def _require_database(url: str, name: str, part: str) -> None:
    parts = urlsplit(url)
    scheme, _, driver = parts.scheme.partition("+")
    like = (
        "postgresql+asyncpg://USER@HOST:PORT/NAME"
        if part == "prefect"
        else "postgresql+psycopg://USER@HOST:PORT/NAME"
    )
    try:
        port = parts.port
    except ValueError:
        raise UsageError(
            f"{name}: the port of the URL is no number", f"give one like {like}"
        ) from None
    if scheme != "postgresql" or not parts.path.strip("/"):
        what = (
            "names no database"
            if scheme == "postgresql"
            else "is not the URL of a PostgreSQL database"
        )
        raise UsageError(
            f"{name}: {masked(url)!r} {what}", f"give one like {like}; without it SQLite is used"
        )
    if part == "prefect" and driver != "asyncpg":
        raise UsageError(f"{name}: Prefect cannot use the driver {driver}", f"give one like {like}")
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
    """Why PostgreSQL does not let us in; None where it does."""
    import asyncpg

    try:
        connection = await asyncpg.connect(url, timeout=DATABASE_S)
    except TimeoutError:
        return f"nothing comes back within {DATABASE_S:.0f} s"
    except (asyncpg.PostgresError, asyncpg.InterfaceError, OSError, ValueError) as error:
        return (str(error) or type(error).__name__).splitlines()[0]
    await connection.close()
    return None
