"""This package as it is installed: its commands for the interpreter that runs, and whether it has
changed.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
import time
from pathlib import Path

from kernels_eval.errors import InstallationError

CHECKOUT = Path(__file__).resolve().parent.parent
STARTED = time.time()
ROOT_VARIABLE, DEFAULT_ROOT = "CONCUR_ROOT", ".concur"
"""What a command without --root takes: the value of the variable, else the folder here."""
AGAIN = "install it again where it is incomplete, then start again: what is finished is kept"


def require_unchanged() -> None:
    """Raise InstallationError where code of the judge was changed since this process started: its
    new parts and its old ones do not fit together.
    """
    for path in Path(__file__).parent.rglob("*.py"):
        if path.stat().st_ctime > STARTED:
            raise InstallationError(f"{path} was changed while this ran", AGAIN)


def install_command(*extras: str) -> str:
    """The command that installs these extras from this package's own folder or address: on an index
    its name may be a stranger's.
    """
    names = f"[{','.join(extras)}]" if extras else ""
    if (CHECKOUT / "pyproject.toml").is_file():
        here = Path.cwd().resolve() == CHECKOUT
        requirement = f"{'.' if here else CHECKOUT}{names}"
    else:
        requirement = f"concur{names}{_origin()}"
    return pip_install(requirement)


def command_name(program: str = "concur") -> str:
    """Return a program as this user can type it: beside the running interpreter if it is there."""
    beside = Path(sys.executable).with_name(program)
    if not beside.exists():
        return program
    here = Path.cwd()
    return str(beside.relative_to(here) if beside.is_relative_to(here) else beside)


def command_at(verb: str, root: str | Path) -> str:
    """A command of concur for this root, as this user can type it; without --root where that is
    what it takes."""
    there, here = Path(root).absolute(), Path.cwd()
    if there == here / DEFAULT_ROOT == Path(os.environ.get(ROOT_VARIABLE, DEFAULT_ROOT)).absolute():
        return shlex.join([command_name(), verb])
    place = str(there.relative_to(here) if there.is_relative_to(here) else there)
    place = str(root) if "://" in str(root) else place
    return shlex.join([command_name(), verb, "--root", place])


def pip_install(*requirements: str) -> str:
    return shlex.join([sys.executable, "-m", "pip", "install", *requirements])


def _origin() -> str:
    """` @ URL` of an installed copy; empty where it came from an index."""
    from importlib import metadata

    try:
        text = metadata.distribution("concur").read_text("direct_url.json")
    except metadata.PackageNotFoundError:
        text = None
    return f" @ {json.loads(text)['url']}" if text else ""
