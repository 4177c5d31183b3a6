"""Programs of a stack, and supervisord's configuration. Everything listens on loopback; variables
that would point a part elsewhere are not passed on."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from flows.stack.layout import PART_VARIABLE, PARTS, ROOT_VARIABLE, Layout, Part, StackSettings
from kernels_eval.pool.ray import NICENESS

PYTHON = (sys.executable, "-P", "-m")
"""-P: no file of the working directory may replace a package."""
QUICKLY_S, RETRIES = 5, 5
"""A part that ends so quickly, so often in a row, is not restarted."""
STOP_S = 8
NOT_HANDED_ON = (
    *("PREFECT__", "PREFECT_API_", "PREFECT_HOME", "PREFECT_PROFILE", "PREFECT_SERVER_API_"),
    *(
        "PREFECT_WORKER_WEBSERVER_",
        "PREFECT_SERVER_DATABASE_",
        "PREFECT_SERVER_UI_API_URL",
        "PREFECT_UI_API_URL",
    ),
    *("MLFLOW_BACKEND_STORE_URI", "MLFLOW_REGISTRY_STORE_URI", "MLFLOW_TRACKING_"),
    *("MLFLOW_DEFAULT_ARTIFACT_ROOT", "MLFLOW_ARTIFACTS_DESTINATION", "MLFLOW_SERVER_"),
    *("RAY_ADDRESS", "RAY_AUTH_", "SUPERVISOR_"),
)
"""Prefixes of variables."""
SUPERVISORD = """[supervisord]
logfile = {logs}/supervisor.log
logfile_maxbytes = 20MB
logfile_backups = 1
pidfile = {sockets}/supervisord.pid
childlogdir = {logs}
umask = 077
user = {user}

[unix_http_server]
file = {sockets}/supervisor.sock
chmod = 0700

[rpcinterface:supervisor]
supervisor.rpcinterface_factory = supervisor.rpcinterface:make_main_rpcinterface
"""
PROGRAM = """
[program:{part}]
command = {command}
environment = {environment}
priority = {priority}
autorestart = true
startsecs = {startsecs}
startretries = {retries}
stopwaitsecs = {stop_s}
stopasgroup = true
killasgroup = true
redirect_stderr = true
stdout_logfile = {log}
stdout_logfile_maxbytes = 20MB
stdout_logfile_backups = 1
"""


@dataclass(frozen=True)
class Program:
    """A Python module with its arguments, and the environment it needs beside the caller's."""

    words: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)


def programs(layout: Layout, settings: StackSettings) -> dict[Part, Program]:
    return {
        "prefect": Program(
            ("prefect", "server", "start"),
            {
                **_prefect_client(layout, settings),
                "PREFECT_SERVER_API_HOST": "127.0.0.1",
                "PREFECT_SERVER_API_PORT": str(settings.prefect_port),
                # The page otherwise asks port 4200, whatever the port is.
                "PREFECT_SERVER_UI_API_URL": f"{settings.prefect_url}/api",
                "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
                # By default any web page that is open in a browser here may start runs.
                "PREFECT_SERVER_CORS_ALLOWED_ORIGINS": (
                    f"{settings.prefect_url},http://localhost:{settings.prefect_port}"
                ),
                # By default in memory: a server that dies would never free the slots of `devices`.
                "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": (
                    "prefect.server.concurrency.lease_storage.filesystem"
                ),
            },
        ),
        "mlflow": Program(
            (
                *("mlflow", "server", "--workers", "1"),
                *("--host", "127.0.0.1", "--port", str(settings.mlflow_port)),
            ),
            {
                "MLFLOW_BACKEND_STORE_URI": f"sqlite:///{layout.root}/mlflow.db",
                # not through the server: a run without a stack writes to the same experiment
                "MLFLOW_DEFAULT_ARTIFACT_ROOT": f"{layout.root}/mlartifacts",
                # 13 processes and 2 GB for what nothing here uses
                "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
                "MLFLOW_DISABLE_TELEMETRY": "true",
            },
        ),
        "ray": Program(
            (
                *("flows.stack.head", "start", "--head", "--block"),
                f"--port={settings.ray_port}",
                f"--ray-client-server-port={settings.ray_client_port}",
                f"--temp-dir={layout.sockets}/ray",
                "--disable-usage-stats",
                # any free port: Ray's default, 10002 to 19999, may hold one of the stack's own
                *("--min-worker-port=0", "--max-worker-port=0"),
                "--include-dashboard=false",
                "--include-log-monitor=false",  # a hundredth of a core, for what no run reads
                "--log-color=false",
            ),
            {
                **_ray_client(layout),
                # how long a node waits for the agent that it asks for environments of workers
                "RAY_agent_register_timeout_ms": "600000",
                "REPORTER_UPDATE_INTERVAL_MS": "60000",  # by default 5 s, for the dashboard
            },
        ),
        "worker": Program(
            ("flows.stack.worker",),
            {
                **client_environment(layout, settings),
                # Prefect's runner has one folder for all users of a machine by default.
                "TMPDIR": f"{layout.sockets}/runs",
            },
        ),
    }


def client_environment(layout: Layout, settings: StackSettings) -> dict[str, str]:
    return {
        **_prefect_client(layout, settings),
        "MLFLOW_TRACKING_URI": settings.mlflow_url,
        "RAY_ADDRESS": settings.ray_address,
        **_ray_client(layout),
        "CONCUR_ROOT": str(layout.root),
    }


def _prefect_client(layout: Layout, settings: StackSettings) -> dict[str, str]:
    return {
        "PREFECT_API_URL": f"{settings.prefect_url}/api",
        "PREFECT_HOME": str(layout.prefect_home),
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_CLI_PROMPT": "false",
    }


def _ray_client(layout: Layout) -> dict[str, str]:
    return {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(layout.ray_token),
        # Ray otherwise listens on all addresses. Despite its name, on Linux it means loopback.
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray ends a driver whose head is away for a minute, and a busy machine needs nearly as long
        # to start another.
        "RAY_gcs_rpc_server_reconnect_timeout_s": "300",
        **dict([NICENESS]),
    }


def inherited() -> dict[str, str]:
    return {name: text for name, text in os.environ.items() if not name.startswith(NOT_HANDED_ON)}


def configuration(layout: Layout, settings: StackSettings) -> str:
    sections = [SUPERVISORD.format(logs=layout.logs, sockets=layout.sockets, user=os.getuid())]
    for part, program in programs(layout, settings).items():
        marks = {ROOT_VARIABLE: str(layout.root), PART_VARIABLE: layout.mark(part)}
        environment = {"DO_NOT_TRACK": "1", "PYTHONUNBUFFERED": "1", **program.environment, **marks}
        sections.append(
            PROGRAM.format(
                part=part,
                command=shlex.join([*PYTHON, "flows.stack.part", *program.words]),
                environment=",".join(f'{name}="{text}"' for name, text in environment.items()),
                priority=PARTS.index(part),
                startsecs=QUICKLY_S,
                retries=RETRIES,
                stop_s=STOP_S,
                log=layout.log(part),
            )
        )
    return "".join(sections)
