"""What each part of the stack is: its command line, its environment, and how its health is asked.

Guarantees: no secret is on a command line, and each part gets only the secrets that it needs;
variables of the caller that would point a part at another server, home or database are not handed
on. Everything listens on loopback but, where it was asked for, the two servers.
"""

from __future__ import annotations

import os
import secrets as random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from flows.ops.places import Places
from flows.ops.processes import MARK
from flows.ops.settings import (
    MLFLOW_DATABASE,
    MLFLOW_SECRET,
    MLFLOW_USER,
    PREFECT_DATABASE,
    PREFECT_SECRET,
    Part,
    Secrets,
    StackSettings,
)

PYTHON = (sys.executable, "-P", "-m")
"""-P: a file of the working directory must not stand in for a package."""
NOT_HANDED_ON = (
    "PREFECT__",
    "PREFECT_API_",
    "PREFECT_HOME",
    "PREFECT_PROFILE",
    "PREFECT_SERVER_API_",
    "PREFECT_SERVER_DATABASE_",
    "PREFECT_SERVER_UI_API_URL",
    "PREFECT_UI_API_URL",
    "PREFECT_WORKER_WEBSERVER_",
    "MLFLOW_BACKEND_STORE_URI",
    "MLFLOW_REGISTRY_STORE_URI",
    "MLFLOW_AUTH_",
    "MLFLOW_FLASK_SERVER_SECRET_KEY",
    "MLFLOW_TRACKING_",
    "MLFLOW_SERVER_ALLOWED_HOSTS",
    "MLFLOW_DEFAULT_ARTIFACT_ROOT",
    "MLFLOW_ARTIFACTS_DESTINATION",
    "RAY_ADDRESS",
    "RAY_AUTH_",
    "NOTIFY_SOCKET",
)
RAY_LOG_BYTES = 10_000_000


@dataclass(frozen=True)
class Program:
    """One part, ready to be started."""

    part: Part
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    url: str
    port: int
    port_name: str


def programs(
    places: Places,
    settings: StackSettings,
    secrets: Secrets,
    environment: Mapping[str, str] = os.environ,
) -> list[Program]:
    """The parts of a stack, in the order of their start."""
    made = {"prefect": _prefect, "mlflow": _mlflow, "ray": _ray, "worker": _worker}
    base = {
        name: value for name, value in environment.items() if not name.startswith(NOT_HANDED_ON)
    }
    base |= {MARK: str(places.root), "DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1"}
    return [made[part](places, settings, secrets, base) for part in settings.parts]


def client_environment(places: Places, settings: StackSettings) -> dict[str, str]:
    """What points a client at the stack; without secrets."""
    found = {}
    if "prefect" in settings.parts:
        found |= {
            "PREFECT_API_URL": f"{settings.prefect_url}/api",
            "PREFECT_HOME": str(places.prefect_home),
        }
    if "mlflow" in settings.parts:
        found["MLFLOW_TRACKING_URI"] = settings.mlflow_url
    if "ray" in settings.parts:
        found |= ray_client(places, settings)
    return found


def secret_names(settings: StackSettings) -> dict[str, str]:
    """Variable of a client -> variable of the server that holds the same secret."""
    return {
        name: source
        for part, name, source in (
            ("prefect", "PREFECT_API_AUTH_STRING", PREFECT_SECRET),
            ("mlflow", "MLFLOW_TRACKING_PASSWORD", MLFLOW_SECRET),
        )
        if part in settings.parts
    }


def ray_client(places: Places, settings: StackSettings) -> dict[str, str]:
    return {
        "RAY_ADDRESS": settings.ray_address,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(places.ray_token),
        # Ray otherwise listens on all addresses; the name is of its makers: elsewhere than on
        # Windows and macOS it means `loopback`
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray ends a driver whose head is away for a minute, and a head takes nearly as long to come
        # back where a machine is busy
        "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    }


def _prefect_common(places: Places) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(places.prefect_home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_CLI_PROMPT": "false",
    }


def _prefect(
    places: Places, settings: StackSettings, secrets: Secrets, base: dict[str, str]
) -> Program:
    port = settings.prefect_port
    origins = {
        f"http://{host}:{port}" for host in ("127.0.0.1", "localhost", settings.near, settings.far)
    }
    environment = (
        base
        | _prefect_common(places)
        | {
            "PREFECT_SERVER_API_HOST": settings.host,
            "PREFECT_SERVER_API_PORT": str(port),
            "PREFECT_API_URL": f"{settings.prefect_url}/api",
            "PREFECT_SERVER_UI_API_URL": (
                f"http://{settings.far}:{port}/api"
            ),  # else the page asks port 4200, whatever the port is
            # Prefect's default lets any web page that is open in a browser here start runs
            "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(sorted(origins)),
            # in memory, Prefect's default, a server that dies takes along who holds the limit
            # `gpu`, and its slots never come free again
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
                "prefect.server.concurrency.lease_storage.filesystem"
            ),
        }
    )
    if database := secrets.prefect_database or settings.prefect_database:
        environment[PREFECT_DATABASE] = prefect_database(database)
    if secrets.prefect:
        environment |= {PREFECT_SECRET: secrets.prefect, "PREFECT_API_AUTH_STRING": secrets.prefect}
    return Program(
        "prefect",
        [*PYTHON, "prefect", "server", "start"],
        environment,
        settings.prefect_url,
        port,
        "--prefect-port",
    )


def prefect_database(url: str) -> str:
    """With the driver that Prefect uses, where the URL names none."""
    scheme, separator, rest = url.partition("://")
    return (
        f"postgresql+asyncpg://{rest}"
        if separator and scheme in ("postgres", "postgresql")
        else url
    )


def mlflow_database(url: str) -> str:
    """With a driver, where the URL names none: which one SQLAlchemy takes then depends on its
    version."""
    scheme, separator, rest = url.partition("://")
    return (
        f"postgresql+psycopg://{rest}"
        if separator and scheme in ("postgres", "postgresql")
        else url
    )


def _mlflow(
    places: Places, settings: StackSettings, secrets: Secrets, base: dict[str, str]
) -> Program:
    port = settings.mlflow_port
    environment = base | {
        MLFLOW_DATABASE: mlflow_database(
            secrets.mlflow_database
            or settings.mlflow_database
            or f"sqlite:///{places.root}/mlflow.db"
        ),
        "MLFLOW_ARTIFACTS_DESTINATION": str(places.root / "mlartifacts"),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": (
            "false"
        ),  # 13 processes and 2 GB for what nothing here uses
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [
        *PYTHON,
        "mlflow",
        "server",
        "--host",
        settings.host,
        "--port",
        str(port),
        "--workers",
        "1",
    ]
    if settings.exposed:
        hosts = dict.fromkeys(
            ("127.0.0.1", "localhost", settings.near, settings.far, *settings.allowed_hosts)
        )
        environment["MLFLOW_SERVER_ALLOWED_HOSTS"] = ",".join(
            f"{host}:{port}" if ":" not in host else host for host in hosts
        )
    if secrets.mlflow:
        command += ["--app-name", "basic-auth"]
        environment |= {
            MLFLOW_SECRET: secrets.mlflow,
            MLFLOW_USER: secrets.mlflow_user,
            "MLFLOW_AUTH_CONFIG_PATH": str(places.stack / "mlflow-auth.ini"),
            "MLFLOW_FLASK_SERVER_SECRET_KEY": random.token_urlsafe(32),
        }
    return Program("mlflow", command, environment, settings.mlflow_url, port, "--mlflow-port")


def mlflow_auth_file(places: Places) -> bytes:
    """Where MLflow's users are; the first one's name and password come from the environment. Others
    may see nothing until they are told."""
    users = f"sqlite:///{places.stack}/mlflow-users.db".replace("%", "%%")
    return (
        "[mlflow]\ndefault_permission = NO_PERMISSIONS\ndatabase_uri ="
        f" {users}\nauth_cache_ttl_seconds = 60\n".encode()
    )


def _ray(
    places: Places, settings: StackSettings, secrets: Secrets, base: dict[str, str]
) -> Program:
    dashboard = settings.ray_dashboard_port
    command = [
        *PYTHON,
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        f"--port={settings.ray_port}",
        f"--ray-client-server-port={settings.ray_client_port}",
        f"--temp-dir={places.ray}",
        "--disable-usage-stats",
        "--min-worker-port=0",
        # any free one: Ray's default, 10002 to 19999, may hold one of the stack's own
        "--max-worker-port=0",
        "--log-color=false",
        "--dashboard-host=127.0.0.1",
        f"--include-dashboard={'true' if dashboard else 'false'}",
        *([f"--dashboard-port={dashboard}"] if dashboard else []),
    ]
    environment = (
        base
        | ray_client(places, settings)
        | {
            "RAY_ROTATION_MAX_BYTES": str(RAY_LOG_BYTES),
            "RAY_ROTATION_BACKUP_COUNT": "1",
        }
    )
    environment.pop("RAY_ADDRESS")
    url = f"http://127.0.0.1:{dashboard}" if dashboard else settings.ray_address
    return Program("ray", command, environment, url, settings.ray_port, "--ray-port")


def _worker(
    places: Places, settings: StackSettings, secrets: Secrets, base: dict[str, str]
) -> Program:
    environment = (
        base
        | _prefect_common(places)
        | client_environment(places, settings)
        | {
            "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
            "PREFECT_WORKER_WEBSERVER_PORT": str(settings.worker_port),
            "TMPDIR": str(
                places.runs
                # Prefect's runner has one directory for all users of a machine, made by whoever
                # comes first
            ),
            "CONCUR_STACK_LIMITS": f"{settings.gpu_limit or ''},{settings.cpu_limit or ''}",
        }
    )
    if secrets.prefect:
        environment["PREFECT_API_AUTH_STRING"] = secrets.prefect
    if secrets.mlflow and "mlflow" in settings.parts:
        environment |= {
            "MLFLOW_TRACKING_USERNAME": secrets.mlflow_user,
            "MLFLOW_TRACKING_PASSWORD": secrets.mlflow,
        }
    url = f"http://127.0.0.1:{settings.worker_port}/health"
    return Program(
        "worker",
        [*PYTHON, "flows.ops.worker"],
        environment,
        url,
        settings.worker_port,
        "--worker-port",
    )
