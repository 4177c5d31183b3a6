"""The role that finds out where a task's reference spends its time
(`kernels_eval.model.operators`). It runs the task's own code in the process that measures: a
task which means to lie about itself can. And the role that finds out what a processor can do."""

from __future__ import annotations

import torch

from kernels_eval.model.inputs import construct, declared, load_module, make_inputs, moved
from kernels_eval.model.model_runner import best_s
from kernels_eval.model.operators import time_operators
from kernels_eval.model.trials import DECLARED
from kernels_eval.sandbox.channel import Message

TRIES = 10


def do_profile(path: str, device: str, threads: int, budget_s: float, **task: str) -> Message:
    """Microseconds a call of every outermost operator, the slowest first, and by which clock.
    Raises what the task raises."""
    torch.set_num_threads(threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    module, spec = load_module(path, "task"), declared(task, device, device)
    model = moved(construct(module, module, spec), device)
    inputs = make_inputs(module, spec.seed, DECLARED, None, device)
    with torch.no_grad():
        # what is loaded or chosen with the first call is no part of any operator
        model(*inputs)
        found = time_operators(lambda: model(*inputs), device.startswith("cuda"), budget_s)
    del found["kernels"]
    return found


def do_measure(threads: int, working_set: int) -> Message:
    """What this processor reaches: FLOP/s of a product of fp32 matrices, and bytes per second
    of copying within a working set of so many bytes. The best of several."""
    torch.set_num_threads(threads)
    left, right = torch.rand(2, 512, 512)
    source = torch.ones(max(1024, working_set // 8))
    target = torch.empty_like(source)
    return {
        "peak_flops": 2 * 512**3 / best_s(lambda: left @ right, TRIES),
        "peak_bytes_per_s": 8 * source.numel() / best_s(lambda: target.copy_(source), TRIES),
    }
