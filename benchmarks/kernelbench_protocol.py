"""The same candidates, verified the way KernelBench's public harness does it: what that costs, to
compare with ours.

    python -m benchmarks.kernelbench_protocol --tasks kernelbench.parquet --responses
    qwq32b_candidates.parquet --mode sequential \ --only OURS/verdicts.json --budget-s 400 --out DIR
    python -m benchmarks.kernelbench_protocol --out DIR --ours OURS/verdicts.json

Candidates run with no isolation, with your rights: only give it responses you would run.

Own code that follows the protocol of https://github.com/ScalingIntelligence/KernelBench
(scripts/eval_from_generations.py and the tolerance of its first version). Every candidate has a
fresh Python process. It imports torch, runs the reference's module and the candidate's in one
namespace (the candidate builds its extension with torch's own load_inline), constructs both models
under one seed, compares them in 5 trials on inputs that are made on the CPU and copied, and times
100 calls of each after 3 warm-ups. A process that exceeds its deadline is killed with its group.
Every candidate has its own TORCH_EXTENSIONS_DIR, so nothing that is built serves two of them.

`--mode sequential` is KernelBench's default: one candidate after the other, each builds and runs in
one process. `--mode parallel-builds` is its `build_cache`: all builds first, each in a process of
its own and many at a time, then the runs one after the other. As there, a build that fails leaves
no cache, so the run tries it again; the summary also says what that repetition cost.

In KernelBench's favour: a process imports torch and nothing else, one process less is started per
candidate, and it ends without clean-up. Against it: the reference's 100 calls, which KernelBench
times with each candidate in newer versions only. They are listed apart. Not done: flushing the L2
cache between calls, as newer versions do.

Writes `kernelbench_protocol.json` to --out after every candidate: a section for each mode, each
with its rows and its summary. Both modes may share one --out. The order of candidates is shuffled
with a fixed seed, so that a run cut short is still a fair sample.

`--ours verdicts.json` (what benchmarks.recorded_verdicts wrote) prints how much faster ours was, if
both have the same candidates: give ours `responses-MODE.parquet` of --out as --responses, and a
cold build cache.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

SEED = 42
CORRECTNESS_TRIALS = 5
TOLERANCE = 1e-2
WARM_UPS = 3
TIMING_TRIALS = 100

RESULT = "kernelbench_protocol.json"
MODES = ("sequential", "parallel-builds")
PHASES = ("import", "device", "load", "correctness", "timing", "reference_timing", "end")
DETAIL_CHARACTERS = 800


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--tasks",
        help=(
            "KernelBench tasks, Parquet; without it nothing runs, and --ours is compared with what"
            " --out holds"
        ),
    )
    parser.add_argument("--responses", help="recorded responses, Parquet")
    parser.add_argument("--out", help="a folder")
    parser.add_argument("--mode", choices=MODES, default="sequential")
    parser.add_argument(
        "--only",
        help=(
            "JSON list of objects with task_id and sample_index (a verdicts.json will do): exactly"
            " these"
        ),
    )
    parser.add_argument(
        "--limit",
        type=int,
        default=64,
        help="without --only: so many candidates, spread evenly over those with code",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for candidates in C++"
    )
    parser.add_argument(
        "--builders",
        type=int,
        default=len(os.sched_getaffinity(0)),
        help="builds at a time, with parallel-builds",
    )
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="deadline of one process, seconds"
    )
    parser.add_argument(
        "--budget-s",
        type=float,
        default=0.0,
        help="start no candidate (no build: half of it) after so long; 0: no limit",
    )
    parser.add_argument(
        "--grace-s",
        type=float,
        default=30.0,
        help="what still runs so long after the budget is killed and not counted",
    )
    parser.add_argument("--arch", help="TORCH_CUDA_ARCH_LIST; the device's own where not given")
    parser.add_argument(
        "--ours", help="verdicts.json of benchmarks.recorded_verdicts, to compare with"
    )
    parser.add_argument(
        "--ours-summary", help="its summary.json; the one beside --ours where not given"
    )
    parser.add_argument("--child", help=argparse.SUPPRESS)
    parser.add_argument("--report-fd", type=int, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        return run_child(Path(arguments.child), arguments.report_fd)
    if not arguments.out:
        parser.error("--out is needed")
    if bool(arguments.tasks) != bool(arguments.responses) or not (
        arguments.tasks or arguments.ours
    ):
        parser.error(
            "give --tasks and --responses to run candidates, or --ours to compare with an earlier"
            " run in --out"
        )
    if arguments.builders < 1:
        parser.error("--builders must be 1 or more")
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    interrupted = bool(arguments.tasks) and not run_candidates(arguments, out)
    result = read_result(out)
    if not result["modes"]:
        print(f"error: {out / RESULT} holds no run yet", file=sys.stderr)
        return 1
    print("\n".join(table(result)), flush=True)
    if arguments.ours:
        summary = (
            Path(arguments.ours_summary)
            if arguments.ours_summary
            else Path(arguments.ours).with_name("summary.json")
        )
        compared = compare(
            result["modes"],
            json.loads(Path(arguments.ours).read_text()),
            json.loads(summary.read_text()),
        )
        (out / "compared.json").write_text(json.dumps(compared, indent=2))
        print("\n" + "\n".join(comparison_lines(compared)), flush=True)
    return 130 if interrupted else 0


# --- candidates


@dataclass(frozen=True)
class Job:
    """One candidate: the source of its task's module and of its own."""

    task_id: str
    sample_index: int
    reference: str
    candidate: str

    @property
    def key(self) -> tuple[str, int]:
        return self.task_id, self.sample_index

    @property
    def folder(self) -> str:
        return f"{self.task_id}-{self.sample_index}".replace("/", "-")


def key_of(row: dict[str, Any]) -> tuple[str, int]:
    return row["task_id"], int(row["sample_index"])


def load_jobs(tasks: str, responses: str) -> list[Job]:
    """Every response that holds code and belongs to a task, in the order of sample, level and
    problem."""
    import polars as pl

    from tasks.sources import kernelbench
    from tasks.synthesis.parsing import parse_response

    references = {task.task_id: task.code for task in kernelbench.load(tasks)}
    recorded = pl.read_parquet(responses, columns=["level", "problem_id", "sample_id", "response"])
    found = []
    for row in recorded.sort("sample_id", "level", "problem_id").iter_rows(named=True):
        task_id = f"kernelbench/L{row['level']}/{row['problem_id']}"
        code = parse_response(row["response"]).code if task_id in references else None
        if code is not None:
            found.append(Job(task_id, row["sample_id"], references[task_id], code))
    return found


def choose(jobs: list[Job], only: list[dict[str, Any]] | None, limit: int) -> list[Job]:
    """The candidates named by `only`, else `limit` spread evenly over all; shuffled the same way
    every time."""
    if only is not None:
        wanted = {key_of(row) for row in only}
        chosen = [job for job in jobs if job.key in wanted]
    else:
        step = max(1.0, len(jobs) / max(limit, 1))
        chosen = [jobs[int(number * step)] for number in range(min(limit, len(jobs)))]
    random.Random(0).shuffle(chosen)
    return chosen


# --- runs


@dataclass(frozen=True)
class Settings:
    """`timeout_s` is the deadline of a process; from `budget_s` on (0: never) nothing new is
    started; `grace_s` later all is killed."""

    mode: str
    device: str
    builders: int = 1
    timeout_s: float = 300.0
    budget_s: float = 0.0
    grace_s: float = 30.0
    arch: str | None = None


def run_candidates(arguments: argparse.Namespace, out: Path) -> bool:
    """Run the chosen mode and write its section after every candidate. Returns whether it came to
    its end undisturbed."""
    only = json.loads(Path(arguments.only).read_text()) if arguments.only else None
    jobs = choose(load_jobs(arguments.tasks, arguments.responses), only, arguments.limit)
    if only is not None:
        left_out = len({key_of(row) for row in only}) - len(jobs)
        print(
            f"{len(jobs)} candidates; {left_out} of --only have no code or are not in the"
            " responses",
            flush=True,
        )
    if not jobs:
        raise SystemExit("error: no candidate to run")
    settings = Settings(
        mode=arguments.mode,
        device=arguments.device,
        builders=arguments.builders,
        timeout_s=arguments.timeout_s,
        budget_s=arguments.budget_s,
        grace_s=arguments.grace_s,
        arch=arguments.arch,
    )
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    others = read_result(out)["modes"]

    def save(section: dict[str, Any]) -> None:
        write_result(out, {"modes": others | {settings.mode: section}})

    done = True
    try:
        run_mode(jobs, settings, save)
    except KeyboardInterrupt:  # SIGTERM too
        print("interrupted; what was finished is kept", flush=True)
        done = False
    section = read_result(out)["modes"].get(settings.mode)
    if section:
        write_responses(
            arguments.responses, section["rows"], out / f"responses-{settings.mode}.parquet"
        )
    return done


def write_responses(responses: str, rows: list[dict[str, Any]], path: Path) -> None:
    """The recorded responses of these rows alone: what benchmarks.recorded_verdicts takes to verify
    exactly the same candidates."""
    import polars as pl

    done = {key_of(row) for row in rows}
    recorded = pl.read_parquet(responses)
    keys = zip(recorded["level"], recorded["problem_id"], recorded["sample_id"], strict=True)
    recorded.filter(
        pl.Series(
            [(f"kernelbench/L{level}/{problem}", sample) in done for level, problem, sample in keys]
        )
    ).write_parquet(path)


def run_mode(
    jobs: list[Job], settings: Settings, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """All jobs under the settings. `save` gets the section (rows, builds, summary) after every
    build and every run."""
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="kernelbench-"))
    processes = Processes(settings, scratch)
    try:
        facts = processes.facts()
        print(json.dumps(facts), flush=True)
        section = {
            "settings": asdict(settings) | {"arch": processes.arch},
            "machine": facts,
            "chosen": len(jobs),
            "builds": [],
            "build_wall_s": 0.0,
            "rows": [],
            "run_wall_s": 0.0,
        }

        def note(kind: str, done: int, total: int, row: dict[str, Any]) -> None:
            section["summary"] = summarise(section)
            save(section)
            split = ", ".join(
                f"{name} {row['seconds'][name]:.1f}"
                for name in PHASES
                if row["seconds"].get(name, 0) >= 0.05
            )
            name = f"{row['task_id']}#{row['sample_index']}"
            print(
                f"{time.monotonic() - began:6.1f} s  {kind} {done}/{total}  {name}  {row['status']}"
                f"  {row['wall_s']:.1f} s ({split})",
                flush=True,
            )

        ends_at = began + settings.budget_s if settings.budget_s else float("inf")
        killed_at = ends_at + settings.grace_s
        if settings.mode == "parallel-builds":
            stops_at = began + settings.budget_s / 2 if settings.budget_s else float("inf")
            jobs = _build_all(jobs, processes, section, note, stops_at, killed_at)
        _run_all(jobs, processes, section, note, ends_at, killed_at)
        section["summary"] = summarise(section)
        save(section)
        return section
    finally:
        processes.stop()
        shutil.rmtree(scratch, ignore_errors=True)


def _build_all(
    jobs: list[Job],
    processes: Processes,
    section: dict,
    note: Callable,
    stops_at: float,
    killed_at: float,
) -> list[Job]:
    """Import every candidate once, `builders` at a time. Returns the jobs whose build was tried, in
    their order."""

    def build(job: Job) -> dict[str, Any] | None:
        if time.monotonic() >= stops_at:
            return None
        outcome = processes.run("build", job, killed_at)
        if outcome and outcome["status"] != "built":
            shutil.rmtree(
                processes.extensions(job), ignore_errors=True
            )  # KernelBench does the same; a stale lock would block the run
        return outcome

    began = time.monotonic()
    with ThreadPoolExecutor(processes.settings.builders) as pool:
        futures = {pool.submit(build, job): job for job in jobs}
        try:
            for future in as_completed(futures):
                outcome, job = future.result(), futures[future]
                if outcome:
                    section["builds"].append(
                        {"task_id": job.task_id, "sample_index": job.sample_index} | outcome
                    )
                    section["build_wall_s"] = round(time.monotonic() - began, 3)
                    note("build", len(section["builds"]), len(jobs), section["builds"][-1])
        except BaseException:
            processes.stop()  # or leaving the pool would wait for them
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    tried = {key_of(row) for row in section["builds"]}
    return [job for job in jobs if job.key in tried]


def _run_all(
    jobs: list[Job],
    processes: Processes,
    section: dict,
    note: Callable,
    ends_at: float,
    killed_at: float,
) -> None:
    began = time.monotonic()
    for job in jobs:
        if time.monotonic() >= ends_at:
            break
        outcome = processes.run("run", job, killed_at)
        if outcome is None:
            break
        section["rows"].append({"task_id": job.task_id, "sample_index": job.sample_index} | outcome)
        section["run_wall_s"] = round(time.monotonic() - began, 3)
        note("run", len(section["rows"]), len(jobs), section["rows"][-1])
        shutil.rmtree(processes.folder(job), ignore_errors=True)


class Processes:
    """Starts the processes of candidates, ends them at their deadlines, reads what they report.
    `stop` ends all of them, for good."""

    def __init__(self, settings: Settings, scratch: Path) -> None:
        self.settings = settings
        self.scratch = scratch
        self.arch = settings.arch or os.environ.get("TORCH_CUDA_ARCH_LIST")
        self._running: set[subprocess.Popen] = set()
        self._lock = threading.Lock()
        self._stopped = False

    def folder(self, job: Job) -> Path:
        return self.scratch / job.folder

    def extensions(self, job: Job) -> Path:
        return self.folder(job) / "extensions"

    def facts(self) -> dict[str, Any]:
        """What the machine holds, asked in a process, so that this one has no CUDA context.
        SystemExit where candidates could not run."""
        folder = self.scratch / "facts"
        outcome = self._outcome({"kind": "facts"}, folder, self.settings.timeout_s)
        if outcome is None or outcome["status"] != "facts":
            raise SystemExit(f"error: {outcome['detail'] if outcome else 'stopped'}")
        facts = outcome["facts"]
        if not facts["ninja"]:
            raise SystemExit("error: torch finds no ninja, which load_inline needs: put it on PATH")
        if self.settings.device == "cuda":
            if not facts["device_name"]:
                raise SystemExit(
                    f"error: torch {facts['torch']} sees no CUDA device; --device cpu runs"
                    " candidates in C++"
                )
            if not facts["cuda_home"]:
                raise SystemExit(
                    "error: torch finds no CUDA toolkit: put nvcc on PATH or set CUDA_HOME"
                )
            self.arch = self.arch or facts["capability"]
        return facts

    def run(self, kind: str, job: Job, killed_at: float) -> dict[str, Any] | None:
        """Build a candidate or run it. None where the time of the whole run ended first; that
        candidate does not count."""
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reference.py").write_text(job.reference, encoding="utf-8")
        (folder / "candidate.py").write_text(job.candidate, encoding="utf-8")
        left_s = killed_at - time.monotonic()
        if left_s <= 0:
            return None
        outcome = self._outcome({"kind": kind}, folder, min(self.settings.timeout_s, left_s))
        return (
            None
            if outcome and outcome["status"] == "timeout" and left_s < self.settings.timeout_s
            else outcome
        )

    def stop(self) -> None:
        with self._lock:
            self._stopped = True
            for process in self._running:
                _kill_group(process)

    def _outcome(
        self, job: dict[str, Any], folder: Path, timeout_s: float
    ) -> dict[str, Any] | None:
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        path, log = folder / "job.json", folder / "log.txt"
        path.write_text(json.dumps(job | {"device": self.settings.device, "began": began}))
        report, report_fd = os.pipe()
        # -P: this file's folder is not on the candidate's path
        command = [
            sys.executable,
            "-P",
            str(Path(__file__).resolve()),
            "--child",
            str(path),
            "--report-fd",
            str(report_fd),
        ]
        try:
            with log.open("wb") as output, self._lock:
                if self._stopped:
                    return None
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT,
                    pass_fds=(report_fd,),
                    cwd=folder,
                    env=self._environment(folder),
                    process_group=0,
                )
                self._running.add(process)
            late = False
            try:
                process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                _kill_group(process)  # also what a candidate left behind
                process.wait()
                with self._lock:
                    self._running.discard(process)
            wall_s = time.monotonic() - began
            lines = _drain(report)
        finally:
            os.close(report)
            os.close(report_fd)
        if self._stopped:
            return None
        return read_outcome(
            lines, wall_s, "timeout" if late else "exit", process.returncode, _tail(log)
        )

    def _environment(self, folder: Path) -> dict[str, str]:
        """Ours, with every cache and every temporary file in the candidate's own folder."""
        environment = dict(os.environ)
        environment["TORCH_EXTENSIONS_DIR"] = str(folder / "extensions")
        environment["TORCHINDUCTOR_CACHE_DIR"] = str(folder / "inductor")
        environment["TRITON_CACHE_DIR"] = str(folder / "triton")
        environment["TMPDIR"] = str(folder / "tmp")
        environment["PATH"] = os.pathsep.join(
            [str(Path(sys.executable).parent), environment.get("PATH", os.defpath)]
        )  # ninja may be there
        if self.settings.device == "cuda" and self.arch:
            environment["TORCH_CUDA_ARCH_LIST"] = (
                self.arch
            )  # in builds and runs alike, or ninja would build again
        return environment


def _kill_group(process: subprocess.Popen) -> None:
    with suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)


def _drain(report: int) -> list[str]:
    """The lines that are in the pipe now. What an escaped process writes later is not waited
    for."""
    os.set_blocking(report, False)
    chunks: list[bytes] = []
    with suppress(BlockingIOError):
        while chunk := os.read(report, 1 << 16):
            chunks.append(chunk)
    return b"".join(chunks).decode("utf-8", "replace").splitlines()


def _tail(log: Path) -> str:
    with suppress(OSError), log.open("rb") as file:
        file.seek(max(0, log.stat().st_size - DETAIL_CHARACTERS))
        return file.read().decode("utf-8", "replace")
    return ""


def read_outcome(
    lines: list[str], wall_s: float, end: str, returncode: int, log_tail: str
) -> dict[str, Any]:
    """What a process was worth: its last report, the time it took, and, where it died before its
    verdict, how.

    `end` is "timeout" where the deadline killed it, else "exit". The time since its last report
    counts to the phase it was in.
    """
    report: dict[str, Any] = {"phase": "import", "seconds": {}, "status": None}
    for line in lines:
        with suppress(ValueError):
            read = json.loads(line)
            report = (
                read
                if isinstance(read, dict) and {"phase", "seconds", "status"} <= set(read)
                else report
            )
    seconds = dict(report["seconds"])
    rest = max(0.0, wall_s - sum(seconds.values()))
    last = "end" if report["status"] else report["phase"]
    seconds[last] = seconds.get(last, 0.0) + rest
    outcome = {name: value for name, value in report.items() if name not in ("phase", "seconds")}
    if report["status"] is None:
        if end == "timeout":
            outcome |= {
                "status": "timeout",
                "detail": f"killed in {report['phase']} after {wall_s:.0f} s",
            }
        else:
            status = "harness_error" if report["phase"] in ("import", "device") else "runtime_error"
            how = f"signal {-returncode}" if returncode < 0 else f"exit status {returncode}"
            outcome |= {"status": status, "detail": f"ended in {report['phase']} with {how}"}
    if outcome["status"] not in ("built", "correct", "facts"):
        outcome["log_tail"] = (
            # load_inline(verbose=True) prints the compiler's errors and raises without them
            log_tail
        )
    return outcome | {
        "seconds": {name: round(value, 3) for name, value in seconds.items()},
        "wall_s": round(wall_s, 3),
    }


def clipped(text: str) -> str:
    """The beginning and the end of a long text: a compiler's errors are at its end."""
    text = text.strip()
    return (
        text
        if len(text) <= DETAIL_CHARACTERS
        else f"{text[:200]} [...] {text[-(DETAIL_CHARACTERS - 200) :]}"
    )


# --- the process of one candidate


class Ended(Exception):
    """The verdict is known: a status and its detail."""

    def __init__(self, status: str, detail: str) -> None:
        super().__init__(detail)
        self.status = status


class Report:
    """Writes a JSON line to the report pipe at the start of every phase and at the end. `seconds`
    are those of finished phases."""

    def __init__(self, descriptor: int, began: float) -> None:
        self._descriptor = descriptor
        self._phase_began = began  # the first phase began where the parent started this process
        self.fields: dict[str, Any] = {
            "phase": "import",
            "seconds": {},
            "status": None,
            "detail": "",
        }

    @contextmanager
    def phase(self, name: str, failure: str) -> Iterator[None]:
        """Time a phase. Whatever is raised in it ends the candidate with the status `failure`,
        unless it is `Ended` already."""
        self.fields["phase"] = name
        self._write()
        try:
            yield
        except Ended:
            raise
        except BaseException as error:  # SystemExit too: a candidate may call sys.exit
            raise Ended(failure, f"{type(error).__name__} in {name}: {error}") from error
        finally:
            now = time.monotonic()
            seconds = self.fields["seconds"]
            seconds[name] = seconds.get(name, 0.0) + now - self._phase_began
            self._phase_began = now

    def finish(self, status: str, detail: str = "") -> None:
        self.fields |= {"status": status, "detail": clipped(detail)}
        self._write()

    def _write(self) -> None:
        os.write(self._descriptor, json.dumps(self.fields).encode() + b"\n")


def run_child(path: Path, descriptor: int) -> int:
    """The child's main: does what job.json says, reports, and ends at once, without the clean-up of
    an interpreter."""
    os.set_inheritable(descriptor, False)
    job = json.loads(path.read_text())
    report = Report(descriptor, job["began"])
    try:
        if job["kind"] == "facts":
            _report_facts(report, job["device"])
        elif job["kind"] == "build":
            _build(report, path.parent)
        else:
            _verify(report, path.parent, job["device"])
    except Ended as ended:
        report.finish(ended.status, str(ended))
    with suppress(BaseException):
        sys.stdout.flush()
        sys.stderr.flush()
    os._exit(0)


def _report_facts(report: Report, device: str) -> None:
    with report.phase("import", "harness_error"):
        import platform

        import torch
        from torch.utils import cpp_extension

    with report.phase("device", "harness_error"):
        there = device == "cuda" and torch.cuda.is_available()
        if there:
            torch.ones(1, device="cuda:0").sum().item()
        report.fields["facts"] = {
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "cuda_home": cpp_extension.CUDA_HOME,
            "ninja": cpp_extension.is_ninja_available(),
            "device_name": torch.cuda.get_device_name(0) if there else None,
            "capability": (
                ".".join(map(str, torch.cuda.get_device_capability(0))) if there else None
            ),
            "python": platform.python_version(),
            "cores": len(os.sched_getaffinity(0)),
        }
    report.finish("facts")


def _execute(path: Path, module: ModuleType) -> None:
    module.__file__ = str(path)
    exec(compile(path.read_text(encoding="utf-8"), str(path), "exec"), module.__dict__)


def _namespace() -> ModuleType:
    module = ModuleType("kernelbench_candidate")
    sys.modules[module.__name__] = module  # TorchScript and dataclasses look there
    return module


def _build(report: Report, folder: Path) -> None:
    """Run the candidate's module alone: what it builds at import is built."""
    with report.phase("import", "harness_error"):
        importlib.import_module("torch")
    with report.phase("load", "compile_error"):
        _execute(folder / "candidate.py", _namespace())
    report.finish("built")


def _verify(report: Report, folder: Path, device: str) -> None:
    with report.phase("import", "harness_error"):
        import torch

    with report.phase("device", "harness_error"):
        if device == "cuda":
            torch.cuda.set_device(0)
            torch.empty(1, device="cuda:0")
            torch.cuda.synchronize()

    def synchronise() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def seed(value: int) -> None:
        torch.manual_seed(value)
        if device == "cuda":
            torch.cuda.manual_seed(value)

    def placed(values: Any) -> list[Any]:
        return [
            value.cuda() if device == "cuda" and isinstance(value, torch.Tensor) else value
            for value in values
        ]

    module = _namespace()
    with report.phase("load", "task_error"):
        _execute(folder / "reference.py", module)
        reference_class, get_inputs = module.Model, module.get_inputs
        seed(SEED)
        arguments = placed(module.get_init_inputs())
        with torch.no_grad():
            seed(SEED)
            reference = reference_class(*arguments)
    with report.phase("load", "compile_error"):
        _execute(folder / "candidate.py", module)
        candidate_class = module.ModelNew
        synchronise()
    with report.phase("load", "runtime_error"), torch.no_grad():
        seed(SEED)
        candidate = candidate_class(*arguments)
        reference, candidate = (
            model.cuda() if device == "cuda" else model for model in (reference, candidate)
        )
        synchronise()

    with report.phase("correctness", "runtime_error"), torch.no_grad():
        torch.manual_seed(SEED)
        seeds = [int(torch.randint(0, 2**32 - 1, (1,)).item()) for _ in range(CORRECTNESS_TRIALS)]
        wrong = []
        for trial, trial_seed in enumerate(seeds):
            seed(trial_seed)
            inputs = placed(get_inputs())
            with _reference_fails():
                expected = reference(*inputs)
                synchronise()
            output = candidate(*inputs)
            synchronise()
            if expected.shape != output.shape:
                raise Ended(
                    "incorrect", f"shape {tuple(output.shape)}, expected {tuple(expected.shape)}"
                )
            if not torch.allclose(expected, output, atol=TOLERANCE, rtol=TOLERANCE):
                wrong.append(
                    f"trial {trial}: largest difference"
                    f" {torch.max(torch.abs(expected - output)).item():.6g}"
                )
        if wrong:
            raise Ended("incorrect", "; ".join(wrong))
        del expected, output, inputs

    # As in KernelBench, a failure from here on leaves the candidate correct, without a time.
    latency_ms = report.fields["latency_ms"] = {}
    measure = _event_times if device == "cuda" else _clock_times
    with report.phase("timing", "correct"):
        seed(SEED)
        inputs = placed(get_inputs())
        latency_ms["candidate"] = _statistics(measure(candidate, inputs))
    with report.phase("reference_timing", "correct"):
        latency_ms["reference"] = _statistics(measure(reference, inputs))
    report.fields["speedup"] = round(
        latency_ms["reference"]["mean"] / max(latency_ms["candidate"]["mean"], 1e-9), 4
    )
    report.finish("correct")


@contextmanager
def _reference_fails() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        raise Ended("task_error", f"reference: {type(error).__name__}: {error}") from error


def _event_times(model: Callable, inputs: list[Any]) -> list[float]:
    """Milliseconds of each of the timed calls, by CUDA events."""
    import torch

    for _ in range(WARM_UPS):
        model(*inputs)
        torch.cuda.synchronize()
    found = []
    for _ in range(TIMING_TRIALS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        model(*inputs)
        end.record()
        torch.cuda.synchronize()
        found.append(start.elapsed_time(end))
    return found


def _clock_times(model: Callable, inputs: list[Any]) -> list[float]:
    """Milliseconds of each of the timed calls, by the processor's clock."""
    for _ in range(WARM_UPS):
        model(*inputs)
    found = []
    for _ in range(TIMING_TRIALS):
        start = time.perf_counter()
        model(*inputs)
        found.append(1e3 * (time.perf_counter() - start))
    return found


def _statistics(times_ms: list[float]) -> dict[str, float]:
    return {
        "mean": round(statistics.fmean(times_ms), 6),
        "median": round(statistics.median(times_ms), 6),
        "std": round(statistics.pstdev(times_ms), 6),
        "min": round(min(times_ms), 6),
        "max": round(max(times_ms), 6),
    }


# --- results


def read_result(out: Path) -> dict[str, Any]:
    path = out / RESULT
    return json.loads(path.read_text()) if path.exists() else {"modes": {}}


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Whole or not at all, so that a run that is killed leaves the last whole file."""
    partial = out / f"{RESULT}.partial"
    partial.write_text(json.dumps(result, indent=1))
    partial.replace(out / RESULT)


def summarise(section: dict[str, Any]) -> dict[str, Any]:
    """Seconds of wall time, in all and a candidate, and where they went.

    With parallel builds the seconds of a candidate are the builds' wall time / builds + the runs'
    wall time / runs, since a run cut short has built more candidates than it ran. The median is
    that of the runs, with the same share of the builds' wall time.
    """
    rows, builds = section["rows"], section["builds"]
    parallel = section["settings"]["mode"] == "parallel-builds"
    summary: dict[str, Any] = {
        "mode": section["settings"]["mode"],
        "chosen": section["chosen"],
        "candidates": len(rows),
        "wall_s": round(section["build_wall_s"] + section["run_wall_s"], 1),
        "statuses": dict(Counter(row["status"] for row in rows)),
    }
    build_s = section["build_wall_s"] / len(builds) if builds else 0.0
    if rows:
        summary["s_per_candidate_mean"] = round(build_s + section["run_wall_s"] / len(rows), 3)
        summary["s_per_candidate_median"] = round(
            build_s + statistics.median(row["wall_s"] for row in rows), 3
        )
        summary["run_split_mean_s"] = _split(rows)
        built = [row["seconds"].get("load", 0.0) for row in rows if row["status"] == "correct"]
        summary["load_s_mean_of_correct"] = round(statistics.fmean(built), 3) if built else None
    if parallel:
        failed = {key_of(row) for row in builds if row["status"] != "built"}
        again = [row["wall_s"] for row in rows if key_of(row) in failed]
        summary |= {
            "builders": section["settings"]["builders"],
            "builds": len(builds),
            "builds_failed": len(failed),
            "build_wall_s": round(section["build_wall_s"], 1),
            "run_wall_s": round(section["run_wall_s"], 1),
            "build_wall_s_per_candidate": round(build_s, 3),
            "build_process_s_mean": (
                round(statistics.fmean(row["wall_s"] for row in builds), 3) if builds else None
            ),
            "builds_tried_again": len(again),
            "builds_tried_again_s": round(sum(again), 1),
        }
        if rows:
            summary["s_per_candidate_mean_without_trying_again"] = round(
                build_s + (section["run_wall_s"] - sum(again)) / len(rows), 3
            )
    return summary


def _split(rows: list[dict[str, Any]]) -> dict[str, float]:
    return {
        name: round(statistics.fmean(row["seconds"].get(name, 0.0) for row in rows), 3)
        for name in PHASES
    }


def table(result: dict[str, Any]) -> list[str]:
    """The summaries as Markdown: a column for each mode."""
    summaries = [result["modes"][mode]["summary"] for mode in MODES if mode in result["modes"]]
    labels = {
        "candidates": "candidates done",
        "chosen": "of chosen",
        "wall_s": "wall time, s",
        "s_per_candidate_mean": "s per candidate, mean",
        "s_per_candidate_median": "s per candidate, median",
        "s_per_candidate_mean_without_trying_again": (
            "s per candidate, mean, failed builds not tried again"
        ),
        "build_wall_s": "wall time of the builds, s",
        "builds": "builds",
        "builds_failed": "builds that failed",
        "builders": "builds at a time",
        "build_process_s_mean": "s of one build's process, mean",
        "run_wall_s": "wall time of the runs, s",
    }
    lines = [
        "| | " + " | ".join(summary["mode"] for summary in summaries) + " |",
        "| --- |" + " ---: |" * len(summaries),
    ]
    for name, label in labels.items():
        if any(name in summary for summary in summaries):
            lines.append(
                f"| {label} | "
                + " | ".join(str(summary.get(name, "-")) for summary in summaries)
                + " |"
            )
    for phase in PHASES:
        values = [summary.get("run_split_mean_s", {}).get(phase, "-") for summary in summaries]
        lines.append(
            f"| of a run, mean s: {phase.replace('_', ' ')} | "
            + " | ".join(map(str, values))
            + " |"
        )
    for status in sorted({status for summary in summaries for status in summary["statuses"]}):
        lines.append(
            f"| {status} | "
            + " | ".join(str(summary["statuses"].get(status, 0)) for summary in summaries)
            + " |"
        )
    return lines


# --- ours


def compare(
    modes: dict[str, Any], verdicts: list[dict[str, Any]], summary: dict[str, Any]
) -> dict[str, Any]:
    """KernelBench's wall seconds a candidate over ours, for each mode that ran the same candidates.

    Ours is the wall time of `summary` over the verdicts with code. A mode with other candidates
    than ours has only `candidates`, how many both have.
    """
    with_code = {key_of(row): row for row in verdicts if row["status"] != "no_code"}
    ours_s = summary["wall_s"] / max(len(with_code), 1)
    found: dict[str, Any] = {
        "ours_with_code": len(with_code),
        "ours_wall_s": summary["wall_s"],
        "modes": {},
    }
    for mode in MODES:
        if mode not in modes:
            continue
        rows = {key_of(row): row for row in modes[mode]["rows"]}
        common = rows.keys() & with_code.keys()
        found["modes"][mode] = {"candidates": len(common)}
        if not common or not common == rows.keys() == with_code.keys():
            continue
        theirs_s = modes[mode]["summary"]["s_per_candidate_mean"]
        pairs = Counter((rows[key]["status"], with_code[key]["status"]) for key in common)
        found["modes"][mode] |= {
            "kernelbench_s_per_candidate": theirs_s,
            "ours_s_per_candidate": round(ours_s, 3),
            "ratio": round(theirs_s / ours_s, 2),
            "verdicts": {
                f"{theirs} | ours {ours}": count for (theirs, ours), count in sorted(pairs.items())
            },
        }
    return found


def comparison_lines(compared: dict[str, Any]) -> list[str]:
    """The comparison in words, with what is compared."""
    lines = [
        "Compared: wall seconds a candidate with code, KernelBench's protocol over ours.",
        f"Ours: {compared['ours_wall_s']} s of wall time (workers' start included) for"
        f" {compared['ours_with_code']} candidates with code.",
    ]
    for mode, row in compared["modes"].items():
        if "ratio" not in row:
            lines.append(
                f"{mode}: {row['candidates']} candidates in common, but not the same ones in all:"
                f" verify responses-{mode}.parquet with ours, then compare"
            )
            continue
        lines.append(
            f"{mode}: {row['candidates']} candidates; {row['kernelbench_s_per_candidate']} s each"
            f" against {row['ours_s_per_candidate']} s = {row['ratio']} times"
        )
        lines += [f"    {count} x {name}" for name, count in row["verdicts"].items()]
    return lines


if __name__ == "__main__":
    sys.exit(main())
