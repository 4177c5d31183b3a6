"""Commands that verify kernels, score verdicts and write them for other suites."""

from __future__ import annotations

import json
import os
import sys
from contextlib import closing, nullcontext
from pathlib import Path
from typing import Annotated, Any, Literal

import typer
from typer import Argument, Option

from flows.cli import pages
from flows.cli.common import (
    AsJson,
    Candidates,
    Group,
    Json,
    KernelLanguage,
    Quick,
    RayAddress,
    Root,
    Verdicts,
    command,
    repeated,
    setting,
    tell,
)
from flows.cli.silence import age_s, now_at

PROTOCOL: Any = setting("the protocol", "timing.max_s=1.0")
Workers = Annotated[
    int | None,
    Option(
        min=1,
        help="Devices to use at once.",
        show_default="every GPU, or half of the cores, two at least",
    ),
]
Builders = Annotated[
    int | None,
    Option(min=1, help="Number of build workers.", show_default="the other cores, two at least"),
]
Form = Literal["flashinfer", "sol", "kernelbench", "package", "harbor", "table"]


@command(Group.VERIFY, prints=False)
def verify(
    task: Annotated[Path, Argument(dir_okay=False)],
    candidate: Annotated[Path, Argument(dir_okay=False)],
    *,
    overrides: list[str] = PROTOCOL,
    quick: Quick = False,
    language: KernelLanguage | None = None,
    check: bool = False,
    min_speedup: Annotated[float | None, Option(min=0)] = None,
    progress: bool = False,
    as_json: AsJson = False,
) -> None:
    """Verify one kernel: CANDIDATE (a file with ModelNew) against TASK (a file with Model).

    Options:
        task TASK: Python file with Model.
        candidate CANDIDATE: Python file with ModelNew.
        language: Language of the kernel. [default: read from its source]
        check: Exit status 1 unless the candidate is correct.
        min_speedup X: Exit status 1 unless it is correct and at least X times as fast as TASK.
        progress: Print each stage to stderr. [default: only on a terminal]
    """
    from kernels_eval.sandbox.server_process import ServerProcess

    def say_always(text: str) -> None:
        tell(f"{age_s():6.1f} s  {text}")

    def say(text: str) -> None:
        if progress or sys.stderr.isatty():
            say_always(text)
        else:
            now_at(text)

    # before the imports that follow; what is given may change its number of threads
    with nullcontext() if overrides else closing(ServerProcess()) as started:
        from flows.cli.verdict import missed, render
        from kernels_eval.settings import load_protocol
        from kernels_eval.verify_file import QUICK, read_pair, verify

        config = load_protocol(overrides, QUICK if quick else None)
        pair = read_pair(str(task), str(candidate), language, lambda text: tell(f"note: {text}"))
        verdict = verify(*pair, str(candidate), config, say, started, say_always)
    page = (
        json.dumps(verdict.model_dump(mode="json")) if as_json else render(verdict, candidate.name)
    )
    typer.echo(page)
    if (check or min_speedup is not None) and (why := missed(verdict, min_speedup or 0.0)):
        tell(f"not passed: {why}")
        sys.exit(1)


@command(Group.VERIFY, needs=["batch"], page=pages.of_batch)
def verify_batch(
    candidates: str,
    *,
    overrides: list[str] = PROTOCOL,
    quick: Quick = False,
    tasks: str,
    out: str,
    language: KernelLanguage | None = None,
    model: str | None = None,
    workers: Workers = None,
    builders: Builders = None,
    gpu_type: str | None = None,
    timeout_s: Annotated[float | None, Option(min=0)] = None,
    ray_address: RayAddress = None,
) -> Json:
    """Verify CANDIDATES against their tasks: a table (Parquet, JSON lines, CSV), a folder of .py
    files, a run of KernelBench, or a data set on the hub.

    If the run is stopped, rerun the same command to resume it. With another --out all are judged
    again.

    Options:
        candidates CANDIDATES: A table, a folder, a run, or an id of the hub.
        tasks TASKS: Tasks: a table, a folder of .py files, a KernelBench checkout, or a hub id.
        out DIR: Folder for verdicts.parquet, summary.json and the snapshots.
        language: Verify only this language. [default: from the table or the sources, else cpp]
        model NAME: Name of the model, if no column gives it. [default: the run's or the file's
            name]
        gpu_type TYPE: GPUs to use in a cluster of several types, such as H100. [default: this
            machine's type]
        timeout_s --timeout SECONDS: Give up where other runs use the devices for so long.
            [default: wait until they end]
    """
    from kernels_eval.pool.held import holders

    for kind in ("cpu", "gpu"):  # before the imports that follow, which take seconds
        if others := " and ".join(holders(kind)):
            tell(f"{others} uses the {kind.upper()}: work for it waits its turn")
    from flows.runtime.terminal import TerminalProgress
    from kernels_eval.records import Language
    from kernels_eval.settings import load_protocol
    from kernels_eval.verify_file import QUICK
    from tasks.synthesis.tables import CandidateTable
    from tasks.verification.batch import verify_batch
    from tasks.verification.config import VerificationConfig

    config = VerificationConfig(
        eval=load_protocol(overrides, QUICK if quick else None),
        workers=workers,
        builders=builders,
        gpu_type=gpu_type,
        ray_address=ray_address,
    )
    table = CandidateTable(candidates, model)
    with TerminalProgress():
        chosen = Language(language) if language else None
        return verify_batch(table, tasks, out, config, chosen, patience_s=timeout_s)


@command(Group.VERIFY, needs=["batch", "serve"], prints=False, serves=True)
def serve(
    *,
    overrides: list[str] = PROTOCOL,
    quick: Quick = False,
    tasks: list[str] = repeated(
        metavar="TASKS", help="Tasks that requests name by id, as for verify-batch."
    ),
    language: KernelLanguage | None = None,
    host: str = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535)] = 8700,
    journal: str = ".concur/serve.sqlite3",
    max_queued: Annotated[int, Option(min=1)] = 10000,
    drain_s: Annotated[float, Option(min=0)] = 60.0,
    workers: Workers = None,
    builders: Builders = None,
    ray_address: RayAddress = None,
) -> None:
    """Answer requests for verdicts over HTTP: a reward for trainers.

    SIGTERM or Ctrl-C lets what is under way finish; the next start continues with the rest. A
    --host that is not loopback needs a token in CONCUR_SERVE_TOKEN, which clients then send.

    Options:
        language: Judge this language and those of its device. [default: cuda with a GPU, else
            cpp]
        host ADDRESS: The address to listen on.
        port: The port to listen on.
        journal FILE: What is queued and what was found; a new start continues with it.
        max_queued: Unfinished evaluations, above which requests get 429; one client may have
            half.
        drain_s SECONDS: How long candidates under way may take to finish at the end.
    """
    from kernels_eval.devices import visible_gpus
    from kernels_eval.pool.ray import require_cluster
    from kernels_eval.records import Language
    from kernels_eval.service.app import Intake, Service, run
    from kernels_eval.service.guard import require_token
    from kernels_eval.settings import load_protocol
    from kernels_eval.verify_file import QUICK
    from tasks.reporting.text import plural
    from tasks.sources.tables import load
    from tasks.synthesis.parsing import parse_response

    token = os.environ.get("CONCUR_SERVE_TOKEN")
    require_token(host, token)
    require_cluster(ray_address)
    judged = Language(language or ("cuda" if visible_gpus() else "cpp"))
    protocol = load_protocol(overrides, QUICK if quick else None)
    found = {task.task_id: task for place in tasks for task in load(place)}
    intake = Intake(judged, protocol, found, parse_response)
    options = {"workers": workers, "builders": builders, "address": ray_address}
    service = Service(intake, Path(journal), options, max_queued, drain_s)
    tell(
        f"judging {', '.join(intake.languages)} at http://{host}:{port} (API: /docs),"
        f" {plural(len(found), 'task')}, journal {journal}"
    )
    run(service, host, port, token)


@command(Group.VERIFY, needs=["batch", "mcp"], prints=False, serves=True)
def mcp(
    *,
    url: str = "http://127.0.0.1:8700",
    port: Annotated[int | None, Option(min=1, max=65535)] = None,
) -> None:
    """Give coding agents tools over the Model Context Protocol: verify, profile, explain, search.

    The verdicts are those of a running `concur serve`, whose token is in CONCUR_SERVE_TOKEN.

    Options:
        url: Address of `concur serve`.
        port: Serve over HTTP, at /mcp of this port of this machine. [default: stdin and stdout]
    """
    import signal

    from flows.cli.common import INTERRUPTED_STATUS
    from flows.tools.server import run

    # what reads stdin cannot be interrupted, and nothing here needs an end
    signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED_STATUS))
    place = f"http://127.0.0.1:{port}/mcp" if port else "stdin and stdout"
    tell(f"tools for agents at {place}, verdicts by {url}")
    run(url, os.environ.get("CONCUR_SERVE_TOKEN"), port)


@command(Group.VERIFY, needs=["line"], page=pages.of_scores)
def benchmark(
    *,
    verdicts: Verdicts = None,
    candidates: Candidates = None,
    root: Root = ".concur",
    tasks: str | None = None,
    label: str | None = None,
    device: str | None = None,
    ks: str | None = None,
    ps: str = "0.5,0.8,1,1.2,1.5,2",
    resamples: Annotated[int, Option(min=100)] = 2000,
    min_kernel_share: Annotated[float | None, Option(min=0, max=1)] = None,
) -> Json:
    """Score existing verdicts: Exec and fast_p at pass@k, with intervals and by level.

    Options:
        tasks TASKS: Tasks of the verdicts, for their levels. [default: beside the snapshot,
            else by task id]
        label: Name of the verdicts, and of the model if the candidates name none.
        device NAME: Score only the verdicts of this device.
        ks --k K,K,...: Values of k in pass@k. [default: those of 1, 5 and 10 that the samples
            allow]
        ps --p P,P,...: Values of p in fast_p.
        resamples: Bootstrap resamples over tasks.
        min_kernel_share SHARE: Count a custom kernel only from this share of its candidate's
            time, such as 0.1. [default: any share]
    """
    from flows.score import score_table

    return score_table(
        verdicts,
        candidates,
        tasks=tasks,
        root=root,
        label=label,
        device=device,
        ks=ks,
        ps=ps,
        resamples=resamples,
        min_kernel_share=min_kernel_share,
    )


@command(Group.VERIFY, needs=["batch"])
def export(
    *,
    sources: list[str] = Argument(
        [],
        metavar="SOURCE",
        help="Verdicts, results of another harness, a candidate's file, or (harbor) tasks.",
        show_default="the newest verdicts in --root",
    ),
    form: Form,
    out: str,
    candidates: Candidates = None,
    tasks: str | None = None,
    root: Root = ".concur",
    candidate: str | None = None,
    task: str | None = None,
    name: str | None = None,
    license: str | None = None,
    language: KernelLanguage | None = None,
    recipe: str = "concur",
) -> Json:
    """Write verdicts for other suites, one kernel as a package, or tasks for agents.

    SOURCE is what --verdicts of other commands takes (default: the newest in --root). With `--as
    table` it is the results of another harness (a run of KernelBench, or a folder with traces), or
    several sets of verdicts, of one GPU each, that become one table. With `--as package --task
    FILE` it is the file of one candidate.

    Options:
        form --as: The form: traces of FlashInfer-Bench or SOL-ExecBench, run folders of
            KernelBench, a package of one kernel, tasks of Harbor, or (of the results of another
            harness, or of several sets) a table of verdicts.
        out PLACE: Folder to create, or the Parquet file of a table.
        tasks TASKS: Tasks of the verdicts; a folder of definitions keeps these. [default:
            beside the snapshot]
        candidate ID: package: the correct candidate to verify again and to pack.
        task FILE: package: the task of SOURCE, the file of a candidate.
        name: package: its name. [default: the task's]
        license ID: package: its licence, as named by the hub, such as apache-2.0.
        language: harbor: the language to ask for; package: that of the candidate's file.
            [default: cpp; read from its source]
        recipe NAME: harbor: the recipe of the reward.
    """
    from flows import exchange
    from flows.runtime.terminal import TerminalProgress

    now_at("verifies the kernel again, then packs it" if form == "package" else f"reads for {form}")
    with TerminalProgress():
        return exchange.export(
            sources,
            form,
            out,
            candidates=candidates,
            tasks=tasks,
            root=root,
            candidate=candidate,
            name=name,
            license=license,
            task=task,
            language=language,
            recipe=recipe,
        )
