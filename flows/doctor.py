"""`concur doctor`: what this machine has, what is missing, and the line that fixes it.

Imports nothing heavy: it asks processes and package metadata, and changes nothing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from flows import ready
from flows.config import load_profile
from kernels_eval.compile.cache import BuildCache
from kernels_eval.compile.extensions import Builder
from kernels_eval.config import BuildConfig
from kernels_eval.devices import visible_gpus
from kernels_eval.errors import EvalError
from kernels_eval.records import Language, Record
from kernels_eval.sandbox.layers import missing
from kernels_eval.toolchain import default_cache
from tasks.synthesis import sizing
from tasks.synthesis.config import SynthesisConfig

Need = Literal["required", "optional"]
Answer = tuple[str, str]
"""What was found, and the line that fixes it; no line means that nothing is missing."""
FREE_DISK_GB = 8  # precompiled headers are 3 GB, snapshots and a small model the rest
PACKAGES = {
    "torch": "pip install concur",
    "ray": "pip install 'concur[batch]'",
    "prefect": "pip install 'concur[line]'",
    "mlflow": "pip install 'concur[line]'",
    "trl": "pip install 'concur[train]'",
}


class Check(Record):
    """One line of the table. `fix` is empty where nothing is missing."""

    name: str
    found: str
    ok: bool
    need: Need
    fix: str = ""


def examine(profile: str, overrides: tuple[str, ...] = ()) -> list[Check]:
    """Every check; what the profile needs is marked as required. Raises UsageError for a profile
    that cannot be read."""
    config = load_profile(profile, overrides)
    needs_gpu = config.language.needs_gpu
    probes: list[tuple[str, bool, Callable[[], Answer]]] = [
        ("Python", True, python),
        ("torch", True, lambda: package("torch")),
        ("torch device", True, torch_device),
        ("C++ compiler", True, compiler),
        ("nvcc", config.language.needs_nvcc, nvcc),
        ("GPUs", needs_gpu, gpus),
        *((f"language {each}", each == config.language, each.doctor) for each in Language),
        ("ray", True, lambda: package("ray")),
        ("prefect", True, lambda: package("prefect")),
        ("trl", True, lambda: package("trl")),
        ("mlflow", config.tracking.enabled, lambda: package("mlflow")),
        ("vLLM", config.synthesis.sampler == "vllm", lambda: vllm(config.synthesis)),
        ("answers at once", False, lambda: answers_at_once(config.synthesis)),
        *((name, True, partial(_looked, look)) for name, look in ready.checks(config)),
        ("disk", True, lambda: disk(config.root)),
        ("build cache", True, build_cache),
    ]
    return [_check(*probe) for probe in probes] + isolation()


def runnable(checks: list[Check]) -> bool:
    return all(check.ok for check in checks if check.need == "required")


def _looked(look: Callable[[], str]) -> Answer:
    return look(), ""


def _check(name: str, required: bool, look: Callable[[], Answer]) -> Check:
    try:
        found, fix = look()
    except ModuleNotFoundError as error:
        found, fix = str(error), PACKAGES["prefect"]
    except EvalError as error:
        found, fix = str(error.args[0]), error.hint or str(error)
    need: Need = "required" if required else "optional"
    return Check(name=name, found=found, ok=not fix, need=need, fix=fix)


def python() -> Answer:
    fits = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return sys.version.split()[0], "" if fits else "use Python 3.11 or 3.12"


def package(name: str) -> Answer:
    try:
        return version(name), ""
    except PackageNotFoundError:
        return "not installed", PACKAGES[name]


def torch_device() -> Answer:
    """The device that torch can use, asked in a process of its own: the import takes seconds and
    may touch a driver."""
    script = (
        "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'cpu')"
    )
    if found := ask([sys.executable, "-c", script], timeout_s=120):
        return found, ""
    return "torch does not import", PACKAGES["torch"]


def compiler() -> Answer:
    tools = Builder(BuildConfig()).tools
    return f"{tools.cxx_version} ({tools.cxx})", ""


def nvcc() -> Answer:
    tools = Builder(BuildConfig()).tools
    if tools.nvcc:
        return tools.nvcc_version, ""
    return "not found", "install the CUDA toolkit and set CUDA_HOME"


def gpus() -> Answer:
    if found := visible_gpus():
        return "; ".join(found), ""
    return "none visible", "run where nvidia-smi lists a GPU, or use --set language=cpp"


def vllm(synthesis: SynthesisConfig) -> Answer:
    """vLLM lives in its own environment: `synthesis.server` or $CONCUR_VLLM_PYTHON names it, or
    `vllm` is on PATH."""
    from tasks.synthesis.server import serve_command

    command = serve_command(synthesis.server)
    if synthesis.server.command:
        return f"{synthesis.server.command} (not tried)", ""
    script = "from importlib.metadata import version; print(version('vllm'))"
    module = "-m" in command
    if found := ask([command[0], *(["-c", script] if module else ["--version"])], timeout_s=120):
        return found, ""
    fix = f"{command[0]} -m pip install vllm" if module else f"reinstall {command[0]}"
    return f"{command[0]} has no vLLM", fix


def answers_at_once(synthesis: SynthesisConfig) -> Answer:
    """How many answers a server on these GPUs writes at once and how fast; where fewer than 16 fit,
    the GPUs that a replica needs."""
    served = synthesis.sampler == "vllm"
    if not served and not re.search(r"//(127\.|localhost)", str(synthesis.base_url)):
        return "no server on this machine generates answers", ""
    server, limit = synthesis.server, synthesis.sampling.max_tokens
    if not served and not server.tensor_parallel:
        server = server.model_copy(update={"tensor_parallel": 1})  # vllm serve's default
    found, basis = sizing.expected(synthesis.model, server, limit)
    if found.sequences >= min(sizing.LEAST_SEQS, server.max_num_seqs or sizing.LEAST_SEQS):
        return basis, ""
    key = (
        "--set synthesis.server.tensor_parallel" if served else "vllm serve --tensor-parallel-size"
    )
    for gpus in (2, 4, 8):
        wider = server.model_copy(update={"tensor_parallel": gpus})
        held = sizing.expected(synthesis.model, wider, limit)[0].sequences
        if held >= sizing.LEAST_SEQS:
            return basis, f"{key}={gpus} holds {held} at once"
    return basis, "use GPUs with more memory, or vllm serve --kv-cache-dtype fp8"


def disk(location: str) -> Answer:
    root = Path(location)
    if "://" in location:
        return f"{location} is remote and was not checked", ""
    if root.exists() and not root.is_dir():
        return f"{root} is not a directory", "--set root=DIR"
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    writable = os.access(existing, os.W_OK)
    found = f"{free:.0f} GB free at {root}" + ("" if writable else ", not writable")
    if free >= FREE_DISK_GB and writable:
        return found, ""
    return found, f"--set root=DIR with {FREE_DISK_GB} GB free and write permission"


def build_cache() -> Answer:
    cache = BuildCache(default_cache())
    limit = f"limit {cache.limit_bytes / 1e9:.1f} GB" if cache.limit_bytes else "no limit"
    entries, held_bytes = cache.usage()
    return f"about {entries} builds, {held_bytes / 1e9:.1f} GB, {limit}, at {cache.cache}", ""


def isolation() -> list[Check]:
    """The layers that the sandbox would activate, probed by its own code in a short process,
    and a line for each that is missing."""
    command = [sys.executable, "-m", "kernels_eval.sandbox.layers"]
    found = ask(command)
    if not found:
        return [
            _check(
                "isolation",
                False,
                lambda: ("not probed", "python -m kernels_eval.sandbox.layers"),
            )
        ]
    absent = missing(found.split(", "))
    fix = "see the lines below; until then verify only on a machine without valuable data"
    return [
        _check("isolation", False, lambda: (found, fix if absent else "")),
        *(
            Check(name=f"isolation {layer}", found="not active", ok=False, need="optional", fix=fix)
            for layer, fix in absent.items()
        ),
    ]


def ask(command: list[str], timeout_s: float = 60) -> str | None:
    """The last line that a command prints. None if it fails, prints nothing or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1] if done.returncode == 0 and lines else None
