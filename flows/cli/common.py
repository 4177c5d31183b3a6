"""What the commands of `concur` share: options, exit statuses, tables and `--json`.

Exit status: 0 done; 1 the run or the machine failed; 2 the input cannot be used; 130 interrupted.
Importing this module loads nothing heavy.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Protocol, TypeVar

import click

from kernels_eval.errors import DeviceError, EvalError, UsageError

LANGUAGES = ("cpp", "cuda", "triton")
INTERRUPTED = "interrupted: finished work is kept; rerun the same command to resume"
PIPE_WIDTH = 140
"""Columns of a table that is written to a pipe or a file."""

Function = TypeVar("Function", bound=Callable[..., Any])


class Option(Protocol):
    """A decorator that adds options to a function and returns it."""

    def __call__(self, function: Function, /) -> Function: ...


class Command(click.Command):
    """A command whose faults end as one line on stderr and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        with exit_statuses():
            return super().invoke(ctx)


def command(name: str | None = None) -> Callable[[Callable[..., Any]], Command]:
    """Make a function a command: `@command()`, to be registered in `flows.cli.main`."""
    return click.command(name, cls=Command)


@contextmanager
def exit_statuses() -> Iterator[None]:
    """Turn unusable input, failing machines and Ctrl-C into one line on stderr and SystemExit.

    Any other exception is a bug and keeps its traceback.
    """
    try:
        yield
    except (UsageError, DeviceError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except EvalError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo(INTERRUPTED, err=True)
        sys.exit(130)


# -- options ---------------------------------------------------------------------------------------


def json_option(what: str) -> Option:
    """`--json` as the argument `as_json`; `what` completes "Print ..."."""
    return click.option("--json", "as_json", is_flag=True, help=f"Print {what} as one JSON object.")


def root_option(help: str = "Where the snapshots are.") -> Option:
    """`--root`, a directory or an fsspec URL."""
    return click.option("--root", default=".concur", help=help)


def set_option(help: str) -> Option:
    """`--set KEY=VALUE`, repeatable, as the argument `overrides`."""
    return click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help=help)


def profile_options(
    example: str,
    *,
    profile: str = "A profile's name, or the path of a YAML file.",
    default: str | None = "local",
) -> Option:
    """`--profile` and `--set`; `example` is an override that suits the command."""

    def add(function: Function) -> Function:
        function = set_option(f"Override a key of the profile, such as {example}.")(function)
        return click.option("--profile", default=default, help=profile)(function)

    return add


def verdict_options(function: Function) -> Function:
    """`--verdicts`, `--candidates` and `--root`: which verdicts a command reads."""
    function = root_option()(function)
    function = click.option(
        "--candidates",
        metavar="PLACE",
        help="Their candidates.  [default: beside the snapshot, or the same files]",
    )(function)
    return click.option(
        "--verdicts",
        metavar="PLACE",
        help="A verification snapshot, Parquet, or a glob.  [default: the latest under --root]",
    )(function)


# -- output ----------------------------------------------------------------------------------------


def emit(data: Any, as_json: bool, show: Callable[[Any], object]) -> None:
    """Print `data` as exactly one JSON object, or let `show` print it for a person."""
    if as_json:
        click.echo(json.dumps(data))
    else:
        show(data)


def print_table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    width: int = PIPE_WIDTH,
) -> None:
    """Print a table; columns named in `right` hold numbers. Cells are text, never markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    table = Table(title=Text(title) if title else None, show_header=any(columns))
    for name in columns:
        number = name in right
        table.add_column(
            Text(name), justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    for row in rows:
        table.add_row(*(Text(str(cell)) for cell in row))
    Console(width=None if sys.stdout.isatty() else width).print(table)
