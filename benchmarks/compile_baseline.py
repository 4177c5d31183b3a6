"""Eager PyTorch against torch.compile as baselines, in the verifier's own window, and what the
second one costs.

    python -m benchmarks.compile_baseline --language cuda --out DIR

Times every reference against itself compiled (interleaved pairs, as verification does), on the
bundled tasks and six more of KernelBench's kinds (`--tasks FOLDER` takes .py files in KernelBench's
form instead). `--answers` also verifies the first correct recorded answer of each bundled task with
both baselines, and once more with eager alone, and says what the third side adds to `timing_s`.
Prints a table and writes compile_baseline.json. `--budget-s` stops in time. Needs torch, numpy and
pydantic, a C++ compiler and, for CUDA, Triton.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import secrets
import statistics
import sys
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from kernels_eval.checks.timing import measure
from kernels_eval.config import EvalConfig, TimingConfig
from kernels_eval.devices import device_for
from kernels_eval.evaluator import Evaluator
from kernels_eval.isolation.sandbox import Child, ForkServer
from kernels_eval.parent.compiled_baseline import CompiledReference, Lost
from kernels_eval.parent.messages import Stop
from kernels_eval.parent.prepare import Preparer
from kernels_eval.parent.reference_handle import ReferenceProcess
from kernels_eval.records import (
    Candidate,
    KernelTask,
    Language,
    SamplingParams,
    Verdict,
    candidate_id,
)
from tasks.sources import bundled
from tasks.synthesis.parsing import parse_response

FORM = """import torch
import torch.nn as nn
import torch.nn.functional as F


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {init}

    def forward(self, x):
        {forward}


def get_inputs():
    return [torch.randn({shape})]


def get_init_inputs():
    return []
"""
# name, constructor, forward, shape on a CPU, shape on a GPU; each shape's last number is also N
MORE = (
    (
        "elementwise_chain",
        "pass",
        "return torch.tanh(F.silu(x * 2.0 + 1.0)) * 0.5 - x",
        "512, 1024",
        "16384, 8192",
    ),
    (
        "rms_norm",
        "self.w = nn.Parameter(torch.ones(N))",
        "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6) * self.w",
        "512, 1024",
        "16384, 4096",
    ),
    (
        "conv_bias_relu",
        "self.conv = nn.Conv2d(16, 32, 3, padding=1); self.b = nn.Parameter(torch.randn(32, 1, 1))",
        "return torch.relu(self.conv(x) + self.b) * 0.5",
        "2, 16, 32, 32",
        "64, 16, 128, 128",
    ),
    (
        "matmul_gelu_softmax",
        "self.lin = nn.Linear(N, N)",
        "return torch.softmax(F.gelu(self.lin(x)), dim=-1)",
        "64, 256",
        "4096, 2048",
    ),
    (
        "mlp",
        "self.a = nn.Linear(N, 2 * N); self.b = nn.Linear(2 * N, N)",
        "return x + self.b(torch.relu(self.a(x)))",
        "64, 256",
        "4096, 1024",
    ),
    (
        "log_softmax_mean",
        "pass",
        "return F.log_softmax(x, dim=-1).mean(-1)",
        "512, 1024",
        "16384, 8192",
    ),
)


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--language", default="cuda", choices=[language.value for language in Language]
    )
    parser.add_argument(
        "--tasks",
        help=(
            "a folder of .py files in KernelBench's form, instead of the bundled and the built-in"
            " ones"
        ),
    )
    parser.add_argument("--limit", type=int, default=22)
    parser.add_argument("--mode", default="default", help="torch.compile's mode")
    parser.add_argument(
        "--max-s", type=float, default=1.5, help="timing budget of one measurement, seconds"
    )
    parser.add_argument("--budget-s", type=float, default=540)
    parser.add_argument("--answers", action="store_true")
    parser.add_argument("--out", required=True)
    arguments = parser.parse_args()
    language, started = Language(arguments.language), time.monotonic()
    timing = {
        "max_s": arguments.max_s,
        "baselines": ("eager", "compile"),
        "compile_mode": arguments.mode,
    }
    config, device = EvalConfig(timing=TimingConfig.model_validate(timing)), device_for(language)
    rows: list[dict[str, Any]] = []
    with_answers: list[dict[str, Any]] = []
    for task in tasks_of(arguments.tasks, device)[: arguments.limit]:
        if time.monotonic() - started > arguments.budget_s:
            break
        rows.append(measured(task, config, device))
        print(line_of(rows[-1]), flush=True)
    if arguments.answers:
        left = arguments.budget_s - (time.monotonic() - started)
        with_answers = verified(bundled.load(), language, config, device, time.monotonic() + left)
    out = Path(arguments.out)
    out.mkdir(parents=True, exist_ok=True)
    where = next((row["device"] for row in rows if row.get("device")), device)
    found = {
        "device": where if where != "cpu" else platform.processor() or platform.machine(),
        "mode": arguments.mode,
    }
    (out / "compile_baseline.json").write_text(
        json.dumps(found | {"references": rows, "answers": with_answers}, indent=1)
    )
    report(rows, with_answers)
    return 0


def tasks_of(folder: str | None, device: str) -> list[KernelTask]:
    if folder is not None:
        files = sorted(Path(folder).rglob("*.py"))
        return [
            KernelTask(
                task_id=f"file/{path.stem}", name=path.stem, code=path.read_text(encoding="utf-8")
            )
            for path in files
        ]
    more = []
    for name, init, forward, small, large in MORE:
        shape = large if device.startswith("cuda") else small
        code = FORM.format(init=init.replace("; ", "\n        "), forward=forward, shape=shape)
        code = code.replace("\n\n\nclass", f"\n\nN = {shape.rsplit(', ', 1)[-1]}\n\n\nclass", 1)
        more.append(KernelTask(task_id=f"benchmark/{name}", name=name, code=code))
    return [*more, *bundled.load()]


def measured(task: KernelTask, config: EvalConfig, device: str) -> dict[str, Any]:
    """One reference against itself compiled: `speedup` is eager / compiled."""
    server = ForkServer(threads=config.threads)
    reference = ReferenceProcess(
        lambda: Child(server, "reference", config.limits), task, config, device
    )
    compiled = CompiledReference(reference)
    row: dict[str, Any] = {"task": task.name}
    try:
        reference.open()
        started = time.monotonic()
        compiled.open(server)
        row |= {"device": reference.loaded.device_name, "compile_s": time.monotonic() - started}
        seeds = [secrets.randbits(31) for _ in range(3)]
        reference.ask("timing_inputs", seeds=seeds)
        side = compiled.sampler(seeds)
        if side is None:
            return row | {"why_not": compiled.unavailable_reason}
        # nobody here is to be distrusted: no bound but that of a nanosecond
        timing = measure(
            lambda n: reference.ask("sample", calls=n)["ns"],
            side.sample,
            config.timing,
            bound=lambda *_: (1.0, 1.0),
        )
        row |= {
            "eager_ms": timing.reference_ms,
            "compiled_ms": timing.candidate_ms,
            "speedup": timing.speedup,
            "pairs": timing.pairs,
        }
        return row | {
            "lower": timing.speedup_lower,
            "upper": timing.speedup_upper,
            "graphs": compiled.graphs,
        }
    except Lost:
        return row | {"why_not": compiled.unavailable_reason}
    except Stop as stop:
        return row | {"why_not": f"{stop.finding.reason}: {stop.finding.detail[:200]}"}
    finally:
        compiled.close()
        reference.close()
        server.close()


def verified(
    tasks: Iterable[KernelTask],
    language: Language,
    config: EvalConfig,
    device: str,
    deadline: float,
) -> list[dict[str, Any]]:
    """The first correct recorded answer of each task, timed against both baselines and against
    eager alone."""
    alone = config.model_copy(
        update={"timing": config.timing.model_copy(update={"baselines": ("eager",)})}
    )
    preparer = Preparer(config)
    both, eager = Evaluator(device, config), Evaluator(device, alone)
    rows = []
    try:
        for task in tasks:
            for response in bundled.responses(task.name, language.value):
                code = parse_response(response).code
                if code is None or time.monotonic() > deadline:
                    continue
                key = candidate_id(task, "recorded", SamplingParams(), 0, response)
                made = Candidate(
                    candidate_id=key,
                    task_id=task.task_id,
                    language=language,
                    generator="recorded",
                    code=code,
                )
                prepared = preparer.prepare(made, task)
                first = both.run(task, made, prepared)
                if first.timing is not None:
                    rows.append(
                        answered(
                            task,
                            first,
                            both.run(task, made, prepared),
                            eager.run(task, made, prepared),
                        )
                    )
                    print(f"  {json.dumps(rows[-1])[:300]}", flush=True)
                    break
    finally:
        for each in (preparer, both, eager):
            each.close()
    return rows


def answered(task: KernelTask, first: Verdict, again: Verdict, alone: Verdict) -> dict[str, Any]:
    """`again` is the same candidate once more, with the reference compiled already."""
    row: dict[str, Any] = {
        "task": task.name,
        "first_run_s": first.run_s,
        "compile_s": first.timing.compiled.compile_s,
    }
    for name, verdict in (("both", again), ("eager", alone)):
        row |= {f"{name}_timing_s": verdict.phases.timing_s, f"{name}_run_s": verdict.run_s}
        row |= {
            f"{name}_speedup": verdict.timing and verdict.timing.speedup,
            f"{name}_reason": verdict.reason,
        }
    compiled = again.timing and again.timing.compiled
    return row | {
        "against_compile": compiled and compiled.speedup,
        "why_not": compiled.unavailable_reason
        if compiled
        else first.timing.compiled.unavailable_reason,
    }


def line_of(row: dict[str, Any]) -> str:
    if "speedup" not in row:
        return f"| {row['task']} | - | - | {row.get('why_not')} | {row.get('compile_s', 0):.1f} |"
    interval = f"{row['speedup']:.2f} ({row['lower']:.2f} to {row['upper']:.2f})"
    return (
        f"| {row['task']} | {row['eager_ms']:.4f} | {row['compiled_ms']:.4f} | {interval} |"
        f" {row['compile_s']:.1f} |"
    )


def report(rows: list[dict[str, Any]], answers: list[dict[str, Any]]) -> None:
    timed = [row for row in rows if "speedup" in row]
    print(
        "\n| task | eager ms | compiled ms | eager / compiled (95 %) | compile s |\n| --- | ---: |"
        " ---: | ---: | ---: |"
    )
    print("\n".join(map(line_of, rows)))
    if timed:
        mean = math.exp(statistics.fmean(math.log(row["speedup"]) for row in timed))
        faster = sum(row["lower"] > 1 for row in timed)
        cost = statistics.median(row["compile_s"] for row in timed)
        print(
            f"\n{len(timed)} of {len(rows)} references compiled; geometric mean of eager / compiled"
            f" {mean:.2f}."
        )
        print(
            f"{faster} are faster compiled with 95 % confidence; compiling and checking took"
            f" {cost:.1f} s a task (median)."
        )
    usable = [row for row in answers if row["both_reason"] == row["eager_reason"] == "ok"]
    if usable:
        added = statistics.median(row["both_timing_s"] - row["eager_timing_s"] for row in usable)
        apart = statistics.median(
            abs(math.log(row["both_speedup"] / row["eager_speedup"])) for row in usable
        )
        print(
            f"{len(usable)} correct answers: the third side adds {added:.2f} s to timing_s"
            " (median)."
        )
        print(
            f"Their speedup against eager differs by {100 * apart:.1f} % (median) between the two"
            " runs."
        )


if __name__ == "__main__":
    sys.exit(main())
