"""The process worker of the pool `concur`: makes pool, queues and limits where they are absent,
then becomes `prefect worker start`.

Guarantees: two flow runs of the queue `gpu` never run at once unless there are as many GPUs, and
tasks tagged `gpu` neither; limits that were changed in Prefect stay unless `concur up` is told
others. Runs in a process of its own (`python -m flows.ops.worker`).
"""

from __future__ import annotations

import os
import socket
import sys
from contextlib import suppress
from typing import Any

from flows.ops.settings import POOL

QUEUES = {
    "gpu": "Runs that need a GPU: as many at once as there are GPUs.",
    "cpu": "Runs that need no GPU.",
}


def wanted_limits(asked: str) -> dict[str, tuple[int, bool]]:
    """Queue -> runs at once, and whether that was asked for. `asked` is `GPU,CPU`, either empty."""
    from kernels_eval.devices import visible_gpus

    gpu, cpu = asked.split(",")
    return {
        "gpu": (int(gpu) if gpu else max(1, len(visible_gpus())), bool(gpu)),
        "cpu": (int(cpu) if cpu else max(2, (os.cpu_count() or 2) // 2), bool(cpu)),
    }


def prepare(client: Any, limits: dict[str, tuple[int, bool]]) -> None:
    """Make the pool, its queues and the limits `gpu`. What is there is left as it is, but for
    limits that were asked for."""
    from prefect.client.schemas.actions import (
        GlobalConcurrencyLimitCreate,
        WorkPoolCreate,
        WorkQueueUpdate,
    )
    from prefect.exceptions import ObjectAlreadyExists, ObjectNotFound
    from prefect.workers.process import ProcessWorker

    try:
        client.read_work_pool(POOL)
    except ObjectNotFound:
        template = ProcessWorker.get_default_base_job_template()
        with suppress(ObjectAlreadyExists):  # another worker of this server was first
            client.create_work_pool(
                WorkPoolCreate(name=POOL, type="process", base_job_template=template)
            )
    there = {queue.name: queue for queue in client.read_work_queues(work_pool_name=POOL)}
    for name, (limit, asked) in limits.items():
        if name not in there:
            client.create_work_queue(
                name=name, description=QUEUES[name], concurrency_limit=limit, work_pool_name=POOL
            )
        elif asked and there[name].concurrency_limit != limit:
            client.update_work_queue(
                there[name].id,
                **WorkQueueUpdate(concurrency_limit=limit).model_dump(exclude_unset=True),
            )
    limit, asked = limits["gpu"]
    try:
        client.read_global_concurrency_limit_by_name("gpu")
        if asked:
            client.upsert_global_concurrency_limit_by_name("gpu", limit)
    except ObjectNotFound:
        client.create_global_concurrency_limit(
            GlobalConcurrencyLimitCreate(name="gpu", limit=limit)
        )
    try:
        client.read_concurrency_limit_by_tag("gpu")
        known = True
    except ObjectNotFound:
        known = False
    if asked or not known:
        client.create_concurrency_limit(tag="gpu", concurrency_limit=limit)


def main() -> None:
    from prefect.client.orchestration import get_client

    limits = wanted_limits(os.environ.get("CONCUR_STACK_LIMITS", ","))
    with get_client(sync_client=True) as client:
        prepare(client, limits)
    print(
        "pool",
        POOL,
        "with queues",
        ", ".join(f"{name} (limit {limit})" for name, (limit, _) in limits.items()),
        flush=True,
    )
    name = f"{POOL}-{socket.gethostname()}"
    words = [
        "prefect",
        "worker",
        "start",
        "--pool",
        POOL,
        "--type",
        "process",
        "--name",
        name,
        "--with-healthcheck",
    ]
    os.execv(sys.executable, [sys.executable, "-P", "-m", *words, "--install-policy", "never"])


if __name__ == "__main__":
    main()
