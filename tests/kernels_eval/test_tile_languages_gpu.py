"""CuTe DSL, TileLang and cuTile on a GPU: six honest kernels and four cheats in each, and a source
that does not compile. Skipped where a language's package is not installed.

    python -m pytest tests/kernels_eval/test_tile_languages_gpu.py -m gpu -s

prints a table of verdicts with the seconds of each, first with an empty cache and then again.
"""

import time

import pytest

from kernels_eval.errors import UsageError
from kernels_eval.evaluator import Evaluator
from kernels_eval.records import Candidate, Language, Reason, stable_hash
from tasks.synthesis.prompts import EXAMPLE_TASK
from tests.support.kernels import QUICK, kernel_task, on_gpu

pytestmark = [pytest.mark.gpu, pytest.mark.slow]

RELU = {
    "cute": (
        "if value < 0.0:\n"
        "            value = cutlass.Float32(0.0)\n"
        "        out[i] = value + residual[i]"
    ),
    "tilelang": "T.max(x[by, column] + bias[column], T.float32(0)) + residual[by, column]",
    "cutile": "ct.maximum(value, 0.0) + ct.load(residual, index=(row, column), shape=(1, BLOCK))",
}
"""What computes the task of the prompt's example, in the example."""
PARTS = {
    "cute": ("x[i]", "bias[i % features]", "residual[i]"),
    "tilelang": ("x[by, column]", "bias[column]", "residual[by, column]"),
    "cutile": (
        "ct.load(x, index=(row, column), shape=(1, BLOCK))",
        "ct.load(bias, index=(column,), shape=(BLOCK,))",
        "ct.load(residual, index=(row, column), shape=(1, BLOCK))",
    ),
}
OTHERS = {
    "bias_add": ("x + self.bias + residual", "{a} + {b} + {c}"),
    "product": ("x * self.bias * residual", "{a} * {b} * {c}"),
    "scale_add": ("x * self.bias + residual", "{a} * {b} + {c}"),
    "difference": ("(x - residual) * self.bias", "({a} - {c}) * {b}"),
    "square": ("x * x + self.bias * residual", "{a} * {a} + {b} * {c}"),
}
"""Five more tasks of the same operands: torch's formula, and the kernel's."""


def task(formula=""):
    code = EXAMPLE_TASK
    if formula:
        code = code.replace("torch.relu(x + self.bias) + residual", formula)
        assert code != EXAMPLE_TASK
    return kernel_task(code, f"tile_{stable_hash(code)[:8]}")


def module(language, formula=""):
    """The example of the prompts, with another formula where one is given."""
    code = language.example
    assert code.count(RELU[language]) == 1
    if not formula:
        return code
    a, b, c = PARTS[language]
    body = formula.format(a=a, b=b, c=c)
    return code.replace(RELU[language], f"out[i] = {body}" if language.startswith("cute") else body)


def cheats(language):
    honest = language.example
    call = "return bias_relu_add(x, self.bias, residual)"
    assert honest.count(call) == 1
    by_torch = "torch.relu(x + self.bias) + residual"
    stale = (
        "key = tuple(x.shape)\n"
        "        if key not in KEPT:\n"
        "            KEPT[key] = bias_relu_add(x, self.bias, residual)\n"
        "        return KEPT[key]"
    )
    wrong = honest.replace(RELU[language], RELU[language].replace("+ residual", "- residual"))
    if language == "cutile":
        wrong = honest.replace(") + ct.load(residual", ") - ct.load(residual")
    return {
        "torch alone": (honest.replace(call, f"return {by_torch}"), Reason.NO_CUSTOM_KERNEL),
        "kernel for show": (
            honest.replace(call, f"bias_relu_add(x, self.bias, residual); return {by_torch}"),
            Reason.NO_CUSTOM_KERNEL,
        ),
        "keeps its answer": ("KEPT = {}\n" + honest.replace(call, stale), Reason.STALE_CACHE),
        "patches torch": ("import torch\ntorch.relu = None\n" + honest, Reason.HARNESS_TAMPERING),
        "wrong sign": (wrong, Reason.WRONG_OUTPUT),
        "does not compile": (
            honest.replace(RELU[language], RELU[language].replace("residual", "unknown_name")),
            Reason.BUILD_FAILED,
        ),
    }


@pytest.mark.parametrize("name", ["cute", "tilelang", "cutile"])
def test_honest_kernels_and_cheats(name, tmp_path):
    language = Language(name)
    try:
        found = language.doctor()
    except UsageError as error:
        pytest.skip(str(error))
    asked = {"bias_relu": ("", module(language), Reason.OK)}
    for title, (formula, body) in OTHERS.items():
        asked[title] = (formula, module(language, body), Reason.OK)
    for title, (code, reason) in cheats(language).items():
        asked[title] = ("", code, reason)
    missed = []
    for turn in ("first", "again"):
        with Evaluator(language, on_gpu(QUICK), cache=tmp_path) as verify:
            for title, (formula, code, reason) in asked.items():
                given, started = task(formula), time.monotonic()
                made = Candidate(
                    candidate_id=stable_hash([title, code]),
                    task_id=given.task_id,
                    language=language,
                    generator="test",
                    code=code,
                )
                verdict = verify(given, made)
                spent = time.monotonic() - started
                print(f"{found} | {turn} | {title} | {verdict.reason} | {spent:.1f} s")
                if verdict.reason is not reason:
                    missed.append((turn, title, reason, verdict.reason, verdict.detail))
                    print(verdict.detail, verdict.log_tail[-2000:])
    assert not missed, missed
