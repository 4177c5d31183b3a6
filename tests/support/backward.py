"""Twelve tasks that ask for gradients, and for each three candidates: a right one, one with a wrong
gradient, and one whose backward pass has no kernel. All kernels are functions of one library, in
C++ or in CUDA, so that it is compiled once.

A task is a formula in torch and the same in C: `out` and the gradients `ga`, `gb` (of the arguments
x and y) and `gc` (of a weight per column, summed over rows), of `a`, `b`, `c` and the gradient `g`
of the output. `stats` are loops over a row that come before, `back` those of the backward pass.
"""

from typing import NamedTuple

from kernels_eval.records import Candidate, stable_hash
from tests.support.kernels import kernel_task


class Formula(NamedTuple):
    name: str
    torch: str
    out: str
    ga: str
    gb: str = ""
    gc: str = ""
    stats: str = ""
    back: str = ""

    @property
    def operands(self):
        return ["x", *(["y"] if self.gb else []), *(["w"] if self.gc else [])]


EACH = "for (int64_t j = 0; j < n; ++j)"
SIGMOID = "(1.0f / (1.0f + expf(-a)))"
SOFTMAX = f"float m = x[0]; {EACH} m = fmaxf(m, x[j]); float t = 0; {EACH} t += expf(x[j] - m);"
DOT = f"float d = 0; {EACH} d += gr[j] * expf(x[j] - m) / t;"
MEAN_SQUARE = f"float q = 0; {EACH} q += x[j] * x[j]; float s = 1.0f / sqrtf(q / n + 1e-5f);"
FORMULAS = (
    Formula("sigmoid", "torch.sigmoid(x)", SIGMOID, f"g * {SIGMOID} * (1.0f - {SIGMOID})"),
    Formula("tanh", "torch.tanh(x)", "tanhf(a)", "g * (1.0f - tanhf(a) * tanhf(a))"),
    Formula(
        *("silu", "torch.nn.functional.silu(x)", f"a * {SIGMOID}"),
        f"g * {SIGMOID} * (1.0f + a * (1.0f - {SIGMOID}))",
    ),
    Formula(
        *("gelu", "torch.nn.functional.gelu(x)", "0.5f * a * (1.0f + erff(a * 0.70710678f))"),
        "g * (0.5f * (1.0f + erff(a * 0.70710678f)) + a * 0.39894228f * expf(-0.5f * a * a))",
    ),
    Formula(
        "softplus",
        "torch.nn.functional.softplus(x)",
        "log1pf(expf(-fabsf(a))) + fmaxf(a, 0.0f)",
        f"g * {SIGMOID}",
    ),
    Formula(
        "squared_relu", "torch.relu(x) ** 2", "a > 0 ? a * a : 0.0f", "a > 0 ? 2.0f * a * g : 0.0f"
    ),
    Formula("product", "x * y", "a * b", "g * b", gb="g * a"),
    Formula(
        *("gate", "torch.nn.functional.silu(x) * y", f"a * {SIGMOID} * b"),
        f"g * b * {SIGMOID} * (1.0f + a * (1.0f - {SIGMOID}))",
        gb=f"g * a * {SIGMOID}",
    ),
    Formula("scale", "x * w", "a * c", "g * c", gc="g * a"),
    Formula(
        *("bias_relu", "torch.relu(x + w)", "fmaxf(a + c, 0.0f)", "a + c > 0 ? g : 0.0f"),
        gc="a + c > 0 ? g : 0.0f",
    ),
    Formula(
        *("softmax", "torch.softmax(x, -1)", "expf(a - m) / t", "expf(a - m) / t * (g - d)"),
        stats=SOFTMAX,
        back=DOT,
    ),
    Formula(
        *("rms_norm", "x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-5) * w", "a * s * c"),
        "s * (g * c - a * s * s * p / n)",
        gc="g * a * s",
        stats=MEAN_SQUARE,
        back=f"float p = 0; {EACH} p += gr[j] * w[j] * x[j];",
    ),
)
ROWS, COLUMNS = 65, 64


def task_of(formula, rows=ROWS, columns=COLUMNS):
    takes = ", ".join(name for name in formula.operands if name != "w")
    weight = f"self.w = nn.Parameter(torch.randn({columns}))" if formula.gc else "pass"
    drawn = ", ".join([f"torch.randn({rows}, {columns})"] * (1 + bool(formula.gb)))
    code = f"""import torch
import torch.nn as nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        {weight}

    def forward(self, {takes}):
        return {formula.torch.replace("w", "self.w") if formula.gc else formula.torch}


def get_inputs():
    return [{drawn}]


def get_init_inputs():
    return []


GRADIENTS = True
"""
    return kernel_task(code, f"{formula.name}_gradients")


def candidate(formula, kind, language):
    """`kind`: right, wrong_gradient or no_kernel_in_backward."""
    operands = ", ".join(formula.operands)
    scale = 1.02 if kind == "wrong_gradient" else 1.0
    call = f"ext.run_{formula.name}_backward(g, {operands}, {scale})"
    by_torch = f"""with torch.enable_grad():
            leaves = [each.detach().requires_grad_() for each in ({operands},)]
            {operands}{"," if "," not in operands else ""} = leaves
            return torch.autograd.grad({formula.torch}, leaves, g)"""
    weight = f"self.w = nn.Parameter(torch.randn({COLUMNS}))" if formula.gc else "pass"
    arguments = ", ".join(name for name in formula.operands if name != "w")
    code = f"""import torch
import torch.nn as nn
from torch.utils.cpp_extension import load_inline

ext = load_inline(
    name="backward_{language}",
    {sources(language)},
    functions={[f"run_{each.name}{end}" for each in FORMULAS for end in ("", "_backward")]},
)


class Function(torch.autograd.Function):
    @staticmethod
    def forward(ctx, {operands}):
        ctx.save_for_backward({operands})
        return ext.run_{formula.name}({operands})

    @staticmethod
    def backward(ctx, g):
        {operands}{"," if "," not in operands else ""} = ctx.saved_tensors
        {by_torch if kind == "no_kernel_in_backward" else f"return tuple({call})"}


class ModelNew(nn.Module):
    def __init__(self):
        super().__init__()
        {weight}

    def forward(self, {arguments}):
        return Function.apply({", ".join("self.w" if x == "w" else x for x in formula.operands)})
"""
    return Candidate(
        candidate_id=stable_hash(code),
        task_id=f"test/{formula.name}_gradients",
        language=language,
        generator="test",
        code=code,
    )


def sources(language):
    functions = [function(each, back, language) for each in FORMULAS for back in (False, True)]
    text = "\n".join(functions)
    if language == "cpp":
        return f"cpp_sources={'#include <cmath>' + chr(10) + text!r}"
    heads = "".join(
        line.rstrip(" {") + ";\n"
        for line in text.splitlines()
        if line.startswith(("torch::Tensor ", "std::vector<"))
    )
    return f"cpp_sources={heads!r},\n    cuda_sources={text!r}"


def function(formula, back, language):
    """The text of one function that Python calls: a loop over rows, or a kernel with one thread a
    row."""
    operands, gradients = formula.operands, [x for x in ("ga", "gb", "gc") if getattr(formula, x)]
    outs = gradients if back else ["out"]
    like = {"ga": "x", "gb": "y", "gc": "w", "out": "x"}
    ins = [*(["g"] if back else []), *operands]
    add = (
        "atomicAdd(o_gc + j, v * (float)scale)"
        if language == "cuda"
        else "o_gc[j] += v * (float)scale"
    )
    lines = [
        "const int64_t at = r * n;",
        *(
            f"const float* {x if x != 'g' else 'gr'} = p_{x} + {'at' if x != 'w' else '0'};"
            for x in ins
        ),
        formula.stats + (formula.back if back else ""),
        f"{EACH} {{ const float a = x[j];",
        "const float b = y[j];" if "y" in operands else "",
        "const float c = w[j];" if "w" in operands else "",
        "const float g = gr[j];" if back else "",
        *(
            f"{{ const float v = {getattr(formula, x)}; {add}; }}"
            if x == "gc"
            else f"o_{x}[at + j] = ({getattr(formula, x)}){' * (float)scale' if back else ''};"
            for x in outs
        ),
        "}",
    ]
    body = "\n  ".join(filter(None, lines))
    pointers = [f"const float* p_{x}" for x in ins] + [f"float* o_{x}" for x in outs]
    passed = [f"{x}.data_ptr<float>()" for x in ins] + [f"t_{x}.data_ptr<float>()" for x in outs]
    signature = ", ".join([f"torch::Tensor {x}" for x in ins] + ["double scale"] * back)
    scale, value = (", double scale", ", scale") if back else ("", "")
    name = f"run_{formula.name}" + "_backward" * back
    made = [
        f"auto t_{x} = torch::{'zeros' if x == 'gc' else 'empty'}_like({like[x]});" for x in outs
    ]
    kept = [f"{x} = {x}.contiguous();" for x in ins]
    head = f"std::vector<torch::Tensor> {name}({signature}) {{"
    result = f"return {{{', '.join(f't_{x}' for x in outs)}}};"
    if not back:
        head = head.replace("std::vector<torch::Tensor> ", "torch::Tensor ")
        result = "return t_out;"
    sizes = "const int64_t n = x.size(-1), rows = x.numel() / n;"
    if language == "cuda":
        kernel = (
            f"__global__ void {name}_kernel({', '.join(pointers)},"
            f" int64_t n, int64_t rows{scale}) {{\n"
            "  const int64_t r = blockIdx.x * (int64_t)blockDim.x + threadIdx.x;\n"
            f"  if (r >= rows) return;\n  {body}\n}}\n"
        )
        launch = f"{name}_kernel<<<(rows + 127) / 128, 128>>>({', '.join(passed)}, n, rows{value});"
        return kernel + "\n  ".join([head, *kept, *made, sizes, launch, result + "\n}"])
    variables = [f"{p} = {v};" for p, v in zip(pointers, passed, strict=True)]
    loop = f"for (int64_t r = 0; r < rows; ++r) {{\n  {body}\n  }}"
    return "\n  ".join([head, *kept, *made, sizes, *variables, loop, result + "\n}"])
