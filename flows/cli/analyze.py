"""`concur benchmark` and `concur analyze`: what existing verdicts say."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.common import command, emit, json_option, verdict_options


@command()
@verdict_options
@click.option(
    "--tasks",
    metavar="TASKS",
    help="Their tasks, for the levels.  [default: beside the snapshot, or by the ids]",
)
@click.option(
    "--label",
    help="What the verdicts are called, and the model where the candidates name none.",
)
@click.option("--device", metavar="NAME", help="Take the verdicts of this device only.")
@click.option("--k", "ks", default="1,5,10", metavar="K,K,...", help="k of pass@k.")
@click.option(
    "--p",
    "ps",
    default="0,0.5,0.8,1,1.2,1.5,2",
    metavar="P,P,...",
    help="p of fast_p.",
)
@click.option(
    "--resamples",
    type=click.IntRange(min=100),
    default=2000,
    help="Resamples of the bootstrap over tasks.",
)
@json_option("the scores")
def benchmark(ks: str, ps: str, as_json: bool, **options: Any) -> None:
    """Score existing verdicts: Exec and fast_p at pass@k with intervals, level by level."""
    from flows.score import parsed_numbers, print_scores, score_table

    data = score_table(
        ks=parsed_numbers(ks, "--k", int), ps=parsed_numbers(ps, "--p", float), **options
    )
    emit(data, as_json, print_scores)


@command()
@verdict_options
@click.option(
    "--other-verdicts",
    metavar="PATH",
    help="Verdicts of another generator on the same tasks.",
)
@click.option("--other-candidates", metavar="PATH", help="Their candidates.")
@click.option(
    "--out",
    default="analysis",
    metavar="DIR",
    help="Where report.md, analysis.json and the figures go.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    help="Seed for the permutation test and the random groups of tasks.",
)
@json_option("the analysis")
def analyze(as_json: bool, **options: Any) -> None:
    """Observations and difficulty: what reasoning length says of correctness and speedup."""
    from flows.analyze import analyze

    analysis = analyze(**options)
    emit(analysis.as_json(), as_json, lambda _: click.echo(analysis.summary()))
