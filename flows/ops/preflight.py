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
from contextlib import suppress
from importlib.util import find_spec
from urllib.parse import urlsplit

import psutil

from flows.ops.places import Places
from flows.ops.programs import DRIVERS, Stack
from flows.ops.settings import DATABASES, StackSettings
from kernels_eval.errors import UsageError
from kernels_eval.sandbox.process_tree import command_line
from tasks.reporting.text import masked

LEAST_FREE_BYTES = 500_000_000
PROBE_BYTES = 1 << 20
DATABASE_S = 10.0
ROOM = "free some, or choose another disk with --root DIR"
OPTIONS = {
    "ray_client_port": "Ray Client",
    "ray_dashboard_port": "Ray's dashboard",
    "prefect_port": "Prefect",
    "mlflow_port": "MLflow",
    "pages_port": "the pages",
    "worker_port": "the worker",
    "ray_port": "Ray",
}


def check(stack: Stack) -> None:
    """Raises UsageError for the first thing that keeps the stack from being started."""
    require_place(stack.places)
    require_packages(stack)
    require_ports(stack.settings)
    require_databases(stack)


def require_place(places: Places) -> None:
    """Make the directories, and write a megabyte to the disk there. Raises UsageError."""
    try:
        places.make()
        probe = places.stack / f".probe-{os.getpid()}"
        try:
            with probe.open("wb") as handle:
                handle.write(b"\0" * PROBE_BYTES)
                handle.flush()
                os.fsync(handle.fileno())  # a disk that is full may say so only now
        finally:
            probe.unlink(missing_ok=True)
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
            raise UsageError(
                f"no room to write at {places.root}: {error.strerror}", ROOM
            ) from error
        raise UsageError(
            f"cannot write at {error.filename or places.root}: {error.strerror}",
            "choose another one with --root DIR, or correct its permissions",
        ) from error
    free, wanted = shutil.disk_usage(places.stack).free / 1e6, LEAST_FREE_BYTES / 1e6
    if free < wanted:
        what = f"{free:.0f} MB are free at {places.root}; a stack wants {wanted:.0f} MB"
        raise UsageError(what, ROOM)


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
        with_pages = name in ("prefect_port", "mlflow_port", "pages_port")
        host = settings.host if with_pages else "127.0.0.1"
        what, option = f"port {port} for {OPTIONS[name]}", f"--{name.replace('_', '-')}"
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as tried:
                # a port whose last owner has just gone is free
                tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                tried.bind((host, port))
        except PermissionError as error:
            raise UsageError(
                f"{what} is for root only", f"give one above 1023 with {option}"
            ) from error
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise UsageError(
                    f"this machine has no address {host}",
                    "give one of its own with --host, or leave it out",
                ) from error
            raise UsageError(
                f"{what} is in use{_holder(port)}",
                f"give another one with {option}, or stop what holds it",
            ) from error


def _holder(port: int) -> str:
    with suppress(psutil.Error, OSError):
        for found in psutil.net_connections("tcp"):
            listens = found.laddr and found.laddr.port == port
            if listens and found.status == psutil.CONN_LISTEN and found.pid:
                return f" by process {found.pid} ({command_line(found.pid)[:100]})"
    return " by a process that this user cannot see"


def require_databases(stack: Stack) -> None:
    """Raises UsageError where a PostgreSQL database cannot be used."""
    urls = {part: url for part in DRIVERS if (url := stack.database(part))}
    if len(urls) == 2 and len({urlsplit(url)[1:3] for url in urls.values()}) == 1:
        raise UsageError(
            "Prefect and MLflow are given the same database: each would use the other's tables as"
            " its own",
            "create a second database (createdb)",
        )
    for part, url in urls.items():
        if part in stack.settings.parts:
            secret = getattr(stack.secrets, f"{part}_database")
            name = DATABASES[part] if secret else f"--{part}-database"
            message, fix = _database_fault(part, url)
            if message:
                raise UsageError(f"{name}: {message}", fix)


def _database_fault(part: str, url: str) -> tuple[str, str]:
    """Why a database cannot be used, and the fix; empty where it can."""
    parts = urlsplit(url)
    scheme, _, driver = parts.scheme.partition("+")
    form = f"give one like postgresql+{DRIVERS[part]}://USER@HOST:PORT/NAME"
    try:
        port = parts.port or 5432
    except ValueError:
        return "the port of the URL is not a number", form
    if scheme != "postgresql":
        return f"{masked(url)!r} is not the URL of a PostgreSQL database", f"{form}, or none"
    if not parts.path.strip("/"):
        return f"{masked(url)!r} names no database", f"{form}, or none"
    if part == "prefect" and driver != DRIVERS[part]:
        return f"Prefect cannot use the driver {driver}", form
    if not driver or not find_spec(driver):
        return f"the driver {driver} is not installed", "pip install 'concur[server]'"
    if reason := asyncio.run(_refusal(parts._replace(scheme="postgresql").geturl())):
        where = f"{parts.hostname or 'the local socket'}:{port}"
        fix = f"check that PostgreSQL answers at {where}, its user and password"
        return f"cannot use {masked(url)}: {reason}", fix
    return "", ""


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
