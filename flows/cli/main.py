"""The `concur` command: one module a command group, named in `options.toml`.

Guarantees: a command's module is imported when the command is asked for, and imports what it needs
when it runs: `--help` loads nothing heavy, and `concur verify` needs no extra.
"""

from __future__ import annotations

from collections import UserDict
from importlib import import_module

import click

from flows.cli.common import OPTIONS

GROUPS: dict[str, dict[str, str]] = OPTIONS["groups"]


class _Commands(UserDict[str, click.Command]):
    """Commands by name, each imported when it is first asked for."""

    def __init__(self) -> None:
        super().__init__()
        self._modules = {
            name: module for group in GROUPS.values() for name, module in group.items()
        }
        self.data = dict.fromkeys(self._modules, click.Command(None))

    def __getitem__(self, name: str) -> click.Command:
        module = import_module(f"flows.cli.{self._modules[name]}")
        found: click.Command = vars(module)[name.replace("-", "_")]
        return found


class _Grouped(click.Group):
    """A group whose help lists its commands under headings, each with a whole sentence."""

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for title, names in GROUPS.items():
            told = {name: self.commands[name].get_short_help_str(500) for name in names}
            with formatter.section(title):
                formatter.write_dl([(name, f"{text.rstrip('.')}.") for name, text in told.items()])


@click.group(
    cls=_Grouped,
    commands=_Commands(),
    context_settings={"help_option_names": ["-h", "--help"], "show_default": True},
    epilog="If an extra is missing, the command names it.",
)
@click.version_option(package_name="concur")
def main() -> None:
    """Turn LLM-written GPU kernels into trustworthy training data."""


if __name__ == "__main__":
    main()
