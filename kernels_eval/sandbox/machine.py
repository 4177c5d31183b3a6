"""What sandboxes take of the machine: its memory, their environment, and their folders."""

from __future__ import annotations

import fcntl
import os
import re
import tempfile
from contextlib import suppress
from functools import cache
from pathlib import Path

import psutil

from kernels_eval.sandbox.trees import remove_tree

KEPT_VARIABLES = (
    "PATH LD_LIBRARY_PATH CUDA_VISIBLE_DEVICES CUDA_HOME VIRTUAL_ENV PYTHONPATH TZ".split()
)
VAR_TMP = "/var/tmp"
THREAD_VARIABLES = [f"{name}_NUM_THREADS" for name in "OMP MKL OPENBLAS NUMEXPR".split()]


@cache
def machine_memory_bytes() -> int:
    """Memory of this machine, or of this process's control group where less."""
    found = [int(psutil.virtual_memory().total)]
    lines: list[str] = []
    with suppress(OSError):
        lines = Path("/proc/self/cgroup").read_text().splitlines()
    for line in lines:
        _, controllers, inside = line.split(":", 2)
        if not controllers:  # version 2 of control groups
            root, name = "/sys/fs/cgroup", "memory.max"
        elif "memory" in controllers.split(","):
            root, name = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        else:
            continue
        group = Path(root + inside)
        for directory in (group, *group.parents):  # a limit on any group above holds too
            with suppress(OSError, ValueError):
                found.append(int((directory / name).read_text()))
    return min(found)


def new_folder() -> Path:
    """A folder named after this process, for `remove_abandoned`; not in /tmp, which children
    replace.
    """
    home = tempfile.gettempdir()
    if home == "/tmp" and os.access(VAR_TMP, os.W_OK | os.X_OK):
        home = VAR_TMP
    return Path(tempfile.mkdtemp(prefix=f"concur-{os.getpid()}-", dir=home))


def sealed_memory(size: int) -> int:
    """Zeroed memory that no process can shorten, which would end its readers."""
    descriptor = os.memfd_create("concur", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, max(size, 1))
    seals = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, seals)
    return descriptor


def remove_abandoned() -> None:
    homes = map(Path, (tempfile.gettempdir(), VAR_TMP))
    for folder in (folder for home in homes for folder in home.glob("concur-*-*")):
        owner = re.match(r"concur-([0-9]+)-", folder.name)
        if owner and not os.path.exists(f"/proc/{owner[1]}"):  # of any number of digits
            remove_tree(folder)


def child_environment(threads: int) -> dict[str, str]:
    """The environment of the fork server and all children: only what finds Python and CUDA."""
    kept = {name: os.environ[name] for name in KEPT_VARIABLES if name in os.environ}
    paths = (str(Path(__file__).parents[2]), kept.get("PYTHONPATH"))
    return kept | {
        # OpenMP's threads would spin for milliseconds after a call, in the other side's turn. This
        # is 0.15 ms: asleep at once, they made a loop of short calls take four times as long.
        "GOMP_SPINCOUNT": "0" if threads == 1 else "10000",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "LC_ALL": "C.UTF-8",
        "PYTHONDONTWRITEBYTECODE": "1",
        "PYTHONUNBUFFERED": "1",
        # Without it, importing torch.utils.cpp_extension poisons forked children.
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        "CUDA_MODULE_LOADING": "LAZY",
        **dict.fromkeys(THREAD_VARIABLES, str(threads)),
    }
