"""Confines a forked child, by its own system calls, before it runs untrusted code.

The order is the only one that works: namespaces come first (they need rights), then mounts, limits
and descriptors, then capabilities, Landlock and at last the system call filter, which forbids most
of what comes before it. Every step
raises OSError where it fails: a child is confined as reported, or dies.
"""

from __future__ import annotations

import glob
import os
import resource
import signal
import sys
import tempfile
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path
from typing import Any

from kernels_eval.isolation import landlock, namespaces, seccomp
from kernels_eval.isolation.layers import prefer_as_victim
from kernels_eval.isolation.syscalls import LINUX, PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl

SCRATCH_FILES = 65536
DESCRIPTORS = 4096
CPU_GRACE_S = 5

# What CUDA opens. Patterns, matched anew for every child: devices appear when they are first used.
DEVICES = (
    "/dev/nvidia[0-9]*",
    "/dev/nvidiactl",
    "/dev/nvidia-uvm*",
    "/dev/nvidia-modeset",
    "/dev/nvidia-caps",
)
READABLE_TREES = ("/proc", "/sys")


def readable() -> list[str]:
    """Everything a child may read and execute besides its own scratch: Python, torch, this package,
    the system, CUDA's toolkit."""
    modules = (sys.modules.get(name) for name in ("torch", "triton"))
    roots: list[str | Path] = [
        *(sys.prefix, sys.base_prefix, sys.exec_prefix),
        *(Path(sys.executable).resolve().parents[1], Path(__file__).parents[1]),
        os.environ.get("CUDA_HOME") or "/usr/local/cuda",
        *(path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")),
        *(Path(module.__file__).parent for module in modules if module and module.__file__),
        *filter(None, os.environ.get("LD_LIBRARY_PATH", "").split(os.pathsep)),
    ]
    kept = {os.path.realpath(root) for root in roots}
    return [*landlock.system_files(), *READABLE_TREES, *sorted(kept - {"/"})]


def enter_namespaces(layers: Collection[str]) -> None:
    flags = 0
    for name, flag in namespaces.NAMESPACES.items():
        if f"namespace:{name}" in layers:
            flags |= flag
    if flags:
        namespaces.enter(flags)


def confine(
    message: dict[str, Any], layers: Collection[str], read: Collection[str], keep: set[int]
) -> None:
    """Give up every right except what `message` (the spawn request) grants. `read` is `readable()`,
    found before the fork."""
    limits, scratch = message["limits"], message["scratch"]
    work = f"{scratch}/work"
    if "namespace:pid" in layers:
        namespaces.mount_proc()
    if "pid_limit" in layers:
        namespaces.limit_pids(limits["threads"] + limits["processes"])
    if "tmpfs_scratch" in layers:
        namespaces.mount_scratch(work, limits["scratch_mb"], SCRATCH_FILES)
    os.chdir(work)
    os.environ.update(
        HOME=work,
        TMPDIR=work,
        TRITON_CACHE_DIR=f"{work}/triton",
        TORCH_EXTENSIONS_DIR=f"{work}/extensions",
        TORCHINDUCTOR_CACHE_DIR=f"{work}/inductor",
        CUDA_CACHE_PATH=f"{work}/cuda",
        USER="candidate",
        LOGNAME="candidate",
    )
    tempfile.tempdir = work  # found before the fork, and remembered
    _limit(
        limits,
        endless=message["spawn"] in ("reference", "compiled"),
        private="namespace:user" in layers,
    )
    _close_others(keep)
    if not LINUX:
        return
    if "oom_first" in layers:
        prefer_as_victim()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "no_new_privs" in layers:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    if "no_capabilities" in layers:
        namespaces.drop_capabilities()
    if any(layer.startswith("landlock:") for layer in layers):
        _restrict_files(message, work, read)
    if "seccomp" in layers:
        seccomp.install(
            seccomp.program(processes=bool(message.get("processes")), own_pid=os.getpid())
        )


def _restrict_files(message: dict[str, Any], work: str, read: Collection[str]) -> None:
    rules = landlock.Ruleset()
    rules.allow(landlock.READ, read)
    # Built libraries are named by a hash of their sources: without the right to list the directory,
    # nothing else in it is found.
    rules.allow(landlock.READ_FILE, message.get("readable", ()))
    rules.allow(landlock.READ_FILE | landlock.READ_DIR, [message["scratch"]])
    rules.allow(landlock.READ | landlock.CHANGE, [work])
    rules.allow(
        landlock.READ_FILE | landlock.WRITE_FILE,
        [*landlock.PLAIN_DEVICES, *message.get("writable", ())],
    )
    # CUDA names its threads by writing to /proc/self/task/*/comm, and fails with error 304 where it
    # may not (seen on an H200).
    rules.allow(landlock.READ_FILE | landlock.WRITE_FILE | landlock.TRUNCATE, ["/proc/self/task"])
    rules.allow(landlock.DEVICE, [path for pattern in DEVICES for path in glob.glob(pattern)])
    rules.restrict()
    rules.close()


def _limit(limits: dict[str, Any], *, endless: bool, private: bool) -> None:
    _set(resource.RLIMIT_CORE, 0)
    _set(resource.RLIMIT_FSIZE, int(limits["file_mb"]) << 20)
    # A write above the limit fails with EFBIG instead of killing.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _set(resource.RLIMIT_NOFILE, DESCRIPTORS)
    # A reference serves all candidates of its task, and only answers while the parent waits for it.
    if not endless:
        cpu = int(limits["cpu_s"])
        _set(resource.RLIMIT_CPU, cpu, cpu + CPU_GRACE_S)
    # The kernel counts within the user namespace; elsewhere it would count all processes of the
    # user.
    if private:
        _set(resource.RLIMIT_NPROC, limits["threads"] + limits["processes"])


def _set(kind: int, soft: int, hard: int | None = None) -> None:
    hard, ceiling = soft if hard is None else hard, resource.getrlimit(kind)[1]
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))


def _close_others(keep: set[int]) -> None:
    listed = os.path.isdir("/proc/self/fd")
    for name in os.listdir("/proc/self/fd") if listed else range(3, 1024):
        if int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))
