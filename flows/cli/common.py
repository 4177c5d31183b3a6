"""What the commands of `concur` share.

A command is a function: its signature is its options, its docstring the help, with a line of each
option under `Options:`, and the data it returns is printed as a page (`flows.cli.render`) or, with
`--json`, as one JSON object.

Exit status: 0 done; 1 the run or the machine failed; 2 the input cannot be used; 130 interrupted.
Importing this module loads nothing heavy.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from copy import copy
from enum import StrEnum
from functools import wraps
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import typer
import typer.core
from typer import Argument, Option

from flows.cli.render import render
from flows.cli.silence import never_silent
from flows.extras import extra_of, require_extras
from kernels_eval.errors import DeviceError, EvalError, UsageError
from kernels_eval.installation import ROOT_VARIABLE, install_command

INTERRUPTED_STATUS = 130
INTERRUPTED = "interrupted: finished work is kept; rerun the same command to resume"
NEEDS: dict[str, Sequence[str]] = {}
"""The extras that each command needs, by its name."""

Json = dict[str, Any]
"""The data of a command: what `--json` prints."""
Function = TypeVar("Function", bound=Callable[..., Any])
Words = tuple[str, str, str, str]
"""What a docstring says of an option: flag, metavar, help, and its default in words."""
OPTION = re.compile(
    r"^    (\w+)(?: (--\S+))?(?: ([A-Z][^\s:]*))?: (.+(?:\n {8}.+)*)$", re.MULTILINE
)

# -- shared options --------------------------------------------------------------------------------

KernelLanguage = Literal["cpp", "cuda", "triton"]
AsJson = Annotated[bool, Option("--json", help="Print the result as one JSON object.")]
Root = Annotated[str, Option(envvar=ROOT_VARIABLE, help="Folder of the snapshots.")]
StackRoot = Annotated[
    str, Option(envvar=ROOT_VARIABLE, help="Folder of snapshots, databases and logs.")
]
Profile = Annotated[str, Option(help="A profile's name, or the path of a YAML file.")]
Verdicts = Annotated[
    str | None,
    Option(
        metavar="PLACE",
        help="A verification snapshot, the --out of verify-batch, or Parquet.",
        show_default="newest in --root",
    ),
]
Candidates = Annotated[
    str | None,
    Option(
        metavar="PLACE",
        help="Candidates of the verdicts.",
        show_default="beside the snapshot, or in the same files",
    ),
]
Curated = Annotated[
    str | None,
    Option(
        metavar="SNAPSHOT",
        help="A curated snapshot: fingerprint or directory.",
        show_default="the newest",
    ),
]
Quick = Annotated[
    bool,
    Option("--quick", help="Screen: fewer trials and timing samples, a rough speedup."),
]
RayAddress = Annotated[
    str | None,
    Option(
        "--address",
        metavar="ADDRESS",
        help="A Ray cluster: auto or HOST:PORT.",
        show_default="this machine alone",
    ),
]


def repeated(*names: str, metavar: str | None = None, help: str) -> Any:
    """Return an option that may be given several times; its value is a list."""
    text = f"{help} Repeatable."
    return Option([], *names, metavar=metavar, help=text, show_default=False)


def setting(what: str, example: str) -> Any:
    """Return the option `--set KEY=VALUE`, which overrides keys of `what`."""
    text = f"Override a key of {what}, such as {example}."
    return repeated("--set", metavar="KEY=VALUE", help=text)


# -- commands --------------------------------------------------------------------------------------


class Group(StrEnum):
    """A heading of the help, in its order."""

    VERIFY = "Verify kernels"
    DATA = "Make training data"
    TRAIN = "Train and compare"
    FIND = "Find things"
    MACHINE = "Check and clean this machine"
    STACK = "Run the servers"


class Grouped(typer.core.TyperGroup):
    """A group whose help lists its commands under headings, each with a whole sentence."""

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        for group in Group:
            rows = []
            for name, command in self.commands.items():
                if vars(command)["rich_help_panel"] == group.value:
                    text = command.get_short_help_str(500).rstrip(".")
                    rows.append((name, f"{text}."))
            with formatter.section(group.value):
                formatter.write_dl(rows)


class Command(typer.core.TyperCommand):
    """A command whose numbers are finite: NaN lies within every range."""

    def invoke(self, ctx: Any) -> Any:
        parameters: list[Any] = self.params
        for parameter in parameters:
            value = ctx.params.get(parameter.name)
            if isinstance(value, float) and not math.isfinite(value):
                text = f"{value} is not a finite number."
                raise typer.BadParameter(text, ctx=ctx, param=parameter)
        return super().invoke(ctx)


app = typer.Typer(
    name="concur",
    cls=Grouped,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="If an extra is missing, the command names it.",
)


def command(
    group: Group,
    *,
    needs: Sequence[str] = (),
    succeeded: str = "",
    prints: bool = True,
    serves: bool = False,
    page: Callable[[Json], str] = render,
) -> Callable[[Function], Function]:
    """Register a function as the command of its name.

    `needs` are extras that must be installed. The data it returns is printed, as JSON with
    `--json`, else as `page` draws it, and text as it is; the exit status is 1 where
    `data[succeeded]` is false. With `prints=False` the function prints by itself, and `--json` is
    its own affair. One that `serves` may be silent.
    """

    def register(function: Function) -> Function:
        name = function.__name__.rstrip("_").replace("_", "-")
        signature = inspect.signature(function, eval_str=True)
        text, _, rows = inspect.cleandoc(function.__doc__ or "").partition("\n\nOptions:\n")
        said = options_in(rows)
        parameters = {
            key: worded(each, said[key]) if key in said else each
            for key, each in signature.parameters.items()
        }
        wants_json = "as_json" in parameters
        if prints and not wants_json:
            parameters["as_json"] = inspect.Parameter(
                "as_json", inspect.Parameter.KEYWORD_ONLY, default=False, annotation=AsJson
            )

        @wraps(function)
        def run(**options: Any) -> None:
            as_json = options["as_json"] if wants_json else options.pop("as_json", False)
            _accept_interrupts()
            with nullcontext() if serves else never_silent(name), exit_statuses():
                require_extras(needs, name)
                data = function(**options)
            if isinstance(data, str):
                typer.echo(data)
            elif prints:
                typer.echo(json.dumps(data) if as_json else page(data))
            if succeeded and not data[succeeded]:
                sys.exit(1)

        run.__annotations__ = {key: each.annotation for key, each in parameters.items()}
        vars(run)["__signature__"] = signature.replace(parameters=list(parameters.values()))
        NEEDS[name] = needs
        app.command(name, cls=Command, help=text, rich_help_panel=group.value)(run)
        return function

    return register


def options_in(rows: str) -> Mapping[str, Words]:
    """The lines `name --flag METAVAR: help [default: words]` under `Options:`, by name."""
    found = {}
    for name, flag, metavar, words in OPTION.findall(rows):
        help, _, default = " ".join(words.split()).removesuffix("]").partition(" [default: ")
        found[name] = (flag, metavar, help, default)
    return found


def worded(parameter: inspect.Parameter, words: Words) -> inspect.Parameter:
    """A parameter as typer takes it: an argument before the `*` of a signature, else an option,
    without a `--no-` form."""
    flag, metavar, help, default = words
    kind, *given = [parameter.annotation]
    if get_origin(kind) is Annotated:
        kind, *given = get_args(kind)
    is_argument = parameter.kind is not parameter.KEYWORD_ONLY
    told = copy(given[0]) if given else Argument() if is_argument else Option()
    if kind is bool:
        flag = flag or f"--{parameter.name}"
    vars(told).update(help=help, metavar=metavar or None, show_default=default or True)
    if flag:
        told.param_decls = (flag,)
    return parameter.replace(annotation=Annotated[kind, told])


def tell(line: str) -> None:
    """Say on stderr what is under way."""
    typer.echo(line, err=True)


def _accept_interrupts() -> None:
    """Undo that a script starts background jobs with SIGINT ignored, which Python keeps."""
    if threading.current_thread() is threading.main_thread():
        if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            signal.signal(signal.SIGINT, signal.default_int_handler)


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
        tell(f"error: {error}: {install_command(extra)}")
        sys.exit(2)
    except EvalError as error:
        tell(f"error: {error}")
        sys.exit(2 if isinstance(error, UsageError | DeviceError) else 1)
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would change the exit status
        tell(INTERRUPTED)
        sys.exit(INTERRUPTED_STATUS)
