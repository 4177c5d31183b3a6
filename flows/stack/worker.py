"""The process worker of the pool `concur` (`python -m flows.stack.worker`): makes absent pool,
queues, limit `devices` and automations, then runs `prefect worker start`.

Queue `devices` has at most $CONCUR_GPU_LIMIT runs at once or, unset, as many as this machine has
GPUs, but at least one.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from importlib import import_module
from typing import TYPE_CHECKING

import yaml

from flows.config import shipped_dir
from flows.stack.health import POOL, worker_name
from tasks.retry import retry_until_back

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

SERVER_S = 600.0
DEVICES = "devices"
"""The queue of runs that measure, and Prefect's global concurrency limit whose slots they hold: one
is a GPU, or the whole CPU without any."""
QUEUES = {
    DEVICES: "Runs that measure: as many at once as there are GPUs, or one on the CPU.",
    "cpu": "Runs that measure nothing.",
}


def limits() -> dict[str, int]:
    """Queue -> flow runs at once."""
    from kernels_eval.devices import visible_gpus

    gpus = int(os.environ.get("CONCUR_GPU_LIMIT") or len(visible_gpus()))
    return {DEVICES: max(1, gpus), "cpu": max(2, (os.cpu_count() or 2) // 2)}


def prepare(client: SyncPrefectClient) -> None:
    _make_pool(client)
    existing = {queue.name for queue in client.read_work_queues(work_pool_name=POOL)}
    for name, limit in limits().items():
        if name not in existing:
            client.create_work_queue(
                name=name,
                description=QUEUES[name],
                concurrency_limit=limit,
                work_pool_name=POOL,
            )
    limit_devices(client)
    _make_automations(client)


def _make_pool(client: SyncPrefectClient) -> None:
    from prefect.client.schemas.actions import WorkPoolCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        pool = WorkPoolCreate(name=POOL, type="process", base_job_template=template)
        with suppress(ObjectAlreadyExists):  # another worker of this server was first
            client.create_work_pool(pool)


def limit_devices(client: SyncPrefectClient) -> None:
    """Make the limit, where it is absent."""
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound

    try:
        client.read_global_concurrency_limit_by_name(DEVICES)
    except ObjectNotFound:
        wanted = GlobalConcurrencyLimitCreate(name=DEVICES, limit=limits()[DEVICES])
        with suppress(ObjectAlreadyExists):  # another run was quicker
            client.create_global_concurrency_limit(wanted)


def _make_automations(client: SyncPrefectClient) -> None:
    from prefect.events.schemas.automations import AutomationCore

    file = shipped_dir("automations") / "free-the-slot.yaml"
    for told in yaml.safe_load(file.read_text(encoding="utf-8"))["automations"]:
        if not client.read_automations_by_name(told["name"]):
            client.create_automation(AutomationCore.model_validate(told))


def main() -> None:
    from httpx import TransportError
    from prefect.cli import app
    from prefect.client.orchestration import get_client

    import_module("prefect.cli.worker")  # seconds of a core, while the server starts
    with get_client(sync_client=True) as client:
        retry_until_back(
            lambda: prepare(client),
            service=f"Prefect at {client.api_url}",
            is_absent=lambda error: isinstance(error, TransportError),
            log=lambda line: print(line, flush=True),
            deadline_s=SERVER_S,
        )
    words = ["prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    words += ["--name", worker_name(), "--install-policy", "never"]
    if "PREFECT_WORKER_WEBSERVER_PORT" in os.environ:  # a container's health is asked there
        words.append("--with-healthcheck")
    sys.argv = words
    app()


if __name__ == "__main__":
    main()
