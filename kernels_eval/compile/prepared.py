"""Shims, header folders and torch's precompiled header, made once per (torch, Python, compiler),
under a lock. Torch's precompiled header (45 core-seconds, 790 MB) waits for several sources and
goes after 30 days unused; nothing else is removed: kept libraries link to it."""

from __future__ import annotations

import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property, partial
from pathlib import Path

from kernels_eval.compile.lite import COMMON, Operators
from kernels_eval.compile.process import (
    WorkRoot,
    interesting,
    locked,
    log_of,
    raise_if_full,
    rename_into_place,
    run,
)
from kernels_eval.errors import ToolchainError
from kernels_eval.sandbox.process_tree import Deadline
from kernels_eval.sandbox.trees import remove_tree, temporary_tree
from kernels_eval.toolchain import HEADERS, NEW_SUBMODULES, Toolchain

DEADLINE_S = 600
PRECOMPILED_KEPT_S = 30 * 24 * 3600
FULL_BUILDS_WITHOUT = 3
COMMON_CXX = ("-DTORCH_API_INCLUDE_EXTENSION_H", NEW_SUBMODULES, "-fPIC", "-std=c++20", "-w")
SHARED_LIBRARY = ("-std=c++20", "-w", "-fPIC", "-shared")
# What nvcc's launch stubs call (CUDA 13: __cudaLaunchKernel, before it cudaLaunchKernel), and what
# sources call themselves.
WRAPPED = """__cudaRegisterFunction __cudaGetKernel __cudaLaunchKernel __cudaLaunchKernel_ptsz
    cudaLaunchKernel cudaLaunchKernelExC cudaLaunchCooperativeKernel""".split()
# The second knows Python; two files, so that two builders share the work.
SHIMS = ("concur_shim", "concur_python")
COMMON_LIBRARY = "concur_common"
PLAIN_VARIABLE = (
    "struct THPVariable { PyObject_HEAD // Payload at::Tensor cdata;",
    "extern PyObject* THPVariableClass;",
    "extern PyObject* ParameterClass;",
    "PyObject* THPVariable_Wrap(const at::TensorBase& var);",
)
"""What concur_python.cpp repeats of torch's python_variable.h."""


class Prepared:
    def __init__(self, tools: Toolchain, work: WorkRoot) -> None:
        self.tools, self._work = tools, work
        self.operators = Operators(tools.torch_dir / "include")

    @cached_property
    def root(self) -> Path:
        root = self.tools.cache / "headers" / self.tools.key
        root.mkdir(parents=True, exist_ok=True)
        return root

    def once(self, target: Path, make: Callable[[Path], None]) -> Path:
        """The target, made by `make(staging)` where it was missing."""
        if not target.exists():
            with locked(target.with_name(f".{target.name}.lock")):
                if not target.exists():
                    staging = self._work.path / f"{uuid.uuid4().hex}-{target.name}"
                    make(staging)
                    rename_into_place(staging, target)
        return target

    def compile(self, what: str, command: Sequence[str], target: Path) -> None:
        """Run a compiler that writes `target`. Raises ToolchainError or DiskFullError."""
        with temporary_tree("prepare-", self._work.path) as work:
            deadline = Deadline(DEADLINE_S)
            command = [*command, "-o", str(target)]
            outcome, log = run(command, work, deadline, self.tools.environment), log_of(work)
        if outcome != "ok":
            raise_if_full(self.root, log)
            said = f"{self.tools.cxx} ({outcome}): {interesting(log, self.root)}"
            raise ToolchainError(f"{what} does not compile with {said}", "concur doctor")

    def _link_library(self, name: str, options: Iterable[str], staging: Path) -> None:
        command = [self.tools.cxx, *SHARED_LIBRARY, str(HEADERS / f"support/{name}.cpp"), *options]
        self.compile(f"the library {name}", [*command, f"-Wl,-soname,lib{name}.so"], staging)

    def library(self, name: str) -> Path:
        return self.root / f"lib{name}.so"

    @property
    def launch_library(self) -> Path:
        return self.root / f"cuda-{self.tools.cuda_key}/libconcur_launch.so"

    @property
    def bindings_header(self) -> Path:
        return self.root / "bindings/torch/extension.h"

    @property
    def _torch_library(self) -> str:
        return f"-L{self.tools.torch_dir / 'lib'}"

    # -- the lite tier -----------------------------------------------------------------------------

    def lite_headers(self) -> Path:
        """Our headers and torch's header-only ones; the rest of torch is out of reach."""

        def make(staging: Path) -> None:
            shutil.copytree(HEADERS / "lite", staging)
            torch = self.tools.torch_dir / "include/torch/headeronly"
            (staging / "torch/headeronly").symlink_to(torch)

        return self.once(self.root / "lite", make)

    def shim(self, name: str) -> Path:
        # a fifth less to read: no header of all operators
        options = [*self.tools.includes, "-DAT_PER_OPERATOR_HEADERS", "-O2"]
        options += [self._torch_library, "-lc10", "-ltorch_cpu"]
        if name == "concur_python":
            options += ["-ltorch_python", *self._plain_variable()]
            options += [str(self.shim("concur_shim")), f"-Wl,-rpath,{self.root}"]
        make = partial(self._link_library, name, options)
        return self.once(self.library(name), make)

    def _plain_variable(self) -> list[str]:
        """A definition where torch declares a tensor's Python object as concur_python.cpp does."""
        header = next(self.tools.torch_headers("torch/csrc/autograd/python_variable.h"))
        text = " ".join(header.read_text(errors="replace").split())
        known = all(declared in text for declared in PLAIN_VARIABLE)
        return ["-DCONCUR_PLAIN_VARIABLE"] if known else []

    def common(self) -> Path:
        def make(staging: Path) -> None:
            generated = self._work.path / uuid.uuid4().hex
            self.operators.write(" ".join(COMMON), generated, common=True)
            options = [f"-I{generated}", f"-I{self.lite_headers()}", "-O2", "-fvisibility=hidden"]
            options += [self._torch_library, "-ltorch_cpu", "-lc10", str(self.shim("concur_shim"))]
            options.append(f"-Wl,-rpath,{self.root}")
            self._link_library(COMMON_LIBRARY, options, staging)
            remove_tree(generated)

        return self.once(self.library(COMMON_LIBRARY), make)

    def bindings(self) -> Path:
        """A folder whose <torch/extension.h> has lite's bindings and no operators, precompiled for
        GCC.
        """

        def make(staging: Path) -> None:
            (staging / "torch").mkdir(parents=True)
            includes = ("torch/types.h", "ATen/Parallel.h", "concur_bind.h")
            text = "#pragma once\n" + "".join(f"#include <{name}>\n" for name in includes)
            (staging / "torch/extension.h").write_text(text)
            self.operators.write("", staging)

        def make_precompiled(staging: Path) -> None:
            staging.mkdir()
            flags = [*COMMON_CXX, *self.least(), *self.lite_includes(folder)]
            for level in ("-O0", "-O2"):
                self._precompile("lite's header", [*flags, level], header, staging / level[1:])

        header = self.bindings_header
        folder = self.once(header.parents[1], make)
        if self.tools.is_gcc:
            self.once(header.with_name("extension.h.gch"), make_precompiled)
        return folder

    def lite_includes(self, folder: Path) -> list[str]:
        """Options for lite's headers and those written for one source in `folder`."""
        folders = [folder, self.lite_headers(), HEADERS / "support", *self.tools.plain_includes]
        return [f"-I{path}" for path in folders]

    def _precompile(self, what: str, flags: Sequence[str], header: Path, target: Path) -> None:
        command = [self.tools.cxx, *flags, "-x", "c++-header", str(header)]
        self.compile(what, command, target)

    def least(self) -> list[str]:
        """A definition of the oldest C++ that torch's headers accept, where they ask for one."""
        return [f"-DCONCUR_LEAST_CPLUSPLUS={self.least_cplusplus}"] if self.least_cplusplus else []

    def launches(self) -> Path:
        options = [f"-I{path}" for path in self.tools.plain_includes]
        options += [*(f"-L{folder}" for folder in self.tools.cuda_libraries), "-lcudart", "-O1"]
        self.launch_library.parent.mkdir(exist_ok=True)
        make = partial(self._link_library, "concur_launch", options)
        return self.once(self.launch_library, make)

    # -- torch's headers -------------------------------------------------------------------------

    def preprocessed(self, heads: Iterable[str], suffix: str, command: Sequence[str]) -> str:
        """What a compiler reads of these headers. Raises as `compile`."""
        probe = self._work.path / f"{uuid.uuid4().hex}{suffix}"
        target = probe.with_suffix(".i")
        probe.write_text("".join(f"#include <{head}>\n" for head in heads))
        try:
            includes = [*self.tools.includes, str(probe)]
            self.compile("torch's header", [*command, "-E", *includes], target)
            return target.read_text(errors="replace")
        finally:
            probe.unlink()
            target.unlink(missing_ok=True)

    @cached_property
    def least_cplusplus(self) -> str:
        """The oldest __cplusplus that torch's headers accept, such as 201703L; "" where they do not
        ask.
        """
        for header in self.tools.torch_headers("torch/all.h"):
            text = header.read_text(errors="replace")
            if match := re.search(r"__cplusplus < (\d+L)\s*\n#error", text):
                return match.group(1)
        return ""

    # -- torch's own header ------------------------------------------------------------------------

    def full_headers(self) -> Path:
        """Torch's own header, through a file that may have a precompiled form beside it."""

        def make(staging: Path) -> None:
            (staging / "torch").mkdir(parents=True)
            real = next(self.tools.torch_headers("torch/extension.h"))
            (staging / "torch/extension.h").write_text(f'#pragma once\n#include "{real}"\n')

        return self.once(self.root / "full", make)

    def precompiled(self) -> None:
        """Make the precompiled form of torch's header, once it pays: it costs three full builds."""
        if not self.tools.is_gcc:
            return
        header = self.full_headers() / "torch/extension.h"
        made = header.with_name("extension.h.gch")
        if made.exists():
            with suppress(OSError):
                os.utime(made)  # in use: it stays when another is made
            return
        asked = self.root / "full-builds"
        asked.mkdir(parents=True, exist_ok=True)
        (asked / uuid.uuid4().hex).touch()
        if len(list(asked.iterdir())) <= FULL_BUILDS_WITHOUT:
            return

        def make(staging: Path) -> None:
            flags = [*COMMON_CXX, "-O2", f"-I{header.parent.parent}", *self.tools.includes]
            self._precompile("torch's header", flags, header, staging)

        for other in self.root.parent.glob("*/full/torch/extension.h.gch"):
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > PRECOMPILED_KEPT_S:
                    other.unlink()
        self.once(made, make)
