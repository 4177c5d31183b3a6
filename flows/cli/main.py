"""The `concur` command: one module a command group, registered here.

Answers --help without loading anything heavy: every command imports what it needs when it runs.
"""

from __future__ import annotations

import click

from flows.cli.ablate import ablate
from flows.cli.analyze import analyze
from flows.cli.benchmark import benchmark
from flows.cli.curate import curate, diff, publish
from flows.cli.doctor import doctor
from flows.cli.gc import gc
from flows.cli.morning import morning
from flows.cli.run import run
from flows.cli.stack import down, env, status, up
from flows.cli.train import train
from flows.cli.verify import verify, verify_batch
from flows.cli.view import view
from flows.cli.watchdog import watchdog

COMMANDS = (
    *(run, verify, verify_batch, curate, publish, diff, train, ablate, benchmark, analyze),
    *(view, morning, doctor, gc, up, status, down, env, watchdog),
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "show_default": True})
@click.version_option(package_name="concur")
def main() -> None:
    """Turn LLM-written GPU kernels into trustworthy training data."""


for _command in COMMANDS:
    main.add_command(_command)

if __name__ == "__main__":
    main()
