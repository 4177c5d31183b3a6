"""Does the finding name the limit that was planted into a kernel?

    python -m benchmarks.bottlenecks --out found                on a machine with a GPU
    python -m benchmarks.bottlenecks --compile-only             builds all of them, without a GPU
    python -m benchmarks.bottlenecks --again found/profiles.json    the rules over kept profiles

Twenty-four CUDA kernels, all of them right, each with one limit planted; the sizes are chosen for
an H200. Each gets a verdict, then a profile. Prints what was found of each, the confusion table,
and what the profiles cost; `--out` keeps every number of them.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from kernels_eval.config import BuildConfig, CorrectnessConfig, EvalConfig, LimitsConfig
from kernels_eval.devices import gpu_arch
from kernels_eval.evaluator import Evaluator
from kernels_eval.parent.prepare import Preparer
from kernels_eval.profiling.bottleneck import findings, numbers_of
from kernels_eval.profiling.profiler import Profiler
from kernels_eval.profiling.records import KernelProfile
from kernels_eval.records import Candidate, KernelTask, Language, SamplingParams, Verdict

CONFIG = EvalConfig(
    build=BuildConfig(timeout_s=600, capture_timeout_s=60),
    correctness=CorrectnessConfig(shapes="off", distributions=("declared", "normal")),
    limits=LimitsConfig(run_s=120, load_s=120),
)
LARGE, SMALL = 1 << 25, 1 << 12
SIDE = 8192
NEEDED = 20


class Planted(NamedTuple):
    """A kernel `planted` of (x, y, n, one, zero), its launch, and what limits it. `one` and `zero`
    have these values, which the compiler does not know."""

    name: str
    limit: str
    body: str
    launch: str = "(n + 255) / 256, 256"
    size: str = str(LARGE)
    formula: str = "x * 2.0 + 1.0"
    output: str = "torch::empty_like(x)"
    call: str = "ext.run(x)"
    bytes_min: int = 8 * LARGE


INDEX = "  const long i = blockIdx.x * (long)blockDim.x + threadIdx.x;\n"
STEPS = INDEX + "  const long step = gridDim.x * (long)blockDim.x;\n"
AFFINE = "y[i] = x[i] * 2.0f + 1.0f;"
ONE_EACH = f"{INDEX}  if (i < n) {AFFINE}"
MATRIX = f"{SIDE}, {SIDE}"
OF_MATRIX: dict[str, Any] = {"size": MATRIX, "bytes_min": 8 * SIDE * SIDE}
BANKS = """  __shared__ volatile float part[8192];
  const int t = threadIdx.x, at = (t %% 32) * %d + t / 32;
  const long i = blockIdx.x * (long)blockDim.x + t;
  part[at] = i < n ? x[i] : 0.0f;
  __syncthreads();
  float sum = 0.0f;
  for (int k = 0; k < 256; ++k) sum += part[at];
  if (i < n) y[i] = sum * (2.0f / 256.0f) + 1.0f;"""
SPILLED = """  const long t = blockIdx.x * (long)blockDim.x + threadIdx.x, step = n / %(count)d;
  if (t >= step) return;
  float kept[%(count)d];
  float sum = 0.0f;
  #pragma unroll
  for (int k = 0; k < %(count)d; ++k) kept[k] = x[k * step + t];
  for (int turn = 0; turn < 8; ++turn) {
    #pragma unroll
    for (int k = 0; k < %(count)d; ++k) {
      sum = fmaf(kept[k], zero, sum);
      kept[k] = fmaf(kept[(k + 7) %% %(count)d], zero, kept[k] * one);
    }
  }
  #pragma unroll
  for (int k = 0; k < %(count)d; ++k) y[k * step + t] = kept[k] * 2.0f + 1.0f + sum * zero;"""
CHAIN = "for (int k = 0; k < {count}; ++k) v = fmaf(v, one, zero);"
ROWS = """  __shared__ float part[1024];
  const long row = blockIdx.x, columns = n / gridDim.x;
  float sum = 0.0f;
  for (long k = threadIdx.x; k < columns; k += blockDim.x) sum += x[row * columns + k];
  part[threadIdx.x] = sum;
  __syncthreads();
  for (int half = blockDim.x / 2; half; half /= 2) {
    if (threadIdx.x < half) part[threadIdx.x] += part[threadIdx.x + half];
    __syncthreads();
  }
  if (threadIdx.x == 0) y[row] = part[0];"""
OF_ROWS: dict[str, Any] = {
    "formula": "x.sum(1)",
    "output": "torch::empty({x.size(0)}, x.options())",
    "launch": "x.size(0), 256",
}
WAYS = (
    "v * one",
    "v + zero",
    "v - zero",
    "fmaf(v, one, zero)",
    "fminf(v, 1e30f * one)",
    "fmaxf(v, -1e30f * one)",
    "__int_as_float(__float_as_int(v) ^ __float2int_rn(zero))",
)
SWITCH = "".join(
    f"    case {case}: for (int k = 0; k < 300; ++k) v = {way}; break;\n"
    for case, way in enumerate(WAYS)
)
COLUMN = (
    f"{INDEX}  const long side = 8192, at = (i % side) * side + i / side;\n  if (i >= n) return;"
)

KERNELS = (
    Planted("strided", "uncoalesced", f"{COLUMN}\n  y[at] = x[at] * 2.0f + 1.0f;", **OF_MATRIX),
    Planted(
        "transposed",
        "uncoalesced",
        f"{COLUMN}\n  y[at] = x[i] * 2.0f + 1.0f;",
        formula="(x * 2.0 + 1.0).t().contiguous()",
        **OF_MATRIX,
    ),
    Planted(
        "a_run_each",
        "uncoalesced",
        f"{INDEX}  for (long k = 32 * i; k < 32 * i + 32 && k < n; ++k) y[k] = x[k] * 2.0f + 1.0f;",
        launch="(n / 32 + 255) / 256, 256",
    ),
    Planted("banks_32", "bank_conflicts", BANKS % 32),
    Planted("banks_16", "bank_conflicts", BANKS % 16),
    Planted("banks_8", "bank_conflicts", BANKS % 8),
    Planted(
        "small_blocks_and_much_shared_memory",
        "low_occupancy",
        "  __shared__ volatile float part[12000];\n  part[threadIdx.x] = zero;\n" + ONE_EACH,
        launch="(n + 63) / 64, 64",
    ),
    Planted(
        "one_warp_and_much_shared_memory",
        "low_occupancy",
        "  __shared__ volatile float part[12000];\n  part[threadIdx.x] = zero;\n" + ONE_EACH,
        launch="(n + 31) / 32, 32",
    ),
    Planted("spilled_96", "spills", SPILLED % {"count": 96}, launch="(n / 96 + 256) / 256, 256"),
    Planted("spilled_64", "spills", SPILLED % {"count": 64}, launch="(n / 64 + 256) / 256, 256"),
    Planted(
        "sixteen_blocks",
        "too_few_blocks",
        f"{STEPS}  for (long k = i; k < n; k += step) y[k] = x[k] * 2.0f + 1.0f;",
        launch="16, 256",
    ),
    Planted(
        "one_block",
        "too_few_blocks",
        f"{STEPS}  for (long k = i; k < n; k += step) y[k] = x[k] * 2.0f + 1.0f;",
        launch="1, 1024",
        size=str(1 << 21),
        bytes_min=8 << 21,
    ),
    Planted(
        "long_rows",
        "too_few_blocks",
        ROWS,
        size=f"32, {LARGE // 32}",
        bytes_min=4 * LARGE,
        **OF_ROWS,
    ),
    Planted(
        "one_lane",
        "divergence",
        f"{INDEX}  if (i >= n) return;\n  float v = x[i];\n"
        f"  if (threadIdx.x % 32 == 0) {CHAIN.format(count=2000)}\n  y[i] = v * 2.0f + 1.0f;",
    ),
    Planted(
        "every_lane_its_own_way",
        "divergence",
        f"{INDEX}  if (i >= n) return;\n  float v = x[i];\n"
        f"  switch (threadIdx.x % 7) {{\n{SWITCH}  }}\n  y[i] = v * 2.0f + 1.0f;",
    ),
    Planted(
        "by_value",
        "divergence",
        f"{INDEX}  if (i >= n) return;\n  float v = x[i];\n"
        f"  if (v > 1.5f) {CHAIN.format(count=2000)}\n  y[i] = v * 2.0f + 1.0f;",
    ),
    Planted(
        "multiply_add",
        "compute",
        f"{INDEX}  if (i >= n) return;\n  float a = x[i], b = a, c = a, d = a;\n"
        "  for (int k = 0; k < 512; ++k) {\n    a = fmaf(a, one, zero); b = fmaf(b, one, zero);\n"
        "    c = fmaf(c, one, zero); d = fmaf(d, one, zero);\n  }\n"
        "  y[i] = (a + b + c + d) * 0.5f + 1.0f;",
    ),
    Planted(
        "special_functions",
        "compute",
        f"{INDEX}  if (i >= n) return;\n  float v = x[i], s = one, t = one;\n"
        "  for (int k = 0; k < 128; ++k) { s = __expf(s * zero); t = __sinf(t * zero + one); }\n"
        "  y[i] = v * 2.0f + s + zero * t;",
    ),
    Planted(
        "vectors",
        "at_roofline",
        f"{INDEX}  if (4 * i >= n) return;\n  float4 v = ((const float4*)x)[i];\n"
        "  v.x = v.x * 2.0f + 1.0f; v.y = v.y * 2.0f + 1.0f;\n"
        "  v.z = v.z * 2.0f + 1.0f; v.w = v.w * 2.0f + 1.0f;\n  ((float4*)y)[i] = v;",
        launch="(n / 4 + 255) / 256, 256",
        size=str(1 << 27),
        bytes_min=8 << 27,
    ),
    Planted("coalesced", "at_roofline", ONE_EACH, size=str(1 << 27), bytes_min=8 << 27),
    Planted("tiny", "launch_overhead", ONE_EACH, size=str(SMALL), bytes_min=8 * SMALL),
    Planted(
        "many_tiny",
        "launch_overhead",
        f"{INDEX}  if (i < n) y[i] = x[i] + one;",
        size=str(SMALL),
        bytes_min=8 * SMALL,
        formula="x + 8.0",
        call="ext.run(ext.run(ext.run(ext.run(ext.run(ext.run(ext.run(ext.run(x))))))))",
    ),
    Planted(
        "after_a_product",
        "elsewhere",
        ONE_EACH,
        formula="(x @ x) * 2.0 + 1.0",
        call="ext.run(x @ x)",
        size="4096, 4096",
        bytes_min=8 << 24,
    ),
    Planted(
        "after_a_sort",
        "elsewhere",
        ONE_EACH,
        formula="x.sort(1).values * 2.0 + 1.0",
        call="ext.run(x.sort(1).values)",
        size="4096, 4096",
        bytes_min=8 << 24,
    ),
)
assert len(KERNELS) == 24

TASK = """import torch
import torch.nn as nn
class Model(nn.Module):
    def forward(self, x):
        return {formula}
def get_inputs():
    return [torch.randn({size}, device="cuda" if torch.cuda.is_available() else "cpu")]
def get_init_inputs():
    return []
"""
MODULE = """import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline
source = r'''
#include <torch/extension.h>
__global__ void {bounds}planted(const float* x, float* y, long n, float one, float zero) {{
{body}
}}
torch::Tensor run(torch::Tensor x) {{
  auto y = {output};
  const long n = x.numel();
  planted<<<{launch}>>>(x.data_ptr<float>(), y.data_ptr<float>(), n, 1.0f, 0.0f);
  return y;
}}
'''
ext = load_inline(name="planted_{name}", cuda_sources=source,
                  cpp_sources="torch::Tensor run(torch::Tensor x);", functions=["run"])
class ModelNew(nn.Module):
    def forward(self, x):
        return {call}
"""


def pair(planted: Planted) -> tuple[KernelTask, Candidate]:
    """The task and the candidate of a planted kernel."""
    name = f"planted/{planted.name}"
    task = KernelTask(task_id=name, name=planted.name, code=TASK.format_map(planted._asdict()))
    bounds = "__launch_bounds__(256, 8) " if planted.limit == "spills" else ""
    code = MODULE.format(bounds=bounds, **planted._asdict())
    candidate = Candidate(
        candidate_id=name,
        task_id=name,
        language=Language.CUDA,
        generator="planted",
        sampling=SamplingParams(),
        sample_index=0,
        response=code,
        code=code,
    )
    return task, candidate


class Measured(NamedTuple):
    planted: Planted
    verdict: Verdict
    profile: KernelProfile
    seconds: float


def measured(chosen: list[Planted], metrics: bool) -> Iterator[Measured]:
    """Each kernel with its verdict and its profile."""
    arch = gpu_arch()
    with (
        Evaluator(Language.CUDA, CONFIG, cuda_arch=arch) as evaluate,
        Profiler(CONFIG, "cuda:0", metrics=metrics, cuda_arch=arch) as profiler,
    ):
        for planted in chosen:
            task, candidate = pair(planted)
            verdict = evaluate(task, candidate)
            started = time.monotonic()
            flops = 2 * planted.bytes_min // 8
            flops += 2 * 4096**3 if planted.name == "after_a_product" else 0
            profile = profiler.profile(
                task, candidate, verdict, flops=flops, bytes_min=planted.bytes_min
            )
            yield Measured(planted, verdict, profile, time.monotonic() - started)


def found_in(profile: KernelProfile) -> str:
    """The finding in one word: its cause, else its limit."""
    if profile.problem is not None:
        return "no profile"
    finding = next(findings(profile))
    return str(finding.cause or finding.limit)


def line(planted: Planted, profile: KernelProfile, about: str) -> str:
    word = found_in(profile)
    mark = "" if word == planted.limit else "  <-- MISSED"
    if profile.problem is not None:
        return f"{planted.name:38} {planted.limit:16} {profile.problem[:120]}{mark}"
    shown = ", ".join(f"{name}={value:.2g}" for name, value in numbers_of(profile).items())
    return f"{planted.name:38} {planted.limit:16} {word:16} {about} [{shown}]{mark}"


def confusion(pairs: list[tuple[str, str]]) -> str:
    """A table of planted (rows) against found (columns)."""
    counts = Counter(pairs)
    rows = list(dict.fromkeys(planted for planted, _ in pairs))
    columns = [*rows, *sorted({found for _, found in pairs} - set(rows))]
    width = max(map(len, [*rows, *columns])) + 1
    head = " " * width + "".join(f"{name:>{width}}" for name in columns)
    body = [
        f"{row:{width}}" + "".join(f"{counts[row, name] or '.':>{width}}" for name in columns)
        for row in rows
    ]
    right = sum(planted == found for planted, found in pairs)
    needed = f"{right} of {len(pairs)} named (at least {NEEDED} of {len(KERNELS)} are asked for)"
    return "\n".join(["planted \\ found", head, *body, needed])


def compiled(chosen: list[Planted]) -> int:
    """Build each kernel. Returns how many could not be."""
    failed = 0
    preparer = Preparer(CONFIG)
    for planted in chosen:
        task, candidate = pair(planted)
        prepared = preparer.prepare(candidate, task)
        what = prepared.finding.log if prepared.finding else f"built ({prepared.tier})"
        failed += prepared.finding is not None
        print(f"{planted.name:38} {what} {prepared.seconds:.1f} s", flush=True)
    preparer.close()
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", help="a folder for profiles.json and table.txt")
    parser.add_argument("--only", default="", help="kernels whose name or limit holds this")
    parser.add_argument("--no-metrics", action="store_true", help="do not ask ncu")
    parser.add_argument("--compile-only", action="store_true")
    parser.add_argument("--again", help="profiles.json of an earlier run")
    asked = parser.parse_args()
    chosen = [each for each in KERNELS if asked.only in f"{each.name} {each.limit}"]
    if asked.compile_only:
        return compiled(chosen)
    kept: list[dict[str, Any]] = []
    if asked.again:
        kept = json.loads(Path(asked.again).read_text())
        profiles = {row["name"]: KernelProfile.model_validate(row["profile"]) for row in kept}
        chosen = [each for each in chosen if each.name in profiles]
        lines = [line(each, profiles[each.name], "") for each in chosen]
        print("\n".join(lines))
        print(confusion([(each.limit, found_in(profiles[each.name])) for each in chosen]))
        return 0
    pairs, lines = [], []
    for planted, verdict, profile, seconds in measured(chosen, not asked.no_metrics):
        pairs.append((planted.limit, found_in(profile)))
        times = f"{verdict.timing.candidate_ms:.4g} ms" if verdict.timing else verdict.detail[:80]
        about = f"{verdict.status}, {times}, profiled in {seconds:.1f} s"
        lines.append(line(planted, profile, about))
        print(lines[-1], flush=True)
        row = {"name": planted.name, "limit": planted.limit, "seconds": seconds}
        told = {
            "verdict": verdict.model_dump(mode="json"),
            "profile": profile.model_dump(mode="json"),
        }
        kept.append(row | told)
    spent = sorted(row["seconds"] for row in kept)
    counters = {row["profile"]["counters"] for row in kept if row["profile"]["counters"]}
    lines += ["", confusion(pairs), *(f"counters: {said}" for said in counters)]
    lines.append(
        f"a profile takes {spent[len(spent) // 2]:.1f} s (median), {spent[-1]:.1f} s at most"
    )
    print("\n".join(lines[len(kept) :]))
    if asked.out:
        folder = Path(asked.out)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "profiles.json").write_text(json.dumps(kept))
        (folder / "table.txt").write_text("\n".join(lines) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
