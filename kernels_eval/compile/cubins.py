"""Per-kernel resources of a built library, by cuobjdump: no GPU is needed, and nothing of the
library runs. A spilled register looks like an array in local memory."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

PROGRAM = "cuobjdump"
TIMEOUT_S = 60
USAGE = re.compile(r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)")
INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][A-Z0-9]*)", re.MULTILINE)
LOCAL = ("STL", "LDL")


class Resources(NamedTuple):
    """A kernel's registers and stack bytes per thread, static shared bytes per block, and share of
    local memory instructions.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    local_share: float


def tool_path(name: str, *folders: str | Path) -> str | None:
    """Path of a CUDA tool, from PATH, the toolkit or these folders; or None."""
    home = os.environ.get("CUDA_HOME") or "/usr/local/cuda"
    places = (os.environ.get("PATH", ""), f"{home}/bin", f"{home}/{name}", *map(str, folders))
    return shutil.which(name, path=os.pathsep.join(places))


def cuobjdump() -> str | None:
    triton = importlib.util.find_spec("triton")
    folder = Path(triton.origin).parent / "backends/nvidia/bin" if triton and triton.origin else ""
    return tool_path(PROGRAM, folder)


def resources_of(library: str) -> dict[str, Resources]:
    program = cuobjdump()
    if program is None:
        return {}
    command = [program, "--dump-resource-usage", "--dump-sass", library]
    done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    return resources_in(done.stdout)


def resources_in(said: str) -> dict[str, Resources]:
    codes = dict(re.findall(r"Function : (\S+)\n(.*?)(?=\n\s*Function : |\Z)", said, re.DOTALL))
    found = {}
    for name, *numbers in USAGE.findall(said):
        names = INSTRUCTION.findall(codes.get(name, ""))
        share = sum(each in LOCAL for each in names) / max(1, len(names))
        registers, stack, shared = map(int, numbers)
        found[name] = Resources(registers, stack, shared, share)
    return found


def plain_name(kernel: str) -> str:
    """A kernel's name without namespaces, templates and arguments."""
    words = re.findall(r"\w+", re.split(r"[<(]", kernel.replace("(anonymous namespace)::", ""))[0])
    return words[-1] if words else kernel


def named(kernel: str, mangled: str) -> bool:
    return mangled == kernel or f"{len(kernel)}{kernel}" in mangled
