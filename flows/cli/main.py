"""The `concur` command: every group of commands, registered in the order of the help.

Guarantees: a command imports what it needs when it runs, so `--help` loads nothing heavy and
`concur verify` needs no extra.
"""

from __future__ import annotations

import typer
import typer.main
from typer import Option

from flows.cli import data, find, machine, stack, train, verify
from flows.cli.common import app

GROUPS = (verify, data, train, find, machine, stack)
"""The modules whose import registers the commands."""


def print_version(asked: bool) -> None:
    if asked:
        from importlib import metadata

        typer.echo(f"concur, version {metadata.version('concur')}")
        raise typer.Exit


@app.callback()
def concur(
    version: bool = Option(
        False, "--version", help="Show the version and exit.", is_eager=True, callback=print_version
    ),
) -> None:
    """Turn LLM-written GPU kernels into trustworthy training data."""


main = typer.main.get_command(app)

if __name__ == "__main__":
    main()
