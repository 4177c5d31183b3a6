"""The gates of each type of number. Tasks in each: tests/data/verdicts/precision.yaml."""

import pytest

from kernels_eval.model.correctness import answer_of, hangs_on_scatter, judge
from kernels_eval.protocol import Comparison
from kernels_eval.records import Reason
from tasks.sources import kernelbench
from tests.support.kernels import AFFINE


@pytest.mark.parametrize(
    "precision, passes, fails",
    [
        ("fp64", 9e-13, 2e-12),
        ("fp32", 9e-7, 2e-6),
        ("fp16", 7e-4, 1e-3),
        ("bf16", 6e-3, 7e-3),
        ("e4m3", 0.039, 0.042),
    ],
)
def test_the_gate_of_each_type(precision, passes, fails):
    for error, reason in ((passes, Reason.OK), (fails, Reason.WRONG_OUTPUT)):
        assert (
            judge(Comparison(rms=error, max=error, reference_rms=0.0, precision=precision))
            is reason
        )


@pytest.mark.parametrize(
    "precision, own, passes, fails",
    [("fp32", 1e-6, 7e-6, 9e-6), ("fp16", 1e-3, 3.9e-3, 5e-3), ("bf16", 5e-3, 0.019, 0.021)],
)
def test_the_reference_s_own_error_widens_a_gate(precision, own, passes, fails):
    for error, right in ((passes, True), (fails, False)):
        measured = Comparison(rms=error, max=error, reference_rms=own, precision=precision)
        assert (judge(measured) is Reason.OK) == right


@pytest.mark.parametrize(
    "precision, narrow, wide", [("fp32", 1e-6, 1e-5), ("bf16", 6.4e-3, 1.6e-2)]
)
def test_scatter_is_asked_for_where_it_could_make_an_answer_right(precision, narrow, wide):
    for error, asked in ((narrow / 2, False), (narrow * 1.2, True), (wide * 1.2, False)):
        measured = Comparison(rms=error, max=error, reference_rms=0.0, precision=precision)
        assert hangs_on_scatter(measured) == asked
    assert judge(measured.model_copy(update={"scatter_rms": wide})) is Reason.OK


def test_the_reference_s_own_error_widens_no_gate_of_fp8():
    for precision, reason in (("e4m3", Reason.WRONG_OUTPUT), ("bf16", Reason.OK)):
        measured = Comparison(rms=0.1, max=0.1, reference_rms=0.036, precision=precision)
        assert judge(measured) is reason


def test_each_output_is_judged_by_its_own_precision():
    own = [Comparison(rms=0.0, max=0.0, reference_rms=error) for error in (2e-3, 1e-8, 0.0)]
    for wrong, reason in ((1e-7, Reason.OK), (4e-4, Reason.PRECISION_DOWNCAST)):
        errors = [("bf16", 2e-3), ("fp32", wrong), ("", 0.0)]
        outputs = [
            Comparison(rms=rms, max=rms, reference_rms=0.0, precision=precision)
            for precision, rms in errors
        ]
        for order in (1, -1):
            found = answer_of(outputs[::order], own[::order])
            assert judge(found) is reason
        assert reason is Reason.OK or (found.rms, found.precision, found.worst) == (
            wrong,
            "fp32",
            1,
        )


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
