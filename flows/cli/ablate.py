"""`concur ablate`: an ablation from a terminal."""

from __future__ import annotations

import atexit
import os
import sys
from typing import Any

import click

from flows.cli.common import INTERRUPTED, command, emit


@command
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

    Rerun the same command to resume a stopped ablation and to retry failed branches. The exit
    status is 1 if a branch failed or was left out.
    """
    from flows.ablation.plan import (
        ablation_config,
        parsed_list,
        pipeline_of,
        planned_branches,
    )
    from flows.ablation.run import estimated, run_ablation
    from flows.launch import require_ready
    from flows.ops.control import join_stack

    lists = {
        "strategies": parsed_list(strategies, "--strategies", str),
        "sizes": parsed_list(sizes, "--sizes", int),
        "seeds": parsed_list(seeds, "--seeds", int),
    }
    config = ablation_config(overrides=overrides, **lists, **options)
    pipeline = pipeline_of(config)
    planned_branches(config)
    require_ready(pipeline, *(() if config.verdicts else ("refresh",)), "training", "benchmark")
    join_stack(pipeline.root)
    if only_estimate:
        data = estimated(config, pipeline)
        emit(data, as_json, lambda data: click.echo("\n".join(data["lines"])))
        return
    try:
        data = run_ablation(config, pipeline)
    except KeyboardInterrupt:
        # Branches work in threads that nothing can interrupt; what they finished is on disk. End
        # Ray and the embedded Prefect: the interpreter would wait for the threads.
        click.echo(INTERRUPTED, err=True)
        atexit._run_exitfuncs()
        os._exit(130)
    emit(data, as_json, "ablate")
    sys.exit(0 if data["complete"] else 1)
