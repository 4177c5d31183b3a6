"""Does HTTP cost throughput? The same candidates by the pool alone and through `concur serve`, and
the seconds from a request to its verdict where the build is new.

    python -m benchmarks.serving_throughput --tasks kernelbench.parquet --responses
    qwq32b_candidates.parquet --limit 96 --out DIR
    python -m benchmarks.serving_throughput --limit 24 --out DIR

The first takes recorded CUDA answers and needs a GPU; the second generated C++ kernels. Both sides
run on the same machine, one after the other, each with a build cache of its own that begins empty.
`--warm` candidates go first and are not measured: workers start, headers are compiled. Then all
others are handed over at once, and the time until the last verdict counts. `--first` chooses the
side that begins. At the end `--latency` of those that were correct are sent one by one, each with
a comment that makes its build new.

The pool runs on Ray: besides the verifier's own packages this needs ray, fastapi, uvicorn,
prometheus_client and httpx (the extras `batch` and `serve`).
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks.serving_load import KERNEL, TASK
from kernels_eval.__main__ import QUICK
from kernels_eval.cluster.pool import Pool
from kernels_eval.records import Candidate, KernelTask, Language, Status, Verdict
from kernels_eval.service.client import VerifierClient
from kernels_eval.service.schema import EvaluationRequest, TaskSource
from tasks.sources.config import TasksConfig
from tasks.sources.stage import load_tasks
from tasks.synthesis.parsing import parse_response

SIDES = ("pool", "service")
STARTS_S = 300.0


class Pair(NamedTuple):
    task: KernelTask
    code: str


class Side(NamedTuple):
    """What one side took: wall seconds, and the verdicts in the order of the candidates."""

    seconds: float
    verdicts: list[Verdict]


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", help="KernelBench tasks, Parquet")
    parser.add_argument("--responses", help="recorded responses, Parquet")
    parser.add_argument("--limit", type=int, default=96, help="candidates that are measured")
    parser.add_argument("--warm", type=int, default=16)
    parser.add_argument("--latency", type=int, default=12)
    parser.add_argument("--first", choices=SIDES, default="pool")
    parser.add_argument("--port", type=int, default=8798)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", choices=["pool"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    language = Language.CUDA if asked.responses else Language.CPP
    pairs = recorded(asked) if asked.responses else generated(asked)
    if asked.only:  # a process of its own, so that its Ray is gone when the service starts
        found = by_pool(pairs, asked.warm, language)
        print(json.dumps([found.seconds, [each.model_dump_json() for each in found.verdicts]]))
        return 0
    sides = dict[str, Side]()
    for name in sorted(SIDES, key=lambda name: name != asked.first):
        if name == "pool":
            sides[name] = in_a_process(asked)
            print(f"pool: {len(sides[name].verdicts)} verdicts, {sides[name].seconds:.1f} s")
        else:
            sides[name], latencies = by_service(pairs, asked, language)
    return show(sides, latencies, asked.out)


def recorded(asked: argparse.Namespace) -> list[Pair]:
    """One response of every task, then a second of every task, until there are enough."""
    import polars as pl

    loaded = load_tasks(TasksConfig(source="kernelbench", location=asked.tasks))
    tasks = {task.task_id: task for task in loaded}
    rows = pl.read_parquet(asked.responses).sort("sample_id", "problem_id", "level")
    pairs: list[Pair] = []
    for row in rows.iter_rows(named=True):
        task = tasks.get(f"kernelbench/L{row['level']}/{row['problem_id']}")
        code = parse_response(row["response"]).code
        if task and code:
            pairs.append(Pair(task, code))
        if len(pairs) == asked.warm + asked.limit:
            break
    return pairs


def generated(asked: argparse.Namespace) -> list[Pair]:
    task = TaskSource(code=TASK).task()
    return [Pair(task, varied(KERNEL, n)) for n in range(asked.warm + asked.limit)]


def varied(code: str, number: int) -> str:
    """The same kernel, whose build is new."""
    return code.replace("#include", f"// {number} {os.getpid()}\n#include", 1)


# -- the two sides ---------------------------------------------------------------------------------


def in_a_process(asked: argparse.Namespace) -> Side:
    words = [word for word in sys.argv[1:] if word] + ["--only", "pool"]
    env = os.environ | {"CONCUR_CACHE": str(asked.out / "cache-pool")}
    command = [sys.executable, "-m", "benchmarks.serving_throughput", *words]
    done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    seconds, verdicts = json.loads(done.stdout.splitlines()[-1])
    return Side(seconds, [Verdict.model_validate_json(each) for each in verdicts])


def by_pool(pairs: list[Pair], warm: int, language: Language) -> Side:
    named = [
        (
            pair.task,
            Candidate(
                candidate_id=str(number),
                task_id=pair.task.task_id,
                language=language,
                generator="benchmark",
                code=pair.code,
            ),
        )
        for number, pair in enumerate(pairs)
    ]
    with Pool(language, QUICK) as pool:
        list(pool.verify(named[:warm]))
        began = time.monotonic()
        verdicts = list(pool.verify(named[warm:]))
        seconds = time.monotonic() - began
    return Side(seconds, sorted(verdicts, key=lambda each: int(each.candidate_id)))


def by_service(
    pairs: list[Pair], asked: argparse.Namespace, language: Language
) -> tuple[Side, list[float]]:
    """The other side, and the seconds of each request that was sent alone."""
    words = ["serve", "--port", str(asked.port), "--language", language.value, "--quick"]
    journal = asked.out / "serve.sqlite3"
    for old in asked.out.glob("serve.sqlite3*"):
        old.unlink()
    served = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", *words, "--journal", str(journal)],
        env=os.environ | {"CONCUR_CACHE": str(asked.out / "cache-service")},
        stderr=(asked.out / "service.log").open("wb"),
    )

    def request(pair: Pair) -> EvaluationRequest:
        source = TaskSource(
            code=pair.task.code, entry_point=pair.task.entry_point, init_form=pair.task.init_form
        )
        return EvaluationRequest(task=source, code=pair.code, language=language)

    try:
        with VerifierClient(f"http://127.0.0.1:{asked.port}", timeout_s=STARTS_S) as client:
            client.evaluate_batch([request(pair) for pair in pairs[: asked.warm]])
            client.timeout_s, began = 3600, time.monotonic()
            used = sum(psutil.Process(served.pid).cpu_times()[:2])
            found = client.evaluate_batch([request(pair) for pair in pairs[asked.warm :]])
            seconds = time.monotonic() - began
            used = sum(psutil.Process(served.pid).cpu_times()[:2]) - used
            print(f"processor time of the service itself: {1000 * used / len(found):.1f} ms each")
            verdicts = [each.verdict for each in found if each.verdict]
            print(f"service: {len(verdicts)} verdicts, {seconds:.1f} s")
            latencies: list[float] = []
            for number, (pair, each) in enumerate(zip(pairs[asked.warm :], found, strict=True)):
                right = each.verdict and each.verdict.status is Status.CORRECT
                if right and len(latencies) < asked.latency:
                    began = time.monotonic()
                    again = client.evaluate(request(Pair(pair.task, varied(pair.code, -number))))
                    if again.verdict and not again.verdict.build_cached:
                        latencies.append(time.monotonic() - began)
    finally:
        served.send_signal(signal.SIGTERM)
        served.wait(120)
    return Side(seconds, verdicts), latencies


def show(sides: dict[str, Side], latencies: list[float], out: Path) -> int:
    print("\n| side | verdicts | seconds | verdicts an hour | statuses |")
    print("| --- | ---: | ---: | ---: | --- |")
    rate = dict[str, float]()
    for name, (seconds, verdicts) in sides.items():
        rate[name] = 3600 * len(verdicts) / seconds
        counts = dict(Counter(each.status.value for each in verdicts).most_common())
        print(f"| {name} | {len(verdicts)} | {seconds:.1f} | {rate[name]:,.0f} | {counts} |")
    print(f"\nservice / pool: {rate['service'] / rate['pool']:.1%} (goal: 95 %)")
    if latencies:
        print(
            f"seconds from request to verdict, new build, nothing else under way: median"
            f" {statistics.median(latencies):.2f}, {min(latencies):.2f} to {max(latencies):.2f}"
            f" ({len(latencies)} requests)"
        )
    data = {"rate": rate, "latencies": latencies, "load": os.getloadavg()}
    (out / "summary.json").write_text(json.dumps(data, indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
