"""The devices of this machine, asked for without making a CUDA context."""

from __future__ import annotations

import os
import shutil
import subprocess

from kernels_eval.errors import DeviceError
from kernels_eval.records import Language

# NVML's clocks event reasons that lower clocks below what the work could have: power cap, hardware
# slowdown, and temperature.
SLOWING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


def visible_gpus() -> list[str]:
    """Name and compute capability of each NVIDIA GPU this process may use, by nvidia-smi."""
    if os.environ.get("CUDA_VISIBLE_DEVICES", "all").strip() in ("", "-1"):
        return []
    program = shutil.which("nvidia-smi")
    if program is None:
        return []
    query = [program, "--query-gpu=name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    return [line.strip() for line in lines if line.strip()]


def gpu_arch() -> str | None:
    """Compute capability of the first GPU, such as '9.0'; None where there is none."""
    gpus = visible_gpus()
    return gpus[0].rsplit(",", 1)[1].strip() if gpus and "," in gpus[0] else None


def require_device(language: Language) -> None:
    """Raise DeviceError, before any work starts, where the language's device is missing."""
    if language.needs_gpu and not visible_gpus():
        raise DeviceError(
            f"{language.value} kernels need an NVIDIA GPU, and none is visible here",
            "run where nvidia-smi lists one, or choose cpp (--language cpp, or --set language=cpp)",
        )


def device_for(language: Language) -> str:
    """The torch device a language runs on. Raises DeviceError where it is missing."""
    require_device(language)
    return "cuda:0" if language.needs_gpu else "cpu"


def throttled() -> bool | None:
    """Whether the first visible GPU lowers its clocks now, for another reason than being idle. None
    where NVML cannot say."""
    try:
        import pynvml

        pynvml.nvmlInit()
        visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
        handle = (
            pynvml.nvmlDeviceGetHandleByIndex(int(visible))
            if visible.isdigit()
            else pynvml.nvmlDeviceGetHandleByUUID(visible)
        )
        return bool(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle) & SLOWING)
    except Exception:  # no library, no driver or no permission
        return None
