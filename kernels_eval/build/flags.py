"""Which compiler flags candidates may pass on.

Everything that names a file to load, a file to write or another tool is refused. An allow-list,
since compilers have many spellings of the same thing.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

PLAIN_FLAG = re.compile(
    r"-O\w*|-std=[\w+]+|--std=[\w+]+|-[fm][\w=.+-]+|-W(no-)?[a-z][\w=+-]*|-w|-g\d?|-G|-v|-pthread|-pedantic|-ansi|-D\w+(=\S*)?|-U\w+"
    r"|-[IL][\w./+-]+|-l[\w.+-]+|-Wl,(-rpath,[\w./$+-]+|--no-as-needed|--as-needed|-O\d|--no-undefined|-z,\w+)"
    r"|-?-?(use_fast_math|expt-[\w-]+|lineinfo|generate-line-info|restrict|extra-device-vectorization|verbose|resource-usage|res-usage)"
    r"|-?-?(arch|gpu-architecture|code|gencode|generate-code|maxrregcount|ftz|prec-div|prec-sqrt|fmad|rdc|default-stream|threads|t|O|std"
    r"|relocatable-device-code|diag-suppress|diag_suppress|Werror|disable-warnings)(=?[\w=,.+\[\]-]*)"
    r"|-?-?(Xptxas|ptxas-options|Xcudafe|Xnvlink)(=[\w=,.+-]+)?"
)
DANGEROUS_F = re.compile(
    r"-f(plugin|dump|profile|test-coverage|callgraph|stack-usage|opt-info|save-|auxinfo|lto|wpa|compare-debug|diagnostics|time)"
)
TAKES_VALUE = re.compile(
    r"-?-?(arch|gpu-architecture|code|gencode|generate-code|maxrregcount|Xptxas|ptxas-options|Xcudafe|diag-suppress|I|L|D|std|threads|t)"
)
REACHES_OUT = re.compile(
    r"[\w.]/|/[\w.]|@|plugin|specs|wrapper|dump|save-temps|^-o|^-M|^-W[lpa],|^-B|^-i|odir|output|keep|^-?-?run|-aux"
)
PASSES_ON = re.compile(r"(?:-Xcompiler|--compiler-options)(?:=(.*))?")
VALUE = re.compile(r"[\w=,./+\[\]-]+")


def refused_flag(flags: Sequence[str], *, passed_on: bool = False) -> str | None:
    """The first flag that candidates may not pass to a compiler; None where all are harmless.
    `passed_on`: one compiler passes them on to another, once."""
    left = list(flags)
    while left:
        flag = left.pop(0)
        if not flag.isprintable():
            return flag
        if not passed_on and (match := PASSES_ON.fullmatch(flag)):
            inner = match.group(1) or (left.pop(0) if left else "")
            parts = [part for part in inner.strip("'\"").split(",") if part]
            if (bad := refused_flag(parts, passed_on=True)) is not None:
                return bad
        elif (
            not PLAIN_FLAG.fullmatch(flag) and not TAKES_VALUE.fullmatch(flag)
        ) or DANGEROUS_F.match(flag):
            return flag
        elif (
            TAKES_VALUE.fullmatch(flag)
            and left
            and not left[0].startswith("--")
            and VALUE.fullmatch(left[0])
        ):
            left.pop(0)
    return None
