"""The package's extras: which are installed, and how to install a missing one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from importlib.util import find_spec

from kernels_eval.errors import UsageError
from kernels_eval.installation import install_command

EXTRAS = {
    "batch": ["ray", "polars", "pyarrow", "huggingface_hub", "datasets"],
    "line": [
        *("prefect", "sqlalchemy", "mlflow", "transformers", "openai"),
        *("httpx", "anyio"),
        *("matplotlib", "scipy", "statsmodels", "datasketch", "supervisor"),
    ],
    "train": ["trl", "peft", "accelerate"],
    "serve": ["fastapi", "starlette", "uvicorn", "prometheus_client", "httpx", "anyio"],
    "mcp": ["mcp"],
    "server": ["flask_wtf", "psycopg"],
}
"""The package's extras, each with modules that show it is installed."""


def require_extras(extras: Iterable[str], name: str) -> None:
    """Raise UsageError naming missing extras that command `name` needs."""
    absent = [extra for extra in extras if not all(map(_installed, EXTRAS[extra]))]
    if absent:
        names = " and ".join(f"`{extra}`" for extra in absent)
        noun = "extras" if absent[1:] else "extra"
        raise UsageError(f"`concur {name}` needs the {noun} {names}: {install_command(*absent)}")


def extra_of(error: ModuleNotFoundError) -> str:
    top = (error.name or "").partition(".")[0]
    return next((extra for extra, held in EXTRAS.items() if top in held), "")


def _installed(module: str) -> bool:
    with suppress(ImportError):  # a finder may refuse a name
        return find_spec(module) is not None
    return False
