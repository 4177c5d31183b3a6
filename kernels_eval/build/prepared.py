"""What is made once per (torch, Python, compiler) and then shared by every build: shims, header
folders, torch's precompiled header.

Guarantees: each thing is made under a lock, in the work root of whichever builder needs it first,
and renamed into place whole; a compiler that is killed from outside is started again. `warm` makes
what `lite` builds need; torch's precompiled header (45 core-seconds, 790 MB) is made once more than
a few sources needed torch's own header, and goes when another is made after 30 days without use.
Nothing else here is ever removed (70 MB, most of it the precompiled form of lite's own header):
kept libraries link to the shims.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from kernels_eval.build.disk import raise_if_full
from kernels_eval.build.lite import (
    COMMON,
    IDENTIFIER,
    STREAM_NAMES,
    Operators,
    TorchNames,
    file_scope,
)
from kernels_eval.build.process import Lock, WorkRoot, interesting, rename_into_place, was_killed
from kernels_eval.build.toolchain import HEADERS, Toolchain
from kernels_eval.errors import KILL_ATTEMPTS, ToolchainError
from kernels_eval.isolation.reaper import run_captured

DEADLINE_S = 600
PRECOMPILED_KEPT_S = 30 * 24 * 3600
# what nvcc's launch stubs call (CUDA 13: __cudaLaunchKernel, before it cudaLaunchKernel), and what
# sources call themselves
WRAPPED = (
    *("__cudaRegisterFunction", "__cudaGetKernel", "__cudaLaunchKernel", "__cudaLaunchKernel_ptsz"),
    *("cudaLaunchKernel", "cudaLaunchKernelExC", "cudaLaunchCooperativeKernel"),
)
SHIMS = (
    "concur_shim",
    "concur_python",
)  # the second knows Python; two files, so that two builders share the work


class Prepared:
    """Things made once, in the cache of one toolchain."""

    def __init__(self, tools: Toolchain, work: WorkRoot) -> None:
        self.tools, self._work = tools, work
        self.operators = Operators(tools.torch_dir / "include")

    @cached_property
    def root(self) -> Path:
        root = self.tools.cache / "headers" / self.tools.key
        root.mkdir(parents=True, exist_ok=True)
        return root

    def _once(self, target: Path, make: Callable[[Path], None]) -> Path:
        if not target.exists():
            with Lock(target.with_name(f".{target.name}.lock")):
                if not target.exists():
                    staging = self._work.path / f"{uuid.uuid4().hex}-{target.name}"
                    make(staging)
                    rename_into_place(staging, target)
        return target

    def _compile(self, what: str, command: Sequence[str]) -> str:
        for _ in range(KILL_ATTEMPTS):
            done = run_captured(
                command, DEADLINE_S, env=self.tools.environment, cwd=self._work.path
            )
            if not was_killed(done.returncode, done.stderr):
                break
        if done.returncode:
            raise_if_full(self.root, done.stderr)
            raise ToolchainError(
                f"{what} does not compile with {self.tools.cxx}:"
                f" {interesting(done.stderr, self.root)}",
                "concur doctor",
            )
        return done.stdout

    # -- the lite tier -----------------------------------------------------------------------------

    def lite_headers(self) -> Path:
        """Our headers, and beside them torch's header-only ones: nothing else of torch can be
        included from there."""

        def make(staging: Path) -> None:
            shutil.copytree(HEADERS / "lite", staging)
            (staging / "torch/headeronly").symlink_to(
                self.tools.torch_dir / "include/torch/headeronly"
            )

        return self._once(self.root / "lite", make)

    def shim(self, name: str) -> Path:
        def make(staging: Path) -> None:
            libraries = ["-lc10", "-ltorch_cpu"] + (
                ["-ltorch_python"] if name == "concur_python" else []
            )
            self._compile(
                f"the shim {name}",
                [
                    self.tools.cxx,
                    "-std=c++20",
                    "-O0" if name == "concur_python" else "-O1",
                    "-w",
                    "-fPIC",
                    "-shared",
                    *self.tools.includes,
                    str(HEADERS / f"support/{name}.cpp"),
                    "-o",
                    str(staging),
                    f"-Wl,-soname,lib{name}.so",
                    f"-L{self.tools.torch_dir / 'lib'}",
                    *libraries,
                ],
            )

        return self._once(self.root / f"lib{name}.so", make)

    def common(self) -> Path:
        """The library that holds what the lite headers only declare."""

        def make(staging: Path) -> None:
            generated = self._work.path / uuid.uuid4().hex
            self.operators.write(" ".join(COMMON), generated, common=True)
            include = (generated, self.lite_headers())
            self._compile(
                "what candidates' sources have in common",
                [
                    self.tools.cxx,
                    "-std=c++20",
                    "-O1",
                    "-w",
                    "-fPIC",
                    "-shared",
                    "-fvisibility=hidden",
                    *(f"-I{path}" for path in include),
                    str(HEADERS / "support/concur_common.cpp"),
                    "-o",
                    str(staging),
                    "-Wl,-soname,libconcur_common.so",
                    f"-L{self.tools.torch_dir / 'lib'}",
                    "-ltorch_cpu",
                    "-lc10",
                    str(self.shim("concur_shim")),
                    f"-Wl,-rpath,{self.root}",
                ],
            )
            shutil.rmtree(generated)

        return self._once(self.root / "libconcur_common.so", make)

    def bindings(self) -> Path:
        """A folder whose <torch/extension.h> is lite's with the bindings and without operators, and
        with GCC in precompiled form: for sources that only declare functions. GCC takes the form
        that a build's flags allow, and else reads the header.
        """

        def make(staging: Path) -> None:
            (staging / "torch").mkdir(parents=True)
            includes = ["torch/types.h", "ATen/Parallel.h", "concur_bind.h"]
            (staging / "torch/extension.h").write_text(
                "#pragma once\n" + "".join(f"#include <{name}>\n" for name in includes)
            )
            self.operators.write("", staging)

        def make_precompiled(staging: Path) -> None:
            staging.mkdir()
            for level in ("-O0", "-O2"):
                self._compile(
                    "lite's header",
                    [
                        self.tools.cxx,
                        *COMMON_CXX,
                        *self.least(),
                        level,
                        *(f"-I{path}" for path in self.bindings_includes(folder)),
                        "-x",
                        "c++-header",
                        str(header),
                        "-o",
                        str(staging / level[1:]),
                    ],
                )

        folder = self._once(self.root / "bindings", make)
        header = folder / "torch/extension.h"
        if self.tools.is_gcc:
            self._once(header.with_name("extension.h.gch"), make_precompiled)
        return folder

    def bindings_includes(self, folder: Path) -> list[Path]:
        return [folder, self.lite_headers(), HEADERS / "support", *self.tools.plain_includes]

    def least(self) -> list[str]:
        return [f"-DCONCUR_LEAST_CPLUSPLUS={self.least_cplusplus}"] if self.least_cplusplus else []

    def launches(self) -> Path:
        """The library that counts candidates' kernel launches; made with the CUDA toolkit that
        builds them."""

        def make(staging: Path) -> None:
            self._compile(
                "the launch counter",
                [
                    self.tools.cxx,
                    "-std=c++20",
                    "-O1",
                    "-w",
                    "-fPIC",
                    "-shared",
                    *(f"-I{path}" for path in self.tools.plain_includes),
                    str(HEADERS / "support/concur_launch.cpp"),
                    "-o",
                    str(staging),
                    "-Wl,-soname,libconcur_launch.so",
                    *(f"-L{folder}" for folder in self.tools.cuda_libraries),
                    "-lcudart",
                ],
            )

        folder = self.root / f"cuda-{self.tools.cuda_key}"
        folder.mkdir(exist_ok=True)
        return self._once(folder / "libconcur_launch.so", make)

    @cached_property
    def torch_names(self) -> TorchNames:
        """What torch's headers, and all they include, bring into a source: decides where lite may
        speak for full."""

        def make(staging: Path) -> None:
            probe = self._work.path / f"{uuid.uuid4().hex}.cpp"
            cuda = ["cuda_runtime.h", "c10/cuda/CUDAGuard.h"] if self.tools.nvcc else []
            heads = [
                "torch/extension.h",
                *cuda,
                *(["ATen/cuda/CUDAContext.h"] if self._has_cuda_libraries() else []),
            ]
            probe.write_text("".join(f"#include <{head}>\n" for head in heads))
            try:
                text = self._compile(
                    "torch's header",
                    [self.tools.cxx, *COMMON_CXX, "-E", "-dD", *self.tools.includes, str(probe)],
                )
            finally:
                probe.unlink()
            macros, words, files = set(), set(), set()
            ours = str(self.tools.torch_dir)
            inside = False
            for line in text.splitlines():
                if line.startswith("# "):
                    inside = ours in line
                    files.add(line.split('"')[1] if '"' in line else "")
                elif (
                    line.startswith("#define ") and inside and (name := IDENTIFIER.search(line, 8))
                ):
                    macros.add(name.group(0))
            words.update(IDENTIFIER.findall(text))
            for name in files:  # what stands in a branch that only nvcc takes
                if ours in name and Path(name).is_file():
                    words.update(IDENTIFIER.findall(Path(name).read_text(errors="replace")))
            staging.write_text(
                json.dumps(
                    [
                        sorted(macros),
                        sorted(words),
                        sorted(macros | file_scope(text)),
                        self._not_brought(),
                    ]
                )
            )

        *found, not_brought = json.loads(
            self._once(self.root / "names_of_torch.json", make).read_text()
        )
        dispatch = (self.tools.torch_dir / "include/ATen/Dispatch.h").read_text()
        tensor = "".join(
            (self.tools.torch_dir / f"include/ATen/core/{name}.h").read_text()
            for name in ("TensorBody", "TensorBase")
        )
        methods = frozenset(IDENTIFIER.findall(tensor))
        device = (
            (self.tools.torch_dir / "include/c10/core/Device.h")
            .read_text()
            .partition("namespace std")[0]
        )
        return TorchNames(
            *(frozenset(names) for names in found),
            methods=methods,
            not_brought=frozenset(not_brought),
            dispatch_takes_types="const at::DeprecatedTypeProperties&" in dispatch,
            device_takes_text=re.search(r"\bDevice\([^()]*(char|string_view)|\btemplate\b", device)
            is not None,
        )

    @cached_property
    def torch_names_of_nvcc(self) -> TorchNames:
        """The same, and what nvcc reads before a source of ours begins: made when the first source
        asks."""

        def make(staging: Path) -> None:
            probe = self._work.path / f"{uuid.uuid4().hex}.cu"
            heads = ("torch/extension.h", "torch/types.h", "cuda.h", "cuda_runtime.h")
            probe.write_text("".join(f"#include <{head}>\n" for head in heads))
            words: set[str] = set()
            files: set[str] = set()
            try:
                for target in ([], ["-D__CUDA_ARCH__=900"]):  # for the host, and for the device
                    text = self._compile(
                        "torch's header",
                        [
                            str(self.tools.nvcc),
                            "-E",
                            "-std=c++20",
                            "-w",
                            "-ccbin",
                            self.tools.cxx,
                            "-DTORCH_API_INCLUDE_EXTENSION_H",
                            "--expt-relaxed-constexpr",
                            *target,
                            *self.tools.includes,
                            str(probe),
                        ],
                    )
                    words.update(IDENTIFIER.findall(text))
                    files.update(re.findall(r'^# \d+ "([^"<>]+)"', text, re.MULTILINE))
            finally:
                probe.unlink()
            for name in files:  # what stands in branches that were not taken, and what macros make
                if Path(name).is_file():
                    words.update(IDENTIFIER.findall(Path(name).read_text(errors="replace")))
            staging.write_text(json.dumps([sorted(words), sorted(files)]))

        words, files = json.loads(
            self._once(self.root / f"names_of_nvcc-{self.tools.cuda_key}.json", make).read_text()
        )
        return self.torch_names._replace(
            nvcc_words=frozenset(words) | self.torch_names.words, nvcc_files=frozenset(files)
        )

    def _not_brought(self) -> list[str]:
        """Which of STREAM_NAMES occur in no header that torch/extension.h may include, whatever is
        defined."""
        roots = [
            self.tools.torch_dir / "include",
            self.tools.torch_dir / "include/torch/csrc/api/include",
        ]
        left = [
            root / "torch/extension.h" for root in roots if (root / "torch/extension.h").is_file()
        ]
        seen, absent = set(left), set(STREAM_NAMES)
        while left:
            header = left.pop()
            text = header.read_text(errors="replace")
            absent = {name for name in absent if name not in text}
            for name in re.findall(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', text, re.MULTILINE):
                for found in (header.parent / name, *(root / name for root in roots)):
                    if found.is_file() and found not in seen:
                        seen.add(found)
                        left.append(found)
        return sorted(absent)

    @cached_property
    def least_cplusplus(self) -> str:
        """The oldest value of __cplusplus that torch's headers accept, such as 201703L; empty where
        they do not ask."""
        for name in ("torch/csrc/api/include/torch/all.h", "torch/all.h"):
            header = self.tools.torch_dir / "include" / name
            if header.is_file() and (
                match := re.search(
                    r"__cplusplus < (\d+L)\s*\n#error", header.read_text(errors="replace")
                )
            ):
                return match.group(1)
        return ""

    def _has_cuda_libraries(self) -> bool:
        return bool(self.tools.cuda_home and (self.tools.cuda_home / "include/cusparse.h").exists())

    @cached_property
    def only_torchs(self) -> frozenset[str]:
        """Macros of torch that lite does not have: a source that names one means torch's."""
        ours: set[str] = set()
        for path in self.lite_headers().rglob("*.h"):
            if "headeronly" not in path.parts:
                ours.update(re.findall(r"^#define (\w+)", path.read_text(), re.MULTILINE))
        return self.torch_names.macros - ours

    # -- torch's own header ------------------------------------------------------------------------

    def full_headers(self) -> Path:
        """Torch's own header, reached through a file that may have a precompiled form beside it."""

        def make(staging: Path) -> None:
            (staging / "torch").mkdir(parents=True)
            real = self.tools.torch_dir / "include/torch/csrc/api/include/torch/extension.h"
            if not real.exists():
                real = self.tools.torch_dir / "include/torch/extension.h"
            (staging / "torch/extension.h").write_text(f'#pragma once\n#include "{real}"\n')

        return self._once(self.root / "full", make)

    @property
    def has_precompiled(self) -> bool:
        return self.tools.is_gcc and (self.full_headers() / "torch/extension.h.gch").exists()

    def precompiled(self) -> None:
        """Make the precompiled form of torch's header, once it pays; GCC takes it where a build's
        flags allow, and else reads the header.

        It costs as much as three full builds, so the first of a cache do without.
        """
        if not self.tools.is_gcc:
            return
        header = self.full_headers() / "torch/extension.h"
        made = header.with_name("extension.h.gch")
        if made.exists():
            with suppress(OSError):
                os.utime(made)  # in use: not what `_remove_unused` is after
            return
        asked = self.root / "full-builds"
        asked.mkdir(parents=True, exist_ok=True)
        (asked / uuid.uuid4().hex).touch()
        if len(list(asked.iterdir())) <= FULL_BUILDS_WITHOUT:
            return

        def make(staging: Path) -> None:
            self._compile(
                "torch's header",
                [
                    self.tools.cxx,
                    *COMMON_CXX,
                    "-O2",
                    f"-I{header.parent.parent}",
                    *self.tools.includes,
                    "-x",
                    "c++-header",
                    str(header),
                    "-o",
                    str(staging),
                ],
            )

        headers = self.root.parent
        _remove_unused(headers.glob("*/full/torch/extension.h.gch"), PRECOMPILED_KEPT_S)
        self._once(made, make)


def _remove_unused(files: Iterable[Path], unused_s: float) -> None:
    """Remove files that nobody has written or touched for so long."""
    for path in files:
        with suppress(OSError):
            if time.time() - path.stat().st_mtime > unused_s:
                path.unlink()


FULL_BUILDS_WITHOUT = 3
COMMON_CXX = ("-DTORCH_API_INCLUDE_EXTENSION_H", "-fPIC", "-std=c++20", "-w")
