"""What `concur up` is told: addresses, ports, databases, limits; and the secrets, which are read
from the environment only.

Guarantees: settings are frozen, hold no secret, and are refused where a server would be reachable
from another machine without authentication. Does not look at this machine: preflight.py does.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from ipaddress import IPv4Address
from pathlib import Path
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import (
    AliasChoices,
    Field,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from flows.config import keys_in
from kernels_eval.errors import UsageError
from kernels_eval.records import Json, Record, Row

Part = Literal["prefect", "worker", "mlflow", "pages", "ray"]
PARTS: tuple[Part, ...] = ("prefect", "mlflow", "pages", "ray", "worker")
"""In the order of their start, and the reverse of the order of their end: what hands out work ends
first, what the others report to last."""
POOL = "concur"
PREFECT_SECRET = "PREFECT_SERVER_API_AUTH_STRING"
MLFLOW_SECRET = "MLFLOW_AUTH_ADMIN_PASSWORD"
DATABASES = {
    "prefect": "PREFECT_SERVER_DATABASE_CONNECTION_URL",
    "mlflow": "MLFLOW_BACKEND_STORE_URI",
}
PASSWORD_LEAST_CHARACTERS = 12
"""MLflow's own least length for its first user."""


Port = Annotated[int, Field(ge=1, le=65535)]
UnprivilegedPort = Annotated[int, Field(ge=1024, le=65535)]


class StackSettings(Record, title="concur up"):
    """Settings of one stack. Ports are TCP ports; limits count flow runs."""

    host: str = "127.0.0.1"
    """Address that Prefect, MLflow and the pages listen on; Ray stays on loopback."""

    public_host: str | None = None
    """The name by which browsers reach this machine, where `host` is not loopback."""

    allowed_hosts: tuple[str, ...] = ()
    """Further names that MLflow and the pages answer to, where `host` is not loopback."""

    prefect_port: Port = 4200
    worker_port: Port = 4280
    """The worker's health endpoint, on loopback."""

    mlflow_port: Port = 5000
    pages_port: Port = 4290
    """Reports and the viewer of candidates."""

    ray_port: Port = 6379
    ray_client_port: UnprivilegedPort = 10001
    ray_dashboard_port: UnprivilegedPort | None = None
    """A dashboard of Ray costs 0.9 GB; none by default."""

    without: tuple[Part, ...] = ()
    """Parts that are not started."""

    prefect_database: str | None = None
    """postgresql+asyncpg://USER@HOST/NAME; SQLite under the root by default."""

    mlflow_database: str | None = None
    """postgresql+psycopg://USER@HOST/NAME; SQLite in the root by default."""

    gpu_limit: PositiveInt | None = None
    """Flow runs at once of the queue gpu; the number of GPUs by default."""

    cpu_limit: PositiveInt | None = None
    """Flow runs at once of the queue cpu; half of the cores by default."""

    @field_validator("host")
    @classmethod
    def _is_address(cls, value: str) -> str:
        if value != "localhost":
            IPv4Address(value)
        return value

    @field_validator("prefect_database", "mlflow_database")
    @classmethod
    def _no_password(cls, value: str | None) -> str | None:
        if value is not None and urlsplit(value).password:
            raise ValueError("it holds a password, which other users of this machine would see")
        return value

    @model_validator(mode="after")
    def _ports_differ(self) -> StackSettings:
        seen: dict[int, str] = {}
        for name, port in self.ports().items():
            if port in seen:
                raise ValueError(f"{seen[port]} and {name} are both {port}")
            seen[port] = name
        return self

    @property
    def parts(self) -> tuple[Part, ...]:
        """What is started, in order; a worker needs a Prefect server."""
        absent = {*self.without, *(("worker",) if "prefect" in self.without else ())}
        return tuple(part for part in PARTS if part not in absent)

    def ports(self) -> dict[str, int]:
        """Name of the setting -> port, for the parts that are started."""
        return {
            name: port
            for part in self.parts
            for name, port in self
            if name.startswith(part) and name.endswith("_port") and port is not None
        }

    @property
    def exposed(self) -> bool:
        """Whether other machines can reach the servers."""
        return self.host != "localhost" and not IPv4Address(self.host).is_loopback

    @property
    def near(self) -> str:
        """The host as processes of this machine reach the servers."""
        return "127.0.0.1" if self.host in ("0.0.0.0", "localhost") else self.host

    @property
    def far(self) -> str:
        """The host as a browser reaches the servers."""
        if not self.exposed:
            return self.near
        return self.public_host or (socket.gethostname() if self.host == "0.0.0.0" else self.host)

    @property
    def prefect_url(self) -> str:
        return f"http://{self.near}:{self.prefect_port}"

    @property
    def mlflow_url(self) -> str:
        return f"http://{self.near}:{self.mlflow_port}"

    @property
    def ray_address(self) -> str:
        return f"127.0.0.1:{self.ray_port}"


class Secrets(Record, extra="ignore"):
    """What is handed on in the environment only, by the name of its variable: never written to a
    file or a command line."""

    prefect: str | None = Field(default=None, repr=False, validation_alias=PREFECT_SECRET)
    mlflow: str | None = Field(default=None, repr=False, validation_alias=MLFLOW_SECRET)
    mlflow_user: str = Field(default="admin", validation_alias="MLFLOW_AUTH_ADMIN_USERNAME")
    prefect_database: str | None = Field(
        default=None,
        repr=False,
        validation_alias=AliasChoices(DATABASES["prefect"], "PREFECT_API_DATABASE_CONNECTION_URL"),
    )
    mlflow_database: str | None = Field(
        default=None, repr=False, validation_alias=DATABASES["mlflow"]
    )


def load_settings(file: str | None, options: Row) -> tuple[StackSettings, Json]:
    """Settings of a YAML file with options over it, and those that were given explicitly.

    Raises UsageError where they cannot be used.
    """
    read = keys_in(Path(file), file, "deployments/stack.yaml") if file else {}
    given = {**read, **options}
    try:
        return StackSettings.model_validate(given), given
    except ValidationError as error:
        raise _explained(error, file) from error


def load_secrets(settings: StackSettings, environment: Mapping[str, str] = os.environ) -> Secrets:
    """Secrets from the environment. Raises UsageError where servers would be open to other machines
    without a password, or a secret cannot be used."""
    secrets = read_secrets(environment)
    for part, secret, variable, form in (
        ("prefect", secrets.prefect, PREFECT_SECRET, "user:password"),
        ("mlflow", secrets.mlflow, MLFLOW_SECRET, "a password"),
        ("pages", secrets.prefect, PREFECT_SECRET, "user:password"),
    ):
        if part not in settings.parts:
            continue
        if settings.exposed and not secret:
            raise UsageError(
                f"--host {settings.host} lets other machines reach {part}, which anybody could then"
                " use to run code here",
                f"set {variable} ({form}) in the environment, or leave --host out to stay on"
                " loopback",
            )
        if secret and len(secret) < PASSWORD_LEAST_CHARACTERS:
            raise UsageError(
                f"{variable} has {len(secret)} characters",
                f"give at least {PASSWORD_LEAST_CHARACTERS}",
            )
    if secrets.prefect and ":" not in secrets.prefect:
        raise UsageError(f"{PREFECT_SECRET} has no colon", "give user:password")
    return secrets


def read_secrets(environment: Mapping[str, str] = os.environ) -> Secrets:
    """Secrets from the environment, unchecked."""
    return Secrets.model_validate({name: value for name, value in environment.items() if value})


def _explained(error: ValidationError, file: str | None) -> UsageError:
    problem = error.errors()[0]
    key = ".".join(str(part) for part in problem["loc"])
    message = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "extra_forbidden":
        known = ", ".join(sorted(StackSettings.model_fields))
        return UsageError(f"{file} has an unknown key {key!r}", f"known keys: {known}")
    fix = f"correct {key}" if file else f"correct --{key.replace('_', '-')}"
    if key == "host":
        message, fix = f"{problem['input']!r} is not an IPv4 address", "give one like 127.0.0.1"
    elif "password" in message:
        variable = DATABASES[key.partition("_")[0]]
        fix = f"give the URL with its password in the environment, as {variable}"
    return UsageError(f"{key or 'ports'}: {message}", fix if key else "give each port its own")
