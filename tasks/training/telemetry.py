"""How fast a training step was, what it took of the device, and what the machine did meanwhile:
columns of the training log.

Guarantees: time is that of the steps alone, evaluation and checkpoints left out; what this machine
cannot say (a GPU's power without a GPU, the peak of an unknown device) is None, never 0; measuring
takes no random number and starts no thread. Does not guarantee anything of the utilisation between
two readings: the system's numbers are read once a step, at its end, and averaged over nothing.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from trl.trainer.sft_trainer import SFTTrainer

SPEED = ("tokens_per_s", "mfu", "memory_gb")
# MLflow's own names, so that its pages show them among the system metrics
SYSTEM = (
    *("system/cpu_utilization_percentage", "system/system_memory_usage_megabytes"),
    *(
        "system/gpu_0_utilization_percentage",
        "system/gpu_0_memory_usage_megabytes",
        "system/gpu_0_power_usage_watts",
    ),
)
COLUMNS = (*SPEED, *SYSTEM)

# dense bf16 without sparsity, FLOP/s, by a part of the device's name, from NVIDIA's data sheets;
# the first that fits
PEAKS = (
    ("B200", 2.25e15),
    ("H200", 9.89e14),
    ("H100", 9.89e14),
    ("A100", 3.12e14),
    ("L40S", 3.62e14),
    ("A10", 1.25e14),
)
# forward 2, backward towards the activations 2; towards the frozen weights none. The adapter's own
# products, and attention, are left out
FLOPS_PER_PARAMETER_AND_TOKEN = 4


def peak_flops(device_name: str | None) -> float | None:
    """Peak bf16 FLOP/s of a device by its name; None where it is not known."""
    return next((peak for part, peak in PEAKS if device_name and part in device_name), None)


def mfu(tokens_per_s: float, parameters: int, peak: float | None, devices: int = 1) -> float | None:
    """Model FLOPs utilisation of LoRA training, a share: what the base model's matrix products
    need, of what the devices could do.

    Recomputed activations do not count (https://arxiv.org/abs/2204.02311, appendix B, defines it
    so). `parameters` are those that a token is multiplied with: without the table of embeddings,
    with the output projection.
    """
    return (
        tokens_per_s * FLOPS_PER_PARAMETER_AND_TOKEN * parameters / (peak * devices)
        if peak
        else None
    )


def multiplied_parameters(model: Any) -> int:
    """Parameters of the base model that every token is multiplied with. A table of embeddings
    counts where it is the output too."""
    table = model.get_input_embeddings().weight
    output = model.get_output_embeddings()
    tied = output is not None and output.weight is table
    found = sum(
        parameter.numel() for name, parameter in model.named_parameters() if "lora_" not in name
    )
    return int(found if tied else found - table.numel())


def attach(trainer: SFTTrainer) -> None:
    """Let a trainer that is built write COLUMNS into its log entries (`trainer.state.log_history`),
    one a step."""
    trainer.add_callback(_telemetry(multiplied_parameters(trainer.model)))


def _telemetry(parameters: int) -> Any:
    from transformers import TrainerCallback

    class Telemetry(TrainerCallback):
        began_s, tokens_before, peak = 0.0, 0.0, None

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            import psutil

            psutil.cpu_percent()  # the first call only begins the interval
            self.peak = peak_flops(_device_name())
            self.tokens_before = next(
                (entry["num_tokens"] for entry in reversed(state.log_history) if "loss" in entry),
                0.0,
            )
            self.began_s = time.perf_counter()

        def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            entry = state.log_history[-1]
            if "loss" not in entry:
                return
            now = time.perf_counter()
            # `checkpoints.watch` lets the count continue over a resume; without it, it begins anew
            before = self.tokens_before if entry["num_tokens"] >= self.tokens_before else 0.0
            tokens = entry["num_tokens"] - before
            speed = tokens / (now - self.began_s)
            entry |= {
                "tokens_per_s": speed,
                "mfu": mfu(speed, parameters, self.peak, args.world_size),
                "memory_gb": _memory_gb(),
                **system(),
            }
            self.began_s, self.tokens_before = now, entry["num_tokens"]

        def on_evaluate(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began_s = time.perf_counter()

        def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            self.began_s = time.perf_counter()

    return Telemetry()


def columns_of(entry: Mapping[str, Any]) -> dict[str, float | None]:
    """COLUMNS of a log entry; None where it has none."""
    return {name: entry.get(name) for name in COLUMNS}


def system() -> dict[str, float | None]:
    """SYSTEM as of now: the CPU since the last call, the rest at this moment. Of this process's
    first GPU."""
    import psutil

    values: list[float | None] = [psutil.cpu_percent(), psutil.virtual_memory().used / 1e6]
    return dict(zip(SYSTEM, [*values, *_gpu()], strict=True))


def _gpu() -> tuple[float | None, float | None, float | None]:
    """(utilisation in per cent, memory in MB, power in W)"""
    import torch

    if not torch.cuda.is_available():
        return None, None, None
    import pynvml

    try:
        pynvml.nvmlInit()
        # torch numbers the GPUs that it may see, NVML all of them: the UUID is the same for both
        handle = pynvml.nvmlDeviceGetHandleByUUID(
            f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device()).uuid}"
        )
        used = pynvml.nvmlDeviceGetMemoryInfo(handle).used / 1e6
        return (
            float(pynvml.nvmlDeviceGetUtilizationRates(handle).gpu),
            used,
            pynvml.nvmlDeviceGetPowerUsage(handle) / 1000,
        )
    except pynvml.NVMLError:  # a container may hide it
        return None, None, None


def _memory_gb() -> float:
    """Peak of the GPU's memory since the process began, or what the process holds where there is
    none; 10^9 bytes."""
    import psutil
    import torch

    return (
        torch.cuda.max_memory_allocated()
        if torch.cuda.is_available()
        else psutil.Process().memory_info().rss
    ) / 1e9


def _device_name() -> str | None:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else None
