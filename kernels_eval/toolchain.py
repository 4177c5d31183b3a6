"""The compilers and the torch installation that builds use, and the identity of both."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from kernels_eval.errors import ToolchainError
from kernels_eval.installation import pip_install
from kernels_eval.records import stable_hash
from kernels_eval.source.spec import ExtensionSpec

HEADERS = Path(__file__).parent / "compile" / "headers"
NEW_SUBMODULES = "-DPyImport_AddModule=PyModule_New"
"""pybind11's `def_submodule` makes a module of its own. What it calls without this gives any module
that is loaded, such as `sys`."""
WITHOUT_NVTX = ("-DCCCL_DISABLE_NVTX", "-DNVTX_DISABLE")
"""CUB's algorithms find a profiler by dlopen without these."""


@dataclass(frozen=True)
class Toolchain:
    """The compilers and torch installation that builds use, found once without importing torch."""

    cache: Path
    cuda_arch: str = "9.0"

    @cached_property
    def torch_dir(self) -> Path:
        return torch_directory()

    @cached_property
    def cxx(self) -> str:
        names = (os.environ.get("CXX", ""), "g++", "c++", "clang++")
        found = next(filter(None, map(shutil.which, names)), None)
        if not found:
            raise ToolchainError(
                "no C++ compiler found", "install one (Debian: apt-get install g++) or set CXX"
            )
        return found

    @cached_property
    def cxx_version(self) -> str:
        return _run(self.cxx, "--version").stdout.splitlines()[0]

    @cached_property
    def is_gcc(self) -> bool:
        return "clang" not in self.cxx_version.lower()

    @cached_property
    def cuda_home(self) -> Path | None:
        given = (os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda")
        for folder in map(Path, filter(None, given)):
            if (folder / "bin/nvcc").exists():
                return folder
        nvcc = shutil.which("nvcc")
        if not nvcc:
            return None
        # Distributions put a wrapper on PATH: nvcc itself knows where it lives.
        text = _run(nvcc, "--dryrun", "-E", "-x", "cu", os.devnull).stderr
        match = re.search(r"#\$ TOP=(\S+)", text) or re.search(r"#\$ _HERE_=(\S+)", text)
        return Path(match.group(1)).resolve() if match else Path(nvcc).resolve().parent.parent

    @cached_property
    def nvcc(self) -> str | None:
        own = self.cuda_home / "bin/nvcc" if self.cuda_home else None
        return str(own) if own and own.exists() else shutil.which("nvcc")

    @cached_property
    def nvcc_version(self) -> str:
        return _run(self.nvcc, "--version").stdout.splitlines()[-1] if self.nvcc else "none"

    @cached_property
    def key(self) -> str:
        headers = [
            (str(p.relative_to(HEADERS)), p.read_text())
            for p in sorted(HEADERS.rglob("*"))
            if p.is_file()
        ]
        return stable_hash(
            [
                *(torch_versions()[0], str(self.torch_dir), self.cxx_version, sys.version),
                *(NEW_SUBMODULES, headers),
            ]
        )[:16]

    def key_for(self, spec: ExtensionSpec) -> str:
        cuda = [self.nvcc_version, self.cuda_arch, WITHOUT_NVTX] if spec.uses_cuda else []
        return stable_hash([self.key, spec.key, cuda])

    @property
    def torch_includes(self) -> list[Path]:
        include = self.torch_dir / "include"
        return [include, include / "torch/csrc/api/include"]

    def torch_headers(self, name: str) -> Iterator[Path]:
        """Where torch has a header of this name, that of its C++ interface first."""
        return (path for root in self.torch_includes[::-1] if (path := root / name).is_file())

    @property
    def includes(self) -> list[str]:
        """Options for torch's own headers. Host sources of a CUDA extension include cuda_runtime.h
        too.
        """
        python, *cuda = self.plain_includes
        paths = [*self.torch_includes, python]
        if not (paths[0] / "c10/cuda/impl/cuda_cmake_macros.h").exists():
            paths.append(HEADERS / "cpu_torch")
        return [f"-I{path}" for path in (*paths, *cuda)]

    @cached_property
    def cuda_key(self) -> str:
        return stable_hash([self.nvcc_version, str(self.cuda_home)])[:16]

    @property
    def cuda_libraries(self) -> list[Path]:
        names = ("lib64", "targets/x86_64-linux/lib", "lib")
        folders = (self.cuda_home / name for name in names) if self.cuda_home else ()
        return [folder for folder in folders if folder.is_dir()]

    @property
    def plain_includes(self) -> list[Path]:
        """What sources may include beside torch's headers: Python's, and CUDA's where there is a
        toolkit.
        """
        python = python_include()
        cuda = self.cuda_home / "include" if self.cuda_home else None
        return [python, cuda] if cuda and (cuda / "cuda_runtime.h").exists() else [python]

    @property
    def environment(self) -> dict[str, str]:
        """The compilers' environment: only the user's search path, no real home, messages in
        English.
        """
        return {
            "PATH": os.environ.get("PATH", os.defpath),
            "LC_ALL": "C",
            "HOME": "/nonexistent",
            "TMPDIR": tempfile.gettempdir(),
        }


def python_include() -> Path:
    return Path(sysconfig.get_paths()["include"])


def _run(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def torch_directory() -> Path:
    """Where torch is installed. Raises ToolchainError."""
    spec = importlib.util.find_spec("torch")
    if spec is None or spec.origin is None:
        raise ToolchainError("torch is not installed", pip_install("torch>=2.11,<2.14"))
    return Path(spec.origin).parent


def torch_versions() -> tuple[str, str]:
    """torch's and its CUDA's version (or empty), from files: importing torch takes seconds."""
    text = (torch_directory() / "version.py").read_text()
    version = re.search(r"__version__ = '([^']+)'", text)
    cuda = re.search(r"^cuda\b[^=]*= '([^']+)'", text, re.MULTILINE)
    return version.group(1) if version else "unknown", cuda.group(1) if cuda else ""


def default_cache() -> Path:
    """`$CONCUR_CACHE`, else `concur` in the user's cache directory."""
    if found := os.environ.get("CONCUR_CACHE"):
        return Path(found)
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "concur"


def places_of(cache: Path) -> list[Path]:
    """The real folders of a cache: Landlock's rights do not extend to targets of links."""
    links = (path for path in cache.iterdir() if path.is_symlink()) if cache.is_dir() else ()
    return [cache.resolve(), *(path.resolve() for path in links)]
