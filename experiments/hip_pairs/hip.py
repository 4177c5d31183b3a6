"""CUDA kernels as HIP, compiled for AMD GPUs without one: the device code of a source, its names
translated by a table, and the assembly that hipcc makes of it; the machine code that nvcc makes of
the same device code.

Guarantees: `compiled` is of a kernel that reached assembly, and says nothing of its results: it is
never a verdict. What a source has beside device code (functions that take tensors or launch) is
left out; templates that it launches are instantiated, with float for a `scalar_t`. Compilers are
confined as those of candidates are. Does not guarantee that a kernel means the same there: a
wavefront of gfx90a has 64 lanes, and a kernel that counts on 32 compiles all the same.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from kernels_eval.compile.cubins import cuobjdump
from kernels_eval.compile.process import log_of, run
from kernels_eval.errors import ToolchainError
from kernels_eval.records import Record
from kernels_eval.sandbox.landlock import compiler_confinement
from kernels_eval.sandbox.process_tree import Deadline
from kernels_eval.toolchain import Toolchain, default_cache

ARCH, CUDA_ARCH = "gfx90a", "sm_90"
TIMEOUT_S = 120.0
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
CAUSES = {
    "no_source": r"^no CUDA source",
    "timeout": r"^timeout$",
    "no_kernel": r"^no kernel is instantiated",
    "missing_header": r"file not found",
    "inline_assembly": r"\basm\b|constraint|invalid instruction",
    "unknown_name": r"undeclared|unknown type|no (member|type|template) named",
    "no_matching_function": r"no matching|ambiguous",
    "other": "",
}
"""Why a source did not compile, by what hipcc says first."""
_HOST = re.compile(r"\b(torch|at|c10|pybind11)::|\b(TORCH|AT|PYBIND11|C10)_\w+|<<<|\bTensor\b")
_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]([^>"\n]+)[>"].*$', re.MULTILINE)
_TOOLKIT = re.compile(
    r"(cu|math_|mma|cooperative_|vector_|device_)\w*\.h$|(cub|thrust)/[\w/]+\.c?u?h$"
)
_COMMENT = re.compile(r"/\*.*?\*/|//[^\n]*", re.DOTALL)
_KERNEL = re.compile(r"^\s*\.amdhsa_kernel (\S+)", re.MULTILINE)
_LAUNCH = re.compile(r"\b(\w+\s*<[\w\s,:]+>)\s*<<<")
_CONSTANT = re.compile(r"\bconst(?:expr)? [\w ]{0,40}?\b(\w{1,60})\s*=\s*(\d+)\s*;")


class HipBuild(Record):
    """What hipcc made of a CUDA source. `kernels` are those in `assembly`, by their symbols;
    `reason` and `cause` (one of `CAUSES`) are empty where `compiled`."""

    arch: str
    source: str
    compiled: bool
    kernels: tuple[str, ...] = ()
    assembly: str = ""
    reason: str = ""

    @property
    def cause(self) -> str:
        if self.compiled:
            return ""
        return next(name for name, said in CAUSES.items() if re.search(said, self.reason))


def hipcc() -> str:
    """Its path. Raises ToolchainError where it is not."""
    found = shutil.which("hipcc")
    if found is None:
        raise ToolchainError("hipcc was not found", "apt-get install hipcc")
    return found


def default_arch() -> str:
    """What this machine's hipcc compiles for: ROCm's own knows gfx942, Debian's does not. Raises
    ToolchainError where there is none."""
    return "gfx942" if "rocm" in str(Path(hipcc()).resolve()) else ARCH


def device_code(cuda: str) -> str:
    """The device code of a CUDA source, which nvcc compiles alone: what takes tensors or launches
    is left out, but for the templates that are launched."""
    text = _COMMENT.sub(" ", cuda)
    kept = "".join(_declarations(text))
    constants = {"scalar_t": "float", **dict(_CONSTANT.findall(text))}
    launched = []
    for launch in dict.fromkeys(_LAUNCH.findall(text)):
        name, _, given = launch.partition("<")
        given = re.sub(r"\w+", lambda word: constants.get(word[0], word[0]), given)
        launched.append(f"  (void)&{name.strip()}<{given};\n")
    uses = f"void launched_templates() {{\n{''.join(launched)}}}\n" if launched else ""
    return f"#include <cuda_runtime.h>\n#include <cfloat>\n#include <cmath>\n{kept}{uses}"


def translated(cuda: str) -> str:
    """The device code of a CUDA source in HIP."""
    found = device_code(cuda)
    for pattern, name in NAMES.items():
        found = re.sub(pattern, name, found)
    return _INCLUDE.sub(_included, found)


def compile_hip(cuda: str, *, arch: str = ARCH) -> HipBuild:
    """Translate and compile. Raises ToolchainError where there is no hipcc; a source that fails is
    a record."""
    source, command = translated(cuda), [hipcc()]
    if "__global__" not in source:
        reason = "no CUDA source with a kernel was found"
        return HipBuild(arch=arch, source=source, compiled=False, reason=reason)
    command += ["-x", "hip", "--cuda-device-only", "-S", f"--offload-arch={arch}"]
    command += ["-O3", "-std=c++17", "-w"]
    made, said = _compiled(Toolchain(default_cache()), command, source)
    assembly = made.decode("utf-8", "replace")
    kernels = tuple(_KERNEL.findall(assembly))
    return HipBuild(
        arch=arch,
        source=source,
        compiled=bool(kernels),
        kernels=kernels,
        assembly=assembly if kernels else "",
        reason="" if kernels else said or "no kernel is instantiated in the device code",
    )


def sass_of(cuda: str) -> str:
    """The machine code of a CUDA source's device code, as cuobjdump prints it; empty where that
    does not compile, or nvcc or cuobjdump is not there."""
    tools, dump = Toolchain(default_cache()), cuobjdump()
    if not (tools.nvcc and dump):
        return ""
    command = [tools.nvcc, "-x", "cu", "-cubin", f"-arch={CUDA_ARCH}", "-O3", "-std=c++17", "-w"]
    command.append("--expt-relaxed-constexpr")
    cubin, _ = _compiled(tools, command, device_code(cuda))
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = [dump, "--dump-sass", file.name]
        done = subprocess.run(told, capture_output=True, timeout=TIMEOUT_S, check=False)
    found = done.stdout.decode("utf-8", "replace")
    return found if "Function :" in found else ""


def _compiled(tools: Toolchain, command: Sequence[str], source: str) -> tuple[bytes, str]:
    """What a compiler writes, and what it says first where it fails."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path, made = folder / "kernel.in", folder / "kernel.out"
        path.write_text(source, encoding="utf-8", errors="replace")
        # beside a CUDA toolkit hipcc takes nvcc
        environment = {**tools.environment, "HIP_PLATFORM": "amd"}
        homes = [Path(command[0]).resolve().parent.parent, Path("/opt/rocm").resolve()]
        outcome = run(
            [*command, str(path), "-o", str(made)],
            folder,
            Deadline(TIMEOUT_S),
            environment,
            compiler_confinement(homes, [folder]),
        )
        if outcome == "ok":
            return made.read_bytes(), ""
        log = log_of(folder)
    said = re.search(r"error\s*: (.*)", log)
    return b"", outcome if outcome != "failed" else (said[1] if said else log.strip())[:300]


def _declarations(text: str) -> Iterator[str]:
    """The parts of a source that device code is made of: headers that HIP has, macros, and
    declarations without tensors, bindings or launches."""
    depth, begin = 0, 0
    lines = _INCLUDE.sub(_of_device, text)
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
    """HIP's header for CUDA's; nothing for one that HIP does not have."""
    if found[1] in HEADERS:
        return f"#include <{HEADERS[found[1]]}>"
    return "" if _TOOLKIT.match(found[1]) else found[0]


def _of_device(found: re.Match[str]) -> str:
    """The toolkit's and the standard's headers; nothing for torch's and the candidate's own."""
    plain = "/" not in found[1] and "." not in found[1]
    return f"#include <{found[1]}>" if plain or _TOOLKIT.match(found[1]) else ""
