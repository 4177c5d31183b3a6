"""Two lanes on a GPU reach the verdicts of one. How far their times are apart, and how much faster
they are, is what `python -m benchmarks.lanes` measures."""

import os

import pytest

from kernels_eval.config import BuildConfig, EvalConfig, TimingConfig
from kernels_eval.pool.pool import Pool
from kernels_eval.records import STATUS_OF, Language
from tasks.sources import bundled
from tasks.synthesis.parsing import parse_response
from tests.support import kernels
from tests.support.kernels import load_inline, module
from tests.support.pools import fresh_ray, outcomes

pytestmark = pytest.mark.gpu
CONFIG = EvalConfig(timing=TimingConfig(max_s=0.5), build=BuildConfig(timeout_s=240))
FAULT = r"""
__global__ void beyond(float* y) { y[(1ll << 40) + threadIdx.x] = 1.0f; }
torch::Tensor faults(torch::Tensor x) {
  auto y = torch::empty_like(x);
  beyond<<<1, 32>>>(y.data_ptr<float>());
  return y;
}
"""


TASKS = ("softmax_rows", "group_norm_swish", "swiglu_gate")


def pairs():
    """Bundled answers, one task after the other, each with one that breaks its CUDA context."""
    extension = load_inline(FAULT, name="beyond", cuda=True)
    for task in (task for task in bundled.load() if task.name in TASKS):
        codes = [parse_response(text).code for text in bundled.responses(task.name, "cuda")]
        codes.append(module("return ext.faults(x)", extension=extension))
        for code in filter(None, codes):
            yield task, kernels.candidate(task, code, language=Language.CUDA)


def test_two_lanes_reach_the_verdicts_of_one():
    asked, found = list(pairs()), []
    with fresh_ray(os.cpu_count(), 1):
        for lanes in (1, 2):
            with Pool(Language.CUDA, CONFIG, workers=1, lanes=lanes) as pool:
                reasons = outcomes(asked, list(pool.verify(asked)))
                found.append([STATUS_OF[reason] for reason in reasons])
                assert not pool.quarantined and not pool.cautions
    assert found[0] == found[1]
    assert {"ok", "cuda_error"} <= set(reasons)
