"""`concur export`: verdicts and kernels in the forms of others, and the results of others as a
table."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.common import command, emit


@command
@click.argument("sources", nargs=-1, metavar="[SOURCE]...")
def export(sources: tuple[str, ...], form: Any, out: str, as_json: bool, **options: Any) -> None:
    """Write verdicts for other suites, or one kernel as a package.

    SOURCE is what --verdicts of other commands takes (default: the newest in --root). With `--as
    table` it is the results of another harness (a run of KernelBench, or a folder with traces), or
    several sets of verdicts, of one GPU each, that become one table.
    """
    from flows import exchange
    from flows.launch import TerminalProgress
    from tasks.progress import observed_by

    with TerminalProgress() as progress, observed_by(progress):
        told = exchange.export(sources, form, out, **options)
    emit(told, as_json, "export")
