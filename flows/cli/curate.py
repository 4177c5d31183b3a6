"""`concur curate`, `concur publish` and `concur diff`: choose, publish, compare training sets."""

from __future__ import annotations

from typing import Any

import click

from flows.cli.common import (
    command,
    emit,
    json_option,
    print_table,
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
    from flows.curate import curate_table, explain_candidate, parsed_sizes

    options["sizes"] = parsed_sizes(sizes)
    if explain is None:
        emit(curate_table(out=out, **options), as_json, print_sets)
        return
    found = {"explanations": explain_candidate(explain, **options)}
    emit(found, as_json, print_explanations)


def print_sets(data: dict[str, Any]) -> None:
    """Print the sets as a table, after what is worth knowing of their source."""
    source, sets = data["source"], data["sets"]
    lines = [
        f"{source['rows']:,} candidates, {source['correct']:,} correct: {source['verdicts']}",
        "tokens and speedup are medians of the set",
    ]
    if set(source["operators_from"]) - {"verdict"}:
        known = _listed(source["operators_from"])
        lines.append(f"operators of the correct ones' tasks are known from: {known}")
    flags = next((each["trace_flags"] for each in sets if each.get("trace_flags")), None)
    if flags:
        lines.append(f"flags of the correct ones' reasoning: {_listed(flags['correct'])}")
    click.echo("\n".join(lines))
    right = ("size", "samples", "tasks", "single", "fusion", "tokens", "speedup")
    rows = [
        (
            each["strategy"],
            _number(each["size"]),
            _number(each["samples"]),
            _number(each["tasks"]),
            _number(each["composition"]["single_operator"]),
            _number(each["composition"]["fusion"]),
            _number(each["median_reasoning_tokens"], ",.0f"),
            _number(each["median_speedup"], ".3g"),
            _listed(each["criteria"]),
        )
        for each in sets
    ]
    print_table("", ("strategy", *right, "criteria"), rows, right=right)
    for each in sets:
        if outcome := each.get("file") or each.get("problem"):
            click.echo(f"{each['strategy']}: {outcome}")


def _number(value: float | None, form: str = ",") -> str:
    return "" if value is None else format(value, form)


def _listed(counts: dict[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in counts.items())


def print_explanations(data: dict[str, Any]) -> None:
    """Print why a candidate was taken or not, one line a reason."""
    from tasks.reporting.text import clean

    for each in data["explanations"]:
        size = "" if each["size"] is None else f", size {each['size']:,}"
        verb = f"took it as {each['criterion']}" if each["taken"] else "did not take it"
        title = f"{each['candidate_id']} of {each['task_id']}: {each['strategy']}{size} {verb}"
        for line in (title, *(f"  {reason}" for reason in each["reasons"])):
            click.echo(clean(line, one_line=True))


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
    from tasks.publishing.sets import publish_set

    emit(publish_set(root, out, **options), as_json, print_published)


def print_published(data: dict[str, Any]) -> None:
    """Print what was published, and where."""
    for config, splits in data["rows"].items():
        counts = ", ".join(f"{split} {rows:,} rows" for split, rows in splits.items())
        click.echo(f"{config}: {counts}")
    size = f"{data['files']} files, {data['size_bytes'] / 1e6:,.1f} MB"
    click.echo(f"folder:    {data['folder']} ({size})\nrevision:  {data['tag']}")
    if hub := data["hub"]:
        state = "private" if hub["private"] else "public"
        state += "" if hub["sent"] else ", was there already"
        click.echo(f"hub:       {hub['url']} ({state})")


@command()
@click.argument("old")
@click.argument("new")
@root_option("Where snapshots named by a fingerprint are.")
@json_option("the report")
def diff(old: str, new: str, root: str, as_json: bool) -> None:
    """Compare two curated snapshots or published folders: what changed, and why."""
    from tasks.publishing.sets import diff_sets

    click.echo(diff_sets(root, old, new, as_json=as_json))
