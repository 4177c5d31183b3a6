"""What a candidate asks to build, the compiler flags it may pass (an allow-list), and what came of
it."""

from __future__ import annotations

import re
import shlex
from collections import deque
from collections.abc import Iterable, Sequence
from typing import Literal

from pydantic import field_validator

from kernels_eval.config import LONGEST_NAME, MOST_FLAG_LETTERS
from kernels_eval.records import Reason, Record, stable_hash

FUNCTION = re.compile(r"[\w:<>, ]{1,500}")
SOURCE_FILE = re.compile(r".+\.(c|cc|cpp|cxx|cu|h|hh|hpp|cuh)")
"""Compilers hand files of other names to the linker, which reads them as scripts."""


class ExtensionSpec(Record):
    """One `load_inline` or `load` call as made. For `load`, `files` holds (name, text)."""

    kind: Literal["inline", "files"] = "inline"
    name: str
    cpp_sources: tuple[str, ...] = ()
    cuda_sources: tuple[str, ...] = ()
    functions: tuple[str, ...] | None = None
    extra_cflags: tuple[str, ...] = ()
    extra_cuda_cflags: tuple[str, ...] = ()
    extra_ldflags: tuple[str, ...] = ()
    files: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()
    """(name, text) of those that the candidate wrote to its disk and its sources include"""
    python_module: bool = True

    @field_validator("extra_cflags", "extra_cuda_cflags", "extra_ldflags")
    @classmethod
    def _as_a_shell_splits_them(cls, flags: tuple[str, ...]) -> tuple[str, ...]:
        """Split strings of several flags, as torch's shell line does; drop empty and idle ones."""
        if sum(map(len, flags)) > MOST_FLAG_LETTERS:
            return flags  # `unusable_reason` says so
        try:
            return without_idle(part for flag in flags for part in shlex.split(flag))
        except ValueError:
            return flags  # an unbalanced quote: the compiler will say so

    @property
    def uses_cuda(self) -> bool:
        return bool(self.cuda_sources) or any(
            name.endswith((".cu", ".cuh")) for name, _ in self.files
        )

    @property
    def unusable_reason(self) -> str:
        flags = (*self.extra_cflags, *self.extra_cuda_cflags, *self.extra_ldflags)
        if (letters := sum(len(flag) + 1 for flag in flags)) > MOST_FLAG_LETTERS:
            return f"compiler flags of {letters} characters; the limit is {MOST_FLAG_LETTERS}"
        if not self.name.isidentifier() or len(self.name.encode()) > LONGEST_NAME:
            # it becomes a macro and a file name
            return (
                f"the extension's name {self.name[:80]!r} is not an identifier of at most"
                f" {LONGEST_NAME} bytes"
            )
        for name, _ in self.files:
            if not _names_a_file(name) or not SOURCE_FILE.fullmatch(name):
                return f"{name[:80]!r} is no name of a source file"
        for name, _ in self.headers:
            if not _names_a_file(name):
                return f"{name[:80]!r} is no name of a header"
        for name in self.functions or ():
            if not FUNCTION.fullmatch(name):
                return f"{name[:80]!r} is no name of a function"
        return ""

    @property
    def text(self) -> str:
        written = (text for _, text in (*self.files, *self.headers))
        return "\n".join([*self.cpp_sources, *self.cuda_sources, *written])

    @property
    def key(self) -> str:
        """Identity of the request, without the toolchain: how a child finds its build."""
        return stable_hash(self.model_dump(mode="json"))


def _names_a_file(name: str) -> bool:
    plain = name.isprintable() and "/" not in name and name not in ("", ".", "..")
    return plain and len(name.encode()) <= LONGEST_NAME


class Build(Record):
    """What came of a build. `path`: the library where `ok`; `reason`: else a compile_error, timeout
    or rejected one.

    `seconds` are wall time, `processor_s` the compilers' processor time and sleep. `lasting` is
    False where a retry may differ (a deadline, a killed compiler): not kept.
    """

    ok: bool
    key: str
    path: str = ""
    tier: str = ""
    reason: Reason | Literal[""] = ""
    log: str = ""
    seconds: float = 0.0
    processor_s: float = 0.0
    cached: bool = False
    lasting: bool = True


PLAIN_FLAG = re.compile(
    r"-O\w*|-std=[\w+]+|--std=[\w+]+|-[fm][\w=.+-]+|-W(no-)?[a-z][\w=+-]*|-w|-g\d?|-ggdb\d?|-G|-v|-s|-pipe|-rdynamic|-shared|-static-lib(gcc|stdc\+\+)|--param=[\w-]+=\d+|-pthread|-pedantic|-ansi|-D\w+(=\S*)?|-U\w+"
    r"|-(I|L|isystem)[\w./+-]+|-l[\w.+-]+|-Wl,(-rpath[,=][\w./$+-]+|--gc-sections|-Bsymbolic(-functions)?|--strip-all|-s|--no-as-needed|--as-needed|-O\d|--no-undefined|-z,\w+)"
    r"|-?-?(use_fast_math|expt-[\w-]+|extended-lambda|device-debug|source-in-ptx|src-in-ptx|allow-unsupported-compiler|lineinfo|generate-line-info|restrict|extra-device-vectorization|verbose|resource-usage|res-usage)"
    r"|-?-?(arch|gpu-architecture|code|gencode|generate-code|maxrregcount|ftz|prec-div|prec-sqrt|fmad|rdc|default-stream|threads|t|O|std"
    r"|optimize|dopt|split-compile|cudart"
    r"|relocatable-device-code|diag-suppress|diag_suppress|Werror|disable-warnings)(=?[\w=,.+\[\]-]*)"
    r"|--warn-on-[\w-]+|--allow-expensive-optimizations=\w+|--register-usage-level=\d+|-Xfatbin(=-compress-all)?|-compress-all"
    r"|-?-?(Xptxas|ptxas-options|Xcudafe|Xnvlink)(=[\w=,.+-]+)?"
)
IDLE_FLAG = re.compile(
    r"-f(no-)?lto(=[\w-]+)?|-f(no-)?(fat-lto-objects|use-linker-plugin|whole-program-vtables)"
    r"|-flto-(partition|compression-level)=\w+|-fdiagnostics-(color|show)[\w=-]*"
    r"|-fopt-info(-\w+)*|-ftime-report|-MM?D|-MP|-static-lib(gcc|stdc\+\+)|-lcudart_static|-ldl"
)
"""Flags of honest candidates that only start programs, write files or link what is there: left out,
as no result depends on them (an extension is usually one unit).
"""
DANGEROUS_F = re.compile(
    r"-f(plugin|dump|profile|test-coverage|callgraph|stack-usage|opt-info|save-|auxinfo|lto|wpa|compare-debug|diagnostics|time)"
)
TAKES_VALUE = re.compile(
    r"-?-?(arch|gpu-architecture|code|gencode|generate-code|maxrregcount|Xptxas|ptxas-options|Xcudafe|diag-suppress|I|L|D|std|threads|t|param|optimize|dopt"
    r"|isystem|default-stream|cudart)"
)
REACHES_OUT = re.compile(
    r"[\w.]/|/[\w.]|@|plugin|specs|wrapper|dump|save-temps|^-o|^-M|^-W[lpa],|^-B|^-i|odir|output|keep|^-?-?run|-aux"
)
PASSES_ON = re.compile(r"(?:-Xcompiler|--compiler-options)(?:=(.*))?")
VALUE = re.compile(r"[\w=,./+\[\]][\w=,./+\[\]-]*")
"""A flag's value; one that begins like a flag is checked as one, as the compiler may read it so."""
TAKES_FLAGS = re.compile(r"-?-?(Xptxas|ptxas-options|Xcudafe)(?P<value>-[\w=,.+-]+)")
"""Flags of nvcc alone whose value is a flag."""


ARCHITECTURE = re.compile(
    r"-?-(?:arch|gpu-architecture|code|gencode|generate-code)(?:=(?P<value>.*))?"
)
"""Flags of nvcc that name the GPUs to compile for."""
CAPABILITY = re.compile(r"(?:sm|compute|lto)_(\d+)")


def for_this_gpu(flags: Iterable[str], arch: str) -> list[str]:
    """The flags, compiling for a GPU of this compute capability ("9.0"): those that name others,
    which this nvcc may not know, are left out.
    """
    left, kept, named = deque(flags), list[str](), False
    number = int(arch.replace(".", ""))
    while left:
        flag = left.popleft()
        words = [flag]
        if match := ARCHITECTURE.fullmatch(flag):
            if match["value"] is None and left:
                words.append(left.popleft())
            asked = [int(each) for each in CAPABILITY.findall(words[-1])]
            if not asked or not all(number // 10 * 10 <= each <= number for each in asked):
                continue
            named = True
        kept += words
    return kept if named else [f"-gencode=arch=compute_{number},code=sm_{number}", *kept]


def without_idle(flags: Iterable[str]) -> tuple[str, ...]:
    kept: list[str] = []
    for flag in flags:
        passed_on = kept and kept[-1] in ("-Xcompiler", "--compiler-options")
        if not IDLE_FLAG.fullmatch(flag.removeprefix("-Xcompiler=")):
            kept.append(flag)
        elif passed_on:
            kept.pop()
    return tuple(kept)


def refused_flag(flags: Sequence[str], *, passed_on: bool = False) -> str | None:
    """The first refused compiler flag, or None. `passed_on`: from one compiler to another, once."""
    left = list(flags)
    while left:
        flag = left.pop(0)
        if not flag.isprintable():
            return flag
        if not passed_on and (match := PASSES_ON.fullmatch(flag)):
            inner = match.group(1) or (left.pop(0) if left else "")
            parts = re.split(r"[,\s]+", inner.strip("'\" "))
            if (bad := refused_flag(parts, passed_on=True)) is not None:
                return bad
        elif (
            not PLAIN_FLAG.fullmatch(flag) and not TAKES_VALUE.fullmatch(flag)
        ) or DANGEROUS_F.match(flag):
            return flag
        elif left and (
            (TAKES_VALUE.fullmatch(flag) and VALUE.fullmatch(left[0]))
            or TAKES_FLAGS.fullmatch(flag + left[0])
        ):
            left.pop(0)
    return None
