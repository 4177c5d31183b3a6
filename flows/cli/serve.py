"""`concur serve`: the verifier over HTTP."""

from __future__ import annotations

import os
from pathlib import Path

import click

from flows.cli.common import command


@command
def serve(
    tasks: tuple[str, ...],
    language: str | None,
    host: str,
    port: int,
    journal: str,
    max_queued: int,
    drain_s: float,
    workers: int | None,
    builders: int | None,
    ray_address: str | None,
    quick: bool,
    overrides: tuple[str, ...],
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
    click.echo(
        f"judging {', '.join(intake.languages)} at http://{host}:{port} (API: /docs), {len(found)}"
        f" tasks, journal {journal}",
        err=True,
    )
    run(service, host, port, token)
