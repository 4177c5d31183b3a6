"""Ideas of other suites that only exist on a GPU: their cheats with streams, events, graphs and
device memory, and the shapes of kernels that they show as good (origins are in `source` comments;
benchmarks/results/2026-11-23-others-suites.md has the table)."""

import pytest

from tests.support.adversarial import CORPUS, GPU_CORPUS, cases_of, trials
from tests.support.kernels import functions_in, module, verifying_on_gpu

SOURCE = (CORPUS / "others.cu").read_text(encoding="utf-8")
SIGNATURES = [line.split(" {")[0] + ";" for line in SOURCE.replace(",\n    ", ", ").splitlines()]
DECLARED = "\n".join(line for line in SIGNATURES if line.startswith("torch::Tensor "))
EXTENSION = (
    f"load_inline(name='others_gpu', cpp_sources={DECLARED!r}, cuda_sources={SOURCE!r},"
    f" functions={functions_in(SOURCE)!r}, extra_cuda_cflags=['-O2'])"
)


def code(forward, **parts):
    return module(forward, extension=EXTENSION, **parts)


CASES = cases_of(GPU_CORPUS / "gpu_others.yaml", code)


@pytest.fixture(scope="module")
def judge():
    with verifying_on_gpu() as made:
        yield made


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.parametrize("trial", trials(CASES, code))
def test_others_gpu(judge, trial):
    trial.assert_judged(judge)
