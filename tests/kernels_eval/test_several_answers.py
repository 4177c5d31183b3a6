"""Tasks of which several answers are right, and small errors that a shorter mantissa explains."""

import pytest
import torch

from kernels_eval.judge.gates import TaskGates
from kernels_eval.protocol import Expect, LoadTask, ModelSpec
from kernels_eval.reference.answers import ReferenceRole
from kernels_eval.reference.downcasts import EXPLANATIONS, FORMATS, explains, lost_bits
from tests.kernels_eval.test_expected_values import serving
from tests.support.kernels import task_source

MATRIX = "[torch.randn(40, 24)]"
SYMMETRIC = "[(lambda a: a + a.T)(torch.randn(24, 24))]"


def signed(x, dim=-1):
    signs = torch.where(torch.arange(x.shape[dim]) % 3 == 0, -1.0, 1.0)
    return x * (signs if dim == -1 else signs[:, None])


def qr(x):
    q, r = torch.linalg.qr(x.double())
    return signed(q), signed(r, -2)


def eigh(x):
    values, vectors = torch.linalg.eigh(x.double())
    return values, signed(vectors)


def svd(x):
    u, s, vh = torch.linalg.svd(x.double(), full_matrices=False)
    return signed(u), s, signed(vh, -2)


RIGHT = {
    "torch.linalg.qr(x)": (MATRIX, qr),
    "torch.linalg.qr(x)[0]": (MATRIX, lambda x: qr(x)[0]),
    "torch.linalg.qr(x)[1]": (MATRIX, lambda x: qr(x)[1]),
    "torch.linalg.qr(x)[1].abs()": (MATRIX, lambda x: qr(x)[1].abs()),
    "torch.linalg.eigh(x)": (SYMMETRIC, eigh),
    "torch.linalg.eigh(x)[1]": (SYMMETRIC, lambda x: eigh(x)[1]),
    "torch.linalg.eigh(x)[1].abs()": (SYMMETRIC, lambda x: eigh(x)[1].abs()),
    "torch.linalg.eigh(x, UPLO='U')": (
        MATRIX.replace("40", "24"),
        lambda x: eigh(x.triu() + x.triu(1).T),
    ),
    "torch.linalg.svd(x, full_matrices=False)": (MATRIX, svd),
    "torch.svd(x)": (MATRIX, lambda x: (*svd(x)[:2], svd(x)[2].mT)),
    "torch.linalg.svd(x, full_matrices=False)[2]": (MATRIX, lambda x: svd(x)[2]),
    "torch.linalg.svd(x, full_matrices=False)[0]": (MATRIX, lambda x: svd(x)[0]),
    "torch.linalg.svdvals(x)": (MATRIX, lambda x: svd(x)[1]),
}
WRONG = {
    "r_of_another": ("torch.linalg.qr(x)", MATRIX, lambda x: (qr(x)[0], qr(x)[1] * 1.01)),
    "not_triangular": ("torch.linalg.qr(x)", MATRIX, lambda x: svd(x)[::2]),
    "not_orthogonal": ("torch.linalg.qr(x)", MATRIX, lambda x: (x / 2, 2 * torch.eye(24))),
    "zeros": ("torch.linalg.qr(x)", MATRIX, lambda x: [y * 0 for y in qr(x)]),
    "identity": ("torch.linalg.eigh(x)[1]", SYMMETRIC, lambda x: torch.eye(24)),
    "another_order": (
        "torch.linalg.eigh(x)",
        SYMMETRIC,
        lambda x: (eigh(x)[0].flip(0), eigh(x)[1].flip(1)),
    ),
    "values_alone": ("torch.linalg.eigh(x)", SYMMETRIC, lambda x: (eigh(x)[0], torch.eye(24))),
    "signs_of_one_side": (
        "torch.linalg.svd(x, full_matrices=False)",
        MATRIX,
        lambda x: (-svd(x)[0], *svd(x)[1:]),
    ),
    "another_basis": ("torch.linalg.qr(x)[0]", MATRIX, lambda x: svd(x)[0]),
}


def judged(folder, forward, inputs, kernel):
    made = serving(folder, task_source(f"return {forward}", inputs=inputs))
    for seed, trial in enumerate(("declared", "normal", "impulse")):
        made.values.expect(Expect(name=trial, seed=seed, distribution=trial))
        known, found = made.values.kept(trial), kernel(*made.task.inputs(seed, trial))
        found = [found] if isinstance(found, torch.Tensor) else found
        pairs = zip(found, known.expected, strict=True)
        actual = [x.to(y.dtype).reshape(y.shape).contiguous() for x, y in pairs]
        yield TaskGates().judge(made._compared(actual, known))


@pytest.mark.parametrize("forward", RIGHT)
def test_factors_of_other_signs_are_right(tmp_path, forward):
    assert set(judged(tmp_path, forward, *RIGHT[forward])) == {"ok"}


@pytest.mark.parametrize("name", WRONG)
def test_factors_that_meet_one_demand_are_wrong(tmp_path, name):
    assert set(judged(tmp_path, *WRONG[name])) == {"wrong_output"}


@pytest.mark.parametrize(
    "forward",
    ["torch.linalg.eigh(x)[1] @ x", "torch.linalg.eigh(x)[1][:, 0]", "torch.linalg.eig(x)"],
)
def test_what_depends_on_signs_or_order_otherwise_has_no_right_answer(tmp_path, forward):
    path = tmp_path / "task.py"
    path.write_text(task_source(f"return {forward}", inputs=SYMMETRIC))
    how = {"entry_point": "Model", "init_form": "args", "device": "cpu", "construct_on": "cpu"}
    asked = LoadTask(path=str(path), spec=ModelSpec(**how))
    assert "several answers are right" in ReferenceRole(None).values.load(asked).ambiguous


def rounded(name, which=0):
    return lambda x, y: FORMATS[name][which](x) @ FORMATS[name][which](y).T


KERNELS = {
    "tf32": (rounded("TF32"), "TF32"),
    "tf32_cut": (rounded("TF32", 1), "TF32"),
    "tf32_beside_a_bias": (lambda x, y: (z := rounded("TF32")(x, y)) + 4.5e-4 * z.abs(), "TF32"),
    "bf16": (rounded("bf16"), "bf16"),
    "in_order": (lambda x, y: (x[:, None] * y).cumsum(-1)[..., -1], ""),
    "a_constant": (lambda x, y: x @ y.T * (1 - 6.5e-4), ""),
}


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("draw", [torch.randn, torch.rand])
def test_factors_of_a_shorter_mantissa_are_named(name, draw):
    kernel, wanted = KERNELS[name]
    torch.manual_seed(3)
    x, y = draw(32, 1024), draw(48, 1024)
    known = x @ y.T, x.double() @ y.double().T
    found = [
        each
        for each, roundings in FORMATS.items()
        for rounding in roundings
        if explains(kernel(x, y), *known, rounding(x) @ rounding(y).T)
    ]
    assert found[:1] == ([wanted] if wanted else [])


def test_of_several_kinds_of_products_all_are_rounded_and_then_each():
    """A kernel may compute attention, and torch the layers."""
    x = torch.randn(1, 16, 16)

    def products():
        return [x[0] @ x[0], torch.nn.functional.conv2d(x[None], x[None]), torch.bmm(x, x)]

    exact, found = products(), []
    for mode in EXPLANATIONS["TF32"]():
        with mode:
            found.append([not torch.equal(*both) for both in zip(products(), exact, strict=True)])
    assert found == 2 * [[True] * 3, *torch.eye(3).bool().tolist()]


def test_one_kind_of_products_is_rounded_once():
    x = torch.randn(16, 16)
    modes = 0
    for mode in EXPLANATIONS["TF32"]():
        modes += 1
        with mode:
            assert (x @ x).shape == x.shape
    assert modes == 2


def test_factors_are_named_in_outputs_of_a_million_elements():
    """Of which nothing as large as their square may be made."""
    torch.manual_seed(3)
    x, y = torch.randn(2, 1024, 64)
    answer = rounded("TF32")(x, y)
    assert explains(answer, x @ y.T, x.double() @ y.double().T, answer)


def test_outputs_that_keep_fewer_bits_are_seen_and_whole_numbers_are_not():
    y = torch.randn(64, 64)
    short = (y.view(torch.int32) >> 6 << 6).view(torch.float32)
    assert lost_bits(short, y) == 6 and lost_bits(y, y) == lost_bits(short, short) == 0
    assert lost_bits(y.round(), y.round()) == lost_bits(short[:1, :8], y[:1, :8]) == 0
    assert lost_bits(torch.softmax(y * 1e4, 1).round(), torch.softmax(y * 1e4, 1)) == 0
