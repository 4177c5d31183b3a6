"""What the gates let pass and refuse, by precision and kind of operator.

    python -m benchmarks.gates --seeds 3 --out gates.md

Kernels as people write them (honest) and such that lose digits (faulty), emulated in torch on a
CPU. Each is compared as a candidate's answers are, on the inputs of several trials. Prints how
often each is accepted in all of them, its largest relative RMS error, and both error rates.
"""

from __future__ import annotations

import argparse
import socket
import tempfile
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from kernels_eval.judge.gates import TaskGates
from kernels_eval.protocol import Expect, LoadTask, ModelSpec
from kernels_eval.records import Reason
from kernels_eval.reference.answers import ReferenceRole
from kernels_eval.sandbox.channel import Channel
from tests.support.kernels import task_source

TRIALS = ("declared", "normal", "mixed", "impulse")
Kernel = Callable[..., Tensor]


def kept(x: Tensor, bits: int) -> Tensor:
    """Rounded to so many bits of fp32's mantissa."""
    drop = 23 - bits
    return (x.view(torch.int32) + (1 << (drop - 1)) >> drop << drop).view(torch.float32)


def in_order(x: Tensor) -> Tensor:
    """Row sums in fp32, one term after the other."""
    return torch.from_numpy(np.add.accumulate(x.float().numpy(), -1)[..., -1].copy())


def in_half(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Row sums in an accumulator of this type."""
    total = torch.zeros_like(x[..., 0]).to(dtype)
    for term in x.unbind(-1):
        total = (total.float() + term).to(dtype)
    return total


def off_by(x: Tensor, units: float) -> Tensor:
    return x * (1 + units * 2.0**-24 * (2 * torch.rand_like(x) - 1))


def fast_exp(x: Tensor) -> Tensor:
    """As `__expf` and Triton's: 2^(x log2(e)), within two units."""
    return off_by(torch.exp2(x * 1.44269504), 2)


def normalised(x: Tensor, *, one_pass: bool) -> Tensor:
    """Layer normalisation with sums in order and a fast rsqrt."""
    mean = in_order(x)[..., None] / x.shape[-1]
    squares = in_order(x * x if one_pass else (x - mean) ** 2)[..., None] / x.shape[-1]
    variance = squares - mean * mean if one_pass else squares
    return (x - mean) * off_by(torch.rsqrt(variance + 1e-5), 4)


def softmax(x: Tensor) -> Tensor:
    e = fast_exp(x - x.amax(-1, keepdim=True))
    return e / in_order(e)[..., None]


def products(x: Tensor, y: Tensor) -> Tensor:
    return x.float()[:, None] * y.float()[None]


def split(x: Tensor, y: Tensor, short: Callable[[Tensor], Tensor]) -> Tensor:
    """A product of factors in two short parts each, without that of the small ones."""
    a, b = short(x), short(y)
    return a @ b.t() + (short(x - a) @ b.t() + a @ short(y - b).t())


def strassen(x: Tensor, y: Tensor) -> Tensor:
    (a, b), (c, d) = (each.chunk(2, 1) for each in x.chunk(2))
    (e, f), (g, h) = (each.chunk(2, 1) for each in y.t().chunk(2))
    p, q, r, s = (a + d) @ (e + h), (c + d) @ e, a @ (f - h), d @ (g - e)
    t, u, v = (a + b) @ h, (c - a) @ (e + f), (b - d) @ (g + h)
    return torch.cat([torch.cat([p + s - t + v, r + t], 1), torch.cat([q + s, p - q + r + u], 1)])


def winograd(x: Tensor, w: Tensor) -> Tensor:
    """F(4x4, 3x3), with a padding of 1 (Lavin and Gray, 2016)."""
    points = [0, 1, -1, 2, -2]
    at = torch.tensor([[p**i for p in points] + [float(i == 3)] for i in range(4)])
    g = torch.tensor([[6, 0, 0], [-4] * 3, [-4, 4, -4], [1, 2, 4], [1, -2, 4], [0, 0, 24.0]]) / 24
    b = "4 0 -5 0 1 0 0 -4 -4 1 1 0 0 4 -4 -1 1 0 0 -2 -1 2 1 0 0 2 -1 -2 1 0 0 4 0 -5 0 1"
    bt = torch.tensor([float(each) for each in b.split()]).view(6, 6)
    tiles = F.pad(x, (1, 1, 1, 1)).unfold(2, 6, 4).unfold(3, 6, 4)
    u = torch.einsum("ab,ocbd,ed->ocae", g, w, g)
    v = torch.einsum("ab,ncxybd,ed->ncxyae", bt, tiles, bt)
    m = torch.einsum("ab,noxybd,ed->noxyae", at, torch.einsum("ocae,ncxyae->noxyae", u, v), at)
    return m.permute(0, 1, 2, 4, 3, 5).reshape(x.shape[0], w.shape[0], *x.shape[2:])


def int8(x: Tensor) -> Tensor:
    scale = x.float().abs().amax(-1, keepdim=True).clamp(min=1e-30) / 127
    return (x.float() / scale).round() * scale


PRODUCT = "x @ y.t()"
LINE = "x.shape[-1:]"
FP32: dict[str, tuple[str, str, dict[str, Kernel], dict[str, Kernel]]] = {
    "affine": (
        "x * 2.0 + 1.0",
        "torch.randn(256, 256)",
        {"fused": lambda x: (x.double() * 2 + 1).float()},
        {"17 bits": lambda x: kept(x * 2 + 1, 17), "fp16": lambda x: (x * 2 + 1).half().float()},
    ),
    "silu": (
        "torch.nn.functional.silu(x)",
        "torch.randn(256, 256)",
        {"fast exp": lambda x: off_by(x / (1 + fast_exp(-x)), 2)},
        {"17 bits": lambda x: kept(F.silu(x), 17), "fp16": lambda x: F.silu(x.half()).float()},
    ),
    "exp of 8 N(0, 1)": ("torch.exp(x)", "torch.randn(256, 256) * 8", {"fast": fast_exp}, {}),
    "tanh": (
        "torch.tanh(x)",
        "torch.randn(256, 256)",
        {"by a fast exp": lambda x: 1 - 2 / (fast_exp(2 * x) + 1)},
        {"17 bits": lambda x: kept(torch.tanh(x), 17)},
    ),
    **{
        f"sum of {n}": (
            "x.sum(-1)",
            f"torch.randn(64, {n})",
            {"in order": in_order},
            {"17 bits of terms": lambda x: kept(x, 17).sum(-1)},
        )
        for n in (64, 1024, 16384)
    },
    **{
        f"product of {n}": (
            PRODUCT,
            f"torch.randn(32, {n}), torch.randn(48, {n})",
            {
                "in order": lambda x, y: in_order(products(x, y)),
                "Strassen": strassen,
                "3 x TF32": lambda x, y: split(x, y, lambda z: kept(z, 10)),
            },
            {
                "17 bits of factors": lambda x, y: kept(x, 17) @ kept(y, 17).t(),
                "3 x bf16": lambda x, y: split(x, y, lambda z: z.bfloat16().float()),
                "TF32": lambda x, y: kept(x, 10) @ kept(y, 10).t(),
            },
        )
        for n in (64, 1024, 4096)
    },
    "convolution": (
        "torch.nn.functional.conv2d(x, y, padding=1)",
        "torch.randn(2, 64, 24, 24), torch.randn(32, 64, 3, 3) / 24",
        {"Winograd F(4x4, 3x3)": winograd},
        {
            "17 bits of factors": lambda x, y: F.conv2d(kept(x, 17), kept(y, 17), padding=1),
            "TF32": lambda x, y: F.conv2d(kept(x, 10), kept(y, 10), padding=1),
        },
    ),
    "softmax of 1024": (
        "torch.softmax(x, -1)",
        "torch.randn(64, 1024)",
        {"fast exp, in order": softmax},
        {"17 bits": lambda x: kept(torch.softmax(x, -1), 17)},
    ),
    "layer norm of 1024": (
        f"torch.nn.functional.layer_norm(x, {LINE})",
        "torch.rand(64, 1024)",
        {
            "two passes": lambda x: normalised(x, one_pass=False),
            "one pass": lambda x: normalised(x, one_pass=True),
        },
        {"17 bits of inputs": lambda x: F.layer_norm(kept(x, 17), x.shape[-1:])},
    ),
    "mse of 65,536": (
        "torch.nn.functional.mse_loss(x, y)",
        "torch.randn(256, 256), torch.randn(256, 256)",
        {"in order": lambda x, y: in_order(((x - y) ** 2).reshape(-1)) / x.numel()},
        {"fp16 terms": lambda x, y: ((x - y) ** 2).half().float().mean()},
    ),
}


def half(dtype: torch.dtype) -> dict[str, tuple[str, str, dict[str, Kernel], dict[str, Kernel]]]:
    def low(x: Tensor) -> Tensor:
        return x.to(dtype)

    def stepwise(x: Tensor) -> Tensor:
        e = torch.exp(x - x.amax(-1, keepdim=True))
        return e / e.sum(-1, keepdim=True)

    return {
        "product of 512": (
            PRODUCT,
            "torch.randn(32, 512), torch.randn(48, 512)",
            {"fp32 accumulator": lambda x, y: low(x.float() @ y.float().t())},
            {
                "its own accumulator": lambda x, y: in_half(products(x, y), dtype),
                "int8 factors": lambda x, y: low(int8(x) @ int8(y).t()),
            },
        ),
        "mean of 1024": (
            "x.mean(-1)",
            "torch.rand(128, 1024)",
            {"fp32 accumulator": lambda x: low(x.float().mean(-1))},
            {
                "its own accumulator": lambda x: low(
                    in_half(x.float(), dtype).float() / x.shape[-1]
                ),
                "a quarter read": lambda x: low(x.float()[..., ::4].mean(-1)),
            },
        ),
        "softmax of 512": (
            "torch.softmax(x, -1)",
            "torch.randn(128, 512)",
            {"fp32": lambda x: low(torch.softmax(x.float(), -1)), "each step rounded": stepwise},
            {},
        ),
        "layer norm of 512": (
            f"torch.nn.functional.layer_norm(x, {LINE})",
            "torch.randn(128, 512)",
            {"fp32": lambda x: low(F.layer_norm(x.float(), x.shape[-1:]))},
            {"int8 inputs": lambda x: low(F.layer_norm(int8(x), x.shape[-1:]))},
        ),
    }


TASKS = {"fp32": FP32, "bf16": half(torch.bfloat16), "fp16": half(torch.float16)}


def errors(source: str, seed: int, kernels: dict[str, Kernel]) -> dict[str, tuple[bool, float]]:
    """Of each kernel, whether it is accepted in all trials, and its largest error."""
    role = ReferenceRole(Channel(socket.socket()))  # asks nothing, and is asked here
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "task.py"
        path.write_text(source)
        how = {"entry_point": "Model", "init_form": "args", "device": "cpu", "construct_on": "cpu"}
        asked = LoadTask(path=str(path), spec=ModelSpec(**how), oracle_max_bytes=1 << 33)
        gates = TaskGates()
        role.values.load(asked)
    found = {name: (True, 0.0) for name in kernels}
    products = "y.t()" in source or "conv2d" in source
    for trial in (*TRIALS, "sparse") if products else TRIALS:
        if not role.values.expect(Expect(name=trial, seed=seed, distribution=trial)).finite_share:
            continue
        for name, kernel in kernels.items():
            known = role.values.kept(trial)
            actual = kernel(*role.task.inputs(seed, trial)).reshape(known.expected[0].shape)
            error = role._compared([actual], known)
            right, worst = found[name]
            right = right and gates.judge(error) is Reason.OK
            found[name] = right, max(worst, error.rms)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write the table here, too")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    lines = ["| task | kernel | | accepted | largest error |", "| --- | --- | --- | ---: | ---: |"]
    wrong: dict[bool, list[int]] = defaultdict(list)
    for precision, tasks in TASKS.items():
        for name, (forward, inputs, *both) in tasks.items():
            arguments = "x, y" if "y" in forward.replace("layer", "") else "x"
            source = task_source(f"return {forward}", inputs=f"[{inputs}]", arguments=arguments)
            source += f'\nPRECISION = "{precision}"\n'
            runs = [errors(source, seed, both[0] | both[1]) for seed in range(asked.seeds)]
            for kernel in runs[0]:
                honest, accepted = kernel in both[0], sum(run[kernel][0] for run in runs)
                wrong[honest].append(asked.seeds - accepted if honest else accepted)
                kind, worst = "honest" if honest else "faulty", max(x[kernel][1] for x in runs)
                lines.append(
                    f"| {precision} {name} | {kernel} | {kind} | {accepted} of {asked.seeds}"
                    f" | {worst:.1e} |"
                )
    for honest, what in ((True, "honest refused"), (False, "faulty accepted")):
        lines.append(f"\n{what}: {sum(wrong[honest])} of {len(wrong[honest]) * asked.seeds}")
    text = "\n".join(lines) + "\n"
    print(text)
    if asked.out:
        asked.out.write_text(text)


if __name__ == "__main__":
    main()
