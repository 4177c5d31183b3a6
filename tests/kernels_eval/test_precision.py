"""Tasks in bf16, fp16 and FP8: which answers pass the gates of each type."""

import pytest

from kernels_eval.model.correctness import judge
from kernels_eval.protocol import Comparison
from kernels_eval.records import Reason
from tasks.sources import kernelbench
from tests.support.kernels import QUICK, kernel_task, task_source, verifying

SOURCE = """
torch::Tensor affine(torch::Tensor y, double s) {
  y = y.contiguous();
  auto out = torch::empty_like(y);
  const float* a = y.data_ptr<float>();
  float* b = out.data_ptr<float>();
  for (int64_t i = 0; i < y.numel(); ++i) b[i] = (a[i] * 2 + 1) * s;
  return out;
}
"""
FP8, E5M2 = "torch.float8_e4m3fn", "torch.float8_e5m2"
PLAIN = "return x * 2.0 + 1.0"


def task(forward=PLAIN, cast="", precision=""):
    code = task_source(forward, inputs=f"[torch.randn(64, 64){cast}]")
    constant = f'\nPRECISION = "{precision}"\n' if precision else ""
    return kernel_task(code + constant, f"affine{cast}{precision}")


def module(scale, dtype):
    return f"""import torch
from torch.utils.cpp_extension import load_inline

ext = load_inline(name="precise", cpp_sources={SOURCE!r}, functions=["affine"])


class ModelNew(torch.nn.Module):
    def forward(self, x):
        return ext.affine(x.float(), {scale}).to({dtype})
"""


@pytest.fixture(scope="module")
def verify():
    with verifying(QUICK.model_copy(update={"time_correct": False})) as made:
        yield made


TO_FP8 = f"return (x * 2.0 + 1.0).to({FP8})"
FROM_E5M2 = f"return (x.float() * 2.0 + 1.0).to({E5M2})"


@pytest.mark.parametrize(
    "asked, dtype, scale, reason",
    [
        (task(precision="bf16"), "x.dtype", 1, "ok"),
        (task(precision="bf16"), "x.dtype", 1.05, "wrong_output"),
        (task(precision="bf16"), "torch.float32", 1, "wrong_dtype"),
        (task(precision="fp16"), "x.dtype", 1, "ok"),
        (task(precision="fp16"), "x.dtype", 1.01, "wrong_output"),
        (task("return x.float() * 2.0 + 1.0", f".to({FP8})"), "torch.float32", 1, "ok"),
        (
            task("return x.float() * 2.0 + 1.0", f".to({FP8})"),
            "torch.float32",
            1.01,
            "wrong_output",
        ),
        (task(TO_FP8), FP8, 1, "ok"),
        (task(TO_FP8), FP8, 1.2, "wrong_output"),
        (task(FROM_E5M2, f".to({E5M2})"), E5M2, 1, "ok"),
        (task(precision="fp8"), "x.dtype", 1, "reference_failed"),
    ],
)
def test_a_task_is_judged_in_its_precision(verify, asked, dtype, scale, reason):
    verdict = verify(asked, module(scale, dtype))
    assert verdict.reason == reason, verdict
    if reason == "reference_failed":
        assert "'fp8', which is none of fp32, fp16, bf16" in verdict.detail


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
    (folder / "1_affine.py").write_text(task().code)
    (plain,), (half,) = (
        kernelbench.load(tmp_path, precision=precision) for precision in ("fp32", "bf16")
    )
    assert plain.code == task().code and "PRECISION" not in plain.code
    names = {}
    exec(half.code, names)
    assert names["PRECISION"] == "bf16" and half.task_id == plain.task_id
