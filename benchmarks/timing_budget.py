"""What more seconds of timing buy: device-seconds of a candidate and the width of its speedup's
interval, by the budget `timing.max_s`.

    python -m benchmarks.timing_budget --tasks kernelbench.parquet --responses
    qwq32b_candidates.parquet --limit 100 --budgets 0.3,1,4,20 --out verdicts.jsonl
    python -m benchmarks.timing_budget --language cpp   # bundled kernels, without a GPU

One response of every task, then a second of every task, until the limit; those without code count
in no figure. Each is built once and then judged under every budget, on one device, ten candidates
at a time under one budget after the other, the order of the budgets turned for the next ten: drift
of the machine falls on all budgets alike. Verdicts are written to --out as they come; after
`--budget-s` seconds the tables hold what is there, of candidates that were judged under all
budgets. Half a width is that of the 95 % interval of log(speedup); `decided` are correct ones whose
interval lies on one side of 1. `moved` is by how much log(speedup) differs from that under the
largest budget, median over candidates.
Needs torch, numpy, pydantic, psutil, polars and nvcc; no Ray, no Prefect.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

from kernels_eval.config import BuildConfig, EvalConfig, TimingConfig
from kernels_eval.evaluator import Evaluator
from kernels_eval.judge.messages import Prepared
from kernels_eval.judge.prepare import Preparer
from kernels_eval.records import Candidate, KernelTask, Language, Verdict, stable_hash
from tasks.sources import bundled, kernelbench
from tasks.synthesis.parsing import parse_response

TOGETHER = 10
PHASES = ("reference_s", "load_s", "correctness_s", "attribution_s", "timing_s")


class Built(NamedTuple):
    """A candidate that only waits for the device."""

    task: KernelTask
    candidate: Candidate
    prepared: Prepared


def choosing(description: str | None, limit: int) -> argparse.ArgumentParser:
    """A command's parser with what `chosen` reads; `limit` is its default."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tasks", help="KernelBench tasks, Parquet")
    parser.add_argument("--responses", help="recorded responses, Parquet")
    parser.add_argument("--language", default="cuda", choices=["cuda", "cpp"])
    parser.add_argument("--limit", type=int, default=limit, help="responses with code")
    return parser


def main() -> int:
    parser = choosing(__doc__, limit=100)
    parser.add_argument("--budgets", default="0.3,1,4,20", help="seconds, between commas")
    parser.add_argument("--builders", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--budget-s", type=float, default=math.inf, help="of the whole run")
    parser.add_argument("--out", type=Path, help="verdicts as JSON lines, appended")
    arguments = parser.parse_args()
    deadline = time.monotonic() + arguments.budget_s
    budgets = sorted(float(each) for each in arguments.budgets.split(","))
    language, rows = Language(arguments.language), []
    candidates = list(chosen(arguments, language))
    built = build(candidates, budgets[0], arguments.builders)
    for row in judged(built, budgets, language):
        rows.append(row)
        if arguments.out:
            with arguments.out.open("a", encoding="utf-8") as file:
                file.write(json.dumps(row) + "\n")
        if time.monotonic() > deadline:
            break
    print("\n".join(tables(rows, budgets)))
    return 0


def chosen(
    arguments: argparse.Namespace, language: Language
) -> Iterator[tuple[KernelTask, Candidate]]:
    """Responses with code, and their tasks."""
    texts = responses(arguments, language)
    parsed = ((task, index, parse_response(text).code) for task, index, text in texts)
    found = ((task, index, code) for task, index, code in parsed if code)
    for _, (task, index, code) in zip(range(arguments.limit), found, strict=False):
        yield (
            task,
            Candidate(
                candidate_id=stable_hash([task.task_id, index]),
                task_id=task.task_id,
                language=language,
                generator="recorded",
                sample_index=index,
                code=code,
            ),
        )


def kernelbench_tasks(path: str) -> dict[str, KernelTask]:
    """KernelBench tasks of a Parquet file, by their ids."""
    import polars as pl

    made = map(kernelbench.task_of, pl.read_parquet(path).iter_rows(named=True))
    return {task.task_id: task for task in made}


def responses(
    arguments: argparse.Namespace, language: Language
) -> Iterator[tuple[KernelTask, int, str]]:
    """One of every task, then a second of every task, and so on."""
    if not arguments.tasks:
        each = [(task, bundled.responses(task.name, language.value)) for task in bundled.load()]
        for index in range(max(len(texts) for _, texts in each)):
            yield from ((task, index, texts[index]) for task, texts in each if index < len(texts))
        return
    import polars as pl

    tasks = kernelbench_tasks(arguments.tasks)
    recorded = pl.read_parquet(arguments.responses).sort("sample_id", "problem_id", "level")
    for row in recorded.iter_rows(named=True):
        task_id = f"kernelbench/L{row['level']}/{row['problem_id']}"
        if task_id in tasks:
            yield tasks[task_id], row["sample_id"], row["response"]


def protocol(budget: float) -> EvalConfig:
    return EvalConfig(timing=TimingConfig(max_s=budget), build=BuildConfig(timeout_s=240))


def build(
    candidates: Iterable[tuple[KernelTask, Candidate]], budget: float, builders: int
) -> list[Built]:
    """In threads, each with a preparer of its own."""
    local, preparers = threading.local(), list[Preparer]()

    def begin() -> None:
        local.preparer = Preparer(protocol(budget))
        preparers.append(local.preparer)

    def prepared(task: KernelTask, candidate: Candidate) -> Built:
        return Built(task, candidate, local.preparer.prepare(candidate, task))

    try:
        with ThreadPoolExecutor(builders, initializer=begin) as pool:
            return list(pool.map(prepared, *zip(*candidates, strict=True)))
    finally:
        for each in preparers:
            each.close()


def judged(
    built: list[Built], budgets: list[float], language: Language
) -> Iterator[dict[str, Any]]:
    """A row for each verdict under each budget."""
    with ExitStack() as stack:
        turns = deque(
            (budget, stack.enter_context(Evaluator(language, protocol(budget))))
            for budget in budgets
        )
        for start in range(0, len(built), TOGETHER):
            for budget, evaluator in turns:
                for task, candidate, prepared in built[start : start + TOGETHER]:
                    yield row_of(evaluator.run(task, candidate, prepared), budget)
                evaluator.runner.drop_reference()  # the others need its memory
            turns.rotate()


def row_of(verdict: Verdict, budget: float) -> dict[str, Any]:
    timing, phases = verdict.timing, verdict.phases
    return {
        "candidate": verdict.candidate_id,
        "task": verdict.task_id,
        "budget": budget,
        "status": verdict.status.value,
        "reason": verdict.reason.value,
        "run_s": verdict.run_s,
        **{name: getattr(phases, name) if phases else 0.0 for name in PHASES},
        "pairs": timing.pairs if timing else None,
        "speedup": timing.speedup if timing else None,
        "lower": timing.speedup_lower if timing else None,
        "upper": timing.speedup_upper if timing else None,
    }


def tables(rows: list[dict[str, Any]], budgets: list[float]) -> Iterator[str]:
    """Markdown: costs and what they buy, by budget."""
    under = {
        budget: {row["candidate"]: row for row in rows if row["budget"] == budget}
        for budget in budgets
    }
    whole = set.intersection(*(set(each) for each in under.values()))
    yield f"{len(whole)} candidates under all budgets\n"
    yield (
        "| max_s | device-s a candidate | of it timing | timed | pairs, median | half a width,"
        " median | 90 % | decided | moved | other status |"
    )
    yield "| ---: |" + " ---: |" * 9
    for budget in budgets:
        yield line(budget, [under[budget][key] for key in sorted(whole)], under[budgets[-1]])


def line(budget: float, rows: list[dict[str, Any]], most: dict[str, dict[str, Any]]) -> str:
    timed = [row for row in rows if row["speedup"]]
    if not timed:
        return f"| {budget:g} |" + " |" * 9
    halves = sorted(math.log(row["upper"] / row["lower"]) / 2 for row in timed)
    moved = [
        abs(math.log(row["speedup"] / longest["speedup"]))
        for row in timed
        if (longest := most[row["candidate"]])["speedup"]
    ]
    decided = sum(not row["lower"] <= 1 <= row["upper"] for row in timed)
    other = sum(row["status"] != most[row["candidate"]]["status"] for row in rows)
    cells = [
        f"{statistics.fmean(row['run_s'] for row in rows):.2f}",
        f"{statistics.fmean(row['timing_s'] for row in rows):.2f}",
        str(len(timed)),
        f"{statistics.median(row['pairs'] for row in timed):.0f}",
        f"{statistics.median(halves):.3f}",
        f"{halves[int(0.9 * (len(halves) - 1))]:.3f}",
        f"{decided / len(timed):.0%}",
        f"{statistics.median(moved):.3f}" if moved else "",
        str(other),
    ]
    return f"| {budget:g} | " + " | ".join(cells) + " |"


if __name__ == "__main__":
    sys.exit(main())
