"""`concur curate`, `concur publish` and `concur diff`: choose, publish, compare training sets."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.common import (
    command,
    emit,
    json_option,
    root_option,
    set_option,
    verdict_options,
)

CURATED = click.option(
    "--curated",
    metavar="SNAPSHOT",
    help="A curated snapshot: fingerprint or directory.  [default: the newest]",
)


@command()
@verdict_options
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    default=("concur",),
    help="A name, a YAML file, or all. Repeat.",
)
@click.option(
    "--size",
    "sizes",
    metavar="N,N,...",
    help="At most so many samples; several sizes make several sets.",
)
@set_option("Override a key of the strategy, such as min_speedup=2.")
@click.option("--out", metavar="DIR", help="Write each set there as Parquet, and curation.json.")
@click.option(
    "--explain",
    metavar="CANDIDATE_ID",
    help="Explain why this candidate was selected or not.",
)
@json_option("the result")
def curate(
    sizes: str | None, out: str | None, explain: str | None, as_json: bool, **options: Any
) -> None:
    """Choose training sets from existing verdicts, by one strategy or many."""
    from flows.curate import (
        curate_table,
        explain_candidate,
        parsed_sizes,
        print_explanations,
        print_sets,
    )

    options["sizes"] = parsed_sizes(sizes)
    if explain is None:
        emit(curate_table(out=out, **options), as_json, print_sets)
        return
    found = {"explanations": explain_candidate(explain, **options)}
    emit(found, as_json, lambda data: print_explanations(data["explanations"]))


@command()
@root_option()
@CURATED
@click.option(
    "--also",
    multiple=True,
    metavar="SNAPSHOT",
    help="Another one, as a configuration named after its strategy.",
)
@click.option("--out", required=True, metavar="DIR", help="The folder to make.")
@click.option("--name", help="What the set is called.")
@click.option(
    "--license",
    metavar="ID",
    help="The set's licence as the hub names it, such as apache-2.0.",
)
@click.option(
    "--holdout",
    "holdout_share",
    type=float,
    metavar="SHARE",
    help="Share of the tasks that make a split `test`.",
)
@click.option("--observations", metavar="FILE", help="Markdown for the card.")
@click.option("--decontamination", metavar="FILE", help="Markdown for the card.")
@click.option("--figure", "figures", multiple=True, metavar="FILE", help="An image for the card.")
@click.option(
    "--push",
    metavar="REPO_ID",
    help="Then push it to the hub; the token is read from HF_TOKEN.",
)
@click.option("--public", is_flag=True, help="Push to a public repository.  [default: private]")
@json_option("the summary")
def publish(as_json: bool, root: str, out: str, **options: Any) -> None:
    """Write a curated set as a folder that datasets.load_dataset loads."""
    from flows.publish import print_published, publish_set

    emit(publish_set(root, out, **options), as_json, print_published)


@command()
@click.argument("old")
@click.argument("new")
@root_option("Where snapshots named by a fingerprint are.")
@json_option("the report")
def diff(old: str, new: str, root: str, as_json: bool) -> None:
    """Compare two curated snapshots or published folders: what changed, and why."""
    from flows.publish import diff_sets

    click.echo(diff_sets(root, old, new, as_json=as_json))
