"""The same candidates, verified the way KernelBench's public harness does it: what that costs, to
compare with ours.

    python -m benchmarks.kernelbench_protocol --tasks kernelbench.parquet --responses
    qwq32b_candidates.parquet --limit 64 --out DIR
    python -m benchmarks.kernelbench_protocol --out DIR --ours OURS/verdicts.json

Candidates run with no isolation, with your rights: only give it responses you would run.

Own code that follows the protocol of https://github.com/ScalingIntelligence/KernelBench
(scripts/eval_from_generations.py and the tolerance of its first version). One candidate after the
other, each in a fresh Python process. It imports torch, runs the reference's module and the
candidate's in one namespace (the candidate builds its extension with torch's own load_inline),
constructs both models under one seed, compares them in 5 trials on inputs that are made on the CPU
and copied, and times 100 calls of each after 3 warm-ups. A process that exceeds its deadline is
killed with its group. Every candidate has its own TORCH_EXTENSIONS_DIR, so nothing that is built
serves two of them.

In KernelBench's favour: a process imports torch and nothing else, one process less is started per
candidate, and it ends without clean-up. Against it: the reference's 100 calls, which KernelBench
times with each candidate in newer versions only. They are listed apart. Not done: flushing the L2
cache between calls, as newer versions do, and building all candidates first (its `build_cache`).

Writes `kernelbench_protocol.json` to --out after every candidate. The order of candidates is
shuffled with a fixed seed, so that a run ended by SIGTERM or Ctrl-C is still a fair sample.

`--ours verdicts.json` (what benchmarks.recorded_verdicts wrote, with its summary.json beside it)
prints how much faster ours was, if both have the same candidates: give ours `responses.parquet` of
--out as --responses, and a cold build cache.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

SEED = 42
CORRECTNESS_TRIALS = 5
TOLERANCE = 1e-2
WARM_UPS = 3
TIMING_TRIALS = 100

RESULT = "kernelbench_protocol.json"
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
    parser.add_argument(
        "--limit",
        type=int,
        default=64,
        help="so many candidates, spread evenly over those with code",
    )
    parser.add_argument(
        "--device", choices=("cuda", "cpu"), default="cuda", help="cpu: for candidates in C++"
    )
    parser.add_argument(
        "--timeout-s", type=float, default=300.0, help="deadline of one process, seconds"
    )
    parser.add_argument(
        "--ours", help="verdicts.json of benchmarks.recorded_verdicts, to compare with"
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
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    interrupted = bool(arguments.tasks) and not run_candidates(arguments, out)
    path = out / RESULT
    if not path.exists():
        print(f"error: {path} holds no run yet", file=sys.stderr)
        return 1
    result = json.loads(path.read_text())
    print(json.dumps(result["summary"], indent=2), flush=True)
    if arguments.ours:
        verdicts = Path(arguments.ours)
        summary = verdicts.with_name("summary.json")
        compared = compare(
            result, json.loads(verdicts.read_text()), json.loads(summary.read_text())
        )
        (out / "compared.json").write_text(json.dumps(compared, indent=2))
        print(json.dumps(compared, indent=2), flush=True)
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


def choose(jobs: list[Job], limit: int) -> list[Job]:
    """`limit` candidates spread evenly over all; shuffled the same way every time."""
    step = max(1.0, len(jobs) / max(limit, 1))
    chosen = [jobs[int(number * step)] for number in range(min(limit, len(jobs)))]
    random.Random(0).shuffle(chosen)
    return chosen


# --- runs


def run_candidates(arguments: argparse.Namespace, out: Path) -> bool:
    """Run the chosen candidates and write the result after each. Returns whether the run came to
    its end undisturbed."""
    jobs = choose(load_jobs(arguments.tasks, arguments.responses), arguments.limit)
    if not jobs:
        raise SystemExit("error: no candidate to run")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    done = True
    try:
        run(jobs, arguments.device, arguments.timeout_s, lambda result: write_result(out, result))
    except KeyboardInterrupt:  # SIGTERM too
        print("interrupted; what was finished is kept", flush=True)
        done = False
    if (path := out / RESULT).exists():
        rows = json.loads(path.read_text())["rows"]
        write_responses(arguments.responses, rows, out / "responses.parquet")
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


def run(
    jobs: list[Job], device: str, timeout_s: float, save: Callable[[dict[str, Any]], None]
) -> dict[str, Any]:
    """Verify all jobs, one after the other. `save` gets the result after every one: its rows, its
    summary and the machine's facts."""
    began = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix="kernelbench-"))
    processes = Processes(device, timeout_s, scratch)
    try:
        facts = processes.facts()
        print(json.dumps(facts), flush=True)
        result: dict[str, Any] = {"machine": facts, "chosen": len(jobs), "rows": []}
        runs_began = time.monotonic()
        for number, job in enumerate(jobs, 1):
            row: dict[str, Any] = {"task_id": job.task_id, "sample_index": job.sample_index}
            row |= processes.run(job)
            result["rows"].append(row)
            result["wall_s"] = round(time.monotonic() - runs_began, 3)
            result["summary"] = summarise(result)
            save(result)
            split = ", ".join(
                f"{name} {row['seconds'][name]:.1f}"
                for name in PHASES
                if row["seconds"].get(name, 0) >= 0.05
            )
            print(
                f"{time.monotonic() - began:6.1f} s  {number}/{len(jobs)}"
                f"  {row['task_id']}#{row['sample_index']}  {row['status']}"
                f"  {row['wall_s']:.1f} s ({split})",
                flush=True,
            )
            shutil.rmtree(processes.folder(job), ignore_errors=True)
        return result
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


class Processes:
    """Starts the processes of candidates, ends them at their deadlines, reads what they report."""

    def __init__(self, device: str, timeout_s: float, scratch: Path) -> None:
        self.device = device
        self.timeout_s = timeout_s
        self.scratch = scratch
        self.arch = os.environ.get("TORCH_CUDA_ARCH_LIST")

    def folder(self, job: Job) -> Path:
        return self.scratch / job.folder

    def facts(self) -> dict[str, Any]:
        """What the machine holds, asked in a process, so that this one has no CUDA context.
        SystemExit where candidates could not run."""
        outcome = self._outcome("facts", self.scratch / "facts")
        if outcome["status"] != "facts":
            raise SystemExit(f"error: {outcome['detail']}")
        facts: dict[str, Any] = outcome["facts"]
        if not facts["ninja"]:
            raise SystemExit("error: torch finds no ninja, which load_inline needs: put it on PATH")
        if self.device == "cuda":
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

    def run(self, job: Job) -> dict[str, Any]:
        folder = self.folder(job)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "reference.py").write_text(job.reference, encoding="utf-8")
        (folder / "candidate.py").write_text(job.candidate, encoding="utf-8")
        return self._outcome("run", folder)

    def _outcome(self, kind: str, folder: Path) -> dict[str, Any]:
        temporary = folder / "tmp"
        temporary.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        path, log = folder / "job.json", folder / "log.txt"
        path.write_text(json.dumps({"kind": kind, "device": self.device, "began": began}))
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
            with log.open("wb") as output:
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
            late = False
            try:
                process.wait(self.timeout_s)
            except subprocess.TimeoutExpired:
                late = True
            finally:
                _kill_group(process)  # also what a candidate left behind
                process.wait()
            wall_s = time.monotonic() - began
            lines = _drain(report)
        finally:
            os.close(report)
            os.close(report_fd)
        end = "timeout" if late else "exit"
        return read_outcome(lines, wall_s, end, process.returncode, _tail(log))

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
        if self.device == "cuda" and self.arch:
            environment["TORCH_CUDA_ARCH_LIST"] = self.arch
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
    if outcome["status"] not in ("correct", "facts"):
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


def write_result(out: Path, result: dict[str, Any]) -> None:
    """Whole or not at all, so that a run that is killed leaves the last whole file."""
    partial = out / f"{RESULT}.partial"
    partial.write_text(json.dumps(result, indent=1))
    partial.replace(out / RESULT)


def summarise(result: dict[str, Any]) -> dict[str, Any]:
    """Seconds of wall time, in all and a candidate, and where they went."""
    rows = result["rows"]
    built = [row["seconds"].get("load", 0.0) for row in rows if row["status"] == "correct"]
    return {
        "chosen": result["chosen"],
        "candidates": len(rows),
        "wall_s": round(result["wall_s"], 1),
        "statuses": dict(Counter(row["status"] for row in rows)),
        "s_per_candidate_mean": round(result["wall_s"] / len(rows), 3),
        "s_per_candidate_median": round(statistics.median(row["wall_s"] for row in rows), 3),
        "split_mean_s": {
            name: round(statistics.fmean(row["seconds"].get(name, 0.0) for row in rows), 3)
            for name in PHASES
        },
        "load_s_mean_of_correct": round(statistics.fmean(built), 3) if built else None,
    }


def compare(
    result: dict[str, Any], verdicts: list[dict[str, Any]], summary: dict[str, Any]
) -> dict[str, Any]:
    """KernelBench's wall seconds a candidate over ours, where both ran the same candidates.

    Ours is the wall time of `summary`, workers' start included, over the verdicts with code.
    SystemExit where the candidates are others.
    """
    rows = {key_of(row): row for row in result["rows"]}
    with_code = {key_of(row): row for row in verdicts if row["status"] != "no_code"}
    if rows.keys() != with_code.keys():
        raise SystemExit(
            f"error: {len(rows.keys() & with_code.keys())} candidates in common, but not the same"
            " ones in all: verify responses.parquet with ours, then compare"
        )
    ours_s = summary["wall_s"] / len(with_code)
    theirs_s = result["summary"]["s_per_candidate_mean"]
    pairs = Counter((row["status"], with_code[key]["status"]) for key, row in rows.items())
    return {
        "candidates": len(rows),
        "kernelbench_s_per_candidate": theirs_s,
        "ours_s_per_candidate": round(ours_s, 3),
        "ratio": round(theirs_s / ours_s, 2),
        "verdicts": {
            f"{theirs} | ours {ours}": count for (theirs, ours), count in sorted(pairs.items())
        },
    }


if __name__ == "__main__":
    sys.exit(main())
