"""Does a GPU slow its clocks? Asked through NVML, by the trusted parent."""

from __future__ import annotations

import os

# Reasons that lower clocks below what the work could have: power cap, hardware slowdown, and
# temperature (NVML's clocks event reasons).
SLOWING = 0x4 | 0x8 | 0x20 | 0x40 | 0x80


def throttled() -> bool | None:
    """Whether the first visible GPU lowers its clocks now, and for more than being idle. None where
    NVML cannot say."""
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
    except Exception:  # no library, no driver, no permission: nothing is said
        return None
