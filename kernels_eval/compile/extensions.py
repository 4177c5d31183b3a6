"""Builds candidates' extensions outside their process, into a content-addressed cache.

Guarantees: one build per (sources, flags, toolchain); hanging compilers are killed; the outcome
does not depend on the header tier; a full disk gives no outcome.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from threading import Lock, Thread
from typing import Any, Literal

from kernels_eval.compile.cache import BuildCache
from kernels_eval.compile.certain_errors import certain_error
from kernels_eval.compile.lite import (
    BEYOND,
    IDENTIFIER,
    definitions,
    only_declares,
)
from kernels_eval.compile.prepared import COMMON_CXX, COMMON_LIBRARY, SHIMS, WRAPPED, Prepared
from kernels_eval.compile.process import (
    Outcome,
    WorkRoot,
    blaming_the_disk,
    interesting,
    limit_compiler,
    log_of,
    raise_if_full,
    run,
)
from kernels_eval.compile.torch_names import HeaderNames
from kernels_eval.compile.transforms import BuildTransform, load_transforms
from kernels_eval.config import (
    CANDIDATE_FILE_BYTES,
    FULL_HEADERS_TIMES,
    WALL_SHARE,
    BuildConfig,
)
from kernels_eval.errors import ToolchainError, UsageError
from kernels_eval.records import Reason, stable_hash
from kernels_eval.sandbox.process_tree import Deadline
from kernels_eval.sandbox.trees import temporary_tree
from kernels_eval.source.lexer import blank
from kernels_eval.source.own_lines import Lines, lines_of
from kernels_eval.source.spec import REACHES_OUT, Build, ExtensionSpec, for_this_gpu, refused_flag
from kernels_eval.toolchain import (
    HEADERS,
    NEW_SUBMODULES,
    WITHOUT_NVTX,
    Toolchain,
    default_cache,
)

FULL_METHOD = 'm.def("{name}", torch::wrap_pybind_function({name}), "{name}");'
FEW_ERRORS = ["-fmax-errors=20"]  # no more are shown, and all of them cost up to half a minute
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
FULL_HEAD = "#include <torch/extension.h>"
CUDA_HEAD = "#include <torch/types.h>\n#include <cuda.h>\n#include <cuda_runtime.h>"
# The same definitions as torch.utils.cpp_extension.COMMON_NVCC_FLAGS, so that half operators behave
# alike.
NVCC_FLAGS = """-DTORCH_API_INCLUDE_EXTENSION_H -D__CUDA_NO_HALF_OPERATORS__
    -D__CUDA_NO_HALF_CONVERSIONS__ -D__CUDA_NO_BFLOAT16_CONVERSIONS__ -D__CUDA_NO_HALF2_OPERATORS__
    --expt-relaxed-constexpr --compiler-options -fPIC -std=c++20 -w""".split()

ENDED = {
    "timeout": "the build ran past its deadline of {:g} s of processor time and sleep"
    f" (build.timeout_s), or {WALL_SHARE} times as long by the clock\n",
    "killed": "the compiler was killed again and again\n",
}
"""What a log does not say by itself."""

OWN_HEADERS = "own_headers"
"""A build's folder for headers that the candidate has written."""
Tier = Literal["lite", "full"]


class ToolFailedError(Exception):
    """A transform's tool failed."""

    def __init__(self, outcome: Outcome) -> None:
        super().__init__(outcome)
        self.outcome = outcome


@dataclass
class Attempt:
    """One build of an extension with one header tier, as torch.utils.cpp_extension composes it, in
    the empty folder `work`. `confine` is called in every compiler process.
    """

    spec: ExtensionSpec
    tier: Tier
    work: Path
    prepared: Prepared
    timeout_s: float
    confine: Callable[[], None] | None = None
    cuda_first: bool = False
    """whether main.cpp is known to compile: CUDA sources, cheaper to fail, then come first"""
    transforms: Sequence[BuildTransform] = ()
    niceness: int = 0

    def build(self) -> Build:
        """The outcome, with a library in `work`. Raises DiskFullError."""
        self.work.mkdir()
        if self.tier == "full":
            self.prepared.precompiled()  # made once, for all: not on this candidate's time
        self.deadline = Deadline(self.limit_s)
        outcome = self._compile_and_link()
        common: dict[str, Any] = {"tier": self.tier, "processor_s": self.deadline.spent_s}
        if outcome == "ok":
            return Build(ok=True, key=self.spec.key, path=str(self.library), **common)
        log = log_of(self.work)
        why = ENDED.get(outcome, "").format(self.limit_s)
        if outcome == "failed":
            raise_if_full(self.prepared.tools.cache, log)
        return Build(
            ok=False,
            key=self.spec.key,
            reason=Reason.BUILD if outcome == "timeout" else Reason.BUILD_FAILED,
            log=why + interesting(log, self.work),
            lasting=outcome == "failed",
            **common,
        )

    @property
    def limit_s(self) -> float:
        """Of processor time and sleep; torch's own headers take much of it by themselves."""
        return self.timeout_s * (FULL_HEADERS_TIMES if self.tier == "full" else 1)

    @property
    def library(self) -> Path:
        return self.work / f"{self.spec.name}.so"

    @cached_property
    def _text(self) -> str:
        return blank(self.spec.text)

    def _compile_and_link(self) -> Outcome:
        if self.tier == "lite":
            self.prepared.operators.write(self._text, self.work / "operators")
        units = self._write_units()
        for name in sorted(units, key=lambda name: self.cuda_first and not name.endswith(".cu")):
            source = str(self.work / name)
            outcome = self._run([*self.command(name), "-c", source, "-o", f"{source}.o"])
            if outcome != "ok":
                return outcome
        outcome = self._run(self._link([f"{self.work / name}.o" for name in units]))
        return self._transform() if outcome == "ok" else outcome

    def _transform(self) -> Outcome:
        try:
            for transform in self.transforms:
                transform.change(self.library, self.spec, self._printed)
        except ToolFailedError as error:
            return error.outcome
        except UsageError as error:
            with (self.work / "log").open("a", encoding="utf-8") as log:
                log.write(f"error: {error}\n")
            return "failed"
        return "ok"

    def _printed(self, command: Sequence[str]) -> str:
        printed = self.work / "printed"
        outcome = self._run(["/bin/sh", "-c", f'exec "$0" "$@" > {printed.name}', *command])
        if outcome != "ok":
            raise ToolFailedError(outcome)
        return printed.read_text(errors="replace")

    def _write_units(self) -> list[str]:
        headers = [(f"{OWN_HEADERS}/{name}", text) for name, text in self.spec.headers]
        if headers:
            (self.work / OWN_HEADERS).mkdir(exist_ok=True)
        for name, text in (*headers, *(units := self.units())):
            (self.work / name).write_text(text, encoding="utf-8", errors="replace")
        return [name for name, _ in units]

    def units(self) -> list[tuple[str, str]]:
        spec = self.spec
        if spec.kind == "files":
            named = [(Path(name).name, text) for name, text in spec.files]
            return [unit for unit in named if not unit[0].endswith((".h", ".hpp", ".cuh"))]
        units = [("main.cpp", "\n".join([FULL_HEAD, *spec.cpp_sources, self._bindings()]))]
        if spec.cuda_sources:
            units.append(("cuda.cu", "\n".join([CUDA_HEAD, *spec.cuda_sources])))
        return units

    def _bindings(self) -> str:
        names = self.spec.functions
        if names is None:
            return ""
        if self.tier == "lite":
            return LITE_BINDINGS % "".join(LITE_METHOD % (name, name) for name in names)
        lines = [FULL_METHOD.format(name=name) for name in names]
        return "\n".join(["PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {", *lines, "}"])

    # -- commands ----------------------------------------------------------------------------------

    def command(self, name: str) -> list[str]:
        spec, tools = self.spec, self.prepared.tools
        headers = "bindings" if name == "main.cpp" and self._only_declares() else self.tier
        switches = [f"-DTORCH_EXTENSION_NAME={spec.name}"]
        if headers != "full":
            switches += self.prepared.least()
        if headers == "lite":
            switches += definitions(self._text)
        if not name.endswith(".cu"):
            flags = [tools.cxx, *COMMON_CXX, *FEW_ERRORS * tools.is_gcc, *switches]
            flags += spec.extra_cflags
        else:
            flags = [str(tools.nvcc), *switches, NEW_SUBMODULES, *WITHOUT_NVTX, *NVCC_FLAGS]
            flags += ["-ccbin", tools.cxx]
            flags += for_this_gpu(spec.extra_cuda_cflags, tools.cuda_arch)
        return flags + self._includes(headers)

    def _only_declares(self) -> bool:
        """Whether main.cpp holds only prototypes of lite's plainest types: no operator needed."""
        text = blank("\n".join(self.spec.cpp_sources))
        return self.tier == "lite" and bool(self.spec.cuda_sources) and only_declares(text)

    def _includes(self, headers: str) -> list[str]:
        made, own = self.prepared, [f"-I{self.work / OWN_HEADERS}"] * bool(self.spec.headers)
        if headers == "full":
            return [*own, f"-I{made.full_headers()}", *made.tools.includes]
        if headers == "bindings":  # lite's, without operators
            return own + made.lite_includes(made.bindings())
        return own + made.lite_includes(self.work / "operators")

    def _link(self, objects: Sequence[str]) -> list[str]:
        tools, lite, cuda = self.prepared.tools, self.tier == "lite", self.spec.uses_cuda
        lib = tools.torch_dir / "lib"
        # The shims bring libtorch along: with lite the linker need not read its symbol tables
        # (0.4 s).
        wanted = [] if lite else ["c10", "torch_cpu", "torch", "torch_python"]
        if cuda:
            wanted += ["c10_cuda"] if lite else ["c10_cuda", "torch_cuda"]
        command = [tools.cxx, "-shared", *objects, "-o", str(self.library), f"-L{lib}"]
        command += [f"-l{name}" for name in wanted if any(lib.glob(f"lib{name}.*"))]
        if cuda and tools.cuda_home:
            counter = self.prepared.launches()
            command += [f"-Wl,--wrap={name}" for name in WRAPPED]
            command += [str(counter), f"-Wl,-rpath,{counter.parent}"]
            command += [f"-L{folder}" for folder in tools.cuda_libraries] + ["-lcudart"]
        if lite:
            command.append(f"-Wl,--version-script={HEADERS / 'support/exports.map'}")
            shims = map(self.prepared.shim, SHIMS)
            command += map(str, (self.prepared.common(), *shims))
            command.append(f"-Wl,-rpath,{self.prepared.root}")
        return command + list(self.spec.extra_ldflags)

    def _run(self, command: Sequence[str]) -> Outcome:
        tools = self.prepared.tools
        return run(command, self.work, self.deadline, tools.environment, self._confine)

    def _confine(self) -> None:
        os.nice(self.niceness)
        limit_compiler(CANDIDATE_FILE_BYTES)
        if self.confine is not None:
            self.confine()


def generated_lines(spec: ExtensionSpec, code: str) -> dict[str, Lines]:
    """Where the lines of the files that a spec is compiled from stand in the candidate's module."""
    if spec.kind == "files":
        return {}
    return {
        "main.cpp": lines_of(FULL_HEAD, spec.cpp_sources, code),
        "cuda.cu": lines_of(CUDA_HEAD, spec.cuda_sources, code),
    }


def _refusal(spec: ExtensionSpec) -> Build | None:
    said, reason = spec.unusable_reason, Reason.BUILD_FAILED
    flags = () if said else (spec.extra_cflags, spec.extra_cuda_cflags, spec.extra_ldflags)
    refused = [bad for bad in map(refused_flag, flags) if bad is not None]
    for bad in refused[:1]:
        said = f"compiler flag not allowed: {bad[:200]!r}"
        reason = Reason.FORBIDDEN_CALL if REACHES_OUT.search(bad) else reason
    return Build(ok=False, key=spec.key, reason=reason, log=said) if said else None


PARTS = {
    "libconcur_python.so": "bindings of Python",
    "libconcur_shim.so": "tensors",
    "defined_in_torch.json": "names of torch",
    "libconcur_common.so": "operators",
    "extension.h": "a precompiled header",
    "libconcur_launch.so": "launches of CUDA",
}
"""What most builds need, in words, by file."""


def parts_made(total: int, left: Sequence[Path], said: str) -> str:
    """How many parts of the headers are built, what is `said` of that, and which are left."""
    words = ", ".join(PARTS.get(path.name, path.name) for path in left)
    made = f"headers: {total - len(left)} of {total} parts built, {said}"
    return f"{made}; under way: {words}" if words else made


class Builder:
    """Turns specs into libraries, one instance per process; the cache may be shared. `confine` runs
    in every compiler process, as a preexec_fn.
    """

    def __init__(
        self,
        config: BuildConfig,
        *,
        cache: Path | None = None,
        cuda_arch: str | None = None,
        transforms: Mapping[str, BuildTransform] | None = None,
    ) -> None:
        """`transforms`: those to apply, by name; default: those that `config` names."""
        self.config = config
        self.transforms = load_transforms(config.transforms) if transforms is None else transforms
        self.tools = Toolchain(cache or default_cache(), config.cuda_arch or cuda_arch or "9.0")
        self.cache = BuildCache(self.tools.cache)
        self.confine: Callable[[], None] | None = None
        self.niceness = 0
        """Of the compilers of what a candidate asks for."""
        self.say: Callable[[str], None] = lambda _: None
        self._warming: list[Thread] = []
        self._work = WorkRoot(self.tools.cache)

    @property
    def work_root(self) -> Path:
        return self._work.path

    @cached_property
    def prepared(self) -> Prepared:
        return Prepared(self.tools, self._work)

    @cached_property
    def names(self) -> HeaderNames:
        return HeaderNames(self.prepared)

    def cached(self, spec: ExtensionSpec) -> Build | None:
        return self.cache.find(self.key_for(spec))

    def known(self, spec: ExtensionSpec) -> Build | None:
        return _refusal(spec) or self.cached(spec)

    def key_for(self, spec: ExtensionSpec) -> str:
        key = self.tools.key_for(spec)
        applied = [[name, each.version] for name, each in self.transforms.items()]
        return stable_hash([key, applied]) if applied else key

    def build(self, spec: ExtensionSpec) -> Build:
        started = time.monotonic()
        if known := self.known(spec):
            return known
        if spec.uses_cuda and not self.tools.nvcc:
            raise ToolchainError(
                "a CUDA extension needs nvcc, and none was found",
                "install the CUDA toolkit and set CUDA_HOME",
            )
        with (
            blaming_the_disk(self.tools.cache),
            temporary_tree("build-", self.work_root) as folder,
        ):
            build = self._compiled(spec, folder)
            build = build.model_copy(update={"seconds": time.monotonic() - started})
            return self.cache.store(self.key_for(spec), build) if build.lasting else build

    def _compiled(self, spec: ExtensionSpec, folder: Path) -> Build:
        spent_s = 0.0
        if self.config.lite_headers and self.lite_can(spec):
            build = self.attempt(spec, "lite", folder).build()
            if build.ok or not build.lasting or self.is_certain(build, spec):
                return build
            spent_s = build.processor_s
        attempt = self.attempt(spec, "full", folder)
        attempt.cuda_first = (folder / "lite/main.cpp.o").exists()
        build = attempt.build()
        return build.model_copy(update={"processor_s": spent_s + build.processor_s})

    def attempt(self, spec: ExtensionSpec, tier: Tier, folder: Path) -> Attempt:
        return Attempt(
            spec,
            tier,
            folder / tier,
            self.prepared,
            self.config.timeout_s,
            self.confine,
            transforms=tuple(self.transforms.values()),
            niceness=self.niceness,
        )

    def lite_can(self, spec: ExtensionSpec) -> bool:
        """Whether to try lite: not for self-binding sources or those that need all of torch."""
        text = blank(spec.text)
        return (
            spec.kind == "inline"
            and bool(spec.functions)
            and spec.python_module
            and not BEYOND.search(text)
            and not self.names.means_torchs(IDENTIFIER.findall(text))
        )

    def is_certain(self, build: Build, spec: ExtensionSpec) -> bool:
        """Whether torch's own headers would certainly reject this source too."""
        undefined = self.tools.nvcc and re.match(r"cuda\.cu\(\d+\): error: identifier ", build.log)
        names = self.names.of_nvcc if undefined else self.names.of_torch
        return certain_error(build.log, spec.text, names)

    def warm(self, share: int = 0, shares: int = 1, *, cuda: bool = True) -> None:
        """Make this builder's share of what most builds need. Raises ToolchainError."""
        with blaming_the_disk(self.tools.cache):
            for job in list(self.parts(cuda=cuda).values())[share::shares]:
                job()

    def begin_warm(self, *, cuda: bool) -> None:
        """Begin all at once what `warm` would make one after the other: beside other work, each
        compiler has a share of the processors. What fails is made, and blamed, by the build."""
        parts = self.parts(cuda=cuda)
        missing = {path: job for path, job in parts.items() if not path.exists()}
        if not missing:
            return
        self.say(
            f"PyTorch's headers are compiled, once for all kernels ({len(missing)} parts):"
            " seconds on idle cores, a minute on busy ones"
        )

        began_s, left, one_at_a_time = time.monotonic(), list(missing), Lock()

        def make(path: Path) -> None:
            with suppress(Exception):
                missing[path]()
            took = f"{PARTS.get(path.name, path.name)} took {time.monotonic() - began_s:.0f} s"
            with one_at_a_time:
                left.remove(path)
                self.say(parts_made(len(missing), left, took))

        self._warming = [Thread(target=make, args=(path,), daemon=True) for path in missing]
        for thread in self._warming:
            thread.start()

    def end_warm(self) -> None:
        """Wait for what `begin_warm` has begun."""
        for thread in self._warming:
            thread.join()

    def parts(self, *, cuda: bool) -> dict[Path, Callable[[], object]]:
        """What most builds need, the longest work first."""
        made = self.prepared
        parts: dict[Path, Callable[[], object]] = {
            made.library(SHIMS[0]): partial(made.shim, SHIMS[0]),
            made.library(SHIMS[1]): partial(made.shim, SHIMS[1]),
            self.names.defined_path: lambda: self.names.defined,
            made.library(COMMON_LIBRARY): made.common,
        }
        if cuda and self.tools.nvcc:
            parts[made.bindings_header] = made.bindings
            parts[made.launch_library] = made.launches
        return parts
