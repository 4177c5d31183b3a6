"""What a search over parameters alone gains on recorded correct CUDA candidates, beside random
search with the same budget, and what the winners are against torch.compile.

    python -m benchmarks.parameter_search --tasks kernelbench.parquet --responses
    qwq32b_candidates.parquet --out DIR

`--per-task` candidates a task, the first that were recorded as correct, have a parameter and are
correct by our own verdict, `--limit` tasks in the order of the seed. Each is the start of an
evolution and of a random search of `--evaluations` verdicts each. Equal code is verified once, and
counts in the budget and the seconds of both. Means over candidates weigh each task once, and their
intervals are those of the tasks' means, for candidates of one task are alike.
Winners and starts are then measured `--rounds` times anew (`--compile`: beside torch.compile, too);
where `--operators` names schedule, which changes machine code, with more inputs, and the winner
once with compute-sanitizer. Proposals depend on the verdicts and the seed alone, and verdicts are
kept in DIR/part-*/verdicts.jsonl as they come: the same command resumes, also with other numbers of
processes. It stops after `--budget-s` with exit status 3 where something is left; the tables hold
the tasks that are finished.

`--gpus N` and `--lanes N` are processes: so many on each of so many GPUs. Each takes the next task
that no other has taken. What they do beside timing overlaps. While one times, the others of its GPU
wait: all of them come to the point where they would time, and time one after the other. Tasks of
more than 2 GB go to the first process of a GPU. `--report` prints the tables of what is there.
Needs torch, numpy, pydantic, psutil, polars and nvcc; no Ray, no Prefect.
`--language cpp` takes the bundled tasks instead, which tests the program without a GPU.
"""

from __future__ import annotations

import argparse
import fcntl
import functools
import json
import math
import os
import random
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace
from pathlib import Path
from statistics import geometric_mean
from typing import IO, Any, NamedTuple

import torch

from kernels_eval.config import BuildConfig, EvalConfig, TimingConfig
from kernels_eval.evaluator import Evaluator
from kernels_eval.parent.messages import Prepared
from kernels_eval.parent.prepare import Preparer
from kernels_eval.records import Candidate, KernelTask, Language, Status, Verdict, stable_hash
from tasks.search.config import SearchConfig
from tasks.search.gain import Interval, again, again_id, mean_gain, pair_of, result_of, summary_of
from tasks.search.parameters import LOOP_NAME, parameters_of, usage
from tasks.search.population import START, Member, Population
from tasks.sources import bundled, kernelbench
from tasks.synthesis.parsing import parse_response

METHODS = ("evolution", "random")
SHOWN = (1, 2, 4, 8, 16, 24, 32)
UNFINISHED = 3
AT_ONCE = 3
"""Most tasks of a process whose candidates are built while others run."""
LARGE = 2e9
"""Bytes of a task's inputs and outputs: memory does not hold many such references."""


class Begin(NamedTuple):
    """A candidate to begin with, in how many ways its parameters can be set, and those that are
    tried where it is not correct."""

    task: KernelTask
    code: str
    settings: int = 0
    others: tuple[str, ...] = ()


class OutOfTime(Exception):
    """The budget of this call is spent; what was verified is kept."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", help="KernelBench tasks, Parquet")
    parser.add_argument("--responses", help="recorded responses, Parquet")
    parser.add_argument("--language", default="cuda", choices=["cuda", "cpp"])
    parser.add_argument("--limit", type=int, default=48, help="tasks")
    parser.add_argument("--per-task", type=int, default=1, help="candidates of each task")
    parser.add_argument("--evaluations", type=int, default=32, help="of each search and task")
    parser.add_argument("--methods", default=",".join(METHODS))
    parser.add_argument("--only", help="task ids between commas")
    parser.add_argument(
        "--most-gb", type=float, default=16.0, help="leave out tasks of more, inputs and outputs"
    )
    parser.add_argument("--operators", default="parameters", help="such as schedule, of sm_90")
    parser.add_argument("--rounds", type=int, default=3, help="fresh measurements of each")
    parser.add_argument("--max-s", type=float, default=1.0, help="timing budget of a verdict, s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--builders", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--budget-s", type=float, default=500)
    parser.add_argument("--compile", action="store_true", help="measure beside torch.compile, too")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--lanes", type=int, default=1, help="processes of each GPU")
    parser.add_argument("--part", type=int, help="number of this process among all")
    parser.add_argument("--report", action="store_true", help="only print what is there")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget_s
    if arguments.report:
        return report(arguments)
    if arguments.part is None:
        return divided(arguments)
    begins = in_order(list(begins_of(arguments)), large=arguments.part < arguments.gpus)
    with Work(arguments, Path(arguments.out) / f"part-{arguments.part}", deadline) as work:
        try:
            work.run(begins)
        except OutOfTime:
            print(f"out of time after {len(work.known)} verdicts: run it again", flush=True)
            return UNFINISHED
    return 0


def divided(arguments: argparse.Namespace) -> int:
    """A process for each lane of each GPU; then the report."""
    parts = arguments.gpus * arguments.lanes
    builders = str(max(1, arguments.builders // parts))
    command = [sys.executable, "-m", "benchmarks.parameter_search", *sys.argv[1:]]
    command += ["--builders", builders, "--part"]
    processes = [
        subprocess.Popen(
            [*command, str(part)],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(part % arguments.gpus)},
        )
        for part in range(parts)
    ]
    statuses = [process.wait() for process in processes]
    return report(arguments) or max(statuses)


def in_order(begins: list[Begin], *, large: bool) -> list[Begin]:
    """The tasks that a process may take: large ones first, where it may, then those whose search
    takes longest."""
    small = [each for each in begins if bytes_of(each.task) <= LARGE]
    small.sort(key=lambda each: -each.settings)
    return [each for each in begins if large and bytes_of(each.task) > LARGE] + small


@functools.cache
def bytes_of(task: KernelTask) -> int:
    """Bytes of a task's inputs and its output, without memory for either; 0 where that cannot be
    told."""
    names: dict[str, Any] = {}
    try:
        with torch.device("meta"):
            exec(task.code, names)
            inputs = names["get_inputs"]()
            found = [*inputs, names["Model"](*names["get_init_inputs"]())(*inputs)]
    except (RuntimeError, NotImplementedError, TypeError, ValueError, KeyError):
        return 0
    return sum(each.nbytes for each in found if isinstance(each, torch.Tensor))


def begins_of(arguments: argparse.Namespace) -> Iterator[Begin]:
    """The candidates to begin with, in the order of the seed: the first of each task that have a
    parameter; those whose only parameters are loops where there are no others."""
    language, wanted = Language(arguments.language), arguments.per_task
    found: dict[str, dict[str, tuple[bool, Begin]]] = {}
    for task, text in recorded(arguments, language):
        code = parse_response(text).code
        parameters = parameters_of(code, language) if code else []
        if code and parameters:
            loops = all(each.name.startswith(LOOP_NAME) for each in parameters)
            settings = math.prod(len(each.values) for each in parameters)
            found.setdefault(task.task_id, {})[code] = (loops, Begin(task, code, settings))
    begins = {
        name: [begin for _, begin in sorted(each.values(), key=lambda pair: pair[0])]
        for name, each in found.items()
    }
    only = arguments.only and arguments.only.split(",")
    names = [name for name in sorted(begins) if not only or name in only]
    names = [name for name in names if bytes_of(begins[name][0].task) <= 1e9 * arguments.most_gb]
    random.Random(arguments.seed).shuffle(names)
    for name in names[: arguments.limit]:
        for place, first in enumerate(begins[name][:wanted]):
            others = begins[name][wanted:][place::wanted]
            yield first._replace(others=tuple(each.code for each in others))


def first_correct(begin: Begin, known: dict[str, dict[str, Any]]) -> Begin:
    """With the task's first candidate that the verifier calls correct or has not seen yet; as it is
    where there is none."""
    for code in (begin.code, *begin.others):
        row = known.get(code_key(begin.task, code))
        if row is None or row["status"] == Status.CORRECT:
            return begin._replace(code=code)
    return begin


def recorded(arguments: argparse.Namespace, language: Language) -> Iterator[tuple[KernelTask, str]]:
    """Tasks and responses that were recorded as correct; of the bundled tasks all responses."""
    if language is Language.CPP:
        for task in bundled.load():
            yield from ((task, text) for text in bundled.responses(task.name, language.value))
        return
    import polars as pl  # here: a machine with a GPU may lack pyarrow

    tasks = kernelbench_tasks(arguments.tasks)
    rows = pl.read_parquet(arguments.responses).filter("recorded_correct")
    for row in rows.sort("level", "problem_id", "sample_id").iter_rows(named=True):
        task_id = f"kernelbench/L{row['level']}/{row['problem_id']}"
        if task_id in tasks:
            yield tasks[task_id], row["response"]


def kernelbench_tasks(path: str) -> dict[str, KernelTask]:
    """KernelBench tasks of a Parquet file, by their ids."""
    import polars as pl

    made = map(kernelbench.task_of, pl.read_parquet(path).iter_rows(named=True))
    return {task.task_id: task for task in made}


# -- verdicts --------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A verdict that is wanted; `key` tells it from others of the same code. One that is `fresh`
    is reached under the protocol that confirms, and where `sanitized` with compute-sanitizer."""

    key: str
    task: KernelTask
    code: str
    fresh: bool = False
    sanitized: bool = False


class Line(NamedTuple):
    """One task on its way: the verdicts that it needs next, as they are built, and what comes
    after."""

    rest: Iterator[list[Asked]]
    asked: list[tuple[Asked, Candidate, Future[Prepared | None]]]

    @property
    def built(self) -> bool:
        return all(future.done() for *_, future in self.asked)

    @property
    def sanitized(self) -> bool:
        return any(each.sanitized for each, *_ in self.asked)


class TakingTurns(Evaluator):
    """Times while no other process with the same files is in a phase; all other phases happen at
    once. Whoever comes to time waits for all that are in a phase to come there, too, or to end.
    Nobody begins anew while somebody waits or times."""

    turns: Path
    waited_s = 0.0
    """of the last verdict"""

    def run(self, task: KernelTask, candidate: Candidate, prepared: Prepared) -> Verdict:
        self.waited_s, self.held, self.on_phase = 0.0, 0, self.take
        with self.turns.open("w") as self.file, self.turns.with_suffix(".gate").open("w") as gate:
            self.gate = gate
            return super().run(task, candidate, prepared)  # closing gives the turn back

    def take(self, phase: str) -> None:
        """Wait for the turn that a phase needs, where the last phase had the other kind: alone to
        time, beside others for all else."""
        wanted = fcntl.LOCK_EX if phase == "timing_s" else fcntl.LOCK_SH
        if wanted == self.held:
            return
        asked = time.monotonic()
        if wanted == fcntl.LOCK_EX:  # those who wait to time hold the gate together
            fcntl.flock(self.gate, fcntl.LOCK_SH)
            fcntl.flock(self.file, fcntl.LOCK_UN)
            fcntl.flock(self.file, fcntl.LOCK_EX)
        else:  # and the others pass it one by one, when nobody holds it
            fcntl.flock(self.file, fcntl.LOCK_UN)
            fcntl.flock(self.gate, fcntl.LOCK_UN)
            fcntl.flock(self.gate, fcntl.LOCK_EX)
            fcntl.flock(self.file, fcntl.LOCK_SH)
            fcntl.flock(self.gate, fcntl.LOCK_UN)
        self.held = wanted
        self.waited_s += time.monotonic() - asked


class Work:
    """Verdicts on this machine, without a cluster: threads build, one process after the other runs.
    Each verdict is a line of `verdicts.jsonl`."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, deadline: float) -> None:
        self.arguments, self.folder, self.deadline = arguments, folder, deadline
        self.language = Language(arguments.language)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "verdicts.jsonl"
        self.known = every_verdict(folder.parent)
        self.claims: list[IO[str]] = []
        self.threads = ThreadPoolExecutor(arguments.builders)
        self.local, self.preparers = threading.local(), list[Preparer]()
        self.evaluators: dict[EvalConfig, TakingTurns] = {}

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        for preparer in self.preparers:
            preparer.close()
        for evaluator in self.evaluators.values():
            evaluator.close()
        for claim in self.claims:
            claim.close()

    def claim(self, begin: Begin) -> bool:
        """Take a task, unless another process has it. What others have verified of it is known
        then."""
        folder = self.folder.parent / "claims"
        folder.mkdir(exist_ok=True)
        claim = (folder / stable_hash([begin.task.task_id, begin.code])).open("w")
        try:
            fcntl.flock(claim, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            claim.close()
            return False
        self.claims.append(claim)
        self.known |= every_verdict(self.folder.parent)
        return True

    def protocol(self, *, fresh: bool = False, sanitized: bool = False) -> EvalConfig:
        baselines = ["eager", "compile"] if fresh and self.arguments.compile else ["eager"]
        timing = {"max_s": self.arguments.max_s, "baselines": baselines}
        protocol = EvalConfig(
            timing=TimingConfig.model_validate(timing), build=BuildConfig(timeout_s=240)
        )
        if not fresh:
            return protocol
        return config_of(METHODS[0], self.arguments).confirming(protocol, sanitized=sanitized)

    def evaluator(self, asked: Asked) -> TakingTurns:
        """That of a protocol; the references that the others hold are given up."""
        protocol = self.protocol(fresh=asked.fresh, sanitized=asked.sanitized)
        for config, other in self.evaluators.items():
            if config != protocol:
                other.runner.drop_reference()
        if protocol not in self.evaluators:
            made = self.evaluators[protocol] = TakingTurns(self.language, protocol)
            gpu = (self.arguments.part or 0) % self.arguments.gpus
            made.turns = self.folder.parent / f"turns-{gpu}"
        return self.evaluators[protocol]

    def run(self, begins: list[Begin]) -> None:
        """All tasks that no other process takes, a few at a time: the first whose candidates are
        built. Raises OutOfTime."""
        processes = self.arguments.gpus * self.arguments.lanes
        at_once = max(1, min(AT_ONCE, len(begins) // processes))
        waiting, lines = deque(begins), list[Line]()
        while waiting or lines:
            while waiting and sum(not line.sanitized for line in lines) < at_once:
                begin = waiting.popleft()
                lines += self._next(self.needed(begin)) if self.claim(begin) else []
            # what takes minutes comes when no other verdict is left to reach
            left = [line for line in lines if not line.sanitized] or lines
            line = next((each for each in left if each.built), None)
            if line:
                self._judge(line)
                place = lines.index(line)
                lines[place : place + 1] = self._next(line.rest)
            elif left:
                wait([future for *_, future in left[0].asked], 1, FIRST_COMPLETED)

    def needed(self, begin: Begin) -> Iterator[list[Asked]]:
        """The verdicts that a task needs: its start, both searches, generation by generation, then
        the fresh measurements."""
        begin = first_correct(begin, self.known)
        while (key := code_key(begin.task, begin.code)) not in self.known:
            yield [Asked(key, begin.task, begin.code)]
            begin = first_correct(begin, self.known)
        methods = self.arguments.methods.split(",")
        searches = [populations([begin], each, self.arguments)[0] for each in methods]
        generation, more = 0, True
        while more:
            more = any([proposed(each, generation) for each in searches]) or not generation
            yield [
                Asked(code_key(each.task, member.code), each.task, member.code)
                for each in searches
                for member in each.members.values()
            ]
            for each in searches:
                settle(each, self.known)
            generation += 1
        fresh = [
            Asked(key, each.task, member.code, fresh=True, sanitized=sanitized)
            for each in searches
            for key, _, member, sanitized in again(each)
        ]
        yield [each for each in fresh if not each.sanitized]
        yield [each for each in fresh if each.sanitized]

    def _next(self, rest: Iterator[list[Asked]]) -> list[Line]:
        """A task with the next verdicts that are missing, being built; none where it is done."""
        for asked in rest:
            missing = {each.key: each for each in asked if each.key not in self.known}
            if missing:
                candidates = [(each, self._candidate(each)) for each in missing.values()]
                return [Line(rest, [(*pair, self._submit(*pair)) for pair in candidates])]
        return []

    def _submit(self, asked: Asked, candidate: Candidate) -> Future[Prepared | None]:
        return self.threads.submit(self._prepare, candidate, asked.task)

    def _judge(self, line: Line) -> None:
        """Reach verdicts of built candidates. Raises OutOfTime."""
        with self.file.open("a", encoding="utf-8") as journal:
            for asked, candidate, future in line.asked:
                prepared = future.result()
                if prepared is None or time.monotonic() > self.deadline:
                    raise OutOfTime
                evaluator = self.evaluator(asked)
                row = row_of(evaluator.run(asked.task, candidate, prepared))
                row["run_s"] -= evaluator.waited_s
                self.known[asked.key] = row
                journal.write(json.dumps({"key": asked.key, **row}) + "\n")
                journal.flush()
        left = self.deadline - time.monotonic()
        print(f"{line.asked[0][0].task.task_id}: {len(self.known)} verdicts, {left:.0f} s left")
        sys.stdout.flush()

    def _candidate(self, asked: Asked) -> Candidate:
        return Candidate(
            candidate_id=stable_hash(asked.key),
            task_id=asked.task.task_id,
            language=self.language,
            generator="search",
            code=asked.code,
        )

    def _prepare(self, candidate: Candidate, task: KernelTask) -> Prepared | None:
        if time.monotonic() > self.deadline:
            return None
        if not hasattr(self.local, "preparer"):
            self.local.preparer = Preparer(self.protocol())
            self.preparers.append(self.local.preparer)
        made: Prepared = self.local.preparer.prepare(candidate, task)
        return made


def row_of(verdict: Verdict) -> dict[str, Any]:
    """What is kept of a verdict."""
    timing = verdict.timing
    compiled = timing and timing.compiled
    kept = ("speedup", "speedup_lower", "speedup_upper", "candidate_ms", "clock_bound_ms")
    return {
        "status": verdict.status.value,
        "reason": verdict.reason.value,
        "detail": verdict.detail,
        "run_s": verdict.run_s,
        "phases": verdict.phases.model_dump(exclude_defaults=True) if verdict.phases else None,
        "device": verdict.device,
        **{name: getattr(timing, name) if timing else None for name in kept},
        "compiled": compiled.speedup if compiled else None,
    }


def read_verdicts(path: Path) -> dict[str, dict[str, Any]]:
    """The whole lines of a file, by key; a line that was cut by a kill is left out."""
    found = {}
    for line in path.read_text(encoding="utf-8").split("\n") if path.exists() else ():
        if line.endswith("}"):
            row = json.loads(line)
            found[row.pop("key")] = row
    return found


def every_verdict(out: Path) -> dict[str, dict[str, Any]]:
    """Those of all processes, of earlier calls with other numbers of them, too."""
    known: dict[str, dict[str, Any]] = {}
    for path in sorted(out.glob("part-*/verdicts.jsonl")):
        known |= read_verdicts(path)
    return known


# -- populations -----------------------------------------------------------------------------------


def code_key(task: KernelTask, code: str) -> str:
    """The id of a candidate: both searches measure equal code of a task once."""
    return stable_hash([task.task_id, code])


def config_of(method: str, arguments: argparse.Namespace) -> SearchConfig:
    names = ("evaluations", "seed", "rounds")
    asked = {"method": method, **{name: getattr(arguments, name) for name in names}}
    operators = arguments.operators.split(",")
    return SearchConfig.model_validate(asked | {"operators": operators, "patience": None})


def populations(
    begins: list[Begin], method: str, arguments: argparse.Namespace
) -> list[Population]:
    """One population a candidate, with its start."""
    config = config_of(method, arguments)
    made = []
    for each in begins:
        population = Population(each.task, Language(arguments.language), config)
        population.add(Member(code_key(each.task, each.code), each.code, 0, START))
        made.append(population)
    return made


def proposed(population: Population, generation: int) -> bool:
    """Add the members of a generation; whether there are any."""
    plans = list(population.plans(generation)) if generation else []
    for plan in plans:
        code, parents = plan.code or "", tuple(each.candidate_id for each in plan.parents)
        name = code_key(population.task, code)
        resource = usage(code, population.language)
        made = Member(name, code, plan.step, plan.operator, parents, plan.change, resource=resource)
        population.add(made)
    return bool(plans)


def settle(population: Population, known: dict[str, dict[str, Any]]) -> None:
    """Note the verdicts of members that have none yet."""
    for member in list(population.members.values()):
        row = known.get(code_key(population.task, member.code))
        if row and not member.settled:
            speedup, lower = row["speedup"] or 0.0, row["speedup_lower"] or 0.0
            timed = replace(member, speedup=speedup, lower=lower, device_s=row["run_s"])
            population.add(timed)


# -- the tables ------------------------------------------------------------------------------------


def report(arguments: argparse.Namespace) -> int:
    """Print the tables of the tasks that are finished, and write report.json; 3 where some are
    not."""
    known = every_verdict(Path(arguments.out))
    begins = [first_correct(each, known) for each in begins_of(arguments)]
    methods = arguments.methods.split(",")
    found = {name: replayed(populations(begins, name, arguments), known) for name in methods}
    done = [
        all(finished(each, known) for each in column)
        for column in zip(*found.values(), strict=True)
    ]
    fresh = {
        key: Interval(row["speedup"], row["speedup_lower"], row["speedup_upper"])
        for key, row in known.items()
        if row["speedup"]
    }
    told: dict[str, Any] = {"device": sorted({row["device"] for row in known.values()} - {""})}
    told["begun"], told["finished"] = len(begins), sum(done)
    for name, members in found.items():
        judged = [each for each, whole in zip(members, done, strict=True) if whole and each.start]
        results = [result_of(each, fresh) for each in judged]
        told[name] = summary_of(results, judged) | {"compiled": compiled(judged, known)}
        told[name]["gain"] = mean_of([(each["task_id"], each["gain"]) for each in results])
        used = [(each["task_id"], each["gain"] if each["improved"] else 1.0) for each in results]
        told[name]["used_gain"] = mean_of(used)
    if set(methods) == set(METHODS):
        told["against_random"] = compared(told)
    (Path(arguments.out) / "report.json").write_text(json.dumps(told, indent=1))
    print("\n".join(lines_of(told, methods)))
    return 0 if all(done) else UNFINISHED


def replayed(members: list[Population], known: dict[str, dict[str, Any]]) -> list[Population]:
    """The populations with all verdicts known so far."""
    for each in members:
        settle(each, known)
        generation = 1
        while proposed(each, generation):
            settle(each, known)
            if not all(member.settled for member in each.members.values()):
                break  # not finished
            generation += 1
    return members


def finished(population: Population, known: dict[str, dict[str, Any]]) -> bool:
    return all(each.settled for each in population.members.values()) and all(
        key in known for key, *_ in again(population)
    )


def mean_of(gains: list[tuple[str, float | None]]) -> dict[str, float]:
    """The geometric mean over tasks of the geometric means of their candidates' gains; those that
    are None are left out."""
    by_task: dict[str, list[float]] = {}
    for task_id, gain in gains:
        if gain:
            by_task.setdefault(task_id, []).append(gain)
    return mean_gain(list(map(geometric_mean, by_task.values())))._asdict()


def compared(told: dict[str, Any]) -> dict[str, float]:
    """Gain of evolution / gain of random search, over the candidates where both are confirmed."""
    first, second = (told[name]["results"] for name in METHODS)
    return mean_of(
        [
            (one["task_id"], one["gain"] and other["gain"] and one["gain"] / other["gain"])
            for one, other in zip(first, second, strict=True)
        ]
    )


def compiled(members: list[Population], known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Speed of the winners against their task under torch.compile, in the windows of the fresh
    measurements; the geometric mean of a winner's rounds."""
    speedups = list[tuple[str, float | None]]()
    for each in members:
        pair, rounds = pair_of(each), range(each.config.rounds)
        rows = [known[again_id(pair[1].candidate_id, n)] for n in rounds] if pair else []
        if rows and all(row["compiled"] for row in rows):
            mean = geometric_mean(row["compiled"] for row in rows)
            speedups.append((each.task.task_id, mean))
    faster = sum(speedup > 1 for _, speedup in speedups if speedup)
    return {"winners": len(speedups), "faster": faster, **mean_of(speedups)}


def lines_of(told: dict[str, Any], methods: list[str]) -> Iterator[str]:
    """The report as Markdown."""

    def form(one: dict[str, float]) -> str:
        return f"{one['value']:.3f} ({one['lower']:.3f} to {one['upper']:.3f})"

    def against(one: dict[str, Any]) -> str:
        return f"{form(one)}, {one['faster']} of {one['winners']} faster" if one["winners"] else ""

    done = f"{told['finished']} of {told['begun']} candidates done"
    yield f"Device: {', '.join(told['device'])}; {done}\n"
    yield "| | " + " | ".join(methods) + " |\n| --- |" + " ---: |" * len(methods)
    rows: dict[str, Callable[[dict[str, Any]], object]] = {
        "candidates whose start is correct": lambda one: one["tasks"],
        "their tasks": lambda one: len({each["task_id"] for each in one["results"]}),
        "confirmed gain, geometric mean (95 %)": lambda one: form(one["gain"]),
        "the same, winners that are not confirmed as 1": lambda one: form(one["used_gain"]),
        "improved with 95 % confidence": lambda one: one["improved"],
        "gained more than 5 %": lambda one: f"{one['share_above_5_percent']:.1%}",
        "evaluations": lambda one: one["evaluations"],
        "seconds of the verifier": lambda one: f"{one['device_s']:,.0f}",
        "winners against torch.compile": lambda one: against(one["compiled"]),
    }
    for name, value in rows.items():
        yield f"| {name} | " + " | ".join(str(value(told[method])) for method in methods) + " |"
    if "against_random" in told:
        yield f"\nEvolution against random search: {form(told['against_random'])}\n"
    steps = [step for step in SHOWN if step <= len(told[methods[0]]["curve"])]
    yield (
        "| best so far, by the search's own verdicts, after | " + " | ".join(map(str, steps)) + " |"
    )
    yield "| --- |" + " ---: |" * len(steps)
    for method in methods:
        values = (f"{told[method]['curve'][step - 1]:.3f}" for step in steps)
        yield f"| {method} | {' | '.join(values)} |"


if __name__ == "__main__":
    sys.exit(main())
