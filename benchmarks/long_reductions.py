"""Which fp32 sums of a given length does the gate let pass, and which does it refuse?

    python -m benchmarks.long_reductions --device cpu --out long-reductions.md

Multiplies two matrices of 8 rows over lengths of 2^8 to 2^21, with kernels that add up in fp32 in
several orders (all honest) and with such that round their factors or leave terms out, and has the
real gate judge each on the inputs of several trials. `--device cuda` does the same with CUDA
kernels, and adds what cuBLAS makes of TF32 and bf16.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor
from torch.utils.cpp_extension import load_inline

from kernels_eval.checks.correctness import judge
from kernels_eval.checks.inputs import make_inputs, plan_inputs
from kernels_eval.checks.measurement import measure
from kernels_eval.config import CorrectnessConfig
from kernels_eval.records import Reason
from kernels_eval.reference.long_sums import LongSums

ROWS = 8
TRIALS = ("declared", "normal", "mixed", "impulse")
ROUND = r"""
#define SUM(BITS, STEP) \
  float total = 0; \
  for (int64_t k = from; k < to; k += STEP) total += kept(x[k], BITS) * kept(y[k], BITS); \
  return total;
static HOW float kept(float value, int bits) {
  if (bits > 22) return value;
  const unsigned drop = 23 - bits;
  union { float f; unsigned u; } word;
  word.f = value;
  word.u = (word.u + (1u << (drop - 1))) & ~((1u << drop) - 1);
  return word.f;
}
static HOW float part(const float* x, const float* y, int64_t from, int64_t to, int bits,
                      int64_t step) {
  SUM(bits, step)
}
"""
CPU = (
    "#define HOW inline\n"
    + ROUND
    + r"""
torch::Tensor product(torch::Tensor a, torch::Tensor b, int64_t block, int64_t stop, int64_t bits,
                      int64_t step, bool shuffled) {
  const int64_t rows = a.size(0), length = a.size(1), parts = (stop + block - 1) / block;
  auto out = torch::empty({rows, rows});
  auto order = shuffled ? torch::randperm(parts) : torch::arange(parts);
  for (int64_t i = 0; i < rows; ++i) for (int64_t j = 0; j < rows; ++j) {
    float total = 0;
    for (int64_t n = 0; n < parts; ++n) {
      const int64_t from = order.data_ptr<int64_t>()[n] * block;
      total += part(a.data_ptr<float>() + i * length, b.data_ptr<float>() + j * length, from,
                    std::min(stop, from + block), bits, step);
    }
    out.data_ptr<float>()[i * rows + j] = total * step;
  }
  return out;
}
"""
)
CUDA = (
    "#define HOW __device__\n"
    + ROUND
    + r"""
__global__ void parts_of(const float* a, const float* b, float* sums, int64_t rows, int64_t length,
                         int64_t parts, int64_t block, int64_t stop, int bits, int64_t step,
                         bool atomic) {
  const int64_t index = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;
  if (index >= rows * rows * parts) return;
  const int64_t out = index / parts, from = index % parts * block;
  const float sum = part(a + out / rows * length, b + out % rows * length, from,
                         min(stop, from + block), bits, step) * step;
  if (atomic) atomicAdd(sums + out, sum); else sums[index] = sum;
}
__global__ void in_order(const float* sums, float* out, int64_t parts) {
  float total = 0;
  for (int64_t n = 0; n < parts; ++n) total += sums[threadIdx.x * parts + n];
  out[threadIdx.x] = total;
}
torch::Tensor product(torch::Tensor a, torch::Tensor b, int64_t block, int64_t stop, int64_t bits,
                      int64_t step, bool atomic) {
  const int64_t rows = a.size(0), parts = (stop + block - 1) / block;
  auto sums = torch::zeros({rows, rows, atomic ? 1 : parts}, a.options());
  parts_of<<<(rows * rows * parts + 63) / 64, 64>>>(a.data_ptr<float>(), b.data_ptr<float>(),
      sums.data_ptr<float>(), rows, a.size(1), parts, block, stop, bits, step, atomic);
  auto out = torch::empty({rows, rows}, a.options());
  in_order<<<1, rows * rows>>>(sums.data_ptr<float>(), out.data_ptr<float>(), atomic ? 1 : parts);
  return out;
}
"""
)
DECLARATION = (
    "torch::Tensor product(torch::Tensor, torch::Tensor, int64_t, int64_t, int64_t, int64_t, bool);"
)
Product = Callable[[Tensor, Tensor], Tensor]


def kernels(library: ModuleType, length: int, device: str) -> dict[str, tuple[bool, Product]]:
    """Honest or not, and the product, by name. The second factor comes transposed."""

    def of(
        block: int, bits: int = 23, stop: int = length, step: int = 1, mixed: bool = False
    ) -> Product:
        return lambda a, b: library.product(a, b, min(block, stop), stop, bits, step, mixed)

    found: dict[str, tuple[bool, Product]] = {
        "sequential": (True, of(length)),
        "blocked by 256": (True, of(256)),
        "atomic": (True, of(256, mixed=True)),
        "split-K of 32": (True, of(max(1, length // 32))),
        "TF32 factors": (False, of(256, bits=10)),
        "bf16 factors": (False, of(256, bits=7)),
        "one in 64 left out": (False, of(256, stop=length - length // 64)),
        "one in 4 sampled": (False, of(256, step=4)),
    }
    if device == "cuda":
        found["cuBLAS TF32"] = (False, _cublas_tf32)
        found["cuBLAS bf16"] = (False, lambda a, b: (a.bfloat16() @ b.bfloat16().T).float())
    return found


def _cublas_tf32(a: Tensor, b: Tensor) -> Tensor:
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        return a @ b.T
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False


def judged(
    library: ModuleType, length: int, seed: int, device: str
) -> dict[str, tuple[bool, bool, dict[str, float]]]:
    """By kernel: is it honest, is it accepted on all trials, and its relative RMS errors."""
    task = ModuleType("task")
    vars(task)["get_inputs"] = lambda: [torch.rand(ROWS, length), torch.rand(ROWS, length)]
    plan = plan_inputs(make_inputs(task, 0, "declared", None, device))
    wanted = kernels(library, length, device)
    passed, errors = dict.fromkeys(wanted, True), defaultdict(dict)
    for trial in TRIALS:
        a, b = make_inputs(task, seed, trial, plan, device)
        oracle = a.double() @ b.double().T
        with LongSums() as sums:
            reference = a @ b.T
        for name, (_, product) in wanted.items():
            found = measure(product(a, b), oracle, reference)
            errors[name][trial] = found.rms
            found = found.model_copy(update={"sequential_rms": sums.error})
            passed[name] &= judge(found, "fp32", CorrectnessConfig()) is Reason.OK
    return {name: (honest, passed[name], errors[name]) for name, (honest, _) in wanted.items()}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--longest", type=int, default=21, help="log2 of the longest sum")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", help="write the tables here, too, Markdown")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    on_gpu = asked.device == "cuda"
    source = {"cpp_sources": DECLARATION, "cuda_sources": CUDA} if on_gpu else {"cpp_sources": CPU}
    library = load_inline(f"long_sums_{asked.device}", functions=["product"], **source)
    started, lengths = time.monotonic(), range(8, asked.longest + 1)
    counts: dict[tuple[str, int], int] = defaultdict(int)
    worst: dict[tuple[str, int, str], float] = defaultdict(float)
    names: dict[str, bool] = {}
    text = ""
    for power in lengths:
        for seed in range(asked.seeds):
            rows = judged(library, 1 << power, seed, asked.device)
            for name, (honest, passed, errors) in rows.items():
                names[name] = honest
                counts[name, power] += passed
                for trial, error in errors.items():
                    worst[name, power, trial] = max(worst[name, power, trial], error)
        print(f"2^{power}: {time.monotonic() - started:.0f} s", file=sys.stderr, flush=True)
        text = tables(names, range(8, power + 1), asked.seeds, counts, worst)
        if asked.out:
            Path(asked.out).write_text(text)
    print(text)
    return 0


def tables(
    names: dict[str, bool],
    lengths: range,
    seeds: int,
    counts: dict[tuple[str, int], int],
    worst: dict[tuple[str, int, str], float],
) -> str:
    """What was accepted and how large the errors were, by kernel and length, as Markdown."""
    head = " | ".join(["kernel", *(f"2^{power}" for power in lengths)])
    rule = "| --- |" + " --- |" * len(lengths)
    lines = [f"Accepted of {seeds}, by length:", "", f"| {head} |", rule]
    for name, honest in names.items():
        cells = [str(counts[name, power]) for power in lengths]
        lines.append(f"| {name} ({'honest' if honest else 'not'}) | {' | '.join(cells)} |")
    for trial in ("declared", "normal"):
        lines += ["", f"Largest relative RMS error on `{trial}` inputs:", "", f"| {head} |", rule]
        for name in names:
            cells = [f"{worst[name, power, trial]:.1e}" for power in lengths]
            lines.append(f"| {name} | {' | '.join(cells)} |")
    for honest, what in ((True, "honest refused"), (False, "others accepted")):
        chosen = [name for name in names if names[name] is honest]
        total = len(chosen) * len(lengths) * seeds
        right = sum(counts[name, power] for name in chosen for power in lengths)
        lines += ["", f"{what}: {total - right if honest else right} of {total}"]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
