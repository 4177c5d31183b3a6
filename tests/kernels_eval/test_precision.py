"""The gates of each type of number. Tasks in each: tests/data/verdicts/precision.yaml."""

import pytest

from kernels_eval.model.correctness import judge
from kernels_eval.protocol import Comparison
from kernels_eval.records import Reason
from tasks.sources import kernelbench
from tests.support.kernels import AFFINE


@pytest.mark.parametrize(
    "precision, passes, fails",
    [("fp32", 9e-6, 2e-5), ("fp16", 1.9e-3, 3e-3), ("bf16", 0.015, 0.02), ("e4m3", 0.05, 0.07)],
)
def test_the_gate_of_each_type(precision, passes, fails):
    for error, reason in ((passes, Reason.OK), (fails, Reason.WRONG_OUTPUT)):
        measured = Comparison(rms=error, max=error, reference_rms=0.0)
        assert judge(measured, precision) in (
            reason,
            *(
                [Reason.PRECISION_DOWNCAST]
                if precision == "fp32" and reason is not Reason.OK
                else []
            ),
        )


def test_the_reference_s_own_error_widens_no_gate_of_fp8():
    measured = Comparison(rms=0.2, max=0.2, reference_rms=0.036)
    assert judge(measured, "e4m3") is Reason.WRONG_OUTPUT
    assert judge(measured, "bf16") is Reason.OK


def test_kernelbench_is_loaded_in_a_precision(tmp_path):
    folder = tmp_path / "level1"
    folder.mkdir()
    (folder / "1_affine.py").write_text(AFFINE.code)
    (plain,), (half,) = (
        kernelbench.load(tmp_path, precision=precision) for precision in ("fp32", "bf16")
    )
    assert plain.code == AFFINE.code and "PRECISION" not in plain.code
    names = {}
    exec(half.code, names)
    assert names["PRECISION"] == "bf16" and half.task_id == plain.task_id
