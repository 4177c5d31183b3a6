"""Kills random processes of a run, the driver among them, every few seconds, and compares its
verdicts with those of a calm run.

    python -m benchmarks.chaos --candidates 500 --seconds 120 --seed 7 --out DIR

Two runs of the verification stage over the same C++ candidates, each with snapshots and a build
cache of its own: one in peace, one in which every 2 to 4 seconds one process is sent SIGKILL,
chosen among all descendants: Ray's actors and servers, fork servers, children, compilers, and the
driver. A driver that is gone is started again with the same command; while it starts its workers
the clock of the killing stands still. When the time is over the run ends by itself.

Ends with 0 where both runs gave every candidate exactly one verdict (one row in the files
themselves), with the same status and reason, no process and no folder was left behind, and every
build that was kept loads. Needs a C++ compiler and no GPU. DIR keeps `report.json` and what
the drivers said.

The candidates come from few sources, so that most builds are served from the cache: kernels of the
test suite, each fault in many variants, and recorded responses. Nothing is timed, and every
deadline is generous: status and reason do not depend on how busy the machine is.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, deque
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from kernels_eval.config import BuildConfig, EvalConfig, LimitsConfig
from kernels_eval.errors import EvalError
from kernels_eval.records import Candidate, KernelTask, Language
from tasks.sources import bundled
from tasks.store.snapshot import Snapshot
from tasks.synthesis.parsing import parse_response
from tasks.tables import CANDIDATES, TASKS
from tasks.verification import stage
from tasks.verification.config import VerificationConfig
from tests.support.kernels import kernel_task, load_inline, module, task_source

CONFIG = VerificationConfig(
    eval=EvalConfig(
        time_correct=False,
        build=BuildConfig(timeout_s=300, capture_timeout_s=60),
        limits=LimitsConfig(load_s=60, run_s=20, memory_gb=2),
    ),
    screen=False,
    workers=2,
    builders=2,
    chunk_size=64,
)
BETWEEN_KILLS_S = (2.0, 4.0)
RUN_S = 3600
"""For either run. One that takes longer hangs."""
GONE_S = 30
POLL_S, RETRY_S, APPEARS_S = 0.05, 0.5, 5.0
CLEAR_ERROR = 3
"""What a driver ends with after an error that names its cause and how to go on."""

VICTIMS = {
    "build worker": 4,
    "kernel worker": 4,
    "fork server": 5,
    "keeper": 5,
    "child": 9,
    "compiler": 8,
    "driver": 2,
    "raylet": 1,
    "gcs": 1,
    "other process of Ray": 1,
}
"""How many of each kind are killed in two minutes, in random order; after that the same again."""
COMPILERS = frozenset({"g++", "c++", "gcc", "cc1plus", "as", "ld", "collect2"})


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--candidates", type=int, default=500)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--seed", type=int, default=7)
    parser.add_argument(
        "--out", help="a directory; two runs of an earlier time that are there are removed"
    )
    parser.add_argument("--drive", help=argparse.SUPPRESS)
    parser.add_argument("--aftermath", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.drive:
        return drive(arguments.drive)
    if arguments.aftermath:
        print(json.dumps(aftermath(Path(arguments.aftermath))))
        return 0
    if not arguments.out:
        parser.error("--out is needed")
    out = Path(arguments.out).absolute()
    report = measure(out, arguments.candidates, arguments.seconds, arguments.seed)
    (out / "report.json").write_text(json.dumps(asdict(report), indent=2))
    for fault in report.faults:
        print(f"fault: {fault}")
    return 0 if report.faults == [] else 1


# -- the candidates --------------------------------------------------------------------------------

AFFINE = [
    kernel_task(task_source(f"return x * 2.0 + 1.0  # {number}"), f"affine_{number}")
    for number in range(5)
]
WEIGHTED = kernel_task(
    task_source("return x * self.weight", init="self.weight = nn.Parameter(torch.randn(64))"),
    "weighted",
)
PAIR = kernel_task(task_source("return x * 2.0 + 1.0, x.sum(1)"), "pair")
INTEGERS = kernel_task(
    task_source("return x * 3 - 1", inputs="[torch.randint(0, 100, (64, 64))]"), "integers"
)
RAISES = kernel_task(task_source("raise ValueError('the reference is broken')"), "raises")
CONSTANT = kernel_task(task_source("return torch.zeros_like(x)"), "constant")
RECORDED = ("softmax_rows", "cumulative_sum", "linear_gelu")

SMALL = """
torch::Tensor affine(torch::Tensor x) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  for (int64_t i = 0; i < in.numel(); ++i)
    out.data_ptr<float>()[i] = in.data_ptr<float>()[i] * 2.0f + 1.0f;
  return out;
}
"""
BROKEN = "torch::Tensor broken(torch::Tensor x) {{\n  return x + not_declared_{0};\n}}\n"
UNDEFINED = (
    "torch::Tensor missing_{0}(torch::Tensor x);\ntorch::Tensor affine(torch::Tensor x) {{ return"
    " missing_{0}(x); }}\n"
)
LATE = "self.ext = " + load_inline()
CALLED = ("affine", "shifted", "with_nan", "rounded", "one_wrong", "aborts", "null_write", "leaves")
WRAPPED = {
    "wrong_shape": module("return ext.affine(x).flatten()"),
    "wrong_dtype": module("return ext.affine(x).double()"),
    "no_custom_kernel": module("return x * 2.0 + 1.0"),
    "called_once": module(
        "self.calls += 1\nreturn ext.affine(x) if self.calls == 1 else x * 2.0 + 1.0",
        init="self.calls = 0",
    ),
    "ornamental": module("ext.affine(x)\nreturn x * 2.0 + 1.0"),
    "input_mutated": module("y = ext.affine(x)\next.relu_in_place(x)\nreturn y"),
    "output_aliased": module(
        "return ext.affine_into(x, self.out)", init="self.out = torch.empty(64, 64)"
    ),
    "stale_cache": module(
        "y = ext.affine(x)\nself.first = y if self.first is None else self.first\nreturn"
        " self.first.clone()",
        init="self.first = None",
    ),
    "lazy_output": module(
        "return torch.Tensor._make_subclass(Lazy, ext.affine(x))",
        before="class Lazy(torch.Tensor):\n    pass",
    ),
    "forbidden_call": module("return ext.affine(x)", before="import subprocess"),
    "harness_tampering": module(
        "return ext.affine(x)", before="torch.allclose = lambda *a, **k: True"
    ),
    "global_state": module("return ext.affine(x)", before="torch.set_default_dtype(torch.float64)"),
    "syntax_error": "import torch\nclass ModelNew(torch.nn.Module:\n    pass\n",
    "no_module": module("return ext.affine(x)", before="import a_module_nobody_has"),
    "missing_model_new": module("return ext.affine(x)").replace("ModelNew", "Model"),
    "exception": module("raise ValueError('a shape I do not like')"),
    "built_in_the_constructor": module("return self.ext.affine(x)", init=LATE, extension="None"),
    "built_in_the_first_call": module(
        "return load().affine(x)",
        before=f"def load():\n    return {load_inline()}",
        extension="None",
    ),
}
SELDOM = {
    "spins": module("return ext.spins(x)"),  # each takes its whole deadline
    "out_of_memory": module("hold = bytearray(b'x') * (6 << 30)\nreturn ext.affine(x)"),
}
GAIN = "self.gain = nn.Parameter(torch.randn(64))"
OF_OTHER_TASKS = (
    (WEIGHTED, module("return ext.times_row(x, self.gain)", init=GAIN)),
    (
        WEIGHTED,
        module(
            "return ext.times_row(x, self.frozen)",
            init=f"{GAIN}\nself.frozen = self.gain.detach().clone()",
        ),
    ),
    (PAIR, module("return ext.affine(x), ext.row_sum(x)")),
    (PAIR, module("return ext.affine(x)")),
    (INTEGERS, module("return ext.integers(x)")),
    (RAISES, module("return ext.affine(x)")),
    (CONSTANT, module("return ext.affine(x)")),
)


def candidates(count: int) -> list[tuple[KernelTask, Candidate]]:
    """`count` candidates of every kind, each with an identity of its own; the same for the same
    count."""
    made: list[tuple[KernelTask, Candidate]] = [
        pair for name in RECORDED for pair in recorded(name)
    ]
    for number in range(
        count // 16
    ):  # each of these is a source that nobody else has: a real build
        code = module(
            "return ext.affine(x)",
            extension=load_inline(f"// {number}\n{SMALL}", name="small_ext"),
        )
        made.append(candidate(AFFINE[number % len(AFFINE)], code, number))
    for number in range(4):
        for name, source, function in (
            ("broken", BROKEN, "broken"),
            ("undefined", UNDEFINED, "affine"),
        ):
            extension = load_inline(source.format(number), name=f"{name}_ext")
            code = module(f"return ext.{function}(x)", extension=extension)
            made.append(candidate(AFFINE[number], code, number))
    made += [
        candidate(AFFINE[number], code, number) for number in range(2) for code in SELDOM.values()
    ]
    made += [candidate(AFFINE[number], None, number, "truncated") for number in range(len(AFFINE))]
    shared = [
        *OF_OTHER_TASKS,
        *((None, module(f"return ext.{name}(x)")) for name in CALLED),
        *((None, code) for code in WRAPPED.values()),
    ]
    number = 0
    while len(made) < count:
        task, code = shared[number % len(shared)]
        round_ = number // len(shared)
        made.append(
            candidate(task or AFFINE[round_ % len(AFFINE)], f"{code}\n# {round_}", 10 + number)
        )
        number += 1
    return made[:count]


def candidate(
    task: KernelTask, code: str | None, number: int, parse_reason: str | None = None
) -> Candidate:
    from kernels_eval.records import stable_hash

    found = stable_hash([task.task_id, code, parse_reason, number])
    made = Candidate(
        candidate_id=found,
        task_id=task.task_id,
        language=Language.CPP,
        generator="chaos",
        sample_index=number,
        code=code,
        parse_reason=parse_reason,
    )
    return task, made


def recorded(name: str) -> list[tuple[KernelTask, Candidate]]:
    (task,) = [task for task in bundled.load() if task.name == name]
    parsed = [parse_response(text) for text in bundled.responses(name, "cpp")]
    return [
        candidate(task, one.code, number, one.parse_reason) for number, one in enumerate(parsed)
    ]


def snapshots(root: Path) -> tuple[Snapshot, Snapshot]:
    return Snapshot(str(root), "tasks", "chaos"), Snapshot(str(root), "synthesis", "chaos")


def write(root: Path, count: int) -> None:
    """Finished snapshots of the tasks and candidates, and a build cache that holds headers and no
    builds."""
    shutil.rmtree(root, ignore_errors=True)
    (root / "tmp").mkdir(parents=True)
    made = candidates(count)
    tasks, responses = snapshots(root)
    tasks.append(
        [
            task.model_dump(mode="json")
            for task in {task.task_id: task for task, _ in made}.values()
        ],
        TASKS,
    )
    responses.append(
        [one.model_dump(mode="json") | {"request_key": one.candidate_id} for _, one in made],
        CANDIDATES,
    )
    for snapshot in (tasks, responses):
        snapshot.publish(config={})
    from kernels_eval.compile.extensions import Builder

    builder = Builder(CONFIG.eval.build)
    builder.warm()
    shutil.copytree(
        builder.prepared.root,
        root / "cache/headers" / builder.tools.key,
        copy_function=_link,
        symlinks=True,
    )


def _link(source: str, target: str) -> None:
    try:
        os.link(source, target)
    except OSError:
        shutil.copy2(source, target)


# -- one driver ------------------------------------------------------------------------------------


def drive(root: str) -> int:
    """The run itself, in this process: does what is left to do."""
    tasks, responses = snapshots(Path(root))
    try:
        stage.run(responses.ref, tasks.ref, CONFIG, Language.CPP)
    except EvalError as error:
        print(f"error: {error}", file=sys.stderr)
        return CLEAR_ERROR
    return 0


class Driver:
    """A driver as a user starts it; its process is `process`, what it says goes to a file."""

    def __init__(self, root: Path, number: int) -> None:
        self.log = root / f"driver-{number}.log"
        command = [sys.executable, "-m", "benchmarks.chaos", "--drive", str(root)]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen(
                command, env=environment(root), stdout=log, stderr=log, start_new_session=True
            )

    def last_words(self) -> str:
        """Its error; what it said last where it had none."""
        lines = [line for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return "\n".join([line for line in lines if line.startswith("error: ")][-1:] or lines[-3:])


def environment(root: Path) -> dict[str, str]:
    quiet = {"RAY_USAGE_STATS_ENABLED": "0", "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    return {
        **os.environ,
        **quiet,
        "CONCUR_CACHE": str(root / "cache"),
        "TMPDIR": str(root / "tmp"),
        "RAY_TMPDIR": "/tmp",
    }


# -- killing ---------------------------------------------------------------------------------------


def family() -> list[tuple[str, psutil.Process]]:
    """Every living descendant of this process with its kind. Orphans are among them: this process
    adopts them (`adopt_orphans`)."""
    commands: dict[int, str] = {}
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() == psutil.STATUS_ZOMBIE:
                continue
            parent, name = process.ppid(), process.name()
            command = commands[process.pid] = " ".join(process.cmdline())
            if "kernels_eval.sandbox.forkserver" in command:
                above = [
                    pid
                    for pid in (parent, _parent(parent))
                    if "sandbox.forkserver" in commands.get(pid, "")
                ]
                kind = ("fork server", "keeper", "child")[len(above)]
            else:
                kind = _kind(command, name)
        except psutil.Error:
            continue
        found.append((kind, process))
    return found


def _parent(pid: int) -> int:
    try:
        return psutil.Process(pid).ppid()
    except psutil.Error:
        return 0


def _kind(command: str, name: str) -> str:
    if "--drive" in command:
        return "driver"
    if "ray::BuildWorker" in command:
        return "build worker"
    if "ray::KernelWorker" in command:
        return "kernel worker"
    if name in COMPILERS:
        return "compiler"
    return {"raylet": "raylet", "gcs_server": "gcs"}.get(name, "other process of Ray")


def kill_one(chance: random.Random, deck: deque[str]) -> str | None:
    """SIGKILL for a random process of the kind that is next in `deck`. Returns the kind; None where
    nothing was there to kill.

    While a driver starts its workers, nothing is killed: it takes longer than the time between two
    kills. A kind that comes and goes, as children do, is waited for; where it does not come, it is
    its turn again later.
    """
    if not deck:
        deck += chance.sample(list(VICTIMS), sum(VICTIMS.values()), counts=list(VICTIMS.values()))
    deadline = time.monotonic() + APPEARS_S
    while time.monotonic() < deadline:
        found = family()
        if not {"kernel worker", "fork server"} <= {kind for kind, _ in found}:
            return None
        if victims := [process for kind, process in found if kind == deck[0]]:
            with suppress(psutil.Error):
                chance.choice(victims).kill()
                return deck.popleft()
        time.sleep(POLL_S)
    deck.rotate(-1)
    return None


def adopt_orphans() -> None:
    from kernels_eval.sandbox.syscalls import PR_SET_CHILD_SUBREAPER, prctl

    prctl(PR_SET_CHILD_SUBREAPER, 1)


def bury(but: int) -> None:
    """Take the exit status of adopted processes that have ended, so that they are gone. `but` is
    waited for by others."""
    for process in psutil.Process().children():
        try:
            if process.pid != but and process.status() == psutil.STATUS_ZOMBIE:
                os.waitpid(process.pid, os.WNOHANG)
        except (psutil.Error, ChildProcessError):
            continue


# -- a run -----------------------------------------------------------------------------------------


@dataclass
class Run:
    """What one run came to."""

    wall_s: float = 0.0
    verdicts: dict[str, list[str]] = field(default_factory=dict)
    """Status, reason and detail of every candidate."""
    rows: int = 0
    twice: list[str] = field(default_factory=list)
    """Candidates with more than one row in the files."""
    kills: dict[str, int] = field(default_factory=dict)
    killing_s: float = 0.0
    restarts: dict[str, int] = field(default_factory=dict)
    """How often the driver was started again, by how it had ended."""
    last_words: list[str] = field(default_factory=list)
    """The end of what drivers said that were not killed themselves."""
    left_processes: list[str] = field(default_factory=list)
    left_files: list[str] = field(default_factory=list)
    builds: dict[str, list[str]] = field(default_factory=dict)
    """Every build that was kept: its outcome, and whether the library loads."""


def run(root: Path, seconds: float, chance: random.Random) -> Run:
    """Drivers over the candidates in `root` until one has finished; kills for so many seconds.
    Raises TimeoutError for a run that hangs."""
    try:
        return _run(root, seconds, chance)
    finally:
        for _, process in family():
            process.kill()


def _run(root: Path, seconds: float, chance: random.Random) -> Run:
    seen, kills, restarts = Run(), Counter(), Counter()
    deck: deque[str] = deque()
    started = time.monotonic()
    driver = Driver(root, 0)
    killed_driver = False
    next_kill, spent_s = started + chance.uniform(*BETWEEN_KILLS_S), 0.0
    while True:
        bury(driver.process.pid)
        now = time.monotonic()
        if (code := driver.process.poll()) is not None:
            if code == 0:
                break
            how = (
                "killed"
                if killed_driver
                else "clear error"
                if code == CLEAR_ERROR
                else f"exit {code}"
            )
            restarts[how] += 1
            if how != "killed":
                seen.last_words.append(f"{how}: {driver.last_words()}")
            print(f"{now - started:6.1f} s  driver ended ({how})", flush=True)
            killed_driver = False
            driver = Driver(root, sum(restarts.values()))
        elif now - started > RUN_S:
            raise TimeoutError(
                f"the run in {root} did not end within {RUN_S} s: {driver.last_words()}"
            )
        elif spent_s < seconds and now >= next_kill:
            wait_s = RETRY_S
            if kind := kill_one(chance, deck):
                print(f"{now - started:6.1f} s  killed: {kind}", flush=True)
                killed_driver |= kind == "driver"
                kills[kind] += 1
                wait_s = chance.uniform(*BETWEEN_KILLS_S)
                spent_s += wait_s
            next_kill = now + wait_s
        time.sleep(POLL_S)
    seen.killing_s = round(spent_s, 1)
    seen.wall_s = round(time.monotonic() - started, 1)
    seen.kills, seen.restarts = dict(sorted(kills.items())), dict(sorted(restarts.items()))
    seen.left_processes = left_processes()
    _read(root, seen)
    return seen


def left_processes() -> list[str]:
    """Descendants that go on although the driver has ended, after some seconds to notice."""
    deadline = time.monotonic() + GONE_S
    while (left := family()) and time.monotonic() < deadline:
        bury(0)
        time.sleep(POLL_S)
    return [f"{kind} ({process.pid})" for kind, process in left]


def _read(root: Path, seen: Run) -> None:
    (finished,) = [found for found in _verification(root) if found.finished]
    rows = finished.read(columns=["candidate_id", "status", "reason", "detail"]).to_dicts()
    counted = Counter(row["candidate_id"] for row in rows)
    seen.rows, seen.twice = (
        len(rows),
        sorted(found for found, count in counted.items() if count > 1),
    )
    seen.verdicts = {
        row["candidate_id"]: [row["status"], row["reason"], row["detail"]] for row in rows
    }
    command = [sys.executable, "-m", "benchmarks.chaos", "--aftermath", str(root)]
    done = subprocess.run(
        command, env=environment(root), stdout=subprocess.PIPE, text=True, check=True
    )
    seen.left_files, seen.builds = json.loads(done.stdout.splitlines()[-1]).values()
    seen.left_files += sorted(
        str(path) for path in Path(finished.path).iterdir() if path.name.startswith(".")
    )


def _verification(root: Path) -> list[Snapshot]:
    from tasks.store.lookup import snapshots as found

    return found(str(root), stage.STAGE)


def aftermath(root: Path) -> dict[str, Any]:
    """Runs in the environment of the run: start what the next run would start, which sweeps; what
    is left then, and whether builds load."""
    from kernels_eval.compile.cache import BuildCache
    from kernels_eval.compile.extensions import Builder
    from kernels_eval.sandbox.server_handle import ForkServer

    shared = [
        path
        for path in Path("/dev/shm").glob("concur-*-*")
        if not psutil.pid_exists(int(path.name.split("-")[1]))
    ]
    ForkServer().close()
    builder = Builder(CONFIG.eval.build)
    ours = builder.work_root
    left = [*(root / "tmp").glob("concur-*"), *(path for path in shared if path.exists())]
    left += [path for path in (root / "cache").glob("work-*") if path != ours]
    left += [
        path for path in (root / "cache/headers").glob("*/.*") if not path.name.endswith(".lock")
    ]
    cache = BuildCache(root / "cache")
    return {
        "left": sorted(map(str, left)),
        "builds": {
            path.parent.name: _outcome(cache, path) for path in cache.root.glob("??/*/build.json")
        },
    }


def _outcome(cache: Any, record: Path) -> list[str]:
    import torch

    assert torch  # kernels find its libraries as their process does: loaded before them
    build = cache.find(record.parent.name)
    if build is None:
        return ["broken", "cannot be read"]
    if not build.ok:
        return [build.reason, build.log.split("\n")[0]]
    try:
        ctypes.CDLL(build.path)
    except OSError as error:
        return ["ok", str(error).split(": ", 1)[-1]]
    return ["ok", "loads"]


# -- both, compared --------------------------------------------------------------------------------


@dataclass
class Report:
    candidates: int
    seconds: float
    seed: int
    calm: Run
    chaos: Run
    differences: list[str]
    faults: list[str]
    """Why this is no success; empty where it is one."""


def measure(out: Path, count: int, seconds: float, seed: int) -> Report:
    adopt_orphans()
    chance = random.Random(seed)
    write(out / "calm", count)
    calm = run(out / "calm", 0, chance)
    print(f"the calm run took {calm.wall_s} s", flush=True)
    write(out / "chaos", count)
    chaos = run(out / "chaos", seconds, chance)
    return compared(count, seconds, seed, calm, chaos)


def compared(count: int, seconds: float, seed: int, calm: Run, chaos: Run) -> Report:
    differences = []
    for found in sorted({*calm.verdicts, *chaos.verdicts}):
        one, other = (
            calm.verdicts.get(found, ["none", "", ""]),
            chaos.verdicts.get(found, ["none", "", ""]),
        )
        if one[:2] != other[:2]:
            differences.append(
                f"{found}: {'/'.join(one[:2])} ({one[2]}) when calm, {'/'.join(other[:2])}"
                f" ({other[2]}) in chaos"
            )
    builds = [
        key
        for key in sorted({*calm.builds, *chaos.builds})
        if calm.builds.get(key) != chaos.builds.get(key)
    ]
    faults = [f"{len(differences)} verdicts differ"] if differences else []
    for name, seen in (("calm", calm), ("chaos", chaos)):
        faults += [f"{name}: {seen.rows} rows for {count} candidates"] if seen.rows != count else []
        faults += [f"{name}: two rows for {seen.twice}"] if seen.twice else []
        faults += (
            [f"{name}: processes left: {', '.join(seen.left_processes)}"]
            if seen.left_processes
            else []
        )
        faults += [f"{name}: files left: {', '.join(seen.left_files)}"] if seen.left_files else []
    faults += [
        f"build {key}: {calm.builds.get(key)} when calm, {chaos.builds.get(key)} in chaos"
        for key in builds
    ]
    if chaos.killing_s < seconds:
        faults.append(
            f"the run was over after {chaos.killing_s} s of {seconds:g} s of killing: it needs more"
            " candidates"
        )
    return Report(count, seconds, seed, calm, chaos, differences, faults)


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    sys.exit(main())
