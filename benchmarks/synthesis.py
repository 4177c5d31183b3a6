"""What asking costs beside the generator: many requests to a server that answers at once, with a
SIGKILL in the middle.

    python -m benchmarks.synthesis --candidates 20000 --kill-at 7000 --out DIR

Starts an OpenAI-compatible server that does no work (uvicorn, a process of its own) and answers
with 30 KB of reasoning and a module; runs the synthesis stage over generated tasks, five samples
each; kills it with SIGKILL once --kill-at requests were answered; runs it again to the end. Prints
milliseconds per request, the stage's processor time and memory, and what was asked twice. Says
nothing about a generator.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path
from typing import Any

import psutil

from kernels_eval.records import KernelTask, Language
from tasks.store.snapshot import Snapshot
from tasks.synthesis.config import SynthesisConfig
from tasks.synthesis.stage import Synthesis
from tasks.tables import TASKS

PER_TASK = 5
REASONING_CHARACTERS, CODE_CHARACTERS, TASK_CHARACTERS = 26_000, 4_000, 1_500
SAMPLE_EVERY_S = 0.5
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidates", type=int, default=20_000)
    parser.add_argument("--concurrency", type=int, default=128)
    parser.add_argument(
        "--kill-at",
        type=int,
        default=0,
        help="requests answered before the first run is killed; 0: none is",
    )
    parser.add_argument("--out", required=True)
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        return serve(arguments.serve)
    if arguments.work:
        return work(arguments)
    measured = measure(arguments)
    (Path(arguments.out) / "synthesis.json").write_text(json.dumps(measured, indent=2))
    print(
        json.dumps(measured)
        if arguments.as_json
        else "\n".join(f"{key:32} {value}" for key, value in measured.items())
    )
    return 0 if measured["rows"] == measured["unique_rows"] == arguments.candidates else 1


def tasks_in(root: str) -> Snapshot:
    return Snapshot(root, "tasks", "generated")


def config(port: int, concurrency: int) -> SynthesisConfig:
    return SynthesisConfig(
        sampler="openai",
        model="nobody",
        base_url=f"http://127.0.0.1:{port}/v1",
        samples_per_task=PER_TASK,
        concurrency=concurrency,
    )


# -- the server ------------------------------------------------------------------------------------


def serve(port: int) -> int:
    """Answers every chat completion at once; /answered tells how many."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import ClientDisconnect, Request
    from starlette.responses import JSONResponse, PlainTextResponse
    from starlette.routing import Route

    rng = random.Random(0)
    words = [
        "thread",
        "block",
        "shared",
        "float",
        "wait",
        "so",
        "the",
        "index",
        "tile",
        "row",
        "memory",
        "sum",
        "warp",
        "bound",
        "loop",
    ]
    thoughts = " ".join(rng.choice(words) for _ in range(REASONING_CHARACTERS // 5))[
        :REASONING_CHARACTERS
    ]
    code = "import torch\n\nclass ModelNew(torch.nn.Module):\n    pass\n" + "\n".join(
        f"# line {n}" for n in range(CODE_CHARACTERS // 11)
    )
    answered = 0

    async def complete(request: Request) -> JSONResponse:
        nonlocal answered
        try:
            await request.body()
        except ClientDisconnect:  # it was killed
            return JSONResponse({}, status_code=400)
        answered += 1
        text = f"<think>\n{answered} {thoughts}\n</think>\n```python\n{code}\n```"
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text},
            "finish_reason": "stop",
        }
        usage = {"prompt_tokens": 900, "completion_tokens": 7_000, "total_tokens": 7_900}
        body = {
            "id": "x",
            "object": "chat.completion",
            "created": 0,
            "model": "nobody",
            "choices": [choice],
            "usage": usage,
        }
        return JSONResponse(body)

    async def count(_: Request) -> PlainTextResponse:
        return PlainTextResponse(str(answered))

    app = Starlette(
        routes=[
            Route("/v1/chat/completions", complete, methods=["POST"]),
            Route("/answered", count),
        ]
    )
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error", access_log=False)
    return 0


def answered(port: int) -> int:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/answered", timeout=30) as reply:
            return int(reply.read())
    except OSError:
        return -1


# -- the stage -------------------------------------------------------------------------------------


def work(arguments: argparse.Namespace) -> int:
    """The stage, in a process that can be killed. Prints its processor seconds."""
    Synthesis(
        tasks_in(arguments.out).ref, config(arguments.work, arguments.concurrency), Language.CUDA
    ).run()
    used = resource.getrusage(resource.RUSAGE_SELF)
    print(json.dumps({"processor_s": used.ru_utime + used.ru_stime}))
    return 0


def measure(arguments: argparse.Namespace) -> dict[str, Any]:
    root = str(Path(arguments.out).absolute())
    generate(root, arguments.candidates // PER_TASK)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    base = [
        sys.executable,
        "-m",
        "benchmarks.synthesis",
        "--out",
        root,
        "--concurrency",
        str(arguments.concurrency),
    ]
    snapshot = Synthesis(
        tasks_in(root).ref, config(port, arguments.concurrency), Language.CUDA
    ).snapshot
    server = subprocess.Popen([*base, "--serve", str(port)])
    try:
        deadline = time.monotonic() + 60
        while answered(port) < 0:
            if time.monotonic() > deadline or server.poll() is not None:
                raise SystemExit("error: the server did not start")
            time.sleep(0.1)
        if arguments.kill_at:
            _watched([*base, "--work", str(port)], lambda: answered(port) >= arguments.kill_at)
        before = answered(port)
        wall_s, rss, said = _watched([*base, "--work", str(port)], lambda: False)
        asked = answered(port)
    finally:
        server.kill()
        server.wait()
    rows = snapshot.read(columns=["request_key", "candidate_id"])
    return {
        "candidates": arguments.candidates,
        "rows": len(rows),
        "unique_rows": rows["request_key"].n_unique(),
        "concurrency": arguments.concurrency,
        "answered_before_the_kill": before,
        "kept_after_the_kill": arguments.candidates - (asked - before),
        "asked_twice": asked - arguments.candidates,
        "wall_s": round(wall_s, 1),
        "requests_in_that_time": asked - before,
        "ms_per_request": round(1e3 * wall_s / max(1, asked - before), 3),
        "processor_ms_per_request": round(
            1e3 * json.loads(said.splitlines()[-1])["processor_s"] / max(1, asked - before), 3
        ),
        "peak_rss_mib": round(max(rss) / MIB, 1),
        "rss_mib_third_quarter": _middle_mib(rss[len(rss) // 2 : 3 * len(rss) // 4]),
        "rss_mib_last_quarter": _middle_mib(rss[3 * len(rss) // 4 :]),
        "cores": os.cpu_count(),
    }


def _middle_mib(rss: list[int]) -> float:
    return round(statistics.median(rss or [0]) / MIB, 1)


def generate(root: str, count: int) -> None:
    snapshot = tasks_in(root)
    if snapshot.finished:
        return
    rng = random.Random(1)
    filler = "".join(rng.choice("abcdefgh \n") for _ in range(TASK_CHARACTERS))
    rows = []
    for number in range(count):
        code = f'"""{number} {filler}"""\nimport torch\n'
        rows.append(
            KernelTask(
                task_id=f"generated/{number}", name=f"generated {number}", code=code
            ).model_dump(mode="json")
        )
    snapshot.append(rows, TASKS)
    snapshot.publish(config={}, rows=len(rows))


def _watched(command: list[str], enough: Any) -> tuple[float, list[int], str]:
    """Run it to its end, or kill it once there is enough. Returns wall seconds, resident bytes over
    time and what it printed."""
    started, rss = time.monotonic(), []
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    watch = psutil.Process(process.pid)
    while process.poll() is None:
        if enough():
            process.send_signal(signal.SIGKILL)
            break
        try:
            rss.append(watch.memory_info().rss)
            process.wait(SAMPLE_EVERY_S)
        except (psutil.Error, subprocess.TimeoutExpired):
            continue
    said = process.communicate()[0]
    if process.returncode not in (0, -signal.SIGKILL):
        raise SystemExit(f"error: the stage ended with status {process.returncode}")
    return time.monotonic() - started, rss or [0], said


if __name__ == "__main__":
    sys.exit(main())
