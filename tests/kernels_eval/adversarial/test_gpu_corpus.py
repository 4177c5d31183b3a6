"""Cheats and their honest twins that need a GPU, from tests/data/adversarial_gpu; and verdicts of
other kinds, from tests/data/verdicts_gpu."""

import pytest

from tests.support.adversarial import GPU_CORPUS, GPU_VERDICTS, parameters, trials_of
from tests.support.kernels import verifying_on_gpu
from tests.support.processes import python

TRIALS = trials_of(GPU_CORPUS)


@pytest.fixture(scope="module")
def judge():
    with verifying_on_gpu() as made:
        yield made


def persisting_l2_changes():
    """Can a process set L2 aside here? Asked in a process of its own."""
    script = (
        "import ctypes, torch; torch.empty(1, device='cuda'); rt = ctypes.CDLL('libcudart.so.13');"
        " v = [ctypes.c_size_t() for _ in '12'];rt.cudaDeviceGetLimit(ctypes.byref(v[0]), 6);"
        " rt.cudaDeviceSetLimit(6, ctypes.c_size_t(8 <<"
        " 20));rt.cudaDeviceGetLimit(ctypes.byref(v[1]), 6); print(v[0].value != v[1].value)"
    )
    return python(script).stdout.strip() == "True"


@pytest.mark.gpu
@pytest.mark.parametrize("trial", parameters([*TRIALS, *trials_of(GPU_VERDICTS)]))
def test_gpu_corpus(judge, trial):
    if trial.threat == 34 and not persisting_l2_changes():
        pytest.skip(
            "cudaDeviceSetLimit changes nothing on this machine: there is no carve-out to find"
        )
    trial.assert_judged(judge)
