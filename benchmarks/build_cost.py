"""What building a candidate costs, by header tier, over real responses.

    python -m benchmarks.build_cost --responses qwq32b_candidates.parquet --limit 60 --tiers
    lite,full --full-limit 25

Needs nvcc and no GPU. Builds the extensions that recorded responses ask for, each with each tier
and from scratch, and prints the median core-seconds (user and system time of the compilers:
preprocess, compile, bind, link), the mean of those that fail, the share of what builds at all that
lite builds, and every disagreement between the tiers. The tier `whole` is a build as concur makes
it: lite, then full where that is not certain to fail. Time to make shims and precompiled headers is
measured apart. A deadline is 600 s of processor time. `--jobs N` builds N at a time: compilers that
share a core's two threads count more seconds for the same work. The candidates' modules are run to
see what they ask for, with builds replaced by stubs: only give it responses you would run.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from kernels_eval.compile.extensions import Builder
from kernels_eval.compile.prepared import FULL_BUILDS_WITHOUT
from kernels_eval.config import BuildConfig
from kernels_eval.source.spec import ExtensionSpec
from tasks.synthesis.parsing import parse_response

# Reads a list of modules, prints what each asks for: a forked process each, so that no module sees
# what another left behind.
CAPTURE = """
import json, os, signal, sys
import torch
from kernels_eval.candidate.build_interception import intercept

class Stub:
    def __getattr__(self, name): return lambda *a, **k: None

def asked_by(code):
    asked = []
    intercept(lambda spec: asked.append(spec) or Stub())
    try:
        exec(compile(code, "candidate", "exec"), {"__name__": "candidate"})
    except BaseException:
        pass
    return asked

modules, out = json.load(sys.stdin), os.dup(1)
os.dup2(2, 1)
for code in modules:
    child = os.fork()
    if not child:
        signal.alarm(30)
        os.write(out, (json.dumps(asked_by(code)) + chr(10)).encode())
        os._exit(0)
    if os.waitpid(child, 0)[1]:
        os.write(out, b"[]" + chr(10).encode())
"""


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--responses",
        required=True,
        help="recorded responses, Parquet with columns response and recorded_compiled",
    )
    parser.add_argument(
        "--limit", type=int, default=60, help="extensions with CUDA sources, spread over the file"
    )
    parser.add_argument(
        "--skip", type=int, default=0, help="leave out so many of them (those of an earlier run)"
    )
    parser.add_argument(
        "--full-limit",
        type=int,
        default=None,
        help="of those, how many also with torch's own headers",
    )
    parser.add_argument("--tiers", default="lite,full")
    parser.add_argument("--arch", default="9.0", help="compute capability to build for")
    parser.add_argument("--jobs", type=int, default=1, help="builds at a time")
    parser.add_argument("--out", help="write one JSON line an extension")
    arguments = parser.parse_args()
    specs = captured(arguments.responses, arguments.limit)[arguments.skip :]
    tiers = set(arguments.tiers.split(","))
    every = max(1, len(specs) // (arguments.full_limit or len(specs)))
    with tempfile.TemporaryDirectory() as cache:
        builder = Builder(BuildConfig(timeout_s=600, cuda_arch=arguments.arch), cache=Path(cache))
        began = children_s()
        builder.warm()
        print(f"made once for lite: {children_s() - began:.1f} core-s")
        if tiers & {"full", "whole"}:
            for _ in range(FULL_BUILDS_WITHOUT + 1):
                builder.prepared.precompiled()
        jobs = [
            (spec, tiers if number % every == 0 else tiers - {"full"})
            for number, (_, spec) in enumerate(specs)
        ]
        with multiprocessing.get_context("fork").Pool(arguments.jobs, _start, (builder,)) as pool:
            rows = []
            for number, row in enumerate(pool.imap(_one, jobs)):
                rows.append({"recorded_compiled": specs[number][0], **row})
                print(json.dumps({"number": number, **rows[-1]})[:400], file=sys.stderr, flush=True)
                if arguments.out:
                    with open(arguments.out, "a" if number else "w", encoding="utf-8") as out:
                        out.write(json.dumps(rows[-1]) + "\n")
    report(rows)
    return 0


_builder: Builder
"""Of this process of the pool."""


def _start(builder: Builder) -> None:
    global _builder
    _builder = Builder(
        builder.config, cache=builder.tools.cache
    )  # a process has a work folder of its own


def _one(job: tuple[ExtensionSpec, set[str]]) -> dict[str, Any]:
    spec, tiers = job
    row = {"lite": with_lite(_builder, spec)} if "lite" in tiers else {}
    row |= {"whole": whole(_builder, spec)} if "whole" in tiers else {}
    return row | ({"full": measured(_builder, spec, "full")} if "full" in tiers else {})


def captured(path: str, limit: int) -> list[tuple[bool, ExtensionSpec]]:
    """(recorded as compiled, spec) of responses that ask for CUDA sources: as many of each kind,
    spread evenly over the file."""
    import polars as pl

    responses = pl.read_parquet(path).sort("sample_id", "level", "problem_id")
    codes = [
        (bool(row["recorded_compiled"]), parse_response(row["response"]).code)
        for row in responses.iter_rows(named=True)
    ]
    codes = [(recorded, code) for recorded, code in codes if code and "cuda_sources" in code]
    found: dict[bool, list[tuple[bool, ExtensionSpec]]] = {True: [], False: []}
    for (recorded, _), asked in zip(codes, _asked_by([code for _, code in codes]), strict=True):
        specs = [ExtensionSpec.model_validate(one) for one in asked if one.get("cuda_sources")]
        found[recorded] += [(recorded, spec) for spec in specs[:1]]
    for kind, all_of_it in found.items():  # spread evenly
        found[kind] = all_of_it[:: max(1, 2 * len(all_of_it) // limit)]
    pairs = zip(found[True], found[False], strict=False)
    return [one for pair in pairs for one in pair][:limit]


def _asked_by(codes: list[str]) -> list[list[dict[str, Any]]]:
    """What each module asks to build; every core takes its share of them."""

    def ask(share: list[str]) -> list[list[dict[str, Any]]]:
        done = subprocess.run(
            [sys.executable, "-c", CAPTURE],
            input=json.dumps(share),
            stdout=subprocess.PIPE,
            text=True,
            check=True,
        )
        return [json.loads(line) for line in done.stdout.splitlines()]

    cores = len(os.sched_getaffinity(0))
    asked: list[list[dict[str, Any]]] = [[] for _ in codes]
    with ThreadPoolExecutor(cores) as threads:
        for first, answers in enumerate(
            threads.map(ask, [codes[core::cores] for core in range(cores)])
        ):
            asked[first::cores] = answers
    return asked


def with_lite(builder: Builder, spec: ExtensionSpec) -> dict[str, Any]:
    if not builder.lite_can(spec):
        return {"outcome": "not for lite", "core_s": 0.0}
    return measured(builder, spec, "lite")


def whole(builder: Builder, spec: ExtensionSpec) -> dict[str, Any]:
    began, wall = children_s(), time.monotonic()
    build = builder.build(spec)
    return {
        "outcome": "built" if build.ok else "deadline" if build.reason == "build" else "failed",
        "core_s": children_s() - began,
        "wall_s": time.monotonic() - wall,
        "tier": build.tier,
        "log": build.log[:1500],
    }


def measured(builder: Builder, spec: ExtensionSpec, tier: str) -> dict[str, Any]:
    scratch = builder.work_root / uuid.uuid4().hex
    scratch.mkdir()
    if tier == "full":
        builder.prepared.precompiled()
    began, wall = children_s(), time.monotonic()
    build = builder.attempt(spec, tier, scratch).build()
    core_s = children_s() - began
    shutil.rmtree(scratch)
    outcome = "built" if build.ok else "deadline" if build.reason == "build" else "failed"
    if outcome == "failed" and tier == "lite" and builder.is_certain(build, spec):
        outcome = "refused"  # for certain: full is not asked
    return {
        "outcome": outcome,
        "core_s": core_s,
        "wall_s": time.monotonic() - wall,
        "log": build.log[:1500],
    }


def children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def report(rows: list[dict[str, Any]]) -> None:
    print(
        "| tier | extensions | median core-s, built | median core-s, all | mean core-s, not built |"
        " outcomes |\n| --- | --- | --- | --- | --- | --- |"
    )
    for tier in ("lite", "full", "whole"):
        of = [row[tier] for row in rows if tier in row and row[tier]["outcome"] != "not for lite"]
        if of:
            built = [one["core_s"] for one in of if one["outcome"] == "built"]
            outcomes = Counter(row[tier]["outcome"] for row in rows if tier in row)
            shown = ", ".join(f"{count} {name}" for name, count in outcomes.most_common())
            median = f"{statistics.median(built):.1f}" if built else "-"
            failed = [one["core_s"] for one in of if one["outcome"] != "built"]
            mean = f"{statistics.mean(failed):.1f} of {len(failed)}" if failed else "-"
            print(
                f"| {tier} | {len(of)} | {median} |"
                f" {statistics.median(one['core_s'] for one in of):.1f} | {mean} | {shown} |"
            )
    both = [
        row
        for row in rows
        if "lite" in row and "full" in row and row["full"]["outcome"] != "deadline"
    ]
    good = [row for row in both if row["full"]["outcome"] == "built"]
    if both:
        print(
            f"\nbuilt by full: {len(good)}, of these by lite:"
            f" {sum(row['lite']['outcome'] == 'built' for row in good)}"
        )
        wrong = [
            row
            for row in both
            if row["lite"]["outcome"] == "built" and row["full"]["outcome"] != "built"
        ]
        wrong += [row for row in good if row["lite"]["outcome"] == "refused"]
        print(f"disagreements: {len(wrong)} of {len(both)}")
        for row in wrong:
            print(json.dumps(row))


if __name__ == "__main__":
    sys.exit(main())
