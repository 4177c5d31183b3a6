"""`concur doctor`: what is here, what is missing, and the line that fixes it. Imports nothing
heavy; asks processes and metadata."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from kernels_eval.errors import EvalError, UsageError
from kernels_eval.records import Record

if TYPE_CHECKING:
    from tasks.synthesis.config import SynthesisConfig

Need = Literal["required", "optional", "unneeded"]
FREE_DISK_GB = 8  # precompiled headers are 3 GB, snapshots and a small model the rest


class Check(Record):
    """One line of the table. `fix` is empty where nothing is missing."""

    name: str
    found: str
    ok: bool
    need: Need
    fix: str = ""


def examine(profile: str, overrides: tuple[str, ...] = ()) -> list[Check]:
    """Every check, with what the profile needs marked as required. Raises UsageError for a profile
    that cannot be read."""
    from flows.config import load_profile

    config = load_profile(profile, overrides)
    gpu: Need = "required" if config.language.needs_gpu else "optional"
    openai: Need = "required" if config.synthesis.sampler == "openai" else "optional"
    return [
        _python(),
        _package("torch", "required", "pip install 'torch>=2.11,<2.14'"),
        _torch_device(),
        _compiler(),
        _nvcc(gpu),
        _gpus(gpu),
        _package("ray", "required", "pip install 'ray[default]'"),
        _package("prefect", "required", "pip install 'prefect>=3.8,<3.9' 'fastapi<0.151'"),
        _package("trl", "required", "pip install 'trl>=1.16'"),
        _package(
            "mlflow",
            "required" if config.tracking.enabled else "optional",
            "pip install 'mlflow>=3.17'",
        ),
        _package("openai", openai, "pip install openai"),
        _vllm(config.synthesis),
        _disk(config.root),
        _build_cache(),
        *_isolation(),
    ]


def runnable(checks: list[Check]) -> bool:
    return all(check.ok for check in checks if check.need == "required")


def _python() -> Check:
    ok = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return Check(
        name="Python",
        found=sys.version.split()[0],
        ok=ok,
        need="required",
        fix="" if ok else "use Python 3.11 or 3.12",
    )


def _package(name: str, need: Need, fix: str) -> Check:
    try:
        return Check(name=name, found=version(name), ok=True, need=need)
    except PackageNotFoundError:
        return Check(name=name, found="not installed", ok=False, need=need, fix=fix)


def _torch_device() -> Check:
    """Which device torch can use, asked in a process of its own (the import takes seconds and may
    touch a driver)."""
    script = (
        "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'cpu')"
    )
    found = _ask([sys.executable, "-c", script], timeout=120)
    return Check(
        name="torch device",
        found=found or "torch does not import",
        ok=bool(found),
        need="required",
        fix="" if found else "pip install 'torch>=2.11,<2.14'",
    )


def _compiler() -> Check:
    from kernels_eval.build.extensions import Builder
    from kernels_eval.config import BuildConfig

    def look() -> str:
        tools = Builder(BuildConfig()).tools
        return f"{tools.cxx_version} ({tools.cxx})"

    return _tried("C++ compiler", look, "required", "apt-get install g++, or set CXX")


def _nvcc(need: Need) -> Check:
    from kernels_eval.build.extensions import Builder
    from kernels_eval.config import BuildConfig

    tools = Builder(BuildConfig()).tools
    fix = "" if tools.nvcc else "install the CUDA toolkit and set CUDA_HOME"
    return Check(
        name="nvcc",
        found=tools.nvcc_version if tools.nvcc else "not found",
        ok=bool(tools.nvcc),
        need=need,
        fix=fix,
    )


def _gpus(need: Need) -> Check:
    from kernels_eval.devices import visible_gpus

    gpus = visible_gpus()
    return Check(
        name="GPUs",
        found="; ".join(gpus) or "none visible",
        ok=bool(gpus),
        need=need,
        fix="" if gpus else "run where nvidia-smi lists a GPU, or use --set language=cpp",
    )


def _vllm(synthesis: SynthesisConfig) -> Check:
    """vLLM lives in an environment of its own: `synthesis.server` or $CONCUR_VLLM_PYTHON names it,
    or `vllm` is on PATH."""
    from tasks.synthesis.server import serve_command

    need: Need = "required" if synthesis.sampler == "vllm" else "optional"
    try:
        command = serve_command(synthesis.server)
    except UsageError as error:
        return Check(
            name="vLLM",
            found=f"{error.args[0]} (own environment)",
            ok=False,
            need=need,
            fix=error.hint,
        )
    if synthesis.server.command:
        return Check(
            name="vLLM", found=f"{synthesis.server.command} (not tried)", ok=True, need=need
        )
    ask = (
        [command[0], "-c", "from importlib.metadata import version; print(version('vllm'))"]
        if "-m" in command
        else [command[0], "--version"]
    )
    found = _ask(ask, timeout=120)
    fix = (
        ""
        if found
        else f"{command[0]} -m pip install vllm"
        if "-m" in command
        else f"mend {command[0]}"
    )
    return Check(
        name="vLLM", found=found or f"{command[0]} has no vLLM", ok=bool(found), need=need, fix=fix
    )


def _disk(location: str | Path) -> Check:
    root, location = Path(location), str(location)
    if "://" in location:
        return Check(
            name="disk", found=f"{location} is remote and was not checked", ok=True, need="required"
        )
    if root.exists() and not root.is_dir():
        return Check(
            name="disk",
            found=f"{root} is not a directory",
            ok=False,
            need="required",
            fix="--set root=DIR",
        )
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    writable = os.access(existing, os.W_OK)
    ok = free >= FREE_DISK_GB and writable
    found = f"{free:.0f} GB free at {root}" + ("" if writable else ", not writable")
    return Check(
        name="disk",
        found=found,
        ok=ok,
        need="required",
        fix="" if ok else f"--set root=DIR with {FREE_DISK_GB} GB free and write permission",
    )


def _build_cache() -> Check:
    from kernels_eval.build.cache import BuildCache
    from kernels_eval.build.toolchain import default_cache

    def look() -> str:
        cache = BuildCache(default_cache())
        limit = f"limit {cache.limit_bytes / 1e9:.1f} GB" if cache.limit_bytes else "no limit"
        entries, held_bytes = cache.usage()
        return f"about {entries} builds, {held_bytes / 1e9:.1f} GB, {limit}, at {cache.cache}"

    return _tried("build cache", look, "required", "")


def _isolation() -> list[Check]:
    """Which layers the sandbox would have in force, probed by its own code in a short process; a
    line for each that is missing."""
    found = _ask([sys.executable, "-m", "kernels_eval.isolation.layers"])
    if not found:
        return [
            Check(
                name="isolation",
                found="not probed",
                ok=False,
                need="optional",
                fix="python -m kernels_eval.isolation.layers",
            )
        ]
    from kernels_eval.isolation.layers import missing

    absent = missing(found.split(", "))
    summary = Check(
        name="isolation",
        found=found,
        ok=not absent,
        need="optional",
        fix=(
            "see the lines below; until then run verification where nothing can be lost"
            if absent
            else ""
        ),
    )
    return [summary] + [
        Check(name=f"isolation {layer}", found="not in force", ok=False, need="optional", fix=fix)
        for layer, fix in absent.items()
    ]


def _tried(name: str, look: Callable[[], str], need: Need, fix: str) -> Check:
    try:
        return Check(name=name, found=look(), ok=True, need=need)
    except EvalError as error:
        return Check(
            name=name, found=str(error.args[0]), ok=False, need=need, fix=error.hint or fix
        )


def _ask(command: list[str], timeout: float = 60) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return (
        done.stdout.strip().splitlines()[-1]
        if done.returncode == 0 and done.stdout.strip()
        else None
    )
