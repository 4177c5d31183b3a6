"""Identifiers in torch's headers, read once per torch and compiler: they decide where lite may
speak for full."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from kernels_eval.compile.lite import IDENTIFIER
from kernels_eval.compile.prepared import COMMON_CXX, Prepared

INCLUDED = re.compile(r'^\s*#\s*include\s*[<"]([^>"]+)[>"]', re.MULTILINE)
DEFINED = re.compile(rb"^[ \t]*#[ \t]*define[ \t]+(\w+)", re.MULTILINE)
Names = frozenset[str]


class TorchNames(NamedTuple):
    macros: Names
    words: Names
    file_scope: Names
    """Identifiers outside of namespaces, classes and functions."""
    methods: Names = Names()
    """Identifiers in the headers that declare Tensor."""
    not_brought: Names = Names()
    """CUDA stream names that torch/extension.h never brings."""
    dispatch_takes_types: bool = False
    """Whether AT_DISPATCH_* may be given x.type(), as before torch 2.0."""
    nvcc_words: Names = Names()
    """Identifiers under nvcc, in any branch; empty where they were not read."""
    nvcc_files: Names = Names()


STREAM_NAMES = (
    "getCurrentCUDAStream",
    "getDefaultCUDAStream",
    "getStreamFromPool",
    "current_stream",
    "current_device",
)

_PARAMETERS_OF = re.compile(r"(?<=\w)\s*\((?!\s*[*&])[^():]*[ ,][^():]*\)")
"""Parameters of a function that is declared; not a name in parentheses, such as `(*f)`."""
_OPENS_FILE_SCOPE = re.compile(
    r'\bextern\s+"C(\+\+)?"\s*$|\benum\b(?!\s+(class|struct))[^;()]*$|\bnamespace\s*$'
)


def file_scope(preprocessed: str) -> set[str]:
    """A superset of the identifiers declared at file scope."""
    names: set[str] = set()
    open_braces: list[bool] = []  # does what is inside count as file scope?
    last = ""
    for piece in re.split(
        r"([{}])",
        re.sub(r'^#.*$|"(?:\\.|[^"\\\n])*"(?!\s*\{)', " ", preprocessed, flags=re.MULTILINE),
    ):
        if piece == "}":
            if open_braces:
                open_braces.pop()
        elif piece == "{":
            outer = all(open_braces)
            open_braces.append(outer and bool(_OPENS_FILE_SCOPE.search(last)))
        elif all(open_braces):
            names.update(IDENTIFIER.findall(_PARAMETERS_OF.sub(" ", piece)))
        last = piece if piece not in "{}" else ""
    return names


class HeaderNames:
    """The names of one installation of torch, under its compilers."""

    def __init__(self, made: Prepared) -> None:
        self._made, self._tools = made, made.tools

    @property
    def path(self) -> Path:
        return self._made.root / "names_of_torch.json"

    @cached_property
    def of_torch(self) -> TorchNames:
        """Names that torch's headers bring: they decide where lite may speak for full."""

        def make(staging: Path) -> None:
            heads = ["torch/extension.h"]
            if self._tools.nvcc:
                heads += ["cuda_runtime.h", "c10/cuda/CUDAGuard.h"]
            if self._tools.cuda_home and (self._tools.cuda_home / "include/cusparse.h").exists():
                heads.append("ATen/cuda/CUDAContext.h")
            text = self._made.preprocessed(heads, ".cpp", [self._tools.cxx, *COMMON_CXX, "-dD"])
            macros: set[str] = set()
            files: set[str] = set()
            torch, inside = str(self._tools.torch_dir), False
            for line in text.splitlines():
                if line.startswith("# "):
                    inside = torch in line
                    files.add(line.split('"')[1] if '"' in line else "")
                elif inside and line.startswith("#define "):
                    macros.update(IDENTIFIER.findall(line, 8)[:1])
            # With what stands in a branch that only nvcc takes.
            words = set(IDENTIFIER.findall(text)) | _words(file for file in files if torch in file)
            scope = macros | file_scope(text)
            staging.write_text(json.dumps([*map(sorted, (macros, words, scope)), self._absent()]))

        path = self._made.once(self.path, make)
        macros, words, scope, not_brought = map(frozenset, json.loads(path.read_text()))
        include = self._tools.torch_dir / "include"
        dispatch = (include / "ATen/Dispatch.h").read_text()
        tensor = (f"{include}/ATen/core/Tensor{part}.h" for part in ("Body", "Base"))
        return TorchNames(
            macros=macros,
            words=words,
            file_scope=scope,
            methods=frozenset(_words(tensor)),
            not_brought=not_brought,
            dispatch_takes_types="const at::DeprecatedTypeProperties&" in dispatch,
        )

    @cached_property
    def of_nvcc(self) -> TorchNames:
        def make(staging: Path) -> None:
            heads = ("torch/extension.h", "torch/types.h", "cuda.h", "cuda_runtime.h")
            nvcc = [str(self._tools.nvcc), "-std=c++20", "-w", "-ccbin", self._tools.cxx]
            nvcc += ["-DTORCH_API_INCLUDE_EXTENSION_H", "--expt-relaxed-constexpr"]
            words: set[str] = set()
            files: set[str] = set()
            for target in ([], ["-D__CUDA_ARCH__=900"]):  # for the host, and for the device
                text = self._made.preprocessed(heads, ".cu", [*nvcc, *target])
                words.update(IDENTIFIER.findall(text))
                files.update(re.findall(r'^# \d+ "([^"<>]+)"', text, re.MULTILINE))
            # With what stands in branches that were not taken, and what macros make.
            staging.write_text(json.dumps([sorted(words | _words(files)), sorted(files)]))

        path = self._made.once(self._made.root / f"names_of_nvcc-{self._tools.cuda_key}.json", make)
        words, files = map(frozenset, json.loads(path.read_text()))
        names = self.of_torch
        return names._replace(nvcc_words=words | names.words, nvcc_files=files)

    def _absent(self) -> list[str]:
        roots = self._tools.torch_includes
        left = list(self._tools.torch_headers("torch/extension.h"))
        seen, absent = set(left), set(STREAM_NAMES)
        while left:
            header = left.pop()
            text = header.read_text(errors="replace")
            absent = {name for name in absent if name not in text}
            for name in INCLUDED.findall(text):
                for found in (folder / name for folder in (header.parent, *roots)):
                    if found not in seen and found.is_file():
                        seen.add(found)
                        left.append(found)
        return sorted(absent)

    @property
    def defined_path(self) -> Path:
        return self._made.root / "defined_in_torch.json"

    @cached_property
    def defined(self) -> Names:
        """Every name that some file of torch's headers defines as a macro, in whatever branch."""

        def make(staging: Path) -> None:
            found: set[str] = set()
            for path in (self._tools.torch_dir / "include").rglob("*"):
                if path.is_file() and b"define" in (text := path.read_bytes()):
                    found.update(map(bytes.decode, DEFINED.findall(text)))
            staging.write_text(json.dumps(sorted(found)))

        return frozenset(json.loads(self._made.once(self.defined_path, make).read_text()))

    @cached_property
    def _ours(self) -> Names:
        """Macros of lite's own headers."""
        ours: set[str] = set()
        for path in self._made.lite_headers().rglob("*.h"):
            if "headeronly" not in path.parts:
                ours.update(re.findall(r"^#define (\w+)", path.read_text(), re.MULTILINE))
        return frozenset(ours)

    def means_torchs(self, identifiers: Iterable[str]) -> bool:
        """Whether one of these is a macro of torch that lite lacks: a source that names one means
        torch's. Torch's header is preprocessed only for a name that may be one.
        """
        possible = (self.defined & set(identifiers)) - self._ours
        return bool(possible and possible & self.of_torch.macros)


def _words(files: Iterable[str]) -> set[str]:
    found: set[str] = set()
    for path in map(Path, files):
        if path.is_file():
            found.update(IDENTIFIER.findall(path.read_text(errors="replace")))
    return found
