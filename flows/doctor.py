"""`concur doctor`: what this machine has, what is missing, and the fixing command.

Imports nothing heavy: it asks processes and package metadata, and changes nothing."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Collection
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal, NamedTuple

from flows import ready
from flows.config import load_profile
from flows.extras import extra_of
from flows.ready import Look
from kernels_eval.compile.cache import BuildCache
from kernels_eval.compile.extensions import Builder
from kernels_eval.config import BuildConfig
from kernels_eval.devices import visible_gpus
from kernels_eval.errors import EvalError, UsageError
from kernels_eval.installation import install_command
from kernels_eval.judge import sanitizer
from kernels_eval.records import Language, Record
from kernels_eval.sandbox.layers import missing
from kernels_eval.toolchain import default_cache
from tasks.synthesis.config import SynthesisConfig

Need = Literal["required", "optional"]
Work = Literal["verify", "refresh", "training"]
WORKS: tuple[Work, ...] = ("verify", "refresh", "training")
"""What runs, least first: each needs what those before it need. training: with the benchmark."""
FREE_DISK_GB = 8  # precompiled headers are 3 GB, snapshots and a small model the rest


class Probe(NamedTuple):
    """One check: `look` says what it found, and raises EvalError where it is missing. `work` is the
    least that needs it, or None."""

    name: str
    work: Work | None
    look: Look


class Check(Record):
    """One line of the table. `fix` is empty where nothing is missing; `work` is the least that
    needs what is required."""

    name: str
    found: str
    ok: bool
    need: Need
    work: Work | None = None
    fix: str = ""


def examine(
    profile: str, overrides: tuple[str, ...] = (), *, say: Callable[[str], None] = lambda _: None
) -> list[Check]:
    """Every check; the profile's needs are marked as required. `say` is told that they begin.
    Raises UsageError for an unreadable profile."""
    config = load_profile(profile, overrides)
    say("checking tools, devices and models: seconds, half a minute where the machine is busy")
    synthesis = config.synthesis

    def only(needed: bool, work: Work) -> Work | None:
        return work if needed else None

    probes = [
        Probe("Python", "verify", python),
        Probe("torch", "verify", partial(package, "torch")),
        Probe("torch device", "verify", torch_device),
        Probe("C++ compiler", "verify", compiler),
        Probe("nvcc", only(config.language.needs_nvcc, "verify"), nvcc),
        Probe("compute-sanitizer", None, compute_sanitizer),
        Probe("GPUs", only(config.language.needs_gpu, "verify"), gpus),
    ]
    for language in Language:
        work = only(language == config.language, "verify")
        probes.append(Probe(f"language {language}", work, language.doctor))
    probes += [
        Probe("ray", "refresh", partial(package, "ray")),
        Probe("prefect", "refresh", partial(package, "prefect")),
        Probe("trl", "training", partial(package, "trl")),
        Probe("mlflow", only(config.tracking.enabled, "refresh"), partial(package, "mlflow")),
        Probe("vLLM", only(synthesis.sampler == "vllm", "refresh"), lambda: vllm(synthesis)),
    ]
    probes += [Probe(name, "refresh", look) for name, look in ready.checks(config, ("refresh",))]
    trained = ready.checks(config, ("training", "benchmark"))
    probes += [Probe(name, "training", look) for name, look in trained]
    probes += [
        Probe("disk", "refresh", lambda: disk(config.root)),
        Probe("build cache", "verify", build_cache),
    ]
    return [check_of(probe) for probe in probes] + isolation()


def runs(checks: Collection[Check]) -> dict[Work, bool]:
    """What runs here with what there is."""
    found: dict[Work, bool] = {}
    for work in WORKS:
        ready_for = all(check.ok for check in checks if check.work == work)
        found[work] = ready_for and all(found.values())
    return found


def check_of(probe: Probe) -> Check:
    fix = ""
    try:
        found = probe.look()
    except ModuleNotFoundError as error:
        extra = "train" if probe.work == "training" else "line"
        found, fix = f"{error.name}: not installed", install_command(extra)
    except EvalError as error:
        found, fix = str(error.args[0]), error.hint or str(error)
    need: Need = "required" if probe.work else "optional"
    return Check(name=probe.name, found=found, ok=not fix, need=need, work=probe.work, fix=fix)


def python() -> str:
    found = sys.version.split()[0]
    if not (3, 11) <= sys.version_info[:2] <= (3, 12):
        raise UsageError(found, "use Python 3.11 or 3.12")
    return found


def package(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError as error:
        raise UsageError("not installed", install_line(name)) from error


def install_line(name: str) -> str:
    extra = extra_of(ModuleNotFoundError(name=name))
    return install_command(*([extra] if extra else []))


def torch_device() -> str:
    """The device that torch can use, asked in another process: the import takes seconds and may
    touch a driver."""
    script = (
        "import torch; print(torch.cuda.get_device_name(0) if torch.cuda.is_available() else 'cpu')"
    )
    found = ask([sys.executable, "-c", script], timeout_s=120)
    if not found:
        raise UsageError("torch does not import", install_line("torch"))
    return found


def compiler() -> str:
    tools = Builder(BuildConfig()).tools
    return f"{tools.cxx_version} ({tools.cxx})"


def nvcc() -> str:
    tools = Builder(BuildConfig()).tools
    if not tools.nvcc:
        raise UsageError("not found", "install the CUDA toolkit and set CUDA_HOME")
    return tools.nvcc_version


def compute_sanitizer() -> str:
    """Without it, what reads or writes beside its memory on a GPU may be called correct."""
    found = sanitizer.installed()
    if not found:
        fix = "NVIDIA's Debian repository: apt-get install cuda-sanitizer-13-0; or put it on PATH"
        raise UsageError("not found", fix)
    return found


def gpus() -> str:
    found = visible_gpus()
    if not found:
        fix = "run where nvidia-smi lists a GPU, or use --set language=cpp"
        raise UsageError("none visible", fix)
    return "; ".join(found)


def vllm(synthesis: SynthesisConfig) -> str:
    """vLLM's own environment, from `synthesis.server`, $CONCUR_VLLM_PYTHON or `vllm` on PATH."""
    from tasks.synthesis.server import serve_command

    *program, _ = serve_command(synthesis.server)
    found = ask([*program, "--version"], timeout_s=120)
    if not found:
        words = " ".join(program)
        raise UsageError(
            f"{words} does not tell its version", "pip install vllm in its environment"
        )
    return found


def disk(location: str) -> str:
    root = Path(location)
    if "://" in location:
        return f"{location} is remote and was not checked"
    if root.exists() and not root.is_dir():
        raise UsageError(f"{root} is not a directory", "--set root=DIR")
    existing = next(path for path in (root.absolute(), *root.absolute().parents) if path.exists())
    free = shutil.disk_usage(existing).free / 1e9
    writable = os.access(existing, os.W_OK)
    found = f"{free:.0f} GB free at {root}" + ("" if writable else ", not writable")
    if free < FREE_DISK_GB or not writable:
        fix = f"--set root=DIR with {FREE_DISK_GB} GB free and write permission"
        raise UsageError(found, fix)
    return found


def build_cache() -> str:
    cache = BuildCache(default_cache())
    limit = f"limit {cache.limit_bytes / 1e9:.1f} GB" if cache.limit_bytes else "no limit"
    entries, held_bytes = cache.usage()
    return f"about {entries} builds, {held_bytes / 1e9:.1f} GB, {limit}, at {cache.cache}"


def isolation() -> list[Check]:
    """Sandbox layers, probed by its own code in a short process, and a line for each missing
    one."""
    command = [sys.executable, "-m", "kernels_eval.sandbox.layers"]
    found = ask(command)
    if not found:
        return [_optional("isolation", "not probed", shlex.join(command))]
    absent = missing(found.split(", "))
    fix = "see the lines below; until then verify only on a machine without valuable data"
    return [
        _optional("isolation", found, fix if absent else ""),
        *(_optional(f"isolation {layer}", "not active", fix) for layer, fix in absent.items()),
    ]


def _optional(name: str, found: str, fix: str) -> Check:
    return Check(name=name, found=found, ok=not fix, need="optional", fix=fix)


def ask(command: list[str], timeout_s: float = 60) -> str | None:
    """The last line of a command's output. None if it fails, prints nothing or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=timeout_s, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    lines = done.stdout.strip().splitlines()
    return lines[-1] if done.returncode == 0 and lines else None
