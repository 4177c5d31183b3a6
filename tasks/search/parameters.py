"""The parameters of a kernel's source: numbers that change its speed and not its result, found by
syntax.

Found in native source (the triple-quoted or plain strings of a candidate's module): sizes of a
block where a kernel is launched (literals, and the constants that are named there), constants and
template arguments with the name of a tuning parameter, `#pragma unroll`, `#pragma GCC unroll`,
`__launch_bounds__`, and `for` loops that have no such pragma.

Guarantees: comments, strings and all other numbers stay as they are; equal numbers that mean the
same are changed together (a block's size, the grid computed from it, the shared array of that
extent, `__launch_bounds__`); the same source gives the same parameters in the same order. Does not
guarantee that a changed kernel is right: a source may rely on a value elsewhere. The verifier says
so.
"""

from __future__ import annotations

import io
import math
import re
import tokenize
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from random import Random

from kernels_eval.checks.syntax import UNPARSABLE
from kernels_eval.records import Language

THREADS = (32, 64, 128, 256, 512, 1024)
UNROLL, LOOP = (1, 2, 4, 8, 16), (0, 2, 4, 8)
"""Of a loop with a pragma, and of one without: 0."""
VECTOR = (1, 2, 4, 8)
MIN_BLOCKS = (1, 2, 3, 4, 6, 8)
UNREADABLE = (*UNPARSABLE, tokenize.TokenError)
MOST_THREADS = 1024
"""Of a block, by CUDA."""
LOOP_NAME = "loop unroll"
MOST_LOOPS = 12
"""Loops without a pragma that are taken of one source, the first ones."""

Span = tuple[int, int, str, int]
"""Beginning, end, what stands there (`{}` is a number), and how much less than the value that
is."""


@dataclass(frozen=True)
class Parameter:
    """A number of a source, and the others that it may be. `name` tells parameters of a source
    apart."""

    name: str
    value: int
    values: tuple[int, ...]
    spans: tuple[Span, ...]


def parameters_of(code: str, language: Language) -> list[Parameter]:
    """The parameters of a candidate's module, in the order of the source; none of one that does not
    parse."""
    try:
        found = [each for at, text in _native(code) for each in _Source(text, at).parameters()]
    except UNREADABLE:
        return []
    kept: dict[tuple[int, int], Parameter] = {}
    for each in sorted(found, key=lambda each: each.spans[0][:2]):
        if set(each.values) - {each.value}:
            kept.setdefault(each.spans[0][:2], each)
    return _named_apart(list(kept.values()))


def with_values(code: str, parameters: Sequence[Parameter], values: Mapping[str, int]) -> str:
    """The module with other values for some of its parameters."""
    edits = {
        (start, end): form.format(values[each.name] - less)
        for each in parameters
        if values.get(each.name, each.value) != each.value
        for start, end, form, less in each.spans
    }
    for (start, end), text in sorted(edits.items(), reverse=True):
        code = code[:start] + text + code[end:]
    return code


def changed(
    code: str, language: Language, draw: Random, *, jointly: bool = False
) -> tuple[str, str] | None:
    """The module with one or two parameters changed, or `jointly` all drawn anew, and what was
    changed in words; None where it has no parameter."""
    found = parameters_of(code, language)
    if not found:
        return None
    count = len(found) if jointly else min(len(found), 1 + (draw.random() < 0.3))
    chosen = draw.sample(found, count)
    values = {
        each.name: draw.choice([v for v in each.values if jointly or v != each.value])
        for each in chosen
    }
    said = ", ".join(
        f"{each.name} {each.value} -> {values[each.name]}"
        for each in chosen
        if values[each.name] != each.value
    )
    return with_values(code, found, values), said


def _named_apart(found: list[Parameter]) -> list[Parameter]:
    seen: Counter[str] = Counter()
    named = []
    for each in found:
        seen[each.name] += 1
        number = seen[each.name]
        named.append(replace(each, name=f"{each.name} #{number}") if number > 1 else each)
    return named


def usage(code: str, language: Language) -> float:
    """What a module takes of the machine, as far as its source says: elements of its arrays in
    shared memory for CUDA, signs of native source for C++. Registers are not known before a kernel
    is profiled."""
    try:
        sources = [_Source(text, at) for at, text in _native(code)]
    except UNREADABLE:
        return 0.0
    if language is Language.CPP:
        return float(sum(len("".join(each.text.split())) for each in sources))
    return float(sum(each.shared_numbers() for each in sources))


# -- native source ---------------------------------------------------------------------------------

NATIVE = re.compile(r"#include|__global__|(?:torch|at)::Tensor")
HIDDEN = re.compile(
    r'//[^\n]*|/\*.*?\*/|"(?:\\.|[^"\\\n])*"|(?<![0-9a-fA-F])\'(?:\\.|[^\'\\\n])+\'', re.DOTALL
)
NUMBER = r"(?<![\w.])(\d+)(?![\w.])"
TUNED = re.compile(
    r"(?!.*(warp_?size|warpsize|blocks$|grid|batch|num_?classes))"
    r"(?:k?(block|tile|thread|chunk|strip|stage|warps_|num_?warps|items_?per|rows_?per|cols_?per"
    r"|elems_?per|per_?thread|tpb|b[mnk]$|t[mnk]$)|unroll|vec|.*_(tile|block|unroll|vec)(_|$))",
    re.IGNORECASE,
)
"""Names that constants have whose value is a choice; sizes of a problem have others."""
VECTORS = re.compile(r"vec|width$", re.IGNORECASE)
UNROLLED = re.compile(r"unroll", re.IGNORECASE)
DECLARED = re.compile(
    r"\b(?:int|unsigned|size_t|auto|long|u?int\d+_t|std::size_t)\s+(?:const\s+)?(\w+)\s*(?:=|\{)\s*"
    rf"{NUMBER}\s*\}}?\s*(?=[;,])"
)
CONSTANT = re.compile(r"\b(?:const|constexpr)\b[^;{}()=]*$")
DEFINED = re.compile(rf"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+\(?{NUMBER}\)?[ \t]*$", re.MULTILINE)
LAUNCH = re.compile(r"(\w+)\s*(?:<([^<>;()]*)>)?\s*<<<(.*?)>>>", re.DOTALL)
DIM3 = r"\bdim3\s+{}\s*(?:=\s*(?:dim3\s*)?)?[({{]([^;]*?)[)}}]\s*;"
PRAGMA = re.compile(r"#[ \t]*pragma[ \t]+(?:GCC[ \t]+)?unroll\b[ \t]*\(?[ \t]*(\d+)?[ \t]*\)?")
BOUNDS = re.compile(rf"__launch_bounds__\s*\(\s*([^,()]+?)\s*(?:,\s*{NUMBER}\s*)?\)")
SHARED = re.compile(rf"__shared__[^;\[\]]*\[\s*{NUMBER}\s*\]\s*;")
SHARED_ARRAY = re.compile(r"__shared__\s+\w+\s+\w+((?:\s*\[[^\]]+\])+)")
TEMPLATE = re.compile(r"template\s*<([^<>]*)>\s*__global__[^;{]*?\b(\w+)\s*\(")
FOR = re.compile(r"(?<=[{};])(\s*)\bfor\s*\(")
NESTING = re.compile(r"[{};]")


def _native(code: str) -> Iterator[tuple[int, str]]:
    """Strings of a module that hold native source, as they are written there, and where; no
    f-strings, which Python 3.12 divides otherwise than 3.11."""
    lines = [0, *accumulate(len(line) + 1 for line in code.split("\n"))]
    for token in tokenize.generate_tokens(io.StringIO(code).readline):
        formatted = token.string.lower().startswith(("f", "rf"))
        if token.type == tokenize.STRING and not formatted and NATIVE.search(token.string):
            (row, column) = token.start
            yield lines[row - 1] + column, token.string


def _powers(least: int, most: int) -> tuple[int, ...]:
    return tuple(2**n for n in range(12) if least <= 2**n <= most)


class _Source:
    """One native source of a module, beginning `at` there. Comments and strings are blanks in
    `text`, so that every place is that of the module."""

    def __init__(self, source: str, at: int) -> None:
        quotes = re.match(r"\w*('''|\"\"\"|'|\")", source)
        opening = quotes.end() if quotes else 0
        body = source[opening : len(source) - len(quotes[1]) if quotes else None]
        self.several_lines = bool(quotes and len(quotes[1]) == 3)
        if not self.several_lines:
            body = body.replace("\\n", " \n")
        hidden = HIDDEN.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), body)
        self.text, self.at = hidden, at + opening

    def parameters(self) -> Iterator[Parameter]:
        yield from self._launches()
        yield from self._constants()
        yield from self._pragmas()
        if self.several_lines:
            yield from self._loops()

    def _span(self, found: re.Match[str], group: int = 1, form: str = "{}") -> Span:
        return self.at + found.start(group), self.at + found.end(group), form, 0

    # -- blocks ------------------------------------------------------------------------------------

    def _launches(self) -> Iterator[Parameter]:
        for launch in LAUNCH.finditer(self.text):
            arguments = list(_arguments(launch[3], launch.start(3)))
            if len(arguments) < 2:
                continue
            (grid, grid_at), (block, block_at) = arguments[:2]
            yield from self._block(launch, block, block_at, (grid, grid_at))
            yield from self._template_arguments(launch)

    def _block(
        self, launch: re.Match[str], block: str, at: int, grid: tuple[str, int]
    ) -> Iterator[Parameter]:
        """The parameters of the extents of a block, which may be a number, a constant, a `dim3` or
        the name of one."""
        if re.fullmatch(r"[A-Za-z_]\w*", block):
            dims = list(re.finditer(DIM3.format(block), self.text[: launch.start()]))
            if dims:
                block, at = dims[-1][1], dims[-1].start(1)
        elif found := re.fullmatch(r"dim3\s*[({](.*)[)}]", block, re.DOTALL):
            block, at = found[1], at + found.start(1)
        extents = [each for each in _arguments(block, at) if each[0] != "1"]
        known = [self._known(text, place, launch.start()) for text, place in extents]
        for each in known:
            if each is None:
                continue
            name, value, span = each
            same = [place for place, other in enumerate(known) if other and other[2] == span]
            others = [other[1] for place, other in enumerate(known) if other and place not in same]
            room = int((MOST_THREADS // max(1, math.prod(others))) ** (1 / len(same)) + 1e-9)
            values = THREADS if len(extents) == 1 else _powers(2, room)
            linked = self._linked(value, span, None if name else grid) if values is THREADS else ()
            yield Parameter(name or "block", value, values, (span, *linked))

    def _known(self, text: str, at: int, before: int) -> tuple[str, int, Span] | None:
        """The name ("" for a literal), the value and the place of an extent's number."""
        if text.isdigit():
            return "", int(text), (self.at + at, self.at + at + len(text), "{}", 0)
        found = [each for each in self._declared() if each[1] == text and each.start() < before]
        return (text, int(found[-1][2]), self._span(found[-1], 2)) if found else None

    def _declared(self) -> Iterator[re.Match[str]]:
        yield from DEFINED.finditer(self.text)
        yield from DECLARED.finditer(self.text)

    def _linked(self, value: int, own: Span, grid: tuple[str, int] | None) -> Iterator[Span]:
        """Where else the size of a block stands as a number: shared arrays of this extent, bounds
        of a launch, and in the grid of a launch whose block is this literal."""
        for found in SHARED.finditer(self.text):
            if int(found[1]) == value:
                yield self._span(found)
        for found in BOUNDS.finditer(self.text):
            if found[1] == str(value):
                yield self._span(found)
        if grid:
            text, at = grid
            if re.fullmatch(r"\w+", text):
                named = rf"\b{text}\s*(?:=|\()([^;]*);"
                if not (defined := list(re.finditer(named, self.text[: own[0] - self.at]))):
                    return
                text, at = defined[-1][1], defined[-1].start(1)
            for found in re.finditer(NUMBER, text):
                if int(found[1]) in (value, value - 1):
                    place = self.at + at + found.start(1)
                    yield place, place + len(found[1]), "{}", value - int(found[1])

    def _template_arguments(self, launch: re.Match[str]) -> Iterator[Parameter]:
        declared = {
            found[2]: [each.split("=")[0].split()[-1:] for each in found[1].split(",")]
            for found in TEMPLATE.finditer(self.text)
        }
        names = declared.get(launch[1], [])
        given = _arguments(launch[2] or "", launch.start(2))
        for name, (text, at) in zip(names, given, strict=False):
            if name and text.isdigit() and TUNED.match(name[0]):
                span = (self.at + at, self.at + at + len(text), "{}", 0)
                yield Parameter(name[0], int(text), _choices(name[0], int(text)), (span,))

    def shared_numbers(self) -> int:
        """Elements of arrays in shared memory whose extents are numbers or constants."""
        known = {found[1]: found[2] for found in self._declared()}
        arrays = (re.findall(r"\[\s*(\w+)", each) for each in SHARED_ARRAY.findall(self.text))
        sizes = ([known.get(word, word) for word in words] for words in arrays)
        return sum(math.prod(map(int, each)) for each in sizes if "".join(each).isdecimal())

    # -- constants and pragmas ---------------------------------------------------------------------

    def _constants(self) -> Iterator[Parameter]:
        for found in self._declared():
            before = self.text[: found.start()].rpartition("\n")[2] + found[0].partition("=")[0]
            is_constant = found.re is DEFINED or CONSTANT.search(before)
            if is_constant and TUNED.match(found[1]) and int(found[2]):
                value = int(found[2])
                linked = self._linked(value, self._span(found, 2), None) if value >= 32 else ()
                spans = (self._span(found, 2), *linked)
                yield Parameter(found[1], value, _choices(found[1], value), spans)

    def _pragmas(self) -> Iterator[Parameter]:
        for found in PRAGMA.finditer(self.text):
            words = found[0].split("unroll")[0]
            span = self._span(found, 0, f"{words}unroll {{}}")
            yield Parameter("unroll", int(found[1] or 0), UNROLL, (span,))
        for found in BOUNDS.finditer(self.text):
            if found[2]:
                value, span = int(found[2]), self._span(found, 2)
                yield Parameter("min blocks", value, MIN_BLOCKS, (span,))

    def _loops(self) -> Iterator[Parameter]:
        """Loops without a pragma: of kernels where there is one, else of every function."""
        kernels, loops = list(_kernels(self.text)), list(FOR.finditer(self.text))
        words = "#pragma unroll {}" if kernels else "#pragma GCC unroll {}"
        if kernels:
            loops = [each for each in loops if any(a <= each.start() < b for a, b in kernels)]
        for loop in loops[:MOST_LOOPS]:
            if "\\" not in self.text[: loop.end()].rpartition("\n")[2] + loop[1]:
                place = self.at + loop.end(1)
                yield Parameter(LOOP_NAME, 0, LOOP, ((place, place, f"\n{words}\n", 0),))


def _kernels(text: str) -> Iterator[tuple[int, int]]:
    """Where the bodies of functions that run on a GPU begin and end."""
    depth = begun = opened = 0
    on_gpu = False
    for found in NESTING.finditer(text):
        place = found.end()
        if found[0] == "{":
            header = text[begun:place]
            if depth or not re.search(r"\b(namespace|extern)\b", header):
                opened, depth = (opened, depth + 1) if depth else (place, 1)
                on_gpu = on_gpu if depth > 1 else bool(re.search(r"__(global|device)__", header))
            else:
                begun = place
        elif found[0] == "}" and depth > 0:
            depth -= 1
            if not depth:
                begun = place
                if on_gpu:
                    yield opened, place
        elif not depth:
            begun = place


def _choices(name: str, value: int) -> tuple[int, ...]:
    """The values that a constant of this name may have."""
    if UNROLLED.search(name):
        return tuple(each for each in UNROLL if each)
    if VECTORS.search(name) and value in VECTOR:
        return VECTOR
    near = {value} | {max(1, value * up // down) for up, down in ((1, 4), (1, 2), (2, 1), (4, 1))}
    return tuple(sorted(each for each in near if each <= 4096))


def _arguments(text: str, at: int) -> Iterator[tuple[str, int]]:
    """Arguments between commas that stand in no brackets, stripped, and where each begins."""
    depth = start = 0
    for place, sign in enumerate(f"{text},"):
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            argument = text[start:place]
            yield argument.strip(), at + start + len(argument) - len(argument.lstrip())
            start = place + 1
