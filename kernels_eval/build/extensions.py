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


LITE_METHOD = """
  {"%s", [](PyObject*, PyObject* args) { return concur::dispatch(&%s, args); }, METH_VARARGS, 0},"""
LITE_BINDINGS = """#include "concur_bind.h"
static PyMethodDef concur_methods[] = {%s
  {nullptr, nullptr, 0, nullptr}};
static PyModuleDef concur_module = {PyModuleDef_HEAD_INIT, CONCUR_STRING(TORCH_EXTENSION_NAME),
  nullptr, -1, concur_methods, nullptr, nullptr, nullptr, nullptr};
extern "C" __attribute__((visibility("default"))) PyObject*
CONCUR_CONCAT(PyInit_, TORCH_EXTENSION_NAME)(void) { return PyModule_Create(&concur_module); }
"""
# The same definitions as torch.utils.cpp_extension.COMMON_NVCC_FLAGS, so that half operators behave
# alike.
NVCC_FLAGS = (
    "-DTORCH_API_INCLUDE_EXTENSION_H",
    *("-D__CUDA_NO_HALF_OPERATORS__", "-D__CUDA_NO_HALF_CONVERSIONS__"),
    *("-D__CUDA_NO_BFLOAT16_CONVERSIONS__", "-D__CUDA_NO_HALF2_OPERATORS__"),
    *("--expt-relaxed-constexpr", "--compiler-options", "-fPIC", "-std=c++20", "-w"),
)


def _refusal(spec: ExtensionSpec) -> tuple[str, str] | None:
    """The reason and the words for a spec that is not given to a compiler at all."""
    for flags in (spec.extra_cflags, spec.extra_cuda_cflags, spec.extra_ldflags):
        if bad := refused_flag(flags):
            attack = REACHES_OUT.search(bad)
            reason = "forbidden_call" if attack else "build_failed"
            return reason, f"compiler flag not allowed: {bad!r}"
    if not spec.name.isidentifier():  # it becomes a macro and a file name
        return "build_failed", f"the extension's name {spec.name[:80]!r} is not an identifier"
    return None


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
        if refusal := _refusal(spec):
            reason, why = refusal
            return Build(ok=False, key=spec.key, reason=reason, log=why)
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
        scratch.close()  # the files of a first attempt take room as well
        directory = tempfile.TemporaryDirectory(prefix="build-", dir=self.work_root)
        folder = Path(scratch.enter_context(directory))
        if self.config.lite_headers and self._lite_can(spec):
            build = self._attempt(spec, "lite", folder)
            if build.ok or not build.lasting or self._certain(build, spec):
                return build
        return self._attempt(spec, "full", folder)

    # -- one attempt -------------------------------------------------------------------------------

    def _lite_can(self, spec: ExtensionSpec) -> bool:
        """Whether to try lite: not for sources that bind themselves, or name what only torch's
        whole header has."""
        text = plain_text(spec.text)
        return (
            spec.kind == "inline"
            and bool(spec.functions)
            and spec.python_module
            and not BEYOND.search(text)
            and self.prepared.only_torchs.isdisjoint(IDENTIFIER.findall(text))
        )

    def _certain(self, build: Build, spec: ExtensionSpec) -> bool:
        """Whether torch's own headers would certainly reject this source as well."""
        undefined = self.tools.nvcc and re.match(r"cuda\.cu\(\d+\): error: identifier ", build.log)
        names = self.prepared.torch_names_of_nvcc if undefined else self.prepared.torch_names
        return certain_error(build.log, spec.text, names)

    def _attempt(self, spec: ExtensionSpec, tier: str, scratch: Path) -> Build:
        work = scratch / tier
        work.mkdir()
        if tier == "full":
            self.prepared.precompiled()  # made once, for all: not on this candidate's time
        deadline = time.monotonic() + self.config.timeout_s
        library = work / f"{spec.name}.so"
        outcome = self._build_in(spec, tier, work, library, deadline)
        if outcome == "ok":
            return Build(ok=True, key=spec.key, tier=tier, path=str(library))
        log = (work / "log").read_text(errors="replace") if (work / "log").exists() else ""
        if outcome == "failed":
            raise_if_full(self.cache.cache, log)
        return Build(
            ok=False,
            key=spec.key,
            tier=tier,
            reason="build" if outcome == "timeout" else "build_failed",
            log=interesting(log, work),
            lasting=outcome == "failed",
        )

    def _build_in(
        self, spec: ExtensionSpec, tier: str, work: Path, library: Path, deadline: float
    ) -> Outcome:
        """Compile and link in `work`, up to the first step that does not succeed."""
        if tier == "lite":
            self.prepared.operators.write(plain_text(spec.text), work / "operators")
        objects: list[str] = []
        for name, text, compiler in self._units(spec, tier):
            source, target = work / name, work / f"{name}.o"
            main = name == "main.cpp"
            if main and tier == "full" and not self._may_parse(spec, source, deadline):
                return "failed"
            source.write_text(text, encoding="utf-8", errors="replace")
            headers = "bindings" if main and tier == "lite" and self._only_declares(spec) else tier
            cxx = compiler == "cxx"
            flags = self._cxx_flags(spec, headers) if cxx else self._nvcc_flags(spec, headers)
            command = [*flags, *self._includes(headers, work), "-c", str(source), "-o", str(target)]
            if (outcome := self._run(command, work, deadline)) != "ok":
                return outcome
            objects.append(str(target))
        return self._run(self._link(spec, tier, objects, library), work, deadline)

    def _includes(self, tier: str, work: Path) -> list[str]:
        made = self.prepared
        if tier == "full":
            return [f"-I{made.full_headers()}", *self.tools.includes]
        if tier == "bindings":  # lite's, without operators
            folders = made.bindings_includes(made.bindings())
        else:
            folders = [work / "operators", made.lite_headers(), HEADERS / "support"]
            folders += self.tools.plain_includes
        return [f"-I{path}" for path in folders]

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
            return LITE_BINDINGS % "".join(LITE_METHOD % (name, name) for name in spec.functions)
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
        named = definitions(plain_text(spec.text)) if tier == "lite" else []
        return named + self.prepared.least()

    def _only_declares(self, spec: ExtensionSpec) -> bool:
        """Whether main.cpp holds only prototypes over lite's plainest types: then it needs no
        operator of torch."""
        text = plain_text("\n".join(spec.cpp_sources))
        return bool(spec.cuda_sources) and only_declares(text)

    def _nvcc_flags(self, spec: ExtensionSpec, tier: str) -> list[str]:
        arch = self.tools.cuda_arch.replace(".", "")
        named = any("arch" in flag or "gencode" in flag for flag in spec.extra_cuda_cflags)
        return [
            str(self.tools.nvcc),
            f"-DTORCH_EXTENSION_NAME={spec.name}",
            *self._switches(spec, tier),
            *NVCC_FLAGS,
            *([] if named else [f"-gencode=arch=compute_{arch},code=sm_{arch}"]),
            *("-ccbin", self.tools.cxx),
            *spec.extra_cuda_cflags,
        ]

    def _link(
        self, spec: ExtensionSpec, tier: str, objects: Sequence[str], library: Path
    ) -> list[str]:
        lib, lite = self.tools.torch_dir / "lib", tier == "lite"
        # The shims bring libtorch along: with lite the linker need not read its symbol tables
        # (0.4 s).
        wanted = [] if lite else ["c10", "torch_cpu", "torch", "torch_python"]
        if spec.uses_cuda:
            wanted += ["c10_cuda"] if lite else ["c10_cuda", "torch_cuda"]
        command = [self.tools.cxx, "-shared", *objects, "-o", str(library), f"-L{lib}"]
        command += [f"-l{name}" for name in wanted if any(lib.glob(f"lib{name}.*"))]
        if spec.uses_cuda and self.tools.cuda_home:
            counter = self.prepared.launches()
            command += [f"-Wl,--wrap={name}" for name in WRAPPED]
            command += [str(counter), f"-Wl,-rpath,{counter.parent}"]
            command += [f"-L{folder}" for folder in self.tools.cuda_libraries] + ["-lcudart"]
        if lite and sys.platform != "darwin":
            command.append(f"-Wl,--version-script={HEADERS / 'support/exports.map'}")
        if lite:
            shims = (self.prepared.shim(name) for name in SHIMS)
            command += map(str, (self.prepared.common(), *shims))
            command.append(f"-Wl,-rpath,{self.prepared.root}")
        if sys.platform == "darwin":
            command += ["-undefined", "dynamic_lookup"]
        return command + list(spec.extra_ldflags)

    def _may_parse(self, spec: ExtensionSpec, source: Path, deadline: float) -> bool:
        """Whether torch's precompiled header can parse the source: one that it cannot will not
        compile, whatever binds it.

        Sound only where the candidate's flags cannot change what is parsed; elsewhere, or without
        precompiled headers, True.
        """
        plain = all(re.match(r"-(O|m|f|W|w|g)", flag) for flag in spec.extra_cflags)
        if not self.prepared.has_precompiled or not plain or FLAG_SENSITIVE.search(spec.text):
            return True
        text = "\n".join(["#include <torch/extension.h>", *spec.cpp_sources])
        source.write_text(text, encoding="utf-8", errors="replace")
        name = f"-DTORCH_EXTENSION_NAME={spec.name}"
        check = [self.tools.cxx, *COMMON_CXX, "-O2", name, "-fsyntax-only"]
        command = [*check, *self._includes("full", source.parent), str(source)]
        return self._run(command, source.parent, deadline) != "failed"

    # -- running -----------------------------------------------------------------------------------

    def warm(self, share: int = 0, shares: int = 1) -> None:
        """Make what most builds need, so that no candidate waits for it. Builders divide the work:
        each takes its share. Raises ToolchainError.
        """
        made = self.prepared
        jobs: list[tuple[int, Callable[[], object]]] = [  # with seconds, as measured on one core
            (16, partial(made.shim, SHIMS[1])),
            (12, partial(made.shim, SHIMS[0])),
            (7, lambda: made.only_torchs),
            (2, made.common),
        ]
        if self.tools.nvcc:
            jobs += [(4, made.bindings), (1, made.launches)]
        loads = [0] * shares
        for seconds, job in sorted(jobs, key=lambda pair: -pair[0]):
            least = loads.index(min(loads))
            loads[least] += seconds
            if least == share:
                self.cache.with_room(job)

    def _run(self, command: Sequence[str], work: Path, deadline: float) -> Outcome:
        return run(command, work, deadline, self.tools.environment, self.confine)
