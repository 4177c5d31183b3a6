"""Many clients against `concur serve` on the CPU while its processes are killed: is every request
answered with exactly one verdict, and how long does handing one over take?

    python -m benchmarks.serving_load --clients 200 --seconds 600 --kill-every 20 --out DIR

Each client hands over a request and waits for its verdict, then the next, through an
`AsyncVerifierClient` of its own, as clients in many processes do; all run in this one, which
takes its part of the cores. Of the candidates, a
share is new C++ kernels (`--new`; their library is built once, so that judging, not building, is
what is asked for), the rest are rejected sources, responses without code and repetitions. Every
`--kill-every` seconds one process gets SIGKILL: the service, the process of its pool, a worker, a
builder, Ray's control server (its head), its raylet, in turn. The service is started again when it
ends, as a supervisor does. `enqueue_ms` is the time of each POST that was answered with 202,
without the attempts that met no service; `handed_over_ms` counts those and the pauses between them
too. `quiet` is what began in minutes of the run in which nothing was killed. `client_lag_ms` is by
how much this process woke up too late: its own part in the times above.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import os
import random
import signal
import sqlite3
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import psutil

from kernels_eval.service.client import POLL_S, AsyncVerifierClient
from kernels_eval.service.schema import Evaluation, EvaluationRequest, TaskSource

KINDS = ("service", "pool", "worker", "builder", "gcs", "raylet")
MARKS = {
    "pool": "spawn_main",
    "worker": "ray::KernelWorker",
    "builder": "ray::BuildWorker",
    "gcs": "gcs_server",
    "raylet": "raylet/raylet",
}
TASK = """import torch
class Model(torch.nn.Module):
    def forward(self, x):
        return x * 2.0 + 1.0
def get_inputs():
    return [torch.randn(64, 64)]
def get_init_inputs():
    return []
"""
KERNEL = """import torch
from torch.utils.cpp_extension import load_inline
source = r'''
#include <torch/extension.h>
torch::Tensor affine(torch::Tensor x) {
  auto y = torch::empty_like(x);
  const float* in = x.data_ptr<float>();
  float* out = y.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); i++) out[i] = in[i] * 2.0f + 1.0f;
  return y;
}
'''
ext = load_inline(name="affine", cpp_sources=source, functions=["affine"])
class ModelNew(torch.nn.Module):
    def forward(self, x):
        return ext.affine(x)
"""
REJECTED = "import subprocess\nclass ModelNew:\n    pass\n"
LOOK_S = 5.0
WAKE_S = 0.02
TIMED = ("enqueue_ms", "handed_over_ms", "client_lag_ms")
SHARES = (50, 90, 99, 100)
PROTOCOL = ("timing.max_s=1", "timing.min_pairs=6", "timing.min_side_s=0.02")


class Served:
    """`concur serve`, started again whenever it has ended."""

    def __init__(self, folder: Path, port: int) -> None:
        self.folder, self.port, self.starts = folder, port, 0
        self.process: subprocess.Popen[bytes] | None = None

    def keep(self) -> None:
        if self.process is None or self.process.poll() is not None:
            words = ["serve", "--port", str(self.port), "--language", "cpp", "--quick"]
            words += [word for each in PROTOCOL for word in ("--set", each)]
            words += ["--journal", str(self.folder / "serve.sqlite3")]
            with open(self.folder / "service.log", "ab") as log:
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "flows.cli", *words], stdout=log, stderr=log
                )
            self.starts += 1

    def victim(self, kind: str) -> psutil.Process | None:
        """A process of this kind, where one runs."""
        assert self.process
        try:
            own = psutil.Process(self.process.pid)
            below = own.children(recursive=True)
        except psutil.NoSuchProcess:
            return None
        if kind == "service":
            return own
        for each in below:
            try:
                if MARKS[kind] in " ".join(each.cmdline()):
                    return each
            except psutil.Error:
                continue
        return None

    def end(self) -> int | None:
        if self.process:
            self.process.send_signal(signal.SIGTERM)
            self.process.wait(180)
            return self.process.returncode
        return None


class Load:
    """The clients and what they saw."""

    def __init__(self, asked: argparse.Namespace, port: int) -> None:
        self.asked = asked
        self.times: dict[str, list[tuple[int, float]]] = {name: [] for name in TIMED}
        """Of each kind, the minute in which it began and its milliseconds."""
        self.killed: list[tuple[int, str]] = []
        """The minute and the kind of each process that was killed."""
        self.found: dict[str, Evaluation] = {}
        self.sent: set[str] = set()
        hooks: dict[str, list[Any]] = {"request": [self._begun], "response": [self._answered]}
        self.clients: list[AsyncVerifierClient] = []
        for _ in range(asked.clients):
            self.clients.append(AsyncVerifierClient(f"http://127.0.0.1:{port}", timeout_s=3600))
            self.clients[-1]._http.event_hooks = hooks
        self.draw = random.Random(asked.seed)
        self.began = time.monotonic()
        self.until = self.began + asked.seconds

    def minute(self) -> int:
        return int(time.monotonic() - self.began) // 60

    @contextmanager
    def timed(self, name: str) -> Iterator[None]:
        minute, began = self.minute(), time.monotonic()
        yield
        self.times[name].append((minute, 1000 * (time.monotonic() - began)))

    async def _begun(self, request: httpx.Request) -> None:
        request.extensions["begun"] = (self.minute(), time.monotonic())

    async def _answered(self, response: httpx.Response) -> None:
        if response.status_code == 202:
            minute, began = response.request.extensions["begun"]
            self.times["enqueue_ms"].append((minute, 1000 * (time.monotonic() - began)))

    def request(self, identity: str, client: str) -> EvaluationRequest:
        fields: dict[str, Any] = {"task": TaskSource(code=TASK), "id": identity, "client": client}
        if self.draw.random() < self.asked.new:
            return EvaluationRequest(code=f"{KERNEL}# {identity}\n", **fields)
        other = self.draw.choice(("rejected", "no code", "known"))
        if other == "no code":
            return EvaluationRequest(response=f"I cannot. {identity}", **fields)
        code = KERNEL if other == "known" else f"{REJECTED}# {identity}\n"
        return EvaluationRequest(code=code, **fields)

    async def one(self, name: str, client: AsyncVerifierClient) -> None:
        await asyncio.sleep(self.draw.uniform(0, self.asked.ramp))
        for number in itertools.count():
            if time.monotonic() > self.until:
                return
            identity = f"{name}-{number}"
            self.sent.add(identity)
            with self.timed("handed_over_ms"):
                found = await client.submit(self.request(identity, name))
            while not found.state.final:
                found = await client.result(identity, POLL_S)
            self.found[identity] = found

    async def watch(self) -> None:
        """How late this process wakes up."""
        while True:
            woken = time.monotonic() + WAKE_S
            minute = self.minute()
            await asyncio.sleep(WAKE_S)
            self.times["client_lag_ms"].append((minute, 1000 * (time.monotonic() - woken)))

    async def run(self, served: Served) -> None:
        clients = [
            asyncio.create_task(self.one(f"client{n}", client))
            for n, client in enumerate(self.clients)
        ]
        watching = asyncio.create_task(self.watch())
        kinds = itertools.cycle(self.asked.kinds)
        kill_at = time.monotonic() + self.asked.kill_every
        while not all(task.done() for task in clients):
            served.keep()
            if kill_at < time.monotonic() < self.until:
                kind = next(kinds)
                found = await asyncio.to_thread(served.victim, kind)
                # looking through all processes slows the clients down: seldom
                kill_at = time.monotonic() + (self.asked.kill_every if found else LOOK_S)
                if found:
                    found.kill()
                    self.killed.append((self.minute(), kind))
            await asyncio.sleep(0.2)
        await asyncio.gather(*clients)
        watching.cancel()
        for client in self.clients:
            await client.close()


def shares(times: Iterable[float]) -> dict[str, float]:
    """How many, and milliseconds: median, 99th percentile, longest."""
    found = sorted(times)
    at = {
        f"p{share}": found[min(len(found) - 1, len(found) * share // 100)]
        for share in SHARES
        if found
    }
    return {"count": len(found)} | {name: round(value, 1) for name, value in at.items()}


def summarise(load: Load, served: Served) -> dict[str, Any]:
    journal = sqlite3.connect(served.folder / "serve.sqlite3")
    rows = journal.execute("SELECT id, state, key, verdict FROM evaluations").fetchall()
    kept = {row[0]: row for row in rows}
    busy = {minute for minute, _ in load.killed}
    verdicts = {
        name: found.verdict.model_dump_json() for name, found in load.found.items() if found.verdict
    }
    return {
        "requests": len(load.sent),
        "lost": len(load.sent - load.found.keys()),
        "without_verdict": len(load.found) - len(verdicts),
        "other_verdict_in_journal": sum(kept[name][3] != text for name, text in verdicts.items()),
        "in_journal_only": len(kept.keys() - load.sent),
        "candidates": len({row[2] for row in rows}),
        "candidates_with_two_verdicts": sum(
            len(set(texts)) > 1
            for _, group in itertools.groupby(sorted((r[2], r[3]) for r in rows), lambda r: r[0])
            if (texts := [text for _, text in group])
        ),
        "states": dict(Counter(row[1] for row in rows)),
        "reasons": dict(Counter(f.verdict.reason for f in load.found.values() if f.verdict)),
        "killed": load.killed,
        "starts": served.starts,
    } | {
        name: {
            "all": shares(value for _, value in times),
            "quiet": shares(value for minute, value in times if minute not in busy),
        }
        for name, times in load.times.items()
        if times
    }


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument(
        "--seconds", type=float, default=600.0, help="clients begin no request after"
    )
    parser.add_argument("--ramp", type=float, default=10.0, help="seconds in which clients begin")
    parser.add_argument("--kill-every", type=float, default=20.0, help="seconds between kills")
    parser.add_argument("--kinds", nargs="*", choices=KINDS, default=list(KINDS))
    parser.add_argument("--new", type=float, default=0.1, help="share of new kernels")
    parser.add_argument("--port", type=int, default=8799)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", required=True)
    asked = parser.parse_args()
    folder = Path(asked.out)
    folder.mkdir(parents=True, exist_ok=True)
    load_before = os.getloadavg()[0]
    served = Served(folder, asked.port)
    began = time.monotonic()
    served.keep()
    load = Load(asked, asked.port)
    try:
        asyncio.run(load.run(served))
    finally:
        status = served.end()
    summary = summarise(load, served) | {
        "seconds": round(time.monotonic() - began, 1),
        "exit_status": status,
        "load_before": load_before,
        "load_after": os.getloadavg()[0],
        "asked": vars(asked),
    }
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    print(json.dumps(summary, indent=2))
    wrong = ("lost", "without_verdict", "other_verdict_in_journal", "candidates_with_two_verdicts")
    return int(any(summary[name] for name in wrong))


if __name__ == "__main__":
    sys.exit(main())
