"""The `concur` command. Answers --help without loading anything heavy: every command imports what
it needs when it runs.

Exit status: 0 done; 1 the run or the machine failed; 2 the input cannot be used; 130 interrupted.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from flows.cli.ablate import ablate
from flows.cli.gc import gc
from flows.cli.morning import morning
from flows.cli.stack import down, env, status, up
from flows.cli.watchdog import watchdog
from kernels_eval.errors import DeviceError, EvalError, UsageError

LANGUAGES = ("cpp", "cuda", "triton")


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="concur")
def main() -> None:
    """Turn LLM-written GPU kernels into trustworthy training data."""


@main.command()
@click.argument("task", type=click.Path(dir_okay=False))
@click.argument("candidate", type=click.Path(dir_okay=False))
@click.option(
    "--language",
    type=click.Choice(LANGUAGES),
    default="cpp",
    show_default=True,
    help="What the kernel is written in; cuda and triton need a GPU.",
)
@click.option("--json", "as_json", is_flag=True, help="Print exactly one JSON object, the Verdict.")
def verify(task: str, candidate: str, language: str, as_json: bool) -> None:
    """Verify CANDIDATE (a module with ModelNew) against TASK (a module with Model)."""
    from kernels_eval.__main__ import run

    sys.exit(run(task, candidate, language, as_json))


@main.command()
@click.option(
    "--profile",
    default="local",
    show_default=True,
    help="Profile whose needs decide the exit status.",
)
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the profile."
)
@click.option("--json", "as_json", is_flag=True, help="Print the checks as JSON.")
def doctor(profile: str, overrides: tuple[str, ...], as_json: bool) -> None:
    """Show what is here, what is missing, and the line that fixes it."""
    from flows.ops.doctor import examine, runnable

    checks = _guarded(lambda: examine(profile, overrides))
    if as_json:
        click.echo(
            json.dumps(
                {
                    "profile": profile,
                    "runnable": runnable(checks),
                    "checks": [check.model_dump() for check in checks],
                }
            )
        )
    else:
        _print_checks(checks, profile, runnable(checks))
    sys.exit(0 if runnable(checks) else 1)


@main.command()
@click.option(
    "--profile",
    default="local",
    show_default=True,
    help="A profile's name, or the path of a YAML file.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key, such as verification.workers=2.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
@click.option(
    "--only",
    type=click.Choice(["refresh"]),
    default=None,
    help="Stop after the refresh (tasks to curated set).",
)
def run(profile: str, overrides: tuple[str, ...], as_json: bool, only: str | None) -> None:
    """Run the line: tasks, synthesis, verification, curation, training, benchmark, tracking."""
    from flows.config import load_profile
    from flows.ops.control import join_stack

    config = _guarded(lambda: load_profile(profile, overrides))
    _guarded(lambda: join_stack(config.root))
    _guarded(lambda: _prepare(config))
    from flows.launch import launch

    summary = _guarded(lambda: launch(config, refresh_only=only == "refresh", quiet=as_json))
    click.echo(json.dumps(summary) if as_json else "")


@main.command("verify-batch")
@click.argument("candidates")
@click.option(
    "--tasks",
    required=True,
    metavar="TASKS",
    help="Tasks: a Parquet file, a folder or glob of them, or task files.",
)
@click.option(
    "--out",
    required=True,
    metavar="DIR",
    help="Where verdicts.parquet, summary.json and the snapshots go.",
)
@click.option(
    "--language",
    type=click.Choice(LANGUAGES),
    default=None,
    help="Verify these only.  [default: the table's language, else cpp]",
)
@click.option(
    "--workers",
    type=click.IntRange(min=1),
    default=None,
    help="Devices used at once.  [default: every GPU, or half of the cores]",
)
@click.option(
    "--builders",
    type=click.IntRange(min=1),
    default=None,
    help="Build workers.  [default: the other cores]",
)
@click.option(
    "--address",
    default=None,
    metavar="ADDRESS",
    help="A Ray cluster: auto or HOST:PORT.  [default: start one here]",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the protocol, such as timing.max_s=1.0.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def verify_batch(
    candidates: str, overrides: tuple[str, ...], as_json: bool, language: str | None, **options: Any
) -> None:
    """Verify a table of CANDIDATES (Parquet: task_id and code or response) against their tasks.

    The same command again goes on where it was stopped.
    """
    from kernels_eval.records import Language

    def work() -> dict[str, Any]:
        from flows.config import load_protocol
        from tasks.verification.batch import verify_batch

        protocol = load_protocol(overrides)
        return verify_batch(
            candidates,
            language=Language(language) if language else None,
            protocol=protocol,
            **options,
        )

    data = _guarded(work)
    if as_json:
        click.echo(json.dumps(data))
        return
    from tasks.verification.batch import print_summary

    print_summary(data)


@main.command()
@click.option(
    "--verdicts",
    default=None,
    metavar="PLACE",
    help="A verification snapshot, or Parquet.  [default: the latest under --root]",
)
@click.option(
    "--candidates",
    default=None,
    metavar="PLACE",
    help="Their candidates.  [default: beside the snapshot, or the same file]",
)
@click.option("--root", default=".concur", show_default=True, help="Where snapshots are.")
@click.option(
    "--strategy",
    "strategies",
    multiple=True,
    default=("concur",),
    show_default=True,
    help="A name, a YAML file, or all. Repeat.",
)
@click.option(
    "--size",
    "sizes",
    default=None,
    metavar="N,N,...",
    help="At most so many samples; several make a sweep.",
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key of the strategy, such as min_speedup=2.",
)
@click.option(
    "--out", default=None, metavar="DIR", help="Write each set there as Parquet, and curation.json."
)
@click.option(
    "--explain",
    default=None,
    metavar="CANDIDATE_ID",
    help="Say why this candidate is taken, or why not.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the result as one JSON object.")
def curate(
    sizes: str | None, out: str | None, explain: str | None, as_json: bool, **options: Any
) -> None:
    """Choose training sets from verdicts that are there, by one strategy or many."""

    def work() -> Any:
        from flows.curate import curate_table, explain_candidate, parsed_sizes

        asked = {"sizes": parsed_sizes(sizes), **options}
        return (
            {"explanations": explain_candidate(explain, **asked)}
            if explain is not None
            else curate_table(out=out, **asked)
        )

    data = _guarded(work)
    if as_json:
        click.echo(json.dumps(data))
        return
    from flows.curate import print_explanations, print_sets

    print_sets(data) if explain is None else print_explanations(data["explanations"])


@main.command()
@click.option(
    "--verdicts",
    default=None,
    metavar="PLACE",
    help="A verification snapshot, or Parquet.  [default: the latest under --root]",
)
@click.option(
    "--candidates",
    default=None,
    metavar="PLACE",
    help="Their candidates.  [default: beside the snapshot, or the same file]",
)
@click.option(
    "--tasks",
    default=None,
    metavar="TASKS",
    help="Their tasks, for the levels.  [default: beside the snapshot, or by the ids]",
)
@click.option("--root", default=".concur", show_default=True, help="Where snapshots are.")
@click.option(
    "--label",
    default=None,
    help="What the verdicts are called, and the model where the candidates name none.",
)
@click.option(
    "--device", default=None, metavar="NAME", help="Take the verdicts of this device only."
)
@click.option(
    "--k", "ks", default="1,5,10", show_default=True, metavar="K,K,...", help="k of pass@k."
)
@click.option(
    "--p",
    "ps",
    default="0,0.5,0.8,1,1.2,1.5,2",
    show_default=True,
    metavar="P,P,...",
    help="p of fast_p.",
)
@click.option(
    "--resamples",
    type=click.IntRange(min=100),
    default=2000,
    show_default=True,
    help="Of the bootstrap over tasks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the scores as one JSON object.")
def benchmark(ks: str, ps: str, as_json: bool, **options: Any) -> None:
    """Score verdicts that are there: Exec and fast_p at pass@k with intervals, level by level."""

    def work() -> dict[str, Any]:
        from flows.score import parsed_numbers, score_table

        return score_table(
            ks=parsed_numbers(ks, "--k", int), ps=parsed_numbers(ps, "--p", float), **options
        )

    data = _guarded(work)
    if as_json:
        click.echo(json.dumps(data))
        return
    from flows.score import print_scores

    print_scores(data)


@main.command()
@click.option("--root", default=".concur", show_default=True, help="Where the snapshots are.")
@click.option(
    "--curated",
    default=None,
    metavar="SNAPSHOT",
    help="A curated snapshot: fingerprint or directory.  [default: the newest]",
)
@click.option(
    "--also",
    multiple=True,
    metavar="SNAPSHOT",
    help="Another one, as a configuration named after its strategy.",
)
@click.option("--out", required=True, metavar="DIR", help="The folder to make.")
@click.option("--name", default=None, help="What the set is called.")
@click.option(
    "--license",
    default=None,
    metavar="ID",
    help="The set's licence as the hub names it, such as apache-2.0.",
)
@click.option(
    "--holdout",
    "holdout_share",
    type=float,
    default=None,
    metavar="SHARE",
    help="Share of the tasks that make a split `test`.",
)
@click.option("--observations", default=None, metavar="FILE", help="Markdown for the card.")
@click.option("--decontamination", default=None, metavar="FILE", help="Markdown for the card.")
@click.option("--figure", "figures", multiple=True, metavar="FILE", help="An image for the card.")
@click.option(
    "--push",
    default=None,
    metavar="REPO_ID",
    help="Then push it to the hub; the token is read from HF_TOKEN.",
)
@click.option("--public", is_flag=True, help="Push to a public repository.  [default: private]")
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def publish(as_json: bool, root: str, out: str, **options: Any) -> None:
    """Write a curated set as a folder that datasets.load_dataset loads."""

    def work() -> dict[str, Any]:
        from flows.publish import publish_set

        return publish_set(root, out, **options)

    data = _guarded(work)
    if as_json:
        click.echo(json.dumps(data))
        return
    from flows.publish import print_published

    print_published(data)


@main.command()
@click.option("--root", default=".concur", show_default=True, help="Where the snapshots are.")
@click.option(
    "--curated",
    default=None,
    metavar="SNAPSHOT",
    help="A curated snapshot: fingerprint or directory.  [default: the newest]",
)
@click.option(
    "--profile", default="local", show_default=True, help="Whose `training` and `tracking` hold."
)
@click.option(
    "--set",
    "overrides",
    multiple=True,
    metavar="KEY=VALUE",
    help="Override a key, such as training.num_epochs=1.",
)
@click.option(
    "--merged",
    default=None,
    metavar="DIR",
    help="Write base and adapter as one model there, if they agree.",
)
@click.option(
    "--merged-dtype",
    type=click.Choice(["bfloat16", "float32"]),
    default="bfloat16",
    show_default=True,
    help="Of its weights.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the summary as one JSON object.")
def train(as_json: bool, root: str, curated: str | None, **options: Any) -> None:
    """Train an adapter on a curated set that is there, and say where it is and where MLflow has it.

    The same command again goes on where it was stopped.
    """

    def work() -> dict[str, Any]:
        from flows.ops.control import join_stack
        from flows.train_set import train_set

        join_stack(root)
        return train_set(root, curated, **options)

    data = _guarded(work)
    if as_json:
        click.echo(json.dumps(data))
        return
    from flows.train_set import print_trained

    print_trained(data)


@main.command()
@click.argument("old")
@click.argument("new")
@click.option(
    "--root",
    default=".concur",
    show_default=True,
    help="Where snapshots named by a fingerprint are.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the report as one JSON object.")
def diff(old: str, new: str, root: str, as_json: bool) -> None:
    """What changed between two curated snapshots or published folders, and why."""

    def work() -> str:
        from flows.publish import diff_sets

        return diff_sets(root, old, new, as_json=as_json)

    click.echo(_guarded(work))


@main.command()
@click.option(
    "--verdicts",
    default=None,
    metavar="PATH",
    help="A snapshot's directory, Parquet, or a glob.  [default: the latest under --root]",
)
@click.option(
    "--candidates",
    default=None,
    metavar="PATH",
    help="Their candidates.  [default: beside the snapshot, or the same files]",
)
@click.option("--root", default=".concur", show_default=True, help="Where snapshots are.")
@click.option(
    "--other-verdicts",
    default=None,
    metavar="PATH",
    help="Verdicts of another generator on the same tasks.",
)
@click.option("--other-candidates", default=None, metavar="PATH", help="Their candidates.")
@click.option(
    "--out",
    default="analysis",
    show_default=True,
    metavar="DIR",
    help="Where report.md, analysis.json and the figures go.",
)
@click.option(
    "--seed",
    type=int,
    default=0,
    show_default=True,
    help="Of the permutation test and the random groups of tasks.",
)
@click.option("--json", "as_json", is_flag=True, help="Print the analysis as one JSON object.")
def analyze(as_json: bool, **options: Any) -> None:
    """Observations and difficulty: what reasoning length says of correctness and speedup."""

    def work() -> Any:
        from flows.analyze import analyze

        return analyze(**options)

    analysis = _guarded(work)
    click.echo(json.dumps(analysis.as_json()) if as_json else analysis.summary())


def _prepare(config: Any) -> None:
    """What must hold before anything starts: a device for the language, the cluster if one is
    named, and a root that can be written."""
    from kernels_eval.cluster.ray import address_of, require_cluster
    from kernels_eval.devices import require_device

    require_device(config.language)
    if (address := address_of(config.verification.ray_address)) != "local":
        require_cluster(address)
    if "://" in config.root:
        return
    root = Path(config.root)
    try:
        root.mkdir(parents=True, exist_ok=True)
        probe = root / f".probe-{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        raise UsageError(
            f"cannot write to root {config.root}: {error.strerror}",
            "choose another one with --set root=DIR, or mend its permissions",
        ) from error


def _guarded(call: Callable[[], Any]) -> Any:
    """Run a command's body; one clear line and the right exit status for what users and machines
    get wrong."""
    try:
        return call()
    except (UsageError, DeviceError) as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(2)
    except EvalError as error:
        click.echo(f"error: {error}", err=True)
        sys.exit(1)
    except KeyboardInterrupt:
        click.echo(
            "interrupted: what is finished is kept; the same command goes on from there", err=True
        )
        sys.exit(130)


def _print_checks(checks: list[Any], profile: str, fine: bool) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=f"concur doctor (profile {profile})")
    for column in ("", "what", "found", "fix"):
        table.add_column(column, overflow="fold")
    for check in checks:
        mark = "ok" if check.ok else ("MISSING" if check.need == "required" else "-")
        table.add_row(mark, check.name, check.found, check.fix)
    console = Console()
    console.print(table)
    console.print(
        f"profile {profile} can run here"
        if fine
        else f"profile {profile} cannot run here: mend what is MISSING"
    )


for _command in (up, status, down, env, morning, watchdog, ablate, gc):
    main.add_command(_command)

if __name__ == "__main__":
    main()
