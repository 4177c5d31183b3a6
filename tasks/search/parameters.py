"""Tunable numbers in a kernel's native source (string literals of its module), found by syntax:
block sizes at launches, constants and template arguments with a tuning name, unroll pragmas,
`__launch_bounds__`, and `for` loops without a pragma.

Guarantees: equal numbers of one meaning change together (block size, its grid, a shared array of
that extent).
"""

from __future__ import annotations

import math
import re
import tokenize
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from random import Random

from kernels_eval.records import Language
from kernels_eval.source.lexer import blank
from kernels_eval.source.module_text import UNREADABLE, placed_tokens, with_line_ends
from tasks.search.flags import TABLE

VALUES = {name: tuple(values) for name, values in TABLE["values"].items()}
MOST_THREADS = 1024
"""Of a block, by CUDA."""
MOST_DECLARED = 1000
"""Characters of one declaration that are looked at."""
LEAST_TILE = 16
"""A smaller extent of a shared array may mean anything."""
LOOP_NAME = "loop unroll"
MOST_LOOPS = 12
"""Loops without a pragma that are taken of one source, the first ones."""

Place = tuple[int, int]
"""Beginning and end."""
Span = tuple[int, int, str, int]
"""Beginning, end, what stands there (`{}` is a number), and how much less than the value that
is."""


@dataclass(frozen=True)
class Parameter:
    """A number of a source and its alternatives; `name` is unique in the source."""

    name: str
    value: int
    values: tuple[int, ...]
    spans: tuple[Span, ...]


def parameters_of(code: str, language: Language) -> list[Parameter]:
    try:
        text = _native(code)
    except UNREADABLE:
        return []
    found = [*_launches(text), *_constants(text), *_pragmas(text), *_loops(text)]
    kept: dict[int, Parameter] = {}
    owner: dict[Place, int] = {}
    for index, each in enumerate(found):
        if set(each.values) - {each.value}:
            sharing = sorted({owner[span[:2]] for span in each.spans if span[:2] in owner})
            joined = [*map(kept.pop, sharing), each]
            spans = dict.fromkeys(span for one in joined for span in one.spans)
            first = min((*sharing, index))
            kept[first] = replace(joined[0], spans=tuple(spans))
            owner |= {span[:2]: first for span in spans}
    return _numbered(sorted(kept.values(), key=lambda each: each.spans[0][:2]))


def _numbered(found: Iterable[Parameter]) -> list[Parameter]:
    made = []
    names: Counter[str] = Counter()
    for each in found:
        names[each.name] += 1
        number = f" #{names[each.name]}" if names[each.name] > 1 else ""
        made.append(replace(each, name=each.name + number))
    return made


def with_values(code: str, parameters: Sequence[Parameter], values: Mapping[str, int]) -> str:
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
    """The module with one or two parameters changed, or `jointly` all drawn anew, and the change in
    words; None without parameters."""
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


def usage(code: str, language: Language) -> float:
    """Machine usage as the source shows: shared array elements with known extents for CUDA,
    characters of native source for C++. Registers need profiling."""
    try:
        text = _native(code)
    except UNREADABLE:
        return 0.0
    if not language.needs_gpu:
        return float(len("".join(text.split())))
    known = {found[1]: found[2] for found in _declared(text)}
    declared = (each.split(",") for each in SHARED_ARRAY.findall(text))
    arrays = (re.findall(r"\[\s*(\w+)", each) for each in chain(*declared))
    sizes = ([known.get(word, word) for word in words] for words in arrays)
    return float(sum(math.prod(map(int, each)) for each in sizes if "".join(each).isdecimal()))


# -- native source ---------------------------------------------------------------------------------

STATEMENT_ENDS = (tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT)
"""A string behind one of these is a docstring."""
NATIVE = re.compile(r"#include|__global__|(?:torch|at)::Tensor")
SWITCHED_OFF = re.compile(
    r"^[ \t]*#[ \t]*if[ \t]+0\b.*?^[ \t]*#[ \t]*(?:endif|el\w+)\b", re.DOTALL | re.MULTILINE
)
DIRECTIVE = re.compile(r"^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", re.MULTILINE)
NUMBER = r"(?<![\w.])(\d+)(?=[uUlL]*(?![\w.]))"
TUNED = re.compile(
    r"(?!.*(warp_?size|warpsize|blocks$|grid|batch|num_?classes))"
    r"(?:k?(block|tile|thread|chunk|strip|stage|warps_|num_?warps|items_?per|rows_?per|cols_?per"
    r"|elems_?per|per_?thread|tpb|b[mnk]$|t[mnk]$)|unroll|vec|.*_(tile|block|unroll|vec)(_|$))",
    re.IGNORECASE,
)
"""Names that constants have whose value is a choice; sizes of a problem have others."""
VECTORS = re.compile(r"vec|width$", re.IGNORECASE)
BLOCKS = re.compile(r"block|thread|tpb", re.IGNORECASE)
UNROLLED = re.compile(r"unroll", re.IGNORECASE)
DECLARED = re.compile(
    r"(?:\b(?:int|unsigned|size_t|auto|long|u?int\d+_t|std::size_t)\s+(?:const\s+)?|[,{]\s*)(\w+)"
    rf"\s*(?:=|\{{)\s*{NUMBER}[uUlL]*\s*\}}?\s*(?=[;,}}>])"
)
CONSTANT = re.compile(
    r"\b(?:const(?:expr)?\b[^;{}()]*|template\s*<[^;{}()]*|enum\b[^;{}()]*\{[^;{}()]*)$"
)
DEFINED = re.compile(
    rf"^[ \t]*#[ \t]*define[ \t]+(\w+)[ \t]+\(?{NUMBER}[uUlL]*\)?[ \t]*$", re.MULTILINE
)
LAUNCH = re.compile(r"(\w+)\s*(?:<([^<>;()]*)>)?\s*<<<(.*?)>>>", re.DOTALL)
DIM3 = r"\bdim3\s+{}\s*(?:=\s*(?:dim3\s*)?)?[({{]([^;]*?)[)}}]\s*;"
PRAGMA = re.compile(r"#[ \t]*pragma[ \t]+(?:GCC[ \t]+)?unroll\b[ \t]*\(?[ \t]*(\d+)?[ \t]*\)?")
BOUNDS = re.compile(rf"__launch_bounds__\s*\(\s*([^,()]+?)\s*(?:,\s*{NUMBER}\s*)?\)")
_EXTENTS = r"(?:\s*\[[^\]]+\])+"
SHARED_ARRAY = re.compile(rf"__shared__[^;\[\]]*\w({_EXTENTS}(?:\s*,\s*\w+{_EXTENTS})*)")
TEMPLATE = re.compile(r"template\s*<([^<>]*)>\s*__global__[^;{]*?\b(\w+)\s*\(")
FOR = re.compile(r"(?<=[{};])(\s*)\bfor\s*\(")
ON_GPU = re.compile(r"__(?:global|device)__[^;{}]*\{")


def _native(code: str) -> str:
    """Blank everything except native source, keeping places; also f-strings, and `for` in one-line
    strings."""
    text = _blank(code)
    before = tokenize.NEWLINE
    for token, place, _ in placed_tokens(code):
        quotes = re.match(r"(?!\w*[fF])\w*('''|\"\"\"|'|\")", token.string)
        is_value = token.type == tokenize.STRING and before not in STATEMENT_ENDS
        if token.type not in (tokenize.COMMENT, tokenize.NL):
            before = token.type
        if is_value and quotes and NATIVE.search(token.string):
            body = token.string[quotes.end() : -len(quotes[1])]
            if len(quotes[1]) == 1:
                body = re.sub(r"\bfor\b", "   ", with_line_ends(body))
            body = SWITCHED_OFF.sub(lambda found: _blank(found[0]), blank(body))
            start = place + quotes.end()
            text = text[:start] + body + text[start + len(body) :]
    return text


def _blank(text: str) -> str:
    return re.sub(r"[^\n]", " ", text)


def _span(found: re.Match[str], group: int = 1, form: str = "{}") -> Span:
    return found.start(group), found.end(group), form, 0


# -- blocks ----------------------------------------------------------------------------------------


def _launches(text: str) -> Iterator[Parameter]:
    templates = {
        found[2]: [each.split("=")[0].split()[-1:] for each in found[1].split(",")]
        for found in TEMPLATE.finditer(text)
    }
    for launch in LAUNCH.finditer(text):
        arguments = list(_arguments(text, *launch.span(3)))
        if len(arguments) < 2:
            continue
        yield from _block(text, *arguments[:2])
        given = _arguments(text, *launch.span(2)) if launch[2] else ()
        for name, (start, end) in zip(templates.get(launch[1], ()), given, strict=False):
            if name and (number := text[start:end]).isdigit() and TUNED.match(name[0]):
                yield _tuned(text, name[0], int(number), (start, end, "{}", 0))


def _tuned(text: str, name: str, value: int, span: Span) -> Parameter:
    linked = [*_linked(text, value, span, None)] if value >= 32 else []
    if BLOCKS.search(name):
        linked += _literal_blocks(text, value)
    return Parameter(name, value, _choices(name, value), (span, *linked))


def _literal_blocks(text: str, value: int) -> Iterator[Span]:
    for launch in LAUNCH.finditer(text):
        for place in [*_arguments(text, *launch.span(3))][1:2]:
            yield from _numbers(text, place, value, (value,))


def _block(text: str, grid: Place, block: Place) -> Iterator[Parameter]:
    extents = [*_extents(text, block, grid[0])]
    grids = [*_extents(text, grid, grid[0])]
    known = [text[slice(*x)] != "1" and _known(text, *x, grid[0]) for x in extents]
    sizes = [each[:2] for each in known if each]
    for each, own in zip_longest(known, grids[: len(known)]):
        if not each:
            continue
        name, value, span = each
        others = math.prod(size for other, size in sizes if (other, size) != (name, value))
        room = int((MOST_THREADS // max(1, others)) ** (1 / sizes.count((name, value))) + 1e-9)
        values = tuple(2**n for n in range(1, room.bit_length()))
        linked: Iterable[Span] = ()
        if len(sizes) == 1:
            values = VALUES["threads"]
        if len(sizes) == 1 or not name:
            linked = _linked(text, value, span, None if name else own)
        yield Parameter(name or "block", value, values, (span, *linked))


def _extents(text: str, place: Place, before: int) -> Iterator[Place]:
    name = text[slice(*place)]
    if re.fullmatch(r"[A-Za-z_]\w*", name):
        if dims := list(re.finditer(DIM3.format(name), text[:before])):
            place = dims[-1].span(1)
    elif found := re.fullmatch(r"dim3\s*[({](.*)[)}]", name, re.DOTALL):
        place = place[0] + found.start(1), place[0] + found.end(1)
    return _arguments(text, *place)


def _known(text: str, start: int, end: int, before: int) -> tuple[str, int, Span] | None:
    word = text[start:end]
    if word.isdigit():
        return "", int(word), (start, end, "{}", 0)
    found = [each for each in _declared(text) if each[1] == word and each.start() < before]
    return (word, int(found[-1][2]), _span(found[-1], 2)) if found else None


def _declared(text: str) -> Iterator[re.Match[str]]:
    yield from DEFINED.finditer(text)
    yield from DECLARED.finditer(text)


def _linked(text: str, value: int, own: Span, grid: Place | None) -> Iterator[Span]:
    arrays = SHARED_ARRAY.finditer(text) if value >= LEAST_TILE else ()
    for found in (*arrays, *BOUNDS.finditer(text)):
        padded = (value, value + 1) if "][" in "".join(found[1].split()) else (value,)
        yield from _numbers(text, found.span(1), value, padded)
    if grid and re.fullmatch(r"\w+", name := text[slice(*grid)]):
        named = list(re.finditer(rf"\b{name}\s*(?:=|\()([^;]*);", text[: own[0]]))
        grid = named[-1].span(1) if named else None
    if grid:
        yield from _numbers(text, grid, value, (value, value - 1))


def _numbers(text: str, place: Place, value: int, wanted: Sequence[int]) -> Iterator[Span]:
    for found in re.compile(NUMBER).finditer(text, *place):
        if int(found[1]) in wanted:
            yield *found.span(1), "{}", value - int(found[1])


# -- constants and pragmas -------------------------------------------------------------------------


def _constants(text: str) -> Iterator[Parameter]:
    for found in _declared(text):
        begin = found.start(1)
        before = CONSTANT.search(text, max(0, begin - MOST_DECLARED), begin)
        is_constant = found.re is DEFINED or before
        if is_constant and TUNED.match(found[1]) and (value := int(found[2])):
            yield _tuned(text, found[1], value, _span(found, 2))


def _pragmas(text: str) -> Iterator[Parameter]:
    for found in PRAGMA.finditer(text):
        span = _span(found, 0, f"{found[0].split('unroll')[0]}unroll {{}}")
        yield Parameter("unroll", int(found[1] or 0), VALUES["unroll"], (span,))
    for found in BOUNDS.finditer(text):
        if found[2]:
            yield Parameter("min blocks", int(found[2]), VALUES["min_blocks"], (_span(found, 2),))


def _loops(text: str) -> Iterator[Parameter]:
    """Loops without a pragma: in kernels if any, else in all functions; never in macros."""
    kernels = list(_kernels(text))
    loops = list(FOR.finditer(DIRECTIVE.sub(lambda found: re.sub(r"[^\n]", "#", found[0]), text)))
    words = "#pragma unroll {}" if kernels else "#pragma GCC unroll {}"
    if kernels:
        loops = [each for each in loops if any(a <= each.start() < b for a, b in kernels)]
    for loop in loops[:MOST_LOOPS]:
        place = loop.end(1)
        yield Parameter(LOOP_NAME, 0, VALUES["loop"], ((place, place, f"\n{words}\n", 0),))


def _kernels(text: str) -> Iterator[Place]:
    for found in ON_GPU.finditer(text):
        depth = 0
        for brace in re.compile("[{}]").finditer(text, found.end() - 1):
            depth += 1 if brace[0] == "{" else -1
            if not depth:
                yield found.end(), brace.end()
                break


def _choices(name: str, value: int) -> tuple[int, ...]:
    if UNROLLED.search(name):
        return VALUES["unroll"]
    if VECTORS.search(name) and value in VALUES["vector"]:
        return VALUES["vector"]
    near = {value} | {max(1, value * up // down) for up, down in ((1, 4), (1, 2), (2, 1), (4, 1))}
    return tuple(sorted(each for each in near if each <= 4096))


def _arguments(text: str, start: int, end: int) -> Iterator[Place]:
    depth = 0
    for place in range(start, end + 1):
        sign = text[place] if place < end else ","
        depth += (sign in "([{") - (sign in ")]}")
        if sign == "," and not depth:
            argument = text[start:place]
            begin = place - len(argument.lstrip())
            yield begin, begin + len(argument.strip())
            start = place + 1
