"""What the line itself costs per candidate: Prefect, Ray and snapshots as they are, over work that
does nothing.

    python -m benchmarks.orchestration --candidates 90810 --out DIR

Generates candidates of realistic sizes (five a task, 30 KB of response, 4 KB of code) into
snapshots under --out, then runs the verification stage over them as a flow does: an embedded
Prefect with a server of its own, Ray, one task run per chunk, journal and parts. Only the work of
the two kinds of Ray worker is replaced: a build answers "prepared" at once, a run "correct". Prints
wall time, processor seconds and memory; needs no GPU and no compiler. Says nothing about what
verifying a kernel costs.

Generating is not measured, and runs in a process of its own, so that peak memory is the driver's.
`--order scattered` writes the candidates in random order, so that none lies beside another one of
its task: the worst case for reading them by task.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from kernels_eval.cluster.pool import Pool
from kernels_eval.cluster.worker import Call
from kernels_eval.config import EvalConfig
from kernels_eval.parent.messages import Prepared
from kernels_eval.records import Candidate, KernelTask, Language, Record, Verdict
from tasks.store.snapshot import Snapshot, SnapshotRef
from tasks.tables import CANDIDATES, TASKS
from tasks.verification.config import VerificationConfig
from tasks.verification.stage import Verification

PER_TASK = 5
RESPONSE_CHARACTERS, ANSWER_CHARACTERS, CODE_CHARACTERS, TASK_CHARACTERS = (
    30_000,
    8_000,
    4_000,
    1_500,
)
PART_ROWS = 1000
SAMPLE_EVERY_S = 5.0
MIB = 2**20


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidates", type=int, default=9081)
    parser.add_argument(
        "--out",
        required=True,
        help="a directory; the generated snapshots are kept there for the next run",
    )
    parser.add_argument("--order", choices=("written", "scattered"), default="written")
    parser.add_argument("--workers", type=int, default=None)
    parser.add_argument("--builders", type=int, default=None)
    parser.add_argument("--chunk-size", type=int, default=VerificationConfig().chunk_size)
    parser.add_argument(
        "--at-once",
        type=int,
        default=Pool.at_once,
        help="candidates in one Ray call at most; 1: as for slow candidates",
    )
    parser.add_argument("--json", action="store_true", dest="as_json", help="print one JSON object")
    parser.add_argument("--generate-only", action="store_true")
    arguments = parser.parse_args()
    root = Path(arguments.out).absolute() / f"{arguments.candidates}-{arguments.order}"
    if arguments.generate_only:
        generate(str(root), arguments.candidates, scattered=arguments.order == "scattered")
        return 0
    again = [
        sys.executable,
        "-m",
        "benchmarks.orchestration",
        "--generate-only",
        "--candidates",
        str(arguments.candidates),
    ]
    subprocess.run([*again, "--out", arguments.out, "--order", arguments.order], check=True)
    config = VerificationConfig(
        workers=arguments.workers, builders=arguments.builders, chunk_size=arguments.chunk_size
    )
    measured = measure(root, arguments.candidates, config, arguments.at_once)
    (root / "orchestration.json").write_text(json.dumps(measured, indent=2))
    print(json.dumps(measured) if arguments.as_json else as_text(measured))
    return 0 if measured["rows"] == measured["unique_rows"] == arguments.candidates else 1


# -- the candidates --------------------------------------------------------------------------------


def inputs(root: str) -> tuple[Snapshot, Snapshot]:
    return Snapshot(root, "tasks", "generated"), Snapshot(root, "synthesis", "generated")


def generate(root: str, candidates: int, *, scattered: bool = False) -> None:
    """Finished snapshots of tasks and candidates, in parts of 1,000 rows. Does nothing where they
    are."""
    tasks, responses = inputs(root)
    if responses.finished:
        return
    shutil.rmtree(root, ignore_errors=True)
    chance = random.Random(0)
    words = [
        "".join(chance.choices("etaoinshrdlu_(){};", k=chance.randint(2, 9))) for _ in range(4000)
    ]
    corpus = " ".join(chance.choices(words, k=12_000))

    def text(characters: int) -> str:
        start = chance.randrange(len(corpus) - characters)
        return corpus[start : start + characters]

    def task(number: int) -> dict[str, Any]:
        record = KernelTask(
            task_id=f"task-{number:07d}", name=f"task {number}", code=text(TASK_CHARACTERS), level=1
        )
        return record.model_dump(mode="json")

    def candidate(number: int) -> dict[str, Any]:
        code = f"# {number}\n{text(CODE_CHARACTERS)}"
        reasoning, answer = (
            text(RESPONSE_CHARACTERS - ANSWER_CHARACTERS),
            text(ANSWER_CHARACTERS - CODE_CHARACTERS) + code,
        )
        found = hashlib.sha256(str(number).encode()).hexdigest()[:32]
        return {
            **{
                "candidate_id": found,
                "task_id": f"task-{number // PER_TASK:07d}",
                "language": "cpp",
                "generator": "generated",
            },
            **{
                "sampling": {
                    "temperature": 1.0,
                    "top_p": 1.0,
                    "max_tokens": 16384,
                    "seed": number % PER_TASK,
                },
                "prompt_hash": found,
            },
            **{
                "sample_index": number % PER_TASK,
                "response": reasoning + answer,
                "reasoning": reasoning,
                "answer": answer,
                "code": code,
            },
            **{
                "reasoning_tokens": 7000,
                "completion_tokens": 10_000,
                "finish_reason": "stop",
                "request_key": found,
            },
        }

    numbers = list(range(candidates))
    if scattered:
        chance.shuffle(numbers)
    tasks.append(map(task, range(-(-candidates // PER_TASK))), TASKS)
    tasks.publish(config={})
    responses.append(map(candidate, numbers), CANDIDATES)
    responses.publish(config={})


# -- work that does nothing ------------------------------------------------------------------------


class NoBuild:
    """Stands in for BuildWorker: every candidate is prepared as it comes."""

    def __init__(self, *_: object) -> None:
        pass

    def several(self, calls: list[Call]) -> tuple[list[Record], float]:
        from kernels_eval.cluster.worker import several

        return several(self.prepare, calls)

    def prepare(self, task: KernelTask, candidate: Candidate) -> Prepared:
        libraries = {"0": "/nowhere/0.so"}
        return Prepared(candidate_id=candidate.candidate_id, libraries=libraries, tier="lite")


class NoRun:
    """Stands in for KernelWorker: every candidate is correct."""

    def __init__(self, *_: object) -> None:
        from kernels_eval.records import Correctness, Status, Timing, Verdict

        timing = {
            "reference_ms": 1.0,
            "candidate_ms": 0.5,
            "speedup": 2.0,
            "speedup_lower": 1.9,
            "speedup_upper": 2.1,
            "pairs": 100,
        }
        verdict = Verdict(
            candidate_id="",
            task_id="",
            language=Language.CPP,
            status=Status.CORRECT,
            reason="ok",
            outputs_match=True,
            device="none",
            timing=Timing(**timing, calls_per_sample=10, clock_bound_ms=0.5),
            correctness=Correctness(trials=6, rms_error=1e-7),
            custom_kernels=("nothing",),
            library_calls=("aten::empty",),
            reference_operators=("aten::mul", "aten::add"),
            build_tier="lite",
            isolation=("namespaces", "landlock", "seccomp"),
        )
        self._verdict = verdict

    def several(self, calls: list[Call]) -> tuple[list[Record], float]:
        from kernels_eval.cluster.worker import several

        return several(self.run, calls)

    def run(self, task: KernelTask, candidate: Candidate, prepared: Prepared) -> Verdict:
        of = {"candidate_id": candidate.candidate_id, "task_id": task.task_id}
        return self._verdict.model_copy(update=of)


# -- where the time goes ---------------------------------------------------------------------------


class Watch:
    """Wall seconds by part of the work. Each moment counts once, for the innermost part that was
    entered."""

    def __init__(self, first: str) -> None:
        self.spent: dict[str, float] = {}
        self._inside = [first]
        self._since = time.perf_counter()

    def total(self) -> dict[str, float]:
        self._account()
        return dict(self.spent)

    def _account(self) -> None:
        now = time.perf_counter()
        self.spent[self._inside[-1]] = self.spent.get(self._inside[-1], 0.0) + now - self._since
        self._since = now

    @contextmanager
    def on(self, part: str) -> Iterator[None]:
        self._account()
        self._inside.append(part)
        try:
            yield
        finally:
            self._account()
            self._inside.pop()

    def each(self, part: str, items: Iterable[Any]) -> Generator[Any, None, None]:
        """The same items; the time that each takes to come counts for the part."""
        waiting = iter(items)
        while True:
            with self.on(part):
                item = next(waiting, self)
            if item is self:
                return
            yield item


def measured_by(
    watch: Watch, cpu: list[dict[str, float]], at_once: int = Pool.at_once
) -> type[Verification]:
    """The stage with workers that do nothing, and a watch on its parts. `cpu` gets two readings:
    before the plan and before publishing."""

    class WatchedPool(Pool):
        def __enter__(self) -> Pool:
            with watch.on("starting Ray"):
                return super().__enter__()

        def verify(
            self, pairs: Iterable[tuple[KernelTask, Candidate]]
        ) -> Generator[Verdict, None, None]:
            return watch.each("pool", super().verify(watch.each("reading", pairs)))

    class WatchedSnapshot(Snapshot):
        @contextmanager
        def journal(self, *arguments: Any, **options: Any) -> Iterator[Callable[[Any], None]]:
            with super().journal(*arguments, **options) as add:

                def watched(row: Any) -> None:
                    with watch.on("snapshot"):
                        add(row)

                yield watched

    class Watched(Verification):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            self.snapshot = WatchedSnapshot(
                self.snapshot.root, self.snapshot.stage, self.snapshot.fingerprint
            )

        def pool(self) -> Pool:
            sizes = {"workers": self.config.workers, "builders": self.config.builders}
            return WatchedPool(
                self.language, EvalConfig(), **sizes, builder=NoBuild, runner=NoRun, at_once=at_once
            )

        def plan(self) -> int:
            cpu.append(processor_s())
            with watch.on("plan"):
                return super().plan()

        def verify_chunk(self, number: int) -> dict[str, int]:
            with watch.on("stage"):
                return super().verify_chunk(number)

        def publish(self) -> SnapshotRef:
            cpu.append(processor_s())
            with watch.on("publish"):
                return super().publish()

    return Watched


class Memory(threading.Thread):
    """Samples the driver's resident memory every five seconds."""

    def __init__(self, done: Callable[[], int]) -> None:
        super().__init__(daemon=True)
        self.series: list[tuple[float, int, float]] = []  # seconds, verdicts, MiB
        self._done, self._over, self._since = done, threading.Event(), time.monotonic()

    def run(self) -> None:
        import psutil

        process = psutil.Process()
        while not self._over.wait(SAMPLE_EVERY_S):
            self.series.append(
                (
                    round(time.monotonic() - self._since, 1),
                    self._done(),
                    round(process.memory_info().rss / MIB, 1),
                )
            )

    def stop(self) -> list[tuple[float, int, float]]:
        self._over.set()
        self.join()
        return self.series


def slope(series: list[tuple[float, int, float]]) -> float | None:
    """MiB per 10,000 verdicts over the second half of a series, by least squares. None for fewer
    than four samples."""
    half = series[len(series) // 2 :]
    if len(half) < 4 or len({done for _, done, _ in half}) < 2:
        return None
    import numpy as np

    return round(
        float(np.polyfit([done for _, done, _ in half], [mib for _, _, mib in half], 1)[0])
        * 10_000,
        2,
    )


def processor_s() -> dict[str, float]:
    """Processor seconds of this process, and of those it started and that still live: Ray, its
    workers, the Prefect server."""
    import psutil

    found: dict[str, float] = {"driver": sum(psutil.Process().cpu_times()[:2])}
    for process in psutil.Process().children(recursive=True):
        try:
            command = " ".join(process.cmdline())
            name = next((name for word, name in PROCESSES.items() if word in command), "Ray")
            found[name] = found.get(name, 0.0) + sum(process.cpu_times()[:2])
        except psutil.Error:
            continue
    return found


PROCESSES = {
    "prefect": "Prefect server",
    "uvicorn": "Prefect server",
    "NoBuild": "build workers",
    "NoRun": "run workers",
}


def measure(
    root: Path, candidates: int, config: VerificationConfig, at_once: int = Pool.at_once
) -> dict[str, Any]:
    """Run the stage once over the generated snapshots under `root`; an earlier run's verdicts are
    removed first."""
    for old in ("verification", "prefect"):
        shutil.rmtree(root / old, ignore_errors=True)
    os.environ.pop("PREFECT_API_URL", None)
    os.environ["PREFECT_HOME"] = str(root / "prefect")
    from flows.config import PipelineConfig
    from flows.launch import embed

    embed(PipelineConfig(root=str(root)))
    from prefect import flow

    from tasks.policy import ProgressArtifact
    from tasks.progress import observed_by
    from tasks.verification.step import verify

    tasks, responses = inputs(str(root))
    watch, done, cpu = Watch("starting Prefect"), [0], []

    def count(stage: str, number: int, total: int, note: str) -> None:
        done[0] = number

    @flow(name="orchestration benchmark")
    def orchestrate() -> SnapshotRef:
        with (
            watch.on("Prefect"),
            observed_by(ProgressArtifact("benchmark", "share of the candidates that is done")),
            observed_by(count),
        ):
            return verify(
                responses.ref, tasks.ref, config, Language.CPP, measured_by(watch, cpu, at_once)
            )

    memory = Memory(lambda: done[0])
    memory.start()
    load_before, started = os.getloadavg(), time.perf_counter()
    snapshot = orchestrate().open()
    wall_s = time.perf_counter() - started
    series, peak_mib = memory.stop(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    seconds = watch.total()
    starting_s = seconds["starting Prefect"] + seconds["starting Ray"]
    ids = snapshot.read(columns=["candidate_id"])["candidate_id"]
    return {
        "candidates": candidates,
        "rows": len(ids),
        "unique_rows": ids.n_unique(),
        "parts": len(snapshot.parts()),
        "wall_s": round(wall_s, 1),
        "ms_per_candidate": round(1e3 * wall_s / candidates, 3),
        "ms_per_candidate_once_started": round(1e3 * (wall_s - starting_s) / candidates, 3),
        "ms_per_candidate_by_part": {
            name: round(1e3 * spent / candidates, 4) for name, spent in seconds.items()
        },
        "processor_s": {
            name: round(spent - cpu[0].get(name, 0.0), 1) for name, spent in cpu[1].items()
        },
        "peak_rss_mib": round(peak_mib, 1),
        "rss_mib_per_10000": slope(series),
        "rss_series": series,
        "cores": os.cpu_count(),
        "load_average": [round(load, 1) for load in (load_before[0], os.getloadavg()[0])],
        "config": (
            config.model_dump(mode="json", include={"workers", "builders", "chunk_size"})
            | {"at_once": at_once}
        ),
    }


def as_text(measured: dict[str, Any]) -> str:
    lines = [
        f"{name:<32} {measured[name]}"
        for name in measured
        if not isinstance(measured[name], dict | list)
    ]
    for name in ("ms_per_candidate_by_part", "processor_s"):
        lines += [f"{name}:", *(f"  {part:<30} {value}" for part, value in measured[name].items())]
    thinned = measured["rss_series"][:: max(1, len(measured["rss_series"]) // 20)]
    return "\n".join(
        [
            *lines,
            "seconds, verdicts, driver MiB:",
            *(f"  {seconds:>8} {done:>8} {mib:>8}" for seconds, done, mib in thinned),
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
