"""What each part of the stack is: its command line and its environment, by `parts.toml`.

Guarantees: no secret is on a command line, and each part gets only the secrets that it needs;
variables of the caller that would point a part at another server, home or database are not handed
on. Everything listens on loopback but, where it was asked for, the servers with pages.
"""

from __future__ import annotations

import os
import secrets as random
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field

from flows.ops.places import PART_VARIABLE, ROOT_VARIABLE, Places
from flows.ops.settings import Part, Secrets, StackSettings
from kernels_eval.records import Json
from kernels_eval.tables import table_beside

PYTHON = (sys.executable, "-P", "-m")
"""-P: a file of the working directory must not stand in for a package."""
TABLE: Json = table_beside(__file__, "parts.toml")
DRIVERS = {"prefect": "asyncpg", "mlflow": "psycopg"}


@dataclass(frozen=True)
class Program:
    """One part, ready to be started."""

    command: list[str]
    environment: dict[str, str] = field(repr=False)


@dataclass(frozen=True)
class Stack:
    """What the programs of a stack are made from."""

    places: Places
    settings: StackSettings
    secrets: Secrets

    def filled(self, text: str) -> str:
        """A text of `parts.toml` with what this stack has in its places."""
        from jinja2 import StrictUndefined, Template

        settings, secrets = self.settings, self.secrets
        hosts = dict.fromkeys(("127.0.0.1", "localhost", settings.near, settings.far))
        ports = settings.prefect_port, settings.mlflow_port
        known = {
            "prefect_origins": ",".join(sorted(f"http://{host}:{ports[0]}" for host in hosts)),
            "mlflow_hosts": ",".join(
                host if ":" in host else f"{host}:{ports[1]}"
                for host in (*hosts, *settings.allowed_hosts)
            ),
            "pages_hosts": ",".join((*hosts, *settings.allowed_hosts)),
            "prefect_database": self.database("prefect"),
            "mlflow_database": self.database("mlflow"),
            "random": random.token_urlsafe(32),
        }
        template = Template(text, undefined=StrictUndefined)
        text = template.render(places=self.places, settings=settings, secrets=secrets, **known)
        return text

    def variables(self, table: Mapping[str, str]) -> dict[str, str]:
        """Those that are not empty."""
        found = {name: self.filled(text) for name, text in table.items()}
        return {name: value for name, value in found.items() if value}

    def database(self, part: str) -> str:
        """The URL that was given, with the driver that the part uses where it names none."""
        name = f"{part}_database"
        url: str = getattr(self.secrets, name) or getattr(self.settings, name) or ""
        scheme, separator, rest = url.partition("://")
        plain = separator and scheme in ("postgres", "postgresql")
        return f"postgresql+{DRIVERS[part]}://{rest}" if plain else url

    def url(self, part: Part) -> str:
        """Where a part is reached."""
        return self.filled(TABLE[part]["url"])


def program(part: Part, stack: Stack, environment: Mapping[str, str] = os.environ) -> Program:
    """One part of a stack; `environment` is the caller's."""
    table = TABLE[part]
    foreign = tuple(TABLE["not_handed_on"])
    found = {name: value for name, value in environment.items() if not name.startswith(foreign)}
    for shared in ("all", *table.get("use", ())):
        found |= stack.variables(TABLE["shared"][shared])
    if part == "worker":
        found |= client_environment(stack)
    found |= stack.variables(table["environment"])
    found |= {ROOT_VARIABLE: str(stack.places.root), PART_VARIABLE: stack.places.mark(part)}
    words = [word for text in table["command"] if (word := stack.filled(text))]
    return Program([*PYTHON, *words], found)


def client_environment(stack: Stack) -> dict[str, str]:
    """What points a client at the stack; without secrets."""
    found: dict[str, str] = {}
    for part in stack.settings.parts:
        found |= stack.variables(TABLE[part].get("client", {}))
        if part == "ray":
            found |= stack.variables(TABLE["shared"]["ray"])
    return found


def client_secrets(settings: StackSettings) -> dict[str, str]:
    """Variable of a client -> variable of the server that holds the same secret."""
    return {
        name: source
        for part in settings.parts
        for name, source in TABLE[part].get("client_secrets", {}).items()
    }
