"""What each part of the stack is: its command line and its environment.

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

from flows.ops.places import PART_VARIABLE, ROOT_VARIABLE, Places
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
    "SUPERVISOR_",
)
RAY_LOG_BYTES = 10_000_000
DRIVERS = {"prefect": "asyncpg", "mlflow": "psycopg"}
MLFLOW_AUTH = """[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///{users}
auth_cache_ttl_seconds = 60
"""
"""Where MLflow's users are; the first one's name and password come from the environment. Others may
see nothing until they are given a permission."""


@dataclass(frozen=True)
class Program:
    """One part, ready to be started."""

    part: Part
    command: list[str]
    environment: dict[str, str] = field(repr=False)
    url: str
    port: int


@dataclass(frozen=True)
class Stack:
    """What the programs of a stack are made from."""

    places: Places
    settings: StackSettings
    secrets: Secrets


def program(part: Part, stack: Stack, environment: Mapping[str, str] = os.environ) -> Program:
    """One part of a stack; `environment` is the caller's."""
    base = {
        name: value for name, value in environment.items() if not name.startswith(NOT_HANDED_ON)
    }
    base |= {
        ROOT_VARIABLE: str(stack.places.root),
        PART_VARIABLE: stack.places.mark(part),
        "DO_NOT_TRACK": "1",
        "PYTHONUNBUFFERED": "1",
    }
    made = {"prefect": _prefect, "mlflow": _mlflow, "ray": _ray, "worker": _worker}[part](stack)
    return Program(part, made.command, base | made.environment, made.url, made.port)


def client_environment(places: Places, settings: StackSettings) -> dict[str, str]:
    """What points a client at the stack; without secrets."""
    found: dict[str, str] = {}
    if "prefect" in settings.parts:
        found |= {
            "PREFECT_API_URL": f"{settings.prefect_url}/api",
            "PREFECT_HOME": str(places.prefect_home),
        }
    if "mlflow" in settings.parts:
        found["MLFLOW_TRACKING_URI"] = settings.mlflow_url
    if "ray" in settings.parts:
        found |= {"RAY_ADDRESS": settings.ray_address} | _ray_common(places)
    return found


def client_secrets(settings: StackSettings) -> dict[str, str]:
    """Variable of a client -> variable of the server that holds the same secret."""
    names: dict[Part, tuple[str, str]] = {
        "prefect": ("PREFECT_API_AUTH_STRING", PREFECT_SECRET),
        "mlflow": ("MLFLOW_TRACKING_PASSWORD", MLFLOW_SECRET),
    }
    return dict(pair for part, pair in names.items() if part in settings.parts)


def database_url(part: str, url: str) -> str:
    """With the driver that the part uses, where the URL names none."""
    scheme, separator, rest = url.partition("://")
    plain = separator and scheme in ("postgres", "postgresql")
    return f"postgresql+{DRIVERS[part]}://{rest}" if plain else url


def _ray_common(places: Places) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(places.ray_token),
        # Ray otherwise listens on all addresses. Despite its name, on Linux it means loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray ends a driver whose head is away for a minute, and on a busy machine a head needs
        # nearly as long to come back.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
    }


def _prefect_common(places: Places) -> dict[str, str]:
    return {
        "PREFECT_HOME": str(places.prefect_home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_COLORS": "false",
        "PREFECT_CLI_PROMPT": "false",
    }


def _prefect(stack: Stack) -> Program:
    settings, secrets = stack.settings, stack.secrets
    port = settings.prefect_port
    hosts = {"127.0.0.1", "localhost", settings.near, settings.far}
    environment = _prefect_common(stack.places) | {
        "PREFECT_SERVER_API_HOST": settings.host,
        "PREFECT_SERVER_API_PORT": str(port),
        "PREFECT_API_URL": f"{settings.prefect_url}/api",
        # The page otherwise asks port 4200, whatever the port is.
        "PREFECT_SERVER_UI_API_URL": f"http://{settings.far}:{port}/api",
        # By default any web page that is open in a browser here may start runs.
        "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": ",".join(
            sorted(f"http://{host}:{port}" for host in hosts)
        ),
        # By default in memory: a server that dies forgets who holds the limit `gpu`, and its slots
        # never come free again.
        "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
            "prefect.server.concurrency.lease_storage.filesystem"
        ),
    }
    if database := secrets.prefect_database or settings.prefect_database:
        environment[PREFECT_DATABASE] = database_url("prefect", database)
    if secrets.prefect:
        environment |= {PREFECT_SECRET: secrets.prefect, "PREFECT_API_AUTH_STRING": secrets.prefect}
    command = [*PYTHON, "prefect", "server", "start"]
    return Program("prefect", command, environment, settings.prefect_url, port)


def _mlflow(stack: Stack) -> Program:
    places, settings, secrets = stack.places, stack.settings, stack.secrets
    port = settings.mlflow_port
    database = secrets.mlflow_database or settings.mlflow_database
    environment = {
        MLFLOW_DATABASE: database_url("mlflow", database or f"sqlite:///{places.root}/mlflow.db"),
        "MLFLOW_ARTIFACTS_DESTINATION": str(places.root / "mlartifacts"),
        # 13 processes and 2 GB for what nothing here uses
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }
    command = [*PYTHON, "mlflow", "server", "--workers", "1"]
    command += ["--host", settings.host, "--port", str(port)]
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
            "MLFLOW_AUTH_CONFIG_PATH": str(places.mlflow_auth),
            "MLFLOW_FLASK_SERVER_SECRET_KEY": random.token_urlsafe(32),
        }
    return Program("mlflow", command, environment, settings.mlflow_url, port)


def _ray(stack: Stack) -> Program:
    settings = stack.settings
    dashboard = settings.ray_dashboard_port
    command = [
        *PYTHON,
        "ray.scripts.scripts",
        "start",
        "--head",
        "--block",
        f"--port={settings.ray_port}",
        f"--ray-client-server-port={settings.ray_client_port}",
        f"--temp-dir={stack.places.ray}",
        "--disable-usage-stats",
        # any free port: Ray's default, 10002 to 19999, may hold one of the stack's own
        "--min-worker-port=0",
        "--max-worker-port=0",
        "--log-color=false",
        "--dashboard-host=127.0.0.1",
        f"--include-dashboard={'true' if dashboard else 'false'}",
        *([f"--dashboard-port={dashboard}"] if dashboard else []),
    ]
    environment = _ray_common(stack.places) | {
        "RAY_ROTATION_MAX_BYTES": str(RAY_LOG_BYTES),
        "RAY_ROTATION_BACKUP_COUNT": "1",
    }
    url = f"http://127.0.0.1:{dashboard}" if dashboard else settings.ray_address
    return Program("ray", command, environment, url, settings.ray_port)


def _worker(stack: Stack) -> Program:
    settings, secrets = stack.settings, stack.secrets
    environment = _prefect_common(stack.places) | client_environment(stack.places, settings)
    environment |= {
        "PREFECT_WORKER_WEBSERVER_HOST": "127.0.0.1",
        "PREFECT_WORKER_WEBSERVER_PORT": str(settings.worker_port),
        # Prefect's runner has one directory for all users of a machine, made by whoever is first.
        "TMPDIR": str(stack.places.runs),
        "CONCUR_STACK_LIMITS": f"{settings.gpu_limit or ''},{settings.cpu_limit or ''}",
    }
    if secrets.prefect:
        environment["PREFECT_API_AUTH_STRING"] = secrets.prefect
    if secrets.mlflow and "mlflow" in settings.parts:
        environment |= {
            "MLFLOW_TRACKING_USERNAME": secrets.mlflow_user,
            "MLFLOW_TRACKING_PASSWORD": secrets.mlflow,
        }
    url = f"http://127.0.0.1:{settings.worker_port}/health"
    return Program("worker", [*PYTHON, "flows.ops.worker"], environment, url, settings.worker_port)
