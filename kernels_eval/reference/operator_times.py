"""Two roles: where a task's reference spends its time (`kernels_eval.model.operators`), and what a
processor reaches. The task's code runs in the measuring process: it can lie about itself.
"""

from __future__ import annotations

import torch

from kernels_eval.model.inputs import construct, declared, load_module, make_inputs, moved
from kernels_eval.model.model_runner import best_s
from kernels_eval.model.operators import time_operators
from kernels_eval.protocol import (
    DECLARED,
    MeasurePeaks,
    OperatorTimes,
    Peaks,
    TimeOperators,
    handles,
)

TRIES = 10


@handles(TimeOperators)
def profile(request: TimeOperators) -> OperatorTimes:
    """Raises what the task raises."""
    device = request.device
    torch.set_num_threads(request.threads)
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    module, spec = load_module(request.path, "task"), declared(request, device, device)
    model = moved(construct(module, module, spec), device)
    inputs = make_inputs(module, spec.seed, DECLARED, None, device)
    with torch.no_grad():
        # what is loaded or chosen with the first call is no part of any operator
        model(*inputs)
        on_gpu = device.startswith("cuda")
        return time_operators(lambda: model(*inputs), on_gpu, request.budget_s)


@handles(MeasurePeaks)
def measure_peaks(request: MeasurePeaks) -> Peaks:
    torch.set_num_threads(request.threads)
    left, right = torch.rand(2, 512, 512)
    source = torch.ones(max(1024, request.working_set // 8))
    target = torch.empty_like(source)
    copied_bytes = 2 * source.nbytes
    return Peaks(
        peak_flops=2 * 512**3 / best_s(lambda: left @ right, TRIES),
        peak_bytes_per_s=copied_bytes / best_s(lambda: target.copy_(source), TRIES),
    )
