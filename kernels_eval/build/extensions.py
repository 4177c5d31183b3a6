"""Builds the C++ and CUDA extensions that candidates ask for, outside the candidate's process, into
a content-addressed cache.

Guarantees: a library is built once per (sources, flags, toolchain), as long as it is kept
(`cache`); a compiler that hangs is killed with its children, one that is killed from outside is
started again; a build that fails with the lite headers is tried again with torch's own, unless its
first error is one that torch's headers would give too, so the outcome does not depend on the tier;
a build that a full disk may have made fail has no outcome. Does not guarantee that the compiler
itself is safe against hostile input beyond a deadline, a file-size limit, a list of flags that load
or write things, and whatever `confine` adds.
"""

from __future__ import annotations

import re
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path

from kernels_eval.build.cache import BuildCache
from kernels_eval.build.disk import raise_if_full
from kernels_eval.build.flags import REACHES_OUT, refused_flag
from kernels_eval.build.lite import (
    BEYOND,
    IDENTIFIER,
    certain_error,
    definitions,
    only_declares,
    plain_text,
)
from kernels_eval.build.prepared import COMMON_CXX, SHIMS, WRAPPED, Prepared
from kernels_eval.build.process import Outcome, WorkRoot, interesting, run
from kernels_eval.build.spec import Build, ExtensionSpec
from kernels_eval.build.toolchain import HEADERS, Toolchain, default_cache
from kernels_eval.config import BuildConfig
from kernels_eval.errors import ToolchainError

# Preprocessor features through which -march or -ffast-math could change whether a source parses.
FLAG_SENSITIVE = re.compile(
    r"^\s*#\s*(if|el|pragma\s+(GCC|push_macro|pop_macro))|__builtin|intrin\.h|__[A-Z0-9]+_*_?_",
    re.MULTILINE,
)


class Builder:
    """Turns specs into libraries. One instance a process; any number of processes may share a cache
    directory.

    `confine` is called in every compiler process before it starts, to shut it in; it may use only
    what a preexec_fn may.
    """

    def __init__(
        self,
        config: BuildConfig,
        *,
        cache: Path | None = None,
        cuda_arch: str | None = None,
        confine: Callable[[], None] | None = None,
    ) -> None:
        self.config = config
        self.tools = Toolchain(cache or default_cache(), config.cuda_arch or cuda_arch or "9.0")
        self.cache = BuildCache(self.tools.cache)
        self.confine = confine
        self._work = WorkRoot(self.tools.cache)

    @property
    def work_root(self) -> Path:
        """The one folder under the cache that this process's compilers write to; it goes with the
        process."""
        return self._work.path

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared(self.tools, self._work)

    def cached(self, spec: ExtensionSpec) -> Build | None:
        return self.cache.find(self.tools.key_for(spec))

    def build(self, spec: ExtensionSpec) -> Build:
        """Build one extension, or take it from the cache. Never raises for a candidate's fault;
        ToolchainError for the machine's, DiskFullError among them."""
        if found := self.cached(spec):
            return found
        started = time.monotonic()
        for flags in (spec.extra_cflags, spec.extra_cuda_cflags, spec.extra_ldflags):
            if bad := refused_flag(flags):
                reason = (
                    "forbidden_call" if REACHES_OUT.search(bad) else "build_failed"
                )  # a slip is no attack
                return Build(
                    ok=False, key=spec.key, reason=reason, log=f"compiler flag not allowed: {bad!r}"
                )
        if not spec.name.isidentifier():  # it becomes a macro and a file name
            return Build(
                ok=False,
                key=spec.key,
                reason="build_failed",
                log=f"the extension's name {spec.name[:80]!r} is not an identifier",
            )
        if spec.uses_cuda and not self.tools.nvcc:
            raise ToolchainError(
                "a CUDA extension needs nvcc, and none was found",
                "install the CUDA toolkit and set CUDA_HOME",
            )
        with ExitStack() as scratch:
            build = self.cache.with_room(lambda: self._compiled(spec, scratch))
            build = build.model_copy(update={"seconds": time.monotonic() - started})
            if not build.lasting:
                return build
            return self.cache.store(self.tools.key_for(spec), build)

    def _compiled(self, spec: ExtensionSpec, scratch: ExitStack) -> Build:
        """The outcome, with a library in a folder that goes with `scratch`. Raises OSError or
        DiskFullError for a full disk."""
        scratch.close()  # what a first try has left takes room as well
        folder = Path(
            scratch.enter_context(tempfile.TemporaryDirectory(prefix="build-", dir=self.work_root))
        )
        if self.config.lite_headers and self._lite_can(spec):
            build = self._attempt(spec, "lite", folder)
            if build.ok or not build.lasting or self._certain(build, spec):
                return build
        return self._attempt(spec, "full", folder)

    # -- one attempt -------------------------------------------------------------------------------

    def _lite_can(self, spec: ExtensionSpec) -> bool:
        """Sources that bind themselves, or name what only torch's whole header has, go straight to
        it."""
        text = plain_text(spec.text)
        return (
            spec.kind == "inline"
            and bool(spec.functions)
            and spec.python_module
            and not BEYOND.search(text)
            and self.prepared.only_torchs.isdisjoint(IDENTIFIER.findall(text))
        )

    def _certain(self, build: Build, spec: ExtensionSpec) -> bool:
        """Would torch's own headers reject this source as well? Where that is not certain, they are
        asked."""
        undefined = self.tools.nvcc and re.match(r"cuda\.cu\(\d+\): error: identifier ", build.log)
        return certain_error(
            build.log,
            spec.text,
            self.prepared.torch_names_of_nvcc if undefined else self.prepared.torch_names,
        )

    def _attempt(self, spec: ExtensionSpec, tier: str, scratch: Path) -> Build:
        work = scratch / tier
        work.mkdir()
        if tier == "full":
            self.prepared.precompiled()  # made once, for all: not on this candidate's time
        deadline = time.monotonic() + self.config.timeout_s

        def failed(outcome: Outcome) -> Build:
            log = (work / "log").read_text(errors="replace") if (work / "log").exists() else ""
            if outcome == "failed":
                raise_if_full(self.cache.cache, log)
            reason = "build" if outcome == "timeout" else "build_failed"
            return Build(
                ok=False,
                key=spec.key,
                tier=tier,
                reason=reason,
                log=interesting(log, work),
                lasting=outcome == "failed",
            )

        include = self._includes(tier, work)
        if tier == "lite":
            self.prepared.operators.write(plain_text(spec.text), work / "operators")
        objects: list[str] = []
        for name, text, compiler in self._units(spec, tier):
            source, target = work / name, work / f"{name}.o"
            source.write_text(text, encoding="utf-8", errors="replace")
            if (
                tier == "full"
                and name == "main.cpp"
                and not self._may_parse(spec, work, include, deadline)
            ):
                return failed("failed")
            headers = (
                "bindings"
                if tier == "lite" and name == "main.cpp" and self._only_declares(spec)
                else tier
            )
            flags = (
                self._cxx_flags(spec, headers)
                if compiler == "cxx"
                else self._nvcc_flags(spec, headers)
            )
            command = [*flags, *self._includes(headers, work), "-c", str(source), "-o", str(target)]
            if (outcome := self._run(command, work, deadline)) != "ok":
                return failed(outcome)
            objects.append(str(target))
        library = work / f"{spec.name}.so"
        if (outcome := self._run(self._link(spec, tier, objects, library), work, deadline)) != "ok":
            return failed(outcome)
        return Build(ok=True, key=spec.key, tier=tier, path=str(library))

    def _includes(self, tier: str, work: Path) -> list[str]:
        if tier == "bindings":  # lite's, without operators
            return [
                f"-I{path}" for path in self.prepared.bindings_includes(self.prepared.bindings())
            ]
        if tier == "full":
            return [f"-I{self.prepared.full_headers()}", *self.tools.includes]
        return [
            f"-I{path}"
            for path in (
                work / "operators",
                self.prepared.lite_headers(),
                HEADERS / "support",
                *self.tools.plain_includes,
            )
        ]

    def _units(self, spec: ExtensionSpec, tier: str) -> list[tuple[str, str, str]]:
        """(file name, text, compiler) of every translation unit, composed as
        torch.utils.cpp_extension does."""
        if spec.kind == "files":
            named = [(Path(name).name, text) for name, text in spec.files]
            return [
                (n, text, "nvcc" if n.endswith(".cu") else "cxx")
                for n, text in named
                if not n.endswith((".h", ".hpp", ".cuh"))
            ]
        main = "\n".join(
            ["#include <torch/extension.h>", *spec.cpp_sources, self._bindings(spec, tier)]
        )
        units = [("main.cpp", main, "cxx")]
        if spec.cuda_sources:
            head = ["#include <torch/types.h>", "#include <cuda.h>", "#include <cuda_runtime.h>"]
            units.append(("cuda.cu", "\n".join([*head, *spec.cuda_sources]), "nvcc"))
        return units

    def _bindings(self, spec: ExtensionSpec, tier: str) -> str:
        if spec.functions is None:
            return ""
        if tier == "lite":
            table = "\n".join(
                f'  {{"{name}", [](PyObject*, PyObject* args) {{ return concur::dispatch(&{name},'
                " args); }, METH_VARARGS, 0},"
                for name in spec.functions
            )
            return (
                f'#include "concur_bind.h"\nstatic PyMethodDef concur_methods[] = {{\n{table}\n '
                " {nullptr, nullptr, 0, nullptr}};\nstatic PyModuleDef concur_module ="
                " {PyModuleDef_HEAD_INIT, CONCUR_STRING(TORCH_EXTENSION_NAME), nullptr, -1,"
                ' concur_methods, nullptr, nullptr, nullptr, nullptr};\nextern "C"'
                ' __attribute__((visibility("default"))) PyObject* CONCUR_CONCAT(PyInit_,'
                " TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&concur_module); }\n"
            )
        lines = [
            f'm.def("{name}", torch::wrap_pybind_function({name}), "{name}");'
            for name in spec.functions
        ]
        return "\n".join(["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *lines, "}"])

    def _cxx_flags(self, spec: ExtensionSpec, tier: str) -> list[str]:
        return [
            self.tools.cxx,
            *COMMON_CXX,
            *self._switches(spec, tier),
            f"-DTORCH_EXTENSION_NAME={spec.name}",
            *spec.extra_cflags,
        ]

    def _switches(self, spec: ExtensionSpec, tier: str) -> list[str]:
        if tier == "full":
            return []
        return (
            definitions(plain_text(spec.text)) if tier == "lite" else []
        ) + self.prepared.least()

    def _only_declares(self, spec: ExtensionSpec) -> bool:
        """Is there nothing in main.cpp but prototypes over lite's plainest types? Then no operator
        of torch plays a part in it."""
        text = plain_text("\n".join(spec.cpp_sources))
        return bool(spec.cuda_sources) and only_declares(text)

    def _nvcc_flags(self, spec: ExtensionSpec, tier: str) -> list[str]:
        arch = self.tools.cuda_arch.replace(".", "")
        # the same definitions as torch.utils.cpp_extension.COMMON_NVCC_FLAGS, so that half
        # operators behave alike
        operators = [
            f"-D__CUDA_NO_{name}__"
            for name in (
                "HALF_OPERATORS",
                "HALF_CONVERSIONS",
                "BFLOAT16_CONVERSIONS",
                "HALF2_OPERATORS",
            )
        ]
        gencode = (
            []
            if any("arch" in flag or "gencode" in flag for flag in spec.extra_cuda_cflags)
            else [f"-gencode=arch=compute_{arch},code=sm_{arch}"]
        )
        return [
            str(self.tools.nvcc),
            f"-DTORCH_EXTENSION_NAME={spec.name}",
            "-DTORCH_API_INCLUDE_EXTENSION_H",
            *self._switches(spec, tier),
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

    def _link(
        self, spec: ExtensionSpec, tier: str, objects: Sequence[str], library: Path
    ) -> list[str]:
        lib = self.tools.torch_dir / "lib"
        # the shims bring libtorch along: with lite the linker need not read its symbol tables (0.4
        # s)
        wanted = [] if tier == "lite" else ["c10", "torch_cpu", "torch", "torch_python"]
        if spec.uses_cuda:
            wanted += ["c10_cuda"] if tier == "lite" else ["c10_cuda", "torch_cuda"]
        command = [self.tools.cxx, "-shared", *objects, "-o", str(library), f"-L{lib}"]
        command += [f"-l{name}" for name in wanted if any(lib.glob(f"lib{name}.*"))]
        if spec.uses_cuda and self.tools.cuda_home:
            counter = self.prepared.launches()
            command += [f"-Wl,--wrap={name}" for name in WRAPPED] + [
                str(counter),
                f"-Wl,-rpath,{counter.parent}",
            ]
            command += [f"-L{folder}" for folder in self.tools.cuda_libraries] + ["-lcudart"]
        if tier == "lite" and sys.platform != "darwin":
            command += [f"-Wl,--version-script={HEADERS / 'support/exports.map'}"]
        if tier == "lite":
            command += [
                str(self.prepared.common()),
                *(str(self.prepared.shim(name)) for name in SHIMS),
                f"-Wl,-rpath,{self.prepared.root}",
            ]
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        return command + list(spec.extra_ldflags)

    def _may_parse(
        self, spec: ExtensionSpec, work: Path, include: list[str], deadline: float
    ) -> bool:
        """Cheap refusal: sources that torch's precompiled header cannot parse will not compile,
        whatever binds them.

        Sound only where the candidate's flags cannot change what is parsed; elsewhere, or without
        precompiled headers, True.
        """
        harmless = all(
            re.match(r"-(O|m|f|W|w|g)", flag) for flag in spec.extra_cflags
        ) and not FLAG_SENSITIVE.search(spec.text)
        if not self.prepared.has_precompiled or not harmless:
            return True
        source = work / "main.cpp"
        bound = source.read_text(encoding="utf-8", errors="replace")
        source.write_text(
            "\n".join(["#include <torch/extension.h>", *spec.cpp_sources]),
            encoding="utf-8",
            errors="replace",
        )
        check = [
            self.tools.cxx,
            *COMMON_CXX,
            "-O2",
            f"-DTORCH_EXTENSION_NAME={spec.name}",
            "-fsyntax-only",
        ]
        outcome = self._run([*check, *include, str(source)], work, deadline)
        source.write_text(bound, encoding="utf-8", errors="replace")
        return outcome != "failed"

    # -- running -----------------------------------------------------------------------------------

    def warm(self, share: int = 0, shares: int = 1) -> None:
        """Make what most builds need, so that no candidate waits for it. Builders divide it: each
        takes its share.

        Raises ToolchainError.
        """
        jobs: list[tuple[int, Callable[[], object]]] = [
            (12, partial(self.prepared.shim, SHIMS[0])),
            (16, partial(self.prepared.shim, SHIMS[1])),
            (2, self.prepared.common),
        ]
        if self.tools.nvcc:
            jobs += [(1, self.prepared.launches), (4, self.prepared.bindings)]
        jobs += [(7, lambda: self.prepared.only_torchs)]  # seconds, as measured on one core
        loads = [0] * shares
        for seconds, job in sorted(jobs, key=lambda pair: -pair[0]):
            least = loads.index(min(loads))
            loads[least] += seconds
            if least == share:
                self.cache.with_room(job)

    def _run(self, command: Sequence[str], work: Path, deadline: float) -> Outcome:
        return run(command, work, deadline, self.tools.environment, self.confine)
