"""Tiny tasks, one small C++ library full of honest and dishonest kernels, and builders of candidate
sources.

Most candidates share `SOURCE`, so a whole test file compiles it once: what differs is which
function they call and what Python they wrap around it. Inputs are about 64 x 64 float32.
"""

import atexit
import re
import sys
import textwrap
from contextlib import contextmanager
from functools import cache
from pathlib import Path

from kernels_eval.config import BuildConfig, EvalConfig, LimitsConfig, TimingConfig
from kernels_eval.devices import gpu_arch
from kernels_eval.evaluator import Evaluator
from kernels_eval.flags import meaning_of
from kernels_eval.judge.prepare import Workplace
from kernels_eval.records import STATUS_OF, Candidate, KernelTask, Language, stable_hash
from kernels_eval.toolchain import default_cache

QUICK = EvalConfig(
    build=BuildConfig(timeout_s=600, capture_timeout_s=60),
    timing=TimingConfig(max_s=20, min_pairs=6, min_side_s=0.02, interval_width=0.5),
    limits=LimitsConfig(run_s=20, load_s=60),
    address_sanitizer="off",
    compute_sanitizer=(),
)
"""A verdict in about a second on an idle machine; every gate as in production. Deadlines and the
budget of timing are those of a busy machine: no verdict depends on how much of it others use."""


UNTIMED = QUICK.model_copy(update={"time_correct": False})

SPINS = """
import threading
def spin():
    while True:
        pass
threading.Thread(target=spin, daemon=True).start()
"""
"""A thread that computes until its process ends or is stopped."""

OWN_TMP = not any(
    Path(place).resolve().is_relative_to("/tmp")
    for place in (__file__, sys.prefix, default_cache())
)
"""Has a child a /tmp of its own? Not where this code, its Python or its builds are in /tmp."""


def kernel_task(code, name, **fields):
    return KernelTask.model_validate(
        {"task_id": f"test/{name}", "name": name, "code": textwrap.dedent(code).lstrip(), **fields}
    )


def task_source(
    forward,
    *,
    init="pass",
    arguments="x",
    inputs="[torch.randn(64, 64)]",
    init_inputs="[]",
):
    """A reference program; `forward` and `init` are one statement a line, `init` may use the name
    `scale` when it is an argument."""
    takes = ", scale" if init_inputs != "[]" else ""
    return "\n".join(
        [
            "import torch",
            "import torch.nn as nn",
            "class Model(nn.Module):",
            f"    def __init__(self{takes}):",
            "        super().__init__()",
            *(f"        {line}" for line in init.splitlines()),
            f"    def forward(self, {arguments}):",
            *(f"        {line}" for line in forward.splitlines()),
            "def get_inputs():",
            f"    return {inputs}",
            "def get_init_inputs():",
            f"    return {init_inputs}",
        ]
    )


AFFINE = kernel_task(task_source("return x * 2.0 + 1.0"), "affine")
WEIGHTED = kernel_task(
    task_source("return x * self.weight", init="self.weight = nn.Parameter(torch.randn(64))"),
    "weighted",
)

SOURCE = r"""
#include <unistd.h>
#include <cstdio>
#include <cstdlib>
#include <cmath>
#include <cstring>

static torch::Tensor each(torch::Tensor x, float (*f)(float)) {
  auto in = x.contiguous();
  auto out = torch::empty_like(in);
  const float* a = in.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < in.numel(); ++i) b[i] = f(a[i]);
  return out;
}
static float twice_plus_one(float v) { return v * 2.0f + 1.0f; }
static float ten_bits(float v) {
  v = twice_plus_one(v);
  unsigned bits;
  std::memcpy(&bits, &v, 4);
  bits = (bits + 0x1000u) & ~0x1fffu;
  std::memcpy(&v, &bits, 4);
  return v;
}

torch::Tensor affine(torch::Tensor x) { return each(x, twice_plus_one); }
torch::Tensor rounded(torch::Tensor x) { return each(x, ten_bits); }
torch::Tensor shifted(torch::Tensor x) { return each(x, [](float v) { return v * 2.0f + 1.5f; }); }
torch::Tensor with_nan(torch::Tensor x) {
  auto out = each(x, twice_plus_one);
  out.data_ptr<float>()[7] = NAN;
  return out;
}
torch::Tensor one_wrong(torch::Tensor x) {
  auto out = each(x, twice_plus_one);
  out.data_ptr<float>()[out.numel() - 1] += 1.0f;
  return out;
}
torch::Tensor affine_into(torch::Tensor x, torch::Tensor out) {
  const float* a = x.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = twice_plus_one(a[i]);
  return out;
}
torch::Tensor relu_in_place(torch::Tensor x) {
  float* a = x.data_ptr<float>();
  for (int64_t i = 0; i < x.numel(); ++i) a[i] = a[i] > 0.0f ? a[i] : 0.0f;
  return x;
}
torch::Tensor times_row(torch::Tensor x, torch::Tensor row) {
  auto out = torch::empty_like(x);
  const float* a = x.data_ptr<float>();
  const float* w = row.data_ptr<float>();
  float* b = out.data_ptr<float>();
  const int64_t n = row.numel();
  for (int64_t i = 0; i < x.numel(); ++i) b[i] = a[i] * w[i % n];
  return out;
}
torch::Tensor integers(torch::Tensor x) {
  auto out = torch::empty_like(x);
  for (int64_t i = 0; i < x.numel(); ++i)
    out.data_ptr<int64_t>()[i] = x.data_ptr<int64_t>()[i] * 3 - 1;
  return out;
}
torch::Tensor row_sum(torch::Tensor x) {
  auto out = torch::empty({x.size(0)}, x.options());
  for (int64_t i = 0; i < x.size(0); ++i) {
    double sum = 0;
    for (int64_t j = 0; j < x.size(1); ++j) sum += x.data_ptr<float>()[i * x.size(1) + j];
    out.data_ptr<float>()[i] = (float)sum;
  }
  return out;
}
torch::Tensor aborts(torch::Tensor x) { std::abort(); return x; }
torch::Tensor null_write(torch::Tensor x) { *(volatile int*)nullptr = 1; return x; }
torch::Tensor leaves(torch::Tensor x) {
  std::printf("{\"status\": \"correct\", \"reason\": \"ok\", \"timing\": {\"speedup\": 1000.0}}\n");
  std::fflush(stdout);
  (&_exit)(0);  // through a pointer: a plain call is seen in the source
  return x;
}
torch::Tensor spins(torch::Tensor x) {
  volatile bool on = true;
  while (on) {}
  return x;
}
"""
DEFINED = re.compile(
    r"^((?:torch::Tensor|at::Tensor|int64_t|std::vector<torch::Tensor>) (\w+)\([^;{]*\)) \{",
    re.MULTILINE,
)


def functions_in(source):
    """The functions that a source defines and does not keep to itself."""
    return [name for _, name in DEFINED.findall(source)]


def load_inline(source=SOURCE, name="concur_test_kernels", *, cuda=False, **options):
    """A `load_inline(...)` expression that binds every function of the source, unless it binds
    itself."""
    asked = {"name": name, "cpp_sources": source, "functions": functions_in(source)}
    if "PYBIND11_MODULE" in source:
        asked["functions"] = None
    if cuda:
        declared = "\n".join(f"{signature};" for signature, _ in DEFINED.findall(source))
        asked |= {"cpp_sources": declared, "cuda_sources": source}
    asked |= {"extra_cuda_cflags" if cuda else "extra_cflags": ["-O2"]} | options
    return f"load_inline({', '.join(f'{key}={value!r}' for key, value in asked.items())})"


def module(
    forward,
    *,
    init="",
    before="",
    after="",
    extension=None,
    arguments="x",
):
    """A candidate's Python source. `forward`, `init`, `before` and `after` are lines of Python; the
    extension is the name `ext`."""
    return "\n".join(
        [
            "import torch",
            "import torch.nn as nn",
            "from torch.utils.cpp_extension import load_inline",
            before,
            f"ext = {extension if extension is not None else load_inline()}",
            "class ModelNew(nn.Module):",
            "    def __init__(self, *args, **kwargs):",
            "        super().__init__()",
            *(f"        {line}" for line in init.splitlines()),
            f"    def forward(self, {arguments}):",
            *(f"        {line}" for line in forward.splitlines()),
            after,
        ]
    )


def candidate(
    task,
    code,
    *,
    language=Language.CPP,
    parse_reason=None,
):
    return Candidate(
        candidate_id=stable_hash([task.code, code, parse_reason]),
        task_id=task.task_id,
        language=language,
        generator="tests",
        code=code,
        parse_reason=parse_reason,
    )


@cache
def workplace():
    """Holds the fork server of all verifiers of this process: starting one takes seconds."""
    made = Workplace(QUICK)
    atexit.register(made.close)
    return made


class Verifier:
    """Verdicts of sources, in the processes of one evaluator: candidates of a task share its
    reference. With a fork server of its own only where that is what is tested."""

    def __init__(
        self,
        config=QUICK,
        device="cpu",
        own_server=False,
        **options,
    ):
        self.evaluator = Evaluator(device, config, **options)
        self.preparer, self.runner = self.evaluator.preparer, self.evaluator.runner
        if not own_server:
            self.runner._host = workplace()

    def __call__(
        self,
        task,
        code,
        *,
        language=Language.CPP,
        parse_reason=None,
        timed=None,
    ):
        """`timed`: otherwise than configured, with the same reference."""
        evaluator, config = self.evaluator, self.evaluator.config
        if timed is not None:
            evaluator.config = config.model_copy(update={"time_correct": timed})
        try:
            return evaluator(
                task, candidate(task, code, language=language, parse_reason=parse_reason)
            )
        finally:
            evaluator.config = config


@contextmanager
def verifying(config=QUICK, device="cpu", **options):
    made = Verifier(config, device, **options)
    with made.evaluator:
        yield made


def on_gpu(config):
    """With deadlines for the first use of a GPU."""
    limits = config.limits.model_copy(update={"run_s": 30, "load_s": 60})
    return config.model_copy(update={"limits": limits})


@contextmanager
def verifying_on_gpu(config=QUICK):
    with verifying(on_gpu(config), "cuda:0", cuda_arch=gpu_arch()) as made:
        yield made


def assert_reason(verdict, *reasons, timed=True):
    """One of these reasons, with its status, flags that have a meaning, and a timing if correct."""
    seen = f"{verdict.status.value}/{verdict.reason}: {verdict.detail}\n{verdict.log_tail}"
    assert verdict.reason in reasons, f"expected {' or '.join(reasons)}, saw {seen}"
    assert verdict.status is STATUS_OF[verdict.reason]
    assert all(map(meaning_of, verdict.flags)), verdict.flags
    assert (verdict.timing is not None) == (timed and verdict.reason == "ok")
