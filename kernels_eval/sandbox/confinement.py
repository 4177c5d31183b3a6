"""Confines a forked child, by its own system calls, before it runs untrusted code.

In order: namespaces (they need rights), mounts, limits and descriptors, capabilities, Landlock, and
last the system call filter, which forbids most steps before it. Every step raises OSError.
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

from kernels_eval.config import CPU_GRACE_S, DESCRIPTORS, SCRATCH_FILES
from kernels_eval.languages import Language
from kernels_eval.sandbox import landlock, namespaces, seccomp
from kernels_eval.sandbox.channel import Answer
from kernels_eval.sandbox.layers import prefer_as_victim
from kernels_eval.sandbox.syscalls import PR_SET_NO_NEW_PRIVS, PR_SET_PDEATHSIG, prctl

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
    """What a child may read and execute besides its scratch: Python, torch, this package, the
    system, CUDA's toolkit.
    """
    names = ("torch", *(name for each in Language for name in each.packages.values()))
    modules = map(sys.modules.get, names)
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
    known = namespaces.NAMESPACES.items()
    if flags := sum(flag for name, flag in known if f"namespace:{name}" in layers):
        namespaces.enter(flags)


def confine(
    message: Answer, layers: Collection[str], read: Collection[str], keep: set[int]
) -> None:
    """Give up every right except what `message` (the spawn request) grants. `read` is `readable()`,
    found before the fork.
    """
    limits, work = message["limits"], f"{message['scratch']}/work"
    most_threads = limits["threads"] + limits["processes"]
    if "namespace:pid" in layers:
        namespaces.mount_proc()
    if "pid_limit" in layers:
        namespaces.limit_pids(most_threads)
    if "tmpfs_scratch" in layers:
        if message["spawn"] == "sanitizer":
            namespaces.mount_scratch("/run", 1, 16)  # over the sockets of the machine's services
        namespaces.mount_scratch(work, limits["scratch_mb"], SCRATCH_FILES)
        needed = map(os.path.realpath, (*read, *message.get("readable", ()), message["scratch"]))
        if not any(Path(path).is_relative_to("/tmp") for path in needed):
            namespaces.show_at(work, "/tmp")
    os.chdir(work)
    os.environ.update(
        HOME=work,
        TMPDIR=work,
        TORCH_EXTENSIONS_DIR=f"{work}/extensions",
        TORCHINDUCTOR_CACHE_DIR=f"{work}/inductor",
        CUDA_CACHE_PATH=f"{work}/cuda",
        USER="candidate",
        LOGNAME="candidate",
    )
    os.environ.update({each.jit_cache: f"{work}/{each}" for each in Language if each.jit_cache})
    tempfile.tempdir = work  # found before the fork, and remembered
    _limit(resource.RLIMIT_CORE, 0)
    _limit(resource.RLIMIT_FSIZE, int(limits["file_mb"]) << 20)
    # A write above the limit fails with EFBIG instead of killing.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    _limit(resource.RLIMIT_NOFILE, DESCRIPTORS)
    # A reference serves all candidates of its task, and only answers while the parent waits for it.
    if message["spawn"] not in ("reference", "compiled"):
        _limit(resource.RLIMIT_CPU, int(limits["cpu_s"]), CPU_GRACE_S)
    # The kernel counts within the user namespace; elsewhere it would count all processes of the
    # user.
    if "namespace:user" in layers:
        _limit(resource.RLIMIT_NPROC, most_threads)
    _close_others(keep)
    _give_up_rights(message, layers, read, work)


def _limit(kind: int, soft: int, grace: int = 0) -> None:
    hard, ceiling = soft + grace, resource.getrlimit(kind)[1]
    if ceiling != resource.RLIM_INFINITY:
        soft, hard = min(soft, ceiling), min(hard, ceiling)
    resource.setrlimit(kind, (soft, hard))


def _close_others(keep: set[int]) -> None:
    for name in os.listdir("/proc/self/fd"):
        if int(name) not in keep:
            with suppress(OSError):
                os.close(int(name))


def _give_up_rights(
    message: Answer, layers: Collection[str], read: Collection[str], work: str
) -> None:
    if "oom_first" in layers:
        prefer_as_victim()
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if "no_new_privs" in layers:
        prctl(PR_SET_NO_NEW_PRIVS, 1)
    if "no_capabilities" in layers:
        namespaces.drop_capabilities()
    # The program that compute-sanitizer starts does this itself, with its own /proc/self.
    talks = message["spawn"] == "sanitizer"
    if any(layer.startswith("landlock:") for layer in layers) and not talks:
        restrict_files(message, work, read)
    if "seccomp" in layers:
        may_fork = bool(message.get("processes"))
        talks = talks and "tmpfs_scratch" in layers  # else to the machine's services, too
        program = seccomp.program(
            processes=may_fork,
            connects=talks,
            own_pid=os.getpid(),
            shared_memory=_may_share(message),
        )
        seccomp.install(program)


def _devices() -> list[str]:
    return [path for pattern in DEVICES for path in glob.glob(pattern)]


def _may_share(message: Answer) -> bool:
    """Whether it may make memory that no resident set counts: our own code, and CUDA."""
    return message.get("spawn") not in ("candidate", "capture") or bool(_devices())


def restrict_files(message: Answer, work: str, read: Collection[str]) -> None:
    both = landlock.READ_FILE | landlock.WRITE_FILE
    rules = landlock.Ruleset().allow(landlock.READ, read)
    # Built libraries are named by a hash of their sources: without the right to list the directory,
    # nothing else in it is found.
    rules.allow(landlock.READ_FILE, message.get("readable", ()))
    rules.allow(landlock.READ_FILE | landlock.READ_DIR, [message["scratch"]])
    rules.allow(landlock.READ | landlock.CHANGE, [work])
    shared = _may_share(message)  # a shared mapping of /dev/zero is such memory
    plain = [path for path in landlock.PLAIN_DEVICES if shared or path != "/dev/zero"]
    rules.allow(both, plain)
    if devices := _devices():
        # CUDA names its threads by writing to /proc/self/task/*/comm, and fails with error 304
        # where it may not (seen on an H200). Beside it are `mem` and `oom_score_adj`.
        rules.allow(both | landlock.TRUNCATE, ["/proc/self/task"])
        rules.allow(landlock.DEVICE, devices)
    rules.restrict()
    rules.close()
