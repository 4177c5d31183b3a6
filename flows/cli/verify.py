"""Commands that verify kernels, score verdicts and write them for other suites."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated, Literal

import typer
from typer import Argument, Option

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
)

Protocol = Annotated[list[str], setting("the protocol", "timing.max_s=1.0")]
Workers = Annotated[
    int | None,
    Option(min=1, help="Devices to use at once.", show_default="every GPU, or half of the cores"),
]
Builders = Annotated[
    int | None, Option(min=1, help="Number of build workers.", show_default="the other cores")
]
Form = Literal["flashinfer", "sol", "kernelbench", "package", "hip", "table"]


@command(Group.VERIFY, prints=False)
def verify(
    task: Annotated[
        Path,
        Argument(
            metavar="TASK",
            help="Python file with Model.",
            dir_okay=False,
        ),
    ],
    candidate: Annotated[
        Path,
        Argument(
            metavar="CANDIDATE",
            help="Python file with ModelNew.",
            dir_okay=False,
        ),
    ],
    *,
    overrides: Protocol,
    quick: Quick = False,
    language: Annotated[
        KernelLanguage | None,
        Option(help="Language of the kernel.", show_default="read from its source"),
    ] = None,
    progress: Annotated[
        bool,
        Option("--progress", help="Print each stage to stderr.", show_default="only on a terminal"),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify one kernel: CANDIDATE (a file with ModelNew) against TASK (a file with Model)."""
    from kernels_eval.__main__ import QUICK, run

    config = QUICK if quick else None
    if overrides:
        from flows.config import load_protocol

        config = load_protocol(overrides, config)
    sys.exit(run(str(task), str(candidate), language, as_json, config=config, progress=progress))


@command(Group.VERIFY, needs=["batch"])
def verify_batch(
    candidates: Annotated[
        str,
        Argument(
            metavar="CANDIDATES",
            help="A table, a folder, a run, or an id of the hub.",
        ),
    ],
    *,
    overrides: Protocol,
    quick: Quick = False,
    tasks: Annotated[
        str,
        Option(
            metavar="TASKS",
            help="Tasks: a table, a folder of .py files, a KernelBench checkout, or a hub id.",
        ),
    ],
    out: Annotated[
        str,
        Option(metavar="DIR", help="Folder for verdicts.parquet, summary.json and the snapshots."),
    ],
    language: Annotated[
        KernelLanguage | None,
        Option(
            help="Verify only this language.",
            show_default="from the table or the sources, else cpp",
        ),
    ] = None,
    model: Annotated[
        str | None,
        Option(
            metavar="NAME",
            help="Name of the model, if no column gives it.",
            show_default="the run's or the file's name",
        ),
    ] = None,
    workers: Workers = None,
    builders: Builders = None,
    gpu_type: Annotated[
        str | None,
        Option(
            metavar="TYPE",
            help="GPUs to use in a cluster of several types, such as H100.",
            show_default="this machine's type",
        ),
    ] = None,
    ray_address: RayAddress = None,
) -> Json:
    """Verify CANDIDATES against their tasks: a table (Parquet, JSON lines, CSV), a folder of .py
    files, a run of KernelBench, or a data set on the hub.

    If the run is stopped, rerun the same command to resume it.
    """
    from flows.config import load_protocol
    from flows.launch import TerminalProgress
    from kernels_eval.__main__ import QUICK
    from kernels_eval.records import Language
    from tasks.progress import observed_by
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
    with TerminalProgress() as progress, observed_by(progress):
        return verify_batch(table, tasks, out, config, Language(language) if language else None)


@command(Group.VERIFY, needs=["batch", "serve"], prints=False)
def serve(
    *,
    overrides: Protocol,
    quick: Quick = False,
    tasks: Annotated[
        list[str],
        repeated(metavar="TASKS", help="Tasks that requests name by id, as for verify-batch."),
    ],
    language: Annotated[
        KernelLanguage | None,
        Option(
            help="Judge this language and those of its device.",
            show_default="cuda with a GPU, else cpp",
        ),
    ] = None,
    host: Annotated[str, Option(metavar="ADDRESS", help="The address to listen on.")] = "127.0.0.1",
    port: Annotated[int, Option(min=1, max=65535, help="The port to listen on.")] = 8700,
    journal: Annotated[
        str,
        Option(
            metavar="FILE", help="What is queued and what was found; a new start continues with it."
        ),
    ] = ".concur/serve.sqlite3",
    max_queued: Annotated[
        int,
        Option(
            min=1,
            help="Unfinished evaluations, above which requests get 429; one client may have half.",
        ),
    ] = 10_000,
    drain_s: Annotated[
        float,
        Option(
            min=0,
            metavar="SECONDS",
            help="How long candidates under way may take to finish at the end.",
        ),
    ] = 60.0,
    workers: Workers = None,
    builders: Builders = None,
    ray_address: RayAddress = None,
) -> None:
    """Answer requests for verdicts over HTTP: a reward for trainers.

    SIGTERM or Ctrl-C lets what is under way finish; the next start continues with the rest. A
    --host that is not loopback needs a token in CONCUR_SERVE_TOKEN, which clients then send.
    """
    from flows.config import load_protocol
    from kernels_eval.__main__ import QUICK
    from kernels_eval.devices import visible_gpus
    from kernels_eval.pool.ray import address_of, require_cluster
    from kernels_eval.records import Language
    from kernels_eval.service.app import Intake, Service, run
    from kernels_eval.service.guard import require_token
    from tasks.sources.tables import load
    from tasks.synthesis.parsing import parse_response

    token = os.environ.get("CONCUR_SERVE_TOKEN")
    require_token(host, token)
    if (address := address_of(ray_address)) != "local":
        require_cluster(address)
    judged = Language(language or ("cuda" if visible_gpus() else "cpp"))
    protocol = load_protocol(overrides, QUICK if quick else None)
    found = {task.task_id: task for place in tasks for task in load(place)}
    intake = Intake(judged, protocol, found, parse_response)
    options = {"workers": workers, "builders": builders, "address": ray_address}
    service = Service(intake, Path(journal), options, max_queued, drain_s)
    typer.echo(
        f"judging {', '.join(intake.languages)} at http://{host}:{port} (API: /docs), {len(found)}"
        f" tasks, journal {journal}",
        err=True,
    )
    run(service, host, port, token)


@command(Group.VERIFY, needs=["line"])
def benchmark(
    *,
    verdicts: Verdicts = None,
    candidates: Candidates = None,
    root: Root = ".concur",
    tasks: Annotated[
        str | None,
        Option(
            metavar="TASKS",
            help="Tasks of the verdicts, for their levels.",
            show_default="beside the snapshot, else by task id",
        ),
    ] = None,
    label: Annotated[
        str | None,
        Option(help="Name of the verdicts, and of the model if the candidates name none."),
    ] = None,
    device: Annotated[
        str | None, Option(metavar="NAME", help="Score only the verdicts of this device.")
    ] = None,
    ks: Annotated[str, Option("--k", metavar="K,K,...", help="Values of k in pass@k.")] = "1,5,10",
    ps: Annotated[
        str, Option("--p", metavar="P,P,...", help="Values of p in fast_p.")
    ] = "0,0.5,0.8,1,1.2,1.5,2",
    resamples: Annotated[int, Option(min=100, help="Bootstrap resamples over tasks.")] = 2000,
) -> Json:
    """Score existing verdicts: Exec and fast_p at pass@k, with intervals and by level."""
    from flows.cli.benchmark import parsed_numbers, score_table

    return score_table(
        verdicts,
        candidates,
        tasks=tasks,
        root=root,
        label=label,
        device=device,
        ks=parsed_numbers(ks, "--k", int),
        ps=parsed_numbers(ps, "--p", float),
        resamples=resamples,
    )


@command(Group.VERIFY, needs=["batch"])
def export(
    *,
    sources: Annotated[
        list[str],
        Argument(
            metavar="SOURCE",
            help="Verdicts, or results of another harness.",
            default_factory=list,
            show_default="the newest in --root",
        ),
    ],
    form: Annotated[
        Form,
        Option(
            "--as",
            help="The form: traces of FlashInfer-Bench or SOL-ExecBench, run folders of"
            " KernelBench, a package of one kernel, pairs of CUDA and HIP, or (of the results of"
            " another harness, or of several sets) a table of verdicts.",
        ),
    ],
    out: Annotated[
        str, Option(metavar="PLACE", help="Folder to create, or the Parquet file of a table.")
    ],
    candidates: Candidates = None,
    tasks: Annotated[
        str | None,
        Option(
            metavar="TASKS",
            help="Tasks of the verdicts; a folder of definitions keeps these.",
            show_default="beside the snapshot",
        ),
    ] = None,
    root: Root = ".concur",
    candidate: Annotated[
        str | None,
        Option(metavar="ID", help="package: the correct candidate to verify again and to pack."),
    ] = None,
    name: Annotated[
        str | None, Option(help="package: its name.", show_default="the task's")
    ] = None,
    license: Annotated[
        str | None,
        Option(metavar="ID", help="package: its licence, as named by the hub, such as apache-2.0."),
    ] = None,
    quick: Annotated[
        bool, Option("--quick", help="package: verify with fewer timing samples.")
    ] = False,
) -> Json:
    """Write verdicts for other suites, or one kernel as a package.

    SOURCE is what --verdicts of other commands takes (default: the newest in --root). With `--as
    table` it is the results of another harness (a run of KernelBench, or a folder with traces), or
    several sets of verdicts, of one GPU each, that become one table.
    """
    from flows import exchange
    from flows.launch import TerminalProgress
    from tasks.progress import observed_by

    with TerminalProgress() as progress, observed_by(progress):
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
            quick=quick,
        )
