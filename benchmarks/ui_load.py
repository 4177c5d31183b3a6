"""Do Prefect's and MLflow's servers go on answering when many ask, and when there is much history?

    eval "$(concur env --root ROOT)" python -m benchmarks.ui_load clients --clients 50 --seconds 60
    # while a run works, if there is to be one python -m benchmarks.ui_load history --runs 10000
    # fills the history first, then asks what the pages ask

`clients` asks both servers at once, each client one request after the other, what their pages ask:
runs, their states, artifacts, logs; experiments and runs. `history` writes ended flow runs through
the API until there are so many (all as of now: the API takes no past moment), and then times each
page's requests alone. Prints per request how often it was asked, its median and 95th percentile in
ms, and failures (any status but 200, or no answer in 30 s), and how many runs of the server ended
meanwhile, and how. Exit status 1 if a request failed, or a run failed meanwhile.

Takes the servers named by PREFECT_API_URL and MLFLOW_TRACKING_URI. The history that it writes
stays: use servers of their own.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import statistics
import sys
import time
from collections import Counter
from datetime import UTC, datetime, timedelta
from typing import Any

import httpx

TIMEOUT_S = 30.0
FLOW = "history of a benchmark"
ENDINGS = {"COMPLETED": 0.9, "FAILED": 0.07, "CANCELLED": 0.03}
PAGE = 25


def asked_of_prefect() -> list[tuple[str, str, dict[str, Any]]]:
    """What the pages Dashboard, Runs, Deployments, Artifacts and a run's logs ask: name, path,
    body."""
    since = (datetime.now(UTC) - timedelta(days=7)).isoformat()
    recent = {"flow_runs": {"start_time": {"after_": since}}}
    window = {
        "history_start": since,
        "history_end": datetime.now(UTC).isoformat(),
        "history_interval_seconds": 86400,
    }
    return [
        (
            "runs, newest",
            "flow_runs/paginate",
            {"sort": "START_TIME_DESC", "limit": PAGE, "page": 1},
        ),
        (
            "runs, page 20",
            "flow_runs/paginate",
            {"sort": "START_TIME_DESC", "limit": PAGE, "page": 20},
        ),
        (
            "runs that failed",
            "flow_runs/paginate",
            {"flow_runs": {"state": {"type": {"any_": ["FAILED", "CRASHED"]}}}, "limit": PAGE},
        ),
        (
            "runs by name",
            "flow_runs/paginate",
            {"flow_runs": {"name": {"like_": "refresh"}}, "limit": PAGE},
        ),
        ("how many runs", "flow_runs/count", {}),
        ("runs of a week, by day", "flow_runs/history", window | recent),
        ("how late runs are", "flow_runs/lateness", recent),
        ("flows", "flows/paginate", {"limit": PAGE}),
        ("deployments", "deployments/paginate", {"limit": PAGE}),
        ("artifacts", "artifacts/latest/filter", {"limit": PAGE}),
        ("logs", "logs/filter", {"limit": 200}),
        ("task runs", "task_runs/filter", {"limit": 100}),
    ]


def asked_of_mlflow() -> list[tuple[str, str, dict[str, Any]]]:
    api = "api/2.0/mlflow"
    return [
        ("experiments", f"{api}/experiments/search", {"max_results": 50}),
        ("runs", f"{api}/runs/search", {"experiment_ids": ["0", "1"], "max_results": 100}),
        ("models", f"{api}/registered-models/search?max_results=50", {}),
    ]


def requests() -> list[tuple[str, str, dict[str, Any] | None]]:
    """Name, address and body (None: a GET) of everything that is asked."""
    prefect, mlflow = (
        os.environ.get("PREFECT_API_URL", ""),
        os.environ.get("MLFLOW_TRACKING_URI", ""),
    )
    found: list[tuple[str, str, dict[str, Any] | None]] = []
    if prefect:
        found += [
            (f"prefect: {name}", f"{prefect}/{path}", body)
            for name, path, body in asked_of_prefect()
        ]
        found += [("prefect: the page itself", prefect.removesuffix("/api") + "/", None)]
    if mlflow.startswith("http"):
        found += [
            (f"mlflow: {name}", f"{mlflow}/{path}", body or None)
            for name, path, body in asked_of_mlflow()
        ]
        found += [("mlflow: the page itself", f"{mlflow}/", None)]
    if not found:
        raise SystemExit(
            'neither PREFECT_API_URL nor MLFLOW_TRACKING_URI is set: eval "$(concur env --root'
            ' ROOT)"'
        )
    return found


class Seen:
    """How long each kind of request took (ms), and what went wrong."""

    def __init__(self) -> None:
        self.took_ms: dict[str, list[float]] = {}
        self.failed: Counter[str] = Counter()
        self.again = 0

    async def ask(
        self, client: httpx.AsyncClient, name: str, url: str, body: dict[str, Any] | None
    ) -> None:
        began = time.perf_counter()
        try:
            try:
                answer = await (client.get(url) if body is None else client.post(url, json=body))
            except (
                httpx.ReadError,
                httpx.RemoteProtocolError,
            ):  # a kept connection that the server closed just then: browsers ask again
                self.again += 1
                answer = await (client.get(url) if body is None else client.post(url, json=body))
            if answer.status_code != 200:
                self.failed[f"{name}: {answer.status_code} {answer.text[:120]}"] += 1
        except httpx.HTTPError as error:
            self.failed[f"{name}: {type(error).__name__}"] += 1
        self.took_ms.setdefault(name, []).append(1000 * (time.perf_counter() - began))

    def rows(self) -> list[dict[str, Any]]:
        return [
            {
                "request": name,
                "asked": len(took),
                "median_ms": round(statistics.median(took), 1),
                "p95_ms": round(sorted(took)[min(len(took) - 1, int(0.95 * len(took)))], 1),
                "most_ms": round(max(took), 1),
            }
            for name, took in sorted(self.took_ms.items())
        ]


async def clients(number: int, seconds: float) -> Seen:
    """So many clients, each with a connection of its own, asking at random for so long."""
    seen, deadline, kinds = Seen(), time.monotonic() + seconds, requests()

    async def one(seed: int) -> None:
        draw = random.Random(seed)
        async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
            while time.monotonic() < deadline:
                await seen.ask(client, *draw.choice(kinds))

    await asyncio.gather(*(one(seed) for seed in range(number)))
    return seen


async def history(runs: int, repeats: int) -> tuple[Seen, int, float]:
    """Fill the history up to so many runs, then ask everything `repeats` times, alone. Returns also
    how many were written, in how long."""
    api, seen = os.environ["PREFECT_API_URL"], Seen()
    began = time.monotonic()
    async with httpx.AsyncClient(timeout=120.0, limits=httpx.Limits(max_connections=16)) as client:
        there = int((await client.post(f"{api}/flow_runs/count", json={})).json())
        flow = (await client.post(f"{api}/flows/", json={"name": FLOW})).json()["id"]
        missing = max(0, runs - there)
        gate = asyncio.Semaphore(2)  # SQLite has one writer

        async def write(number: int) -> None:
            draw = random.Random(number)
            ending = draw.choices(list(ENDINGS), list(ENDINGS.values()))[0]
            moment = datetime.now(UTC) - timedelta(days=30 * number / max(1, missing))
            state = {"type": ending, "name": ending.title(), "message": "written by a benchmark"}
            body = {
                "flow_id": flow,
                "name": f"refresh {moment:%Y-%m-%d %H:%M} {number}",
                "state": state,
                "tags": ["history"],
            }
            async with gate:
                while (
                    answer := await client.post(f"{api}/flow_runs/", json=body)
                ).status_code == 503:
                    await asyncio.sleep(
                        0.2
                    )  # its database was busy for a moment: Prefect's own client asks again, too
                answer.raise_for_status()

        for start in range(0, missing, 1000):
            await asyncio.gather(
                *(write(number) for number in range(start, min(missing, start + 1000)))
            )
    wrote_s = time.monotonic() - began
    async with httpx.AsyncClient(timeout=TIMEOUT_S) as client:
        for _ in range(repeats):
            for kind in requests():
                await seen.ask(client, *kind)
    return seen, missing, wrote_s


def states() -> Counter[str]:
    """How many runs of the server are in each state, without those that this benchmark wrote."""
    api = os.environ.get("PREFECT_API_URL")
    if not api:
        return Counter()
    found: Counter[str] = Counter()
    for state in ("COMPLETED", "FAILED", "CRASHED", "CANCELLED", "RUNNING"):
        body = {"flow_runs": {"state": {"type": {"any_": [state]}}}}
        counts = [
            int(
                httpx.post(f"{api}/flow_runs/count", json=each, timeout=60)
                .raise_for_status()
                .json()
            )
            for each in (body, body | {"flows": {"name": {"any_": [FLOW]}}})
        ]
        found[state] = counts[0] - counts[1]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = parser.add_subparsers(dest="kind", required=True)
    many = kinds.add_parser("clients", help="many at once")
    many.add_argument("--clients", type=int, default=50)
    many.add_argument("--seconds", type=float, default=60.0)
    long = kinds.add_parser("history", help="with much history")
    long.add_argument("--runs", type=int, default=10_000)
    long.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    before = states()
    data: dict[str, Any] = {"kind": asked.kind}
    if asked.kind == "clients":
        seen = asyncio.run(clients(asked.clients, asked.seconds))
        data |= {"clients": asked.clients, "seconds": asked.seconds}
    else:
        seen, written, wrote_s = asyncio.run(history(asked.runs, asked.repeats))
        data |= {"runs": asked.runs, "written": written, "wrote_s": round(wrote_s, 1)}
    after = states()
    changed = {state: after[state] - before[state] for state in after}
    data |= {
        "requests": seen.rows(),
        "failed": dict(seen.failed),
        "asked_again": seen.again,
        "runs_meanwhile": changed,
        "working_at_the_start": before["RUNNING"],
    }
    print(json.dumps(data, indent=2))
    return (
        1
        if seen.failed
        or (asked.kind == "clients" and (changed["FAILED"] > 0 or changed["CRASHED"] > 0))
        else 0
    )


if __name__ == "__main__":
    sys.exit(main())
