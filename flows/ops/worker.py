"""The process worker of the pool `concur`: makes pool, queues and limits where they are absent,
then becomes `prefect worker start`.

Guarantees: two flow runs of the queue `gpu` never run at once unless there are as many GPUs, and
tasks tagged `gpu` neither; limits that were changed in Prefect stay unless `concur up` is told
others; flow runs of this stack whose process is gone have ended in Prefect before it takes another.
Runs in a process of its own (`python -m flows.ops.worker`).
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import TYPE_CHECKING

from flows.ops.places import ROOT_VARIABLE, Places
from flows.ops.programs import PYTHON, Stack
from flows.ops.runs import GONE, settle
from flows.ops.settings import POOL, read_secrets
from tasks.retry import retry_until_back

if TYPE_CHECKING:
    from prefect.client.orchestration import SyncPrefectClient

QUEUES = {
    "gpu": "Runs that need a GPU: as many at once as there are GPUs.",
    "cpu": "Runs that need no GPU.",
}
SERVER_S = 600.0


def wanted_limits(asked: str) -> dict[str, tuple[int, bool]]:
    """Queue -> runs at once, and whether that was asked for. `asked` is `GPU,CPU`, either empty."""
    from kernels_eval.devices import visible_gpus

    gpu, cpu = asked.split(",")
    return {
        "gpu": (int(gpu) if gpu else max(1, len(visible_gpus())), bool(gpu)),
        "cpu": (int(cpu) if cpu else max(2, (os.cpu_count() or 2) // 2), bool(cpu)),
    }


def prepare(client: SyncPrefectClient, limits: dict[str, tuple[int, bool]]) -> None:
    """Make the pool, its queues and the limits `gpu`. Existing ones are left as they are, but for
    limits that were asked for."""
    _make_pool(client)
    existing = {queue.name: queue for queue in client.read_work_queues(work_pool_name=POOL)}
    for name, (limit, asked) in limits.items():
        if name not in existing:
            client.create_work_queue(
                name=name, description=QUEUES[name], concurrency_limit=limit, work_pool_name=POOL
            )
        elif asked and existing[name].concurrency_limit != limit:
            client.update_work_queue(existing[name].id, concurrency_limit=limit)
    _limit_gpus(client, *limits["gpu"])


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


def _limit_gpus(client: SyncPrefectClient, limit: int, asked: bool) -> None:
    """The global limit, which flows hold, and that of tasks tagged `gpu`."""
    from prefect.client.schemas.actions import GlobalConcurrencyLimitCreate
    from prefect.exceptions import ObjectNotFound

    try:
        client.read_global_concurrency_limit_by_name("gpu")
        if asked:
            client.upsert_global_concurrency_limit_by_name("gpu", limit)
    except ObjectNotFound:
        wanted = GlobalConcurrencyLimitCreate(name="gpu", limit=limit)
        client.create_global_concurrency_limit(wanted)
    if not asked:
        with suppress(ObjectNotFound):
            client.read_concurrency_limit_by_tag("gpu")
            return
    client.create_concurrency_limit(tag="gpu", concurrency_limit=limit)


def settle_runs() -> None:
    """End in Prefect the flow runs of this stack whose process is gone; nothing outside a stack."""
    places = Places(os.environ[ROOT_VARIABLE]) if ROOT_VARIABLE in os.environ else None
    state = places.read_state() if places else None
    if places and state:
        for name in settle(Stack(places, state.settings, read_secrets()), GONE):
            print(f"flow run {name}: ended in Prefect, because {GONE}", flush=True)


def main() -> None:
    from httpx import TransportError
    from prefect.client.orchestration import get_client

    limits = wanted_limits(os.environ.get("CONCUR_STACK_LIMITS", ","))
    with get_client(sync_client=True) as client:
        retry_until_back(
            lambda: prepare(client, limits),
            service=f"Prefect at {client.api_url}",
            is_absent=lambda error: isinstance(error, TransportError),
            log=lambda line: print(line, flush=True),
            deadline_s=SERVER_S,
        )
    settle_runs()
    print(f"pool {POOL} with limits {limits}", flush=True)
    words = ["prefect", "worker", "start", "--pool", POOL, "--type", "process"]
    words += ["--name", f"{POOL}-{socket.gethostname()}", "--with-healthcheck"]
    os.execv(sys.executable, [*PYTHON, *words, "--install-policy", "never"])


if __name__ == "__main__":
    main()
