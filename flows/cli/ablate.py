"""`concur ablate`: an ablation from a terminal."""

from __future__ import annotations

import atexit
import json
import os
import sys
from typing import Any

import click


@click.command()
@click.option(
    "--profile",
    default=None,
    help="A profile's name, or the path of a YAML file.  [default: ablation]",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key, such as training.num_epochs=1.",
)
@click.option(
    "--strategies",
    default=None,
    metavar="S,S,...",
    help="Names, YAML files, or all; others are compared with the first.",
)
@click.option(
    "--sizes",
    default=None,
    metavar="N,N,...",
    help="At most so many samples; `all`: what a strategy takes.  [default: all]",
)
@click.option(
    "--seeds",
    default=None,
    metavar="N,N,...",
    help="Of curation, training and answers.  [default: 0,1]",
)
@click.option(
    "--max-gpu-hours",
    type=float,
    default=None,
    metavar="HOURS",
    help="Refuse to start, or to go on, above it.",
)
@click.option(
    "--parallel",
    "max_parallel_branches",
    type=int,
    default=None,
    metavar="N",
    help="Branches at once.  [default: one a GPU]",
)
@click.option(
    "--verdicts",
    default=None,
    metavar="SNAPSHOT",
    help="Start from this verification snapshot.  [default: refresh first]",
)
@click.option(
    "--estimate", "only_estimate", is_flag=True, help="Print what it would cost, and stop."
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def ablate(
    strategies: str | None,
    sizes: str | None,
    seeds: str | None,
    overrides: tuple[str, ...],
    only_estimate: bool,
    as_json: bool,
    **options: Any,
) -> None:
    """Compare strategies: curate, train and benchmark each, at every size and with every seed.

    The same command again goes on where it was stopped, and tries what failed. Exit status 1 where
    a branch failed or was left out.
    """
    from flows.ablation.plan import (
        ablation_config,
        expanded,
        parsed_list,
        pipeline_of,
        planned_branches,
    )
    from flows.cli.main import _guarded, _prepare
    from flows.ops.control import join_stack

    def asked() -> Any:
        lists = {
            "strategies": expanded(parsed_list(strategies, "--strategies", str)),
            "sizes": parsed_list(sizes, "--sizes", int),
            "seeds": parsed_list(seeds, "--seeds", int),
        }
        config = ablation_config(overrides=overrides, **lists, **options)
        pipeline = pipeline_of(config)
        planned_branches(config)
        _prepare(pipeline)
        return config, pipeline

    config, pipeline = _guarded(asked)
    _guarded(lambda: join_stack(pipeline.root))
    from flows.ablation.run import estimated, run_ablation

    if only_estimate:
        data = _guarded(lambda: estimated(config, pipeline))
        click.echo(json.dumps(data) if as_json else "\n".join(data["lines"]))
        return
    try:
        data = _guarded(lambda: run_ablation(config, pipeline))
    except SystemExit as error:
        if (
            error.code == 130
        ):  # branches work in threads that nothing can interrupt: what they had finished is on disk
            # ends Ray and the embedded Prefect; the interpreter would go on to wait for the threads
            atexit._run_exitfuncs()
            os._exit(130)
        raise
    if as_json:
        click.echo(json.dumps(data))
    else:
        from flows.ablation.table import print_ablation

        print_ablation(data)
    sys.exit(0 if data["complete"] else 1)
