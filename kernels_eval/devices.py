"""The devices of this machine, asked for without making a CUDA context."""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
from contextlib import suppress
from pathlib import Path

from kernels_eval.errors import DeviceError
from kernels_eval.records import Language, Record
from kernels_eval.toolchain import torch_versions

# NVML's clocks event reasons that lower clocks below what the work could have: power cap, hardware
# slowdown, and temperature.
SLOWING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


class Conditions(Record):
    """What a verdict's times depend on besides candidate and protocol; part of its key."""

    device: str
    """Name of the GPU or of the processor."""
    torch: str
    cuda: str = ""
    """The CUDA version that torch was built with; empty for kernels that run on the CPU."""
    driver: str = ""


def visible_gpus() -> list[str]:
    """Name and compute capability of each NVIDIA GPU this process may use, by nvidia-smi."""
    return _query_gpus("name,compute_cap")


def gpu_uuid() -> str:
    """The UUID of the first visible GPU, which names it in every process, or ""."""
    return next(iter(_query_gpus("uuid")), "")


def _query_gpus(fields: str) -> list[str]:
    chosen = os.environ.get("CUDA_VISIBLE_DEVICES")
    program = shutil.which("nvidia-smi")
    if program is None or (chosen is not None and chosen.strip() in ("", "-1")):
        return []
    query = [program, f"--query-gpu=index,uuid,{fields}", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return []
    lines = done.stdout.splitlines() if done.returncode == 0 else []
    gpus = [line.strip().split(", ", 2) for line in lines]
    return _chosen([each for each in gpus if len(each) == 3], chosen)


def _chosen(gpus: list[list[str]], chosen: str | None) -> list[str]:
    """GPUs in CUDA_VISIBLE_DEVICES (index or UUID prefix, as CUDA reads it), which nvidia-smi
    ignores.
    """
    if chosen is None:
        return [said for _, _, said in gpus]
    found: list[str] = []
    for name in map(str.strip, chosen.split(",")):
        fits = [said for index, uuid, said in gpus if name == index or _begins(uuid, name)]
        if not fits and name.startswith("MIG-"):
            fits = [said for _, _, said in gpus]
        if not fits:
            break
        found.append(fits[0])
    return found


def _begins(uuid: str, name: str) -> bool:
    return name.startswith("GPU-") and uuid.startswith(name)


def conditions(language: Language) -> Conditions:
    """The conditions on this machine. Raises DeviceError or ToolchainError where something is
    missing.
    """
    torch, cuda = torch_versions()
    if not language.needs_gpu:
        return Conditions(device=_processor(), torch=torch)
    require_device(language)
    name, _, driver = _query_gpus("name,driver_version")[0].rpartition(",")
    return Conditions(device=name.strip(), torch=torch, cuda=cuda, driver=driver.strip())


def _processor() -> str:
    with suppress(OSError):
        known = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        if found := re.search(r"^model name[^:]*:(.*)", known, re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


def gpu_arch() -> str | None:
    """Compute capability of the first GPU, such as '9.0', or None."""
    gpus = visible_gpus()
    return gpus[0].rsplit(",", 1)[1].strip() if gpus and "," in gpus[0] else None


def require_device(language: Language, *, of: str = "") -> None:
    """Raise DeviceError, beginning with `of`, where the language's device is missing."""
    if language.needs_gpu and not visible_gpus():
        raise DeviceError(
            f"{of}{language.value} kernels need an NVIDIA GPU, and none is visible here",
            "run where nvidia-smi lists one, or choose cpp (--language cpp, or --set language=cpp)",
        )


def device_for(language: Language) -> str:
    """The torch device a language runs on. Raises DeviceError where it is missing."""
    require_device(language)
    return "cuda:0" if language.needs_gpu else "cpu"


def throttled() -> bool | None:
    """Whether the first visible GPU lowers its clocks now, not for idling; None where unknown."""
    with suppress(Exception):  # no library, no driver or no permission
        import pynvml

        return bool(pynvml.nvmlDeviceGetCurrentClocksThrottleReasons(_nvml_handle()) & SLOWING)
    return None


def free_share() -> float | None:
    with suppress(Exception):  # as above
        import pynvml

        memory = pynvml.nvmlDeviceGetMemoryInfo(_nvml_handle())
        return float(memory.free / memory.total)
    return None


def _nvml_handle() -> object:
    import pynvml

    pynvml.nvmlInit()
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    if visible.isdigit():
        return pynvml.nvmlDeviceGetHandleByIndex(int(visible))
    return pynvml.nvmlDeviceGetHandleByUUID(visible)
