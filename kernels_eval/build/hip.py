"""CUDA kernels as HIP, compiled for AMD GPUs without one: the device code of a source, its names
translated, and the assembly that hipcc makes of it.

Guarantees: `compiled` is of a kernel that reached assembly, and says nothing of its results: it is
never a verdict. What a source has beside device code (functions that take tensors or launch) is
left out. Does not guarantee that a kernel means the same there: a wavefront of gfx90a has 64 lanes,
and a kernel that counts on 32 compiles all the same. Templates that only host code instantiates
are no kernels of the device code.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from kernels_eval.errors import ToolchainError
from kernels_eval.records import Record

ARCH = "gfx90a"
HEADERS = {
    "cuda_runtime.h": "hip/hip_runtime.h",
    "cuda_runtime_api.h": "hip/hip_runtime_api.h",
    "cuda.h": "hip/hip_runtime.h",
    "cuda_fp16.h": "hip/hip_fp16.h",
    "cooperative_groups.h": "hip/hip_cooperative_groups.h",
}
NAMES = {
    **{r"\bcuda(?=[A-Z])": "hip", r"\bcu(?=(?:Mem|Stream|Event|Launch)[A-Z])": "hip"},
    r"\b__syncwarp\s*\(\s*\w*\s*\)": "__builtin_amdgcn_wave_barrier()",
    r"\b__(shfl(?:_up|_down|_xor)?)_sync\s*\(\s*[^,()]+,": r"__\1(",
    r"\b__(any|all|ballot)_sync\s*\(\s*[^,()]+,": r"__\1(",
    r"\b__activemask\s*\(\s*\)": "__ballot(1)",
    r"\bCUDART_INF_F\b": "__builtin_inff()",
    r"\bCUDART_NAN_F\b": '__builtin_nanf("")',
    r"\bCUDART_INF\b": "__builtin_inf()",
}
"""The names that candidates use, as regular expressions, and HIP's. The masks of whole warps that
the first argument of `_sync` functions gives are dropped: ROCm 5 has none."""
_HOST = re.compile(r"\b(torch|at|c10|pybind11)::|\b(TORCH|AT|PYBIND11|C10)_\w+|<<<|\bTensor\b")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"].*$', re.MULTILINE)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_KERNEL = re.compile(r"^\s*\.amdhsa_kernel (\S+)", re.MULTILINE)


class HipBuild(Record):
    """What hipcc made of a CUDA source. `kernels` are those in `assembly`, by their symbols;
    `reason` is empty where `compiled`."""

    arch: str
    source: str
    compiled: bool
    kernels: tuple[str, ...] = ()
    assembly: str = ""
    reason: str = ""


def translated(cuda: str) -> str:
    """The device code of a CUDA source in HIP."""
    kept = "".join(chunk for chunk in _declarations(_COMMENT.sub(" ", cuda)))
    for pattern, name in NAMES.items():
        kept = re.sub(pattern, name, kept)
    return f"#include <hip/hip_runtime.h>\n#include <cfloat>\n#include <cmath>\n{kept}"


def compile_hip(cuda: str, *, arch: str = ARCH, timeout_s: float = 120) -> HipBuild:
    """Translate and compile. Raises ToolchainError where there is no hipcc; a source that fails is
    a record."""
    hipcc = shutil.which("hipcc")
    if hipcc is None:
        raise ToolchainError("hipcc was not found", "apt-get install hipcc")
    source = translated(cuda)
    with tempfile.TemporaryDirectory() as folder:
        path, made = Path(folder) / "kernel.hip", Path(folder) / "kernel.s"
        path.write_text(source, encoding="utf-8", errors="replace")
        command = [hipcc, "-x", "hip", "--cuda-device-only", "-S", f"--offload-arch={arch}"]
        command += ["-O3", "-std=c++17", "-w", str(path), "-o", str(made)]
        try:
            done = subprocess.run(
                command,
                capture_output=True,
                text=True,
                timeout=timeout_s,
                cwd=folder,
                env=os.environ | {"HIP_PLATFORM": "amd"},  # beside a CUDA toolkit it takes nvcc
            )
        except subprocess.TimeoutExpired:
            return HipBuild(arch=arch, source=source, compiled=False, reason="timeout")
        if done.returncode:
            said = re.search(r"error: (.*)", done.stderr)
            reason = said[1] if said else done.stderr.strip() or "hipcc failed"
            return HipBuild(arch=arch, source=source, compiled=False, reason=reason[:300])
        assembly = made.read_text(encoding="utf-8")
    kernels = tuple(_KERNEL.findall(assembly))
    reason = "" if kernels else "no kernel is instantiated in the device code"
    return HipBuild(
        arch=arch,
        source=source,
        compiled=bool(kernels),
        kernels=kernels,
        assembly=assembly,
        reason=reason,
    )


def _declarations(text: str) -> Iterator[str]:
    """The parts of a source that device code is made of: headers that HIP has, macros, and
    declarations without tensors, bindings or launches."""
    depth, begin = 0, 0
    lines = _INCLUDE.sub(_included, text)
    for match in re.finditer(r"[{};]|^[ \t]*#(?:[^\n\\]|\\.)*\n", lines, re.MULTILINE | re.DOTALL):
        found = match[0]
        if found in "{}":
            depth += 1 if found == "{" else -1
        ends = found == ";" or (found == "}" and not _continues(lines, match.end()))
        if depth == 0 and (ends or "#" in found):
            chunk = lines[begin : match.end()]
            begin = match.end()
            if not _HOST.search(chunk):
                yield chunk


def _continues(text: str, at: int) -> bool:
    """Whether a declaration goes on behind its closing brace, as a struct's does."""
    return text[at:].lstrip()[:1] == ";"


def _included(found: re.Match[str]) -> str:
    name = HEADERS.get(found[1])
    if name is None and (found[1].endswith((".h", ".cuh", ".hpp")) or "/" in found[1]):
        return ""  # torch's and CUDA's own
    return f"#include <{name or found[1]}>"
