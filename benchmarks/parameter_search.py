"""What a search over parameters alone gains on recorded correct CUDA candidates, beside random
search with the same budget, and what the winners are against torch.compile.

    python -m benchmarks.parameter_search --tasks kernelbench.parquet --responses
    qwq32b_candidates.parquet --out DIR

One candidate a task (`--limit`), the first that was recorded as correct and has a parameter; each
is the start of an evolution and of a random search of `--evaluations` verdicts each. Equal code is
verified once, and counts in the budget and the device-seconds of both. Winners and starts are then
measured `rounds` times anew, and once more beside torch.compile (`--compile`); where `--operators`
names schedule, which changes machine code, with more inputs and compute-sanitizer. Proposals depend
on the verdicts and the seed alone, and verdicts are kept as they come: the same command resumes. It
stops after `--budget-s` with exit status 3 where something is left. `--gpus N` divides the tasks
over so many GPUs, a process each; `--report` prints the tables of what is there. Needs torch,
numpy, pydantic, psutil, polars and nvcc; no Ray, no Prefect. `--language cpp` takes the bundled
tasks instead, which tests the program without a GPU.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from kernels_eval.config import BuildConfig, EvalConfig, TimingConfig
from kernels_eval.evaluator import Evaluator
from kernels_eval.parent.prepare import Prepared, Preparer
from kernels_eval.records import Candidate, KernelTask, Language, Verdict, stable_hash
from tasks.search.config import SearchConfig
from tasks.search.gain import Interval, again, mean_gain, pair_of, result_of, summary_of
from tasks.search.parameters import LOOP_NAME, parameters_of, usage
from tasks.search.population import START, Member, Population
from tasks.sources import bundled, kernelbench
from tasks.synthesis.parsing import parse_response

METHODS = ("evolution", "random")
SHOWN = (1, 2, 4, 8, 16, 24, 32)
UNFINISHED = 3


class Begin(NamedTuple):
    """A candidate to begin with."""

    task: KernelTask
    code: str


class OutOfTime(Exception):
    """The budget of this call is spent; what was verified is kept."""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", help="KernelBench tasks, Parquet")
    parser.add_argument("--responses", help="recorded responses, Parquet")
    parser.add_argument("--language", default="cuda", choices=["cuda", "cpp"])
    parser.add_argument("--limit", type=int, default=48, help="candidates, one a task")
    parser.add_argument("--evaluations", type=int, default=32, help="of each search and task")
    parser.add_argument("--operators", default="parameters", help="such as schedule, of sm_90")
    parser.add_argument("--max-s", type=float, default=1.0, help="timing budget of a verdict, s")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--builders", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("--budget-s", type=float, default=500)
    parser.add_argument("--compile", action="store_true", help="measure beside torch.compile, too")
    parser.add_argument("--gpus", type=int, default=1)
    parser.add_argument("--part", default="0/1", help="this process's share, such as 1/4")
    parser.add_argument("--report", action="store_true", help="only print what is there")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget_s
    if arguments.report:
        return report(arguments)
    if arguments.gpus > 1:
        return divided(arguments)
    part, parts = map(int, arguments.part.split("/"))
    begins = list(begins_of(arguments))[part::parts]
    with Work(arguments, Path(arguments.out) / f"part-{part}-of-{parts}", deadline) as work:
        try:
            work.run(begins)
        except OutOfTime:
            print(f"out of time after {len(work.known)} verdicts: run it again", flush=True)
            return UNFINISHED
    return report(arguments) if parts == 1 else 0


def divided(arguments: argparse.Namespace) -> int:
    """One process for each GPU, each with its part of the tasks; then the report."""
    builders = str(max(1, arguments.builders // arguments.gpus))
    command = [sys.executable, "-m", "benchmarks.parameter_search", *sys.argv[1:]]
    command += ["--gpus", "1", "--builders", builders, "--part"]
    processes = [
        subprocess.Popen(
            [*command, f"{number}/{arguments.gpus}"],
            env={**os.environ, "CUDA_VISIBLE_DEVICES": str(number)},
        )
        for number in range(arguments.gpus)
    ]
    statuses = [process.wait() for process in processes]
    return max(statuses) or report(arguments)


def begins_of(arguments: argparse.Namespace) -> Iterator[Begin]:
    """The candidates to begin with, by task id: the first of each task that has a parameter; one
    whose only parameters are loops where there is no other."""
    language = Language(arguments.language)
    best: dict[str, tuple[bool, Begin]] = {}
    for task, text in recorded(arguments, language):
        code = parse_response(text).code
        found = parameters_of(code, language) if code else []
        sized = any(not each.name.startswith(LOOP_NAME) for each in found)
        if code and found and (task.task_id not in best or (sized and not best[task.task_id][0])):
            best[task.task_id] = (sized, Begin(task, code))
    yield from [best[name][1] for name in sorted(best)][: arguments.limit]


def recorded(arguments: argparse.Namespace, language: Language) -> Iterator[tuple[KernelTask, str]]:
    """Tasks and responses that were recorded as correct; of the bundled tasks all responses."""
    if language is Language.CPP:
        for task in bundled.load():
            yield from ((task, text) for text in bundled.responses(task.name, language.value))
        return
    import polars as pl

    # read here: a machine with a GPU may lack pyarrow
    tasks = {
        (task := kernelbench.task_of(row)).task_id: task
        for row in pl.read_parquet(arguments.tasks).iter_rows(named=True)
    }
    rows = pl.read_parquet(arguments.responses).filter("recorded_correct")
    for row in rows.sort("level", "problem_id", "sample_id").iter_rows(named=True):
        task_id = f"kernelbench/L{row['level']}/{row['problem_id']}"
        if task_id in tasks:
            yield tasks[task_id], row["response"]


# -- verdicts --------------------------------------------------------------------------------------


class Asked(NamedTuple):
    """A verdict that is wanted; `key` tells it from others of the same code."""

    key: str
    task: KernelTask
    code: str


class Work:
    """Verdicts on this machine, without a cluster: threads build, one process after the other runs.
    Each verdict is a line of `verdicts.jsonl`."""

    def __init__(self, arguments: argparse.Namespace, folder: Path, deadline: float) -> None:
        self.arguments, self.folder, self.deadline = arguments, folder, deadline
        self.language = Language(arguments.language)
        folder.mkdir(parents=True, exist_ok=True)
        self.file = folder / "verdicts.jsonl"
        self.known: dict[str, dict[str, Any]] = read_verdicts(self.file)
        self.threads = ThreadPoolExecutor(arguments.builders)
        self.local, self.preparers = threading.local(), list[Preparer]()

    def __enter__(self) -> Work:
        return self

    def __exit__(self, *_: object) -> None:
        self.threads.shutdown(wait=True, cancel_futures=True)
        for preparer in self.preparers:
            preparer.close()

    def protocol(self, baselines: tuple[str, ...] = ("eager",)) -> EvalConfig:
        timing = {"max_s": self.arguments.max_s, "baselines": baselines}
        return EvalConfig(
            timing=TimingConfig.model_validate(timing), build=BuildConfig(timeout_s=240)
        )

    def run(self, begins: list[Begin]) -> None:
        """Both searches, generation by generation; then the fresh measurements."""
        searches = {method: populations(begins, method, self.arguments) for method in METHODS}
        with Evaluator(self.language, self.protocol()) as evaluator:
            generation, more = 0, True
            while more:
                everyone = [each for found in searches.values() for each in found]
                more = any([proposed(each, generation) for each in everyone]) or not generation
                asked = (
                    Asked(code_key(each, member.code), each.task, member.code)
                    for each in everyone
                    for member in each.members.values()
                )
                self.verify(evaluator, asked)
                for each in everyone:
                    settle(each, self.known)
                generation += 1
        strict = config_of(METHODS[0], self.arguments).confirming(self.protocol())
        with Evaluator(self.language, strict) as evaluator:
            for found in searches.values():
                self.verify(
                    evaluator,
                    (
                        Asked(key, each.task, member.code)
                        for each in found
                        for key, _, member in again(each)
                    ),
                )
        if self.arguments.compile:
            winners = (
                Asked(f"compiled/{pair[1].candidate_id}", each.task, pair[1].code)
                for found in searches.values()
                for each in found
                if (pair := pair_of(each))
            )
            with Evaluator(self.language, self.protocol(("eager", "compile"))) as evaluator:
                self.verify(evaluator, winners)

    def verify(self, evaluator: Evaluator, wanted: Iterable[Asked]) -> None:
        """Reach the verdicts that are missing, those of a task one after the other. Raises
        OutOfTime."""
        missing = {each.key: each for each in wanted if each.key not in self.known}
        asked = sorted(missing.values(), key=lambda each: each.task.task_id)
        candidates = [self._candidate(each) for each in asked]
        with self.file.open("a", encoding="utf-8") as journal:
            prepared = [
                self.threads.submit(self._prepare, candidate, each.task)
                for candidate, each in zip(candidates, asked, strict=True)
            ]
            try:
                for each, candidate, future in zip(asked, candidates, prepared, strict=True):
                    if time.monotonic() > self.deadline:
                        raise OutOfTime
                    row = row_of(verdict_by(evaluator, each.task, candidate, future.result()))
                    self.known[each.key] = row
                    journal.write(json.dumps({"key": each.key, **row}) + "\n")
                    journal.flush()
            finally:
                for future in prepared:
                    future.cancel()
        if asked:
            print(
                f"{len(self.known)} verdicts, {self.deadline - time.monotonic():.0f} s left",
                flush=True,
            )

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


def verdict_by(
    evaluator: Evaluator, task: KernelTask, candidate: Candidate, prepared: Prepared | None
) -> Verdict:
    """The verdict of a built candidate. Raises OutOfTime where it was not built any more."""
    if prepared is None:
        raise OutOfTime
    return evaluator.run(task, candidate, prepared)


def row_of(verdict: Verdict) -> dict[str, Any]:
    """What is kept of a verdict."""
    timing = verdict.timing
    compiled = timing and timing.compiled
    kept = ("speedup", "speedup_lower", "speedup_upper")
    return {
        "status": verdict.status.value,
        "reason": verdict.reason.value,
        "run_s": verdict.run_s,
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


# -- populations -----------------------------------------------------------------------------------


def code_key(population: Population, code: str) -> str:
    """The id of a candidate: both searches measure equal code of a task once."""
    return stable_hash([population.task.task_id, code])


def config_of(method: str, arguments: argparse.Namespace) -> SearchConfig:
    asked = {"method": method, "evaluations": arguments.evaluations, "seed": arguments.seed}
    operators = arguments.operators.split(",")
    return SearchConfig.model_validate(asked | {"operators": operators, "patience": None})


def populations(
    begins: list[Begin], method: str, arguments: argparse.Namespace
) -> list[Population]:
    """One population a candidate, with its start."""
    config = config_of(method, arguments)
    made = []
    for task, code in begins:
        population = Population(task, Language(arguments.language), config)
        population.add(Member(code_key(population, code), code, 0, START))
        made.append(population)
    return made


def proposed(population: Population, generation: int) -> bool:
    """Add the members of a generation; whether there are any."""
    plans = list(population.plans(generation)) if generation else []
    for plan in plans:
        code, parents = plan.code or "", tuple(each.candidate_id for each in plan.parents)
        name = code_key(population, code)
        resource = usage(code, population.language)
        made = Member(name, code, plan.step, plan.operator, parents, plan.change, resource=resource)
        population.add(made)
    return bool(plans)


def settle(population: Population, known: dict[str, dict[str, Any]]) -> None:
    """Note the verdicts of members that have none yet."""
    for member in list(population.members.values()):
        row = known.get(code_key(population, member.code))
        if row and not member.settled:
            speedup, lower = row["speedup"] or 0.0, row["speedup_lower"] or 0.0
            timed = replace(member, speedup=speedup, lower=lower, device_s=row["run_s"])
            population.add(timed)


# -- the tables ------------------------------------------------------------------------------------


def report(arguments: argparse.Namespace) -> int:
    """Print the tables of all parts, and write report.json."""
    known: dict[str, dict[str, Any]] = {}
    for path in sorted(Path(arguments.out).glob("part-*/verdicts.jsonl")):
        known |= read_verdicts(path)
    begins = list(begins_of(arguments))
    found = {method: replayed(populations(begins, method, arguments), known) for method in METHODS}
    fresh = {
        key: Interval(row["speedup"], row["speedup_lower"], row["speedup_upper"])
        for key, row in known.items()
        if row["speedup"]
    }
    told: dict[str, Any] = {"device": sorted({row["device"] for row in known.values()} - {""})}
    for method, members in found.items():
        results = [result_of(each, fresh) for each in members if each.start]
        told[method] = summary_of(results, [each for each in members if each.start])
    told["against_random"] = compared(told)._asdict()
    told["against_compile"] = {method: compiled(found[method], known) for method in METHODS}
    (Path(arguments.out) / "report.json").write_text(json.dumps(told, indent=1))
    print("\n".join(lines_of(told)))
    return 0


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


def compared(told: dict[str, Any]) -> Interval:
    """Gain of evolution / gain of random search, over the tasks where both are confirmed."""
    gains = [{row["task_id"]: row["gain"] for row in told[name]["results"]} for name in METHODS]
    both = [key for key, gain in gains[0].items() if gain and gains[1].get(key)]
    return mean_gain([gains[0][key] / gains[1][key] for key in both])


def compiled(members: list[Population], known: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """Speed of the winners against their task under torch.compile, in one window."""
    pairs = [pair for each in members if (pair := pair_of(each))]
    rows = [known.get(f"compiled/{winner.candidate_id}", {}) for _, winner in pairs]
    speedups = [row["compiled"] for row in rows if row.get("compiled")]
    faster = sum(speedup > 1 for speedup in speedups)
    return {"winners": len(speedups), "faster": faster, **mean_gain(speedups)._asdict()}


def lines_of(told: dict[str, Any]) -> Iterator[str]:
    """The report as Markdown."""

    def form(one: dict[str, float]) -> str:
        return f"{one['value']:.3f} ({one['lower']:.3f} to {one['upper']:.3f})"

    yield f"Device: {', '.join(told['device'])}\n"
    yield "| | " + " | ".join(METHODS) + " |\n| --- | ---: | ---: |"
    rows = {
        "candidates": lambda one: one["tasks"],
        "confirmed gain, geometric mean (95 %)": lambda one: form(one["gain"]),
        "the same, winners that are not confirmed as 1": lambda one: form(one["used_gain"]),
        "improved with 95 % confidence": lambda one: one["improved"],
        "gained more than 5 %": lambda one: f"{one['share_above_5_percent']:.1%}",
        "evaluations": lambda one: one["evaluations"],
        "device-seconds": lambda one: f"{one['device_s']:,.0f}",
    }
    for name, value in rows.items():
        yield f"| {name} | " + " | ".join(str(value(told[method])) for method in METHODS) + " |"
    against = [told["against_compile"][method] for method in METHODS]
    words = [
        f"{form(one)}, {one['faster']} of {one['winners']} faster"
        if one["winners"]
        else "not measured"
        for one in against
    ]
    yield f"| winners against torch.compile | {' | '.join(words)} |"
    yield f"\nEvolution against random search: {form(told['against_random'])}\n"
    steps = [step for step in SHOWN if step <= len(told[METHODS[0]]["curve"])]
    yield (
        "| best so far, by the search's own verdicts, after | " + " | ".join(map(str, steps)) + " |"
    )
    yield "| --- |" + " ---: |" * len(steps)
    for method in METHODS:
        values = (f"{told[method]['curve'][step - 1]:.3f}" for step in steps)
        yield f"| {method} | {' | '.join(values)} |"


if __name__ == "__main__":
    sys.exit(main())
