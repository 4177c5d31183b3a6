"""Builds the C++ and CUDA extensions that candidates ask for, outside the candidate's process, into a content-addressed cache.

Guarantees: a library is built once per (sources, flags, toolchain); a finished entry is renamed into place whole and never changes, so
any number of builders may share a cache; a compiler that hangs is killed with its children; a build that fails with the slim headers is
tried again with torch's own, so the outcome does not depend on the tier. Does not guarantee that the compiler itself is safe against
hostile input beyond a deadline, a file-size limit and a list of flags that load or write things.
"""

from __future__ import annotations

import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Literal

from kernels_eval.build.flags import REACHES_OUT, refused_flag
from kernels_eval.build.spec import Build, ExtensionSpec
from kernels_eval.build.toolchain import HEADERS, Toolchain, default_cache
from kernels_eval.config import BuildConfig
from kernels_eval.errors import ToolchainError

LOG_LIMIT = 8192

# Preprocessor features through which -march or -ffast-math could change whether a source parses.
FLAG_SENSITIVE = re.compile(r"^\s*#\s*(if|el|pragma)|__builtin|intrin\.h|__[A-Z0-9]+_*_?_", re.MULTILINE)


class Builder:
    """Turns specs into libraries. One instance a process; any number of processes may share a cache directory."""

    def __init__(self, config: BuildConfig, *, cache: Path | None = None, cuda_arch: str | None = None) -> None:
        self.config = config
        self.tools = Toolchain(cache or default_cache(), config.cuda_arch or cuda_arch or "9.0")

    def cached(self, spec: ExtensionSpec) -> Build | None:
        entry = self._entry(spec)
        try:
            build = Build.model_validate_json((entry / "build.json").read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            shutil.rmtree(entry, ignore_errors=True)  # written by another version of this code
            return None
        return build.model_copy(update={"cached": True, "path": str(entry / build.path) if build.path else ""})

    def build(self, spec: ExtensionSpec) -> Build:
        """Build one extension, or take it from the cache. Never raises for a candidate's fault; ToolchainError for the machine's."""
        if found := self.cached(spec):
            return found
        started = time.monotonic()
        for flags in (spec.extra_cflags, spec.extra_cuda_cflags, spec.extra_ldflags):
            if bad := refused_flag(flags):
                reason = "forbidden_call" if REACHES_OUT.search(bad) else "build_failed"  # a slip is no attack
                return Build(ok=False, key=spec.key, reason=reason, log=f"compiler flag not allowed: {bad!r}")
        if not spec.name.isidentifier():  # it becomes a macro and a file name
            return Build(ok=False, key=spec.key, reason="build_failed", log=f"the extension's name {spec.name[:80]!r} is not an identifier")
        if spec.uses_cuda and not self.tools.nvcc:
            raise ToolchainError("a CUDA extension needs nvcc, and none was found", "install the CUDA toolkit and set CUDA_HOME")
        tiers = ["slim", "full"] if self.config.slim_headers and self._slim_can(spec) else ["full"]
        self.tools.cache.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="build-", dir=self.tools.cache) as scratch:
            build = Build(ok=False, key=spec.key, reason="build_failed")
            for tier in tiers:
                build = self._attempt(spec, tier, Path(scratch))
                if build.ok or build.reason == "build":
                    break
            build = build.model_copy(update={"seconds": time.monotonic() - started})
            if build.reason == "build":  # a deadline may be the machine's fault: not remembered
                return build
            return self._keep(spec, build, Path(scratch))

    # -- one attempt -------------------------------------------------------------------------------------------------------------

    def _slim_can(self, spec: ExtensionSpec) -> bool:
        """Sources that bind themselves, or name what only torch's whole header has, go straight to it."""
        return (
            spec.kind == "inline"
            and bool(spec.functions)
            and spec.python_module
            and not re.search(r"PYBIND11|pybind11|\bpy::|torch::nn\b|torch::jit\b|torch::autograd\b|TORCH_LIBRARY", spec.text)
        )

    def _attempt(self, spec: ExtensionSpec, tier: str, scratch: Path) -> Build:
        work = scratch / tier
        work.mkdir()
        deadline = time.monotonic() + self.config.timeout_s
        include = self._header_dir(tier)
        objects: list[str] = []
        for name, text, compiler in self._units(spec, tier):
            source, target = work / name, work / f"{name}.o"
            source.write_text(text, encoding="utf-8", errors="replace")
            if tier == "full" and name == "main.cpp" and not self._may_parse(spec, work, include, deadline):
                log = (work / "log").read_text(errors="replace")
                return Build(ok=False, key=spec.key, tier=tier, reason="build_failed", log=_interesting(log, work))
            flags = self._cxx_flags(spec, tier) if compiler == "cxx" else self._nvcc_flags(spec)
            if compiler == "cxx":
                self._ensure_pch(tier, spec.extra_cflags)
            outcome = self._run([*flags, *include, *self.tools.includes, "-c", str(source), "-o", str(target)], work, deadline)
            if outcome != "ok":
                log = (work / "log").read_text(errors="replace")
                reason = "build" if outcome == "timeout" else "build_failed"
                return Build(ok=False, key=spec.key, tier=tier, reason=reason, log=_interesting(log, work))
            objects.append(str(target))
        library = work / f"{spec.name}.so"
        outcome = self._run(self._link(spec, tier, objects, library), work, deadline)
        if outcome != "ok":
            log = (work / "log").read_text(errors="replace")
            return Build(
                ok=False, key=spec.key, tier=tier, reason="build" if outcome == "timeout" else "build_failed", log=_interesting(log, work)
            )
        return Build(ok=True, key=spec.key, tier=tier, path=f"{tier}/{library.name}")

    def _units(self, spec: ExtensionSpec, tier: str) -> list[tuple[str, str, str]]:
        """(file name, text, compiler) of every translation unit, composed as torch.utils.cpp_extension does."""
        if spec.kind == "files":
            named = [(Path(name).name, text) for name, text in spec.files]
            return [(n, text, "nvcc" if n.endswith(".cu") else "cxx") for n, text in named if not n.endswith((".h", ".hpp", ".cuh"))]
        main = "\n".join(["#include <torch/extension.h>", *spec.cpp_sources, self._bindings(spec, tier)])
        units = [("main.cpp", main, "cxx")]
        if spec.cuda_sources:
            head = ["#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>"]
            units.append(("cuda.cu", "\n".join([*head, *spec.cuda_sources]), "nvcc"))
        return units

    def _bindings(self, spec: ExtensionSpec, tier: str) -> str:
        if spec.functions is None:
            return ""
        if tier == "slim":
            table = "\n".join(
                f'  {{"{name}", [](PyObject*, PyObject* args) {{ return concur::dispatch(&{name}, args); }}, METH_VARARGS, 0}},'
                for name in spec.functions
            )
            return (
                '#include "concur_bind.h"\n'
                f"static PyMethodDef concur_methods[] = {{\n{table}\n  {{nullptr, nullptr, 0, nullptr}}}};\n"
                "static PyModuleDef concur_module = {PyModuleDef_HEAD_INIT, CONCUR_STRING(TORCH_EXTENSION_NAME), nullptr, -1,"
                " concur_methods, nullptr, nullptr, nullptr, nullptr};\n"
                'extern "C" __attribute__((visibility("default"))) PyObject* CONCUR_CONCAT(PyInit_, TORCH_EXTENSION_NAME)(void) '
                "{ return PyModule_Create(&concur_module); }\n"
            )
        lines = [f'm.def("{name}", torch::wrap_pybind_function({name}), "{name}");' for name in spec.functions]
        return "\n".join(["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *lines, "}"])

    def _cxx_flags(self, spec: ExtensionSpec, tier: str) -> list[str]:
        return [self.tools.cxx, *self._common_cxx(tier), f"-DTORCH_EXTENSION_NAME={spec.name}", *spec.extra_cflags]

    def _common_cxx(self, tier: str) -> list[str]:
        support = [f"-I{HEADERS / 'support'}"] if tier == "slim" else []
        return ["-DTORCH_API_INCLUDE_EXTENSION_H", "-fPIC", "-std=c++20", "-w", *support]

    def _nvcc_flags(self, spec: ExtensionSpec) -> list[str]:
        arch = self.tools.cuda_arch.replace(".", "")
        # the same definitions as torch.utils.cpp_extension.COMMON_NVCC_FLAGS, so that half operators behave alike
        operators = [f"-D__CUDA_NO_{name}__" for name in ("HALF_OPERATORS", "HALF_CONVERSIONS", "BFLOAT16_CONVERSIONS", "HALF2_OPERATORS")]
        gencode = (
            []
            if any("arch" in flag or "gencode" in flag for flag in spec.extra_cuda_cflags)
            else [f"-gencode=arch=compute_{arch},code=sm_{arch}"]
        )
        return [
            str(self.tools.nvcc),
            f"-DTORCH_EXTENSION_NAME={spec.name}",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            *operators,
            "--expt-relaxed-constexpr",
            *gencode,
            "--compiler-options",
            "-fPIC",
            "-std=c++20",
            "-w",
            "-ccbin",
            self.tools.cxx,
            *spec.extra_cuda_cflags,
        ]

    def _link(self, spec: ExtensionSpec, tier: str, objects: Sequence[str], library: Path) -> list[str]:
        lib = self.tools.torch_dir / "lib"
        wanted = ["c10", "torch_cpu", "torch", "torch_python"] + (["c10_cuda", "torch_cuda"] if spec.uses_cuda else [])
        command = [self.tools.cxx, "-shared", *objects, "-o", str(library), f"-L{lib}"]
        command += [f"-l{name}" for name in wanted if any(lib.glob(f"lib{name}.*"))]
        if spec.uses_cuda and self.tools.cuda_home:
            folders = [self.tools.cuda_home / name for name in ("lib64", "targets/x86_64-linux/lib", "lib")]
            command += [f"-L{folder}" for folder in folders if folder.is_dir()] + ["-lcudart"]
        if tier == "slim":
            shim = self._shim()
            command += [str(shim), f"-Wl,-rpath,{shim.parent}"]
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        return command + [flag for flag in spec.extra_ldflags]

    def _may_parse(self, spec: ExtensionSpec, work: Path, include: list[str], deadline: float) -> bool:
        """Cheap refusal: sources that torch's precompiled header cannot parse will not compile, whatever binds them.

        Sound only where the candidate's flags cannot change what is parsed; elsewhere, or without precompiled headers, True.
        """
        plain = _pch_family(spec.extra_cflags) == "plain"
        harmless = all(re.match(r"-(O|m|f|W|w|g)", flag) for flag in spec.extra_cflags) and not FLAG_SENSITIVE.search(spec.text)
        if not self.tools.is_gcc or not (plain or harmless):
            return True
        self._ensure_pch("full", ("-O2",))
        source = work / "main.cpp"
        bound = source.read_text(encoding="utf-8", errors="replace")
        source.write_text("\n".join(["#include <torch/extension.h>", *spec.cpp_sources]), encoding="utf-8", errors="replace")
        check = [self.tools.cxx, *self._common_cxx("full"), "-O2", f"-DTORCH_EXTENSION_NAME={spec.name}", "-fsyntax-only"]
        outcome = self._run([*check, *include, *self.tools.includes, str(source)], work, deadline)
        source.write_text(bound, encoding="utf-8", errors="replace")
        return outcome != "failed"

    # -- headers that are compiled once --------------------------------------------------------------------------------------------

    def _header_dir(self, tier: str) -> list[str]:
        return [f"-I{self._pch_root(tier)}"]

    def _pch_root(self, tier: str) -> Path:
        root = self.tools.cache / "headers" / self.tools.key / tier
        if not (root / ".complete").exists():
            staging = root.with_name(f".{tier}-{uuid.uuid4().hex}")
            if tier == "slim":
                shutil.copytree(HEADERS / "slim", staging)
            else:  # torch's own header, reached through a file that may have a precompiled form beside it
                (staging / "torch").mkdir(parents=True)
                real = self.tools.torch_dir / "include/torch/csrc/api/include/torch/extension.h"
                if not real.exists():
                    real = self.tools.torch_dir / "include/torch/extension.h"
                (staging / "torch/extension.h").write_text(f'#pragma once\n#include "{real}"\n')
            (staging / ".complete").touch()
            _rename_into_place(staging, root)
        return root

    def _ensure_pch(self, tier: str, cflags: Sequence[str]) -> None:
        """Make the precompiled header of this tier and flag family, once. GCC tries every file in the `.gch` directory."""
        family = _pch_family(cflags)
        if not self.tools.is_gcc or family is None:
            return
        header = self._pch_root(tier) / "torch/extension.h"
        target = header.with_name("extension.h.gch") / family
        if target.exists():
            return
        target.parent.mkdir(exist_ok=True)
        with _Lock(target.with_name(f".{family}.lock")):
            if target.exists():
                return
            staging = target.parent.parent / f".{family}-{uuid.uuid4().hex}"
            flags = [*self._common_cxx(tier), *_FAMILIES[family]]  # no name: a macro that differs would void it
            command = [
                self.tools.cxx,
                *flags,
                *self._header_dir(tier),
                *self.tools.includes,
                "-x",
                "c++-header",
                str(header),
                "-o",
                str(staging),
            ]
            done = subprocess.run(command, capture_output=True, text=True, env=self.tools.environment, timeout=600)
            if done.returncode:
                raise ToolchainError(
                    f"torch's headers do not compile with {self.tools.cxx}: {_interesting(done.stderr, header.parent)}", "concur doctor"
                )
            os.replace(staging, target)

    def _shim(self) -> Path:
        target = self.tools.cache / "headers" / self.tools.key / "libconcur_shim.so"
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        with _Lock(target.with_name(".shim.lock")):
            if not target.exists():
                staging = target.with_name(f".shim-{uuid.uuid4().hex}.so")
                lib = self.tools.torch_dir / "lib"
                command = [
                    self.tools.cxx, "-std=c++20", "-O1", "-w", "-fPIC", "-shared", f"-I{HEADERS / 'support'}", *self.tools.includes,
                    str(HEADERS / "support/concur_shim.cpp"), "-o", str(staging), "-Wl,-soname,libconcur_shim.so",
                    f"-L{lib}", "-lc10", "-ltorch_cpu", "-ltorch_python",
                ]  # fmt: skip
                done = subprocess.run(command, capture_output=True, text=True, env=self.tools.environment, timeout=600)
                if done.returncode:
                    raise ToolchainError(f"the binding shim does not compile: {_interesting(done.stderr, target.parent)}", "concur doctor")
                os.replace(staging, target)
        return target

    def warm(self, share: int = 0, shares: int = 1) -> None:
        """Compile what most builds need, so that no candidate waits for it. Builders divide it: each takes its share.

        Raises ToolchainError.
        """
        self.tools.cache.mkdir(parents=True, exist_ok=True)
        jobs: list[tuple[int, Callable[[], object]]] = [(15, self._shim), (45, lambda: self._ensure_pch("full", ("-O2",)))]
        jobs += [(11, partial(self._ensure_pch, "slim", flags)) for flags in _FAMILIES.values()]  # seconds, as measured on one core
        loads = [0] * shares
        for seconds, job in sorted(jobs, key=lambda pair: -pair[0]):
            least = loads.index(min(loads))
            loads[least] += seconds
            if least == share:
                job()

    # -- running and keeping -------------------------------------------------------------------------------------------------------

    def _run(self, command: Sequence[str], work: Path, deadline: float) -> Literal["ok", "failed", "timeout"]:
        remaining = deadline - time.monotonic()
        if remaining <= 0:
            return "timeout"
        with open(work / "log", "ab") as log:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd=work,
                env=self.tools.environment,
                start_new_session=True,
                preexec_fn=_limit_compiler,
            )
            try:
                return "ok" if process.wait(remaining) == 0 else "failed"
            except subprocess.TimeoutExpired:
                return "timeout"
            finally:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()

    def _entry(self, spec: ExtensionSpec) -> Path:
        key = self.tools.key_for(spec)
        return self.tools.cache / "extensions" / key[:2] / key

    def _keep(self, spec: ExtensionSpec, build: Build, scratch: Path) -> Build:
        entry = self._entry(spec)
        staging = self.tools.cache / f".keep-{uuid.uuid4().hex}"
        staging.mkdir()
        kept = build
        if build.ok:
            shutil.copyfile(scratch / build.path, staging / f"{spec.name}.so")
            kept = build.model_copy(update={"path": f"{spec.name}.so"})
        (staging / "build.json").write_text(kept.model_dump_json())
        entry.parent.mkdir(parents=True, exist_ok=True)
        _rename_into_place(staging, entry)
        return build.model_copy(update={"path": str(entry / f"{spec.name}.so") if build.ok else ""})


def _limit_compiler() -> None:
    """No core files, and no file above 2 GB: the largest object of an honest kernel is a few megabytes."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (2 << 30, 2 << 30))


class _Lock:
    """An advisory lock the kernel releases when its holder dies: nothing can be left stale (torch's FileBaton can hang for ever)."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __enter__(self) -> None:
        import fcntl

        self.handle = open(self.path, "w")
        fcntl.flock(self.handle, fcntl.LOCK_EX)

    def __exit__(self, *_: object) -> None:
        self.handle.close()


_FAMILIES: Mapping[str, tuple[str, ...]] = {
    "plain": ("-O2",),
    "native": ("-O2", "-march=native"),
    "native-fast": ("-O2", "-march=native", "-ffast-math"),
}


def _pch_family(cflags: Sequence[str]) -> str | None:
    """Which precompiled header fits these flags; None where none does (the compiler then reads the header itself)."""
    flags = " ".join(cflags).split()
    optimised = any(re.fullmatch(r"-O([123s]|fast)", flag) for flag in flags)
    native, fast = "-march=native" in flags, any(flag in ("-ffast-math", "-Ofast") for flag in flags)
    others = [
        f
        for f in flags
        if not re.fullmatch(r"-O([123s]|fast)|-march=native|-ffast-math|-W\S*|-w|-std=c\+\+20|-f(no-)?(unroll-loops|tree-vectorize)", f)
    ]
    if not optimised or others:
        return None
    return {(False, False): "plain", (True, False): "native", (True, True): "native-fast"}.get((native, fast))


def _rename_into_place(staging: Path, target: Path) -> None:
    try:
        os.rename(staging, target)
    except OSError:
        if not target.exists():
            raise
        shutil.rmtree(staging, ignore_errors=True)  # another builder was faster: same content


def _interesting(log: str, work: Path) -> str:
    """The lines of a compiler log that say what is wrong, without our scratch paths, at most 8 KB."""
    lines = log.replace(str(work) + "/", "").splitlines()
    errors = [i for i, line in enumerate(lines) if re.search(r"\berror\b|undefined reference|multiple definition|cannot find|fatal", line)]
    picked = [line for i in errors[:20] for line in lines[i : i + 4]] if errors else lines[-40:]
    return "\n".join(dict.fromkeys(picked))[:LOG_LIMIT]
