"""Commands that make training data: the whole pipeline, and its stages on what exists."""

from __future__ import annotations

import os
from typing import Literal

from typer import Option

from flows.cli import pages
from flows.cli.common import (
    Candidates,
    Curated,
    Group,
    Json,
    Profile,
    Root,
    Verdicts,
    command,
    setting,
)
from flows.extras import require_extras
from kernels_eval.installation import ROOT_VARIABLE

File = str | None


@command(Group.DATA)
def run(
    *,
    root: str | None = None,
    profile: Profile = "local",
    overrides: list[str] = setting("the profile", "verification.workers=2"),
    only: Literal["refresh"] | None = None,
) -> Json:
    """Run the pipeline: tasks, synthesis, verification, curation, training, benchmark, tracking.

    Options:
        root: Folder of the snapshots. [default: the profile's; $CONCUR_ROOT, where that is
            .concur]
        only: Stop after the refresh (tasks to curated set).
    """
    require_extras(["line"] if only else ["line", "train"], "run")
    from flows.config import load_profile, read_profile
    from flows.launch import launch, require_ready
    from flows.stack.control import join_stack

    if not root and read_profile(profile).get("root", ".concur") == ".concur":
        root = os.environ.get(ROOT_VARIABLE)
    config = load_profile(profile, overrides, {"root": root} if root else None)
    join_stack(config.root)
    require_ready(config, "refresh", *(() if only else ("training", "benchmark")))
    return launch(config, refresh_only=only == "refresh")


@command(Group.DATA, needs=["batch"])
def import_(
    source: str,
    *,
    columns: str | None = None,
    name: str | None = None,
    tokenizer: str | None = None,
    out: str = "imported",
) -> Json:
    """Turn a foreign table or folder into tasks and recorded answers.

    Text, chat messages, chat completions, lists of answers and bytes are understood. Both tables
    are what verify-batch, curate, and a refresh with recorded answers read.

    Options:
        source SOURCE: A table, a folder, or an id of the hub.
        columns --map KEY=COLUMN,...: Which columns are what: task, answer, kernel, id, model,
            label, language, ... [default: the known map of its columns]
        name --as NAME: Read it by this known map, such as kernelbook.
        tokenizer ID: The model's tokenizer, a hub id or directory: counts its reasoning, for
            curate.
        out DIR: Folder for tasks and answers as Parquet.
    """
    from flows.importing import import_source
    from flows.runtime.terminal import TerminalProgress

    with TerminalProgress():
        return import_source(source, columns, name, out, tokenizer)


@command(Group.DATA, needs=["line"], page=pages.of_sets)
def curate(
    *,
    verdicts: Verdicts = None,
    candidates: Candidates = None,
    root: Root = ".concur",
    strategies: list[str] = Option(
        ["concur"],
        "--strategy",
        metavar="S,S,...",
        help="Names, YAML files, or all. Repeatable.",
        show_default="concur",
    ),
    sizes: str | None = None,
    overrides: list[str] = setting("the strategy", "min_speedup=2"),
    out: File = None,
    explain: str | None = None,
) -> Json:
    """Choose training sets from existing verdicts, by one strategy or many.

    Options:
        sizes --size N,N,...: Maximum number of samples; one set per size.
        out DIR: Write each set as Parquet, and curation.json, to this folder.
        explain CANDIDATE_ID: Explain why it was selected or not; a beginning of the id is
            enough.
    """
    from flows.curate import Choice, curate_table, explain_candidate
    from flows.lists import parsed_numbers

    limits = parsed_numbers(sizes, "--size", int, 1, "500,1000") if sizes else ()
    choice = Choice(verdicts, candidates, root, strategies, limits, overrides)
    if explain is None:
        return curate_table(choice, out)
    return {"explanations": explain_candidate(choice, explain)}


@command(Group.DATA, needs=["line"])
def publish(
    *,
    root: Root = ".concur",
    curated: Curated = None,
    out: str,
    name: str | None = None,
    license: str | None = None,
    holdout: float | None = None,
    push: str | None = None,
    public: bool = False,
) -> Json:
    """Write a curated set as a folder that datasets.load_dataset loads.

    Options:
        out DIR: Folder to create.
        name: Name of the data set. [default: that of the folder or repository]
        license ID: Licence of the set, as named by the hub, such as apache-2.0.
        holdout SHARE: Share of the tasks for the split `test`.
        push REPO_ID: Also push the set to the hub; the token is read from HF_TOKEN.
        public: Push to a public repository. [default: private]
    """
    from tasks.publishing.sets import publish_set

    return publish_set(
        root,
        out,
        curated=curated,
        push=push,
        public=public,
        name=name,
        license=license,
        holdout_share=holdout,
    )


@command(Group.DATA, needs=["line"])
def diff(
    old: str,
    new: str,
    *,
    root: Root = ".concur",
) -> Json:
    """Compare two curated snapshots or published folders: what changed, and why.

    Options:
        old OLD: A curated snapshot or a published folder.
        new NEW: The one to compare it with.
        root: Folder of the snapshots named by a fingerprint.
    """
    from flows.diff import diff_sets

    return diff_sets(root, old, new)


@command(Group.DATA, needs=["line"], page=pages.of_analysis)
def analyze(
    *,
    verdicts: Verdicts = None,
    candidates: Candidates = None,
    root: Root = ".concur",
    out: str = "analysis",
) -> Json:
    """Analyse how reasoning length relates to correctness and speedup.

    Options:
        out DIR: Folder for report.md, analysis.json and the figure.
    """
    from flows.analyze import analyze_table

    return analyze_table(verdicts, candidates, root=root, out=out)


@command(Group.DATA, needs=["line"])
def search(
    *,
    root: Root = ".concur",
    profile: Profile = "local",
    verdicts: str | None = None,
    overrides: list[str] = setting("the profile", "search.evaluations=64"),
) -> Json:
    """Search for faster variants of correct kernels; print the gains that are confirmed.

    Block and tile sizes, unrolling and launch bounds are changed; with search.operators also flags,
    and a model rewrites. Rerun the same command to resume a search that was stopped.

    Options:
        verdicts SNAPSHOT: Verified candidates to begin with: fingerprint or directory.
            [default: the newest]
    """
    from flows.launch import joined_configuration, served_and_shown

    config = joined_configuration(profile, overrides, root)
    from flows.search import begun_with, search_and_track, summary_of

    begun = begun_with(config, verdicts)
    with served_and_shown() as progress:
        searched, _ = search_and_track(*begun)
    return summary_of(searched) | {"seconds": progress.seconds}
