"""What the commands of `concur` share: options, exit statuses, tables and `--json`.

Options are in `options.toml`, what a command prints for a person in `templates/`. Exit status: 0
done; 1 the run or the machine failed; 2 the input cannot be used; 130 interrupted. Importing this
module loads nothing heavy.
"""

from __future__ import annotations

import json
import math
import signal
import sys
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from kernels_eval.errors import DeviceError, EvalError, UsageError
from kernels_eval.tables import table_beside

if TYPE_CHECKING:
    from jinja2 import Environment

HERE = Path(__file__).parent
OPTIONS: dict[str, Any] = table_beside(__file__, "options.toml")
INTERRUPTED = "interrupted: finished work is kept; rerun the same command to resume"
PIPE_WIDTH = 140
"""Columns of a table that is written to a pipe or a file."""


class Command(click.Command):
    """A command whose faults end as one line on stderr and an exit status."""

    def invoke(self, ctx: click.Context) -> Any:
        # A script starts background jobs with SIGINT ignored, and Python keeps that.
        if threading.current_thread() is threading.main_thread():
            if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
                signal.signal(signal.SIGINT, signal.default_int_handler)
        with exit_statuses():
            require_extras(OPTIONS.get(str(self.name), {}).get("needs", ()))
            return super().invoke(ctx)


def command(function: Callable[..., Any]) -> Command:
    """Make a function a command with the options of its name, to be registered in `main`."""
    name = function.__name__.replace("_", "-")
    return click.command(name, cls=Command, params=list(options_of(name)))(function)


def require_extras(extras: Sequence[str]) -> None:
    """Raises UsageError that names those of these extras that are not installed. To be called
    inside a command."""
    absent = [extra for extra in extras if not all(map(_installed, OPTIONS["extras"][extra]))]
    if absent:
        names = " and ".join(f"`{extra}`" for extra in absent)
        raise UsageError(
            f"`concur {click.get_current_context().info_name}` needs the"
            f" {'extras' if absent[1:] else 'extra'} {names}: pip install"
            f" 'concur[{','.join(absent)}]'"
        )


def extra_of(error: ModuleNotFoundError) -> str:
    """The extra that holds a module that is missing; empty where none does."""
    top = (error.name or "").partition(".")[0]
    return next((extra for extra, held in OPTIONS["extras"].items() if top in held), "")


def _installed(module: str) -> bool:
    with suppress(ImportError):  # a finder may refuse a name
        return find_spec(module) is not None
    return False


@contextmanager
def exit_statuses() -> Iterator[None]:
    """Turn unusable input, failing machines, missing extras and Ctrl-C into one line on stderr and
    SystemExit.

    Any other exception is a bug and keeps its traceback.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if not (extra := extra_of(error)):
            raise
        click.echo(f"error: {error}: pip install 'concur[{extra}]'", err=True)
        sys.exit(2)
    except EvalError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2 if isinstance(error, UsageError | DeviceError) else 1)
    except KeyboardInterrupt:
        click.echo(INTERRUPTED, err=True)
        sys.exit(130)


# -- options ---------------------------------------------------------------------------------------


def options_of(command: str) -> Iterator[click.Parameter]:
    """The options of a command: those that it shares, its own, and `--json` as `as_json`."""
    own = {name: told for name, told in OPTIONS[command].items() if name != "needs"}
    shared = [OPTIONS["shared"][group] for group in own.pop("use", ())]
    what = own.pop("json", None)
    for table in (*shared, own):
        for name, told in table.items():
            yield _option(name, **told)
    if what:
        text = f"Print {what} as one JSON object."
        yield _option("--json", into="as_json", is_flag=True, help=text)


class _FiniteRange(click.FloatRange):
    """A range without NaN, which is in every other one, and infinities."""

    def convert(self, value: Any, param: Any, ctx: Any) -> float:
        found = float(super().convert(value, param, ctx))
        if not math.isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


def _option(name: str, into: str | None = None, **told: Any) -> click.Option:
    least, most = told.pop("min", None), told.pop("max", None)
    match told.get("type"):
        case "int":
            told["type"] = int if least is None else click.IntRange(least, most)
        case "float":
            told["type"] = _FiniteRange(min=least)
    if choices := told.pop("choices", None):
        told["type"] = click.Choice(choices)
    return click.Option([name, into] if into else [name], **told)


# -- output ----------------------------------------------------------------------------------------


def emit(data: Any, as_json: bool, show: str | Callable[[Any], object], **more: object) -> None:
    """Print `data` as exactly one JSON object, or for a person: through the template `show`, which
    also gets `more`, or by calling it."""
    if as_json:
        click.echo(json.dumps(data))
    elif isinstance(show, str):
        click.echo(rendered(show, data, **more))
    else:
        show(data)


def rendered(name: str, data: Any, **more: object) -> str:
    """The template `name` with `data`; nothing that it prints acts on a terminal if `shown`."""
    return _templates().get_template(f"{name}.txt.j2").render(data=data, table=table, **more)


@cache
def _templates() -> Environment:
    from tasks.progress import duration, hours
    from tasks.reporting.templates import environment
    from tasks.reporting.text import clean
    from tasks.sources.files import shown

    filters = {
        "clean": clean,
        "counted": counted,
        "duration": duration,
        "form": lambda value, form=",": "" if value is None else format(value, form),
        "hours": hours,
        "shown": shown,
        "units": in_units,
    }
    return environment(HERE / "templates", filters=filters, extensions=["jinja2.ext.do"])


def table(
    title: str,
    columns: Sequence[str],
    rows: Iterable[Sequence[object]],
    *,
    right: Collection[str] = (),
    width: int = PIPE_WIDTH,
) -> str:
    """A table; columns named in `right` hold numbers. Cells are text, never markup."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    made = Table(title=Text(title) if title else None, show_header=any(columns))
    for name in columns:
        number = name in right
        made.add_column(
            Text(name), justify="right" if number else "left", no_wrap=number, overflow="fold"
        )
    for row in rows:
        made.add_row(*(Text(str(cell)) for cell in row))
    console = Console(width=None if sys.stdout.isatty() else width)
    with console.capture() as printed:
        console.print(made)
    return printed.get().rstrip("\n")


def counted(counts: Mapping[str, int]) -> str:
    """`name 1,234, other 5`."""
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def in_units(size: float) -> str:
    """Bytes for a person, in decimal units."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:,.0f} {unit}" if unit == "B" else f"{size:,.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"
