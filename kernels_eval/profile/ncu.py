"""NVIDIA's ncu over a candidate's own kernels: the command, its output, and the metrics asked for
(`ncu.toml`).
"""

from __future__ import annotations

import csv
import math
import re
from collections.abc import Collection, Iterable
from pathlib import Path

from kernels_eval.compile.cubins import plain_name, tool_path
from kernels_eval.tables import table_beside

TABLE = table_beside(__file__)
CUDAFORGE, OTHERS = ([name for name, *_ in TABLE[part]] for part in ("cudaforge", "others"))
METRICS = CUDAFORGE + OTHERS
PROGRAM = "ncu"
LAUNCHES = 16
ENVIRONMENT = {"NV_COMPUTE_PROFILER_LOCAL_CONNECTION_OVERRIDE": "uds"}  # no other sockets
HOME = Path("/opt/nvidia/nsight-compute")
MISSING = (
    "ncu is not installed: no metrics. Install Nsight Compute (NVIDIA's Debian repository: apt-get"
    " install nsight-compute-2025.3.1) or put it on PATH"
)
FORBIDDEN = (
    "the driver does not permit reading performance counters (ERR_NVGPUCTRPERM): no metrics. As"
    " root, set NVreg_RestrictProfilingToAdminUsers=0 for the nvidia module and reload it"
    " (https://developer.nvidia.com/ERR_NVGPUCTRPERM)"
)
ERROR = re.compile(r"==ERROR== (.*)")
UNKNOWN = re.compile(r"(?:find|unknown|invalid) metric\D*?[\"']?(\w+__[\w.]+)", re.IGNORECASE)


def installed() -> str | None:
    return tool_path(PROGRAM, *sorted(HOME.glob("*"), reverse=True))


def command(program: str, kernels: Iterable[str], without: Collection[str] = ()) -> list[str]:
    """ncu's command: only these kernels (plain names), between marks, without locking clocks."""
    metrics = ",".join(name for name in METRICS if name not in without)
    options = f"""--csv --page raw --print-units base --profile-from-start off
        --target-processes application-only --clock-control none --launch-count {LAUNCHES}"""
    names = "|".join(sorted({re.escape(plain_name(name)) for name in kernels}))
    named = ["--kernel-name", f"regex:^({names})$"] if names else []
    return [program, *options.split(), *named, "--metrics", metrics]


def metrics_in(said: str) -> dict[str, dict[str, float]]:
    """Metrics of each kernel's longest launch, by plain name, without those the chip lacks."""
    lines = [line for line in said.splitlines() if line.startswith('"')]
    found: dict[str, dict[str, float]] = {}
    for row in csv.DictReader(lines):
        values = {name: value for name in METRICS if (value := _number(row.get(name))) is not None}
        kernel = plain_name(row.get("Kernel Name") or "")
        longest = found.get(kernel, {}).get("gpu__time_duration.sum", -1.0)
        if values and values.get("gpu__time_duration.sum", 0.0) > longest:
            found[kernel] = values
    return found


def unavailable_reason(said: str) -> str:
    """Why there are no metrics, in one line; empty where nothing says so."""
    if "ERR_NVGPUCTRPERM" in said:
        return FORBIDDEN
    error = ERROR.search(said)
    return f"ncu says: {error[1].strip()[:300]}" if error else ""


def unknown_metrics(said: str) -> set[str]:
    return set(UNKNOWN.findall(said))


def _number(text: str | None) -> float | None:
    try:
        value = float((text or "").replace(",", ""))
    except ValueError:
        return None
    return value if math.isfinite(value) else None
