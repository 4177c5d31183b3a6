"""How to install an extra of this package for the interpreter that runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path

CHECKOUT = Path(__file__).resolve().parent.parent


def install_command(*extras: str) -> str:
    """Return the command that installs these extras from where this package came from.

    A package of this name on an index may be a stranger's, so a clone names its own folder and an
    installed copy the address that it was installed from.
    """
    names = f"[{','.join(extras)}]" if extras else ""
    if (CHECKOUT / "pyproject.toml").is_file():
        here = Path.cwd().resolve() == CHECKOUT
        requirement = f"{'.' if here else CHECKOUT}{names}"
    else:
        requirement = f"concur{names}{_origin()}"
    return pip_install(requirement)


def pip_install(*requirements: str) -> str:
    """Return the command that installs packages for the interpreter that runs."""
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def _origin() -> str:
    """Return ` @ URL` of an installed copy; empty where it came from an index."""
    from importlib import metadata

    try:
        text = metadata.distribution("concur").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    return f" @ {json.loads(text)['url']}" if text else ""
